"""Golden cases of ``weft plan``: no later state may predict a slower plan, or lose one that fitted.

    python -m benchmarks.bench_golden [--only NAME ...] [--workers 2] [--json]
    python -m benchmarks.bench_golden --write      keeps what is found as the new reference

Each case of ``benchmarks.golden_cases`` is planned as the command does it, without a time limit, in a fresh process. Its
step time and the peak memory of its fullest device are held against ``benchmarks/golden/plans.json``. Ties may be
broken in another way, so a step may be slower by at most 0.5 %; a case for which no plan was found may find one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.golden_cases import CASES

ROOT: Final = Path(__file__).resolve().parents[1]
REFERENCE: Final = ROOT / "benchmarks" / "golden" / "plans.json"
SLOWER: Final = 1.005
"""So many times the reference's step is still as good."""
NOTHING_FITS: Final = 3
"""Exit code of the command where no plan fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a case came to."""

    step_time_s: float | None
    """None where nothing fits."""
    peak_bytes: int = 0
    strategy: str = ""
    cpu_s: float = 0.0


def plan_case(name: str) -> Planned:
    """Return what ``weft plan`` finds for a case; raise ``RuntimeError`` if the command fails."""
    from weft.cli.main import main

    os.chdir(ROOT)
    begin, out, err = time.process_time(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", *shlex.split(CASES[name]), "--json", "--quiet"])
    spent = round(time.process_time() - begin, 1)
    if code == NOTHING_FITS:
        return Planned(step_time_s=None, cpu_s=spent)
    if code:
        raise RuntimeError(f"{name}: exit code {code}: {err.getvalue()[-500:]}")
    found = json.loads(out.getvalue())
    best = next(row for row in found["strategies"] if row["strategy"] == found["best"])
    return Planned(step_time_s=found["step_time"], peak_bytes=max(best["peak_memory"].values()),
                   strategy=found["best"], cpu_s=spent)


def plan_cases(names: Sequence[str], workers: int) -> Iterator[tuple[str, Planned]]:
    """Yield what the cases come to, in their order; each has a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=workers, mp_context=context, max_tasks_per_child=1) as pool:
        yield from zip(names, pool.map(plan_case, names), strict=True)


def is_worse(now: Planned, before: Planned | None) -> bool:
    """Return whether a plan is slower than its reference, or lost."""
    if before is None or before.step_time_s is None:
        return False
    return now.step_time_s is None or now.step_time_s > before.step_time_s * SLOWER


def read_reference() -> dict[str, Planned]:
    """Return what the cases came to when the reference was written."""
    rows = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return {name: Planned(**row) for name, row in rows.items()}


def show(name: str, now: Planned, before: Planned | None) -> None:
    """Print a case beside its reference."""
    def text(item: Planned | None) -> str:
        if item is None:
            return "no reference"
        if item.step_time_s is None:
            return "nothing fits"
        return f"{1e3 * item.step_time_s:10.2f} ms {item.peak_bytes / 2**30:6.2f} GiB {item.strategy:16}"

    mark = "WORSE" if is_worse(now, before) else "ok   "
    print(f"{mark} {name:32} {text(now):42} [{text(before)}]  {now.cpu_s:.0f} CPU-s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), metavar="NAME")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep what is found as the reference")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    before = read_reference() if REFERENCE.exists() else {}
    found = {}
    for name, row in plan_cases(args.only or list(CASES), args.workers):
        found[name] = row
        if not args.json:
            show(name, row, before.get(name))
    if args.json:
        print(json.dumps({name: asdict(row) for name, row in found.items()}, indent=1))
    if args.write:
        merged = {**before, **found}
        text = json.dumps({name: asdict(merged[name]) for name in CASES if name in merged}, indent=1) + "\n"
        REFERENCE.write_text(text, encoding="utf-8")
        return 0
    worse = [name for name, row in found.items() if is_worse(row, before.get(name))]
    print(f"{len(worse)} of {len(found)} cases are worse than their reference", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
