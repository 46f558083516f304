"""By hand, on a machine with a GPU: ``python -m tests.run.cuda_check`` runs one rank on it and verifies the result."""

from __future__ import annotations

import sys

from tests.run.plans import MODELS, greedy_order, pipeline_plan, traced
from weft.run.launch import run_plan
from weft.run.result import RunOptions


def main() -> int:
    graph = traced("tiny_gpt").graph
    failed = False
    for split in (False, True):
        for recompute in (False, True):
            plan = pipeline_plan(graph, [0] * 3, greedy_order([0] * 3, 4, split=split), microbatches=4, optimizer="adamw",
                                 recompute=recompute)
            for dtype in ("float64", "float32"):
                options = RunOptions(dtype=dtype, device="cuda", verify=True, steps=3, warmup=1)
                result = run_plan(plan, f"{MODELS}:tiny_gpt", options=options)
                print(split, recompute, dtype, result.losses, result.step_time_s, result.verification, flush=True)
                failed |= result.verification is None or not result.verification.passed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
