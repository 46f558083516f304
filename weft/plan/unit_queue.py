"""Where the collectives of units stand among the computes of a rank.

Along the computes of the stages whose pieces a group of ranks keeps, in the group's order:

    F u0   F u1   F u2   B u2   B u1   B u0              computes
    G u0   G u1 | F u0 | G u2 | F u1 | F u2 | G u1 | B u2 | G u0   R u2 | B u1 | R u1 | B u0 | R u0

A unit is gathered (``G``) for a compute where it is not there, one compute ahead; it stays until the next compute of
the group does not need it (``u2`` for its backward), or, where the storage says so, until no micro-batch is between its
forward and its backward. What was gathered ahead comes before what is scattered (``R``), because it is needed sooner.
Gradients are scattered when those of a micro-batch, or of the step, are final on the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.plan.layout import Layout
from weft.plan.plan import Plan
from weft.plan.program import Phase
from weft.plan.units import Unit

Action = tuple[int, Phase, int]
"""(instance, phase, micro-batch); for a collective the first number says which (``collective_of``)."""
Line = Sequence[tuple[int, Phase, int]]
"""(stage, phase, micro-batch) of the computes of a group."""


def collective_of(layout: Layout, action: Action) -> tuple[int, int]:
    """Return the bucket of a collective, and the instance of the group's first rank for whose compute it comes."""
    return divmod(-1 - action[0], len(layout.instances))


def with_unit_actions(plan: Plan, layout: Layout, queues: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Return the queues of all ranks with the collectives of units among the computes."""
    before: list[dict[int, list[tuple[int, Action]]]] = [{} for _ in queues]
    behind: list[dict[int, list[tuple[int, Action]]]] = [{} for _ in queues]
    instance_of = {(item.stage, rank): index for index, item in enumerate(layout.instances) for rank in item.ranks}
    groups: dict[tuple[int, ...], list[Unit]] = {}
    for unit in layout.units:
        groups.setdefault(unit.ranks, []).append(unit)
    for ranks, units in groups.items():
        stages = {stage for unit in units for stage in unit.stages}
        lines = [[place for place, action in enumerate(queues[rank]) if layout.instances[action[0]].stage in stages]
                 for rank in ranks]
        first = queues[ranks[0]]  # all ranks of a group have the same line
        line = [(layout.instances[first[place][0]].stage, *first[place][1:]) for place in lines[0]]
        of_stage: dict[int, list[int]] = {}
        for place, (stage, _, _) in enumerate(line):
            of_stage.setdefault(stage, []).append(place)
        for unit in units:
            uses = sorted(place for stage in unit.stages for place in of_stage.get(stage, ()))
            for bucket, found, tables, ahead in ((unit.gather, _gathers(unit, line, uses), before, 1),
                                                 (unit.reduce, _scatterings(unit, line, uses), behind, 0)):
                for place in found if bucket >= 0 else ():
                    stage, phase, microbatch = line[place]
                    code = -1 - (bucket * len(layout.instances) + instance_of[stage, ranks[0]])
                    for rank, places in zip(ranks, lines, strict=True):
                        tables[rank].setdefault(places[max(0, place - ahead)], []).append(
                            (place, (code, phase, microbatch)))
    return [_merged(queue, first, then) for queue, first, then in zip(queues, before, behind, strict=True)]


def sums_pending(layout: Layout, queues: Sequence[Sequence[Action]]) -> dict[int, int]:
    """Return for each sum over groups how many scatterings it waits for."""
    pending: dict[int, int] = {}
    for unit in layout.units:
        for action in queues[unit.ranks[0]] if unit.sums else ():
            if action[0] < 0 and collective_of(layout, action)[0] == unit.reduce:
                for bucket in unit.sums:
                    pending[bucket] = pending.get(bucket, 0) + 1
    return pending


def _merged(queue: Sequence[Action], before: dict[int, list[tuple[int, Action]]],
            behind: dict[int, list[tuple[int, Action]]]) -> list[Action]:
    result: list[Action] = []
    for place in range(len(queue) + 1):
        result += [action for _, action in sorted(before.get(place, ()), key=lambda item: item[0])]
        result += [action for _, action in behind.get(place - 1, ())]
        result += queue[place : place + 1]
    return result


def _gathers(unit: Unit, line: Line, uses: Sequence[int]) -> Iterable[int]:
    """Yield the places in the line of the computes for which the unit is gathered, of those that use it."""
    known, is_there = set(uses), False
    opened: set[tuple[int, int]] = set()
    for place in uses:
        stage, phase, microbatch = line[place]
        if not is_there:
            yield place
        if phase == Phase.F:
            opened.add((stage, microbatch))
        elif phase != Phase.I:
            opened.discard((stage, microbatch))
        is_there = place + 1 in known or (unit.storage.keeps and bool(opened))


def _scatterings(unit: Unit, line: Line, uses: Sequence[int]) -> Iterable[int]:
    """Yield the places in the line of the computes behind which gradients of the unit are scattered."""
    last: dict[int, int] = {}
    for place in uses:
        _, phase, microbatch = line[place]
        if phase in (Phase.B, Phase.W):
            last[-1 if unit.storage.scatters_once else microbatch] = place
    yield from last.values()
