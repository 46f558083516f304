"""Simulated annealing of cyclic orders: patterns of small period, for any number of micro-batches and any memory.

A state has for every task i of each of the K micro-batches of a period a place s(i, k), in periods: its lap is the
whole part, and by the fractions all tasks of a resource are in order, round the clock. No task has a place before one
that it depends on, so some period admits the order, and the smallest is the largest ratio length / laps of a cycle, as
in ``cyclic`` (``_evaluate``). A move takes a task, or a task with all before or after it, to another place, and takes
along what would be passed (``_move``). What is minimised is

    period + penalty * (how often, and by how much, memory is exceeded) + a little * (time that a micro-batch takes)

where the penalty rises while nothing fits and falls while all does, so that the search stays at the edge of memory.
Short micro-batches make warm-ups and cool-downs short. A step is a few microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64, Bool
from weft.search.common.budget import Budget
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import TOLERANCE
from weft.search.schedule.tuning import TUNING


class Tables(NamedTuple):
    """What compiled code needs of a problem; times are in units of the mean."""

    times: F64
    first_edge: I64
    """Edges out of task t: ``first_edge[t] .. first_edge[t + 1]`` of ``targets`` and ``delays``."""
    targets: I64
    delays: F64
    first_resource: I64
    resources: I64
    memory: F64
    """By task, on each of its devices."""
    limits: F64
    """By resource; infinite for none."""
    units: F64
    """By resource: what a task takes, on average."""
    is_after: Bool
    """[task, task]: whether the first depends on the second, by whatever path."""
    depth: I64
    """Tasks on the longest path to each."""
    bound: float
    """No period is smaller, per micro-batch."""

    @staticmethod
    def of(problem: ScheduleProblem, bound: float) -> Tables:
        """Return the tables of a problem; no period per micro-batch is below the bound."""
        edges = [edge for row in problem.successors for edge in row]
        num_tasks, num_resources = problem.num_tasks, len(problem.resource_names)
        mean = float(np.mean(problem.task_times)) or 1.0
        memory = np.array([problem.memory_of(task) for task in range(num_tasks)], dtype=np.float64)
        limits, units = np.full(num_resources, np.inf), np.ones(num_resources)
        for device, limit in enumerate(problem.device_memory):
            amounts = memory[list(problem.resource_tasks[device])]
            if limit is not None and amounts.any() and abs(amounts.sum()) <= 1e-9 * np.abs(amounts).max():
                limits[device] = limit + TOLERANCE * max(1.0, abs(limit))
                units[device] = amounts[amounts > 0].mean()
        is_after, depth = np.zeros((num_tasks, num_tasks), dtype=np.bool_), np.zeros(num_tasks, dtype=np.int64)
        for task in problem.topological:
            for edge in problem.predecessors[task]:
                is_after[task] |= is_after[edge.source]
                is_after[task, edge.source] = True
                depth[task] = max(depth[task], depth[edge.source] + 1)
        return Tables(
            times=np.array(problem.task_times, dtype=np.float64) / mean,
            first_edge=_starts([len(row) for row in problem.successors]),
            targets=np.array([edge.target for edge in edges], dtype=np.int64),
            delays=np.array([edge.delay for edge in edges], dtype=np.float64) / mean,
            first_resource=_starts([len(row) for row in problem.task_resources]),
            resources=np.array([item for row in problem.task_resources for item in row], dtype=np.int64),
            memory=memory, limits=limits, units=units, is_after=is_after, depth=depth,
            bound=bound / mean)


def _starts(sizes: list[int]) -> I64:
    return np.cumsum([0, *sizes], dtype=np.int64)


class Annealer:
    """Anneals cyclic orders of one problem; the same for a seed, whatever the machine."""

    def __init__(self, problem: ScheduleProblem, bound: float, seed: int) -> None:
        self.tables = Tables.of(problem, bound)
        self.rng = np.random.default_rng(seed)

    def run(self, places: F64, effort: float, budget: Budget) -> F64 | None:
        """Return the places [tasks, K] of the smallest period found from these, in periods; None if none fits memory.

        It ends at the bound, or with the effort, which is taken from the budget.
        """
        state, best = places.ravel().copy(), np.zeros(places.size)
        number = places.shape[1]
        seconds = TUNING.seconds_per_place * len(self.tables.resources) * number
        steps = int(min(effort, budget.effort) / seconds)
        value, penalty, done = np.inf, TUNING.anneal_penalty, 0
        while done < steps and value > number * self.tables.bound * (1 + 1e-9) and not budget.is_spent:
            part = min(steps - done, max(1, int(TUNING.anneal_part_s / seconds)))
            hot, cold = (TUNING.anneal_hot * (TUNING.anneal_cold / TUNING.anneal_hot) ** (at / steps)
                         for at in (done, done + part))
            value, penalty, used = _anneal(self.tables, number, state, best, value, part, hot, cold, penalty,
                                           TUNING.anneal_haste, int(self.rng.integers(1 << 31)))
            done += part
            budget.effort -= used * seconds
        return best.reshape(places.shape) if np.isfinite(value) else None


@compiled
def _anneal(tables: Tables, number: int, state: F64, best: F64, value: float, steps: int, hot: float, cold: float,
            penalty: float, haste: float, seed: int) -> tuple[float, float, int]:
    """Change the state step by step, and ``best`` where a period is below ``value``.

    Return the value of ``best``, the penalty, and the steps taken.
    """
    np.random.seed(seed)
    num = len(state)
    _shift(number, state)
    order, starts = np.arange(num), np.empty(num)
    _sort(tables, number, order, state)
    period, excess = _evaluate(tables, number, order, state, np.inf, starts)
    span, shortest = _span(number, state, period), np.inf
    trial, places = order.copy(), state.copy()
    floor, num_fitting = 0.3 * penalty, 0
    for step in range(steps):
        places[:], trial[:] = state, order
        _move(tables, number, places)
        _sort(tables, number, trial, places)
        temperature = hot * (cold / hot) ** (step / steps)
        limit = period + penalty * excess + haste * span - temperature * np.log(1.0 - np.random.random())
        shorter, over = _evaluate(tables, number, trial, places, limit, starts)
        if shorter + penalty * over > limit:
            length = np.inf
        else:
            places[:] = np.floor(places) + starts / shorter
            length = _span(number, places, shorter)
        if shorter + penalty * over + haste * length <= limit:
            period, excess, span = shorter, over, length
            state[:] = places
            order[:] = trial
            _sort(tables, number, order, state)
            if excess == 0 and (period < value * (1 - 1e-9) or (period < value * (1 + 1e-9) and span < shortest)):
                value, shortest = min(value, period), span
                best[:] = state
                if value <= number * tables.bound * (1 + 1e-9):
                    steps = step + 1
                    break
        num_fitting += excess == 0
        if step % 50 == 49:
            if num_fitting < 5:
                penalty *= 1.3
            elif num_fitting > 25:
                penalty = max(penalty / 1.3, floor)
            num_fitting = 0
    _shift(number, best)
    return value, penalty, steps


@compiled
def _shift(number: int, places: F64) -> None:
    """Let every micro-batch begin in lap 0: all of its tasks may be moved by whole periods."""
    for copy in range(number):
        places[copy::number] -= np.floor(places[copy::number].min())


@compiled
def _span(number: int, places: F64, period: float) -> float:
    """Return the time from the first start of a micro-batch to its last, on average."""
    total = 0.0
    for copy in range(number):
        total += places[copy::number].max() - places[copy::number].min()
    return total * period / number


@compiled
def _move(tables: Tables, number: int, places: F64) -> None:
    """Take a task to another place, with what would be passed or with all before or after it."""
    num_tasks = len(tables.times)
    task, copy = np.random.randint(0, num_tasks), np.random.randint(0, number)
    step = np.random.normal() * 0.1 * 3.0 ** np.random.randint(0, 3)
    together = np.random.random() < 0.15
    to = places[task * number + copy] + step
    places[task * number + copy] = to
    for other in range(num_tasks):
        if tables.is_after[task, other] if step < 0 else tables.is_after[other, task]:
            node = other * number + copy
            beside = to + 1e-6 * (tables.depth[other] - tables.depth[task])
            if together:
                places[node] += step
            elif places[node] > beside if step < 0 else places[node] < beside:
                places[node] = beside


@compiled
def _sort(tables: Tables, number: int, order: I64, places: F64) -> None:
    """Put the nodes in order round the clock; they nearly are."""
    for index in range(1, len(order)):
        node = order[index]
        part = places[node] - np.floor(places[node])
        while index > 0:
            other = order[index - 1]
            before = places[other] - np.floor(places[other])
            if before < part or (before == part and tables.depth[other // number] <= tables.depth[node // number]):
                break
            order[index] = other
            index -= 1
        order[index] = node


@compiled
def _evaluate(tables: Tables, number: int, order: I64, places: F64, limit: float, starts: F64) -> tuple[float, float]:
    """Return the smallest period, infinity if it is above the limit, and by how much memory is exceeded.

    ``starts`` become the earliest, in the lap of each node.
    """
    num, num_resources = len(order), len(tables.limits)
    level = np.zeros(num_resources)
    lap = np.floor(places).astype(np.int64)
    for node in range(num):
        task = node // number
        for item in range(tables.first_resource[task], tables.first_resource[task + 1]):
            level[tables.resources[item]] -= tables.memory[task] * lap[node]
    first, last = np.full(num_resources, -1), np.full(num_resources, -1)
    following = np.empty(len(tables.resources) * number, dtype=np.int64)
    turns = np.zeros(len(following), dtype=np.int64)
    excess = 0.0
    for node in order:
        task, copy = node // number, node % number
        for item in range(tables.first_resource[task], tables.first_resource[task + 1]):
            resource = tables.resources[item]
            if last[resource] >= 0:
                following[last[resource]] = node
            else:
                first[resource] = node
            last[resource] = item * number + copy
            level[resource] += tables.memory[task]
            if tables.memory[task] > 0 and level[resource] > tables.limits[resource]:
                excess += 0.25 + (level[resource] - tables.limits[resource]) / tables.units[resource]
    for resource in range(num_resources):
        if last[resource] >= 0:
            following[last[resource]] = first[resource]
            turns[last[resource]] = 1
    return _smallest(tables, number, order, lap, following, turns, limit, starts), excess


@compiled
def _smallest(tables: Tables, number: int, order: I64, lap: I64, following: I64, turns: I64, limit: float,
              starts: F64) -> float:
    """Return the largest ratio length / laps of a cycle (or the bound), infinity above the limit; set the starts.

    Longest paths; a cycle that gains gives the next period. ``following`` and ``turns``: for each resource of a node
    the node that is next on it, and whether that is round the clock.
    """
    num, period = len(order), number * tables.bound
    before, length, laps = np.empty(num, dtype=np.int64), np.zeros(num), np.zeros(num, dtype=np.int64)
    seen = np.empty(num, dtype=np.int64)
    before[:] = -1
    starts[:] = 0.0
    for _ in range(20 * num + 20):
        if period > limit:
            return np.inf
        has_changed = False
        for node in order:
            task, copy = node // number, node % number
            for item in range(tables.first_resource[task], tables.first_resource[task + 1]):
                place = item * number + copy
                other, at = following[place], starts[node] + tables.times[task] - period * turns[place]
                if at > starts[other] + 1e-9 * period:
                    starts[other], before[other], length[other] = at, node, tables.times[task]
                    laps[other], has_changed = turns[place], True
            for edge in range(tables.first_edge[task], tables.first_edge[task + 1]):
                other = tables.targets[edge] * number + copy
                far = tables.times[task] + tables.delays[edge]
                at = starts[node] + far - period * (lap[other] - lap[node])
                if at > starts[other] + 1e-9 * period:
                    starts[other], before[other], length[other] = at, node, far
                    laps[other], has_changed = lap[other] - lap[node], True
        if not has_changed:
            return period
        longest = period
        seen[:] = -1
        for begin in range(num):
            node = begin
            while seen[node] < 0 and before[node] >= 0:
                seen[node] = begin
                node = before[node]
            if seen[node] == begin and before[node] >= 0:
                total, wraps, other = length[node], laps[node], before[node]
                while other != node:
                    total, wraps, other = total + length[other], wraps + laps[other], before[other]
                if wraps <= 0:
                    return np.inf
                longest = max(longest, total / wraps)
            elif seen[node] < 0:
                seen[node] = begin
        if longest > period:
            period = longest
            before[:] = -1
            starts[:] = 0.0
    return np.inf
