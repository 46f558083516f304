"""Architectures that Weft was not made for: traced, planned, and run in two ways that must equal one process.

    python -m benchmarks.bench_foreign [--only mixtral,bart] [--all] [--json]

Each model (``benchmarks.foreign_models``: tiny, random weights, the library's own settings) is traced for training and
planned for two devices. Then a pipeline of two stages and a sharding over two devices are run on two CPU processes in
float64; loss and all gradients are compared with the plain module in one process. Without ``--all`` or ``--only`` these
are the twelve that are asked for. The sharding is the search's for two devices with a very fast link, so that it splits
what it can; where it still splits nothing, the plain rule of ``weft.search.joint.placements`` is taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.foreign_models import ARCHITECTURES, BATCH, REQUIRED
from tests.run.pool import Pool
from weft.base.errors import WeftError
from weft.cluster import read_cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.folded import trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import TracedModel, trace
from weft.plan.plan import Optimizer, Plan, Replica, Stage
from weft.planning.compare import compare_strategies
from weft.search.common.problem import PlanOptions, Problem, add_gradients
from weft.search.joint.baselines import STRATEGIES
from weft.search.joint.placements import spread
from weft.search.shard.compare import search_plan
from weft.sharding.named_ops import named_ops

TOLERANCE = 1e-10
MODELS = Path(__file__).with_name("foreign_models.py")
_FAST_LINK = {
    "format": "weft.cluster", "version": 1,
    "devices": [{"name": f"d{index}", "kind": "slow", "flops": {"float64": 1e9, "float32": 1e9}, "memory": "64GiB",
                 "memory_bandwidth": "1GB/s"} for index in range(2)],
    "links": [{"from": "d0", "to": "d1", "bandwidth": "100TB/s", "latency": "0s"}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an architecture came to; errors are relative, None where it was not run."""

    name: str
    num_ops: int = 0
    planned: str = ""
    """The best plain strategy for two GPUs, by simulation."""
    pipeline_error: float | None = None
    sharding_error: float | None = None
    num_split: str = ""
    """Parameters that are stored in parts, of all."""
    seconds: float = 0.0
    note: str = ""

    @property
    def passed(self) -> bool:
        """Return whether both runs equal one process."""
        return all(error is not None and error <= TOLERANCE for error in (self.pipeline_error, self.sharding_error))


def run_case(name: str, folder: Path) -> Result:
    """Return what an architecture comes to."""
    kind, begin = ARCHITECTURES[name], time.process_time()
    spec = f"{MODELS}:{name}" + (":in_eval_mode" if kind.in_eval_mode else "")
    notes = [text for text in ("eval mode" if kind.in_eval_mode else "", kind.note) if text]
    found: dict[str, Any] = {}
    try:
        traced = trace(_source(spec), batch_dims=True)
        found["num_ops"] = traced.graph.num_ops
        problem = _problem(traced, kind.microbatches)
        found["planned"] = compare_strategies(problem).best.strategy
        with Pool(2, folder, models=()) as pool:
            plan = STRATEGIES["1f1b"](problem, kind.microbatches)
            found["pipeline_error"] = _run(pool, plan, spec, notes)
            plan = _sharded(traced, kind.microbatches)
            tensors, parameters = plan.stages[0].sharding.tensors, _parameters(traced)
            found["num_split"] = f"{sum('S' in tensors.get(item, ('',))[0] for item in parameters)}/{len(parameters)}"
            found["sharding_error"] = _run(pool, plan, spec, notes)
    except (WeftError, AssertionError) as problem_found:
        notes.append(f"{type(problem_found).__name__}: {str(problem_found)[:300]}")
    return Result(name=name, note="; ".join(notes), seconds=time.process_time() - begin, **found)


def _source(spec: str) -> ModelSource:
    source = resolve_model(spec, dtype="float64", batch=BATCH)
    assert isinstance(source, ModelSource)
    return source


def _problem(traced: TracedModel, microbatches: int) -> Problem:
    cluster = read_cluster("2 x A100-80GB")
    return Problem(graph=traced.graph, cluster=cluster, costs=estimate_costs(traced.graph, cluster), options=PlanOptions(
        batch=BATCH, microbatches=microbatches, dtype="float64", optimizer=Optimizer(kind="none")))


def _parameters(traced: TracedModel) -> dict[str, tuple[int, ...]]:
    graph = traced.graph
    return {graph.tensor_names[tensor]: graph.tensor_shapes[tensor] for tensor in graph.parameters}


def _sharded(traced: TracedModel, microbatches: int) -> Plan:
    """Return a plan of one stage over two devices: the search's, or by the plain rule where that splits nothing."""
    cluster = parse_cluster(_FAST_LINK, where="fast link")
    plan = search_plan(trace_folded(traced.source), cluster, shape=(2,), optimizer=Optimizer(kind="none"))
    if any("S" in word for words in plan.stages[0].sharding.tensors.values() for word in words):
        return plan
    sharding = spread(named_ops(traced), _parameters(traced), 2)
    stage = Stage(name="s0", ops=traced.graph.op_names, sharding=sharding,
                  replicas=(Replica(devices=("d0", "d1"), mesh={"tensor": 2}),))
    actions = tuple(f"s0:{phase}:{number}" for phase in "FB" for number in range(microbatches))
    return add_gradients(Plan(
        model=plan.model, cluster=plan.cluster, microbatches=microbatches, stages=(stage,), gradients=(),
        order=dict.fromkeys(("d0", "d1"), actions), optimizer=plan.optimizer), traced.graph)


def _run(pool: Pool, plan: Plan, spec: str, notes: list[str]) -> float | None:
    """Return the largest relative error of loss and gradients; None, with a note, if the run fails."""
    try:
        check = pool.run(plan, spec)["verification"]
    except AssertionError as problem:
        notes.append(str(problem).splitlines()[0][:300])
        return None
    return float(max(check["loss_error"], check["gradient_error"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return 1 if a model was not run in both ways or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--all", action="store_true", help="all architectures, not only the twelve")
    parser.add_argument("--json", action="store_true", help="the results as JSON")
    args = parser.parse_args(arguments)
    names = args.only.split(",") if args.only else list(ARCHITECTURES if args.all else REQUIRED)
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}: choose from {', '.join(ARCHITECTURES)}")
    results = []
    with tempfile.TemporaryDirectory(prefix="weft-foreign-") as folder:
        if not args.json:
            print(f"{'architecture':16} {'ops':>5} {'planned':12} {'pipeline':>9} {'sharding':>9} {'split':>8}  notes")
        for name in names:
            results.append(run_case(name, Path(folder)))
            if not args.json:
                print(_line(results[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(item) for item in results], indent=1))
    else:
        print(f"{sum(item.passed for item in results)} of {len(results)} equal one process in both ways "
              f"(1e-10), {sum(item.seconds for item in results):.0f} CPU s beside the ranks'")
    return 0 if all(item.passed for item in results) else 1


def _line(item: Result) -> str:
    errors = [f"{'-' if error is None else format(error, '.0e'):>9}"
              for error in (item.pipeline_error, item.sharding_error)]
    return f"{item.name:16} {item.num_ops:5} {item.planned:12} {' '.join(errors)} {item.num_split:>8}  {item.note}"


if __name__ == "__main__":
    sys.exit(main())
