"""The library of named schedules: what published schedules make of a schedule problem.

A named schedule looks at what the blocks are (``roles``), orders them on every device by its own rule
(``named_orders``, ``named_split``), and is played as early as possible with the problem's own times and transfers
(``replay``), so unequal stages are fine. Some apply to a problem and some do not:

    gpipe, 1f1b          pipelines that train, also with several stages on a device; whole or split backward
    1f1b+                ... with blocks that span the devices of others (shapes M, NN, K)
    interleaved          stages that go round the devices several times
    zb-h1, zb-h2         split backward, one stage on each device
    zbv, v-half          split backward, stages that go over the devices and back
    chimera, dualpipe    two opposite pipelines (shape X)
    forward-only         no backward blocks (none that are recognised), or no memory: inference
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from weft.base.errors import PlanError
from weft.search.schedule.check import find_problems
from weft.search.schedule.named_orders import (
    DeviceOrders,
    chimera,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    one_f_one_b_plus,
)
from weft.search.schedule.named_split import dualpipe, v_half, zb_h1, zb_h2, zbv
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.roles import Roles, find_roles
from weft.search.schedule.schedule import Schedule, replay

_RULES: Final[dict[str, Callable[[ScheduleProblem, Roles, int], DeviceOrders | str]]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "1f1b+": one_f_one_b_plus, "interleaved": interleaved, "chimera": chimera,
    "zb-h1": zb_h1, "zb-h2": zb_h2, "zbv": zbv, "v-half": v_half, "dualpipe": dualpipe, "forward-only": forward_only}
"""Orders on all devices, or why the schedule does not apply."""


class NotApplicable(PlanError):  # noqa: N818 - it is an answer rather than a fault
    """The named schedule is not defined for the problem; the message says why."""


def named_schedule(name: str, problem: ScheduleProblem, num_microbatches: int) -> Schedule:
    """Return the named schedule, whether or not it fits the memory.

    Raises ``NotApplicable`` where it is not defined for the problem.
    """
    return _make(name, problem, find_roles(problem), num_microbatches)


NAMED: Final[dict[str, Callable[[ScheduleProblem, int], Schedule]]] = {
    name: partial(named_schedule, name) for name in _RULES}
"""Every named schedule, as a function of the problem and the number of micro-batches."""


@dataclass(frozen=True, kw_only=True)
class NamedRow:
    """What one named schedule makes of a problem."""

    name: str
    schedule: Schedule | None
    """None where the schedule does not apply."""
    reason: str
    """Why it cannot be used: what does not apply, or which device holds too much; empty if it can."""

    @property
    def is_usable(self) -> bool:
        """Return whether the schedule applies and fits the memory."""
        return not self.reason


def compare_named(problem: ScheduleProblem, num_microbatches: int) -> list[NamedRow]:
    """Return a row for every named schedule: usable ones, those that hold too much, and those that do not apply."""
    roles = find_roles(problem)
    rows = []
    for name in _RULES:
        try:
            schedule = _make(name, problem, roles, num_microbatches)
        except NotApplicable as error:
            rows.append(NamedRow(name=name, schedule=None, reason=str(error)))
        else:
            rows.append(NamedRow(name=name, schedule=schedule, reason="; ".join(find_problems(schedule))))
    return rows


def named_schedules(problem: ScheduleProblem, num_microbatches: int) -> dict[str, Schedule]:
    """Return by name the schedules that apply, fit the memory and pass ``check_schedule``."""
    return {row.name: row.schedule for row in compare_named(problem, num_microbatches)
            if row.schedule is not None and row.is_usable}


def _make(name: str, problem: ScheduleProblem, roles: Roles | None, num_microbatches: int) -> Schedule:
    orders = "its blocks are no pipelines that are known here" if roles is None else \
        _RULES[name](problem, roles, num_microbatches)
    if isinstance(orders, str):
        raise NotApplicable(f"{name} does not apply: {orders}")
    return replay(problem, num_microbatches, orders)
