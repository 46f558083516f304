"""Predicted against real training plans: for each row of a file the time of an iteration and the fullest GPU's memory.

    python -m benchmarks.measured [FILE] [--json]

``FILE`` holds measured plans with layer profiles and link fits (``benchmarks.measured_file`` says in which form);
without it, the 15 plans of OPT-350 on GH200 in ``../shared/data/measured`` are taken, where they are.
``benchmarks.measured_predict`` predicts; nothing there is fitted to measured rows. Errors are parts of the real value:
0.05 is five per cent too much.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured_file import MeasuredFile, load_measured
from benchmarks.measured_predict import predict
from weft.base.errors import InputError, WeftError, printable

DEFAULT: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "measured" / "opt350-gh200.json"
REFERENCE: Final = "OPT-350 on GH200: at most 8 % and 5.5 %, at least 0.95; Sailor's own simulator: 8.9 % and 5.9 %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One plan, predicted and real; what was not measured is null."""

    name: str
    predicted_iteration_s: float
    real_iteration_s: float | None
    time_error: float | None
    predicted_peak_bytes: int
    real_peak_bytes: int | None
    memory_error: float | None
    pipeline_s: float
    gradients_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All plans together; null where too little was measured."""

    rows: int
    mean_time_error: float | None
    mean_memory_error: float | None
    rank_correlation: float | None
    """Spearman's, of predicted and real times."""
    skipped: dict[str, str]
    """Rows that could not be predicted, and why."""


def compare(file: MeasuredFile) -> tuple[list[Comparison], dict[str, str]]:
    """Return every row of the file that can be predicted, predicted and real, and why the others cannot."""
    result, skipped = [], dict(file.skipped)
    for row in file.rows:
        try:
            found = predict(file, row)
        except InputError as problem:
            skipped[row.name] = str(problem)
            continue
        result.append(Comparison(
            name=row.name, predicted_iteration_s=found.seconds, real_iteration_s=row.real_iteration_s,
            time_error=_error(found.seconds, row.real_iteration_s), predicted_peak_bytes=round(found.peak_bytes),
            real_peak_bytes=None if row.real_peak_bytes is None else round(row.real_peak_bytes),
            memory_error=_error(found.peak_bytes, row.real_peak_bytes), pipeline_s=found.pipeline_s,
            gradients_s=found.gradients_s, update_s=found.update_s))
    if not result:
        raise InputError(f"no row can be predicted. {next(iter(skipped))}: {next(iter(skipped.values()))}")
    return result, skipped


def summarize(rows: Sequence[Comparison], skipped: Mapping[str, str] = MappingProxyType({})) -> Summary:
    """Return mean errors, without their signs, and the rank correlation of the times."""
    timed = [(row.predicted_iteration_s, row.real_iteration_s) for row in rows if row.real_iteration_s is not None]
    return Summary(rows=len(rows), skipped=dict(skipped), mean_time_error=_mean([row.time_error for row in rows]),
                   mean_memory_error=_mean([row.memory_error for row in rows]),
                   rank_correlation=rank_correlation([one for one, _ in timed], [other for _, other in timed]))


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, equal values sharing their rank; None where a side has one value only.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    if len(set(left)) < 2 or len(set(right)) < 2:
        return None
    one, other = _ranks(left), _ranks(right)
    one, other = one - one.mean(), other - other.mean()
    return float((one * other).sum() / math.sqrt((one * one).sum() * (other * other).sum()))


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place.reshape(-1)]


def _error(predicted: float, real: float | None) -> float | None:
    return None if real is None else predicted / real - 1


def _mean(errors: Sequence[float | None]) -> float | None:
    known = [abs(error) for error in errors if error is not None]
    return math.fsum(known) / len(known) if known else None


def show(rows: Sequence[Comparison], summary: Summary, *, reference: str) -> None:
    """Print the table and the summary."""
    names = [printable(row.name) for row in rows]
    width = max(map(len, names))
    print(f"{'plan':{width}}  {'predicted s':>11}  {'real s':>9}  {'error':>8}  {'predicted GB':>12}  {'real GB':>9}  "
          f"{'error':>8}")
    for name, row in zip(names, rows, strict=True):
        print(f"{name:{width}}  {row.predicted_iteration_s:11.4f}  {_number(row.real_iteration_s, '.4f'):>9}  "
              f"{_percent(row.time_error, '+.1f'):>8}  {row.predicted_peak_bytes / 1e9:12.2f}  "
              f"{_number(row.real_peak_bytes, '.2f', 1e9):>9}  {_percent(row.memory_error, '+.1f'):>8}")
    print(f"mean error: time {_percent(summary.mean_time_error)}, memory {_percent(summary.mean_memory_error)}; "
          f"rank correlation of times {_number(summary.rank_correlation, '.4f')}{reference}")


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:{form}}"


def _percent(error: float | None, form: str = ".1f") -> str:
    return "-" if error is None else f"{100 * error:{form}} %"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return 2, with a message, if the file cannot be used."""
    parser = argparse.ArgumentParser(description="Predicted against real training plans.")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE",
                        help=f"measured plans; default {DEFAULT.name} in ../shared/data/measured")
    parser.add_argument("--json", action="store_true", help="print rows and summary as JSON")
    args = parser.parse_args(arguments)
    try:
        if args.file is None and not DEFAULT.exists():
            raise InputError(f"the default, ../shared/data/measured/{DEFAULT.name}, is not beside this repository: "
                             "name a FILE")
        rows, skipped = compare(load_measured(args.file or DEFAULT))
    except WeftError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    summary = summarize(rows, skipped)
    for name, why in skipped.items():
        print(f"note: {printable(name)} is left out: {printable(why)}", file=sys.stderr)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "summary": asdict(summary)}, indent=1))
    else:
        show(rows, summary, reference=f"   [{REFERENCE}]" if args.file is None else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
