"""From a stage's graph to the part of it that one device of a replica runs, with exchanges where layouts differ.

Every operator is split as the plan says (``weft.sharding.factors``); the device calls it on its parts
(``weft.sharding.local_ops``). From the factors follow the layout in which an operator gives its results and wants their
gradients, and that in which it wants its operands and gives their gradients. Between the two a tensor takes this way:

    producer's layout -> common layout -> layout of a reader     (the gradient comes back the same way)

Every change of layout is one node of the graph (``weft.run.mesh``), made once for all readers that want the same.
The common layout is named by the plan, or else chosen here so that nothing is exchanged twice.

Inputs and outputs of the stage are whole on all devices, with their gradients. Parameters are there as stored; where
they are stored in parts but wanted whole, each forward gathers them, and what the backward needs of them is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.base.errors import PlanError
from weft.model.probe import is_random
from weft.plan.plan import Sharding
from weft.plan.sharding import SplitOp, TensorLayout, parse_layout, parse_strategy, whole_layout
from weft.run.again import MOVE
from weft.run.mesh import Change, ReplicaMesh, Reshard
from weft.run.random_state import RankRandom
from weft.run.split_backward import attributes_of
from weft.run.stage import StageModule
from weft.sharding.expert_rows import Ends, Rows, find_rows
from weft.sharding.factor_rules import factors_of
from weft.sharding.factors import NOT_SPLIT, split_counts
from weft.sharding.local_ops import LocalCall, is_special, plain_call, run_local
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, Placement, local_shape


def shard_stage(stage: StageModule, sharding: Sharding, mesh: ReplicaMesh, *, parameters: Mapping[str, TensorLayout],
                random: RankRandom) -> StageModule:
    """Return the stage as one device of a replica runs it.

    ``parameters`` says how the parameters lie that the stage was built with, which are the device's parts already;
    those not named are whole. Operators draw random numbers from the streams of ``random``. Raise ``PlanError`` if an
    operator cannot be split as the plan says.
    """
    layouts = _Layouts(stage, sharding, mesh, parameters)
    builder = _Builder(stage, layouts, mesh, random)
    graph = builder.build()
    return replace(stage, module=GraphModule(attributes_of(stage.module), graph, class_name="Stage"), op_names={},
                   tensor_names={})


# ---- layouts --------------------------------------------------------------------------------------------------------


class _Layouts:
    """The layouts of a stage's tensors where they are made, where they are read, and in between."""

    def __init__(self, stage: StageModule, sharding: Sharding, mesh: ReplicaMesh,
                 parameters: Mapping[str, TensorLayout]) -> None:
        self.stage, self.mesh = stage, mesh
        self.whole = whole_layout(len(mesh.sizes))
        self.parameters = parameters
        self.splits: dict[Node, SplitOp] = {}
        self.differentiable: set[Node] = set()
        for node in stage.module.graph.nodes:
            if self._needs_gradient(node):
                self.differentiable.add(node)
            name = stage.op_names.get(node, "")
            words = sharding.ops.get(name, ())
            if any(words):
                self.splits[node] = parse_strategy(factors_of(node), words, mesh.sizes, name=name)
        self.rows = find_rows(stage.module.graph.nodes, self._divides_experts, factors_of)
        self.made: dict[Node, TensorLayout] = {}
        self.common: dict[Node, TensorLayout] = {}
        for node in stage.module.graph.nodes:
            if node.op != "output":
                self.made[node] = self._made(node)
                self.common[node] = self._common(node, sharding)

    def _divides_experts(self, node: Node) -> bool:
        found = self.splits.get(node)
        return found is not None and any(choice >= 0 and found.op.factors[choice].ragged for choice in found.strategy)

    def _needs_gradient(self, node: Node) -> bool:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
            return False
        if node.op == "get_attr":
            return bool(getattr(self.stage.module, str(node.target)).requires_grad)
        return node.op == "placeholder" or any(item in self.differentiable for item in node.all_input_nodes)

    def _made(self, node: Node) -> TensorLayout:
        """Return the layout of a value where it is made, and that in which its gradient is wanted there."""
        if node.op == "get_attr":
            return self._of_value(node, self.parameters.get(self.stage.tensor_names[node], self.whole))
        source, position = node, 0
        if node.target is operator.getitem:
            source, position = node.args
        found = self.splits.get(source)
        if found is None:
            return self.whole
        return self._of_value(node, found.made(position))

    def wanted(self, reader: Node, node: Node) -> TensorLayout:
        """Return the layout in which a reader wants a value, and that in which its gradient comes out there."""
        found = self.splits.get(reader)
        if found is None:
            return self.whole
        return self._of_value(node, found.wanted(reader.all_input_nodes.index(node)))

    def _of_value(self, node: Node, layout: TensorLayout) -> TensorLayout:
        """Return the layout, without regard to the gradient where there is none."""
        return layout if node in self.differentiable else TensorLayout(layout.value, self.whole.gradient)

    def _common(self, node: Node, sharding: Sharding) -> TensorLayout:
        """Return the layout in which all readers find a tensor."""
        made, name = self.made[node], self.stage.tensor_names.get(node, "")
        if node.op == "call_function" and name in sharding.tensors:
            return self._of_value(node, parse_layout(sharding.tensors[name]))
        readers = [self.wanted(reader, node) for reader in node.users if reader.target is not operator.getitem]
        if not readers:
            return made
        values = zip(*(item.value for item in readers), strict=True)
        value = tuple(_agreed(items, WHOLE if own == SUM else own)
                      for items, own in zip(values, made.value, strict=True))
        gradients = zip(*(item.gradient for item in readers), strict=True)
        gradient = tuple(_agreed(items, own if own.is_split else SUM if SUM in items else WHOLE)
                         for items, own in zip(gradients, value, strict=True))
        return TensorLayout(value, gradient)


def _agreed(items: Sequence[Placement], otherwise: Placement) -> Placement:
    return items[0] if len(set(items)) == 1 else otherwise


# ---- the device's graph ---------------------------------------------------------------------------------------------


class _Builder:
    """Writes the graph of one device."""

    def __init__(self, stage: StageModule, layouts: _Layouts, mesh: ReplicaMesh, random: RankRandom) -> None:
        self.stage, self.layouts, self.mesh, self.random = stage, layouts, mesh, random
        self.graph = Graph()
        self.local: dict[Node, Node] = {}
        self.changed: dict[tuple[Node, TensorLayout], Node] = {}
        self.ends: dict[Node, Node] = {}
        """By sort: where the experts' rows end."""

    def build(self) -> Graph:
        """Return the graph."""
        for node in self.stage.module.graph.nodes:
            if node.op == "output":
                self.graph.output(map_arg(node.args[0], lambda item: self._read(item, self.layouts.whole)))
            elif node.target is operator.getitem:
                self.local[node] = self._noted(node, self.graph.node_copy(node, lambda item: self.local[item]))
            else:
                found = self.layouts.splits.get(node)
                new = self._split(node, found) if found is not None else self.graph.node_copy(
                    node, lambda item: self._read(item, self.layouts.whole))
                if node.op == "call_function" and is_random(node):
                    new.target = self.random.drawing(new.target, self._stream(() if found is None else found.strategy))
                self.local[node] = self._noted(node, new)
        self.graph.eliminate_dead_code()
        return self.graph

    def _stream(self, strategy: Sequence[int]) -> str:
        """Return the stream of the devices that run the same part of an operator as this one."""
        places = [f"{axis}={self.mesh.coordinates[axis]}" for axis, choice in enumerate(strategy)
                  if choice != NOT_SPLIT]
        return ",".join(["team" + "-".join(map(str, self.mesh.ranks)), *places])  # so checkpoints name a tp group

    def _noted(self, node: Node, new: Node) -> Node:
        """Return the new node with the shape that its value has on this device."""
        value, layout = node.meta.get("val"), self.layouts.made[node].value
        if isinstance(value, Tensor):
            new.meta = {**node.meta, "val": self._like(value, layout)}
        else:
            new.meta = {**node.meta, **new.meta}
        return new

    def _like(self, value: Tensor, layout: Layout) -> Tensor:
        shape = local_shape(tuple(value.shape), layout, self.mesh.sizes, self.mesh.coordinates)
        return value if shape == tuple(value.shape) else torch.empty(shape, dtype=value.dtype, device="meta")

    def _split(self, node: Node, found: SplitOp) -> Node:
        def read(item: Node) -> Node:
            return self._read(item, self.layouts.wanted(node, item))

        if all(choice == NOT_SPLIT for choice in found.strategy):
            return self.graph.node_copy(node, read)
        args, kwargs = map_arg(node.args, read), map_arg(node.kwargs, read)
        call = LocalCall(target=node.target, args=args, kwargs=kwargs, op=found.op, strategy=found.strategy,
                         mesh=self.mesh.sizes, coordinates=self.mesh.coordinates, group=self.mesh.group)
        made = node.meta["val"]
        shapes = [tuple(item.shape) for item in (made if isinstance(made, tuple | list) else (made,))]
        if rows := self._split_rows(node, found):
            ends = self._ends(next(iter(rows.values())))
            return self.graph.call_function(_by_rows(call, shapes, tuple(rows)), (ends, *args), kwargs)
        if is_special(found.op, found.strategy):
            return self.graph.call_function(_special(call, shapes), args, kwargs)
        target, args = plain_call(call, shapes)
        return self.graph.call_function(target, args, kwargs)

    def _split_rows(self, node: Node, found: SplitOp) -> dict[int, Rows]:
        """Return the factors that are split and are rows of experts."""
        split = split_counts(found.op, found.strategy, self.mesh.sizes) or {}
        rows: dict[int, Rows] = {}
        places: dict[int, list[Node]] = {}
        for position, item in enumerate(node.all_input_nodes):
            for dim, factors in enumerate(found.op.inputs[position]):
                own = self.layouts.rows.get(item)
                for factor in factors:
                    if factor in split and not found.op.factors[factor].ragged:
                        if own is not None and own.dim == dim:
                            rows[factor] = own
                        else:
                            places.setdefault(factor, []).append(item)
        for factor in rows.keys() & places.keys():
            raise PlanError(f"sharding.ops.{self.stage.op_names.get(node, node.name)}: experts' rows are divided with "
                            f"{places[factor][0].name!r}, which has other rows: leave this operator whole")
        return rows

    def _ends(self, rows: Rows) -> Node:
        """Return the node that finds where the experts' rows end."""
        if rows.sort not in self.ends:
            values = next(user for user in rows.sort.users if user.args[1] == 0)  # a sort is done by all devices
            self.ends[rows.sort] = self.graph.call_function(_find_ends(rows.num_experts), (self.local[values],))
        return self.ends[rows.sort]

    def _read(self, node: Node, wanted: TensorLayout) -> Node:
        """Return the node's value in the layout that a reader wants."""
        if node not in self.layouts.differentiable:
            wanted = TensorLayout(wanted.value, self.layouts.whole.gradient)
        common = self._change(node, self.layouts.made[node], self.layouts.common[node])
        return common if wanted == self.layouts.common[node] else self._change(node, self.layouts.common[node], wanted)

    def _change(self, node: Node, before: TensorLayout, after: TensorLayout) -> Node:
        if before == after:
            return self.local[node] if before == self.layouts.made[node] else self.changed[node, before]
        if (node, after) not in self.changed:
            source = self.local[node] if before == self.layouts.made[node] else self.changed[node, before]
            shape = tuple(node.meta["val"].shape)
            rows, is_differentiable = self.layouts.rows.get(node), node in self.layouts.differentiable
            value = Change(self.mesh, shape, before.value, after.value, rows=rows)
            gradient = Change(self.mesh, shape, after.gradient, before.gradient, rows=rows)
            if rows is None:
                new = self.graph.call_function(_reshard(value, gradient, is_differentiable), (source,))
            else:
                made = _reshard_rows(value, gradient, is_differentiable)
                new = self.graph.call_function(made, (source, self._ends(rows)))
            new.meta |= {"val": self._like(node.meta["val"], after.value), MOVE: True}
            self.changed[node, after] = new
        return self.changed[node, after]


def _reshard(value: Change, gradient: Change, is_differentiable: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that changes the layout of a tensor."""
    def reshard(tensor: Tensor) -> Tensor:
        result: Tensor = Reshard.apply(tensor, value, gradient) if is_differentiable else value(tensor)
        return result

    return reshard


def _reshard_rows(value: Change, gradient: Change, is_differentiable: bool) -> Callable[[Tensor, Ends], Tensor]:
    """Return a function that changes the layout of a tensor with rows of experts, which end somewhere."""
    def reshard(tensor: Tensor, ends: Ends) -> Tensor:
        return _reshard(value.cut_at(ends), gradient.cut_at(ends), is_differentiable)(tensor)

    return reshard


def _find_ends(num_experts: int) -> Callable[[Tensor], Ends]:
    """Return a function from the sorted numbers of experts to where the rows of each end; it waits for the device."""
    def find_ends(ids: Tensor) -> Ends:
        numbers = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
        return [0, *torch.searchsorted(ids, numbers, right=True).tolist()]

    return find_ends


def _by_rows(call: LocalCall, shapes: Sequence[tuple[int, ...]], factors: Sequence[int]) -> Callable[..., Any]:
    """Return a function that does what one device does for an operator of which it has some experts' rows."""
    def local_part(ends: Ends, *args: Any, **kwargs: Any) -> Any:
        here = replace(call, args=args, kwargs=kwargs, row_ends=dict.fromkeys(factors, ends))
        return run_local(here, shapes)

    return local_part


def _special(call: LocalCall, shapes: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
    """Return a function that does what one device does for an operator whose parts are not the operator itself."""
    def local_part(*args: Any, **kwargs: Any) -> Any:
        return run_local(replace(call, args=args, kwargs=kwargs), shapes)

    return local_part
