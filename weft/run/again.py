"""Stages that make some of their tensors again for the backward (``weft.plan.saving``), operator by operator.

The forward runs as ever, but whatever autograd would keep of a tensor that is made again is replaced by a note:

    an operand       which node of the stage made it
    anything else    the n-th thing that this operator keeps (its result, statistics, a mask)

When the backward asks for the first note of a bundle, the bundle's operators run once more from what was kept, and draw
the same random numbers; each value goes with the last note that wants it. So any operator can be made again, also one
that moves a tensor between the devices of a tp group: all of them meet the same notes in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.model.probe import is_random
from weft.run.random_state import RankRandom
from weft.run.split_backward import attributes_of

MARK = "weft_again"
"""Nodes with this in ``meta`` are made again."""


MOVE = "weft_move"
"""Nodes with this in ``meta`` bring a tensor to another layout."""


def mark_repeated(op_names: Mapping[Node, str], graph: Graph, ops: Collection[str]) -> None:
    """Mark the nodes of these operators, and those that take what they make apart."""
    for node in graph.nodes:
        if node.op == "call_function" and (op_names[node] in ops if node in op_names else any(
                MARK in item.meta for item in node.all_input_nodes)):
            node.meta = {**node.meta, MARK: True}


def _mark_moves(graph: Graph) -> None:
    """Mark what brings to another layout what is made again."""
    for node in graph.nodes:
        if MOVE in node.meta and MARK in node.all_input_nodes[0].meta:
            node.meta = {**node.meta, MARK: True}


@dataclass(eq=False, slots=True)
class _Call:
    """One node of the stage that is made again, or that reads something which is."""

    node: Node
    operands: tuple[Node, ...]
    """Those that are not attributes of the stage, as often as they are read."""
    run: Callable[[Sequence[Any]], Any]
    is_again: bool
    is_random: bool
    bundle: int = -1


class _Operand(NamedTuple):
    """A note of an operand."""

    node: Node
    shape: tuple[torch.Size, tuple[int, ...], int] | None
    """Size, strides and offset in its memory, where they are not those of the tensor."""


class _Inside(NamedTuple):
    """A note of something else that an operator keeps."""

    call: _Call
    number: int


class _Tape:
    """One forward: what was kept, and after a bundle has run, what it gave."""

    def __init__(self, calls: dict[Node, _Call], bundles: list[list[_Call]], random: RankRandom) -> None:
        self.calls, self.bundles, self.random = calls, bundles, random
        self.kept: dict[Node, Any] = {}
        """What is read by nodes that are made again and is not made again itself."""
        self.wants_gradient: dict[Node, bool] = {}
        self.states: dict[Node, Any] = {}
        """Of random numbers, as a node met them."""
        self.notes: Counter[Node] = Counter()
        """How many notes of an operand there are."""
        self.inside: Counter[_Call] = Counter()
        self.made: dict[Node, Any] = {}
        self.made_inside: dict[tuple[_Call, int], Tensor] = {}
        self.has_run = [False] * len(bundles)
        self.running: _Call = None  # type: ignore[assignment]
        self.values: Sequence[Any] = ()

    # ---- the forward ------------------------------------------------------------------------------------------------

    def record(self, call: _Call, values: Sequence[Any]) -> Any:
        """Return what a node gives; whatever autograd keeps of it is noted."""
        if call.is_again:
            for node, value in zip(call.operands, values, strict=True):
                if isinstance(value, Tensor):
                    self.wants_gradient[node] = value.requires_grad
                if node not in self.calls or not self.calls[node].is_again:
                    self.kept[node] = _alone(value)
            if call.is_random:
                self.states[call.node] = self.random.now()

        self.running, self.values = call, values
        try:
            with saved_tensors_hooks(self.note, self.fetch):
                return call.run(values)
        finally:
            self.values = ()

    def note(self, tensor: Tensor) -> Any:
        """Return what autograd keeps instead of a tensor while a node runs: nothing of the tensor if it is made again.

        Autograd holds on to this function, so it must not hold any tensor itself.
        """
        call, node = self.running, _owner(tensor, self.running.operands, self.values)
        if node is not None:
            if node not in self.calls or not self.calls[node].is_again:
                return tensor.detach()  # a result with its graph would keep that alive
            self.notes[node] += 1
            like = self.values[call.operands.index(node)]
            same = (like.shape, like.stride(), like.storage_offset()) == (
                tensor.shape, tensor.stride(), tensor.storage_offset())
            return _Operand(node, None if same else (tensor.shape, tensor.stride(), tensor.storage_offset()))
        if not call.is_again:
            return tensor.detach()
        self.inside[call] += 1
        return _Inside(call, self.inside[call] - 1)

    # ---- the backward -----------------------------------------------------------------------------------------------

    def fetch(self, note: Any) -> Tensor:
        """Return what a note stands for."""
        if isinstance(note, Tensor):
            return note
        if isinstance(note, _Inside):
            self.require(note.call.bundle)
            return self.made_inside.pop((note.call, note.number))
        self.require(self.calls[note.node].bundle)
        value: Tensor = self.made[note.node]
        self.notes[note.node] -= 1
        if not self.notes[note.node]:
            del self.made[note.node]
        return value if note.shape is None else value.as_strided(*note.shape)

    def require(self, bundle: int) -> None:
        """Run a bundle once."""
        if not self.has_run[bundle]:
            self.has_run[bundle] = True
            self._run(self.bundles[bundle])

    def _run(self, calls: Sequence[_Call]) -> None:
        left = Counter(node for call in calls for node in call.operands)
        for call in calls:
            values = [self.kept[node] if node in self.kept else self.made[node] for node in call.operands]
            result = self._repeat(call, values)
            del values
            if left[call.node] or self.notes[call.node]:
                self.made[call.node] = result
            del result
            for node in call.operands:
                left[node] -= 1
                if not left[node]:
                    if node in self.made and not self.notes[node]:
                        del self.made[node]
                    elif node in self.kept and not self._is_wanted(node):
                        del self.kept[node]

    def _is_wanted(self, node: Node) -> bool:
        """Return whether a bundle that is still to run reads what was kept."""
        return any(not has_run and any(node in call.operands for call in calls)
                   for has_run, calls in zip(self.has_run, self.bundles, strict=True))

    def _repeat(self, call: _Call, values: list[Any]) -> Any:
        """Return what a node gives, made again; what autograd keeps besides its operands is noted down as before."""
        found: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            if _owner(tensor, call.operands, given) is None:
                found.append(tensor.detach())

        wanted = self.inside[call]
        given = [_leaf(value, self.wants_gradient.get(node, False)) if wanted else value
                 for node, value in zip(call.operands, values, strict=True)]
        with self.random.as_it_was(self.states.pop(call.node)) if call.is_random else nullcontext():
            if not wanted:
                with torch.no_grad():
                    return _alone(call.run(given))
            with torch.enable_grad(), saved_tensors_hooks(pack, _never):
                result = call.run(given)
        assert len(found) == wanted, f"{call.node.name} keeps {len(found)} tensors, and kept {wanted} at first"
        self.made_inside.update(((call, number), tensor) for number, tensor in enumerate(found))
        return _alone(result)


def _never(note: Any) -> Tensor:
    raise AssertionError("the backward goes through the first forward")


def _owner(tensor: Tensor, nodes: Sequence[Node], values: Sequence[Any]) -> Node | None:
    """Return the operand in whose memory a tensor lies."""
    memory = tensor.untyped_storage()._cdata
    return next((node for node, value in zip(nodes, values, strict=True) if isinstance(value, Tensor)
                 and value.dtype == tensor.dtype and value.untyped_storage()._cdata == memory), None)


def _alone(value: Any) -> Any:
    """Return a value without the graph behind it."""
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(map(_alone, value)) if type(value) in (tuple, list) else value


def _leaf(value: Any, wants_gradient: bool) -> Any:
    return value.detach().requires_grad_() if wants_gradient and isinstance(value, Tensor) else value


class Repeating:
    """A stage's forward that keeps only what is not made again."""

    def __init__(self, module: GraphModule, random: RankRandom, *, draws: bool) -> None:
        """``draws``: any node may draw random numbers, whatever it looks like."""
        self.random, self.draws, self.calls = random, draws, dict[Node, _Call]()
        self.bundles: list[list[_Call]] = []
        self.tape: _Tape | None = None
        _mark_moves(module.graph)
        graph, new = Graph(), dict[Node, Node]()
        for node in module.graph.nodes:
            self._copy(node, graph, new, module)
        self._bundle()
        self.module = GraphModule(attributes_of(module), graph, class_name="RepeatingStage")

    def forward(self, call: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        """Return the module's forward with a tape of its own each time; ``call`` runs the module."""
        def run(*arguments: Any) -> tuple[Tensor, ...]:
            self.tape = _Tape(self.calls, self.bundles, self.random) if torch.is_grad_enabled() else None
            try:
                return call(*arguments)
            finally:
                self.tape = None

        return run

    def _copy(self, node: Node, graph: Graph, new: dict[Node, Node], module: GraphModule) -> None:
        is_again = MARK in node.meta
        reads = any(MARK in item.meta for item in node.all_input_nodes)
        if node.op != "call_function" or not (is_again or reads):
            new[node] = graph.node_copy(node, lambda item: new[item])
            return
        operands = tuple(_operands(node))
        known = self.calls[node] = _Call(node, operands, _runner(node, operands, attributes_of(module)), is_again,
                                         is_random=self.draws or is_random(node))

        def call(*values: Any) -> Any:
            return known.run(values) if self.tape is None else self.tape.record(known, values)

        new[node] = graph.call_function(call, tuple(new[item] for item in operands))
        new[node].meta = node.meta

    def _bundle(self) -> None:
        """Number the bundles: nodes that are made again and read one another."""
        group = {node: node for node, call in self.calls.items() if call.is_again}

        def find(node: Node) -> Node:
            while group[node] is not node:
                group[node] = group[group[node]]
                node = group[node]
            return node

        for node in group:
            for item in self.calls[node].operands:
                if item in group:
                    group[find(node)] = find(item)
        numbers: dict[Node, int] = {}
        for node in group:
            number = numbers.setdefault(find(node), len(numbers))
            if number == len(self.bundles):
                self.bundles.append([])
            self.calls[node].bundle = number
            self.bundles[number].append(self.calls[node])


def _operands(node: Node) -> Iterator[Node]:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), lambda item: found.append(item))
    yield from (item for item in dict.fromkeys(found) if item.op != "get_attr")


def _runner(node: Node, operands: Sequence[Node], attributes: dict[str, Any]) -> Callable[[Sequence[Any]], Any]:
    """Return what calls a node's function with these operands; parameters and buffers are at hand."""
    place = {item: number for number, item in enumerate(operands)}
    target: Any = node.target
    plain = all(isinstance(item, Node) or not _holds_node(item) for item in node.args) and not any(
        _holds_node(item) for item in node.kwargs.values())
    if not plain:
        def general(values: Sequence[Any]) -> Any:
            args, kwargs = map_arg((node.args, node.kwargs), lambda item: (
                attributes[str(item.target)] if item.op == "get_attr" else values[place[item]]))
            return target(*args, **kwargs)

        return general
    kwargs = dict(node.kwargs)
    slots = [(place[item], None) if isinstance(item, Node) and item in place else
             (-1, attributes[str(item.target)] if isinstance(item, Node) else item) for item in node.args]

    def run(values: Sequence[Any]) -> Any:
        return target(*(values[number] if number >= 0 else fixed for number, fixed in slots), **kwargs)

    return run


def _holds_node(value: Any) -> bool:
    found: list[Node] = []
    map_arg(value, lambda item: found.append(item))
    return bool(found)
