"""The smallest period of tiny problems, by trying every steady state of K micro-batches per period.

In a steady state task ``b`` of micro-batch ``m`` starts at ``s[b] + T * (m + q[b])`` with ``0 <= s[b] < T``. Given the
order of the ``s`` on every resource and the whole numbers ``q``, the smallest ``T`` is the largest ratio (time / periods)
of a circle of constraints:

    b after a:                      s[b] >= s[a] + time[a] + delay - T * (q[b] - q[a])     so q[b] >= q[a]
    b next after a on a resource:   s[b] >= s[a] + time[a]
    first b after last a:           s[b] >= s[a] + time[a] - T

Before period ``p`` task ``b`` has run ``p - q[b]`` times; where a micro-batch gives back all it takes, a device therefore
holds ``- sum(memory[b] * q[b])`` at the start of each period. K micro-batches per period are one micro-batch of the
problem with K copies of its blocks. The answer is exact for the given K and largest ``q``, and so a number that the
smallest period over all steady states does not exceed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from fractions import Fraction

from weft.search.schedule.problem import Block, ScheduleProblem, Transfer

Constraint = tuple[int, int, Fraction, int]
"""(a, b, time, periods): b starts at least ``time - T * periods`` after a."""


@dataclass(frozen=True)
class SteadyState:
    """A steady state: its period, and the order and shifts that give it."""

    period: Fraction
    orders: tuple[tuple[int, ...], ...]
    shifts: tuple[int, ...]


def gives_back_all(problem: ScheduleProblem) -> bool:
    """Return whether a micro-batch leaves every device with limited memory as it found it."""
    return all(limit is None or sum(Fraction(problem.blocks[task].memory) for task in tasks if task < problem.num_blocks) == 0
               for limit, tasks in zip(problem.device_memory, problem.resource_tasks, strict=False))


def can_repeat(problem: ScheduleProblem) -> bool:
    """Return whether a schedule of any number of micro-batches can be run again and again, one after the other."""
    return all(limit is None or sum(Fraction(problem.blocks[task].memory) for task in tasks if task < problem.num_blocks) <= 0
               for limit, tasks in zip(problem.device_memory, problem.resource_tasks, strict=False))


def copies(problem: ScheduleProblem, number: int) -> ScheduleProblem:
    """Return the problem whose micro-batch is so many of this problem's."""
    size = problem.num_blocks
    blocks = tuple(Block(name=f"{block.name}.{copy}", devices=block.devices, time=block.time, memory=block.memory,
                         after=tuple(index + copy * size for index in block.after))
                   for copy in range(number) for block in problem.blocks)
    transfers = tuple(Transfer(source=item.source + copy * size, target=item.target + copy * size, time=item.time,
                               link=item.link) for copy in range(number) for item in problem.transfers)
    return changed(problem, blocks=blocks, transfers=transfers)


def num_candidates(problem: ScheduleProblem, number: int, max_shift: int) -> int:
    """Return at most how many steady states ``min_period`` would try."""
    import math

    orders = math.prod(math.factorial(len(tasks) * number) for tasks in problem.resource_tasks)
    return orders * (max_shift + 1) ** (problem.num_tasks * number)


def min_period(problem: ScheduleProblem, number: int = 1, max_shift: int = 2) -> SteadyState | None:
    """Return the steady state of smallest period for so many micro-batches per period, or None if memory admits none."""
    assert gives_back_all(problem)
    many = copies(problem, number)
    best: SteadyState | None = None
    orders = [list(itertools.permutations(tasks)) for tasks in many.resource_tasks]
    shifts = list(_shifts(many, problem.num_blocks, number, max_shift))
    work = max(sum(Fraction(many.task_times[task]) for task in tasks) for tasks in many.resource_tasks)
    for chosen in itertools.product(*orders):
        fixed = _order_constraints(many, chosen)
        for shift in shifts if best is None or best.period > work else ():
            if _fits(many, chosen, shift):
                bound = best.period if best else None
                period = _smallest(many.num_tasks, [*fixed, *_edge_constraints(many, shift)], bound)
                if period is not None:
                    best = SteadyState(period, chosen, shift)
    return best


def _shifts(many: ScheduleProblem, size: int, number: int, max_shift: int) -> Iterator[tuple[int, ...]]:
    """Yield shifts that grow along dependencies; renaming micro-batches lets the least of each copy be 0."""
    for shift in itertools.product(range(max_shift + 1), repeat=many.num_tasks):
        if all(shift[edge.source] <= shift[edge.target] for edge in many.edges) and all(
                min(shift[copy * size:(copy + 1) * size]) == 0 for copy in range(number)):
            yield shift


def _fits(many: ScheduleProblem, orders: Sequence[Sequence[int]], shift: Sequence[int]) -> bool:
    for limit, order in zip(many.device_memory, orders, strict=False):
        if limit is not None:
            amounts = [Fraction(many.memory_of(task)) for task in order]
            base = -sum((amount * shift[task] for amount, task in zip(amounts, order, strict=True)), Fraction(0))
            if max(itertools.accumulate(amounts, initial=base)) > limit:
                return False
    return True


def _order_constraints(many: ScheduleProblem, orders: Sequence[Sequence[int]]) -> list[Constraint]:
    result = []
    for order in orders:
        for place, task in enumerate(order):
            last = place == len(order) - 1
            result.append((task, order[0] if last else order[place + 1], Fraction(many.task_times[task]), int(last)))
    return result


def _edge_constraints(many: ScheduleProblem, shift: Sequence[int]) -> list[Constraint]:
    return [(edge.source, edge.target, Fraction(many.task_times[edge.source]) + Fraction(edge.delay),
             shift[edge.target] - shift[edge.source]) for edge in many.edges]


def _smallest(num_tasks: int, constraints: Sequence[Constraint], below: Fraction | None) -> Fraction | None:
    """Return the smallest period that meets the constraints, or None if there is none or none below the given one."""
    period = Fraction(0)
    while below is None or period < below:
        circle = _late_circle(num_tasks, constraints, period)
        if circle is None:
            return period
        time, periods = sum(item[2] for item in circle), sum(item[3] for item in circle)
        if periods == 0:
            return None
        period = time / periods
    return None


def _late_circle(num_tasks: int, constraints: Sequence[Constraint], period: Fraction) -> list[Constraint] | None:
    """Return constraints in a circle that ask for more time than the period gives, or None (Bellman-Ford)."""
    scale = math.lcm(period.denominator, *(item[2].denominator for item in constraints))
    lap = period.numerator * (scale // period.denominator)
    steps = [(source, target, time.numerator * (scale // time.denominator) - lap * periods)
             for source, target, time, periods in constraints]  # whole numbers: as exact as fractions, and faster
    starts = [0] * num_tasks
    via: list[Constraint | None] = [None] * num_tasks
    for _ in range(num_tasks + 1):
        moved = None
        for place, (source, target, step) in enumerate(steps):
            start = starts[source] + step
            if start > starts[target]:
                starts[target], via[target], moved = start, constraints[place], target
        if moved is None:
            return None
    for _ in range(num_tasks):
        item = via[moved]
        assert item is not None
        moved = item[0]
    circle = []
    task = moved
    while not circle or task != moved:
        item = via[task]
        assert item is not None
        circle.append(item)
        task = item[0]
    return circle
