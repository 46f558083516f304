"""Schedules of small problems to hold bounds against: the oracle's optimum, and random ones played as early as possible."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from random import Random

import numpy as np

from tests.search.schedule.oracle import Instance, World, min_makespan, place
from tests.search.schedule.random_problems import RandomProblem, random_problem
from weft.search.schedule.problem import ScheduleProblem
from weft.search.schedule.schedule import Schedule


@cache
def allowed_schedules(seed: int, *, max_instances: int = 12, num_random: int = 4) -> tuple[RandomProblem, tuple[Schedule, ...]]:
    """Return the random problem of that seed, and an optimal schedule (first) and random ones that memory admits."""
    case = random_problem(seed, max_instances=max_instances)
    answer = min_makespan(case.problem, case.num_microbatches)
    sequences = [] if answer is None else [answer.sequence]
    for number in range(num_random):
        sequence = random_sequence(case.problem, case.num_microbatches, Random(f"{seed} {number}"))
        if sequence is not None:
            sequences.append(sequence)
    return case, tuple(to_schedule(case.problem, place(case.problem, sequence)) for sequence in sequences)


def random_sequence(problem: ScheduleProblem, num_microbatches: int, rng: Random, *,
                    ignore_memory: bool = False) -> tuple[Instance, ...] | None:
    """Return all tasks in a random order that respects dependencies; None where it ran into the memory limit."""
    world = World(problem)
    masks, sequence = [0] * num_microbatches, []
    while len(sequence) < num_microbatches * world.num_tasks:
        ready = [(task, index) for index, mask in enumerate(masks) for task in range(world.num_tasks)
                 if not mask >> task & 1 and mask & world.needs[task] == world.needs[task]
                 and (ignore_memory or world.fits(task, masks))]
        if not ready:
            return None
        task, index = rng.choice(ready)
        masks[index] |= 1 << task
        sequence.append((task, index))
    return tuple(sequence)


def to_schedule(problem: ScheduleProblem, starts: dict[Instance, Fraction]) -> Schedule:
    num_microbatches = 1 + max(index for _, index in starts)
    return Schedule(problem=problem, starts=np.asarray([[float(starts[task, index]) for index in range(num_microbatches)]
                                                        for task in range(problem.num_tasks)]))


def in_order(starts: np.ndarray) -> np.ndarray:
    """Return the same schedule with the micro-batches of every task renamed, so that they are in order."""
    return np.sort(starts, axis=1)
