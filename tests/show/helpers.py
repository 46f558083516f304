"""Timelines to show: simulated pipelines, and plans whose names try to break the page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.simulate.helpers import pipeline_world
from tests.worlds import chain_graph, pipeline, plain_cluster, plan_of, with_gradients
from weft.cluster.cluster import Cluster, Device, DeviceKind, Link
from weft.cluster.cluster_file import parse_cluster, to_json
from weft.cost.costs import estimate_costs
from weft.plan.lower import lower
from weft.plan.orders import gpipe, one_f_one_b, to_tokens
from weft.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from weft.plan.program import Op, Phase, Program
from weft.simulate.timeline import Timeline, make_timeline
from weft.simulate.timing import simulate

HOSTILE = ("<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", '"><svg onload=alert(3)>',
           "<!-- {{data}} ]]>", "a&lt;b \u2028 \u202e {{script}}", "[red]x[/red] \x1b[2J' onmouseover='alert(4)")


def simulated(kind: str = "1f1b", num_devices: int = 2, num_microbatches: int = 2, **options) -> Timeline:
    """Return the predicted timeline of a pipeline: forward 1 s, backward 2 s, 1 byte per second on links."""
    program, costs, cluster = pipeline_world(kind, num_devices, num_microbatches, **options)
    return simulate(program, costs, cluster)


def stretched(timeline: Timeline, factor: float) -> Timeline:
    """Return the timeline as if it had been measured, everything slower by the factor."""
    assert timeline.program is not None
    return make_timeline(timeline.program, start_s=timeline.start_s * factor, end_s=timeline.end_s * factor,
                         kind="measured")


def played(program: Program, *, forward_s: float = 1.0, kind: str = "predicted") -> Timeline:
    """Return a timeline in which each rank does one instruction after the other, whatever it waits for."""
    seconds = np.where(program.op == Op.COMPUTE, np.where(program.phase == Phase.F, forward_s, 2 * forward_s), 0.25)
    ends = np.concatenate([np.cumsum(seconds[first:last]) for first, last in
                           zip(program.rank_start[:-1], program.rank_start[1:], strict=True)])
    return make_timeline(program, start_s=ends - seconds, end_s=ends, kind=kind)


def hostile_timeline() -> Timeline:
    """Return the timeline of a plan whose model, stages, modules, parameters and devices have hostile names."""
    graph = chain_graph(2)
    weights = iter(HOSTILE[1:3])
    graph = replace(graph, name=HOSTILE[0], op_modules=(HOSTILE[1], HOSTILE[3]), op_names=(HOSTILE[3], HOSTILE[4]),
                    tensor_names=tuple(next(weights) if name.startswith("w") else name for name in graph.tensor_names))
    cluster = plain_cluster(2)
    cluster = replace(cluster, links=(), devices=tuple(
        replace(device, name=name) for device, name in zip(cluster.devices, HOSTILE[4:], strict=True)))
    plan = plan_of(graph, [[0, 1]], devices=[0], order=gpipe(1, 2), microbatches=2, num_devices=2)
    devices = tuple(device.name for device in cluster.devices)
    stage = Stage(name=HOSTILE[0], ops=graph.op_names, replicas=tuple(
        Replica(devices=(name,), share=0.5) for name in devices))
    tokens = tuple(f"{HOSTILE[0]}:{phase}:{index}" for phase in "FB" for index in range(2))
    plan = replace(plan, stages=(stage,), order=dict.fromkeys(devices, tokens), gradients=(),
                   model=replace(plan.model, batch=4), cluster=replace(plan.cluster, devices=devices))
    return played(lower(with_gradients(plan, graph), graph))


def replicated_program(shares: tuple[float, ...], num_samples: int = 8) -> Program:
    """Return data parallelism over so many devices: one stage of four ops, two micro-batches."""
    graph = chain_graph(4, batch=num_samples)
    names = [f"d{index}" for index in range(len(shares))]
    plan = plan_of(graph, [[0, 1, 2, 3]], devices=[0], order=one_f_one_b(1, 2), microbatches=2,
                   num_devices=len(shares), microbatch_size=num_samples)
    stage = replace(plan.stages[0], replicas=tuple(
        Replica(devices=(name,), share=share) for name, share in zip(names, shares, strict=True)))
    plan = replace(plan, stages=(stage,), order=dict.fromkeys(names, plan.order["d0"]), gradients=())
    return lower(with_gradients(plan, graph), graph)


def many_microbatches(num_devices: int, num_microbatches: int) -> Timeline:
    """Return a timeline of a long 1F1B pipeline without simulating it."""
    graph, plan = pipeline("1f1b", num_devices, num_microbatches)
    return played(lower(plan, graph))


def wide_timeline(num_hosts: int, per_host: int, num_microbatches: int, *, along_hosts: bool = False) -> Timeline:
    """Return data parallelism over hosts with a 1F1B pipeline in each, or (along hosts) one stage for each host."""
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "name": "wide", "network": {"bandwidth": "100Gbit/s", "latency": "10us"},
        "hosts": [{"name": "h", "count": num_hosts, "devices": f"{per_host} x A100-80GB", "intra": "nvlink3"}]})
    names = [device.name for device in cluster.devices]
    num_stages, num_replicas = (num_hosts, per_host) if along_hosts else (per_host, num_hosts)
    grid = [[names[stage * per_host + replica] if along_hosts else names[replica * per_host + stage]
             for replica in range(num_replicas)] for stage in range(num_stages)]
    graph = chain_graph(2 * num_stages, batch=num_replicas, flops=1e12, activation_bytes=1 << 22, parameter_bytes=1 << 26)
    stages = tuple(Stage(name=f"s{index}", ops=graph.op_names[2 * index: 2 * index + 2], replicas=tuple(
        Replica(devices=(name,), share=1 / num_replicas) for name in row)) for index, row in enumerate(grid))
    tokens = to_tokens(one_f_one_b(num_stages, num_microbatches), tuple(stage.name for stage in stages))
    plan = Plan(
        model=ModelRef(name="chain", digest=graph.digest, batch=num_microbatches * num_replicas), stages=stages,
        cluster=ClusterRef(digest=cluster.digest, devices=tuple(names), description=to_json(cluster)),
        microbatches=num_microbatches, order={name: tokens[index] for index, row in enumerate(grid) for name in row})
    return simulate(lower(with_gradients(plan, graph), graph), estimate_costs(graph, cluster), cluster)


def hostile_cluster() -> Cluster:
    """Return the cluster of ``hostile_timeline`` with hostile hosts, kinds and switches, each device in its own host."""
    kinds = {name: DeviceKind(name=name, flop_per_s={"float32": 1.0}, memory_bytes_per_s=1.0) for name in HOSTILE[:2]}
    devices = tuple(Device(name=name, kind=kind, host=host, memory_bytes=None)
                    for name, kind, host in zip(HOSTILE[4:], kinds, HOSTILE[2:4], strict=True))
    links = tuple(Link(source=source, target=target, bytes_per_s=1e9, latency_s=0.0) for device in devices
                  for source, target in ((device.name, HOSTILE[1]), (HOSTILE[1], device.name)))
    return Cluster(name=HOSTILE[3], kinds=kinds, devices=devices, links=links)
