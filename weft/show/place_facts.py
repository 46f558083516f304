"""What the tables of a placement say, its critical path, its chart, and what the page's script draws of that.

Everything that runs is an *item*: operator ``i`` is item ``i``, transfer ``j`` of the timetable is item ``n + j`` with
``n`` operators. An item starts when the last of what it waits for ends: an operator waits for the tensors that it reads
and for the operator before it on its processing unit, a transfer for its tensor and for the one before it on its way.
Followed back from the operator that ends last, these waits are the critical path: they explain the whole latency.

    gpu     |AAABBBBCCC......ffGGGG|   77 %
    cpu     |....ddddEEEEEE........|   45 %
    gpu>cpu |..........CC..........|    9 %
            0        12 ms     24 ms

The chart has the devices, then the links in use. A letter says where in the graph an operator is: ``a`` to ``z`` from
the first to the last operator, or the operator itself where there are no more than 26; the colour says the same, from
blue to red. Capitals and full colours are on the critical path. A transfer looks like its writer. On the page, of a
very large graph, runs of operators too short to be seen are one box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from weft.base.units import format_time
from weft.model.graph import F64, I64
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import PlaceResult, Timetable
from weft.show.chart import Chart, Key, Look, Row, part_colour, part_look
from weft.show.names import grouped, printable
from weft.show.page import chart_data

Why = Literal["start", "input", "transfer", "device", "link"]
"""What an item waited for last: nothing, an operator that it reads from, a tensor on its way, its device, its link."""
WHY: Final[dict[Why, str]] = {"start": "nothing", "input": "input", "transfer": "transfer", "device": "busy device",
                              "link": "busy link"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Why every item starts when it does."""

    after: I64
    """[items] the item that it waited for last, or -1."""
    why: tuple[Why, ...]
    start_s: F64
    end_s: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the critical path: operators in a row on one device, or a transfer."""

    items: tuple[int, ...]
    where: str
    start_s: float
    end_s: float
    why: Why
    """What its first item waited for."""
    is_transfer: bool

    @property
    def time_s(self) -> float:
        """Return how much of the latency it is."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What a placement puts on a device."""

    name: str
    num_ops: int
    busy_s: float
    share: float
    """Part of the latency (or of the largest load) in which it computes."""
    peak_bytes: float
    capacity: float | None
    """None: unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferUse:
    """All transfers of one request together."""

    count: int
    num_bytes: float
    time_s: float
    """The sum of their times."""
    busiest: str | None
    """What of all that they occupy is occupied longest."""
    busiest_s: float


def item_names(timetable: Timetable) -> tuple[str, ...]:
    """Return the name of every item: the operator's, or ``source > target: operator`` of a transfer."""
    problem = timetable.problem
    return (*problem.op_names, *(f"{problem.op_names[int(problem.producer[sent.tensor])]} to "
                                 f"{problem.device_names[sent.target]}" for sent in timetable.transfers))


def item_times(timetable: Timetable) -> tuple[F64, F64]:
    """Return when every item starts and ends."""
    sent = timetable.transfers
    return (np.concatenate((timetable.start_s, [item.start_s for item in sent])),
            np.concatenate((timetable.end_s, [item.end_s for item in sent])))


def device_rows(timetable: Timetable) -> list[Row]:
    """Return what every device does."""
    times = item_times(timetable)
    return [_row(name, np.flatnonzero(timetable.device == device), times, is_link=False)
            for device, name in enumerate(timetable.problem.device_names)]


def link_rows(timetable: Timetable) -> list[Row]:
    """Return what transfers occupy, as far as it is in use; without contention, the pairs of devices.

    Things that carry exactly the same transfers, such as the links of one way, are one row; it has the devices' names
    where the transfers are all between the same two.
    """
    problem, sent = timetable.problem, timetable.transfers
    rows, times = [], item_times(timetable)
    used = [(name, members) for name, members in _members(timetable) if members]
    for alike in grouped(used, lambda item: tuple(item[1])):
        carried, shared = alike[0][1], [name for name, _ in alike]
        pairs = {(sent[index].source, sent[index].target) for index in carried}
        is_way = len(shared) > 1 and len(pairs) == 1
        name = ">".join(problem.device_names[end] for end in min(pairs)) if is_way else shared[0]
        rows.append(_row(name, np.asarray(carried, dtype=np.int64) + problem.num_ops, times, is_link=True))
    return rows


def _members(timetable: Timetable) -> Iterator[tuple[str, list[int]]]:
    """Return the name of everything that transfers can occupy, with those over it."""
    problem = timetable.problem
    names = problem.resource_names or tuple(f"{source}>{target}" for source in problem.device_names
                                            for target in problem.device_names)
    members: list[list[int]] = [[] for _ in names]
    for index, sent in enumerate(timetable.transfers):
        pair = sent.source * problem.num_devices + sent.target
        used = slice(*problem.resource_start[pair : pair + 2].tolist())
        for resource in problem.resources[used].tolist() if problem.resource_names else [pair]:
            members[resource].append(index)
    return zip(names, members, strict=True)


def items_at(timetable: Timetable, name: str) -> list[int]:
    """Return what the device of that name runs, or the transfers over the link of that name."""
    problem = timetable.problem
    if name in problem.device_names:
        return np.flatnonzero(timetable.device == problem.device_names.index(name)).tolist()
    return [problem.num_ops + index for link, members in _members(timetable) if link == name for index in members]


def _row(name: str, items: I64, times: tuple[F64, F64], *, is_link: bool) -> Row:
    starts, ends = times[0][items], times[1][items]
    order = np.lexsort((ends, starts))
    return Row(name=name, is_link=is_link, items=items[order].astype(np.int64), starts=starts[order],
               ends=ends[order], busy=_covered(starts[order], ends[order]))


def _covered(starts: F64, ends: F64) -> float:
    """Return the time in which at least one of the spans runs; they are sorted by start."""
    latest = np.maximum.accumulate(ends)
    before = np.concatenate((starts[:1], latest[:-1]))
    return float(np.maximum(0.0, latest - np.maximum(starts, before)).sum())


def device_use(result: PlaceResult) -> list[DeviceUse]:
    """Return operators, time and memory of every device."""
    problem, peaks = result.problem, result.timetable.peak_bytes().tolist()
    uses = []
    for row, peak, capacity in zip(device_rows(result.timetable), peaks, problem.capacity.tolist(), strict=True):
        busy_s = result.loads.get(row.name, float((row.ends - row.starts).sum()))
        uses.append(DeviceUse(
            name=row.name, num_ops=len(row.items), busy_s=busy_s, peak_bytes=peak,
            share=busy_s / result.value if result.value > 0 else 0.0,
            capacity=capacity if np.isfinite(capacity) else None))
    return uses


def transfer_use(result: PlaceResult) -> TransferUse:
    """Return how much is sent, and what is occupied longest."""
    table = result.timetable
    busiest = max(link_rows(table), key=lambda row: row.busy, default=None)
    return TransferUse(
        count=len(table.transfers), time_s=sum(sent.end_s - sent.start_s for sent in table.transfers),
        num_bytes=float(sum(table.problem.tensor_bytes[sent.tensor] for sent in table.transfers)),
        busiest=None if busiest is None else busiest.name, busiest_s=0.0 if busiest is None else busiest.busy)


# ---- waits and the critical path


def find_waits(timetable: Timetable) -> Waits:
    """Return what every item waited for last; of equals what it reads comes before what held its device."""
    problem, sent, num_ops = timetable.problem, timetable.transfers, timetable.problem.num_ops
    start_s, end_s = item_times(timetable)
    after = np.full(len(start_s), -1, dtype=np.int64)
    why: list[Why] = ["start"] * len(start_s)
    slack = 1e-12 * float(end_s.max(initial=0.0))

    def offer(item: int, before: int, reason: Why) -> None:
        if after[item] < 0 or end_s[before] > end_s[after[item]] + slack:
            after[item], why[item] = before, reason

    arrival = {(item.tensor, item.target): num_ops + index for index, item in enumerate(sent)}
    for source, reader, tensor in problem.edges.tolist():
        if timetable.device[source] == timetable.device[reader]:
            offer(reader, source, "input")
        elif (tensor, int(timetable.device[reader])) in arrival:
            offer(reader, arrival[tensor, int(timetable.device[reader])], "transfer")
    for index, item in enumerate(sent):
        offer(num_ops + index, int(problem.producer[item.tensor]), "input")
    _offer_busy(timetable, start_s, end_s, slack, offer)
    return Waits(after=after, why=tuple(why), start_s=start_s, end_s=end_s)


def _offer_busy(timetable: Timetable, start_s: F64, end_s: F64, slack: float,
                offer: Callable[[int, int, Why], None]) -> None:
    """Offer to each item the one before it on its processing unit, or on each thing that it occupies."""
    problem, num_ops = timetable.problem, timetable.problem.num_ops
    cores = problem.core_of_device[timetable.device]
    queues: list[tuple[Why, I64]] = [("device", np.flatnonzero(cores == core)) for core in np.unique(cores)]
    if problem.resource_names:
        queues += [("link", np.asarray(members, dtype=np.int64) + num_ops) for _, members in _members(timetable)]
    for reason, items in queues:
        ordered = items[np.lexsort((items, end_s[items], start_s[items]))].tolist()
        for before, item in pairwise(ordered):
            if end_s[before] <= start_s[item] + slack:
                offer(item, before, reason)


def critical_items(waits: Waits, num_ops: int) -> list[int]:
    """Return the items on the critical path, first to last."""
    item = int(np.argmax(waits.end_s[:num_ops])) if num_ops else -1
    path: dict[int, None] = {}
    while item >= 0 and item not in path:
        path[item] = None
        item = int(waits.after[item])
    return [*path][::-1]


def critical_path(timetable: Timetable, waits: Waits | None = None) -> list[Segment]:
    """Return the critical path; operators that follow each other on a device are one segment."""
    problem, num_ops = timetable.problem, timetable.problem.num_ops
    waits = find_waits(timetable) if waits is None else waits
    segments: list[Segment] = []
    for item in critical_items(waits, num_ops):
        is_transfer = item >= num_ops
        if is_transfer:
            sent = timetable.transfers[item - num_ops]
            where = f"{problem.device_names[sent.source]}>{problem.device_names[sent.target]}"
        else:
            where = problem.device_names[int(timetable.device[item])]
        last = segments[-1] if segments else None
        if last is not None and not is_transfer and not last.is_transfer and last.where == where:
            segments[-1] = replace(last, items=(*last.items, item), end_s=float(waits.end_s[item]))
        else:
            segments.append(Segment(items=(item,), where=where, start_s=float(waits.start_s[item]), why=waits.why[item],
                                    end_s=float(waits.end_s[item]), is_transfer=is_transfer))
    return segments


LETTERS: Final = 26
MAX_NAMES: Final = 160
"""The legend has the operators' names if they are no longer in all."""
MAX_BOXES: Final = 30_000
"""Of more boxes on a page, runs of short ones are joined."""
_SHORT: Final = 1 / 4000
"""Boxes are short if they take less of the whole time than this."""


def place_chart(timetable: Timetable, *, title: str = "Placement", to_text: Callable[[float], str] = format_time,
                waits: Waits | None = None) -> Chart:
    """Return the chart of the timetable."""
    problem, names, parts = timetable.problem, item_names(timetable), graph_parts(timetable)
    waits, letters = find_waits(timetable) if waits is None else waits, item_letters(timetable)
    critical = set(critical_items(waits, problem.num_ops))

    def look(item: int) -> Look:
        start, end = float(waits.start_s[item]), float(waits.end_s[item])
        tip = (f"{names[item]}: {to_text(start)} to {to_text(end)} ({to_text(end - start)}), waited for "
               f"{WHY[waits.why[item]]}")
        return part_look(float(parts[item]), int(letters[item]), text=names[item], tip=tip, is_strong=item in critical)

    keys = (Key(tuple(part_colour(step / 5, is_strong=is_strong) for step in range(6)), text) for is_strong, text in (
        (True, "on the critical path"), (False, "others, from first to last operator")))
    return Chart(title=title, rows=(*device_rows(timetable), *link_rows(timetable)), look=look,
                 span=timetable.latency_s, to_text=to_text, legend=_legend(problem), keys=tuple(keys))


def graph_parts(timetable: Timetable) -> F64:
    """Return for every item where in the graph it is, from 0 to 1; a transfer is where its writer is."""
    problem = timetable.problem
    part = np.arange(problem.num_ops) / max(1, problem.num_ops - 1)
    return np.concatenate((part, [part[problem.producer[sent.tensor]] for sent in timetable.transfers]))


def item_letters(timetable: Timetable) -> I64:
    """Return for every item its letter's number, 0 to 25."""
    problem = timetable.problem
    letters = np.arange(problem.num_ops) * min(LETTERS, problem.num_ops) // max(1, problem.num_ops)
    sent = [letters[problem.producer[item.tensor]] for item in timetable.transfers]
    return np.concatenate((letters, sent)).astype(np.int64)


def _legend(problem: PlaceProblem) -> str:
    names = ", ".join(f"{chr(ord('a') + op)} {printable(name)}" for op, name in enumerate(problem.op_names[:LETTERS]))
    if problem.num_ops > LETTERS or len(names) > MAX_NAMES:
        last = chr(ord("a") + min(problem.num_ops, LETTERS) - 1)
        names = f"a-{last} operators from the first to the last of the graph, transfers by what they carry"
    return f"{names}; capitals: on the critical path"


# ---- for the page


class _Boxes(NamedTuple):
    """What a row draws on the page: each box is a run of items, most often of one."""

    row: Row
    """With the first item of each box."""
    last: I64
    num_items: I64


def placement_data(timetable: Timetable, to_text: Callable[[float], str] = format_time) -> dict[str, Any]:
    """Return everything that the page's script draws."""
    waits = find_waits(timetable)
    chart = place_chart(timetable, to_text=to_text, waits=waits)
    is_large = sum(len(row.items) for row in chart.rows) > MAX_BOXES
    boxes = [_joined(row, chart.span * _SHORT if is_large else 0.0) for row in chart.rows]
    what = list(_what(timetable, boxes, waits))
    capacities = [limit if math.isfinite(limit) else None for limit in timetable.problem.capacity.tolist()]
    devices = [{"name": printable(row.name), "link": row.is_link, "capacity": limit}
               for row, limit in zip_longest(chart.rows, capacities)]
    curves = [(times, amounts.tolist()) for times, amounts in timetable.memory_curves()]
    idle: list[tuple[F64, list[float]]] = [(np.zeros(0), [])] * (len(chart.rows) - len(curves))
    return chart_data({"placement": replace(chart, rows=tuple(item.row for item in boxes))}, devices=devices, what=what,
                      columns=_columns(boxes, waits), microbatches=1, whys=list(WHY.values()),
                      memory=[[*curves, *idle]] if timetable.problem.has_lifetimes else ())


def _joined(row: Row, short_s: float) -> _Boxes:
    """Return the row's items as boxes; runs of items that are shorter than ``short_s``, without gaps, are one."""
    is_short = row.ends - row.starts < short_s
    gap = row.starts[1:] - row.ends[:-1]
    joins = np.concatenate(([False], is_short[1:] & is_short[:-1] & (gap < 0.1 * short_s)))[: len(is_short)]
    begin = np.flatnonzero(~joins)
    end = np.append(begin[1:], len(joins))[: len(begin)]
    return _Boxes(replace(row.only(begin), ends=row.ends[end - 1]), row.items[end - 1], end - begin)


def _columns(boxes: Sequence[_Boxes], waits: Waits) -> dict[str, list[int]]:
    """Return the boxes in columns; ``after`` is the box of what each waited for."""
    first = [item for box in boxes for item in box.row.items.tolist()]
    last = [item for box in boxes for item in box.last.tolist()]
    box_of: dict[int, int] = {}
    for at, ends in enumerate(zip(first, last, strict=True)):
        for item in ends:
            box_of.setdefault(item, at)
    codes = {name: index for index, name in enumerate(WHY)}
    return {"what": list(range(len(first))), "microbatch": [-1] * len(first),
            "after": [box_of.get(int(waits.after[item]), -1) for item in first],
            "why": [codes[waits.why[item]] for item in first]}


def _what(timetable: Timetable, boxes: Sequence[_Boxes], waits: Waits) -> Iterator[dict[str, Any]]:
    problem, names, parts = timetable.problem, item_names(timetable), graph_parts(timetable)
    critical = set(critical_items(waits, problem.num_ops))
    for box in boxes:
        for first, last, count in zip(box.row.items.tolist(), box.last.tolist(), box.num_items.tolist(), strict=True):
            is_sent = first >= problem.num_ops
            label = names[first] if count == 1 else f"{count} in a row: {names[first]} ... {names[last]}"
            size = float(problem.tensor_bytes[timetable.transfers[first - problem.num_ops].tensor]) if is_sent else None
            yield {"label": printable(label), "op": "send" if is_sent else "compute", "phase": "",
                   "bytes": size if count == 1 else None, "part": round(float(parts[first]), 3),
                   "strong": first in critical or last in critical}
