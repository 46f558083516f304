"""Clusters and models that the tests of sharding share, and the way from a model to its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.cluster.cluster import Cluster, Contention, Device, DeviceKind, Link
from weft.cost.costs import estimate_costs
from weft.cost.mesh import Mesh
from weft.model.folded import FoldedModel, trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.plan.plan import Optimizer
from weft.search.common.budget import Budget
from weft.search.shard.folded_graph import Assembler
from weft.search.shard.mesh import Resharding
from weft.search.shard.model_search import MeshSearch
from weft.search.shard.parts import ModelParts, PartBuilder


def cluster_of(hosts: Sequence[int], *, flop_per_s: float = 1e12, memory_bytes_per_s: float = 1e12,
               link: tuple[float, float] = (1e9, 1e-6), network: tuple[float, float] = (1e8, 1e-5)) -> Cluster:
    """Return hosts with so many equal devices each; ``link`` and ``network`` are (bytes/s, seconds) one way.

    Devices hang on their host's switch, with half of the latency on the way there; hosts hang on one network.
    """
    kind = DeviceKind(name="unit", flop_per_s={"float32": flop_per_s}, memory_bytes=None,
                      memory_bytes_per_s=memory_bytes_per_s)
    devices = tuple(Device(name=f"h{host}d{index}", kind="unit", host=f"h{host}", memory_bytes=None)
                    for host, count in enumerate(hosts) for index in range(count))
    ends = [(device.name, f"{device.host}/switch", link) for device in devices]
    if len(hosts) > 1:
        ends += [(f"h{host}/switch", "network", network) for host in range(len(hosts))]
    links = tuple(Link(source=a, target=b, bytes_per_s=rate, latency_s=latency / 2)
                  for end, other, (rate, latency) in ends for a, b in ((end, other), (other, end)))
    return Cluster(name="test", kinds={"unit": kind}, devices=devices, links=links, contention=Contention.LINK)


def source_of(make: Callable[[], nn.Module], *shapes: tuple[int, ...], batch: int = 4,
              mode: str = "training") -> ModelSource:
    """Return a float32 model made on the spot, with inputs of these shapes behind the batch."""
    def sample(_mode: str, size: int, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(size, *shape, generator=generator) for shape in shapes)

    return ModelSource(name="test", spec="test", batch=batch, mode=mode, builder=lambda _mode: make(), sampler=sample)


def zoo(spec: str, *, batch: int = 4, mode: str = "training") -> ModelSource:
    source = resolve_model(spec, mode=mode, batch=batch)
    assert isinstance(source, ModelSource)
    return source


def whole(source: ModelSource) -> FoldedModel:
    """Return the model with every layer, as one that has no runs."""
    return FoldedModel(traced=trace(source, fold=False), runs=())


def parts_of(folded: FoldedModel, cluster: Cluster, shape: Sequence[int], *, optimizer: str = "adam",
             splits_states: bool = True) -> ModelParts:
    """Return the parts of a model on the cluster's first devices."""
    devices = range(math.prod(shape))
    return PartBuilder(traced=folded.traced, costs=estimate_costs(folded.traced.graph, cluster), devices=devices,
                       resharding=Resharding(Mesh(cluster, devices, shape)), optimizer=Optimizer(kind=optimizer),
                       splits_states=splits_states).build()


def assembler_of(folded: FoldedModel, cluster: Cluster, shape: Sequence[int]) -> Assembler:
    return Assembler(parts_of(folded, cluster, shape), folded)


def search_of(source: ModelSource | FoldedModel, cluster: Cluster, shape: Sequence[int], *,
              limit: float | None = None, optimizer: str = "adam") -> MeshSearch:
    """Return the search for a model on the cluster's first devices."""
    folded = trace_folded(source) if isinstance(source, ModelSource) else source
    return MeshSearch(folded, estimate_costs(folded.traced.graph, cluster),
                      Mesh(cluster, range(math.prod(shape)), shape), optimizer=Optimizer(kind=optimizer),
                      limit_bytes=limit, budget=Budget(effort=math.inf))


def chosen(parts: ModelParts, node_part: Sequence[int], choice: Sequence[int]) -> Mapping[str, int]:
    """Return the choice of every part by its name; operators and tensors of one name differ by their kind."""
    return {f"{parts.parts[part].kind} {parts.parts[part].name}": strategy
            for part, strategy in zip(node_part, choice, strict=True)}
