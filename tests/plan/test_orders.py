"""The named orders: good for every size, with as many micro-batches in flight as the papers say."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.plan.explore import walk
from tests.worlds import pipeline
from weft.base.errors import PlanError
from weft.plan.check import check_program
from weft.plan.lower import lower
from weft.plan.orders import Order, forward_only, gpipe, interleaved, one_f_one_b, to_tokens


def in_flight(actions: list[tuple[int, str, int]]) -> int:
    """Return the most micro-batches whose forward is done and whose backward is not."""
    return max(accumulate({"F": 1, "B": -1}[phase] for _, phase, _ in actions))


def is_complete(order: Order, num_stages: int, num_microbatches: int) -> bool:
    """Return whether every stage has the forward and the backward of every micro-batch once, forward first."""
    actions = [action for items in order for action in items]
    wanted = {(stage, phase, index) for stage in range(num_stages) for phase in "FB"
              for index in range(num_microbatches)}
    first = all(items.index((stage, "F", index)) < items.index((stage, "B", index))
                for items in order for stage, phase, index in items if phase == "F")
    return len(actions) == len(wanted) and set(actions) == wanted and first


def plays(order: Order, num_stages: int) -> bool:
    """Return whether the devices come to the end, each doing its list in order."""
    done: set[tuple[int, str, int]] = set()
    at = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(order):
            while at[device] < len(actions):
                stage, phase, index = actions[at[device]]
                needed = (stage - 1, "F", index) if phase == "F" else (stage + 1, "B", index)
                if 0 <= needed[0] < num_stages and needed not in done:
                    break
                done.add((stage, phase, index))
                at[device] += 1
                moved = True
    return at == [len(actions) for actions in order]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_gpipe_and_1f1b_are_good_for_every_size(num_stages):
    for num_microbatches in range(1, 17):
        for make in (gpipe, one_f_one_b):
            order = make(num_stages, num_microbatches)
            assert is_complete(order, num_stages, num_microbatches)
            assert plays(order, num_stages)
        assert [in_flight(actions) for actions in gpipe(num_stages, num_microbatches)] == [num_microbatches] * num_stages
        assert [in_flight(actions) for actions in one_f_one_b(num_stages, num_microbatches)] == [
            min(num_microbatches, num_stages - stage) for stage in range(num_stages)]


@pytest.mark.parametrize("num_devices", range(1, 9))
def test_interleaved_is_good_for_every_size(num_devices):
    for num_chunks in (1, 2, 3, 4):
        for num_microbatches in range(num_devices, 17, num_devices):
            order = interleaved(num_devices, num_chunks, num_microbatches)
            num_stages = num_devices * num_chunks
            assert is_complete(order, num_stages, num_microbatches)
            assert plays(order, num_stages)
            assert all(stage % num_devices == device for device, items in enumerate(order) for stage, _, _ in items)
            total = num_microbatches * num_chunks
            ahead = [total if num_microbatches == num_devices else 2 * (num_devices - device - 1)
                     + (num_chunks - 1) * num_devices for device in range(num_devices)]
            assert [in_flight(actions) for actions in order] == [min(total, first + 1) for first in ahead]


@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 7])
def test_interleaved_refuses_rounds_that_are_not_whole(num_microbatches):
    with pytest.raises(PlanError, match=rf"interleaved 1F1B needs micro-batches \({num_microbatches}\) in multiples of "
                                        r"the devices \(4\)"):
        interleaved(4, 2, num_microbatches)


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_named_orders_lower_to_programs_that_run(kind, chunks):
    from random import Random
    for num_devices in (1, 2, 3, 5, 8):
        for num_microbatches in (1, 2, 3, 8, 16):
            if kind == "interleaved" and num_microbatches % num_devices:
                continue
            program = lower(*pipeline(kind, num_devices, num_microbatches, chunks=chunks)[::-1])
            check_program(program)
            assert walk(program, Random(0))


def test_forward_only_has_every_microbatch_in_order():
    assert forward_only(2, 3) == [[(0, "F", 0), (0, "F", 1), (0, "F", 2)], [(1, "F", 0), (1, "F", 1), (1, "F", 2)]]


def test_tokens():
    assert to_tokens([[(0, "F", 2), (1, "B", 0)]], ("a", "b")) == [("a:F:2", "b:B:0")]
