"""Shardings of models: against named plans, with a very wide classifier, with little memory, and without folding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sections import Row
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.cost.costs import estimate_costs
from weft.cost.mesh import Mesh
from weft.model.folded import FoldedModel, trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.plan.plan import Optimizer
from weft.search.common.budget import Budget
from weft.search.shard.compare import compare_meshes
from weft.search.shard.model_search import MeshSearch
from weft.search.shard.named import NAMES, find_roles
from weft.search.shard.named import named as named_plan
from weft.search.shard.parts import ModelParts
from weft.search.strategies.search import solve
from weft.show.sharding_facts import sharding_facts

CLUSTERS = Path(__file__).resolve().parent / "problems" / "shard"


def cluster_named(name: str) -> Cluster:
    """Return one of the clusters of these benchmarks."""
    return read_cluster(str(CLUSTERS / f"{name}.yaml"))


def source_of(model: str, batch: int) -> ModelSource:
    """Return a model for training in bfloat16."""
    found = resolve_model(model, mode="training", batch=batch, dtype="bf16")
    assert isinstance(found, ModelSource)
    return found


@cache
def folded_model(model: str, batch: int) -> FoldedModel:
    """Return the model, folded."""
    return trace_folded(source_of(model, batch), batch=batch)


def mesh_search(folded: FoldedModel, cluster: Cluster, shape: tuple[int, ...], limit: float | None = None) -> MeshSearch:
    """Return the search of a model on a mesh of all devices."""
    return MeshSearch(folded, estimate_costs(folded.traced.graph, cluster),
                      Mesh(cluster, range(cluster.num_devices), shape), optimizer=Optimizer(), limit_bytes=limit,
                      budget=Budget(effort=float("inf")))


# ---- named plans ----------------------------------------------------------------------------------------------------

NAMED_MODELS = (("gpt2-xl", 32), ("llama-7b", 16), ("t5-large", 64), ("bert-large", 64), ("vit-base", 512),
                ("mixtral-8x:hidden=256,ffn=896,seq=128", 16))
NAMED_CLUSTERS = (("h100-nvlink-8", ((8,), (2, 4))), ("h100-pcie-8", ((8,), (2, 4))), ("h100-nvlink-2x8", ((2, 8),)),
                  ("h100-pcie-2x8", ((2, 8),)))


def named(options: Any) -> Iterator[Row]:
    """Yield a row for every model and cluster: the sharding found beside all named plans, best over the same meshes."""
    for model, batch in NAMED_MODELS:
        for name, shapes in NAMED_CLUSTERS:
            if options.match not in f"{model} {name}":
                continue
            cluster, folded = cluster_named(name), folded_model(model, batch)
            found = compare_meshes(folded, cluster, estimate_costs(folded.traced.graph, cluster), shapes=shapes,
                                   names=NAMES)
            best = found.best.seconds
            times = {row.name: row.sharding.seconds for row in found.named if row.sharding is not None}
            yield Row(f"{model}, batch {batch}, on {name}",
                      f"{best * 1e3:.4g} ms on {found.best.mesh.name} ({found.best.status}, bound "
                      f"{found.best.bound * 1e3:.4g} ms)",
                      "<= each of: " + ", ".join(f"{key} {value / best:.3f}x" for key, value in times.items()),
                      all(best <= value * (1 + 1e-9) for value in times.values()),
                      {"model": model, "cluster": name, "seconds": best, "named": times})


# ---- a very wide classifier -----------------------------------------------------------------------------------------


def resnet(options: Any) -> Iterator[Row]:
    """Yield a row for each number of classes: convolutions by samples, the classifier split, below both pure plans."""
    for classes in (100_000, 1_000_000):
        cluster, folded = cluster_named("h100-nvlink-8"), folded_model(f"resnet-50:classes={classes}", 1024)
        search = mesh_search(folded, cluster, (8,))
        found = search.run()
        roles = find_roles(search.parts, folded)

        def without_samples(parts: ModelParts, index: int, samples: dict[int, int] = roles.samples) -> Any:
            choices = parts.parts[index].choices
            if choices is None or index not in samples:
                return None
            return np.array([samples[index] not in strategy for strategy in choices.strategies])

        data, tensor = search.run(named_plan("zero1", roles, 1)), search.run(without_samples)
        facts = sharding_facts(found, folded)
        kinds = dict(zip(folded.traced.graph.op_names, folded.traced.graph.op_kinds, strict=True))
        words = {facts.ops[name].partition(": ")[2] for name in facts.ops if kinds[name].startswith("aten.conv")}
        classifier = {facts.ops[name].partition(": ")[2] for name in facts.ops if kinds[name].startswith("aten.linear")}
        is_mixed = words == {"samples"} and classifier == {"column"}
        yield Row(f"ResNet-50 with {classes:,} classes, batch 1,024, on 8",
                  f"{found.seconds * 1e3:.4g} ms ({found.status}); convolutions {words}, classifier {classifier}",
                  f"data parallel (ZeRO-1) {data.seconds * 1e3:.4g} ms, without splitting samples {tensor.seconds * 1e3:.4g} ms",
                  is_mixed and found.seconds < min(data.seconds, tensor.seconds),
                  {"classes": classes, "seconds": found.seconds, "data": data.seconds, "tensor": tensor.seconds})


# ---- little memory --------------------------------------------------------------------------------------------------


def mixing(options: Any) -> Iterator[Row]:
    """Yield a row for each memory limit: layers of two kinds against the best with all layers alike."""
    cluster, folded = cluster_named("h100-nvlink-8"), folded_model("llama-7b:layers=28", 8)
    free = mesh_search(folded, cluster, (8,))
    roles = find_roles(free.parts, folded)
    most, least = (free.run(named_plan(name, roles, 1)).held_bytes for name in ("zero1", "zero3"))
    for share in (0.04, 0.08, 0.12, 0.16, 0.2, 0.25):
        limit = least + share * (most - least)
        search = mesh_search(folded, cluster, (8,), limit)
        found = search.run()
        alike = solve(search.assembler.assemble({}, limit=limit).problem, time_limit=10.0)
        gain = 100.0 * (float(alike.cost) / found.seconds - 1.0)
        gap = 100.0 * (found.seconds - found.bound) / found.seconds
        is_open = float(alike.cost) > found.bound * 1.002  # else there is next to nothing to gain
        is_better = found.seconds < float(alike.bound) * (1 - 1e-9) if is_open else found.seconds <= float(alike.cost)
        yield Row(f"28 layers, limit {limit / 2**30:.1f} GiB ({100 * share:.0f} % from ZeRO-3 to ZeRO-1)",
                  f"{found.seconds * 1e3:.5g} ms, layers {dict(found.graph.counts)}, gap to the bound {gap:.2f} %",
                  f"all layers alike {float(alike.cost) * 1e3:.5g} ms ({alike.status}), {gain:.1f} % more",
                  is_better and found.held_bytes <= limit,
                  {"limit": limit, "seconds": found.seconds, "bound": found.bound, "alike": float(alike.cost)})


# ---- folding --------------------------------------------------------------------------------------------------------

FOLDED_MODELS = (
    "gpt2:layers=5", "llama-7b:layers=5,seq=512", "opt-1.3b:layers=5", "mixtral-8x:layers=5,hidden=128,ffn=448,seq=64",
    "bert-large:layers=5", "t5-base:layers=5", "mt5-base:layers=5", "vit-base:layers=5", "swin-t",
    "flava:layers=5,joint_layers=5", "resnet-50", "convnext-t", "whisper-base:layers=5", "vgg-19", "inception-v3", "lstm")


def folded(options: Any) -> Iterator[Row]:
    """Yield a row for every family of models: the best step time with folding and without."""
    from weft.model.trace import trace

    cluster = cluster_named("h100-nvlink-8")
    for model in FOLDED_MODELS:
        if options.match not in model:
            continue
        batch = 64
        short = folded_model(model, batch)
        full = FoldedModel(traced=trace(source_of(model, batch), batch=batch), runs=())
        for shape in ((8,), (2, 4)):
            one, other = (mesh_search(item, cluster, shape).run() for item in (short, full))
            yield Row(f"{model} on {'x'.join(map(str, shape))}",
                      f"folded {one.seconds * 1e3:.9g} ms ({one.status}, {len(short.traced.graph.op_names)} operators)",
                      f"not folded {other.seconds * 1e3:.9g} ms ({other.status}, {len(full.traced.graph.op_names)} operators)",
                      abs(one.seconds - other.seconds) <= 1e-9 * other.seconds,
                      {"model": model, "mesh": shape, "folded": one.seconds, "full": other.seconds})
