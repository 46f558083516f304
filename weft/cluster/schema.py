"""What a cluster file may hold, field by field, before names are resolved and texts with units are read.

``weft.base.files.decode`` fills these records from YAML or JSON; ``weft.cluster.expand`` turns them into a ``Cluster``.
Fields of type ``Any`` are texts with units (``80GiB``, ``400Gbit/s``) or bare numbers (bytes, bytes/s, s, FLOP/s).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from weft.cluster.cluster import Contention

ABSENT: Final = object()
"""Stands for a field that is not in the file, where null means something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEntry:
    """A connection inside a host: what one device can send and, at the same time, receive."""

    bandwidth: Any
    latency: Any = 0.0
    """From device to device."""
    shared: bool | str = False
    """All devices use one medium, one transfer at a time; text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEntry:
    """The connection between hosts: what one network card can send and, at the same time, receive."""

    bandwidth: Any
    latency: Any = 0.0
    """From host to host."""
    shared: bool | str = False
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
class KindEntry:
    """A device kind of the user's own."""

    flops: Mapping[str, Any] = field(default_factory=dict)
    memory: Any = None
    memory_bandwidth: Any = None
    overhead: Any = 0.0
    type: Literal["gpu", "cpu"] = "gpu"
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    """A link between two nodes: in both directions, unless ``directed`` or the other direction is listed too."""

    from_: str
    to: str
    bandwidth: Any
    latency: Any = 0.0
    shared: bool | str = False
    """True: both directions are one medium; text: one medium with all links of the same text."""
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
