"""Partition problems in the benchmark's format that look like models it has: made up, the same for every run.

Layer graphs have a class for each node; operator graphs have weights as nodes of their own, in the class of what reads
them. ``for_latency`` and ``for_throughput`` set devices and scale of costs as the published files do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Value = dict[str, Any]


class _Writer:
    def __init__(self, seed: int, *, speedup: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.speedup = speedup
        self.nodes: list[Value] = []
        self.sources: list[list[int]] = []

    def add(self, sources: list[int], *, time: float, size: float, weight: float = 0.0, is_class: bool = True) -> int:
        """Return the new node that reads the sources; ``weight`` makes a node of its own for what it multiplies by."""
        time *= float(self.rng.uniform(0.8, 1.25))
        kept = []
        if weight:
            kept = [self._put([], 0.0, weight, len(self.nodes) + 1)]
        color = len(self.nodes) if is_class or weight else None
        return self._put([*sources, *kept], time, size, color)

    def _put(self, sources: list[int], time: float, size: float, color: int | None) -> int:
        index = len(self.nodes)
        node = {"id": index, "name": f"n{index}", "supportedOnFpga": 1, "cpuLatency": time * self.speedup,
                "fpgaLatency": time, "isBackwardNode": 0, "size": size}
        self.nodes.append(node if color is None else {**node, "colorClass": color})
        self.sources.append(sources)
        return index

    def value(self) -> Value:
        edges = [{"sourceId": source, "destId": node, "cost": self.nodes[source]["size"]}
                 for node, sources in enumerate(self.sources) for source in dict.fromkeys(sources)]
        return {"maxSizePerFPGA": 0.0, "maxFPGAs": 0, "maxCPUs": 0, "nodes": self.nodes, "edges": edges}


def gnmt(*, layers: int = 14, seed: int = 0) -> Value:
    """Return two stacks of recurrent layers, the second reading the end of the first throughout: about 96 nodes."""
    w = _Writer(seed, speedup=10.0)
    last = w.add([], time=1.0, size=20.0)
    for _ in range(layers):
        state = w.add([last], time=4.0, size=8.0)
        last = w.add([w.add([state], time=0.3, size=8.0), last], time=0.2, size=8.0)
    memory, last = last, w.add([], time=1.0, size=20.0)
    for _ in range(layers):
        state = w.add([last, memory], time=4.5, size=8.0)
        last = w.add([w.add([state], time=0.3, size=8.0), last], time=0.2, size=8.0)
    for time in (9.0, 2.0, 1.0):
        last = w.add([last], time=time, size=30.0)
    return w.value()


def inception(*, blocks: int = 11, seed: int = 0) -> Value:
    """Return blocks of four branches of convolution, norm and activation, joined: about 326 nodes."""
    w = _Writer(seed, speedup=10.0)
    last = w.add([], time=6.0, size=60.0)
    for block in range(blocks):
        ends = []
        size = 48.0 / (1 + block // 3)
        for length in (1, 2, 3, 3):
            branch = last
            for _ in range(length):
                branch = w.add([branch], time=float(w.rng.uniform(0.5, 3.0)), size=size)
                branch = w.add([branch], time=0.4, size=size)
                branch = w.add([branch], time=0.2, size=size)
            ends.append(branch)
        last = w.add(ends, time=0.1, size=3 * size)
    return w.value()


def bert(*, layers: int = 6, seed: int = 0) -> Value:
    """Return operators of an encoder with its weights: about 45 nodes for each layer."""
    w = _Writer(seed, speedup=23.0)
    mask = w.add([w.add([], time=0.001, size=0.02, is_class=False)], time=0.001, size=0.01, is_class=False)
    last = w.add([], time=0.05, size=1.6, weight=15.6)
    last = w.add([w.add([last], time=0.05, size=1.6, weight=0.26)], time=0.2, size=1.6, weight=0.001)
    for _ in range(layers):
        heads = []
        for _ in range(3):
            head = w.add([w.add([last], time=0.035, size=1.6, weight=0.07)], time=0.05, size=1.6, weight=0.001)
            heads.append(w.add([w.add([head], time=0.02, size=1.6)], time=0.05, size=1.6))
        scores = w.add([w.add([heads[0], heads[1]], time=0.25, size=12.6)], time=0.6, size=12.6)
        scores = w.add([w.add([scores, mask], time=0.4, size=12.6)], time=0.6, size=12.6)
        scores = w.add([w.add([scores], time=0.4, size=0.4)], time=0.0, size=12.6)
        mixed = w.add([w.add([w.add([scores, heads[2]], time=0.5, size=1.6)], time=0.05, size=1.6)], time=0.02, size=1.6)
        mixed = w.add([w.add([mixed], time=0.035, size=1.6, weight=0.07)], time=0.05, size=1.6, weight=0.001)
        middle = w.add([w.add([mixed, last], time=0.05, size=1.6)], time=0.2, size=1.6, weight=0.001)
        wide = w.add([w.add([middle], time=1.1, size=50.0, weight=2.1)], time=1.6, size=50.0, weight=0.02)
        wide = w.add([w.add([wide], time=2.4, size=50.0)], time=0.35, size=1.6, weight=2.1)
        last = w.add([w.add([wide, middle], time=0.05, size=1.6)], time=0.2, size=1.6, weight=0.001)
    w.add([w.add([last], time=0.001, size=0.003)], time=0.001, size=0.003, weight=0.07)
    logits = w.add([w.add([last], time=0.2, size=1.6, weight=0.07)], time=8.0, size=300.0, weight=15.6)
    w.add([logits], time=11.0, size=300.0, weight=0.12)
    return w.value()


def resnet(*, stages: tuple[int, ...] = (3, 4, 6, 3), seed: int = 0) -> Value:
    """Return operators of a residual network with its weights: about 400 nodes."""
    w = _Writer(seed, speedup=23.0)
    last, size = w.add([], time=10.0, size=190.0, weight=0.04), 190.0
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            branch, skip = last, last
            for part in range(3):
                inner = size if part == 2 else size / 4
                branch = w.add([branch], time=1.5, size=inner, weight=0.3 * 4**stage)
                branch = w.add([branch], time=0.8, size=inner, weight=0.002)
                branch = branch if part == 2 else w.add([branch], time=0.5, size=inner)
            if block == 0:
                skip = w.add([w.add([last], time=1.5, size=size, weight=0.3 * 4**stage)], time=0.8, size=size,
                             weight=0.002)
            last = w.add([w.add([branch, skip], time=0.2, size=size)], time=0.6, size=size)
        size /= 2
    w.add([w.add([last], time=0.6, size=0.5)], time=0.4, size=0.1, weight=8.0)
    return w.value()


def training(value: Value) -> Value:
    """Return the problem with a backward node for each node, in its class, and edges back."""
    nodes, edges = list(value["nodes"]), list(value["edges"])
    count = len(nodes)
    for node in value["nodes"]:
        color = node.get("colorClass", count + node["id"])
        nodes[node["id"]] = {**node, "colorClass": color}
        nodes.append({**node, "id": count + node["id"], "colorClass": color, "isBackwardNode": 1,
                      "cpuLatency": 1.3 * node["cpuLatency"], "fpgaLatency": 1.3 * node["fpgaLatency"]})
    edges += [{"sourceId": count + edge["destId"], "destId": count + edge["sourceId"],
               "cost": nodes[edge["destId"]]["size"]} for edge in value["edges"]]
    return {**value, "nodes": nodes, "edges": edges}


def for_latency(value: Value, *, accelerators: int = 6, room: float = 0.3) -> Value:
    """Return the problem with so much of all memory on each accelerator, and a second for 2 units of size."""
    return _scaled(value, accelerators=accelerators, cpus=8, room=room, scale=0.5)


def for_throughput(value: Value, *, accelerators: int = 6, room: float = 2.0) -> Value:
    """Return the problem with one CPU and transfers that take little."""
    return _scaled(value, accelerators=accelerators, cpus=1, room=room, scale=0.01)


def _scaled(value: Value, *, accelerators: int, cpus: int, room: float, scale: float) -> Value:
    total = sum(node["size"] for node in value["nodes"])
    edges = [{**edge, "cost": scale * edge["cost"]} for edge in value["edges"]]
    return {**value, "maxFPGAs": accelerators, "maxCPUs": cpus, "maxSizePerFPGA": room * total, "edges": edges}


MODELS: dict[str, Callable[[], Value]] = {
    "gnmt": gnmt, "inception": inception, "bert-6": bert, "bert-12": lambda: bert(layers=12), "resnet-ops": resnet,
    "gnmt-training": lambda: training(gnmt()), "inception-training": lambda: training(inception()),
    "bert-6-training": lambda: training(bert()), "resnet-ops-training": lambda: training(resnet())}
