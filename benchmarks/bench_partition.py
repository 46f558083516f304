"""Figures of the dnn-partitioning problems, each beside its reference.

    python -m benchmarks.bench_partition [--data FOLDER] [--only throughput|contiguous|latency] [--time-limit S] [--json]

Every search runs in a fresh process; times are CPU seconds over all threads, imports included. Files other than those
with a reference are searched as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"
SECTIONS = ("throughput", "contiguous", "latency")
MOST_S = 60.0
"""CPU seconds that a search may take."""

REFERENCE: dict[str, dict[str, tuple[float, bool]]] = {
    "throughput": {
        "l-bert24_inference": (17.7147, False), "l-bert24_training": (39.7895, True),
        "l-resnet50_inference": (33.4494, False), "l-resnet50_training": (76.6398, False),
        "o-bert_l-3_inference": (21.9084, True), "o-bert_l-3_training": (54.2074, True),
        "o-bert_l-6_training": (72.4717, False), "o-resnet50_inference": (124.349, False)},
    "contiguous": {"l-bert24_inference": (17.7899, True), "o-bert_l-3_inference": (27.9186, True)},
    "latency": {"l-bert24_inference": (100.218, True), "o-bert_l-3_inference": (408.471, False),
                "l-resnet50_inference": (1443.79, False)},
}
"""The best values known, and whether they are the least possible."""


def solve(path: Path, section: str, time_limit: float | None) -> dict[str, Any]:
    """Return the figures of a search in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.bench_partition", "--one", str(path), "--only", section]
    if time_limit is not None:
        command += ["--time-limit", str(time_limit)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def search_one(path: Path, section: str, time_limit: float | None) -> dict[str, Any]:
    from weft.search.place.partition.search import load_partition, solve_partition

    result = solve_partition(load_partition(path), objective="latency" if section == "latency" else "throughput",
                             contiguous=section == "contiguous", time_limit=time_limit)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"value": result.value, "bound": result.bound, "status": result.status,
            "cpu_s": usage.ru_utime + usage.ru_stime}


def rounded_up(reference: float) -> float:
    """Return the largest value that is written like the reference: references are rounded to the digits they show."""
    decimals = len(str(reference).partition(".")[2])
    return reference + 0.500001 * 10.0**-decimals


def is_reached(found: dict[str, Any], reference: float, is_optimal: bool) -> bool:
    """Return whether the figures are as good as the reference, or prove that nothing is unless it is a proof too."""
    if found["bound"] > rounded_up(reference):
        return not is_optimal and found["status"] == "optimal"
    return found["value"] <= rounded_up(reference) and (found["status"] == "optimal" or not is_optimal)


def rows(folder: Path, section: str, time_limit: float | None) -> Iterator[dict[str, Any]]:
    kind = "latency" if section == "latency" else "throughput"
    for path in sorted((folder / "place" / "dnn-partitioning" / kind).glob("*.json")):
        name = path.name.removesuffix(".json")
        known = REFERENCE[section].get(name)
        if section == "contiguous" and known is None:
            continue
        found = solve(path, section, time_limit)
        is_good = known is None or (found["cpu_s"] <= MOST_S and is_reached(found, *known))
        yield {"section": section, "name": name, **found, "reference": known[0] if known else None,
               "is_reference_optimal": known[1] if known else None, "ok": is_good if known else None}


def show(row: dict[str, Any]) -> None:
    mark = {True: "ok    ", False: "MISSED", None: "      "}[row["ok"]]
    reference = "" if row["reference"] is None else f"{row['reference']}{' optimal' if row['is_reference_optimal'] else ''}"
    if row["reference"] is not None and row["bound"] > rounded_up(row["reference"]):
        reference += ", below the proven bound: no split has it"
    print(f"{mark} {row['name']:24} {row['value']:12.6f} bound {row['bound']:12.6f} {row['status']:9} "
          f"{row['cpu_s']:6.1f} CPU-s   [{reference}]", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the dnn-partitioning problems, each beside its reference.")
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the benchmark inputs")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section to run; all if absent")
    parser.add_argument("--time-limit", type=float, help="CPU seconds of one search; its own default if absent")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(search_one(args.one, args.only[0], args.time_limit)))
        return 0
    if not (args.data / "place" / "dnn-partitioning").is_dir():
        print(f"no folder {args.data / 'place' / 'dnn-partitioning'}: nothing to measure; give the inputs' folder with --data",
              file=sys.stderr)
        return 0
    found = []
    for section in args.only or SECTIONS:
        if not args.json:
            print(f"-- {section}", flush=True)
        for row in rows(args.data, section, args.time_limit):
            found.append(row)
            if not args.json:
                show(row)
    if args.json:
        print(json.dumps(found, indent=1))
    missed = sum(row["ok"] is False for row in found)
    print(f"{missed} of {len(found)} rows missed", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
