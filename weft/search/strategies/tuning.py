"""The numbers that the search for strategies is tuned by, all in one place, each with how its value was chosen.

What was not tried with other values, or without a record of it, is called a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes of the parts of the search."""

    # Reductions.
    max_table: int = 4_000_000
    """Entries to look at when a unit is eliminated; above, it stays. A guess."""
    max_compared: int = 40_000_000
    """Entries to compare when looking for dominated strategies of a unit; above, it is left as it is. A guess."""
    max_relaxed: int = 1_000
    """Units of a problem that is also reduced without its limit; a guess."""
    worth_fixing: float = 0.1
    """Share of strategies that are ruled out before a core is reduced again while the bound still rises; a guess."""
    reductions_part: float = 0.4
    """Part of a time limit after which a problem is searched as far as it is reduced by then; a guess."""

    # The bound.
    swept_per_round: int = 80_000_000
    """Costs that a round's sweeps look at: about a tenth of a second on large problems."""
    least_rise: float = 0.01
    """The bound has stalled when it has closed no more than this share of the gap in the last ``sweeps``, ..."""
    least_hope: float = 0.02
    """... and steps of prices are too short to close more than this; guesses, as are the numbers below."""
    sweeps: int = 100
    patience: int = 20
    """After so many steps without a much better bound, the search for prices goes back to the best, with less hope."""
    most_sweeps: int = 10
    """There and back at the same prices."""
    too_far: float = 5.0
    """It also does where the bound falls so many times the rise hoped for below the best."""
    memory: float = 0.9
    """Weight of the last directions in the next one."""
    softness: float = 10.0
    """A strategy counts for the usage if it costs no more beyond the best than a few times this share of the rise hoped
    for per unit."""

    # Walks.
    rounds_per_walk: int = 15
    """A walk cools down over so many rounds; then another begins at the best choice. A guess."""
    worth_walking: float = 2.0
    """Suggestions that cost more than this times the best are not improved; a guess."""
    steps: int = 100_000
    """Small steps in a round; a guess."""
    looked_at: int = 4_000_000
    """Numbers that the large steps of a round look at, about; it limits how many there are. A guess."""
    max_repairs: int = 5
    """Strategies that are changed after a large step, to make it fit; a guess."""

    # The integer program.
    max_integer: int = 60_000
    """Costs of pairs in a core that goes to the integer program; a guess."""
    max_integer_uses: int = 2_000_000
    """Entries of its usage rows; a guess."""
    integer_s: float = 60.0
    """Seconds for it, if there is no time limit; half of what is left if there is. A guess."""

    # Time.
    reserve_s: float = 1.0
    """Of the time limit, for judging and writing the answer; a guess."""
    grace_s: float = 1.0
    """After the time limit, where there is no choice at all yet; a guess."""
    checked: int = 256
    """Nodes of the first choice between two looks at the clock; a guess."""
    seconds_between_reports: float = 2.0
    """For people who watch; a guess."""


TUNING: Final = Tuning()
