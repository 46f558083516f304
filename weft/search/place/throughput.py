"""The throughput objective for Weft's graphs: the least largest load of any device or of anything transfers occupy.

A device's load is the time of its operators (devices that share a processing unit count together); a resource's is the
time of the transfers over it, where a tensor is sent once to each device that reads it. What operators keep resident
must fit; ``contiguous`` means that no path between two operators of a device leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64
from weft.search.common.budget import Budget
from weft.search.place.fit import fitting_devices
from weft.search.place.problem import PlaceProblem
from weft.search.place.throughput_model import LoadProblem, Loads, csr, with_tensors
from weft.search.place.throughput_search import NothingFits, minimise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """The best placement found for throughput."""

    device: I64
    """[ops]"""
    value: float
    """Seconds per request: the largest load."""
    bound: float
    """No placement has a smaller value."""
    is_optimal: bool


def solve_throughput(problem: PlaceProblem, *, contiguous: bool, budget: Budget, seed: int,
                     starts: Sequence[I64] = ()) -> Loaded:
    """Return the best placement found from the starts (devices of operators) and Weft's own.

    Raises ``NoFeasiblePlan`` where none was found that fits the memory.
    """
    loads_of = load_problem(problem, contiguous=contiguous)
    first = first_ops(problem)
    found = minimise(loads_of, budget=budget, seed=seed, starts=[np.asarray(start)[first] for start in starts])
    if isinstance(found, NothingFits):
        fitting_devices(problem, seed=seed)  # raises where memory alone is too small
        raise _not_placed(problem, contiguous=contiguous, is_proven=found.is_proven)
    return Loaded(device=np.asarray(found.device[problem.unit_of_op], dtype=np.int64), value=found.value,
                  bound=found.bound, is_optimal=found.is_optimal)


def first_ops(problem: PlaceProblem) -> I64:
    """Return [units] the first operator of each unit."""
    first = np.zeros(problem.num_units, dtype=np.int64)
    first[problem.unit_of_op[::-1]] = np.arange(problem.num_ops - 1, -1, -1)
    return first


def loads(problem: PlaceProblem, device: I64) -> F64:
    """Return the load of every device (of its processing unit), then of every resource; infinite without a way."""
    found = np.zeros(problem.num_devices + problem.num_resources)
    cores = np.zeros(int(problem.core_of_device.max(initial=-1)) + 1)
    np.add.at(cores, problem.core_of_device[device], problem.time_s[np.arange(problem.num_ops), device])
    found[: problem.num_devices] = cores[problem.core_of_device]
    sent = {(int(tensor), int(device[source]), int(device[reader])) for source, reader, tensor in problem.edges.tolist()
            if device[source] != device[reader]}
    for tensor, source, target in sorted(sent):
        seconds = problem.transfer_s(tensor, source, target)
        if not np.isfinite(seconds):
            found[source] = np.inf
        pair = source * problem.num_devices + target
        for resource in problem.resources[problem.resource_start[pair] : problem.resource_start[pair + 1]]:
            found[problem.num_devices + resource] += seconds
    return found


def load_problem(problem: PlaceProblem, *, contiguous: bool) -> LoadProblem:
    """Return the problem by units, as loads."""
    count, num_units = problem.num_devices, problem.num_units
    time_s = np.zeros((num_units, count))
    np.add.at(time_s, problem.unit_of_op, problem.time_s)
    items: list[dict[int, None]] = [{} for _ in range(num_units)]
    for op, unit in enumerate(problem.unit_of_op.tolist()):
        kept_here = problem.weights[problem.weight_start[op] : problem.weight_start[op + 1]]
        items[unit].update(dict.fromkeys(kept_here.tolist()))
    item_start, item_list = csr([list(entry) for entry in items])
    start, readers = problem.readers
    sources: list[list[int]] = [[] for _ in range(problem.num_ops)]
    for source, reader, _ in problem.edges.tolist():
        sources[reader].append(source)
    source_start, source_list = csr([sorted(set(entry)) for entry in sources])
    read_by = [sorted(set(problem.unit_of_op[readers[start[tensor] : start[tensor + 1]]].tolist())
                      - {int(problem.unit_of_op[problem.producer[tensor]])}) for tensor in range(problem.num_tensors)]
    kept = [tensor for tensor in range(problem.num_tensors) if read_by[tensor]]
    empty = np.zeros(0, dtype=np.int64)
    arrays = Loads(
        time_s=time_s, core=problem.core_of_device, num_cores=int(problem.core_of_device.max(initial=-1)) + 1,
        owner=empty, reader_start=empty, readers=empty, touch_s=np.zeros((len(kept), count)), own_start=empty,
        owned=empty, read_start=empty, reads=empty, latency_s=problem.latency_s, s_per_byte=problem.s_per_byte,
        tensor_bytes=problem.tensor_bytes[kept], given_row=problem.given_row[kept], given_s=problem.given_s,
        resource_start=problem.resource_start, resources=problem.resources, num_resources=problem.num_resources,
        item_start=item_start, items=item_list, item_bytes=problem.weight_bytes, capacity=problem.capacity,
        node_unit=problem.unit_of_op, source_start=source_start, sources=source_list)
    arrays = with_tensors(arrays, problem.unit_of_op[problem.producer[kept]], [read_by[tensor] for tensor in kept])
    names = [""] * num_units
    for op in reversed(range(problem.num_ops)):
        names[problem.unit_of_op[op]] = problem.op_names[op]
    return LoadProblem(arrays=arrays, unit_names=tuple(names), device_names=problem.device_names,
                       class_of_device=_classes(problem), contiguous=contiguous)


def _classes(problem: PlaceProblem) -> I64:
    """Return a number for each device, the same for those that any placement may exchange.

    Two devices may if their times and memory are equal, they look alike to every third device and to each other, and
    what transfers occupy does not tell them apart: nothing, a port for each way, or a link of its own for each pair.
    """
    count = problem.num_devices
    label = np.arange(count, dtype=np.int64)
    if not _has_plain_resources(problem):
        return label
    for device in range(count):
        for other in range(device):
            if label[other] == other and _is_alike(problem, device, other):
                label[device] = other
                break
    return label


def _has_plain_resources(problem: PlaceProblem) -> bool:
    count = problem.num_devices
    lists = [tuple(problem.resources[problem.resource_start[pair] : problem.resource_start[pair + 1]].tolist())
             for pair in range(count * count)]
    ports = [() if pair // count == pair % count else (pair // count, count + pair % count)
             for pair in range(count * count)]
    own = [item for pair, item in enumerate(lists) if pair // count != pair % count]
    is_own = all(len(item) == 1 for item in own) and len(set(own)) == len(own)
    return not any(lists) or lists == ports or is_own


def _is_alike(problem: PlaceProblem, one: int, other: int) -> bool:
    swap = np.arange(problem.num_devices)
    swap[[one, other]] = other, one
    has_own_core = [int((problem.core_of_device == problem.core_of_device[index]).sum()) == 1 for index in (one, other)]
    tables = (problem.latency_s, problem.s_per_byte, *problem.given_s)
    return (all(has_own_core) and bool((problem.time_s[:, one] == problem.time_s[:, other]).all())
            and bool(problem.capacity[one] == problem.capacity[other])
            and all((table == table[np.ix_(swap, swap)]).all() for table in tables))


def _not_placed(problem: PlaceProblem, *, contiguous: bool, is_proven: bool) -> NoFeasiblePlan:
    """Return the error for problems that would fit the memory, if that were all."""
    has_limits = bool(np.isfinite(problem.capacity).any())
    wanted = ["every operator gets what it reads"] + ["no path leaves a device and comes back"] * contiguous + [
        "all fits the memory"] * has_limits
    hints = ["without --contiguous"] * contiguous + ["links between more devices"] + ["more memory"] * has_limits
    return NoFeasiblePlan(f"{'there is no placement' if is_proven else 'no placement was found'} of {problem.name!r} "
                          f"in which {' and '.join(wanted)}. Try {' or '.join(hints)}.")
