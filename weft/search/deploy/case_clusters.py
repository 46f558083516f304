"""Random clusters for training the policy: up to four hosts on one switch, equal or mixed, with fast or slow links.

Kinds are the presets in ``PRESETS`` or made up, with one of five speeds. Hosts of one cluster may have different
network cards, and sometimes one card is much slower than the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster

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
