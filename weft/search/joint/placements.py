"""Placements: which device runs which part of the model, for pipelines of several shapes; the order comes later.

    v             one stage on each device: 0, 1, .., p-1
    interleaved   two stages on each device: 0, 1, .., p-1, then 0, 1, .., p-1 again
    vv            two stages on each device: 0, 1, .., p-1, then p-1, .., 1, 0
    x             two pipelines in opposite directions, each with all parameters and every second micro-batch
    m             a large embedding or head on all devices together, the rest a pipeline
    nn            two such groups, before and in the middle: encoder and decoder on one half of the devices each
    k             two branches on one half of the devices each, and what joins them on all devices together

Each function returns a plan with an order in which micro-batches go through one after another: it is sound and takes
the least memory, and a schedule is to be found for it (``weft.search.joint.scheduled``).

Stages on all devices together (*joint* stages) are spread in a plain way (``weft.search.joint.placements``). Of a model
without factors of its operators, only a guess is made of the tensors that devices hold parts of: every matrix is
divided along its largest dimension, and so are the tensors inside the stage that have that dimension. The time of a
joint stage is that of one device divided by the number of devices, without the collectives inside.

A plain way to spread operators over the devices of a replica: split large parameters, and follow what is split.

It looks at one operator after another, once. Where an operand is split, the operator is split likewise, if it can be;
where none is, an operator with a large matrix is split along the matrix's longest dimension, and all others are not.
Sums are taken where they come up, except that views of them are sums as well.
For transformers this gives what Megatron-LM does: the first matrix of a pair by columns, the second by rows, attention
by heads, and embedding, head and loss by the vocabulary. It weighs no costs: ``weft.search.shard`` does.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import lru_cache, partial
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cluster.cluster import DeviceId
from weft.cost.roofline import parameter_bytes
from weft.model.graph import I64, Graph, TensorRole
from weft.plan.layout import stage_inputs
from weft.plan.op_bytes import prefix_sums, state_by_op
from weft.plan.orders import Action, Order
from weft.plan.plan import Plan, Sharding
from weft.plan.sharding import SplitOp, TensorLayout, format_layout, parse_layout, parse_strategy
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.search.joint.baselines import PipelineCutter, Room, Strategy
from weft.search.joint.chain import Chain
from weft.sharding import factors
from weft.sharding.named_ops import NamedOp
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement


def spread(ops: Mapping[str, NamedOp], shapes: Mapping[str, Sequence[int]], num_devices: int, *,
           stored: Mapping[str, Layout] | None = None, leaving: Set[str] = frozenset()) -> Sharding:
    """Return how a stage of these operators, in order, is spread over one axis of so many devices.

    ``shapes`` are those of the model's parameters. ``stored`` are parameters that another stage on the same devices
    holds already, which decides how they are stored here. ``leaving`` are tensors that others read, too: whole.
    """
    mesh = (num_devices,)
    chosen: dict[str, tuple[str, ...]] = {}
    layouts: dict[str, Placement] = {name: layout[0] for name, layout in (stored or {}).items()}
    read: dict[str, set[Placement]] = {tensor: {WHOLE} for tensor in leaving}
    num_readers = Counter(tensor for op in ops.values() for tensor in op.inputs)
    for name, op in ops.items():
        takes_sums = len(op.inputs) == 1 and num_readers[op.inputs[0]] == 1
        strategy = _choose(op, layouts, shapes, num_devices, takes_sums=takes_sums)
        if op.factors is None or strategy == (factors.NOT_SPLIT,):
            for tensor in op.inputs:
                read.setdefault(tensor, set()).add(WHOLE)
            continue
        chosen[name] = (_word(op.factors, strategy[0]),)
        for position, tensor in enumerate(op.inputs):
            place = factors.input_layout(op.factors, strategy, mesh, position)[0]
            read.setdefault(tensor, set()).add(place)
            if tensor in shapes:
                layouts.setdefault(tensor, place)
        for position, tensor in enumerate(op.outputs[: len(op.factors.outputs)]):
            layouts[tensor] = factors.output_layout(op.factors, strategy, mesh, position)[0]
    sharding = with_stored_parameters(chosen, ops, shapes, mesh, stored=stored)
    tensors, made = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    for tensor, place in layouts.items():
        if tensor in shapes:
            continue
        found = read.get(tensor, set())
        wanted = next(iter(found)) if len(found) == 1 else WHOLE
        if place.is_split and place in found:
            tensors[tensor] = str(place),
        elif place.is_split or wanted.is_split:
            made[tensor] = str(place),
            if wanted.is_split:
                tensors[tensor] = str(wanted),
    return Sharding(ops=sharding.ops, tensors={**tensors, **sharding.tensors}, made=made)


def _word(op: factors.OpFactors, choice: int) -> str:
    return op.factors[choice].name if choice >= 0 else f"+{-2 - choice}"


def _choose(op: NamedOp, layouts: Mapping[str, Placement], shapes: Mapping[str, Sequence[int]],
            count: int, *, takes_sums: bool) -> factors.Strategy:
    """Return the strategy that fits most of the split operands, else splits the largest matrix, with least work."""
    if op.factors is None:
        return (factors.NOT_SPLIT,)
    held = [(position, layouts[name]) for position, name in enumerate(op.inputs)
            if name in layouts and (layouts[name].is_split or (layouts[name] == SUM and takes_sums))]
    best = (0, 0, -1.0)
    found: factors.Strategy = (factors.NOT_SPLIT,)
    for strategy in _strategies(op.factors, count):
        fits = sum(factors.input_layout(op.factors, strategy, (count,), position)[0] == place
                   for position, place in held)
        matrix = max((math.prod(shapes[name]) for position, name in enumerate(op.inputs)
                      if _cuts_longest(op.factors, strategy, count, position, shapes.get(name, ()))), default=0)
        key = (fits, matrix, -factors.work_part(op.factors, strategy, (count,)))
        if key > best and (fits or (matrix and not held)):
            best, found = key, strategy
    return found


def _strategies(op: factors.OpFactors, count: int) -> Iterator[factors.Strategy]:
    choices = [*range(len(op.factors)), *(factors.linear_choice(index) for index in range(len(op.linear)))]
    yield from ((choice,) for choice in choices if factors.is_valid(op, (choice,), (count,)))


def _cuts_longest(op: factors.OpFactors, strategy: factors.Strategy, count: int, position: int,
                  shape: Sequence[int]) -> bool:
    """Return whether a matrix is split along its longest dimension."""
    is_matrix = sum(size > 1 for size in shape) > 1
    place = factors.input_layout(op, strategy, (count,), position)[0] if is_matrix else WHOLE
    return place.is_split and shape[place.dim] == max(shape)


def with_stored_parameters(words: Mapping[str, Sequence[str]], ops: Mapping[str, NamedOp],
                           shapes: Mapping[str, Sequence[int]], mesh: Sequence[int], *,
                           stored: Mapping[str, Layout] | None = None) -> Sharding:
    """Return the sharding with these strategies in which parameters are stored as they are used.

    A parameter whose readers want different parts of it is whole; on axes where its gradient comes out as parts or
    sums it is summed at the end of the step.
    """
    readers: dict[str, list[tuple[SplitOp | None, int]]] = {}
    for name, op in ops.items():
        split = parse_strategy(op.factors, words[name], mesh, name=name) if any(words.get(name, ())) else None
        for position, tensor in enumerate(op.inputs):
            if tensor in shapes:
                readers.setdefault(tensor, []).append((split, position))
    tensors = {}
    for tensor, items in readers.items():
        given = None if stored is None else stored.get(tensor)
        layout = TensorLayout(*zip(*(_stored(items, axis, given) for axis in range(len(mesh))), strict=True))
        if any(item != WHOLE for item in (*layout.value, *layout.gradient)):
            tensors[tensor] = format_layout(layout)
    return Sharding(ops={name: tuple(items) for name, items in words.items() if any(items)}, tensors=tensors)


def _stored(readers: Sequence[tuple[SplitOp | None, int]], axis: int,
            given: Layout | None) -> tuple[Placement, Placement]:
    """Return how a parameter and its gradient lie on one axis."""
    wanted = {WHOLE if split is None else split.wanted(position).value[axis] for split, position in readers}
    place = given[axis] if given is not None else wanted.pop() if len(wanted) == 1 else WHOLE
    if place.is_split:
        return place, place
    come_out = {WHOLE if split is None else split.wanted(position).gradient[axis] for split, position in readers}
    return WHOLE, WHOLE if come_out == {WHOLE} else SUM


# ---- stages spread over devices --------------------------------------------------------------------------------------


NUM_CHUNKS: Final = 2
"""Stages per device of the interleaved placement."""
LARGE: Final = 2.0
"""A parameter is large if it has so many times the bytes of the largest matrix of the repeated layers."""
REPEATED: Final = 3
"""Matrices of one shape, so many or more, are those of repeated layers; embedding and head may be two."""
END_PART: Final = 0.2
"""A large parameter is at an end of the model if at most this part of the others is before, or behind, it."""
BRANCH_PART: Final = 0.05
"""A branch has at least this part of the work."""


def chain_placement(problem: Problem, microbatches: int, *, name: str) -> Plan:
    """Return a pipeline that goes over all devices once (v), again and again (interleaved), or there and back (vv).

    Its stages are cut so that the period of 1F1B is as short as possible, and devices have about as much to do.
    """
    once = problem.devices
    devices = {"v": once, "interleaved": once * NUM_CHUNKS, "vv": once + once[::-1]}[name]
    specs = _pipeline(problem, microbatches, _all_ops(problem), devices, stages_per_device=len(devices) // len(once))
    return _make(problem, microbatches, specs, name)


def x_placement(problem: Problem, microbatches: int) -> Plan:
    """Return two pipelines over the same devices in opposite directions, for every second micro-batch each."""
    if microbatches % 2:
        raise NoFeasiblePlan(f"opposite pipelines need an even number of micro-batches, not {microbatches}")
    specs = []
    for number, devices in enumerate((problem.devices, problem.devices[::-1])):
        specs += _pipeline(problem, microbatches, _all_ops(problem), devices, stages_per_device=2,
                           served=tuple(range(number, microbatches, 2)))
    return _make(problem, microbatches, specs, "x")


def m_placement(problem: Problem, microbatches: int) -> Plan:
    """Return the large parameters at the model's ends on all devices together, and the rest as a pipeline."""
    groups = _Groups(problem)
    if groups.middle:
        raise NoFeasiblePlan(f"placement m spreads large parameters at the ends of a model; {groups.describe_middle()} "
                             "stands in the middle. Try nn, k or v")
    joint = _joint(problem, [ops for ops in (groups.front, groups.tail) if len(ops)])
    rest = np.arange(len(groups.front), groups.first_of_tail)
    pipeline = _pipeline(problem, microbatches, rest, problem.devices, reserved=_joint_bytes(problem, joint))
    return _make(problem, microbatches, _around(groups, joint, pipeline), "m")


def nn_placement(problem: Problem, microbatches: int) -> Plan:
    """Return large parameters before and in the middle on all devices together, the parts between them on one half."""
    groups = _Groups(problem)
    if not len(groups.front) or not groups.middle:
        missing = "in the middle" if len(groups.front) else "at the beginning"
        raise NoFeasiblePlan(f"placement nn needs large parameters at the beginning and in the middle of the model; "
                             f"{problem.graph.name!r} has none {missing}. Try m, k or v")
    middle = np.arange(groups.middle[0], groups.middle[-1] + 1)
    if groups.light[middle].sum() > END_PART * groups.light.sum():
        raise NoFeasiblePlan(f"placement nn needs one place in the middle of the model with large parameters; "
                             f"{groups.describe_middle()} stand apart. Try k or v")
    joint = _joint(problem, [ops for ops in (groups.front, middle, groups.tail) if len(ops)])
    reserved = _joint_bytes(problem, joint)
    parts = (np.arange(len(groups.front), middle[0]), np.arange(middle[-1] + 1, groups.first_of_tail))
    encoder, decoder = (_pipeline(problem, microbatches, ops, half, reserved=reserved)
                        for ops, half in zip(parts, _halves(problem), strict=True))
    return _make(problem, microbatches, _around(groups, joint, [*encoder, joint[1], *decoder]), "nn")


def k_placement(problem: Problem, microbatches: int) -> Plan:
    """Return two independent branches on one half of the devices each, and what joins them on all devices together."""
    branches = _find_branches(problem)
    joint = _joint(problem, [np.setdiff1d(_all_ops(problem), np.concatenate(branches))])
    reserved = _joint_bytes(problem, joint)
    first, second = (_pipeline(problem, microbatches, ops, half, reserved=reserved)
                     for ops, half in zip(branches, _halves(problem), strict=True))
    return _make(problem, microbatches, [*first, *second, *joint], "k")


PLACEMENTS: Final[dict[str, Strategy]] = {
    "v": partial(chain_placement, name="v"), "x": x_placement, "m": m_placement, "nn": nn_placement, "k": k_placement,
    "interleaved": partial(chain_placement, name="interleaved"), "vv": partial(chain_placement, name="vv")}
"""Placements by name."""


# ---- pieces ---------------------------------------------------------------------------------------------------------


def _make(problem: Problem, microbatches: int, specs: Sequence[StageSpec], name: str) -> Plan:
    """Return the plan with these stages, given in topological order, one micro-batch after another."""
    devices = sorted({device for spec in specs for members, _ in spec.replicas for device in members})
    order: Order = [[] for _ in devices]
    for index in range(microbatches):
        used = [number for number, spec in enumerate(specs) if spec.microbatches is None or index in spec.microbatches]
        actions: list[Action] = [(number, "F", index) for number in used]
        if problem.is_training:
            actions += [(number, "B", index) for number in reversed(used)]
        for action in actions:
            for members, _ in specs[action[0]].replicas:
                for device in members:
                    order[devices.index(device)].append(action)
    return make_plan(problem, specs, order, microbatches=microbatches, by=f"placement-{name}", order_devices=devices)


def _all_ops(problem: Problem) -> I64:
    return np.arange(problem.graph.num_ops)


def _halves(problem: Problem) -> tuple[tuple[DeviceId, ...], tuple[DeviceId, ...]]:
    _require_devices(problem)
    middle = (len(problem.devices) + 1) // 2
    return problem.devices[:middle], problem.devices[middle:]


def _require_devices(problem: Problem) -> None:
    if len(problem.devices) < 2:
        raise NoFeasiblePlan(f"a pipeline needs 2 or more devices; the cluster has {len(problem.devices)}")


def _pipeline(problem: Problem, microbatches: int, ops: I64, devices: tuple[DeviceId, ...], *,
              stages_per_device: int = 1, reserved: float = 0.0, served: tuple[int, ...] | None = None
              ) -> list[StageSpec]:
    """Return the operators cut into stages on these devices; stages without operators are left out.

    ``reserved`` bytes of each device are for others, and the rest is for ``stages_per_device`` stages.
    """
    _require_devices(problem)
    capacity = [problem.cluster.devices[device].memory_bytes for device in devices]
    room = Room(devices=devices, memory=tuple(
        None if size is None else max(0.0, size - reserved) / stages_per_device for size in capacity))
    chain = Chain(problem, ops=ops, num_stages=len(devices))
    cutter = PipelineCutter(chain, microbatches, room)
    cuts = cutter.balanced()
    if stages_per_device > 1 and served is None:
        cuts = _balance_devices(cutter, cuts)
    return [StageSpec(ops=ops[first:last], replicas=(((device,), 1.0),), microbatches=served)
            for device, (first, last) in zip(devices, itertools.pairwise(chain.places[cuts].tolist()), strict=True)
            if last > first]


def _balance_devices(cutter: PipelineCutter, cuts: list[int]) -> list[int]:
    """Return the cuts moved, one at a time, as long as the busiest device gets less to do.

    The cutter looks at each stage by itself; here the stages of a device add up. No device gets more than its stages
    may take together.
    """
    load = _device_load(cutter)
    best, improved = load(cuts), True
    while improved:
        improved = False
        for position in range(1, len(cuts) - 1):
            for place in range(cuts[position - 1], cuts[position + 1] + 1):
                trial = [*cuts[:position], place, *cuts[position + 1:]]
                trial_s = load(trial)
                if trial_s < best * (1 - 1e-6):
                    cuts, best, improved = trial, trial_s, True
                    break
    return cuts


def _device_load(cutter: PipelineCutter) -> Callable[[Sequence[int]], float]:
    """Return what gives the work of the busiest device for one micro-batch, transfers included, by the cuts.

    It is infinite where memory is exceeded.
    """
    chain, devices, capacity = cutter.chain, cutter.room.devices, cutter.room.memory_of_device
    seconds = [chain.step_seconds(device, cutter.size) for device in devices]
    sent = chain.crossing_seconds(cutter.size, devices)
    need = lru_cache(maxsize=None)(cutter.need)

    def load(cuts: Sequence[int]) -> float:
        work, held = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
        for stage, (first, last) in enumerate(itertools.pairwise(cuts)):
            if last > first:
                work[devices[stage]] += float(seconds[stage][last] - seconds[stage][first] + 2 * sent[last])
                held[devices[stage]] += float(need(stage, first)[last - first])
        return math.inf if any(held[device] > capacity[device] for device in held) else max(work.values())

    return load


def _around(groups: _Groups, joint: Sequence[StageSpec], inner: list[StageSpec]) -> list[StageSpec]:
    """Return the inner stages after the joint stage at the front and before the one at the end."""
    return [*(joint[:1] if len(groups.front) else []), *inner, *(joint[-1:] if len(groups.tail) else [])]


def _joint(problem: Problem, parts: Sequence[I64]) -> list[StageSpec]:
    """Return each of these parts of the model as one stage on all devices together."""
    graph, count = problem.graph, len(problem.devices)
    if problem.ops is None:
        shardings = [guess_sharding(graph, ops, count) for ops in parts]
    else:
        shapes = {graph.tensor_names[tensor]: graph.tensor_shapes[tensor] for tensor in graph.parameters}
        stored: dict[str, Layout] = {}
        shardings = []
        for ops in parts:
            names = [graph.op_names[op] for op in ops]
            shardings.append(spread({name: problem.ops[name] for name in names}, shapes, count, stored=stored,
                                    leaving=_read_elsewhere(graph, ops)))
            read = {tensor for name in names for tensor in problem.ops[name].inputs if tensor in shapes}
            held = shardings[-1].tensors
            stored |= {tensor: parse_layout(held.get(tensor, ("R",))).value for tensor in sorted(read)}
    return [StageSpec(ops=ops, replicas=((problem.devices, 1.0),), sharding=sharding)
            for ops, sharding in zip(parts, shardings, strict=True)]


def _read_elsewhere(graph: Graph, ops: I64) -> frozenset[str]:
    """Return the tensors that operators beside these read, and the model's outputs."""
    others = np.setdiff1d(np.arange(graph.num_ops), ops)
    read = [tensor for op in others.tolist() for tensor in graph.op_inputs(op).tolist()]
    return frozenset(graph.tensor_names[tensor] for tensor in {*read, *graph.outputs})


def _joint_bytes(problem: Problem, joint: Sequence[StageSpec]) -> float:
    """Return about what the joint stages take on each device: their part of parameters and state."""
    ops = np.concatenate([spec.ops for spec in joint])
    optimizer = problem.options.optimizer if problem.is_training else None
    return float(state_by_op(problem.graph, optimizer)[ops].sum()) / len(problem.devices)


def guess_sharding(graph: Graph, ops: I64, num_devices: int) -> Sharding:
    """Return how a stage divides its tensors: matrices by their largest dimension, and what has that dimension.

    Tensors that go to other stages, or come from them, stay whole.
    """
    read = np.unique(np.concatenate([graph.op_inputs(int(op)) for op in ops]))
    inside = np.zeros(graph.num_ops, dtype=bool)
    inside[ops] = True
    result: dict[str, tuple[str, ...]] = {}
    sizes: set[int] = set()
    for tensor in read[graph.tensor_role[read] == TensorRole.PARAMETER].tolist():
        shape = graph.tensor_shapes[tensor]
        if len(shape) > 1 and max(shape) >= num_devices:
            result[graph.tensor_names[tensor]] = (f"S{shape.index(max(shape))}",)
            sizes |= {max(shape)} if shape.count(max(shape)) == 1 else set()
    outside = np.flatnonzero(~inside)
    leaving = set(stage_inputs(graph, outside).tolist()) | set(graph.outputs)
    for op in ops.tolist():
        for tensor in graph.op_outputs(op).tolist():
            split = [dim for dim, size in enumerate(graph.tensor_shapes[tensor]) if size in sizes]
            if split and tensor not in leaving:
                result[graph.tensor_names[tensor]] = (f"S{split[-1]}",)
    return Sharding(tensors=result)


# ---- which operators ------------------------------------------------------------------------------------------------


class _Groups:
    """Where the model's large parameters are read: at its beginning, at its end, or in the middle."""

    def __init__(self, problem: Problem) -> None:
        _require_devices(problem)
        graph = self.graph = problem.graph
        large = large_readers(graph)
        self.light = parameter_bytes(graph)
        self.light[large] = 0.0
        before, limit = prefix_sums(self.light), END_PART * float(self.light.sum())
        front = [op for op in large if before[op] <= limit]
        tail = [op for op in large if op not in front and before[-1] - before[op + 1] <= limit]
        self.middle = [op for op in large if op not in front and op not in tail]
        self.front: I64 = np.arange(front[-1] + 1 if front else 0)
        self.first_of_tail = tail[0] if tail else graph.num_ops
        self.tail: I64 = np.arange(self.first_of_tail, graph.num_ops)
        if before[self.first_of_tail] - before[len(self.front)] <= 0:
            raise NoFeasiblePlan(f"{graph.name!r} has no layers besides its large parameters to make a pipeline of")

    def describe_middle(self) -> str:
        """Return the names of the operators in the middle."""
        names = [self.graph.op_modules[op] or self.graph.op_names[op] for op in self.middle[:3]]
        return ", ".join(dict.fromkeys(names)) + (", ..." if len(self.middle) > 3 else "")


def large_readers(graph: Graph) -> list[int]:
    """Return the operators that read a parameter far larger than most; raise ``NoFeasiblePlan`` if there is none."""
    matrices = [int(tensor) for tensor in graph.parameters if len(graph.tensor_shapes[tensor]) > 1]
    if not matrices:
        raise NoFeasiblePlan(f"{graph.name!r} has no matrices among its parameters to spread over devices")
    counts = Counter(graph.tensor_shapes[tensor] for tensor in matrices)
    repeated = [tensor for tensor in matrices if counts[graph.tensor_shapes[tensor]] >= REPEATED] or matrices
    limit = LARGE * float(graph.tensor_bytes[repeated].max())
    large = [tensor for tensor in matrices if graph.tensor_bytes[tensor] >= limit]
    if not large:
        largest = max(matrices, key=lambda tensor: graph.tensor_bytes[tensor])
        raise NoFeasiblePlan(
            f"{graph.name!r} has no parameter that is worth to be spread over all devices: the largest, "
            f"{graph.tensor_names[largest]!r} ({format_bytes(int(graph.tensor_bytes[largest]))}), has less than "
            f"{LARGE:g} times the bytes of the largest matrix of the layers ({format_bytes(limit / LARGE)}). "
            "Try placement v")
    return sorted(set(graph.consumer_op[np.isin(graph.inputs, large)].tolist()))


def _find_branches(problem: Problem) -> tuple[I64, I64]:
    """Return the operators of the two heaviest branches that depend on different inputs of the model."""
    graph = problem.graph
    origins = _input_origins(graph)
    seconds = problem.op_seconds(problem.devices[0], graph.batch)
    best: tuple[float, int, int] | None = None
    for one, other in itertools.combinations(sorted({origin for origin in origins if origin}), 2):
        if one & other == 0:
            weight = min(float(seconds[_within(origins, one)].sum()), float(seconds[_within(origins, other)].sum()))
            best = max(best or (weight, one, other), (weight, one, other), key=lambda item: item[0])
    if best is None or best[0] < BRANCH_PART * seconds.sum():
        raise NoFeasiblePlan(f"placement k needs two branches that depend on different inputs and are joined later, "
                             f"each with {BRANCH_PART:.0%} of the work or more; {graph.name!r} has none. Try v or m")
    branches = _within(origins, best[1]), _within(origins, best[2])
    return branches if branches[0][0] < branches[1][0] else branches[::-1]


def _within(origins: Sequence[int], allowed: int) -> I64:
    return np.asarray([op for op, origin in enumerate(origins) if origin and origin & ~allowed == 0], dtype=np.int64)


def _input_origins(graph: Graph) -> list[int]:
    """Return, as a bit set, the inputs of the model that each operator depends on.

    Operators that depend on none, such as those on positions, count to those that read them.
    """
    inputs = np.flatnonzero(graph.tensor_role == TensorRole.INPUT).tolist()
    bit = {tensor: 1 << number for number, tensor in enumerate(inputs)}
    origins = [0] * graph.num_ops
    for op in range(graph.num_ops):
        for tensor in graph.op_inputs(op).tolist():
            producer = int(graph.tensor_producer[tensor])
            origins[op] |= origins[producer] if producer >= 0 else bit.get(tensor, 0)
    readers = list(origins)
    for producer, consumer, _ in graph.edges[::-1].tolist():
        if not origins[producer]:
            readers[producer] |= readers[consumer]
    return readers
