"""Device kinds and links by name: ``A100-80GB``, ``nvlink3``, ``ethernet100``. The figures are in ``presets.yaml``.

Names are forgiving: case, spaces, dashes and underscores do not matter, vendor words such as ``NVIDIA`` or ``Tesla``
may lead, and common short names work (``A100`` is ``A100-80GB``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

from weft.base.errors import ClusterError
from weft.base.files import decode
from weft.base.units import parse_bytes, parse_flop_rate, parse_rate, parse_time
from weft.cluster.cluster import DeviceKind
from weft.cluster.yaml_text import parse_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPreset:
    """A device kind and how such devices are usually attached."""

    kind: DeviceKind
    link: str
    """The link preset that attaches the device to its host, such as ``pcie4``."""
    nvlink: str | None
    """The link preset of its NVLink generation, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPreset:
    """What a link can do in one direction."""

    name: str
    bytes_per_s: float
    latency_s: float
    lanes: int
    """How many lanes the bandwidth is the sum of; meaningful for NVLink."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KindEntry:
    """A device kind in a file; fields of type ``Any`` are texts with units or bare numbers."""

    flops: Mapping[str, Any] = field(default_factory=dict)
    memory: Any = None
    memory_bandwidth: Any = None
    overhead: Any = 0.0
    type: Literal["gpu", "cpu"] = "gpu"
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KindEntry(KindEntry):
    link: str
    nvlink: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkEntry:
    bandwidth: str
    latency: str
    source: str
    lanes: int = 1
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _PresetFile:
    kinds: Mapping[str, _KindEntry]
    links: Mapping[str, _LinkEntry]


@cache
def _file() -> _PresetFile:
    text = files("weft.cluster").joinpath("presets.yaml").read_text(encoding="utf-8")
    return decode(_PresetFile, parse_yaml(text, where="presets.yaml"), where="presets.yaml", error=ClusterError)


@cache
def kind_presets() -> Mapping[str, KindPreset]:
    """Return all device kinds by name."""
    return {name: KindPreset(
        link=entry.link, nvlink=entry.nvlink,
        kind=DeviceKind(name=name, type=entry.type, source=entry.source,
                        flop_per_s={dtype: parse_flop_rate(rate) for dtype, rate in entry.flops.items()},
                        memory_bytes=None if entry.memory is None else parse_bytes(entry.memory),
                        memory_bytes_per_s=parse_rate(entry.memory_bandwidth), overhead_s=parse_time(entry.overhead)))
            for name, entry in _file().kinds.items()}


@cache
def link_presets() -> Mapping[str, LinkPreset]:
    """Return all links by name."""
    return {name: LinkPreset(name=name, bytes_per_s=parse_rate(entry.bandwidth), latency_s=parse_time(entry.latency),
                             lanes=entry.lanes, source=entry.source) for name, entry in _file().links.items()}


@cache
def _names(part: Literal["kinds", "links"]) -> Mapping[str, str]:
    """Return the canonical names by normalised name or alias."""
    entries: Mapping[str, _KindEntry | _LinkEntry] = getattr(_file(), part)
    names = {normal_name(name): name for name in entries}
    for name, entry in entries.items():
        for alias in entry.aliases:
            names.setdefault(normal_name(alias), name)
    return names


_VENDOR_WORDS: Final = re.compile(r"^(nvidia|tesla|geforce|gtx|intel|amd)+(?=.)")


def normal_name(name: str) -> str:
    """Return ``name`` without case, spaces, dashes, underscores and leading vendor words."""
    return _VENDOR_WORDS.sub("", re.sub(r"[\s_-]+", "", name.lower()))


def lookup_kind(name: str) -> KindPreset | None:
    """Return the device kind that ``name`` means, or None."""
    found = _names("kinds").get(normal_name(name))
    return None if found is None else kind_presets()[found]


def find_kind(name: str) -> KindPreset:
    """Return the device kind that ``name`` means; raise ``ClusterError`` with similar names if there is none."""
    preset = lookup_kind(name)
    if preset is None:
        raise ClusterError(f"unknown device kind {name[:100]!r}{suggestion(name, kind_presets())}. Presets: "
                           f"{', '.join(kind_presets())}")
    return preset


def find_link(name: str) -> LinkPreset:
    """Return the link that ``name`` means; raise ``ClusterError`` with similar names if there is none."""
    found = _names("links").get(normal_name(name))
    if found is None:
        raise ClusterError(f"unknown link {name[:100]!r}{suggestion(name, link_presets())}. Presets: "
                           f"{', '.join(link_presets())}; or write {{bandwidth: 50GB/s, latency: 5us}}")
    return link_presets()[found]


def suggestion(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``" (did you mean 'A100-80GB'?)"`` with up to three names like ``name``, or ``""``."""
    by_normal = {normal_name(item): item for item in known}
    close = difflib.get_close_matches(normal_name(name)[:60], by_normal, n=3, cutoff=cutoff)
    return f" (did you mean {' or '.join(repr(by_normal[item]) for item in close)}?)" if close else ""
