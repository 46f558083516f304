"""What ``weft schedule`` prints, its chart, and its page: key figures, devices and their memory, the named schedules.

    d0 |01...aaa2bbb3ccc4ddd5eee.fff|   86 %
    d1 |.0aaa1bbb2ccc3ddd4eee5fff...|   86 %

An item of the chart is a task and a micro-batch: ``task * num_microbatches + microbatch``; copies to the host and back
count behind the tasks (``moves.rows_of``). Rows are the devices, each with its copy stream beneath it where memory can
leave, then the directions of links in use. Blocks that run at once are halves of their row. The steady part is where
every block repeats with the period that the search found. One period in its middle is marked: a span of time in which
each block starts once for each micro-batch of the period, cut where the fewest blocks run. On the page transfers are in
the thin row of the device that sends, and so are copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.schedule.named import NamedRow
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.roles import Role, find_roles
from weft.search.schedule.schedule import TOLERANCE, Schedule, ScheduleResult
from weft.show import chart, page
from weft.show.chart import Chart, Look, Row, Shade, Steady, counted, number
from weft.show.drawing import print_chart
from weft.show.names import printable, short_list
from weft.show.page import chart_data
from weft.show.tables import MAX_DEVICE_ROWS, UNKNOWN, TextTable, make_table, percent, print_tables

_SHADES: Final[dict[Role, Shade]] = {Role.FORWARD: "forward", Role.BACKWARD: "backward",
                                     Role.INPUT_GRADIENT: "backward", Role.WEIGHT_GRADIENT: "weight"}
_PARTS: Final = ("warm-up", "steady", "cool-down")
_LETTERS: Final[dict[Shade, str]] = {"forward": "F", "backward": "B", "weight": "W"}


def schedule_chart(result: ScheduleResult, title: str = "Schedule") -> Chart:
    """Return the chart of the schedule; of a long one whole periods may be left out."""
    schedule, problem = result.schedule, result.schedule.problem
    shades, phases = block_shades(problem), None if result.period is None else result.phases()
    ends = schedule.ends

    def look(item: int) -> Look:
        task, microbatch = divmod(item, schedule.num_microbatches)
        if task >= problem.num_tasks:
            return _copy_look(schedule, task - problem.num_tasks, microbatch)
        start = float(schedule.starts[task, microbatch])
        tip = (f"{problem.task_names[task]} of micro-batch {microbatch}: {number(start)} to "
               f"{number(float(ends[task, microbatch]))}")
        if (task, microbatch) in partner:
            other, index = partner[task, microbatch]
            tip += f", at once with {problem.task_names[other]} of micro-batch {index}"
        return chart.microbatch_look(
            microbatch, schedule.num_microbatches, shades[task], is_joint=len(problem.task_resources[task]) > 1,
            tip=f"{tip}, {phases[task][microbatch]}" if phases else tip)

    partner = {one: other for pair in schedule.pairs for one, other in (pair, pair[::-1])}
    is_joint = any(len(block.devices) > 1 for block in problem.blocks)
    notes = [*(["two in turn: at once"] if partner else []),
             *(["below a device its copies, to the host as forward, back as backward"] if schedule.offloads else [])]
    return Chart(
        title=f"{title}: {chart.counted(schedule.num_microbatches, 'micro-batch')} in {number(result.makespan)}",
        rows=tuple(_with_streams(result)), span=result.makespan, steady=find_steady(result), look=look, to_text=number,
        shortest=min((block.time for block in problem.blocks if block.time > 0), default=0.0),
        legend="; ".join([chart.marks_legend(set(shades), schedule.num_microbatches), *notes]),
        keys=(*chart.shade_keys(set(shades), schedule.num_microbatches),
              *([chart.Key(("#ffffff",), "on several devices", chart.DARK)] if is_joint else [])))


def _copy_look(schedule: Schedule, row: int, microbatch: int) -> Look:
    """Return the look of a copy to the host (even row) or back."""
    problem, (copy, way) = schedule.problem, divmod(row, 2)
    assert schedule.moves is not None, "it is a copy that was made"
    start, item = float(schedule.moves[row, microbatch]), problem.copies[copy]
    shades: tuple[Shade, Shade] = "forward", "backward"
    return chart.microbatch_look(
        microbatch, schedule.num_microbatches, shades[way],
        tip=f"what {problem.blocks[item.block].name} of micro-batch {microbatch} takes, "
            f"{('to the host', 'back')[way]}: {number(start)} to {number(start + item.time)}")


def _with_streams(result: ScheduleResult) -> Iterator[Row]:
    """Yield the devices, each with its copy stream if memory can leave it, then the links."""
    copied = result.schedule.problem.copied
    for resource, row in enumerate(rows_of(result)):
        yield row
        if resource in copied:
            yield _stream(result.schedule, resource)


def _stream(schedule: Schedule, device: int) -> Row:
    """Return the copies of a device's memory, by start."""
    problem, boxes = schedule.problem, []
    for copy, microbatch, *starts in schedule.offloads:
        item = problem.copies[copy]
        if device in problem.blocks[item.block].devices:
            boxes += [(start, start + item.time, (problem.num_tasks + 2 * copy + way) * schedule.num_microbatches
                       + microbatch) for way, start in enumerate(starts)]
    begins, ends, items = np.asarray(sorted(boxes), dtype=np.float64).reshape(-1, 3).T
    return Row(name=f"{problem.device_names[device]} copies", is_link=True, items=items.astype(np.int64), starts=begins,
               ends=ends, busy=float((ends - begins).sum()))


def rows_of(result: ScheduleResult) -> tuple[Row, ...]:
    """Return the devices, then the directions of links in use."""
    schedule, problem = result.schedule, result.schedule.problem
    is_steady = np.asarray(result.phases()) == "steady" if find_steady(result) is not None else None
    half = {item: place for pair in schedule.pairs for place, item in enumerate(pair, 1)}
    all_ends = schedule.ends
    rows = []
    for resource, (name, order) in enumerate(zip(problem.resource_names, schedule.orders(), strict=True)):
        tasks, microbatches = np.asarray(order, dtype=np.int64).reshape(-1, 2).T
        starts, ends = schedule.starts[tasks, microbatches], all_ends[tasks, microbatches]
        steady = None
        if is_steady is not None and (kept := is_steady[tasks, microbatches]).any():
            steady = float(starts[kept].min()), float(ends[kept].max())
        halves = np.asarray([half.get(item, 0) for item in order], dtype=np.int64) if half else None
        rows.append(Row(name=name, is_link=resource >= problem.num_devices, starts=starts, ends=ends, half=halves,
                        items=tasks * schedule.num_microbatches + microbatches, steady=steady,
                        busy=schedule.busy(resource) if half else float((ends - starts).sum())))
    return tuple(rows)


def find_steady(result: ScheduleResult) -> Steady | None:
    """Return where everything repeats, or None where the micro-batches are too few for a whole period."""
    period, number = result.period, result.period_microbatches
    if period is None or number is None or period <= 0:
        return None
    schedule, slack = result.schedule, TOLERANCE * result.makespan
    after, until = -np.inf, np.inf
    for row, phases in zip(schedule.starts, result.phases(), strict=True):
        steady = np.flatnonzero(np.asarray(phases) == "steady")
        if len(steady) < number:
            return None
        # A period that begins after the first and no later than the second of these has `number` starts of the task.
        first, last = int(steady[0]), int(steady[-1])
        after = max(after, row[first + number - 1] - period, row[first - 1] if first else -np.inf)
        until = min(until, row[last + 1 - number])
    num_blocks = schedule.problem.num_blocks
    starts, ends = np.sort(schedule.starts[:num_blocks].ravel()), schedule.ends[:num_blocks].ravel()
    cuts = starts[(starts > after + slack) & (starts <= until + slack)]
    if not len(cuts):
        return None
    cut = chart.quietest_cut(cuts, starts, ends, slack)
    inside = (schedule.starts >= cut - slack) & (schedule.starts < cut + period - slack)
    if (inside.sum(axis=1) != number).any():
        return None  # micro-batches that overtake each other
    return Steady(start=float(cuts[0]), end=float(cuts[-1]) + period, period_start=cut, period_end=cut + period,
                  num_microbatches=number)


def block_shades(problem: ScheduleProblem) -> tuple[Shade, ...]:
    """Return for each task how dark it is drawn; transfers have the shade of the block that they come from."""
    roles = find_roles(problem)
    known = roles.of_blocks() if roles is not None and roles.is_training else None
    shades = _shades_by_memory(problem) if known is None else [
        _SHADES[known[block].role] for block in range(problem.num_blocks)]
    return (*shades, *(shades[transfer.source] for transfer in problem.linked))


def _shades_by_memory(problem: ScheduleProblem) -> list[Shade]:
    """Return forward for what takes memory or leads to something that does; the rest is backward if any releases."""
    if all(block.memory >= 0 for block in problem.blocks):
        return ["forward"] * problem.num_blocks
    leads = [problem.memory_of(task) > 0 for task in range(problem.num_tasks)]
    for task in reversed(problem.topological):
        leads[task] = leads[task] or any(leads[edge.target] for edge in problem.successors[task])
    return ["forward" if lead else "backward" for lead in leads[: problem.num_blocks]]


def memory_curves(schedule: Schedule) -> Iterator[tuple[F64, F64]]:
    """Yield for each device (times, amounts): what it holds from each time on; only changes are listed."""
    for times, changes in schedule.memory_changes():
        kept = changes != 0
        yield times[kept], np.cumsum(changes)[kept]


# ---- for the page


def schedule_data(result: ScheduleResult) -> dict[str, Any]:
    """Return everything that the page's script draws."""
    problem, count, drawn = result.schedule.problem, result.schedule.num_microbatches, schedule_chart(result)
    rows = rows_of(result)
    streams = {device: _stream(result.schedule, device) for device in problem.copied}
    drawn = replace(drawn, rows=tuple(_with_transfers(problem, count, rows, streams)))
    items = np.concatenate([row.items for row in drawn.rows])
    columns, more = {"what": (items // count).tolist(), "microbatch": (items % count).tolist()}, {}
    if result.period is not None:
        phases = [_PARTS.index(name) for names in result.phases() for name in names]
        columns["part"], more["parts"] = [phases[item] for item in _blocks_of(result.schedule, items)], list(_PARTS)
    curves = memory_curves(result.schedule)
    return chart_data(
        {"schedule": drawn}, microbatches=count, what=_what(problem), columns=columns, **more,
        devices=[{"name": printable(name), "capacity": limit} for name, limit in
                 zip(problem.device_names, problem.device_memory, strict=True)],
        memory=[[(times, [float(f"{value:.9g}") for value in amounts.tolist()]) for times, amounts in curves]])


def _blocks_of(schedule: Schedule, items: I64) -> list[int]:
    """Return the items, those of copies as the block whose memory they move."""
    tasks, microbatches = np.divmod(items, schedule.num_microbatches)
    problem = schedule.problem
    block = np.asarray([*range(problem.num_tasks), *(item.block for item in problem.copies for _ in range(2))])
    found: list[int] = (block[tasks] * schedule.num_microbatches + microbatches).tolist()
    return found


def _with_transfers(problem: ScheduleProblem, count: int, rows: tuple[Row, ...],
                    streams: Mapping[int, Row]) -> Iterator[Row]:
    """Yield the devices, each with the transfers that it sends, and its copies, behind its blocks."""
    sender = np.asarray([problem.blocks[item.source].devices[0] for item in problem.linked], dtype=np.int64)
    for device, row in enumerate(rows[: problem.num_devices]):
        parts = [row, *(link.only(sender[link.items // count - problem.num_blocks] == device)
                        for link in rows[problem.num_devices:]), *([streams[device]] if device in streams else [])]
        items: I64 = np.concatenate([part.items for part in parts])
        yield replace(row, items=items, half=None, starts=np.concatenate([part.starts for part in parts]),
                      ends=np.concatenate([part.ends for part in parts]))


def _what(problem: ScheduleProblem) -> list[dict[str, Any]]:
    shades, names = block_shades(problem), problem.resource_names
    items = []
    for task, shade in enumerate(shades):
        is_block, resources = task < problem.num_blocks, problem.task_resources[task]
        where = short_list(printable(names[resource]) for resource in resources)
        items.append({"label": printable(problem.task_names[task]), "op": "compute" if is_block else "send",
                      "phase": _LETTERS[shade] if is_block else "", "backward": shade != "forward", "bytes": None,
                      "joint": len(resources) > 1, "where": where if len(resources) > 1 or not is_block else ""})
    for copy in problem.copies:
        block = problem.blocks[copy.block]
        items += [{"label": f"{printable(block.name)} {way}", "op": "send", "phase": "", "backward": way == "back",
                   "bytes": None, "joint": False, "where": "the host"} for way in ("away", "back")]
    return items


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """One line of the comparison of schedules."""

    name: str
    is_search: bool = False
    is_best: bool = False
    makespan: float | None = None
    idle: float | None = None
    """Part of the makespan in which the busiest device is idle."""
    peak_memory: dict[str, float] | None = None
    reason: str | None = None
    """Why there is none, or why it does not fit."""


def print_schedule(result: ScheduleResult, compared: Sequence[ScheduleFacts] = (), *,
                   width: int | None = None) -> None:
    """Print the result, and the comparison if there is one."""
    print_tables(summary_table(result), memory_table(result), width=width)
    print_chart(schedule_chart(result), width=width)
    if compared:
        print_tables(compare_table(compared), width=width)


def summary_table(result: ScheduleResult) -> TextTable:
    """Return the result as rows of (what, value)."""
    each, note = period_texts(result)
    by = "" if result.by == "search" else f" ({result.by}; the search found none shorter)"
    return TextTable(header=("schedule", ""), rows=(
        ("status", result.status + by),
        ("micro-batches", str(result.schedule.num_microbatches)),
        ("makespan", f"{number(result.makespan)} (bound {number(result.makespan_bound)}, gap {gap_text(result)})"),
        ("period per micro-batch", f"{each} ({note})"),
        ("bubble", f"{percent(result.bubble)} of a period" if result.bubble is not None else UNKNOWN),
        *_choices(result.schedule),
        ("search", f"{result.seconds:.3g} CPU seconds")))


def _choices(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """Yield how many blocks run at once, and how much leaves the devices, where that can be."""
    problem = schedule.problem
    if problem.overlaps:
        yield "pairs", f"{counted(len(schedule.pairs), 'pair')} of blocks at once"
    if problem.copies:
        limit = limit_text(problem.host_memory)
        yield "offload", (f"{len(schedule.offloads)} of {len(problem.copies) * schedule.num_microbatches}; the host "
                          f"keeps {number(schedule.peak_host_memory())} at most (limit {limit})")


def gap_text(result: ScheduleResult) -> str:
    """Return how far the makespan is from its bound."""
    if result.makespan_bound > 0:
        return percent(max(0.0, result.makespan / result.makespan_bound - 1))
    return percent(0.0) if result.makespan <= 0 else UNKNOWN


def period_texts(result: ScheduleResult) -> tuple[str, str]:
    """Return the period per micro-batch, and its bound and make-up in words."""
    bound = UNKNOWN if result.period_bound is None else number(result.period_bound)
    if result.period is None or result.period_microbatches is None:
        return UNKNOWN, f"bound {bound}, no steady state known"
    each = number(result.period / result.period_microbatches)
    many = counted(result.period_microbatches, "micro-batch")
    return each, f"bound {bound}; {many} in a period of {number(result.period)}"


def memory_table(result: ScheduleResult, *, limit: int = MAX_DEVICE_ROWS) -> TextTable:
    """Return how busy each device is, and its peak memory against what it has; rows beyond ``limit`` are cut."""
    problem, peaks = result.schedule.problem, result.schedule.peak_memory()
    cells = [(row.name, percent(row.share(result.makespan)), number(peaks[row.name]), limit_text(memory))
             for row, memory in zip(rows_of(result), problem.device_memory, strict=False)]
    return make_table("Devices", ("device", "#busy", "#peak memory", "#limit"), cells, limit=limit)


def limit_text(memory: float | None) -> str:
    """Return a device's memory in words."""
    return "none" if memory is None else number(memory)


def peaks_text(row: ScheduleFacts) -> str:
    """Return the range of the devices' peaks: ``1 - 4``."""
    peaks = (row.peak_memory or {}).values()
    return " - ".join(dict.fromkeys([number(min(peaks)), number(max(peaks))])) if peaks else UNKNOWN


def compare_table(rows: Sequence[ScheduleFacts]) -> TextTable:
    """Return the comparison of those that apply: the shortest that fits is marked, the others are named below."""
    shown = [row for row in rows if row.makespan is not None]
    cells = ((("* " if row.is_best else "  ") + row.name, number(row.makespan or 0.0), percent(row.idle),
                   peaks_text(row), fits_text(row)) for row in shown)
    notes = ["* shortest that fits; idle: part of the makespan in which the device with the most work does nothing; "
             "peak memory: least and most of any device"]
    if len(shown) < len(rows):
        notes.append("do not apply here: " + ", ".join(row.name for row in rows if row.makespan is None))
    return make_table("Named schedules", ("schedule", "#makespan", "#idle", "#peak memory", "fits"), cells, notes=notes,
                      marked=(row.is_best for row in shown))


def fits_text(row: ScheduleFacts) -> str:
    """Return ``yes``, or the first reason why not."""
    if row.reason is None:
        return "yes"
    first, *others = row.reason.split("; ")
    return f"no: {first}" + (f"; and {len(others)} more" if others else "")


# ---- named schedules


def compare_facts(result: ScheduleResult, named: Sequence[NamedRow]) -> list[ScheduleFacts]:
    """Return the search's result and the named schedules; the shortest that fits is marked, the search among equals."""
    rows = [_facts(name="search", schedule=result.schedule, reason=None, is_search=True),
            *(_facts(name=item.name, schedule=item.schedule, reason=item.reason or None) for item in named)]
    fitting = [row.makespan for row in rows if row.makespan is not None and row.reason is None]
    limit = min(fitting) * (1 + TOLERANCE)
    best = next(row for row in rows if row.reason is None and row.makespan is not None and row.makespan <= limit)
    return [replace(row, is_best=row is best) for row in rows]


def _facts(*, name: str, schedule: Schedule | None, reason: str | None, is_search: bool = False) -> ScheduleFacts:
    if schedule is None:
        return ScheduleFacts(name=name, reason=reason or "it does not apply")
    return ScheduleFacts(name=name, is_search=is_search, makespan=schedule.makespan, idle=idle_part(schedule),
                         peak_memory=schedule.peak_memory(), reason=reason)


def idle_part(schedule: Schedule) -> float:
    """Return the part of the makespan in which the device with the most work is idle."""
    problem, makespan = schedule.problem, schedule.makespan
    work = max(problem.device_work[: problem.num_devices], default=0.0) * schedule.num_microbatches
    if schedule.pairs:
        work = max(map(schedule.busy, range(problem.num_devices)))
    return max(0.0, 1.0 - work / makespan) if makespan > 0 else 0.0


def facts_json(row: ScheduleFacts) -> dict[str, Any]:
    """Return the line as plain JSON values."""
    return {"name": row.name, "makespan": row.makespan, "idle": row.idle, "peak_memory": row.peak_memory,
            "fits": row.makespan is not None and row.reason is None, "reason": row.reason}


# ---- the page


def render_schedule_report(result: ScheduleResult, *, title: str = "Schedule",
                           compared: Sequence[ScheduleFacts] = ()) -> str:
    """Return the page's text: key figures, an interactive chart with memory, devices; ``compared`` adds a table."""
    problem, count = result.schedule.problem, result.schedule.num_microbatches
    return page.render_page({
        "title": f"{printable(title)}: Weft schedule", "mark": "schedule", "last_column": "Phase",
        "heading": printable(title), "tiles": _tiles(result),
        "subtitle": f"{counted(count, 'micro-batch')} of {problem.num_blocks} blocks on "
                    f"{counted(problem.num_devices, 'device')}, by {printable(result.by)}",
        "sections": "\n".join([_compared(compared) if compared else "", _devices(result)]),
        "footer": "Written by Weft. Times and memory are in the units of the problem; memory is taken when a block "
                  f"starts and released when it {problem.free_at}s."}, schedule_data(result))


def _tiles(result: ScheduleResult) -> str:
    return page.tiles([("Makespan", number(result.makespan), f"status {result.status}"),
                       ("Lower bound", number(result.makespan_bound), f"gap {gap_text(result)}"),
                       ("Period per micro-batch", *period_texts(result)),
                       ("Bubble", percent(result.bubble), "of a period, on the busiest device"),
                       ("Peak memory", *_fullest(result)), *(
                           (name.capitalize(), text.split()[0].rstrip(";"), text.split(" ", 1)[1])
                           for name, text in _choices(result.schedule))])


def _fullest(result: ScheduleResult) -> tuple[str, str]:
    """Return the peak of the device that is fullest, and a note on it."""
    problem, peaks = result.schedule.problem, result.schedule.peak_memory()
    names = dict(zip(problem.device_names, problem.device_memory, strict=True))
    if not names:
        return UNKNOWN, ""
    name = max(names, key=lambda item: (peaks[item] / (names[item] or math.inf), peaks[item]))
    return number(peaks[name]), f"on {printable(name)}, limit {limit_text(names[name])}"


def _compared(rows: Sequence[ScheduleFacts]) -> str:
    best = min((row.makespan for row in rows if row.makespan is not None and row.reason is None), default=None)
    body = [(page.tagged(row.name, "best" if row.is_best else ""), *(
        [printable(row.reason or "")] if row.makespan is None else
        [number(row.makespan), percent(row.makespan / best - 1, signed=True) if best else UNKNOWN, percent(row.idle),
         peaks_text(row), printable(fits_text(row))])) for row in rows]
    styles = {index: "chosen" if row.is_best else "refused" for index, row in enumerate(rows)
              if row.is_best or row.reason}
    header = ("Schedule", "#Makespan", "#Against best", "#Idle", "#Peak memory per device", "~Fits")
    return page.table_section("Named schedules", header, body, styles=styles, lead=(
        "Idle is the part of the makespan in which the device with the most work does nothing."))


def _devices(result: ScheduleResult) -> str:
    problem, peaks = result.schedule.problem, result.schedule.peak_memory()
    body = []
    for row, limit in zip(rows_of(result), problem.device_memory, strict=False):
        busy = row.share(result.makespan)
        peak, whole = peaks[row.name], max(peaks[row.name], limit or 0.0)
        memory = f"{number(peak)} of {limit_text(limit)}"
        body.append((printable(row.name), page.with_bar(f"busy {percent(busy)}", {"busy": busy}),
                     page.with_bar(memory, {"activations": peak / whole if whole > 0 else 0.0}) if limit else memory))
    return page.table_section("Devices", ("Device", "Time", "Memory at its peak"), body)
