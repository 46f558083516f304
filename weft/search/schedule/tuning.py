"""Constants of the schedule search, in one place: sizes up to which a method is tried, and shares of the effort.

Effort is counted as in ``weft.search.common.cpsat``: about CPU seconds, the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of the effort for one constraint problem, and how it is spent."""

    part: float
    linearization: int = 0
    """How much of the model goes into the linear relaxation: without one better schedules are found sooner, with one
    they are proven to be the best sooner."""
    lns: bool = False
    """Improve the hint by large neighbourhood search."""
    ordered: bool = True
    """For a trial period: with a literal for the order of every two tasks (see ``weft.search.schedule.steady``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The search's constants. None of the values comes from a paper; those without a reason are guesses."""

    # ---- the whole search (weft.search.schedule.search)
    default_seconds: float = 10.0
    """CPU seconds, about, for a small problem where no limit is given: what a user may want to wait. A guess."""
    rules_effort: float = 0.01
    """With so little effort only rules are tried: for many problems of which some are searched later."""
    max_instances: int = 1_000_000
    """More tasks times micro-batches are refused: even to play one order would take many seconds."""
    max_played: int = 20_000
    """Of more tasks in all, micro-batches one after the other are one of them, moved: playing them takes seconds."""
    max_tiny: int = 60
    """Up to so many tasks of all micro-batches a finer grid of time costs little. A guess."""
    tiny_exact: int = 10**9
    """Exact scaling is used up to so many ticks for those. A guess."""
    tiny_resolution: int = 10**6
    """Ticks per busiest device and micro-batch for those, where scaling is not exact. A guess."""
    max_free: int = 800
    """Up to so many tasks of all micro-batches are solved all at once. A guess."""
    max_unrolled: int = 2_500
    """Up to so many tasks in warm-up, middle and cool-down are solved together. A guess."""
    max_greedy: int = 20_000
    """Greedy rules are tried up to so many tasks of all micro-batches: they are plain Python. A guess."""
    max_window: int = 200
    """Bounds by windows are computed up to so many tasks of one micro-batch. A guess."""
    steady_share: float = 0.4
    """Of the effort, for the steady state. This and the shares below are guesses; what is not spent comes back."""
    variants_share: float = 0.05
    """For other steady states of the same period."""
    loose_factors: tuple[float | None, ...] = (None, 4.0, 3.0, 2.0, 1.5, 1.25)
    """Times the memory with which is searched where memory can leave; None for no limit. A guess."""
    loose_share: float = 0.1
    """For one of these searches."""
    simple_share: float = 0.25
    """Without pairs and copies there is a search first; it has all the effort, and what follows all but this again."""
    instants_share: float = 0.25
    """With copies that take a little where they take no time. A guess."""
    completion_share: float = 0.06
    """For one size of warm-up and cool-down."""
    window_share: float = 0.1
    """For bounds by windows."""
    whole_share: float = 0.7
    """Of what is left, for all micro-batches at once before long warm-ups and cool-downs are tried."""
    rounded_share: float = 0.6
    """Of that, where times were rounded: what is left goes into a bound with times rounded down."""
    first_sizes: tuple[int, ...] = (1, 2, 3)
    """Micro-batches of warm-up and cool-down that are tried before anything else; 3 only where all at once is not."""
    later_sizes: tuple[int, ...] = (3, 5, 7, 10, 14, 20, 28)
    """Those that are tried after it: about half as many again each time."""
    in_flight: tuple[int, ...] = (2, 3, 4, 6, 8, 12)
    """Limits for greedy rules on the micro-batches in flight, besides none; for large problems that of devices."""
    # ---- first schedules (weft.search.schedule.first)
    max_joint_tasks: int = 600
    """More tasks are not searched together for the least memory, but in equal groups of micro-batches, one group after
    the other. A guess."""
    # ---- cyclic orders by annealing (weft.search.schedule.anneal)
    seconds_per_place: float = 6e-8
    """CPU seconds of one step, about, for every resource of every task of a period; measured."""
    max_annealed: int = 1_000
    """Up to so many tasks of a period are annealed: of more, a search sees too few orders. A guess."""
    anneal_part_s: float = 0.2
    """Compiled code runs so long at a time: it looks neither at the clock nor for Ctrl-C."""
    anneal_hot: float = 0.3
    """Temperature at the beginning, in mean times of a task. This and the next were the best of five tried."""
    anneal_cold: float = 0.03
    anneal_penalty: float = 1.0
    """For one task's memory too much, at the beginning."""
    anneal_haste: float = 0.015
    """For the time from the first start of a micro-batch to its last."""
    # ---- the steady state (weft.search.schedule.steady)
    max_microbatches: int = 8
    """Micro-batches per period that are tried. A guess."""
    max_exact_microbatches: int = 4
    """Those for which the solver looks for proofs, and for what annealing has missed. A guess."""
    anneal_share: float = 0.3
    """Of the effort for one trial period, for annealing each number of micro-batches in the same round."""
    max_variants: int = 30
    """Other steady states of the same period that are looked at. A guess."""
    trial_slices: tuple[Slice, ...] = (
        Slice(0.35, ordered=False), Slice(0.25, linearization=1, ordered=False), Slice(0.4))
    """How a trial period is solved. On random problems of 12 to 40 blocks with tight memory the plain model found what
    exists up to 20 times sooner, and the one with orders excluded what does not exist up to 5 times sooner."""
    trial_efforts: tuple[float, ...] = (0.25, 1.0, 4.0, 16.0, 64.0)
    """Effort for one trial period, round after round. Most trials are decided in the first."""
    example_length: int = 40
    """Micro-batches, at least, of the named schedules in whose middle a pattern is looked for."""
    example_per_device: int = 6
    """And so many for each device: the first third is there to fill ZBV's pipeline, which takes two for each. Up to
    twice as many where that is no more than ``max_greedy``: with 14 devices and links, V-Half settles only then."""
    max_laps: int = 500
    """So many periods of a steady state are checked at most; a GPipe of 128 micro-batches holds 40 to 130."""
    windows: int = 24
    """Windows of one micro-batch in the middle of a schedule that repeats itself only about; of more, fewer by so much.
    A guess."""
    max_pairs: int = 20_000
    """Models with more pairs of tasks that share a resource are not built; one micro-batch after the other has to do. A
    guess: pairs are a Python loop and two constraints each."""
    tick_slack: float = 1e-6
    """Times are on the grid if they are so near, in ticks."""
    quick_effort: float = 1.0
    """Effort for one trial period. A guess."""
    variant_effort: float = 0.15
    """Effort for one random steady state. A guess."""
    # ---- all micro-batches, or a steady middle with its ends (weft.search.schedule.unrolled)
    to_improve: tuple[Slice, ...] = (Slice(0.7), Slice(0.3, lns=True))
    """For schedules with a steady middle, where only better ones count. A guess."""
    to_prove: tuple[Slice, ...] = (Slice(0.5), Slice(0.3, lns=True), Slice(0.2, linearization=1))
    """For all micro-batches at once, where a proof ends the search. A guess."""
    max_paired: int = 20_000
    """Of more pairs of blocks that could run at once, only those of near micro-batches are in the model. A guess."""
    # ---- whole numbers (weft.search.schedule.whole)
    resolution: int = 240
    """Ticks per busiest device and micro-batch where times have no small common denominator; it has many divisors."""
    max_exact: int = 2_000
    """Exact scaling is used up to so many ticks: finer grids make the solver many times slower."""
    max_delay: int = 1_000_000
    """No delay takes more ticks; beside a longer one, blocks are short, and so are their ticks."""
    max_memory: int = 1 << 30
    """Amounts and limits of memory are scaled to at most this, so that sums stay far below the solver's 2^63."""
    max_held: int = 1_000_000
    """A limit that is more than so many times the largest amount is none: no more micro-batches are accepted."""
    # ---- bounds without a solver (weft.search.schedule.bounds)
    path_chunk: int = 256
    """Longest paths are followed from so many tasks at once: a bound on memory. A guess."""
    max_filling_steps: int = 200_000
    """Steps along edges, about, in all searches for idle time while filling: a part of a second in plain Python."""
    # ---- split backward (weft.search.schedule.named)
    overhangs: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Tried: which part of a weight gradient may delay the next fixed block; the best is taken. A guess."""


TUNING: Final = Tuning()
