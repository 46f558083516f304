"""Problems to train the deployment policy on, and which ones are kept apart to judge it.

``training_case(seed)`` draws a model of one of six families (``benchmarks.policy_training.models``), a cluster, a
batch, a dtype and an optimizer, all from one generator of that seed. Clusters have up to four hosts on one switch, of
equal or mixed devices: the presets in ``PRESETS``, or made-up kinds with one of five speeds. Hosts of one cluster may
have different network cards, and sometimes one card is much slower than the others.

Held out, and used in ``benchmarks.bench_deploy`` only:

- Models: traced models of the zoo that have a structure which no family draws: decoders with the output layer tied to
  the embedding (``gpt2``, ``opt``), with gated feed-forward layers (``llama``), encoders with decoders that all read
  the encoder's end (``t5``, ``mt5``, ``whisper``), branches that part and join in every block (``inception-v3``),
  windows and merging of patches (``swin-t``), depth-wise convolutions (``convnext-t``), two encoders and a joint one
  (``flava``), recurrence (``lstm``). Layers of attention and feed-forward are in many of them, as in the family
  ``encoder``: what is new there is the wiring around, the output layer as wide as the vocabulary, and the sizes.
  ``vgg-19``, ``resnet-50``, ``bert-large`` and ``vit-base`` are of the same structure as a training family each: the
  benchmark shows them apart, and counts them nowhere.
- Clusters: the files in ``benchmarks/problems/deploy``. Training has stars of hosts around one switch, of made-up kinds
  and five presets. The files have other presets (P100, V100, 1080 Ti, T4, A100, processors), links from host to host,
  and racks of two levels. A star with one slow link is in both; kinds and rates are not.

So that there is something to learn, clusters are drawn until data parallelism would spend between ``LEAST_LOAD`` and
``MOST_LOAD`` times as long on the network as on compute (or the nearest of a few draws is taken). The memory of all
devices is never less than ``MIN_ROOM`` times what one copy of the model's states and activations takes, and the largest
device has room for the largest layer: so nearly always something fits, and in some cases not much does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from benchmarks.policy_training.models import FAMILIES, random_model
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import F64, Graph
from weft.plan.memory import optimizer_bytes
from weft.plan.plan import Optimizer, OptimizerKind
from weft.search.common.problem import PlanOptions, Problem

BATCHES: Final = (8, 12, 16, 20, 24, 32, 40, 48, 60, 64, 96, 100, 128, 144, 160, 192, 200, 240, 256)
LEAST_LOAD: Final = 0.05
MOST_LOAD: Final = 20.0
MIN_ROOM: Final = 1.5
TIGHT_ROOM: Final = 4.0
"""In tight cases there is room for up to so many copies."""
TIGHT_PART: Final = 0.3
"""Part of the cases whose memory is tight."""
_MAX_DRAWS: Final = 12


def training_case(seed: int) -> Problem:
    """Return the training problem of a seed; the model is named ``FAMILY-SEED``."""
    rng = np.random.default_rng([seed, 6])
    family = tuple(FAMILIES)[int(rng.integers(len(FAMILIES)))]
    batch, dtype = int(rng.choice(BATCHES)), str(rng.choice(["float32", "bfloat16"]))
    kinds: tuple[OptimizerKind, ...] = ("sgd", "adam", "adamw")
    optimizer = Optimizer(kind=kinds[int(rng.integers(len(kinds)))])
    graph = random_model(family, rng, name=f"{family}-{seed}", batch=batch, dtype=dtype)
    cluster = _with_room(_suitable_cluster(rng, graph, dtype, f"cluster-{seed}"), graph, optimizer, rng)
    options = PlanOptions(batch=batch, dtype=dtype, optimizer=optimizer, seed=seed)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=options)


def _suitable_cluster(rng: np.random.Generator, graph: Graph, dtype: str, name: str) -> Cluster:
    """Return a random cluster whose network is neither idle nor hopeless for data parallelism."""
    draws = []
    for _ in range(_MAX_DRAWS):
        cluster = random_cluster(rng, name)
        load = network_load(graph, cluster, dtype)
        draws.append((max(LEAST_LOAD / load, load / MOST_LOAD, 1.0), cluster))
        if draws[-1][0] == 1.0:
            break
    return min(draws, key=lambda draw: draw[0])[1]


def network_load(graph: Graph, cluster: Cluster, dtype: str) -> float:
    """Return roughly how many times as long data parallelism spends on the slowest link as on compute."""
    rates = [cluster.kinds[device.kind].flop_per_s[dtype] for device in cluster.devices]
    compute_s = 3 * float(graph.flops.sum()) / (len(rates) * min(rates) / 2)
    return 2 * graph.parameter_bytes / min(link.bytes_per_s for link in cluster.links) / compute_s


def _with_room(cluster: Cluster, graph: Graph, optimizer: Optimizer, rng: np.random.Generator) -> Cluster:
    """Return the cluster with memory for the model, in some cases only just."""
    states = state_bytes(graph, optimizer)
    saved = float(graph.tensor_bytes[graph.is_saved].sum() + graph.saved_inside_bytes.sum())
    sizes = [device.memory_bytes or 0 for device in cluster.devices]
    layer = np.zeros(graph.num_ops)
    np.add.at(layer, graph.consumer_op, states[graph.inputs])
    least = 2 * (float(layer.max()) + 2 * saved / graph.batch) * sum(sizes) / max(sizes)
    room = max(float(rng.uniform(MIN_ROOM, TIGHT_ROOM)) * (float(states.sum()) + saved), least)
    is_tight = rng.random() < TIGHT_PART
    return with_total_memory(cluster, room) if is_tight or sum(sizes) < room else cluster


def state_bytes(graph: Graph, optimizer: Optimizer) -> F64:
    """Return the bytes of each parameter, its gradient and its optimizer states, by tensor."""
    result = np.zeros(graph.num_tensors)
    for tensor in graph.parameters.tolist():
        result[tensor] = 2 * int(graph.tensor_bytes[tensor]) + optimizer_bytes(graph, tensor, optimizer)
    return result


# ---- clusters -------------------------------------------------------------------------------------------------------

PRESETS: Final = ("RTX3090", "RTX4090", "A10", "L4", "H100")
"""The presets that training sees; the others are held out."""
SPEEDS: Final = (2e12, 5e12, 12e12, 28e12, 65e12)
"""float32 operations per second of made-up kinds."""
MAX_DEVICES: Final = 16
_INSIDE: Final = (8e9, 16e9, 32e9, 63e9, 100e9, 200e9, 450e9)
"""Bytes per second between the devices of a host: PCI Express by halves and generations, then NVLink."""
_SWITCH: Final = "core"


def random_cluster(rng: np.random.Generator, name: str) -> Cluster:
    """Return a random cluster of 2 to ``MAX_DEVICES`` devices."""
    kinds = {f"made-{index}": _made_up_kind(rng) for index in range(2)}
    names = (*kinds, *rng.permutation(PRESETS)[:2].tolist())
    hosts = _hosts(rng, names)
    used = {text.split(" x ")[1] for host in hosts for text in host["devices"]}
    value: dict[str, Any] = {"format": "weft.cluster", "version": 1, "name": name, "hosts": hosts,
                             "kinds": {kind: entry for kind, entry in kinds.items() if kind in used}}
    if len(hosts) > 1:
        value |= {"switches": [_SWITCH], "links": _links(rng, [host["name"] for host in hosts])}
    return parse_cluster(value, where=name)


def with_total_memory(cluster: Cluster, num_bytes: float) -> Cluster:
    """Return the cluster with the memory of all devices made larger or smaller alike, to ``num_bytes`` in all."""
    own = sum(device.memory_bytes or 0 for device in cluster.devices)
    devices = tuple(replace(device, memory_bytes=round((device.memory_bytes or 0) * num_bytes / own))
                    for device in cluster.devices)
    return replace(cluster, devices=devices)


def _made_up_kind(rng: np.random.Generator) -> dict[str, Any]:
    speed = SPEEDS[int(rng.integers(len(SPEEDS)))] * float(rng.uniform(0.8, 1.25))
    return {"flops": {"float32": speed, "bfloat16": speed * float(rng.choice([1, 2, 4, 8]))},
            "memory": int(rng.choice([8, 12, 16, 24, 32, 48, 80])) * 10**9,
            "memory_bandwidth": float(np.exp(rng.uniform(np.log(2e11), np.log(2.5e12)))), "overhead": 5e-6}


def _hosts(rng: np.random.Generator, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the entries of the hosts: all equal, or each with its own kind, or with two kinds in one host."""
    num_hosts = int(rng.choice([1, 2, 2, 3, 3, 4, 4]))
    is_equal = rng.random() < 0.25
    count, kind, inside = _count(rng), str(rng.choice(kinds)), float(rng.choice(_INSIDE))
    left, hosts = MAX_DEVICES, []
    for index in range(num_hosts):
        if not is_equal:
            count, kind, inside = _count(rng), str(rng.choice(kinds)), float(rng.choice(_INSIDE))
        count = max(1, min(count, left - (num_hosts - 1 - index)))
        if num_hosts == 1:
            count = max(count, 2)
        groups = [(count, kind)]
        other = str(rng.choice(kinds))
        if count > 1 and other != kind and not is_equal and rng.random() < 0.2:
            groups = [(count - count // 2, kind), (count // 2, other)]
        left -= count
        hosts.append({"name": f"h{index}", "devices": [f"{number} x {name}" for number, name in groups],
                      "intra": {"bandwidth": inside, "latency": 5e-6}})
    return hosts


def _count(rng: np.random.Generator) -> int:
    return int(rng.choice([1, 1, 2, 2, 3, 4, 4, 6, 8]))


def _links(rng: np.random.Generator, hosts: list[str]) -> list[dict[str, Any]]:
    """Return the links of the hosts to the switch: 1 to 100 Gbit/s, in some clusters one of them much slower."""
    rate, latency = float(np.exp(rng.uniform(np.log(1.25e8), np.log(1.25e10)))), float(rng.uniform(2e-6, 3e-5))
    rates = np.full(len(hosts), rate)
    if rng.random() < 0.2:
        rates *= np.exp(rng.uniform(np.log(0.3), np.log(3.0), size=len(hosts)))
    if rng.random() < 0.25:
        rates[int(rng.integers(len(hosts)))] /= float(rng.uniform(4, 20))
    return [{"from": f"{host}/fabric", "to": _SWITCH, "bandwidth": float(own), "latency": latency}
            for host, own in zip(hosts, rates, strict=True)]
