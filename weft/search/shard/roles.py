"""What operators are for, as people see them: which of their factors are samples and positions, which layers they form.

Found by following the inputs' first two dimensions (samples, positions) through the factors of all operators, and by
the modules around attention. Named plans (``named``) and printed plans are made of these words; the search is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from weft.model.folded import FoldedModel
from weft.search.shard.parts import ModelParts

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
        if edge.is_parameter:
            for group in (attention, feed_forward, layers):
                if edge.reader in group:
                    group.add(edge.giver)
        elif parts.parts[edge.reader].kind == "tensor":
            for group in (attention, feed_forward, layers):
                if edge.giver in group:
                    group.add(edge.reader)
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
