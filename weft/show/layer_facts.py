"""The layers of a plan by class: repeated layers that are alike and split alike are one record.

    transformer.h.0 - 11    stages s0 (6), s1 (6)    attn.c_attn, mlp.c_fc: tensor column; attn.c_proj: tensor row

A layer is what belongs to a module path up to its first number (``transformer.h.3``). Two layers are alike if their
operators are, one by one: name inside the layer, kind, work, and how the plan splits them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from weft.model.graph import Graph
from weft.plan.plan import Stage
from weft.plan.program import Program
from weft.show.facts import parameters_of
from weft.show.names import ATTENTION, factor_word, grouped, short_list

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
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return module


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
