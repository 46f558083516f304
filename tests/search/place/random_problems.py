"""Small random placement problems that always have a placement, as files' values or as problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import I64
from weft.model.graph_file import parse_graph
from weft.search.place.problem import PlaceProblem, problem_from_graph
from weft.search.place.timetable import make_timetable

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """The files, and a placement that they allow."""

    graph: Json
    cluster: Json
    device: I64


def random_files(rng: np.random.Generator, num_ops: int, num_devices: int, *, contention: str = "link",
                 tight_memory: bool = False, colocate: bool = False, shared_tensors: bool = True,
                 limited: bool = True, shared_cores: bool = False) -> tuple[Json, Json]:
    """Return the values of a graph file and a cluster file.

    Times are small whole numbers, zero at times; some tensors have given transfer times, the others sizes. With
    ``tight_memory`` devices have as much memory as some placement needs, else any device holds everything.
    ``limited``: some operators may only run on some devices. ``shared_cores``: the last two devices share a core.
    """
    drawn = _draw(rng, num_ops, num_devices, contention=contention, tight_memory=tight_memory, colocate=colocate,
                  shared_tensors=shared_tensors, limited=limited, shared_cores=shared_cores)
    return drawn.graph, drawn.cluster


def random_problem(rng: np.random.Generator, num_ops: int, num_devices: int, *, contention: str = "link",
                   tight_memory: bool = False, colocate: bool = False, shared_tensors: bool = True,
                   lifetimes: bool = False, limited: bool = True, shared_cores: bool = False,
                   shared_weights: bool = False) -> PlaceProblem:
    """Return the problem of such files; a placement exists.

    ``lifetimes``: tensors take memory as well. ``shared_weights``: about half of the operators keep resident what an
    operator before them keeps. Files cannot say these two of graphs with given times, so they are put in afterwards.
    """
    drawn = _draw(rng, num_ops, num_devices, contention=contention, tight_memory=tight_memory, colocate=colocate,
                  shared_tensors=shared_tensors, limited=limited, shared_cores=shared_cores)
    graph, cluster = parse_graph(drawn.graph), parse_cluster(drawn.cluster)
    problem = problem_from_graph(graph, cluster, estimate_costs(graph, cluster))
    if shared_weights:
        owner = [int(rng.integers(op + 1)) if rng.random() < 0.5 else op for op in range(num_ops)]
        problem = replace(problem, weights=np.array(owner, dtype=np.int64))
    if not lifetimes:
        return problem
    problem = replace(problem, has_lifetimes=True)
    peaks = make_timetable(problem, drawn.device, np.arange(num_ops, dtype=np.int64)).peak_bytes()
    everything = problem.weight_bytes.sum() + problem.tensor_bytes.sum()
    return replace(problem, capacity=peaks if tight_memory else np.full(num_devices, everything))


def _draw(rng: np.random.Generator, num_ops: int, num_devices: int, *, contention: str, tight_memory: bool,
          colocate: bool, shared_tensors: bool, limited: bool, shared_cores: bool) -> _Drawn:
    names = [f"d{index}" for index in range(num_devices)]
    group = rng.integers(max(1, num_ops // 2), size=num_ops) if colocate else np.full(num_ops, -1)
    group = np.where(rng.random(num_ops) < 0.6, group, -1)
    allowed: dict[int, list[str]] = {}
    ops, device = [], np.zeros(num_ops, dtype=np.int64)
    home: dict[int, int] = {}
    for op in range(num_ops):
        key = int(group[op]) if group[op] >= 0 else num_ops + op
        count = int(rng.integers(1, num_devices + 1)) if limited and rng.random() < 0.3 else num_devices
        on = allowed.setdefault(key, sorted(rng.permutation(names)[:count].tolist()))
        device[op] = home.setdefault(key, names.index(on[int(rng.integers(len(on)))]))
        base = int(rng.integers(0, 10))
        times = {name: max(0, base + int(rng.integers(-2, 8))) for name in on}
        record: Json = {"name": f"op{op}", "times": times, "memory": int(rng.integers(0, 50)), "on": on}
        ops.append(record if group[op] < 0 else {**record, "colocate": f"g{group[op]}"})
    resident = np.bincount(device, weights=[record["memory"] for record in ops], minlength=num_devices)
    memory = np.maximum(1, resident if tight_memory else np.full(num_devices, resident.sum()))
    graph = {"format": "weft.graph", "version": 1, "name": "random", "ops": ops,
             "edges": _edges(rng, num_ops, names, shared_tensors)}
    return _Drawn(graph=graph, device=device,
                  cluster=_cluster(rng, names, [int(item) for item in memory], contention, shared_cores))


def _edges(rng: np.random.Generator, num_ops: int, names: list[str], shared_tensors: bool) -> list[Json]:
    edges: list[Json] = []
    sizes = rng.integers(0, 30, size=num_ops)
    for op in range(1, num_ops):
        count = min(op, int(rng.choice([0, 1, 1, 2, 2, 3])))
        for source in sorted(rng.choice(op, size=count, replace=False).tolist()):
            edge: Json = {"from": f"op{source}", "to": f"op{op}"}
            if shared_tensors and rng.random() < 0.6:
                edges.append({**edge, "bytes": int(sizes[source]), "tensor": f"t{source}"})
            elif len(names) == 1 or rng.random() < 0.5:
                edges.append({**edge, "bytes": int(rng.integers(0, 30))})
            else:
                times = {f"{a}>{b}": int(rng.integers(0, 12)) for a in names for b in names if a != b}
                edges.append({**edge, "bytes": int(rng.integers(0, 30)), "times": times})
    return edges


def _cluster(rng: np.random.Generator, names: list[str], memory: list[int], contention: str,
             shared_cores: bool) -> Json:
    """Return devices around a switch, some pairs with a link of their own."""
    devices: list[Json] = [{"name": name, "kind": name, "memory": amount}
                           for name, amount in zip(names, memory, strict=True)]
    if shared_cores:
        devices = [*devices[:-2], *({**device, "unit": "core"} for device in devices[-2:])]
    links: list[Json] = [{"from": name, "to": "switch", "bandwidth": int(rng.integers(1, 9)),
                          "latency": int(rng.integers(0, 2))} for name in names]
    for index, name in enumerate(names[1:]):
        if rng.random() < 0.3:
            links.append({"from": names[index], "to": name, "bandwidth": 8, "latency": 0,
                          "shared": bool(rng.random() < 0.5)})
    return {"format": "weft.cluster", "version": 1, "contention": contention, "devices": devices,
            "switches": ["switch"], "links": links}
