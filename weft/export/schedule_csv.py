"""A schedule of blocks as the CSV that ``torch.distributed.pipelining`` runs, where every block is on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from weft.export.pipelining_csv import order_to_csv
from weft.plan.orders import Action
from weft.plan.structure import PHASES, raise_problems
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule


def schedule_to_csv(schedule: Schedule, roles: Mapping[int, tuple[int, str]]) -> str:
    """Return the order of the schedule's blocks as a CSV: one row per device, one cell per block and micro-batch.

    ``roles`` gives each block's (stage, phase) by the block's index; phases are F, B, I and W, stages form one chain
    from 0. Raises ``PlanError`` for blocks on several devices, for blocks without a role or with that of another, and
    for what PyTorch could not run.
    """
    problem = schedule.problem
    _check_roles(problem, roles)
    order = [[cast(Action, (*roles[task], index)) for task, index in row]
             for row in schedule.orders()[: problem.num_devices]]
    return order_to_csv(order, num_microbatches=schedule.num_microbatches)


def _check_roles(problem: ScheduleProblem, roles: Mapping[int, tuple[int, str]]) -> None:
    problems, taken = [], dict[tuple[int, str], str]()
    for index, block in enumerate(problem.blocks):
        role = roles.get(index)
        if len(block.devices) > 1:
            names = ", ".join(problem.device_names[device] for device in block.devices)
            problems.append(f"block {block.name!r} is on several devices ({names}), a stage of a pipelining CSV on one")
        if role is None:
            problems.append(f"block {block.name!r} has no role (stage, phase)")
        elif role[1] not in PHASES:
            problems.append(f"block {block.name!r} has the phase {role[1]!r}, not one of {', '.join(PHASES)}")
        elif (other := taken.setdefault(role, block.name)) != block.name:
            problems.append(f"blocks {other!r} and {block.name!r} are both {role[1]} of stage {role[0]}")
    if problems:
        raise_problems("the schedule", problems)
