"""A placement as a chart, and what the page's script draws of it.

    gpu     |AAABBBBCCC......ffGGGG|   77 %
    cpu     |....ddddEEEEEE........|   45 %
    gpu>cpu |..........CC..........|    9 %
            0        12 ms     24 ms

Rows are the devices, then the links in use. A letter says where in the graph an operator is: ``a`` to ``z`` from the
first to the last operator, or the operator itself where there are no more than 26; the colour says the same, from blue
to red. Capitals and full colours are on the critical path. A transfer looks like its writer. On the page, of a very
large graph, runs of operators too short to be seen are one box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np

from weft.base.units import format_time
from weft.model.graph import F64, I64
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import Timetable
from weft.show import place_facts as facts
from weft.show.chart import Chart, Key, Look, Row, part_colour, part_look
from weft.show.names import printable
from weft.show.page import chart_data
from weft.show.place_facts import WHY, Waits, find_waits

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
    problem, names, parts = timetable.problem, facts.item_names(timetable), graph_parts(timetable)
    waits, letters = find_waits(timetable) if waits is None else waits, item_letters(timetable)
    critical = set(facts.critical_items(waits, problem.num_ops))

    def look(item: int) -> Look:
        start, end = float(waits.start_s[item]), float(waits.end_s[item])
        tip = (f"{names[item]}: {to_text(start)} to {to_text(end)} ({to_text(end - start)}), waited for "
               f"{WHY[waits.why[item]]}")
        return part_look(float(parts[item]), int(letters[item]), text=names[item], tip=tip, is_strong=item in critical)

    keys = (Key(tuple(part_colour(step / 5, is_strong=is_strong) for step in range(6)), text) for is_strong, text in (
        (True, "on the critical path"), (False, "others, from first to last operator")))
    return Chart(title=title, rows=(*facts.device_rows(timetable), *facts.link_rows(timetable)), look=look,
                 span=timetable.latency_s, to_text=to_text, legend=_legend(problem), keys=tuple(keys))


def graph_parts(timetable: Timetable) -> F64:
    """Return for every item where in the graph it is, from 0 to 1; a transfer is where its writer is."""
    problem = timetable.problem
    part = np.arange(problem.num_ops) / max(1, problem.num_ops - 1)
    return np.concatenate((part, [part[problem.producer[sent.tensor]] for sent in timetable.transfers]))


def item_letters(timetable: Timetable) -> I64:
    """Return for every item its letter's number, 0 to 25."""
    problem = timetable.problem
    letters = np.arange(problem.num_ops)
    if problem.num_ops > LETTERS:
        letters = letters * LETTERS // problem.num_ops
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
    curves = [(times, amounts.tolist()) for times, amounts in facts.memory_curves(timetable)]
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
    problem, names, parts = timetable.problem, facts.item_names(timetable), graph_parts(timetable)
    critical = set(facts.critical_items(waits, problem.num_ops))
    for box in boxes:
        for first, last, count in zip(box.row.items.tolist(), box.last.tolist(), box.num_items.tolist(), strict=True):
            is_sent = first >= problem.num_ops
            label = names[first] if count == 1 else f"{count} in a row: {names[first]} ... {names[last]}"
            size = float(problem.tensor_bytes[timetable.transfers[first - problem.num_ops].tensor]) if is_sent else None
            yield {"label": printable(label), "op": "send" if is_sent else "compute", "phase": "",
                   "bytes": size if count == 1 else None, "part": round(float(parts[first]), 3),
                   "strong": first in critical or last in critical}
