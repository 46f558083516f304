"""Seeded random schedule problems, small enough for the oracle: ``random_problem(seed)``.

Pipelines with backward blocks (whole or split) and arbitrary graphs with branches; one or several devices per block;
memory that is given back, kept, or larger than a device; both conventions of ``free_at``; transfers as delays and on
links that several pairs of blocks share, in both directions; whole and real times, some of them zero.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random

from weft.search.schedule.problem import Block, Copy, Overlap, ScheduleProblem, Transfer

MAX_INSTANCES = 12


@dataclass(frozen=True)
class RandomProblem:
    """A problem and how many micro-batches to ask for."""

    seed: int
    problem: ScheduleProblem
    num_microbatches: int


def random_problem(seed: int, *, max_instances: int = MAX_INSTANCES, whole_times: bool | None = None) -> RandomProblem:
    """Return the problem of that seed; it has at most ``max_instances`` tasks over all micro-batches."""
    rng = Random(f"schedule problem {seed}")
    whole = rng.random() < 0.6 if whole_times is None else whole_times
    make = rng.choice([_pipeline, _pipeline, _pipeline, _graph, _graph])
    problem = make(rng, whole, max_instances // 2)
    problem = _with_transfers(rng, problem, whole, max_instances)
    problem = replace(problem, device_memory=_limits(rng, problem))
    most = max(1, max_instances // problem.num_tasks)
    return RandomProblem(seed, problem, rng.randint(1, 2) if most > 3 and rng.random() < 0.2 else most)


def _time(rng: Random, whole: bool) -> float:
    if rng.random() < 0.08:
        return 0.0
    return float(rng.randint(1, 4)) if whole else rng.choice([rng.uniform(0.2, 3.0), round(rng.uniform(0.2, 3.0), 2)])


def _pipeline(rng: Random, whole: bool, max_blocks: int) -> ScheduleProblem:
    """Return forward blocks in a chain, their backward blocks in reverse, and weight blocks where backward is split."""
    split = rng.random() < 0.3
    most = max(1, max_blocks // (3 if split else 2))
    num_stages = rng.randint(max(1, most - 1), most)
    num_devices = rng.randint(1, max(1, num_stages))
    devices = [_devices(rng, num_devices, 0.25) for _ in range(num_stages)]
    amounts = [rng.choice([0.25, 0.5, 1.0, 1.0, 1.0, 2.0]) for _ in range(num_stages)]
    blocks: list[Block] = []

    def add(name: str, stage: int, memory: float, after: list[int]) -> int:
        time = _time(rng, whole)
        # Blocks without duration that start together on one device have no order of their own; with memory it would matter.
        blocks.append(Block(name=f"{name}{stage}", devices=devices[stage], memory=memory, after=tuple(after),
                            time=1.0 if memory and not time else time))
        return len(blocks) - 1

    forward: list[int] = []
    for stage in range(num_stages):
        forward.append(add("f", stage, amounts[stage], forward[-1:]))
    kept = rng.random() < 0.1
    last: list[int] = []
    for stage in reversed(range(num_stages)):
        gives = -amounts[stage] if not kept else -amounts[stage] / 2
        after = [*last, *([forward[stage]] if forward[stage] not in last else [])]
        last = [add("b", stage, 0.0 if split else gives, after)]
        if split:
            add("w", stage, gives, list(last))
    return _problem(rng, num_devices, blocks)


def _graph(rng: Random, whole: bool, max_blocks: int) -> ScheduleProblem:
    """Return blocks that wait for random earlier ones; some take memory that a later block on the same devices returns."""
    num_blocks, num_devices = rng.randint(2, max(2, max_blocks)), rng.randint(1, 3)
    memory = [0.0] * num_blocks
    devices = [_devices(rng, num_devices, 0.35) for _ in range(num_blocks)]
    after: list[set[int]] = [{other for other in range(block) if rng.random() < 0.45} for block in range(num_blocks)]
    style = rng.choice(["paired", "paired", "paired", "any", "none"])
    for block in range(num_blocks - 1):
        if style == "paired" and memory[block] == 0 and rng.random() < 0.7:
            free = [later for later in range(block + 1, num_blocks) if memory[later] == 0]
            if free:
                later = rng.choice(free)
                memory[block] = rng.choice([0.5, 1.0, 1.0, 2.0])
                memory[later], devices[later] = -memory[block], devices[block]
                if rng.random() < 0.8:
                    after[later].add(block)
        elif style == "any":
            memory[block] = rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0, 1.0])
    blocks = []
    for block in range(num_blocks):
        time = _time(rng, whole)
        blocks.append(Block(name=f"n{block}", devices=devices[block], memory=memory[block], after=tuple(sorted(after[block])),
                            time=1.0 if memory[block] and not time else time))
    return _problem(rng, num_devices, blocks)


def _devices(rng: Random, num_devices: int, share: float) -> tuple[int, ...]:
    size = rng.randint(2, num_devices) if num_devices > 1 and rng.random() < share else 1
    return tuple(sorted(rng.sample(range(num_devices), size)))


def _problem(rng: Random, num_devices: int, blocks: list[Block]) -> ScheduleProblem:
    return ScheduleProblem(device_names=tuple(f"d{index}" for index in range(num_devices)),
                           device_memory=(None,) * num_devices, blocks=tuple(blocks), free_at=rng.choice(["start", "end"]))


def _with_transfers(rng: Random, problem: ScheduleProblem, whole: bool, max_instances: int) -> ScheduleProblem:
    """Return the problem with transfers on some dependencies, as long as one micro-batch stays small."""
    if rng.random() < 0.35:
        return problem
    links = [f"link{index}" for index in range(rng.randint(1, 2))]
    room = max_instances - problem.num_blocks if rng.random() < 0.3 else max_instances // 2 - problem.num_blocks
    transfers: list[Transfer] = []
    for target, block in enumerate(problem.blocks):
        for source in block.after:
            if rng.random() < 0.5:
                linked = sum(item.link is not None for item in transfers)
                link = rng.choice(links) if linked < room and rng.random() < 0.6 else None
                transfers.append(Transfer(source=source, target=target, time=_time(rng, whole), link=link))
    return replace(problem, transfers=tuple(transfers))


def _limits(rng: Random, problem: ScheduleProblem) -> tuple[float | None, ...]:
    """Return memory for each device: none, around what its largest block takes, or more."""
    result: list[float | None] = []
    style = rng.choice(["none", "tight", "tight", "mixed", "loose"])
    for tasks in problem.resource_tasks[: problem.num_devices]:
        amounts = [problem.memory_of(task) for task in tasks if problem.memory_of(task) > 0]
        largest, total = max(amounts, default=0.0), sum(amounts)
        kind = rng.choice(["none", "tight", "loose"]) if style == "mixed" else style
        tight = rng.choice([largest, largest, total, total, total + 0.25, total + largest, 0.75 * largest])
        result.append({"none": None, "tight": tight, "loose": total * rng.randint(2, 4)}[kind])
    return tuple(result)


def random_joint_problem(seed: int, *, max_instances: int = 9) -> RandomProblem:
    """Return a random problem with blocks that may run at once, or memory that may leave, or both."""
    rng = Random(f"joint schedule problem {seed}")
    for attempt in range(1000):
        case = random_problem(1000 * seed + attempt, max_instances=max_instances)
        problem = _with_choices(rng, case.problem)
        if problem.overlaps or problem.copies:
            return replace(case, seed=seed, problem=problem)
    raise AssertionError("most problems have blocks that may run at once")


def _with_choices(rng: Random, problem: ScheduleProblem) -> ScheduleProblem:
    kind = rng.choice(["overlaps", "copies", "both"])
    overlaps, copies = [], []
    for one, other in itertools.combinations(range(problem.num_blocks), 2):
        a, b = problem.blocks[one], problem.blocks[other]
        if a.devices == b.devices and rng.random() < 0.6:
            low, high = max(a.time, b.time), a.time + b.time
            time = rng.choice([low, high, low + (high - low) / 2, low + (high - low) / 4])
            overlaps.append(Overlap(blocks=rng.choice([(one, other), (other, one)]), time=time))
    for index, block in enumerate(problem.blocks):
        if block.memory > 0 and rng.random() < 0.8:
            copies.append(Copy(block=index, time=rng.choice([0.0, 0.25, 0.5, 0.5, 1.0, 2.0])))
    problem = replace(problem, overlaps=tuple(overlaps) if kind != "copies" else (),
                      copies=tuple(copies) if kind != "overlaps" else ())
    problem = replace(problem, copies=tuple(item for item, back in zip(problem.copies, problem.returns, strict=True) if back))
    if not problem.copies:
        return problem
    tight = [min((problem.memory_of(task) for task in tasks if problem.memory_of(task) > 0), default=0.0)
             for tasks in problem.resource_tasks[: problem.num_devices]]
    limits = tuple(rng.choice([least, 1.5 * least, 2 * least, limit]) for least, limit in
                   zip(tight, problem.device_memory, strict=True))
    return replace(problem, device_memory=limits, host_memory=rng.choice([None, None, 0.5, 1.0, 2.0]))
