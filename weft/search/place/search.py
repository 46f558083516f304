"""Weft's own search for a placement: many starts, exact parts where the graph is in series, local search on the rest.

    place = starts (every named method)            -> a first placement that fits
          + bounds (ways, linear relaxation; with whole operators, a start too, where memory is tight)
          + exact (CP-SAT) for small problems
          + series: the parts between cuts, solved one by one, most hopeful first (``series``)
          + annealing of devices and order on the compiled timetable (``anneal``)
          + sequencing: the best placement's order, by CP-SAT

The programme for latency; ``check_timetable`` states it for any timetable, ``weft.search.place.latency.exact`` as a
model, ``weft.search.place.latency.bounds`` with fractions of operators:

    d[i], s[i]   device and start of operator i;  e[i] = s[i] + time[i, d[i]]                  (``Timetable.end_s``)
    a[t, c]      start of the transfer of tensor t to device c, from the device of its writer w, in
                 seconds[t, d[w], c]

    minimise T over d, s, a with
        T >= e[i]                                                                          (``Timetable.latency_s``)
        s[i] >= e[w] of what i reads from its own device                                   (``_missing_inputs``)
        s[i] >= a[t, d[i]] + seconds[t, d[w], d[i]] of what it reads from others           (``_missing_inputs``)
        a[t, c] >= e[w]                                                                    (``_wrong_transfers``)
        one operator at a time on a core                                                   (``_overlaps``)
        one transfer at a time on a way                                                    (``_busy_ways``)
        bytes held by a device at any time <= capacity                                     (``Timetable.peak_bytes``)
        d[i] = d[j] for operators of one unit, time[i, d[i]] finite                        (``check_placement``)

Throughput is another programme: ``weft.search.place.throughput.search``.

Every placement goes through ``check_timetable``; the best is kept. Searches are limited by *effort*, which is about CPU
seconds but counted in moves and in CP-SAT's deterministic time: the same input and seed give the same placement on any
machine, unless the clock ends the search first: that of ``time_limit``, or that of a single CP-SAT search, which may
take twice what its deterministic time says and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from weft.base.errors import InputError, NoFeasiblePlan, PlanError
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import I64
from weft.model.graph_file import parse_graph
from weft.search.common.budget import Budget, OutOfTime, cut_short, ended_by_ctrl_c
from weft.search.common.incumbent import Incumbent
from weft.search.place.fit import fitting_devices
from weft.search.place.latency.anneal import Annealer
from weft.search.place.latency.bounds import Relaxation, heads_and_tails, tighten, way_bound
from weft.search.place.latency.exact import ANY, Model, Series, Solved, solve_series
from weft.search.place.lists import heft
from weft.search.place.methods import METHODS, single
from weft.search.place.problem import Objective, PlaceProblem, problem_from_graph
from weft.search.place.throughput.search import place_stream, solve_throughput
from weft.search.place.timetable import (
    Assignment,
    MethodResult,
    PlaceResult,
    Timetable,
    check_timetable,
    make_timetable,
    no_room_for_tensors,
    with_room_for_tensors,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was chosen for the search, and why. None was tuned on a recorded set: take them for guesses that work."""

    effort: float = 15.0
    """CPU seconds, about, of a search without a time limit."""
    proven: float = 1e-6
    """A bound this close to the value, as a part of it, is a proof: whole ticks are no finer."""
    negligible: float = 1e-5
    """A gap of so little is not worth a search, though it is no proof: linear programs are solved to tolerances."""
    small: int = 40
    """Up to so many operators, CP-SAT alone is tried first."""
    quick_method: str = "heft"
    """Good for its time: under a time limit it comes before all that takes longer."""
    slow_methods: tuple[str, ...] = ("m-sct", "getf")
    max_ops_for_slow: int = 4000
    """Above so many operators the slow methods are left out as starts."""
    max_exact_terms: int = 30_000
    """CP-SAT is not tried on problems with more transfers x pairs of devices."""
    max_choices: int = 300
    """CP-SAT is not tried where more devices are open than so many beyond one for each unit."""
    max_entries: int = 30_000
    """Parts in series are left alone where parts x pairs of devices are more: the shortest way takes too long then."""
    fit_effort: float = 3.0
    """CPU seconds, about, in which annealing may make tensors fit where nothing else did."""
    max_whole: int = 2500
    """The relaxation is solved with whole operators up to so many operators x devices."""
    nodes_per_s: int = 150
    """Nodes of its tree that are looked at in a second, about."""
    least_s: float = 0.05
    """Seconds that each method has at least in a comparison under a time limit."""
    grace_s: float = 0.3
    """Seconds after the deadline in which the named methods are still tried: small problems need not even that."""
    last_grace_s: float = 1.5
    """Seconds after the deadline in which some placement may still be found, where there is none."""


TUNING: Final = Tuning()


def place(problem: PlaceProblem, *, objective: Objective = "latency", method: str = "auto", contiguous: bool = False,
          time_limit: float | None = None, seed: int = 0,
          progress: Callable[[str], None] = lambda text: None) -> PlaceResult:
    """Return the best placement found by the method (``auto``: by all of them and Weft's own search), checked.

    ``time_limit`` is in seconds. ``contiguous`` (throughput only): what a device runs is a convex part of the graph.
    Ctrl-C ends the search with the best so far. Raise ``NoFeasiblePlan`` if nothing fits.
    """
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"the time limit must be more than 0 seconds, not {time_limit}")
    if method != "auto" and method not in METHODS:
        raise InputError(f"there is no method {method!r}: choose one of auto, {', '.join(METHODS)}")
    if contiguous and objective == "latency":
        raise InputError("contiguous placements are for the objective throughput")
    begin = time.process_time()
    budget = Budget(effort=TUNING.effort if time_limit is None else time_limit, report=progress,
                    deadline=None if time_limit is None else time.monotonic() + time_limit)
    with ended_by_ctrl_c(budget):
        if objective == "throughput":
            return place_stream(problem, method=method, contiguous=contiguous, budget=budget, seed=seed, begin=begin)
        search = LatencySearch(problem, budget, seed)
        if method != "auto":
            _by_name(search, method)
        elif time_limit is None:
            search.run()
        else:
            search.run_within_limit()
        return search.result(time.process_time() - begin)


def _by_name(search: LatencySearch, method: str) -> None:
    """Offer what one method finds; one that is not done in time has found nothing."""
    if search.budget.deadline is not None:
        search.bound_by_work()
    try:
        with cut_short(search.budget.deadline):
            search.try_method(method)
            if search.budget.deadline is not None:
                search.bound_by_ways()
    except OutOfTime:
        if search.best.answer is None:
            raise NoFeasiblePlan(f"the method {method!r} was not done when the time limit ended it: give it more "
                                 "time, or try the method auto, which always has something") from None


def compare(problem: PlaceProblem, *, objective: Objective = "latency", contiguous: bool = False,
            time_limit: float | None = None, seed: int = 0,
            progress: Callable[[str], None] = lambda text: None) -> tuple[MethodResult, ...]:
    """Return what every named method and ``auto`` (last) come to; Ctrl-C leaves out those that are still to come."""
    rows = []
    deadline = None if time_limit is None else time.monotonic() + time_limit
    for name in (*METHODS, "auto"):
        if name != "auto" and deadline is not None and time.monotonic() >= deadline:
            rows.append(MethodResult(method=name, reason="not tried: the time limit was reached"))
            continue
        left = None if deadline is None else max(TUNING.least_s, deadline - time.monotonic())
        try:
            found = place(problem, objective=objective, method=name, contiguous=contiguous, seed=seed,
                          progress=progress, time_limit=left if name == "auto" or left is None else 0.7 * left)
        except NoFeasiblePlan as miss:
            rows.append(MethodResult(method=name, reason=str(miss)))
            if name == "auto":
                raise
        else:
            rows.append(MethodResult(method=name, result=found, value=found.value))
            if found.is_interrupted:
                break
    return tuple(rows)


class LatencySearch:
    """The search for the lowest latency: the best so far and what is proven."""

    def __init__(self, problem: PlaceProblem, budget: Budget, seed: int) -> None:
        self.problem, self.budget, self.seed = problem, budget, seed
        self.effort = budget.effort
        self.best = Incumbent[Timetable](budget=budget, unit="s", proof=TUNING.proven, bound=0.0)
        self.misses: list[NoFeasiblePlan] = []
        self.tried: set[str] = set()
        if budget.deadline is None:
            self.bound_by_ways()

    @cached_property
    def annealer(self) -> Annealer:
        """Return local search for the problem."""
        return Annealer(self.problem, self.seed)

    def bound_by_work(self) -> None:
        """Raise the bound by the work alone: all devices busy, nothing sent. It takes no time."""
        self.best.raise_bound(self.problem.work_bound())

    def bound_by_ways(self) -> None:
        """Raise the bound by the longest ways."""
        heads, tails = heads_and_tails(self.problem)
        self.best.raise_bound(way_bound(self.problem, heads, tails))

    def is_done(self) -> bool:
        """Return whether the search should end."""
        is_near = self.best.value <= self.best.bound * (1 + TUNING.negligible)
        return self.best.is_done or (is_near and self.best.answer is not None)

    def result(self, seconds: float) -> PlaceResult:
        """Return what was found; raise ``NoFeasiblePlan`` if nothing was."""
        best = self.best
        if best.answer is None:
            self.fit()  # raises where even the weights do not fit
            raise self.nearest_miss()
        return PlaceResult(timetable=best.answer, objective="latency", value=best.value, by=best.by,
                           bound=min(best.bound, best.value), status=best.status, seconds=seconds,
                           is_interrupted=self.budget.is_interrupted)

    def nearest_miss(self) -> NoFeasiblePlan:
        """Return why there is no placement, by the last method tried that says so."""
        return self.misses[-1] if self.misses else NoFeasiblePlan(
            f"no placement of {self.problem.name!r} was found in which every operator gets what it reads: are there "
            "ways between the devices that may run them? Add links to the cluster file, or try the method auto")

    def offer(self, table: Timetable, by: str) -> bool:
        """Keep the timetable if it is valid and the best; return whether it was kept."""
        if not self.best.is_better(table.latency_s):
            return False
        try:
            check_timetable(table)
        except PlanError:
            return False
        return self.best.offer(table.latency_s, table, by)

    def in_order(self, device: I64) -> Timetable:
        """Return the timetable of the devices with operators in the graph's order."""
        return make_timetable(self.problem, device, np.arange(self.problem.num_ops))

    # ---- steps ----------------------------------------------------------------------------------------------------

    def run_within_limit(self) -> None:
        """Find some placement first, then do as ``run`` until the deadline, wherever that is."""
        for name in METHODS:
            if self.best.answer is None:
                self.try_method(name)
        self.bound_by_work()
        try:
            with cut_short(self.end_of_search(TUNING.grace_s)):
                if TUNING.quick_method not in self.tried:
                    self.try_method(TUNING.quick_method)
                self.try_methods()
            with cut_short(self.end_of_search(0.0)):
                self.bound_by_ways()
                self.run()
        except OutOfTime:
            self.best.tell("time limit")
            if self.best.answer is None:
                raise NoFeasiblePlan(f"no placement of {self.problem.name!r} was found within the time limit, though "
                                     f"there may be one: give it more time. {self.nearest_miss()}") from None

    def end_of_search(self, grace_s: float) -> float | None:
        """Return when the search is cut off: so long after the deadline, and later where there is no placement yet."""
        deadline = self.budget.deadline
        has_none = self.best.answer is None
        if deadline is None or (has_none and self.problem.num_ops <= TUNING.max_ops_for_slow):
            return None  # looking for room takes no longer than its effort there
        return deadline + (TUNING.last_grace_s if has_none else grace_s)

    def run(self) -> None:
        """Try everything, cheap and hopeful steps first, until the best is proven or the effort is spent."""
        series = Series(self.problem)
        is_small = max(len(part.ops) for part in series.parts) <= TUNING.small if series.parts else True
        if "single" not in self.tried:
            self.try_method("single")
        if self.problem.num_ops <= TUNING.small:
            self.best.raise_bound(self.solve_from_best(0.5 * self.effort, "exact").bound)
        elif is_small:
            self.solve_parts(series, 0.35 * self.effort)
        if self.best.is_proven or (self.budget.is_interrupted and self.best.answer is not None):
            return
        self.try_methods()
        self.relax(0.15 * self.effort)
        if not is_small:
            self.anneal(0.2 * self.budget.effort)
        self.solve_parts(series, 0.5 * self.budget.effort)
        num_rounds = 0
        while self.best.answer is not None and not self.is_done():
            before = self.best.value
            self.anneal(max(0.4 * self.budget.effort, 0.05 * self.effort))
            if self.best.value < before or num_rounds % 2 == 1:
                self.solve_parts(series, 0.6 * self.budget.effort)
            if not self.is_done():
                self.sequence(0.25 * self.budget.effort)
            num_rounds += 1

    def relax(self, effort: float) -> None:
        """Raise the bound by the linear relaxation; where memory is tight, start from its best with whole operators."""
        relaxation = Relaxation(self.problem)
        if not relaxation.is_of_use:
            return
        self.best.raise_bound(relaxation.bound(time_limit=self.seconds_for(effort)))
        if not self.problem.is_tight or relaxation.num_x > TUNING.max_whole or self.is_done():
            return
        begin = time.process_time()
        bound, device = relaxation.whole(time_limit=self.seconds_for(effort),
                                         max_nodes=int(TUNING.nodes_per_s * effort) + 1)
        self.budget.effort -= time.process_time() - begin
        self.best.raise_bound(bound)
        if device is not None:
            table = self.in_order(device)
            if not self.offer(table, "relaxation") and np.isfinite(table.latency_s):
                self.make_fit(table, effort, "relaxation, made to fit")

    def make_fit(self, start: Timetable, effort: float, by: str) -> bool:
        """Offer what annealing makes of a timetable that does not fit; return whether it was kept."""
        found = self.annealer.make_fit(start, self.budget, effort=effort)
        return found is not None and self.offer(found, by)

    def seconds_for(self, effort: float) -> float:
        """Return how long a linear program may take by the clock: what is asked, and no more than there is."""
        left = self.budget.seconds_left
        return max(1.0, effort) if left is None else max(TUNING.least_s, min(max(1.0, effort), left))

    def try_methods(self) -> None:
        """Use every named method as a start."""
        slow = TUNING.slow_methods if self.problem.num_ops > TUNING.max_ops_for_slow else ()
        for name in METHODS:  # never worse than any of them, if there is time
            if self.best.is_proven or self.budget.is_interrupted:
                break
            if name not in self.tried and name not in slow:
                self.try_method(name)
        if self.best.answer is None:
            self.fit()
        if self.best.answer is None:
            self.find_ways()

    def find_ways(self) -> None:
        """Offer a placement with ways for all that is sent; raise ``NoFeasiblePlan`` if there is none.

        Lists and memory alone do not look ahead where some devices cannot send to others; the search for loads does.
        """
        with self.budget.without(0.8 * self.budget.effort):
            found = solve_throughput(self.problem, contiguous=False, budget=self.budget, seed=self.seed)
        assert found.answer is not None, "else it raises"
        self.offer(self.in_order(found.answer), "ways")

    def fit(self) -> None:
        """Offer a placement that looks at memory alone; raise ``NoFeasiblePlan`` if there is none."""
        def method(problem: PlaceProblem) -> Assignment:
            return Assignment(device=fitting_devices(problem, seed=self.seed), order=np.arange(problem.num_ops))

        devices = fitting_devices(self.problem, seed=self.seed)  # raises where the weights alone do not fit
        try:
            found = with_room_for_tensors(self.problem, method)
        except NoFeasiblePlan as miss:
            effort = TUNING.fit_effort if self.budget.deadline is None else min(TUNING.fit_effort, TUNING.last_grace_s)
            if self.make_fit(self.in_order(devices), effort, "memory"):
                return
            raise no_room_for_tensors(self.problem, miss) from miss
        self.offer(make_timetable(self.problem, found.device, found.order), "memory")

    def try_method(self, name: str) -> None:
        """Offer what a named method finds."""
        self.tried.add(name)
        begin = time.process_time()
        try:
            found = METHODS[name](self.problem)
            self.offer(make_timetable(self.problem, found.device, found.order), name)
        except NoFeasiblePlan as miss:
            self.misses.append(miss)
        if self.problem.num_ops > TUNING.max_ops_for_slow:  # else too little to make what follows depend on the clock
            self.budget.effort -= time.process_time() - begin

    def solve_from_best(self, effort: float, by: str, device: I64 | None = None) -> Solved:
        """Offer and return what CP-SAT makes of the best placement; ``device`` leaves only the order."""
        found = solve_exactly(self.problem, self.budget, effort=effort, start=self.best.answer, limit=self.best.value,
                              seed=self.seed, device=device)
        if found.timetable is not None:
            self.offer(found.timetable, by)
        return found

    def solve_parts(self, series: Series, effort: float) -> None:
        """Solve the parts between the cuts; offer what they add up to, and raise the bound."""
        num_entries = len(series.parts) * self.problem.num_devices**2
        if len(series.parts) < 2 or num_entries > TUNING.max_entries or self.is_done():
            return
        if self.best.answer is not None:
            adopt(series, self.best.answer)

        def solve(problem: PlaceProblem, bound: float, limit: float, share: float) -> Solved:
            part = share if problem.num_ops <= TUNING.small else min(share, 0.5)
            found = solve_exactly(problem, self.budget, effort=part * self.budget.effort, start=None, limit=limit,
                                  seed=self.seed)
            return replace(found, bound=max(bound, found.bound))

        last = 0.0

        def report(lower: float) -> None:
            nonlocal last
            self.best.raise_bound(lower)
            if self.best.bound > last * 1.01:
                last = self.best.bound
                self.best.tell(f"parts between {len(series.parts) - 1} cuts")

        with self.budget.without(max(0.0, self.budget.effort - effort)):
            solve_series(series, solve, upper=self.best.value, is_spent=lambda: self.budget.is_spent, report=report)
        self.best.raise_bound(series.shortest(by_bound=True).seconds)
        way = series.shortest(by_bound=False)
        if way.seconds < self.best.value:
            self.offer(series.timetable(way), "parts")

    def anneal(self, effort: float) -> None:
        """Improve the best by local search."""
        if self.best.answer is None or self.is_done():
            return
        for table in self.annealer.improve(self.best.answer, self.budget, effort=effort):
            self.offer(table, "local search")
            if self.is_done():
                break

    def sequence(self, effort: float) -> None:
        """Find a better order for the best placement by CP-SAT."""
        if self.best.answer is not None and not self.budget.is_spent:
            self.solve_from_best(effort, "sequencing", self.best.answer.device)


def solve_exactly(problem: PlaceProblem, budget: Budget, *, effort: float, start: Timetable | None, limit: float,
                  seed: int, device: I64 | None = None) -> Solved:
    """Return what CP-SAT finds that takes less than ``limit``, and what it proves; ``device`` leaves only the order."""
    if device is not None:
        problem = pinned(problem, device)
    if np.isfinite(limit):
        less = tighten(problem, limit)
        if less is None:
            return Solved(bound=limit)
        problem = less
    choices = problem.is_allowed.sum(axis=1)
    num_terms = choices[problem.unit_of_op][problem.edges[:, :2]].prod(axis=1).sum()
    if choices.sum() - problem.num_units > TUNING.max_choices or num_terms > TUNING.max_exact_terms:
        return Solved(bound=0.0)
    model = Model(problem, limit_s=limit)
    if start is not None:
        model.hint(start)
    # Without a linear relaxation small models are solved sooner; large ones with few open choices need it.
    found = model.solve(budget, effort=effort, seed=seed, linearization=0 if problem.num_ops <= TUNING.small else 1)
    return replace(found, bound=min(found.bound, limit))


def pinned(problem: PlaceProblem, device: I64) -> PlaceProblem:
    """Return the problem with every operator allowed only where it is."""
    time_s = np.full(problem.time_s.shape, np.inf)
    rows = np.arange(problem.num_ops)
    time_s[rows, device] = problem.time_s[rows, device]
    return replace(problem, time_s=time_s)


def adopt(series: Series, table: Timetable) -> None:
    """Let the parts know what a whole timetable does between the cuts."""
    order = table.order
    before = ANY
    for index, part in enumerate(series.parts):
        after = int(table.device[part.ops[-1]]) if part.has_exit else ANY
        local = np.full(series.problem.num_ops, -1, dtype=np.int64)
        local[part.ops] = np.arange(len(part.ops))
        inside = local[order]
        fixed = part.fixed(before, after)
        found = make_timetable(fixed, table.device[part.ops], inside[inside >= 0])
        series.record(index, before, after, Solved(bound=0.0, timetable=found))
        before = after


def load_compiled() -> None:
    """Read from the disk what every search needs of the compiled code, or compile it.

    Before a search under a time limit, so that it does not count against it.
    """
    ops = [{"name": name, "kind": "op", "times": {"gpu": 1.0}, "memory": 1} for name in ("a", "b")]
    graph = parse_graph({"format": "weft.graph", "version": 1, "ops": ops,
                         "edges": [{"from": "a", "to": "b", "bytes": 1}]})
    cluster = parse_cluster({"format": "weft.cluster", "version": 1,
                             "devices": [{"name": name, "kind": "gpu", "memory": 2} for name in ("x", "y")],
                             "links": [{"from": "x", "to": "y", "bandwidth": "1GB/s", "latency": "1us"}]})
    problem = problem_from_graph(graph, cluster, estimate_costs(graph, cluster))
    for method in (single, heft):  # under a time limit these are tried first
        found = method(problem)
        check_timetable(make_timetable(problem, found.device, found.order))
