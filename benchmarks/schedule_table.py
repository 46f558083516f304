"""Sections ``table``, ``steady`` and ``scale`` of ``bench_schedule``: known problems against known values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.schedule_common import Options, at_most, solve, solve_steady
from benchmarks.schedule_shapes import shape
from benchmarks.sections import Row
from weft.search.schedule.problem import ScheduleProblem, load_problem


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with the values to reach."""

    file: str
    reference: str
    """What another planner finds: for Tessel period, makespan of 8 micro-batches, CPU seconds."""
    makespans: dict[int, float] = field(default_factory=dict)
    """By number of micro-batches."""
    period: float | None = None
    """Per micro-batch."""
    aims: dict[int, float] = field(default_factory=dict)
    proven: tuple[int, ...] = ()
    """Numbers of micro-batches whose makespan must be proven optimal."""


CASES = (
    Case("v-train-mem4", "Tessel 4, 44-47, 1 s", {8: 44, 128: 524}, 4),
    Case("x-train-mem4", "Tessel 8, 74 (N=128 1034), 12 s", {8: 70, 128: 1033}, 8, aims={128: 1030}),
    Case("m-train-mem6", "Tessel 6, 60, 66 s", {8: 60, 128: 780}, 6),
    Case("nn-train-mem6", "Tessel unfinished after 149 s (fast mode, more memory: 8, 82-84)", {6: 60, 8: 80, 128: 1044}, 8,
         aims={8: 76, 128: 1036}, proven=(6,)),
    Case("k-train-mem6", "Tessel 6, 52-54, 4 s", {8: 52, 128: 772}, 6),
    *(Case(f"{name}-infer", f"Tessel {period}", {8: makespan}, period, proven=(8,)) for name, period, makespan in (
        ("v", 1, 11), ("x", 2, 18), ("m", 2, 19), ("nn", 3, 27), ("k", 2, 17))),
    Case("v-train-mem3", "Tessel 8", {8: float("inf")}, 16 / 3),
    Case("m-train-mem5", "Tessel 7", {8: float("inf")}, 6),
    Case("zb-p4", "zero-bubble's scheduler N=8 27", {8: 27}),
    Case("zbv-p4", "ZBV N=8 25.5, N=12 37.5", {8: 25.5, 12: 37.5}),
    Case("zbv-p4-comm", "ZBV 27.1", {8: 27.1}),
)


def cpu_limit(num_microbatches: int) -> float:
    return 20.0 if num_microbatches >= 128 else 10.0


def table(options: Options) -> Iterator[Row]:
    """Yield a row for every problem and number of micro-batches."""
    for case in CASES:
        for number, makespan in case.makespans.items():
            result = solve(options.folder / f"{case.file}.json", number, options.time_limit)
            limit = cpu_limit(number)
            wanted = [*([f"makespan {makespan:g}"] if makespan < float("inf") else []),
                      *([f"aim {case.aims[number]:g}"] if number in case.aims else []),
                      *([f"period {case.period:.6g} each"] if case.period else []),
                      *(["optimal"] if number in case.proven else []), f"{limit:g} CPU-s"]
            missed = number in case.aims and not at_most(result["makespan"], case.aims[number])
            figure = describe(result) + ("; aim NOT reached" if missed else "")
            yield Row(f"{case.file}, N={number}", figure, f"{case.reference}; to reach: {', '.join(wanted)}",
                      is_reached(case, number, result), result)


def is_reached(case: Case, number: int, result: dict[str, Any]) -> bool:
    """Return whether the result has all the case asks for."""
    each = result["period"] / result["period_microbatches"] if result["period"] is not None else None
    return (at_most(result["makespan"], case.makespans[number]) and not result["problems"]
            and (case.period is None or at_most(each, case.period))
            and (number not in case.proven or result["status"] == "optimal") and result["cpu_s"] <= cpu_limit(number))


def describe(result: dict[str, Any]) -> str:
    """Return period, makespan and CPU seconds with their bounds."""
    named = min(result["named"].items(), key=lambda item: item[1], default=None)
    return (f"{describe_period(result)}; makespan {result['makespan']:.6g} (bound {result['makespan_bound']:.6g}, "
            f"{result['status']}, by {result['by']}); {result['cpu_s']:.2f} CPU-s ({result['search_cpu_s']:.2f} without "
            f"imports)" + (f"; best named: {named[0]} {named[1]:.6g}" if named else "")
            + "".join(f"; NOT ALLOWED: {line}" for line in result["problems"][:1]))


def describe_period(result: dict[str, Any]) -> str:
    if result["period"] is None:
        return "no period"
    number = result["period_microbatches"]
    return (f"period {result['period']:.6g}" + (f" for {number}, {result['period'] / number:.6g} each" if number > 1 else "")
            + f" (bound {result['period_bound']:.6g})")


def steady(options: Options) -> Iterator[Row]:
    """Yield the steady state alone of every problem of the table."""
    for case in CASES:
        problem = load_problem(options.folder / f"{case.file}.json")
        goal = case.period if case.period is not None else max(problem.device_work)
        yield _steady_row(case.file, problem, goal, 1.0, "the table's period" if case.period else "the work bound")


def _steady_row(what: str, problem: ScheduleProblem, goal: float, limit: float, reason: str) -> Row:
    result = solve_steady(problem, limit)
    each = None if result["period"] is None else result["period"] / result["period_microbatches"]
    return Row(f"{what}: steady state alone",
               f"{describe_period(result)}; {result['search_cpu_s']:.2f} CPU-s ({result['cpu_s']:.2f} with imports)",
               f"{goal:.6g} ({reason}) in {limit:g} CPU-s", at_most(each, goal) and result["search_cpu_s"] <= limit, result)


def memory_for(name: str, num_devices: int) -> float:
    """Return memory as in the 4-device files: 1F1B's for V; half as much again for M, whose wide blocks need slack."""
    return num_devices * (1.5 if name == "m" else 1.0)


def scale(options: Options) -> Iterator[Row]:
    """Yield steady states on 16 devices and schedules of 256 micro-batches on 32."""
    for name in ("v", "m"):
        problem = shape(name, 16, memory=memory_for(name, 16))
        yield _steady_row(f"shape {name}, 16 devices", problem, max(problem.device_work), 60.0, "the work bound")
    for name in ("v", "m"):
        problem = shape(name, 32, memory=memory_for(name, 32))
        result = solve(problem, 256, options.time_limit)
        named = min(result["named"].values(), default=float("inf"))
        yield Row(f"shape {name}, 32 devices, N=256", describe(result), "not above the best named schedule, in 120 CPU-s",
                  at_most(result["makespan"], named) and not result["problems"] and result["cpu_s"] <= 120, result)
