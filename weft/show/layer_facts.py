"""The layers of a plan by class: repeated layers that are alike and split alike are one record.

    transformer.h.0 - 11    stages s0 (6), s1 (6)    attn.c_attn, mlp.c_fc: tensor column; attn.c_proj: tensor row

A layer is what belongs to a module path up to its first number (``transformer.h.3``). Two layers are alike if their
operators are, one by one: name inside the layer, kind, work, and how the plan splits them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from weft.model.graph import Graph
from weft.plan.plan import Plan, Stage
from weft.plan.program import Program
from weft.show.facts import parameters_of
from weft.show.names import ATTENTION, factor_word, short_list

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


class _Op(NamedTuple):
    """What counts of an operator when layers are compared."""

    name: str
    """Inside the layer; empty where it is not named after its layer."""
    kind: str
    flops: float
    axes: tuple[str, ...]
    words: tuple[str, ...]


class _Layer(NamedTuple):
    path: str
    ops: list[int]


def layer_facts(program: Program) -> tuple[LayerFacts, ...]:
    """Return the classes of layers of the program's plan, in the order of the model."""
    graph, plan = program.graph, program.plan
    stages_of = _stages_of(program)
    layers: dict[str, _Layer] = {}
    for op, module in enumerate(graph.op_modules):
        path = layer_path(module)
        layers.setdefault(path, _Layer(path, [])).ops.append(op)
    classes: dict[tuple[str, tuple[_Op, ...]], list[_Layer]] = {}
    for layer in layers.values():
        seen = tuple(_describe(graph, plan, op, layer.path, stages_of) for op in layer.ops)
        classes.setdefault((_family(layer.path), seen), []).append(layer)
    whole = float(graph.flops.sum()) or 1.0
    return tuple(_facts(program, members, stages_of, whole) for members in classes.values())


def layer_path(module: str) -> str:
    """Return the module's path up to its first number, or the whole of it.

    >>> layer_path("transformer.h.3.attn.c_attn")
    'transformer.h.3'
    """
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return module


def _family(path: str) -> str:
    head, _, last = path.rpartition(".")
    return head if last.isdecimal() else path


def _stages_of(program: Program) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for stage, ops in enumerate(program.stage_ops):
        for op in ops.tolist():
            found.setdefault(op, []).append(stage)
    return found


def _describe(graph: Graph, plan: Plan, op: int, path: str, stages_of: Mapping[int, Sequence[int]]) -> _Op:
    name = graph.op_names[op]
    stage = next((plan.stages[index] for index in stages_of.get(op, ()) if plan.stages[index].sharding), None)
    words = () if stage is None else tuple(stage.sharding.ops.get(name, ()))
    axes = tuple(stage.replicas[0].mesh) if words and stage is not None else ()
    inner = name.removeprefix(f"{path}.") if path and name.startswith(f"{path}.") else ""
    return _Op(inner, graph.op_kinds[op], float(graph.flops[op]), axes, words)


def _facts(program: Program, members: Sequence[_Layer], stages_of: Mapping[int, Sequence[int]],
           whole: float) -> LayerFacts:
    graph, first = program.graph, members[0]
    counts: dict[str, int] = {}
    for layer in members:
        for stage in dict.fromkeys(index for op in layer.ops for index in stages_of.get(op, ())):
            name = program.plan.stages[stage].name
            counts[name] = counts.get(name, 0) + 1
    ops = [op for layer in members for op in layer.ops]
    return LayerFacts(
        title=_title([layer.path for layer in members]), count=len(members),
        num_ops=len(first.ops), parameter_bytes=int(graph.tensor_bytes[parameters_of(graph, first.ops)].sum()),
        work=float(graph.flops[ops].sum()) / whole, stages=tuple(counts.items()),
        splits=tuple(_splits(program, first, stages_of)),
        is_joint=any(len(replica.devices) > 1 for stage in program.plan.stages if stage.name in counts
                     for replica in stage.replicas))


def _title(paths: Sequence[str]) -> str:
    """Return ``transformer.h.0 - 5``, or the one path."""
    if len(paths) == 1:
        return paths[0] or OUTSIDE
    return f"{_family(paths[0])}.{short_list((path.rpartition('.')[2] for path in paths), limit=4)}"


def _splits(program: Program, layer: _Layer, stages_of: Mapping[int, Sequence[int]]) -> Iterator[Split]:
    """Yield how the modules with parameters, the attention and the loss of a layer are split, alike ones together."""
    graph, plan = program.graph, program.plan
    groups: dict[tuple[tuple[tuple[str, str], ...], tuple[str, ...]], dict[str, None]] = {}
    for op in layer.ops:
        stage = next((plan.stages[index] for index in stages_of.get(op, ()) if plan.stages[index].sharding), None)
        kind = graph.op_kinds[op]
        parameters = parameters_of(graph, [op]).tolist()
        if stage is None or not (parameters or kind.startswith(ATTENTION) or "loss" in kind):
            continue
        name = graph.op_names[op].removeprefix(f"{layer.path}.") if layer.path else graph.op_names[op]
        shown = name.rpartition(".")[0] or layer.path.rpartition(".")[2] or name if parameters else name
        axes = tuple(stage.replicas[0].mesh)
        words = tuple((axis, _word(kind, word)) for axis, word in zip(axes, stage.sharding.ops.get(
            graph.op_names[op], ("",) * len(axes)), strict=True))
        used = tuple((axis, word) for axis, word in words if word)
        groups.setdefault((used, _stored(graph, stage, parameters, axes)), {}).setdefault(shown)
    for (used, stored), names in groups.items():
        yield Split(tuple(names), used, stored)


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
