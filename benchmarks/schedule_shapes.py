"""Tessel's five placement shapes for any number of devices: ``shape("m", 8, memory=6)``.

    v     f0 (d0) > f1 (d1) > f2 (d2) > f3 (d3) > b0 (d3) > ... > b3 (d0)
    x     v, and a second pipeline through the devices in reverse
    m     a wide block on all devices before and after v
    nn    a wide block before the first half of the devices, and one before the second half
    k     two pipelines, one through each half of the devices, that meet in a wide block

Backward blocks mirror the forward ones: ``b0`` is the backward block of the last forward block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from weft.base.errors import InputError
from weft.search.schedule.problem import Block, FreeAt, ScheduleProblem

SHAPES: Final = ("v", "x", "m", "nn", "k")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A forward block, before its backward block is added."""

    devices: tuple[int, ...]
    after: tuple[int, ...] = ()
    """Indices of the steps before it."""
    wide: bool = False
    memory: float = 1.0


def shape(name: str, num_devices: int, *, memory: float | None, training: bool = True, forward: float = 1.0,
          backward: float = 3.0, wide_forward: float = 1.0, wide_backward: float = 1.0,
          free_at: FreeAt = "start") -> ScheduleProblem:
    """Return the problem of that shape: one stage per device (two in ``x``), each taking memory 1 in training.

    ``wide`` times are those of blocks on all devices. Wide blocks take memory in ``k`` alone. ``backward`` is three
    times ``forward`` because Tessel recomputes.
    """
    _check(name, num_devices)
    blocks: list[Block] = []
    first = 0
    for steps in _branches(name, num_devices):
        begin = len(blocks)
        for index, step in enumerate(steps):
            blocks.append(Block(name=f"f{first + index}", devices=step.devices, memory=step.memory if training else 0.0,
                                time=wide_forward if step.wide else forward,
                                after=tuple(begin + other for other in step.after)))
        if training:
            blocks += _mirror(steps, begin, first, backward, wide_backward)
        first += len(steps)
    return ScheduleProblem(device_names=tuple(f"d{index}" for index in range(num_devices)),
                           device_memory=(memory,) * num_devices, blocks=tuple(blocks), free_at=free_at)


def _check(name: str, num_devices: int) -> None:
    if name not in SHAPES:
        raise InputError(f"there is no shape {name!r}; choose from {', '.join(SHAPES)}")
    halves = name in ("nn", "k")
    if num_devices < 1 or (halves and num_devices % 2):
        what = "an even number of devices" if halves else "at least one device"
        raise InputError(f"shape {name!r} needs {what}, not {num_devices}")


def _branches(name: str, num_devices: int) -> tuple[tuple[_Step, ...], ...]:
    """Return the forward steps, apart for what shares no block."""
    alone, half = [_Step(devices=(device,)) for device in range(num_devices)], num_devices // 2
    everywhere = _Step(devices=tuple(range(num_devices)), wide=True, memory=0.0)
    match name:
        case "v":
            return (_chain(alone),)
        case "x":
            return _chain(alone), _chain(alone[::-1])
        case "m":
            return (_chain([everywhere, *alone]),)
        case "nn":
            return (_chain([everywhere, *alone[:half], everywhere, *alone[half:]]),)
        case _:
            second = tuple(replace(step, after=tuple(half + other for other in step.after))
                           for step in _chain(alone[half:]))
            joint = replace(everywhere, after=(half - 1, num_devices - 1), memory=1.0)
            return ((*_chain(alone[:half]), *second, joint),)


def _chain(steps: list[_Step]) -> tuple[_Step, ...]:
    return tuple(replace(step, after=(index - 1,) if index else ()) for index, step in enumerate(steps))


def _mirror(steps: tuple[_Step, ...], begin: int, first: int, backward: float, wide_backward: float) -> list[Block]:
    """Return the backward blocks in the order in which they can run; a step of two branches is followed by both."""
    order = list(reversed(range(len(steps))))
    if steps[-1].after[1:]:  # k: the wide block, then each branch from its end
        half = steps[-1].after[0] + 1
        order = [len(steps) - 1, *reversed(range(half)), *reversed(range(half, len(steps) - 1))]
    place = {step: begin + len(steps) + number for number, step in enumerate(order)}
    blocks = []
    for number, index in enumerate(order):
        step = steps[index]
        users = tuple(place[other] for other in range(len(steps)) if index in steps[other].after)
        blocks.append(Block(name=f"b{first + number}", devices=step.devices, memory=0.0 - step.memory,
                            time=wide_backward if step.wide else backward,
                            after=users or (begin + index,)))
    return blocks
