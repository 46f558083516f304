"""Make a traced graph functional without tracing it again, where the ways in which it changes memory are simple.

Most models change memory in a few plain ways: ``relu_`` on a result, ``x += y``, batch-norm statistics. For these each
operator that changes a tensor is replaced by the one that makes a new tensor, and every later reader reads the new one:

    a = conv(x); relu_(a); b = pool(a)      becomes      a = conv(x); c = relu(a); b = pool(c)

That is right as long as no *view* of the tensor, made before the change, is read after it. Where one is, or where
anything else is unusual, ``make_functional`` says so before it touches the graph, and the caller lets PyTorch trace all
over again (``run_decompositions``), which takes three times as long and settles on the strides of CPU kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

aten = torch.ops.aten

_BATCH_NORM: Final = aten.batch_norm.default
_FUNCTIONAL_BATCH_NORM: Final = aten._native_batch_norm_legit_functional.default


def is_mutable(target: Any) -> bool:
    """Return whether an operator says that it changes one of its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def changes_memory(node: fx.Node) -> bool:
    """Return whether the node changes memory; normalisations do so in training without saying so."""
    if node.target in (_BATCH_NORM, aten.instance_norm.default):
        return node.args[3] is not None and bool(node.args[5])
    return is_mutable(node.target)


def changed_tensors(node: fx.Node) -> list[fx.Node] | None:
    """Return the tensors (never views) whose memory the node changes, or None if that is not known."""
    if not changes_memory(node):
        return []
    changed = _changed(node)
    return None if changed is None else [owner_of(tensor) for tensor in changed]


def owner_of(node: fx.Node) -> fx.Node:
    """Return the node that made the memory which the node's value may share."""
    source = _aliased(node)
    return node if source is None else owner_of(source)


def make_functional(graph: fx.Graph, buffers: Mapping[str, str]) -> dict[str, fx.Node] | None:
    """Return the new values of changed buffers by path, after making ``graph`` functional; None if that is not simple.

    ``buffers`` gives the path of each placeholder that is a buffer.
    """
    nodes = list(graph.nodes)
    if not _is_simple(nodes, buffers):
        return None
    rewriter = _Rewriter(graph=graph)
    for node in nodes:
        rewriter.take(node)
    return {buffers[placeholder.name]: value for placeholder, value in rewriter.current.items()
            if placeholder.name in buffers}


# ---- what is simple -----------------------------------------------------------------------------------------------


def _is_simple(nodes: list[fx.Node], buffers: Mapping[str, str]) -> bool:
    """Return whether no view made before a change is read after it, and every change has a functional twin."""
    order = {node: index for index, node in enumerate(nodes)}
    same: dict[fx.Node, fx.Node] = {}
    """The tensor that a node's value is: itself, or the one that it changed."""
    views: dict[fx.Node, list[fx.Node]] = {}
    """Views by the tensor they are of."""
    base: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = _aliased(node)
        if changes_memory(node):
            changed = _changed(node)
            if changed is None or _twin(node) is None:
                return False
            for tensor in changed:
                owner = same.get(tensor, tensor)
                stored = owner.op == "placeholder"
                if owner in base or (stored and owner.name not in buffers):
                    return False
                if any(order[user] > order[node] for view in views.get(owner, ()) for user in view.users):
                    return False
            if node.target is not _BATCH_NORM:
                same[node] = same.get(changed[0], changed[0])
        elif source is not None:
            owner = same.get(source, source)
            base[node] = base.get(owner, owner)
            views.setdefault(base[node], []).append(node)
    return True


def _aliased(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory the node's value may share."""
    if node.op != "call_function" or not node.args:
        return None
    if node.target is operator.getitem:
        producer = node.args[0]
        return producer if isinstance(producer, fx.Node) and _aliased(producer) is not None else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(result.alias_info is not None for result in schema.returns):
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def _changed(node: fx.Node) -> list[fx.Node] | None:
    """Return the tensors that the node changes, or None if it is not one of the simple kinds."""
    if node.target is _BATCH_NORM:
        changed = [value for value in node.args[3:5] if isinstance(value, fx.Node)]
        return changed if len(changed) == 2 else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    written = [argument.name for argument in schema.arguments
               if argument.alias_info is not None and argument.alias_info.is_write]
    return [node.args[0]] if written == [schema.arguments[0].name] else None


def _twin(node: fx.Node) -> Any:
    """Return the operator that makes a new tensor instead, if it gives one of the same shape and dtype."""
    if node.target is _BATCH_NORM:
        return _FUNCTIONAL_BATCH_NORM
    packet, overload = str(node.target.overloadpacket), node.target._overloadname
    namespace, _, name = packet.partition(".")
    if not name.endswith("_") or name.startswith("_"):
        return None
    found = getattr(getattr(getattr(torch.ops, namespace), name[:-1], None), overload, None)
    if found is None or is_mutable(found):
        return None
    try:
        result = found(*_values(node.args), **_values(node.kwargs))
    except Exception:  # fake kernels fail in many ways; PyTorch's own pass is the way out of all of them
        return None
    before = node.meta["val"]
    alike = isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (before.shape, before.dtype)
    return found if alike else None


def _values(value: Any) -> Any:
    return fx.node.map_arg(value, lambda node: node.meta["val"])


# ---- rewriting ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Rewriter:
    """Replaces changes by new tensors, node by node."""

    graph: fx.Graph
    current: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The latest value of each tensor that was changed."""
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def take(self, node: fx.Node) -> None:
        """Let ``node`` read the latest values, and make it functional."""
        changes = changes_memory(node)
        changed = (_changed(node) or []) if changes else []
        owners = [self.same.get(tensor, tensor) for tensor in changed]
        node.args = fx.node.map_arg(node.args, self._latest)
        node.kwargs = fx.node.map_arg(node.kwargs, self._latest)
        if not changes:
            return
        if node.target is _BATCH_NORM:
            self._rewrite_batch_norm(node, owners)
        else:
            node.target = _twin(node)
            self.same[node] = owners[0]
            self.current[owners[0]] = node

    def _latest(self, node: fx.Node) -> fx.Node:
        owner = self.same.get(node, node)
        return self.current.get(owner, node)

    def _rewrite_batch_norm(self, node: fx.Node, owners: list[fx.Node]) -> None:
        """Replace batch norm by its functional form: (result, mean, deviation, new running mean, new variance)."""
        with self.graph.inserting_before(node):
            call = self.graph.call_function(_FUNCTIONAL_BATCH_NORM, tuple(node.args[:8]))
        call.meta = dict(node.meta)
        call.meta["val"] = _FUNCTIONAL_BATCH_NORM(*_values(call.args))
        items = {}
        for position in (0, 3, 4):
            with self.graph.inserting_before(node):
                items[position] = self.graph.call_function(operator.getitem, (call, position))
            items[position].meta = {**node.meta, "val": call.meta["val"][position]}
        node.replace_all_uses_with(items[0])
        self.graph.erase_node(node)
        self.current[owners[0]], self.current[owners[1]] = items[3], items[4]
