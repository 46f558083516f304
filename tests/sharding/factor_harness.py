"""The numeric check of factor rules: split a call in every way its factors allow, run the parts, combine, compare.

``check_call(torch.ops.aten.mm.default, a, b, mesh=(3,))`` finds the call's factors and, for every valid strategy on
the mesh, hands each rank its parts of the inputs, runs ``run_local`` there, puts the local results together as the
output layouts say and compares with the whole result; then the same for gradients, with random cotangents. Ranks are
run one after the other, or in threads with a fake group where a special factor is split. ``op=`` gives other factors
than the rule's, so that tests can see a wrong rule fail.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from weft.sharding.factor_rules import factors_of
from weft.sharding.factors import (
    NOT_SPLIT,
    OpFactors,
    Strategy,
    input_gradient_layout,
    input_layout,
    is_valid,
    linear_choice,
    output_gradient_layout,
    output_layout,
)
from weft.sharding.local_ops import LocalCall, run_local
from weft.sharding.tensor_layout import SUM, WHOLE, Layout, dim_ranges, local_shape

TOLERANCE = 1e-10
MESHES = ((2,), (3,), (4,), (2, 2))
GROUP_TIMEOUT_S = 20.0

Coordinates = tuple[int, ...]
Parts = dict[Coordinates, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What ``check_call`` went through."""

    op: OpFactors
    strategies: tuple[Strategy, ...]
    """Those checked: all valid ones that use each axis of the mesh."""

    @property
    def factors(self) -> frozenset[str]:
        """Return the names of the call's factors."""
        return frozenset(factor.name for factor in self.op.factors)

    @property
    def split(self) -> frozenset[str]:
        """Return the names of the factors that some checked strategy splits."""
        return frozenset(self.op.factors[choice].name for strategy in self.strategies for choice in strategy
                         if choice >= 0)

    @property
    def num_linear(self) -> int:
        """Return how many checked strategies take a sum as input."""
        return sum(any(choice < NOT_SPLIT for choice in strategy) for strategy in self.strategies)


def check_call(target: Any, *args: Any, mesh: tuple[int, ...] = (2,), op: OpFactors | None = None,
               no_gradient: Sequence[Tensor] = (), tolerance: float = TOLERANCE, **kwargs: Any) -> Checked:
    """Return the strategies that were checked on a mesh; raises AssertionError naming the first that is wrong.

    Floating-point tensors of ``args`` and ``kwargs`` get gradients, except those in ``no_gradient``.
    """
    node, values = call_node(target, args, kwargs)
    found = factors_of(node) if op is None else op
    assert found is not None, f"{target} has no rule for this call"
    frozen = {id(tensor) for tensor in no_gradient}
    wanted = [value.is_floating_point() and id(value) not in frozen for value in values]
    case = _Case(node, found, mesh, values, wanted)
    check_structure(found, [value.shape for value in values], [value.shape for value in case.results])
    strategies = tuple(valid_strategies(found, mesh))
    for strategy in strategies:
        try:
            with _one_thread():
                case.check(strategy, tolerance)
        except Exception as error:
            raise AssertionError(f"{target} on mesh {mesh} split by {describe(found, strategy)}: {error}") from error
    return Checked(op=found, strategies=strategies)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let small operators not wait for threads of torch that share the cores with the ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_meshes(target: Any, *args: Any, meshes: Iterable[tuple[int, ...]] = MESHES, **kwargs: Any) -> Checked:
    """Return all strategies checked on several meshes together."""
    checked = [check_call(target, *args, mesh=mesh, **kwargs) for mesh in meshes]
    return Checked(op=checked[0].op, strategies=tuple(itertools.chain(*(item.strategies for item in checked))))


def call_node(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Node, list[Tensor]]:
    """Return an fx call of these arguments, with shapes in ``meta``, and the tensors in the order of its inputs."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    tensors: dict[fx.Node, Tensor] = {}

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in nodes:
            nodes[id(value)] = graph.placeholder(f"input{len(nodes)}")
            nodes[id(value)].meta["val"] = value.detach().to("meta")
            tensors[nodes[id(value)]] = value
        return nodes[id(value)]

    node_args, node_kwargs = pytree.tree_map(place, args), pytree.tree_map(place, kwargs)
    node = graph.call_function(target, node_args, node_kwargs)
    with torch.no_grad():
        node.meta["val"] = pytree.tree_map_only(Tensor, lambda value: value.to("meta"), target(*args, **kwargs))
    return node, [tensors[item] for item in node.all_input_nodes]


def check_structure(op: OpFactors, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
    """Check that the factors describe tensors of these shapes."""
    for what, dims_of, shapes in (("input", op.inputs, inputs), ("output", op.outputs, outputs)):
        assert len(dims_of) == len(shapes), f"{len(dims_of)} {what}s described, there are {len(shapes)}"
        for position, (dims, shape) in enumerate(zip(dims_of, shapes, strict=True)):
            assert len(dims) == len(shape), f"{what} {position} of shape {tuple(shape)} is described as {dims}"
            for dim, size in zip(dims, shape, strict=True):
                if any(op.factors[item].ragged for item in dim):
                    continue  # rows of experts: as many as values say
                assert not dim or math.prod(op.factors[item].size for item in dim) == size, \
                    f"{what} {position}: factors {dim} do not make {size}"
    names = [factor.name for factor in op.factors]
    assert len(set(names)) == len(names), f"names of factors repeat: {names}"


def valid_strategies(op: OpFactors, mesh: tuple[int, ...]) -> Iterable[Strategy]:
    """Yield the valid strategies on a mesh that use each of its axes; others are those of a mesh without the axis."""
    choices = [*range(len(op.factors)), *(linear_choice(index) for index in range(len(op.linear)))]
    for strategy in itertools.product(choices, repeat=len(mesh)):
        if is_valid(op, strategy, mesh):
            yield strategy


def describe(op: OpFactors, strategy: Strategy) -> str:
    """Return a strategy for people."""
    return ", ".join(op.factors[choice].name if choice >= 0 else "-" if choice == NOT_SPLIT else
                     f"sum of inputs {op.linear[-2 - choice]}" for choice in strategy)


class _Case:
    """A call with its inputs, cotangents, results and gradients in one piece."""

    def __init__(self, node: fx.Node, op: OpFactors, mesh: tuple[int, ...], values: list[Tensor],
                 wanted: list[bool]) -> None:
        self.node, self.op, self.mesh, self.wanted = node, op, mesh, wanted
        self.values = [value.detach() for value in values]
        leaves = self._leaves(self.values)
        results = _tensors(node.target(*self._args(leaves)[0], **self._args(leaves)[1]))  # type: ignore[operator]
        self.results = [result.detach() for result in results]
        generator = torch.Generator().manual_seed(0)
        self.cotangents = [torch.randn(result.shape, dtype=result.dtype, generator=generator)
                           if result.is_floating_point() else None for result in self.results]
        self.gradients = self._backward(results, self.cotangents, leaves)

    def check(self, strategy: Strategy, tolerance: float) -> None:
        """Raise if the strategy's parts do not make the whole."""
        mesh, op = self.mesh, self.op
        inputs = [distribute(value, input_layout(op, strategy, mesh, position), mesh)
                  for position, value in enumerate(self.values)]
        cotangents = [None if value is None else
                      distribute(value, output_gradient_layout(op, strategy, mesh, position), mesh)
                      for position, value in enumerate(self.cotangents)]
        fabric = FakeFabric(mesh)

        def on_rank(at: Coordinates) -> tuple[list[Tensor], list[Tensor | None]]:
            leaves = self._leaves([parts[at] for parts in inputs])
            args, kwargs = self._args(leaves)
            call = LocalCall(target=self.node.target, args=args, kwargs=kwargs, op=op, strategy=strategy, mesh=mesh,
                             coordinates=at, group=lambda axes: fabric.group(at, axes))
            results = _tensors(run_local(call, [tuple(result.shape) for result in self.results]))
            given = [None if parts is None else parts[at] for parts in cotangents]
            return [result.detach() for result in results], self._backward(results, given, leaves)

        is_special = any(choice >= 0 and op.factors[choice].special for choice in strategy)
        done = fabric.run(on_rank) if is_special else {at: on_rank(at) for at in fabric.ranks}
        for position, whole in enumerate(self.results):
            parts = {at: results[position] for at, (results, _) in done.items()}
            compare(whole, parts, output_layout(op, strategy, mesh, position), mesh, f"result {position}", tolerance)
        for position, gradient in enumerate(self.gradients):
            if gradient is not None:
                parts = {at: found for at, (_, gradients) in done.items() if (found := gradients[position]) is not None}
                layout = input_gradient_layout(op, strategy, mesh, position)
                compare(gradient, parts, layout, mesh, f"gradient of input {position}", tolerance)

    def _leaves(self, values: list[Tensor]) -> list[Tensor]:
        return [value.detach().clone().requires_grad_(wanted)
                for value, wanted in zip(values, self.wanted, strict=True)]

    def _args(self, leaves: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_node = dict(zip(self.node.all_input_nodes, leaves, strict=True))
        return (fx.node.map_arg(self.node.args, by_node.__getitem__),
                dict(fx.node.map_arg(self.node.kwargs, by_node.__getitem__)))

    def _backward(self, results: list[Tensor], cotangents: Sequence[Tensor | None],
                  leaves: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the leaves, zeros where none flows, None where none is wanted."""
        pairs = [(result, given) for result, given in zip(results, cotangents, strict=True)
                 if given is not None and result.requires_grad]
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad([result for result, _ in pairs], asked, [given for _, given in pairs],
                                         allow_unused=True) if pairs and asked else [None] * len(asked))
        result: list[Tensor | None] = []
        for leaf in leaves:
            gradient = next(found) if leaf.requires_grad else None
            result.append(torch.zeros_like(leaf) if leaf.requires_grad and gradient is None else gradient)
        return result


def _tensors(result: Any) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]


# ---- layouts --------------------------------------------------------------------------------------------------------


def distribute(whole: Tensor, layout: Layout, mesh: tuple[int, ...]) -> Parts:
    """Return what each rank holds of a tensor; where the layout is a sum, of random summands."""
    sums = [axis for axis, placement in enumerate(layout) if placement == SUM]
    summands: Parts = {}
    rest = whole
    for at in itertools.product(*(range(mesh[axis]) for axis in sums)):
        is_last = all(index == mesh[axis] - 1 for index, axis in zip(at, sums, strict=True))
        summands[at] = rest if is_last else torch.randn(whole.shape, dtype=torch.float64).to(whole.dtype)
        rest = rest if is_last else rest - summands[at]
    return {at: summands[tuple(at[axis] for axis in sums)][_index(whole.shape, layout, mesh, at)].clone()
            for at in _ranks(mesh)}


def compare(whole: Tensor, parts: Parts, layout: Layout, mesh: tuple[int, ...], what: str,
            tolerance: float = TOLERANCE) -> None:
    """Raise if the parts do not make the whole by the layout."""
    combined = torch.zeros_like(whole)
    for at in _ranks(mesh):
        assert at in parts, f"{what}: rank {at} has none"
        expected = local_shape(whole.shape, layout, mesh, at)
        assert tuple(parts[at].shape) == expected, f"{what}: rank {at} has {tuple(parts[at].shape)}, not {expected}"
        first = tuple(0 if placement == WHOLE else index for index, placement in zip(at, layout, strict=True))
        if at != first:
            _assert_close(parts[at], parts[first], f"{what}: ranks {at} and {first} differ", tolerance)
        else:
            index = _index(whole.shape, layout, mesh, at)
            combined[index] = parts[at] if SUM not in layout else combined[index] + parts[at]
    _assert_close(combined, whole, f"{what} in layout {'.'.join(map(str, layout))}", tolerance)


def _assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    if found.dtype == expected.dtype and torch.allclose(found, expected, tolerance, tolerance, equal_nan=True):
        return  # the quick way
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True,
                               msg=lambda text: f"{what}: {text}")


def _index(shape: Sequence[int], layout: Layout, mesh: tuple[int, ...], at: Coordinates) -> tuple[Tensor, ...]:
    """Return the index of what the rank at these coordinates holds."""
    entries = [torch.cat([torch.arange(start, stop) for start, stop in ranges])
               for ranges in dim_ranges(shape, layout, mesh, at)]
    return tuple(item.reshape([-1 if dim == place else 1 for dim in range(len(entries))])
                 for place, item in enumerate(entries))


def _ranks(mesh: tuple[int, ...]) -> list[Coordinates]:
    return list(itertools.product(*map(range, mesh)))


# ---- ranks in threads -----------------------------------------------------------------------------------------------


class FakeFabric:
    """The ranks of a mesh as threads of this process."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.mesh, self.ranks = mesh, _ranks(mesh)
        self._lock = threading.Lock()
        self._groups: dict[tuple[Coordinates, Coordinates], tuple[threading.Barrier, list[Any]]] = {}

    def run(self, on_rank: Callable[[Coordinates], Any]) -> dict[Coordinates, Any]:
        """Return what every rank returns; a rank that fails lets the others go."""
        def guarded(at: Coordinates) -> Any:
            try:
                return on_rank(at)
            except BaseException:
                for barrier, _ in self._groups.values():
                    barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            futures = {at: pool.submit(guarded, at) for at in self.ranks}
        errors = [error for future in futures.values() if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return {at: future.result() for at, future in futures.items()}

    def group(self, at: Coordinates, axes: tuple[int, ...]) -> FakeGroup:
        """Return the group of the rank at these coordinates along some axes."""
        others = tuple(-1 if axis in axes else index for axis, index in enumerate(at))
        size = math.prod(self.mesh[axis] for axis in axes)
        with self._lock:
            barrier, slots = self._groups.setdefault((axes, others), (threading.Barrier(size), [None] * size))
        rank = 0
        for axis in axes:
            rank = rank * self.mesh[axis] + at[axis]
        return FakeGroup(size, rank, barrier, slots)


class FakeGroup:
    """A ``weft.sharding.local_ops.Group`` of threads."""

    def __init__(self, size: int, rank: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.size, self.rank, self._barrier, self._slots = size, rank, barrier, slots

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return what every rank has for this one."""
        self._slots[self.rank] = [part.detach().clone() for part in parts]
        self._barrier.wait(GROUP_TIMEOUT_S)
        found = [slots[self.rank] for slots in self._slots]
        self._barrier.wait(GROUP_TIMEOUT_S)
        assert [tuple(part.shape) for part in found] == [tuple(shape) for shape in shapes], "parts of other shapes"
        return found

    def all_reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Return the sum or maximum over the group."""
        self._slots[self.rank] = tensor.detach().clone()
        self._barrier.wait(GROUP_TIMEOUT_S)
        assert len({tuple(item.shape) for item in self._slots}) == 1, "ranks reduce tensors of different shapes"
        stacked = torch.stack(self._slots)
        self._barrier.wait(GROUP_TIMEOUT_S)
        return stacked.amax(0) if how == "max" else stacked.sum(0)

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what waits for the tensor of the rank before."""
        self._slots[self.rank] = tensor.detach().clone()
        self._barrier.wait(GROUP_TIMEOUT_S)
        found: Tensor = self._slots[(self.rank - 1) % self.size]
        self._barrier.wait(GROUP_TIMEOUT_S)
        return lambda: found
