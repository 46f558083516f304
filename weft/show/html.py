"""The report: one self-contained page with the plan's tables and an interactive Gantt chart.

``page`` has the frame, ``html_sections`` and ``html_details`` the tables and drawings, ``report_data`` what the chart's
script gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from os import PathLike

import numpy as np

from weft.base.files import write_atomic
from weft.cluster.cluster import Cluster
from weft.plan.plan import Plan
from weft.plan.program import Program
from weft.show import html_details as details
from weft.show import html_sections as sections
from weft.show.facts import (
    StrategyFacts,
    device_facts,
    exchange_facts,
    pick,
    plan_cluster,
    plan_facts,
    program_of,
    stage_facts,
)
from weft.show.layer_facts import layer_facts
from weft.show.link_facts import link_facts
from weft.show.page import render_page
from weft.show.period import find_period
from weft.show.report_data import report_data
from weft.show.run_facts import error_facts
from weft.simulate.timeline import Timeline


def write_report(path: str | PathLike[str], timelines: Sequence[Timeline], *, plan: Plan | None = None,
                 comparison: Sequence[StrategyFacts] | None = None,
                 capacities: Mapping[str, int | None] | None = None, cluster: Cluster | None = None) -> None:
    """Write the page about one plan and its timelines (predicted, measured or both), whole or not at all.

    ``plan`` is needed where the timelines show a part of it, such as one of many equal replicas. ``comparison`` adds
    the table of strategies. ``cluster`` is by default the one that the plan describes, and ``capacities`` are the
    memories of its devices. Raises ``PlanError`` if the timelines are not all of one known program.
    """
    write_atomic(path, render_report(timelines, plan=plan, comparison=comparison, capacities=capacities,
                                     cluster=cluster))


def render_report(timelines: Sequence[Timeline], *, plan: Plan | None = None,
                  comparison: Sequence[StrategyFacts] | None = None,
                  capacities: Mapping[str, int | None] | None = None, cluster: Cluster | None = None) -> str:
    """Return the page's text; see ``write_report``."""
    program = program_of(timelines)
    part = program.plan
    plan = part if plan is None else plan
    is_part = (plan.stages, plan.microbatches) != (part.stages, part.microbatches)
    cluster = plan_cluster(plan) if cluster is None else cluster
    known = _capacities(cluster) if capacities is None else capacities
    shown = pick(timelines, "predicted") or timelines[0]
    period = find_period(replace(shown, program=program))
    facts, devices = plan_facts(plan, () if is_part else timelines), device_facts(shown, known)
    if is_part:
        devices = tuple(row for row, num in zip(devices, np.diff(program.rank_start), strict=True) if num)
    if facts.bound_s is None and comparison:
        facts = replace(facts, bound_s=next((row.bound_s for row in comparison if row.is_chosen), None))
    drawn_on = plan_cluster(part) if is_part else cluster
    return render_page({
        "title": escape(f"{plan.model.name}: Weft plan report"), "mark": "plan report", "last_column": "Bytes",
        "heading": escape(sections.heading(facts)), "subtitle": escape(sections.subtitle(facts)),
        "tiles": sections.tiles(facts, devices),
        "before": details.settings(plan, facts, period, cluster.name if cluster else None)
        + (details.part_note(plan, part, shown) if is_part else ""),
        "sections": "\n".join([
            _errors(program, timelines), sections.strategies(comparison) if comparison else "",
            details.cluster_drawing(cluster, plan), sections.stages(stage_facts(program, shown)),
            details.layers(layer_facts(program)), sections.devices(devices, shown.kind), details.memory(shown, known),
            details.links(link_facts(program, drawn_on, shown.step_time_s)) if drawn_on else "",
            sections.exchanges(exchange_facts(program, shown)), sections.provenance(plan)]),
        "footer": _footer(plan),
    }, report_data(program, timelines, known, period, only_used=is_part))


def _capacities(cluster: Cluster | None) -> dict[str, int | None]:
    return {device.name: device.memory_bytes for device in cluster.devices} if cluster else {}


def _errors(program: Program, timelines: Sequence[Timeline]) -> str:
    predicted, measured = pick(timelines, "predicted"), pick(timelines, "measured")
    if predicted is None or measured is None:
        return ""
    return details.errors(error_facts(program, predicted, measured), predicted, measured)


def _footer(plan: Plan) -> str:
    return escape(f"Written by Weft. Memory is by the plan's account of what each device holds. "
                  f"Plan for model {plan.model.digest} on cluster {plan.cluster.digest}.")
