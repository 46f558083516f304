"""By hand, on a machine with a GPU: ``python -m tests.run.cuda_check`` runs one rank on it, then two that exchange
gradients inside the backward, and verifies the results."""

from __future__ import annotations

import sys
from dataclasses import replace

from tests.run.plans import MODELS, greedy_order, pipeline_plan, traced
from tests.run.test_overlap import CASES
from weft.plan.program import Op
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
    return int(failed or not exchanges_inside())


def exchanges_inside() -> bool:
    """Return whether gradients that two ranks of one GPU exchange inside the backward are right, and issued there."""
    passed = True
    for case in ("tied weights", "recomputation", "sequence, all on one group"):
        model, make = CASES[case]
        plan = make()
        plan = replace(plan, cluster=replace(plan.cluster, devices=plan.cluster.devices[:2]), order={
            device: actions for device, actions in plan.order.items() if device in plan.cluster.devices[:2]})
        options = RunOptions(dtype="float64", device="cuda:0@50%,cuda:0@50%", verify=True, steps=3, warmup=1)
        result = run_plan(plan, f"{MODELS}:{model}" if "gpt2" not in model else model, options=options)
        timeline = result.timeline
        ends = timeline.end_s[timeline.previous[timeline.op == Op.COLLECTIVE]]
        lead = ends.max() - timeline.start_s[timeline.op == Op.COLLECTIVE].min()
        print(case, result.verification, f"the first exchange begins {lead * 1e3:.3f} ms before the backward ends", flush=True)
        passed &= result.verification is not None and result.verification.passed and lead > 0
    return passed


if __name__ == "__main__":
    sys.exit(main())
