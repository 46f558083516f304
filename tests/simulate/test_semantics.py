"""Simulated times against the program's semantics, read literally: one instruction after the other, no arrays."""

from __future__ import annotations

import functools

import pytest

from tests.simulate.helpers import bare_cluster, given_graph
from tests.worlds import with_gradients
from weft.cluster.cluster import Cluster, Contention
from weft.cost.costs import Costs, estimate_costs
from weft.plan.lower import lower
from weft.plan.orders import gpipe, one_f_one_b, to_tokens
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage
from weft.plan.program import Instruction, Op, Phase, Program
from weft.simulate.timing import simulate


def replicated_pipeline(groups: list[list[tuple[tuple[int, ...], float]]], microbatches: int, order) -> tuple[
        Program, Costs, Cluster]:
    """Return a pipeline whose stages have replicas (devices, share); transfers never wait for each other."""
    graph = given_graph([1.0 + 0.25 * index for index in range(len(groups))], activation_bytes=12, batch=4,
                        skips=((0, len(groups) - 1),))
    cluster = bare_cluster(1 + max(device for group in groups for devices, _ in group for device in devices),
                           bytes_per_s=8.0, latency_s=0.01, contention=Contention.NONE)
    names = tuple(f"s{index}" for index in range(len(groups)))
    tokens = to_tokens(order(len(groups), microbatches), names)
    stages = tuple(Stage(name=name, ops=(graph.op_names[index],), replicas=tuple(
        Replica(devices=tuple(f"d{device}" for device in devices), share=share,
                mesh={"tensor": len(devices)} if len(devices) > 1 else {})
        for devices, share in groups[index])) for index, name in enumerate(names))
    plan = Plan(model=ModelRef(name=graph.name, digest=graph.digest, batch=4 * microbatches), stages=stages,
                cluster=ClusterRef(digest=cluster.digest, devices=tuple(item.name for item in cluster.devices)),
                microbatches=microbatches, optimizer=Optimizer(kind="none"),
                order={f"d{device}": tokens[index] for index, group in enumerate(groups) for devices, _ in group
                       for device in devices})
    plan = with_gradients(plan, graph)
    return lower(plan, graph), estimate_costs(graph, cluster), cluster


class Reader:
    """Works out each instruction's start and end by asking for what it waits for."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.lists = [list(program.instructions(rank)) for rank in range(program.num_ranks)]
        self.span = functools.cache(self._span)

    def before(self, rank: int, index: int, *ops: Op) -> Instruction | None:
        found = [item for item in self.lists[rank] if item.index < index and item.op in ops]
        return found[-1] if found else None

    def end_before(self, rank: int, index: int, *ops: Op) -> float:
        item = self.before(rank, index, *ops)
        return self.span(item.index)[1] if item else 0.0

    def same(self, item: Instruction, rank: int, op: Op) -> Instruction:
        """Return the rank's share in what an instruction does."""
        return next(other for other in self.lists[rank] if (
            other.op, other.instance, other.microbatch, other.phase, other.channel, other.bucket) == (
            op, item.instance, item.microbatch, item.phase, item.channel, item.bucket))

    def _span(self, index: int) -> tuple[float, float]:
        program, item = self.program, self.program.instruction(index)
        stream = (Op.COMPUTE, Op.STEP)
        if item.op is Op.COMPUTE:
            instance = program.instances[item.instance]
            ranks = instance.ranks
            start = max(self.end_before(rank, self.same(item, rank, Op.COMPUTE).index, *stream) for rank in ranks)
            needed = {Phase.F: instance.forward_channels, Phase.W: ()}.get(item.phase, instance.gradient_channels)
            for channel in needed:
                receives = [other for other in self.lists[program.channels[channel].target]
                            if other.op is Op.RECV and (other.channel, other.microbatch) == (channel, item.microbatch)]
                start = max([start, *(self.span(other.index)[1] for other in receives)])
            ops, share = program.stage_ops[instance.stage], instance.num_samples / program.graph.batch
            return start, start + max(self.costs.stage_figure(ops, rank, item.phase.name, share).seconds
                                      for rank in ranks)
        if item.op is Op.COLLECTIVE:
            bucket = program.buckets[item.bucket]
            mine = {rank: self.same(item, rank, Op.COLLECTIVE).index for rank in bucket.ranks}
            start = max(self.end_before(rank, place, *ops) for rank, place in mine.items()
                        for ops in (stream, (Op.COLLECTIVE,)))
            return start, start + self.costs.collective("all_reduce", bucket.num_bytes, bucket.ranks).seconds
        channel = program.channels[item.channel]
        start = max(self.end_before(rank, self.same(item, rank, op).index, *stream)
                    for rank, op in ((channel.source, Op.SEND), (channel.target, Op.RECV)))
        return start, start + self.costs.transfer(channel.num_bytes, channel.source, channel.target).seconds


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize("groups", [
    [[((0,), 1.0)], [((1,), 1.0)], [((2,), 1.0)]],
    [[((0,), 0.75), ((1,), 0.25)], [((2,), 0.5), ((3,), 0.5)]],
    [[((0,), 1.0)], [((1, 2), 1.0)], [((3,), 1.0)]],
    [[((0,), 0.5), ((1, 2), 0.5)], [((3,), 0.25), ((4,), 0.75)], [((5,), 1.0)]],
], ids=["plain", "uneven replicas", "joint stage", "all at once"])
def test_times_follow_the_semantics(groups, order):
    program, costs, cluster = replicated_pipeline(groups, 3, order)
    timeline = simulate(program, costs, cluster)
    reader = Reader(program, costs)
    expected = [reader.span(index) for index in range(program.num_instructions)]
    assert list(zip(timeline.start_s.tolist(), timeline.end_s.tolist(), strict=True)) == expected
