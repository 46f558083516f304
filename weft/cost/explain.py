"""Where costs come from: the share of time by source, and the heaviest operators with theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.base.units import format_time
from weft.cost.costs import Costs
from weft.cost.figure import SOURCES, Source
from weft.cost.op_classes import op_class
from weft.model.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """One operator's cost."""

    name: str
    kind: str
    op_class: str
    forward_s: float
    backward_s: float
    share: float
    """Of the total time of all operators."""
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSummary:
    """The costs of a graph on one device."""

    column: str
    """The device kind, or device, that it is about."""
    forward_s: float
    backward_s: float
    share_by_source: Mapping[Source, float]
    """Shares of the total time, forward and backward; sources that do not occur are left out."""
    heaviest: tuple[OpCost, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the summary as plain text, line by line."""
        shares = ", ".join(f"{share:.0%} {source.value}" for source, share in self.share_by_source.items())
        text = [f"{self.column}: forward {format_time(self.forward_s)}, backward {format_time(self.backward_s)} "
                f"({shares or 'nothing to do'})"]
        width = max((len(op.name) for op in self.heaviest), default=0)
        for op in self.heaviest:
            text.append(f"  {op.share:6.1%}  {format_time(op.forward_s):>9}  {format_time(op.backward_s):>9}  "
                        f"{op.source.value:<8}  {op.name:<{width}}  {op.kind}")
        return text + [f"  note: {note}" for note in self.notes]


def explain_costs(graph: Graph, costs: Costs, *, device: int = 0, top: int = 15) -> CostSummary:
    """Return what the costs of ``graph`` on ``device`` are made of: shares by source and the ``top`` operators."""
    column = costs.column_of_device[device]
    forward_s, backward_s = (np.where(np.isfinite(seconds), seconds, 0.0) for seconds in (
        costs.op_seconds("F")[:, column], costs.op_seconds("B")[:, column]))
    total_s = float(forward_s.sum() + backward_s.sum())
    by_source: dict[Source, float] = {}
    for code, source in enumerate(SOURCES):
        seconds = (forward_s[costs.source[:, column] == code].sum()
                   + backward_s[costs.backward_source[:, column] == code].sum())
        if seconds > 0:
            by_source[source] = float(seconds) / total_s
    order = np.argsort(-(forward_s + backward_s), kind="stable")[:top]
    heaviest = tuple(
        OpCost(name=graph.op_names[op], kind=graph.op_kinds[op], op_class=op_class(graph.op_kinds[op]),
               forward_s=float(forward_s[op]), backward_s=float(backward_s[op]),
               share=float(forward_s[op] + backward_s[op]) / total_s if total_s else 0.0,
               source=SOURCES[int(costs.source[op, column])])
        for op in order.tolist()
    )
    return CostSummary(column=costs.columns[column], forward_s=float(forward_s.sum()),
                       backward_s=float(backward_s.sum()), share_by_source=by_source, heaviest=heaviest,
                       notes=costs.notes)
