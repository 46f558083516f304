"""What is held on a device from when to when: memory as intervals between a block that takes and one that releases.

Every release is matched with blocks of the same micro-batch that took before it (its ancestors), so that memory becomes
a sum of intervals, which a constraint solver handles far better than running sums. Any matching describes the same
levels. What is never released is held to the end, what is released without having been taken is held from the begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from weft.search.schedule.problem import ScheduleProblem

_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """``amount`` on a device from the start of ``take`` to the end of ``release``."""

    device: int
    take: int | None
    """None: held from the begin."""
    release: int | None
    """None: held to the end."""
    amount: float


def balanced_holds(problem: ScheduleProblem) -> dict[int, list[tuple[int, int, float]]]:
    """Return (take, release, amount) by device, for the devices where every take is matched with a release.

    Only there is what is held never less than nothing, so that holds bound how many micro-batches there is room for.
    """
    result: dict[int, list[tuple[int, int, float]]] = {}
    unmatched = set()
    for hold in find_holds(problem):
        if hold.take is None or hold.release is None:
            unmatched.add(hold.device)
        else:
            result.setdefault(hold.device, []).append((hold.take, hold.release, hold.amount))
    return {device: holds for device, holds in result.items() if device not in unmatched}


def find_holds(problem: ScheduleProblem) -> tuple[Hold, ...]:
    """Return the holds of one micro-batch on all devices with a limit; their sums are the blocks' amounts."""
    ancestors = find_ancestors(problem)
    holds: list[Hold] = []
    for device in range(problem.num_devices):
        if problem.device_memory[device] is not None:
            holds += _match(problem, device, ancestors)
    return tuple(holds)


def find_ancestors(problem: ScheduleProblem) -> list[int]:
    """Return for each task the set of tasks that must end before it, as a bit mask."""
    masks = [0] * problem.num_tasks
    for task in problem.topological:
        for edge in problem.predecessors[task]:
            masks[task] |= masks[edge.source] | 1 << edge.source
    return masks


def _match(problem: ScheduleProblem, device: int, ancestors: list[int]) -> list[Hold]:
    amounts = {task: problem.memory_of(task) for task in problem.resource_tasks[device]}
    takes = {task: amount for task, amount in amounts.items() if amount > 0}
    releases = {task: -amount for task, amount in amounts.items() if amount < 0}
    smallest = _TOLERANCE * max([1e-300, *takes.values(), *releases.values()])
    # The latest possible take first, and releases with the fewest candidates first: short holds, few left over.
    order = {task: place for place, task in enumerate(problem.topological)}
    mask = sum(1 << task for task in takes)
    open_takes = sorted(takes, key=lambda task: -order[task])
    holds = []
    for release in sorted(releases, key=lambda task: ((ancestors[task] & mask).bit_count(), order[task])):
        for take in [task for task in open_takes if ancestors[release] >> task & 1]:
            amount = min(takes[take], releases[release])
            if amount <= smallest:
                break
            holds.append(Hold(device=device, take=take, release=release, amount=amount))
            takes[take] -= amount
            releases[release] -= amount
            if takes[take] <= smallest:
                open_takes.remove(take)
    holds += [Hold(device=device, take=task, release=None, amount=left)
              for task, left in takes.items() if left > smallest]
    holds += [Hold(device=device, take=None, release=task, amount=left)
              for task, left in releases.items() if left > smallest]
    return holds
