"""Files of measured training plans: plans with real times, and the layer profiles and link fits to predict from.

One JSON object. ``rows``: for each plan its batch, micro-batch and stages; a stage has layers and data-parallel
replicas, each on ``tensor`` GPUs of one kind in one node. ``profile[gpu][micro_batch][tensor][layer]``: seconds
``[forward, backward, update]``. ``sizes[tensor][layer]``: bytes, activations for one sample. ``gpus[gpu]``:
``per_node``. ``intra_node[gpu][number of GPUs]`` and ``inter_node["a>b"]``: ``[[c2, c1, c0], peak]``, a link that
carries ``c2 x^2 + c1 x + c0`` GB/s with ``x = log2(message in MB)`` and at most ``peak`` bytes/s.

Such files are others' data, without a version: fields that are not known here are left out with a warning, and so are
rows for which something is missing. Micro-batches that were not profiled are interpolated between those that were.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Final

from weft.base.errors import InputError
from weft.base.files import decode, load_json

LOGGER = logging.getLogger(__name__)
MAX_CELLS: Final = 1_000_000
"""A row may have so many pairs of stage and micro-batch."""
MEGABYTE: Final = 2**20
"""The unit of messages in fits: they are made over powers of two."""
SLOWEST: Final = 1e-3
"""Fits may fall below zero for tiny messages: none is slower than this part of the peak."""
LARGER: Final = tuple(0.25 * step for step in range(1, 81))
"""How much larger messages, as powers of two, are looked at: a smaller one takes no longer."""
NEEDED_SIZES: Final = ("params", "act_mem", "act_output")
FLOAT_BYTES: Final = 4
OTHER_SIZES: Final = frozenset(
    {"params_floats", "act_output_floats", "act_input_floats", "act_mem_floats", "act_input_bytes"})
"""Fields of ``sizes`` that are known and not needed where there are bytes."""
LONGEST_S: Final = 1e9
LARGEST_BYTES: Final = 1e18
OPTIONAL: Final = ("intra_node", "inter_node", "model", "source", "note")


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
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Rows that cannot be predicted, and why."""

    def layer_times(self, replica: Replica, micro_batch: int, layer: int) -> LayerTimes:
        """Return the seconds of a layer on a replica: forward, backward, update."""
        sizes = self.profiled(replica, layer)
        known = [self.profile[replica.gpu][str(size)][str(replica.tensor)][str(layer)] for size in sizes]
        return interpolated(micro_batch, sizes, known)

    def profiled(self, replica: Replica, layer: int) -> list[int]:
        """Return the micro-batches for which a layer was profiled on such a replica, smallest first."""
        return sorted(int(size) for size, degrees in self.profile.get(replica.gpu, {}).items()
                      if str(layer) in degrees.get(str(replica.tensor), {}))

    def layer_sizes(self, replica: Replica, layer: int) -> LayerSizes:
        """Return the bytes of a layer on each GPU of a replica."""
        return self.sizes[str(replica.tensor)][str(layer)]

    def intra_fit(self, gpu: str, num_gpus: int) -> LinkFit | None:
        """Return the fit for so many GPUs of a node, or the one for the next smaller number that was measured."""
        fits = {int(count): fit for count, fit in self.intra_node.get(gpu, {}).items() if fit[1] > 0}
        if not fits:
            return None
        return fits[max((count for count in fits if count <= num_gpus), default=min(fits))]

    def inter_fit(self, first: str, second: str) -> LinkFit:
        """Return the fit between nodes of two kinds; a link measured one way only is taken to be the same both ways."""
        for name in (f"{first}>{second}", f"{second}>{first}"):
            if name in self.inter_node and self.inter_node[name][1] > 0:
                return self.inter_node[name]
        raise InputError(f"inter_node has no link {first + '>' + second!r} with a peak above 0, over which a plan communicates "
                         f"(it has {_listed(self.inter_node)}): measure it, or leave the plan out")


def interpolated(micro_batch: int, sizes: Sequence[int], known: Sequence[LayerTimes]) -> LayerTimes:
    """Return the times of a micro-batch from those of others, on a line; beyond the last two their line goes on.

    Below the smallest, forward and backward are in proportion; the update takes as long for any.
    """
    if micro_batch in sizes:
        return known[sizes.index(micro_batch)]
    if micro_batch < sizes[0] or len(sizes) == 1:
        part = micro_batch / sizes[0]
        return known[0][0] * part, known[0][1] * part, known[0][2]
    upper = next((index for index, size in enumerate(sizes) if size > micro_batch), len(sizes) - 1)
    lower, part = upper - 1, (micro_batch - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    forward, backward, update = (max(one + (other - one) * part, 0.0)
                                 for one, other in zip(known[lower], known[upper], strict=True))
    return forward, backward, update


def link_rate(fit: LinkFit, message_bytes: float) -> float:
    """Return the bytes per second at which messages of this size travel.

    A fit is a parabola, and true only about where it was measured: past its top the rate stays what it is there, and a
    message never takes longer than a larger one.
    """
    size = math.log2(max(message_bytes, 1.0) / MEGABYTE)
    seconds = min(2.0 ** more / _fitted_rate(fit, size + more) for more in (0.0, *LARGER))
    return 1.0 / seconds


def _fitted_rate(fit: LinkFit, size: float) -> float:
    (square, linear, constant), peak = fit
    if square:
        turn = -linear / (2 * square)
        size = min(size, turn) if square < 0 else max(size, turn)
    return min(max((square * size * size + linear * size + constant) * 1e9, SLOWEST * peak), peak)


def load_measured(path: str | PathLike[str]) -> MeasuredFile:
    """Return the file's content, checked; raise ``InputError`` with all that is wrong with it."""
    value = load_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be an object with rows, profile, sizes and gpus")
    file = decode(MeasuredFile, _without_unknown(value), where=str(path))
    problems = list(_problems(file))
    good, skipped, of_rows = list[Row](), dict[str, str](), list[str]()
    for index, row in enumerate(file.rows):
        misses = list(_row_problems(file, row))
        if misses:
            skipped[row.name] = "; ".join(misses[:3])
            of_rows += [f"rows[{index}] ({row.name}): {miss}" for miss in misses]
        else:
            good.append(row)
    problems += [] if good else of_rows
    if problems:
        more = f"; and {len(problems) - 5} more problems" if len(problems) > 5 else ""
        raise InputError(f"{path}: " + "; ".join(problems[:5]) + more)
    return replace(file, rows=tuple(good), skipped=skipped)


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
        return each(_by_number(item), lambda content: keep(_in_bytes(content), LayerSizes, "sizes.", OTHER_SIZES))

    result = keep(value, MeasuredFile, "")
    result = {name: content for name, content in result.items()
              if name != "skipped" and not (content is None and name in OPTIONAL)}
    if isinstance(result.get("rows"), list):
        result["rows"] = [{"name": f"row {index}", **row} if isinstance(row, dict) else row
                          for index, row in enumerate(result["rows"])]
    result = within(result, "rows", lambda row: within(keep(row, Row, "rows."), "stages", stage))
    result = within(result, "gpus", lambda item: keep(item, Gpu, "gpus."))
    result = within(result, "sizes", sizes)
    result = within(result, "profile", lambda gpu: each(gpu, lambda batch: each(
        batch, lambda layers: each(_by_number(layers), _with_update))))
    if ignored:
        LOGGER.warning("not used, because not known: %s", ", ".join(sorted(ignored)))
    return dict(result)


def _by_number(layers: Any) -> Any:
    return {str(index): layer for index, layer in enumerate(layers)} if isinstance(layers, list) else layers


def _in_bytes(item: Any) -> Any:
    """Return a layer's sizes with bytes where they are given in numbers of 4 bytes only."""
    if not isinstance(item, dict):
        return item
    counts = {f"{name}_bytes": FLOAT_BYTES * item[f"{name}_floats"] for name in NEEDED_SIZES
              if isinstance(item.get(f"{name}_floats"), int | float)}
    return {**counts, **item}


def _with_update(times: Any) -> Any:
    """Return a layer's times with an update of nothing where there is none."""
    return [*times, 0.0] if isinstance(times, list) and len(times) == 2 else times


def _problems(file: MeasuredFile) -> Iterator[str]:
    if not file.rows:
        yield "rows is empty"
    for gpu, kind in file.gpus.items():
        if kind.per_node < 1:
            yield f"gpus.{gpu}.per_node must be 1 or more, not {kind.per_node}"
    yield from _bad_numbers(file)


def _bad_numbers(file: MeasuredFile) -> Iterator[str]:
    for gpu, batches in file.profile.items():
        for batch, degrees in batches.items():
            for tensor, layers in degrees.items():
                for layer, seconds in layers.items():
                    if min(seconds) < 0 or max(seconds) > LONGEST_S:
                        yield (f"profile.{gpu}.{batch}.{tensor}.{layer} must have times from 0 to {LONGEST_S:g} s, "
                               f"not {list(seconds)}")
            if not (batch.isdecimal() and batch.isascii() and int(batch)):
                yield f"profile.{gpu} must be by micro-batches, whole numbers from 1 on, not by {batch!r}"
    for tensor, layers_ in file.sizes.items():
        for layer, sizes in layers_.items():
            numbers = (sizes.params_bytes, sizes.act_mem_bytes, sizes.act_output_bytes)
            if min(numbers) < 0 or max(numbers) > LARGEST_BYTES:
                yield f"sizes.{tensor}.{layer} must have sizes from 0 to {LARGEST_BYTES:g} bytes, not {list(numbers)}"
    for gpu, by_count in file.intra_node.items():
        if not all(count.isdecimal() and count.isascii() for count in by_count):
            yield f"intra_node.{gpu} must be by numbers of GPUs, not by {_listed(by_count)}"


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
            yield from (f"stage {number}: {problem}" for problem in _replica_problems(file, stage, replica))


def _replica_problems(file: MeasuredFile, stage: Stage, replica: Replica) -> Iterator[str]:
    gpu, tensor = replica.gpu, str(replica.tensor)
    if gpu not in file.gpus:
        yield f"gpus has no kind {gpu!r} (it has {_listed(file.gpus)})"
    elif not 1 <= replica.tensor <= file.gpus[gpu].per_node:
        yield f"{tensor} tensor-parallel GPUs do not fit in a node of {file.gpus[gpu].per_node} {gpu}"
    unknown = [layer for layer in stage.layers if not file.profiled(replica, layer)]
    degrees = {degree for by_degree in file.profile.get(gpu, {}).values() for degree in by_degree}
    if gpu not in file.profile:
        yield f"profile has no GPU {gpu!r} (it has {_listed(file.profile)}): profile it, or leave the row out"
    elif tensor not in degrees:
        yield (f"profile of {gpu} has no tensor degree {tensor} (it has {_listed(dict.fromkeys(degrees))}): profile "
               "it, or leave the row out")
    elif unknown:
        yield f"profile of {gpu}, tensor degree {tensor}, has no layer {unknown[0]} for any micro-batch"
    if tensor not in file.sizes:
        yield f"sizes has no tensor degree {tensor} (it has {_listed(file.sizes)})"
        return
    missing = [layer for layer in stage.layers if str(layer) not in file.sizes[tensor]]
    if missing:
        yield f"sizes of tensor degree {tensor} has no layer {missing[0]} (it has {_listed(file.sizes[tensor])})"


def _listed(names: Mapping[str, Any]) -> str:
    """Return the names for a message, numbers in order, cut where there are many."""
    ordered = sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    shown = ", ".join(repr(name) if not name.isdecimal() else name for name in ordered[:12])
    return (shown + (", ..." if len(ordered) > 12 else "")) or "none"
