"""A sharding as tables, as JSON, and as settings of other tools where these can say the same.

``weft shard MODEL CLUSTER`` prints the plan by classes of layers, its collectives and the named plans
(``print_sharding``), ``weft shard PROBLEM`` a strategy graph's cost, bound and usage, and what costs most
(``print_strategies``). For other tools:

- ``parallelize_plan``: for each module the style of ``torch.distributed.tensor.parallel`` (``ColwiseParallel``, ...)
  with its layouts, for ``parallelize_module`` along the mesh's last axis;
- ``titan_settings``: degrees of parallelism as torchtitan names them.

The matrix products and the attention of layers must be as the tool can have them, else there is an ``InputError`` that
names the one in the way. What else differs (a norm, the embedding) is listed under ``differences``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from weft.base.errors import InputError
from weft.base.units import format_bytes, format_time
from weft.model.folded import FoldedModel
from weft.search.shard.compare import NamedResult
from weft.search.strategies.search import ShardSolution
from weft.search.strategies.strategy_graph import StrategyGraph, evaluate
from weft.sharding.tensor_layout import Placement
from weft.show.names import grouped, short_list
from weft.show.sharding_facts import OUTSIDE, Exchange, LayerClass, ShardingFacts, ShardingReader, Use
from weft.show.tables import TextTable, make_table, percent, print_tables

STORED = {"split": "split", "pieces": "in pieces", "states": "states in pieces"}
"""How a parameter is stored, in words."""
MOST_SHOWN: Final = 8
"""Rows of the table of what costs most."""
STYLES: Final = {("linear", "column"): "ColwiseParallel", ("linear", "row"): "RowwiseParallel",
                 ("embedding", "column"): "ColwiseParallel", ("embedding", "vocabulary"): "RowwiseParallel",
                 ("other", "positions"): "SequenceParallel"}
_TENSOR: Final = ("column", "row", "heads", "vocabulary", "classes", "positions", "whole")


def print_sharding(facts: ShardingFacts, named: Sequence[NamedResult] = ()) -> None:
    """Print the sharding, and the comparison if there is one."""
    compared = [named_table(facts, named)] if named else []
    print_tables(summary_table(facts), layers_table(facts), exchanges_table(facts), *compared)


def summary_table(facts: ShardingFacts) -> TextTable:
    """Return the result as rows of (what, value)."""
    item = facts.sharding
    gap = (item.seconds - item.bound) / item.seconds if item.seconds else 0.0
    limit = "no limit" if item.limit_bytes is None else f"limit {format_bytes(item.limit_bytes)}"
    axes = ", ".join(f"{axis.name} {axis.size}" for axis in facts.axes)
    sent = ", ".join(f"{format_time(axis.seconds)} {axis.name}" for axis in facts.axes)
    return TextTable(header=("sharding", f"{facts.model} on {facts.cluster}"), rows=(
        ("mesh", f"{item.mesh.name} ({axes})"),
        ("step", f"{format_time(item.seconds)} (bound {format_time(item.bound)}, gap {percent(gap)}, {item.status})"),
        ("time", f"{format_time(facts.compute_s)} compute; collectives: {sent}"),
        ("memory", f"{format_bytes(item.held_bytes)} ({limit}): {format_bytes(facts.parameter_bytes)} parameters, "
                   f"gradients and optimizer states, {format_bytes(facts.activation_bytes)} activations")),
                     notes=facts.notes)


def layers_table(facts: ShardingFacts) -> TextTable:
    """Return how modules are split, by class of layers: those that are split alike share a row."""
    axes = [f"{axis.name} ({axis.size})" for axis in facts.axes]
    rows = tuple((layer_label(layer) if number == 0 else "", short_list((use.name for use in uses), limit=12),
                  *uses[0].words, stored_text(uses[0].stored, facts)) for layer in facts.layers
                 for number, uses in enumerate(grouped(layer.uses, lambda use: (use.words, use.stored))))
    return make_table("Layers", ("layers", "modules", *axes, "parameters"), rows)


def layer_label(layer: LayerClass) -> str:
    """Return ``32 x model.layers``."""
    return layer.title if layer.count == 1 else f"{layer.count} x {layer.title}"


def stored_text(stored: Sequence[str], facts: ShardingFacts) -> str:
    """Return how a parameter is stored: ``split (tensor), states in pieces (data)``; ``-`` where there is none."""
    if not stored:
        return "-"
    pairs = [(word, axis.name) for word, axis in zip(stored, facts.axes, strict=True) if word != "whole"]
    return ", ".join(f"{STORED[alike[0][0]]} ({', '.join(name for _, name in alike)})"
                     for alike in grouped(pairs, lambda pair: pair[0])) or "whole"


def exchanges_table(facts: ShardingFacts) -> TextTable:
    """Return the collectives of one layer of each class, with the seconds of all its layers."""
    rows = tuple((layer_label(layer) if number == 0 else "", item.direction, facts.axes[item.axis].name,
                  exchange_text(item), format_time(item.seconds))
                 for layer in facts.layers for number, item in enumerate(layer.exchanges))
    return make_table("Collectives", ("layers", "when", "axis", "in one layer", "#in all"), rows,
                      notes=["weights: gathered for use; gradients: added up; update: gathered after the optimizer"])


def exchange_text(item: Exchange) -> str:
    """Return ``2 all-reduce, 64 MiB each``."""
    if not item.count:
        return f"{item.kind.replace('_', '-')}, at the ends only"
    each = format_bytes(item.num_bytes / item.count)
    return f"{item.count:.3g} {item.kind.replace('_', '-')}, {each}" + (" on average" if item.count > 1 else "")


def named_table(facts: ShardingFacts, named: Sequence[NamedResult]) -> TextTable:
    """Return the named plans beside the sharding found, the fastest first."""
    best = facts.sharding
    rows = []
    for item in sorted([NamedResult(name="weft", sharding=best), *named],
                       key=lambda item: float("inf") if item.sharding is None else item.sharding.seconds):
        found = item.sharding
        if found is None:
            why = f"not possible: {item.reason}" if item.least_bytes is None else (
                f"does not fit: at least {format_bytes(item.least_bytes)}")
            rows.append((item.name, "-", "-", "-", "-", why))
        else:
            ratio = "1" if found is best else f"{found.seconds / best.seconds:.3f}"
            rows.append((item.name, found.mesh.name, format_time(found.seconds), ratio,
                         format_bytes(found.held_bytes), ""))
    return make_table("Named plans", ("plan", "mesh", "#step time", "#to weft's", "#memory", "reason"), rows,
                      marked=(cells[0] == "weft" for cells in rows))


def sharding_json(facts: ShardingFacts, named: Sequence[NamedResult] = ()) -> dict[str, Any]:
    """Return the sharding as plain JSON values."""
    item = facts.sharding
    result: dict[str, Any] = {
        "status": item.status, "model": facts.model, "cluster": facts.cluster, "seconds": item.seconds,
        "bound": item.bound, "mesh": list(item.mesh.shape), "axes": [axis.name for axis in facts.axes],
        "held_bytes": round(item.held_bytes),
        "limit_bytes": None if item.limit_bytes is None else round(item.limit_bytes),
        "parameter_bytes": round(facts.parameter_bytes), "activation_bytes": round(facts.activation_bytes),
        "compute_seconds": facts.compute_s, "axis_seconds": [axis.seconds for axis in facts.axes],
        "layers": [_layer_json(layer, facts) for layer in facts.layers], "ops": dict(facts.ops),
        "parameters": dict(facts.parameters), "notes": list(facts.notes)}
    if named:
        result["compare"] = [_named_json(row) for row in named]
    return result


def _layer_json(layer: LayerClass, facts: ShardingFacts) -> dict[str, Any]:
    return {"layers": layer.title, "count": layer.count, "modules": {
                use.name: {"split": list(use.words), **({"stored": list(use.stored)} if use.stored else {})}
                for use in layer.uses},
            "collectives": [{"when": item.direction, "collective": item.kind, "axis": facts.axes[item.axis].name,
                             "count": item.count, "bytes": item.num_bytes, "seconds": item.seconds}
                            for item in layer.exchanges]}


def _named_json(row: NamedResult) -> dict[str, Any]:
    if row.sharding is None:
        return {"plan": row.name, "feasible": False, "least_bytes": row.least_bytes, "reason": row.reason}
    return {"plan": row.name, "feasible": True, "mesh": list(row.sharding.mesh.shape), "seconds": row.sharding.seconds,
            "status": row.sharding.status, "held_bytes": round(row.sharding.held_bytes)}


# ---- a strategy graph


def print_strategies(graph: StrategyGraph, solution: ShardSolution) -> None:
    """Print the solution of a strategy graph."""
    print_tables(strategies_table(graph, solution), costs_table(graph, solution))


def strategies_table(graph: StrategyGraph, solution: ShardSolution) -> TextTable:
    """Return the solution as rows of (what, value)."""
    peak = evaluate(graph, solution.choice)
    limit = graph.usage_limit
    part = "no limit" if limit is None else f"limit {figure(limit)}" + (
        f", {percent(solution.usage_peak / limit)} used" if limit else "")
    return TextTable(header=("strategies", graph.name), rows=(
        ("cost", f"{figure(solution.cost)} (bound {figure(solution.bound)}, gap {100.0 * solution.gap:.3g} %)"),
        ("status", solution.status),
        ("usage", f"{figure(solution.usage_peak)} at time {peak.peak_time} ({part})"),
        ("graph", f"{graph.num_nodes} nodes, {len(graph.edges)} edges"),
        ("search", f"{solution.seconds:.3g} seconds")))


def costs_table(graph: StrategyGraph, solution: ShardSolution) -> TextTable:
    """Return the nodes and edges of the choice that cost most."""
    choice = solution.choice
    parts = [(cost[chosen].item(), f"node {node}", str(chosen))
             for node, (cost, chosen) in enumerate(zip(graph.costs, choice, strict=True))]
    parts += [(matrix[choice[a], choice[b]].item(), f"edge {a} - {b}", f"{choice[a]}, {choice[b]}")
              for (a, b), matrix in zip(graph.edges.tolist(), graph.edge_costs, strict=True)]
    parts.sort(key=lambda part: -part[0])
    total = solution.cost or 1
    return make_table("What costs most", ("what", "strategy", "cost", "of all"), (
        (what, chosen, figure(cost), percent(cost / total)) for cost, what, chosen in parts[:MOST_SHOWN]))


def figure(value: float) -> str:
    """Return a number as it is if it is whole, else with nine digits."""
    return str(value) if isinstance(value, int) else f"{value:.9g}"


# ---- parallelize_module ---------------------------------------------------------------------------------------------


def parallelize_plan(facts: ShardingFacts, folded: FoldedModel) -> dict[str, Any]:
    """Return the plan of ``parallelize_module`` for the last axis: module path to style and layouts."""
    reader, axis, last = ShardingReader(facts.sharding, folded), facts.axes[-1], len(facts.axes) - 1
    plan: dict[str, Any] = {}
    differences: list[str] = []
    for key, paths in _modules(reader):
        op = reader.kind_of[reader.parts.parts[key[0]].name]
        kind = next((item for item in ("linear", "embedding") if op.startswith(f"aten.{item}")), "other")
        word = reader.op_words(key[0], reader.choice_of(key))[last]
        is_product = op.startswith(("aten.linear", "aten.addmm", "aten.mm", "aten.matmul"))
        style = STYLES.get((kind, word))
        if style is None and word != "whole" and is_product and reader.unit_of(key) is not None:
            raise InputError(f"parallelize_module cannot say this sharding: on the mesh's last axis ({axis.name!r}) "
                             f"{paths[0]!r} ({kind}) is split by {word}. Try another --mesh, with the axis that splits "
                             "layers last")
        before, after = _around(reader, key, last)
        layouts = {} if style == "SequenceParallel" else {"input_layouts": before, "output_layouts": after}
        if style is not None:
            plan |= {path: {"style": style, **layouts} for path in paths}
        elif word != "whole":
            differences += [f"{path}: {word} ({axis.name})" for path in paths]
    return {"mesh": [item.size for item in facts.axes], "mesh_dim_names": [item.name for item in facts.axes],
            "axis": axis.name, "plan": plan, "differences": differences}


def _modules(reader: ShardingReader) -> list[tuple[tuple[int, int], list[str]]]:
    """Return the modules with parameters: the node that reads the largest of these, and the paths of all copies."""
    largest: dict[str, tuple[float, tuple[int, int], list[str]]] = {}
    for key in reader.nodes:
        for edge in reader.parameters_of.get(key[0], ()) if reader.parts.parts[key[0]].kind == "op" else ():
            paths = reader.full_names(key, reader.parts.parts[edge.giver].name.rpartition(".")[0])
            if paths[0] not in largest or edge.num_bytes > largest[paths[0]][0]:
                largest[paths[0]] = edge.num_bytes, key, paths
    return [(key, paths) for _, key, paths in largest.values()]


def _around(reader: ShardingReader, key: tuple[int, int], axis: int) -> tuple[str, str]:
    """Return the layouts on an axis in which an operator's input comes, and in which its output is wanted."""
    layouts = reader.resharding.layouts
    before = after = "Replicate"
    for edge in reader.parts.edges:
        if edge.reader == key[0] and not edge.is_parameter:
            given = reader.choice_of(reader.at(edge.giver, key[1]))
            value = reader.parts.parts[edge.giver].values[edge.output][given]
            before = _layout_text(layouts[int(value)][axis])
        elif edge.giver == key[0]:
            wanted = edge.reads[reader.choice_of(reader.at(edge.reader, key[1]))]
            after = _layout_text(layouts[int(wanted)][axis])
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
