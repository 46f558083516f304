"""The search for the least latency of a dnn-partitioning problem: intervals, paths, annealing, CP-SAT."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.model.graph import F64, I64
from weft.search.common.budget import Budget, OutOfTime, cut_short
from weft.search.place.partition_latency import block_orders, interval_sets, latency_graph
from weft.search.place.partition_latency_exact import improve_or_prove
from weft.search.place.partition_latency_kernel import Graph, Scratch, anneal, excess, latency
from weft.search.place.partition_path import cover, cover_s, times_in_sets, weights_for_paths
from weft.search.place.partition_path_kernel import longest_path
from weft.search.place.partition_polish_kernel import polish
from weft.search.place.partition_problem import PartitionProblem

HEAT = (0.003, 0.0003, 0.01, 0.001, 0.03)
"""Starting temperatures in turn, in parts of the latency."""
COLD = 1e-7
PIECE_S = 0.4
"""Effort between looks at the clock."""
FIRST_S = 0.01
"""Effort of the first runs at most, for each unit: small problems are proven sooner than annealed."""
POLISH_SHARE = 0.02
"""Small changes take no more of the effort that is left than this."""
RANDOM_PATHS = 20
PATH_SHARE = 0.1
"""A path, or all random ones of a turn, take no more of the effort that is left than this."""
PROVEN = 1e-6
"""Relative: a bound so close to the value is a proof; whole numbers are no finer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundSets:
    """The best sets, and what is known about them."""

    where: I64
    """[units] 0 for CPUs, sets from 1."""
    value: float
    bound: float


def minimise_latency(problem: PartitionProblem, *, budget: Budget, seed: int) -> FoundSets:
    """Return the best sets found."""
    search = _Search(latency_graph(problem), budget, seed)
    try:
        search.start()
        with cut_short(budget.deadline):
            _improve(search, problem.num_units)
    except OutOfTime:
        budget.report(f"time limit: latency {search.value:.6g}, bound {search.bound:.6g}")
    except KeyboardInterrupt:
        budget.is_interrupted = True
    return search.found()


def _improve(search: _Search, num_units: int) -> None:
    """Improve what the search began with, and its bound, until the effort is spent."""
    budget, effort = search.budget, search.budget.effort
    search.anneal_for(min(0.05 * effort, FIRST_S * num_units))
    search.follow_paths(RANDOM_PATHS)
    search.prove(0.1 * effort, linearization=0)
    search.anneal_for(0.35 * effort)
    search.follow_paths(RANDOM_PATHS)
    search.prove(0.3 * effort, linearization=1)
    search.anneal_for(budget.effort)
    search.follow_paths(RANDOM_PATHS)


class _Search:
    def __init__(self, g: Graph, budget: Budget, seed: int) -> None:
        self.g, self.budget, self.seed = g, budget, seed
        self.scratch = Scratch.of(g)
        self.seconds = 4e-7 + 8e-9 * (len(g.cpu_s) + len(g.targets)) + 1e-8 * g.num_sets
        self.where = np.zeros(len(g.can_set), dtype=np.int64)
        self.value = latency(g, self.where, self.scratch)
        self.bound = path_bound(g)
        self.starts = [self.where]
        self.paths: set[bytes] = set()
        self.num_runs = 0

    @property
    def is_done(self) -> bool:
        return self.budget.is_spent or self.bound >= self.value * (1 - PROVEN)

    def offer(self, where: I64) -> None:
        """Take the sets if they are allowed and, after small changes, better."""
        where = where.copy()
        latency(self.g, where, self.scratch)
        if excess(self.g, self.scratch) > 0:
            return
        limit = int(POLISH_SHARE * self.budget.effort / self.seconds)
        self.budget.effort -= polish(self.g, where, self.scratch, limit) * self.seconds
        value = latency(self.g, where, self.scratch)
        if value < self.value * (1 - 1e-12):
            self.where, self.value = where, value
            self.budget.report(f"latency {value:.6g}, bound {self.bound:.6g}")

    def start(self) -> None:
        """Take the best of the intervals of a few orders."""
        if self.g.num_sets == 0:
            self.bound = self.value
            return
        for blocks in block_orders(self.g):
            self.starts.append(interval_sets(self.g, blocks))
            self.offer(self.starts[-1])
        for weights in weights_for_paths(self.g):
            self.follow(weights)
        self.follow_paths(0)

    def follow_paths(self, num_random: int) -> None:
        """Take bounds and sets from the longest path by the times in the best sets, and by some near them."""
        rng = np.random.default_rng(self.seed + self.num_runs)
        times_s = times_in_sets(self.g, self.where)
        num_random = min(num_random, int(PATH_SHARE * self.budget.effort / cover_s(self.g)))
        for index in range(1 + num_random):
            self.follow(times_s * rng.uniform(0.5, 1.0, size=len(times_s)) if index else times_s)

    def follow(self, weights: F64) -> None:
        """Take the bound and the sets of the path with the largest sum of weights."""
        path = longest_path(self.g, weights)
        seconds = cover_s(self.g)
        if self.is_done or path.tobytes() in self.paths or seconds > PATH_SHARE * self.budget.effort:
            return
        self.paths.add(path.tobytes())
        self.budget.effort -= seconds
        found = cover(self.g, path)
        self.bound = max(self.bound, min(found.bound, self.value))
        if not any((found.where == start).all() for start in self.starts):
            self.starts.append(found.where)
            self.offer(found.where)

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
        heat = HEAT[self.num_runs % len(HEAT)]
        num_pieces = max(1, round(steps * self.seconds / PIECE_S))
        hot, ratio = heat * max(self.value, 1e-300), (COLD / heat) ** (1 / num_pieces)
        self.num_runs += 1
        now = start.copy()
        for piece in range(num_pieces):
            if self.is_done:
                return
            found, value = anneal(self.g, now, steps // num_pieces, hot, hot * ratio,
                                  (1000 * self.seed + self.num_runs) * 1000 + piece)
            hot *= ratio
            self.budget.effort -= steps // num_pieces * self.seconds
            if value < self.value * (1 - 1e-12) or (np.isfinite(value) and piece == num_pieces - 1):
                self.offer(found)

    def prove(self, effort: float, *, linearization: int) -> None:
        """Let CP-SAT improve the best sets or raise the bound."""
        if self.is_done:
            return
        found = improve_or_prove(self.g, self.where, self.value, budget=self.budget, effort=effort, seed=self.seed,
                                 linearization=linearization)
        self.bound = max(self.bound, min(found.bound, self.value))
        if found.where is not None:
            self.offer(found.where)

    def found(self) -> FoundSets:
        """Return the best, with the bound equal to the value where it is a proof."""
        is_proven = self.bound >= self.value * (1 - PROVEN)
        return FoundSets(where=self.where, value=self.value, bound=self.value if is_proven else self.bound)


def path_bound(g: Graph) -> float:
    """Return the longest path with every node where it is fastest; a set's load is at least its nodes' times."""
    ends = np.zeros(len(g.cpu_s))
    fastest = np.where((g.can_set[g.unit] > 0) & (g.num_sets > 0), np.minimum(g.cpu_s, g.fpga_s), g.cpu_s)
    for node in range(len(ends)):
        ends[node] += fastest[node]
        for target in g.targets[g.target_start[node] : g.target_start[node + 1]]:
            ends[target] = max(ends[target], ends[node])
    return float(ends.max(initial=0.0))
