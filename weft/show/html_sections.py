"""The parts of the report that are plain HTML: figures and tables, readable without scripts.

Every text goes through ``escape``; functions return HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from weft.plan.memory import CATEGORIES
from weft.plan.plan import Plan
from weft.show.facts import DeviceFacts, ExchangeFacts, PlanFacts, StageFacts, StrategyFacts, relative
from weft.show.names import short_list
from weft.show.page import escape, number_cells, row_header, section, share_bar, table, tile
from weft.show.tables import (
    UNKNOWN,
    batch_text,
    bound_text,
    peak_text,
    per_second,
    percent,
    seconds,
    share_text,
    stage_devices,
    stage_modules,
)
from weft.units import format_bytes

_TIME_PARTS: Final = {"busy": "busy", "exposed": "exposed communication", "bubble": "bubble"}
MAX_ROWS: Final = 256
"""Longer tables of devices are cut; the chart has all of them."""


def heading(facts: PlanFacts) -> str:
    """Return the page's heading, not escaped."""
    devices = "1 device" if facts.num_devices == 1 else f"{facts.num_devices} devices"
    return f"{facts.model} on {devices}"


def subtitle(facts: PlanFacts) -> str:
    """Return the line below the heading, not escaped."""
    stages = "1 stage" if facts.num_stages == 1 else f"{facts.num_stages} stages"
    return (f"{facts.mode.capitalize()} in {facts.dtype}, batch {batch_text(facts)}, {stages}, "
            f"planned by {facts.strategy}")


def tiles(facts: PlanFacts, devices: Sequence[DeviceFacts]) -> str:
    """Return the key figures."""
    items: list[tuple[str, str, str]] = [
        ("Predicted step", seconds(facts.step_time_s), f"{per_second(facts.samples_per_s)} samples")]
    if facts.measured_s is not None:
        items.append(("Measured step", seconds(facts.measured_s),
                      f"{percent(facts.measured_difference, signed=True)} against the prediction"))
    gap = f"gap {percent(facts.gap)}" if facts.bound_s is not None else bound_text(facts)
    items.append(("Lower bound", seconds(facts.bound_s), f"{gap}, status {facts.status}"))
    whole = sum(item.step_time_s for item in devices)
    if whole:
        exposed = sum(item.exposed_s for item in devices) / whole
        items.append(("Bubble", percent(sum(item.bubble_s for item in devices) / whole),
                      f"exposed communication {percent(exposed)}"))
    if devices:
        items.append(("Peak memory", *_fullest(devices)))
    return "".join(tile(*item) for item in items)


def _fullest(devices: Sequence[DeviceFacts]) -> tuple[str, str]:
    """Return the peak of the device that is fullest, and a note on it."""
    top = max(devices, key=lambda item: (item.capacity_used or 0.0, item.peak_bytes))
    if top.capacity_bytes is None:
        return format_bytes(top.peak_bytes), f"on {top.device}"
    return (format_bytes(top.peak_bytes),
            f"on {top.device}, {percent(top.capacity_used)} of {format_bytes(top.capacity_bytes)}")


def strategies(rows: Sequence[StrategyFacts]) -> str:
    """Return the comparison of strategies."""
    best = min((row.step_time_s for row in rows if row.step_time_s is not None), default=None)
    body = []
    for row in rows:
        name = row_header(row.strategy, tag="chosen" if row.is_chosen else "")
        if row.step_time_s is None:
            body.append(f'<tr class="refused">{name}<td colspan="8" class="wrap">{escape(row.status)}: '
                        f"{escape(row.reason or 'no reason given')}</td></tr>")
            continue
        slower = relative(row.step_time_s, best)
        cells = [seconds(row.step_time_s), "fastest" if not slower else percent(slower, signed=True),
                 per_second(row.samples_per_s), str(row.microbatches or UNKNOWN), peak_text(row), percent(row.bubble),
                 seconds(row.bound_s)]
        body.append(f"<tr{' class=chosen' if row.is_chosen else ''}>{name}{number_cells(cells)}"
                    f"<td>{escape(row.status)}</td></tr>")
    header = ("Strategy", "#Step time", "#Against fastest", "#Samples", "#Micro-batches", "#Peak memory per device",
              "#Bubble", "#Bound", "Status")
    return section("Strategies", table("Strategies", header, body))


def stages(rows: Sequence[StageFacts]) -> str:
    """Return the stages."""
    body = [f'<tr>{row_header(row.name)}<td class="wrap">{escape(stage_modules(row))}</td>'
            f'{number_cells([str(row.num_ops)])}<td class="wrap">{escape(stage_devices(row))}</td>'
            + number_cells([share_text(row), format_bytes(row.parameter_bytes), seconds(row.forward_s),
                        seconds(row.backward_s)])
            + "</tr>" for row in rows]
    header = ("Stage", "Modules", "#Operators", "Devices", "#Share of batch", "#Parameters", "#Forward", "#Backward")
    return section("Stages", table("Stages", header, body), lead="Times are for one micro-batch.")


def exchanges(rows: Sequence[ExchangeFacts]) -> str:
    """Return the gradient exchanges, or nothing where there are none."""
    if not rows:
        return ""
    body = [f'<tr>{row_header(row.how.replace("_", " "))}'
            f'<td class="wrap">{escape(short_list(row.parameters, limit=4))}</td>'
            + number_cells([str(len(row.parameters)), format_bytes(row.num_bytes)])
            + f'<td class="wrap">{escape(short_list(row.devices))}</td>{number_cells([seconds(row.time_s)])}</tr>'
            for row in rows]
    header = ("Method", "Parameters", "#Number", "#Bytes", "Devices", "#Time")
    return section("Gradient exchanges", table("Gradient exchanges", header, body))


def devices(rows: Sequence[DeviceFacts], kind: str) -> str:
    """Return where each device's time and memory go, with bars."""
    body = []
    for row in rows[:MAX_ROWS]:
        parts = {"busy": row.busy_s, "exposed": row.exposed_s, "bubble": row.bubble_s}
        shares = {name: value / row.step_time_s if row.step_time_s else 0.0 for name, value in parts.items()}
        text = ", ".join(f"{_TIME_PARTS[name]} {percent(value)}" for name, value in shares.items())
        body.append(f"<tr>{row_header(row.device)}<td>{escape(text)}{share_bar(shares)}</td>{number_cells([seconds(row.idle_s)])}"
                    f"<td>{_memory_cell(row)}</td></tr>")
    if len(rows) > MAX_ROWS:
        body.append(f'<tr><td colspan="4" class="dim">{len(rows) - MAX_ROWS} more</td></tr>')
    header = ("Device", f"Time of the {kind} step", "#Idle", "Memory at its peak")
    used = [name for name in CATEGORIES if any(row.peak_memory.get(name) for row in rows)]
    return section("Devices", table("Devices", header, body) + _key({**_TIME_PARTS, **{name: name for name in used}}))


def _memory_cell(row: DeviceFacts) -> str:
    whole = max(row.peak_bytes, row.capacity_bytes or 0)
    shares = {name: row.peak_memory.get(name, 0) / whole if whole else 0.0 for name in CATEGORIES}
    text = escape(format_bytes(row.peak_bytes))
    if row.capacity_bytes is not None:
        part = f"{percent(row.capacity_used)} of {format_bytes(row.capacity_bytes)}"
        is_over = row.peak_bytes > row.capacity_bytes
        text += f' <span class="{"over" if is_over else "dim"}">{escape(part)}</span>'
    return text + share_bar(shares)


def _key(names: Mapping[str, str]) -> str:
    items = (f'<li><svg class="{name}" aria-hidden="true"><rect width="100%" height="100%"/></svg>{escape(text)}</li>'
             for name, text in names.items())
    return f'<ul class="key">{"".join(items)}</ul>'


def provenance(plan: Plan) -> str:
    """Return who made the plan, from what."""
    search = plan.search
    facts = [("Planned by", search.by), ("Status", search.status), ("Seed", str(search.seed)),
             ("Search time", seconds(search.seconds)), ("Optimizer", plan.optimizer.kind + (
                 ", state sharded" if plan.optimizer.sharded else "")),
             ("Model digest", plan.model.digest), ("Cluster digest", plan.cluster.digest),
             ("Devices of the cluster", short_list(plan.cluster.devices))]
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return section("About this plan", f'<dl class="facts panel">{items}</dl>')
