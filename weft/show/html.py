"""The report: one self-contained page with the plan's tables and an interactive Gantt chart.

``page`` has the frame, ``html_sections`` the tables, ``report_data`` what the chart's script gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from os import PathLike

from weft.files import write_atomic
from weft.plan.plan import Plan
from weft.show import html_sections as sections
from weft.show.facts import (
    StrategyFacts,
    device_facts,
    exchange_facts,
    pick,
    plan_capacities,
    plan_facts,
    program_of,
    stage_facts,
)
from weft.show.page import render_page
from weft.show.report_data import report_data
from weft.simulate.timeline import Timeline


def write_report(path: str | PathLike[str], timelines: Sequence[Timeline], *,
                 comparison: Sequence[StrategyFacts] | None = None,
                 capacities: Mapping[str, int | None] | None = None) -> None:
    """Write the page about one plan and its timelines (predicted, measured or both), whole or not at all.

    ``comparison`` adds the table of strategies. ``capacities`` are the devices' memories, by default those of the
    cluster that the plan describes. Raises ``PlanError`` if the timelines are not all of one known program.
    """
    write_atomic(path, render_report(timelines, comparison=comparison, capacities=capacities))


def render_report(timelines: Sequence[Timeline], *, comparison: Sequence[StrategyFacts] | None = None,
                  capacities: Mapping[str, int | None] | None = None) -> str:
    """Return the page's text; see ``write_report``."""
    program = program_of(timelines)
    plan = program.plan
    known = plan_capacities(plan) if capacities is None else capacities
    shown = pick(timelines, "predicted") or timelines[0]
    facts, devices = plan_facts(plan, timelines), device_facts(shown, known)
    if facts.bound_s is None and comparison:
        facts = replace(facts, bound_s=next((row.bound_s for row in comparison if row.is_chosen), None))
    return render_page({
        "title": escape(f"{plan.model.name}: Weft plan report"), "mark": "plan report", "last_column": "Bytes",
        "heading": escape(sections.heading(facts)), "subtitle": escape(sections.subtitle(facts)),
        "tiles": sections.tiles(facts, devices),
        "sections": "\n".join([
            sections.strategies(comparison) if comparison else "",
            sections.stages(stage_facts(program, shown)), sections.devices(devices, shown.kind),
            sections.exchanges(exchange_facts(program, shown)), sections.provenance(plan)]),
        "footer": _footer(plan),
    }, report_data(program, timelines, known))


def _footer(plan: Plan) -> str:
    return escape(f"Written by Weft. Memory is by the plan's account of what each device holds. "
                  f"Plan for model {plan.model.digest} on cluster {plan.cluster.digest}.")
