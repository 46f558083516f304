"""Mixtures of experts of the zoo: traced by folding, and one request on one H200 against what its roofline allows.

    python -m benchmarks.bench_experts [--only mixtral-8x7b] [--tokens 2048] [--compile]

A step is the sum of all operators of the forward in bfloat16, batch 1. The roofline is the larger of two times: all
operations (each token's experts only) at the rate that large products reach, and the weights that some token needs, read
once, at the bandwidth that products reach (``weft/cost/efficiency.yaml``); the second figure is by the device's peaks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from weft.cluster import read_cluster
from weft.coarsen.compiled import planned_costs
from weft.cost.op_classes import op_classes
from weft.model.probe import part_met
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.sharding.expert_rows import GROUPED_KINDS

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-7b", "gpt-oss-20b", "deepseek-v3")


def row(name: str, tokens: int, *, compiled: bool) -> str:
    """Return the line of a model."""
    begin = time.process_time()
    source = resolve_model(f"{name}:seq={tokens}", dtype="bfloat16", batch=1, mode="inference")
    graph = trace(source).graph
    seconds = time.process_time() - begin
    cluster = read_cluster("1 x H200")
    kind, shares = cluster.kinds["H200"], op_classes()["matmul"].gpu
    step_s = float(planned_costs(graph, cluster, None, "bfloat16", compiled=compiled).forward_s[:, 0].sum())
    weights = sum(float(graph.tensor_bytes[tensor]) for tensor in graph.parameters)
    unread = 0.0
    for op, operator in enumerate(graph.op_kinds):
        if operator in GROUPED_KINDS:
            matrices = int(graph.op_inputs(op)[1])
            rows = graph.tensor_shapes[int(graph.op_outputs(op)[0])][0]
            unread += float(graph.tensor_bytes[matrices]) * (1 - part_met(rows, graph.tensor_shapes[matrices][0]))
    compute_s = float(graph.flops.sum()) / kind.flop_per_s["bfloat16"]
    read_s = (weights - unread) / kind.memory_bytes_per_s
    reached_s, peak_s = max(compute_s / shares.compute, read_s / shares.memory), max(compute_s, read_s)
    return (f"| {name} | {weights / 2e9:.1f} | {weights / 1e9:.1f} | {seconds:.1f} | {graph.flops.sum() / 1e12:.1f} "
            f"| {step_s * 1e3:.1f} ms | {reached_s * 1e3:.1f} ms | {step_s / reached_s:.2f} | {step_s / peak_s:.2f} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--compile", action="store_true", help="compiled stages, as `weft plan --compile` has them")
    args = parser.parse_args(arguments)
    print("| model | 10^9 parameters | weights, GB | traced, CPU s | Tflop | step | roofline of products | times that "
          "| times the peaks' |\n|---|---|---|---|---|---|---|---|---|")
    for name in [args.only] if args.only else MODELS:
        print(row(name, args.tokens, compiled=args.compile), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
