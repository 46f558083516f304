"""Local search around the best placement: annealing over devices and the order of operators, compiled.

A state is the device of every unit and an order of all operators; its value is the end of the timetable that they mean
(``timetable.make_timetable``). A move sends one unit, or a few connected ones, to another device, or puts an operator
elsewhere in the order. A move is accepted if the value rises by less than ``-T * log(uniform)``; the temperature ``T``
falls from ``hot`` to ``cold`` of the start's value. Three things make it fast:

- what comes before the first changed position stays as it is: evaluation starts at the last checkpoint before it;
- it ends as soon as an operator ends so late that, with the shortest way to the end, the move cannot be accepted;
- memory is kept as counts of each weight on each device, so a move that does not fit is never evaluated.

With a price on memory (``price``), what does not fit may be held for a while: a byte over a device's memory costs so
many seconds, few at first and ever more, until it no longer pays. So placements that differ in much of what each device
holds, and have only placements between them that do not fit, are within reach.

Rounds of annealing (``Annealer.improve``) begin from warm and from hot in turn, as long as they pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.place.kernel import Arrays, pieces, transfer_s
from weft.search.place.problem import Bools, PlaceProblem, starts_of
from weft.search.place.timetable import Timetable, make_timetable

NEVER = 1 << 60
MAX_SWAPPED = 8
"""Units that are sent back at most to make room for others."""
MOVE_STEPS = 16
"""A move takes as long as timing so many operators, beside those that it times."""


class Neighbours(NamedTuple):
    """What moves need to know."""

    unit_of_op: I64
    unit_start: I64
    unit_ops: I64
    """Operators of each unit."""
    choice_start: I64
    choices: I64
    """Devices that each unit may run on."""
    may_run: Bools
    """[units, m] the same as a table."""
    next_start: I64
    next_ops: I64
    """Operators that each operator reads from or is read by."""
    reader_start: I64
    readers: I64
    weight_start: I64
    weights: I64
    weight_bytes: F64
    capacity: F64
    tail_s: F64
    """The least time from an operator's end to the end of all."""
    output_start: I64
    outputs: I64
    """Tensors that each operator writes."""
    counts_tensors: bool
    """Tensors take memory while they are alive."""


class _State(NamedTuple):
    """Where things are, and the last accepted timetable with its checkpoints."""

    device: I64
    order: I64
    position: I64
    end_s: F64
    arrival: F64
    arrived_at: I64
    """Position in the order at which the transfer [tensor, device] was made; ``NEVER`` if not."""
    core_free: F64
    """[checkpoints, devices]"""
    resource_free: F64
    """[checkpoints, resources]"""


class _Trial(NamedTuple):
    """The timetable of the move that is being tried, from the checkpoint before it on."""

    end_s: F64
    arrival: F64
    stamp: I64
    log: I64
    """[transfers, 3]: tensor, device and position of each transfer made."""
    core_free: F64
    resource_free: F64
    core_now: F64
    resource_now: F64
    waiting: I64


@compiled
def _evaluate(a: Arrays, n: Neighbours, s: _State, t: _Trial, every: int, first: int, limit: float,
              stamp: int) -> tuple[float, int, int]:
    """Return the trial's value, infinite as soon as it must exceed ``limit``, its transfers and operators timed."""
    num_ops, num_devices = a.time_s.shape
    block = first // every
    begin_at = block * every
    core_free, resource_free = t.core_now, t.resource_now
    for index in range(num_devices):
        core_free[index] = s.core_free[block, index]
    for index in range(a.num_resources):
        resource_free[index] = s.resource_free[block, index]
    value, num_sent = 0.0, 0
    for place in range(begin_at, num_ops):
        if place % every == 0:
            for index in range(num_devices):
                t.core_free[place // every, index] = core_free[index]
            for index in range(a.num_resources):
                t.resource_free[place // every, index] = resource_free[index]
        op = s.order[place]
        here = s.device[op]
        ready = core_free[a.core_of_device[here]]
        count = 0
        for slot in range(a.input_start[op], a.input_start[op + 1]):
            tensor = a.inputs[slot]
            writer = a.producer[tensor]
            written = s.end_s[writer] if s.position[writer] < begin_at else t.end_s[writer]
            if s.device[writer] == here:
                ready = max(ready, written)
            elif s.arrived_at[tensor, here] < begin_at:
                ready = max(ready, s.arrival[tensor, here])
            elif t.stamp[tensor, here] == stamp:
                ready = max(ready, t.arrival[tensor, here])
            else:
                slot_at = count
                while slot_at > 0:
                    other = a.producer[t.waiting[slot_at - 1]]
                    if (s.end_s[other] if s.position[other] < begin_at else t.end_s[other]) <= written:
                        break
                    t.waiting[slot_at] = t.waiting[slot_at - 1]
                    slot_at -= 1
                t.waiting[slot_at] = tensor
                count += 1
        for slot in range(count):
            tensor = t.waiting[slot]
            writer = a.producer[tensor]
            begin = s.end_s[writer] if s.position[writer] < begin_at else t.end_s[writer]
            pair = s.device[writer] * num_devices + here
            for index in range(a.resource_start[pair], a.resource_start[pair + 1]):
                begin = max(begin, resource_free[a.resources[index]])
            begin += transfer_s(a, tensor, s.device[writer], here)
            for index in range(a.resource_start[pair], a.resource_start[pair + 1]):
                resource_free[a.resources[index]] = begin
            t.arrival[tensor, here] = begin
            t.stamp[tensor, here] = stamp
            t.log[num_sent, 0] = tensor
            t.log[num_sent, 1] = here
            t.log[num_sent, 2] = place
            num_sent += 1
            ready = max(ready, begin)
        ready += a.time_s[op, here]
        t.end_s[op] = ready
        core_free[a.core_of_device[here]] = ready
        value = max(value, ready + n.tail_s[op])
        if value > limit:
            return np.inf, num_sent, place - begin_at
    for place in range(begin_at):
        value = max(value, s.end_s[s.order[place]])
    return value, num_sent, num_ops - begin_at


@compiled
def _tensor_peaks(a: Arrays, n: Neighbours, s: _State, left: I64, peak: F64) -> None:
    """Fill ``peak`` with the most bytes of tensors alive on each device, by the order of operators rather than by time.

    This is soon done, and near enough to reject by; what is better than the best is counted by time as well. A tensor
    is on its writer's device, and on those that read it, from when it is written until its last reader there.
    """
    num_devices = a.time_s.shape[1]
    now = np.zeros(num_devices)
    for device in range(num_devices):
        peak[device] = 0.0
    for place in range(len(s.order)):
        op = s.order[place]
        here = s.device[op]
        for slot in range(n.output_start[op], n.output_start[op + 1]):
            tensor = n.outputs[slot]
            for device in range(num_devices):
                left[tensor, device] = 0
            for index in range(n.reader_start[tensor], n.reader_start[tensor + 1]):
                there = s.device[n.readers[index]]
                if left[tensor, there] == 0 and there != here:
                    now[there] += a.tensor_bytes[tensor]
                    peak[there] = max(peak[there], now[there])
                left[tensor, there] += 1
            now[here] += a.tensor_bytes[tensor]
            peak[here] = max(peak[here], now[here])
        for slot in range(n.output_start[op], n.output_start[op + 1]):
            if left[n.outputs[slot], here] == 0:
                now[here] -= a.tensor_bytes[n.outputs[slot]]
        for slot in range(a.input_start[op], a.input_start[op + 1]):
            tensor = a.inputs[slot]
            left[tensor, here] -= 1
            if left[tensor, here] == 0:
                now[here] -= a.tensor_bytes[tensor]


@compiled
def _tensor_peaks_by_time(a: Arrays, n: Neighbours, s: _State, t: _Trial, first: int, stamp: int, peak: F64) -> None:
    """Fill ``peak`` with the most bytes of tensors alive on each device in the trial's timetable, from ``first`` on.

    As ``timetable.Timetable.peak_bytes`` counts them: a tensor that is sent stays until it has arrived everywhere.
    """
    num_devices = a.time_s.shape[1]
    size = len(a.producer) * num_devices
    when, amount, where = np.zeros(2 * size), np.zeros(2 * size), np.zeros(2 * size, dtype=np.int64)
    since, until = np.zeros(num_devices), np.zeros(num_devices)
    count = 0
    for tensor in range(len(a.producer)):
        writer = a.producer[tensor]
        home = s.device[writer]
        written = s.end_s[writer] if s.position[writer] < first else t.end_s[writer]
        for device in range(num_devices):
            until[device] = -1.0
        since[home], until[home] = written - a.time_s[writer, home], written
        for slot in range(n.reader_start[tensor], n.reader_start[tensor + 1]):
            reader = n.readers[slot]
            there = s.device[reader]
            if there != home and until[there] < 0.0:
                arrived = t.arrival[tensor, there] if t.stamp[tensor, there] == stamp else s.arrival[tensor, there]
                since[there] = arrived - transfer_s(a, tensor, home, there)
                until[home] = max(until[home], arrived)
            until[there] = max(until[there], s.end_s[reader] if s.position[reader] < first else t.end_s[reader])
        for device in range(num_devices):
            if until[device] >= 0.0:  # what ends comes before what begins at the same time: the sort is stable
                when[count], amount[count], where[count] = until[device], -a.tensor_bytes[tensor], device
                when[size + count], amount[size + count] = since[device], a.tensor_bytes[tensor]
                where[size + count] = device
                count += 1
    now = np.zeros(num_devices)
    for device in range(num_devices):
        peak[device] = 0.0
    for index in np.argsort(when, kind="mergesort"):
        now[where[index]] += amount[index]
        peak[where[index]] = max(peak[where[index]], now[where[index]])


@compiled
def _excess(used: F64, peak: F64, room: F64) -> float:
    """Return the bytes over the devices' room."""
    excess = 0.0
    for device in range(len(used)):
        excess += max(0.0, used[device] + peak[device] - room[device])
    return excess


@compiled
def _accept(a: Arrays, s: _State, t: _Trial, every: int, first: int, num_sent: int) -> None:
    """Make the trial the accepted timetable."""
    num_ops = len(s.order)
    block = first // every
    begin_at = block * every
    for place in range(begin_at, num_ops):
        op = s.order[place]
        s.end_s[op] = t.end_s[op]
        for slot in range(a.input_start[op], a.input_start[op + 1]):
            tensor = a.inputs[slot]
            for there in range(a.time_s.shape[1]):
                if s.arrived_at[tensor, there] >= begin_at:
                    s.arrived_at[tensor, there] = NEVER
    for row in range(num_sent):
        tensor, there = t.log[row, 0], t.log[row, 1]
        s.arrival[tensor, there] = t.arrival[tensor, there]
        s.arrived_at[tensor, there] = t.log[row, 2]
    for index in range(block, len(s.core_free)):
        for column in range(s.core_free.shape[1]):
            s.core_free[index, column] = t.core_free[index, column]
        for column in range(s.resource_free.shape[1]):
            s.resource_free[index, column] = t.resource_free[index, column]


@compiled
def _shift(s: _State, source: int, target: int) -> None:
    """Move the operator at position ``source`` to ``target``; those between step aside."""
    op = s.order[source]
    step = 1 if target > source else -1
    for place in range(source, target, step):
        s.order[place] = s.order[place + step]
        s.position[s.order[place]] = place
    s.order[target] = op
    s.position[op] = target


@compiled
def _room(a: Arrays, n: Neighbours, s: _State, op: int) -> tuple[int, int]:
    """Return the first and last position that the operator may have, all others staying in order."""
    low, high = 0, len(s.order) - 1
    for slot in range(a.input_start[op], a.input_start[op + 1]):
        low = max(low, s.position[a.producer[a.inputs[slot]]] + 1)
    for slot in range(n.next_start[op], n.next_start[op + 1]):
        other = n.next_ops[slot]
        if s.position[other] > s.position[op]:
            high = min(high, s.position[other] - 1)
    return low, high


@compiled
def _move_unit(n: Neighbours, s: _State, held: I64, used: F64, unit: int, target: int) -> None:
    """Put the unit on the device, and its weights with it."""
    for slot in range(n.unit_start[unit], n.unit_start[unit + 1]):
        op = n.unit_ops[slot]
        source = s.device[op]
        s.device[op] = target
        for index in range(n.weight_start[op], n.weight_start[op + 1]):
            weight = n.weights[index]
            held[weight, source] -= 1
            if held[weight, source] == 0:
                used[source] -= n.weight_bytes[weight]
            if held[weight, target] == 0:
                used[target] += n.weight_bytes[weight]
            held[weight, target] += 1


@compiled
def _put_back(n: Neighbours, s: _State, held: I64, used: F64, picked: I64, before: I64, moved: int) -> None:
    """Send units back to where they were, the last first."""
    for index in range(moved - 1, -1, -1):
        _move_unit(n, s, held, used, picked[index], before[index])


@compiled
def _pick(n: Neighbours, s: _State, picked: I64, limit: int) -> int:
    """Fill ``picked`` with up to ``limit`` units that hang together; return how many."""
    op = np.random.randint(len(s.order))
    picked[0] = n.unit_of_op[op]
    count = 1
    for _ in range(3 * limit):
        if count == limit:
            break
        unit = picked[np.random.randint(count)]
        op = n.unit_ops[np.random.randint(n.unit_start[unit], n.unit_start[unit + 1])]
        degree = n.next_start[op + 1] - n.next_start[op]
        if degree == 0:
            break
        unit = n.unit_of_op[n.next_ops[n.next_start[op] + np.random.randint(degree)]]
        is_new = True
        for index in range(count):
            is_new = is_new and picked[index] != unit
        if is_new:
            picked[count] = unit
            count += 1
    return count


@compiled
def _target(n: Neighbours, s: _State, unit: int) -> int:
    """Return a device for the unit: where a neighbour is, or any that it may run on."""
    op = n.unit_ops[np.random.randint(n.unit_start[unit], n.unit_start[unit + 1])]
    degree = n.next_start[op + 1] - n.next_start[op]
    if degree > 0 and np.random.random() < 0.5:
        return int(s.device[n.next_ops[n.next_start[op] + np.random.randint(degree)]])
    first, last = n.choice_start[unit], n.choice_start[unit + 1]
    return int(n.choices[np.random.randint(first, last)])


@compiled
def _make_room(n: Neighbours, s: _State, held: I64, used: F64, picked: I64, before: I64, moved: int, target: int,
               other: int) -> int:
    """Send units with weights from the full device to the other one until it has room; return how many moved in all."""
    for _ in range(4 * MAX_SWAPPED):
        if used[target] <= n.capacity[target] or moved == len(picked):
            break
        op = np.random.randint(len(s.order))
        unit = n.unit_of_op[op]
        is_new = s.device[op] == target and n.weight_start[op + 1] > n.weight_start[op] and n.may_run[unit, other]
        for index in range(moved):
            is_new = is_new and picked[index] != unit
        if is_new:
            picked[moved] = unit
            before[moved] = target
            moved += 1
            _move_unit(n, s, held, used, unit, other)
    return moved


@compiled
def _try_devices(n: Neighbours, s: _State, held: I64, used: F64, picked: I64, before: I64, cluster: int,
                 is_priced: bool) -> int:
    """Send a few connected units to one device, and others back if it is full; return how many moved, 0 if none fit.

    Where what does not fit has a price, others are sent back every other time, and what does not fit may stay.
    """
    count = _pick(n, s, picked, cluster)
    target = _target(n, s, picked[0])
    other = s.device[n.unit_ops[n.unit_start[picked[0]]]]
    room = max(n.capacity[other], used[other])  # what is too full may stay so, but not become fuller
    moved = 0
    for index in range(count):
        unit = picked[index]
        source = s.device[n.unit_ops[n.unit_start[unit]]]
        if source != target and n.may_run[unit, target]:
            picked[moved] = unit
            before[moved] = source
            moved += 1
            _move_unit(n, s, held, used, unit, target)
    if moved > 0 and used[target] > n.capacity[target] and other != target and (
            not is_priced or np.random.random() < 0.5):
        moved = _make_room(n, s, held, used, picked, before, moved, target, other)
    if not is_priced and (used[target] > n.capacity[target] or used[other] > room):
        _put_back(n, s, held, used, picked, before, moved)
        return 0
    return moved


@compiled
def _first_changed(n: Neighbours, s: _State, picked: I64, count: int) -> int:
    first = len(s.order)
    for index in range(count):
        unit = picked[index]
        for slot in range(n.unit_start[unit], n.unit_start[unit + 1]):
            first = min(first, s.position[n.unit_ops[slot]])
    return first


@compiled
def _begin(a: Arrays, device: I64, order: I64, every: int) -> tuple[_State, _Trial]:
    """Return a state that is to be timed, with these devices and this order, and room for trials."""
    num_ops, num_devices = a.time_s.shape
    num_tensors = len(a.producer)
    blocks = (num_ops + every - 1) // every + 1
    width = max(1, a.num_resources)
    position = np.empty(num_ops, dtype=np.int64)
    for index in range(num_ops):
        position[order[index]] = index
    s = _State(device, order, position, np.zeros(num_ops), np.zeros((num_tensors, num_devices)),
               np.full((num_tensors, num_devices), NEVER), np.zeros((blocks, num_devices)), np.zeros((blocks, width)))
    t = _Trial(np.zeros(num_ops), np.zeros((num_tensors, num_devices)), np.zeros((num_tensors, num_devices), np.int64),
               np.zeros((num_tensors * num_devices, 3), dtype=np.int64), np.zeros((blocks, num_devices)),
               np.zeros((blocks, width)), np.zeros(num_devices), np.zeros(width),
               np.zeros(num_tensors + 1, dtype=np.int64))
    return s, t


@compiled
def _count_weights(n: Neighbours, device: I64, num_devices: int) -> tuple[I64, F64]:
    """Return how many operators on each device need each weight, and the bytes of weights on each device."""
    held = np.zeros((len(n.weight_bytes), num_devices), dtype=np.int64)
    used = np.zeros(num_devices)
    for op in range(len(device)):
        for index in range(n.weight_start[op], n.weight_start[op + 1]):
            if held[n.weights[index], device[op]] == 0:
                used[device[op]] += n.weight_bytes[n.weights[index]]
            held[n.weights[index], device[op]] += 1
    return held, used


@compiled
def anneal(a: Arrays, n: Neighbours, device: I64, order: I64, steps: int, hot: float, cold: float, price: float,
           dearer: float, seed: int) -> tuple[I64, I64, float, int]:
    """Anneal, in place; return the best devices, order and value, and the steps taken."""
    np.random.seed(seed)
    num_ops, num_devices = a.time_s.shape
    every = max(4, num_ops // 64)
    s, t = _begin(a, device, order, every)
    held, used = _count_weights(n, device, num_devices)
    first = num_ops - num_ops  # not the constant 0, for which everything would be compiled once more
    value, num_sent, spent = _evaluate(a, n, s, t, every, first, np.inf, first + 1)
    _accept(a, s, t, every, first, num_sent)
    scale, best, best_device, best_order = value, value, device.copy(), order.copy()
    left = np.zeros((len(a.producer), num_devices), dtype=np.int64)
    peak, none, room = np.zeros(num_devices), np.zeros(num_devices), n.capacity.copy()
    if n.counts_tensors:
        _tensor_peaks_by_time(a, n, s, t, first, first + 1, peak)
    if _excess(used, peak, n.capacity) > 0.0:
        best = np.inf
    if n.counts_tensors:
        _tensor_peaks(a, n, s, left, peak)
    excess, is_priced = _excess(used, peak, room), price > 0.0
    if excess > 0.0 and not is_priced:  # what does not fit by this account from the start may stay as full as it is
        excess, room = 0.0, np.maximum(room, used + peak)
    picked, before = np.zeros(8 + MAX_SWAPPED, dtype=np.int64), np.zeros(8 + MAX_SWAPPED, dtype=np.int64)
    ratio, stamp = np.log(cold / hot), spent
    while spent < steps:
        stamp += 1
        spent += MOVE_STEPS
        temperature = min(best, scale) * hot * np.exp(ratio * spent / steps)
        now = price * dearer ** (spent / steps)
        limit = value + now * excess - temperature * np.log(1.0 - np.random.random())
        kind = np.random.random()
        first, moved, source, target = num_ops, 0, 0, 0
        if kind < 0.75:
            cluster = 1 if kind < 0.4 else 2 + np.random.randint(7)  # at most 8
            moved = _try_devices(n, s, held, used, picked, before, cluster, is_priced)
            first = _first_changed(n, s, picked, moved)
        if kind >= 0.65 and (moved > 0 or kind >= 0.75):
            op = n.unit_ops[n.unit_start[picked[0]]] if moved > 0 else np.random.randint(num_ops)
            low, high = _room(a, n, s, op)
            source, target = s.position[op], low + np.random.randint(high - low + 1)
            first = min(first, min(source, target))
            _shift(s, source, target)
        if moved == 0 and source == target:
            continue
        over = _excess(used, none, room) if is_priced else 0.0
        trial, num_sent, timed = _evaluate(a, n, s, t, every, first, limit - now * over, stamp)
        spent += timed
        fits = trial <= limit - now * over
        if fits and n.counts_tensors:
            _tensor_peaks(a, n, s, left, peak)
            spent += num_ops
            over = _excess(used, peak, room)
            fits = trial + now * over <= limit if is_priced else over == 0.0
            if fits and over == 0.0 and trial < best:
                _tensor_peaks_by_time(a, n, s, t, first // every * every, stamp, peak)
                spent += num_ops
                over = _excess(used, peak, n.capacity)
                fits = trial + now * over <= limit if is_priced else over == 0.0
        if fits:
            _accept(a, s, t, every, first, num_sent)
            value, excess = trial, over
            if value < best and over == 0.0:
                best, best_device[:], best_order[:] = value, s.device, s.order
            continue
        _shift(s, target, source)
        _put_back(n, s, held, used, picked, before, moved)
    return best_device, best_order, best, spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was chosen for local search, and how."""

    heat: tuple[float, ...] = (0.02, 0.005, 0.05, 0.01)
    """Starting temperatures of rounds in turn, as parts of the value: a guess of warm and hot, not tuned."""
    cold: float = 0.0002
    """The last temperature, likewise: far below any change of a value that matters."""
    price: float = 0.3
    """Of a byte over a device's memory, at first, as a part of the best time by byte: a guess."""
    dearer: float = 300.0
    """Memory that is over costs so many times more at the end of a run than at its begin, so that it does not pay."""
    seconds_per_step: float = 50e-9
    """CPU seconds of timing one operator, about; measured."""
    piece: int = 10_000_000
    """Steps between two looks at whether to go on: about half a second, so that Ctrl-C is answered."""
    least_steps: int = 10_000
    """Steps of a round at least: a few hundred moves."""


TUNING: Final = Tuning()


class Annealed(NamedTuple):
    """The best state that was met and fits."""

    device: I64
    order: I64
    value: float
    """Infinite if none fits; then device and order are those of the start."""
    num_steps: int
    """Operators that were timed, and moves: what the run cost."""


class Annealer:
    """Anneals one problem again and again, from different states."""

    def __init__(self, problem: PlaceProblem, seed: int = 0) -> None:
        self.problem, self.seed, self.num_runs = problem, seed, 0
        self.arrays, self.neighbours = Arrays.of(problem), _neighbours(problem)
        self.bytes_held = float(problem.weight_bytes.sum()) or float(problem.tensor_bytes.sum())

    def improve(self, best: Timetable, budget: Budget, *, effort: float) -> Iterator[Timetable]:
        """Yield the better timetables that rounds of annealing end with; each starts from the best so far."""
        for index, hot in enumerate(TUNING.heat):
            if budget.is_spent:
                break
            found = self._round(best, budget, effort=effort / len(TUNING.heat), hot=hot, is_priced=index % 2 == 0)
            if found is not None and found.latency_s < best.latency_s:
                best = found
                yield best

    def make_fit(self, start: Timetable, budget: Budget, *, effort: float) -> Timetable | None:
        """Return what annealing comes to from a timetable that need not fit, None if it finds none that does."""
        return self._round(start, budget, effort=effort, hot=TUNING.heat[0], is_priced=True)

    def _round(self, best: Timetable, budget: Budget, *, effort: float, hot: float, is_priced: bool
               ) -> Timetable | None:
        """Return what a run ends with, None if nothing that it met fits.

        With ``is_priced`` it may pass through what does not fit, where memory is tight at all.
        """
        self.num_runs += 1
        price = TUNING.price * best.latency_s / self.bytes_held if is_priced and self.problem.is_tight else 0.0
        steps = max(TUNING.least_steps, int(effort / TUNING.seconds_per_step))
        found = self.run(best.device, best.order, steps=steps, hot=hot, cold=TUNING.cold, price=price,
                         seed=self.seed + 97 * self.num_runs, is_spent=lambda: budget.is_spent)
        budget.effort -= found.num_steps * TUNING.seconds_per_step
        return make_timetable(self.problem, found.device, found.order) if np.isfinite(found.value) else None

    def run(self, device: I64, order: I64, *, steps: int, seed: int, hot: float, cold: float,
            price: float = 0.0, is_spent: Callable[[], bool] = lambda: False) -> Annealed:
        """Return the best state found from this one in about so many steps.

        ``price`` is what a byte over a device's memory costs at first, in seconds; zero: no state may hold more than
        fits. It is done in pieces, the first in any case; before each other ``is_spent`` is asked whether to end.

        A step is one operator timed; a move that times few still counts as ``MOVE_STEPS``. The temperature falls with
        the steps from ``hot`` to ``cold``, which are parts of the value.
        """
        device, order, spent = device.copy(), order.copy(), 0
        best: Annealed | None = None
        for piece in pieces(steps, size=TUNING.piece, hot=hot, fall=cold / hot, is_done=is_spent):
            dearer = TUNING.dearer ** (1 / piece.total)
            found = Annealed(*anneal(self.arrays, self.neighbours, device, order, piece.steps, piece.hot, piece.cold,
                                     price * dearer**piece.number, dearer, (seed * 1000003 + piece.number) % 2**31))
            spent += found.num_steps
            if best is None or found.value < best.value:
                best = found
        assert best is not None, "there is at least one piece"
        return best._replace(num_steps=spent)


def _neighbours(problem: PlaceProblem) -> Neighbours:
    units, ops, devices = problem.num_units, problem.num_ops, np.nonzero(problem.is_allowed)
    pairs = np.unique(np.concatenate([problem.edges[:, [0, 1]], problem.edges[:, [1, 0]]]), axis=0)
    return Neighbours(
        problem.unit_of_op, starts_of(problem.unit_of_op, units), np.argsort(problem.unit_of_op, kind="stable"),
        starts_of(devices[0], units), devices[1], problem.is_allowed, starts_of(pairs[:, 0], ops), pairs[:, 1].copy(),
        *problem.readers, problem.weight_start, problem.weights, problem.weight_bytes, problem.capacity,
        least_tails(problem), starts_of(problem.producer, ops), np.argsort(problem.producer, kind="stable"),
        problem.has_lifetimes and bool(np.isfinite(problem.capacity).any()))


def least_tails(problem: PlaceProblem) -> F64:
    """Return [n] the least time from an operator's end to the end of all: its readers on their fastest devices."""
    fastest = problem.time_s.min(axis=1, initial=np.inf)
    tail = np.zeros(problem.num_ops)
    edges = problem.edges
    for source, reader, _tensor in edges[np.argsort(-edges[:, 0], kind="stable")].tolist():
        tail[source] = max(tail[source], fastest[reader] + tail[reader])
    return tail
