"""What the compiled simulation of deployments reads: columns, and blocks that are made of them.

Columns are the model on the cluster (``World``), layouts that groups may have, and exchanges of gradients. From the
layout of each group ``make_blocks``, compiled, makes blocks, their slots, and what flows between them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64


class World(NamedTuple):
    """What does not depend on the deployment."""

    bundle_producer: I64
    bundle_consumer_start: I64
    bundle_consumers: I64
    bundle_bytes: F64
    """[bundles, 4] per sample, fixed, and the same of gradients."""
    latency_s: F64
    """[devices, devices]"""
    s_per_byte: F64
    resource_start: I64
    """[devices * devices + 1] into ``resources``: what a transfer between two devices holds."""
    resources: I64
    num_resources: int
    saved_per_sample: F64
    """[groups] bytes kept from forward to backward."""
    work_per_sample: F64
    """[groups] bytes that are needed while the group runs."""
    capacity: F64
    """[devices] bytes; infinite for no limit."""


class Layouts(NamedTuple):
    """All layouts that groups may have; a *slot* is one device of one replica."""

    slot_start: I64
    slot_device: I64
    slot_first: I64
    """First sample of the micro-batch."""
    slot_stop: I64
    replica_position: I64
    """The slot's place in its replica."""
    replica_size: I64
    forward_s: F64
    """[layouts, groups, slots]"""
    backward_s: F64
    step_s: F64
    """Seconds of the optimizer."""
    static: F64
    """[layouts, groups] bytes of parameters, gradients and optimizer states on each device."""
    saved_part: F64
    """[layouts, groups] part of what a group keeps for its backward that each device keeps."""


class Buckets(NamedTuple):
    """Gradient exchanges of a deployment."""

    seconds: F64
    member_start: I64
    members: I64
    """What is occupied: devices, and as ``num_devices + resource`` the resources on which exchanges meet."""
    of_group: I64
    """[pairs, 2] rows (bucket, group)."""


class Blocks(NamedTuple):
    """Consecutive groups with one layout, their replicas' devices as slots, and what flows between slots."""

    of_group: I64
    layout: I64
    first_group: I64
    """[blocks + 1]"""
    base: I64
    """[blocks + 1] first slot of each block."""
    device: I64
    """[slots]"""
    of_slot: I64
    seconds: F64
    """[2, slots] forward and backward of one micro-batch."""
    edges: I64
    """[edges, 2] rows (source slot, target slot)."""
    leader: I64
    """[edges] the edge whose message serves this one too: the same tensors for another block on the same device."""
    sizes: F64
    """[edges, 2] bytes forward and backward."""
    out_start: I64
    out_edges: I64
    in_start: I64
    in_edges: I64
    limit: I64
    """[blocks] micro-batches that may be between forward and backward."""


class Outcome(NamedTuple):
    """What the simulation says."""

    seconds: float
    used: F64
    """[devices] bytes."""
    busy_s: F64
    """[devices]"""
    link_busy_s: F64
    """[resources]"""
    exchange_s: F64
    """[devices] seconds of gradient exchanges."""
    group_end_s: F64
    """[groups] when the last backward of the group's block ends."""
    starts: F64
    """[phase * M + micro-batch, slots of blocks], for the order of the plan."""
    num_events: int
    """Of the simulation; zero if it did not have to begin."""


@compiled
def find_blocks(layout_of: I64) -> I64:
    """Return the block of each group: a new one wherever the layout changes."""
    block_of = np.zeros(len(layout_of), dtype=np.int64)
    for group in range(1, len(layout_of)):
        block_of[group] = block_of[group - 1] + (layout_of[group] != layout_of[group - 1])
    return block_of


@compiled
def make_blocks(world: World, layouts: Layouts, layout_of: I64, num_microbatches: int, ahead: int) -> Blocks:
    """Return the blocks of a deployment.

    A block may have ``ahead`` micro-batches more in flight for each block after it, on the longest way to the end.
    """
    of_group = find_blocks(layout_of)
    num_blocks = of_group[-1] + 1
    layout, first_group = np.zeros(num_blocks, dtype=np.int64), np.full(num_blocks + 1, len(layout_of))
    for group in range(len(layout_of) - 1, -1, -1):
        layout[of_group[group]], first_group[of_group[group]] = layout_of[group], group
    base = np.zeros(num_blocks + 1, dtype=np.int64)
    for block in range(num_blocks):
        base[block + 1] = base[block] + layouts.slot_start[layout[block] + 1] - layouts.slot_start[layout[block]]
    device, of_slot = np.empty(base[-1], dtype=np.int64), np.empty(base[-1], dtype=np.int64)
    seconds = np.zeros((2, base[-1]))
    for block in range(num_blocks):
        for slot in range(base[block + 1] - base[block]):
            at = base[block] + slot
            device[at], of_slot[at] = layouts.slot_device[layouts.slot_start[layout[block]] + slot], block
            for group in range(first_group[block], first_group[block + 1]):
                seconds[0, at] += layouts.forward_s[layout[block], group, slot]
                seconds[1, at] += layouts.backward_s[layout[block], group, slot]
    edges, leader, sizes = _find_edges(world, layouts, of_group, layout, base)
    out_start, out_edges = _group_by(edges[:, 0], base[-1])
    in_start, in_edges = _group_by(edges[:, 1], base[-1])
    limit = _limits(num_blocks, edges, of_slot, num_microbatches, ahead)
    return Blocks(of_group, layout, first_group, base, device, of_slot, seconds, edges, leader, sizes, out_start,
                  out_edges, in_start, in_edges, limit)


@compiled
def _find_edges(world: World, layouts: Layouts, of_group: I64, layout: I64, base: I64) -> tuple[I64, I64, F64]:
    """Return rows (source slot, target slot), leaders, and bytes both ways, for all that blocks read from others."""
    capacity = 64
    rows, sizes = np.empty((capacity, 6), dtype=np.int64), np.empty((capacity, 2))
    count = 0
    for bundle in range(len(world.bundle_producer)):
        source = of_group[world.bundle_producer[bundle]]
        begin, last_block = count, -1
        for place in range(world.bundle_consumer_start[bundle], world.bundle_consumer_start[bundle + 1]):
            target = of_group[world.bundle_consumers[place]]
            if target in (source, last_block):
                continue
            last_block = target
            first = layouts.slot_start[layout[target]]
            for slot in range(first, layouts.slot_start[layout[target] + 1]):
                replica, stop = _sources(layouts, layout[source], slot)
                while replica < stop:
                    if count == capacity:
                        capacity *= 2
                        rows, sizes = np.concatenate((rows, rows)), np.concatenate((sizes, sizes))
                    if _add_edge(world.bundle_bytes[bundle], layouts, replica, slot, rows[count], sizes[count]):
                        rows[count, 0] += base[source] - layouts.slot_start[layout[source]]
                        rows[count, 1] += base[target] - first
                        rows[count, 5] = _leader_of(rows, begin, count)
                        count += 1
                    replica += layouts.replica_size[replica]
    return rows[:count, :2].copy(), rows[:count, 5].copy(), sizes[:count].copy()


@compiled
def _sources(layouts: Layouts, layout: int, target: int) -> tuple[int, int]:
    """Return the first slots, from and up to, of replicas that may have samples of ``target``: all or the equal one."""
    first, stop = layouts.slot_start[layout], layouts.slot_start[layout + 1]
    replica = first
    while replica < stop:
        if (layouts.slot_first[replica] == layouts.slot_first[target]
                and layouts.slot_stop[replica] == layouts.slot_stop[target]):
            return replica, replica + 1
        replica += layouts.replica_size[replica]
    return first, stop


@compiled
def _add_edge(bundle_bytes: F64, layouts: Layouts, replica: int, target: int, row: I64, sizes: F64) -> bool:
    """Write what the slot ``target`` gets from a replica, if they have samples in common."""
    low, high = layouts.slot_first[target], layouts.slot_stop[target]
    begin, stop = max(low, layouts.slot_first[replica]), min(high, layouts.slot_stop[replica])
    if begin >= stop:
        return False
    size = layouts.replica_size[replica]
    giver = replica + (layouts.replica_position[target]) % size
    for other in range(replica, replica + size):
        if layouts.slot_device[other] == layouts.slot_device[target]:
            giver = other
    owner = 1.0 if layouts.slot_first[replica] <= low else 0.0
    row[0], row[1], row[2], row[3], row[4] = giver, target, begin, stop, layouts.slot_device[target]
    sizes[0] = (stop - begin) * bundle_bytes[0] + owner * bundle_bytes[1]
    sizes[1] = (stop - begin) * bundle_bytes[2] + owner * bundle_bytes[3]
    return True


@compiled
def _leader_of(rows: I64, begin: int, count: int) -> int:
    for other in range(begin, count):
        if rows[other, 5] == other and rows[other, 0] == rows[count, 0] and rows[other, 4] == rows[count, 4] and (
                rows[other, 2] == rows[count, 2] and rows[other, 3] == rows[count, 3]):
            return other
    return count


@compiled
def _group_by(column: I64, num: int) -> tuple[I64, I64]:
    """Return (start, rows): the rows with each value of the column, in order."""
    start = np.zeros(num + 1, dtype=np.int64)
    for value in column:
        start[value + 1] += 1
    for value in range(num):
        start[value + 1] += start[value]
    rows, at = np.empty(len(column), dtype=np.int64), start.copy()
    for row in range(len(column)):
        rows[at[column[row]]] = row
        at[column[row]] += 1
    return start, rows


@compiled
def _limits(num_blocks: int, edges: I64, of_slot: I64, num_microbatches: int, ahead: int) -> I64:
    """Return how many micro-batches each block may have in flight."""
    after = np.zeros(num_blocks, dtype=np.int64)
    order = np.argsort(-of_slot[edges[:, 1]])
    for row in order:
        source, target = of_slot[edges[row, 0]], of_slot[edges[row, 1]]
        after[source] = max(after[source], after[target] + 1)
    return np.minimum(num_microbatches, ahead * after + 1)
