"""Inputs on which the search once failed, each named after what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.compare import compare
from tests.search.schedule.random_problems import RandomProblem
from weft.base.errors import NoFeasiblePlan
from weft.search.common.budget import Budget
from weft.search.schedule.first import first_schedule
from weft.search.schedule.problem import Block, ScheduleProblem, Transfer
from weft.search.schedule.schedule import ScheduleResult
from weft.search.schedule.search import schedule
from weft.search.schedule.steady import find_steady_state
from weft.search.schedule.whole import to_whole


def search(problem: ScheduleProblem, num_microbatches: int) -> ScheduleResult:
    return schedule(problem, microbatches=num_microbatches, time_limit=4.0)


def chain(*blocks: tuple[float, float], memory: float | None) -> ScheduleProblem:
    """Blocks (time, memory) on one device, one after the other."""
    return ScheduleProblem(device_names=("d0",), device_memory=(memory,), blocks=tuple(
        Block(name=f"n{index}", devices=(0,), time=time, memory=amount, after=(index - 1,) if index else ())
        for index, (time, amount) in enumerate(blocks)))


def scaled(problem: ScheduleProblem, time: float) -> ScheduleProblem:
    return replace(problem, blocks=tuple(replace(block, time=block.time * time) for block in problem.blocks))


@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_zero_times_everywhere(delay):
    """The period is 0, and nothing may be divided by it."""
    result = search(scaled(shape("m", 4, memory=6), 0.0), 4)
    assert (result.status, result.makespan, result.period) == ("optimal", 0.0, 0.0)
    blocks = (Block(name="a", devices=(0,), time=0.0), Block(name="b", devices=(1,), time=0.0, after=(0,)))
    late = ScheduleProblem(device_names=("d0", "d1"), device_memory=(None, None), blocks=blocks,
                           transfers=(Transfer(source=0, target=1, time=delay),))
    assert search(late, 3).makespan == delay


def test_blocks_without_duration_that_release_what_others_take_at_once():
    """They start together; in order of their indices both takes came first, and memory was said to be too small."""
    blocks = (*(Block(name=f"t{index}", devices=(0,), time=0.0, memory=1.0) for index in range(2)),
              *(Block(name=f"r{index}", devices=(0,), time=0.0, memory=-1.0, after=(index,)) for index in range(2)))
    problem = ScheduleProblem(device_names=("d0",), device_memory=(1.0,), blocks=blocks)
    result = search(problem, 2)
    assert (result.makespan, result.schedule.peak_memory()) == (0.0, {"d0": 1.0})


def test_a_block_without_duration_before_one_with_a_lower_index():
    """Both start at once; the cyclic order had the later one first, which no period satisfies."""
    blocks = (Block(name="y", devices=(0,), time=1.0, after=(1,)), Block(name="x", devices=(0,), time=0.0, after=(2,)),
              Block(name="w", devices=(1,), time=1.0))
    problem = ScheduleProblem(device_names=("d0", "d1"), device_memory=(None, None), blocks=blocks)
    result = search(problem, 3)
    assert (result.makespan, result.period) == (4.0, 1.0)


@pytest.mark.parametrize("unit", [1e-20, 1e20])
def test_times_far_from_one(unit):
    """Differences below 1e-12 counted as rounding whatever the unit, so that orders waited for each other."""
    result = search(scaled(shape("m", 4, memory=6), unit), 4)
    assert (result.makespan / unit, result.period / unit) == pytest.approx((36.0, 6.0))


def test_micro_batches_that_only_fit_together():
    """What one micro-batch releases early makes room for another; one alone does not fit."""
    returned = chain((1, -1), (1, 2), (1, -2), (1, 1), memory=0.0)
    falling = chain((1, -1), (1, 2), (1, -2), memory=0.0)
    for problem, number in ((returned, 2), (falling, 2), (falling, 3), (falling, 200)):
        result = search(problem, number)
        assert result.makespan == number * problem.num_blocks
        with pytest.raises(NoFeasiblePlan) as caught:
            search(problem, 1)
        assert caught.value.needed == 1.0


def test_amounts_that_differ_between_devices_and_fill_them_exactly():
    """They have no common unit that is small, but each device has one of its own: four fit, not three."""
    amounts = (12345678901.0, 9876543217.0, 0.1 * 3, 1e10 / 7)
    problem = shape("v", 4, memory=4)
    problem = replace(problem, device_memory=tuple(4 * amount for amount in amounts), blocks=tuple(
        replace(block, memory=block.memory * amounts[block.devices[0]]) for block in problem.blocks))
    whole = to_whole(problem)
    assert whole.is_exact
    assert whole.limits == (4, 4, 4, 4)
    assert find_steady_state(problem, budget=Budget(effort=5.0)).period == 4.0


def test_a_sum_of_real_amounts_within_the_limit_but_for_rounding():
    """0.1 * 3 + 0.1 * 3 is more than 0.6 by rounding alone."""
    blocks = (Block(name="a", devices=(0,), time=1.0, memory=0.1 * 3), Block(name="b", devices=(1,), time=1.0, after=(0,)),
              Block(name="c", devices=(0,), time=1.0, memory=-0.1 * 3, after=(1,)))
    problem = ScheduleProblem(device_names=("d0", "d1"), device_memory=(0.6, None), blocks=blocks)
    assert find_steady_state(problem, budget=Budget(effort=5.0)).period == 2.0


def test_a_limit_far_above_all_amounts_costs_no_exactness():
    assert to_whole(shape("v", 4, memory=1e15)).is_exact


def test_tight_memory_without_time():
    """No time for the solver: a rule finds the order, or the error says that nothing was found."""
    takes = [Block(name=f"t{index}", devices=(0,), time=1.0, memory=1.0) for index in range(40)]
    gives = [Block(name=f"r{index}", devices=(0,), time=1.0, memory=-1.0, after=(index,)) for index in range(40)]
    problem = ScheduleProblem(device_names=("d0",), device_memory=(1.0,), blocks=(*takes, *gives))
    late = Budget(effort=0.0, deadline=0.0)
    assert first_schedule(problem, 2, late).makespan == 160.0
    with pytest.raises(NoFeasiblePlan, match=r"no schedule within memory was found|admits no schedule") as caught:
        first_schedule(replace(problem, device_memory=(0.5,)), 2, late)
    assert caught.value.needed == 1.0


def test_large_problems_build_no_model_that_takes_longer_than_the_limit():
    """Two thousand blocks on one device: two million pairs. It ran for minutes; here the pieces that made it slow."""
    problem = chain(*[(1.0, 1.0)] * 1000, *[(1.0, -1.0)] * 1000, memory=3000.0)
    steady = find_steady_state(problem, budget=Budget(effort=1.0))
    assert steady.period == 2000.0


def test_zero_times_and_real_times_against_brute_force():
    """Rounding turned the order of a block without duration and of what depends on it."""
    third = 1 / 3
    blocks = (Block(name="c", devices=(0,), time=third, memory=-1.0, after=(1,)),
              Block(name="b", devices=(0, 1), time=0.0, after=(2,)),
              Block(name="a", devices=(0,), time=0.7 * third, memory=1.0))
    problem = ScheduleProblem(device_names=("d0", "d1"), device_memory=(1.0, None), blocks=blocks)
    assert compare(RandomProblem(0, problem, 3), search).complaints == []


def test_ctrl_c_while_the_solver_runs():
    """The solver's thread was taken for ended when waiting for it was interrupted."""
    script = textwrap.dedent("""
        import os, signal, threading
        from dataclasses import replace
        from weft.search.schedule.search import schedule
        from benchmarks.schedule_shapes import shape
        signal.signal(signal.SIGINT, signal.default_int_handler)
        problem = shape("nn", 4, memory=5)
        problem = replace(problem, blocks=tuple(replace(block, time=block.time * (1 + index % 7 / 30))
                                                for index, block in enumerate(problem.blocks)))
        timers = []
        def progress(line):
            if not timers and (line.startswith("all at once") or line.startswith("completion")):
                timers.append(threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)))
                timers[0].start()  # one alone: a second Ctrl-C ends a process as usual
        result = schedule(problem, microbatches=16, progress=progress)
        print(result.is_interrupted, result.makespan > 0)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr[-2000:]


def test_the_same_bytes_whatever_the_hash_seed():
    script = textwrap.dedent("""
        import json
        from weft.search.schedule.search import schedule
        from benchmarks.schedule_shapes import shape
        result = schedule(shape("x", 2, memory=2), microbatches=5, seed=3).to_json()
        del result["seconds"]
        print(json.dumps(result))
    """)
    outputs = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}).stdout
               for seed in ("1", "2")}
    assert len(outputs) == 1


def test_a_period_below_its_bound():
    """The cyclic order of blocks without duration was not the one that fits the memory."""
    rows = (((0, 1), 0.0, ()), ((0, 1), 0.5, (0,)), ((0,), 0.5, (0, 1)), ((1,), 0.0, ()), ((0, 1), -0.5, (0, 1, 2, 3)),
            ((0,), -0.5, (1, 2, 3)))
    blocks = tuple(Block(name=f"n{index}", devices=devices, time=0.0, memory=memory, after=after)
                   for index, (devices, memory, after) in enumerate(rows))
    transfers = tuple(Transfer(source=source, target=target, time=time)
                      for source, target, time in ((0, 4, 3.0), (1, 5, 4.0), (2, 5, 4.0)))
    problem = ScheduleProblem(device_names=("d0", "d1"), device_memory=(3.0, 1.0), blocks=blocks, transfers=transfers,
                              free_at="start")
    result = search(problem, 2)
    assert result.period / result.period_microbatches >= result.period_bound * (1 - 1e-9)
