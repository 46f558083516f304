"""The numbers that the search for deployments is tuned by, all in one place, each with how its value was chosen.

Temperature and lengths of the annealing come from runs on the cases of ``benchmarks.bench_deploy``, as does that the
worse half of the annealings is dropped. Most others are guesses that were kept because searches with them did well
there: what was not tried with other values is called a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes of the parts of the search."""

    # What is decided.
    max_groups: int = 60
    """Operator groups; a guess: simulations get slower with each. The network was trained with up to so many."""
    overweight: float = 1.0
    """What a group with twice the work that it should have costs, as a part of all bytes; a guess."""
    max_subsets: int = 31
    """So many sets of device groups are considered: all of them where there are up to five groups. A guess."""
    max_single: int = 16
    """Up to so many devices each has an action of its own; a guess."""
    max_microbatches: int = 16
    """A guess."""
    full_bucket: int = 10
    """A bucket of gradients is full when its bytes take so many times its latency; a guess."""

    # Seeds.
    first_steps: int = 40
    """Simulations of the tree search before anything else; a guess. They are enough where the network knows the model's
    like."""
    slack: float = 1.3
    """Seeds that are slower than the best by more than such a factor are of no use; a guess."""
    num_parts: int = 10
    """So many of the best actions make deployments in two parts; a guess."""
    num_places: int = 12
    """At so many places, about, one of two parts ends and the other begins; a guess."""
    max_states: int = 2000
    """With more parts of the cluster, pipelines of stages take device groups as a whole: that bounds the time of the
    dynamic program. A guess."""
    limits: tuple[float, ...] = (1.0, 1.1, 1.25, 1.5, 2.0)
    """Times the least slowest stage that a pipeline can have; a guess."""
    num_pipelines: int = 8
    """So many pipelines of stages are tried for each number of micro-batches; a guess."""
    much: float = 4.0
    """A group does not part from the next one if so many times more crosses after it than before it; a guess."""
    flat: float = 0.3
    """Part of the moves whose action may be any, of those that follow the actions' worth; a guess."""

    # Tree search.
    explore: float = 1.2
    """Weight of the prior in PUCT; a guess near to AlphaZero's 1.25."""
    best_part: float = 0.5
    """Part of the best value below, beside the mean, in what an action is worth; a guess."""
    tree_steps: int = 40
    """Steps in a round, fewer while they find nothing better; a guess."""
    tree_patience: int = 900
    """Steps of the tree search alone, where no limit is given; a guess."""

    # Annealing.
    hot: float = 0.02
    """The temperature, as a part of the step time, that annealings in ``auto`` begin with: by runs on the cases of
    ``benchmarks.bench_deploy``. Seeds are good, so it is lower than in annealing alone."""
    hot_alone: float = 0.05
    """The same in annealing alone; a guess."""
    cold: float = 0.001
    """The temperature that annealings end with; a guess."""
    max_chains: int = 8
    """Annealings at the beginning, from different seeds; a guess."""
    far_off: float = 2.0
    """A seed that is slower than the best by such a factor is not annealed; a guess."""
    heat_steps: int = 800
    """Steps of all annealings together, in a round that leaves the better half of them: by runs on those cases."""
    num_left: int = 3
    """Once so few are left, one goes on in each round; a guess."""
    anneal_steps: int = 400
    """Steps of the one that goes on: by runs on those cases."""
    same: float = 0.2
    """Part of the moves that take an action which some group has already; this and the next parts are guesses."""
    near: float = 0.3
    """Part of the moves that take an action which is like the one before."""
    peers: float = 0.3
    """Part of the changes of a stretch that take it from another good deployment."""
    swap: float = 0.05
    """Part of the other changes of a stretch in whose place two actions change places everywhere."""
    far: float = 0.3
    """Part of the moves of a border that may go far: up to a quarter of the groups."""
    spell: float = 0.5
    """Part of the runs that begin with pipelines spelled out."""
    late_steps: int = 16
    """The clock is read after so many steps, as that is not free; a guess."""

    # The end.
    patience: int = 6
    """Rounds without a better deployment that end the search, where no limit is given; a guess."""
    num_finalists: int = 5
    """So many deployments become plans at the end: the simulation here and that of plans may differ a little."""
    num_polished: int = 2
    """Finalists whose shares are improved; a guess."""
    num_ends: int = 3
    """So many of the busiest and of the idlest devices are tried; a guess."""
    max_tries: int = 300
    """Shares that are tried for one finalist; a guess."""


TUNING: Final = Tuning()
