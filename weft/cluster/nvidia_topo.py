"""The text of ``nvidia-smi topo -m`` to a cluster of one host.

            GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
    GPU0     X      NV12    PXB     0-31            0
    GPU1    NV12     X      SYS     32-63           1

``NV#`` is a bundle of # NVLinks. Where a GPU's bundles add up to more links than it has, they lead to a switch, else
each is a direct link. All other pairs meet in a tree of PCI Express and socket nodes, by the closest level that joins
them: PIX (one switch), PXB (several), PHB (a host bridge), NODE (one NUMA node), SYS (the interconnect of sockets). A
GPU reaches a node, and a node the next, over one link of the kind's PCI Express generation, which everything below
shares; only SYS is slower. With two parts below SYS each has its own link in each direction; with more it cannot be
known which sockets are between them, so all of SYS counts as one medium. Network cards and affinities are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weft.base.errors import ClusterError
from weft.cluster.cluster import Cluster, Device, Link, both_ways, check_cluster
from weft.cluster.presets import KindPreset, LinkPreset, find_kind, find_link

LEVELS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCI Express relations, closest first."""
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU: Final = re.compile(r"GPU[0-9]{1,5}")
_BUNDLE: Final = re.compile(r"NV([0-9]{1,3})")
_OLD_NAMES: Final = {"SOC": "SYS"}
_MAX_GPUS: Final = 128

Cells = Mapping[tuple[str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    gpus: tuple[str, ...]
    cells: Cells
    """``NV4``, ``PIX``, ... by ordered pair of different GPUs; the same both ways."""

    def lanes(self, a: str, b: str) -> int:
        match = _BUNDLE.fullmatch(self.cells[a, b])
        return int(match[1]) if match else 0


def parse_topo(text: str, *, kind: str = "H100", name: str = "topo", host: str = "host") -> Cluster:
    """Return the cluster that the text of ``nvidia-smi topo -m`` describes, its GPUs all of one preset kind."""
    preset = find_kind(kind)
    matrix = _read_matrix(text)
    links = [*_nvlinks(matrix, preset)]
    if any(not matrix.lanes(a, b) for a, b in matrix.cells):
        links.extend(_pcie_tree(matrix, find_link(preset.link)))
    devices = tuple(Device(name=gpu, kind=preset.kind.name, host=host, memory_bytes=preset.kind.memory_bytes)
                    for gpu in matrix.gpus)
    cluster = Cluster(name=name, kinds={preset.kind.name: preset.kind}, devices=devices, links=tuple(links))
    check_cluster(cluster)
    return cluster


def _read_matrix(text: str) -> _Matrix:
    lines = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words and _GPU.fullmatch(words[0]) and "X" not in words), None)
    if header is None:
        raise ClusterError("this is no output of 'nvidia-smi topo -m': there is no line 'GPU0 GPU1 ... CPU Affinity'")
    columns = header[: header.index("CPU")] if "CPU" in header else header
    gpus = tuple(word for word in columns if _GPU.fullmatch(word))
    if len(set(columns)) != len(columns) or len(gpus) > _MAX_GPUS:
        raise ClusterError(f"the header of the topology names a column twice, or more than {_MAX_GPUS} GPUs")
    rows = {words[0]: words[1:] for words in lines if words and words[0] in gpus and words is not header}
    missing = [gpu for gpu in gpus if len(rows.get(gpu, ())) < len(columns)]
    if missing:
        raise ClusterError(f"the topology has no row of {len(columns)} cells for {', '.join(missing[:5])}")
    cells = {}
    for gpu in gpus:
        for column, cell in zip(columns, rows[gpu], strict=False):
            if column in gpus and column != gpu:
                cells[gpu, column] = _checked_cell(gpu, column, _OLD_NAMES.get(cell, cell))
    for (a, b), cell in cells.items():
        if cells[b, a] != cell:
            raise ClusterError(f"the topology says {cell} from {a} to {b} but {cells[b, a]} back")
    return _Matrix(gpus=gpus, cells=cells)


def _checked_cell(row: str, column: str, cell: str) -> str:
    match = _BUNDLE.fullmatch(cell)
    if cell not in LEVELS and (match is None or int(match[1]) == 0):
        raise ClusterError(f"the topology has {cell[:20]!r} for {row} and {column}: known are NV#, {', '.join(LEVELS)}")
    return cell


def _nvlinks(matrix: _Matrix, preset: KindPreset) -> list[Link]:
    """Return direct NVLinks, or for each switched part of the GPUs a link between each GPU and a switch node."""
    pairs = [(a, b) for a, b in matrix.cells if matrix.lanes(a, b)]
    if not pairs:
        return []
    nvlink = None if preset.nvlink is None else find_link(preset.nvlink)
    for a, b in pairs:
        if nvlink is None or matrix.lanes(a, b) > nvlink.lanes:
            has = 0 if nvlink is None else nvlink.lanes
            raise ClusterError(f"the topology says {matrix.cells[a, b]} between {a} and {b}, but the kind "
                               f"{preset.kind.name!r} has {has} NVLinks: name the kind that the GPUs are of")
    assert nvlink is not None
    links = []
    for number, part in enumerate(_parts(matrix.gpus, pairs)):
        inside = [(a, b) for a, b in pairs if a in part]
        totals = {gpu: sum(matrix.lanes(gpu, b) for a, b in inside if a == gpu) for gpu in part}
        if max(totals.values(), default=0) > nvlink.lanes:
            most = {gpu: max(matrix.lanes(gpu, b) for a, b in inside if a == gpu) for gpu in part}
            for gpu in part:
                links.extend(both_ways(gpu, f"nvswitch{number}", bytes_per_s=_lane_rate(nvlink, most[gpu]),
                                       latency_s=nvlink.latency_s / 2, origin=_origin(nvlink)))
        else:
            links.extend(Link(source=a, target=b, bytes_per_s=_lane_rate(nvlink, matrix.lanes(a, b)),
                              latency_s=nvlink.latency_s, origin=_origin(nvlink)) for a, b in inside)
    return links


def _lane_rate(nvlink: LinkPreset, lanes: int) -> float:
    return nvlink.bytes_per_s / nvlink.lanes * lanes


def _parts(nodes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return the connected parts of the graph with these pairs as edges, in the order of ``nodes``."""
    label = {node: index for index, node in enumerate(nodes)}
    for a, b in pairs:
        if label[a] != label[b]:
            low, high = sorted((label[a], label[b]))
            label = {node: low if number == high else number for node, number in label.items()}
    return [tuple(node for node in nodes if label[node] == number) for number in dict.fromkeys(label.values())]


def _pcie_tree(matrix: _Matrix, pcie: LinkPreset) -> list[Link]:
    """Return the links of the tree in which all GPUs meet, level by level from the leaves."""
    socket = find_link("upi")  # its latency also stands for the hop from one node of the tree to the next
    tops = {gpu: gpu for gpu in matrix.gpus}  # the node that stands for each GPU at the current level
    links: list[Link] = []
    for depth, level in enumerate(LEVELS):
        near = LEVELS[: depth + 1]
        pairs = [pair for pair, cell in matrix.cells.items() if cell in near or level == "SYS"]
        for number, part in enumerate(part for part in _parts(matrix.gpus, pairs) if len(part) > 1):
            below = tuple(dict.fromkeys(tops[gpu] for gpu in part))
            if len(below) == 1:
                continue
            node = f"{level.lower()}{number}"
            bytes_per_s = min(socket.bytes_per_s, pcie.bytes_per_s) if level == "SYS" else pcie.bytes_per_s
            medium = node if level == "SYS" and len(below) > 2 else None
            for lower in below:
                latency_s = socket.latency_s + (pcie.latency_s if lower in matrix.gpus else 0.0)
                links.extend(both_ways(lower, node, bytes_per_s=bytes_per_s, latency_s=latency_s / 2, shared=medium,
                                       origin=_origin(socket if level == "SYS" else pcie)))
            tops.update(dict.fromkeys(part, node))
    return links


def _origin(preset: LinkPreset) -> str:
    return f"nvidia-smi topo, preset {preset.name}"
