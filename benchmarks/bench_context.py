"""Plans with a context axis: long samples on few devices, against the best plan without one.

    python -m benchmarks.bench_context [--lengths 8192 32768 131072] [--batch 1] [--json]

Each row is LLaMA-3-8B in bfloat16 on 8 H100 as ``weft plan`` plans it (the joint search alone): the step, tokens a
second, what the plan is and how long planning took; then the best plan without a context axis. Planning must take at most
60 CPU seconds, and the plan be no slower than that without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from unittest import mock

from benchmarks.sections import Row, show
from weft.base.errors import NoFeasiblePlan
from weft.cluster.cluster_file import read_cluster
from weft.planning.make import SearchOptions, search_plans
from weft.search.common.problem import PlanOptions
from weft.search.deploy import find_splits
from weft.search.joint.search import Tried

CLUSTER = "8 x H100-80GB"
MAX_CPU_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a length came to."""

    length: int
    batch: int
    plan: str
    step_s: float
    tokens_per_s: float
    cpu_s: float
    without: str
    """The best plan without a context axis."""
    without_s: float | None


def best_of(length: int, batch: int, *, has_context: bool) -> tuple[Tried | None, float]:
    """Return the best setting with its simulated step, None where nothing fits, and the CPU seconds of planning."""
    begin = time.process_time()
    shortest = find_splits.CONTEXT_LENGTH if has_context else length + 1
    with mock.patch.object(find_splits, "CONTEXT_LENGTH", shortest):
        try:
            found = search_plans(f"llama-3-8b:seq={length}", read_cluster(CLUSTER), PlanOptions(
                batch=batch, dtype="bf16"), SearchOptions(joint=True, deploy=False, strategies=()))
        except NoFeasiblePlan:
            return None, time.process_time() - begin
    tried = [item for item in found.comparison.best.tried if item.step_time_s is not None]
    return min(tried, key=lambda item: item.step_time_s or 0.0), time.process_time() - begin


def planned(length: int, batch: int) -> Planned:
    """Return the row of a length."""
    best, cpu_s = best_of(length, batch, has_context=True)
    plain, _ = best_of(length, batch, has_context=False)
    assert best is not None, "it fits with a context axis"
    assert best.step_time_s is not None
    return Planned(length=length, batch=batch, plan=best.setting.describe(), step_s=best.step_time_s,
                   tokens_per_s=length * batch / best.step_time_s, cpu_s=cpu_s,
                   without="does not fit" if plain is None else plain.setting.describe(),
                   without_s=None if plain is None else plain.step_time_s)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a row was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = [planned(length, batch) for length in options.lengths for batch in options.batch]
    if options.json:
        print(json.dumps([asdict(item) for item in found], indent=1))
    rows = []
    for item in found:
        reference = item.without if item.without_s is None else f"{item.without_s:.3f} s: {item.without}"
        rows.append(Row(what=f"llama-3-8b, sequence {item.length:,}, batch {item.batch}: {item.plan}",
                        figure=f"{item.step_s:.3f} s, {item.tokens_per_s:,.0f} tokens/s, planned in {item.cpu_s:.0f} CPU-s",
                        reference=f"without a context axis {reference}",
                        ok=item.cpu_s <= MAX_CPU_S and (item.without_s is None or item.step_s <= 1.001 * item.without_s)))
        if not options.json:
            show(rows[-1])
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
