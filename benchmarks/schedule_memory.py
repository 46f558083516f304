"""Sections ``memory`` and ``random-memory`` of ``bench_schedule``: the smallest periods at whatever memory there is.

Random problems are held against a plain modulo model in CP-SAT (``reference_period``), bisected for one to three
micro-batches per period: start = offset + period x lap, no overlap round the clock, memory counted over laps.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from ortools.sat.python import cp_model

from benchmarks.schedule_common import SLACK, Options, at_most, solve
from benchmarks.sections import Row
from benchmarks.tight_problems import tight_problem, wide_problem
from weft.search.schedule.bounds import period_bound
from weft.search.schedule.problem import ScheduleProblem, load_problem
from weft.search.schedule.search import schedule

PERIODS = {"m-train-mem4": (7.0, 20.0), "x-train-mem3": (9.0, 20.0), "nn-train-mem3": (10.5, 60.0),
           "m8-train-mem10": (6.5, 60.0), "hetero-train-mem8": (17.5, 60.0)}
"""Per micro-batch, and in so many CPU seconds of the whole search."""
KINDS = {"pipelines": tight_problem, "graphs": wide_problem}
MAX_LAPS = 40
MAX_NUMBER = 3
"""Micro-batches per period of the reference."""
SECONDS_PER_UNIT = 1.5
"""CPU seconds of a unit of CP-SAT's deterministic time, about."""
OWN_S = 20.0


def memory(options: Options) -> Iterator[Row]:
    """Yield periods at less memory than 1F1B needs, and makespans beside what the period makes of them."""
    for name, (wanted, limit) in PERIODS.items():
        problem = load_problem(options.folder / f"{name}.json")
        path = max(at + time for at, time in zip(problem.longest_paths(), problem.task_times, strict=True))
        for number in (16, 64):
            result = solve(options.folder / f"{name}.json", number, options.time_limit)
            each = result["period"] / result["period_microbatches"]
            makespan, goal = result["makespan"], 1.03 * (number * each + path)
            yield Row(f"{name}, N={number}",
                      f"period {result['period']:.6g} for {result['period_microbatches']}, {each:.6g} each (bound "
                      f"{result['period_bound']:.6g}); makespan {makespan:.6g} (bound {result['makespan_bound']:.6g}); "
                      f"{result['cpu_s']:.1f} CPU-s", f"{wanted:g} each, makespan {goal:.5g} (3 % above N periods and one "
                      f"path), {limit:g} CPU-s",
                      at_most(each, wanted) and at_most(makespan, goal) and result["cpu_s"] <= limit, result)


def random_memory(options: Options) -> Iterator[Row]:
    """Yield random problems with little memory, each beside the reference."""
    seeds = range(options.first, options.first + options.count)
    with ProcessPoolExecutor(options.workers) as pool:
        compared = list(pool.map(_compare, itertools.repeat(options.kind), seeds, itertools.repeat(options.reference_s)))
    yield from (row for row, _, _ in compared)
    ratios = [ratio for _, ratio, _ in compared]
    never_worse, better = sum(at_most(ratio, 1.0) for ratio in ratios), sum(ratio < 1 - SLACK for ratio in ratios)
    yield Row("period / reference", f"not above in {never_worse} of {len(ratios)}, below in {better}; at most "
              f"{max(ratios, default=1.0):.4f}; {sum(proven for _, _, proven in compared)} proven optimal for any number",
              "not above in 95 %, at most 1.02", never_worse >= 0.95 * len(ratios) and max(ratios, default=1.0) <= 1.02)


def _compare(kind: str, seed: int, reference_s: float) -> tuple[Row, float, bool]:
    """Return what becomes of a problem, its period over the reference's, and whether it is proven."""
    problem = KINDS[kind](seed)
    begin = time.process_time()
    result = schedule(problem, microbatches=16, effort=OWN_S)
    spent = time.process_time() - begin
    assert result.period is not None
    assert result.period_microbatches is not None
    assert result.period_bound is not None
    each = result.period / result.period_microbatches
    other, number = reference_period(problem, reference_s)
    row = Row(f"problem {seed}: {problem.num_devices} devices, {problem.num_blocks} blocks",
              f"{each:.6g} each ({result.period_microbatches} per period, bound {result.period_bound:.6g}); "
              f"{spent:.1f} CPU-s", f"{other:.6g} ({number} per period) in {reference_s:g} CPU-s",
              at_most(each, 1.02 * other) and at_most(result.period_bound, other))
    return row, each / other, at_most(each, result.period_bound)


def reference_period(problem: ScheduleProblem, seconds: float) -> tuple[float, int]:
    """Return the smallest period per micro-batch that the plain model finds, and its micro-batches per period."""
    bound, alone = period_bound(problem), sum(problem.task_times)
    assert bound is not None, "all is released"
    best, best_number = alone, 1
    for number in range(1, MAX_NUMBER + 1):
        low, high = math.ceil(bound * number - 1e-6), math.ceil(best * number - 1e-6)
        left = seconds / MAX_NUMBER
        while low < high and left > 0:
            period = (low + high) // 2
            begin = time.process_time()
            if _is_feasible(problem, number, period, left / 2):
                best, best_number, high = period / number, number, period
            else:
                low = period + 1
            left -= time.process_time() - begin
    return best, best_number


def _is_feasible(problem: ScheduleProblem, number: int, period: int, seconds: float) -> bool:
    """Return whether the plain model finds a steady state of so many micro-batches in this period."""
    model = cp_model.CpModel()
    nodes = list(itertools.product(range(problem.num_blocks), range(number)))
    times = [round(block.time) for block in problem.blocks]
    offset = {node: model.new_int_var(0, period - 1, "") for node in nodes}
    lap = {node: model.new_int_var(0, MAX_LAPS, "") for node in nodes}
    for (block, copy), before in ((node, before) for node in nodes for before in problem.blocks[node[0]].after):
        source = before, copy
        model.add(offset[block, copy] + period * lap[block, copy] >= offset[source] + period * lap[source] + times[before])
    model.add(lap[nodes[0]] == 0)
    for device, limit in enumerate(problem.device_memory):
        mine = [node for node in nodes if device in problem.blocks[node[0]].devices]
        model.add_no_overlap([model.new_fixed_size_interval_var(offset[node] + shift, times[node[0]], "")
                              for node in mine for shift in (0, period)])
        amounts = {node: round(problem.blocks[node[0]].memory) for node in mine}
        for taker in mine if limit is not None else ():
            if amounts[taker] > 0:
                held: Any = 0
                for node in mine:
                    is_begun = model.new_bool_var("")  # a device runs one block at a time: begun is as good as ended
                    model.add(offset[node] <= offset[taker]).only_enforce_if(is_begun)
                    model.add(offset[node] > offset[taker]).only_enforce_if(~is_begun)
                    held += amounts[node] * (is_begun - lap[node])
                model.add(held <= math.floor(limit))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = seconds / SECONDS_PER_UNIT
    return solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
