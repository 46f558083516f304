"""The adapter to AOTAutograd and inductor: from a function of tensors to compiled graphs of its forward and backward.

``compile_graphs`` traces the function and its derivative into one joint graph, cuts that where the fewest bytes are
kept (what is cheap, inductor computes again), and compiles both sides ahead of time, from shapes alone. A backward
can be cut once more: ``inputs`` gives the gradients of activations, ``weights``, later, those of parameters.

    forward(primals)           -> outputs, saved
    backward(saved, tangents)  -> gradients                (whole)
    backward(saved, tangents)  -> some gradients, kept     (split: I)
    weights(kept)              -> the other gradients      (split: W)

A node belongs to the second part if exactly one parameter's gradient depends on it, and no activation's: a product with
the weight's other factor does, the chain of gradients from layer to layer does not.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner, select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.run.compiled_graphs import Call, Gradients, Graphs, Primal, viewed


def compile_graphs(function: Callable[..., Sequence[Tensor]], primals: Sequence[Primal], *, num_outputs: int,
                   updates: Mapping[int, int] | None = None, split: bool = False) -> Graphs:
    """Return the compiled graphs of a function of tensors that changes none of them.

    ``updates`` names outputs, behind the ``num_outputs`` that are returned, which the compiled forward writes to
    primals instead: {output: primal}. Any failure of the compiler is raised as it is.
    """
    updates = updates or {}
    mode = FakeTensorMode()
    with mode, tracing(TracingContext(mode)):
        fakes = [_fake(item) for item in primals]
        with torch.enable_grad():
            made = function(*fakes)

        def apart(*arguments: Any) -> list[Tensor]:  # tracing refuses results that may be views
            return [item.clone() for item in function(*arguments)]

        differentiable = [place for place, item in enumerate(made[:num_outputs]) if item.requires_grad]
        if not differentiable:
            with torch.no_grad():
                graph = aot_export_joint_simple(apart, tuple(fakes), trace_joint=False,
                                                decompositions=select_decomp_table())
            _without_copies(graph, len(made))
            graph = joint_graph_passes(graph, primals[0].device)
            _write_updates(graph, updates)
            return Graphs(forward=_compile(graph, num_kept=num_outputs, is_inference=True), num_outputs=num_outputs)
        joint = aot_export_joint_simple(apart, tuple(fakes), trace_joint=True,
                                        decompositions=select_decomp_table())
        _without_copies(joint, len(made))
        joint = joint_graph_passes(joint, primals[0].device)
        forward, backward = min_cut_rematerialization_partition(
            joint, [node.meta["val"] for node in _placeholders(joint)], num_fwd_outputs=len(made),
            static_lifetime_input_indices=[place for place, item in enumerate(primals) if item.is_parameter])
        _write_updates(forward, updates)
        tangents = [node.meta["val"] for node in _placeholders(backward)][-len(differentiable):]
        with _strides_of_outputs() as strides:
            compiled = _compile(forward, num_kept=num_outputs, is_inference=False)
        _lay_out(backward, strides[num_outputs:])
        _give_away(forward, backward, num_outputs)
        graphs = Graphs(forward=compiled, num_outputs=num_outputs, with_tangent=tuple(differentiable),
                        tangent_strides=tuple(tuple(item.stride()) for item in tangents))
        return _with_backward(graphs, backward, primals, split=split)


def _fake(primal: Primal) -> Tensor:
    value = torch.empty_strided(primal.shape, primal.stride, dtype=primal.dtype, device=primal.device)
    return value.requires_grad_(primal.needs_gradient)


def _placeholders(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _output(module: GraphModule) -> Node:
    return next(iter(reversed(module.graph.nodes)))


@contextmanager
def _strides_of_outputs() -> Iterator[list[Any]]:
    found: list[Any] = []
    with TracingContext.report_output_strides() as strides:
        yield found
    found.extend(strides or [])


def _write_updates(module: GraphModule, updates: Mapping[int, int]) -> None:
    """Let the graph write some of its results to its arguments instead of returning them."""
    if not updates:
        return
    end, arguments = _output(module), _placeholders(module)
    results = list(end.args[0])
    with module.graph.inserting_before(end):
        for place, primal in updates.items():
            module.graph.call_function(torch.ops.aten.copy_.default, (arguments[primal], results[place]))
    end.args = (tuple(item for place, item in enumerate(results) if place not in updates),)
    module.recompile()


def _without_copies(module: GraphModule, num_results: int) -> None:
    """Let the first results be what they are copies of, unless that is an argument."""
    end = _output(module)
    results = list(end.args[0])
    for place, node in enumerate(results[:num_results]):
        if node.target is torch.ops.aten.clone.default and _root(node.args[0]).op != "placeholder":
            results[place] = node.args[0]
    end.args = (tuple(results),)
    module.graph.eliminate_dead_code()
    module.recompile()


def _lay_out(module: GraphModule, strides: Sequence[Sequence[int] | None]) -> None:
    """Let the first arguments of a graph lie as another graph makes them."""
    for node, stride in zip(_placeholders(module), strides, strict=False):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and stride is not None and tuple(value.stride()) != tuple(stride):
            node.meta["val"] = value.as_strided(value.shape, stride)


_GIVEN_AWAY: Final = "given_away_"


def _give_away(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Mark the arguments of the backward whose memory it may use for something else.

    That is what the forward saved, if nobody else has that memory: it is neither one of its arguments nor one of its
    results, is saved once, and no gradient lies in it. The mark is the argument's name, because the compiler's cache
    knows a graph by its code.
    """
    results = _output(forward).args[0]
    owners = Counter(_root(item) for item in results if isinstance(item, Node))
    returned = {_root(item) for item in _output(backward).args[0] if isinstance(item, Node)}
    for place, (saved, node) in enumerate(zip(results[num_outputs:], _placeholders(backward), strict=False)):
        root = _root(saved)
        if root.op == "call_function" and owners[root] == 1 and node not in returned:
            _call(node, f"{_GIVEN_AWAY}{place}")
    backward.recompile()


def _call(argument: Node, name: str) -> None:
    argument._rename(name)
    argument.target = argument.name


def _compile(module: GraphModule, *, num_kept: int, is_inference: bool = False, is_backward: bool = False) -> Call:
    """Return the compiled graph; its first ``num_kept`` results lie as they were traced."""
    _output(module).meta["user_visible_output_idxs"] = [
        place for place, item in enumerate(_output(module).args[0][:num_kept]) if isinstance(item, Node)]
    arguments = _placeholders(module)
    with _giving([place for place, node in enumerate(arguments) if node.name.startswith(_GIVEN_AWAY)]):
        compiled = compile_fx_inner(module, [node.meta["val"] for node in arguments], is_inference=is_inference,
                                    is_backward=is_backward)
    call: Call = compiled
    return call


@contextmanager
def _giving(places: list[int]) -> Iterator[None]:
    """Tell the compiler which arguments it may write over, where it looks for that."""
    context = TracingContext.get()
    before = context.fw_metadata
    if places:
        context.fw_metadata = SimpleNamespace(bw_donated_idxs=places, static_input_indices=[])
    try:
        yield
    finally:
        context.fw_metadata = before


def _with_backward(graphs: Graphs, backward: GraphModule, primals: Sequence[Primal], *, split: bool) -> Graphs:
    wanted = [(primal, place) for place, (primal, item) in enumerate(
        zip(range(len(primals)), _output(backward).args[0], strict=False)) if isinstance(item, Node)]
    if not split:
        gradients = _gradients(backward, wanted)
        return replace(graphs, backward=_compile(backward, num_kept=0, is_backward=True), gradients=gradients)
    parts = _cut(backward, wanted, primals)
    found = replace(graphs, gradients=_gradients(parts.first, parts.by_first),
                    weight_gradients=_gradients(parts.second, parts.by_second))
    with _strides_of_outputs() as strides:
        first = _compile(parts.first, num_kept=0, is_backward=True)
    if not parts.by_second:
        return replace(found, backward=first)
    _lay_out(parts.second, strides[len(parts.by_first):])
    return replace(found, backward=first, weights=_compile(parts.second, num_kept=0, is_backward=True))


def _gradients(module: GraphModule, wanted: Sequence[tuple[int, int]]) -> Gradients:
    results = _output(module).args[0]
    roots = {primal: _root(results[place]) for primal, place in wanted}
    everywhere = [_root(item) for item in results if isinstance(item, Node)]
    shared = {primal for primal, root in roots.items() if root.op == "placeholder" or everywhere.count(root) > 1}
    return Gradients(places=tuple(wanted), shared=frozenset(shared))


def _root(node: Node) -> Node:
    """Return the node whose memory a node's value may be in."""
    while (source := viewed(node)) is not None:
        node = source
    return node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A backward in two parts, and (primal, place) of the gradients in the results of both."""

    first: GraphModule
    second: GraphModule
    by_first: list[tuple[int, int]]
    by_second: list[tuple[int, int]]


def _cut(backward: GraphModule, wanted: Sequence[tuple[int, int]], primals: Sequence[Primal]) -> _Parts:
    results = list(_output(backward).args[0])
    late = _late_nodes(backward, [results[place] for primal, place in wanted if not primals[primal].is_parameter],
                       [results[place] for primal, place in wanted if primals[primal].is_parameter])
    soon = [(primal, place) for primal, place in wanted if results[place] not in late]
    later = [(primal, place) for primal, place in wanted if results[place] in late]
    kept = [node for node in backward.graph.nodes if node not in late and any(user in late for user in node.users)]
    for place, node in enumerate(kept):  # what the second part reads, the first may not write over
        if _root(node).op == "placeholder":
            _call(_root(node), f"kept_{place}")
    early = {node for node in backward.graph.nodes if node.op == "call_function" and node not in late}
    first, second = Graph(), Graph()
    _copy_part(backward, first, early, arguments=_placeholders(backward),
               results=[*(results[place] for _, place in soon), *kept])
    _copy_part(backward, second, late, arguments=kept, results=[results[place] for _, place in later])
    return _Parts(first=GraphModule(backward, first), second=GraphModule(backward, second),
                  by_first=[(primal, place) for place, (primal, _) in enumerate(soon)],
                  by_second=[(primal, place) for place, (primal, _) in enumerate(later)])


def _late_nodes(backward: GraphModule, of_inputs: Sequence[Node], of_weights: Sequence[Node]) -> set[Node]:
    """Return the nodes that one gradient of a parameter alone depends on, and none of an activation."""
    needed = _needed(of_inputs)
    counts = Counter(node for result in of_weights for node in _needed([result]))
    late = {node for node, count in counts.items() if node.op == "call_function" and count == 1 and node not in needed}
    for node in backward.graph.nodes:  # what a tuple holds stays with it
        if node.target is operator.getitem and node.args[0] not in late:
            late.discard(node)
    return late


def _needed(results: Any) -> set[Node]:
    found: set[Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _copy_part(source: GraphModule, graph: Graph, nodes: Collection[Node], *, arguments: Sequence[Node],
               results: Sequence[Node]) -> None:
    copied: dict[Node, Node] = {}
    for node in arguments:
        copied[node] = graph.placeholder(node.name)
        copied[node].meta = dict(node.meta)
    for node in source.graph.nodes:
        if node in nodes or node.op == "get_attr":
            copied[node] = graph.node_copy(node, lambda item: copied[item])
    graph.output(map_arg(tuple(results), lambda item: copied[item]))
