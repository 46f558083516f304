"""DTensor's strategies for a call, from its registry: an oracle for factor rules, private to torch and read only here.

``Oracle.strategies`` puts every placement on every input, on a mesh of one axis without any process behind it, and asks
DTensor's propagator what comes out. A combination that DTensor takes as it is, without moving an input first, is a
strategy. Placements are text as in ``weft.sharding.tensor_layout``; kinds that are not there, as DTensor writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

Combination = tuple[tuple[str, ...], tuple[str, ...]]
"""The placements of inputs, and those of results."""


class OracleMissingError(Exception):
    """This version of torch has no such internals."""


class Oracle:
    """DTensor's registry on a mesh of one axis."""

    def __init__(self, num_devices: int) -> None:
        try:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
            from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
            from torch.distributed.tensor._op_schema import OpSchema
        except ImportError as error:
            raise OracleMissingError(f"torch {torch.__version__}: {error}") from error
        self._mesh = init_device_mesh("cpu", (num_devices,))
        self._spec, self._meta, self._schema = DTensorSpec, TensorMeta, OpSchema
        self._replicate, self._partial, self._shard = Replicate, Partial, Shard
        self._propagator = DTensor._op_dispatcher.sharding_propagator
        tables = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules", "op_to_schema_info")
        missing = [name for name in tables if not hasattr(self._propagator, name)]
        if missing:
            raise OracleMissingError(f"torch {torch.__version__}: the propagator has no {', '.join(missing)}")

    def operators(self) -> frozenset[str]:
        """Return the names of all operators that DTensor knows."""
        found = self._propagator
        return frozenset(str(target) for table in (found.op_strategy_funcs, found.op_single_dim_strategy_funcs,
                                                   found.op_to_rules) for target in table)

    def strategies(self, node: fx.Node, values: list[Tensor]) -> set[Combination]:
        """Return DTensor's strategies for a call of these tensors, but the one that splits nothing."""
        nodes = list(node.all_input_nodes)
        kinds = ["R", "P"] if len(values) < 4 else ["R"]  # sums of many tensors are too many combinations to try
        choices = [[*kinds, *(f"S{dim}" for dim in range(value.dim()))] for value in values]
        found = set()
        for inputs in itertools.product(*choices):
            if set(inputs) == {"R"}:
                continue
            outputs = self._outputs(node, dict(zip(nodes, map(self._spec_of, values, inputs), strict=True)))
            if outputs is not None:
                found.add((inputs, outputs))
        return found

    def _outputs(self, node: fx.Node, specs: dict[fx.Node, Any]) -> tuple[str, ...] | None:
        """Return the placements of results, None if DTensor would move an input first, or refuses."""
        info = self._propagator.op_to_schema_info.get(node.target)
        if info is None:
            info = getattr(self._propagator, "op_to_schema_info_for_single_dim_strategy", {}).get(node.target)
        args = fx.node.map_arg(node.args, specs.__getitem__)
        kwargs = dict(fx.node.map_arg(node.kwargs, specs.__getitem__))
        schema = self._schema(node.target, _plain(args), _plain(kwargs), schema_info=info)
        try:
            sharding = self._propagator.propagate_op_sharding_non_cached(schema)
        except (RuntimeError, ValueError, NotImplementedError, AssertionError, LookupError):
            return None
        moved = sharding.redistribute_schema
        if moved is not None and [spec.placements for spec in moved.args_spec] != \
                [spec.placements for spec in schema.args_spec]:
            return None
        results = sharding.output_spec
        results = list(results) if isinstance(results, list | tuple) else [results]
        return tuple(self._text(spec.placements[0]) for spec in results if spec is not None)

    def _spec_of(self, value: Tensor, placement: str) -> Any:
        how = {"R": self._replicate, "P": self._partial}.get(placement)
        found = self._shard(int(placement[1:])) if how is None else how()
        return self._spec(self._mesh, (found,), tensor_meta=self._meta(value.shape, value.stride(), value.dtype))

    def _text(self, placement: Any) -> str:
        if type(placement) is self._shard:
            return f"S{placement.dim}"
        if type(placement) is self._partial and placement.reduce_op == "sum":
            return "P"
        if hasattr(placement, "split_factor"):
            return f"S{placement.dim}/{placement.split_factor}"
        return "R" if type(placement) is self._replicate else str(placement)


def _plain(value: Any) -> Any:
    """Return arguments with fx's immutable lists as plain ones, which DTensor's type checks want."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return [_plain(item) for item in value] if isinstance(value, list) else value


@contextmanager
def fake_world(num_devices: int) -> Iterator[None]:
    """Be rank 0 of some processes that do not exist; communication does nothing."""
    try:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise OracleMissingError(f"torch {torch.__version__}: {error}") from error
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_devices)
    try:
        yield
    finally:
        dist.destroy_process_group()
