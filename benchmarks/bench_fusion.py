"""What fusion leaves: operators before and after coarsening, for every model of the zoo (inference, batch 1).

    python benchmarks/bench_fusion.py                    all models by rules, a few by inductor; about two minutes
    python benchmarks/bench_fusion.py gpt2 swin-t        only these, both ways
    python benchmarks/bench_fusion.py --json             the same facts for machines

``const`` are operators that any device computes for itself, which are not placed. ``rules`` are the groups by Weft's
table of fusions, ``inductor`` those of PyTorch's compiler for the CPU (which calls a library for each convolution and
matrix product and fuses nothing into them there). Seconds are CPU time without tracing. Exit status 1 if some model
keeps more than 60 % of its operators by the rules.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

QUICK = ("gpt2-tiny", "llama-tiny", "vit-base", "swin-t", "resnet-50", "convnext-t", "vgg-19", "inception-v3", "lstm")
"""Models that inductor takes less than 20 CPU-seconds for."""
LIMIT = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRow:
    """How many operators one model has before and after fusion."""

    model: str
    num_ops: int
    num_constants: int
    """Of them, those that any device computes for itself: they are not placed."""
    num_rules: int
    """Groups by the table of rules."""
    num_inductor: int | None
    """Groups by inductor; None where it was not asked."""
    rules_s: float
    """CPU seconds of the rules and the contraction."""
    inductor_s: float | None


def fusion_report(models: Iterable[str], *, inductor: Collection[str] = (), batch: int = 1) -> Iterator[FusionRow]:
    """Yield one row for each zoo model, traced for inference; those in ``inductor`` also as inductor fuses them."""
    from weft.coarsen.coarsen import coarsen, find_groups
    from weft.coarsen.groups import NO_GROUP
    from weft.model.load import trace_model

    for name in models:
        traced = trace_model(name, mode="inference", batch=batch)
        start = time.process_time()
        coarse = coarsen(traced)
        rules_s = time.process_time() - start
        num_inductor, inductor_s = None, None
        if name in inductor:
            start = time.process_time()
            num_inductor = find_groups(traced, "inductor").num_groups
            inductor_s = time.process_time() - start
        yield FusionRow(model=name, num_ops=traced.graph.num_ops,
                        num_constants=int((coarse.groups.of_op == NO_GROUP).sum()), num_rules=coarse.groups.num_groups,
                        num_inductor=num_inductor, rules_s=rules_s, inductor_s=inductor_s)


def main() -> None:
    from weft.model.zoo import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="zoo names or specs (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    names = options.models or list(MODELS)
    if not options.json:
        print(f"{'model':13} {'ops':>5} {'const':>5} {'rules':>5} {'left':>5} {'s':>6} {'inductor':>8} {'s':>6}")
    rows = []
    for row in fusion_report(names, inductor=options.models or QUICK):
        rows.append(row)
        if not options.json:
            after = f"{row.num_inductor:8} {row.inductor_s:6.1f}" if row.num_inductor is not None else f"{'-':>8}"
            print(f"{row.model:13} {row.num_ops:5} {row.num_constants:5} {row.num_rules:5} "
                  f"{row.num_rules / row.num_ops:5.0%} {row.rules_s:6.2f} {after}", flush=True)
    kept = all(row.num_rules <= LIMIT * row.num_ops for row in rows)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "limit": LIMIT, "kept": kept}, indent=1))
    else:
        print(f"at most {LIMIT:.0%} of the operators left: {'kept' if kept else 'MISSED'}")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
