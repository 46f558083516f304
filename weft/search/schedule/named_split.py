"""Named schedules for split backward, and DualPipe: a fixed order of forwards F and input gradients I on each device.

``fill_weights`` puts the weight gradients where the devices would otherwise stand idle, or where memory asks for them.
With p devices, device r, and the two chunks or directions of a device told apart as 0 and 1, a device runs some blocks
first and then repeats a short cycle; a block in its turn takes its next micro-batch, and is left out if there is none:

              first                                    again and again    at most held without weight gradient
    ZB-H1     p-r F                                    I F                p
    ZB-H2     2(p-r)-1 F                               I F                2p-1
    ZBV       2(p-r)-1 F0, r (F1 F0), p-r (F1 I1)      F0 I0 F1 I1        2p half stages
    DualPipe  p-2r-2 F0, r+1 (F0 F1), p/2-r-1 (I1 F1)  F0 I1 F1 I0        p+1

For DualPipe r counts from the nearer end, and direction 0 is the one that starts there. V-Half is a pattern in time
(see ``v_half``) that holds at most p+2 half stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weft.search.schedule.named_fill import Place, fill_weights
from weft.search.schedule.named_orders import DeviceOrders, not_opposite
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.roles import Roles, Stage
from weft.search.schedule.schedule import Instance

Kind = str
"""F0, F1, I0 or I1."""

_V_HALF_PERIOD: Final = 6
"""Slots of one micro-batch on a device: F, I and W of two half stages."""


def zb_h1(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return ZB-H1's orders, for chains with one stage on each device."""
    return _zero_bubble(problem, roles, num_microbatches, 1, 0)


def zb_h2(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return ZB-H2's orders, for chains with one stage on each device."""
    return _zero_bubble(problem, roles, num_microbatches, 2, -1)


def _zero_bubble(problem: ScheduleProblem, roles: Roles, num_microbatches: int, factor: int,
                 summand: int) -> DeviceOrders | str:
    """Return orders that begin with ``factor * stages to the end + summand`` forwards."""
    reason = _not_split_chains(roles)
    if reason:
        return reason
    orders: dict[Place, list[Instance]] = {}
    for pipeline in roles.pipelines:
        if len(set(pipeline.places)) < len(pipeline.places):
            return "it has several stages on a device"
        for stage, height in zip(pipeline.stages, pipeline.heights(), strict=True):
            first: list[Kind] = ["F0"] * (factor * height + summand)
            orders[stage.devices] = _unfold((stage,), first, ("I0", "F0"), num_microbatches)
    return fill_weights(problem, roles, num_microbatches, orders, limit=factor * _longest(roles) + summand)


def zbv(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return ZBV's orders, for chains that go over the devices and back: two stages on each."""
    reason = _not_split_chains(roles) or _not_over_and_back(roles)
    if reason:
        return reason
    orders: dict[Place, list[Instance]] = {}
    for pipeline in roles.pipelines:
        width = len(pipeline.stages) // 2
        for device, stage in enumerate(pipeline.stages[:width]):
            first: list[Kind] = ["F0"] * (2 * (width - device) - 1)
            first += ["F1", "F0"] * device + ["F1", "I1"] * (width - device)
            orders[stage.devices] = _unfold((stage, pipeline.stages[-1 - device]), first, ("F0", "I0", "F1", "I1"),
                                            num_microbatches)
    return fill_weights(problem, roles, num_microbatches, orders, limit=_longest(roles))


def v_half(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return V-Half's orders, for chains that go over the devices and back: two stages on each.

    One micro-batch's blocks are laid out in slots, the next micro-batch's ``_V_HALF_PERIOD`` slots later. From one
    device to the next, F of chunk 0 and I of chunk 1 take 1 slot, F of chunk 1 and I of chunk 0 take 2, so that F and I
    of a chunk are 3 slots per device farther apart with every device: p half stages held on average, half as many as
    1F1B. The one pause, before I of chunk 0, keeps all four apart on every device: modulo 3, F0 is in the slot of its
    device r, F1 and I0 in r+1 (3 slots apart modulo 6), I1 in r+2.
    """
    reason = _not_split_chains(roles) or _not_over_and_back(roles)
    if reason:
        return reason
    orders: dict[Place, list[Instance]] = {}
    for pipeline in roles.pipelines:
        last = len(pipeline.stages) // 2 - 1
        for device, stage in enumerate(pipeline.stages[: last + 1]):
            back = pipeline.stages[-1 - device]
            slots = {stage.forward: device, back.forward: 3 * last + 1 - 2 * device,
                     back.backward: 3 * last + 2 + device,
                     stage.backward: 6 * last + (4 if last % 2 == 0 else 7) - 2 * device}
            orders[stage.devices] = [(block, number) for _, number, block in sorted(
                (slot + _V_HALF_PERIOD * number, number, block) for block, slot in slots.items() if block is not None
                for number in range(num_microbatches))]
    return fill_weights(problem, roles, num_microbatches, orders, limit=_longest(roles) // 2 + 2)


def dualpipe(problem: ScheduleProblem, roles: Roles, num_microbatches: int) -> DeviceOrders | str:
    """Return DualPipe's orders, for two opposite pipelines over an even number of devices; split or whole backward."""
    reason = not_opposite(roles)
    if reason:
        return reason
    down, up = roles.pipelines
    width = len(down.stages)
    if width % 2:
        return f"it needs an even number of stages, not {width}"
    orders: dict[Place, list[Instance]] = {}
    for device, (stage, opposite) in enumerate(zip(down.stages, up.stages[::-1], strict=True)):
        nearer = min(device, width - 1 - device)
        first: list[Kind] = ["F0"] * (width - 2 * nearer - 2)
        first += ["F0", "F1"] * (nearer + 1) + ["I1", "F1"] * (width // 2 - nearer - 1)
        pair = (stage, opposite) if device < width // 2 else (opposite, stage)
        orders[stage.devices] = _unfold(pair, first, ("F0", "I1", "F1", "I0"), num_microbatches)
    return fill_weights(problem, roles, num_microbatches, orders, limit=width + 1)


def _unfold(stages: Sequence[Stage], first: Sequence[Kind], cycle: Sequence[Kind],
            num_microbatches: int) -> list[Instance]:
    """Return the blocks of ``first``, then of ``cycle`` again and again, each with its next micro-batch.

    F0 and I0 are the blocks of the first of the stages, F1 and I1 those of the second.
    """
    blocks = {f"{letter}{which}": block for which, stage in enumerate(stages)
              for letter, block in (("F", stage.forward), ("I", stage.backward)) if block is not None}
    following = dict.fromkeys(blocks, 0)
    result: list[Instance] = []
    while len(result) < len(blocks) * num_microbatches:
        for kind in first:
            if following[kind] < num_microbatches:
                result.append((blocks[kind], following[kind]))
                following[kind] += 1
        first = cycle
    return result


def _longest(roles: Roles) -> int:
    return max(len(pipeline.stages) for pipeline in roles.pipelines)


def _not_split_chains(roles: Roles) -> str:
    """Return why the problem is not chains with split backward on devices of their own; nothing if it is."""
    if not roles.is_training or not roles.is_split:
        return "no backward is split into input and weight gradient"
    if not roles.are_apart:
        return "its pipelines share devices"
    if any(pipeline.has_shared or not pipeline.is_chain for pipeline in roles.pipelines):
        return "it has blocks that span the devices of others, or branches"
    return "" if roles.are_places_apart else "its stages share devices in part"


def _not_over_and_back(roles: Roles) -> str:
    """Return why the stages do not go over all devices and back; nothing if they do."""
    is_v = all(pipeline.places == pipeline.places[::-1] and 2 * len(set(pipeline.places)) == len(pipeline.places)
               for pipeline in roles.pipelines)
    return "" if is_v else "its stages do not go over the devices once and back"
