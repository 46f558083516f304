"""What a plan means, worked out from the plan and the graph alone, for tests to hold the lowering against.

It shares no code with ``weft.plan.layout``: sets and loops over single tensors instead of columns and channels.
"""

from __future__ import annotations

from functools import cache

from weft.model.graph import Graph, TensorRole
from weft.plan.plan import Plan

Member = tuple[int, int]
"""(stage, replica)."""


def divide(num_samples: int, shares: list[float]) -> list[int]:
    """Return whole samples by largest remainder, one left-over sample at a time."""
    exact = [num_samples * share / sum(shares) for share in shares]
    counts = [int(value + 1e-9) for value in exact]
    while sum(counts) < num_samples:
        largest = max(range(len(shares)), key=lambda index: (exact[index] - counts[index], -index))
        counts[largest] += 1
    return counts


class Meaning:
    """Members (replicas of stages) with their samples and ranks, and which tensors go from whom to whom."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        self.training = plan.model.mode == "training"
        self.samples: dict[Member, tuple[int, int]] = {}
        self.ranks: dict[Member, tuple[int, ...]] = {}
        self.microbatches: list[tuple[int, ...]] = []
        self.reads: list[set[int]] = []
        self.makes: list[set[int]] = []
        self.parameters: list[set[int]] = []
        for index, stage in enumerate(plan.stages):
            self._add_members(index)
            ops = [graph.op_names.index(name) for name in stage.ops]
            everything = {int(tensor) for op in ops for tensor in graph.op_inputs(op)}
            makers = {tensor: int(graph.tensor_producer[tensor]) for tensor in everything}
            self.reads.append({tensor for tensor, maker in makers.items()
                               if maker >= 0 and maker not in ops and not graph.is_constant[maker]})
            self.makes.append({tensor for tensor in range(graph.num_tensors) if graph.tensor_producer[tensor] in ops})
            self.parameters.append({tensor for tensor in everything
                                    if graph.tensor_role[tensor] == TensorRole.PARAMETER})
            self.microbatches.append(stage.microbatches if stage.microbatches is not None
                                     else tuple(range(plan.microbatches)))
        self.differentiable = cache(self._differentiable)
        self.feeds = cache(self._feeds)
        self.gradients = cache(self._gradients)

    def _add_members(self, index: int) -> None:
        stage = self.plan.stages[index]
        counts = divide(self.plan.model.batch // self.plan.microbatches, [item.share for item in stage.replicas])
        first = 0
        for number, (item, count) in enumerate(zip(stage.replicas, counts, strict=True)):
            self.samples[index, number] = (first, first + count)
            self.ranks[index, number] = tuple(self.plan.cluster.devices.index(device) for device in item.devices)
            first += count

    def _differentiable(self, tensor: int) -> bool:
        """Return whether the tensor is floating point and depends on a parameter."""
        if self.graph.tensor_dtypes[tensor] == "int64":
            return False
        if self.graph.tensor_role[tensor] == TensorRole.PARAMETER:
            return True
        maker = int(self.graph.tensor_producer[tensor])
        return maker >= 0 and any(self.differentiable(int(item)) for item in self.graph.op_inputs(maker))

    def _sources(self, member: Member, tensor: int, microbatch: int) -> list[Member]:
        """Return the members that hold the samples of the tensor which this one needs."""
        low, high = self.samples[member]
        if self.graph.tensor_batch_dim[tensor] == -1:
            high = low + 1
        found = []
        for other, (first, last) in self.samples.items():
            makes_it = tensor in self.makes[other[0]] and microbatch in self.microbatches[other[0]]
            if makes_it and other[0] != member[0] and first < high and low < last:
                found.append(other)
        return found

    def _feeds(self, member: Member, microbatch: int) -> tuple[tuple[int, Member], ...]:
        """Return (tensor, member that makes it) for everything the member's forward reads from other stages."""
        return tuple((tensor, source) for tensor in sorted(self.reads[member[0]])
                     for source in self._sources(member, tensor, microbatch))

    def _gradients(self, member: Member, microbatch: int) -> tuple[tuple[int, Member], ...]:
        """Return (tensor, member that reads it) for all gradients that the member's backward waits for."""
        found = []
        for other in self.samples:
            if microbatch in self.microbatches[other[0]] and self.reads[other[0]] & self.makes[member[0]]:
                found += [(tensor, other) for tensor, source in self.feeds(other, microbatch)
                          if source == member and self.differentiable(tensor)]
        return tuple(found)

    def members(self) -> list[Member]:
        """Return all replicas of all stages."""
        return list(self.samples)
