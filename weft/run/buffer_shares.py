"""Buffers that the forward changes, such as a batch norm's statistics, kept alike by all ranks that hold them.

Each replica changes its copy by the samples it sees. After a step all take over those of the first of them, as
PyTorch's data parallelism does; so a checkpoint has one value for each, and a resumed run goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from weft.plan.program import Program
from weft.run.transport import Transport


def buffer_holders(program: Program, updates: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that change each buffer; ``updates`` names the tensor that is its new value."""
    found: dict[str, tuple[int, ...]] = {}
    for path, tensor in updates.items():
        op = int(program.graph.tensor_producer[program.graph.tensor_index[tensor]])
        ranks = {rank for item in program.instances if op in program.stage_ops[item.stage] for rank in item.ranks}
        found[path] = tuple(sorted(ranks))
    return found


def buffer_groups(program: Program, updates: Mapping[str, str]) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that share buffers, in the same order on every rank."""
    yield from dict.fromkeys(ranks for ranks in buffer_holders(program, updates).values() if len(ranks) > 1)


class BufferShares:
    """One rank's shared buffers."""

    def __init__(self, program: Program, updates: Mapping[str, str], buffers: Mapping[str, Tensor],
                 transport: Transport) -> None:
        self._transport = transport
        self._shared: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        for path, ranks in buffer_holders(program, updates).items():
            if transport.rank in ranks and len(ranks) > 1:
                self._shared.setdefault((ranks, buffers[path].dtype), []).append(buffers[path])

    def spread(self) -> None:
        """Take over what the first of the ranks has."""
        for (ranks, _), tensors in self._shared.items():
            group = self._transport.lane_group(ranks)
            assert group is not None, "the rank is a member"
            wire = self._transport.on_wire(torch.cat([tensor.reshape(-1) for tensor in tensors]))
            self._transport.status.begin_wait()
            group.spread(wire, ranks[0])
            self._transport.status.end_wait()
            for tensor, part in zip(tensors, wire.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
