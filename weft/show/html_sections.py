"""The parts of the report that are plain HTML: figures and tables, readable without scripts.

Every text goes through ``escape``; functions return HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weft.base.units import format_bytes
from weft.plan.memory import CATEGORIES
from weft.plan.plan import Plan
from weft.show.facts import DeviceFacts, ExchangeFacts, PlanFacts, StageFacts, StrategyFacts, extra_parts, relative
from weft.show.names import short_list
from weft.show.page import (
    colour_key,
    definitions,
    escape,
    number_cells,
    row_header,
    section,
    share_bar,
    table,
    tile,
)
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

_TIME_PARTS: Final = {"busy": "busy", "exposed": "exposed communication", "bubble": "bubble"}
MAX_ROWS: Final = 256
"""Longer tables of devices are cut; the chart has all of them."""
MAX_SINGLE: Final = 16
"""Of more devices, those whose time and memory go the same way share a row."""
MAX_GROUPS: Final = 6
"""Of more groups of devices that exchange alike, the others are counted."""
MAX_TRIED: Final = 200
"""Longer lists of settings are cut."""
_TEXT: Final = "{:.4g}".format


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
    """Return the comparison of strategies, and why all but one lost."""
    chosen = next((row for row in rows if row.is_chosen), None)
    best = min((row.step_time_s for row in rows if row.step_time_s is not None), default=None)
    body = []
    for row in rows:
        name = row_header(row.strategy, tag="chosen" if row.is_chosen else "")
        if row.step_time_s is None:
            body.append(f'<tr class="refused">{name}<td colspan="7" class="wrap">{escape(row.status)}: '
                        f"{escape(row.reason or 'no reason given')}</td></tr>")
            continue
        slower = relative(row.step_time_s, best)
        cells = [seconds(row.step_time_s), "fastest" if not slower else percent(slower, signed=True),
                 per_second(row.samples_per_s), str(row.microbatches or UNKNOWN), peak_text(row), percent(row.bubble)]
        style = ' class="chosen"' if row.is_chosen else ""
        body.append(f'<tr{style}>{name}{number_cells(cells)}<td class="wrap">{escape(_verdict(row, chosen))}</td></tr>')
    header = ("Strategy", "#Step time", "#Against fastest", "#Samples", "#Micro-batches", "#Peak memory per device",
              "#Bubble", "Why")
    tried = "".join(_tried(row) for row in rows if row.tried)
    return section("Strategies", table("Strategies", header, body) + tried,
                   lead="All that was tried. Why: what a device has more of than with the chosen plan, on average.")


def _tried(row: StrategyFacts) -> str:
    """Return everything that a strategy looked at, folded away."""
    best = min((item.step_time_s for item in row.tried if item.step_time_s is not None), default=None)
    body = []
    for item in row.tried[:MAX_TRIED]:
        why = item.reason or ("not simulated: others were estimated to be faster" if item.step_time_s is None else "")
        slower = relative(item.step_time_s, best)
        cells = [seconds(item.estimate_s), seconds(item.step_time_s),
                 percent(slower, signed=True) if slower else UNKNOWN]
        body.append(f'<tr><td class="wrap">{escape(item.setting)}</td>{number_cells(cells)}'
                    f'<td class="wrap">{escape(why)}</td></tr>')
    if len(row.tried) > MAX_TRIED:
        body.append(f'<tr><td colspan="5" class="dim">{len(row.tried) - MAX_TRIED} more</td></tr>')
    inner = table(f"Settings of {row.strategy}", ("Setting", "#Estimate", "#Simulated", "#Against best", "Why"), body)
    return f"<details><summary>{escape(f'{len(row.tried)} settings of {row.strategy}')}</summary>{inner}</details>"


def _verdict(row: StrategyFacts, chosen: StrategyFacts | None) -> str:
    """Return why a strategy was chosen or lost."""
    if row.reason:
        return row.reason
    if row.is_chosen:
        return f"fastest that fits, {row.status}"
    if chosen is None:
        return row.status
    if row.step_time_s == chosen.step_time_s:
        return "as fast as the chosen one"
    more = [f"{seconds(value)} more {name}" for name, value in extra_parts(row, chosen).items()]
    return ", ".join(more) or row.status


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
    """Return the gradient exchanges, alike ones among other devices in one row; nothing where there are none."""
    groups: dict[tuple[object, ...], list[ExchangeFacts]] = {}
    for row in rows:
        time = UNKNOWN if row.time_s is None else _TEXT(row.time_s)
        groups.setdefault((row.how, row.parameters, row.num_bytes, time), []).append(row)
    if not groups:
        return ""
    body = [_exchange_row(members) for members in groups.values()]
    header = ("Method", "Parameters", "#Number", "#Bytes", "Devices", "#Time")
    return section("Gradient exchanges", table("Gradient exchanges", header, body))


def _exchange_row(members: Sequence[ExchangeFacts]) -> str:
    """Return the same exchange among one or several groups of devices."""
    row = members[0]
    name = row_header(row.how.replace("_", " "), tag=f"{len(members)} alike" if len(members) > 1 else "")
    among = "; ".join(short_list(item.devices) for item in members[:MAX_GROUPS])
    if len(members) > MAX_GROUPS:
        among += f"; {len(members) - MAX_GROUPS} more groups"
    return (f'<tr>{name}<td class="wrap">{escape(short_list(row.parameters, limit=4))}</td>'
            + number_cells([str(len(row.parameters)), format_bytes(row.num_bytes)])
            + f'<td class="wrap">{escape(among)}</td>{number_cells([seconds(row.time_s)])}</tr>')


def devices(rows: Sequence[DeviceFacts], kind: str) -> str:
    """Return where each device's time and memory go, with bars; alike ones of many are one row."""
    groups: dict[object, list[DeviceFacts]] = {}
    for row in rows:
        key = row.device if len(rows) <= MAX_SINGLE else (
            _TEXT(row.busy_s), _TEXT(row.exposed_s), row.capacity_bytes, tuple(row.peak_memory.values()))
        groups.setdefault(key, []).append(row)
    body = [_device_row(members) for members in list(groups.values())[:MAX_ROWS]]
    if len(groups) > MAX_ROWS:
        left_out = sum(len(members) for members in list(groups.values())[MAX_ROWS:])
        body.append(f'<tr><td colspan="4" class="dim">{left_out} more</td></tr>')
    header = ("Device", f"Time of the {kind} step", "#Idle", "Memory at its peak")
    used = [name for name in CATEGORIES if any(row.peak_memory.get(name) for row in rows)]
    return section("Devices", table("Devices", header, body)
                   + colour_key({**_TIME_PARTS, **{name: name for name in used}}))


def _device_row(members: Sequence[DeviceFacts]) -> str:
    row = members[0]
    parts = {"busy": row.busy_s, "exposed": row.exposed_s, "bubble": row.bubble_s}
    shares = {name: value / row.step_time_s if row.step_time_s else 0.0 for name, value in parts.items()}
    text = ", ".join(f"{_TIME_PARTS[name]} {percent(value)}" for name, value in shares.items())
    name = row_header(short_list((item.device for item in members), limit=4),
                      tag=f"{len(members)} alike" if len(members) > 1 else "")
    return (f"<tr>{name}<td>{escape(text)}{share_bar(shares)}</td>{number_cells([seconds(row.idle_s)])}"
            f"<td>{_memory_cell(row)}</td></tr>")


def _memory_cell(row: DeviceFacts) -> str:
    whole = max(row.peak_bytes, row.capacity_bytes or 0)
    shares = {name: row.peak_memory.get(name, 0) / whole if whole else 0.0 for name in CATEGORIES}
    text = escape(format_bytes(row.peak_bytes))
    if row.capacity_bytes is not None:
        part = f"{percent(row.capacity_used)} of {format_bytes(row.capacity_bytes)}"
        is_over = row.peak_bytes > row.capacity_bytes
        text += f' <span class="{"over" if is_over else "dim"}">{escape(part)}</span>'
    return text + share_bar(shares)


def provenance(plan: Plan) -> str:
    """Return who made the plan, from what."""
    search = plan.search
    facts = [("Planned by", search.by), ("Status", search.status), ("Seed", str(search.seed)),
             ("Search time", seconds(search.seconds)), ("Model digest", plan.model.digest),
             ("Cluster digest", plan.cluster.digest),
             ("Devices of the cluster", short_list(plan.cluster.devices))]
    return section("About this plan", definitions(facts))
