"""Named schedules that are an order by position: GPipe, 1F1B, 1F1B+, interleaved 1F1B, Chimera, forward only.

Each gives every block of every micro-batch a place in a row (a number); the order on a device is the order of these
places. With h the stages from a stage to the end of its pipeline (itself included), H the largest h, and n the number
of the micro-batch:

    forward only   F at H-h + n
    GPipe          F at H-h + n,      B at (H+N) + h + n            all forwards, then all backwards
    1F1B           F at H-h + 2n,     B at H+h-1 + 2n               neighbours alternate; h micro-batches in flight
    Chimera        1F1B in both directions; after every p/2 micro-batches of each direction a new unit of 2p places

1F1B+ is 1F1B with shared (all-device) stages half a place before the forward of the next stage and half a place after
the backward of the one before. Weight gradients directly follow input gradients.

Places grow along all dependencies, so no order of this kind can wait in a circle; interleaved 1F1B has places that are
each device's own, those of its authors, which do not either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weft.model.graph import F64
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.roles import Pipeline, Roles, forward_roles
from weft.search.schedule.schedule import Instance

DeviceOrders = list[list[Instance]]


def gpipe(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return GPipe's orders, for every problem that trains."""
    if not roles.is_training:
        return "it trains nothing"
    highest = max(max(pipeline.heights()) for pipeline in roles.pipelines)
    numbers = np.arange(num_microbatches, dtype=np.float64)
    return _order(problem, roles, lambda at: (
        highest - at.height - at.half + numbers, highest + num_microbatches + at.height + at.half + numbers))


def forward_only(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return the orders of a pipeline without backward: every micro-batch behind the one before it."""
    if roles.is_training:
        if any(block.memory for block in problem.blocks):
            return "it trains: its backward blocks release memory"
        roles = forward_roles(problem)
    highest = max(max(pipeline.heights()) for pipeline in roles.pipelines)
    numbers = np.arange(num_microbatches, dtype=np.float64)
    return _order(problem, roles, lambda at: (highest - at.height - at.half + numbers, numbers))


def one_f_one_b(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return 1F1B's orders, for pipelines without shared stages; several stages on a device are taken as they come."""
    if any(pipeline.has_shared for pipeline in roles.pipelines):
        return "some blocks span the devices of others (see 1f1b+)"
    return _one_f_one_b(problem, roles, num_microbatches)


def one_f_one_b_plus(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return 1F1B+'s orders: 1F1B with shared stages as steps of their own."""
    if not any(pipeline.has_shared for pipeline in roles.pipelines):
        return "no block spans the devices of others (see 1f1b)"
    return _one_f_one_b(problem, roles, num_microbatches)


def _one_f_one_b(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    if not roles.is_training:
        return "it trains nothing"
    if not roles.are_apart:
        return "its pipelines share devices"
    numbers = 2 * np.arange(num_microbatches, dtype=np.float64)
    return _order(problem, roles, lambda at: (
        at.top - at.height - at.half + numbers, at.top + at.height - 1 + at.half + numbers))


def chimera(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return Chimera's orders, for two opposite pipelines; units follow each other directly."""
    reason = not_opposite(roles)
    if reason:
        return reason
    num_stages = len(roles.pipelines[0].stages)
    unit, inside = np.divmod(np.arange(num_microbatches), max(1, num_stages // 2))
    numbers = (2 * num_stages * unit + 2 * inside).astype(np.float64)
    return _order(problem, roles, lambda at: (at.top - at.height + numbers, at.top + at.height - 1 + numbers))


def not_opposite(roles: Roles) -> str:
    """Return why the problem is not two opposite pipelines; nothing if it is."""
    if not roles.is_training or len(roles.pipelines) != 2:
        return "it is not two pipelines that train"
    down, up = roles.pipelines
    if not all(pipeline.is_chain and not pipeline.has_shared and len(set(pipeline.places)) == len(pipeline.places)
               for pipeline in roles.pipelines) or not roles.are_places_apart:
        return "its pipelines are not chains with one stage on every device"
    return "" if down.places == up.places[::-1] else "its pipelines do not run over the same devices in opposite order"


def interleaved(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return the orders of interleaved 1F1B, for stages that go round the devices several times.

    Micro-batches advance in groups of p, the number of devices: p of them through the first chunk, the same p through
    the second, and so on. A number of micro-batches that is no multiple of p leaves holes in the last group.
    """
    if not roles.is_training or not roles.are_apart:
        return "it is not a pipeline that trains on devices of its own"
    if not roles.are_places_apart or not all(map(_goes_round, roles.pipelines)):
        return "its stages do not go round the devices several times in the same order"
    numbers = np.arange(num_microbatches)

    def places(at: _Position) -> tuple[F64, F64]:
        chunk, device = divmod(at.top - at.height, at.width)
        group = numbers // at.width * at.top + numbers % at.width
        forward = group + chunk * at.width
        backward = group + at.top - (chunk + 1) * at.width
        num_warm = at.top - at.width + 2 * (at.width - device - 1)
        return (2 * forward).astype(np.float64), (2 * (backward + num_warm) + 1).astype(np.float64)

    return _order(problem, roles, places)


def _goes_round(pipeline: Pipeline) -> bool:
    """Return whether the stages go round the devices at least twice."""
    places, width = pipeline.places, len(set(pipeline.places))
    is_round = all(place == places[index % width] for index, place in enumerate(places))
    return (is_round and pipeline.is_chain and not pipeline.has_shared and width < len(places)
            and len(places) % width == 0)


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a stage stands in its pipeline."""

    height: int
    """Stages from it to the end, itself included."""
    top: int
    """The largest height."""
    width: int
    """Over how many places (sets of devices) its pipeline goes."""
    half: float
    """1/2 for a shared stage, else 0."""


def _order(problem: ScheduleProblem, roles: Roles, places: Callable[[_Position], tuple[F64, F64]]) -> DeviceOrders:
    """Return the blocks of each device by the places of their forwards and backwards.

    Of equal places the lower micro-batch is first, then what others depend on.
    """
    place_of: dict[int, F64] = {}
    for pipeline in roles.pipelines:
        heights, width = pipeline.heights(), len(set(pipeline.places))
        for stage, height in zip(pipeline.stages, heights, strict=True):
            forward, backward = places(_Position(height, max(heights), width, 0.5 if stage.is_shared else 0.0))
            place_of[stage.forward] = forward
            place_of.update({block: backward for block in (stage.backward, stage.weight) if block is not None})
    rank = {task: number for number, task in enumerate(problem.topological)}
    return [_sorted(sorted(tasks, key=rank.__getitem__), place_of)
            for tasks in problem.resource_tasks[: problem.num_devices]]


def _sorted(blocks: list[int], place_of: dict[int, F64]) -> list[Instance]:
    """Return all micro-batches of the blocks by place."""
    if not blocks:
        return []
    rows = np.stack([place_of[block] for block in blocks])
    ranks, numbers = np.indices(rows.shape)
    order = np.lexsort((ranks.ravel(), numbers.ravel(), rows.ravel()))
    return [(blocks[row], number) for row, number in
            zip(ranks.ravel()[order].tolist(), numbers.ravel()[order].tolist(), strict=True)]
