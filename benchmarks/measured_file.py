"""Files of measured training plans: plans with real times, and the layer profiles and link fits to predict from.

One JSON object. ``rows``: for each plan its batch, micro-batch and stages; a stage has layers and data-parallel
replicas, each on ``tensor`` GPUs of one kind in one node. ``profile[gpu][micro_batch][tensor][layer]``: seconds
``[forward, backward, update]``. ``sizes[tensor][layer]``: bytes, activations for one sample. ``gpus[gpu]``:
``per_node``. ``intra_node[gpu][number of GPUs]`` and ``inter_node["a>b"]``: ``[[c2, c1, c0], peak]``, a link that
carries ``c2 x^2 + c1 x + c0`` GB/s with ``x = log2(message in MB)`` and at most ``peak`` bytes/s.

Such files are others' data, without a version: fields that are not known here are left out with a warning.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Final

from weft.errors import InputError
from weft.files import decode, load_json

LOGGER = logging.getLogger(__name__)
MAX_CELLS: Final = 1_000_000
"""A row may have so many pairs of stage and micro-batch."""
MEGABYTE: Final = 2**20
"""The unit of messages in fits: they are made over powers of two."""
SLOWEST: Final = 1e-3
"""Fits may fall below zero for tiny messages: none is slower than this part of the peak."""
OTHER_SIZES: Final = frozenset(
    {"params_floats", "act_output_floats", "act_input_floats", "act_mem_floats", "act_input_bytes"})
"""Fields of ``sizes`` that are known and not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A group of GPUs in one node that runs a stage for its micro-batches."""

    gpu: str
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers and the replicas that run them."""

    layers: tuple[int, ...]
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan and what was measured."""

    name: str
    global_batch: int
    micro_batch: int
    stages: tuple[Stage, ...]
    real_iteration_s: float | None = None
    real_peak_bytes: float | None = None

    @property
    def num_microbatches(self) -> int:
        """Return the micro-batches of one iteration, over all replicas."""
        return self.global_batch // self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Bytes of a layer on each GPU of a tensor group."""

    params_bytes: float
    act_mem_bytes: float
    """What the forward of one sample keeps for its backward."""
    act_output_bytes: float
    """What goes to the next layer, for one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A kind of GPU."""

    per_node: int
    memory_bytes: float | None = None


LinkFit = tuple[tuple[float, float, float], float]
LayerTimes = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFile:
    """The content of a file; see the module's docstring."""

    rows: tuple[Row, ...]
    profile: Mapping[str, Mapping[str, Mapping[str, Mapping[str, LayerTimes]]]]
    sizes: Mapping[str, Mapping[str, LayerSizes]]
    gpus: Mapping[str, Gpu]
    intra_node: Mapping[str, Mapping[str, LinkFit]] = field(default_factory=dict)
    inter_node: Mapping[str, LinkFit] = field(default_factory=dict)
    model: str = ""
    source: str = ""
    note: str = ""

    def layer_times(self, replica: Replica, micro_batch: int, layer: int) -> LayerTimes:
        """Return the seconds of a layer on a replica: forward, backward, update."""
        return self.profile[replica.gpu][str(micro_batch)][str(replica.tensor)][str(layer)]

    def layer_sizes(self, replica: Replica, layer: int) -> LayerSizes:
        """Return the bytes of a layer on each GPU of a replica."""
        return self.sizes[str(replica.tensor)][str(layer)]

    def intra_fit(self, gpu: str, num_gpus: int) -> LinkFit | None:
        """Return the fit for so many GPUs of a node, or the one for the next smaller number that was measured."""
        fits = {int(count): fit for count, fit in self.intra_node.get(gpu, {}).items()}
        if not fits:
            return None
        return fits[max((count for count in fits if count <= num_gpus), default=min(fits))]

    def inter_fit(self, first: str, second: str) -> LinkFit:
        """Return the fit between nodes of two kinds; a link measured one way only is taken to be the same both ways."""
        for name in (f"{first}>{second}", f"{second}>{first}"):
            if name in self.inter_node:
                return self.inter_node[name]
        raise InputError(f"inter_node has no link {first + '>' + second!r}, over which a plan communicates "
                         f"(it has {_listed(self.inter_node)}): measure it, or leave the plan out")


def link_rate(fit: LinkFit, message_bytes: float) -> float:
    """Return the bytes per second at which messages of this size travel."""
    (square, linear, constant), peak = fit
    size = math.log2(max(message_bytes, 1.0) / MEGABYTE)
    return min(max((square * size * size + linear * size + constant) * 1e9, SLOWEST * peak), peak)


def load_measured(path: str | PathLike[str]) -> MeasuredFile:
    """Return the file's content, checked; raise ``InputError`` with all that is wrong with it."""
    value = load_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be an object with rows, profile, sizes and gpus")
    file = decode(MeasuredFile, _without_unknown(value), where=str(path))
    problems = list(_problems(file))
    if problems:
        more = f"; and {len(problems) - 5} more problems" if len(problems) > 5 else ""
        raise InputError(f"{path}: " + "; ".join(problems[:5]) + more)
    return file


def _without_unknown(value: dict[str, Any]) -> dict[str, Any]:
    """Return the file's object with the known fields only, and lists of layers as objects by number."""
    ignored: set[str] = set()

    def keep(item: Any, target: Any, where: str, quiet: frozenset[str] = frozenset()) -> Any:
        if not isinstance(item, dict):
            return item
        known = {entry.name for entry in dataclasses.fields(target)}
        ignored.update(f"{where}{name}" for name in item if name not in known | quiet)
        return {name: content for name, content in item.items() if name in known}

    def each(item: Any, change: Any) -> Any:
        if isinstance(item, dict):
            return {name: change(content) for name, content in item.items()}
        return [change(content) for content in item] if isinstance(item, list) else item

    def stage(item: Any) -> Any:
        kept = keep(item, Stage, "rows.stages.")
        return within(kept, "replicas", lambda content: keep(content, Replica, "rows.stages.replicas."))

    def within(item: Any, name: str, change: Any) -> Any:
        return {**item, name: each(item[name], change)} if isinstance(item, dict) and name in item else item

    def sizes(item: Any) -> Any:
        return each(_by_number(item), lambda content: keep(content, LayerSizes, "sizes.", OTHER_SIZES))

    result = keep(value, MeasuredFile, "")
    result = within(result, "rows", lambda row: within(keep(row, Row, "rows."), "stages", stage))
    result = within(result, "gpus", lambda item: keep(item, Gpu, "gpus."))
    result = within(result, "sizes", sizes)
    result = within(result, "profile", lambda gpu: each(gpu, lambda batch: each(batch, _by_number)))
    if ignored:
        LOGGER.warning("not used, because not known: %s", ", ".join(sorted(ignored)))
    return dict(result)


def _by_number(layers: Any) -> Any:
    return {str(index): layer for index, layer in enumerate(layers)} if isinstance(layers, list) else layers


def _problems(file: MeasuredFile) -> Iterator[str]:
    if not file.rows:
        yield "rows is empty"
    for gpu, kind in file.gpus.items():
        if kind.per_node < 1:
            yield f"gpus.{gpu}.per_node must be 1 or more, not {kind.per_node}"
    yield from _bad_numbers(file)
    for index, row in enumerate(file.rows):
        where = f"rows[{index}] ({row.name})"
        yield from (f"{where}: {problem}" for problem in _row_problems(file, row))


def _bad_numbers(file: MeasuredFile) -> Iterator[str]:
    for gpu, batches in file.profile.items():
        for batch, degrees in batches.items():
            for tensor, layers in degrees.items():
                for layer, seconds in layers.items():
                    if min(seconds) < 0:
                        yield f"profile.{gpu}.{batch}.{tensor}.{layer} has a negative time: {list(seconds)}"
    for tensor, layers_ in file.sizes.items():
        for layer, sizes in layers_.items():
            if min(sizes.params_bytes, sizes.act_mem_bytes, sizes.act_output_bytes) < 0:
                yield f"sizes.{tensor}.{layer} has a negative size"
    fits = [(f"inter_node.{name}", fit) for name, fit in file.inter_node.items()]
    for gpu, by_count in file.intra_node.items():
        fits += [(f"intra_node.{gpu}.{count}", fit) for count, fit in by_count.items()]
        if not all(count.isdecimal() and count.isascii() for count in by_count):
            yield f"intra_node.{gpu} must be by numbers of GPUs, not by {_listed(by_count)}"
    yield from (f"{name}: the peak must be above 0 bytes/s, not {fit[1]}" for name, fit in fits if fit[1] <= 0)


def _row_problems(file: MeasuredFile, row: Row) -> Iterator[str]:
    if row.micro_batch < 1 or row.global_batch < 1 or row.global_batch % row.micro_batch:
        yield (f"global_batch {row.global_batch} must be a multiple of micro_batch {row.micro_batch}, "
               "both 1 or more")
        return
    if not row.stages:
        yield "it has no stages"
    if row.num_microbatches * len(row.stages) > MAX_CELLS:
        yield f"{row.num_microbatches} micro-batches on {len(row.stages)} stages are more than {MAX_CELLS} in all"
    for what, value in (("real_iteration_s", row.real_iteration_s), ("real_peak_bytes", row.real_peak_bytes)):
        if value is not None and value <= 0:
            yield f"{what} must be above 0, not {value}"
    layers = [layer for stage in row.stages for layer in stage.layers]
    if len(set(layers)) != len(layers):
        yield "a layer is in it twice"
    for number, stage in enumerate(row.stages):
        if not stage.layers or not stage.replicas:
            yield f"stage {number} has no {'replicas' if stage.layers else 'layers'}"
        for replica in dict.fromkeys(stage.replicas):
            yield from (f"stage {number}: {problem}" for problem in _replica_problems(file, row, stage, replica))


def _replica_problems(file: MeasuredFile, row: Row, stage: Stage, replica: Replica) -> Iterator[str]:
    gpu, tensor, batch = replica.gpu, str(replica.tensor), str(row.micro_batch)
    if gpu not in file.gpus:
        yield f"gpus has no kind {gpu!r} (it has {_listed(file.gpus)})"
    elif not 1 <= replica.tensor <= file.gpus[gpu].per_node:
        yield f"{tensor} tensor-parallel GPUs do not fit in a node of {file.gpus[gpu].per_node} {gpu}"
    degrees = file.profile.get(gpu, {}).get(batch, {})
    if gpu not in file.profile:
        yield f"profile has no GPU {gpu!r} (it has {_listed(file.profile)}): profile it, or leave the row out"
    elif not degrees:
        yield (f"profile of {gpu} has no micro-batch {batch} (it has {_listed(file.profile[gpu])}): "
               "profile it, or leave the row out")
    elif tensor not in degrees:
        yield (f"profile of {gpu} has no tensor degree {tensor} for micro-batch {batch} (it has {_listed(degrees)}): "
               "profile it, or leave the row out")
    if tensor not in file.sizes:
        yield f"sizes has no tensor degree {tensor} (it has {_listed(file.sizes)})"
    for what, known in (("profile", degrees.get(tensor)), ("sizes", file.sizes.get(tensor))):
        missing = [layer for layer in stage.layers if str(layer) not in (known or {})]
        if known is not None and missing:
            yield f"{what} of {gpu}, tensor degree {tensor}, has no layer {missing[0]} (it has {_listed(known)})"


def _listed(names: Mapping[str, Any]) -> str:
    """Return the names for a message, numbers in order, cut where there are many."""
    ordered = sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    shown = ", ".join(repr(name) if not name.isdecimal() else name for name in ordered[:12])
    return (shown + (", ..." if len(ordered) > 12 else "")) or "none"
