"""Sections ``overlap``, ``offload`` and ``joint-oracle`` of ``bench_schedule``: pairs of blocks, and memory that leaves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.schedule_common import Options, at_most
from benchmarks.schedule_shapes import shape
from benchmarks.sections import Row
from tests.search.schedule.compare import Verdict, compare_joint
from tests.search.schedule.oracle_joint import TooLargeError
from tests.search.schedule.random_problems import random_joint_problem
from weft.search.schedule.named import named_schedule
from weft.search.schedule.pairing import with_pairs
from weft.search.schedule.problem import Block, Copy, Overlap, ScheduleProblem, with_memory
from weft.search.schedule.search import schedule

NUM_DEVICES = 8
PART = 0.8
"""How long a forward and a backward take at once, of their sum."""
ORACLE_EFFORT = 2.0


def overlap(options: Options) -> Iterator[Row]:
    """Yield DualPipe's and DualPipeV's settings: the search beside the named schedule, both with pairs."""
    for name, problem, number in (
            ("dualpipe", shape("x", NUM_DEVICES, memory=None, backward=2.0), 10),
            ("dualpipev", over_and_back(NUM_DEVICES, is_split=False), 20)):
        problem = _with_pairs(problem)
        named = named_schedule(name, problem, number)
        best = min(with_pairs(named), key=lambda item: item.makespan)
        held = {device: max(amount, best.peak_memory()[device]) for device, amount in named.peak_memory().items()}
        begin = time.process_time()
        result = schedule(with_memory(problem, held), microbatches=number, time_limit=options.time_limit)
        seconds = time.process_time() - begin
        assert result.period is not None
        assert result.period_microbatches is not None
        yield Row(f"{name}, {NUM_DEVICES} devices, 20 micro-batches, forward and backward at once {PART:g} of the sum",
                  f"makespan {result.makespan:.6g} (bound {result.makespan_bound:.6g}) with {len(result.schedule.pairs)} pairs; "
                  f"period {result.period / result.period_microbatches:.6g} (bound {result.period_bound:.6g}); "
                  f"{seconds:.1f} CPU-s", f"{best.makespan:.6g}, {name} with {len(best.pairs)} pairs, at its memory",
                  at_most(result.makespan, best.makespan))


def offload(options: Options) -> Iterator[Row]:
    """Yield idle time at a third of 1F1B's memory, with and without copies of half a forward."""
    number, memory = 2 * NUM_DEVICES, 2 * NUM_DEVICES / 3
    for early, what in ((0.0, "all memory is given back by W"), (0.5, "half of it by I, half by W")):
        idle = []
        for copy in (None, 0.5):
            problem = over_and_back(NUM_DEVICES, is_split=True, early=early, copy=copy)
            begin = time.process_time()
            result = schedule(with_memory(problem, dict.fromkeys(problem.device_names, memory)), microbatches=number,
                              time_limit=options.time_limit)
            idle.append(result.makespan - number * problem.device_work[0])
            seconds = time.process_time() - begin
        yield Row(f"over {NUM_DEVICES} devices and back, split backward, a third of 1F1B's memory, {number} micro-batches; {what}",
                  f"idle {idle[1]:.6g} with offload (makespan bound {result.makespan_bound:.6g}, {result.status}; "
                  f"{len(result.schedule.offloads)} of {len(problem.copies) * number} leave; {seconds:.1f} CPU-s)",
                  f"{idle[0]:.6g} without; at least 40 % less", idle[1] <= 0.6 * idle[0])


def joint_oracle(options: Options) -> Iterator[Row]:
    """Yield what brute force makes of the search on random problems with pairs and copies."""
    begin = time.process_time()
    verdicts = [verdict for seed in range(5000, 5000 + options.num_problems) for verdict in _judge(seed)]
    wrong = [verdict for verdict in verdicts if verdict.complaints]
    kinds = Counter(verdict.kind for verdict in verdicts)
    gap = max((verdict.gap for verdict in verdicts if verdict.kind == "feasible"), default=0.0)
    first = f"; problem {wrong[0].seed}: {wrong[0].complaints[0]}" if wrong else ""
    yield Row(f"{options.num_problems} random problems with pairs and copies against brute force: agree",
              f"{len(verdicts) - len(wrong)} of {len(verdicts)}{first}: {kinds['optimal']} claimed and optimal, "
              f"{kinds['feasible']} without claim (at most {gap:.2%} above the optimum), {kinds['infeasible']} infeasible with "
              f"the smallest memory named; {options.num_problems - len(verdicts)} too large for it; "
              f"{time.process_time() - begin:.0f} CPU-s", "all", not wrong and bool(verdicts))


def _judge(seed: int) -> Iterator[Verdict]:
    try:
        yield compare_joint(random_joint_problem(seed), lambda problem, number: schedule(
            problem, microbatches=number, effort=ORACLE_EFFORT))
    except TooLargeError:
        return


def _with_pairs(problem: ScheduleProblem) -> ScheduleProblem:
    """Return the problem in which every forward and every backward of a device may run at once."""
    forward = [block for block, item in enumerate(problem.blocks) if item.name.startswith("f")]
    backward = [block for block, item in enumerate(problem.blocks) if item.name.startswith("b")]
    return replace(problem, overlaps=tuple(
        Overlap(blocks=(one, other), time=PART * (problem.blocks[one].time + problem.blocks[other].time))
        for one in forward for other in backward if problem.blocks[one].devices == problem.blocks[other].devices))


def over_and_back(num_devices: int, *, is_split: bool, early: float = 0.0, copy: float | None = None) -> ScheduleProblem:
    """Return a pipeline whose stages go over the devices and back; forward, I and W take 1, a whole backward 2.

    ``early`` is the part of its memory that I gives back, ``copy`` the time of a copy to the host.
    """
    last = 2 * num_devices - 1
    devices = [(min(stage, last - stage),) for stage in range(last + 1)]
    blocks = [Block(name=f"f{stage}", devices=devices[stage], time=1.0, memory=1.0, after=(stage - 1,) if stage else ())
              for stage in range(last + 1)]
    for stage in reversed(range(last + 1)):
        blocks.append(Block(name=f"b{stage}", devices=devices[stage], time=1.0 if is_split else 2.0,
                            memory=-early if is_split else -1.0, after=(len(blocks) - 1,)))
    for stage in range(last + 1) if is_split else ():
        blocks.append(Block(name=f"w{stage}", devices=devices[stage], time=1.0, memory=early - 1.0,
                            after=(2 * last + 1 - stage,)))
    return ScheduleProblem(device_names=tuple(f"d{device}" for device in range(num_devices)),
                           device_memory=(None,) * num_devices, blocks=tuple(blocks),
                           copies=() if copy is None else tuple(Copy(block=stage, time=copy) for stage in range(last + 1)))
