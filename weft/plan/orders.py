"""The library of named orders, by position of stage and micro-batch, for plans and for schedule problems alike.

**By place.** An order gives every block of every micro-batch a place in a row (a number); a device runs its blocks by
place. With h the stages from a stage to the end of its pipeline (itself included), H the largest h, N the number of
micro-batches and n the number of one:

    forward-only   F at H-h + n
    gpipe          F at H-h + n,      B at (H+N) + h + n            all forwards, then all backwards
    1f1b           F at H-h + 2n,     B at H+h-1 + 2n               neighbours alternate; h micro-batches in flight
    1f1b+          1F1B with shared (all-device) stages half a place before the forward of the next stage and half a
                   place after the backward of the one before
    chimera        1F1B in both directions; after every p/2 micro-batches of each direction a new unit of 2p places
    interleaved    stages go round p devices; p micro-batches advance through the first chunk, the same p through the
                   second, and so on; device d runs 2(p-d-1) forwards ahead and p for each chunk after its first
                   (Narayanan et al., SC 2021)

Places grow along all dependencies, so no order of this kind can wait in a circle; interleaved 1F1B has places that are
each device's own, those of its authors, which do not either. Where the backward is split, W directly follows I.

**By pattern**, for split backward: a device first runs some blocks, then repeats a short cycle; a block in its turn
takes its next micro-batch, and is left out if there is none. With p devices, device r, and the two chunks or directions
of a device told apart as 0 and 1:

               first                                     again and again    at most held without weight gradient
    zb-h1      p-r F                                     I F                p
    zb-h2      2(p-r)-1 F                                I F                2p-1
    zbv        2(p-r)-1 F0, r (F1 F0), p-r (F1 I1)       F0 I0 F1 I1        2p half stages
    dualpipev  2(p-r-1) F0, r+1 (F0 F1), p-r-1 (I1 F1)   F0 I1 F1 I0        2p+1 half stages
    dualpipe   p-2r-2 F0, r+1 (F0 F1), p/2-r-1 (I1 F1)   F0 I1 F1 I0        p+1

For DualPipe r counts from the nearer end, and direction 0 is the one that starts there. DualPipeV is one half of it,
folded: the other half's stages are the way back. What remains of the cycle when forwards run out is its end.

**By slots**, for split backward and chains that go over the devices and back: one micro-batch's blocks are laid out in
slots, those of the next one 6 slots later (F, I and W of two half stages), and each device runs its blocks in that
order as early as it can. How far F and I of a chunk are apart is how long it is held:

    v-half     p half stages held on average, at most p+2 (p odd: p+1)        (``_v_half``)
    v-min      2p/3 half stages held on average, at most 2 floor((p+4)/3)     (``_v_min``)

With equal times of F, I and W and 2p micro-batches or more, m of them take 6m on every device, and the whole schedule
p-1 more (ZBV, DualPipeV), 3p-4 (V-Half), 4p-5 (V-Min; 4p-3 where p is a multiple of 3); 1F1B of whole stages 6(p-1).

Where the weight gradients W go depends on real times (``weft.search.schedule.named``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np

from weft.base.errors import PlanError
from weft.model.graph import F64
from weft.plan.structure import parse_action

if TYPE_CHECKING:
    from weft.plan.plan import Plan

Action = tuple[int, Literal["F", "B", "I", "W"], int]
"""(stage, phase, micro-batch)"""
Order = list[list[Action]]
"""The actions of every device."""
Kind = str
"""F0, F1, I0 or I1: a forward or an input gradient of the first or the second chunk (or direction) of a device."""

_PERIOD: Final = 6
"""Slots of one micro-batch on a device, in an order by slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a stage stands in its pipeline."""

    height: int | F64
    """h: stages from it to the end, itself included; or a column of them, for many stages at once."""
    num_stages: int
    """H of its pipeline."""
    highest: int
    """The largest H of all pipelines."""
    width: int
    """Over how many places (sets of devices) its pipeline goes."""
    half: float = 0.0
    """1/2 for a shared stage, else 0."""


Places = Callable[[Position, F64], tuple[F64, F64]]
"""The places of a stage's forwards and of its backwards, for these micro-batches 0 .. N-1."""


def _interleaved(at: Position, n: F64, *, is_all_ahead: bool = False) -> tuple[F64, F64]:
    """Return the places of interleaved 1F1B; an N that is no multiple of p leaves holes in the last round."""
    chunk, device = divmod(at.num_stages - at.height, at.width)
    rounds = n // at.width * at.num_stages + n % at.width
    forward, backward = rounds + chunk * at.width, rounds + at.num_stages - (chunk + 1) * at.width
    num_ahead = at.num_stages - at.width + 2 * (at.width - device - 1)
    if is_all_ahead:
        num_ahead = at.num_stages * len(n)
    return 2 * forward, 2 * (backward + num_ahead) + 1


def _one_f_one_b(at: Position, n: F64) -> tuple[F64, F64]:
    return (at.num_stages - at.height - at.half + 2 * n, at.num_stages + at.height - 1 + at.half + 2 * n)


def _chimera(at: Position, n: F64) -> tuple[F64, F64]:
    unit, inside = np.divmod(n, max(1, at.num_stages // 2))
    return _one_f_one_b(at, at.num_stages * unit + inside)


PLACES: Final[Mapping[str, Places]] = {
    "forward-only": lambda at, n: (at.highest - at.height - at.half + n, n),
    "gpipe": lambda at, n: (at.highest - at.height - at.half + n, at.highest + len(n) + at.height + at.half + n),
    "1f1b": _one_f_one_b, "1f1b+": _one_f_one_b, "interleaved": _interleaved, "chimera": _chimera}
"""The orders by place; see the module's docstring."""

PATTERNS: Final[Mapping[str, Callable[[int, int], tuple[Sequence[Kind], Sequence[Kind]]]]] = {
    "zb-h1": lambda r, p: (["F0"] * (p - r), ("I0", "F0")),
    "zb-h2": lambda r, p: (["F0"] * (2 * (p - r) - 1), ("I0", "F0")),
    "zbv": lambda r, p: ([*["F0"] * (2 * (p - r) - 1), *["F1", "F0"] * r, *["F1", "I1"] * (p - r)],
                         ("F0", "I0", "F1", "I1")),
    "dualpipe": lambda r, p: ([*["F0"] * (p - 2 * r - 2), *["F0", "F1"] * (r + 1), *["I1", "F1"] * (p // 2 - r - 1)],
                              ("F0", "I1", "F1", "I0")),
    "dualpipev": lambda r, p: ([*["F0"] * (2 * (p - r - 1)), *["F0", "F1"] * (r + 1), *["I1", "F1"] * (p - r - 1)],
                               ("F0", "I1", "F1", "I0"))}
"""The orders by pattern, for device r of p: what is run first, and the cycle."""

HELD: Final[Mapping[str, Callable[[int], int]]] = {
    "zb-h1": lambda p: p, "zb-h2": lambda p: 2 * p - 1, "zbv": lambda p: 2 * p, "v-half": lambda p: (p + 2) // 2 * 2,
    "v-min": lambda p: (p + 4) // 3 * 2, "dualpipe": lambda p: p + 1, "dualpipev": lambda p: 2 * p + 1}
"""How many forwards a device of p holds at most, without their weight gradient, in an order by pattern or by slots."""


def by_place(rows: Sequence[F64]) -> list[tuple[int, int]]:
    """Return (row, micro-batch) by place; of equal places the lower micro-batch is first, then the first row."""
    numbers, ranks = np.divmod(np.argsort(np.stack(rows, axis=1), axis=None, kind="stable"), len(rows))
    return list(zip(ranks.tolist(), numbers.tolist(), strict=True))


def by_pattern(name: str, device: int, width: int, num_microbatches: int) -> list[tuple[Kind, int]]:
    """Return the forwards and input gradients of device ``device`` of ``width``, with their micro-batches."""
    if name in SLOTS:
        return _by_slots(SLOTS[name](device, width), num_microbatches)
    first, cycle = PATTERNS[name](device, width)
    following = dict.fromkeys(cycle, 0)
    result: list[tuple[Kind, int]] = []
    while len(result) < len(cycle) * num_microbatches:
        for kind in first:
            if following[kind] < num_microbatches:
                result.append((kind, following[kind]))
                following[kind] += 1
        first = cycle
    return result


def _by_slots(slots: Mapping[Kind, int], num_microbatches: int) -> list[tuple[Kind, int]]:
    """Return the blocks of a device in order of their slots, each micro-batch's ``_PERIOD`` after the one before."""
    found = sorted((slot + _PERIOD * number, number, kind) for kind, slot in slots.items()
                   for number in range(num_microbatches))
    return [(kind, number) for _, number, kind in found]


def _v_min(device: int, width: int) -> dict[Kind, int]:
    """Return V-Min's slots.

    All four wander by one slot per device, so on every device F and I of both chunks are 4p slots apart together: 2p/3
    half stages held on average. F0 and I1 are in slots of the device's parity, F1 and I0 in the others; a pause of two
    slots before I1 keeps those of equal parity apart where p is a multiple of 3.
    """
    last = width - 1
    turn = 2 * last + (2 if width % 3 else 4)
    return {"F0": device, "F1": 2 * last + 1 - device, "I1": turn + device, "I0": turn + 2 * last + 1 - device}


def _v_half(device: int, width: int) -> dict[Kind, int]:
    """Return V-Half's slots.

    From one device to the next, F0 and I1 take 1 slot, F1 and I0 take 2, so that F and I of a chunk are 3 slots per
    device farther apart with every device: p half stages held on average, half as many as 1F1B. The one pause, before
    I0, keeps all four apart on every device: modulo 3, F0 is in the slot of its device r, F1 and I0 in r+1 (3 slots
    apart modulo 6), I1 in r+2.
    """
    last = width - 1
    return {"F0": device, "F1": 3 * last + 1 - 2 * device, "I1": 3 * last + 2 + device,
            "I0": 6 * last + (4 if last % 2 == 0 else 7) - 2 * device}


SLOTS: Final[Mapping[str, Callable[[int, int], Mapping[Kind, int]]]] = {"v-half": _v_half, "v-min": _v_min}
"""The orders by slots, for device r of p."""


def _dealt(places: Places, num_devices: int, num_stages: int, num_microbatches: int,
           phases: tuple[Literal["F", "B"], ...] = ("F", "B")) -> Order:
    """Return the order of a chain of stages that are dealt out to the devices in turn."""
    at = Position(height=num_stages - np.arange(num_stages, dtype=np.float64)[:, None], num_stages=num_stages,
                  highest=num_stages, width=num_devices)
    found = places(at, np.arange(num_microbatches, dtype=np.float64))[: len(phases)]
    num_chunks = num_stages // num_devices
    rows = np.stack(found, axis=1).reshape(num_chunks, num_devices, len(phases), num_microbatches)
    ranked = np.argsort(rows.transpose(1, 3, 0, 2).reshape(num_devices, -1), axis=1, kind="stable")
    numbers, chunks, kinds = np.unravel_index(ranked, (num_microbatches, num_chunks, len(phases)))
    stages = chunks * num_devices + np.arange(num_devices)[:, None]
    return [[(stage, phases[kind], index) for stage, kind, index in zip(*row, strict=True)]
            for row in zip(stages.tolist(), kinds.tolist(), numbers.tolist(), strict=True)]


def gpipe(num_stages: int, num_microbatches: int) -> Order:
    """Return all forwards, then all backwards, one stage per device."""
    return _dealt(PLACES["gpipe"], num_stages, num_stages, num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Order:
    """Return 1F1B: device ``s`` runs ``num_stages - 1 - s`` forwards ahead, then one of each in turn."""
    return _dealt(_one_f_one_b, num_stages, num_stages, num_microbatches)


def forward_only(num_stages: int, num_microbatches: int) -> Order:
    """Return the order of an inference pipeline: every stage in order of micro-batches."""
    return _dealt(PLACES["forward-only"], num_stages, num_stages, num_microbatches, ("F",))


def interleaved(num_devices: int, num_chunks: int, num_microbatches: int) -> Order:
    """Return interleaved 1F1B: ``num_chunks`` stages per device (stage ``s`` on ``s % p``), in rounds of micro-batches.

    ``num_microbatches`` must be a multiple of ``num_devices``. A single round runs all its forwards ahead.
    """
    if num_microbatches % num_devices:
        raise PlanError(f"interleaved 1F1B needs micro-batches ({num_microbatches}) in multiples of the devices "
                        f"({num_devices})")
    is_all_ahead = num_microbatches == num_devices
    return _dealt(lambda at, n: _interleaved(at, n, is_all_ahead=is_all_ahead), num_devices, num_devices * num_chunks,
                  num_microbatches)


def one_after_another(device_of: Sequence[int], num_microbatches: int) -> Order:
    """Return one micro-batch after the other, forward and back over stages on these devices: what holds least."""
    order: Order = [[] for _ in range(max(device_of) + 1)]
    for index in range(num_microbatches):
        for stage, device in enumerate(device_of):
            order[device].append((stage, "F", index))
        for stage, device in reversed(list(enumerate(device_of))):
            order[device].append((stage, "B", index))
    return order


def to_tokens(order: Order, stage_names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the order as plan actions, such as ``s0:F:2``."""
    known: dict[int, tuple[str, ...]] = {}
    for actions in order:
        if id(actions) not in known:  # many devices may share one list
            known[id(actions)] = tuple(f"{stage_names[stage]}:{phase}:{index}" for stage, phase, index in actions)
    return [known[id(actions)] for actions in order]


def stage_order(plan: Plan, devices: Sequence[str]) -> Order:
    """Return the actions of some devices of a checked plan, with stages as numbers."""
    number = {stage.name: index for index, stage in enumerate(plan.stages)}
    found = [[parse_action(token) for token in plan.order.get(device, ())] for device in devices]
    return [[cast(Action, (number[action[0]], *action[1:])) for action in row if action is not None] for row in found]


def order_name(order: Order, num_stages: int, num_microbatches: int) -> str | None:
    """Return ``gpipe``, ``1f1b``, ``interleaved-1f1b`` or ``forward`` if the order is that, else None.

    ``order`` has one list for each pipeline rank; rank ``r`` has the stages ``r``, ``r + num_ranks`` and so on.
    """
    known: Mapping[str, Order] = {"forward": forward_only(num_stages, num_microbatches),
                                  "1f1b": one_f_one_b(num_stages, num_microbatches),
                                  "gpipe": gpipe(num_stages, num_microbatches)}
    num_ranks = len(order)
    if num_stages > num_ranks and num_stages % num_ranks == 0 and num_microbatches % num_ranks == 0:
        known = {"interleaved-1f1b": interleaved(num_ranks, num_stages // num_ranks, num_microbatches)}
    return next((name for name, actions in known.items() if actions == order), None)
