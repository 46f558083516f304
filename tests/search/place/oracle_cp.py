"""The exact latency by a constraint solver, placement and times in one model: shares no idea with ``oracle``.

Every operator has an optional interval on each device, every tensor one for each ordered pair of devices, present when
its writer is on the first and some reader on the second. Times become whole numbers by ``SCALE``; problems whose times
do not are refused. What takes no time occupies nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from weft.search.place.problem import PlaceProblem

SCALE = 840
"""Of the random problems: bandwidths are 1 to 8, all else is whole."""


def min_latency_cp(problem: PlaceProblem) -> float | None:
    """Return the best latency, or None where no placement is possible."""
    from ortools.sat.python import cp_model

    assert not problem.has_lifetimes
    model = _Model(cp_model.CpModel(), problem)
    model.build()
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model.cp)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), solver.status_name(status)
    return solver.objective_value / SCALE if status == cp_model.OPTIMAL else None


def _whole(seconds: float) -> int:
    amount = round(seconds * SCALE)
    assert abs(amount - seconds * SCALE) < 1e-6, f"{seconds} s is no multiple of 1/{SCALE} s"
    return amount


class _Model:
    def __init__(self, cp: Any, problem: PlaceProblem) -> None:
        self.cp, self.problem = cp, problem
        times = problem.time_s[np.isfinite(problem.time_s)].sum() + sum(
            problem.transfer_s(tensor, source, target) for tensor in range(problem.num_tensors)
            for source in range(problem.num_devices) for target in range(problem.num_devices)
            if np.isfinite(problem.transfer_s(tensor, source, target)))
        self.horizon = _whole(times)
        self.on_core: dict[int, list[Any]] = defaultdict(list)
        self.on_way: dict[int, list[Any]] = defaultdict(list)
        units, devices = range(problem.num_units), range(problem.num_devices)
        self.at = [[cp.new_bool_var(f"unit{unit} on {device}") for device in devices] for unit in units]
        self.start = [cp.new_int_var(0, self.horizon, f"start{op}") for op in range(problem.num_ops)]

    def build(self) -> None:
        problem, cp = self.problem, self.cp
        for row in self.at:
            cp.add_exactly_one(row)
        self._memory()
        latest = cp.new_int_var(0, self.horizon, "latency")
        for op in range(problem.num_ops):
            cp.add(latest >= self.end(op))
            self._operator(op)
        start, readers = problem.readers
        for tensor in range(problem.num_tensors):
            self._tensor(tensor, readers[start[tensor] : start[tensor + 1]].tolist())
        for items in (*self.on_core.values(), *self.on_way.values()):
            cp.add_no_overlap(items)
        cp.minimize(latest)

    def place(self, op: int, device: int) -> Any:
        return self.at[self.problem.unit_of_op[op]][device]

    def end(self, op: int) -> Any:
        times = self.problem.time_s[op]
        return self.start[op] + sum(_whole(times[device]) * self.place(op, device)
                                    for device in range(self.problem.num_devices) if np.isfinite(times[device]))

    def _operator(self, op: int) -> None:
        for device, seconds in enumerate(self.problem.time_s[op].tolist()):
            if seconds == np.inf:
                self.cp.add(self.place(op, device) == 0)
            elif seconds > 0:
                self.on_core[int(self.problem.core_of_device[device])].append(
                    self.cp.new_optional_fixed_size_interval_var(self.start[op], _whole(seconds),
                                                                 self.place(op, device), ""))

    def _tensor(self, tensor: int, readers: list[int]) -> None:
        problem, cp = self.problem, self.cp
        writer = int(problem.producer[tensor])
        for reader in readers:
            cp.add(self.start[reader] >= self.end(writer))
        for target in range(problem.num_devices):
            sent = cp.new_int_var(0, self.horizon, f"tensor{tensor} to {target}")
            cp.add(sent >= self.end(writer))
            for source in range(problem.num_devices):
                if source == target or not readers:
                    continue
                is_sent = cp.new_bool_var("")
                for reader in readers:
                    cp.add_bool_or([is_sent, self.place(writer, source).negated(),
                                    self.place(reader, target).negated()])
                seconds = problem.transfer_s(tensor, source, target)
                if seconds == np.inf:
                    cp.add(is_sent == 0)
                    continue
                for reader in readers:
                    cp.add(self.start[reader] >= sent + _whole(seconds)).only_enforce_if(
                        [self.place(writer, source), self.place(reader, target)])
                pair = source * problem.num_devices + target
                for way in problem.resources[problem.resource_start[pair] : problem.resource_start[pair + 1]].tolist():
                    if seconds > 0:
                        self.on_way[way].append(
                            cp.new_optional_fixed_size_interval_var(sent, _whole(seconds), is_sent, ""))

    def _memory(self) -> None:
        problem, cp = self.problem, self.cp
        for device, limit in enumerate(problem.capacity.tolist()):
            if limit == np.inf:
                continue
            held = [cp.new_bool_var("") for _ in problem.weight_bytes]
            for op in range(problem.num_ops):
                for item in problem.weights[problem.weight_start[op] : problem.weight_start[op + 1]].tolist():
                    cp.add_implication(self.place(op, device), held[item])
            cp.add(sum(int(size) * keep for size, keep in zip(problem.weight_bytes, held, strict=True)) <= int(limit))
