"""Placement for a stream of requests: the least largest load, by ``throughput``'s search or by a named method."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget, OutOfTime, cut_short
from weft.search.place.assignment import Assignment
from weft.search.place.fit import fitting_devices
from weft.search.place.methods import METHODS
from weft.search.place.problem import PlaceProblem
from weft.search.place.result import PlaceResult
from weft.search.place.throughput import Loaded, first_ops, load_problem, loads, solve_throughput
from weft.search.place.throughput_bounds import average_bound
from weft.search.place.throughput_search import PROVEN
from weft.search.place.timetable import TOLERANCE, Timetable, make_timetable

STARTS_PART: Final = 0.3
"""Part of a time limit in which the named methods are tried as starts."""
_MAX_ROUNDS: Final = 6
"""Searches at most, each with less room for weights, until tensors fit beside them."""

Search = Callable[[F64, float, Sequence[I64]], Loaded]
"""From the memory that weights may use, the part of the effort that may go into it, and devices to start from."""


def place_stream(problem: PlaceProblem, *, method: str, contiguous: bool, budget: Budget, seed: int,
                 begin: float) -> PlaceResult:
    """Return the placement with the least largest load; ``begin`` is when CPU seconds are counted from."""
    starts = _starts(problem, METHODS if method == "auto" else (method,), budget.part(STARTS_PART).deadline)

    def search(capacity: F64, share: float, more: Sequence[I64]) -> Loaded:
        kept = (1 - share) * budget.effort
        budget.effort -= kept  # of one budget, so that Ctrl-C reaches the search
        try:
            return solve_throughput(replace(problem, capacity=capacity), contiguous=contiguous, budget=budget,
                                    seed=seed, starts=[*(start.device for start in starts), *more])
        finally:
            budget.effort += kept

    if method == "auto":
        found, table = _search_in_time(problem, search, starts, budget, contiguous=contiguous)
    else:
        found = _as_it_is(problem, starts[0].device, method, contiguous=contiguous)
        table = make_timetable(problem, starts[0].device, starts[0].order)
    names = (*problem.device_names, *problem.resource_names)
    return PlaceResult(
        timetable=table, objective="throughput", value=found.value, bound=min(found.bound, found.value),
        status="optimal" if found.is_optimal else "feasible", by="loads" if method == "auto" else method,
        seconds=time.process_time() - begin, is_interrupted=budget.is_interrupted,
        loads=dict(zip(names, loads(problem, found.device).tolist(), strict=True)))


def _search_in_time(problem: PlaceProblem, search: Search, starts: Sequence[Assignment], budget: Budget, *,
                    contiguous: bool) -> tuple[Loaded, Timetable]:
    """Return what the search finds; where the deadline cuts it, the best of what it had and of the starts."""
    kept: list[Loaded] = []

    def search_and_keep(capacity: F64, share: float, more: Sequence[I64]) -> Loaded:
        kept.append(search(capacity, share, more))
        return kept[-1]

    try:
        with cut_short(budget.deadline):
            return _search_with_tensors(problem, search_and_keep, starts, contiguous=contiguous)
    except OutOfTime:
        order = np.arange(problem.num_ops)
        found = [*(Assignment(device=item.device, order=order) for item in kept), *starts]
        fitting = _fitting(problem, found, contiguous=contiguous)
    if not fitting:
        raise NoFeasiblePlan(f"no placement of {problem.name!r} was found within the time limit, though there may be "
                             "one: give it more time")
    best, table = min(fitting, key=lambda item: item[0].value)
    bound = kept[0].bound if kept else problem.work_bound()  # of the first one, in which weights had all the room
    return replace(best, bound=bound, is_optimal=bound >= best.value * (1 - PROVEN)), table


def _search_with_tensors(problem: PlaceProblem, search: Search, starts: Sequence[Assignment], *, contiguous: bool
                         ) -> tuple[Loaded, Timetable]:
    """Return the best placement found in which the tensors of one request fit beside the weights, and its timetable.

    Loads know only what is resident. If tensors that are alive for a while do not fit beside it, weights get less room
    where they do not, and so on. The bound is that of the first search, in which weights had all.
    """
    limit = problem.capacity
    if not problem.has_lifetimes or not np.isfinite(limit).any():
        found = search(limit, 1.0, ())
        return found, _in_order(problem, found.device)[0]
    found = search(limit, 0.5, ())
    bound = found.bound
    table, over = _in_order(problem, found.device)
    for _ in range(_MAX_ROUNDS):
        if not over.any():
            break
        limit = np.where(over > 0, np.minimum(limit - over, problem.resident_bytes(found.device) - 1), limit)
        try:
            found = search(limit, 0.5, ())
        except NoFeasiblePlan:
            break
        table, over = _in_order(problem, found.device)
    fitting = _fitting(problem, starts, contiguous=contiguous) + ([] if over.any() else [(found, table)])
    if not fitting:
        raise _no_room_for_tensors(problem, table, over)
    if not over.any() and not found.is_optimal:
        more = search(limit, 1.0, [found.device])
        fitting += _fitting(problem, [Assignment(device=more.device, order=np.arange(problem.num_ops))],
                            contiguous=contiguous)
    best, table = min(fitting, key=lambda item: item[0].value)
    return replace(best, bound=bound, is_optimal=bound >= best.value * (1 - PROVEN)), table


def _fitting(problem: PlaceProblem, found: Iterable[Assignment], *, contiguous: bool) -> list[tuple[Loaded, Timetable]]:
    """Return those that can be used as they are, with their timetables."""
    asked = load_problem(problem, contiguous=contiguous)
    kept = []
    for item in found:
        value = asked.value(item.device[first_ops(problem)])
        if np.isfinite(value):
            table = make_timetable(problem, item.device, item.order)
            if (table.peak_bytes() <= problem.capacity * (1 + TOLERANCE)).all():
                kept.append((Loaded(device=item.device, value=value, bound=0.0, is_optimal=False), table))
    return kept


def _in_order(problem: PlaceProblem, device: I64) -> tuple[Timetable, F64]:
    """Return the timetable of one request with operators in the graph's order, and [m] the bytes that do not fit."""
    table = make_timetable(problem, device, np.arange(problem.num_ops))
    return table, np.maximum(table.peak_bytes() - problem.capacity * (1 + TOLERANCE), 0.0)


def _no_room_for_tensors(problem: PlaceProblem, table: Timetable, over: F64) -> NoFeasiblePlan:
    worst = int(np.argmax(over))
    name, missing = problem.device_names[worst], int(np.ceil(over[worst]))
    return NoFeasiblePlan(
        f"no placement of {problem.name!r} was found that fits: its weights do, but not with the tensors that are "
        f"alive at the same time ({missing} bytes are missing on {name!r} in the last one tried, which would hold "
        f"{format_bytes(table.peak_bytes()[worst])}). Try a smaller batch or a device with more memory.",
        missing_bytes=missing, device=name)


def _as_it_is(problem: PlaceProblem, device: I64, method: str, *, contiguous: bool) -> Loaded:
    """Return what a named method's placement comes to; raise ``NoFeasiblePlan`` if it cannot be used as asked."""
    asked = load_problem(problem, contiguous=contiguous)
    value = asked.value(device[first_ops(problem)])
    if not np.isfinite(value):
        what = " contiguously," if contiguous else ""
        raise NoFeasiblePlan(f"{method} does not place {problem.name!r}{what} on devices with a way between them: use "
                             "the method auto, or add links to the cluster file")
    bound = min(value, average_bound(asked))
    return Loaded(device=device, value=value, bound=bound, is_optimal=bound >= value * (1 - PROVEN))


def _starts(problem: PlaceProblem, names: Iterable[str], deadline: float | None) -> list[Assignment]:
    """Return what the methods choose, once one has, until the deadline; raise ``NoFeasiblePlan`` if nothing can fit."""
    found: list[Assignment] = []
    misses = []
    try:
        for name in names:
            try:
                with cut_short(deadline if found else None):
                    found.append(METHODS[name](problem))
            except NoFeasiblePlan as miss:
                misses.append(miss)
    except OutOfTime:
        assert found, "nothing is cut short before"
    if not found:
        device = fitting_devices(problem)  # raises where even the weights do not fit
        if len(misses) == 1:
            raise misses[0]
        found.append(Assignment(device=device, order=np.arange(problem.num_ops)))
    return found
