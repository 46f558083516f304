"""Rewriting traced graphs: functional where that is simple, blocks written out, what does nothing left out.

**Functional.** Without tracing again, where the ways in which a graph changes memory are simple.

Most models change memory in a few plain ways: ``relu_`` on a result, ``x += y``, batch-norm statistics. For these each
operator that changes a tensor is replaced by the one that makes a new tensor, and every later reader reads the new one:

    a = conv(x); relu_(a); b = pool(a)      becomes      a = conv(x); c = relu(a); b = pool(c)

That is right as long as no *view* of the tensor, made before the change, is read after it. Where one is, or where
anything else is unusual, ``make_functional`` says so before it touches the graph, and the caller lets PyTorch trace all
over again (``run_decompositions``), which takes three times as long and settles on the strides of CPU kernels.

**Blocks.** ``inline_blocks`` writes out the sub-graphs of ``no_grad`` and disabled ``autocast`` blocks.

**Simplifying.** ``simplify`` removes what has no effect, ``free_of_strides`` what depends on how CPU
kernels lay out their results.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from weft.base.errors import ModelError

aten = torch.ops.aten

_SET_GRAD: Final = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST: Final = torch.ops.higher_order.wrap_with_autocast
_REMOVED: Final = ("aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar",
                   "aten.sym_constrain_range")
_SAME_AS_INPUT: Final = (aten.lift_fresh_copy.default, aten.alias.default)
_PRODUCTS: Final = frozenset(f"aten.{name}" for name in (
    "linear.default", "mm.default", "addmm.default", "bmm.default", "baddbmm.default", "matmul.default", "mv.default",
    "convolution.default", "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding",
    "conv3d.padding", "conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"))
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')
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


# ---- blocks -------------------------------------------------------------------------------------------------------


def inline_blocks(root: fx.GraphModule) -> None:
    """Write out the sub-graphs of ``no_grad`` and disabled ``autocast`` blocks of ``root`` in place."""
    for node in list(root.graph.nodes):
        if node.target is _SET_GRAD:
            _inline(root, node, node.args[1], node.args[2:], detach=not node.args[0])
        elif node.target is AUTOCAST and not node.args[2]:
            _inline(root, node, node.args[4], node.args[5:], detach=False)


def _inline(root: fx.GraphModule, call: fx.Node, getter: fx.Node, arguments: tuple[Any, ...], *, detach: bool) -> None:
    body = root.get_submodule(str(getter.target))
    inline_blocks(body)
    values: dict[fx.Node, Any] = {}
    rest = iter(arguments)
    with root.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "output":
                results = node.args[0]
            else:
                if detach and _changes_memory_with_gradient(node, values):
                    raise ModelError(f"{node.target} changes a tensor that needs a gradient inside a no_grad block"
                                     f"{place_of(node)}: a traced graph cannot keep that. Move it out of the forward "
                                     "pass")
                values[node] = root.graph.node_copy(node, values.__getitem__)
        made = [_detached(root.graph, values[item]) if detach else values[item] for item in results]
    for user in list(call.users):
        user.replace_all_uses_with(made[user.args[1]])
        root.graph.erase_node(user)
    root.graph.erase_node(call)
    root.graph.erase_node(getter)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return node
    result = graph.call_function(aten.detach.default, (node,))
    result.meta = dict(node.meta)
    return result


def _changes_memory_with_gradient(node: fx.Node, outside: Mapping[fx.Node, Any]) -> bool:
    """Return whether a node of a ``no_grad`` block changes what came into the block with a gradient."""
    if not is_mutable(node.target) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    waiting, seen = [outside[node.args[0]]], set()
    while waiting:
        source = waiting.pop()
        if source.op == "placeholder" and source.meta["val"].requires_grad:
            return True
        if source not in seen:
            seen.add(source)
            waiting.extend(source.all_input_nodes)
    return False


# ---- simplifying --------------------------------------------------------------------------------------------------


def simplify(graph: fx.Graph) -> None:
    """Remove, in place, checks, operators that return their input whatever its shape, and operators nobody uses."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target).startswith(_REMOVED):
            graph.erase_node(node)
        elif node.target is aten.copy.default:
            _spell_out_copy(graph, node)
        elif node.op == "call_function" and _returns_input(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _spell_out_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the functional ``copy``, which has no derivative, by a cast (if any) and an expansion of its source."""
    source, value = node.args[1], node.meta["val"]
    with graph.inserting_before(node):
        if source.meta["val"].dtype != value.dtype:
            source = graph.call_function(aten._to_copy.default, (source,), {"dtype": value.dtype})
            source.meta = {**node.meta, "val": node.args[1].meta["val"].to(value.dtype)}
        result = graph.call_function(aten.expand.default, (source, list(value.shape)))
    result.meta = {**node.meta, "val": source.meta["val"].expand(value.shape)}
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _returns_input(node: fx.Node) -> bool:
    """Return whether the operator gives back its input for every batch size (so that names do not depend on it)."""
    target, args = node.target, node.args
    if target in _SAME_AS_INPUT:
        return True
    if target is aten.detach.default:
        return args[0].op == "placeholder" and not args[0].meta["val"].requires_grad
    if target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
        return args[1] == 0 or not args[2]
    if target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other):
        copies = node.kwargs.get("copy", False) or (target is aten.to.dtype and len(args) > 3 and args[3])
        return not copies and args[0].meta["val"].dtype == node.meta["val"].dtype
    if target is aten.slice.Tensor:
        start = args[2] if len(args) > 2 else None
        end = args[3] if len(args) > 3 else None
        return start in (None, 0) and end in (None, sys.maxsize) and (len(args) < 5 or args[4] == 1)
    return False


def free_of_strides(graph: fx.Graph) -> None:
    """Turn views into reshapes, in place.

    PyTorch leaves out a copy (``contiguous``) where the strides of fake CPU tensors need none; real kernels, such as
    attention on another device, may lay out their results differently, and a view of those would fail.
    """
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default


# ---- products of two precisions -----------------------------------------------------------------------------------


def check_precisions(graph: fx.Graph) -> None:
    """Raise ``ModelError`` at the first product whose factors have different floating-point dtypes.

    Tensors without values let them pass, real kernels refuse them.
    """
    for node in graph.nodes:
        found = _dtypes(node) if str(node.target) in _PRODUCTS else []
        if len(found) > 1:
            kinds = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
            raise ModelError(f"operator {node.target}{place_of(node)} multiplies {kinds}, which PyTorch refuses: give "
                             f"inputs of the parameters' precision, such as x.to({found[-1]}), or convert the model")


def _dtypes(node: fx.Node) -> list[torch.dtype]:
    values = [item.meta.get("val") for item in node.all_input_nodes[:2]]
    return list(dict.fromkeys(item.dtype for item in values if isinstance(item, torch.Tensor)
                              and item.is_floating_point()))


# ---- places in the user's code ------------------------------------------------------------------------------------


def place_of(node: fx.Node) -> str:
    """Return where in the user's code a node was made, in brackets, for messages; nothing if that is not known."""
    source = source_line(node)
    return f" ({source})" if source else ""


def source_line(node: fx.Node) -> str:
    """Return ``file.py:12`` of the innermost frame outside PyTorch that made ``node``, or ``""``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0] and not frame[0].startswith("<")] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""
