"""The faults that have hung real runs, one by one, each with the sentence that the user gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.bases import base, custom_plan
from tests.plan.explore import rows_of, works
from tests.plan.faults import program_of
from tests.worlds import chain_graph, pipeline
from weft.base.errors import PlanError
from weft.plan.check import check_plan, check_program
from weft.plan.lower import lower
from weft.plan.orders import gpipe, interleaved, one_f_one_b
from weft.plan.plan import GradientExchange
from weft.plan.program import Op, Program


def find(program: Program, rank: int, label: str) -> int:
    """Return the position in the rank's list of the instruction with that label."""
    first, last = (int(item) for item in program.rank_start[rank:rank + 2])
    return next(index - first for index in range(first, last) if program.label(index) == label)


def moved(program: Program, rank: int, label: str, *, before: str) -> Program:
    """Return the program with one instruction of a rank moved to stand right before another."""
    lists = rows_of(program)
    row = lists[rank].pop(find(program, rank, label))
    target = find(program_of(program, lists), rank, before)
    lists[rank].insert(target, row)
    return program_of(program, lists)


def refusal(program: Program) -> PlanError:
    """Return the checker's error, after making sure that the program really does not work."""
    assert not works(program)
    with pytest.raises(PlanError) as caught:
        check_program(program)
    return caught.value


def crossed_program() -> Program:
    """Return a program in which both of two ranks send first and receive later."""
    graph = chain_graph(2)
    on_d0, on_d1 = ((("d0",), 1.0),), ((("d1",), 1.0),)
    plan = custom_plan(graph, [[0], [1], [0], [1]], [on_d0, on_d1, on_d1, on_d0], microbatches=2, size=1, num_devices=2,
                       handled=[(0,), (0,), (1,), (1,)])
    plan = replace(plan, order={"d0": ("s0:F:0", "s3:F:1", "s3:B:1", "s0:B:0"),
                                "d1": ("s2:F:1", "s1:F:0", "s1:B:0", "s2:B:1")})
    program = lower(plan, graph)
    check_program(program)
    return moved(program, 1, "recv s0>s1 mb 0", before="F s1 mb 0")


def test_crossed_sends_between_two_ranks():
    """Each waits for the other (pytorch#172668)."""
    error = refusal(crossed_program())
    assert "rank 0 (d0), instruction 1: send s0>s1 mb 0: waits for ever for rank 1 (d1), which is at 'send s2>s3 mb 1'" \
        in error.problems
    assert "rank 1 (d1), instruction 1: send s2>s3 mb 1: waits for ever for rank 0 (d0), which is at 'send s0>s1 mb 0'" \
        in error.problems


@pytest.mark.parametrize("order", [one_f_one_b, gpipe])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_fewer_microbatches_than_stages_run_to_the_end(order, num_microbatches):
    """A pipeline that never fills (torchtitan#775) is a good plan."""
    graph, plan = pipeline({one_f_one_b: "1f1b", gpipe: "gpipe"}[order], 4, num_microbatches)
    program = lower(plan, graph)
    check_program(program)
    assert works(program)


def test_fewer_microbatches_than_stages_with_a_warm_up_that_does_not_know_it():
    """The order of a full 1F1B warm-up, with the forwards that do not exist left out, blocks and is refused."""
    graph, plan = pipeline("1f1b", 3, 1)
    order = dict(plan.order)
    order["d1"] = ("s1:B:0", "s1:F:0")
    with pytest.raises(PlanError, match=r"order.d1\[0\]: 's1:B:0' stands before 's1:F:0'"):
        lower(replace(plan, order=order), graph)


def test_receive_ahead_of_the_send_it_waits_for_on_one_stream():
    program = base("1f1b")
    early = moved(program, 0, "recv grad s1>s0 mb 0", before="send s0>s1 mb 0")
    error = refusal(early)
    assert ("rank 0 (d0), instruction 1: recv grad s1>s0 mb 0: waits for ever for rank 1 (d1), "
            "which is at 'recv s0>s1 mb 0'") in error.problems
    assert any(problem.startswith("rank 1 (d1), instruction 0: recv s0>s1 mb 0: waits for ever for rank 0 (d0)")
               for problem in error.problems)


def test_different_orders_of_sends_and_receives_on_the_two_sides():
    program = base("gpipe")
    lists = rows_of(program)
    first, second = find(program, 1, "recv s0>s1 mb 0"), find(program, 1, "recv s0>s1 mb 1")
    lists[1][first], lists[1][second] = lists[1][second], lists[1][first]
    error = refusal(program_of(program, lists))
    assert ("ranks 0 and 1 disagree on the order of messages: rank 0 (d0), instruction 1: send s0>s1 mb 0 meets "
            "rank 1 (d1), instruction 0: recv s0>s1 mb 1") in error.problems


def exchanging_program() -> Program:
    """Return a program of two ranks that exchange the gradients of two parameters, one after the other."""
    graph = chain_graph(2)
    plan = custom_plan(graph, [[0, 1]], [((("d0",), 0.75), (("d1",), 0.25))], microbatches=1, size=4, num_devices=2)
    each = tuple(GradientExchange(parameters=(name,), devices=("d0", "d1")) for name in ("w0", "w1"))
    return lower(replace(plan, gradients=each), graph)


def test_different_orders_of_collectives_among_members():
    program = exchanging_program()
    lists = rows_of(program)
    assert [row[0] for row in lists[1]] == [Op.COMPUTE, Op.COMPUTE, Op.COLLECTIVE, Op.COLLECTIVE, Op.STEP]
    lists[1][2], lists[1][3] = lists[1][3], lists[1][2]
    assert refusal(program_of(program, lists)).problems == (
        "rank 0 (d0), instruction 2: all_reduce 1 parameters (bucket 0): waits for ever for rank 1 (d1), "
        "which is at 'all_reduce 1 parameters (bucket 1)'",
        "rank 1 (d1), instruction 2: all_reduce 1 parameters (bucket 1): waits for ever for rank 0 (d0), "
        "which is at 'all_reduce 1 parameters (bucket 0)'")


def test_different_orders_of_a_stage_on_several_devices():
    """The devices of one stage exchange shards inside it, so they must come to it in the same order."""
    graph = chain_graph(1)
    plan = custom_plan(graph, [[0]], [((("d0", "d1"), 1.0),)], microbatches=2, size=1, num_devices=2)
    plan = replace(plan, order=dict.fromkeys(("d0", "d1"), ("s0:F:0", "s0:F:1", "s0:B:0", "s0:B:1")))
    program = lower(plan, graph)
    check_program(program)
    lists = rows_of(program)
    lists[1][0], lists[1][1] = lists[1][1], lists[1][0]
    assert refusal(program_of(program, lists)).problems == (
        "rank 0 (d0), instruction 0: F s0 mb 0: waits for ever for rank 1 (d1), which is at 'F s0 mb 1'",
        "rank 1 (d1), instruction 0: F s0 mb 1: waits for ever for rank 0 (d0), which is at 'F s0 mb 0'")


def test_dropped_action():
    program = base("1f1b")
    lists = rows_of(program)
    del lists[1][find(program, 1, "B s1 mb 2")]
    error = refusal(program_of(program, lists))
    assert "rank 1 (d1): missing backward (B, or I and W) of s1 mb 2" in error.problems
    assert any("send grad s1>s0 mb 2: comes before backward s1 mb 2, which makes it" in item for item in error.problems)


def test_dropped_send():
    program = base("1f1b")
    lists = rows_of(program)
    del lists[0][find(program, 0, "send s0>s1 mb 1")]
    error = refusal(program_of(program, lists))
    assert "rank 0 (d0): the send of activation from s0 mb 1 is missing" in error.problems
    assert any(item.startswith("ranks 0 and 1") for item in error.problems)


def test_duplicated_action():
    program = base("1f1b")
    lists = rows_of(program)
    at = find(program, 2, "B s2 mb 0")
    lists[2].insert(at, lists[2][at])
    error = refusal(program_of(program, lists))
    assert error.problems == (f"rank 2 (d2), instruction {at + 1}: B s2 mb 0: is there more than once on this rank",)


def test_swapped_actions():
    program = base("1f1b")
    lists = rows_of(program)
    first, second = find(program, 2, "F s2 mb 0"), find(program, 2, "B s2 mb 0")
    lists[2][first], lists[2][second] = lists[2][second], lists[2][first]
    error = refusal(program_of(program, lists))
    assert f"rank 2 (d2), instruction {first}: B s2 mb 0: comes before its F, which it needs" in error.problems


def test_action_on_the_wrong_rank():
    program = base("1f1b")
    lists = rows_of(program)
    lists[2].insert(0, lists[0].pop(find(program, 0, "F s0 mb 0")))
    error = refusal(program_of(program, lists))
    assert "rank 2 (d2), instruction 0: F s0 mb 0: this stage runs on rank 0 (d0)" in error.problems
    assert "rank 0 (d0): missing F of s0 mb 0" in error.problems


def test_retargeted_message():
    program = base("skip connections")
    lists = rows_of(program)
    at = find(program, 0, "send s0>s1 mb 0")
    other = next(index for index, channel in enumerate(program.channels)
                 if channel.kind == "activation" and channel.source == 1)
    lists[0][at] = (*lists[0][at][:4], other, -1)
    error = refusal(program_of(program, lists))
    assert any(f"rank 0 (d0), instruction {at}: send s1>" in item and "is on the wrong rank; the message leaves "
               "rank 1 (d1)" in item for item in error.problems)


@pytest.mark.parametrize(("column", "value", "sentence"), [
    (0, 9, "rank 1 (d1), instruction 0: there is no operation 9"),
    (4, 99, "rank 1 (d1), instruction 0: a recv names channel 99; there are 4"),
    (4, -1, "rank 1 (d1), instruction 0: a recv names channel -1; there are 4"),
])
def test_reference_to_nothing(column, value, sentence):
    program = base("1f1b")
    lists = rows_of(program)
    row = list(lists[1][0])
    row[column] = value
    lists[1][0] = tuple(row)
    assert refusal(program_of(program, lists)).problems == (sentence,)


def test_step_where_nothing_is_updated():
    program = base("idle device")
    lists = rows_of(program)
    lists[1].append((int(Op.STEP), -1, -1, 0, -1, -1))
    error = refusal(program_of(program, lists))
    assert error.problems == ("rank 1 (d1), instruction 0: sgd step: there is nothing to update on this rank",)


def test_step_before_the_gradients_are_exchanged():
    program = exchanging_program()
    lists = rows_of(program)
    lists[0].insert(3, lists[0].pop())
    assert refusal(program_of(program, lists)).problems == (
        "rank 0 (d0), instruction 4: all_reduce 1 parameters (bucket 1): stands after the optimizer step",)


def test_collective_before_its_gradients():
    program = exchanging_program()
    lists = rows_of(program)
    for rows in lists:
        rows.insert(1, rows.pop(2))
    assert refusal(program_of(program, lists)).problems == tuple(
        f"rank {rank} (d{rank}), instruction 1: all_reduce 1 parameters (bucket 0): comes before the backward of "
        f"s0.{rank} mb 0" for rank in (0, 1))


def test_all_problems_are_reported_at_once():
    program = base("1f1b")
    lists = rows_of(program)
    del lists[0][find(program, 0, "F s0 mb 2")]
    lists[1].insert(3, lists[1][3])
    del lists[2][-1]
    error = refusal(program_of(program, lists))
    text = " | ".join(error.problems)
    for part in ("rank 0 (d0): missing F of s0 mb 2", "is there more than once on this rank",
                 "rank 2 (d2): the optimizer step is missing"):
        assert part in text
    assert str(error).startswith(f"the program has {len(error.problems)} problems: ")


def test_columns_that_do_not_fit_together():
    program = base("1f1b")
    with pytest.raises(PlanError, match="not of one length"):
        check_program(replace(program, channel=program.channel[:-1]))
    with pytest.raises(PlanError, match="rank_start does not divide"):
        check_program(replace(program, rank_start=program.rank_start[::-1].copy()))


def test_blocked_orders_name_the_devices_and_what_they_wait_for():
    graph, plan = pipeline("gpipe", 2, 2)
    order = dict(plan.order)
    order["d0"] = ("s0:F:0", "s0:B:0", "s0:F:1", "s0:B:1")
    with pytest.raises(PlanError) as caught:
        lower(replace(plan, order=order), graph)
    assert caught.value.problems == (
        "order.d0[1]: s0:B:0 waits for s1:B:0, which never comes: the orders of the devices block each other",
        "order.d1[1]: s1:F:1 waits for s0:F:1, which never comes: the orders of the devices block each other")


def test_blocked_orders_of_a_stage_on_several_devices():
    graph = chain_graph(1)
    plan = custom_plan(graph, [[0]], [((("d0", "d1"), 1.0),)], microbatches=2, size=1, num_devices=2)
    order = {"d0": ("s0:F:0", "s0:F:1", "s0:B:0", "s0:B:1"), "d1": ("s0:F:1", "s0:F:0", "s0:B:0", "s0:B:1")}
    with pytest.raises(PlanError, match=r"order.d0\[0\]: s0:F:0 waits for the other devices of its group"):
        lower(replace(plan, order=order), graph)


def test_plan_with_one_wrong_exchange_is_refused_before_it_is_lowered():
    graph, plan = pipeline("1f1b", 2, 2)
    from tests.worlds import plain_cluster
    broken = replace(plan, gradients=(GradientExchange(parameters=("w0",), devices=("d0", "d1")),))
    with pytest.raises(PlanError, match="'w0' is held by d0, but exchanged among d0, d1"):
        check_plan(broken, graph, plain_cluster(2))


def test_interleaved_needs_whole_rounds():
    with pytest.raises(PlanError, match=r"micro-batches \(3\) in multiples of the devices \(2\)"):
        interleaved(2, 2, 3)
