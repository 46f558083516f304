"""Sections ``oracle``, ``unequal`` and ``infeasible`` of ``bench_schedule``: random problems, and too little memory."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks.schedule_common import SLACK, Options
from benchmarks.sections import Row
from tests.search.schedule.compare import Verdict, compare
from tests.search.schedule.random_problems import RandomProblem, random_problem
from weft.base.errors import NoFeasiblePlan
from weft.search.schedule.named import named_schedule, named_schedules
from weft.search.schedule.problem import Block, ScheduleProblem, Transfer, load_problem, save_problem, with_memory
from weft.search.schedule.schedule import ScheduleResult, check_schedule, replay
from weft.search.schedule.search import schedule

SIZES = (12, 12, 16, 20)
"""Tasks over all micro-batches, at most, of the random problems in turn."""
AIM = 0.95
"""For the mean of search / best named."""
SMALL_LIMIT, LARGE_LIMIT = 5.0, 10.0
"""Seconds for one search in ``oracle``, and in ``infeasible``, where none are given."""


def search(problem: ScheduleProblem, num_microbatches: int, time_limit: float) -> ScheduleResult:
    return schedule(problem, microbatches=num_microbatches, time_limit=time_limit, progress=lambda line: None)


def oracle(options: Options) -> Iterator[Row]:
    """Yield what brute force makes of the search on random problems."""
    before = time.process_time()
    limit = SMALL_LIMIT if options.time_limit is None else options.time_limit
    verdicts = [_judge(random_problem(5000 + number, max_instances=SIZES[number % len(SIZES)]), limit)
                for number in range(options.num_problems)]
    seconds = time.process_time() - before
    kinds = Counter(verdict.kind for verdict in verdicts)
    wrong = [verdict for verdict in verdicts if verdict.complaints]
    yield Row(f"{len(verdicts)} random problems of up to {max(SIZES)} tasks against brute force: agree",
              f"{len(verdicts) - len(wrong)} of {len(verdicts)}" + _first(wrong), "all of at least 300",
              not wrong and len(verdicts) >= 300)
    gaps = [verdict.gap for verdict in verdicts if verdict.kind == "feasible"]
    yield Row("of these", f"{kinds['optimal']} claimed and optimal, {kinds['feasible']} without claim "
              f"(at most {max(gaps, default=0.0):.2%} above the optimum), {kinds['infeasible']} infeasible with the smallest "
              f"memory named; {sum(verdict.period_checked for verdict in verdicts)} period bounds against all small steady "
              "states", "no reference")
    yield Row("CPU time, search and brute force", f"{seconds:.0f} CPU-s", "no reference")


def _judge(case: RandomProblem, time_limit: float) -> Verdict:
    try:
        return compare(case, lambda problem, number: search(problem, number, time_limit))
    except Exception as error:  # a search that breaks is a finding like any other; the rest is still wanted
        return Verdict(case.seed, "broken", [repr(error)])


def _first(wrong: list[Verdict]) -> str:
    return "".join(f"\n         problem {verdict.seed}: {verdict.complaints[0]}" for verdict in wrong[:10])


def unequal_pipeline(rng: Random, num_stages: int, *, memory: float, split: bool, transfers: str) -> ScheduleProblem:
    """Return a pipeline whose stages take 50 to 150 % of the mean: forward 1, backward 2 or input 1 and weight 1.

    ``transfers``: ``none``; ``delay``, a tenth of a forward; ``link``, as much on the link of two neighbours.
    """
    factors = [rng.uniform(0.5, 1.5) for _ in range(num_stages)]
    stages = range(num_stages)
    forward = [Block(name=f"f{stage}", devices=(stage,), time=factors[stage], memory=1.0,
                     after=(stage - 1,) if stage else ()) for stage in stages]
    backward = [Block(name=f"b{stage}", devices=(stage,), time=factors[stage] * (1 if split else 2),
                      memory=0.0 if split else -1.0,
                      after=(stage,) if stage == num_stages - 1 else (stage, 2 * num_stages - 2 - stage))
                for stage in reversed(stages)]
    weights = [Block(name=f"w{stage}", devices=(stage,), time=factors[stage], memory=-1.0,
                     after=(2 * num_stages - 1 - stage,)) for stage in stages] if split else []
    moves = [(stage, stage + 1, stage) for stage in stages[:-1]]
    moves += [(2 * num_stages - 2 - stage, 2 * num_stages - 1 - stage, stage) for stage in stages[:-1]]
    return ScheduleProblem(
        device_names=tuple(f"d{stage}" for stage in stages), device_memory=(memory,) * num_stages, free_at="end",
        blocks=(*forward, *backward, *weights),
        transfers=() if transfers == "none" else tuple(
            Transfer(source=source, target=target, time=0.1 * rng.uniform(0.5, 1.5),
                     link=f"d{stage}-d{stage + 1}" if transfers == "link" else None) for source, target, stage in moves))


def best_named(problem: ScheduleProblem, num_microbatches: int) -> float | None:
    """Return the shortest makespan of the named schedules that fit the memory, or None where none does."""
    return min((item.makespan for item in named_schedules(problem, num_microbatches).values()), default=None)


def best_in_groups(problem: ScheduleProblem, num_microbatches: int) -> float:
    """Return the shortest makespan of named schedules of so few micro-batches that they fit, one group after the other.

    Groups overlap: their orders are joined and played as early as possible. Every size of group is tried. This is what
    remains of the named schedules where memory is short. (1F1B with fewer micro-batches in flight is no measure: it
    still takes backward and forward in turn, so each stage waits for a forward that the first stage cannot yet begin.
    On 8 equal stages, 16 micro-batches and half the memory it takes 213, groups take 132, the search 105.)
    """
    makespans = []
    for size in range(1, num_microbatches + 1):
        fitting = named_schedules(problem, size)
        if not fitting:  # nor will more
            break
        for name, whole in fitting.items():
            rest = num_microbatches % size
            parts = [whole.orders()] * (num_microbatches // size)
            parts += [named_schedule(name, problem, rest).orders()] if rest else []
            orders = [[(task, index + size * number) for number, part in enumerate(parts) for task, index in part[device]]
                      for device in range(problem.num_devices)]
            joined = replay(problem, num_microbatches, orders)
            check_schedule(joined)
            makespans.append(joined.makespan)
    return min(makespans)


def unequal(options: Options) -> Iterator[Row]:
    """Yield how the search compares on pipelines of unequal stages: with named schedules, and with groups of them."""
    for full in (True, False):
        ratios: list[float] = []
        bounds: list[float] = []
        against = "best named" if full else "best named in groups (none fits whole)"
        for num_stages, transfers, split in itertools.product((4, 8), ("none", "delay", "link"), (False, True)):
            pairs = [_ratios(Random(f"{num_stages} {transfers} {full} {split} {sample}"), num_stages, transfers, full, split,
                             options.time_limit) for sample in range(options.num_samples)]
            found = [ratio for ratio, _ in pairs]
            ratios += found
            bounds += [bound for _, bound in pairs]
            yield Row(f"{num_stages} stages, transfers {transfers}, {'all' if full else 'half'} of 1F1B's memory, "
                      f"{'split' if split else 'whole'} backward, search / {against}", _spread(found),
                      "never above 1" if full else "no reference", max(found) <= 1 + SLACK if full else None)
        mean = statistics.fmean(ratios)
        missed = f"; aim {AIM:g} NOT reached" if full and mean > AIM else ""
        yield Row(f"all with {'all' if full else 'half'} of 1F1B's memory: search / {against}", _spread(ratios) + missed,
                  f"never above 1; mean below 1, aim {AIM:g}" if full else "no reference",
                  max(ratios) <= 1 + SLACK and mean < 1 if full else None)
        yield Row(f"the same problems: proven bound / {against}", _spread(bounds), "no schedule can be below it")


def _ratios(rng: Random, num_stages: int, transfers: str, full: bool, split: bool,
            time_limit: float | None) -> tuple[float, float]:
    """Return the search's makespan, and its bound, over the best of the named schedules."""
    memory = num_stages if full else num_stages // 2
    problem = unequal_pipeline(rng, num_stages, memory=memory, split=split, transfers=transfers)
    number = 2 * num_stages
    named = best_named(problem, number)
    assert (named is not None) == full, "which schedules fit decides what the row is called"
    result = schedule(problem, microbatches=number, time_limit=time_limit)
    check_schedule(result.schedule)
    reference = best_in_groups(problem, number) if named is None else named
    return result.makespan / reference, result.makespan_bound / reference


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return (f"min {min(values):.3f}, quartiles {low:.3f} {middle:.3f} {high:.3f}, max {max(values):.3f}, "
            f"mean {statistics.fmean(values):.3f} ({len(values)} problems)")


def infeasible(options: Options) -> Iterator[Row]:
    """Yield exit code and named memory for every training problem with too little on one device, and on all."""
    for path in sorted(options.folder.glob("*.json")):
        problem = load_problem(path)
        if problem.device_memory[0] is not None:
            small = tuple(0.75 * max(block.memory for block in problem.blocks if device in block.devices)
                          for device in range(problem.num_devices))
            yield _infeasible_row(path.stem, with_memory(problem, {problem.device_names[-1]: small[-1]}), "one device")
            yield _infeasible_row(path.stem, replace(problem, device_memory=small), "all devices")


def _infeasible_row(name: str, problem: ScheduleProblem, which: str) -> Row:
    code, message = _command_line(problem, 4)
    raised, named = problem, []
    for _ in problem.device_names:
        try:
            search(raised, 4, LARGE_LIMIT)
            break
        except NoFeasiblePlan as error:
            named.append((str(error.device), float(error.needed)))
            raised = with_memory(raised, dict(named))
    works = _command_line(raised, 4)[0] == 0
    less = with_memory(raised, {named[-1][0]: named[-1][1] * (1 - 1e-3)}) if named else raised
    is_least = _command_line(less, 4)[0] == 3
    is_named = bool(named) and named[0][0] in message and f"{named[0][1]:.6g}" in message
    return Row(f"{name}, too little memory on {which}",
               f"exit {code}; named: {', '.join(f'{device} {needed:.6g}' for device, needed in named)}"
               f"{'' if is_named else ' (NOT in the message)'}; with these it {'works' if works else 'DOES NOT work'}, with a "
               f"little less {'not' if is_least else 'TOO'}", "exit 3, the value named works", code == 3 and works and is_least
               and is_named)


def _command_line(problem: ScheduleProblem, num_microbatches: int) -> tuple[int, str]:
    """Return exit code and messages of ``weft schedule``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        save_problem(problem, path)
        run = subprocess.run([sys.executable, "-m", "weft", "schedule", str(path), "--microbatches", str(num_microbatches),
                              "--time-limit", "10", "--json"], capture_output=True, text=True, timeout=300, check=False)
    return run.returncode, run.stderr
