"""The parts of the report beside the chart that explain a plan: settings, cluster, layers, memory, links, errors.

As in ``html_sections`` every text goes through ``escape``; functions return HTML, or nothing where there is nothing to
say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from weft.base.units import format_bytes, format_count, format_rate
from weft.cluster.cluster import Cluster
from weft.plan.memory import CATEGORIES
from weft.plan.plan import Plan
from weft.show.cluster_facts import cluster_facts
from weft.show.cluster_svg import NUM_COLOURS, cluster_svg
from weft.show.facts import PlanFacts, relative
from weft.show.layer_facts import LayerFacts
from weft.show.link_facts import LinkFacts, link_title
from weft.show.memory_svg import MemoryPanel, fullest, memory_panels, panel_svg, scale_of
from weft.show.names import short_list
from weft.show.page import colour_key, definitions, escape, number_cells, row_header, section, share_bar, table
from weft.show.period import Period
from weft.show.run_facts import ErrorFacts, mean_error
from weft.show.tables import UNKNOWN, batch_text, percent, seconds
from weft.simulate.timeline import Timeline

MAX_LAYER_ROWS: Final = 48
MAX_LINK_ROWS: Final = 32
MAX_STAGE_ROWS: Final = 48
"""Longer tables are cut, and say so."""
_OVER: Final = ("More than 100 %: exchanges at the same time are predicted as if each had the link to itself, so the "
                "step will take longer than predicted.")


def settings(plan: Plan, facts: PlanFacts, period: Period | None, cluster_name: str | None) -> str:
    """Return what was decided, in words."""
    used = f"{facts.num_devices} of {facts.num_cluster_devices} devices"
    items = [("Cluster", f"{cluster_name}, {used}" if cluster_name else used), ("Batch", batch_text(facts)),
             ("Stages and replicas", _shape(plan)), ("Recomputation", _recomputation(plan)),
             ("Optimizer", _optimizer(plan)), ("Gradients", _gradients(plan))]
    if period is not None:
        items.append(("Steady state", period_text(period)))
    return f'<section aria-label="Settings">{definitions(items)}</section>'


def part_note(plan: Plan, part: Plan, shown: Timeline) -> str:
    """Return what the chart and the tables show, where that is not the whole plan."""
    used, shown_there = (len({device for stage in item.stages for replica in stage.replicas
                              for device in replica.devices}) for item in (plan, part))
    text = (f"The timeline and the tables below it show a part of the plan that stands for the rest: {shown_there} of "
            f"{used} devices and {part.microbatches} of {plan.microbatches} micro-batches, "
            f"{seconds(shown.step_time_s)}. The cluster and the step above are the whole.")
    return f'<p class="note">{escape(text)}</p>'


def period_text(period: Period) -> str:
    """Return how often a step repeats, in words."""
    count = period.num_microbatches
    return f"repeats every {seconds(period.length_s)}" + (f", {count} micro-batches each" if count > 1 else "")


def _shape(plan: Plan) -> str:
    """Return how the plan divides model and batch: ``4 stages, 2 replicas, tensor 2``."""
    num_stages = len(plan.stages)
    counts = sorted({len(stage.replicas) for stage in plan.stages})
    axes: dict[str, set[int]] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            for axis, size in replica.mesh.items():
                axes.setdefault(axis, set()).add(size)
    parts = ["1 stage" if num_stages == 1 else f"{num_stages} stages"]
    if counts[-1] > 1:
        parts.append(f"{_range(counts)} replicas")
    parts += [f"{axis} {_range(sorted(sizes))}" for axis, sizes in axes.items() if max(sizes) > 1]
    return ", ".join(parts)


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _recomputation(plan: Plan) -> str:
    again = [stage.name for stage in plan.stages if stage.recompute]
    if not again:
        return "none"
    return "all stages" if len(again) == len(plan.stages) else short_list(again)


def _optimizer(plan: Plan) -> str:
    if plan.optimizer.kind == "none" or plan.model.mode != "training":
        return "none"
    return plan.optimizer.kind + (", state sharded" if plan.optimizer.sharded else ", state whole on each device")


def _gradients(plan: Plan) -> str:
    """Return the ways in which gradients are exchanged, with the number of parameters of each."""
    used: dict[str, set[str]] = {}
    for exchange in plan.gradients:
        if len(exchange.devices) > 1:
            used.setdefault(exchange.method, set()).update(exchange.parameters)
    if not used:
        return "nothing to exchange"
    return ", ".join(f"{method.replace('_', ' ')} ({len(names)} parameter{'s' if len(names) > 1 else ''})"
                     for method, names in used.items())


def cluster_drawing(cluster: Cluster | None, plan: Plan) -> str:
    """Return the drawing of the cluster with what runs where."""
    if cluster is None:
        return ""
    facts = cluster_facts(cluster, plan)
    names = {f"kind-{index % NUM_COLOURS}": _kind_text(cluster, name, count)
             for index, (name, count) in enumerate(facts.kinds.items())}
    direct = "; ".join(f"{source} - {target} {format_rate(rate)}" for source, target, rate in facts.direct[:8])
    note = f'<p class="note">Direct links: {escape(direct)}</p>' if direct else ""
    box = f'<div class="card scroll drawing" tabindex="0" role="region" aria-label="Cluster">{cluster_svg(facts)}</div>'
    return section("Cluster", box + colour_key(names) + note,
                   lead="Each device with the stages it runs. Rates are of links inside a host and to the network.")


def _kind_text(cluster: Cluster, name: str, count: int) -> str:
    kind = cluster.kinds[name]
    peak = max(kind.flop_per_s.items(), key=lambda item: item[1], default=None)
    parts = [f"{count} x {name}" if count > 1 else name]
    if kind.memory_bytes is not None:
        parts.append(format_bytes(kind.memory_bytes))
    if peak is not None:
        parts.append(f"{format_count(peak[1])}FLOP/s {peak[0]}")
    return ", ".join(parts)


def layers(rows: Sequence[LayerFacts]) -> str:
    """Return the classes of layers, and how each is split."""
    has_splits = any(row.splits for row in rows)
    body = []
    for row in rows[:MAX_LAYER_ROWS]:
        name = row_header(row.title, tag=f"{row.count} alike" if row.count > 1 else "")
        cells = [str(row.num_ops), format_bytes(row.parameter_bytes) if row.parameter_bytes else UNKNOWN,
                 percent(row.work)]
        split = f'<td class="wrap">{_splits(row)}</td>' if has_splits else ""
        body.append(f'<tr>{name}{number_cells(cells)}<td class="wrap">{escape(_stage_counts(row))}</td>{split}</tr>')
    if len(rows) > MAX_LAYER_ROWS:
        body.append(f'<tr><td colspan="6" class="dim">{len(rows) - MAX_LAYER_ROWS} more</td></tr>')
    header = ("Layers", "#Operators", "#Parameters", "#Work", "Stages", *(["Split over devices"] if has_splits else []))
    return section("Layers", table("Layers", header, body),
                   lead="Layers that are alike and split alike share a row. Operators and parameters are of one of "
                        "them; work is the part of the model's operations in all of them.")


def _stage_counts(row: LayerFacts) -> str:
    shown = [name if count == 1 and row.count == 1 else f"{name} ({count})" for name, count in row.stages]
    return ", ".join(shown[:8]) + (f", {len(shown) - 8} more" if len(shown) > 8 else "")


def _splits(row: LayerFacts) -> str:
    """Return a line for each way in which modules are split."""
    lines = []
    for item in row.splits:
        words = ", ".join(f"{axis} {word}" for axis, word in item.words) or "replicated"
        stored = f", stored in parts ({', '.join(item.stored)})" if item.stored and not item.words else ""
        lines.append(f"<li><b>{escape(words)}</b>{escape(stored)} "
                     f'<span class="dim">{escape(short_list(item.modules, limit=8))}</span></li>')
    whole = "" if row.is_joint else "whole on one device"
    return f'<ul class="plain">{"".join(lines)}</ul>' if lines else f'<span class="dim">{whole}</span>'


def memory(timeline: Timeline, capacities: Mapping[str, int | None]) -> str:
    """Return what the devices hold over time, in drawings."""
    panels = memory_panels(timeline, capacities)
    drawn = fullest(panels)
    if not drawn:
        return ""
    shared = scale_of(panels)
    figures = "".join(_figure(panel, shared) for panel in drawn)
    left_out = sum(len(panel.devices) for panel in panels) - sum(len(panel.devices) for panel in drawn)
    note = f'<p class="note">The fullest are drawn, {left_out} more devices are not.</p>' if left_out else ""
    used = {name: name for index, name in enumerate(CATEGORIES)
            if any(panel.num_bytes[:, index].any() for panel in drawn)}
    limit = {"limit": "capacity"} if any(panel.shows_capacity for panel in drawn) else {}
    return section("Memory", f'<div class="figures">{figures}</div>{colour_key(used | limit)}{note}',
                   lead=f"What a device holds from the start to the end of the {timeline.kind} step "
                        f"({seconds(timeline.step_time_s)}). Alike devices share a drawing.")


def _figure(panel: MemoryPanel, shared: int) -> str:
    limit = panel.capacity_bytes
    of = "" if limit is None else f" of {format_bytes(limit)}, {percent(panel.peak_bytes / limit if limit else None)}"
    style = "over" if limit is not None and panel.peak_bytes > limit else "dim"
    return (f"<figure><figcaption><b>{escape(short_list(panel.devices, limit=3))}</b> <span>"
            f'{escape(format_bytes(panel.peak_bytes))}<span class="{style}">{escape(of)}</span></span></figcaption>'
            f"{panel_svg(panel, shared)}</figure>")


def links(rows: Sequence[LinkFacts]) -> str:
    """Return what each link carries."""
    if not rows:
        return ""
    body = [_link_row(row) for row in rows[:MAX_LINK_ROWS]]
    if len(rows) > MAX_LINK_ROWS:
        body.append(f'<tr><td colspan="5" class="dim">{len(rows) - MAX_LINK_ROWS} more</td></tr>')
    header = ("Link", "#Rate", "#Latency", "#Bytes in a step", "Share of the step at the link's rate")
    is_over = any((row.busy or 0.0) > 1 for row in rows)
    note = f'<p class="note">{escape(_OVER)}</p>' if is_over else ""
    return section("Communication by link", table("Communication by link", header, body) + note,
                   lead="Tensors between stages and gradients; exchanges inside a sharded stage are part of its times. "
                        "Bytes are of each of alike links.")


def _link_row(row: LinkFacts) -> str:
    name = row_header(link_title(row.names), tag=f"{len(row.names)} alike" if len(row.names) > 1 else "")
    rate = UNKNOWN if row.bytes_per_s is None else format_rate(row.bytes_per_s)
    busy = row.busy or 0.0
    share = escape(percent(row.busy))
    text = f'<span class="over">{share}</span>' if busy > 1 else share
    return (f"<tr>{name}{number_cells([rate, seconds(row.latency_s), format_bytes(row.num_bytes)])}"
            f"<td>{text}{share_bar({'busy': min(busy, 1.0)})}</td></tr>")


def errors(rows: Sequence[ErrorFacts], predicted: Timeline, measured: Timeline) -> str:
    """Return the prediction against the run."""
    step = ErrorFacts(what="step", stage="", count=1, predicted_s=predicted.step_time_s,
                      measured_s=measured.step_time_s)
    body = [_error_row(row) for row in (step, *(row for row in rows if not row.stage))]
    header = ("What", "#Number", "#Predicted", "#Measured", "#Prediction off by", "")
    whole = table("Predicted against measured", header, body)
    by_stage = [row for row in rows if row.stage]
    details = ""
    if by_stage:
        more = len(by_stage) - MAX_STAGE_ROWS
        cut = [f'<tr><td colspan="6" class="dim">{more} more</td></tr>'] if more > 0 else []
        inner = table("By stage", header, [*(_error_row(row) for row in by_stage[:MAX_STAGE_ROWS]), *cut])
        details = f"<details><summary>By stage</summary>{inner}</details>"
    mean = mean_error(rows)
    lead = (f"The step was predicted {_off(relative(step.predicted_s, step.measured_s))}; computes by "
            f"{percent(mean)} in the mean. Times are of one instruction; measured transfers and exchanges include "
            "waiting for the other side. The chart shows both on one time axis.")
    return section("Predicted against measured", whole + details, lead=lead)


def _off(error: float | None) -> str:
    if error is None:
        return "without a measurement"
    return f"{percent(abs(error))} too {'long' if error > 0 else 'short'}" if error else "exactly"


def _error_row(row: ErrorFacts) -> str:
    name = f"{row.stage} {row.what}" if row.stage else row.what
    cells = [f"{row.count:,}", seconds(row.predicted_s), seconds(row.measured_s), percent(row.error, signed=True)]
    return f"<tr>{row_header(name)}{number_cells(cells)}<td>{''.join(_error_bar(row.error))}</td></tr>"


def _error_bar(error: float | None) -> Iterator[str]:
    """Yield a bar from the middle: to the right where the prediction is too long; half the width is 50 %."""
    if error is None:
        return
    wide = min(abs(error), 0.5) * 100
    x = 50 if error > 0 else 50 - wide
    yield (f'<svg class="parts error" aria-hidden="true"><rect class="busy" x="{x:.1f}%" width="{wide:.1f}%" '
           'height="100%"/><rect class="axis" x="50%" width="1" height="100%"/></svg>')
