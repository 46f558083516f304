"""Placements to show: small graphs on small clusters, with devices chosen by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.show.helpers import HOSTILE
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph_file import parse_graph
from weft.search.place.problem import PlaceProblem, problem_from_graph
from weft.search.place.timetable import PlaceResult, make_timetable
from weft.show.place_tables import PlaceView

DIAMOND = {"format": "weft.graph", "version": 1,
           "ops": [{"name": "in", "kind": "conv", "times": {"gpu": 1.0, "cpu": 2.0}, "memory": 100},
                   {"name": "left", "kind": "conv", "times": {"gpu": 4.0, "cpu": 8.0}, "memory": 200},
                   {"name": "right", "kind": "conv", "times": {"gpu": 2.0, "cpu": 3.0}, "memory": 300},
                   {"name": "out", "kind": "add", "times": {"gpu": 1.0, "cpu": 1.0}}],
           "edges": [{"from": "in", "to": "left", "bytes": 50, "tensor": "x"}, {"from": "in", "to": "right", "bytes": 50, "tensor": "x"},
                     {"from": "left", "to": "out", "bytes": 20}, {"from": "right", "to": "out", "bytes": 100}]}
"""``in`` feeds ``left`` and ``right``, which feed ``out``."""
PAIR = {"format": "weft.cluster", "version": 1, "devices": [{"name": "g", "kind": "gpu", "memory": 1000}, {"name": "c", "kind": "cpu"}],
        "links": [{"from": "g", "to": "c", "bandwidth": 100}]}
"""A GPU of 1,000 bytes and a CPU without a limit, 100 bytes per second between them."""


def problem_of(graph: dict, cluster: dict) -> PlaceProblem:
    """Return the placement problem of two files' contents."""
    model, target = parse_graph(graph), parse_cluster(cluster, where="cluster")
    return problem_from_graph(model, target, estimate_costs(model, target))


def result_of(problem: PlaceProblem, devices: list[int], order: list[int] | None = None, **more) -> PlaceResult:
    """Return the placement as a search's result."""
    table = make_timetable(problem, np.asarray(devices, dtype=np.int64),
                           np.asarray(range(problem.num_ops) if order is None else order, dtype=np.int64))
    given = {"objective": "latency", "value": table.latency_s, "bound": table.latency_s / 2, "status": "feasible", "by": "hand",
             "seconds": 0.25}
    return PlaceResult(timetable=table, **{**given, **more})


def diamond(devices: tuple[int, ...] = (0, 0, 1, 0), **more) -> PlaceResult:
    """Return the diamond, ``right`` on the CPU.

        g   |in |left           |   |out|    0-1, 1-5, 5.5-6.5
        c   |    ..  |right     |            1.5-4.5
        g>c |    |x|                         1-1.5
        c>g |                   |r|          4.5-5.5
    """
    return result_of(problem_of(DIAMOND, PAIR), list(devices), **more)


def pipelined(**more) -> PlaceResult:
    """Return the diamond as a throughput result."""
    loads = {"g": 6.0, "c": 3.0, "g>c": 0.5, "c>g": 1.0}
    return diamond(objective="throughput", value=6.0, bound=5.0, loads=loads, **more)


def random_result(num_ops: int, num_devices: int, seed: int = 0, *, contention: str = "link", lifetimes: bool = False) -> PlaceResult:
    """Return a random graph on random devices."""
    rng = np.random.default_rng(seed)
    ops = [{"name": f"op{index}", "kind": "op", "memory": int(rng.integers(100)), "times": {"gpu": float(rng.uniform(0.5, 1.5))}}
           for index in range(num_ops)]
    edges = []
    for op in range(1, num_ops):
        for source in {int(rng.integers(max(0, op - 6), op)) for _ in range(2)}:
            edges.append({"from": f"op{source}", "to": f"op{op}", "bytes": int(rng.integers(1, 80)), "tensor": f"t{source}"})
    sizes = {}
    for edge in edges:
        edge["bytes"] = sizes.setdefault(edge["tensor"], edge["bytes"])
    devices = [{"name": f"d{index}", "kind": "gpu"} for index in range(num_devices)]
    links = [{"from": device["name"], "to": "switch", "bandwidth": "100B/s"} for device in devices]
    cluster = {"format": "weft.cluster", "version": 1, "devices": devices, "switches": ["switch"], "links": links, "contention": contention}
    problem = problem_of({"format": "weft.graph", "version": 1, "ops": ops, "edges": edges}, cluster)
    if lifetimes:
        problem = replace(problem, has_lifetimes=True)
    order = np.argsort(np.arange(num_ops) + rng.uniform(0, 1, num_ops) * 0.9, kind="stable")
    return result_of(problem, rng.integers(0, num_devices, num_ops).tolist(), order.tolist())


def hostile() -> PlaceResult:
    """Return the diamond with names that try to break pages and terminals."""
    names = dict(zip(("in", "left", "right", "out"), HOSTILE[:4], strict=True))
    graph = {**DIAMOND, "ops": [{**op, "name": names[op["name"]], "times": {"gpu": 1.0, "cpu": 1.0}} for op in DIAMOND["ops"]],
             "edges": [{"from": names[edge["from"]], "to": names[edge["to"]], "bytes": 50} for edge in DIAMOND["edges"]]}
    problem = replace(problem_of(graph, PAIR), device_names=HOSTILE[4:6], resource_names=(f"{HOSTILE[4]}>b", HOSTILE[0]))
    return result_of(problem, [0, 0, 1, 0], by=HOSTILE[2])


def view_of(result: PlaceResult, **more) -> PlaceView:
    """Return the result as it is shown."""
    return PlaceView(result=result, **{"title": "model on cluster", **more})
