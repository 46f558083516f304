"""What parts of one device can do, measured: rates, ways between processes, and operators alone and among busy ones.

Parts of a GPU share its memory, caches and power: an operator takes longer while the other parts are busy. So every
part is profiled twice, alone and while all others train the same model. A prediction (``Bench.predict``) takes for each
part the time between the two that fits how much the others compute while it does, by the prediction itself:

    time = alone + w (busy - alone)      w: share of the other parts that is busy, mean over the part's own busy time

Messages and exchanges of gradients are measured through the runtime's own transport while all parts are busy, those
collectives for which a stage waits while none is.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.mps import multi_process_service
from benchmarks.mps_slices import ROOT, Slices
from weft.cluster.cluster import Cluster, Contention, Device, DeviceId, Link
from weft.cluster.cluster_file import parse_cluster, save_cluster
from weft.cost.collectives import Collective, scope_of
from weft.cost.costs import Costs, estimate_costs
from weft.cost.fit import fit_collective
from weft.cost.profile import CommFit, ProfileStore
from weft.cost.roofline import PARTS
from weft.model.graph import F64, Graph
from weft.model.load import trace_model
from weft.model.trace import TracedModel
from weft.plan.check import check_plan
from weft.plan.plan import Optimizer, Plan, save_plan
from weft.plan.program import Op
from weft.run.result import RunResult, Verification, load_result
from weft.search.common.problem import PlanOptions, Problem
from weft.simulate.timeline import Timeline
from weft.simulate.timing import simulate

SHARES: Final = (50, 25, 12, 12)
"""Percent of the GPU for each process."""
PASSES: Final = 2
PAIR: Final = (2, 3)
"""The processes that split operators between them in some plans: two equal ones."""
LINK_BYTES: Final = (256 << 10, 2 << 20, 12 << 20, 32 << 20)
STAGE_BYTES: Final = (24 << 20, 64 << 20, 128 << 20)
"""Sizes of collectives that a stage waits for: activations. Small messages are faster by the byte, and would mislead."""
LOAD_BATCH: Final = 4
MORE: Final = 4
"""Models are profiled for so many times the samples of a micro-batch too: larger kernels are faster by the sample."""
REPEATS: Final = 5
ROUNDS: Final = 6
"""Of prediction and what it says about who is busy when."""
MODELS: Final = ROOT / "benchmarks" / "models" / "transformers_like.py"


def model_spec(name: str) -> str:
    return f"{MODELS}:{name}"


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A plan that was run."""

    result: RunResult
    peak_bytes: tuple[int | None, ...]
    """By rank, what the run added to what the process held before; None where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its costs alone and among busy parts."""

    name: str
    traced: TracedModel
    cluster: Cluster
    alone: ProfileStore
    busy: ProfileStore

    def problem(self, batch: int) -> Problem:
        """Return the problem of this batch with the costs of busy parts."""
        return Problem(graph=self.traced.graph, cluster=self.cluster, costs=self._bounds(self.traced.graph)[1],
                       options=PlanOptions(batch=batch, optimizer=Optimizer(kind="sgd")))

    def costs(self, weights: Sequence[float], graph: Graph | None = None) -> Costs:
        """Return costs between those of lonely and of busy parts, for each device by its weight."""
        alone, busy = self._bounds(graph or self.traced.graph)
        by_column = np.zeros(len(busy.columns))
        for column, weight in zip(busy.column_of_device, weights, strict=True):
            by_column[column] = weight

        def between(low: F64, high: F64) -> F64:
            return np.asarray(low + by_column * (high - low), dtype=np.float64)

        others = tuple(replace(high, seconds={part: between(low.seconds[part], high.seconds[part]) for part in PARTS})
                       for low, high in zip(alone.measured_at, busy.measured_at, strict=True))
        return replace(busy, forward_s=between(alone.forward_s, busy.forward_s),
                       input_grad_s=between(alone.input_grad_s, busy.input_grad_s),
                       weight_grad_s=between(alone.weight_grad_s, busy.weight_grad_s), measured_at=others)

    def _bounds(self, graph: Graph) -> tuple[Costs, Costs]:
        key = id(graph)
        if key not in self._known:
            self._known[key] = (estimate_costs(graph, self.cluster, profile=self.alone),
                                estimate_costs(graph, self.cluster, profile=self.busy))
        return self._known[key]

    @cached_property
    def _known(self) -> dict[int, tuple[Costs, Costs]]:
        return {}

    def predict(self, plan: Plan) -> Timeline:
        """Return the predicted timeline, with each part as slow as the others make it."""
        program = check_plan(plan, self.traced.graph, self.cluster)
        weights = [1.0] * self.cluster.num_devices
        for _ in range(ROUNDS):
            timeline = simulate(program, self.costs(weights), self.cluster)
            weights = [(old + new) / 2 for old, new in zip(weights, busy_weights(timeline), strict=True)]
        return timeline


def busy_weights(timeline: Timeline, shares: Sequence[int] = SHARES) -> list[float]:
    """Return for each rank how much of the other parts is busy while it is: 0 for none, 1 for all."""
    computes = np.isin(timeline.op, (Op.COMPUTE, Op.STEP))
    spans = []
    for rank in range(timeline.num_ranks):
        mine = np.flatnonzero(computes & (timeline.rank == rank))
        order = mine[np.argsort(timeline.start_s[mine], kind="stable")]
        spans.append((timeline.start_s[order], timeline.end_s[order]))
    weights = []
    for rank, own in enumerate(spans):
        total = float((own[1] - own[0]).sum())
        others = [other for other in range(len(spans)) if other != rank]
        both = sum(shares[other] * _overlap(own, spans[other]) for other in others)
        weights.append(both / total / sum(shares[other] for other in others) if total > 0 else 1.0)
    return weights


def _overlap(first: tuple[F64, F64], second: tuple[F64, F64]) -> float:
    """Return for how long spans of both are under way; spans of each follow one another."""
    if not len(first[0]) or not len(second[0]):
        return 0.0
    starts = np.maximum(first[0][:, None], second[0][None, :])
    ends = np.minimum(first[1][:, None], second[1][None, :])
    return float(np.maximum(ends - starts, 0.0).sum())


class Bench:
    """Processes on parts of a device, and what was measured about them."""

    def __init__(self, slices: Slices, folder: Path, load: str) -> None:
        """``load`` is the model that is trained while ways between processes are measured."""
        self.slices, self.folder, self.load = slices, folder, load
        self.alone, self.busy = ProfileStore(folder / "alone.sqlite"), ProfileStore(folder / "busy.sqlite")
        self._num_runs = 0

    @property
    def num_devices(self) -> int:
        """Return the number of processes."""
        return len(self.slices.devices)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Return a kind for each process, so that each group of them has fits of its own."""
        return tuple(f"slice-{share}{'abcd'[SHARES[:index].count(share)]}"
                     for index, share in enumerate(SHARES[:self.num_devices]))

    @cached_property
    def cluster(self) -> Cluster:
        """Return the parts as a cluster, with measured rates and links; fits of sums go into the stores."""
        found = [parse_cluster(answer["cluster"]).kind_of(DeviceId(0)) for answer in self.slices.ask_all({"do": "probe"})]
        note("; ".join(f"{kind}: {rates.flop_per_s['float32'] / 1e12:.1f} TFLOP/s, "
                       f"{(rates.memory_bytes_per_s or 0) / 1e9:.0f} GB/s"
                       for kind, rates in zip(self.kinds, found, strict=True)))
        devices = tuple(Device(name=f"d{index}", kind=kind, host="host",
                               memory_bytes=(rates.memory_bytes or 0) * SHARES[index] // 100)
                        for index, (kind, rates) in enumerate(zip(self.kinds, found, strict=True)))
        kinds = {name: replace(rates, name=name, source=f"{rates.source}, all parts at once")
                 for name, rates in zip(self.kinds, found, strict=True)}
        # All messages of a process go through one thread of gloo's.
        bare = Cluster(name="slices", kinds=kinds, devices=devices, contention=Contention.PORT)
        fits = self._measure_links(bare)
        for store in (self.alone, self.busy):
            store.put_comm_fits(fits)
        cluster = replace(bare, links=tuple(_links(bare, fits)))
        save_cluster(cluster, self.folder / "cluster.json")
        return cluster

    def _measure_links(self, bare: Cluster) -> list[CommFit]:
        ranks = range(self.num_devices)
        answers = self.slices.ask_all({
            "do": "links", "groups": [group for size in ranks[2:] for group in itertools.combinations(ranks, size)]
            + [tuple(ranks)], "together": [PAIR], "bytes": LINK_BYTES, "stage_bytes": STAGE_BYTES, "repeats": REPEATS,
            "model": model_spec(self.load), "batch": LOAD_BATCH})
        (self.folder / "links.json").write_text(json.dumps(answers))
        points = points_of(answers, "found") | points_of(answers, "waited")  # what a stage waits for counts for its group
        fits = [fit_collective(Collective(name), rows, num_devices=len(group), scope=scope_of(bare, group))
                for (name, group), rows in points.items()]
        for name in (Collective.P2P.value, Collective.ALL_REDUCE.value):
            rates = [1 / fit.s_per_byte / 1e9 for fit in fits if fit.collective == name]
            note(f"{name} over links of {min(rates):.2f} to {max(rates):.2f} GB/s")
        return fits

    def case(self, name: str, *, batch: int) -> Case:
        """Return the model traced for ``batch`` samples, and profiled for these and more, alone and among busy parts."""
        cluster, spec = self.cluster, model_spec(name)
        for size in (batch, MORE * batch):
            self._profile(spec, size, self.alone, together=False)
            self._profile(spec, size, self.busy, together=True)
        traced = trace_model(spec, batch=batch, batch_dims=True)
        return Case(name=name, traced=traced, cluster=cluster, alone=self.alone, busy=self.busy)

    def _profile(self, spec: str, batch: int, store: ProfileStore, *, together: bool) -> None:
        found = []
        for rank, kind in enumerate(self.kinds):
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                load = {"do": "load", "model": spec, "batch": batch, "folder": folder} if together else None
                commands: list[dict[str, Any] | None] = [load] * self.num_devices
                commands[rank] = {
                    "do": "profile", "model": spec, "batch": batch, "folder": folder, "kind": kind, "passes": PASSES,
                    "store": str(store.path), "num_loaded": self.num_devices - 1 if together else 0}
                found.append(self.slices.ask(commands, timeout_s=180.0)[rank])
        note(f"{Path(spec).name}, {batch} samples, {'all parts busy' if together else 'each part alone'}: "
             + ", ".join(f"{answer['forward_s'] * 1e3:.0f} + {answer['backward_s'] * 1e3:.0f} ms" for answer in found)
             + "".join(f"; {text}" for answer in found for text in answer["problems"][:1]))

    def run(self, case: Case, plan: Plan, *, steps: int, warmup: int = 1) -> Ran:
        """Return the result of a plan on the parts."""
        return self._run(case, plan, {"steps": steps, "warmup": warmup, "verify": False, "dtype": None})

    def verify(self, case: Case, plan: Plan) -> Verification:
        """Return how far one step of the plan in double precision is from one process."""
        ran = self._run(case, plan, {"steps": 1, "warmup": 0, "verify": True, "dtype": "float64"})
        assert ran.result.verification is not None
        return ran.result.verification

    def _run(self, case: Case, plan: Plan, settings: dict[str, Any]) -> Ran:
        self._num_runs += 1
        folder = self.folder / f"run-{self._num_runs:02d}"
        folder.mkdir()
        save_plan(plan, folder / "plan.json")
        answers = self.slices.ask_all({
            "do": "run", "plan": str(folder / "plan.json"), "model": model_spec(case.name), "output": str(folder),
            **settings}, timeout_s=150.0)
        (folder / "memory.json").write_text(json.dumps(answers))
        peaks = tuple(None if answer["peak_bytes"] is None else answer["peak_bytes"] - answer["held_before_bytes"]
                      for answer in answers)
        return Ran(result=load_result(folder), peak_bytes=peaks)


def points_of(answers: Sequence[dict[str, Any]], what: str) -> dict[tuple[str, tuple[int, ...]], list[tuple[int, float]]]:
    """Return (bytes, seconds) by collective and group."""
    points: dict[tuple[str, tuple[int, ...]], list[tuple[int, float]]] = {}
    for name, group, size, seconds in (row for answer in answers for row in answer[what]):
        points.setdefault((name, tuple(group)), []).append(
            (size, seconds / 2 if name == Collective.P2P.value else seconds))
    return points


def _links(cluster: Cluster, fits: Sequence[CommFit]) -> Iterator[Link]:
    for first, second in itertools.combinations(range(cluster.num_devices), 2):
        scope = scope_of(cluster, (first, second))
        fit = next(fit for fit in fits if fit.collective == Collective.P2P.value and fit.scope == scope)
        for source, target in ((first, second), (second, first)):
            yield Link(source=cluster.devices[source].name, target=cluster.devices[target].name,
                       bytes_per_s=1 / fit.s_per_byte, latency_s=fit.latency_s, origin="measured between processes")


def slice_names(device: str) -> list[str]:
    """Return the devices of the processes: parts of a GPU, or as many processes on the CPU."""
    return [f"cuda:0@{share}%" for share in SHARES] if device == "cuda" else ["cpu"] * len(SHARES)


@contextmanager
def opened(device: str, keep: Path | None, load: str) -> Iterator[Bench]:
    """Yield processes on parts of the device; what is measured stays in ``keep``, if that is given."""
    with tempfile.TemporaryDirectory(prefix="weft-mps-bench-") as name:
        folder = Path(name) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        with multi_process_service(device == "cuda"), Slices(slice_names(device), folder) as slices:
            yield Bench(slices, folder, load)
