"""A sharding as settings of other tools, where these can say the same.

- ``parallelize_plan``: for each module the style of ``torch.distributed.tensor.parallel`` (``ColwiseParallel``, ...)
  with its layouts, for ``parallelize_module`` along the mesh's last axis;
- ``titan_settings``: degrees of parallelism as torchtitan names them.

The matrix products and the attention of layers must be as the tool can have them, else there is an ``InputError`` that
names the one in the way. What else differs (a norm, the embedding) is listed under ``differences``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from weft.base.errors import InputError
from weft.model.folded import FoldedModel
from weft.sharding.tensor_layout import Placement
from weft.show.sharding_choices import ShardingReader
from weft.show.sharding_facts import OUTSIDE, LayerClass, ShardingFacts, Use

STYLES: Final = {("linear", "column"): "ColwiseParallel", ("linear", "row"): "RowwiseParallel",
                 ("embedding", "column"): "ColwiseParallel", ("embedding", "vocabulary"): "RowwiseParallel",
                 ("other", "positions"): "SequenceParallel"}
_TENSOR: Final = ("column", "row", "heads", "vocabulary", "classes", "positions", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A module with a parameter, on one axis."""

    paths: list[str]
    kind: str
    """``linear``, ``embedding`` or ``other``."""
    word: str
    input: str
    """Layout in which its input comes."""
    output: str
    """Layout in which its output is wanted."""
    is_strict: bool
    """It is a matrix product of a layer."""


# ---- parallelize_module ---------------------------------------------------------------------------------------------


def parallelize_plan(facts: ShardingFacts, folded: FoldedModel) -> dict[str, Any]:
    """Return the plan of ``parallelize_module`` for the last axis: module path to style and layouts."""
    axis = facts.axes[-1]
    plan: dict[str, Any] = {}
    differences: list[str] = []
    for module in _modules(ShardingReader(facts.sharding, folded), len(facts.axes) - 1):
        if module.word == "whole":
            continue
        style = STYLES.get((module.kind, module.word))
        if style is None and module.is_strict:
            raise InputError(f"parallelize_module cannot say this sharding: on the mesh's last axis ({axis.name!r}) "
                             f"{module.paths[0]!r} ({module.kind}) is split by {module.word}. Try another --mesh, with "
                             "the axis that splits layers last")
        for path in module.paths:
            if style is None:
                differences.append(f"{path}: {module.word} ({axis.name})")
            elif style == "SequenceParallel":
                plan[path] = {"style": style}
            else:
                plan[path] = {"style": style, "input_layouts": module.input, "output_layouts": module.output}
    return {"mesh": [item.size for item in facts.axes], "mesh_dim_names": [item.name for item in facts.axes],
            "axis": axis.name, "plan": plan, "differences": differences}


def _modules(reader: ShardingReader, axis: int) -> Iterator[_Module]:
    """Yield the modules with parameters, as they are split on an axis; each once, by its largest parameter."""
    largest: dict[str, float] = {}
    found: dict[str, _Module] = {}
    for key in reader.nodes:
        part = reader.parts.parts[key[0]]
        for edge in reader.parameters_of.get(key[0], ()) if part.kind == "op" else ():
            name = reader.parts.parts[edge.giver].name.rpartition(".")[0]
            paths = reader.full_names(key, name)
            if edge.num_bytes <= largest.get(paths[0], 0.0):
                continue
            largest[paths[0]] = edge.num_bytes
            kind = reader.kind_of[part.name]
            what = next((item for item in ("linear", "embedding") if kind.startswith(f"aten.{item}")), "other")
            before, after = _around(reader, key, axis)
            is_product = kind.startswith(("aten.linear", "aten.addmm", "aten.mm", "aten.matmul"))
            found[paths[0]] = _Module(
                paths=paths, kind=what, word=reader.op_words(key[0], reader.choice_of(key))[axis], input=before,
                output=after, is_strict=is_product and reader.unit_of(key) is not None)
    yield from found.values()


def _around(reader: ShardingReader, key: tuple[int, int], axis: int) -> tuple[str, str]:
    """Return the layouts on an axis in which an operator's input comes, and in which its output is wanted."""
    layouts = reader.resharding.layouts
    before = after = "Replicate"
    for edge in reader.parts.edges:
        if edge.reader == key[0] and not edge.is_parameter:
            giver = next(item for item in ((edge.giver, key[1]), (edge.giver, -1), (edge.giver, 0))
                         if item in reader.nodes)
            value = reader.parts.parts[edge.giver].values[edge.output][reader.choice_of(giver)]
            before = _layout_text(layouts[int(value)][axis])
        elif edge.giver == key[0]:
            user = next(item for item in ((edge.reader, key[1]), (edge.reader, -1), (edge.reader, 0))
                        if item in reader.nodes)
            after = _layout_text(layouts[int(edge.reads[reader.choice_of(user)])][axis])
    return before, after


def _layout_text(placement: Placement) -> str:
    return f"Shard({placement.dim})" if placement.is_split else "Replicate" if placement.dim == -1 else "Partial"


# ---- torchtitan -----------------------------------------------------------------------------------------------------


def titan_settings(facts: ShardingFacts) -> dict[str, Any]:
    """Return torchtitan's degrees of parallelism that mean this sharding."""
    degrees = {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 1, "tensor_parallel_degree": 1}
    settings: dict[str, Any] = {}
    differences: list[str] = []
    for number, axis in enumerate(facts.axes):
        kind = "tensor" if any(use.words[number] in ("column", "row", "heads") and _is_strict(layer, use)
                               for layer in facts.layers for use in layer.uses) else "data"
        differences += _differences(facts, number, _TENSOR if kind == "tensor" else ("samples",), kind)
        if kind == "tensor":
            if degrees["tensor_parallel_degree"] > 1:
                raise InputError("torchtitan cannot say this sharding: two axes of the mesh split layers by heads or "
                                 "width, and it has one. Try --mesh with fewer axes")
            degrees["tensor_parallel_degree"] = axis.size
            settings["enable_sequence_parallel"] = any(
                use.words[number] == "positions" for layer in facts.layers for use in layer.uses)
            continue
        stored = _main_storage(facts, number)
        if stored == "whole":
            degrees["data_parallel_replicate_degree"] *= axis.size
        else:
            degrees["data_parallel_shard_degree"] *= axis.size
            settings["fsdp_reshard_after_forward"] = "always" if stored == "pieces" else "never"
            if stored == "states":
                differences.append("only optimizer states are in pieces: gradients and states are with "
                                   "fsdp_reshard_after_forward = never, which is closest")
    return {"parallelism": {**degrees, "pipeline_parallel_degree": 1, **settings}, "differences": differences}


def _is_strict(layer: LayerClass, use: Use) -> bool:
    """Return whether a module is a matrix product or the attention of a layer."""
    return layer.title != OUTSIDE and (use.is_matrix or not use.stored)


def _differences(facts: ShardingFacts, axis: int, allowed: tuple[str, ...], kind: str) -> list[str]:
    """Return what is split otherwise than a kind of axis does; raise for what must not be."""
    found = []
    for layer in facts.layers:
        for use in layer.uses:
            word = use.words[axis]
            if word in allowed or (word == "whole" and not _is_strict(layer, use)):
                continue
            if _is_strict(layer, use):
                done = "done by every device" if word == "whole" else f"split by {word}"
                raise InputError(f"torchtitan cannot say this sharding: {use.name!r} of {layer.title!r} is {done} on "
                                 f"axis {facts.axes[axis].name!r}, which would be {kind} parallel")
            found.append(f"{layer.title} {use.name}: {use.words[axis]} ({facts.axes[axis].name})")
    return found


def _main_storage(facts: ShardingFacts, axis: int) -> str:
    """Return how most layers store their matrices on an axis; raise where layers differ."""
    kinds = {use.stored[axis] for layer in facts.layers if layer.title != OUTSIDE for use in layer.uses
             if use.stored and use.is_matrix}
    if len(kinds) > 1:
        raise InputError(f"torchtitan cannot say this sharding: on axis {facts.axes[axis].name!r} matrices are stored "
                         f"in several ways ({', '.join(sorted(kinds))})")
    return kinds.pop() if kinds else "whole"
