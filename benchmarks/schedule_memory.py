"""Sections ``memory`` and ``random-memory`` of ``bench_schedule``: the smallest periods at whatever memory there is.

Random problems are held against a plain modulo model in CP-SAT (``reference_period``), bisected for one to three
micro-batches per period: start = offset + period x lap, no overlap round the clock, memory counted over laps.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from random import Random
from typing import Any

from ortools.sat.python import cp_model

from benchmarks.schedule_common import Options, at_most, solve
from benchmarks.sections import Row
from weft.search.schedule.bounds import period_bound
from weft.search.schedule.problem import Block, ScheduleProblem, load_problem
from weft.search.schedule.search import schedule

PERIODS = {"m-train-mem4": (7.0, 20.0), "x-train-mem3": (9.0, 20.0), "nn-train-mem3": (10.5, 60.0),
           "m8-train-mem10": (6.5, 60.0), "hetero-train-mem8": (17.5, 60.0)}
"""Per micro-batch, and in so many CPU seconds of the whole search."""
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
    ratios = []
    for seed in range(options.first, options.first + options.count):
        problem = tight_problem(seed)
        begin = time.process_time()
        result = schedule(problem, microbatches=16, effort=OWN_S)
        spent = time.process_time() - begin
        assert result.period is not None
        assert result.period_microbatches is not None
        assert result.period_bound is not None
        each = result.period / result.period_microbatches
        other, number = reference_period(problem, options.reference_s)
        ratios.append(each / other)
        yield Row(f"problem {seed}: {problem.num_devices} devices, {problem.num_blocks} blocks",
                  f"{each:.6g} each ({result.period_microbatches} per period, bound {result.period_bound:.6g}); "
                  f"{spent:.1f} CPU-s", f"{other:.6g} ({number} per period) in {options.reference_s:g} CPU-s",
                  at_most(each, 1.02 * other) and at_most(result.period_bound, other))
    never_worse = sum(at_most(ratio, 1.0) for ratio in ratios)
    yield Row("period / reference", f"not above in {never_worse} of {len(ratios)}; at most {max(ratios, default=1.0):.4f}",
              "not above in 95 %, at most 1.02", never_worse >= 0.95 * len(ratios) and max(ratios, default=1.0) <= 1.02)


def tight_problem(seed: int) -> ScheduleProblem:
    """Return a random pipeline of 4 to 8 devices: chains, ways back, branches, blocks on all devices; times 1 to 9.

    Memory is in units or bytes, from what one micro-batch takes upward.
    """
    rng = Random(f"tight {seed}")
    num_devices, kind = rng.randint(4, 8), rng.choice(["chain", "back", "branches", "wide", "double"])
    is_split, in_bytes, is_unequal = rng.random() < 0.3, rng.random() < 0.5, rng.random() < 0.75
    steps = _steps(rng, kind, num_devices)
    times = [float(rng.randint(1, 6)) if is_unequal else 1.0 for _ in steps]
    amounts = [0.0 if len(devices) > 1 and rng.random() < 0.5 else
               rng.randint(200, 2000) * 1e6 if in_bytes else 1.0 for devices, _ in steps]
    ratio, last = rng.choice([1, 2, 3]), len(steps) - 1
    blocks = [Block(name=f"f{index}", devices=devices, time=times[index], memory=amounts[index], after=after)
              for index, (devices, after) in enumerate(steps)]
    place = {index: len(steps) + last - index for index in range(len(steps))}
    for index in reversed(range(len(steps))):
        users = [other for other, (_, after) in enumerate(steps) if index in after]
        taken = times[index] * ratio if not is_unequal or rng.random() < 0.7 else float(rng.randint(1, 9))
        blocks.append(Block(name=f"b{index}", devices=steps[index][0], time=taken,
                            memory=0.0 if is_split else -amounts[index], after=(index, *(place[user] for user in users))))
    if is_split:
        blocks += [Block(name=f"w{index}", devices=devices, memory=-amounts[index], after=(place[index],),
                         time=times[index] + (rng.choice([0, 0, 1]) if is_unequal else 0))
                   for index, (devices, _) in enumerate(steps)]
    least = [sum(amount for amount, (devices, _) in zip(amounts, steps, strict=True) if device in devices)
             for device in range(num_devices)]
    factor, is_same = rng.choice([1, 1.3, 1.5, 2, 2, 3]), rng.random() < 0.5
    limits = [float(math.floor((max(least) if is_same else item) * factor)) or 1.0 for item in least]
    return ScheduleProblem(device_names=tuple(f"d{device}" for device in range(num_devices)),
                           device_memory=tuple(limits), blocks=tuple(blocks), free_at=rng.choice(["start", "end"]))


def _steps(rng: Random, kind: str, num_devices: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return devices and predecessors of the forward blocks."""
    alone, everyone = [(device,) for device in range(num_devices)], tuple(range(num_devices))
    half = num_devices // 2
    rows = [alone]
    if kind == "back":
        rows = [alone + alone[::-1]]
    elif kind == "double":
        rows = [alone, alone[::-1]]
    elif kind == "branches":
        rows = [alone[:half], alone[half:]]
    elif kind == "wide":
        cut = rng.randint(2, num_devices - 1)
        rows = [[everyone, *alone[:cut], *([everyone] if rng.random() < 0.5 else []), *alone[cut:],
                 *([everyone] if rng.random() < 0.5 else [])]]
    steps = []
    for row in rows:
        begin = len(steps)
        steps += [(devices, (begin + index - 1,) if index else ()) for index, devices in enumerate(row)]
    if kind == "branches":
        steps.append((everyone if rng.random() < 0.6 else (num_devices - 1,), (half - 1, num_devices - 1)))
    return steps


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
