"""The report: one self-contained page with the plan's tables and an interactive Gantt chart.

The page loads nothing: style, script and data are inside it, and its content security policy admits exactly that style
and that script by their digests, so that even a name which got through unescaped could neither run nor fetch anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from os import PathLike
from typing import Final

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
from weft.show.report_data import embed_json, report_data
from weft.simulate.timeline import Timeline

_SCRIPTS: Final = ("report_draw.js", "report.js")
_PLACEHOLDER: Final = re.compile(r"\{\{(\w+)\}\}")


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
    style, script = _read("report.css"), _script()
    return _fill(_read("report.html"), {
        "policy": _policy(style, script), "style": style, "script": script,
        "title": escape(f"{plan.model.name}: Weft plan report"),
        "heading": escape(sections.heading(facts)), "subtitle": escape(sections.subtitle(facts)),
        "tiles": sections.tiles(facts, devices),
        "sections": "\n".join([
            sections.strategies(comparison) if comparison else "",
            sections.stages(stage_facts(program, shown)), sections.devices(devices, shown.kind),
            sections.exchanges(exchange_facts(program, shown)), sections.provenance(plan)]),
        "footer": _footer(plan), "data": embed_json(report_data(program, timelines, known)),
    })


def _read(name: str) -> str:
    return (files("weft.show") / name).read_text(encoding="utf-8")


def _script() -> str:
    """Return the scripts as one, in a block of their own so that they leave no global names."""
    return '"use strict";\n{\n' + "\n".join(_read(name) for name in _SCRIPTS) + "}\n"


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each ``{{name}}`` replaced once; what is inserted is not searched again."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _policy(style: str, script: str) -> str:
    return (f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _footer(plan: Plan) -> str:
    return escape(f"Written by Weft. Memory is by the plan's account of what each device holds. "
                  f"Plan for model {plan.model.digest} on cluster {plan.cluster.digest}.")
