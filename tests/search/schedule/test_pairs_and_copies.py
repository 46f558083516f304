"""Blocks that run at once, and memory that leaves a device: what files say, what schedules mean, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.schedule.compare import compare_joint
from tests.search.schedule.pipelines import chain
from tests.search.schedule.random_problems import random_joint_problem
from weft.base.errors import InputError, NoFeasiblePlan, PlanError
from weft.search.schedule.bounds import period_bound
from weft.search.schedule.moves import earliest
from weft.search.schedule.pairs import least_work
from weft.search.schedule.problem import (
    Overlap,
    load_problem,
    parse_problem,
    problem_to_json,
    save_problem,
    without_instants,
)
from weft.search.schedule.schedule import Schedule, check_schedule, find_problems, replay
from weft.search.schedule.search import schedule

NAN = float("nan")


def form(**changes) -> dict:
    """Return two stages on one device that train, with an overlap and two copies."""
    return {"format": "weft.schedule-problem", "version": 1, "devices": [{"name": "d", "memory": 3}],
            "blocks": [{"name": "f0", "devices": ["d"], "time": 1, "memory": 1},
                       {"name": "f1", "devices": ["d"], "time": 1, "memory": 2, "after": ["f0"]},
                       {"name": "b1", "devices": ["d"], "time": 2, "memory": -2, "after": ["f1"]},
                       {"name": "b0", "devices": ["d"], "time": 2, "memory": -1, "after": ["b1"]}],
            "overlaps": [{"blocks": ["f0", "b0"], "time": 2.5}],
            "copies": [{"block": "f0", "time": 0.5}, {"block": "f1", "time": 1}], "host_memory": 2, **changes}


def test_the_new_fields_are_read_and_written(tmp_path):
    problem = parse_problem(form())
    assert [(item.blocks, item.time) for item in problem.overlaps] == [((0, 3), 2.5)]
    assert [(item.block, item.time) for item in problem.copies] == [(0, 0.5), (1, 1.0)]
    assert problem.host_memory == 2
    assert problem.returns == ((3,), (2,))
    save_problem(problem, tmp_path / "p.json")
    assert load_problem(tmp_path / "p.json") == problem


def test_without_them_nothing_new_is_written():
    value = form()
    for field in ("overlaps", "copies", "host_memory"):
        del value[field]
    assert set(problem_to_json(parse_problem(value))) == {"format", "version", "devices", "free_at", "blocks"}


def two_devices() -> dict:
    return form(devices=[{"name": "d"}, {"name": "e"}],
                blocks=[*form()["blocks"], {"name": "g", "devices": ["d", "e"], "time": 1, "memory": 1}])


@pytest.mark.parametrize(("value", "message"), [
    (form(overlaps=[{"blocks": ["f0"], "time": 1}]), r"overlaps\[0\]\.blocks must be the names of two different blocks"),
    (form(overlaps=[{"blocks": ["f0", "f0"], "time": 1}]), "two different blocks, not .'f0', 'f0'."),
    (form(overlaps=[{"blocks": ["f0", "b9"], "time": 1}]), r"overlaps\[0\]\.blocks names no block: 'b9'"),
    (form(overlaps=[{"blocks": ["f0", "b0"], "time": 1.9}]), r"overlaps\[0\]\.time must be between 2, .* and 3, .* not 1.9"),
    (form(overlaps=[{"blocks": ["f0", "b0"], "time": 3.1}]), "not 3.1"),
    (form(overlaps=[{"blocks": ["f0", "b0"], "time": 3}, {"blocks": ["b0", "f0"], "time": 3}]), r"overlaps\[1\].* twice"),
    (form(overlaps=[{"blocks": ["f0", "b0"]}]), "time"),
    (form(overlaps=[{"blocks": ["f0", "b0"], "time": 3, "speed": 1}]), "speed"),
    ({**two_devices(), "overlaps": [{"blocks": ["f0", "g"], "time": 2}]}, "'f0' is on d and 'g' on d, e: only blocks of"),
    (form(copies=[{"block": "f9", "time": 1}]), r"copies\[0\]\.block names no block: 'f9'"),
    (form(copies=[{"block": "b0", "time": 1}]), r"copies\[0\]: 'b0' takes no memory"),
    (form(copies=[{"block": "f0", "time": -1}]), r"copies\[0\]\.time must not be negative"),
    (form(copies=[{"block": "f0", "time": 1}, {"block": "f0", "time": 2}]), r"copies\[1\]\.block is there twice"),
    ({**two_devices(), "copies": [{"block": "g", "time": 2}]}, r"copies\[0\]: no block gives back what 'g' takes"),
    (form(host_memory=-1), "host_memory must not be negative"),
    (form(host_memory="2GB"), "host_memory"),
])
def test_broken_files_are_refused_by_name(value, message):
    with pytest.raises(InputError, match=message):
        parse_problem(value)


def good() -> Schedule:
    """Return two micro-batches: b0 of the first beside f0 of the second, whose memory is away while f1 and b1 run."""
    return Schedule(problem=parse_problem(form()), starts=np.asarray([[0, 6], [1, 8.5], [2, 9.5], [6, 13.5]]),
                    moves=np.asarray([[1.25, 8.5], [5.0, 13.0], [NAN, NAN], [NAN, NAN]]))


def test_what_a_pair_and_a_copy_mean():
    schedule = good()
    check_schedule(schedule)
    assert schedule.pairs == (((0, 1), (3, 0)),)
    assert schedule.ends.tolist() == [[1, 8.5], [2, 9.5], [4, 11.5], [8.5, 15.5]]
    assert schedule.makespan == 15.5
    assert schedule.busy(0) == 4 + 2.5 + 1 + 2 + 2
    assert schedule.offloads == ((0, 0, 1.25, 5.0), (0, 1, 8.5, 13.0))
    assert schedule.peak_host_memory() == 1
    assert schedule.peak_memory() == {"d": 3}
    times, amounts = next(schedule.memory_changes())
    assert times.tolist() == [0, 1, 1.75, 4, 5, 6, 8.5, 8.5, 9.0, 11.5, 13, 15.5]
    assert amounts.tolist() == [1, 2, -1, -2, 1, 1, -1, 2, -1, -2, 1, -1]


def test_memory_of_both_counts_unless_it_is_given_back_at_the_start():
    problem = replace(parse_problem(form(copies=[])), device_memory=(1.0,))
    starts = np.asarray([[0.0, 6.0], [1.0, 8.5], [2.0, 9.5], [6.0, 13.5]])
    two = replace(problem, blocks=tuple(replace(block, memory=0.0 if block.name.endswith("1") else block.memory)
                                        for block in problem.blocks))
    assert find_problems(Schedule(problem=two, starts=starts)) == ["d holds 2 at its fullest, its memory is 1"]
    assert find_problems(Schedule(problem=replace(two, free_at="start"), starts=starts)) == []


def changed(row: int, index: int, time: float, **problem) -> Schedule:
    schedule = good()
    moves = schedule.moves.copy()
    moves[row, index] = time
    return Schedule(problem=replace(schedule.problem, **problem), starts=schedule.starts, moves=moves)


@pytest.mark.parametrize(("schedule", "problems"), [
    (changed(0, 0, 0.5), ["what f0 of micro-batch 0 takes leaves at 0.5, but its block ends at 1"]),
    (changed(1, 0, 1.5), ["what f0 of micro-batch 0 takes comes back from 1.5, but its copy to the host ends at 1.75",
                          "d copies what f0 of micro-batch 0 takes until 1.75 and what f0 of micro-batch 0 takes from 1.5"]),
    (changed(1, 0, 5.75), ["what f0 of micro-batch 0 takes is back at 6.25, but b0 of micro-batch 0, which gives it back, "
                           "starts at 6"]),
    (changed(1, 0, NAN), ["some copies have only one of the times at which they leave and come back, or infinite ones"]),
    (changed(1, 0, float("inf")), ["some copies have only one of the times at which they leave and come back, or infinite "
                                   "ones"]),
    (changed(1, 0, 5.0, device_memory=(2.5,)), ["d holds 3 at its fullest, its memory is 2.5"]),
    (changed(1, 0, 5.0, host_memory=0.5), ["the host keeps 1 at its fullest, its memory is 0.5"]),
    (replace(good(), moves=np.zeros((2, 2))), ["it has (2, 2) times of copies, the problem's copies need (4, 2)"]),
    (replace(good(), problem=replace(good().problem, overlaps=())),
     ["d runs b0 of micro-batch 0 until 8 and f1 of micro-batch 1 from 8.5"]),
])
def test_faults_are_named(schedule, problems):
    if not schedule.problem.overlaps:  # what starts together without an overlap is at once
        assert find_problems(schedule)[0].startswith("d runs f0 of micro-batch 1 until 7 and b0 of micro-batch 0 from 6")
        return
    assert find_problems(schedule) == problems
    with pytest.raises(PlanError):
        check_schedule(schedule)


def test_the_host_has_room_again_when_a_copy_back_has_ended():
    problem = replace(parse_problem(form()), host_memory=2.0)
    moves = np.asarray([[1.0, NAN], [5.5, NAN], [NAN, NAN], [NAN, NAN]])
    both = Schedule(problem=problem, starts=good().starts, moves=moves)
    assert both.peak_host_memory() == 1
    late = np.asarray([[1.0, NAN], [1.5, NAN], [NAN, NAN], [NAN, NAN]])
    assert Schedule(problem=problem, starts=good().starts, moves=late).peak_host_memory() == 1


def test_an_order_with_pairs_is_played_as_early_as_can_be():
    problem = parse_problem(form(copies=[]))
    order = [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]
    assert replay(problem, 2, [order]).makespan == 12
    paired = replay(problem, 2, [order], pairs=[((0, 1), (3, 0))])
    assert paired.starts.tolist() == [[0, 4], [1, 6.5], [2, 7.5], [4, 9.5]]
    assert paired.makespan == 11.5
    assert paired.orders()[0] == [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0), (1, 1), (2, 1), (3, 1)]
    with pytest.raises(PlanError, match="wait for each other"):
        replay(problem, 2, [order], pairs=[((0, 0), (3, 0))])


def test_the_least_work_is_that_of_the_best_pairs_in_any_number_of_micro_batches():
    """Three blocks that overlap each other: each is half of its time beside one, half beside the other."""
    value = form(overlaps=[{"blocks": list(names), "time": 1.5} for names in (("f0", "f1"), ("f1", "g"), ("f0", "g"))])
    value["blocks"].append({"name": "g", "devices": ["d"], "time": 1})
    assert least_work(parse_problem(value))[0] == pytest.approx(1 + 1 + 1 + 2 + 2 - 1.5 * 0.5, rel=1e-9)


def test_less_memory_is_named_where_memory_can_leave():
    """Alone, a micro-batch holds 3; while f1 and b1 run, what f0 took can be away."""
    problem = replace(parse_problem(form(overlaps=[])), device_memory=(1.5,))
    with pytest.raises(NoFeasiblePlan, match=r"'d' has memory 1\.5 and needs at least 2") as caught:
        schedule(problem, microbatches=3)
    assert caught.value.needed == 2
    found = schedule(replace(problem, device_memory=(2.0,)), microbatches=3)
    assert found.schedule.peak_memory() == {"d": 2}
    assert len(found.to_json()["offloads"]) == 3
    with pytest.raises(NoFeasiblePlan, match="needs at least 3"):
        schedule(replace(problem, device_memory=(2.0,), host_memory=0.5), microbatches=3)


def test_a_steady_state_has_pairs_and_copies():
    problem = parse_problem(form(copies=[]))
    found = schedule(problem, microbatches=6)
    assert found.period / found.period_microbatches == pytest.approx(5.5) == period_bound(problem)
    assert found.bubble == pytest.approx(0)
    away = replace(parse_problem(form(overlaps=[], host_memory=None)), device_memory=(2.0,))
    found = schedule(away, microbatches=6)
    assert (found.period, found.period_microbatches, found.schedule.peak_memory()) == (6, 1, {"d": 2})
    assert len(found.schedule.offloads) == 6


def test_what_can_be_earlier_is_earlier():
    """The copies out begin at once, the copies back when their memory is free or their block is near."""
    late = good()
    slow = Schedule(problem=late.problem, starts=2 * late.starts, moves=2 * late.moves)
    assert find_problems(slow) == []
    played = earliest(slow)
    assert find_problems(played) == []
    assert played.makespan < 15.5
    assert played.pairs == late.pairs
    assert len(played.offloads) == 2


def test_with_little_effort_pairs_are_no_worse_than_none():
    """They once were: the search without them had a part of the effort, and its period of 5 was 6 with them."""
    plain = chain(range(8), backward=2.0, memory=5)
    pairs = tuple(Overlap(blocks=(stage, 15 - stage), time=2.94) for stage in (1, 5))
    alone, together = (schedule(item, microbatches=16, effort=1.0) for item in (plain, replace(plain, overlaps=pairs)))
    assert together.schedule.makespan <= alone.schedule.makespan * (1 + 1e-9)
    rates = [item.period / item.period_microbatches for item in (alone, together)]
    assert rates[1] <= rates[0] * (1 + 1e-9)


def test_memory_that_is_back_for_an_instant_is_found():
    """Its copies take no time, and models of intervals did not have it: what was found was 52 % above the optimum."""
    case = random_joint_problem(5086)
    assert case.problem.instants
    assert not without_instants(case.problem).instants
    verdict = compare_joint(case, lambda problem, number: schedule(problem, microbatches=number, effort=2.0))
    assert not verdict.complaints
    assert verdict.gap == 0
