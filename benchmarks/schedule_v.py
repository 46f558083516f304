"""Section ``v-shape`` of ``bench_schedule``: two stages on each device, over all devices and back, at any memory.

The search at 1F1B's memory (p micro-batches of both stages on p devices), at V-Half's, at a half and at a third, beside
the named schedules that fit there: none may have a shorter makespan, or take less for each further micro-batch. Where
none fits, they run in groups of so few micro-batches that they do (``best_in_groups``).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final

from benchmarks.schedule_common import Options, at_most, solve
from benchmarks.schedule_random import best_in_groups
from benchmarks.sections import Row
from weft.search.schedule.named import named_schedules
from weft.search.schedule.problem import Block, ScheduleProblem, Transfer

PAPER: Final = (8, 24)
"""Devices and micro-batches of the papers on V schedules."""
UNSEEN: Final = ((4, 12), (6, 18), (12, 24), (16, 32))
KINDS: Final = ("equal", "unequal", "unequal, delays", "unequal, links")
HALVES: Final = {"1F1B's": lambda p: 2 * p, "V-Half's": lambda p: (p + 2) // 2 * 2, "1/2": lambda p: p,
                 "1/3": lambda p: 2 * p // 3}
"""Half stages that a device may hold: one micro-batch leaves two."""


def v_shape(options: Options) -> Iterator[Row]:
    """Yield makespans and periods beside those of the named schedules at the same memory."""
    for num_devices, number in (PAPER, *UNSEEN):
        for kind in KINDS:
            for part, halves in HALVES.items():
                yield _row(v_problem(num_devices, kind, memory=halves(num_devices)), number, options,
                           f"{num_devices} devices, {kind}, memory {part} ({halves(num_devices)} half stages), N={number}")


def v_problem(num_devices: int, kind: str, *, memory: float) -> ScheduleProblem:
    """Return the problem of a V on so many devices, split backward; equal times are 1 for F, I and W of half a device.

    Unequal ones differ by kind of block, and by a fifth among stages; a message then takes a tenth of a forward.
    """
    rng = Random(f"{num_devices} {kind}")
    places = [*range(num_devices), *reversed(range(num_devices))]
    last, is_equal = len(places) - 1, kind == "equal"
    scale = {phase: 1.0 if is_equal else rng.uniform(0.7, 1.4) for phase in "FIW"}
    weight = [1.0 if is_equal else rng.uniform(0.8, 1.2) for _ in places]
    rows = [("F", stage, (stage - 1,) if stage else ()) for stage in range(last + 1)]
    rows += [("I", stage, (stage,) if stage == last else (stage, 2 * last - stage)) for stage in reversed(range(last + 1))]
    rows += [("W", stage, (2 * last + 1 - stage,)) for stage in range(last + 1)]
    blocks = tuple(Block(name=f"{phase.lower()}{stage}", devices=(places[stage],), time=scale[phase] * weight[stage],
                         memory={"F": 1.0, "I": 0.0, "W": -1.0}[phase], after=after) for phase, stage, after in rows)
    moves = tuple(Transfer(source=source, target=target, time=0.1 * scale["F"], link=_link(blocks[source], blocks[target])
                           if kind.endswith("links") else None)
                  for target, block in enumerate(blocks) for source in block.after
                  if "," in kind and blocks[source].devices != block.devices)
    return ScheduleProblem(device_names=tuple(f"d{device}" for device in range(num_devices)), blocks=blocks,
                           device_memory=(memory,) * num_devices, transfers=moves)


def _link(one: Block, other: Block) -> str:
    return "-".join(f"d{device}" for device in sorted((one.devices[0], other.devices[0])))


def _row(problem: ScheduleProblem, number: int, options: Options, what: str) -> Row:
    result = solve(problem, number, options.time_limit)
    each = result["period"] / result["period_microbatches"]
    figure = (f"makespan {result['makespan']:.6g} (bound {result['makespan_bound']:.6g}, by {result['by']}), "
              f"{each:.6g} for each micro-batch (bound {result['period_bound']:.6g}); {result['cpu_s']:.1f} CPU-s")
    named = result["named"]
    if not named:
        groups = best_in_groups(problem, number)
        return Row(what, figure, f"named schedules in groups {groups:.6g}", at_most(result["makespan"], groups), result)
    fastest, rates = min(named, key=lambda name: float(named[name])), _rates(problem)
    lowest = min(rates, key=lambda name: rates[name])
    return Row(what, figure, f"{fastest} {named[fastest]:.6g}; {lowest} {rates[lowest]:.6g} each",
               at_most(result["makespan"], named[fastest])
               and at_most(each, max(rates[lowest], result["period_bound"])), result)


def _rates(problem: ScheduleProblem) -> dict[str, float]:
    """Return the time that each named schedule that fits takes for one more micro-batch in the long run.

    That is from 12p to 24p of them: with 16 devices, V-Half takes less from 4p to 8p than ever after.
    """
    few = 12 * problem.num_devices
    short, long = (named_schedules(problem, number) for number in (few, 2 * few))
    return {name: (long[name].makespan - short[name].makespan) / few for name in long if name in short}
