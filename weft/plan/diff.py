"""What differs between two plans: settings, stages, where operators run, how layers are sharded, orders, exchanges.

Stages are matched by their operators and devices, so that their names and numbers do not matter: two plans that mean
the same are the same. What a plan says about its search, and the predicted times in it, do not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

from weft.model.graph import Graph
from weft.plan.orders import order_name, stage_order
from weft.plan.plan import GradientExchange, ModelRef, Plan, Replica, Stage
from weft.plan.units import storage_text

T = TypeVar("T")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that the two plans say differently."""

    what: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChange:
    """A stage of the first plan and the one of the second that has most of its operators."""

    a: str | None
    """Its name; None if the second plan has no such stage, or the first for ``b``."""
    b: str | None
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Operators that run on other devices."""

    a: tuple[str, ...]
    """Devices in the first plan; none if its model does not have the operators."""
    b: tuple[str, ...]
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    """The modules of the operators, each once."""
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChange:
    """Operators or tensors of equal layers that are divided differently."""

    kind: str
    """``operator`` or ``tensor``."""
    name: str
    """With ``*`` for the numbers of layers: ``h.*.mlp.c_fc.addmm``."""
    count: int
    a: str
    """By axis; ``whole`` where nothing is split."""
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderChange:
    """A device whose actions come in another order."""

    device: str
    position: int
    """Of the first action that differs."""
    a: str
    """That action; nothing where the list has ended."""
    b: str
    """The same of the second plan, by the names of the first plan's stages."""
    num_a: int
    num_b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeChange:
    """Parameters whose gradients are exchanged differently."""

    a: str
    b: str
    parameters: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """Everything that differs; see the module's docstring."""

    settings: tuple[Change, ...]
    stages: tuple[StageChange, ...]
    moves: tuple[Move, ...]
    sharding: tuple[ShardingChange, ...]
    orders: tuple[OrderChange, ...]
    exchanges: tuple[ExchangeChange, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """Return in words what differs; nothing if the plans are the same."""
        found = {"settings": self.settings, "stages": self.stages, "placement": self.moves, "sharding": self.sharding,
                 "order": self.orders, "gradient exchanges": self.exchanges}
        return tuple(name for name, changes in found.items() if changes)

    @property
    def is_same(self) -> bool:
        """Return whether both plans mean the same."""
        return not self.parts


def diff_plans(a: Plan, b: Plan, graph_a: Graph, graph_b: Graph) -> PlanDiff:
    """Return what differs between two checked plans, each with the graph of its model."""
    pairs = match_stages(a, b)
    return PlanDiff(
        settings=tuple(_settings(a, b)), stages=tuple(_stages(a, b, pairs)),
        moves=tuple(_moves(a, b, graph_a, graph_b)), sharding=tuple(_sharding(a, b)),
        orders=tuple(_orders(a, b, pairs)), exchanges=tuple(_exchanges(a, b, graph_a, graph_b)))


def match_stages(a: Plan, b: Plan) -> tuple[tuple[int | None, int | None], ...]:
    """Return pairs of stages (index in ``a``, index in ``b``) that have operators in common.

    Stages with the same operators go together first, then those on the same devices, then those with most in common; of
    equals, those for the same micro-batches. Stages without a partner come last.
    """
    ops_a, ops_b = ([frozenset(stage.ops) for stage in plan.stages] for plan in (a, b))
    home: dict[str, list[int]] = {}
    for index, ops in enumerate(ops_b):
        for op in ops:
            home.setdefault(op, []).append(index)

    def distance(pair: tuple[int, int]) -> tuple[bool, bool, float, bool, tuple[int, int]]:
        one, other = a.stages[pair[0]], b.stages[pair[1]]
        mine, theirs = ops_a[pair[0]], ops_b[pair[1]]
        return (mine != theirs, _replicas_text(one) != _replicas_text(other),
                -len(mine & theirs) / len(mine | theirs), one.microbatches != other.microbatches, pair)

    partner: dict[int, int] = {}
    taken: set[int] = set()
    close = {(left, right) for left, ops in enumerate(ops_a) for op in ops for right in home.get(op, ())}
    for left, right in sorted(close, key=distance):
        if left not in partner and right not in taken:
            partner[left] = right
            taken.add(right)
    pairs: list[tuple[int | None, int | None]] = sorted(partner.items())
    pairs += [(left, None) for left in range(len(a.stages)) if left not in partner]
    return (*pairs, *((None, right) for right in range(len(b.stages)) if right not in taken))


def _differing(here: Mapping[str, T], there: Mapping[str, T], default: T) -> Iterator[tuple[str, T, T]]:
    """Yield the names of which the two say different things, with these; ``default`` where one says nothing."""
    for name in dict.fromkeys((*here, *there)):
        left, right = here.get(name, default), there.get(name, default)
        if left != right:
            yield name, left, right


def _grouped(changes: Iterator[tuple[str, T, T]]) -> dict[tuple[T, T], list[str]]:
    groups: dict[tuple[T, T], list[str]] = {}
    for name, left, right in changes:
        groups.setdefault((left, right), []).append(name)
    return groups


# ---- settings -------------------------------------------------------------------------------------------------------


def _settings(a: Plan, b: Plan) -> Iterator[Change]:
    yield from (Change(what=what, a=left, b=right) for what, left, right in (
        ("model", _model_text(a.model, b.model), _model_text(b.model, a.model)),
        ("mode", a.model.mode, b.model.mode), ("dtype", a.model.dtype, b.model.dtype),
        ("batch", str(a.model.batch), str(b.model.batch)),
        ("cluster", *_cluster_texts(a, b)),
        ("micro-batches", str(a.microbatches), str(b.microbatches)),
        ("stages", *("compiled" if item.compiled else "operator by operator" for item in (a, b))),
        ("optimizer", _optimizer_text(a), _optimizer_text(b))) if left != right)


def _model_text(own: ModelRef, other: ModelRef) -> str:
    """Return the model's name, with its digest where another model has the same name; same digests are one model."""
    if own.digest == other.digest:
        return own.digest
    return own.name if own.name != other.name else f"{own.name} ({own.digest})"


def _cluster_texts(a: Plan, b: Plan) -> tuple[str, str]:
    if a.cluster.digest == b.cluster.digest and a.cluster.devices == b.cluster.devices:
        return "", ""
    texts = [", ".join(plan.cluster.devices) for plan in (a, b)]
    if texts[0] == texts[1]:
        texts = [f"{text} ({plan.cluster.digest})" for text, plan in zip(texts, (a, b), strict=True)]
    return texts[0], texts[1]


def _optimizer_text(plan: Plan) -> str:
    if plan.model.mode != "training":
        return ""
    item = plan.optimizer
    return f"{item.kind}, lr {item.lr:g}" + (", state divided" if item.sharded else "")


def plan_order_name(plan: Plan) -> str | None:
    """Return the name of the plan's order (``1f1b``, ``gpipe``, ...) if it has one."""
    ranks = list(dict.fromkeys(stage.replicas[0].devices[0] for stage in plan.stages))
    return order_name(stage_order(plan, ranks), len(plan.stages), plan.microbatches)


# ---- stages and placement -------------------------------------------------------------------------------------------


def _stages(a: Plan, b: Plan, pairs: Sequence[tuple[int | None, int | None]]) -> Iterator[StageChange]:
    for left, right in pairs:
        if left is None or right is None:
            stage = a.stages[left] if left is not None else b.stages[right or 0]
            text = f"{len(stage.ops)} operators on {_replicas_text(stage)}"
            yield StageChange(a=stage.name if right is None else None, b=stage.name if left is None else None, changes=(
                Change(what="stage", a=text if right is None else "-", b=text if left is None else "-"),))
            continue
        one, other = a.stages[left], b.stages[right]
        changes = (*_stage_changes(one, other), *_microbatch_changes(a, one, b, other))
        if changes:
            yield StageChange(a=one.name, b=other.name, changes=changes)


def _stage_changes(one: Stage, other: Stage) -> Iterator[Change]:
    mine, theirs = set(one.ops), set(other.ops)
    if mine != theirs:
        gained, lost = len(theirs - mine), len(mine - theirs)
        yield Change(what="operators", a=str(len(mine)), b=f"{len(theirs)} ({gained} more, {lost} fewer)")
    yield from (Change(what=what, a=left, b=right) for what, left, right in (
        ("devices", _replicas_text(one), _replicas_text(other)),
        ("shares", _shares_text(one), _shares_text(other)), ("mesh", _mesh_text(one), _mesh_text(other)),
        ("in pieces", *(storage_text(stage.storage) or "no" for stage in (one, other))),
        ("recompute", *map(_recompute_text, (one, other)))) if left != right)


def _recompute_text(stage: Stage) -> str:
    if stage.saved:
        return f"all but {len(stage.saved)} tensors"
    return "yes" if stage.recompute else "no"


def _replicas_text(stage: Stage) -> str:
    return ", ".join("+".join(replica.devices) for replica in stage.replicas)


def _shares_text(stage: Stage) -> str:
    return ", ".join(f"{replica.share:.6g}" for replica in stage.replicas)


def _mesh_text(stage: Stage) -> str:
    def text(replica: Replica) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in replica.mesh.items()) or "-"

    return ", ".join(dict.fromkeys(text(replica) for replica in stage.replicas))


def _microbatch_changes(a: Plan, one: Stage, b: Plan, other: Stage) -> Iterator[Change]:
    mine, theirs = ("all" if stage.microbatches is None or set(stage.microbatches) == set(range(plan.microbatches)) else
                    ", ".join(map(str, sorted(stage.microbatches))) for plan, stage in ((a, one), (b, other)))
    if mine != theirs:
        yield Change(what="micro-batches", a=mine, b=theirs)


def _moves(a: Plan, b: Plan, graph_a: Graph, graph_b: Graph) -> Iterator[Move]:
    for (left, right), ops in _grouped(_differing(_places(a, graph_a), _places(b, graph_b), ())).items():
        graph = graph_a if left else graph_b
        indices = [graph.op_index[op] for op in ops]
        parameters = set(graph.parameters.tolist()) & {tensor for op in indices for tensor in
                                                       graph.op_inputs(op).tolist()}
        modules = dict.fromkeys(graph.op_modules[op] for op in indices)
        yield Move(a=left, b=right, ops=tuple(ops), modules=tuple(modules),
                   parameter_bytes=int(graph.tensor_bytes[sorted(parameters)].sum()))


def _places(plan: Plan, graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the devices of every operator that is not constant, in the order of the cluster."""
    rank = {device: index for index, device in enumerate(plan.cluster.devices)}
    found: dict[str, set[str]] = {}
    for stage in plan.stages:
        devices = {device for replica in stage.replicas for device in replica.devices}
        for op in stage.ops:
            if op in graph.op_index and not graph.is_constant[graph.op_index[op]]:  # another version may name others
                found.setdefault(op, set()).update(devices)
    order = (name for name in graph.op_names if name in found)
    return {op: tuple(sorted(found[op], key=rank.__getitem__)) for op in order}


def _sharding(a: Plan, b: Plan) -> Iterator[ShardingChange]:
    for kind in ("operator", "tensor"):
        changes = _differing(_words(a, kind), _words(b, kind), "whole")
        counts = Counter((_NUMBER.sub("*", name), left, right) for name, left, right in changes)
        yield from (ShardingChange(kind=kind, name=name, a=left, b=right, count=count)
                    for (name, left, right), count in counts.items())


def _words(plan: Plan, kind: str) -> dict[str, str]:
    """Return how each operator or tensor is split, by axis, without those that are whole."""
    found: dict[str, dict[str, None]] = {}
    for stage in plan.stages:
        axes = tuple(stage.replicas[0].mesh)
        table: Mapping[str, tuple[str, ...]] = stage.sharding.ops if kind == "operator" else stage.sharding.tensors
        for name, words in table.items():
            parts = [f"{axis} {word}" for axis, word in zip(axes, words, strict=False) if word not in ("", "R")]
            if parts:
                found.setdefault(name, {})[", ".join(parts)] = None
    return {name: "; ".join(sorted(texts)) for name, texts in found.items()}


# ---- orders and exchanges -------------------------------------------------------------------------------------------


def _orders(a: Plan, b: Plan, pairs: Sequence[tuple[int | None, int | None]]) -> Iterator[OrderChange]:
    names = {b.stages[right].name: a.stages[left].name for left, right in pairs
             if left is not None and right is not None}
    for device in dict.fromkeys((*a.order, *b.order)):
        mine = a.order.get(device, ())
        theirs = tuple(_renamed(token, names) for token in b.order.get(device, ()))
        position = next((index for index, (left, right) in enumerate(zip_longest(mine, theirs)) if left != right), None)
        if position is not None:
            yield OrderChange(device=device, position=position, num_a=len(mine), num_b=len(theirs),
                              a="".join(mine[position:position + 1]), b="".join(theirs[position:position + 1]))


def _renamed(token: str, names: Mapping[str, str]) -> str:
    """Return an action with the name that its stage has in the other plan, or marked as of a stage without partner."""
    stage, _, rest = token.partition(":")
    return f"{names[stage]}:{rest}" if stage in names else f"{stage} (B):{rest}"


def _exchanges(a: Plan, b: Plan, graph_a: Graph, graph_b: Graph) -> Iterator[ExchangeChange]:
    groups = _grouped(_differing(_methods(a), _methods(b), "none"))
    for (left, right), names in groups.items():
        yield ExchangeChange(a=left, b=right, parameters=tuple(names),
                             num_bytes=sum(_tensor_bytes(name, graph_a, graph_b) for name in names))
    buckets_a, buckets_b = ({_canonical(exchange) for exchange in plan.gradients} for plan in (a, b))
    if not groups and buckets_a != buckets_b:
        names = sorted({name for exchange in buckets_a ^ buckets_b for name in exchange.parameters})
        yield ExchangeChange(a=f"{len(a.gradients)} buckets", b=f"{len(b.gradients)} other buckets",
                             parameters=tuple(names),
                             num_bytes=sum(_tensor_bytes(name, graph_a, graph_b) for name in names))


def _tensor_bytes(name: str, *graphs: Graph) -> int:
    graph = next(graph for graph in graphs if name in graph.tensor_index)
    return int(graph.tensor_bytes[graph.tensor_index[name]])


def _canonical(exchange: GradientExchange) -> GradientExchange:
    return replace(exchange, parameters=tuple(sorted(exchange.parameters)))


def _methods(plan: Plan) -> dict[str, str]:
    """Return how the gradient of each parameter is exchanged, in words."""
    found: dict[str, list[str]] = {}
    for exchange in plan.gradients:
        text = f"{exchange.method} among {', '.join(exchange.devices)}"
        if exchange.server is not None:
            text += f" at {exchange.server}"
        if exchange.groups:
            text += " in groups " + " | ".join(", ".join(group) for group in exchange.groups)
        for name in exchange.parameters:
            found.setdefault(name, []).append(text)
    return {name: "; ".join(sorted(texts)) for name, texts in found.items()}
