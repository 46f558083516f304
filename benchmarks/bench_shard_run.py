"""Searched shardings, executed: loss and gradients of several processes against one; and gradients beside the backward.

    python -m benchmarks.bench_shard_run [--only executed|overlap] [--model M ...] [--json]

For each model and mesh the search finds the sharding for four slow devices on fast links, so that everything is split
that can be; four processes run it, and all gradients are compared with those of one process. Controls that must fail
are in ``tests/run/test_sharded*.py``.

``overlap`` runs data parallelism on two processes of this machine, gradients in one bucket and in several that are
exchanged beside the backward, and compares each step with its prediction (costs: probe and profile of this machine).
On a CPU an exchange takes time from the computing, so what overlap hides on links between GPUs it hides here in part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.sections import Row, run_sections
from weft.cluster.cluster_file import parse_cluster
from weft.cluster.probe import probe
from weft.cost.costs import estimate_costs
from weft.cost.profile import ProfileStore
from weft.cost.profiler import profile_model
from weft.model.folded import trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.plan import Optimizer
from weft.plan.program import inside_backward
from weft.run.launch import run_plan
from weft.run.result import RunOptions
from weft.search.common.problem import PlanOptions, Problem, add_gradients
from weft.search.joint.baselines import data_parallel
from weft.search.shard.compare import search_plan
from weft.simulate.timing import simulate

CASES = (
    ("gpt2-tiny", (4,), 4, None), ("gpt2-tiny", (4,), 4, "megatron"), ("gpt2-tiny", (2, 2), 4, "megatron"),
    ("gpt2-tiny:seq=30", (4,), 6, "sequence"),
    ("llama-tiny", (4,), 4, None), ("llama-tiny", (2, 2), 4, None), ("llama-tiny", (4,), 4, "megatron"),
    ("t5-base:layers=2,hidden=64,heads=4,ffn=128,vocab=512,seq=16", (4,), 4, None),
    ("vit-base:layers=2,hidden=64,heads=4,ffn=128,image=32,classes=10", (2, 2), 4, None),
    ("mixtral-8x:layers=2,hidden=64,heads=8,ffn=128,vocab=512,seq=16", (4,), 4, None),
)
TOLERANCE = 1e-10
ROUNDED = {("llama-tiny", "megatron"): 1e-6}
"""LLaMA's norms round to float32 inside, in float64 too. Where a plan adds up what they read in another order than one
process, the last bit may fall the other way, and 1e-16 becomes 1e-7."""


def slow_cluster(num_devices: int = 4) -> object:
    """Return devices so slow, on links so fast, that splitting always pays."""
    names = [f"d{index}" for index in range(num_devices)]
    return {"format": "weft.cluster", "version": 1,
            "kinds": {"slow": {"flops": {"float32": 1e8, "float64": 1e8}, "memory": "8GiB", "memory_bandwidth": "1GB/s"}},
            "devices": [{"name": name, "kind": "slow", "host": "h"} for name in names],
            "links": [{"from": a, "to": b, "bandwidth": "100GB/s", "latency": "0.1us"}
                      for index, a in enumerate(names) for b in names[index + 1:]]}


def executed(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each model, mesh and plan."""
    cluster = parse_cluster(slow_cluster())
    for model, shape, batch, name in CASES:
        if options.model and model not in options.model:
            continue
        source = resolve_model(model, mode="training", batch=batch, dtype="float64")
        assert isinstance(source, ModelSource)
        folded = trace_folded(source, batch=batch)
        plan = search_plan(folded, cluster, shape=shape, optimizer=Optimizer(kind="none"), name=name)
        check = run_plan(plan, model, options=RunOptions(verify=True, dtype="float64")).verification
        assert check is not None
        words = plan.stages[0].sharding
        limit = ROUNDED.get((model, name or ""), TOLERANCE)
        why = " (float32 in the module's norms)" if limit > TOLERANCE else ""
        yield Row(f"{model}, batch {batch}, mesh {'x'.join(map(str, shape))}, {name or 'best'}",
                  f"loss {check.loss_error:.1e}, gradients {check.gradient_error:.1e} over {check.num_gradients}; "
                  f"{len(words.ops)} operators split", f"<= {limit:.0e}{why}",
                  check.loss_error <= limit and check.gradient_error <= limit)


OVERLAP_MODEL, OVERLAP_BATCH = "vit-base:layers=4,image=64,classes=100", 16


def overlap(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for data parallelism with one bucket, and one with several beside the backward."""
    source = resolve_model(OVERLAP_MODEL, mode="training", batch=OVERLAP_BATCH // 2)
    assert isinstance(source, ModelSource)
    traced, cluster = trace(source, batch=OVERLAP_BATCH // 2), probe(2, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = ProfileStore(Path(folder) / "profile.db")
        profile_model(traced, "cpu", store, passes=3)
        costs = estimate_costs(traced.graph, cluster, profile=store)
    problem = Problem(graph=traced.graph, cluster=cluster, costs=costs, options=PlanOptions(
        batch=OVERLAP_BATCH, optimizer=Optimizer(kind="none")))
    several = data_parallel(problem, 1)
    steps = []
    for plan in (add_gradients(several, traced.graph), several):
        program = lower(plan, traced.graph)
        predicted = simulate(program, costs, cluster).step_time_s
        measured = min(run_plan(plan, OVERLAP_MODEL, options=RunOptions(warmup=2, steps=8)).step_times_s)
        steps.append((predicted, measured))
        num_early = int((inside_backward(program) >= 0).sum()) // program.num_ranks
        yield Row(f"{OVERLAP_MODEL}, batch {OVERLAP_BATCH}, data parallel on 2 processes, {len(plan.gradients)} buckets",
                  f"predicted {predicted * 1e3:.0f} ms, measured {measured * 1e3:.0f} ms (best of 8); {num_early} issued inside",
                  "for information")
    (one, one_measured), (many, many_measured) = steps
    yield Row("step with buckets / step with one", f"predicted {many / one:.3f}, measured {many_measured / one_measured:.3f}",
              "predicted <= 1", many <= one)


def main() -> int:
    parser = argparse.ArgumentParser(description="Searched shardings, executed against one process.")
    parser.add_argument("--only", action="append", choices=("executed", "overlap"))
    parser.add_argument("--model", action="append", help="only this one")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    return run_sections(dict.fromkeys(("executed", "overlap"), "bench_shard_run"), args, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
