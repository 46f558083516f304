"""A schedule as a chart, and what the page's script draws of it.

    d0 |01...aaa2bbb3ccc4ddd5eee.fff|   86 %
    d1 |.0aaa1bbb2ccc3ddd4eee5fff...|   86 %

An item of the chart is a task and a micro-batch: ``task * num_microbatches + microbatch``. Rows are the devices, then
the directions of links in use. The steady part is where every block repeats with the period that the search found. One
period in its middle is marked: a span of time in which each block starts once for each micro-batch of the period, cut
where the fewest blocks run. On the page transfers are in the thin row of the device that sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from weft.model.graph import F64, I64
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.roles import Role, find_roles
from weft.search.schedule.schedule import TOLERANCE, Schedule, ScheduleResult
from weft.show import chart
from weft.show.chart import Chart, Look, Row, Shade, Steady, number
from weft.show.names import printable, short_list
from weft.show.page import chart_data

_SHADES: Final[dict[Role, Shade]] = {Role.FORWARD: "forward", Role.BACKWARD: "backward",
                                     Role.INPUT_GRADIENT: "backward", Role.WEIGHT_GRADIENT: "weight"}
_PARTS: Final = ("warm-up", "steady", "cool-down")
_LETTERS: Final[dict[Shade, str]] = {"forward": "F", "backward": "B", "weight": "W"}


def schedule_chart(result: ScheduleResult, title: str = "Schedule") -> Chart:
    """Return the chart of the schedule; of a long one whole periods may be left out."""
    schedule, problem = result.schedule, result.schedule.problem
    shades, phases = block_shades(problem), None if result.period is None else result.phases()

    def look(item: int) -> Look:
        task, microbatch = divmod(item, schedule.num_microbatches)
        start = float(schedule.starts[task, microbatch])
        tip = (f"{problem.task_names[task]} of micro-batch {microbatch}: {number(start)} to "
               f"{number(start + problem.task_times[task])}")
        return chart.microbatch_look(
            microbatch, schedule.num_microbatches, shades[task], is_joint=len(problem.task_resources[task]) > 1,
            tip=f"{tip}, {phases[task][microbatch]}" if phases else tip)

    is_joint = any(len(block.devices) > 1 for block in problem.blocks)
    return Chart(
        title=f"{title}: {chart.counted(schedule.num_microbatches, 'micro-batch')} in {number(result.makespan)}",
        rows=rows_of(result), span=result.makespan, steady=find_steady(result), look=look, to_text=number,
        shortest=min((block.time for block in problem.blocks if block.time > 0), default=0.0),
        legend=chart.marks_legend(set(shades), schedule.num_microbatches),
        keys=(*chart.shade_keys(set(shades), schedule.num_microbatches),
              *([chart.Key(("#ffffff",), "on several devices", chart.DARK)] if is_joint else [])))


def rows_of(result: ScheduleResult) -> tuple[Row, ...]:
    """Return the devices, then the directions of links in use."""
    schedule, problem = result.schedule, result.schedule.problem
    is_steady = np.asarray(result.phases()) == "steady" if find_steady(result) is not None else None
    rows = []
    for resource, (name, order) in enumerate(zip(problem.resource_names, schedule.orders(), strict=True)):
        tasks, microbatches = np.asarray(order, dtype=np.int64).reshape(-1, 2).T
        starts, ends = schedule.starts[tasks, microbatches], schedule.ends[tasks, microbatches]
        steady = None
        if is_steady is not None and (kept := is_steady[tasks, microbatches]).any():
            steady = float(starts[kept].min()), float(ends[kept].max())
        rows.append(Row(name=name, is_link=resource >= problem.num_devices, starts=starts, ends=ends,
                        items=tasks * schedule.num_microbatches + microbatches, busy=float((ends - starts).sum()),
                        steady=steady))
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
    starts = np.sort(schedule.starts[: schedule.problem.num_blocks].ravel())
    cuts = starts[(starts > after + slack) & (starts <= until + slack)]
    if not len(cuts):
        return None
    num_blocks = schedule.problem.num_blocks
    cut = chart.quietest_cut(cuts, schedule.starts[:num_blocks].ravel(), schedule.ends[:num_blocks].ravel(), slack)
    inside = (schedule.starts >= cut - slack) & (schedule.starts < cut + period - slack)
    if (inside.sum(axis=1) != number).any():
        return None  # micro-batches that overtake each other
    return Steady(start=float(cuts[0]), end=float(cuts[-1]) + period, period_start=cut, period_end=cut + period,
                  num_microbatches=number)


def block_shades(problem: ScheduleProblem) -> tuple[Shade, ...]:
    """Return for each task how dark it is drawn; transfers have the shade of the block that they come from."""
    roles = find_roles(problem)
    if roles is None or not roles.is_training:
        shades = _shades_by_memory(problem)
    else:
        known = roles.of_blocks()
        shades = [_SHADES[known[block].role] for block in range(problem.num_blocks)]
    return (*shades, *(shades[transfer.source] for transfer in problem.linked))


def _shades_by_memory(problem: ScheduleProblem) -> list[Shade]:
    """Return forward for what takes memory or leads to something that does; the rest is backward if any releases."""
    if all(block.memory >= 0 for block in problem.blocks):
        return ["forward"] * problem.num_blocks
    leads = [problem.memory_of(task) > 0 for task in range(problem.num_tasks)]
    for task in reversed(problem.topological):
        leads[task] = leads[task] or any(leads[edge.target] for edge in problem.successors[task])
    return ["forward" if lead else "backward" for lead in leads[: problem.num_blocks]]


def memory_curve(schedule: Schedule, row: Row) -> tuple[F64, F64]:
    """Return (times, amounts): what the device holds from each time on; only changes are listed."""
    problem = schedule.problem
    tasks = (row.items // schedule.num_microbatches).tolist()
    change = np.asarray([problem.memory_of(task) for task in tasks], dtype=np.float64)
    is_late = (change < 0) & (problem.free_at == "end")
    kept = change != 0
    return np.where(is_late, row.ends, row.starts)[kept], np.cumsum(change)[kept]


# ---- for the page


def schedule_data(result: ScheduleResult) -> dict[str, Any]:
    """Return everything that the page's script draws."""
    problem, count, drawn = result.schedule.problem, result.schedule.num_microbatches, schedule_chart(result)
    devices = drawn.rows[: problem.num_devices]
    drawn = replace(drawn, rows=tuple(_with_transfers(problem, count, drawn.rows)))
    items = np.concatenate([row.items for row in drawn.rows])
    columns, more = {"what": (items // count).tolist(), "microbatch": (items % count).tolist()}, {}
    if result.period is not None:
        phases = [_PARTS.index(name) for names in result.phases() for name in names]
        columns["part"], more["parts"] = [phases[item] for item in items.tolist()], list(_PARTS)
    curves = [memory_curve(result.schedule, row) for row in devices]
    return chart_data(
        {"schedule": drawn}, microbatches=count, what=_what(problem), columns=columns, **more,
        devices=[{"name": printable(name), "capacity": limit} for name, limit in
                 zip(problem.device_names, problem.device_memory, strict=True)],
        memory=[[(times, [float(f"{value:.9g}") for value in amounts.tolist()]) for times, amounts in curves]])


def _with_transfers(problem: ScheduleProblem, count: int, rows: tuple[Row, ...]) -> Iterator[Row]:
    """Yield the devices, each with the transfers that it sends behind its blocks."""
    sender = np.asarray([problem.blocks[item.source].devices[0] for item in problem.linked], dtype=np.int64)
    for device, row in enumerate(rows[: problem.num_devices]):
        parts = [row, *(link.only(sender[link.items // count - problem.num_blocks] == device)
                        for link in rows[problem.num_devices:])]
        items: I64 = np.concatenate([part.items for part in parts])
        yield replace(row, items=items, starts=np.concatenate([part.starts for part in parts]),
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
    return items
