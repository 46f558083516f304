"""Time limits: each command in a fresh process with ``--time-limit``, how far it goes beyond, and what it has by then.

    python -m benchmarks.bench_limits [--only NAME ...] [--long S] [--over S] [--json]

Cases are generated from seeds (``limit_cases``) or models of the zoo. For each: the limit, wall and CPU seconds of the
process, what it reports for imports and tracing, what it used beyond limit, imports and tracing (by the wall and by CPU
seconds; what starting Python and importing takes is measured with ``weft --help`` of a command and taken off), the
status and the value, beside the value of the same command with ``--long`` seconds. Exits with 1 if any case has no
answer or is more than ``--over`` seconds beyond by both clocks: on a shared machine the wall alone says little.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.limit_cases import (
    SHAPES,
    place_cluster,
    place_graph,
    schedule_problem,
    strategy_graph,
    write,
)

VALUES = ("value", "cost", "step_time", "makespan")
KILLED_AFTER_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command without its limit, and the limits to try."""

    name: str
    arguments: tuple[str, ...]
    limits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a process took and said."""

    code: int | None
    wall_s: float
    cpu_s: float
    peak_mib: float
    result: dict[str, Any]

    @property
    def not_counted_s(self) -> float:
        """Return the seconds of imports and tracing that the command reports."""
        return float(self.result.get("import_seconds", 0.0)) + float(self.result.get("tracing_seconds", 0.0))

    @property
    def value(self) -> float | None:
        """Return what was minimised."""
        return next((self.result[name] for name in VALUES if name in self.result), None)


def cases(folder: Path) -> Iterator[Case]:
    """Yield the cases, with their files written."""
    links = {(count, written): str(write(folder / f"cluster-{count}-{written}.json",
                                         place_cluster(count, every_link=written)))
             for count in (2, 8, 16) for written in (False, True)}
    for shape in SHAPES:
        graph = str(write(folder / f"{shape}.json", place_graph(20_000, shape, 1)))
        for (count, written), cluster in links.items():
            if (shape, written) in (("layered", True), ("layered", False), ("wide", True), ("chain", False)):
                yield Case(name=f"place-{shape}-{count}{'-links' if written else ''}", limits=(1.0, 5.0),
                           arguments=("place", graph, cluster))
        yield Case(name=f"throughput-{shape}-8", limits=(2.0,),
                   arguments=("place", graph, links[8, True], "--objective", "throughput"))
    for name, tightness in (("free", None), ("loose", 0.6), ("tight", 0.32)):
        path = write(folder / f"strategies-{name}.json", strategy_graph(30_000, 1, tightness=tightness))
        yield Case(name=f"shard-{name}", arguments=("shard", str(path)), limits=(1.0, 5.0))
    for name, devices, room, number in (("64-devices", 64, 1.0, 1000), ("tight", 64, 0.1, 1000), ("16", 16, 1.0, 64)):
        path = write(folder / f"schedule-{name}.json", schedule_problem(devices, room=room))
        yield Case(name=f"schedule-{name}", arguments=("schedule", str(path), "-n", str(number)), limits=(2.0,))
    hosts = {count: {"format": "weft.cluster", "version": 1, "network": {"bandwidth": "100Gbit/s", "latency": "10us"},
                     "hosts": [{"name": "a", "count": count // 8, "devices": "8 x A100-80GB", "intra": "nvlink3"}]}
             for count in (16, 64, 256)}
    files = {count: str(write(folder / f"hosts-{count}.json", value)) for count, value in hosts.items()}
    for model in ("gpt2", "gpt2-xl", "llama-7b", "mixtral-8x"):
        for count, cluster in files.items():
            yield Case(name=f"plan-{model}-{count}", limits=(2.0, 10.0),
                       arguments=("plan", model, cluster, "--batch", "256"))
    yield Case(name="explain-gpt2", arguments=("explain", "gpt2", files[16]), limits=(10.0, 60.0))
    yield Case(name="deploy-gpt2", arguments=("deploy", "gpt2", files[16]), limits=(2.0, 10.0))
    yield Case(name="fit-llama-7b", arguments=("fit", "llama-7b", files[64], "--batch", "64"), limits=(2.0,))
    yield Case(name="shard-gpt2", arguments=("shard", "gpt2", "8 x A100-80GB"), limits=(5.0,))


def run(arguments: tuple[str, ...]) -> Run:
    """Return what a fresh process makes of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, check=False,
                              timeout=KILLED_AFTER_S)
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, text = None, ""
    wall_s, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    try:
        result = json.loads(text)
    except json.JSONDecodeError:
        result = {}
    return Run(code=code, wall_s=wall_s, cpu_s=cpu_s, peak_mib=after.ru_maxrss / 1024, result=result)


def measure(case: Case, limit_s: float, long_s: float, start: Run) -> dict[str, Any]:
    """Return the row of a case with one limit; ``start`` is a process that only starts."""
    found = run((*case.arguments, "--time-limit", str(limit_s), "--json", "--quiet"))
    best = run((*case.arguments, "--time-limit", str(long_s), "--json", "--quiet")) if long_s else None
    wall_over, cpu_over = (seconds - of_start - limit_s - found.not_counted_s for seconds, of_start in (
        (found.wall_s, start.wall_s), (found.cpu_s, start.cpu_s)))
    return {"case": case.name, "limit": limit_s, "code": found.code, "wall": round(found.wall_s, 2),
            "cpu": round(found.cpu_s, 2), "not counted": round(found.not_counted_s, 2),
            "wall beyond": round(wall_over, 2), "cpu beyond": round(cpu_over, 2), "MiB": round(found.peak_mib),
            "status": found.result.get("status"), "value": found.value, "bound": found.result.get("bound"),
            "value with more time": None if best is None else best.value}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How far commands go beyond their time limits.")
    parser.add_argument("--only", action="append", help="cases whose name begins so; all if absent")
    parser.add_argument("--long", type=float, default=0.0, help="seconds of the same command to compare with; 0: none")
    parser.add_argument("--over", type=float, default=2.0, help="seconds beyond the limit that are allowed")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


def main() -> int:
    """Run the cases and print a row for each."""
    args, rows = parse(), []
    start = run(("check", "--help"))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder)):
            if args.only and not case.name.startswith(tuple(args.only)):
                continue
            for limit_s in case.limits:
                rows.append(measure(case, limit_s, args.long, start))
                if not args.json:
                    print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))
    bad = [row for row in rows if row["code"] != 0 or min(row["wall beyond"], row["cpu beyond"]) > args.over]
    print(f"{len(rows)} runs, {len(bad)} without an answer or more than {args.over} s beyond the limit",
          file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
