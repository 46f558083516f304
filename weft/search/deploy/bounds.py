"""Compiled bounds of a deployment's seconds, with which most of what is too slow is found out without a simulation.

- A device, a link, the exchanges of a device take at least as long as all that they have to do.
- The last micro-batch goes forwards and backwards through all blocks; then parameters' gradients are exchanged.
- A device begins no sooner than what comes before its first slot, and the last thing it does is the last micro-batch's
  backward in one of its slots (micro-batches do not pass each other). Then gradients still go on and are exchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.deploy.columns import Blocks, Buckets, Layouts, World


class Bounds(NamedTuple):
    """What is still to come, at least."""

    seconds: float
    """The whole."""
    work: F64
    """[devices] of blocks."""
    after: F64
    """[devices] between the last block of a device and the end of the step."""
    to_end: F64
    """[2, slots] from the begin of the last micro-batch's forward or backward to the end of the step."""


@compiled
def least_seconds(layouts: Layouts, layout_of: I64, num_devices: int, num_microbatches: int,
                  is_training: bool) -> float:
    """Return the seconds of the busiest device, from the layouts of groups alone."""
    seconds = np.zeros(num_devices)
    for group in range(len(layout_of)):
        layout = layout_of[group]
        first = layouts.slot_start[layout]
        for slot in range(layouts.slot_start[layout + 1] - first):
            work = layouts.forward_s[layout, group, slot] * num_microbatches
            if is_training:
                work += layouts.backward_s[layout, group, slot] * num_microbatches + layouts.step_s[layout, group, slot]
            seconds[layouts.slot_device[first + slot]] += work
    return float(seconds.max())


@compiled
def find_bounds(world: World, blocks: Blocks, buckets: Buckets, lowest: I64, step_s: F64, num_microbatches: int,
                is_training: bool) -> Bounds:
    """Return the bounds of a deployment.

    ``lowest`` is [buckets, blocks], the first group of the block in the bucket, or -1; ``step_s`` are the seconds of
    each device's optimizer.
    """
    num_slots, num_devices = len(blocks.device), len(step_s)
    head, tail, to_end = np.zeros(num_slots), np.zeros(num_slots), np.zeros((2, num_slots))
    for slot in range(num_slots):
        tail[slot] = step_s[blocks.device[slot]] + _exchange_after(blocks, buckets, lowest, slot)
        for place in range(blocks.in_start[slot], blocks.in_start[slot + 1]):
            edge = blocks.in_edges[place]
            source = blocks.edges[edge, 0]
            head[slot] = max(head[slot], head[source] + blocks.seconds[0, source] + _sent(world, blocks, edge, 0))
            if is_training and blocks.sizes[edge, 1] > 0:
                tail[slot] = max(tail[slot], _sent(world, blocks, edge, 1) + to_end[1, source])
        to_end[1, slot] = (blocks.seconds[1, slot] if is_training else 0.0) + tail[slot]
    _fill_forward(world, blocks, to_end)
    work, first, after = np.zeros(num_devices), np.full(num_devices, np.inf), np.full(num_devices, np.inf)
    seconds = max(_link_load(world, blocks, num_microbatches, is_training),
                  _exchange_load(buckets, step_s, world.num_resources))
    for slot in range(num_slots):
        owner = blocks.device[slot]
        work[owner] += num_microbatches * (blocks.seconds[0, slot] + (blocks.seconds[1, slot] if is_training else 0.0))
        first[owner], after[owner] = min(first[owner], head[slot]), min(after[owner], tail[slot])
        seconds = max(seconds, head[slot] + to_end[0, slot])
    for owner in range(num_devices):
        if first[owner] < np.inf:
            seconds = max(seconds, first[owner] + work[owner] + after[owner])
    return Bounds(seconds, work, after, to_end)


@compiled
def _fill_forward(world: World, blocks: Blocks, to_end: F64) -> None:
    """Fill in the seconds from the begin of each forward, by way of the blocks after it and back."""
    for slot in range(len(blocks.device) - 1, -1, -1):
        rest = to_end[1, slot]
        for place in range(blocks.out_start[slot], blocks.out_start[slot + 1]):
            edge = blocks.out_edges[place]
            rest = max(rest, _sent(world, blocks, edge, 0) + to_end[0, blocks.edges[edge, 1]])
        to_end[0, slot] = blocks.seconds[0, slot] + rest


@compiled
def _exchange_after(blocks: Blocks, buckets: Buckets, lowest: I64, slot: int) -> float:
    """Return the seconds of the exchanges that cannot begin before the slot's last backward has ended."""
    seconds, block = 0.0, blocks.of_slot[slot]
    at_end = sends_gradients(blocks, slot)
    for bucket in range(len(buckets.seconds)):
        if lowest[bucket, block] >= 0 and (at_end or lowest[bucket, block] == blocks.first_group[block]):
            seconds += buckets.seconds[bucket]
    return seconds


@compiled
def sends_gradients(blocks: Blocks, slot: int) -> bool:
    """Return whether another device waits for gradients from this slot."""
    for place in range(blocks.in_start[slot], blocks.in_start[slot + 1]):
        edge = blocks.in_edges[place]
        if blocks.sizes[edge, 1] > 0 and blocks.device[blocks.edges[edge, 0]] != blocks.device[slot]:
            return True
    return False


@compiled
def _sent(world: World, blocks: Blocks, edge: int, phase: int) -> float:
    """Return the seconds of a message forwards (0) or backwards (1) if nothing is in its way."""
    source, target = blocks.device[blocks.edges[edge, 0]], blocks.device[blocks.edges[edge, 1]]
    if phase == 1:
        source, target = target, source
    num_bytes = blocks.sizes[edge, phase]
    if source == target or num_bytes == 0:
        return 0.0
    return float(world.latency_s[source, target] + num_bytes * world.s_per_byte[source, target])


@compiled
def _exchange_load(buckets: Buckets, step_s: F64, num_resources: int) -> float:
    """Return the longest that a device or link is busy with exchanges, and the device with the optimizer after them."""
    load = np.zeros(len(step_s) + num_resources)
    load[:len(step_s)] = step_s
    for bucket in range(len(buckets.seconds)):
        for place in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
            load[buckets.members[place]] += buckets.seconds[bucket]
    return float(load.max())


@compiled
def _link_load(world: World, blocks: Blocks, num_microbatches: int, is_training: bool) -> float:
    """Return the longest that a link is busy."""
    load = np.zeros(world.num_resources + 1)
    for edge in range(len(blocks.edges)):
        for phase in range(2 if is_training else 1):
            if phase == 1 or blocks.leader[edge] == edge:
                seconds = _sent(world, blocks, edge, phase)
                source, target = blocks.device[blocks.edges[edge, phase]], blocks.device[blocks.edges[edge, 1 - phase]]
                pair = source * len(world.capacity) + target
                for place in range(world.resource_start[pair], world.resource_start[pair + 1]):
                    load[world.resources[place]] += seconds * num_microbatches
    return float(load.max())
