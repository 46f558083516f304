"""The chart of a plan's timeline, and of several ones of a plan for the page; the part of a step that repeats.

    d0 |000111222aaaaaa333bbbbbb|  100 %
    d1 |...000aaaaaa111bbbbbb...|   75 %
       0 s                 24 s

An item of the chart is an instruction of the program. On the page (``report_data``) instructions that differ in nothing
but the micro-batch share an entry of ``what``. Of many devices those that do the same at the same times are one row
(``alike`` names them), and of very many instructions only the first rows are there (``left_out`` counts the others), so
that pages stay small.

In the steady state of a pipeline everything starts again after the same time (``find_period``): each stage's forward,
backward and so on, for the next ``K`` micro-batches. For each kind of compute (an instance's phase) the starts in order
of time are

    s[0], s[1], s[2], ...        repeating where s[j + K] - s[j] = T

and the longest stretch of them that does is a span of time. Where the spans of all kinds overlap for a whole period,
the step repeats; one period in the middle is cut where the fewest computes are under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from weft.base.units import format_time
from weft.model.graph import F64, Bool
from weft.plan.program import Op, Phase, Program
from weft.show import chart
from weft.show.chart import Chart, Row, Shade, Steady
from weft.show.facts import program_of
from weft.show.names import grouped, short_list
from weft.show.page import chart_data
from weft.simulate.timeline import Timeline

STEP: Final = "+"
SHADES: Final[dict[Phase, Shade]] = {
    Phase.F: "forward", Phase.B: "backward", Phase.I: "backward", Phase.W: "weight"}
MAX_SINGLE: Final = 32
"""Of more devices, those that do the same are one row of the page."""
MAX_INSTRUCTIONS: Final = 120_000
"""Rows are left out beyond so many; a page then has about six million characters."""
MAX_MICROBATCHES: Final = 4
"""Periods of more micro-batches are not looked for."""
TOLERANCE: Final = 0.004
"""Relative to the period: starts that differ by less are the same."""


def timeline_chart(timeline: Timeline, program: Program | None = None, *, ranks: Sequence[int] | None = None,
                   steady: Steady | None = None) -> Chart:
    """Return the chart of some ranks, all by default; ``steady`` is the part of it that repeats, if that is drawn.

    The program is the timeline's, or that of another timeline of the same plan. Raises ``PlanError`` if there is none.
    """
    program = program_of([timeline]) if program is None else program
    rows = []
    for rank in range(timeline.num_ranks) if ranks is None else ranks:
        part = np.arange(int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1]))
        rows.append(Row(name=timeline.devices[rank], items=part, starts=timeline.start_s[part],
                        ends=timeline.end_s[part], busy=float(timeline.busy_s[rank]), is_message=~timeline.runs[part],
                        steady=None if steady is None else (steady.start, steady.end)))
    has_steps = bool((timeline.end_s > timeline.start_s)[program.op == Op.STEP].any())
    shades = {SHADES[Phase(phase)] for phase in set(program.phase[program.op == Op.COMPUTE].tolist())}
    legend = chart.marks_legend(shades, program.plan.microbatches)
    seconds = (timeline.end_s - timeline.start_s)[program.op == Op.COMPUTE]
    return Chart(
        title=f"{program.plan.model.name}: {timeline.kind} step of {format_time(timeline.step_time_s)}",
        rows=tuple(rows), span=timeline.step_time_s, steady=steady, to_text=format_time,
        shortest=float(seconds[seconds > 0].min(initial=timeline.step_time_s)), look=lambda item: _look(program, item),
        legend=f"{legend}; {STEP} optimizer" if has_steps else legend,
        keys=(*chart.shade_keys(shades, program.plan.microbatches),
              chart.Key((chart.NEUTRAL,), "optimizer, gradient exchange")))


def _look(program: Program, item: int) -> chart.Look:
    """Return the micro-batch's look, of the optimizer and of gradient exchanges a neutral one."""
    shade, tip = SHADES[Phase(int(program.phase[item]))], program.label(item)
    if program.op[item] in (Op.SEND, Op.RECV):
        shade = "backward" if program.channels[int(program.channel[item])].kind == "gradient" else "forward"
    if program.microbatch[item] < 0:
        return chart.Look(mark=STEP, style="reverse", fill=chart.NEUTRAL, ink=chart.DARK, text="", tip=tip)
    return chart.microbatch_look(int(program.microbatch[item]), program.plan.microbatches, shade, tip=tip)


# ---- for the page


class ShownRow(NamedTuple):
    """A rank that is drawn, and all that do the same at the same times."""

    rank: int
    members: tuple[int, ...]


def report_data(program: Program, timelines: Sequence[Timeline], capacities: Mapping[str, int | None],
                period: Steady | None = None, *, only_used: bool = False) -> dict[str, Any]:
    """Return everything that the page's script draws; ``only_used`` leaves out devices that have nothing to do."""
    rows = shown_rows(program, timelines, only_used=only_used)
    ranks = [row.rank for row in rows]
    predicted = next((item for item in timelines if item.kind == "predicted"), timelines[0])
    charts = [timeline_chart(item, program, ranks=ranks, steady=period if item is predicted else None)
              for item in timelines]
    kept = np.concatenate([row.items for row in charts[0].rows]) if rows else np.zeros(0, dtype=np.int64)
    columns = np.stack([column[kept] for column in (
        program.op, program.instance, program.phase, program.channel, program.bucket)], axis=1)
    _, first, what = np.unique(columns.astype(np.int64), axis=0, return_index=True, return_inverse=True)
    return chart_data(
        dict(zip(_titles(timelines), charts, strict=True)), microbatches=program.plan.microbatches,
        devices=[_device(program, row, capacities) for row in rows],
        what=[_describe(program, int(kept[index])) for index in first],
        columns={"what": what.reshape(-1).tolist(), "microbatch": program.microbatch[kept].tolist()},
        memory=[[_memory_curve(item, rank) for rank in ranks] for item in timelines],
        left_out=0 if only_used else program.num_ranks - sum(len(row.members) for row in rows))


def shown_rows(program: Program, timelines: Sequence[Timeline], *, only_used: bool = False) -> list[ShownRow]:
    """Return the rows of the chart: all devices, or where there are many, alike ones together, as many as fit."""
    sizes = np.diff(program.rank_start).tolist()
    alike = grouped((rank for rank, size in enumerate(sizes) if size or not only_used),
                    lambda rank: rank if program.num_ranks <= MAX_SINGLE else _behaviour(program, timelines, rank))
    totals = accumulate(sizes[ranks[0]] for ranks in alike)
    return [ShownRow(rank=ranks[0], members=tuple(ranks)) for index, (ranks, total) in enumerate(zip(
        alike, totals, strict=True)) if index == 0 or total <= MAX_INSTRUCTIONS]


def _behaviour(program: Program, timelines: Sequence[Timeline], rank: int) -> tuple[bytes, ...]:
    """Return what a rank does when, and holds, so that equal ranks have equal ones."""
    part = slice(int(program.rank_start[rank]), int(program.rank_start[rank + 1]))
    stages = np.asarray([instance.stage for instance in program.instances], dtype=np.int64)
    instance = program.instance[part]
    stage = np.where(instance >= 0, stages[instance], -1)
    times = [np.round(column[part] / (timeline.step_time_s or 1.0) * 1e6).astype(np.int64).tobytes()
             for timeline in timelines for column in (timeline.start_s, timeline.end_s)]
    columns = (program.op[part], stage, program.phase[part], program.microbatch[part], timelines[0].memory.held(rank))
    return (*(column.tobytes() for column in columns), *times)


def _device(program: Program, row: ShownRow, capacities: Mapping[str, int | None]) -> dict[str, Any]:
    name = program.rank_names[row.rank]
    alike = {"alike": short_list((program.rank_names[rank] for rank in row.members), limit=8),
             "count": len(row.members)} if len(row.members) > 1 else {}
    return {"name": name, "capacity": capacities.get(name), **alike}


def _titles(timelines: Sequence[Timeline]) -> list[str]:
    """Return the timelines' kinds, numbered where there are several of one kind."""
    kinds = [timeline.kind for timeline in timelines]
    return [kind if kinds.count(kind) == 1 else f"{kind} {kinds[: index + 1].count(kind)}"
            for index, kind in enumerate(kinds)]


def _describe(program: Program, index: int) -> dict[str, Any]:
    item = program.instruction(index)
    backward, num_bytes = item.phase is not Phase.F, None
    if item.op in (Op.SEND, Op.RECV):
        channel = program.channels[item.channel]
        backward, num_bytes = channel.kind == "gradient", channel.num_bytes
    elif item.op is Op.COLLECTIVE:
        num_bytes = program.buckets[item.bucket].num_bytes
    return {"label": program.label(index).removesuffix(f" mb {item.microbatch}"), "op": item.op.name.lower(),
            "phase": item.phase.name if item.op is Op.COMPUTE else "", "backward": backward, "bytes": num_bytes}


def _memory_curve(timeline: Timeline, rank: int) -> tuple[F64, list[float]]:
    """Return the steps of the rank's memory curve at which the total changes."""
    curve = timeline.memory_curve(rank)
    total = curve.num_bytes.sum(axis=1)
    kept = np.diff(total, prepend=-1) != 0
    return curve.time_s[kept], total[kept].tolist()


# ---- the part that repeats


def find_period(timeline: Timeline) -> Steady | None:
    """Return what repeats in the timeline, with the fewest micro-batches in a period; None where nothing does."""
    program = timeline.program
    if program is None:
        return None
    series = list(_series(program, timeline))
    for count in range(1, MAX_MICROBATCHES + 1):
        if (found := _repeating(series, count)) is not None:
            (start_s, end_s), length_s = found
            first_s = _quietest(timeline, start_s, end_s, length_s)
            return Steady(start=start_s, end=end_s, period_start=first_s, period_end=first_s + length_s,
                          num_microbatches=count)
    return None


def _series(program: Program, timeline: Timeline) -> Iterator[F64]:
    """Yield the starts of each kind of compute; where an instance has several devices, on one of them."""
    leaders = np.asarray([instance.ranks[0] for instance in program.instances], dtype=np.int64)
    computes = np.flatnonzero(program.op == Op.COMPUTE)
    led = computes[leaders[program.instance[computes]] == program.rank_of()[computes]]
    keys = program.instance[led].astype(np.int64) * len(Phase) + program.phase[led]
    order = np.lexsort((timeline.start_s[led], keys))
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    yield from (timeline.start_s[led[part]] for part in np.split(order, bounds) if len(part))


def _repeating(series: list[F64], count: int) -> tuple[tuple[float, float], float] | None:
    """Return the span in which all starts come again after ``count`` micro-batches, and after which time."""
    if not series or min(map(len, series)) <= count:
        return None
    length_s = float(np.median(np.concatenate([starts[count:] - starts[:-count] for starts in series])))
    spans = [_longest_span(starts, count, length_s) for starts in series]
    known = [span for span in spans if span is not None]
    if length_s <= 0 or len(known) < len(spans):
        return None
    start_s, end_s = max(low for low, _ in known), min(high for _, high in known)
    return ((start_s, end_s), length_s) if end_s - start_s >= length_s * (1 - TOLERANCE) else None


def _longest_span(starts: F64, count: int, length_s: float) -> tuple[float, float] | None:
    """Return from when to when the starts repeat for the longest time."""
    fits: Bool = np.abs(starts[count:] - starts[:-count] - length_s) <= TOLERANCE * length_s
    edges = np.flatnonzero(np.diff(np.concatenate(([False], fits, [False])).astype(np.int8)))
    spans = [(float(starts[first]), float(starts[last - 1 + count])) for first, last in zip(
        edges[::2], edges[1::2], strict=True)]
    return max(spans, key=lambda span: span[1] - span[0], default=None)


def _quietest(timeline: Timeline, start_s: float, end_s: float, length_s: float) -> float:
    """Return where to cut a period out of the middle of the span: at the start before which the fewest computes run."""
    starts, ends = timeline.start_s[timeline.runs], timeline.end_s[timeline.runs]
    middle_s = (start_s + end_s - length_s) / 2
    low, high = max(start_s, middle_s - length_s / 2), min(end_s - length_s, middle_s + length_s / 2)
    slack = 1e-9 * length_s
    cuts = np.unique(starts[(starts >= low - slack) & (starts <= high + slack)])
    return chart.quietest_cut(cuts, starts, ends, slack) if len(cuts) else max(start_s, middle_s)
