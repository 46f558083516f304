"""A placement as one self-contained page: key figures, an interactive Gantt chart, devices, the critical path, methods.

The page and its chart are those of ``weft.show.html``; links have rows of their own below the devices, colours say
where in the graph an operator is, and pointing at a box tells what it waited for. Of a very large graph, runs of
operators too short to be seen are one box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any, Final, NamedTuple

import numpy as np

from weft.base.files import write_atomic
from weft.base.units import format_bytes
from weft.model.graph import F64, I64
from weft.show.drawing import number
from weft.show.names import printable
from weft.show.page import escape, number_cells, render_page, row_header, section, share_bar, table, tile
from weft.show.place_facts import (
    WHY,
    Row,
    Waits,
    critical_items,
    critical_path,
    device_rows,
    device_use,
    find_waits,
    item_names,
    link_rows,
    memory_curves,
    transfer_use,
)
from weft.show.place_gantt import graph_parts
from weft.show.place_tables import (
    PlaceView,
    capacity_text,
    critical_table,
    loads_table,
    longest_text,
    methods_table,
    operators_text,
    path_text,
    value_name,
)
from weft.show.tables import TextTable, percent

MAX_ROWS: Final = 256
"""Longer tables of devices and of the critical path are cut; the chart has all of them."""
MAX_BOXES: Final = 30_000
"""Of more boxes, runs of short ones are joined."""
_SHORT: Final = 1 / 4000
"""Boxes are short if they take less of the whole time than this."""


def write_placement_report(path: str | PathLike[str], view: PlaceView) -> None:
    """Write the page to the file, whole or not at all."""
    write_atomic(path, render_placement_report(view))


def render_placement_report(view: PlaceView) -> str:
    """Return the page's text."""
    title = escape(printable(view.title))
    return render_page({
        "title": f"{title}: Weft placement", "mark": "placement", "heading": title, "subtitle": escape(_subtitle(view)),
        "second_column": "Waited for", "last_column": "Bytes", "tiles": _tiles(view),
        "sections": "\n".join([_devices(view), _why(view), _methods(view) if view.methods else ""]),
        "footer": escape("Written by Weft. Times are simulated from the costs of operators and links."),
    }, placement_data(view))


def _subtitle(view: PlaceView) -> str:
    problem = view.result.problem
    devices = "1 device" if problem.num_devices == 1 else f"{problem.num_devices} devices"
    request = "" if view.batch is None else f", {view.batch:,} sample{'s' if view.batch != 1 else ''} in a request"
    return f"{operators_text(view)} operators on {devices}{request}, by {printable(view.result.by)}"


def _tiles(view: PlaceView) -> str:
    result, use = view.result, transfer_use(view.result)
    busiest = f"busiest {printable(use.busiest)}: {view.to_text(use.busiest_s)}" if use.busiest else "nothing is sent"
    items = [(value_name(result).capitalize(), view.to_text(result.value), f"status {result.status}"),
             ("Lower bound", view.to_text(result.bound), f"gap {percent(result.gap)}"),
             ("Transfers", f"{use.count:,}", (f"{format_bytes(use.num_bytes)}; " if use.num_bytes else "") + busiest),
             ("Peak memory", *_fullest(view))]
    if result.is_interrupted:
        items.append(("Search", "interrupted", "the best so far"))
    if result.objective == "throughput":
        items.insert(1, ("Latency", view.to_text(result.timetable.latency_s), "of one request alone"))
    return "".join(tile(*item) for item in items)


def _fullest(view: PlaceView) -> tuple[str, str]:
    """Return the peak of the device that is fullest, and a note on it."""
    uses = device_use(view.result)
    row = max(uses, key=lambda item: (item.peak_bytes / (item.capacity or math.inf), item.peak_bytes))
    limit = "no limit" if row.capacity is None else f"{percent(row.peak_bytes / max(row.capacity, 1.0))} used"
    return format_bytes(row.peak_bytes), f"on {printable(row.name)}, {limit}"


def _devices(view: PlaceView) -> str:
    body, uses = [], device_use(view.result)
    for row in uses[:MAX_ROWS]:
        filled = share_bar({"activations": min(1.0, row.peak_bytes / row.capacity)}) if row.capacity else ""
        memory = f"{format_bytes(row.peak_bytes)} of {capacity_text(row)}"
        busy = f"busy {view.to_text(row.busy_s)}, {percent(row.share)}"
        name = row_header(printable(row.name), tag=printable(view.kinds.get(row.name, "")))
        body.append(f"<tr>{name}{number_cells([f'{row.num_ops:,}'])}"
                    f"<td>{escape(busy)}{share_bar({'busy': min(1.0, row.share)})}</td>"
                    f"<td>{escape(memory)}{filled}</td></tr>")
    if len(uses) > MAX_ROWS:
        body.append(f'<tr><td colspan="4" class="dim">{len(uses) - MAX_ROWS} more</td></tr>')
    return section("Devices", table("Devices", ("Device", "#Operators", "Time", "Memory at its peak"), body))


def _why(view: PlaceView) -> str:
    """Return what the value comes from: the most loaded, or the critical path."""
    if view.result.objective == "throughput":
        loads = loads_table(view, limit=MAX_ROWS)
        return section("Load per request", _text_table(loads), lead=" ".join(map(printable, loads.notes)))
    timetable = view.result.timetable
    waits = find_waits(timetable)
    segments = critical_path(timetable, waits)
    items = [item for part in segments for item in part.items]
    longest = longest_text(view, waits, items, timetable.latency_s)
    lead = f"{path_text(segments, timetable.latency_s).replace('in all', 'In all')}; {longest}."
    return section("Critical path", _text_table(critical_table(view, limit=MAX_ROWS)), lead=printable(lead))


def _methods(view: PlaceView) -> str:
    return section("Methods", _text_table(methods_table(view)))


def _text_table(item: TextTable) -> str:
    """Return a table of the terminal as HTML; its first column is the header of each row."""
    header = [("#" if index and index in item.numeric else "") + name.capitalize()
              for index, name in enumerate(item.header)]
    body = []
    for index, row in enumerate(item.rows):
        cells = "".join(f'<td class="{"n" if column in item.numeric else "wrap"}">{escape(printable(text))}</td>'
                        for column, text in enumerate(row) if column > 0)
        style = ' class="chosen"' if index in item.marked else ""
        body.append(f"<tr{style}>{row_header(printable(row[0]))}{cells}</tr>")
    return table(item.title, header, body)


# ---- data of the chart


class _Boxes(NamedTuple):
    """What a row draws: each box is a run of items, most often of one."""

    first: I64
    last: I64
    num_items: I64
    starts: F64
    ends: F64


def placement_data(view: PlaceView) -> dict[str, Any]:
    """Return everything that the page's script draws, in the columns of ``report_data``."""
    timetable = view.result.timetable
    waits, span = find_waits(timetable), timetable.latency_s
    devices, links = device_rows(timetable), link_rows(timetable)
    rows = [*devices, *links]
    is_large = sum(len(row.items) for row in rows) > MAX_BOXES
    boxes = [_boxes(row, span * _SHORT if is_large else 0.0) for row in rows]
    unit = 10.0 ** (math.floor(math.log10(span)) - 8) if span > 0 else 1.0
    starts, ends = (_whole(np.concatenate(parts), unit) for parts in ([item.starts for item in boxes],
                                                                      [item.ends for item in boxes]))
    capacity = timetable.problem.capacity.tolist()
    timeline: dict[str, Any] = {
        "title": "placement", "step_time_s": span, "unit_s": unit, "start": starts.tolist(),
        "duration": (ends - starts).tolist(),
        "busy": [round(row.busy_s / span, 6) if span > 0 else 0.0 for row in rows]}
    if timetable.problem.has_lifetimes:
        timeline["memory"] = [{"at": _whole(times, unit).tolist(), "bytes": amounts.tolist()}
                              for times, amounts in memory_curves(timetable)] + [{"at": [], "bytes": []} for _ in links]
    return {"plain": view.to_text is number, "microbatches": 1, "what": _what(view, boxes, waits),
            "whys": list(WHY.values()), "timelines": [timeline], "program": _program(boxes, waits),
            "devices": [{"name": printable(row.name), "link": row.is_link,
                         "capacity": None if row.is_link or not math.isfinite(capacity[index]) else capacity[index]}
                        for index, row in enumerate(rows)]}


def _boxes(row: Row, short_s: float) -> _Boxes:
    """Return the row's items as boxes; runs of items that are shorter than ``short_s``, without gaps, are one."""
    length = row.ends - row.starts
    is_short = length < short_s
    gap = np.diff(row.starts, prepend=row.starts[:1]) - np.concatenate(([0.0], length[:-1])) if len(length) else length
    joins = is_short & np.concatenate(([False], is_short[:-1])) & (gap < 0.1 * short_s) if len(length) else is_short
    begin = np.flatnonzero(~joins)
    end = np.concatenate((begin[1:], [len(length)])).astype(np.int64)[: len(begin)]
    last = end - 1
    return _Boxes(row.items[begin], row.items[last], end - begin, row.starts[begin], row.ends[last])


def _program(boxes: Sequence[_Boxes], waits: Waits) -> dict[str, Any]:
    """Return the boxes in columns; ``after`` is the box of what each waited for."""
    first = np.concatenate([item.first for item in boxes])
    box_of: dict[int, int] = {}
    at = 0
    for item in boxes:
        for one, other in zip(item.first.tolist(), item.last.tolist(), strict=True):
            box_of.setdefault(one, at)
            box_of.setdefault(other, at)
            at += 1
    codes = {name: index for index, name in enumerate(WHY)}
    return {"rank_start": np.cumsum([0, *(len(item.first) for item in boxes)]).tolist(),
            "what": list(range(len(first))), "microbatch": [-1] * len(first),
            "after": [box_of.get(int(waits.after[item]), -1) for item in first.tolist()],
            "why": [codes[waits.why[item]] for item in first.tolist()]}


def _what(view: PlaceView, boxes: Sequence[_Boxes], waits: Waits) -> list[dict[str, Any]]:
    timetable = view.result.timetable
    problem, names, parts = timetable.problem, item_names(timetable), graph_parts(timetable)
    critical = set(critical_items(waits, problem.num_ops))
    items = []
    for row in boxes:
        for first, last, count in zip(row.first.tolist(), row.last.tolist(), row.num_items.tolist(), strict=True):
            is_sent = first >= problem.num_ops
            label = names[first] if count == 1 else f"{count} in a row: {names[first]} ... {names[last]}"
            size = problem.tensor_bytes[timetable.transfers[first - problem.num_ops].tensor] if is_sent else None
            items.append({"label": printable(label), "op": "send" if is_sent else "compute", "phase": "",
                          "bytes": None if size is None or count > 1 else float(size),
                          "part": round(float(parts[first]), 3), "strong": first in critical or last in critical})
    return items


def _whole(values: F64, unit: float) -> I64:
    return np.round(values / unit).astype(np.int64)
