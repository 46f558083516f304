"""What every searcher gets: a model with costs, a cluster and the user's options; and the pieces plans are made of.

How many samples each of several unequal devices takes, so that all of them end at about the same time.

How gradients are cut into buckets, so that their exchange runs beside the backward that makes them.

A bucket is exchanged when the last of its gradients is final (``final_times``), one after the other. With
``r_k`` the time at which bucket ``k`` is final and ``t_k`` that of its exchange, all is done at

    e_k = max(e_(k-1), r_k) + t_k

More buckets begin earlier and leave less for the end, but each costs the latency of a collective and the host's time to
issue it: of some numbers of buckets that is taken which ends first (``_best_cut``). Parameters go into buckets in the
order in which they become final, as many bytes in each. Only what can overlap is cut (``weft.plan.program``):
parameters of one stage, whose last backward is whole and sends no gradients to other stages.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

from weft.base.errors import InputError
from weft.base.units import parse_bytes
from weft.cluster.cluster import Cluster, DeviceId
from weft.cluster.cluster_file import to_json
from weft.cost.costs import Costs, Phase
from weft.model.graph import F64, I64, Graph
from weft.plan import plan as plans
from weft.plan.binding import stage_work
from weft.plan.check import check_plan
from weft.plan.expert_load import EVEN
from weft.plan.holders import exchange_sets, parameter_parts
from weft.plan.layout import stage_inputs
from weft.plan.orders import Order, forward_only, interleaved, one_f_one_b, to_tokens
from weft.plan.plan import GradientExchange, Mode, Optimizer, Plan, Replica, Sharding, Stage, Storage, split_samples
from weft.plan.saving import repeated_in, saved_names
from weft.search.common.degrees import NONE_FIXED, Degrees
from weft.search.recompute.stages import chosen_again
from weft.sharding.named_ops import NamedOp
from weft.simulate.exchange_time import reduce_seconds
from weft.simulate.timeline import Timeline
from weft.simulate.timing import final_times, simulate, stage_figure

TENSOR_AXIS: Final = "tensor"
"""The axis of a replica that has several devices."""
CONTEXT_AXIS: Final = "context"
"""The axis of those devices of a replica that divide the sequence of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the user asks of a plan."""

    batch: int
    """Samples in one step."""
    microbatches: int | None = None
    """Parts that the batch is divided into; None lets each strategy choose."""
    mode: Mode = "training"
    dtype: str = "float32"
    own_dtypes: bool = False
    """The model was traced in the dtypes that it has, and ``dtype`` is that of most parameters."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    recompute: bool = False
    """Keep only stage inputs between forward and backward."""
    seed: int = 0
    compiled: bool = False
    """Stages run as compiled graphs."""
    expert_load: str = EVEN
    """What share of the rows falls on each expert, see ``weft.plan.expert_load``."""
    whole_parameters: bool = False
    """Who changes a parameter has all of it, as some optimizers need: neither operators nor states are divided."""
    degrees: Degrees = NONE_FIXED
    """What is fixed by hand."""

    @property
    def saving(self) -> Literal["auto", "none", "selective"] | int:
        """Return what may be made again if not all: what memory asks for, nothing, attention, or what every stage
        cannot keep within so many bytes of one micro-batch on each device."""
        word = self.degrees.recompute
        if word is None or word == "full":
            return "auto"
        return word if word in ("none", "selective") else parse_bytes(word)  # type: ignore[return-value]

    @property
    def may_recompute(self) -> bool:
        """Return whether searches may let stages recompute where memory asks for it."""
        return self.saving == "auto"

    def __post_init__(self) -> None:
        if self.compiled and self.saving not in ("auto", "none"):
            raise InputError("compiled stages recompute as a whole or not at all so far: ask for --recompute full or "
                             "none, or for --eager")
        if self.batch < 1:
            raise InputError(f"the batch must be 1 or more, not {self.batch}")
        if self.microbatches is not None and (self.microbatches < 1 or self.batch % self.microbatches):
            raise InputError(f"a batch of {self.batch} cannot be divided into {self.microbatches} equal micro-batches; "
                             f"try {max(d for d in divisors(self.batch) if d <= max(1, self.microbatches))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A stage before it is costed: operators, and the devices of each replica with their share."""

    ops: I64
    replicas: tuple[tuple[tuple[DeviceId, ...], float], ...]
    """(devices, share of the samples) of each replica; several devices run it together."""
    microbatches: tuple[int, ...] | None = None
    """The micro-batches that it handles; None for all."""
    sharding: Sharding = field(default_factory=Sharding)
    """How the devices of a replica divide the stage among them."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axes of each replica; empty for one axis of all its devices."""
    times: tuple[Mapping[str, float], ...] = ()
    """Seconds of each replica by phase, where devices divide the stage; empty if they are not known."""
    storage: Storage = field(default_factory=Storage)
    """What the replicas keep in pieces."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its costs and a cluster to plan for."""

    graph: Graph
    cluster: Cluster
    costs: Costs
    options: PlanOptions
    ops: Mapping[str, NamedOp] | None = None
    """The operators of a traced PyTorch model with their factors: with them, stages on several devices can be run."""

    @property
    def is_training(self) -> bool:
        """Return whether there is a backward."""
        return self.options.mode == "training"

    @cached_property
    def devices(self) -> tuple[DeviceId, ...]:
        """Return all devices in order."""
        return tuple(DeviceId(index) for index in range(self.cluster.num_devices))

    def op_seconds(self, device: DeviceId, num_samples: float) -> F64:
        """Return each operator's time on the device, forward and backward, for that many samples at once."""
        fraction, column = num_samples / self.graph.batch, self.costs.column_of_device[device]
        forward = self.costs.op_seconds("F", fraction)[:, column]
        if not self.is_training:
            return forward
        again = forward if self.options.recompute else 0.0
        return np.asarray(forward + again + self.costs.op_seconds("B", fraction)[:, column], dtype=np.float64)

    def device_seconds(self, device: int, num_samples: float) -> float:
        """Return the time of the whole model on the device, for that many samples at once."""
        return float(self.op_seconds(DeviceId(device), num_samples).sum())

    def work_bound(self) -> float:
        """Return seconds that no plan for this step can beat: all devices busy all the time, nothing sent.

        An operator's work on the whole batch, divided over all devices at their own speeds, takes at least
        ``1 / sum(1 / t_d)``; overheads and parameter reads are counted once, so smaller pieces only take longer. Where
        operators were measured at several sizes, the size that is best by the sample counts.
        """
        batch = self.options.batch
        measured = [1.0, *(item.fraction for item in self.costs.measured_at)] if self.costs.measured_at else []
        sizes = [batch, *(size for size in (item * self.graph.batch for item in measured) if size < batch)]
        rates = np.zeros(self.graph.num_ops)
        idle = np.zeros(self.graph.num_ops, dtype=bool)
        first_of = {self.costs.column_of_device[device]: device for device in reversed(self.devices)}
        counts = Counter(self.costs.column_of_device)
        for column, device in first_of.items():
            seconds = np.minimum.reduce([self.op_seconds(device, size) * (batch / size) for size in sizes])
            idle |= seconds <= 0
            rates += counts[column] / np.where(seconds > 0, seconds, 1.0)
        return float(np.where(idle, 0.0, 1.0 / rates).sum())


def mesh_axes(num_devices: int, cp: int) -> dict[str, int]:
    """Return the axes of a replica of so many devices of which ``cp`` divide the sequence.

    >>> mesh_axes(8, 2)
    {'context': 2, 'tensor': 4}
    """
    if num_devices == 1:
        return {}
    tensor = {TENSOR_AXIS: num_devices // cp} if num_devices > cp else {}
    return {CONTEXT_AXIS: cp, **tensor} if cp > 1 else tensor


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def make_plan(problem: Problem, specs: Sequence[StageSpec], order: Order, *, microbatches: int, by: str,
              order_devices: Sequence[DeviceId] | None = None) -> Plan:
    """Return the plan with these stages, costed, with gradient exchanges; ``order[i]`` is for ``order_devices[i]``."""
    names = tuple(f"s{index}" for index in range(len(specs)))
    stages = tuple(_make_stage(problem, name, spec, problem.options.batch // microbatches)
                   for name, spec in zip(names, specs, strict=True))
    devices = problem.devices if order_devices is None else tuple(order_devices)
    tokens = to_tokens(order, names)
    options = problem.options
    plan = Plan(
        model=plans.ModelRef(name=problem.graph.name, digest=problem.graph.digest, mode=options.mode,
                             batch=options.batch, dtype=options.dtype, own_dtypes=options.own_dtypes,
                             parameters=problem.graph.parameter_texts, inputs=problem.graph.input_texts),
        cluster=plans.ClusterRef(digest=problem.cluster.digest, description=_description(problem.cluster),
                                 devices=tuple(device.name for device in problem.cluster.devices)),
        microbatches=microbatches, stages=stages,
        order={problem.cluster.devices[device].name: actions for device, actions in zip(devices, tokens, strict=True)},
        optimizer=options.optimizer, compiled=options.compiled, search=plans.SearchInfo(by=by, seed=options.seed))
    return cut_gradients(add_gradients(plan, problem.graph), problem.graph, problem.costs)


def evaluate_plan(plan: Plan, problem: Problem) -> Timeline:
    """Return the simulated timeline of a plan that passes all checks."""
    return simulate(check_plan(plan, problem.graph, problem.cluster), problem.costs, problem.cluster)


def with_plan(timeline: Timeline, plan: Plan) -> Timeline:
    """Return the timeline as that of the plan, which has more about the search by now."""
    assert timeline.program is not None, "it was simulated just now"
    return replace(timeline, program=replace(timeline.program, plan=plan))


def pipeline_order(num_meshes: int, chunks: int, microbatches: int, *, training: bool) -> Order:
    """Return what each mesh does in turn; stage ``s`` is on mesh ``s % num_meshes``."""
    if not training:
        return forward_only(num_meshes, microbatches)
    if chunks > 1:
        return interleaved(num_meshes, chunks, microbatches)
    return one_f_one_b(num_meshes, microbatches)


def one_stage(problem: Problem, spec: StageSpec, microbatches: int, *, by: str) -> Plan:
    """Return the plan of one stage."""
    devices = [device for tp_group, _ in spec.replicas for device in tp_group]
    order = pipeline_order(1, 1, microbatches, training=problem.is_training)
    return make_plan(problem, [spec], order * len(devices), microbatches=microbatches, by=by, order_devices=devices)


def _description(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as a plan describes it; the same object as for the plan before, if the cluster is the same."""
    if not _described or _described[0][0] is not cluster:
        _described[:] = [(cluster, to_json(cluster))]
    return _described[0][1]


_described: list[tuple[Cluster, dict[str, Any]]] = []


def _make_stage(problem: Problem, name: str, spec: StageSpec, microbatch_size: int) -> Stage:
    graph = problem.graph
    counts = split_samples(microbatch_size, tuple(share for _, share in spec.replicas))
    phases: tuple[Phase, ...] = ("F", "B", "I", "W") if problem.is_training else ("F",)
    replicas = []
    recompute = problem.options.recompute and problem.is_training
    again = spec.ops if recompute else _chosen_again(problem, spec, max(counts))
    saved = () if recompute or not len(again) else saved_names(graph, np.sort(spec.ops), again)
    given: Sequence[Mapping[str, float]] = spec.times or [{}] * len(spec.replicas)
    for (devices, share), count, known in zip(spec.replicas, counts, given, strict=True):
        known = known if recompute or not len(again) else _with_again(problem, spec.ops, again, devices[0], known)
        times: dict[str, float] = {
            phase: stage_figure(problem.costs, spec.ops, devices, phase, fraction=count / graph.batch,
                                again=again, sharded=bool(spec.sharding), times=known).seconds
            for phase in phases}
        replicas.append(Replica(devices=tuple(problem.cluster.devices[device].name for device in devices),
                                mesh=spec.mesh or mesh_axes(len(devices), 1),
                                share=share, times=times))
    flops, written = stage_work(graph, spec.ops)
    return Stage(name=name, ops=tuple(graph.op_names[op] for op in spec.ops), replicas=tuple(replicas),
                 modules=block_names(graph, spec.ops), microbatches=spec.microbatches, sharding=spec.sharding,
                 storage=spec.storage, recompute=bool(len(again)), saved=saved, flops=flops, bytes=written)


def _chosen_again(problem: Problem, spec: StageSpec, num_samples: int) -> I64:
    """Return the operators of a stage that run again because the user asked for it."""
    how, graph = problem.options.saving, problem.graph
    if not problem.is_training or how in ("auto", "none"):
        return spec.ops[:0]
    fraction, degree = num_samples / graph.batch, max(len(devices) for devices, _ in spec.replicas)
    column = problem.costs.column_of_device[spec.replicas[0][0][0]]
    return chosen_again(graph, np.sort(spec.ops), how * degree if isinstance(how, int) else how, fraction=fraction,
                        seconds=problem.costs.op_seconds("F", fraction)[:, column])


def _with_again(problem: Problem, ops: I64, again: I64, device: DeviceId,
                times: Mapping[str, float]) -> Mapping[str, float]:
    """Return the seconds of a replica whose devices divide the stage, with what runs again in its backward."""
    forward = problem.costs.op_seconds("F")[:, problem.costs.column_of_device[device]]
    more = times.get("F", 0.0) * float(forward[again].sum()) / (float(forward[ops].sum()) or 1.0)
    return {phase: seconds + more if phase in ("B", "I") else seconds for phase, seconds in times.items()}


def block_of(module: str) -> str:
    """Return the path up to its first number, which is the repeated layer: ``h.3.attn`` -> ``h.3``."""
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return module


def block_names(graph: Graph, ops: I64) -> tuple[str, ...]:
    """Return the blocks that the operators belong to, each once, in order; operators outside any module count not."""
    return tuple(dict.fromkeys(block for op in ops if (block := block_of(graph.op_modules[op]))))


def add_gradients(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with one all-reduce for each set of devices that have parts of the gradients of parameters."""
    if plan.model.mode != "training":
        return plan
    groups: dict[tuple[str, ...], list[str]] = {}
    for tensor, sets in exchange_sets(plan, graph).items():
        for devices in sets:
            groups.setdefault(devices, []).append(graph.tensor_names[tensor])
    exchanges = tuple(GradientExchange(parameters=tuple(names), devices=devices) for devices, names in groups.items())
    return replace(plan, gradients=exchanges)


# ---- shares of samples -----------------------------------------------------------------------------------------------


ROUNDS: Final = 3
"""Of shares by the speeds that devices have with the shares before."""
MOVES: Final = 4
"""Single samples that are moved then, for each device."""


def fair_samples(size: int, num_members: int, seconds: Callable[[int, float], float]) -> tuple[int, ...]:
    """Return the samples of each member, together ``size``; ``seconds(member, samples)`` is what it takes for so many.

    Speeds depend on the number of samples, so shares by speed are only the beginning. Samples are then moved one by one
    from the slowest to whoever would still be quicker with one more.

    >>> fair_samples(10, 2, lambda member, samples: samples * (1, 4)[member])
    (8, 2)
    """
    even = max(1.0, size / num_members)
    counts = split_samples(size, tuple(1.0 / max(seconds(member, even), 1e-12) for member in range(num_members)))
    best = counts, _times(counts, seconds)
    for _ in range(ROUNDS):
        if not all(counts):
            break
        counts = split_samples(size, tuple(count / max(time_s, 1e-12) for count, time_s in zip(
            counts, _times(counts, seconds), strict=True)))
        if counts == best[0]:
            break
        best = min(best, (counts, _times(counts, seconds)), key=lambda item: max(item[1]))
    found, times = list(best[0]), list(best[1])
    for _ in range(MOVES * num_members):
        slowest = max(range(num_members), key=lambda member: times[member])
        if found[slowest] <= 1:
            break
        longer = {member: seconds(member, found[member] + 1) for member in range(num_members) if member != slowest}
        target = min(longer, key=lambda member: longer[member], default=slowest)
        if target == slowest or longer[target] >= times[slowest]:
            break
        found[slowest] -= 1
        found[target] += 1
        times[slowest], times[target] = seconds(slowest, found[slowest]), longer[target]
    return tuple(found)


def _times(counts: tuple[int, ...], seconds: Callable[[int, float], float]) -> tuple[float, ...]:
    return tuple(seconds(member, count) if count else 0.0 for member, count in enumerate(counts))


# ---- buckets of gradients --------------------------------------------------------------------------------------------


COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)
"""So many buckets are tried."""
WORTHWHILE: Final = 0.005
"""More buckets must shorten backward and exchange by this part."""
ISSUE_S: Final = 5e-5
"""What the host does to issue a collective (20 to 100 us), which the costs of collectives do not know."""


def cut_gradients(plan: Plan, graph: Graph, costs: Costs) -> Plan:
    """Return the plan with its exchanges cut into buckets, in the order in which their gradients are final."""
    if not plan.gradients:
        return plan
    stages = _stages_by_parameter(plan, graph)
    cuts: dict[tuple[str, ...], list[tuple[float, tuple[str, ...]]]] = {}
    found: list[tuple[float, GradientExchange]] = []
    for exchange in plan.gradients:
        if exchange.parameters not in cuts:
            stage = _only_stage(plan, graph, stages, exchange)
            cuts[exchange.parameters] = [(np.inf, exchange.parameters)] if stage is None else _best_cut(
                plan, graph, costs, stage, exchange)
        found.extend((at, replace(exchange, parameters=names)) for at, names in cuts[exchange.parameters])
    return replace(plan, gradients=tuple(item for _, item in sorted(found, key=lambda pair: pair[0])))


def _stages_by_parameter(plan: Plan, graph: Graph) -> dict[str, set[int]]:
    result: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        read = {int(tensor) for name in stage.ops for tensor in graph.op_inputs(graph.op_index[name])}
        for tensor in read.intersection(graph.parameters.tolist()):
            result.setdefault(graph.tensor_names[tensor], set()).add(index)
    return result


def _only_stage(plan: Plan, graph: Graph, stages: dict[str, set[int]], exchange: GradientExchange) -> int | None:
    """Return the stage that makes all gradients of an exchange, if its last backward ends with them; else None."""
    users = set().union(*(stages[name] for name in exchange.parameters))
    if len(users) > 1:
        return None
    (index,) = users
    stage = plan.stages[index]
    inputs = stage_inputs(graph, np.asarray([graph.op_index[name] for name in stage.ops], dtype=np.int64))
    splits = any(token.startswith(f"{stage.name}:W:") for actions in plan.order.values() for token in actions)
    return None if splits or graph.needs_gradient[inputs].any() else index


def _best_cut(plan: Plan, graph: Graph, costs: Costs, index: int,
              exchange: GradientExchange) -> list[tuple[float, tuple[str, ...]]]:
    """Return the buckets of one stage's exchange that end first: when each is final in the backward, its parameters.

    Times are those of the replica with the longest backward; when a bucket is final is a part of that.
    """
    stage, place = plan.stages[index], costs.cluster.device_index
    counts = split_samples(plan.microbatch_size, tuple(replica.share for replica in stage.replicas))
    slowest = max(range(len(counts)), key=lambda number: stage.replicas[number].times.get("B", 0.0))
    replica, names = stage.replicas[slowest], exchange.parameters
    tensors = [graph.tensor_index[name] for name in names]
    times = final_times(
        graph, costs, np.sort([graph.op_index[name] for name in stage.ops]),
        [place[name] for name in replica.devices], [(tensor,) for tensor in tensors],
        fraction=counts[slowest] / graph.batch, at_once=stage.keeps_only_inputs, again=repeated_in(
            graph, np.sort([graph.op_index[name] for name in stage.ops]), stage))
    backward_s = replica.times.get("B", float(times[-1]))
    times *= backward_s / (times[-1] or 1.0)
    order = np.argsort(times[:-1], kind="stable")
    final_s, whole = times[:-1][order], graph.tensor_bytes[tensors].astype(np.float64)
    parts = parameter_parts(plan, graph) if stage.sharding else {}
    held = (whole * [parts[tensor][exchange.devices[0]] if parts else 1.0 for tensor in tensors])[order]
    devices = tuple(place[name] for name in exchange.devices)

    def end_s(ends: list[int]) -> float:
        """Return when backward and exchange are done with buckets that end before these parameters."""
        done = 0.0
        for first, last in itertools.pairwise([0, *ends]):
            seconds = reduce_seconds(costs, float(held[first:last].sum()), devices)
            done = max(done, float(final_s[last - 1])) + seconds + ISSUE_S
        return max(done, backward_s)

    best = [len(names)]
    best_s, total = end_s(best), np.cumsum(whole[order])
    for count in COUNTS[1:]:
        marks = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
        ends = sorted({*marks.tolist(), len(names)})
        trial_s = end_s(ends)
        if trial_s < best_s * (1 - WORTHWHILE):
            best, best_s = ends, trial_s
    return [(float(final_s[last - 1]) / (backward_s or 1.0),
             tuple(names[at] for at in np.sort(order[first:last]).tolist()))
            for first, last in itertools.pairwise([0, *best])]
