"""Time limits: each command in a fresh process with ``--time-limit``, how far it goes beyond, and what it has by then.

    python -m benchmarks.bench_limits [--only NAME ...] [--clock wall|cpu] [--long S] [--over S] [--json]

Cases are generated from seeds (``limit_cases``) or models of the zoo. For each: the limit, wall and CPU seconds of the
process, what it reports for imports and tracing, what it used beyond limit, imports and tracing (by the wall and by CPU
seconds; what starting Python takes is measured with ``weft check --help`` and taken off), the peak memory, the status
and the value, beside the value of the same command with ``--long`` seconds. Exits with 1 if any case has no answer or is
more than ``--over`` seconds beyond by both clocks: on a shared machine the wall alone says little. With ``--clock cpu``
the commands themselves take CPU seconds for time (``cpu_clock``), and only those are judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.limit_cases import (
    SHAPES,
    dense_graph,
    partition_problem,
    place_cluster,
    place_graph,
    schedule_problem,
    strategy_graph,
    write,
)

VALUES = ("value", "cost", "step_time", "makespan")
KILLED_AFTER_S = 120.0
KILLED_ON_BUSY_S = 500.0
"""The same where the command counts CPU seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command without its limit, and the limits to try."""

    name: str
    arguments: tuple[str, ...]
    limits: tuple[float, ...]
    codes: tuple[int, ...] = (0,)
    """Exit codes of an answer: 3 where nothing may fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a process took and said."""

    code: int
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
    yield from _place_cases(folder)
    yield from _shard_cases(folder)
    yield from _schedule_cases(folder)
    yield from _partition_cases(folder)
    yield from _model_cases(folder)


def _place_cases(folder: Path) -> Iterator[Case]:
    links = {(count, written): str(write(folder / f"cluster-{count}-{written}.json",
                                         place_cluster(count, every_link=written)))
             for count in (2, 8, 16, 64) for written in (False, True)}
    for shape in SHAPES:
        graph = str(write(folder / f"{shape}.json", place_graph(20_000, shape, 1)))
        for (count, written), cluster in links.items():
            if (shape, written) in (("layered", True), ("layered", False), ("wide", True), ("chain", False)):
                yield Case(name=f"place-{shape}-{count}{'-links' if written else ''}", limits=(1.0, 5.0),
                           arguments=("place", graph, cluster))
        yield Case(name=f"throughput-{shape}-8", limits=(2.0,),
                   arguments=("place", graph, links[8, True], "--objective", "throughput"))
    graph = str(write(folder / "layered.json", place_graph(20_000, "layered", 1)))
    yield Case(name="throughput-layered-64", limits=(0.5, 2.0),
               arguments=("place", graph, links[64, True], "--objective", "throughput"))
    yield Case(name="throughput-contiguous-8", limits=(0.5, 2.0),
               arguments=("place", graph, links[8, True], "--objective", "throughput", "--contiguous"))
    yield Case(name="compare-layered-8", limits=(2.0,), arguments=("place", graph, links[8, False], "--compare"))
    tight = str(write(folder / "tight.json", place_cluster(8, every_link=True, memory="2.7GB")))
    yield Case(name="place-tight-8", limits=(0.5, 2.0), codes=(0, 3), arguments=("place", graph, tight))
    yield Case(name="throughput-tight-8", limits=(0.5, 2.0), codes=(0, 3),
               arguments=("place", graph, tight, "--objective", "throughput"))
    dense = str(write(folder / "dense.json", dense_graph(3_000, 60, 1)))
    for count in (8, 64):
        yield Case(name=f"place-dense-{count}", limits=(0.5, 2.0, 10.0), arguments=("place", dense, links[count, True]))
        yield Case(name=f"throughput-dense-{count}", limits=(0.5, 2.0),
                   arguments=("place", dense, links[count, True], "--objective", "throughput"))
    small = str(write(folder / "small.json", place_graph(300, "layered", 1)))
    yield Case(name="place-small-64", limits=(0.5, 2.0, 10.0), arguments=("place", small, links[64, True]))


def _shard_cases(folder: Path) -> Iterator[Case]:
    for name, tightness in (("free", None), ("loose", 0.6), ("tight", 0.32)):
        path = write(folder / f"strategies-{name}.json", strategy_graph(30_000, 1, tightness=tightness))
        yield Case(name=f"shard-{name}", arguments=("shard", str(path)), limits=(0.5, 1.0, 5.0))
    for name, tightness in (("free", None), ("tight", 0.4)):
        graph = strategy_graph(300, 1, tightness=tightness, counts=(60, 120))
        path = write(folder / f"many-{name}.json", graph)
        yield Case(name=f"shard-many-{name}", arguments=("shard", str(path)), limits=(0.5, 2.0, 10.0))
        path = write(folder / f"tangled-{name}.json", strategy_graph(3000, 1, tightness=tightness, far=True))
        yield Case(name=f"shard-tangled-{name}", arguments=("shard", str(path)), limits=(0.5, 2.0, 10.0))


def _schedule_cases(folder: Path) -> Iterator[Case]:
    for name, devices, chunks, room, number in (
            ("64-devices", 64, 1, 1.0, 1000), ("tight", 64, 1, 0.1, 1000), ("16", 16, 1, 1.0, 64),
            ("chunks", 64, 4, 0.2, 256), ("chunks-16", 16, 4, 0.3, 40), ("few", 64, 1, 0.1, 8),
            ("free", 64, 2, None, 1000)):
        path = write(folder / f"schedule-{name}.json", schedule_problem(devices, chunks=chunks, room=room))
        yield Case(name=f"schedule-{name}", arguments=("schedule", str(path), "-n", str(number)), codes=(0, 3),
                   limits=(0.5, 2.0, 10.0))


def _partition_cases(folder: Path) -> Iterator[Case]:
    for name, width, colours in (("narrow", 8, 0.0), ("wide", 200, 0.0), ("colours", 20, 0.5)):
        path = str(write(folder / f"partition-{name}.json", partition_problem(5_000, width, 1, colours=colours)))
        for objective in ("throughput", "latency"):
            yield Case(name=f"partition-{objective}-{name}", limits=(0.5, 2.0, 10.0), codes=(0, 3),
                       arguments=("place", path, "--format", "dnn-partitioning", "--objective", objective))


def _model_cases(folder: Path) -> Iterator[Case]:
    hosts = {count: {"format": "weft.cluster", "version": 1, "network": {"bandwidth": "100Gbit/s", "latency": "10us"},
                     "hosts": [{"name": "a", "count": count // 8, "devices": "8 x A100-80GB", "intra": "nvlink3"}]}
             for count in (8, 16, 64, 256, 1024)}
    files = {count: str(write(folder / f"hosts-{count}.json", value)) for count, value in hosts.items()}
    for model in ("gpt2", "gpt2-xl", "llama-7b", "mixtral-8x"):
        for count in (16, 64, 256):
            yield Case(name=f"plan-{model}-{count}", limits=(2.0, 10.0), codes=(0, 3),
                       arguments=("plan", model, files[count], "--batch", "256"))
    yield Case(name="plan-llama-70b-1024", limits=(0.5, 2.0, 10.0),
               arguments=("plan", "llama-70b", files[1024], "--batch", "1024"))
    for name, model, count, more in (
            ("target", "gpt2-xl", 64, ("--batch", "256", "--target", "20/s")),
            ("latency", "gpt2-xl", 16, ("--objective", "latency")),
            ("latency-64", "llama-7b", 64, ("--objective", "latency")),
            ("placements", "gpt2", 8, ("--placement", "v", "--placement", "m", "--placement", "interleaved")),
            ("tight", "llama-7b", 8, ("--batch", "256")), ("t5", "t5-large", 64, ("--batch", "64")),
            ("headroom", "gpt2-xl", 16, ("--headroom", "50%")), ("inference", "llama-7b", 64, ("--mode", "inference"))):
        yield Case(name=f"plan-{name}", limits=(0.5, 2.0, 10.0), codes=(0, 3),
                   arguments=("plan", model, files[count], *more))
    yield Case(name="explain-gpt2", arguments=("explain", "gpt2", files[16]), limits=(2.0, 10.0))
    yield Case(name="explain-llama-7b", arguments=("explain", "llama-7b", files[64], "--batch", "64"),
               limits=(0.5, 2.0, 10.0))
    yield Case(name="explain-nothing-fits", arguments=("explain", "llama-7b", "2 x RTX3090", "--batch", "4"),
               limits=(0.5, 2.0, 10.0), codes=(0, 3))
    for model, count in (("gpt2", 16), ("llama-7b", 64), ("t5-large", 64)):
        yield Case(name=f"deploy-{model}", arguments=("deploy", model, files[count], "--batch", "64"),
                   limits=(0.5, 2.0, 10.0))
    for model, count in (("llama-7b", 64), ("llama-70b", 64), ("llama-70b", 1024), ("mixtral-8x", 8)):
        yield Case(name=f"fit-{model}-{count}", arguments=("fit", model, files[count], "--batch", "64"),
                   limits=(0.5, 2.0), codes=(0, 3))
    for model, count, memory in (("gpt2", 8, "none"), ("llama-7b", 8, "30GiB"), ("mixtral-8x", 64, "none"),
                                 ("t5-large", 16, "6GiB")):
        yield Case(name=f"shard-model-{model}", limits=(0.5, 2.0, 5.0), codes=(0, 3),
                   arguments=("shard", model, files[count], "--memory", memory, "--compare"))
    for model, objective in (("gpt2", "latency"), ("gpt2-xl", "latency"), ("inception-v3", "throughput"),
                             ("t5-large", "throughput")):
        yield Case(name=f"place-model-{model}", limits=(0.5, 2.0), codes=(0, 3),
                   arguments=("place", model, files[8], "--objective", objective))


def run(arguments: tuple[str, ...], clock: str) -> Run:
    """Return what a fresh process makes of the command; one that does not end is killed."""
    module = "weft" if clock == "wall" else "benchmarks.cpu_clock"
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=out, stderr=subprocess.DEVNULL)
        killer = threading.Timer(KILLED_AFTER_S if clock == "wall" else KILLED_ON_BUSY_S, process.kill)
        killer.start()
        _, status, usage = os.wait4(process.pid, 0)
        killer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode()
    try:
        result = json.loads(text)
    except json.JSONDecodeError:
        result = {}
    return Run(code=process.returncode, wall_s=time.monotonic() - begin, cpu_s=usage.ru_utime + usage.ru_stime,
               peak_mib=usage.ru_maxrss / 1024, result=result)


def measure(case: Case, limit_s: float, long_s: float, start: Run, clock: str) -> dict[str, Any]:
    """Return the row of a case with one limit; ``start`` is a process that only starts."""
    found = run((*case.arguments, "--time-limit", str(limit_s), "--json", "--quiet"), clock)
    best = run((*case.arguments, "--time-limit", str(long_s), "--json", "--quiet"), clock) if long_s else None
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
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what the commands take for time")
    parser.add_argument("--limit", type=float, action="append", help="seconds, in place of those of the cases")
    parser.add_argument("--long", type=float, default=0.0, help="seconds of the same command to compare with; 0: none")
    parser.add_argument("--over", type=float, default=2.0, help="seconds beyond the limit that are allowed")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


def main() -> int:
    """Run the cases and print a row for each."""
    args, rows = parse(), []
    start = run(("check", "--help"), args.clock)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder)):
            if args.only and not case.name.startswith(tuple(args.only)):
                continue
            for limit_s in args.limit or case.limits:
                rows.append(measure(case, limit_s, args.long, start, args.clock))
                rows[-1]["answered"] = rows[-1]["code"] in case.codes
                if not args.json:
                    print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))
    judged = ("wall beyond", "cpu beyond") if args.clock == "wall" else ("cpu beyond",)
    bad = [row for row in rows if not row["answered"] or min(row[name] for name in judged) > args.over]
    print(f"{len(rows)} runs, {len(bad)} without an answer or more than {args.over} s beyond the limit",
          file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
