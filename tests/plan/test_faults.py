"""Thousands of seeded faults: the checker rejects exactly the programs that do not work when they are played."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from random import Random

import pytest

from tests.plan.bases import BASES, base
from tests.plan.explore import ways_to_block, works
from tests.plan.faults import FAULTS, seed_fault
from tests.plan.generate import random_plan
from weft.base.errors import PlanError
from weft.plan.check import check_program, play_rendezvous, rendezvous_problems
from weft.plan.lower import lower
from weft.plan.program import Program

SEEDS = 18
PLACE = re.compile(r"rank \d+ \(d\d+\)")


def problems_of(program: Program) -> tuple[str, ...]:
    """Return the checker's problems; empty if it accepts the program."""
    try:
        check_program(program)
    except PlanError as error:
        return error.problems or ("none given",)
    return ()


@cache
def verdicts(name: str) -> list[tuple[str, Program, tuple[str, ...]]]:
    """Return (kind of fault, program, the checker's problems) for all faults seeded in one base program."""
    found = []
    for kind in FAULTS:
        for seed in range(SEEDS):
            program = seed_fault(base(name), kind, Random(f"{name} {kind} {seed}"))
            if program is not None:
                found.append((kind, program, problems_of(program)))
    return found


@pytest.mark.parametrize("name", BASES)
def test_good_programs_pass_the_checker_and_the_play(name):
    assert problems_of(base(name)) == ()
    assert works(base(name))


@pytest.mark.parametrize("name", BASES)
def test_checker_rejects_exactly_what_does_not_work(name):
    outcomes = Counter()
    for kind, program, problems in verdicts(name):
        is_good = works(program)
        outcomes[is_good] += 1
        assert is_good == (not problems), f"{kind} in {name}: the play says {is_good}, the checker {problems}"
    assert outcomes[False] > 100
    assert sum(outcomes.values()) > 130


@pytest.mark.parametrize("name", BASES)
def test_every_problem_names_a_rank_and_its_device(name):
    for kind, _, problems in verdicts(name):
        for problem in problems:
            assert PLACE.search(problem) or "ranks " in problem, (kind, problem)
            assert "instruction " in problem or "missing" in problem or "both B and I" in problem, (kind, problem)


@pytest.mark.parametrize("kind", FAULTS)
def test_each_kind_of_fault_is_rejected_many_times(kind):
    rejected = [problems for name in BASES for found, _, problems in verdicts(name) if found == kind and problems]
    assert len(rejected) > (15 if kind == "other bucket" else 100)


ALWAYS_WRONG = ("dropped", "duplicated", "on another rank", "other instance", "other micro-batch", "other phase",
                "other channel", "other bucket", "other operation", "other direction", "message lost", "message twice",
                "message too many")


@pytest.mark.parametrize("kind", ALWAYS_WRONG)
def test_no_dropped_doubled_or_retargeted_action_is_accepted(kind):
    for name in BASES:
        for found, _, problems in verdicts(name):
            assert found != kind or problems, f"a {kind} in {name} was accepted"


SMALL_FAULTS = ("messages permuted", "neighbours swapped", "moved", "other direction")


def small_programs(count: int) -> list[Program]:
    """Return random programs of a few instructions, most with their messages in another order."""
    found: list[Program] = []
    seed = 0
    while len(found) < count:
        rng = Random(seed)
        seed += 1
        graph, _, plan = random_plan(rng, num_ops=rng.randint(2, 5), num_devices=rng.randint(2, 3),
                                     microbatches=rng.randint(1, 2))
        program = lower(plan, graph)
        if rng.random() < 0.85:
            program = seed_fault(program, rng.choice(SMALL_FAULTS), rng)
        if program is not None and program.channels and program.num_instructions <= 40:
            found.append(program)
    return found


def test_deadlock_verdict_equals_exhaustive_exploration_of_all_interleavings():
    verdict = Counter()
    for program in small_programs(400):
        blocked = ways_to_block(program, max_states=100_000)
        verdict[bool(blocked)] += 1
        assert bool(rendezvous_problems(program)) == bool(blocked)
        if blocked:  # whatever the interleaving, the ranks end up where one play says
            stand = play_rendezvous(program)
            assert blocked == [tuple(at - int(first) for at, first in zip(stand, program.rank_start, strict=False))]
    assert verdict[True] > 100
    assert verdict[False] > 100
