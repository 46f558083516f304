"""CPU seconds and peak memory from a model to its sharding, in a fresh process, imports excluded.

    python -m benchmarks.shard_speed llama-3-8b CLUSTER 8x8 16 none

is one such process: it imports everything, then starts the clock.
"""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sections import Row

CLUSTERS = Path(__file__).resolve().parent / "problems" / "shard"
MAX_RSS = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One search and what is known of it."""

    model: str
    cluster: str
    mesh: str
    batch: int
    memory: str
    """``device``: that of a device; ``none``: what is kept for the backward pass exceeds it, whatever the sharding."""
    limit_s: float | None
    """CPU seconds to stay below."""
    peer: str
    """CPU seconds of autoparallel."""
    has_rss_limit: bool = False


def _llama(layers: int, cluster: str, mesh: str, limit_s: float | None, peer: str, *, memory: str) -> Case:
    return Case(f"llama-3-8b:layers={layers}", cluster, mesh, 16, memory, limit_s, peer, mesh == "8x8")


CASES = (
    _llama(2, "h100-nvlink-8x8", "8x8", 5.0, "50 CPU-s, 1.4 GB", memory="device"),
    _llama(8, "h100-nvlink-8x8", "8x8", 5.0, "88 CPU-s", memory="device"),
    _llama(32, "h100-nvlink-8x8", "8x8", 7.0, "110 CPU-s, 4.3 GB", memory="device"),
    _llama(80, "h100-nvlink-8x8", "8x8", None, "none", memory="device"),
    _llama(2, "h100-nvlink-8", "8", 1.5, "3.6 CPU-s", memory="none"),
    _llama(8, "h100-nvlink-8", "8", 1.5, "7.6 CPU-s", memory="none"),
    _llama(32, "h100-nvlink-8", "8", 2.5, "23.5 CPU-s", memory="none"),
    _llama(80, "h100-nvlink-8", "8", None, "none", memory="none"),
    Case("t5-large", "h100-nvlink-8", "8", 8, "device", 4.0, "44 CPU-s"),
    Case("t5-large", "h100-nvlink-2x8", "2x8", 8, "device", 8.0, "971 CPU-s"),
)


def speed(options: Any) -> Iterator[Row]:
    """Yield a row for every case."""
    eight: dict[str, float] = {}
    for case in CASES:
        name = f"{case.model} on {case.cluster}, mesh {case.mesh}"
        if options.match not in name:
            continue
        command = [sys.executable, "-m", "benchmarks.shard_speed", case.model, str(CLUSTERS / f"{case.cluster}.yaml"),
                   case.mesh, str(case.batch), case.memory]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
        found = json.loads(run.stdout)
        limit = case.limit_s if case.limit_s is not None else 1.5 * eight.get(case.mesh, float("inf"))
        if ":layers=8" in case.model:
            eight[case.mesh] = found["cpu_s"]
        is_small = not case.has_rss_limit or found["rss_bytes"] <= MAX_RSS
        yield Row(name, f"{found['cpu_s']:.2f} CPU-s, {found['rss_bytes'] / 2**20:.0f} MiB; {found['status']}, step "
                  f"{found['seconds']:.6g} s, bound {found['bound']:.6g} s", f"<= {limit:.3g} CPU-s; autoparallel: {case.peer}",
                  found["cpu_s"] <= limit and is_small, found)


def measure(model: str, cluster: str, mesh: str, batch: int, memory: str) -> dict[str, Any]:
    """Return what one search took, after importing all that it needs."""
    for name in ("torch", "numpy", "transformers", "weft.model.zoo_models", "weft.sharding.factor_rules",
                 "transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5",
                 "weft.search.strategies.search", "weft.search.strategies.integer"):
        importlib.import_module(name)
    from weft.cluster import read_cluster
    from weft.cost.costs import estimate_costs
    from weft.cost.mesh import Mesh
    from weft.model.folded import trace_folded
    from weft.model.source import resolve_model
    from weft.plan.plan import Optimizer
    from weft.search.common.budget import Budget
    from weft.search.shard.model_search import MeshSearch

    target = read_cluster(cluster)
    limit = None if memory == "none" else float(min(device.memory_bytes or 0 for device in target.devices))
    begin = time.process_time()
    source: Any = resolve_model(model, mode="training", batch=batch, dtype="bf16")
    folded = trace_folded(source, batch=batch)
    shape = tuple(map(int, mesh.split("x")))
    search = MeshSearch(folded, estimate_costs(folded.traced.graph, target),
                        Mesh(target, range(target.num_devices), shape), optimizer=Optimizer(), limit_bytes=limit,
                        budget=Budget(effort=float("inf")))
    found = search.run()
    return {"cpu_s": time.process_time() - begin, "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "status": found.status, "seconds": found.seconds, "bound": found.bound, "held_bytes": found.held_bytes,
            "counts": {str(run): list(counts) for run, counts in found.graph.counts.items()}}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])))
