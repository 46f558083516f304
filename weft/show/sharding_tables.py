"""What ``weft shard MODEL CLUSTER`` prints: the plan by classes of layers, its collectives, and the named plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

from weft.base.units import format_bytes, format_time
from weft.search.shard.compare import NamedResult
from weft.show.names import short_list
from weft.show.sharding_facts import Exchange, LayerClass, ShardingFacts, Use
from weft.show.tables import TextTable, percent, print_text_table

STORED = {"whole": "whole", "split": "split", "pieces": "in pieces", "states": "states in pieces"}
"""How a parameter is stored, in words."""


def print_sharding(facts: ShardingFacts, named: Sequence[NamedResult] = (), *, width: int | None = None,
                   file: IO[str] | None = None) -> None:
    """Print the sharding, and the comparison if there is one."""
    for table in (summary_table(facts), layers_table(facts), exchanges_table(facts)):
        print_text_table(table, file, width)
    if named:
        print_text_table(named_table(facts, named), file, width)


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
    rows: list[tuple[str, ...]] = []
    for layer in facts.layers:
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for use in layer.uses:
            groups.setdefault((use.words, use.stored), []).append(use.name)
        for number, ((words, stored), names) in enumerate(groups.items()):
            title = layer_label(layer) if number == 0 else ""
            rows.append((title, short_list(names, limit=12), *words, stored_text(stored, facts)))
    return TextTable(title="Layers", header=("layers", "modules", *axes, "parameters"), rows=tuple(rows))


def layer_label(layer: LayerClass) -> str:
    """Return ``32 x model.layers``."""
    return layer.title if layer.count == 1 else f"{layer.count} x {layer.title}"


def stored_text(stored: Sequence[str], facts: ShardingFacts) -> str:
    """Return how a parameter is stored: ``split (tensor), states in pieces (data)``; ``-`` where there is none."""
    if not stored:
        return "-"
    axes: dict[str, list[str]] = {}
    for word, axis in zip(stored, facts.axes, strict=True):
        axes.setdefault(word, []).append(axis.name)
    axes.pop("whole", None)
    return ", ".join(f"{STORED[word]} ({', '.join(names)})" for word, names in axes.items()) or "whole"


def exchanges_table(facts: ShardingFacts) -> TextTable:
    """Return the collectives of one layer of each class, with the seconds of all its layers."""
    rows = []
    for layer in facts.layers:
        for number, item in enumerate(layer.exchanges):
            rows.append((layer_label(layer) if number == 0 else "", item.direction, facts.axes[item.axis].name,
                         exchange_text(item), format_time(item.seconds)))
    return TextTable(title="Collectives", header=("layers", "when", "axis", "in one layer", "in all"),
                     rows=tuple(rows), numeric=frozenset({4}),
                     notes=("weights: gathered for use; gradients: added up; update: gathered after the optimizer",))


def exchange_text(item: Exchange) -> str:
    """Return ``2 all-reduce, 64 MiB each``."""
    if not item.count:
        return f"{item.kind.replace('_', '-')}, at the ends only"
    each = format_bytes(item.num_bytes / item.count)
    return f"{item.count:.3g} {item.kind.replace('_', '-')}, {each}" + (" on average" if item.count > 1 else "")


def named_table(facts: ShardingFacts, named: Sequence[NamedResult]) -> TextTable:
    """Return the named plans beside the sharding found, the fastest first."""
    best = facts.sharding
    rows = [(best.seconds, ("weft", best.mesh.name, format_time(best.seconds), "1", format_bytes(best.held_bytes), ""))]
    for item in named:
        found = item.sharding
        if found is None:
            why = f"not possible: {item.reason}" if item.least_bytes is None else (
                f"does not fit: at least {format_bytes(item.least_bytes)}")
            rows.append((float("inf"), (item.name, "-", "-", "-", "-", why)))
            continue
        rows.append((found.seconds, (item.name, found.mesh.name, format_time(found.seconds),
                                     f"{found.seconds / best.seconds:.3f}", format_bytes(found.held_bytes), "")))
    rows.sort(key=lambda row: row[0])
    return TextTable(title="Named plans", header=("plan", "mesh", "step time", "to weft's", "memory", "reason"),
                     rows=tuple(cells for _, cells in rows), numeric=frozenset({2, 3, 4}),
                     marked=frozenset(index for index, (_, cells) in enumerate(rows) if cells[0] == "weft"))


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
    return {"layers": layer.title, "count": layer.count, "modules": {use.name: _use_json(use) for use in layer.uses},
            "collectives": [{"when": item.direction, "collective": item.kind, "axis": facts.axes[item.axis].name,
                             "count": item.count, "bytes": item.num_bytes, "seconds": item.seconds}
                            for item in layer.exchanges]}


def _use_json(use: Use) -> dict[str, Any]:
    return {"split": list(use.words), **({"stored": list(use.stored)} if use.stored else {})}


def _named_json(row: NamedResult) -> dict[str, Any]:
    if row.sharding is None:
        return {"plan": row.name, "feasible": False, "least_bytes": row.least_bytes, "reason": row.reason}
    return {"plan": row.name, "feasible": True, "mesh": list(row.sharding.mesh.shape), "seconds": row.sharding.seconds,
            "status": row.sharding.status, "held_bytes": round(row.sharding.held_bytes)}
