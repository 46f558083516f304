"""Files for ``bench_limits``: large graphs, clusters, strategy graphs and schedule problems, all from a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SHAPES = ("chain", "layered", "wide")


def place_graph(num_ops: int, shape: str, seed: int, *, memory: int = 1 << 20) -> dict[str, Any]:
    """Return a graph file: a long chain with skips, layers of 20, or layers of 400."""
    draw = random.Random(seed)
    width = {"chain": 1, "layered": 20, "wide": 400}[shape]
    ops = [{"name": f"op{index}", "kind": "matmul", "memory": memory,
            "times": {"gpu": round(draw.uniform(1e-5, 1e-3), 8)}} for index in range(num_ops)]
    edges = []
    for index in range(width, num_ops):
        first = (index // width - 1) * width
        sources = {first + draw.randrange(width) for _ in range(draw.choice((1, 1, 2, 3)))}
        if draw.random() < 0.1:
            sources.add(draw.randrange(first + 1))
        for source in sorted(sources):
            edges.append({"from": f"op{source}", "to": f"op{index}", "bytes": draw.randrange(1 << 12, 1 << 22),
                          "tensor": f"op{source}:{draw.randrange(2)}"})
    sizes: dict[str, int] = {}
    for edge in edges:  # one tensor has one size
        edge["bytes"] = sizes.setdefault(edge["tensor"], edge["bytes"])
    return {"format": "weft.graph", "version": 1, "ops": ops, "edges": edges}


def place_cluster(num_devices: int, *, every_link: bool, memory: str = "80GB") -> dict[str, Any]:
    """Return a cluster file: in short form, or with each device and each link written out."""
    kinds = {"gpu": {"flops": {"float32": "10TFLOP/s"}, "memory": memory, "memory_bandwidth": "1TB/s"}}
    if not every_link:
        return {"format": "weft.cluster", "version": 1, "kinds": kinds,
                "hosts": [{"name": "h", "devices": f"{num_devices} x gpu",
                           "intra": {"bandwidth": "25GB/s", "latency": "5us"}}]}
    names = [f"d{index}" for index in range(num_devices)]
    links = [{"from": a, "to": b, "bandwidth": "25GB/s", "latency": "5us"} for a in names for b in names if a != b]
    return {"format": "weft.cluster", "version": 1, "kinds": kinds,
            "devices": [{"name": name, "kind": "gpu"} for name in names], "links": links}


def strategy_graph(num_nodes: int, seed: int, *, tightness: float | None, counts: tuple[int, ...] = (2, 4, 6, 9),
                   far: bool = False) -> dict[str, Any]:
    """Return a strategy graph; ``tightness`` of the largest usage is the limit, None for no limit.

    Nodes have as many strategies as one of ``counts`` says. With ``far`` edges lead to any node before, so that no
    reduction goes far.
    """
    draw = random.Random(seed)
    counts = [draw.choice(counts) for _ in range(num_nodes)]
    intervals = [[index, index + draw.choice((1, 3, 20, 300))] for index in range(num_nodes)]
    costs = [[draw.randrange(1000) for _ in range(count)] for count in counts]
    usages = [[draw.randrange(1, 1000) for _ in range(count)] for count in counts]
    ends, edge_costs = [], []
    for node in range(1, num_nodes):
        before = [draw.randrange(node) if far else max(0, node - draw.choice((1, 2, 5, 50)))
                  for _ in range(3 if far else draw.choice((1, 1, 2)))]
        for other in sorted(set(before)):
            ends.append([other, node])
            edge_costs.append([draw.choice((0, draw.randrange(2000)))
                               for _ in range(counts[other] * counts[node])])
    change = [0] * (num_nodes + 302)
    for (begin, end), values in zip(intervals, usages, strict=True):
        change[begin] += max(values)
        change[end] -= max(values)
    peak = held = 0
    for value in change:
        held += value
        peak = max(peak, held)
    problem = {"name": f"random-{num_nodes}", "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
               "edges": {"nodes": ends, "costs": edge_costs}}
    return {"problem": problem | ({} if tightness is None else {"usage_limit": int(tightness * peak)})}


def dense_graph(num_ops: int, degree: int, seed: int) -> dict[str, Any]:
    """Return a graph file in which each operator reads from ``degree`` of the 200 before it."""
    draw = random.Random(seed)
    ops = [{"name": f"op{index}", "kind": "matmul", "memory": 1 << 20,
            "times": {"gpu": round(draw.uniform(1e-5, 1e-3), 8)}} for index in range(num_ops)]
    edges = [{"from": f"op{source}", "to": f"op{index}", "bytes": 1 << (12 + source % 10)} for index in range(1, num_ops)
             for source in sorted(draw.sample(range(max(0, index - 200), index), min(index, degree)))]
    return {"format": "weft.graph", "version": 1, "ops": ops, "edges": edges}


def partition_problem(num_nodes: int, width: int, seed: int, *, colours: float) -> dict[str, Any]:
    """Return a dnn-partitioning problem in layers; a part of the nodes share a colour with one nearby."""
    draw = random.Random(seed)
    nodes: list[dict[str, Any]] = []
    for index in range(num_nodes):
        seconds = draw.uniform(0.1, 2.0)
        nodes.append({"id": index, "supportedOnFpga": int(draw.random() < 0.95), "cpuLatency": 20 * seconds,
                      "fpgaLatency": seconds, "isBackwardNode": False, "size": draw.uniform(0.5, 2.0),
                      "colorClass": index if draw.random() >= colours or index < 4 else index - draw.randrange(1, 4)})
    costs = [draw.uniform(0.01, 0.5) for _ in range(num_nodes)]
    edges = [{"sourceId": source, "destId": index, "cost": costs[source]} for index in range(width, num_nodes)
             for source in sorted({(index // width - 1) * width + draw.randrange(width)
                                   for _ in range(draw.choice((1, 2, 3)))})]
    return {"maxSizePerFPGA": 0.2 * num_nodes, "maxFPGAs": 8, "maxCPUs": 2, "nodes": nodes, "edges": edges}


def schedule_problem(num_devices: int, *, chunks: int = 1, room: float | None = 1.0) -> dict[str, Any]:
    """Return a pipeline there and back over the devices ``chunks`` times; memory for ``room`` micro-batches each."""
    places = [index % num_devices for index in range(num_devices * chunks)]
    forward = [{"name": f"f{index}", "devices": [f"d{device}"], "time": 1 + index % 3, "memory": 1}
               for index, device in enumerate(places)]
    backward = [{"name": f"b{index}", "devices": [f"d{places[index]}"], "time": 2 + index % 4, "memory": -1}
                for index in reversed(range(len(places)))]
    blocks: list[dict[str, Any]] = [*forward, *backward]
    for before, block in zip([None, *blocks[:-1]], blocks, strict=True):
        block["after"] = [] if before is None else [before["name"]]
    memory = None if room is None else max(chunks, round(room * num_devices))
    return {"format": "weft.schedule-problem", "version": 1, "free_at": "start",
            "devices": [{"name": f"d{index}", "memory": memory} for index in range(num_devices)], "blocks": blocks}


def write(path: Path, value: dict[str, Any]) -> Path:
    """Write the file and return its path."""
    path.write_text(json.dumps(value), encoding="utf-8")
    return path
