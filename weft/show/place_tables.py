"""What ``weft place`` prints and its page says: a summary, devices, why it takes as long as it does, the methods.

Of a dnn-partitioning problem, whose numbers have no units, it prints a summary and every device (``print_partition``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from weft.base.units import format_bytes, format_time
from weft.search.place.partition.problem import PartitionResult
from weft.search.place.timetable import MethodResult, PlaceResult
from weft.show import page
from weft.show import place_facts as facts
from weft.show.chart import Chart, counted, number
from weft.show.drawing import print_chart
from weft.show.names import printable, shorten
from weft.show.place_facts import WHY, DeviceUse, Segment, Waits, place_chart, placement_data
from weft.show.tables import MAX_DEVICE_ROWS, UNKNOWN, TextTable, make_table, percent, print_tables

MAX_SEGMENTS: Final = 12
"""Of a longer critical path so many of the longest parts are shown."""
NUM_LONGEST: Final = 5
NAME_WIDTH: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceView:
    """A result, with what else the reader should see of it."""

    result: PlaceResult
    title: str
    """Model and cluster, in words."""
    fusion: str = "none"
    num_ops_before: int | None = None
    """Operators before fusion; None: the same."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The kind of each device, where known."""
    batch: int | None = None
    """Samples of one request, where it is a model that is placed."""
    methods: tuple[MethodResult, ...] = ()
    """Compared with it, the best first."""
    to_text: Callable[[float], str] = field(default=format_time)
    """How times are written."""

    def chart(self) -> Chart:
        """Return the chart of the result's timetable."""
        return place_chart(self.result.timetable, to_text=self.to_text,
                           title=f"{self.title}: {value_name(self.result)} {self.to_text(self.result.value)}")


def sorted_methods(rows: Iterable[MethodResult]) -> tuple[MethodResult, ...]:
    """Return the best first, of equals ``auto``; those without a value last."""
    return tuple(sorted(rows, key=lambda row: (row.value is None, row.value or 0.0, row.method != "auto")))


def print_placement(view: PlaceView, *, width: int | None = None) -> None:
    """Print the result, and the comparison if there is one."""
    why = loads_table(view) if view.result.objective == "throughput" else critical_table(view)
    print_tables(summary_table(view), devices_table(view), why, width=width)
    print_chart(view.chart(), width=width)
    if view.methods:
        print_tables(methods_table(view), width=width)


def summary_table(view: PlaceView) -> TextTable:
    """Return the result as rows of (what, value)."""
    result = view.result
    by = f"by {result.by}" + (", interrupted" if result.is_interrupted else "")
    return TextTable(header=("placement", view.title), rows=(
        (value_name(result), f"{view.to_text(result.value)} (bound {view.to_text(result.bound)}, gap "
                             f"{percent(result.gap)})"),
        *([("latency of one request", view.to_text(result.timetable.latency_s))]
          if result.objective == "throughput" else []),
        ("status", f"{result.status}, {by}"),
        *([("request", samples_text(view.batch))] if view.batch is not None else []),
        ("operators", operators_text(view)),
        ("transfers", transfers_text(view)),
        ("search", f"{result.seconds:.3g} CPU seconds")))


def value_name(result: PlaceResult) -> str:
    """Return what the value is."""
    return "latency" if result.objective == "latency" else "time per request"


def samples_text(batch: int) -> str:
    """Return how many samples a request has."""
    return f"{batch:,} sample{'s' if batch != 1 else ''}"


def operators_text(view: PlaceView) -> str:
    """Return how many operators there are, before and after fusion."""
    count = view.result.problem.num_ops
    if view.num_ops_before in (None, count):
        return f"{count:,}"
    if view.fusion == "none":
        return f"{count:,} of {view.num_ops_before:,}, constants left out"
    return f"{count:,} of {view.num_ops_before:,} before fusion ({view.fusion})"


def transfers_text(view: PlaceView) -> str:
    """Return the sum of all transfers, and the busiest link."""
    use = facts.transfer_use(view.result)
    if not use.count:
        return "none"
    size = f", {format_bytes(use.num_bytes)}" if use.num_bytes else ""
    busiest = f"; busiest {use.busiest} with {view.to_text(use.busiest_s)}" if use.busiest is not None else ""
    return f"{use.count:,}{size}, {view.to_text(use.time_s)} in all{busiest}"


def devices_table(view: PlaceView, *, limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return operators, time and memory of every device; rows beyond ``limit`` are cut."""
    cells = [(row.name, *((view.kinds[row.name],) if view.kinds else ()), f"{row.num_ops:,}", view.to_text(row.busy_s),
              percent(row.share), format_bytes(row.peak_bytes), capacity_text(row),
              percent(row.peak_bytes / row.capacity) if row.capacity else UNKNOWN)
             for row in facts.device_use(view.result)]
    kind = ("kind",) if view.kinds else ()
    header = ("device", *kind, "#ops", "#busy", "#share", "#peak memory", "#capacity", "#used")
    return make_table("Devices", header, cells, limit=limit)


def capacity_text(row: DeviceUse) -> str:
    """Return a device's memory in words."""
    return "no limit" if row.capacity is None else format_bytes(row.capacity)


# ---- why


def critical_table(view: PlaceView, *, limit: int = MAX_SEGMENTS) -> TextTable:
    """Return the critical path of the timetable in time order; of a long one the longest parts."""
    table = view.result.timetable
    waits, names, latency = facts.find_waits(table), facts.item_names(table), table.latency_s
    segments = facts.critical_path(table, waits)
    longest = sorted(range(len(segments)), key=lambda index: (-segments[index].time_s, index))[:limit]
    shown = [segments[index] for index in sorted(longest)]
    cells = [(view.to_text(part.start_s) if part.start_s > 0 else "0", part.where, segment_text(part, names),
              view.to_text(part.time_s), percent(part.time_s / latency if latency > 0 else 0.0), WHY[part.why])
             for part in shown]
    notes = [path_text(segments, latency),
             longest_text(view, waits, [item for part in segments for item in part.items], latency)]
    if len(shown) < len(segments):
        rest = sum(part.time_s for part in segments) - sum(part.time_s for part in shown)
        count = len(segments) - len(shown)
        notes.insert(0, f"not shown: {counted(count, 'shorter part')}, {view.to_text(rest)} in all")
    return make_table("Critical path", ("#start", "where", "what", "#time", "#part", "waited for"), cells, notes=notes)


def segment_text(segment: Segment, names: Sequence[str]) -> str:
    """Return what the part is: an operator, a transfer, or so many operators from one to another."""
    first, last = (shorten(printable(names[segment.items[end]]), NAME_WIDTH) for end in (0, -1))
    if segment.is_transfer:
        return f"send {first}"
    return first if len(segment.items) == 1 else f"{len(segment.items):,} ops: {first} ... {last}"


def path_text(segments: Sequence[Segment], latency: float) -> str:
    """Return how the path is divided: computing on each device, and transfers."""
    if latency <= 0:
        return "nothing takes any time"
    parts: dict[str, float] = {}
    for part in segments:
        key = "transfers" if part.is_transfer else f"on {part.where}"
        parts[key] = parts.get(key, 0.0) + part.time_s
    waiting = latency - sum(parts.values())
    if waiting > 1e-6 * latency:
        parts["idle"] = waiting
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return "in all: " + ", ".join(f"{percent(time / latency)} {name}" for name, time in ordered[:6])


def longest_text(view: PlaceView, waits: Waits, items: Sequence[int], whole: float) -> str:
    """Return the items that take longest."""
    names, times = facts.item_names(view.result.timetable), (waits.end_s - waits.start_s).tolist()
    parts = (f"{shorten(printable(names[item]), NAME_WIDTH)} {view.to_text(times[item])} "
             f"({percent(times[item] / whole if whole > 0 else 0.0)})"
             for item in sorted(items, key=lambda item: (-times[item], item))[:NUM_LONGEST])
    return f"longest: {', '.join(parts)}" if items else ""


def loads_table(view: PlaceView, *, limit: int = MAX_SEGMENTS) -> TextTable:
    """Return what every device and link does for one request, the most loaded first."""
    result, table = view.result, view.result.timetable
    busy = sorted(result.loads.items(), key=lambda item: -item[1])
    cells = [(name, view.to_text(load), percent(load / result.value if result.value > 0 else 0.0))
             for name, load in busy if load > 0]
    whole = make_table("Load per request", ("where", "#load", "#of the largest"), cells, limit=limit)
    if not cells:
        return whole
    name, load = busy[0]
    longest = longest_text(view, facts.find_waits(table), facts.items_at(table, name), load)
    return replace(whole, notes=(f"{name} is the bottleneck" + (f"; {longest}" if longest else ""),))


# ---- methods


def methods_table(view: PlaceView) -> TextTable:
    """Return the comparison: the best first, with what the others take more, and why a method has none."""
    best = next((row.value for row in view.methods if row.value is not None), None)
    cells = [(row.method, UNKNOWN if row.value is None else view.to_text(row.value),
              f"{row.value / best:.3f}" if row.value is not None and best else UNKNOWN,
              row.reason.partition(". Try ")[0]) for row in view.methods]
    kept = 4 if any(row.reason for row in view.methods) else 3
    return make_table("Methods", ("method", f"#{value_name(view.result)}", "#of the best", "why none")[:kept],
                      (row[:kept] for row in cells), marked=[best is not None])


# ---- the page


def render_placement_report(view: PlaceView) -> str:
    """Return the page's text: key figures, an interactive chart, devices, the critical path, methods."""
    title, problem = printable(view.title), view.result.problem
    request = "" if view.batch is None else f", {samples_text(view.batch)} in a request"
    return page.render_page({
        "title": f"{title}: Weft placement", "mark": "placement", "heading": title, "second_column": "Waited for",
        "last_column": "Bytes", "tiles": _tiles(view),
        "subtitle": f"{operators_text(view)} operators on {counted(problem.num_devices, 'device')}{request}, by "
                    f"{printable(view.result.by)}",
        "sections": "\n".join([_devices(view), _why(view), *(
            [page.section("Methods", page.html_table(methods_table(view)))] if view.methods else [])]),
        "footer": "Written by Weft. Times are simulated from the costs of operators and links.",
    }, placement_data(view.result.timetable, view.to_text))


def _tiles(view: PlaceView) -> str:
    result, use = view.result, facts.transfer_use(view.result)
    busiest = f"busiest {printable(use.busiest)}: {view.to_text(use.busiest_s)}" if use.busiest else "nothing is sent"
    items = [(value_name(result).capitalize(), view.to_text(result.value), f"status {result.status}"),
             ("Lower bound", view.to_text(result.bound), f"gap {percent(result.gap)}"),
             ("Transfers", f"{use.count:,}", (f"{format_bytes(use.num_bytes)}; " if use.num_bytes else "") + busiest),
             ("Peak memory", *_fullest(view))]
    if result.is_interrupted:
        items.append(("Search", "interrupted", "the best so far"))
    if result.objective == "throughput":
        items.insert(1, ("Latency", view.to_text(result.timetable.latency_s), "of one request alone"))
    return page.tiles(items)


def _fullest(view: PlaceView) -> tuple[str, str]:
    """Return the peak of the device that is fullest, and a note on it."""
    uses = facts.device_use(view.result)
    row = max(uses, key=lambda item: (item.peak_bytes / (item.capacity or math.inf), item.peak_bytes))
    limit = "no limit" if row.capacity is None else f"{percent(row.peak_bytes / max(row.capacity, 1.0))} used"
    return format_bytes(row.peak_bytes), f"on {printable(row.name)}, {limit}"


def _devices(view: PlaceView) -> str:
    body = []
    for row in facts.device_use(view.result):
        memory = f"{format_bytes(row.peak_bytes)} of {capacity_text(row)}"
        body.append((page.tagged(printable(row.name), printable(view.kinds.get(row.name, ""))), f"{row.num_ops:,}",
                     page.with_bar(f"busy {view.to_text(row.busy_s)}, {percent(row.share)}",
                                   {"busy": min(1.0, row.share)}),
                     page.with_bar(memory, {"activations": min(1.0, row.peak_bytes / row.capacity)})
                     if row.capacity else memory))
    return page.table_section("Devices", ("Device", "#Operators", "Time", "Memory at its peak"), body)


def _why(view: PlaceView) -> str:
    """Return what the value comes from: the most loaded, or the critical path."""
    if view.result.objective == "throughput":
        loads = loads_table(view, limit=page.MAX_ROWS)
        return page.section("Load per request", page.html_table(loads), lead=" ".join(map(printable, loads.notes)))
    table = critical_table(view, limit=page.MAX_ROWS)
    path, longest = table.notes[-2:]
    return page.section("Critical path", page.html_table(table),
                        lead=printable(f"{path.replace('in all', 'In all')}; {longest}."))


# ---- a problem of the dnn-partitioning benchmark


def print_partition(result: PartitionResult, *, width: int | None = None) -> None:
    """Print the split."""
    print_tables(partition_summary(result), partition_devices(result), width=width)


def partition_summary(result: PartitionResult) -> TextTable:
    """Return the result as rows of (what, value)."""
    problem = result.problem
    name = "latency" if result.objective == "latency" else "largest load"
    status = result.status + (", contiguous" if result.contiguous else "") + (
        ", interrupted" if result.is_interrupted else "")
    cpus = "any number of CPUs" if result.objective == "latency" else f"{problem.num_cpus} CPUs"
    return TextTable(header=("split", problem.name), rows=(
        (name, f"{number(result.value)} (bound {number(result.bound)}, gap {percent(result.gap)})"),
        ("status", status),
        ("nodes", f"{problem.num_nodes:,} in {problem.num_units:,} units that share a device"),
        ("devices", f"{problem.num_accelerators} accelerators, {cpus}"),
        ("search", f"{result.seconds:.3g} CPU seconds")))


def partition_devices(result: PartitionResult) -> TextTable:
    """Return nodes, load and memory of every device; for latency, when its set of nodes runs."""
    problem, figures = result.problem, result.figures
    is_latency = result.objective == "latency"
    cells = []
    for index, name in enumerate(result.device_names):
        nodes = np.flatnonzero(result.device == index)
        is_accelerator = index < problem.num_accelerators
        is_timed = is_accelerator or not is_latency
        share = figures.loads[index] / result.value if result.value > 0 else 0.0
        used = format_bytes(figures.used[index]) if is_accelerator else ""
        memory = f"{used} of {format_bytes(problem.capacity)}" if is_accelerator else "no limit"
        row = [name, f"{len(nodes):,}", number(figures.loads[index]) if is_timed else UNKNOWN,
               percent(share) if is_timed else UNKNOWN, memory]
        if is_latency:
            has_span = is_accelerator and len(nodes) > 0
            row += [number(figures.start_s[nodes[0]]), number(figures.end_s[nodes[0]])] if has_span else [UNKNOWN] * 2
        cells.append(tuple(row))
    header = ("device", "#nodes", "#load", "#share", "#memory", *(("#start", "#end") if is_latency else ()))
    return make_table("Devices", header, cells, limit=MAX_DEVICE_ROWS)
