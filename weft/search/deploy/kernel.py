"""Compiled simulation of a deployment: which replicas run which groups of operators, at what time, on which links.

Consecutive groups with the same layout are one *block*; each replica of a block runs it forward and backward for each
micro-batch. What it means is what ``weft.simulate`` computes for the plan that comes of it (tests compare the two):

- A device runs one block at a time, of those that are ready: backwards before forwards, then the earlier micro-batch.
- What another device needs is sent when the block is done; it holds the links of its route, first come first served.
- A block begins a new micro-batch only while few enough are between their forward and their backward.
- Gradients are exchanged by *buckets*, each when the backward of the last micro-batch has come past its groups, or, in
  a block that sends gradients to another device, at its end; the exchanges of a device follow each other and disturb
  nothing else.
- At the end each device updates its parameters.

Bounds (``least_seconds``, ``find_bounds``) say of most deployments that are too slow that they are, without simulating
them:

- A device, a link, the exchanges of a device take at least as long as all that they have to do.
- The last micro-batch goes forwards and backwards through all blocks; then parameters' gradients are exchanged.
- A device begins no sooner than what comes before its first slot, and the last thing it does is the last micro-batch's
  backward in one of its slots (micro-batches do not pass each other). Then gradients still go on and are exchanged.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64, Bool
from weft.search.deploy.blocks import Blocks, Buckets, Layouts, Outcome, World, make_blocks


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


_ENDED, _ARRIVED, _GRADIENTS = 0, 1, 2
Heap = list[tuple[float, int, int, int]]


class _State(NamedTuple):
    """How far the simulation is. Tasks are numbered (phase * micro-batches + micro-batch) * slots + slot."""

    waiting: I64
    """[tasks] what each of them still waits for."""
    ready: I64
    """[devices, ...] tasks that can begin, as many as ``num_ready`` says."""
    num_ready: I64
    is_idle: Bool
    is_touched: Bool
    """Devices on which something may begin now."""
    link_free: F64
    link_busy: F64
    exchange_free: F64
    """[devices + resources], as in ``Buckets.members``; ``exchange_s`` likewise."""
    exchange_s: F64
    busy: F64
    device_end: F64
    group_end: F64
    starts: F64
    arrival: F64
    """[edges] of the message sent last."""
    lowest: I64
    """[buckets, blocks] the first group of the block that is in the bucket, or -1."""
    bucket_waits: I64
    left: F64
    """[devices] seconds of all blocks that have not begun yet."""
    after: F64
    """[devices] least seconds after them."""
    to_end: F64
    """[2, slots] least seconds from the begin of the last micro-batch's forward or backward to the end."""
    counter: I64
    """[3] events so far, tasks done, whether the limit is sure to be missed."""


@compiled
def run(world: World, layouts: Layouts, buckets: Buckets, layout_of: I64, num_microbatches: int, ahead: int,
        is_training: bool, must_fit: bool, limit_s: float) -> Outcome:
    """Return how a deployment runs; ``layout_of`` is the layout of each group. Infinite if it cannot end.

    It ends as soon as it is clear that it takes longer than ``limit_s``, and does not even begin if it has to fit the
    memory and does not: the seconds are infinite then, too.
    """
    blocks = make_blocks(world, layouts, layout_of, num_microbatches, ahead)
    num_phases = 2 if is_training else 1
    used, step_s = _memory(world, layouts, blocks, is_training)
    lowest = _lowest_groups(blocks, buckets)
    bounds = find_bounds(world, blocks, buckets, lowest, step_s, num_microbatches, is_training)
    state = _begin(world, blocks, lowest, num_microbatches, num_phases, bounds)
    if bounds.seconds > limit_s or (must_fit and (used > world.capacity).any()):
        return Outcome(np.inf, used, state.busy, state.link_busy, state.exchange_s[:len(used)], state.group_end,
                       state.starts, 0)
    heap = [(0.0, 0, 0, 0)]
    heapq.heappop(heap)
    now = 0.0
    while True:
        for owner in range(len(state.is_idle)):
            if state.is_touched[owner]:
                state.is_touched[owner] = False
                if state.is_idle[owner] and state.num_ready[owner]:
                    _start_best(state, heap, layouts, blocks, owner, now, num_microbatches, limit_s)
        if len(heap) == 0 or state.counter[2]:
            break
        now, _, kind, item = heapq.heappop(heap)
        if kind == _ENDED:
            _end(state, heap, world, blocks, item, now, num_microbatches, is_training)
        elif kind == _ARRIVED:
            _make_ready(state, blocks, item)
        else:
            _exchange(state, buckets, item, now, limit_s)
    seconds = 0.0
    for owner in range(len(state.is_idle)):
        seconds = max(seconds, max(state.device_end[owner], state.exchange_free[owner]) + step_s[owner])
    if state.counter[1] < len(state.waiting):
        seconds = np.inf
    return Outcome(seconds, used, state.busy, state.link_busy, state.exchange_s[:len(used)], state.group_end,
                   state.starts, state.counter[0])


@compiled
def _lowest_groups(blocks: Blocks, buckets: Buckets) -> I64:
    """Return [buckets, blocks]: the first group of the block that is in the bucket, or -1."""
    lowest = np.full((len(buckets.seconds), len(blocks.layout)), -1)
    for pair in range(len(buckets.of_group)):
        bucket, group = buckets.of_group[pair]
        block = blocks.of_group[group]
        if lowest[bucket, block] < 0 or group < lowest[bucket, block]:
            lowest[bucket, block] = group
    return lowest


@compiled
def _begin(world: World, blocks: Blocks, lowest: I64, num_microbatches: int, num_phases: int,
           bounds: Bounds) -> _State:
    num_devices, num_slots = len(world.capacity), len(blocks.device)
    num_tasks = num_phases * num_microbatches * num_slots
    waiting = np.zeros(num_tasks, dtype=np.int64)
    for microbatch in range(num_microbatches):
        for slot in range(num_slots):
            waits = blocks.in_start[slot + 1] - blocks.in_start[slot]
            if num_phases == 2:
                waits += microbatch >= blocks.limit[blocks.of_slot[slot]]
                backward = 1
                for place in range(blocks.out_start[slot], blocks.out_start[slot + 1]):
                    backward += blocks.sizes[blocks.out_edges[place], 1] > 0
                waiting[(num_microbatches + microbatch) * num_slots + slot] = backward
            waiting[microbatch * num_slots + slot] = waits
    bucket_waits = np.zeros(len(lowest), dtype=np.int64)
    for bucket in range(len(lowest)):
        for block in range(len(blocks.layout)):
            if lowest[bucket, block] >= 0:
                bucket_waits[bucket] += blocks.base[block + 1] - blocks.base[block]
    state = _State(
        waiting, np.empty((num_devices, num_tasks), dtype=np.int64), np.zeros(num_devices, dtype=np.int64),
        np.ones(num_devices, dtype=np.bool_), np.ones(num_devices, dtype=np.bool_), np.zeros(world.num_resources),
        np.zeros(world.num_resources), np.zeros(num_devices + world.num_resources),
        np.zeros(num_devices + world.num_resources), np.zeros(num_devices),
        np.zeros(num_devices), np.zeros(len(blocks.of_group)),
        np.full((num_phases * num_microbatches, num_slots), np.inf), np.zeros(len(blocks.edges)), lowest, bucket_waits,
        bounds.work, bounds.after, bounds.to_end, np.zeros(3, dtype=np.int64))
    for task in range(num_tasks):
        if waiting[task] == 0:
            owner = blocks.device[task % num_slots]
            state.ready[owner, state.num_ready[owner]] = task
            state.num_ready[owner] += 1
    return state


@compiled
def _push(state: _State, heap: Heap, when: float, kind: int, item: int) -> None:
    state.counter[0] += 1
    heapq.heappush(heap, (when, state.counter[0], kind, item))


@compiled
def _start_best(state: _State, heap: Heap, layouts: Layouts, blocks: Blocks, owner: int, now: float,
                num_microbatches: int, limit_s: float) -> None:
    """Begin the ready task of the device that goes before all others."""
    num_slots = len(blocks.device)
    best, best_key = -1, 0
    for place in range(state.num_ready[owner]):
        row, slot = state.ready[owner, place] // num_slots, state.ready[owner, place] % num_slots
        key = row * num_slots - slot if row >= num_microbatches else (row + 2 * num_microbatches) * num_slots + slot
        if best < 0 or key < best_key:
            best, best_key = place, key
    task = state.ready[owner, best]
    state.num_ready[owner] -= 1
    state.ready[owner, best] = state.ready[owner, state.num_ready[owner]]
    row, slot = task // num_slots, task % num_slots
    phase = 1 if row >= num_microbatches else 0
    seconds = blocks.seconds[phase, slot]
    is_last = row % num_microbatches == num_microbatches - 1
    if now + max(state.left[owner] + state.after[owner], state.to_end[phase, slot] if is_last else 0.0) > limit_s:
        state.counter[2] = 1
    state.starts[row, slot], state.is_idle[owner] = now, False
    state.busy[owner] += seconds
    state.left[owner] -= seconds
    _push(state, heap, now + seconds, _ENDED, task)
    if row == 2 * num_microbatches - 1:
        block = blocks.of_slot[slot]
        at_end = sends_gradients(blocks, slot)
        for bucket in range(len(state.bucket_waits)):
            if state.lowest[bucket, block] >= 0:
                when = now
                first = blocks.first_group[block] if at_end else state.lowest[bucket, block]
                for group in range(first, blocks.first_group[block + 1]):
                    when += layouts.backward_s[blocks.layout[block], group, slot - blocks.base[block]]
                _push(state, heap, when, _GRADIENTS, bucket)


@compiled
def _end(state: _State, heap: Heap, world: World, blocks: Blocks, task: int, now: float, num_microbatches: int,
         is_training: bool) -> None:
    """Note that a task has ended, and send what it made."""
    num_slots = len(blocks.device)
    row, slot = task // num_slots, task % num_slots
    owner, block = blocks.device[slot], blocks.of_slot[slot]
    state.is_idle[owner] = state.is_touched[owner] = True
    state.device_end[owner] = max(state.device_end[owner], now)
    state.counter[1] += 1
    if row < num_microbatches:
        if is_training:
            _make_ready(state, blocks, task + num_microbatches * num_slots)
        for place in range(blocks.out_start[slot], blocks.out_start[slot + 1]):
            edge = blocks.out_edges[place]
            target = blocks.edges[edge, 1]
            if blocks.leader[edge] == edge:
                state.arrival[edge] = _send(state, world, owner, blocks.device[target], blocks.sizes[edge, 0], now)
            _push(state, heap, state.arrival[blocks.leader[edge]], _ARRIVED, row * num_slots + target)
        return
    for group in range(blocks.first_group[block], blocks.first_group[block + 1]):
        state.group_end[group] = max(state.group_end[group], now)
    after = row - num_microbatches + blocks.limit[block]
    if after < num_microbatches:
        _make_ready(state, blocks, after * num_slots + slot)
    for place in range(blocks.in_start[slot], blocks.in_start[slot + 1]):
        edge = blocks.in_edges[place]
        if blocks.sizes[edge, 1] > 0:
            source = blocks.edges[edge, 0]
            when = _send(state, world, owner, blocks.device[source], blocks.sizes[edge, 1], now)
            _push(state, heap, when, _ARRIVED, row * num_slots + source)


@compiled
def _send(state: _State, world: World, source: int, target: int, num_bytes: float, now: float) -> float:
    """Return when a message arrives, and hold its links until then."""
    if source == target or num_bytes == 0:
        return now
    pair = source * len(world.capacity) + target
    begin = now
    for place in range(world.resource_start[pair], world.resource_start[pair + 1]):
        begin = max(begin, state.link_free[world.resources[place]])
    seconds = world.latency_s[source, target] + num_bytes * world.s_per_byte[source, target]
    for place in range(world.resource_start[pair], world.resource_start[pair + 1]):
        state.link_free[world.resources[place]] = begin + seconds
        state.link_busy[world.resources[place]] += seconds
    return float(begin + seconds)


@compiled
def _make_ready(state: _State, blocks: Blocks, task: int) -> None:
    state.waiting[task] -= 1
    if state.waiting[task] == 0:
        owner = blocks.device[task % len(blocks.device)]
        state.ready[owner, state.num_ready[owner]] = task
        state.num_ready[owner] += 1
        state.is_touched[owner] = True


@compiled
def _exchange(state: _State, buckets: Buckets, bucket: int, now: float, limit_s: float) -> None:
    """Count one more device that is ready to exchange a bucket; with the last one it begins."""
    state.bucket_waits[bucket] -= 1
    if state.bucket_waits[bucket]:
        return
    begin = now
    for place in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
        begin = max(begin, state.exchange_free[buckets.members[place]])
    for place in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
        member = buckets.members[place]
        state.exchange_free[member] = begin + buckets.seconds[bucket]
        state.exchange_s[member] += buckets.seconds[bucket]
    if begin + buckets.seconds[bucket] > limit_s:
        state.counter[2] = 1


@compiled
def _memory(world: World, layouts: Layouts, blocks: Blocks, is_training: bool) -> tuple[F64, F64]:
    """Return the bytes that each device needs at most, about, and the seconds of its optimizer."""
    num_devices = len(world.capacity)
    used, work, step_s = np.zeros(num_devices), np.zeros(num_devices), np.zeros(num_devices)
    for slot in range(len(blocks.device)):
        block, owner = blocks.of_slot[slot], blocks.device[slot]
        layout, place = blocks.layout[block], slot - blocks.base[block]
        where = layouts.slot_start[layout] + place
        samples = layouts.slot_stop[where] - layouts.slot_first[where]
        kept = blocks.limit[block] if is_training else 0
        for group in range(blocks.first_group[block], blocks.first_group[block + 1]):
            saved = world.saved_per_sample[group] * layouts.saved_part[layout, group]
            used[owner] += layouts.static[layout, group] + saved * samples * kept
            work[owner] = max(work[owner], world.work_per_sample[group] * samples)
            step_s[owner] += layouts.step_s[layout, group, place] if is_training else 0.0
    return used + work, step_s
