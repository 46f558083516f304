"""Searches over dnn-partitioning problems, by either of the benchmark's objectives.

    from weft.search.place.partition.search import load_partition, solve_partition
    result = solve_partition(load_partition("bert24_inference.json"), objective="throughput")

*Throughput*, as a load problem (``loads_of``): ``time[u, d]`` is the sum of the times of the unit's nodes,
``touch[t, d]`` the cost of the node that writes t where d is an accelerator, 0 for CPUs. It is solved as for graphs
(``weft.search.place.throughput.search``).

*Latency*: accelerators get one set of units each, everything else is on CPUs.

    x[u]     the set of unit u: 1 to K, or 0 for CPUs
    L[k]     load of set k:  sum of fpga[v] of its nodes v, and of cost[v] of the nodes v inside that are read
             outside, or outside that are read inside                                        (``kernel._add_loads``)
    e[v]     end of node v:  max of e[u] of the nodes u that it reads, + cpu[v], on a CPU    (``kernel.latency``)
    e[v]     in set k:       max of e[u] of the nodes u outside that the set reads, + L[k]   (``kernel.latency``)

    minimise T over x with   T >= e[v] for all v                                             (``kernel.latency``)
                             sum of size[v] in a set <= capacity                             (``kernel.excess``)
                             no circle of sets that wait for each other           (``kernel.latency``: infinite)

Starts come from paths, which also give bounds (``cover``); annealing with exact evaluation improves them
(``_Search.anneal_for``); CP-SAT improves further or proves (``weft.search.place.partition.exact``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.base.errors import InputError, NoFeasiblePlan
from weft.base.units import format_bytes
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget, OutOfTime, cut_short, ended_by_ctrl_c
from weft.search.common.incumbent import Incumbent
from weft.search.place.kernel import pieces
from weft.search.place.partition import kernel
from weft.search.place.partition.exact import improve_or_prove
from weft.search.place.partition.kernel import Graph, Scratch
from weft.search.place.partition.problem import (
    PartitionProblem,
    PartitionResult,
    check_latency,
    check_throughput,
    load_partition,
    parse_partition,
)
from weft.search.place.problem import Objective, csr, inverse
from weft.search.place.throughput.model import LoadProblem, make_loads
from weft.search.place.throughput.search import minimise, warm_up

__all__ = ["load_partition", "solve_partition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was chosen for the search for latency. None was tuned on a recorded set: take them for guesses that work."""

    effort: float = 46.0
    """CPU seconds of a search, about, unless told otherwise (of either objective)."""
    proven: float = 1e-6
    """Relative: a bound so close to the value is a proof; CP-SAT's whole numbers are no finer."""
    heat: tuple[float, ...] = (0.003, 0.0003, 0.01, 0.001, 0.03)
    """Starting temperatures in turn, in parts of the latency."""
    cold: float = 1e-7
    """The last temperature, in the same parts."""
    piece_s: float = 0.4
    """Effort between looks at the clock, so that Ctrl-C is answered in about half a second."""
    first_s: float = 0.01
    """Effort of the first runs at most, for each unit: small problems are proven sooner than annealed."""
    random_paths: int = 20
    """Paths near the longest that are followed in each turn."""
    path_share: float = 0.1
    """A path, or all random ones of a turn, take no more of the effort that is left than this."""


TUNING: Final = Tuning()


def loads_of(problem: PartitionProblem, *, contiguous: bool = False) -> LoadProblem:
    """Return the problem as loads: accelerators first, then CPUs; a unit for each colour class."""
    unit, count = problem.unit_of_node, problem.num_accelerators + problem.num_cpus
    is_cpu = np.arange(count) >= problem.num_accelerators
    time_s = np.zeros((problem.num_units, count))
    np.add.at(time_s, unit, np.where(is_cpu[None, :], problem.cpu_s[:, None],
                                     np.where(problem.is_supported, problem.fpga_s, np.inf)[:, None]))
    targets: list[set[int]] = [set() for _ in range(problem.num_nodes)]
    for source, target in problem.edges.tolist():
        targets[source].add(int(unit[target]))
    kept = [node for node in range(problem.num_nodes) if targets[node] - {int(unit[node])} and problem.cost_s[node] > 0]
    order, source_lists = _in_order(problem, contiguous=contiguous)
    none = np.zeros(0, dtype=np.int64)
    return LoadProblem(class_of_device=is_cpu.astype(np.int64), contiguous=contiguous, arrays=make_loads(
        time_s=time_s, core=np.arange(count, dtype=np.int64), owner=unit[kept],
        reader_lists=[sorted(targets[node] - {int(unit[node])}) for node in kept],
        touch_s=np.where(is_cpu[None, :], 0.0, problem.cost_s[kept][:, None]),
        item_lists=[[index] for index in range(problem.num_units)], item_bytes=problem.unit_size,
        capacity=np.where(is_cpu, np.inf, problem.capacity), node_unit=unit[order], source_lists=source_lists,
        latency_s=np.zeros((count, count)), s_per_byte=np.zeros((count, count)), tensor_bytes=np.zeros(len(kept)),
        given_row=np.full(len(kept), -1, dtype=np.int64), given_s=np.zeros((0, count, count)), resources=none,
        resource_start=np.zeros(count * count + 1, dtype=np.int64), num_resources=0))


def _in_order(problem: PartitionProblem, *, contiguous: bool) -> tuple[I64, list[list[int]]]:
    """Return the nodes (for contiguity the forward ones) in topological order, and the places of each one's sources.

    Edges in a circle are an error only where contiguity is asked for; else the file's order does.
    """
    try:
        order = problem.order
    except InputError:
        if contiguous:
            raise
        return np.arange(problem.num_nodes, dtype=np.int64), [[] for _ in range(problem.num_nodes)]
    order = order[~(problem.is_backward[order] & contiguous)]
    place = {node: index for index, node in enumerate(order.tolist())}
    sources: list[list[int]] = [[] for _ in place]
    for source, target in problem.edges.tolist():
        if source in place and target in place:
            sources[place[target]].append(place[source])
    return order, sources


# ---- latency: sets to start from ----------------------------------------------------------------------------------


def latency_graph(problem: PartitionProblem) -> Graph:
    """Return the problem for compiled code: nodes in topological order."""
    order = problem.order
    position = np.empty(problem.num_nodes, dtype=np.int64)
    position[order] = np.arange(problem.num_nodes)
    targets: list[list[int]] = [[] for _ in range(problem.num_nodes)]
    unit = problem.unit_of_node
    near: list[dict[int, None]] = [{} for _ in range(problem.num_units)]
    for source, target in problem.edges.tolist():
        targets[position[source]].append(int(position[target]))
        if unit[source] != unit[target]:
            near[unit[source]][int(unit[target])] = None
            near[unit[target]][int(unit[source])] = None
    start, items = csr([sorted(entry) for entry in targets])
    near_start, near_items = csr([list(entry) for entry in near])
    can_set = np.ones(problem.num_units, dtype=np.int64)
    np.minimum.at(can_set, unit, problem.is_supported.astype(np.int64))
    can_set[problem.unit_size > problem.capacity * (1 + 1e-12)] = 0
    source_start, sources = inverse(start, items, problem.num_nodes)
    member_start, members = inverse(np.arange(problem.num_nodes + 1, dtype=np.int64), unit[order], problem.num_units)
    return Graph(cpu_s=problem.cpu_s[order], fpga_s=problem.fpga_s[order], size=problem.size[order],
                 cost_s=problem.cost_s[order], unit=unit[order], target_start=start, targets=items,
                 source_start=source_start, sources=sources, member_start=member_start, members=members,
                 near_start=near_start, near=near_items, can_set=can_set, num_sets=problem.num_accelerators,
                 capacity=problem.capacity)


def cover(g: Graph, path: I64) -> tuple[float, I64]:
    """Return a bound and the sets of units, by the path's best intervals.

    The sets may break a rule, since the path does not know all of them.
    """
    bound, ends = kernel.best_cover(g, path)
    _, after, before = kernel.spans(g, path)
    where = np.zeros(len(g.can_set), dtype=np.int64)
    for index, begin in enumerate(np.flatnonzero(ends >= 0).tolist()):
        where[g.unit[(after >= begin) & (before <= ends[begin])]] = index + 1
    return bound, where


def cover_s(g: Graph) -> float:
    """Return about how many CPU seconds one cover takes."""
    nodes = len(g.cpu_s)
    return 1e-5 + 2e-8 * nodes * (nodes + len(g.targets)) + 2e-9 * nodes * nodes * g.num_sets


# ---- latency: the search ------------------------------------------------------------------------------------------


def minimise_latency(problem: PartitionProblem, *, budget: Budget, seed: int) -> Incumbent[I64]:
    """Return the best set of each unit (0 for CPUs) found, the bound equal to the value where it is a proof."""
    search = _Search(latency_graph(problem), budget, seed)
    try:
        search.start()
        with cut_short(budget.deadline):
            effort = budget.effort
            search.anneal_for(min(0.05 * effort, TUNING.first_s * problem.num_units))
            search.follow_paths(TUNING.random_paths)
            search.prove(0.1 * effort, linearization=0)
            search.anneal_for(0.35 * effort)
            search.follow_paths(TUNING.random_paths)
            search.prove(0.3 * effort, linearization=1)
            search.anneal_for(budget.effort)
            search.follow_paths(TUNING.random_paths)
    except OutOfTime:
        search.best.tell("time limit")
    except KeyboardInterrupt:
        budget.is_interrupted = True
    if search.best.is_proven:
        search.best.bound = search.best.value
    return search.best


class _Search:
    def __init__(self, g: Graph, budget: Budget, seed: int) -> None:
        self.g, self.budget, self.seed = g, budget, seed
        self.scratch = Scratch.of(g)
        self.seconds = 1e-6 + 2e-9 * (len(g.cpu_s) + len(g.targets)) + 4e-8 * g.num_sets
        on_cpus = np.zeros(len(g.can_set), dtype=np.int64)
        self.best = Incumbent[I64](budget=budget, what="latency", proof=TUNING.proven, bound=path_bound(g),
                                   value=kernel.latency(g, on_cpus, self.scratch), answer=on_cpus, by="CPUs")
        self.starts = [on_cpus]
        self.paths: set[bytes] = set()
        self.num_runs = 0

    @property
    def where(self) -> I64:
        """Return the best sets."""
        assert self.best.answer is not None, "all on CPUs is where it begins"
        return self.best.answer

    @property
    def is_done(self) -> bool:
        return self.budget.is_spent or self.best.is_proven

    def offer(self, where: I64) -> None:
        """Take the sets if they are allowed and better."""
        value = kernel.latency(self.g, where, self.scratch)
        if kernel.excess(self.g, self.scratch) == 0:
            self.best.offer(value, where)

    def start(self) -> None:
        """Follow the longest paths by a few weights: each may tell much."""
        g = self.g
        if g.num_sets == 0:
            self.best.raise_bound(self.best.value)
        for weights in (np.minimum(g.cpu_s, g.fpga_s), g.cpu_s, g.cost_s, g.size, np.ones(len(g.cpu_s))):
            self.follow(weights)
        self.follow_paths(0)

    def follow_paths(self, num_random: int) -> None:
        """Take bounds and sets from the longest path by the times in the best sets, and by some near them."""
        rng = np.random.default_rng(self.seed + self.num_runs)
        times_s = np.where(self.where[self.g.unit] > 0, self.g.fpga_s, self.g.cpu_s)
        num_random = min(num_random, int(TUNING.path_share * self.budget.effort / cover_s(self.g)))
        for index in range(1 + num_random):
            self.follow(times_s * rng.uniform(0.5, 1.0, size=len(times_s)) if index else times_s)

    def follow(self, weights: F64) -> None:
        """Take the bound and the sets of the path with the largest sum of weights."""
        path = kernel.longest_path(self.g, weights)
        seconds = cover_s(self.g)
        if self.is_done or path.tobytes() in self.paths or seconds > TUNING.path_share * self.budget.effort:
            return
        self.paths.add(path.tobytes())
        self.budget.effort -= seconds
        bound, where = cover(self.g, path)
        self.best.raise_bound(bound)
        if not any((where == start).all() for start in self.starts):
            self.starts.append(where)
            self.offer(where)

    def anneal_for(self, effort: float) -> None:
        """Anneal from the best sets, and now and then from another start."""
        least = self.budget.effort - effort
        share = min(effort / 2, max(effort / 8, 0.5))
        while not self.is_done and self.budget.effort > max(0.0, least) + 0.01:
            is_new = self.num_runs % 3 == 2
            start = self.starts[self.num_runs // 3 % len(self.starts)] if is_new else self.where
            self._run(start, max(2000, int(share / self.seconds)))

    def _run(self, start: I64, steps: int) -> None:
        """Anneal once, in pieces, between which the clock and Ctrl-C are looked at."""
        heat = TUNING.heat[self.num_runs % len(TUNING.heat)]
        self.num_runs += 1
        now = start.copy()
        for piece in pieces(steps, size=TUNING.piece_s / self.seconds, hot=heat * max(self.best.value, 1e-300),
                            fall=TUNING.cold / heat, is_done=lambda: self.is_done):
            found, value = kernel.anneal(self.g, now, Scratch.of(self.g), piece.steps, piece.hot, piece.cold,
                                         (1000 * self.seed + self.num_runs) * 1000 + piece.number)
            self.budget.effort -= piece.steps * self.seconds
            if self.best.is_better(value) or (np.isfinite(value) and piece.number == piece.total - 1):
                self.offer(found)

    def prove(self, effort: float, *, linearization: int) -> None:
        """Let CP-SAT improve the best sets or raise the bound."""
        if self.is_done:
            return
        where, bound = improve_or_prove(self.g, self.where, self.best.value, budget=self.budget, effort=effort,
                                        seed=self.seed, linearization=linearization)
        self.best.raise_bound(bound)
        if where is not None:
            self.offer(where)


def path_bound(g: Graph) -> float:
    """Return the longest path with every node where it is fastest; a set's load is at least its nodes' times."""
    fastest = np.where((g.can_set[g.unit] > 0) & (g.num_sets > 0), np.minimum(g.cpu_s, g.fpga_s), g.cpu_s)
    return float(np.cumsum(fastest[kernel.longest_path(g, fastest)])[-1])


# ---- either objective ---------------------------------------------------------------------------------------------


def solve_partition(problem: PartitionProblem, *, objective: Objective, contiguous: bool = False,
                    time_limit: float | None = None, seed: int = 0,
                    progress: Callable[[str], None] = lambda line: None) -> PartitionResult:
    """Return the best split found in about ``time_limit`` CPU seconds, checked, with a bound.

    ``contiguous`` is for throughput (each device's forward nodes are a convex set); sets are always so for latency.
    Raises ``NoFeasiblePlan`` where no split fits the memory.
    """
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"the time limit must be more than 0 seconds, not {time_limit}")
    begin = time.process_time()
    compile_searches(objective)
    budget = Budget(effort=TUNING.effort if time_limit is None else time_limit, report=progress,
                    deadline=None if time_limit is None else time.monotonic() + time_limit)
    with ended_by_ctrl_c(budget):
        if objective == "throughput":
            _check_possible(problem)
            best = minimise(loads_of(problem, contiguous=contiguous), budget=budget, seed=seed)
            if best.answer is None:
                raise _no_split(problem, contiguous=contiguous, is_proven=bool(np.isinf(best.bound)))
            device = np.asarray(best.answer[problem.unit_of_node])
            figures = check_throughput(problem, device, contiguous=contiguous)
        else:
            best = minimise_latency(problem, budget=budget, seed=seed)
            assert best.answer is not None, "all on CPUs is where it begins"
            device = _latency_devices(problem, best.answer)
            figures = check_latency(problem, device)
    bound = best.bound
    is_optimal = bound >= figures.value * (1 - TUNING.proven)
    return PartitionResult(problem=problem, objective=objective, device=device, figures=figures, value=figures.value,
                           bound=min(bound, figures.value), status="optimal" if is_optimal else "feasible",
                           seconds=time.process_time() - begin, contiguous=contiguous,
                           is_interrupted=budget.is_interrupted)


def compile_searches(objective: Objective) -> None:
    """Compile what the search needs, or read it from the disk: that is not to count against its time."""
    value = {"maxSizePerFPGA": 1, "maxFPGAs": 1, "maxCPUs": 1, "edges": [{"sourceId": 0, "destId": 1, "cost": 1}],
             "nodes": [{"id": node, "supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 1} for node in range(2)]}
    tiny = parse_partition(value)
    if objective == "throughput":
        warm_up(loads_of(tiny))
        return
    minimise_latency(tiny, budget=Budget(effort=0.001), seed=0)
    graph = latency_graph(tiny)
    where = cover(graph, kernel.longest_path(graph, graph.cpu_s))[1]
    kernel.anneal(graph, where, Scratch.of(graph), 1, 1.0, 1.0, 0)


def _latency_devices(problem: PartitionProblem, where: I64) -> I64:
    """Return the device of each node from the set of each unit; sets are given to accelerators in order."""
    sets = where[problem.unit_of_node]
    order = [item for item in dict.fromkeys(sets[problem.order].tolist()) if item > 0]
    used = {item: index for index, item in enumerate(order)}
    return np.array([used.get(int(item), problem.num_accelerators) for item in sets], dtype=np.int64)


def _unit_nodes(problem: PartitionProblem, unit: int) -> str:
    ids = [str(problem.node_ids[node]) for node in np.flatnonzero(problem.unit_of_node == unit).tolist()]
    return ", ".join([*ids[:8], *(["..."] if len(ids) > 8 else [])])


def _check_possible(problem: PartitionProblem) -> None:
    """Raise ``NoFeasiblePlan`` where a class of nodes has no device at all."""
    if problem.num_cpus:
        return
    for unit, size in enumerate(problem.unit_size.tolist()):
        nodes = np.flatnonzero(problem.unit_of_node == unit)
        if not problem.is_supported[nodes].all():
            raise NoFeasiblePlan(f"{problem.name}: node {_unit_nodes(problem, unit)} cannot run on an accelerator, and "
                                 "there is no CPU (maxCPUs is 0). Allow at least one CPU.")
        if size > problem.capacity * (1 + 1e-12):
            missing = int(np.ceil(size - problem.capacity))
            raise NoFeasiblePlan(
                f"{problem.name}: node {_unit_nodes(problem, unit)} needs {format_bytes(size)} on one accelerator, "
                f"which has {format_bytes(problem.capacity)}: {missing} bytes are missing, and there is no CPU "
                "(maxCPUs is 0). Try larger accelerators or a CPU.", missing_bytes=missing, device="fpga0")


def _no_split(problem: PartitionProblem, *, contiguous: bool, is_proven: bool) -> NoFeasiblePlan:
    """Return the error for memory that holds every class of nodes but not all of them."""
    sizes = problem.unit_size
    free = np.full(problem.num_accelerators, problem.capacity)
    left = []
    for unit in np.argsort(-sizes, kind="stable").tolist():
        index = int(np.argmax(free))
        if sizes[unit] <= free[index]:
            free[index] -= sizes[unit]
        else:
            left.append(unit)
    short = float(sum(sizes[unit] for unit in left))
    total = max(0.0, float(sizes.sum()) - problem.capacity * problem.num_accelerators)
    missing = int(np.ceil(total if total > 0 else max(short, 1.0)))
    which = "; ".join(_unit_nodes(problem, unit) for unit in left[:5])
    for_what = f", and there is no room for node {which}" if which else ""
    return NoFeasiblePlan(
        f"{problem.name}: the nodes need {format_bytes(float(sizes.sum()))}, and {problem.num_accelerators} "
        f"accelerators of {format_bytes(problem.capacity)} {'cannot' if is_proven else 'seem not to'} hold them"
        f"{' contiguously' if contiguous else ''}: {missing} bytes are missing{for_what}. Try more "
        "or larger accelerators, or a CPU.", missing_bytes=missing)
