"""What all compiled searches for placements share.

The arrays of a problem, the timetable that devices and an order mean, random numbers, and how a run of annealing is cut
into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.problem import PlaceProblem

if TYPE_CHECKING:
    from weft.search.place.throughput.kernel import Loads


class Piece(NamedTuple):
    """A part of an annealing run."""

    number: int
    total: int
    steps: int
    hot: float
    cold: float


def pieces(steps: int, *, size: float, hot: float, fall: float, is_done: Callable[[], bool]) -> Iterator[Piece]:
    """Yield the pieces of a run, of about ``size`` steps each, the temperature falling from ``hot`` by ``fall`` in all.

    Before each but the first, ``is_done`` is asked whether to end: compiled code looks neither at the clock nor for
    Ctrl-C.
    """
    count = max(1, round(steps / size))
    ratio = fall ** (1 / count)
    for number in range(count):
        if number and is_done():
            return
        yield Piece(number, count, max(1, steps // count), hot, hot * ratio)
        hot *= ratio


class Arrays(NamedTuple):
    """What compiled code needs of a problem."""

    time_s: F64
    input_start: I64
    inputs: I64
    producer: I64
    tensor_bytes: F64
    latency_s: F64
    s_per_byte: F64
    given_row: I64
    given_s: F64
    resource_start: I64
    resources: I64
    num_resources: int
    core_of_device: I64

    @staticmethod
    def of(problem: PlaceProblem) -> Arrays:
        """Return the arrays of the problem."""
        return Arrays(problem.time_s, problem.input_start, problem.inputs, problem.producer, problem.tensor_bytes,
                      problem.latency_s, problem.s_per_byte, problem.given_row, problem.given_s,
                      problem.resource_start, problem.resources, problem.num_resources, problem.core_of_device)


@compiled
def transfer_s(a: Arrays | Loads, tensor: int, source: int, target: int) -> float:
    """Return the seconds to send a tensor between two different devices."""
    row = a.given_row[tensor]
    if row >= 0:
        return float(a.given_s[row, source, target])
    return float(a.latency_s[source, target] + a.s_per_byte[source, target] * a.tensor_bytes[tensor])


@compiled
def draw(random: I64, limit: int) -> int:
    """Return a number below the limit, by a linear congruential generator with its good upper bits."""
    random[0] = random[0] * 6364136223846793005 + 1442695040888963407
    return int(((random[0] >> 33) & 0x7FFFFFFF) % limit)


@compiled
def accepts(random: I64, now: float, new: float, temperature: float) -> bool:
    """Return whether annealing takes the new value."""
    return bool(new <= now or np.exp((now - new) / temperature) * 2147483648.0 > draw(random, 2147483647))


@compiled
def sort_inputs(a: Arrays, op: int, here: int, device: I64, end_s: F64, arrival: F64, missing: I64,
                ready: float) -> tuple[int, float]:
    """Return how many tensors must still be sent to the device for the operator, and when all others are there.

    Those to send are in ``missing``, the first written first; the time is ``ready`` at least.
    """
    count = 0
    for slot in range(a.input_start[op], a.input_start[op + 1]):
        tensor = a.inputs[slot]
        writer = a.producer[tensor]
        if device[writer] == here:
            ready = max(ready, end_s[writer])
        elif arrival[tensor, here] < np.inf:
            ready = max(ready, arrival[tensor, here])
        else:
            place = count
            while place > 0 and end_s[a.producer[missing[place - 1]]] > end_s[writer]:
                missing[place] = missing[place - 1]
                place -= 1
            missing[place] = tensor
            count += 1
    return count, ready


@compiled
def decode(a: Arrays, device: I64, order: I64) -> tuple[F64, F64]:
    """Return (start of each operator, start of each transfer [tensors, devices], infinite where nothing is sent)."""
    num_ops, num_devices = a.time_s.shape
    core_free, resource_free = np.zeros(num_devices), np.zeros(max(1, a.num_resources))
    start_s, end_s = np.zeros(num_ops), np.zeros(num_ops)
    sent_s = np.full((len(a.producer), num_devices), np.inf)
    arrival = sent_s.copy()
    waiting = np.empty(len(a.producer), dtype=np.int64)
    for op in order:
        here = device[op]
        count, ready = sort_inputs(a, op, here, device, end_s, arrival, waiting, core_free[a.core_of_device[here]])
        for tensor in waiting[:count]:
            source = device[a.producer[tensor]]
            begin = end_s[a.producer[tensor]]
            pair = source * num_devices + here
            for index in range(a.resource_start[pair], a.resource_start[pair + 1]):
                begin = max(begin, resource_free[a.resources[index]])
            done = begin + transfer_s(a, tensor, source, here)
            for index in range(a.resource_start[pair], a.resource_start[pair + 1]):
                resource_free[a.resources[index]] = done
            sent_s[tensor, here], arrival[tensor, here] = begin, done
            ready = max(ready, done)
        start_s[op], end_s[op] = ready, ready + a.time_s[op, here]
        core_free[a.core_of_device[here]] = end_s[op]
    return start_s, sent_s
