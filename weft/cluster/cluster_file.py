"""Cluster files in and out: YAML or JSON, short form (hosts and presets) or long form (every device and link).

    load_cluster("cluster.yaml")                    a file
    read_cluster("2 x A100-80GB, 2 x RTX3090")      a file's path, or one host written in one line
    save_cluster(cluster, "cluster.json")           the long form; loading it gives an equal cluster

Whatever a file holds, the only error is ``ClusterError``: values are checked for size, depth and type before they are
decoded (``weft.cluster.expand``) and expanded (``weft.cluster.expand``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from weft.base.errors import ClusterError
from weft.base.files import check_header, decode, parse_json, read_bytes, write_atomic
from weft.cluster.cluster import Cluster
from weft.cluster.expand import ClusterFile, expand
from weft.cluster.presets import find_kind, find_link
from weft.cluster.yaml_text import parse_yaml

FORMAT: Final = "weft.cluster"
VERSION: Final = 1
_MAX_DEPTH: Final = 12
_MAX_INT: Final = 2**63
_SUFFIXES: Final = (".json", ".json.gz", ".yaml", ".yml", ".yaml.gz", ".yml.gz")


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Return the cluster in the file ``path``; its name is the file's unless it gives one."""
    where = os.fspath(path)
    data = read_bytes(where, error=ClusterError)
    name = Path(where).name
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    is_json = suffix.startswith(".json") or (not suffix and data.lstrip()[:1] == b"{")
    value = parse_json(data, where=where, error=ClusterError) if is_json else parse_yaml(data, where=where)
    return parse_cluster(value, where, default_name=name.removesuffix(suffix) or "cluster")


def parse_cluster(value: Any, where: str = "cluster", *, default_name: str = "cluster") -> Cluster:
    """Return the cluster that the plain value of a cluster file means; ``where`` leads the error messages."""
    _check_plain(value, where)
    content = check_header(value, format_name=FORMAT, version=VERSION, where=where, error=ClusterError)
    return expand(decode(ClusterFile, content, where=where, error=ClusterError), where=where, default_name=default_name)


def _check_plain(value: Any, where: str) -> None:
    """Raise unless ``value`` is made of JSON's types, not deep, with text keys and numbers of ordinary size."""
    pending: list[tuple[Any, str, int]] = [(value, "", 0)]
    while pending:
        item, path, depth = pending.pop()
        problem = None
        if depth > _MAX_DEPTH:
            problem = "is nested too deeply"
        elif isinstance(item, dict):
            for key, child in item.items():
                if not isinstance(key, str) or not key.isprintable():
                    raise ClusterError(f"{where}: {path or 'the file'} has a key that is not plain text")
                pending.append((child, f"{path}.{key[:60]}" if path else key[:60], depth + 1))
        elif isinstance(item, list | tuple):
            pending.extend((child, f"{path}[{index}]", depth + 1) for index, child in enumerate(item))
        elif isinstance(item, str):
            has_surrogate = any("\ud800" <= letter <= "\udfff" for letter in item)
            problem = "is text with half a character" if has_surrogate else None
        elif isinstance(item, int) and abs(item) >= _MAX_INT:
            problem = "is a number that is too large"
        elif item is not None and not isinstance(item, int | float):
            problem = f"is neither text, number, list nor object, but {type(item).__name__}"
        if problem:
            raise ClusterError(f"{where}: {path or 'the file'} {problem}")


def parse_cluster_text(text: str) -> Cluster:
    """Return one host with the devices that ``text`` lists, such as ``"2 x A100-80GB, 2x RTX3090"``.

    They are joined by PCI Express of the oldest generation among them (processes on a CPU: loopback), or by the link
    preset after ``over``: ``"8 x H100 over nvlink4"``.
    """
    where = f"cluster {text[:100]!r}"
    devices, _, link = text.partition(" over ")
    groups = [part.strip() for part in devices.split(",")]
    host: dict[str, Any] = {"name": "a", "devices": groups}
    cluster = parse_cluster({"format": FORMAT, "version": VERSION, "hosts": [host], "name": text}, where)
    if cluster.num_devices == 1 and not link:
        return cluster
    links = [find_link(find_kind(kind).link) for kind in cluster.kinds]
    host["intra"] = link.strip() or min(links, key=lambda preset: preset.bytes_per_s).name
    return parse_cluster({"format": FORMAT, "version": VERSION, "hosts": [host], "name": text}, where)


def read_cluster(spec: str) -> Cluster:
    """Return the cluster in the file ``spec``, or the one that the text ``spec`` lists (``"4 x A100-80GB"``)."""
    if "\0" in spec or os.path.exists(spec) or os.sep in spec or spec.endswith(_SUFFIXES):
        return load_cluster(spec)
    try:
        return parse_cluster_text(spec)
    except ClusterError as problem:
        raise ClusterError(f"there is no file {spec[:100]!r}, and it lists no devices: {problem}") from problem


def to_json(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as the plain value of a long-form file; ``parse_cluster`` of it gives an equal cluster."""
    value: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "name": cluster.name, "contention": cluster.contention.value,
        "kinds": {name: {"type": kind.type, "flops": dict(kind.flop_per_s), "memory": kind.memory_bytes,
                         "memory_bandwidth": kind.memory_bytes_per_s, "overhead": kind.overhead_s,
                         "source": kind.source} for name, kind in cluster.kinds.items()},
        "devices": [{"name": device.name, "kind": device.kind, "host": device.host, "memory": device.memory_bytes,
                     **({} if device.unit is None else {"unit": device.unit})} for device in cluster.devices]}
    if cluster.links:
        value["switches"] = list(cluster.switches)
        value["links"] = [
            {"from": link.source, "to": link.target, "directed": True, "bandwidth": link.bytes_per_s,
             "latency": link.latency_s, **({} if link.shared is None else {"shared": link.shared}),
             **({"source": link.origin} if link.origin else {})}
            for link in cluster.links]
    return value


def save_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write the cluster to ``path`` in the long form, as JSON (which is YAML too)."""
    write_atomic(path, json.dumps(to_json(cluster), indent=1) + "\n")
