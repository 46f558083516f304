"""What the sections of ``bench_schedule`` share: rows, and searches in processes of their own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.search.schedule.problem import ScheduleProblem, load_problem, save_problem

FOLDER = Path(__file__).resolve().parent / "problems" / "schedule"
SLACK = 1e-6
"""Relative: times this close are equal."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    folder: Path = FOLDER
    time_limit: float | None = None
    num_problems: int = 300
    num_samples: int = 5
    first: int = 0
    count: int = 80
    kind: str = "pipelines"
    workers: int = 1
    reference_s: float = 120.0


def at_most(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit + SLACK * max(1.0, abs(limit))


def solve(problem: Path | ScheduleProblem, num_microbatches: int, time_limit: float | None) -> dict[str, Any]:
    """Return the result of a search in a fresh process, with that process's CPU seconds, imports included."""
    return _fresh(problem, ["--microbatches", str(num_microbatches),
                            *(["--time-limit", str(time_limit)] if time_limit is not None else [])])


def solve_steady(problem: Path | ScheduleProblem, seconds: float) -> dict[str, Any]:
    """Return the steady state that a fresh process finds in about so many seconds, with its CPU seconds."""
    return _fresh(problem, ["--steady", str(seconds)])


def _fresh(problem: Path | ScheduleProblem, arguments: Sequence[str]) -> dict[str, Any]:
    if isinstance(problem, ScheduleProblem):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "problem.json"
            save_problem(problem, path)
            return _fresh(path, arguments)
    command = [sys.executable, "-m", "benchmarks.schedule_common", str(problem), *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _search(problem: ScheduleProblem, num_microbatches: int, time_limit: float | None) -> dict[str, Any]:
    from weft.search.schedule.named import named_schedules
    from weft.search.schedule.schedule import find_problems
    from weft.search.schedule.search import schedule

    before = _cpu_seconds()
    result = schedule(problem, microbatches=num_microbatches, time_limit=time_limit, progress=lambda line: None)
    searched = _cpu_seconds()
    value = result.to_json()
    del value["starts"]
    named = {name: item.makespan for name, item in named_schedules(problem, num_microbatches).items()}
    return {**value, "by": result.by, "problems": find_problems(result.schedule), "search_cpu_s": searched - before,
            "cpu_s": searched, "named": named}


def _steady(problem: ScheduleProblem, seconds: float) -> dict[str, Any]:
    from weft.search.common.budget import Budget
    from weft.search.schedule.steady import find_steady_state

    before = _cpu_seconds()
    state = find_steady_state(problem, budget=Budget(effort=seconds))
    searched = _cpu_seconds()
    found = {"period": None} if state is None else {
        "period": state.period, "period_microbatches": state.num_microbatches, "period_bound": state.bound,
        "proven_for": list(state.proven)}
    return {**found, "search_cpu_s": searched - before, "cpu_s": searched}


def main() -> None:
    """Search one problem and print what came out, for ``solve`` and ``solve_steady``."""
    import argparse

    parser = argparse.ArgumentParser(description="Search one schedule problem and print the figures as JSON.")
    parser.add_argument("problem")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--steady", type=float, metavar="SECONDS", help="find the steady state alone")
    args = parser.parse_args()
    problem = load_problem(args.problem)
    print(json.dumps(_steady(problem, args.steady) if args.steady is not None else
                     _search(problem, args.microbatches, args.time_limit)))


if __name__ == "__main__":
    main()
