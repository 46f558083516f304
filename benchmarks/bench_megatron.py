"""GPT models on up to thousands of A100: Weft's prediction against the published throughput, and Weft's own plan.

    python -m benchmarks.bench_megatron [FILE] [--only predicted|planned] [--rows N ...] [--json]

``FILE`` holds rows of model sizes, tensor and pipeline degrees, GPUs, batch and measured TFLOP/s per GPU; without it
those of ``../shared/data/measured/megatron-a100.json`` are taken, where they are. Nothing is fitted to the rows: costs
are the presets' rates (data sheets) times the efficiencies of operator classes (``weft/cost/efficiency.yaml``, fitted to
profiles on one H200), links by their nominal rates. What the rows do not tell, samples per micro-batch and chunks per
GPU, is chosen as predicted best. Each row is planned in a fresh process, whose CPU time and memory are counted, tracing
included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sections import Row, show
from weft.base.errors import InputError, NoFeasiblePlan, WeftError, printable
from weft.base.files import load_json
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.load import load_graph_for
from weft.plan.plan import Optimizer
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.find_splits import load_splits
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimate, Estimator
from weft.search.joint.layouts import Layout, Setting, even, tp_groups_of
from weft.search.joint.search import joint_search

DEFAULT: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "measured" / "megatron-a100.json"
SEQUENCE: Final = 2048
VOCABULARY: Final = 51200
DTYPE: Final = "bfloat16"
PER_HOST: Final = 8
SAMPLES: Final = (1, 2, 4, 8, 16)
"""Samples of a micro-batch on one replica that are tried."""
CHUNKS: Final = (1, 2, 3, 4)
MEAN, WORST = 0.10, 0.20
MAX_CPU_S, MAX_BYTES = 60.0, 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row of the file."""

    params_b: float
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    tflops_per_gpu: float

    @property
    def model(self) -> str:
        """Return the model's name in Weft's zoo."""
        return (f"gpt2:layers={self.layers},hidden={self.hidden},heads={self.heads},seq={SEQUENCE},"
                f"vocab={VOCABULARY}")

    @property
    def flop(self) -> float:
        """Return the model's FLOP in a step as the paper counts them, recomputation included."""
        size = self.layers * self.hidden
        return 96.0 * self.batch * SEQUENCE * size * self.hidden * (
            1 + SEQUENCE / (6 * self.hidden) + VOCABULARY / (16 * size))

    def rate(self, seconds: float) -> float:
        """Return TFLOP/s per GPU of a step that takes so long."""
        return self.flop / seconds / self.gpus / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What Weft says of one row."""

    published: Published
    predicted_s: float | None
    setting: str
    chosen_s: float | None = None
    chosen: str = ""
    cpu_s: float = 0.0
    peak_bytes: int = 0

    @property
    def error(self) -> float:
        """Return the predicted throughput against the published, 0.1 for ten per cent more."""
        return self.published.rate(self.predicted_s or float("inf")) / self.published.tflops_per_gpu - 1


def read_rows(path: Path) -> list[Published]:
    """Return the file's rows; raise ``InputError`` where it is not as it should be."""
    value: Any = load_json(path, error=InputError)
    try:
        return [Published(**row) for row in value["rows"]]
    except (KeyError, TypeError) as problem:
        raise InputError(f"{path}: not rows of {', '.join(Published.__slots__)}: {problem}") from problem


def make_problem(row: Published) -> Problem:
    """Return the model on nodes of 8 A100 with NVLink and one link of 200 Gbit/s for each GPU."""
    if row.gpus % PER_HOST:
        raise InputError(f"{row.gpus} GPUs are no whole nodes of {PER_HOST}")
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "name": f"{row.gpus} A100",
        "hosts": [{"name": "n", "count": row.gpus // PER_HOST, "devices": f"{PER_HOST} x A100-80GB",
                   "intra": "nvlink3"}],
        "network": {"bandwidth": "200Gbit/s", "latency": "5us", "per": "device"}})
    graph = load_graph_for(row.model, mode="training", batch=1, dtype=DTYPE, batch_dims=True)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster, dtype=DTYPE),
                   options=PlanOptions(batch=row.batch, dtype=DTYPE, optimizer=Optimizer(kind="adam")))


def even_layout(cluster: Cluster, degree: int, num_stages: int) -> Layout:
    """Return all devices in tp groups of ``degree``, in equal stages; raise ``InputError`` if they cannot be."""
    groups = cluster.groups_by_host_and_kind()
    found = even([tp_groups_of(group, degree) for group in groups], num_stages)
    layout = next((layout for layout in found if len(layout) == num_stages), None)
    if layout is None or any(len(group) % degree for group in groups):
        raise InputError(f"{cluster.num_devices} devices cannot be divided into {num_stages} stages of tp groups of "
                         f"{degree}: choose degrees whose product divides their number")
    return layout


def predict(row: Published, estimator: Estimator) -> Estimate:
    """Return the estimate of the published degrees with recomputation; micro-batches and chunks as is best."""
    layout = even_layout(estimator.problem.cluster, row.tensor, row.pipeline)
    replicas = row.gpus // (row.tensor * row.pipeline)
    found, miss = [], None
    for samples in SAMPLES:
        count, rest = divmod(row.batch, replicas * samples)
        for chunks in CHUNKS if row.pipeline > 1 else (1,):
            if rest or (chunks > 1 and count % row.pipeline):
                continue
            try:
                found.append(estimator.by_path(estimator(Setting(
                    layout=layout, microbatches=count, chunks=chunks, recompute=True))))
            except NoFeasiblePlan as problem:
                miss = problem
    if not found:
        raise miss or InputError(f"a batch of {row.batch} cannot be divided over {replicas} replicas")
    return min(found, key=lambda item: item.step_time_s)


def measure(row: Published, plans: bool) -> Outcome:
    """Return what Weft says of a row; run in a process of its own."""
    begin = time.process_time()
    problem = make_problem(row)
    splits = load_splits(row.model, problem, lambda graph: estimate_costs(graph, problem.cluster, dtype=DTYPE),
                         report=lambda text: None)
    found = joint_search(problem, splits) if plans else None
    cpu_s, peak = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        given = predict(row, Estimator(Chain(problem, splits)))
    except NoFeasiblePlan as miss:
        return Outcome(published=row, predicted_s=None, setting=str(miss))
    return Outcome(published=row, predicted_s=given.step_time_s, setting=given.setting.describe(),
                   chosen_s=found.step_time_s if found else None, chosen=found.setting.describe() if found else "",
                   cpu_s=cpu_s, peak_bytes=peak)


def rows_of(outcomes: Sequence[Outcome], *, plans: bool) -> Iterator[Row]:
    """Yield the rows to print."""
    for item in outcomes:
        row = item.published
        name = f"{row.params_b:g} billion parameters on {row.gpus} A100, tensor {row.tensor}, pipeline {row.pipeline}"
        if item.predicted_s is None:
            yield Row(name, f"does not fit: {item.setting}", "published", False, asdict(item))
            continue
        yield Row(name, f"{row.rate(item.predicted_s):.1f} TFLOP/s per GPU, step {item.predicted_s:.2f} s: "
                  f"{item.error:+.1%} ({item.setting})", f"published {row.tflops_per_gpu:g}",
                  abs(item.error) <= WORST, asdict(item))
        if plans and item.chosen_s is not None:
            good = item.chosen_s <= item.predicted_s * (1 + 1e-9) and item.cpu_s <= MAX_CPU_S \
                and item.peak_bytes <= MAX_BYTES
            yield Row("  Weft's plan", f"step {item.chosen_s:.2f} s, {item.predicted_s / item.chosen_s:.2f} x as fast "
                      f"({item.chosen}); {item.cpu_s:.1f} CPU-s, {item.peak_bytes / 2**30:.2f} GiB",
                      f"published, {MAX_CPU_S:g} CPU-s, 4 GiB", good)
    errors = [abs(item.error) for item in outcomes if item.predicted_s is not None]
    if errors:
        yield Row("mean error of the predictions", f"{statistics.fmean(errors):.1%}, worst {max(errors):.1%}",
                  f"{MEAN:.0%}, worst {WORST:.0%}", statistics.fmean(errors) <= MEAN and max(errors) <= WORST)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Published Megatron-LM throughput, predicted, and Weft's own plans.")
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT, help="rows to predict")
    parser.add_argument("--only", choices=["predicted", "planned"], help="without or with Weft's own plans")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows, from 0; all if absent")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.file == DEFAULT and not DEFAULT.exists():
        print(f"the published rows are not here ({DEFAULT.name}): give a file", file=sys.stderr)
        return 0
    try:
        rows = read_rows(args.file)
        wanted = rows if args.rows is None else [rows[number] for number in args.rows]
        plans = args.only != "predicted"
        context = multiprocessing.get_context("spawn")
        outcomes = []
        for row in wanted:
            with context.Pool(1) as pool:
                outcomes.append(pool.apply(measure, (row, plans)))
            print(f"{row.params_b:g} billion parameters: done", file=sys.stderr)
    except (WeftError, IndexError) as problem:
        print(printable(str(problem)), file=sys.stderr)
        return 2
    found = list(rows_of(outcomes, plans=plans))
    if args.json:
        print(json.dumps([asdict(row) for row in found], indent=1))
    else:
        for row in found:
            show(row)
    return 1 if any(row.ok is False for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
