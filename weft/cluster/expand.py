"""From the records of a cluster file to a ``Cluster``: names resolved, units read, short forms written out.

Devices of ``hosts`` come first, then those of ``devices``. A host's devices meet at the switch ``HOST/fabric``, hosts
meet at the switch ``network``; half of a connection's latency is on each side of the switch. A device written out
joins the fabric of its host if that is under ``hosts``, else the network (devices of one such host share its card),
unless a link of its own to that switch is written. All problems are collected, each with the path of its field.

The records say what a cluster file may hold, field by field; ``weft.base.files.decode`` fills them from YAML or JSON.
Fields of type ``Any`` are texts with units (``80GiB``, ``400Gbit/s``) or bare numbers (bytes, bytes/s, s, FLOP/s).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from weft.base.errors import ClusterError, InputError
from weft.base.files import MAX_PROBLEMS
from weft.base.units import parse_bytes, parse_flop_rate, parse_rate, parse_time
from weft.cluster.cluster import (
    MAX_DEVICES,
    MAX_MEMORY_BYTES,
    Cluster,
    Contention,
    Device,
    DeviceKind,
    Link,
    check_cluster,
    name_problem,
)
from weft.cluster.presets import KindEntry, LinkPreset, find_link, kind_presets, lookup_kind, suggestion

ABSENT: Final = object()
"""Stands for a field that is not in the file, where null means something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEntry:
    """A connection inside a host: what one device can send and, at the same time, receive."""

    bandwidth: Any
    latency: Any = 0.0
    """From device to device, or from host to host."""
    shared: bool | str = False
    """All devices use one medium, one transfer at a time; text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEntry(RateEntry):
    """The connection between hosts: what one network card can send and, at the same time, receive."""

    per: Literal["host", "device"] = "host"
    """Whether each host has one network card, or each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEntry:
    """``count`` equal hosts; with several, hosts are named ``a-0``, ``a-1`` and devices are numbered on."""

    name: str
    devices: tuple[str, ...] | str
    """Such as ``4 x A100-80GB``, or several of those."""
    count: int = 1
    intra: RateEntry | str | None = None
    """A link preset or rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """One device written out; its kind is a preset, an entry of ``kinds``, or described here."""

    name: str
    kind: str
    host: str | None = None
    """Absent: a host of its own, named as the device."""
    memory: Any = ABSENT
    """Absent: that of the kind; null: unlimited."""
    unit: str | None = None
    """Devices that give the same text compute one at a time."""
    flops: Mapping[str, Any] = field(default_factory=dict)
    memory_bandwidth: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry(RateEntry):
    """A link between two nodes: in both directions, unless ``directed`` or the other direction is listed too.

    If it is ``shared``, both directions are one medium; with a text, one medium with all links of the same text.
    """

    from_: str
    to: str
    directed: bool = False
    source: str = ""
    """Where the figures are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """The whole file but for ``format`` and ``version``."""

    name: str | None = None
    contention: Contention = Contention.LINK
    hosts: tuple[HostEntry, ...] = ()
    network: NetworkEntry | str | None = None
    kinds: Mapping[str, KindEntry] = field(default_factory=dict)
    devices: tuple[DeviceEntry, ...] = ()
    switches: tuple[str, ...] = ()
    """Nodes that links may name beside devices, ``HOST/fabric`` and ``network``."""
    links: tuple[LinkEntry, ...] = ()


T = TypeVar("T")
NETWORK: Final = "network"
_GROUP: Final = re.compile(r"\s*(?:([0-9]+)\s*[xX*]\s*)?(\S[^\n]*)")
_DTYPES: Final = {alias: name for name, aliases in (
    ("float64", "fp64 double"), ("float32", "fp32 float"), ("tf32", ""), ("float16", "fp16 half"), ("bfloat16", "bf16"),
    ("float8", "fp8"), ("int8", "")) for alias in (name, *aliases.split())}
"""Names of dtypes by what people write."""
_NO_LINK: Final = LinkPreset(name="", bytes_per_s=1.0, latency_s=0.0, lanes=1, source="")
_SIMILAR: Final = 0.86
"""A kind without rates whose name is this close to a preset's is taken for a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    """A connection's figures, read."""

    bytes_per_s: float
    latency_s: float
    shared: bool | str
    origin: str
    per: str = "host"


@dataclass(slots=True, kw_only=True)
class _Draft:
    """The cluster while it is being put together."""

    file: ClusterFile
    where: str
    problems: list[str] = field(default_factory=list)
    kinds: dict[str, DeviceKind] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    """Path of the field that introduced each node."""
    hosts: dict[str, str] = field(default_factory=dict)
    """Path of the entry of ``hosts`` that introduced each host."""
    intra: dict[str, _Rate | None] = field(default_factory=dict)
    """Connection inside each host of ``hosts``."""
    described: dict[str, str] = field(default_factory=dict)
    """Path of the device that described each kind which is neither a preset nor under ``kinds``."""

    def note(self, problem: str) -> None:
        """Keep the problem; raise at once when there are many, because looking for more takes time."""
        self.problems.append(problem)
        if len(self.problems) >= MAX_PROBLEMS:
            self.problems.append("... and perhaps more")
            self.check()

    def check(self) -> None:
        """Raise the problems found so far, if any."""
        if self.problems:
            raise ClusterError(f"{self.where}: " + "; ".join(self.problems))


def expand(file: ClusterFile, *, where: str, default_name: str) -> Cluster:
    """Return the cluster that ``file`` means; raise ``ClusterError`` with the path of every field that is wrong."""
    draft = _Draft(file=file, where=where)
    for name, entry in file.kinds.items():
        _add_kind(draft, name, entry)
    network = _read_connection(draft, "network", file.network)
    for index, host in enumerate(file.hosts):
        _add_host(draft, host, f"hosts[{index}]")
    for index, device in enumerate(file.devices):
        _add_device(draft, device, f"devices[{index}]")
    for index, switch in enumerate(file.switches):
        _add_node(draft, switch, f"switches[{index}]")
    _join(draft, network)
    listed = {(link.from_, link.to) for link in file.links}
    for index, link in enumerate(file.links):
        _add_link(draft, link, f"links[{index}]", has_way_back=(link.to, link.from_) in listed)
    _check_switches(draft)
    draft.check()
    cluster = Cluster(name=file.name or default_name, kinds=draft.kinds, devices=tuple(draft.devices),
                      links=tuple(draft.links), contention=file.contention)
    try:
        check_cluster(cluster)
    except ClusterError as problem:
        raise ClusterError(f"{where}: {problem}") from problem
    return cluster


# Reading one value ---------------------------------------------------------------------------------------------------


def _read(draft: _Draft, path: str, value: Any, parse: Callable[[Any], T], default: T) -> T:
    """Return ``parse(value)``; on failure note the problem and return ``default``, so that all problems are found."""
    try:
        return parse(value)
    except InputError as problem:
        draft.note(f"{path}: {problem}")
        return default


def _read_memory(draft: _Draft, path: str, value: Any) -> int | None:
    if value is None:
        return None
    num_bytes = _read(draft, path, value, parse_bytes, 1)
    if not 0 < num_bytes <= MAX_MEMORY_BYTES:
        draft.note(f"{path}: memory {value!r} must be at least 1 byte and at most 2^53")
    return num_bytes


def _read_memory_bandwidth(draft: _Draft, path: str, value: Any) -> float | None:
    return None if value is None else _read(draft, f"{path}.memory_bandwidth", value, parse_rate, 1.0)


def _read_flops(draft: _Draft, path: str, value: Mapping[str, Any]) -> dict[str, float]:
    rates = {}
    for dtype, text in value.items():
        name = _DTYPES.get(dtype.lower())
        if name is None:
            known = ", ".join(dict.fromkeys(_DTYPES.values()))
            draft.note(f"{path}.{dtype} is not a known dtype (known: {known})")
            continue
        if name in rates:
            draft.note(f"{path}.{dtype}: the rate of {name} is there twice")
        rates[name] = _read(draft, f"{path}.{dtype}", text, parse_flop_rate, 1.0)
    return rates


def _read_connection(draft: _Draft, path: str, entry: RateEntry | NetworkEntry | str | None) -> _Rate | None:
    if entry is None:
        return None
    if isinstance(entry, str):
        preset = _read(draft, path, entry, find_link, _NO_LINK)
        return _Rate(bytes_per_s=preset.bytes_per_s, latency_s=preset.latency_s, shared=False,
                     origin=f"preset {preset.name}")
    return _Rate(bytes_per_s=_read(draft, f"{path}.bandwidth", entry.bandwidth, parse_rate, 1.0),
                 latency_s=_read(draft, f"{path}.latency", entry.latency, parse_time, 0.0),
                 shared=entry.shared, origin="", per=entry.per if isinstance(entry, NetworkEntry) else "host")


# Kinds and devices ---------------------------------------------------------------------------------------------------


def _add_kind(draft: _Draft, name: str, entry: KindEntry) -> None:
    path = f"kinds.{name}"
    if not name or len(name) > 100 or not name.isprintable():
        draft.note(f"{path!r}: the name must have 1 to 100 printable characters")
    draft.kinds[name] = DeviceKind(
        name=name, flop_per_s=_read_flops(draft, f"{path}.flops", entry.flops),
        memory_bytes=_read_memory(draft, f"{path}.memory", entry.memory),
        memory_bytes_per_s=_read_memory_bandwidth(draft, path, entry.memory_bandwidth),
        overhead_s=_read(draft, f"{path}.overhead", entry.overhead, parse_time, 0.0), type=entry.type,
        source=entry.source)


def _add_node(draft: _Draft, name: str, path: str) -> None:
    problem = name_problem(name)
    if problem:
        draft.note(f"{path}: the name {name[:100]!r} {problem}")
    elif name in draft.owners:
        draft.note(f"{path}: the name {name!r} is there already, from {draft.owners[name]}")
    draft.owners[name] = path


def _add_host(draft: _Draft, entry: HostEntry, path: str) -> None:
    groups = _read_groups(draft, entry, path)
    per_host = sum(count for count, _kind in groups)
    if entry.count < 1 or per_host < 1:
        if entry.count < 1:
            draft.note(f"{path}.count must be at least 1, not {entry.count}")
        return
    if len(draft.devices) + entry.count * per_host > MAX_DEVICES:
        draft.note(f"{path}: {entry.count} x {per_host} devices are more than the limit of {MAX_DEVICES}")
        return
    problem = name_problem(entry.name)
    if problem:
        draft.note(f"{path}.name: the name {entry.name[:100]!r} {problem}")
        return
    intra = _read_connection(draft, f"{path}.intra", entry.intra)
    number = 0
    for host_index in range(entry.count):
        host = f"{entry.name}-{host_index}" if entry.count > 1 else entry.name
        if host in draft.hosts:
            draft.note(f"{path}.name: the host {host!r} is there already, from {draft.hosts[host]}")
            return
        draft.hosts[host] = path
        draft.intra[host] = intra
        for kind in [kind for count, kind in groups for _ in range(count)]:
            name = f"{entry.name}{number}"
            number += 1
            _add_node(draft, name, path)
            memory = draft.kinds[kind].memory_bytes
            draft.devices.append(Device(name=name, kind=kind, host=host, memory_bytes=memory))


def _read_groups(draft: _Draft, entry: HostEntry, path: str) -> list[tuple[int, str]]:
    """Return (count, kind) for each text such as ``4 x A100-80GB``."""
    is_one = isinstance(entry.devices, str)
    texts = (entry.devices,) if isinstance(entry.devices, str) else entry.devices
    if not texts:
        draft.note(f"{path}.devices has no device: write such as '4 x A100-80GB'")
    groups = []
    for index, text in enumerate(texts):
        here = f"{path}.devices" if is_one else f"{path}.devices[{index}]"
        match = _GROUP.fullmatch(text) if len(text) <= 100 else None
        if match is None:
            draft.note(f"{here}: cannot read {text[:100]!r}: write such as '4 x A100-80GB'")
            continue
        count = int(match[1]) if match[1] else 1
        if not 1 <= count <= MAX_DEVICES:
            draft.note(f"{here}: the count in {text!r} must be 1 to {MAX_DEVICES}")
            continue
        kind = _known_kind(draft, match[2].strip())
        if kind is None:
            draft.note(f"{here}: {_unknown_kind(draft, match[2].strip())}")
            continue
        groups.append((count, kind.name))
    return groups


def _known_kind(draft: _Draft, name: str) -> DeviceKind | None:
    """Return the kind under ``kinds``, or the preset (which ``draft.kinds`` then holds too), or None."""
    if name in draft.kinds:
        return draft.kinds[name]
    preset = lookup_kind(name)
    return None if preset is None else draft.kinds.setdefault(preset.kind.name, preset.kind)


def _unknown_kind(draft: _Draft, name: str) -> str:
    names = list(dict.fromkeys([*draft.file.kinds, *kind_presets()]))
    return (f"unknown device kind {name[:100]!r}{suggestion(name, names)}. Presets: {', '.join(kind_presets())}; "
            "describe other kinds under 'kinds:'")


def _add_device(draft: _Draft, entry: DeviceEntry, path: str) -> None:
    _add_node(draft, entry.name, f"{path}.name")
    host = entry.name if entry.host is None else entry.host
    problem = name_problem(host)
    if problem:
        draft.note(f"{path}.host: the name {host[:100]!r} {problem}")
    kind = _device_kind(draft, entry, path)
    memory = kind.memory_bytes if entry.memory is ABSENT else _read_memory(draft, f"{path}.memory", entry.memory)
    draft.devices.append(Device(name=entry.name, kind=kind.name, host=host, memory_bytes=memory, unit=entry.unit))


def _device_kind(draft: _Draft, entry: DeviceEntry, path: str) -> DeviceKind:
    """Return the device's kind: one under ``kinds``, one that an earlier device described, a preset, or its own."""
    flops = _read_flops(draft, f"{path}.flops", entry.flops)
    bandwidth = _read_memory_bandwidth(draft, path, entry.memory_bandwidth)
    own = DeviceKind(name=entry.kind, flop_per_s=flops, memory_bytes_per_s=bandwidth)
    has_rates = bool(flops) or bandwidth is not None
    known = _known_kind(draft, entry.kind)
    if known is None:
        is_typo = not has_rates and suggestion(entry.kind, [*draft.file.kinds, *kind_presets()], cutoff=_SIMILAR)
        if is_typo or not entry.kind.isprintable() or not 0 < len(entry.kind) <= 100:
            draft.note(f"{path}.kind: {_unknown_kind(draft, entry.kind)}")
        draft.described[entry.kind] = path
        draft.kinds[entry.kind] = own
        return own
    if has_rates and entry.kind not in draft.described:
        draft.note(f"{path}.flops and memory_bandwidth: the kind {known.name!r} has its own; give the device another "
                   "kind, or write the rates under 'kinds:'")
    elif has_rates and own != known:
        draft.note(f"{path}.flops and memory_bandwidth differ from {draft.described[entry.kind]}, which is of the same "
                   f"kind {entry.kind!r}; give the device another kind")
    return known


# Links ---------------------------------------------------------------------------------------------------------------


def _join(draft: _Draft, network: _Rate | None) -> None:
    """Add the links that ``intra`` and ``network`` mean."""
    written = {frozenset((link.from_, link.to)) for link in draft.file.links}
    linked = {end for link in draft.file.links for end in (link.from_, link.to)}
    members: dict[str, list[str]] = {}
    for device in draft.devices:
        members.setdefault(device.host, []).append(device.name)
    if network is not None:
        _add_node(draft, NETWORK, "network")
    for host, names in members.items():
        intra = draft.intra.get(host)
        on_network = names
        if intra is not None:
            fabric = f"{host}/fabric"
            _add_node(draft, fabric, f"{draft.hosts[host]}.intra")
            joined = [name for name in names if frozenset((name, fabric)) not in written]
            _connect(draft, joined, fabric, intra, medium=_medium(intra, f"{host}/bus"))
            on_network = names if network is not None and network.per == "device" else [fabric]
        elif host in draft.hosts and len(names) > 1 and (network or linked) and linked.isdisjoint(names):
            draft.note(f"{draft.hosts[host]}.intra is missing: say how the {len(names)} devices of host {host!r} are "
                       "connected, such as 'intra: pcie4' or 'intra: {bandwidth: 50GB/s, latency: 5us}'")
        if network is not None:
            joined = [name for name in on_network if frozenset((name, NETWORK)) not in written]
            has_one_card = len(on_network) > 1 and network.per == "host"
            _connect(draft, joined, NETWORK, network, medium=_medium(network, NETWORK),
                     card=f"{host}/card" if has_one_card else None)


def _medium(rate: _Rate, name: str) -> str | None:
    return name if rate.shared is True else (rate.shared or None)


def _connect(draft: _Draft, nodes: list[str], switch: str, rate: _Rate, *, medium: str | None,
             card: str | None = None) -> None:
    """Join each node with the switch; ``medium`` is one for all directions, ``card`` one for each direction."""
    for node in nodes:
        for source, target, way in ((node, switch, "out"), (switch, node, "in")):
            shared = medium or (f"{card}/{way}" if card else None)
            draft.links.append(Link(source=source, target=target, bytes_per_s=rate.bytes_per_s,
                                    latency_s=rate.latency_s / 2, shared=shared, origin=rate.origin))


def _add_link(draft: _Draft, entry: LinkEntry, path: str, *, has_way_back: bool) -> None:
    """Add one direction, and the other unless the file lists it (``has_way_back``) or says ``directed``."""
    for end, name in (("from", entry.from_), ("to", entry.to)):
        if name not in draft.owners:
            near = suggestion(name, draft.owners) if len(draft.owners) <= 1000 else ""
            draft.note(f"{path}.{end}: there is no device or switch {name[:100]!r}{near}; list switches under "
                       "'switches:'")
    if entry.from_ == entry.to:
        draft.note(f"{path}: {entry.from_[:100]!r} is linked to itself")
    bytes_per_s = _read(draft, f"{path}.bandwidth", entry.bandwidth, parse_rate, 1.0)
    latency_s = _read(draft, f"{path}.latency", entry.latency, parse_time, 0.0)
    ends = sorted((entry.from_, entry.to)) if has_way_back else (entry.from_, entry.to)
    shared = "-".join(ends) if entry.shared is True else (entry.shared or None)
    ways = [(entry.from_, entry.to)] + ([] if entry.directed or has_way_back else [(entry.to, entry.from_)])
    for source, target in ways:
        draft.links.append(Link(source=source, target=target, bytes_per_s=bytes_per_s, latency_s=latency_s,
                                shared=shared, origin=entry.source))


def _check_switches(draft: _Draft) -> None:
    linked = {end for link in draft.links for end in (link.source, link.target)}
    for index, name in enumerate(draft.file.switches):
        if name not in linked:
            draft.note(f"switches[{index}]: no link reaches the switch {name[:100]!r}")
