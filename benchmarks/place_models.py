"""Inputs of ``bench_place``: traced models (kept in a cache folder), clusters with tight memory, large graphs."""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CLUSTERS = HERE / "problems" / "place"
TOWERS = f"{HERE / 'models' / 'towers.py'}:towers"
MODELS = ("inception-v3", "flava", "towers", "swin-t", "gpt2", "t5-base", "vit-base", "mixtral-8x:seq=32", "resnet-50")
BRANCHING = ("inception-v3", "flava", "towers")
"""Models with branches of some length that can run at the same time."""
TIGHT = {"gpu-cpu": {"RTX3090": 0.6, "xeon-32c": 1.0}, "two-hosts": {"V100-16GB": 0.4, "A10": 0.4}}
"""Clusters whose memory is made tight: the part of all weights that one device of each kind has room for, beside the
tensors that are alive at once on a device that runs the whole model."""

Json = dict[str, Any]


def cache_folder() -> Path:
    """Return where traced graphs are kept between runs."""
    folder = Path(tempfile.gettempdir()) / "weft-bench-place"
    folder.mkdir(exist_ok=True)
    return folder


def graph_file(model: str, batch: int) -> Path:
    """Return the graph file of a model for inference, traced at most once for each version of Weft's tracer."""
    from weft import __version__
    from weft.model import trace as trace_module

    key = f"{model} {batch} {__version__} {Path(trace_module.__file__).stat().st_mtime}"
    if model == "towers":
        key += (HERE / "models" / "towers.py").read_text()
    path = cache_folder() / f"{model}-{batch}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.graph.json.gz"
    if not path.exists():
        from weft.model.graph import Graph
        from weft.model.graph_file import save_graph
        from weft.model.source import resolve_model

        source = resolve_model(TOWERS if model == "towers" else model, batch=batch, mode="inference")
        assert not isinstance(source, Graph)
        save_graph(trace_module.trace(source, mode="inference", batch=batch).graph, path)
    return path


def cluster_file(name: str, graph: Path, fuse: str) -> Path:
    """Return the cluster's file, with memory made tight for this graph where ``TIGHT`` says so."""
    from weft.cluster.cluster_file import load_cluster, to_json

    path = CLUSTERS / f"{name}.yaml"
    if name not in TIGHT:
        return path
    value = to_json(load_cluster(path))
    weights, tensors = _needed_bytes(graph, path, fuse)
    for device in value["devices"]:
        device["memory"] = int(TIGHT[name][device["kind"]] * weights + tensors)
    tight = cache_folder() / f"{name}-{graph.name.split('.')[0]}-{fuse}.cluster.json"
    tight.write_text(json.dumps(value))
    return tight


def _needed_bytes(graph: Path, cluster: Path, fuse: str) -> tuple[float, float]:
    """Return the memory of weights, and of tensors at their peak, if one device runs the model in the graph's order."""
    from benchmarks.place_common import load_problem
    from weft.search.place.timetable import make_timetable

    problem = load_problem(str(graph), str(cluster), fuse)
    order = np.arange(problem.num_ops, dtype=np.int64)
    peak = float(make_timetable(problem, np.zeros_like(order), order).peak_bytes()[0])
    weights = float(problem.weight_bytes.sum())
    return weights, peak - weights


# ---- large graphs -------------------------------------------------------------------------------------------------


def large_files(kind: str, num_ops: int, folder: Path) -> tuple[Path, Path]:
    """Return the files of a graph of about ``num_ops`` operators and of a cluster of 16 unlike devices."""
    rng = np.random.default_rng(7)
    ops, edges = layered(rng, num_ops) if kind == "layered" else branches(rng, num_ops)
    graph = {"format": "weft.graph", "version": 1, "name": kind, "ops": ops, "edges": edges}
    paths = folder / f"{kind}.graph.json.gz", folder / "large.cluster.json"
    paths[0].write_bytes(gzip.compress(json.dumps(graph).encode()))
    paths[1].write_text(json.dumps(large_cluster()))
    return paths


SPEEDS = {"fast": 1.0, "middle": 1.7, "slow": 3.0, "old": 4.5}
"""Times of one operator on each kind, relative, before noise."""


def large_cluster() -> Json:
    """Return four hosts with four devices each, of four kinds; fast links inside, a network between."""
    devices, links = [], []
    for host, kind in enumerate(SPEEDS):
        rate, latency = ((100e9, 2e-6), (25e9, 5e-6), (12e9, 5e-6), (12e9, 5e-6))[host]
        for index in range(4):
            name = f"{kind}{index}"
            devices.append({"name": name, "kind": kind, "host": f"h{host}", "memory": 16 * 2**30})
            links.append({"from": name, "to": f"s{host}", "bandwidth": rate, "latency": latency / 2})
        links.append({"from": f"s{host}", "to": "net", "bandwidth": 12.5e9, "latency": 5e-6})
    return {"format": "weft.cluster", "version": 1, "devices": devices, "links": links,
            "switches": [*(f"s{host}" for host in range(4)), "net"]}


def _op(rng: np.random.Generator, name: str, seconds: float) -> Json:
    noise = rng.uniform(0.8, 1.25, size=len(SPEEDS))
    return {"name": name, "memory": int(rng.integers(0, 8 * 2**20)),
            "times": {kind: float(f"{seconds * factor * wobble:.4g}")
                      for (kind, factor), wobble in zip(SPEEDS.items(), noise, strict=True)}}


def layered(rng: np.random.Generator, num_ops: int, width: int = 40) -> tuple[list[Json], list[Json]]:
    """Return operators in layers; each reads one to three of the two layers before."""
    ops, edges = [], []
    for index in range(num_ops):
        ops.append(_op(rng, f"op{index}", float(rng.lognormal(np.log(60e-6), 0.8))))
        layer = index // width
        if layer == 0:
            continue
        first = max(0, (layer - 2) * width)
        for source in sorted(set(rng.integers(first, layer * width, size=rng.integers(1, 4)).tolist())):
            edges.append({"from": f"op{source}", "to": f"op{index}", "tensor": f"t{source}",
                          "bytes": int((source * 2654435761) % 2**20)})
    return ops, edges


def branches(rng: np.random.Generator, num_ops: int) -> tuple[list[Json], list[Json]]:
    """Return a chain of blocks: a split, four to eight branches of three to nine operators, a join."""
    ops: list[Json] = []
    edges: list[Json] = []

    def add(seconds: float, sources: list[int], num_bytes: int) -> int:
        index = len(ops)
        ops.append(_op(rng, f"op{index}", seconds))
        edges.extend({"from": f"op{source}", "to": f"op{index}", "tensor": f"t{source}",
                      "bytes": sizes[source]} for source in sources)
        sizes.append(num_bytes)
        return index

    sizes: list[int] = []
    last: list[int] = []
    while len(ops) < num_ops:
        split = add(20e-6, last, 2**19)
        ends = []
        for _ in range(int(rng.integers(4, 9))):
            here = split
            for _ in range(int(rng.integers(3, 10))):
                here = add(float(rng.lognormal(np.log(80e-6), 0.5)), [here], int(rng.integers(2**16, 2**19)))
            ends.append(here)
        last = [add(15e-6, ends, 2**19)]
    return ops, edges
