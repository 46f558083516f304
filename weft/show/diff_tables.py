"""Two plans side by side: what differs, and what is predicted for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from weft.base.files import encode
from weft.base.units import format_bytes
from weft.plan.diff import PlanDiff, plan_order_name
from weft.plan.plan import Plan
from weft.show.facts import PlanFacts, plan_facts, relative
from weft.show.names import short_list, short_modules, shorten
from weft.show.plan_tables import batch_text, model_text
from weft.show.tables import UNKNOWN, TextTable, make_console, make_table, per_second, percent, print_tables, seconds
from weft.simulate.timeline import Timeline

MAX_ROWS: Final = 32
"""Longer tables are cut."""
WIDEST: Final = 60
"""Longer lists of devices are cut in the middle."""
_NOT_COUNTED: Final = "what devices exchange inside a sharded stage is not counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A plan with what the simulator says about it."""

    plan: Plan
    timeline: Timeline
    link_bytes: Mapping[str, int]
    """Bytes of one step over each link."""

    @property
    def facts(self) -> PlanFacts:
        """Return the plan in one row."""
        return plan_facts(self.plan, [self.timeline])

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Return the peak memory of each device."""
        return {item.device: item.peak_bytes for item in self.timeline.summary()}


def diff_json(diff: PlanDiff, a: Predicted, b: Predicted) -> dict[str, Any]:
    """Return the differences as plain JSON values; pairs are of the first and the second plan."""
    return {"same": diff.is_same, "differs": list(diff.parts), **encode(diff),
            "predicted": {"step_time": [item.timeline.step_time_s for item in (a, b)],
                          "bubble": [item.timeline.bubble for item in (a, b)],
                          "peak_memory": _joined(a.peak_bytes, b.peak_bytes),
                          "link_bytes": _joined(a.link_bytes, b.link_bytes)}}


def _joined(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, tuple[int | None, int | None]]:
    """Return (value of the first, value of the second) by name; None where one has nothing of that name."""
    return {name: (a.get(name), b.get(name)) for name in (*a, *b)}


def print_diff(diff: PlanDiff, a: Predicted, b: Predicted) -> None:
    """Draw what differs and what is predicted, and say at the end whether the plans are the same."""
    print_tables(*diff_tables(diff, a, b))
    make_console().print("the plans are the same" if diff.is_same else f"the plans differ: {', '.join(diff.parts)}")


def diff_tables(diff: PlanDiff, a: Predicted, b: Predicted) -> Iterator[TextTable]:
    """Yield the tables: both plans, then what differs where, then memory and links of both."""
    yield summary_table(diff, a, b)
    yield from (table for table in _differences(diff) if table.rows)
    yield _pairs_table("Peak memory", "device", _joined(a.peak_bytes, b.peak_bytes))
    links = _joined(a.link_bytes, b.link_bytes)
    if links:
        table = _pairs_table("Bytes over links in a step", "link", links)
        is_sharded = any(stage.sharding for item in (a, b) for stage in item.plan.stages)
        yield replace(table, notes=(_NOT_COUNTED,)) if is_sharded else table


def summary_table(diff: PlanDiff, a: Predicted, b: Predicted) -> TextTable:
    """Return both plans side by side; rows in which they differ say so."""
    changed = {change.what: change for change in diff.settings}
    one, other = a.facts, b.facts
    cells: list[tuple[str, str, str, str]] = []
    for what, text, parts in _ROWS:
        texts = text(a.plan, one), text(b.plan, other)
        if what in changed and texts[0] == texts[1]:
            texts = changed[what].a, changed[what].b
        cells.append((what, *texts, "differs" if any(part in changed or part in diff.parts for part in parts) else ""))
    cells += [("predicted step", seconds(one.step_time_s), seconds(other.step_time_s),
               percent(relative(other.step_time_s, one.step_time_s), signed=True)),
              ("samples", per_second(one.samples_per_s), per_second(other.samples_per_s),
               percent(relative(other.samples_per_s, one.samples_per_s), signed=True)),
              ("bubble", percent(one.bubble), percent(other.bubble), "")]
    return make_table("Plans", ("", "A", "B", "#difference"), cells)


def _optimizer_text(plan: Plan, facts: PlanFacts) -> str:
    if plan.model.mode != "training":
        return UNKNOWN
    return plan.optimizer.kind + (", state divided" if plan.optimizer.sharded else "")


_ROWS: Final[tuple[tuple[str, Callable[[Plan, PlanFacts], str], tuple[str, ...]], ...]] = (
    ("model", lambda plan, facts: model_text(plan), ("model", "mode", "dtype")),
    ("cluster", lambda plan, facts: f"{facts.num_devices} of {len(plan.cluster.devices)} devices: "
                                    f"{short_list(plan.cluster.devices)}", ("cluster",)),
    ("batch", lambda plan, facts: batch_text(plan), ("batch", "micro-batches")),
    ("stages", lambda plan, facts: str(len(plan.stages)), ("stages",)),
    ("order", lambda plan, facts: plan_order_name(plan) or "of its own", ("order",)),
    ("optimizer", _optimizer_text, ("optimizer",)),
    ("made by", lambda plan, facts: f"{plan.search.by} ({plan.search.status})", ()))
"""Rows of the summary: what, how a plan's cell is written, and the differences that it shows."""


_table = partial(make_table, limit=MAX_ROWS)


def _differences(diff: PlanDiff) -> Iterator[TextTable]:
    """Yield a table for each part of a plan: what differs there."""
    yield _table("Stages that differ", ("A", "B", "what", "in A", "in B"), [
        (stage.a or UNKNOWN, stage.b or UNKNOWN, change.what, shorten(change.a, WIDEST), shorten(change.b, WIDEST))
        for stage in diff.stages for change in stage.changes])
    modules = short_modules([list(move.modules) for move in diff.moves])
    yield _table("Operators that moved", ("from", "to", "#ops", "modules", "#parameters"), [
        (short_list(move.a) or UNKNOWN, short_list(move.b) or UNKNOWN, str(len(move.ops)), text or UNKNOWN,
         format_bytes(move.parameter_bytes)) for move, text in zip(diff.moves, modules, strict=True)])
    yield _table("Sharding", ("", "name", "#layers", "A", "B"), [
        (change.kind, change.name, str(change.count), change.a, change.b) for change in diff.sharding])
    yield _table("Order", ("device", "#actions in A", "#in B", "#first difference at", "A", "B"), [
        (change.device, str(change.num_a), str(change.num_b), str(change.position), change.a or "end",
         change.b or "end") for change in diff.orders])
    yield _table("Gradient exchanges", ("A", "B", "parameters", "#bytes"), [
        (shorten(change.a, WIDEST), shorten(change.b, WIDEST),
         f"{len(change.parameters)}: {short_list(change.parameters, limit=2)}", format_bytes(change.num_bytes))
        for change in diff.exchanges])


def _pairs_table(title: str, what: str, pairs: Mapping[str, tuple[int | None, int | None]]) -> TextTable:
    """Return bytes of both plans with the difference; what only one has is nothing in the other."""
    rows = [(name, *(UNKNOWN if value is None else format_bytes(value) for value in pair), _difference(*pair))
            for name, pair in pairs.items()]
    return make_table(title, (what, "#A", "#B", "#difference"), rows, limit=MAX_ROWS)


def _difference(a: int | None, b: int | None) -> str:
    change, part = (b or 0) - (a or 0), relative(b, a)
    text = f"{'+' if change > 0 else '-'}{format_bytes(abs(change))}" if change else ""
    return text + (f" ({percent(part, signed=True)})" if change and part is not None else "")
