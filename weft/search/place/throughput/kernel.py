"""Compiled local search for the largest load: simulated annealing with exact changes of loads.

The energy is a p-norm of all loads, which is close to the largest load and still rewards what lowers the others; memory
beyond a device's capacity and transfers without a way are added with a large weight. A move takes a unit, or a few
units that share tensors and a device, to another device, or exchanges two such clusters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.kernel import accepts, draw, transfer_s

MAX_CLUSTER = 12
VIOLATION = 4.0
"""Weight of a device's memory taken twice, in loads."""
SLACK = 1e-12
"""Relative: memory sums may be off by so much."""


class Loads(NamedTuple):
    """What compiled code needs of a load problem; ``n`` units, ``m`` devices, ``t`` tensors."""

    time_s: F64
    """[n, m] infinite where the unit may not run."""
    core: I64
    """[m]"""
    num_cores: int
    owner: I64
    """[t] the unit that writes the tensor."""
    reader_start: I64
    """[t + 1]"""
    readers: I64
    """Units other than the owner, each once per tensor; no tensor is without."""
    touch_s: F64
    """[t, m]"""
    own_start: I64
    """[n + 1]"""
    owned: I64
    """Tensors by owner."""
    read_start: I64
    """[n + 1]"""
    reads: I64
    """Tensors by reader."""
    latency_s: F64
    """[m, m]"""
    s_per_byte: F64
    """[m, m]"""
    tensor_bytes: F64
    """[t]"""
    given_row: I64
    """[t]"""
    given_s: F64
    """[rows, m, m]"""
    resource_start: I64
    """[m * m + 1]"""
    resources: I64
    num_resources: int
    item_start: I64
    """[n + 1]"""
    items: I64
    item_bytes: F64
    capacity: F64
    """[m]"""
    node_unit: I64
    """[nodes] the unit of each node that must lie contiguously, sources before targets."""
    source_start: I64
    """[nodes + 1]"""
    sources: I64
    """Nodes that a node reads from."""

    def readers_of(self, tensor: int) -> list[int]:
        """Return the units that read the tensor."""
        return [int(unit) for unit in self.readers[self.reader_start[tensor] : self.reader_start[tensor + 1]]]

    def sources_of(self, node: int) -> list[int]:
        """Return the nodes that the node reads from."""
        return [int(source) for source in self.sources[self.source_start[node] : self.source_start[node + 1]]]

    def items_of(self, unit: int) -> list[int]:
        """Return what the unit keeps."""
        return [int(item) for item in self.items[self.item_start[unit] : self.item_start[unit + 1]]]

    def pair_seconds(self, tensor: int) -> F64:
        """Return [m, m] the seconds to send the tensor."""
        row = self.given_row[tensor]
        return np.asarray(self.given_s[row] if row >= 0 else
                          self.latency_s + self.s_per_byte * self.tensor_bytes[tensor])


class State(NamedTuple):
    """A placement with everything that a move changes."""

    device: I64
    """[n]"""
    reading: I64
    """[t, m] readers of the tensor on the device."""
    load: F64
    """[cores + resources + 1] the last is the number of transfers without a way."""
    held: I64
    """[items, m] units on the device that keep the item."""
    used: F64
    """[m] bytes."""

    @staticmethod
    def empty(a: Loads, device: I64) -> State:
        """Return the state for ``fill``."""
        num_devices = len(a.core)
        return State(device.astype(np.int64).copy(), np.zeros((len(a.owner), num_devices), dtype=np.int64),
                     np.zeros(a.num_cores + a.num_resources + 1),
                     np.zeros((len(a.item_bytes), num_devices), dtype=np.int64), np.zeros(num_devices))


@compiled
def fill(a: Loads, s: State) -> None:
    """Set everything that follows from the devices."""
    s.reading[:] = 0
    s.load[:] = 0
    s.held[:] = 0
    s.used[:] = 0
    for unit in range(len(s.device)):
        here = s.device[unit]
        s.load[a.core[here]] += a.time_s[unit, here]
        for slot in range(a.item_start[unit], a.item_start[unit + 1]):
            item = a.items[slot]
            if s.held[item, here] == 0:
                s.used[here] += a.item_bytes[item]
            s.held[item, here] += 1
    for tensor in range(len(a.owner)):
        for slot in range(a.reader_start[tensor], a.reader_start[tensor + 1]):
            s.reading[tensor, s.device[a.readers[slot]]] += 1
        add_tensor(a, s, tensor, 1.0)


@compiled
def add_tensor(a: Loads, s: State, tensor: int, sign: float) -> None:
    """Add (or take away) what the tensor loads."""
    num_devices = len(a.core)
    source = s.device[a.owner[tensor]]
    is_sent = False
    for target in range(num_devices):
        if target == source or s.reading[tensor, target] == 0:
            continue
        is_sent = True
        s.load[a.core[target]] += sign * a.touch_s[tensor, target]
        seconds = transfer_s(a, tensor, source, target)
        if seconds == np.inf:
            s.load[-1] += sign
            continue
        pair = source * num_devices + target
        for slot in range(a.resource_start[pair], a.resource_start[pair + 1]):
            s.load[a.num_cores + a.resources[slot]] += sign * seconds
    if is_sent:
        s.load[a.core[source]] += sign * a.touch_s[tensor, source]


@compiled
def move_unit(a: Loads, s: State, unit: int, target: int) -> None:
    """Move a unit, but leave the loads of its tensors to the caller."""
    source = s.device[unit]
    s.load[a.core[source]] -= a.time_s[unit, source]
    s.load[a.core[target]] += a.time_s[unit, target]
    for slot in range(a.read_start[unit], a.read_start[unit + 1]):
        s.reading[a.reads[slot], source] -= 1
        s.reading[a.reads[slot], target] += 1
    for slot in range(a.item_start[unit], a.item_start[unit + 1]):
        item = a.items[slot]
        s.held[item, source] -= 1
        if s.held[item, source] == 0:
            s.used[source] -= a.item_bytes[item]
        if s.held[item, target] == 0:
            s.used[target] += a.item_bytes[item]
        s.held[item, target] += 1
    s.device[unit] = target


@compiled
def excess(a: Loads, s: State) -> float:
    """Return how much memory is missing, in parts of devices, and how many transfers have no way."""
    total = max(0.0, s.load[-1])
    for device in range(len(a.core)):
        if s.used[device] > a.capacity[device] * (1 + SLACK):
            total += (s.used[device] - a.capacity[device]) / max(a.capacity[device], 1.0)
    return float(total)


@compiled
def energy(a: Loads, s: State, unit_load: float, squarings: int) -> float:
    """Return the norm of the loads, with what is not allowed on top; the norm's p is 2 to the power ``squarings``."""
    total = 0.0
    for index in range(len(s.load) - 1):
        power = s.load[index] / unit_load
        for _ in range(squarings):
            power *= power
        total += power
    return float(unit_load * (total ** (0.5**squarings) + VIOLATION * excess(a, s)))


@compiled
def is_convex(a: Loads, device: I64, here: int, left: I64) -> bool:
    """Return whether no path leaves the device's nodes and comes back; ``left`` is scratch."""
    for node in range(len(a.node_unit)):
        inside = device[a.node_unit[node]] == here
        left[node] = 0
        for slot in range(a.source_start[node], a.source_start[node + 1]):
            source = a.sources[slot]
            if left[source] == 1:
                if inside:
                    return False
                left[node] = 1
                break
            if not inside and device[a.node_unit[source]] == here:
                left[node] = 1
    return True


@compiled
def are_convex(a: Loads, device: I64) -> bool:
    """Return whether no path leaves any device and comes back."""
    left = np.zeros(len(a.node_unit), dtype=np.int64)
    for here in range(len(a.core)):  # noqa: SIM110 - compiled
        if not is_convex(a, device, here, left):
            return False
    return True


@compiled
def _num_tensors(a: Loads, unit: int) -> int:
    """Return how many tensors the unit writes or reads."""
    return int(a.own_start[unit + 1] - a.own_start[unit] + a.read_start[unit + 1] - a.read_start[unit])


@compiled
def _tensor(a: Loads, unit: int, index: int) -> int:
    """Return one of the tensors that the unit writes, then those that it reads."""
    num_owned = a.own_start[unit + 1] - a.own_start[unit]
    if index < num_owned:
        return int(a.owned[a.own_start[unit] + index])
    return int(a.reads[a.read_start[unit] + index - num_owned])


@compiled
def _near(a: Loads, random: I64, unit: int) -> int:
    """Return a random unit that shares a tensor with the unit, or itself if there is none."""
    num = _num_tensors(a, unit)
    if num == 0:
        return unit
    tensor = _tensor(a, unit, draw(random, num))
    num_pins = a.reader_start[tensor + 1] - a.reader_start[tensor] + 1
    pin = draw(random, num_pins)
    return int(a.owner[tensor] if pin == 0 else a.readers[a.reader_start[tensor] + pin - 1])


@compiled
def _grow(a: Loads, device: I64, random: I64, cluster: I64, begin: int, first: int, size: int) -> int:
    """Put the first unit and some near it on its device into the cluster from ``begin``; return its end."""
    cluster[begin] = first
    end = begin + 1
    for _ in range(3 * size):
        if end - begin >= size:
            break
        other = _near(a, random, cluster[begin + draw(random, end - begin)])
        is_new = device[other] == device[first]
        for slot in range(begin, end):
            is_new = is_new and cluster[slot] != other
        if is_new:
            cluster[end] = other
            end += 1
    return end


@compiled
def _touched(a: Loads, cluster: I64, end: int, stamp: I64, mark: int, tensors: I64) -> int:
    """List the tensors of the cluster's units, each once; return how many."""
    num = 0
    for unit in cluster[:end]:
        for index in range(_num_tensors(a, unit)):
            tensor = _tensor(a, unit, index)
            if stamp[tensor] != mark:
                stamp[tensor] = mark
                tensors[num] = tensor
                num += 1
    return num


@compiled
def _may_go(a: Loads, cluster: I64, begin: int, end: int, target: int) -> bool:
    for unit in cluster[begin:end]:  # noqa: SIM110 - compiled
        if not a.time_s[unit, target] < np.inf:
            return False
    return True


@compiled
def _propose(a: Loads, device: I64, random: I64, cluster: I64) -> tuple[int, int, int]:
    """Return (middle, end, target): the cluster up to ``middle`` goes to the target, the rest from there comes back.

    All are 0 where the move is not allowed.
    """
    num_units, num_devices = a.time_s.shape
    first = draw(random, num_units)
    source = device[first]
    size = 1
    while size < MAX_CLUSTER and draw(random, 5) < 2:
        size += 1
    middle = _grow(a, device, random, cluster, 0, first, size)
    target = device[_near(a, random, cluster[draw(random, middle)])]
    if draw(random, 4) == 0 and (target != source or draw(random, 4) == 0):
        target = draw(random, num_devices)
    if target == source or not _may_go(a, cluster, 0, middle, target):
        return 0, 0, 0
    end = middle
    if draw(random, 3) == 0:
        other = draw(random, num_units)
        for _ in range(8):
            if device[other] == target:
                break
            other = draw(random, num_units)
        if device[other] == target:
            end = _grow(a, device, random, cluster, middle, other, size)
            if not _may_go(a, cluster, middle, end, source):
                return 0, 0, 0
    return middle, end, int(target)


@compiled
def _shift(a: Loads, s: State, cluster: I64, middle: int, end: int, target: int, tensors: I64) -> None:
    """Make the move, with the loads of its tensors."""
    source = s.device[cluster[0]]
    for tensor in tensors:
        add_tensor(a, s, tensor, -1.0)
    for slot in range(end):
        move_unit(a, s, cluster[slot], target if slot < middle else source)
    for tensor in tensors:
        add_tensor(a, s, tensor, 1.0)


@compiled
def anneal(a: Loads, s: State, steps: int, hot: float, cold: float, seed: int, contiguous: bool,
           squarings: int) -> tuple[I64, float]:
    """Return the best allowed placement on the way and its largest load (infinite if there was none).

    ``s`` has the devices where it starts and, afterwards, where it ended: another run can go on from there. The
    temperature falls from ``hot`` to ``cold``, both in seconds.
    """
    fill(a, s)
    unit_load = max(s.load[:-1].max(), 1e-300)
    now = energy(a, s, unit_load, squarings)
    best, best_value = s.device.copy(), np.inf
    if excess(a, s) == 0 and (not contiguous or are_convex(a, s.device)):
        best_value = s.load[:-1].max()
    random = np.array([seed * 7919 + 12345], dtype=np.int64)
    cluster = np.empty(2 * MAX_CLUSTER, dtype=np.int64)
    stamp = np.full(len(a.owner), -1, dtype=np.int64)
    tensors = np.empty(len(a.owner), dtype=np.int64)
    old_load, old_used = s.load.copy(), s.used.copy()
    left = np.zeros(len(a.node_unit), dtype=np.int64)
    temperature = hot
    cooling = (cold / hot) ** (1.0 / max(1, steps // 100))
    for step in range(steps):
        if step % 100 == 99:
            temperature *= cooling
        if step % 100000 == 99999:
            fill(a, s)  # rounding
            now = energy(a, s, unit_load, squarings)
        middle, end, target = _propose(a, s.device, random, cluster)
        if middle == 0:
            continue
        source = s.device[cluster[0]]
        old_load[:] = s.load
        old_used[:] = s.used
        num = _touched(a, cluster, end, stamp, step, tensors)
        _shift(a, s, cluster, middle, end, target, tensors[:num])
        new = energy(a, s, unit_load, squarings)
        accept = accepts(random, now, new, temperature)
        if accept and contiguous:
            accept = is_convex(a, s.device, source, left) and is_convex(a, s.device, target, left)
        if accept:
            now = new
            largest = s.load[:-1].max()
            if largest < best_value * (1 - 1e-12) and excess(a, s) == 0:
                best_value = largest
                best[:] = s.device
        else:
            for slot in range(end):
                move_unit(a, s, cluster[slot], source if slot < middle else target)
            s.load[:] = old_load
            s.used[:] = old_used
    return best, best_value


# ---- orders cut into intervals --------------------------------------------------------------------------------------


@compiled
def grow_order(a: Loads, weight: F64, follow_start: I64, follow: I64, noise: float, random: I64) -> I64:
    """Return an order of the units that keeps together what shares heavy tensors; a random one starts it.

    Next comes the unit that adds least to the weight of the tensors between those in the order and the rest, with up to
    some ``noise`` in the weights' unit on top. ``follow[follow_start[i]:follow_start[i + 1]]`` come after unit ``i``.
    """
    count = len(a.time_s)
    gain, waits = np.zeros(count), np.zeros(count, dtype=np.int64)
    is_near, is_done = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for unit in range(count):
        for index in range(_num_tensors(a, unit)):
            tensor = _tensor(a, unit, index)
            gain[unit] -= weight[tensor] * (a.reader_start[tensor + 1] - a.reader_start[tensor])
    for unit in follow:
        waits[unit] += 1
    order = np.empty(count, dtype=np.int64)
    for turn in range(count):
        best, best_gain, num_open = -1, -np.inf, 0
        for unit in range(count):
            if is_done[unit] or waits[unit] > 0:
                continue
            num_open += 1
            if is_near[unit]:
                value = gain[unit] - noise * np.log((1 + draw(random, 65535)) / 65536.0)
                if value > best_gain:
                    best, best_gain = unit, value
        if best < 0:
            skip = draw(random, num_open)
            for unit in range(count):
                if is_done[unit] == 0 and waits[unit] == 0:
                    if skip == 0:
                        best = unit
                    skip -= 1
        order[turn] = best
        is_done[best] = 1
        for slot in range(follow_start[best], follow_start[best + 1]):
            waits[follow[slot]] -= 1
        for index in range(_num_tensors(a, best)):
            tensor = _tensor(a, best, index)
            for pin in range(a.reader_start[tensor] - 1, a.reader_start[tensor + 1]):
                other = a.owner[tensor] if pin < a.reader_start[tensor] else a.readers[pin]
                gain[other] += 2.0 * weight[tensor]
                is_near[other] = 1
    return order


@compiled
def cut_order(a: Loads, order: I64, sequence: I64, unit_bytes: F64) -> I64:
    """Return the devices of units with the least largest load of a device where each gets an interval of the order.

    Devices come in this sequence, and intervals may be empty. What transfers occupy is left out. With ``best[k, j]``
    the least for the first ``j`` units on the first ``k`` devices:

        best[k, j] = min over i <= j of max(best[k - 1, i], load of device k with the units from i to j)
    """
    count, num_devices = len(order), len(sequence)
    best = np.full((num_devices + 1, count + 1), np.inf)
    came = np.zeros((num_devices + 1, count + 1), dtype=np.int64)
    inside, load = np.zeros(len(a.owner), dtype=np.int64), np.zeros(num_devices)
    best[0, 0] = 0.0
    for end in range(count + 1):
        for turn in range(1, num_devices + 1):
            best[turn, end], came[turn, end] = best[turn - 1, end], end
        inside[:] = 0
        load[:] = 0
        taken = 0.0
        for begin in range(end - 1, -1, -1):
            unit = order[begin]
            taken += unit_bytes[unit]
            for turn in range(num_devices):
                load[turn] += a.time_s[unit, sequence[turn]]
            for index in range(_num_tensors(a, unit)):
                tensor = _tensor(a, unit, index)
                inside[tensor] += 1
                sign = (inside[tensor] == 1) - 1.0 * (
                    inside[tensor] > a.reader_start[tensor + 1] - a.reader_start[tensor])
                for turn in range(num_devices if sign != 0 else 0):
                    load[turn] += sign * a.touch_s[tensor, sequence[turn]]
            for turn in range(num_devices):
                value = max(best[turn, begin], load[turn])
                if value < best[turn + 1, end] and taken <= a.capacity[sequence[turn]] * (1 + SLACK):
                    best[turn + 1, end], came[turn + 1, end] = value, begin
    device, end = np.zeros(count, dtype=np.int64), count
    for turn in range(num_devices, 0, -1):
        for place in range(came[turn, end], end):
            device[order[place]] = sequence[turn - 1]
        end = came[turn, end]
    return device
