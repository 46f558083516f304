"""Local search on compiled timetables: annealing over devices and the order of operators.

A state is the device of every unit and an order of all operators; its value is the end of the timetable that they mean
(``timetable.make_timetable``). A move sends one unit, or a few connected ones, to another device, or puts an operator
elsewhere in the order. A move is accepted if the value rises by less than ``-T * log(uniform)``; the temperature ``T``
falls from ``hot`` to ``cold`` of the start's value. Three things make it fast:

- what comes before the first changed position stays as it is: evaluation starts at the last checkpoint before it;
- it ends as soon as an operator ends so late that, with the shortest way to the end, the move cannot be accepted;
- memory is kept as counts of each weight on each device, so a move that does not fit is never evaluated.

With a price on memory (``price``), what does not fit may be held for a while: a byte over a device's memory costs so
many seconds, few at first and ever more, until it no longer pays. So placements that differ in much of what each device
holds, and have only placements between them that do not fit, are within reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.anneal_kernel import Neighbours, anneal
from weft.search.place.kernel import Arrays
from weft.search.place.problem import PlaceProblem

PIECE = 10_000_000
"""Steps between two looks at whether to go on: about half a second."""
DEARER = 300.0
"""Memory that is over costs so many times more at the end of a run than at its begin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Annealed:
    """The best state that was met and fits."""

    device: I64
    order: I64
    value: float
    """Infinite if none fits; then device and order are those of the start."""
    num_steps: int
    """Operators that were timed, and moves: what the run cost."""


class Annealer:
    """Anneals one problem again and again, from different states."""

    def __init__(self, problem: PlaceProblem) -> None:
        self.problem = problem
        self.arrays = Arrays.of(problem)
        self.neighbours = _neighbours(problem)

    def run(self, device: I64, order: I64, *, steps: int, seed: int, hot: float, cold: float,
            price: float = 0.0, is_spent: Callable[[], bool] = lambda: False) -> Annealed:
        """Return the best state found from this one in about so many steps.

        ``price`` is what a byte over a device's memory costs at first, in seconds; zero: no state may hold more than
        fits. It is done in pieces, between which ``is_spent`` is asked whether to end.

        A step is one operator timed; a move that times few still counts as ``anneal_kernel.MOVE_STEPS``. The
        temperature falls with the steps from ``hot`` to ``cold``, which are parts of the value.
        """
        device, order, best = device.copy(), order.copy(), None
        pieces = max(1, round(steps / PIECE))
        spent = 0
        for piece in range(pieces):
            if piece and is_spent():
                break
            warmer, colder = (hot * (cold / hot) ** (part / pieces) for part in (piece, piece + 1))
            found = anneal(self.arrays, self.neighbours, device, order, max(1, steps // pieces), warmer, colder,
                           price * DEARER ** (piece / pieces), DEARER ** (1 / pieces),
                           (seed * 1000003 + piece) % 2**31)
            spent += found[3]
            if best is None or found[2] < best.value:
                best = Annealed(device=found[0], order=found[1], value=float(found[2]), num_steps=0)
        assert best is not None, "there is at least one piece"
        return replace(best, num_steps=spent)


def _neighbours(problem: PlaceProblem) -> Neighbours:
    units = np.argsort(problem.unit_of_op, kind="stable").astype(np.int64)
    unit_start = np.concatenate(([0], np.cumsum(np.bincount(problem.unit_of_op, minlength=problem.num_units))))
    rows, choices = np.nonzero(problem.is_allowed)
    choice_start = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=problem.num_units))))
    pairs = np.unique(np.concatenate([problem.edges[:, [0, 1]], problem.edges[:, [1, 0]]]), axis=0)
    next_start = np.concatenate(([0], np.cumsum(np.bincount(pairs[:, 0], minlength=problem.num_ops))))
    reader_start, readers = problem.readers
    return Neighbours(
        problem.unit_of_op, unit_start.astype(np.int64), units, choice_start.astype(np.int64),
        choices.astype(np.int64), next_start.astype(np.int64), pairs[:, 1].astype(np.int64), reader_start, readers,
        problem.weight_start, problem.weights, problem.weight_bytes, problem.capacity, least_tails(problem),
        np.concatenate(([0], np.cumsum(np.bincount(problem.producer, minlength=problem.num_ops)))).astype(np.int64),
        np.argsort(problem.producer, kind="stable").astype(np.int64),
        problem.has_lifetimes and bool(np.isfinite(problem.capacity).any()))


def least_tails(problem: PlaceProblem) -> F64:
    """Return [n] the least time from an operator's end to the end of all: its readers on their fastest devices."""
    fastest = problem.time_s.min(axis=1, initial=np.inf)
    tail = np.zeros(problem.num_ops)
    edges = problem.edges
    for source, reader, _tensor in edges[np.argsort(-edges[:, 0], kind="stable")].tolist():
        tail[source] = max(tail[source], fastest[reader] + tail[reader])
    return tail
