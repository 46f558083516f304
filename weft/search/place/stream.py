"""Placement for a stream of requests: the least largest load, by ``throughput``'s search or by a named method."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from weft.errors import NoFeasiblePlan
from weft.model.graph import I64
from weft.search.budget import Budget
from weft.search.place.fit import fitting_devices
from weft.search.place.methods import METHODS
from weft.search.place.problem import PlaceProblem
from weft.search.place.result import PlaceResult
from weft.search.place.throughput import Loaded, first_ops, load_problem, loads, solve_throughput
from weft.search.place.throughput_bounds import average_bound
from weft.search.place.throughput_search import PROVEN
from weft.search.place.timetable import make_timetable


def place_stream(problem: PlaceProblem, *, method: str, contiguous: bool, budget: Budget, seed: int,
                 begin: float) -> PlaceResult:
    """Return the placement with the least largest load; ``begin`` is when CPU seconds are counted from."""
    starts = _starts(problem, METHODS if method == "auto" else (method,))
    if method == "auto":
        found = solve_throughput(problem, contiguous=contiguous, budget=budget, seed=seed, starts=starts)
    else:
        found = _as_it_is(problem, starts[0], method, contiguous=contiguous)
    names = (*problem.device_names, *problem.resource_names)
    table = make_timetable(problem, found.device, np.arange(problem.num_ops))
    return PlaceResult(
        timetable=table, objective="throughput", value=found.value, bound=min(found.bound, found.value),
        status="optimal" if found.is_optimal else "feasible", by="loads" if method == "auto" else method,
        seconds=time.process_time() - begin, is_interrupted=budget.is_interrupted,
        loads=dict(zip(names, loads(problem, found.device).tolist(), strict=True)))


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


def _starts(problem: PlaceProblem, names: Iterable[str]) -> list[I64]:
    """Return the devices that the methods choose; raise ``NoFeasiblePlan`` if none fits and nothing can."""
    found, misses = [], []
    for name in names:
        try:
            found.append(METHODS[name](problem).device)
        except NoFeasiblePlan as miss:
            misses.append(miss)
    if not found:
        device = fitting_devices(problem)  # raises where even the weights do not fit
        if len(misses) == 1:
            raise misses[0]
        found.append(device)
    return found
