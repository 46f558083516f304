"""What FSDP holds on n devices, by the account: what is kept falls as 1/n, and two units are there besides.

    python -m benchmarks.bench_pieces [--model llama-70b] [--devices 8 16 32 64]

For each number of H100 (hosts of eight) a plan of the strategy ``fsdp`` with one sample of 4,096 tokens for each device
is made from the meta device. ``kept`` are parameters, gradients and states in pieces; ``1/n`` is what they would be if
all pieces were equal; ``unit`` the largest unit's parameters. The largest model that fits is given in layers of the
same kind: as many as the rest of the memory has room for.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from weft.base.units import format_bytes
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.coarsen.compiled import planned_costs
from weft.model.graph import Graph
from weft.model.load import load_graph_for
from weft.plan.lower import lower
from weft.plan.memory import account_memory, optimizer_bytes
from weft.plan.plan import Optimizer, Plan
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.baselines import STRATEGIES
from weft.search.joint.pieces import layer_starts

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one device of so many holds."""

    devices: int
    kept: int
    ideal: float
    """A part of 1/n of parameters, gradients and states."""
    unit: int
    peak: int
    recompute: bool
    layers: int
    """So many would fit."""


def hosts_of_h100(count: int) -> Cluster:
    """Return so many devices in hosts of eight, with a network card for each."""
    host = {"name": "n", "count": max(1, count // 8), "devices": f"{min(count, 8)} x H100", "intra": "nvlink4"}
    return parse_cluster({"format": "weft.cluster", "version": 1, "name": f"{count} H100", "hosts": [host],
                          "network": {"bandwidth": "400Gbit/s", "latency": "5us", "per": "device"}}, where="cluster")


def measure(graph: Graph, count: int) -> Row:
    """Return what the account says of FSDP on so many devices; of what does not fit, as if memory had no limit."""
    cluster = hosts_of_h100(count)
    problem = Problem(graph=graph, cluster=cluster, costs=planned_costs(graph, cluster, None, "bfloat16", compiled=False),
                      options=PlanOptions(batch=count, dtype="bfloat16", optimizer=Optimizer(), recompute=True))
    plan = _plan(problem)
    program = lower(plan, graph)
    account = account_memory(program)
    whole = sum(2 * int(graph.tensor_bytes[tensor]) + optimizer_bytes(graph, tensor, plan.optimizer)
                for tensor in graph.parameters.tolist())
    kept = max(int(account.static[rank, :3].sum()) for rank in range(count))
    unit = max(unit.num_bytes for unit in program.units)
    peak = max(account.peak_bytes(rank) for rank in range(count))
    num_layers = len(layer_starts(graph)) - 1
    capacity = cluster.devices[0].memory_bytes or 0
    per_layer = kept / num_layers + _inputs(account.peak(0)["activations"], num_layers)
    return Row(devices=count, kept=kept, ideal=whole / count, unit=unit, peak=peak,
               recompute=any(stage.recompute for stage in plan.stages),
               layers=num_layers + int((capacity - peak) // per_layer))


def _plan(problem: Problem) -> Plan:
    from dataclasses import replace

    roomy = replace(problem.cluster, devices=tuple(replace(item, memory_bytes=None) for item in problem.cluster.devices))
    return STRATEGIES["fsdp"](replace(problem, cluster=roomy), 1)


def _inputs(activations: int, num_layers: int) -> float:
    """Return what a layer more keeps from forward to backward: of all activations about its part."""
    return activations / num_layers


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-70b:seq=4096")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32, 64])
    arguments = parser.parse_args()
    graph = load_graph_for(arguments.model, mode="training", batch=1, dtype="bfloat16")
    print("| H100 | kept on a device | 1/n of all | off | largest unit | peak | of 74.5 GiB | layers that fit |")
    print("|---|---|---|---|---|---|---|---|")
    for count in arguments.devices:
        row = measure(graph, count)
        print(f"| {count} | {format_bytes(row.kept)} | {format_bytes(row.ideal)} | {row.kept / row.ideal - 1:+.2%} | "
              f"{format_bytes(row.unit)} | {format_bytes(row.peak)} | {row.peak / (74.51 * GIB):.0%} | {row.layers} |")


if __name__ == "__main__":
    main()
