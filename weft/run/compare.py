"""A plan's own exchanges of gradients against all-reduce for all of them: how long a step takes, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import numpy as np

from weft.base.errors import InputError
from weft.model.differences import FLOOR
from weft.model.graph import F64
from weft.plan.plan import Plan
from weft.run.launch import run_plan
from weft.run.result import RunOptions, RunResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientComparison:
    """Two runs of one plan from the same parameters and inputs."""

    planned: RunResult
    summed: RunResult
    """With all-reduce for every exchange."""
    difference: float
    """Of the gradients of the first step: the largest over their elements, relative to the gradient's largest element.
    """
    worst: str
    """The parameter with that difference."""


def all_reduced(plan: Plan) -> Plan:
    """Return the plan with all-reduce for every exchange of gradients."""
    return replace(plan, gradients=tuple(
        replace(item, method="all_reduce", groups=(), server=None) for item in plan.gradients))


def compare_gradients(plan: Plan, model: str, *, options: RunOptions, threads: int = 1,
                      keep: str | PathLike[str] | None = None) -> GradientComparison:
    """Return what a plan's own exchanges and all-reduce give, each run with one local process for each device.

    ``keep`` names a folder for the files of the first run; those of the second go to ``all_reduce`` in it.
    """
    if not plan.gradients:
        raise InputError("the plan exchanges no gradients, so there is nothing to compare: it is for inference, or no "
                         "two devices share a parameter")
    wanted = replace(options, gradients=True)
    planned = run_plan(plan, model, options=wanted, threads=threads, keep=keep)
    second = None if keep is None else Path(keep) / "all_reduce"
    summed = run_plan(all_reduced(plan), model, options=wanted, threads=threads, keep=second)
    difference, worst = largest_difference(planned.gradients or {}, summed.gradients or {})
    return GradientComparison(planned=planned, summed=summed, difference=difference, worst=worst)


def largest_difference(gradients: Mapping[str, F64], expected: Mapping[str, F64]) -> tuple[float, str]:
    """Return the largest relative difference between gradients, and whose it is."""
    scale = max((float(np.abs(value).max(initial=0.0)) for value in expected.values()), default=0.0)
    largest, worst = 0.0, ""
    for name, value in expected.items():
        difference = float(np.abs(gradients[name] - value).max(initial=0.0))
        relative = difference / max(float(np.abs(value).max(initial=0.0)), FLOOR * scale, 1e-300)
        if not relative <= largest:
            largest, worst = relative, name
    return largest, worst
