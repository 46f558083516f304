"""Small good programs of every kind, to seed faults in."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

from tests.plan.generate import schedule_randomly
from tests.worlds import chain_graph, dag_graph, pipeline, plain_cluster, plan_of, with_gradients
from weft.model.graph import Graph
from weft.plan.lower import lower
from weft.plan.orders import forward_only
from weft.plan.plan import ClusterRef, GradientExchange, ModelRef, Optimizer, Plan, Replica, Stage
from weft.plan.program import Program

Place = tuple[tuple[tuple[str, ...], float], ...]
"""(devices, share) of each replica of a stage."""


def custom_plan(graph: Graph, groups: list[list[int]], places: list[Place], *, microbatches: int, size: int,
                num_devices: int, seed: int = 0, split: float = 0.0, optimizer: str = "sgd",
                handled: list[tuple[int, ...]] | None = None) -> Plan:
    """Return a plan with one stage for each group of ops on those replicas, with a random order that works."""
    cluster = plain_cluster(num_devices)
    stages = tuple(
        Stage(name=f"s{index}", ops=tuple(f"op{op}" for op in ops), microbatches=handled[index] if handled else None,
              replicas=tuple(Replica(devices=devices, share=share,
                                     mesh={"tensor": len(devices)} if len(devices) > 1 else {})
                             for devices, share in place))
        for index, (ops, place) in enumerate(zip(groups, places, strict=True)))
    plan = Plan(
        model=ModelRef(name=graph.name, digest=graph.digest, batch=microbatches * size),
        cluster=ClusterRef(digest=cluster.digest, devices=tuple(device.name for device in cluster.devices)),
        microbatches=microbatches, stages=stages, order={}, optimizer=Optimizer(kind=optimizer))
    return schedule_randomly(with_gradients(plan, graph), graph, Random(seed), split=split)


def _on(*devices: int) -> Place:
    return (((tuple(f"d{index}" for index in devices)), 1.0),)


def _shared(**shares: float) -> Place:
    return tuple(((device,), share) for device, share in shares.items())


def _v_map() -> tuple[Graph, Plan]:
    graph = chain_graph(4)
    return graph, custom_plan(graph, [[0], [1], [2], [3]], [_on(0), _on(1), _on(1), _on(0)], microbatches=3, size=1,
                              num_devices=2)


def _opposite() -> tuple[Graph, Plan]:
    graph = chain_graph(2)
    return graph, custom_plan(graph, [[0], [1], [0], [1]], [_on(0), _on(1), _on(1), _on(0)], microbatches=4, size=1,
                              num_devices=2, handled=[(0, 1), (0, 1), (2, 3), (2, 3)])


def _skips() -> tuple[Graph, Plan]:
    graph = chain_graph(4, skips=((0, 2), (0, 3), (1, 3)))
    return graph, custom_plan(graph, [[0], [1], [2], [3]], [_on(0), _on(1), _on(2), _on(0)], microbatches=2, size=1,
                              num_devices=3)


def _data_parallel() -> tuple[Graph, Plan]:
    graph = chain_graph(2)
    plan = custom_plan(graph, [[0], [1]], [_shared(d0=0.75, d1=0.25)] * 2, microbatches=2, size=4, num_devices=2)
    each = tuple(GradientExchange(parameters=(name,), devices=("d0", "d1")) for name in ("w0", "w1"))
    return graph, replace(plan, gradients=each)


def _tied() -> tuple[Graph, Plan]:
    graph = chain_graph(3, tied=((0, 2),))
    return graph, custom_plan(graph, [[0], [1], [2]], [_on(0), _on(1), _on(2)], microbatches=2, size=1, num_devices=3)


def _split_backward() -> tuple[Graph, Plan]:
    graph = chain_graph(3)
    return graph, custom_plan(graph, [[0], [1], [2]], [_on(0), _on(1), _on(2)], microbatches=2, size=1, num_devices=3,
                              split=1.0, optimizer="none")


def _split_and_shared() -> tuple[Graph, Plan]:
    graph = chain_graph(1)
    return graph, custom_plan(graph, [[0]], [_shared(d0=0.5, d1=0.5)], microbatches=2, size=2, num_devices=2, split=1.0)


def _common_stage() -> tuple[Graph, Plan]:
    graph = chain_graph(2)
    return graph, custom_plan(graph, [[0], [1], [1]], [_on(0), _on(1), _on(2)], microbatches=3, size=1, num_devices=3,
                              handled=[(0, 1, 2), (0, 2), (1,)])


def _unaligned() -> tuple[Graph, Plan]:
    graph = chain_graph(3)
    places = [_shared(d0=0.75, d1=0.25), _shared(d1=0.5, d2=0.5), _on(0)]
    return graph, custom_plan(graph, [[0], [1], [2]], places, microbatches=1, size=4, num_devices=3)


def _shared_table() -> tuple[Graph, Plan]:
    """A tensor without a batch (op 1 reads a parameter only) that stages with unequal replicas read."""
    graph = dag_graph([[-1], [], [0, 1], [1, 2]], unbatched=(1,))
    places = [_shared(d0=0.5, d1=0.5), _on(1), _on(0)]
    return graph, custom_plan(graph, [[0, 1], [2], [3]], places, microbatches=1, size=2, num_devices=2)


def _joint() -> tuple[Graph, Plan]:
    graph = chain_graph(3)
    return graph, custom_plan(graph, [[0], [1], [2]], [_on(0, 1), _on(1, 2), _on(0)], microbatches=2, size=1,
                              num_devices=3)


def _inference() -> tuple[Graph, Plan]:
    graph = chain_graph(3)
    return graph, plan_of(graph, [[0], [1], [2]], order=forward_only(3, 3), devices=[0, 1, 2], microbatches=3,
                          mode="inference")


def _idle_device() -> tuple[Graph, Plan]:
    graph = chain_graph(2)
    return graph, custom_plan(graph, [[0], [1]], [_on(0), _on(2)], microbatches=2, size=1, num_devices=3)


BASES = {
    "1f1b": lambda: pipeline("1f1b", 3, 3),
    "gpipe": lambda: pipeline("gpipe", 2, 3),
    "fewer micro-batches than stages": lambda: pipeline("1f1b", 4, 2),
    "interleaved": lambda: pipeline("interleaved", 2, 2, chunks=2),
    "v map": _v_map,
    "opposite pipelines": _opposite,
    "skip connections": _skips,
    "data parallel 3:1": _data_parallel,
    "tied parameters": _tied,
    "split backward": _split_backward,
    "split backward of a shared parameter": _split_and_shared,
    "stage common to two pipelines": _common_stage,
    "unaligned replicas": _unaligned,
    "shared table": _shared_table,
    "stage on several devices": _joint,
    "inference": _inference,
    "idle device": _idle_device,
}


@cache
def base(name: str) -> Program:
    """Return the good program of that name."""
    graph, plan = BASES[name]()
    return lower(plan, graph)
