"""What the checker accepts comes to its end on nccl too, whose communicators are queues without tags or buffers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tests.plan.bases import BASES, base
from tests.plan.explore import rows_of
from tests.plan.faults import program_of
from tests.plan.generate import random_plan
from tests.plan.queues import by_pair, play
from tests.plan.test_faults import small_programs, verdicts
from tests.plan.test_named_faults import crossed_program, exchanging_program, find
from weft.base.errors import PlanError
from weft.plan.check import check_program
from weft.plan.lower import lower

WAYS = [{}, {"communicator": by_pair}, {"one_at_a_time": True}]


@pytest.mark.parametrize("name", BASES)
def test_good_programs_end_on_queues(name):
    assert [play(base(name), **way) for way in WAYS] == [""] * len(WAYS)


@pytest.mark.parametrize("part", range(4))
def test_generated_plans_end_on_queues(part):
    for seed in range(part, 400, 4):
        rng = Random(seed)
        graph, _, plan = random_plan(rng, num_ops=rng.randint(2, 9), num_devices=rng.randint(2, 5),
                                     microbatches=rng.randint(1, 3))
        program = lower(plan, graph)
        assert [play(program, **way) for way in WAYS] == [""] * len(WAYS), seed


def test_what_the_checker_accepts_of_faulty_programs_ends_on_queues():
    outcomes = Counter()
    found = [(program, problems) for name in BASES for _, program, problems in verdicts(name)[::4]]
    for program, problems in found:
        if any("there is no operation" in problem or " names " in problem for problem in problems):
            continue  # it cannot be read at all
        wrong = play(program)
        assert problems or not wrong
        outcomes[bool(problems), bool(wrong)] += 1
    assert outcomes[True, True] > 300
    assert outcomes[False, False] > 30


def test_small_programs_with_their_messages_in_another_order():
    outcomes = Counter()
    for program in small_programs(300):
        try:
            check_program(program)
        except PlanError:
            outcomes["refused", bool(play(program, communicator=by_pair))] += 1
        else:
            assert [play(program, **way) for way in WAYS] == [""] * len(WAYS)
            outcomes["accepted"] += 1
    assert outcomes["refused", True] > 50
    assert outcomes["accepted"] > 50


def swapped(program, rank, one, other):
    lists = rows_of(program)
    first, second = find(program, rank, one), find(program, rank, other)
    lists[rank][first], lists[rank][second] = lists[rank][second], lists[rank][first]
    return program_of(program, lists)


def refusal(program) -> str:
    with pytest.raises(PlanError) as caught:
        check_program(program)
    return "\n".join(caught.value.problems)


def test_swapped_receives_take_each_others_data():
    program = swapped(base("gpipe"), 1, "recv s0>s1 mb 0", "recv s0>s1 mb 1")
    assert " meets " in play(program)
    assert "send s0>s1 mb 0 meets rank 1 (d1), instruction 0: recv s0>s1 mb 1" in refusal(program)


def test_sends_head_on_block_a_queue_of_both_directions():
    """With a queue for each direction they would pass; the checker wants one order of everything."""
    program = crossed_program()
    assert play(program, communicator=by_pair)
    assert play(program) == ""
    assert "send s0>s1 mb 0: waits for ever for rank 1 (d1), which is at 'send s2>s3 mb 1'" in refusal(program)


def test_collectives_of_a_group_in_two_orders_add_up_each_others_numbers():
    program = exchanging_program()
    lists = rows_of(program)
    lists[1][2], lists[1][3] = lists[1][3], lists[1][2]
    broken = program_of(program, lists)
    assert " meets " in play(broken)
    assert "(bucket 0): waits for ever for rank 1 (d1), which is at 'all_reduce 1 parameters (bucket 1)'" in refusal(broken)
