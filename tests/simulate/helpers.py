"""Worlds with exact times: every operator takes what the test says, forward once and backward twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.worlds import chain_graph, plain_cluster, plan_of
from weft.cluster.cluster import Cluster, Contention, DeviceKind
from weft.cost.costs import Costs, estimate_costs
from weft.model.graph import GivenCosts, Graph
from weft.plan.lower import lower
from weft.plan.orders import Order, gpipe, interleaved, one_f_one_b
from weft.plan.program import Instruction, Program


def given_graph(times: Sequence[float], **options) -> Graph:
    """Return a chain of ops whose forwards take these seconds on any device."""
    graph = chain_graph(len(times), flops=0.0, **options)
    return replace(graph, given=GivenCosts(
        times=tuple({"unit": seconds} for seconds in times), memory_bytes=(0,) * len(times),
        allowed_kinds=(None,) * len(times), colocate=(None,) * len(times),
        transfer_times=(None,) * graph.num_tensors))


def bare_cluster(num_devices: int, *, bytes_per_s: float = 1.0, latency_s: float = 0.0,
                 contention: Contention = Contention.LINK) -> Cluster:
    """Return devices that have no rates of their own, each joined to one switch."""
    cluster = plain_cluster(num_devices, bytes_per_s=bytes_per_s, latency_s=latency_s, contention=contention)
    return replace(cluster, kinds={"unit": DeviceKind(name="unit")})


def named_order(kind: str, num_devices: int, num_microbatches: int, num_chunks: int = 1) -> Order:
    """Return the order of ``gpipe``, ``1f1b`` or ``interleaved``."""
    match kind:
        case "gpipe":
            return gpipe(num_devices, num_microbatches)
        case "1f1b":
            return one_f_one_b(num_devices, num_microbatches)
    return interleaved(num_devices, num_chunks, num_microbatches)


def pipeline_world(kind: str, num_devices: int, num_microbatches: int, *, num_chunks: int = 1, time_s: float = 1.0,
                   activation_bytes: int = 0, **options) -> tuple[Program, Costs, Cluster]:
    """Return program, costs and cluster of a pipeline with one op per stage, each of ``time_s`` forward."""
    num_stages = num_devices * num_chunks
    graph = given_graph([time_s] * num_stages, activation_bytes=activation_bytes)
    cluster = bare_cluster(num_devices)
    plan = plan_of(graph, [[op] for op in range(num_stages)], devices=[op % num_devices for op in range(num_stages)],
                   order=named_order(kind, num_devices, num_microbatches, num_chunks), microbatches=num_microbatches,
                   cluster=cluster, **{"optimizer": "none", **options})
    return lower(plan, graph), estimate_costs(graph, cluster), cluster


def with_lists(program: Program, lists: Sequence[Sequence[Instruction]], **changes) -> Program:
    """Return the program with these instructions by rank (``index`` is ignored), and other changes."""
    columns = {name: np.asarray([getattr(item, name) for items in lists for item in items],
                                dtype=getattr(program, name).dtype)
               for name in ("op", "instance", "microbatch", "phase", "channel", "bucket")}
    rank_start = np.cumsum([0, *(len(items) for items in lists)], dtype=np.int64)
    return replace(program, rank_start=rank_start, **columns, **changes)
