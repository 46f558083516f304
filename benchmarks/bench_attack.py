"""Mutated files of every kind that the commands read: each ends soon, in little memory, with a result or one clear error.

    python -m benchmarks.bench_attack [--mutants 20000] [--seed 0] [--only KIND] [--workers 2] [--part 1/2] [--json] [--show 10]

Mutants know the structure of the file: trees of JSON and YAML, tables and pages of sqlite, headers of safetensors, nodes
of ONNX, cells of CSV (``attack_mutators``); some stay sound as files and lie in what they say (``attack_formats``). A
mutant is read and, if it is a sound file after all, used: checked, simulated, drawn, searched for a moment
(``attack_targets``; by whole commands ``attack_commands``). Workers are processes of their own; each mutant's CPU time
and the peak of its memory are taken. Before, the numerical code is compiled as ``make`` does it: else the first mutant
that needs a function would wait for its compiler, up to 15 s. A command that a mutant tells to search for longer than
4 s does so until Ctrl-C comes, after 1 s, and must end then. ``--part 1/2`` and ``--part 2/2``, in two processes, are
all mutants together. Defects, of which there must be none:

``untyped``  any exception but Weft's own errors, or the end of the process
``slow``     more than 5 s of CPU time, or no end
``fat``      a peak of more than 1 GiB beyond the clean file's
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.attack_targets import TARGETS, make_clean, make_mutant
from weft import warm
from weft.base.errors import WeftError

MAX_S, MAX_MIB = 5.0, 1024
HANG_S, HANG_CPU_S = 900.0, 60.0
"""A worker that says nothing for so long, or computes for so long meanwhile, is ended; what it was at is slow."""
ROOM = 6 << 30
"""No mutant may take more address space than this; what needs more is fat."""
Job = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one mutant."""

    kind: str
    number: int
    what: str
    """``accepted``, ``refused`` or ``untyped``."""
    seconds: float = 0.0
    extra_mib: float = 0.0
    """Beyond the clean file's."""
    why: str = ""

    @property
    def defects(self) -> tuple[str, ...]:
        """Return what is wrong with it."""
        found = (("untyped", self.what == "untyped"), ("slow", self.seconds > MAX_S), ("fat", self.extra_mib > MAX_MIB))
        return tuple(name for name, is_so in found if is_so)


# ---- one mutant -----------------------------------------------------------------------------------------------------


def mutant_of(kind: str, number: int, seed: int, clean: Path) -> tuple[str, bytes, bool]:
    """Return name and bytes of a mutant, and whether what it says is to be used; the same for the same numbers."""
    target, rng = TARGETS[kind], Random(f"{seed}/{kind}/{number}")
    file = clean / target.file
    name, data = make_mutant(target, file.read_bytes() if file.exists() else b"", rng)
    return name, data, rng.random() < target.use


def attack(kind: str, number: int, seed: int, clean: Path, base_mib: float) -> Verdict:
    """Return what becomes of a mutant."""
    name, data, use = mutant_of(kind, number, seed, clean)
    with tempfile.TemporaryDirectory(dir=clean.parent) as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        del data
        return _judge(kind, number, path, use, base_mib)


def _judge(kind: str, number: int, path: Path, use: bool, base_mib: float) -> Verdict:
    before, begin, what, why = _reset_peak(), time.process_time(), "accepted", ""
    try:
        TARGETS[kind].read(path, use)
    except WeftError as problem:
        what, why = "refused", str(problem)
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt):
            raise
        what, why = "untyped", "".join(traceback.format_exception(problem, limit=-4))
    seconds = time.process_time() - begin
    return Verdict(kind=kind, number=number, what=what, seconds=seconds, extra_mib=_peak_mib() - before - base_mib, why=why[-3000:])


def _reset_peak() -> float:
    """Forget the peak of this process's memory; return what it holds now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


def _peak_mib() -> float:
    return _status_mib("VmHWM")


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


# ---- workers --------------------------------------------------------------------------------------------------------


def _work(jobs: list[Job], seed: int, clean: Path, pipe: Connection) -> None:
    """Attack one mutant after the other; say before each which it is, and after it what became of it."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    limit = int(_status_mib("VmSize") * 2**20) + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    base: dict[str, float] = {}
    for kind, number in jobs:
        pipe.send((kind, number))
        try:
            if kind not in base:
                base[kind] = _clean_mib(kind, clean)
            verdict = attack(kind, number, seed, clean, base[kind])
        except Exception as problem:  # of the attack itself: told, or it could not be mended
            verdict = Verdict(kind=kind, number=number, what="untyped", why=f"the attack broke: {problem!r}")
        pipe.send(verdict)
    pipe.send(None)


def _clean_mib(kind: str, clean: Path) -> float:
    """Return the peak of memory that reading and using the clean file takes, the second time."""
    file = clean / TARGETS[kind].file
    if not file.exists():
        return 0.0
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=clean.parent) as folder:
            path = Path(folder) / file.name
            path.write_bytes(file.read_bytes())
            verdict = _judge(kind, -1, path, True, 0.0)
        if verdict.what == "untyped" or (verdict.what == "refused" and "exit code 3" not in verdict.why):
            raise AssertionError(f"the clean {kind} is not read: {verdict.why}")
    return max(verdict.extra_mib, 0.0)


class Worker:
    """A process that works through some mutants, watched from here."""

    def __init__(self, jobs: list[Job], seed: int, clean: Path) -> None:
        self.jobs, self.seed, self.clean = jobs, seed, clean
        self.current: Job | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(self.jobs, self.seed, self.clean, other), daemon=True)
        self.process.start()
        other.close()
        self.heard, self.heard_cpu = time.monotonic(), 0.0

    def _cpu_s(self) -> float:
        """Return what the process has computed so far, so that a busy machine makes nothing slow."""
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def hear(self) -> Iterator[Verdict]:
        """Yield what the worker has to say; go on with another process where one has ended in mid-air."""
        try:
            message = self.pipe.recv()
        except EOFError:
            self.process.join(10)
            yield from self._replace(f"the process ended with {self.process.exitcode}", 0.0)
            return
        self.heard, self.heard_cpu = time.monotonic(), self._cpu_s()
        if message is None:
            self.jobs = []
        elif isinstance(message, Verdict):
            self.jobs, self.current = self.jobs[1:], None
            yield message
        else:
            self.current = message

    def check_time(self) -> Iterator[Verdict]:
        """End the process if it has not been heard for long."""
        if self.jobs and (time.monotonic() - self.heard > HANG_S or self._cpu_s() - self.heard_cpu > HANG_CPU_S):
            self.process.kill()
            self.process.join(10)
            yield from self._replace("no end", HANG_CPU_S)

    def _replace(self, why: str, seconds: float) -> Iterator[Verdict]:
        kind, number = self.current or self.jobs[0]
        yield Verdict(kind=kind, number=number, what="untyped", seconds=seconds, why=why)
        self.jobs, self.current = self.jobs[1:], None
        self._start()

    def end(self) -> None:
        """Make sure that the process is gone."""
        self.process.kill()
        self.process.join(10)


def run(jobs: Iterable[Job], *, seed: int, clean: Path, workers: int) -> Iterator[Verdict]:
    """Yield what becomes of the mutants, in any order."""
    listed = list(jobs)
    pool = [Worker(listed[index::workers], seed, clean) for index in range(workers)]
    try:
        while busy := [worker for worker in pool if worker.jobs]:
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                yield from worker.hear() if worker.pipe in ready else worker.check_time()
    finally:
        for worker in pool:
            worker.end()


def list_jobs(mutants: int, only: str | None, part: str = "1/1") -> list[Job]:
    """Return the mutants of each kind by its weight, one kind after the other; of ``"2/3"`` every third, from the second.
    """
    index, number = (int(item) for item in part.split("/"))
    kinds = {kind: target for kind, target in TARGETS.items() if only is None or only in kind}
    total = sum(target.weight for target in kinds.values())
    counts = {kind: max(1, round(mutants * target.weight / total)) for kind, target in kinds.items()}
    return [(kind, at) for kind, count in counts.items() for at in range(count)][index - 1::number]


# ---- the table ------------------------------------------------------------------------------------------------------


def summary(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """Return a row for each kind, and one for all."""
    rows = []
    for kind in (*TARGETS, "all"):
        mine = [verdict for verdict in verdicts if kind in (verdict.kind, "all")]
        if mine:
            counts = Counter(verdict.what for verdict in mine)
            rows.append({"file": kind, "mutants": len(mine), **{key: counts[key] for key in ("accepted", "refused", "untyped")},
                         "slowest_s": round(max(verdict.seconds for verdict in mine), 2),
                         "extra_mib": round(max(0.0, *(verdict.extra_mib for verdict in mine), 0.0)),
                         "cpu_s": round(sum(verdict.seconds for verdict in mine))})
    return rows


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    names = list(rows[0])
    widths = [max(len(str(row[name])) for row in [dict(zip(names, names, strict=True)), *rows]) for name in names]
    for row in [dict(zip(names, names, strict=True)), *rows]:
        print("  ".join(str(row[name]).ljust(width) if name == "file" else str(row[name]).rjust(width)
                        for name, width in zip(names, widths, strict=True)))


def main() -> int:
    """Run the attack; the exit code says whether there is a defect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="kinds of files whose name has this in it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", default="1/1", help="2/3: every third mutant, from the second")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", type=int, default=10, help="so many defects of each kind are told in full")
    options = parser.parse_args()
    warm.main([])
    with tempfile.TemporaryDirectory() as folder:
        clean = Path(folder) / "clean"
        clean.mkdir()
        make_clean(clean)
        jobs = list_jobs(options.mutants, options.only, options.part)
        verdicts, shown = [], Counter[str]()
        for verdict in run(jobs, seed=options.seed, clean=clean, workers=options.workers):
            verdicts.append(verdict)
            shown[verdict.kind] += bool(verdict.defects)
            if verdict.defects and shown[verdict.kind] <= options.show:
                print(f"{verdict.kind} {verdict.number}: {', '.join(verdict.defects)}, {verdict.seconds:.1f} s, "
                      f"{verdict.extra_mib:.0f} MiB\n{verdict.why}", file=sys.stderr, flush=True)
    defects = [verdict for verdict in verdicts if verdict.defects]
    rows = summary(verdicts)
    if options.json:
        print(json.dumps({"rows": rows, "defects": [asdict(verdict) for verdict in defects]}, indent=1))
    else:
        print_summary(rows)
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
