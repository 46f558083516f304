"""The numbers that the joint search is tuned by, all in one place, each with how its value was chosen.

What was not tried with other values is called a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes of the parts of the search, and what estimates assume."""

    # Which settings there are (``search``, ``layouts``).
    max_stages: int = 64
    """Meshes in a pipeline; a guess, as many as the longest published pipelines have."""
    chunks: tuple[int, ...] = (1, 2, 4)
    """Stages on each mesh. Measured on 13 problems (five models of the zoo, equal and mixed clusters, memory cut at
    random): with 1 alone steps are 0.2 % longer on average, 2.7 % at most, in 0.55 of the time."""
    max_microbatches_per_stage: int = 16
    """More than so many micro-batches for each mesh of a pipeline hide little more of its filling: 1/16 at most."""
    max_groups: int = 6
    """With more device groups than this, only some runs of groups are looked at: of n groups there are 2^(n-1). A
    guess."""
    max_stages_in_group: int = 8
    """Stages that one device group is divided into; a guess."""
    max_fewer: int = 64
    """With more tp groups than this, all of them are used; a guess."""

    # Where they are cut (``chain``, ``cut``, ``estimate``).
    max_places: int = 256
    """So many places to cut at are considered in a long model: tables of their pairs take 0.5 MB each."""
    precision: float = 1e-3
    """Relative: the longest stage and the fullest device are no more than this from the best of a bisection. Estimates
    are about ten per cent from simulations (``tests/search/joint/test_estimate.py``)."""
    period_precision: float = 1e-6
    """The same for periods, whose pass is exact."""
    about_least: float = 1.1
    """So many times the least that may be sent over a place is about the least; a guess."""
    slacks: tuple[float, ...] = (0.0, 0.2)
    """By how much of its time a stage may be shorter in order to send less; the best of the cuts is taken. A guess."""
    room: float = 0.9
    """So much of a device's memory segments may fill without being made smaller: what the account may differ (4 % at
    most where it was measured), and more."""
    segment_counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Segments that a stage which recomputes may have; a guess."""

    # How long they take.
    hidden: float = 0.8
    """The part of an exchange that may run beside the last backward; a guess."""
    worse: float = 1.15
    """Settings whose bound is this much above the best estimate are not looked at: estimates are about ten per cent
    from simulations."""
    uneven: float = 1.05
    """A pipeline that is said to take so many times what an even one would is also tried over its meshes and back."""

    # Finalists.
    finalists: int = 6
    """So many plans are simulated. On the same 13 problems 3 give the same steps in 0.73 of the time, 12 give 0.2 %
    less on average, 2.5 % at most, in 1.17 of it."""
    attempts: int = 14
    """So many plans are made at most, where some do not pass the check; a guess."""
    max_actions: int = 60_000
    """After so many forwards in all, ``few_finalists`` are enough; a guess."""
    few_finalists: int = 3
    large: int = 128
    """On more devices than this not all of them are simulated, where a stage's replicas are alike; a guess."""
    turned: int = 2
    """So many of those over the meshes and back are made: an order has to be searched for each; a guess."""
    rescheduled: int = 2
    """The order of so many finalists is searched at most; a guess."""
    max_attempts: int = 4
    """So many searches of an order with less and less memory, before as much is kept free as could ever be needed; a
    guess."""
    max_blocks: int = 4096
    """Stages times micro-batches up to which the order of a plan is searched again; a guess."""
    reschedule_effort: float = 1.0
    """About so many CPU seconds for that; a guess."""


TUNING: Final = Tuning()
