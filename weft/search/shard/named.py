"""Plans with names, as restrictions of what parts may choose; the best that a restriction allows is the named plan.

| name | what it allows |
|---|---|
| data | samples are split; every parameter is whole, gradients are all-reduced |
| zero1 | the same, with optimizer states in pieces |
| zero3 | the same, with parameters in pieces too, gathered for use |
| megatron | attention by heads, feed-forward by its width; all else inside layers is whole |
| attention, ffn | only the one or the other of these |
| sequence | as megatron, with what is between them split by positions |

On a mesh of several axes all but the last split samples, and the last is as named; ``data`` and ``zero`` use all axes.
An operator that cannot do on all axes what the plan says (the batch divides over some of them only, or a view cannot be
split by samples and positions at once) does it on as many as it can, and is whole on the others.

What operators are for, as people see them: which of their factors are samples and positions, which layers they form.

Found by following the inputs' first two dimensions (samples, positions) through the factors of all operators, and by
the modules around attention. Named plans (``named``) and printed plans are made of these words; the search is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import numpy as np

from weft.base.errors import InputError
from weft.model.folded import FoldedModel
from weft.search.shard.op_choices import Bools
from weft.search.shard.parts import ModelPart, ModelParts
from weft.sharding.factors import NOT_SPLIT
from weft.sharding.tensor_layout import WHOLE

ATTENTION_KINDS: Final = ("aten.scaled_dot_product_attention", "aten.softmax", "aten._softmax")
LINEAR_KINDS: Final = ("aten.linear", "aten.addmm", "aten.mm", "aten.bmm", "aten.matmul")


@dataclass(frozen=True, kw_only=True, eq=False)
class Roles:
    """What each part of a model is for."""

    samples: dict[int, int]
    """By part (operators): the factor that counts samples."""
    positions: dict[int, int]
    """The factor that counts positions in a sequence."""
    attention: frozenset[int]
    """Operators, and parameters, between a layer's input and the output of its attention."""
    feed_forward: frozenset[int]
    """The other matrix products of layers, what is between them, and their parameters."""
    layers: frozenset[int]
    """Everything inside layers that are repeated."""


def find_roles(parts: ModelParts, folded: FoldedModel) -> Roles:
    """Return the roles of a model's parts."""
    in_layers = {name for run in folded.runs for names in run.copies for name in names}
    graph = folded.traced.graph
    module = dict(zip(graph.op_names, graph.op_modules, strict=True))
    kind = dict(zip(graph.op_names, graph.op_kinds, strict=True))
    scopes = _attention_scopes(folded, kind, module)
    attention: set[int] = set()
    layers: set[int] = set()
    for index, part in enumerate(parts.parts):
        if part.kind == "op" and part.name in in_layers:
            layers.add(index)
            if any(_is_inside(module[part.name], scope) for scope in scopes):
                attention.add(index)
    feed_forward = _feed_forward(parts, layers, attention, kind)
    for edge in parts.edges:
        if edge.is_parameter or parts.parts[edge.reader].kind == "tensor":
            user, used = (edge.reader, edge.giver) if edge.is_parameter else (edge.giver, edge.reader)
            for group in (attention, feed_forward, layers):
                if user in group:
                    group.add(used)
    samples, positions = (_follow(parts, folded, dim) for dim in (0, 1))
    return Roles(samples=samples, positions=positions, attention=frozenset(attention),
                 feed_forward=frozenset(feed_forward), layers=frozenset(layers))


def _shared(path: str, other: str) -> str:
    """Return the innermost module that holds both."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(path.split("."), other.split("."), strict=False))
    return ".".join(name for name, _ in pairs)


def _is_inside(path: str, scope: str) -> bool:
    return path == scope or path.startswith(scope + ".")


def _attention_scopes(folded: FoldedModel, kind: dict[str, str], module: dict[str, str]) -> list[str]:
    """Return the modules that hold attention with the matrix product after it."""
    scopes = set()
    names = list(module)
    is_whole = any(item.startswith(ATTENTION_KINDS[0]) for item in kind.values())  # else made of products and softmax
    wanted = ATTENTION_KINDS[:1] if is_whole else ATTENTION_KINDS
    for position, name in enumerate(names):
        if kind[name].startswith(wanted):
            after = next((other for other in names[position + 1:] if kind[other].startswith(LINEAR_KINDS[:3])), name)
            scopes.add(_shared(module[name], module[after]))
    layers = {path for run in folded.runs for path in run.paths}
    return [scope for scope in scopes if scope and scope not in layers]


def _feed_forward(parts: ModelParts, layers: set[int], attention: set[int], kind: dict[str, str]) -> set[int]:
    """Return the matrix products of layers outside attention, and what reads nothing but them (through tensors too)."""
    found: set[int] = set()
    givers: dict[int, list[int]] = {}
    for edge in parts.edges:
        if not edge.is_parameter:
            givers.setdefault(edge.reader, []).append(edge.giver)
    tensors = {edge.reader: edge.giver for edge in parts.edges if parts.parts[edge.reader].kind == "tensor"}
    for index in sorted(layers - attention):  # operators come in topological order
        sources = [tensors.get(giver, giver) for giver in givers.get(index, ())]
        is_product = kind[parts.parts[index].name].startswith(LINEAR_KINDS)
        if is_product or (sources and all(source in found for source in sources)):
            found.add(index)
    return found


def _follow(parts: ModelParts, folded: FoldedModel, dim: int) -> dict[int, int]:
    """Return, by operator, the factor that a dimension of the model's inputs becomes."""
    program = folded.traced.program
    at: dict[str, int] = {}
    for name in program.inputs:
        node = program.nodes[program.tensor_nodes[name]]
        value = node.meta.get("val")
        if value is not None and len(value.shape) > dim:
            at[node.name] = dim
    found: dict[int, int] = {}
    for name, index in parts.part_of_op.items():
        node, *items = [program.nodes[item] for item in program.op_nodes[name]]
        choices = parts.parts[index].choices
        if choices is None or choices.op is None or not choices.op.factors:
            continue
        factor = None
        for position, source in enumerate(node.all_input_nodes):
            place = at.get(source.name)
            if place is not None and place < len(choices.op.inputs[position]):
                own = choices.op.inputs[position][place]
                factor = own[0] if own and factor is None else factor
        if factor is None:
            continue
        found[index] = factor
        outputs = {0: node} if not items else {int(item.args[1]): item for item in items}
        for position, result in outputs.items():
            for place, own in enumerate(choices.op.outputs[position] if position < len(choices.op.outputs) else ()):
                if factor in own:
                    at[result.name] = place
    return found


# ---- named plans -----------------------------------------------------------------------------------------------------


Restriction = Callable[[ModelParts, int], Bools | None]
"""From a part to which of its choices are allowed; None for all."""

NAMES: Final = ("data", "zero1", "zero3", "megatron", "attention", "ffn", "sequence")
_DATA: Final = ("data", "zero1", "zero3")


def named(name: str, roles: Roles, num_axes: int) -> Restriction:
    """Return the restriction of a named plan."""
    if name not in NAMES:
        raise InputError(f"there is no plan named {name!r}: choose one of {', '.join(NAMES)}")
    by_axis = [name if axis == num_axes - 1 or name in _DATA else "data" for axis in range(num_axes)]

    def allowed(parts: ModelParts, index: int) -> Bools | None:
        part = parts.parts[index]
        if part.kind == "tensor":
            return None
        if part.kind == "parameter" and name in _DATA:
            return _stored_by_samples(part, name)
        if part.kind == "op":
            return _most_axes([_op_axis(part, index, axis, plan, roles) for axis, plan in enumerate(by_axis)], part)
        result = np.ones(len(part.seconds), dtype=np.bool_)
        for axis, plan in enumerate(by_axis):
            result &= _parameter_axis(part, index, axis, plan, roles)
        return result

    return allowed


def _most_axes(wanted: list[Bools], part: ModelPart) -> Bools:
    """Return the strategies that do what is wanted on as many axes as any, and are whole on the others."""
    assert part.choices is not None
    whole = (np.array(part.choices.strategies).reshape(-1, len(wanted)) == NOT_SPLIT).T
    is_allowed = np.all(np.array(wanted) | whole, axis=0)
    count = np.sum(wanted, axis=0)
    return np.asarray(is_allowed & (count == count[is_allowed].max()))


def _op_axis(part: ModelPart, index: int, axis: int, plan: str, roles: Roles) -> Bools:
    """Return which strategies of an operator do on one axis what the plan says."""
    assert part.choices is not None
    chosen = np.array([strategy[axis] for strategy in part.choices.strategies])
    samples, positions = roles.samples.get(index, NOT_SPLIT), roles.positions.get(index, NOT_SPLIT)
    if plan in _DATA:
        return np.asarray(chosen == samples)
    is_free: Bools = (chosen == NOT_SPLIT) | ((chosen != samples) & (chosen != positions))
    if index not in roles.layers:
        return is_free
    if (index in roles.attention and plan != "ffn") or (index in roles.feed_forward and plan != "attention"):
        return is_free
    if plan == "sequence":
        return np.asarray(chosen == positions)
    return np.asarray(chosen == NOT_SPLIT)


def _stored_by_samples(part: ModelPart, name: str) -> Bools:
    """Return which ways to store a parameter are those of a plan that splits samples alone: as fine as they get."""
    values = np.array([sum(placement != WHOLE for placement in item.layout) for item in part.stored])
    gradients = np.array([sum(placement != WHOLE for placement in item.gradient) for item in part.stored])
    if name == "data":
        return np.asarray((values == 0) & (gradients == 0))
    is_open = values == gradients if name == "zero3" else values == 0
    return np.asarray(is_open & (gradients == gradients[is_open].max(initial=0)))


def _parameter_axis(part: ModelPart, index: int, axis: int, plan: str, roles: Roles) -> Bools:
    """Return which ways to store a parameter are as the plan says on one axis."""
    values: Bools = np.array([item.layout[axis] == WHOLE for item in part.stored])
    gradients: Bools = np.array([item.gradient[axis] == WHOLE for item in part.stored])
    if plan == "data":
        return values & gradients
    as_used: Bools = np.array([item.layout[axis] == item.gradient[axis] for item in part.stored])
    is_matrix = any(placement.dim > 0 for item in part.stored for placement in item.layout)
    is_split = (index in roles.attention and plan != "ffn") or (index in roles.feed_forward and plan != "attention")
    if is_split and is_matrix and (as_used & ~values).any():
        return as_used & ~values
    return as_used
