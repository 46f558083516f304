"""The facts about plans and timelines that people ask for, as plain records. Tables and pages only format them.

They are about a plan, its stages, gradient exchanges and devices, the strategies that were compared, how far a
prediction was off against a run (``error_facts``), and what each link of the cluster carries (``link_facts``).

``layer_facts`` are about the layers of a plan: repeated layers that are alike and split alike are one record.

    transformer.h.0 - 11    stages s0 (6), s1 (6)    attn.c_attn, mlp.c_fc: tensor column; attn.c_proj: tensor row

A layer is what belongs to a module path up to its first number (``transformer.h.3``). Two layers are alike if their
operators are, one by one: name inside the layer, kind, work, and how the plan splits them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from weft.base.errors import PlanError
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import F64, I64, Graph
from weft.plan.plan import Plan, Replica, Stage
from weft.plan.program import Op, Phase, Program
from weft.plan.units import storage_text
from weft.show.names import ATTENTION, factor_word, grouped, short_list, short_modules, to_number
from weft.simulate.timeline import RankSummary, Timeline
from weft.simulate.timing import link_bytes

if TYPE_CHECKING:
    from weft.planning.compare import Candidate, Comparison

_NOTABLE: Final = 0.1
"""Parts of a loss that are smaller than this part of it are not named."""
MAX_PARTS: Final = 3
"""Longer lists of links are cut."""
_PHASES: Final = {Phase.F: "forward", Phase.B: "backward", Phase.I: "input gradients", Phase.W: "weight gradients"}
_OTHERS: Final = {Op.RECV: "transfers", Op.COLLECTIVE: "gradient exchange", Op.STEP: "optimizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """A plan in one row."""

    plan: Plan
    num_devices: int
    """Devices that have work."""
    step_time_s: float | None
    """Predicted."""
    measured_s: float | None
    bound_s: float | None
    """No plan of this kind can be faster; None where nothing is known."""
    bubble: float | None
    """Part of all devices' time, of the predicted step."""

    @property
    def samples_per_s(self) -> float | None:
        """Return the predicted throughput."""
        return self.plan.model.batch / self.step_time_s if self.step_time_s else None

    @property
    def gap(self) -> float | None:
        """Return by how much the step is longer than the bound, as a part of the bound."""
        return relative(self.step_time_s, self.bound_s)

    @property
    def measured_difference(self) -> float | None:
        """Return by how much the measured step is longer than the predicted one, as a part of the latter."""
        return relative(self.measured_s, self.step_time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One stage, or those of its replicas that are alike."""

    name: str
    modules: str
    """In short form."""
    num_ops: int
    replicas: tuple[tuple[str, ...], ...]
    """The devices of each replica."""
    mesh: Mapping[str, int]
    share: float
    """Part of each micro-batch that each of the replicas processes."""
    microbatches: tuple[int, ...] | None
    """None for all."""
    parameter_bytes: int
    recompute: bool
    in_pieces: str
    """What its replicas keep in pieces, in words."""
    forward_s: float | None
    """Predicted (else measured) mean over micro-batches."""
    backward_s: float | None
    """Both parts of a split backward together."""
    num_saved: int = 0
    """Of a stage that recomputes, the tensors that it keeps besides its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """The gradient exchanges of one kind among some devices."""

    method: str
    parameters: tuple[str, ...]
    devices: tuple[str, ...]
    num_bytes: int
    time_s: float | None
    """The sum over its buckets, each from the first start to the last end of its collectives."""
    num_buckets: int = 1

    @property
    def how(self) -> str:
        """Return the method, with the number of buckets where there are several."""
        return self.method if self.num_buckets == 1 else f"{self.method} in {self.num_buckets} buckets"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts(RankSummary):
    """Where one device's time and memory go; busy, exposed communication and bubble add up to the step."""

    step_time_s: float
    capacity_bytes: int | None
    """None is unlimited or unknown."""

    @property
    def shares(self) -> dict[str, float]:
        """Return the parts of the step."""
        whole = self.step_time_s or 1.0
        return {"busy": self.busy_s / whole, "exposed": self.exposed_s / whole, "bubble": self.bubble_s / whole}

    @property
    def capacity_used(self) -> float | None:
        """Return the part of the capacity that the peak takes; None where the capacity is not known."""
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedFacts:
    """One setting that a strategy looked at."""

    setting: str
    estimate_s: float | None
    step_time_s: float | None
    """As simulated; None where the estimate was enough to leave it."""
    reason: str
    """Why it is not the best, where there is more to say than its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFacts:
    """What one strategy came to; without a step time there is a reason instead."""

    strategy: str
    is_chosen: bool = False
    step_time_s: float | None = None
    samples_per_s: float | None = None
    microbatches: int | None = None
    peak_bytes: Mapping[str, int] | None = None
    """By device."""
    bubble: float | None = None
    bound_s: float | None = None
    status: str = "infeasible"
    reason: str = ""
    """Why there is no plan, or what else is to be said."""
    parts: Mapping[str, float] | None = None
    """Mean seconds of a device in a step that it computes, waits for communication, or waits for other devices."""
    tried: tuple[TriedFacts, ...] = ()
    """What the strategy looked at, where it says so, best first."""


def relative(value: float | None, base: float | None) -> float | None:
    """Return ``value / base - 1``, or None where either is unknown."""
    return value / base - 1 if value is not None and base else None


def pick(timelines: Sequence[Timeline], kind: str) -> Timeline | None:
    """Return the first timeline of that kind, or None."""
    return next((timeline for timeline in timelines if timeline.kind == kind), None)


def program_of(timelines: Sequence[Timeline]) -> Program:
    """Return the program that all the timelines are of; raise ``PlanError`` if there is none or they differ."""
    program = next((timeline.program for timeline in timelines if timeline.program is not None), None)
    if program is None:
        raise PlanError("none of the timelines knows its program: load them together with the plan they are of")
    for timeline in timelines:
        if timeline.program is not program and not (
                np.array_equal(timeline.rank_start, program.rank_start) and np.array_equal(timeline.op, program.op)):
            raise PlanError(f"the {timeline.kind} timeline has {timeline.num_instructions} instructions that are not "
                            f"those of the plan ({program.num_instructions}): show each with its own plan")
    return program


def plan_facts(plan: Plan, timelines: Sequence[Timeline] = ()) -> PlanFacts:
    """Return the plan in one row; the predicted step time is the timeline's, else the one the plan gives."""
    predicted, measured = pick(timelines, "predicted"), pick(timelines, "measured")
    used = {device for stage in plan.stages for replica in stage.replicas for device in replica.devices}
    return PlanFacts(
        plan=plan, num_devices=len(used), step_time_s=predicted.step_time_s if predicted else plan.search.step_time,
        measured_s=measured.step_time_s if measured else None, bound_s=plan.search.bound,
        bubble=predicted.bubble if predicted else None)


def stage_facts(program: Program, timeline: Timeline | None = None) -> tuple[StageFacts, ...]:
    """Return the stages in order; replicas with equal share, mesh and (to three digits) times are one record."""
    graph, plan = program.graph, program.plan
    modules = short_modules([stage.modules or [graph.op_modules[op] for op in ops]
                             for stage, ops in zip(plan.stages, program.stage_ops, strict=True)])
    times = _phase_times(program, timeline)

    def replica_of(index: int) -> Replica:
        instance = program.instances[index]
        return plan.stages[instance.stage].replicas[instance.replica]

    def looks(index: int) -> object:
        replica = replica_of(index)
        rounded = tuple("" if seconds is None else f"{seconds:.3g}" for seconds in times[index])
        return program.instances[index].stage, replica.share, tuple(sorted(replica.mesh.items())), rounded

    rows = []
    for members in grouped(range(len(program.instances)), looks):
        number, replica, (forward_s, backward_s) = (
            program.instances[members[0]].stage, replica_of(members[0]), times[members[0]])
        stage, parameters = plan.stages[number], parameters_of(graph, program.stage_ops[number].tolist())
        rows.append(StageFacts(
            name=stage.name, modules=modules[number], num_ops=len(stage.ops), mesh=replica.mesh, share=replica.share,
            replicas=tuple(replica_of(index).devices for index in members), microbatches=stage.microbatches,
            parameter_bytes=int(graph.tensor_bytes[parameters].sum()), recompute=stage.recompute,
            in_pieces=storage_text(stage.storage), forward_s=forward_s, backward_s=backward_s,
            num_saved=len(stage.saved)))
    return tuple(rows)


def _phase_times(program: Program, timeline: Timeline | None) -> list[tuple[float | None, float | None]]:
    """Return the mean seconds of forward and backward of each instance, None where there are none."""
    if timeline is None:
        return [(None, None)] * len(program.instances)
    computes = np.flatnonzero(program.op == Op.COMPUTE)
    keys = program.instance[computes].astype(np.int64) * len(Phase) + program.phase[computes]
    size = len(program.instances) * len(Phase)
    seconds = np.bincount(keys, weights=(timeline.end_s - timeline.start_s)[computes], minlength=size)
    counts = np.bincount(keys, minlength=size)
    mean: F64 = np.divide(seconds, counts, out=np.zeros(size), where=counts > 0).reshape(-1, len(Phase))
    known, backward = counts.reshape(-1, len(Phase)) > 0, [Phase.B, Phase.I, Phase.W]
    return [(float(row[Phase.F]) if has[Phase.F] else None, float(row[backward].sum()) if has[backward].any() else None)
            for row, has in zip(mean, known, strict=True)]


def parameters_of(graph: Graph, ops: Sequence[int]) -> I64:
    """Return the parameters that some operators read."""
    read = [graph.op_inputs(op) for op in ops]
    return np.intersect1d(np.concatenate(read), graph.parameters) if read else np.zeros(0, dtype=np.int64)


def exchange_facts(program: Program, timeline: Timeline | None = None) -> tuple[ExchangeFacts, ...]:
    """Return the gradient exchanges of the program, buckets of the same method and devices together."""
    rows = []
    for members in grouped(range(len(program.buckets)), lambda index: (
            program.buckets[index].method, program.buckets[index].ranks)):
        buckets = [program.buckets[index] for index in members]
        rows.append(ExchangeFacts(
            method=buckets[0].method, devices=tuple(program.rank_names[rank] for rank in buckets[0].ranks),
            parameters=tuple(program.graph.tensor_names[tensor] for bucket in buckets for tensor in bucket.parameters),
            num_bytes=sum(program.buckets[index].num_bytes * _times(program, index) for index in members),
            num_buckets=len(buckets),
            time_s=None if timeline is None else sum(_bucket_time(program, timeline, index) for index in members)))
    return tuple(rows)


def _times(program: Program, bucket: int) -> int:
    """Return how often a bucket comes in a step."""
    item = program.buckets[bucket]
    members = (program.op == Op.COLLECTIVE) & (program.bucket == bucket)
    return int(members.sum()) // len(item.ranks) if item.is_of_unit else 1


def _bucket_time(program: Program, timeline: Timeline, bucket: int) -> float:
    members = (program.op == Op.COLLECTIVE) & (program.bucket == bucket)
    if program.buckets[bucket].is_of_unit:  # those of a unit come again and again
        members &= program.rank_of() == program.buckets[bucket].ranks[0]
        return float((timeline.end_s - timeline.start_s)[members].sum())
    return float(timeline.end_s[members].max() - timeline.start_s[members].min()) if members.any() else 0.0


def device_facts(timeline: Timeline, capacities: Mapping[str, int | None] | None = None) -> tuple[DeviceFacts, ...]:
    """Return each device's share of the step and its peak memory."""
    return tuple(DeviceFacts(**asdict(item), step_time_s=timeline.step_time_s,
                             capacity_bytes=(capacities or {}).get(item.device)) for item in timeline.summary())


def plan_cluster(plan: Plan) -> Cluster | None:
    """Return the cluster that the plan describes, or None where it describes none."""
    if plan.cluster.description is None:
        return None
    return parse_cluster(plan.cluster.description, where="the plan's cluster.description")


def capacities_of(cluster: Cluster | None) -> dict[str, int | None]:
    """Return the memory of each device; empty where the cluster is not known."""
    return {device.name: device.memory_bytes for device in cluster.devices} if cluster else {}


def strategy_facts(comparison: Comparison) -> tuple[StrategyFacts, ...]:
    """Return what each strategy came to; the best is marked as chosen."""
    best = comparison.best
    return tuple(_strategy_row(candidate, comparison.bound_s, candidate is best) for candidate in comparison.candidates)


def _strategy_row(candidate: Candidate, bound_s: float, is_chosen: bool) -> StrategyFacts:
    plan, timeline = candidate.plan, candidate.timeline
    if plan is None or timeline is None:
        return StrategyFacts(strategy=candidate.strategy, reason=candidate.reason)
    step_time_s = candidate.step_time_s
    is_whole = step_time_s == timeline.step_time_s  # else the timeline shows a part of a large cluster
    return StrategyFacts(
        strategy=candidate.strategy, is_chosen=is_chosen, step_time_s=step_time_s,
        samples_per_s=plan.model.batch / step_time_s if step_time_s else None, microbatches=plan.microbatches,
        peak_bytes={item.device: item.peak_bytes for item in timeline.summary()},
        bubble=timeline.bubble if is_whole else None, bound_s=bound_s, status=plan.search.status,
        reason=candidate.reason, parts=mean_parts(timeline) if is_whole else None,
        tried=tuple(TriedFacts(setting=item.setting.describe(), estimate_s=item.estimate_s,
                               step_time_s=item.step_time_s, reason=item.reason) for item in candidate.tried))


def mean_parts(timeline: Timeline) -> dict[str, float]:
    """Return the mean seconds of a device in each part of the step; they add up to the step."""
    parts = {"computing": timeline.busy_s, "exposed communication": timeline.exposed_s, "bubble": timeline.bubble_s}
    return {name: float(seconds.sum()) / max(1, timeline.num_ranks) for name, seconds in parts.items()}


def extra_parts(row: StrategyFacts, best: StrategyFacts) -> dict[str, float]:
    """Return in which parts of the step a strategy spends more seconds of a device than the best one, most first.

    Together with the parts in which it spends less they are the difference of the two steps.
    """
    if row.parts is None or best.parts is None or row.step_time_s is None or best.step_time_s is None:
        return {}
    more = {name: value - best.parts.get(name, 0.0) for name, value in row.parts.items()}
    least = _NOTABLE * max(row.step_time_s - best.step_time_s, 0.0)
    return {name: value for name, value in sorted(more.items(), key=lambda item: -item[1]) if value > least}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFacts:
    """One kind of work in both timelines."""

    what: str
    stage: str
    """Empty for all stages together."""
    count: int
    predicted_s: float
    """Mean of one instruction."""
    measured_s: float

    @property
    def error(self) -> float | None:
        """Return by how much the prediction is above the measurement, as a part of the latter."""
        return relative(self.predicted_s, self.measured_s)


def error_facts(program: Program, predicted: Timeline, measured: Timeline) -> tuple[ErrorFacts, ...]:
    """Return each kind of work: over all stages, then stage by stage where there are several."""
    computes, stages = program.op == Op.COMPUTE, program.plan.stages
    stage_of = np.full(program.num_instructions, -1, dtype=np.int64)
    stage_of[computes] = [program.instances[index].stage for index in program.instance[computes]]
    kinds = [(what, "", computes & (program.phase == phase)) for phase, what in _PHASES.items()]
    kinds += [(what, "", program.op == op) for op, what in _OTHERS.items()]
    kinds += [(what, stage.name, (stage_of == index) & (program.phase == phase)) for index, stage in enumerate(stages)
              for phase, what in _PHASES.items() if len(stages) > 1]
    predicted_s, measured_s = (item.end_s - item.start_s for item in (predicted, measured))
    return tuple(ErrorFacts(what=what, stage=stage, predicted_s=float(predicted_s[members].mean()),
                            measured_s=float(measured_s[members].mean()), count=int(members.sum()))
                 for what, stage, members in kinds if members.any())


def mean_error(rows: Sequence[ErrorFacts]) -> float | None:
    """Return the mean of the sizes of the errors of computes, each kind weighted by the time it takes."""
    known = [(abs(row.error), row.count * row.measured_s) for row in rows
             if row.error is not None and not row.stage and row.what in _PHASES.values()]
    whole = sum(weight for _, weight in known)
    return sum(error * weight for error, weight in known) / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """Links that are equally fast and carry equally much."""

    names: tuple[str, ...]
    """``a0>a/fabric``, or the name of a shared medium."""
    bytes_per_s: float | None
    """None where the cluster gives no rates for links."""
    latency_s: float | None
    num_bytes: int
    """Over each of them."""
    busy: float | None
    """Part of the step that the bytes take at the link's rate; the rest it is idle or waits for slower links."""


def link_facts(program: Program, cluster: Cluster, step_time_s: float) -> tuple[LinkFacts, ...]:
    """Return the links that carry something in a step of that length, the busiest first.

    Bytes are those of tensors between stages and of gradients; what the devices of one replica exchange inside a
    sharded stage is not among them.
    """
    costs = estimate_costs(program.graph, cluster, dtype=program.plan.model.dtype)
    rates: dict[str, tuple[float, float]] = {}
    for link in cluster.links:
        name = link.shared if link.shared is not None else link.name
        rates.setdefault(name, (link.bytes_per_s, link.latency_s))
    carried = link_bytes(program, costs, cluster)
    rows = []
    for names in grouped(carried, lambda name: (rates.get(name), carried[name])):
        (bytes_per_s, latency_s), num_bytes = rates.get(names[0], (None, None)), carried[names[0]]
        busy = num_bytes / bytes_per_s / step_time_s if bytes_per_s and step_time_s > 0 else None
        rows.append(LinkFacts(names=tuple(names), bytes_per_s=bytes_per_s, latency_s=latency_s, num_bytes=num_bytes,
                              busy=busy))
    return tuple(sorted(rows, key=lambda row: (-(row.busy or 0.0), -row.num_bytes)))


def link_title(names: Sequence[str]) -> str:
    """Return the names of alike links in short form.

    >>> link_title(["a0>a/fabric", "a/fabric>a0", "a1>a/fabric", "a/fabric>a1"])
    'a0 - a1 > a/fabric, a/fabric > a0 - a1'
    """
    pairs = [name.split(">") for name in names if name.count(">") == 1]
    num_sources = Counter(target for _, target in pairs)
    into = grouped((pair for pair in pairs if num_sources[pair[1]] > 1), lambda pair: pair[1])
    out_of = grouped((pair for pair in pairs if num_sources[pair[1]] == 1), lambda pair: pair[0])
    parts = [f"{short_list((source for source, _ in alike), limit=4)} > {alike[0][1]}" for alike in into]
    parts += [f"{alike[0][0]} > {short_list((target for _, target in alike), limit=4)}" for alike in out_of]
    parts += [name for name in names if name.count(">") != 1]
    return ", ".join(parts[:MAX_PARTS]) + (f", {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else "")


OUTSIDE: Final = "outside modules"
_SAMPLES: Final = ("m", "b0", "d0")
"""Factors whose rows are in the order of the samples."""


class Split(NamedTuple):
    """Modules of a layer that are split alike over the axes of the stage's mesh."""

    modules: tuple[str, ...]
    words: tuple[tuple[str, str], ...]
    """(axis, how): ``("tensor", "column")``; axes that split nothing are left out."""
    stored: tuple[str, ...]
    """The axes over which their parameters are stored in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """Layers that are alike."""

    title: str
    """``transformer.h.0 - 5``, or the one module."""
    count: int
    num_ops: int
    """In one layer."""
    parameter_bytes: int
    """Of one layer."""
    work: float
    """Part of the model's floating-point work that all these layers do."""
    stages: tuple[tuple[str, int], ...]
    """The stages that run them, with the number of layers in each."""
    splits: tuple[Split, ...]
    """Of modules with parameters, attention and loss, where several devices run the stage together."""
    is_joint: bool
    """Several devices run one of the stages together."""


def layer_facts(program: Program) -> tuple[LayerFacts, ...]:
    """Return the classes of layers of the program's plan, in the order of the model."""
    reader = _Reader(program)
    layers = grouped(range(len(program.graph.op_modules)), lambda op: layer_path(program.graph.op_modules[op]))
    return tuple(map(reader.facts, grouped(layers, reader.looks)))


def layer_path(module: str) -> str:
    """Return the module's path up to its first number, or the whole of it.

    >>> layer_path("transformer.h.3.attn.c_attn")
    'transformer.h.3'
    """
    return ".".join(to_number(module.split(".")))


def _family(path: str) -> str:
    head, _, last = path.rpartition(".")
    return head if last.isdecimal() else path


class _Reader:
    """Says of layers, given as their operators, what is shown of them."""

    def __init__(self, program: Program) -> None:
        self.graph, self.plan = program.graph, program.plan
        self.stages_of: dict[int, list[int]] = {}
        for stage, ops in enumerate(program.stage_ops):
            for op in ops.tolist():
                self.stages_of.setdefault(op, []).append(stage)

    def path(self, ops: Sequence[int]) -> str:
        """Return the layer's path."""
        return layer_path(self.graph.op_modules[ops[0]])

    def sharding_of(self, op: int) -> tuple[Stage | None, tuple[str, ...]]:
        """Return the stage that divides the operator over devices, if one does, and how it does over each axis."""
        stages = (self.plan.stages[index] for index in self.stages_of.get(op, ()))
        stage = next((stage for stage in stages if stage.sharding), None)
        return stage, () if stage is None else tuple(stage.sharding.ops.get(self.graph.op_names[op], ()))

    def looks(self, ops: Sequence[int]) -> object:
        """Return what layers that are alike have in common."""
        path, graph, found = self.path(ops), self.graph, []
        for op in ops:
            name, (stage, words) = graph.op_names[op], self.sharding_of(op)
            axes = tuple(stage.replicas[0].mesh) if words and stage is not None else ()
            inner = name.removeprefix(f"{path}.") if path and name.startswith(f"{path}.") else ""
            found.append((inner, graph.op_kinds[op], float(graph.flops[op]), axes, words))
        return _family(path), tuple(found)

    def facts(self, layers: Sequence[Sequence[int]]) -> LayerFacts:
        """Return the record of layers that are alike."""
        graph, first, stages = self.graph, layers[0], self.plan.stages
        counts = Counter(stages[index].name for ops in layers for index in dict.fromkeys(
            index for op in ops for index in self.stages_of.get(op, ())))
        return LayerFacts(
            title=_title([self.path(ops) for ops in layers]), count=len(layers), num_ops=len(first),
            parameter_bytes=int(graph.tensor_bytes[parameters_of(graph, first)].sum()),
            work=float(graph.flops[[op for ops in layers for op in ops]].sum()) / (float(graph.flops.sum()) or 1.0),
            stages=tuple(counts.items()), splits=tuple(self.splits(first)),
            is_joint=any(len(replica.devices) > 1 for stage in stages if stage.name in counts
                         for replica in stage.replicas))

    def splits(self, ops: Sequence[int]) -> Iterator[Split]:
        """Yield how modules with parameters, attention and loss of a layer are split, alike ones together."""
        graph, path = self.graph, self.path(ops)
        groups: dict[tuple[tuple[tuple[str, str], ...], tuple[str, ...]], dict[str, None]] = {}
        for op in ops:
            kind, (stage, words) = graph.op_kinds[op], self.sharding_of(op)
            parameters = parameters_of(graph, [op]).tolist()
            if stage is None or not (parameters or kind.startswith(ATTENTION) or "loss" in kind):
                continue
            name = graph.op_names[op].removeprefix(f"{path}.") if path else graph.op_names[op]
            shown = name.rpartition(".")[0] or path.rpartition(".")[2] or name if parameters else name
            axes = tuple(stage.replicas[0].mesh)
            used = tuple((axis, said) for axis, word in zip(axes, words or ("",) * len(axes), strict=True)
                         if (said := _word(kind, word)))
            groups.setdefault((used, _stored(graph, stage, parameters, axes)), {}).setdefault(shown)
        for (used, stored), names in groups.items():
            yield Split(tuple(names), used, stored)


def _title(paths: Sequence[str]) -> str:
    """Return ``transformer.h.0 - 5``, or the one path."""
    if len(paths) == 1:
        return paths[0] or OUTSIDE
    return f"{_family(paths[0])}.{short_list((path.rpartition('.')[2] for path in paths), limit=4)}"


def _stored(graph: Graph, stage: Stage, parameters: Sequence[int], axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes over which the largest of the parameters is stored in parts."""
    if not parameters:
        return ()
    largest = max(parameters, key=lambda tensor: int(graph.tensor_bytes[tensor]))
    words = stage.sharding.tensors.get(graph.tensor_names[largest], ())
    return tuple(axis for axis, word in zip(axes, words, strict=False) if word.startswith("S"))


def _word(kind: str, word: str) -> str:
    """Return how an axis splits an operator of that kind, for people; nothing where it does not."""
    name = word.partition("/")[0]
    if not name or name.startswith(":"):
        return ""
    if name.startswith("+"):
        return "sum"
    return "samples" if name in _SAMPLES else factor_word(kind, name)
