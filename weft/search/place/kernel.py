"""Compiled code for placements: the arrays of a problem, and the timetable that devices and an order mean."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64
from weft.search.place.problem import PlaceProblem


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
def transfer_s(a: Arrays, tensor: int, source: int, target: int) -> float:
    """Return the seconds to send a tensor between two different devices."""
    row = a.given_row[tensor]
    if row >= 0:
        return float(a.given_s[row, source, target])
    return float(a.latency_s[source, target] + a.s_per_byte[source, target] * a.tensor_bytes[tensor])


@compiled
def decode(a: Arrays, device: I64, order: I64) -> tuple[F64, F64]:
    """Return (start of each operator, start of each transfer [tensors, devices], infinite where nothing is sent)."""
    num_ops, num_devices = a.time_s.shape
    core_free = np.zeros(num_devices)
    resource_free = np.zeros(max(1, a.num_resources))
    start_s = np.zeros(num_ops)
    end_s = np.zeros(num_ops)
    sent_s = np.full((len(a.producer), num_devices), np.inf)
    arrival = np.full((len(a.producer), num_devices), np.inf)
    waiting = np.empty(len(a.producer), dtype=np.int64)
    for op in order:
        here = device[op]
        ready = core_free[a.core_of_device[here]]
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
                while place > 0 and end_s[a.producer[waiting[place - 1]]] > end_s[writer]:
                    waiting[place] = waiting[place - 1]
                    place -= 1
                waiting[place] = tensor
                count += 1
        for slot in range(count):
            tensor = waiting[slot]
            source = device[a.producer[tensor]]
            begin = end_s[a.producer[tensor]]
            pair = source * num_devices + here
            for index in range(a.resource_start[pair], a.resource_start[pair + 1]):
                begin = max(begin, resource_free[a.resources[index]])
            done = begin + transfer_s(a, tensor, source, here)
            for index in range(a.resource_start[pair], a.resource_start[pair + 1]):
                resource_free[a.resources[index]] = done
            sent_s[tensor, here] = begin
            arrival[tensor, here] = done
            ready = max(ready, done)
        start_s[op] = ready
        end_s[op] = ready + a.time_s[op, here]
        core_free[a.core_of_device[here]] = end_s[op]
    return start_s, sent_s
