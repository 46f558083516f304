"""What must hold of a plan before it can be lowered; every problem is named with its path in the plan file.

Names and references, coverage (each operator exactly once for each micro-batch), convex stages (no cycle among them),
shares and sample counts, the actions of each device exactly once and in a possible order, shardings that fit their
tensors, and a gradient exchange for each parameter of which several devices have parts of the gradient's sum.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from weft.base.errors import PlanError
from weft.base.units import format_bytes
from weft.cluster.cluster import Cluster
from weft.model.graph import Graph, find_cycle
from weft.plan.factors import LINEAR_KINDS, Factors, find_factors
from weft.plan.holders import Copies, exchange_sets, in_pieces, layout_problems, parameter_copies
from weft.plan.plan import GradientExchange, Plan, Replica, Stage, split_samples
from weft.plan.saving import saving_problems
from weft.plan.sharding import sharding_problems
from weft.plan.units import storage_problems, unit_problems

PHASES = ("F", "B", "I", "W")
_MICROBATCH = re.compile("[0-9]{1,9}")
_MAX_BATCH = 2**31 - 1
_MAX_STEP_BYTES = 2**58
"""Far more than any cluster has, and few enough that sums of sizes stay below 64 bits."""
_MAX_PROBLEMS = 1000
"""A broken file can have millions of problems; more than this many help nobody."""


def require_structure(plan: Plan, graph: Graph, cluster: Cluster | None = None) -> None:
    """Raise ``PlanError`` with all structural problems of the plan."""
    problems = structure_problems(plan, graph, cluster)
    if problems:
        raise_problems("the plan", problems)


def raise_problems(what: str, problems: Sequence[str]) -> None:
    """Raise one ``PlanError`` that lists the problems (the first 20 in the message, all in ``problems``)."""
    shown = list(problems[:20])
    if len(problems) > len(shown):
        shown.append(f"... and {len(problems) - len(shown)} more")
    text = shown[0] if len(shown) == 1 else "".join(f"\n  - {line}" for line in shown)
    raise PlanError(f"{what} has {len(problems)} problem{'s' if len(problems) > 1 else ''}: {text}", problems)


def structure_problems(plan: Plan, graph: Graph, cluster: Cluster | None = None) -> list[str]:
    """Return all problems; references are checked first, and what builds on them only if they hold."""
    binding = list(_binding_problems(plan, graph, cluster))
    if binding:  # made for another model or cluster: whatever else is wrong follows from that
        return binding
    references = itertools.chain(
        _count_problems(plan, graph),
        *(_stage_problems(plan, graph, stage, f"stages[{index}]") for index, stage in enumerate(plan.stages)))
    problems = list(itertools.islice(references, _MAX_PROBLEMS))
    if problems:
        return problems
    meaning = itertools.chain(_coverage_problems(plan, graph), _order_problems(plan), layout_problems(plan, graph),
                              unit_problems(plan, graph), _gradient_problems(plan, graph))
    return list(itertools.islice(meaning, _MAX_PROBLEMS)) or _cycle_problems(plan, graph)


def _binding_problems(plan: Plan, graph: Graph, cluster: Cluster | None) -> Iterator[str]:
    if plan.model.digest != graph.digest:
        yield (f"model.digest is {plan.model.digest!r} but the model {graph.name!r} has {graph.digest!r}: "
               "the plan was made for another model (or another version of it); plan again")
    if plan.model.mode == "training":
        if not graph.outputs or graph.tensor_shapes[graph.outputs[0]] != ():
            yield "model.mode is 'training' but the model's first output is not a scalar loss"
        if not graph.has_backward:
            yield "model.mode is 'training' but the graph was traced without backward costs"
    if cluster is None:
        return
    if plan.cluster.digest != cluster.digest:
        yield (f"cluster.digest is {plan.cluster.digest!r} but the cluster {cluster.name!r} has {cluster.digest!r}: "
               "the plan was made for another cluster; plan again")
    for index, name in enumerate(plan.cluster.devices):
        if name not in cluster.device_index:
            yield f"cluster.devices[{index}]: there is no device {name!r} in the cluster"


def _count_problems(plan: Plan, graph: Graph) -> Iterator[str]:
    if not plan.cluster.devices:
        yield "cluster.devices is empty"
    for name, count in Counter(plan.cluster.devices).items():
        if count > 1:
            yield f"cluster.devices: {name!r} is there {count} times"
    if plan.microbatches < 1 or not 1 <= plan.model.batch <= _MAX_BATCH:
        yield (f"microbatches ({plan.microbatches}) and model.batch ({plan.model.batch}) must be 1 or more, "
               f"and at most {_MAX_BATCH}")
    elif plan.model.batch % plan.microbatches:
        yield (f"model.batch ({plan.model.batch}) is not a multiple of microbatches ({plan.microbatches}); "
               "change one of them")
    step_bytes = float(graph.tensor_bytes.sum(dtype=np.float64)) * plan.model.batch / graph.batch
    if step_bytes > _MAX_STEP_BYTES:
        yield f"model.batch is {plan.model.batch}: the tensors of one step would take {format_bytes(step_bytes)}"
    num_actions = sum(len(actions) for actions in plan.order.values())
    if plan.microbatches > num_actions:
        yield f"order has {num_actions} actions for {plan.microbatches} micro-batches: each needs at least one"
    if not plan.stages:
        yield "stages is empty"
    for name, count in Counter(stage.name for stage in plan.stages).items():
        if count > 1:
            yield f"stages: the name {name!r} is there {count} times"
    if not math.isfinite(plan.optimizer.lr) or plan.optimizer.lr < 0:
        yield f"optimizer.lr is {plan.optimizer.lr}: it must be zero or more"


def _stage_problems(plan: Plan, graph: Graph, stage: Stage, path: str) -> Iterator[str]:
    if not stage.name or ":" in stage.name:
        yield f"{path}.name {stage.name!r} must not be empty or contain ':'"
    if not stage.ops:
        yield f"{path}.ops is empty"
    for index, op in enumerate(stage.ops):
        if op not in graph.op_index:
            yield f"{path}.ops[{index}]: the model has no operator {op!r}"
    if len(set(stage.ops)) != len(stage.ops):
        yield f"{path}.ops names an operator twice"
    if stage.microbatches is not None:
        if not stage.microbatches or len(set(stage.microbatches)) != len(stage.microbatches):
            yield f"{path}.microbatches must name at least one micro-batch, each once"
        for index, microbatch in enumerate(stage.microbatches):
            if not 0 <= microbatch < plan.microbatches:
                yield f"{path}.microbatches[{index}] is {microbatch}, but there are {plan.microbatches} micro-batches"
    yield from _replica_problems(plan, stage, path)
    yield from sharding_problems(stage, graph, path)
    yield from storage_problems(stage, path)
    if plan.compiled and stage.saved:
        yield (f"{path}.saved names tensors, which compiled stages cannot choose: let the plan run operator by "
               "operator (compiled: false), or remove saved")
    known = [graph.op_index[name] for name in stage.ops if name in graph.op_index]
    yield from saving_problems(graph, np.asarray(known, dtype=np.int64), stage, path)


def _replica_problems(plan: Plan, stage: Stage, path: str) -> Iterator[str]:
    if not stage.replicas:
        yield f"{path}.replicas is empty"
        return
    seen: set[str] = set()
    for index, replica in enumerate(stage.replicas):
        here = f"{path}.replicas[{index}]"
        if not replica.devices:
            yield f"{here}.devices is empty"
        for position, device in enumerate(replica.devices):
            if device not in plan.cluster.devices:
                yield f"{here}.devices[{position}]: {device!r} is not in cluster.devices"
            elif device in seen:
                yield f"{here}.devices[{position}]: {device!r} already runs this stage"
            seen.add(device)
        yield from _mesh_problems(replica, here)
        if not replica.share > 0:
            yield f"{here}.share is {replica.share}: it must be more than zero"
        for phase, time_s in replica.times.items():
            if phase not in PHASES or not 0 <= time_s < math.inf:
                yield f"{here}.times.{phase} is {time_s}: phases are F, B, I, W, and times are zero or more"
    shares = tuple(replica.share for replica in stage.replicas)
    if all(share > 0 for share in shares):
        if abs(sum(shares) - 1) > 1e-6:
            yield f"{path}.replicas: the shares add up to {sum(shares):g}, not 1"
        elif 1 <= plan.microbatches <= plan.model.batch <= _MAX_BATCH and (
                0 in split_samples(plan.microbatch_size, shares)):
            yield (f"{path}.replicas: shares {list(shares)} of {plan.microbatch_size} samples leave a replica "
                   "without one; try fewer micro-batches or replicas")


def _mesh_problems(replica: Replica, here: str) -> Iterator[str]:
    num_devices = len(replica.devices)
    if any(not 1 <= size <= num_devices for size in replica.mesh.values()):
        yield f"{here}.mesh {dict(replica.mesh)}: sizes must be from 1 to the number of devices ({num_devices})"
    elif math.prod(replica.mesh.values()) != num_devices:
        yield (f"{here}.mesh {dict(replica.mesh)} has {math.prod(replica.mesh.values())} places "
               f"for {num_devices} devices")


def stage_microbatches(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Return the micro-batches that the stage handles."""
    return tuple(range(plan.microbatches)) if stage.microbatches is None else stage.microbatches


def stage_patterns(plan: Plan) -> dict[tuple[int, ...], list[int]]:
    """Return the sets of stages that serve some micro-batches together, with those micro-batches."""
    always = [index for index, stage in enumerate(plan.stages) if stage.microbatches is None]
    chosen: list[list[int]] = [[] for _ in range(plan.microbatches)]
    for index, stage in enumerate(plan.stages):
        for microbatch in stage.microbatches or ():
            chosen[microbatch].append(index)
    patterns: dict[tuple[int, ...], list[int]] = {}
    for microbatch, stages in enumerate(chosen):
        patterns.setdefault(tuple(stages), []).append(microbatch)
    return {tuple(sorted((*always, *stages))): microbatches for stages, microbatches in patterns.items()}


def _coverage_problems(plan: Plan, graph: Graph) -> Iterator[str]:
    for stages, microbatches in stage_patterns(plan).items():
        where = "" if len(microbatches) == plan.microbatches else f" for micro-batch {microbatches[0]}"
        count = np.zeros(graph.num_ops, dtype=np.int64)
        for index in stages:
            count[[graph.op_index[op] for op in plan.stages[index].ops]] += 1
        missing = np.flatnonzero((count == 0) & ~graph.is_constant)
        double = np.flatnonzero((count > 1) & ~graph.is_constant)
        for what, ops in (("is in no stage", missing), ("is in more than one stage", double)):
            if len(ops):
                more = f" (and {len(ops) - 1} more)" if len(ops) > 1 else ""
                yield f"stages: operator {graph.op_names[ops[0]]!r}{more} {what}{where}"


def _order_problems(plan: Plan) -> Iterator[str]:
    stages = {stage.name: stage for stage in plan.stages}
    expected: dict[str, dict[str, Stage]] = {device: {} for device in plan.cluster.devices}
    for stage in plan.stages:
        for replica in stage.replicas:
            for device in replica.devices:
                expected[device][stage.name] = stage
    for device in plan.order:
        if device not in expected:
            yield f"order: {device!r} is not in cluster.devices"
    handled = {name: frozenset(stage_microbatches(plan, stage)) for name, stage in stages.items()}
    styles: dict[tuple[str, int], tuple[str, str]] = {}
    for device, device_stages in expected.items():
        yield from _device_order_problems(plan, device, device_stages, handled, styles)


def _device_order_problems(plan: Plan, device: str, device_stages: Mapping[str, Stage],
                           handled: Mapping[str, frozenset[int]],
                           styles: dict[tuple[str, int], tuple[str, str]]) -> Iterator[str]:
    position: dict[tuple[str, str, int], int] = {}
    actions = plan.order.get(device, ())
    for index, token in enumerate(actions):
        path = f"order.{device}[{index}]"
        action = parse_action(token)
        if action is None:
            yield f"{path}: {token!r} is not of the form stage:F:0 with a phase F, B, I or W"
            continue
        name, phase, microbatch = action
        if name not in handled:
            yield f"{path}: there is no stage {name!r}"
        elif name not in device_stages:
            yield f"{path}: {device!r} does not run stage {name!r}"
        elif microbatch not in handled[name]:
            yield f"{path}: stage {name!r} does not handle micro-batch {microbatch}"
        elif phase != "F" and plan.model.mode == "inference":
            yield f"{path}: {token!r} is a backward action, but the plan is for inference"
        elif action in position:
            yield f"{path}: {token!r} is there already, at order.{device}[{position[action]}]"
        else:
            position[action] = index
    for name, stage in device_stages.items():
        for microbatch in stage_microbatches(plan, stage):
            yield from _action_problems(plan, device, name, microbatch, position, styles)


def _action_problems(plan: Plan, device: str, name: str, microbatch: int, position: Mapping[tuple[str, str, int], int],
                     styles: dict[tuple[str, int], tuple[str, str]]) -> Iterator[str]:
    here = {phase: position.get((name, phase, microbatch)) for phase in PHASES}
    if here["F"] is None:
        yield f"order.{device}: '{name}:F:{microbatch}' is missing"
        return
    if plan.model.mode == "inference":
        return
    chain = ["F", "B"] if here["B"] is not None else ["F", "I", "W"]
    if here["B"] is not None and (here["I"] is not None or here["W"] is not None):
        yield f"order.{device}: stage {name!r} micro-batch {microbatch} has both B and I or W; use B, or I and W"
    if here["B"] is None and here["I"] is None and here["W"] is None:
        yield f"order.{device}: '{name}:B:{microbatch}' is missing"
        return
    for before, after in itertools.pairwise(chain):
        first, second = here[before], here[after]
        if second is None:
            yield f"order.{device}: '{name}:{after}:{microbatch}' is missing"
        elif first is not None and first > second:
            yield (f"order.{device}[{second}]: '{name}:{after}:{microbatch}' stands before "
                   f"'{name}:{before}:{microbatch}'")
    style = chain[1]
    other = styles.setdefault((name, microbatch), (style, device))
    if other[0] != style:
        yield (f"order.{device}: stage {name!r} micro-batch {microbatch} uses {style} here "
               f"but {other[0]} on {other[1]!r}; use one of them on all its devices")


def parse_action(token: str) -> tuple[str, str, int] | None:
    """Return (stage, phase, micro-batch) of an action such as ``s0:F:2``, or None if it is not one."""
    parts = token.split(":")
    if len(parts) != 3 or parts[1] not in PHASES or not _MICROBATCH.fullmatch(parts[2]):
        return None
    return parts[0], parts[1], int(parts[2])


def _gradient_problems(plan: Plan, graph: Graph) -> Iterator[str]:
    if plan.model.mode == "inference":
        if plan.gradients:
            yield "gradients: an inference plan exchanges none"
        return
    copies = parameter_copies(plan, graph)
    others = in_pieces(plan, graph)
    exchanged: dict[tuple[int, str], int] = {}
    for index, exchange in enumerate(plan.gradients):
        for position, name in enumerate(exchange.parameters):
            tensor = graph.tensor_index.get(name, -1)
            path = f"gradients[{index}].parameters[{position}]"
            if tensor not in copies:
                yield f"{path}: no stage has a parameter {name!r}"
                continue
            if tensor in others:
                yield f"{path}: the gradient of {name!r} is scattered as the storage of its stage says: leave it out"
                continue
            again = [exchanged[tensor, device] for device in exchange.devices if (tensor, device) in exchanged]
            if again:
                yield f"{path}: {name!r} is exchanged already in gradients[{again[0]}]"
            else:
                yield from _member_problems(copies[tensor], name, exchange.devices, path)
            for device in exchange.devices:
                exchanged.setdefault((tensor, device), index)
        if len(set(exchange.devices)) != len(exchange.devices) or not exchange.devices or not exchange.parameters:
            yield f"gradients[{index}] must name parameters and devices, each device once"
        elif all(graph.tensor_index.get(name, -1) in copies for name in exchange.parameters):
            yield from _exchange_problems(plan, graph, exchange, f"gradients[{index}]")
    for tensor, sets in exchange_sets(plan, graph).items():
        for devices in sets:
            if (tensor, devices[0]) not in exchanged:
                yield (f"gradients: parameter {graph.tensor_names[tensor]!r} is held by {', '.join(devices)} "
                       "but its gradient is not exchanged")


def _member_problems(copies: Sequence[Copies], name: str, devices: Sequence[str], path: str) -> Iterator[str]:
    """Yield a problem if the devices are neither all that hold the same part of a parameter nor an exchange set."""
    allowed = [item for part in copies for item in (part.devices, *part.exchange_sets)]
    if set(devices) not in [set(item) for item in allowed]:
        meant = next((part.devices for part in copies if set(part.devices) & set(devices)), copies[0].devices)
        yield f"{path}: {name!r} is held by {', '.join(meant)}, but exchanged among {', '.join(devices)}"


def _exchange_problems(plan: Plan, graph: Graph, exchange: GradientExchange, path: str) -> Iterator[str]:
    """Yield what is wrong with the method of an exchange whose parameters and devices exist."""
    if exchange.groups and exchange.method != "hierarchical":
        yield f"{path}.groups is for the method 'hierarchical', not for {exchange.method!r}: leave it out"
    if exchange.server is not None and exchange.method != "parameter_server":
        yield f"{path}.server is for the method 'parameter_server', not for {exchange.method!r}: leave it out"
    if exchange.method == "hierarchical":
        yield from _group_problems(exchange, path)
    if exchange.method == "parameter_server" and exchange.server not in exchange.devices:
        given = "is missing" if exchange.server is None else f"{exchange.server!r} is not one of its devices"
        yield f"{path}.server {given}: name one of {', '.join(exchange.devices)}"
    if exchange.method == "sufficient_factors":
        yield from _factor_problems(plan, graph, exchange, path)


def _group_problems(exchange: GradientExchange, path: str) -> Iterator[str]:
    if any(not group for group in exchange.groups):
        yield f"{path}.groups has an empty group"
    count = Counter(device for group in exchange.groups for device in group)
    for device in exchange.devices:
        if count[device] != 1:
            what = "is in no group" if count[device] == 0 else f"is in them {count[device]} times"
            yield f"{path}.groups: {device!r} {what}; the groups divide the exchange's devices, each in one of them"
    for device in count:
        if device not in exchange.devices:
            yield f"{path}.groups: {device!r} is not one of the exchange's devices"


def _factor_problems(plan: Plan, graph: Graph, exchange: GradientExchange, path: str) -> Iterator[str]:
    tensors = [graph.tensor_index[name] for name in exchange.parameters]
    factors = find_factors(graph, tensors)
    made = {use.weight for use in factors.uses} | {use.bias for use in factors.uses}
    for position, (tensor, name) in enumerate(zip(tensors, exchange.parameters, strict=True)):
        if tensor not in made:
            yield f"{path}.parameters[{position}]: {_why_not(graph, tensor, name)}"
    dtypes = sorted({graph.tensor_dtypes[tensor] for tensor in tensors})
    if len(dtypes) > 1:
        yield f"{path}.parameters have the dtypes {', '.join(dtypes)}: exchange factors of each dtype by themselves"
    read = {use.op for use in factors.uses}
    for index, stage in enumerate(plan.stages):
        inside = {graph.op_index[name] for name in stage.ops}
        if inside & read:
            if any(len(replica.devices) > 1 for replica in stage.replicas):
                yield (f"{path}: stages[{index}] ({stage.name!r}) has replicas of several devices; sufficient_factors "
                       "needs replicas of one device each: use all_reduce")
            yield from _transpose_problems(graph, factors, inside, f"{path}: stages[{index}] ({stage.name!r})")


def _why_not(graph: Graph, tensor: int, name: str) -> str:
    readers = graph.consumer_op[graph.inputs == tensor].tolist()
    kinds = list(dict.fromkeys(graph.op_kinds[op] for op in readers))
    is_bias = len(graph.tensor_shapes[tensor]) == 1 and any(kind in LINEAR_KINDS for kind in kinds)
    if is_bias:
        return f"{name!r} is a bias; the weight that belongs to it must be in the same exchange of sufficient_factors"
    return (f"{name!r} is not the weight or bias of a linear operator (it is read by {', '.join(kinds[:3])}), so its "
            "gradient has no factors: use all_reduce")


def _transpose_problems(graph: Graph, factors: Factors, inside: set[int], where: str) -> Iterator[str]:
    for use in factors.uses:
        if use.transpose is not None and use.op in inside and use.transpose not in inside:
            yield (f"{where} holds {graph.op_names[use.op]!r} but not {graph.op_names[use.transpose]!r}, which "
                   "transposes its weight: put both into one stage")


def _cycle_problems(plan: Plan, graph: Graph) -> list[str]:
    for stages in stage_patterns(plan):
        stage_of = np.full(graph.num_ops, -1, dtype=np.int64)
        for index in stages:
            ops = np.asarray([graph.op_index[op] for op in plan.stages[index].ops], dtype=np.int64)
            stage_of[ops[~graph.is_constant[ops]]] = index
        if len(graph.edges) == 0:
            continue
        pairs = np.stack([stage_of[graph.edges[:, 0]], stage_of[graph.edges[:, 1]]], axis=1)
        keep = (pairs[:, 0] != pairs[:, 1]) & (pairs >= 0).all(axis=1)
        cycle = find_cycle((int(a), int(b)) for a, b in np.unique(pairs[keep], axis=0))
        if cycle:
            names = " -> ".join(plan.stages[index].name for index in (*cycle, cycle[0]))
            return [f"stages: {names} feed each other in a cycle; stages must be convex sets of operators"]
    return []
