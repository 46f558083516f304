"""The report of a plan: one self-contained page with tables, drawings and an interactive Gantt chart.

``page`` has the frame and the pieces of HTML, ``timeline_chart`` what the chart's script gets. The sections below are
readable without scripts; each is HTML, or nothing where there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Final

import numpy as np

from weft.base.files import write_atomic
from weft.base.units import format_bytes, format_count, format_rate
from weft.cluster.cluster import Cluster
from weft.plan.memory import CATEGORIES
from weft.plan.plan import Plan
from weft.plan.program import Program
from weft.plan.units import storage_text
from weft.show import facts, page
from weft.show import plan_drawings as drawings
from weft.show.chart import Steady, counted
from weft.show.facts import LayerFacts, layer_facts
from weft.show.names import grouped, short_list
from weft.show.plan_tables import batch_text, bound_text, how_text, peak_text, stages_table
from weft.show.tables import UNKNOWN, per_second, percent, seconds
from weft.show.timeline_chart import find_period, report_data
from weft.simulate.timeline import Timeline

MAX_LAYER_ROWS: Final = 48
MAX_LINK_ROWS: Final = 32
MAX_STAGE_ROWS: Final = 48
MAX_TRIED: Final = 200
"""Longer tables are cut, and say so."""
MAX_SINGLE: Final = 16
"""Of more devices, those whose time and memory go the same way share a row."""
MAX_GROUPS: Final = 6
"""Of more groups of devices that exchange alike, the others are counted."""
_TIME_PARTS: Final = {"busy": "busy", "exposed": "exposed communication", "bubble": "bubble"}
_OVER: Final = ("More than 100 %: exchanges at the same time are predicted as if each had the link to itself, so the "
                "step will take longer than predicted.")
_STAGE_HEADER: Final = ("Stage", "Modules", "Operators", "Devices", "Share of batch", "Parameters", "Forward",
                        "Backward")
_TEXT: Final = "{:.4g}".format


def write_report(path: str | PathLike[str], timelines: Sequence[Timeline], *, plan: Plan | None = None,
                 comparison: Sequence[facts.StrategyFacts] | None = None,
                 capacities: Mapping[str, int | None] | None = None, cluster: Cluster | None = None) -> None:
    """Write the page about one plan and its timelines (predicted, measured or both), whole or not at all.

    ``plan`` is needed where the timelines show a part of it, such as one of many equal replicas. ``comparison`` adds
    the table of strategies. ``cluster`` is by default the one that the plan describes, and ``capacities`` are the
    memories of its devices. Raises ``PlanError`` if the timelines are not all of one known program.
    """
    write_atomic(path, render_report(timelines, plan=plan, comparison=comparison, capacities=capacities,
                                     cluster=cluster))


def render_report(timelines: Sequence[Timeline], *, plan: Plan | None = None,
                  comparison: Sequence[facts.StrategyFacts] | None = None,
                  capacities: Mapping[str, int | None] | None = None, cluster: Cluster | None = None) -> str:
    """Return the page's text; see ``write_report``."""
    program = facts.program_of(timelines)
    part = program.plan
    plan = part if plan is None else plan
    is_part = (plan.stages, plan.microbatches) != (part.stages, part.microbatches)
    cluster = facts.plan_cluster(plan) if cluster is None else cluster
    known = facts.capacities_of(cluster) if capacities is None else capacities
    shown = facts.pick(timelines, "predicted") or timelines[0]
    period = find_period(replace(shown, program=program))
    item, devices = facts.plan_facts(plan, () if is_part else timelines), facts.device_facts(shown, known)
    if is_part:
        devices = tuple(row for row, num in zip(devices, np.diff(program.rank_start), strict=True) if num)
    if item.bound_s is None and comparison:
        item = replace(item, bound_s=next((row.bound_s for row in comparison if row.is_chosen), None))
    drawn_on = facts.plan_cluster(part) if is_part else cluster
    return page.render_page({
        "title": f"{plan.model.name}: Weft plan report", "mark": "plan report", "last_column": "Bytes",
        "heading": f"{plan.model.name} on {counted(item.num_devices, 'device')}",
        "subtitle": f"{plan.model.mode.capitalize()} in {how_text(plan)}, batch {batch_text(plan)}, "
                    f"{counted(len(plan.stages), 'stage')}, planned by {plan.search.by}",
        "tiles": _tiles(item, devices),
        "before": _settings(plan, item, period, cluster.name if cluster else None)
        + (_part_note(plan, part, shown) if is_part else ""),
        "sections": "\n".join([
            _errors(program, timelines), _strategies(comparison) if comparison else "",
            _cluster_drawing(cluster, plan) if cluster else "",
            page.section("Stages", page.html_table(stages_table(facts.stage_facts(program, shown)), _STAGE_HEADER),
                         lead="Times are for one micro-batch."),
            _layers(layer_facts(program)), _devices(devices, shown.kind), _memory(shown, known),
            links(facts.link_facts(program, drawn_on, shown.step_time_s)) if drawn_on else "",
            exchanges(facts.exchange_facts(program, shown)), _provenance(plan)]),
        "footer": "Written by Weft. Memory is by the plan's account of what each device holds. "
                  f"Plan for model {plan.model.digest} on cluster {plan.cluster.digest}.",
    }, report_data(program, timelines, known, period, only_used=is_part))


# ---- figures and settings


def _tiles(item: facts.PlanFacts, devices: Sequence[facts.DeviceFacts]) -> str:
    """Return the key figures."""
    items = [("Predicted step", seconds(item.step_time_s), f"{per_second(item.samples_per_s)} samples")]
    if item.measured_s is not None:
        items.append(("Measured step", seconds(item.measured_s),
                      f"{percent(item.measured_difference, signed=True)} against the prediction"))
    gap = f"gap {percent(item.gap)}" if item.bound_s is not None else bound_text(item)
    items.append(("Lower bound", seconds(item.bound_s), f"{gap}, status {item.plan.search.status}"))
    whole = sum(item.step_time_s for item in devices)
    if whole:
        exposed = sum(item.exposed_s for item in devices) / whole
        items.append(("Bubble", percent(sum(item.bubble_s for item in devices) / whole),
                      f"exposed communication {percent(exposed)}"))
    if devices:
        top = max(devices, key=lambda item: (item.capacity_used or 0.0, item.peak_bytes))
        used = "" if top.capacity_bytes is None else (
            f", {percent(top.capacity_used)} of {format_bytes(top.capacity_bytes)}")
        items.append(("Peak memory", format_bytes(top.peak_bytes), f"on {top.device}{used}"))
    return page.tiles(items)


def _settings(plan: Plan, item: facts.PlanFacts, period: Steady | None, cluster_name: str | None) -> str:
    """Return what was decided, in words."""
    used = f"{item.num_devices} of {len(plan.cluster.devices)} devices"
    items = [("Cluster", f"{cluster_name}, {used}" if cluster_name else used), ("Batch", batch_text(plan)),
             ("Stages and replicas", _shape(plan)), ("Recomputation", _recomputation(plan)),
             ("Optimizer", _optimizer(plan)), ("Gradients", _gradients(plan))]
    if period is not None:
        many = f", {period.num_microbatches} micro-batches each" if period.num_microbatches > 1 else ""
        items.append(("Steady state", f"repeats every {seconds(period.length)}{many}"))
    return f'<section aria-label="Settings">{page.definitions(items)}</section>'


def _part_note(plan: Plan, part: Plan, shown: Timeline) -> str:
    """Return what the chart and the tables show, where that is not the whole plan."""
    used, shown_there = (facts.plan_facts(item).num_devices for item in (plan, part))
    text = (f"The timeline and the tables below it show a part of the plan that stands for the rest: {shown_there} of "
            f"{used} devices and {part.microbatches} of {plan.microbatches} micro-batches, "
            f"{seconds(shown.step_time_s)}. The cluster and the step above are the whole.")
    return f'<p class="note">{page.escape(text)}</p>'


def _shape(plan: Plan) -> str:
    """Return how the plan divides model and batch: ``4 stages, 2 replicas, tensor 2``."""
    counts = [("replicas", len(stage.replicas)) for stage in plan.stages]
    counts += [item for stage in plan.stages for replica in stage.replicas for item in replica.mesh.items()]
    parts = [counted(len(plan.stages), "stage")]
    for alike in grouped(counts, lambda item: item[0]):
        name, least, most = alike[0][0], min(size for _, size in alike), max(size for _, size in alike)
        sizes = str(most) if least == most else f"{least} to {most}"
        if most > 1:
            parts.append(f"{sizes} {name}" if name == "replicas" else f"{name} {sizes}")
    return ", ".join(parts)


def _recomputation(plan: Plan) -> str:
    again = [stage.name for stage in plan.stages if stage.recompute]
    return "all stages" if len(again) == len(plan.stages) else short_list(again) or "none"


def _optimizer(plan: Plan) -> str:
    if plan.optimizer.kind == "none" or plan.model.mode != "training":
        return "none"
    found = list(dict.fromkeys(storage_text(stage.storage) for stage in plan.stages))
    if any(found):
        return plan.optimizer.kind + ", " + short_list([text or "some stages whole" for text in found])
    return plan.optimizer.kind + (", state sharded" if plan.optimizer.sharded else ", state whole on each device")


def _gradients(plan: Plan) -> str:
    """Return the ways in which gradients are exchanged, with the number of parameters of each."""
    sent = grouped((item for item in plan.gradients if len(item.devices) > 1), lambda item: item.method)
    numbers = [len({name for item in items for name in item.parameters}) for items in sent]
    return ", ".join(f"{items[0].method.replace('_', ' ')} ({counted(number, 'parameter')})"
                     for items, number in zip(sent, numbers, strict=True)) or "nothing to exchange"


# ---- predicted against measured


def _errors(program: Program, timelines: Sequence[Timeline]) -> str:
    """Return the prediction against the run, if there are both."""
    predicted, measured = facts.pick(timelines, "predicted"), facts.pick(timelines, "measured")
    if predicted is None or measured is None:
        return ""
    rows = facts.error_facts(program, predicted, measured)
    step = facts.ErrorFacts(what="step", stage="", count=1, predicted_s=predicted.step_time_s,
                      measured_s=measured.step_time_s)
    header = ("What", "#Number", "#Predicted", "#Measured", "#Prediction off by", "")
    by_stage = [_error_row(row) for row in rows if row.stage]
    lead = (f"The step was predicted {_off(step.error)}; computes by {percent(facts.mean_error(rows))} in the mean. "
            "Times are of one instruction; measured transfers and exchanges include waiting for the other side. The "
            "chart shows both on one time axis.")
    return page.table_section(
        "Predicted against measured", header, [_error_row(row) for row in (step, *rows) if not row.stage], lead=lead,
        after=_folded("By stage", page.table("By stage", header, by_stage, limit=MAX_STAGE_ROWS)) if by_stage else "")


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{page.escape(title)}</summary>{body}</details>"


def _off(error: float | None) -> str:
    if error is None:
        return "without a measurement"
    return f"{percent(abs(error))} too {'long' if error > 0 else 'short'}" if error else "exactly"


def _error_row(row: facts.ErrorFacts) -> tuple[str, ...]:
    return (f"{row.stage} {row.what}" if row.stage else row.what, f"{row.count:,}", seconds(row.predicted_s),
            seconds(row.measured_s), percent(row.error, signed=True), _error_bar(row.error))


def _error_bar(error: float | None) -> page.Html:
    """Return a bar from the middle: to the right where the prediction is too long; half the width is 50 %."""
    if error is None:
        return page.Html()
    wide = min(abs(error), 0.5) * 100
    x = 50 if error > 0 else 50 - wide
    return page.Html(f'<svg class="parts error" aria-hidden="true"><rect class="busy" x="{x:.1f}%" width="{wide:.1f}%" '
                'height="100%"/><rect class="axis" x="50%" width="1" height="100%"/></svg>')


# ---- strategies


def _strategies(rows: Sequence[facts.StrategyFacts]) -> str:
    """Return the comparison of strategies, and why all but one lost."""
    chosen = next((row for row in rows if row.is_chosen), None)
    best = min((row.step_time_s for row in rows if row.step_time_s is not None), default=None)
    styles = {index: "chosen" if row.is_chosen else "refused" for index, row in enumerate(rows)
              if row.is_chosen or row.step_time_s is None}
    body: list[tuple[str, ...]] = []
    for row in rows:
        slower = facts.relative(row.step_time_s, best)
        body.append((page.tagged(row.strategy, "chosen" if row.is_chosen else ""), *(
            [f"{row.status}: {row.reason or 'no reason given'}"] if row.step_time_s is None else
            [seconds(row.step_time_s), "fastest" if not slower else percent(slower, signed=True),
             per_second(row.samples_per_s), str(row.microbatches or UNKNOWN), peak_text(row), percent(row.bubble),
             _verdict(row, chosen)])))
    header = ("Strategy", "#Step time", "#Against fastest", "#Samples", "#Micro-batches", "#Peak memory per device",
              "#Bubble", "~Why")
    return page.table_section(
        "Strategies", header, body, styles=styles, after="".join(_tried(row) for row in rows if row.tried),
        lead="All that was tried. Why: what a device has more of than with the chosen plan, on average.")


def _tried(row: facts.StrategyFacts) -> str:
    """Return everything that a strategy looked at, folded away."""
    best = min((item.step_time_s for item in row.tried if item.step_time_s is not None), default=None)
    body = []
    for item in row.tried:
        why = item.reason or ("not simulated: others were estimated to be faster" if item.step_time_s is None else "")
        slower = facts.relative(item.step_time_s, best)
        body.append((item.setting, seconds(item.estimate_s), seconds(item.step_time_s),
                     percent(slower, signed=True) if slower else UNKNOWN, why))
    header = ("~Setting", "#Estimate", "#Simulated", "#Against best", "~Why")
    return _folded(f"{len(row.tried)} settings of {row.strategy}",
                   page.table(f"Settings of {row.strategy}", header, body, limit=MAX_TRIED))


def _verdict(row: facts.StrategyFacts, chosen: facts.StrategyFacts | None) -> str:
    """Return why a strategy was chosen or lost."""
    if row.reason:
        return row.reason
    if row.is_chosen:
        return f"fastest that fits, {row.status}"
    if chosen is None:
        return row.status
    if row.step_time_s == chosen.step_time_s:
        return "as fast as the chosen one"
    more = [f"{seconds(value)} more {name}" for name, value in facts.extra_parts(row, chosen).items()]
    return ", ".join(more) or row.status


# ---- stages, layers, devices


def _layers(rows: Sequence[LayerFacts]) -> str:
    """Return the classes of layers, and how each is split."""
    has_splits = any(row.splits for row in rows)
    body = [(_alike(row.title, row.count), str(row.num_ops),
             format_bytes(row.parameter_bytes) if row.parameter_bytes else UNKNOWN, percent(row.work),
             _stage_counts(row), *([_splits(row)] if has_splits else [])) for row in rows]
    split = ["~Split over devices"] if has_splits else []
    header = ("Layers", "#Operators", "#Parameters", "#Work", "~Stages", *split)
    return page.table_section(
        "Layers", header, body, limit=MAX_LAYER_ROWS,
        lead="Layers that are alike and split alike share a row. Operators and parameters are of one of them; work is "
             "the part of the model's operations in all of them.")


def _alike(name: str, count: int) -> page.Html:
    return page.tagged(name, f"{count} alike" if count > 1 else "")


def _stage_counts(row: LayerFacts) -> str:
    shown = [name if count == 1 and row.count == 1 else f"{name} ({count})" for name, count in row.stages]
    return ", ".join(shown[:8]) + (f", {len(shown) - 8} more" if len(shown) > 8 else "")


def _splits(row: LayerFacts) -> page.Html:
    """Return a line for each way in which modules are split."""
    lines = []
    for item in row.splits:
        words = ", ".join(f"{axis} {word}" for axis, word in item.words) or "replicated"
        stored = f", stored in parts ({', '.join(item.stored)})" if item.stored and not item.words else ""
        lines.append(f"<li><b>{page.escape(words)}</b>{page.escape(stored)} "
                     f'<span class="dim">{page.escape(short_list(item.modules, limit=8))}</span></li>')
    whole = "" if row.is_joint else "whole on one device"
    return page.Html(f'<ul class="plain">{"".join(lines)}</ul>' if lines else f'<span class="dim">{whole}</span>')


def _devices(rows: Sequence[facts.DeviceFacts], kind: str) -> str:
    """Return where each device's time and memory go, with bars; alike ones of many are one row."""
    alike = grouped(rows, lambda row: row.device if len(rows) <= MAX_SINGLE else (
        _TEXT(row.busy_s), _TEXT(row.exposed_s), row.capacity_bytes, tuple(row.peak_memory.values())))
    header = ("Device", f"Time of the {kind} step", "#Idle", "Memory at its peak")
    used = [name for name in CATEGORIES if any(row.peak_memory.get(name) for row in rows)]
    return page.table_section("Devices", header, [_device_row(members) for members in alike],
                              num_more=sum(map(len, alike[page.MAX_ROWS:])),
                              after=page.colour_key({**_TIME_PARTS, **{name: name for name in used}}))


def _device_row(members: Sequence[facts.DeviceFacts]) -> tuple[str, ...]:
    row = members[0]
    times = ", ".join(f"{_TIME_PARTS[name]} {percent(value)}" for name, value in row.shares.items())
    name = _alike(short_list((item.device for item in members), limit=4), len(members))
    whole, memory = max(row.peak_bytes, row.capacity_bytes or 0), page.escape(format_bytes(row.peak_bytes))
    if row.capacity_bytes is not None:
        part = f"{percent(row.capacity_used)} of {format_bytes(row.capacity_bytes)}"
        style = "over" if row.peak_bytes > row.capacity_bytes else "dim"
        memory += f' <span class="{style}">{page.escape(part)}</span>'
    parts = {name: row.peak_memory.get(name, 0) / whole if whole else 0.0 for name in CATEGORIES}
    return name, page.with_bar(times, row.shares), seconds(row.idle_s), page.with_bar(page.Html(memory), parts)


def _memory(timeline: Timeline, capacities: Mapping[str, int | None]) -> str:
    """Return what the devices hold over time, in drawings."""
    panels = drawings.memory_panels(timeline, capacities)
    drawn = drawings.fullest(panels)
    if not drawn:
        return ""
    shared = drawings.scale_of(panels)
    figures = "".join(_figure(panel, shared) for panel in drawn)
    left_out = sum(len(panel.devices) for panel in panels) - sum(len(panel.devices) for panel in drawn)
    note = f'<p class="note">The fullest are drawn, {left_out} more devices are not.</p>' if left_out else ""
    used = {name: name for index, name in enumerate(CATEGORIES)
            if any(panel.num_bytes[:, index].any() for panel in drawn)}
    limit = {"limit": "capacity"} if any(panel.shows_capacity for panel in drawn) else {}
    return page.section("Memory", f'<div class="figures">{figures}</div>{page.colour_key(used | limit)}{note}',
                        lead=f"What a device holds from the start to the end of the {timeline.kind} step "
                             f"({seconds(timeline.step_time_s)}). Alike devices share a drawing.")


def _figure(panel: drawings.MemoryPanel, shared: int) -> str:
    limit = panel.capacity_bytes
    of = "" if limit is None else f" of {format_bytes(limit)}, {percent(panel.peak_bytes / limit if limit else None)}"
    style = "over" if limit is not None and panel.peak_bytes > limit else "dim"
    names, peak = (page.escape(text) for text in (short_list(panel.devices, limit=3), format_bytes(panel.peak_bytes)))
    return (f'<figure><figcaption><b>{names}</b> <span>{peak}<span class="{style}">{page.escape(of)}</span></span>'
            f"</figcaption>{drawings.panel_svg(panel, shared)}</figure>")


# ---- communication


def links(rows: Sequence[facts.LinkFacts]) -> str:
    """Return what each link carries."""
    if not rows:
        return ""
    body = [(_alike(facts.link_title(row.names), len(row.names)),
             UNKNOWN if row.bytes_per_s is None else format_rate(row.bytes_per_s), seconds(row.latency_s),
             format_bytes(row.num_bytes), _busy_cell(row.busy)) for row in rows]
    header = ("Link", "#Rate", "#Latency", "#Bytes in a step", "Share of the step at the link's rate")
    note = f'<p class="note">{page.escape(_OVER)}</p>' if any((row.busy or 0.0) > 1 for row in rows) else ""
    return page.table_section(
        "Communication by link", header, body, limit=MAX_LINK_ROWS, after=note,
        lead="Tensors between stages and gradients; exchanges inside a sharded stage are part of its times. Bytes are "
             "of each of alike links.")


def _busy_cell(busy: float | None) -> page.Html:
    text = page.escape(percent(busy))
    return page.with_bar(page.Html(f'<span class="over">{text}</span>' if (busy or 0.0) > 1 else text),
                    {"busy": min(busy or 0.0, 1.0)})


def exchanges(rows: Sequence[facts.ExchangeFacts]) -> str:
    """Return the gradient exchanges, alike ones among other devices in one row; nothing where there are none."""
    if not rows:
        return ""
    groups = grouped(rows, lambda row: (
        row.how, row.parameters, row.num_bytes, None if row.time_s is None else _TEXT(row.time_s)))
    header = ("Method", "~Parameters", "#Number", "#Bytes", "~Devices", "#Time")
    return page.table_section("Gradient exchanges", header, [_exchange_row(members) for members in groups],
                              limit=len(groups))


def _exchange_row(members: Sequence[facts.ExchangeFacts]) -> tuple[str, ...]:
    """Return the same exchange among one or several groups of devices."""
    row = members[0]
    among = "; ".join(short_list(item.devices) for item in members[:MAX_GROUPS])
    if len(members) > MAX_GROUPS:
        among += f"; {len(members) - MAX_GROUPS} more groups"
    return (_alike(row.how.replace("_", " "), len(members)), short_list(row.parameters, limit=4),
            str(len(row.parameters)), format_bytes(row.num_bytes), among, seconds(row.time_s))


# ---- cluster, origin


def _cluster_drawing(cluster: Cluster, plan: Plan) -> str:
    """Return the drawing of the cluster with what runs where."""
    item = drawings.cluster_facts(cluster, plan)
    names = {f"kind-{index % drawings.NUM_COLOURS}": _kind_text(cluster, name, count)
             for index, (name, count) in enumerate(item.kinds.items())}
    direct = "; ".join(f"{source} - {target} {format_rate(rate)}" for source, target, rate in item.direct[:8])
    note = f'<p class="note">Direct links: {page.escape(direct)}</p>' if direct else ""
    box = ('<div class="card scroll drawing" tabindex="0" role="region" aria-label="Cluster">'
           f"{drawings.cluster_html(item)}</div>")
    return page.section("Cluster", box + page.colour_key(names) + note, lead=(
        "Each device with the stages it runs. Rates are of links inside a host and to the network."))


def _kind_text(cluster: Cluster, name: str, count: int) -> str:
    kind = cluster.kinds[name]
    fastest = sorted(kind.flop_per_s.items(), key=lambda item: -item[1])[:1]
    return ", ".join([f"{count} x {name}" if count > 1 else name,
                      *([] if kind.memory_bytes is None else [format_bytes(kind.memory_bytes)]),
                      *(f"{format_count(rate)}FLOP/s {dtype}" for dtype, rate in fastest)])


def _provenance(plan: Plan) -> str:
    """Return who made the plan, from what."""
    search = plan.search
    rows = [("Planned by", search.by), ("Status", search.status), ("Seed", str(search.seed)),
             ("Search time", seconds(search.seconds)), ("Model digest", plan.model.digest),
             ("Cluster digest", plan.cluster.digest),
             ("Devices of the cluster", short_list(plan.cluster.devices))]
    return page.section("About this plan", page.definitions(rows))
