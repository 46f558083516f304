"""Every model of the zoo on eight clusters: Weft's plan beside the best of five ways to run without a search.

    python -m benchmarks.bench_zoo [--models gpt2,vgg-19] [--clusters box4,tag-testbed] [--workers 2] [--seconds 3]
                                   [--deadline 600] [--lines FILE] [--from-lines FILE] [--json]

Weft's plan is that of ``weft plan``: all strategies, the joint search and a deployment of ``--seconds`` CPU seconds. What
it is held against is in ``benchmarks.zoo_baselines``. All times are predicted by the same simulator; plans are checked.
With ``--deadline`` no case is begun after so many seconds. ``--lines`` appends each case to a file of JSON lines,
``--from-lines`` prints the table of such a file.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.zoo_cases import CLUSTERS, MIXED, NAMES, Case

SLACK = 1e-6
"""Times that differ by less are equal."""
TO_REACH = 1.3
"""Geometric mean of the gains on mixed clusters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a case came to."""

    model: str
    cluster: str
    step_time_s: float | None = None
    """Of Weft's plan; None if nothing fits."""
    strategy: str = ""
    references: dict[str, float | None] = field(default_factory=dict)
    """Step times by name; None where nothing fits."""
    by_speed_s: float | None = None
    """Data parallel with shares by speed: not one of the references, for comparison."""
    cpu_seconds: float = 0.0
    error: str = ""

    @property
    def best_reference(self) -> tuple[str, float] | None:
        """Return the fastest of the references that fit."""
        known = [(seconds, name) for name, seconds in self.references.items() if seconds is not None]
        return min(known)[::-1] if known else None

    @property
    def gain_by_speed(self) -> float | None:
        """Return the same with data parallel by speed as one of the references."""
        known = [seconds for seconds in (*self.references.values(), self.by_speed_s) if seconds is not None]
        return min(known) / self.step_time_s if known and self.step_time_s is not None else None

    @property
    def gain(self) -> float | None:
        """Return how many times as fast as the best reference Weft's plan is; None where one of them is missing."""
        best = self.best_reference
        return None if best is None or self.step_time_s is None else best[1] / self.step_time_s


def run_case(case: Case, seconds: float, deadline: float) -> Result | None:
    """Return what a case comes to; None after the deadline (on the clock of ``time.time``)."""
    if time.time() > deadline:
        return None
    begin = time.process_time()
    try:
        found = _compare(case, seconds)
    except Exception as error:  # the other cases must not be lost for one: the summary counts it as a failure
        found = Result(model=case.model, cluster=case.cluster, error=f"{type(error).__name__}: {error}"[:300])
    return Result(**{**asdict(found), "cpu_seconds": time.process_time() - begin})


def _compare(case: Case, seconds: float) -> Result:
    from benchmarks.zoo_baselines import references
    from benchmarks.zoo_cases import problem_of, splits_of
    from weft.base.errors import NoFeasiblePlan
    from weft.planning.compare import DEPLOY_SIMULATIONS, compare_strategies
    from weft.search.deploy.search import DeployOptions

    problem = problem_of(case)
    splits = splits_of(case, problem)
    deployments = DeployOptions(cpu_seconds=seconds, max_simulations=DEPLOY_SIMULATIONS)
    best, times, error = None, dict[str, float](), ""
    try:
        comparison = compare_strategies(problem, joint=True, deployments=deployments, splits=splits)
        best = comparison.best
        times = {item.strategy: item.step_time_s for item in comparison.candidates if item.plan is not None}
    except NoFeasiblePlan as miss:
        error = str(miss)[:300]
    known = {item.name: None if math.isinf(item.step_time_s) else item.step_time_s
             for item in references(problem, splits, times)}
    if best is None:
        return Result(model=case.model, cluster=case.cluster, references=known, error=error * any(known.values()))
    return Result(model=case.model, cluster=case.cluster, step_time_s=best.step_time_s, strategy=best.strategy,
                  references=known, by_speed_s=times.get("data-parallel-by-speed"))


def run_group(cases: Sequence[Case], seconds: float, deadline: float, lines: Path | None) -> list[Result]:
    """Return what cases of one model come to, which is traced once; each is appended to the file of lines."""
    results = []
    for case in cases:
        result = run_case(case, seconds, deadline)
        if result is not None:
            results.append(result)
            if lines is not None:
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    return results


def run_groups(groups: Sequence[Sequence[Case]], args: argparse.Namespace) -> Iterator[Result]:
    """Yield the results as groups of cases end."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes when they import torch
    deadline = time.time() + args.deadline if args.deadline else float("inf")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=args.workers, mp_context=context) as pool:
        futures = [pool.submit(run_group, group, args.seconds, deadline, args.lines) for group in groups]
        for future in as_completed(futures):
            yield from future.result()


def read_lines(path: Path) -> list[Result]:
    """Return the results in a file of JSON lines; the last one of each case."""
    rows = (Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())
    return list({(row.model, row.cluster): row for row in rows}.values())


def show_case(row: Result) -> None:
    """Print one line for a case."""
    best = row.best_reference
    what = row.error or ("nothing fits" if row.step_time_s is None else
                         f"{1e3 * row.step_time_s:10.1f} ms  {row.strategy:22}")
    against = "only Weft's plan fits" if best is None else f"{1e3 * best[1]:10.1f} ms  {best[0]:15}"
    gain = f"{row.gain:6.3f} x" if row.gain is not None else ""
    print(f"{row.model:13} {row.cluster:12} {what}  {against} {gain}  ({row.cpu_seconds:.0f} CPU-s)", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One line of the table."""

    cluster: str
    num_cases: int
    num_compared: int
    num_faster: int
    num_slower: int
    mean: float
    """Geometric, of the gains."""
    mean_by_speed: float
    """The same, with data parallel by speed as one of the references."""
    worst: float
    largest: float
    only_weft: int
    """Cases that only Weft's plan fits."""
    nothing: int
    num_failed: int


def summarize(name: str, rows: Iterable[Result]) -> Summary:
    """Return what the cases of a cluster, or of several, come to."""
    every = list(rows)
    gains = [row.gain for row in every if row.gain is not None]
    more = [row.gain_by_speed for row in every if row.gain_by_speed is not None]
    return Summary(
        cluster=name, num_cases=len(every), num_compared=len(gains), num_faster=sum(gain > 1 + SLACK for gain in gains),
        num_slower=sum(gain < 1 - SLACK for gain in gains), mean=geometric_mean(gains),
        mean_by_speed=geometric_mean(more), worst=min(gains, default=math.nan),
        largest=max(gains, default=math.nan), num_failed=sum(bool(row.error) for row in every),
        only_weft=sum(row.best_reference is None and row.step_time_s is not None for row in every),
        nothing=sum(row.best_reference is None and row.step_time_s is None and not row.error for row in every))


def geometric_mean(values: Sequence[float]) -> float:
    """Return it; no number where there are none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def table(rows: Sequence[Result]) -> list[Summary]:
    """Return a line for each cluster, for equal and mixed ones, and for all."""
    lines = [summarize(name, [row for row in rows if row.cluster == name]) for name in CLUSTERS]
    lines = [line for line in lines if line.num_cases]
    equal, mixed = ([row for row in rows if (row.cluster in MIXED) is kind] for kind in (False, True))
    return [*lines, summarize("equal", equal), summarize("mixed", mixed), summarize("all", rows)]


def show_table(lines: Sequence[Summary]) -> None:
    """Print it as in ``docs/benchmarks.md``."""
    print("\n| cluster | cases | compared | faster | slower | geometric mean | with data parallel by speed | "
          "worst | largest | only Weft fits | nothing fits |\n" + "|---" * 11 + "|")
    for line in lines:
        print(f"| {line.cluster} | {line.num_cases} | {line.num_compared} | {line.num_faster} | {line.num_slower} | "
              f"{line.mean:.3f} | {line.mean_by_speed:.3f} | {line.worst:.3f} | {line.largest:.2f} | {line.only_weft} | {line.nothing} |")


def main() -> int:
    """Run the cases, print them and the table; return 1 if a plan is slower, or mixed clusters gain too little."""
    parser = argparse.ArgumentParser(description="Every model of the zoo on eight clusters.")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(NAMES), help="separated by commas")
    parser.add_argument("--clusters", type=lambda text: text.split(","), default=list(CLUSTERS))
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds for a deployment of each case")
    parser.add_argument("--deadline", type=float, help="begin no case after so many seconds")
    parser.add_argument("--lines", type=Path, help="file to append each case to, as JSON lines")
    parser.add_argument("--from-lines", type=Path, help="print the table of this file instead")
    parser.add_argument("--json", action="store_true", help="print cases and table as JSON")
    args = parser.parse_args()
    groups = [[Case(model=model, cluster=cluster) for cluster in args.clusters if (cluster in MIXED) is is_mixed]
              for is_mixed in (True, False) for model in args.models]
    rows: list[Result] = []
    for row in read_lines(args.from_lines) if args.from_lines else run_groups(groups, args):
        rows.append(row)
        if not args.json:
            show_case(row)
    lines = table(rows)
    if args.json:
        print(json.dumps({"cases": [asdict(row) for row in rows], "table": [asdict(line) for line in lines]}, indent=1))
    else:
        show_table(lines)
    by_name = {line.cluster: line for line in lines}
    reached = not by_name["mixed"].num_compared or by_name["mixed"].mean >= TO_REACH
    return 0 if reached and not by_name["all"].num_slower and not by_name["all"].num_failed else 1


if __name__ == "__main__":
    sys.exit(main())
