"""A prediction against a run of the same plan: how far each kind of work was off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from weft.model.graph import I64
from weft.plan.program import Op, Phase, Program
from weft.show.facts import relative
from weft.simulate.timeline import Timeline

_PHASES: Final = {Phase.F: "forward", Phase.B: "backward", Phase.I: "input gradients", Phase.W: "weight gradients"}
_OTHERS: Final = {Op.RECV: "transfers", Op.COLLECTIVE: "gradient exchange", Op.STEP: "optimizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFacts:
    """One kind of work in both timelines."""

    what: str
    stage: str
    """Empty for all stages together."""
    count: int
    predicted_s: float
    """Mean of one instruction."""
    measured_s: float

    @property
    def error(self) -> float | None:
        """Return by how much the prediction is above the measurement, as a part of the latter."""
        return relative(self.predicted_s, self.measured_s)


def error_facts(program: Program, predicted: Timeline, measured: Timeline) -> tuple[ErrorFacts, ...]:
    """Return each kind of work: over all stages, then stage by stage where there are several."""
    return tuple(_rows(program, predicted, measured))


def _rows(program: Program, predicted: Timeline, measured: Timeline) -> Iterator[ErrorFacts]:
    computes = program.op == Op.COMPUTE
    stages = np.asarray([instance.stage for instance in program.instances], dtype=np.int64)
    for phase, what in _PHASES.items():
        yield from _row(what, "", np.flatnonzero(computes & (program.phase == phase)), predicted, measured)
    for op, what in _OTHERS.items():
        yield from _row(what, "", np.flatnonzero(program.op == op), predicted, measured)
    if len(program.plan.stages) < 2:
        return
    stage_of = np.full(program.num_instructions, -1, dtype=np.int64)
    stage_of[computes] = stages[program.instance[computes]]
    for index, stage in enumerate(program.plan.stages):
        for phase, what in _PHASES.items():
            members = np.flatnonzero((stage_of == index) & (program.phase == phase))
            yield from _row(what, stage.name, members, predicted, measured)


def _row(what: str, stage: str, members: I64, predicted: Timeline, measured: Timeline) -> Iterator[ErrorFacts]:
    if len(members):
        means = [float((item.end_s - item.start_s)[members].mean()) for item in (predicted, measured)]
        yield ErrorFacts(what=what, stage=stage, count=len(members), predicted_s=means[0], measured_s=means[1])


def mean_error(rows: Sequence[ErrorFacts]) -> float | None:
    """Return the mean of the sizes of the errors of computes, each kind weighted by the time it takes."""
    known = [(abs(row.error), row.count * row.measured_s) for row in rows
             if row.error is not None and not row.stage and row.what in _PHASES.values()]
    whole = sum(weight for _, weight in known)
    return sum(error * weight for error, weight in known) / whole if whole else None
