"""Named orders: in which sequence each device runs the forward and backward of its stages.

Each function returns, for every device, the actions of a pipeline whose stages are ``0 .. num_stages - 1``, as
``(stage, phase, microbatch)``. Stages may share devices: ``interleaved`` puts stage ``s`` on device ``s % p``.
"""

from __future__ import annotations

from typing import Literal

from weft.base.errors import PlanError

Action = tuple[int, Literal["F", "B", "I", "W"], int]
Order = list[list[Action]]


def gpipe(num_stages: int, num_microbatches: int) -> Order:
    """Return all forwards, then all backwards, one stage per device."""
    return [[(stage, "F", index) for index in range(num_microbatches)]
            + [(stage, "B", index) for index in range(num_microbatches)] for stage in range(num_stages)]


def one_f_one_b(num_stages: int, num_microbatches: int) -> Order:
    """Return 1F1B: device ``s`` runs ``num_stages - 1 - s`` forwards ahead, then one of each in turn."""
    order: Order = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_microbatches)
        actions: list[Action] = [(stage, "F", index) for index in range(ahead)]
        for index in range(num_microbatches - ahead):
            actions += [(stage, "F", ahead + index), (stage, "B", index)]
        actions += [(stage, "B", index) for index in range(num_microbatches - ahead, num_microbatches)]
        order.append(actions)
    return order


def interleaved(num_devices: int, num_chunks: int, num_microbatches: int) -> Order:
    """Return interleaved 1F1B: ``num_chunks`` stages per device, micro-batches in rounds of ``num_devices``.

    ``num_microbatches`` must be a multiple of ``num_devices``. Device ``d`` runs ``2 (p - d - 1) + (v - 1) p`` forwards
    ahead (Narayanan et al., SC 2021).
    """
    if num_microbatches % num_devices:
        raise PlanError(f"interleaved 1F1B needs micro-batches ({num_microbatches}) in multiples of the devices "
                        f"({num_devices})")
    total = num_microbatches * num_chunks
    order: Order = []
    for device in range(num_devices):
        forwards = [_interleaved_step(step, device, num_devices, num_chunks, forward=True) for step in range(total)]
        backwards = [_interleaved_step(step, device, num_devices, num_chunks, forward=False) for step in range(total)]
        ahead = total if num_microbatches == num_devices else (
            min(total, 2 * (num_devices - device - 1) + (num_chunks - 1) * num_devices))
        actions: list[Action] = [(stage, "F", index) for stage, index in forwards[:ahead]]
        for step in range(total - ahead):
            actions += [(forwards[ahead + step][0], "F", forwards[ahead + step][1]),
                        (backwards[step][0], "B", backwards[step][1])]
        actions += [(stage, "B", index) for stage, index in backwards[total - ahead:]]
        order.append(actions)
    return order


def _interleaved_step(step: int, device: int, num_devices: int, num_chunks: int, *, forward: bool) -> tuple[int, int]:
    """Return (stage, micro-batch) of a device's ``step``-th forward or backward."""
    round_, inside = divmod(step, num_devices * num_chunks)
    chunk, offset = divmod(inside, num_devices)
    if not forward:
        chunk = num_chunks - 1 - chunk
    return chunk * num_devices + device, round_ * num_devices + offset


def forward_only(num_stages: int, num_microbatches: int) -> Order:
    """Return the order of an inference pipeline: every stage in order of micro-batches."""
    return [[(stage, "F", index) for index in range(num_microbatches)] for stage in range(num_stages)]


def to_tokens(order: Order, stage_names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the order as plan actions, such as ``s0:F:2``."""
    known: dict[int, tuple[str, ...]] = {}
    for actions in order:
        if id(actions) not in known:  # many devices may share one list
            known[id(actions)] = tuple(f"{stage_names[stage]}:{phase}:{index}" for stage, phase, index in actions)
    return [known[id(actions)] for actions in order]
