"""Named schedules keep the promises of their authors: makespans, bubbles and memory in closed form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from benchmarks.schedule_shapes import shape
from tests.search.schedule.pipelines import both_ways, chain, over_and_back, round_and_round, together, uneven
from weft.plan.orders import by_pattern
from weft.search.schedule.named import NAMED, NotApplicable, compare_named, named_schedules
from weft.search.schedule.problem import ScheduleProblem, load_problem, with_memory
from weft.search.schedule.schedule import Schedule, check_schedule, find_problems

PROBLEMS = Path(__file__).resolve().parents[3] / "benchmarks" / "problems" / "schedule"

APPLY = {
    "v-train-mem4": {"gpipe", "1f1b"}, "v-train-mem3": {"gpipe", "1f1b"}, "x-train-mem4": {"gpipe", "chimera", "dualpipe"},
    "m-train-mem6": {"gpipe", "1f1b+"}, "m-train-mem5": {"gpipe", "1f1b+"}, "nn-train-mem6": {"gpipe", "1f1b+"},
    "k-train-mem6": {"gpipe", "1f1b+"}, "zb-p4": {"gpipe", "1f1b", "zb-h1", "zb-h2"},
    "zbv-p4": {"gpipe", "1f1b", "zbv", "dualpipev", "v-half", "v-min"},
    "zbv-p4-comm": {"gpipe", "1f1b", "zbv", "dualpipev", "v-half", "v-min"},
    **{f"{name}-infer": {"forward-only"} for name in ("v", "x", "m", "nn", "k")}}
"""Which schedules each problem of the evaluation has."""


def load(name: str) -> ScheduleProblem:
    return load_problem(PROBLEMS / f"{name}.json")


def made(name: str, problem: ScheduleProblem, num_microbatches: int) -> Schedule:
    """Return the schedule, which must break no rule but that of memory."""
    schedule = NAMED[name](problem, num_microbatches)
    unlimited = with_memory(problem, dict.fromkeys(problem.device_names))
    check_schedule(replace(schedule, problem=unlimited))
    return schedule


def steady(name: str, problem: ScheduleProblem) -> float:
    """Return the time per micro-batch of a long schedule."""
    return (made(name, problem, 60).makespan - made(name, problem, 36).makespan) / 24


def peak(schedule: Schedule) -> float:
    return max(schedule.peak_memory().values())


def span(schedule: Schedule, device: int) -> float:
    """Return the time from the device's first start to its last end."""
    tasks = list(schedule.problem.resource_tasks[device])
    return float(schedule.ends[tasks].max() - schedule.starts[tasks].min())


# ---- which apply ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", APPLY)
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_which_apply(file, num_microbatches):
    rows = compare_named(load(file), num_microbatches)
    assert [row.name for row in rows] == list(NAMED)
    assert {row.name for row in rows if row.schedule} == APPLY[file]
    usable = named_schedules(load(file), num_microbatches)
    assert list(usable) == [row.name for row in rows if row.is_usable]
    for row in rows:
        if row.schedule is None:
            assert row.reason.startswith(f"{row.name} does not apply: ")
        else:
            assert row.reason == "; ".join(find_problems(row.schedule))


def test_rows_say_which_device_holds_too_much():
    rows = {row.name: row for row in compare_named(load("v-train-mem3"), 8)}
    assert rows["1f1b"].reason == "d0 holds 4 at its fullest, its memory is 3"
    assert rows["1f1b"].schedule is not None
    assert not rows["1f1b"].is_usable
    assert not named_schedules(load("v-train-mem3"), 8)
    assert set(named_schedules(load("v-train-mem4"), 8)) == {"1f1b"}
    with pytest.raises(NotApplicable, match="zbv does not apply: no backward is split into input and weight gradient"):
        NAMED["zbv"](load("v-train-mem4"), 8)


def test_problems_that_are_not_recognised_have_none():
    mixed = together(shape("v", 4, memory=None), shape("v", 4, memory=None, training=False))
    assert not named_schedules(mixed, 4)
    assert all("no pipelines that are known here" in row.reason for row in compare_named(mixed, 4))


def test_placements_that_are_almost_right():
    skewed = together(chain([0, 1, 2]), chain([1, 2, 0]))
    for name, problem in (("chimera", skewed), ("dualpipe", both_ways(3)), ("interleaved", chain([0, 1, 2, 0])),
                          ("zbv", chain([0, 1, 2, 2, 0, 1], weight=1.0)), ("zb-h1", both_ways(4, weight=1.0)),
                          ("1f1b", both_ways(4)), ("zbv", chain([(0, 1), (1, 2), (1, 2), (0, 1)], weight=1.0))):
        with pytest.raises(NotApplicable):
            NAMED[name](problem, 4)


# ---- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 1), (3, 2), (4, 8), (8, 5), (8, 20)])
@pytest.mark.parametrize("weight", [None, 1.0])
def test_gpipe_and_1f1b(num_stages, num_microbatches, weight):
    problem = chain(range(num_stages), forward=1.0, backward=2.0, weight=weight)
    # The stage before need not wait for weight gradients.
    makespan = (num_microbatches + num_stages - 1) * 3.0 + num_microbatches * (weight or 0.0)
    gpipe = made("gpipe", problem, num_microbatches)
    assert gpipe.makespan == makespan
    assert peak(gpipe) == num_microbatches
    schedule = made("1f1b", problem, num_microbatches)
    assert schedule.makespan == makespan
    assert list(schedule.peak_memory().values()) == [
        min(num_stages - stage, num_microbatches) for stage in range(num_stages)]


@pytest.mark.parametrize(("num_devices", "num_chunks", "rounds"), [(2, 2, 1), (4, 2, 2), (4, 3, 3), (8, 2, 2)])
def test_interleaved(num_devices, num_chunks, rounds):
    problem = chain(round_and_round(num_devices, num_chunks), forward=1.0, backward=2.0)
    schedule = made("interleaved", problem, rounds * num_devices)
    assert schedule.makespan == 3.0 * (rounds * num_devices * num_chunks + num_devices - 1)
    assert peak(schedule) <= num_devices * num_chunks + num_devices - 1


@pytest.mark.parametrize("num_microbatches", [1, 3, 5, 6, 7, 11])
def test_interleaved_without_whole_groups(num_microbatches):
    problem = chain(round_and_round(4, 2), forward=1.0, backward=2.0)
    below, above = num_microbatches // 4 * 4, -(-num_microbatches // 4) * 4
    assert made("interleaved", problem, num_microbatches).makespan <= made("interleaved", problem, above).makespan
    assert made("interleaved", problem, num_microbatches).makespan > 3.0 * 2 * below


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_zb_h1(num_devices):
    for num_microbatches in (2 * num_devices, 3 * num_devices + 1):
        schedule = made("zb-h1", chain(range(num_devices), weight=1.0), num_microbatches)
        assert schedule.makespan == 3 * num_microbatches + num_devices - 1  # a third of 1F1B's bubble
        assert set(schedule.peak_memory().values()) == {num_devices}


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_zb_h2_leaves_no_gap(num_devices):
    num_microbatches = 3 * num_devices
    schedule = made("zb-h2", chain(range(num_devices), weight=1.0), num_microbatches)
    assert schedule.peak_memory()["d0"] == peak(schedule) == 2 * num_devices - 1
    assert [span(schedule, device) for device in range(num_devices)] == [3 * num_microbatches] * num_devices


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 8])
def test_zbv_starts_late_and_then_leaves_no_gap(num_devices):
    for num_microbatches in (2 * num_devices, 3 * num_devices + 1):
        problem = chain(over_and_back(num_devices), weight=1.0, amount=0.5)
        schedule = made("zbv", problem, num_microbatches)
        assert schedule.makespan == 6 * num_microbatches + num_devices - 1
        assert set(schedule.peak_memory().values()) == {num_devices}


AFTER_WORK = {"zbv": lambda p: p - 1, "dualpipev": lambda p: p - 1, "v-half": lambda p: 3 * p - 4,
              "v-min": lambda p: 4 * p - (5 if p % 3 else 3)}
"""How much longer than the work of a device a V schedule of p devices takes, with equal times."""
HALVES = {"zbv": lambda p: 2 * p, "dualpipev": lambda p: 2 * p + 1, "v-half": lambda p: (p + 2) // 2 * 2,
          "v-min": lambda p: (p + 4) // 3 * 2}
"""Half stages that a device of p holds at most, by the authors."""


@pytest.mark.parametrize("name", [*AFTER_WORK])
@pytest.mark.parametrize("num_devices", [3, 4, 5, 8, 16])
def test_v_schedules_in_closed_form(name, num_devices):
    problem = chain(over_and_back(num_devices), weight=1.0, amount=1.0)
    for num_microbatches in (2 * num_devices, 3 * num_devices + 1):
        schedule = made(name, problem, num_microbatches)
        assert schedule.makespan == 6 * num_microbatches + AFTER_WORK[name](num_devices)
        assert peak(schedule) == HALVES[name](num_devices)
    assert AFTER_WORK["v-min"](num_devices) <= 2 / 3 * 6 * (num_devices - 1) + 2, "two thirds of 1F1B's bubble, about"


@pytest.mark.parametrize("name", [*AFTER_WORK])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
def test_v_schedules_of_few_micro_batches(name, num_microbatches):
    for num_devices in range(1, 17):
        schedule = made(name, chain(over_and_back(num_devices), weight=1.0), num_microbatches)
        assert peak(schedule) <= min(2 * num_microbatches, HALVES[name](num_devices))
        # One micro-batch alone takes 4p and a last weight gradient; a device adds 6 for each of the others at most.
        assert schedule.makespan <= 4 * num_devices + 1 + 6 * num_microbatches


@pytest.mark.parametrize("num_devices", [2, 3, 4, 6])
def test_dualpipev_with_whole_backwards(num_devices):
    problem = chain(over_and_back(num_devices), backward=2.0)
    schedule = made("dualpipev", problem, 3 * num_devices)
    assert peak(schedule) <= 2 * num_devices + 1
    assert steady("dualpipev", problem) == 6


def from_pytorch(schedule: type, num_devices: int, num_microbatches: int) -> list[list[tuple[str, int]]]:
    """Return forwards and input gradients of each device, F0, I1 and so on, in the order of a class of PyTorch."""
    asked = SimpleNamespace(pp_group_size=num_devices, num_stages=2 * num_devices, _n_microbatches=num_microbatches)
    rows = []
    for device in range(num_devices):
        actions = [part for action in schedule._calculate_single_rank_operations(asked, device) if action is not None
                   for part in action.sub_actions or (action,)]
        rows.append([(f"{'F' if part.computation_type.name == 'FORWARD' else 'I'}{int(part.stage_index != device)}",
                      part.microbatch_index) for part in actions if part.computation_type.name != "BACKWARD_WEIGHT"])
    return rows


@pytest.mark.parametrize(("name", "theirs"), [("zbv", "ScheduleZBVZeroBubble"), ("dualpipev", "ScheduleDualPipeV")])
@pytest.mark.parametrize("num_devices", [2, 3, 4, 7])
def test_v_schedules_are_those_of_pytorch(name, theirs, num_devices):
    for num_microbatches in (2 * num_devices, 2 * num_devices + 1, 5 * num_devices):
        assert from_pytorch(getattr(schedules, theirs), num_devices, num_microbatches) == [
            by_pattern(name, device, num_devices, num_microbatches) for device in range(num_devices)]


def test_figures_of_the_evaluation():
    figures = {(file, name, number): made(name, load(file), number).makespan for file, name, number in (
        ("zb-p4", "zb-h1", 8), ("zb-p4", "zb-h2", 8), ("zbv-p4", "zbv", 8), ("zbv-p4", "zbv", 12),
        ("zbv-p4-comm", "zbv", 8), ("v-train-mem4", "1f1b", 8), ("v-train-mem4", "1f1b", 128),
        ("v-infer", "forward-only", 8), ("x-infer", "forward-only", 8), ("m-infer", "forward-only", 8),
        ("nn-infer", "forward-only", 8), ("k-infer", "forward-only", 8))}
    assert list(figures.values()) == pytest.approx([27, 27, 25.5, 37.5, 27.1, 44, 524, 11, 18, 19, 27, 17])
    for file, names in (("zb-p4", {"1f1b", "zb-h1"}), ("zbv-p4", {"1f1b", "zbv", "v-half", "v-min"})):
        assert set(named_schedules(load(file), 12)) == names


@pytest.mark.parametrize(("name", "num_devices", "period"), [
    ("m", 4, 8), ("nn", 4, 10), ("k", 4, 8), ("m", 8, 8), ("nn", 16, 10), ("k", 8, 8)])
def test_1f1b_plus_waits_for_all_devices_at_its_shared_blocks(name, num_devices, period):
    problem = shape(name, num_devices, memory=None)
    schedule = made("1f1b+", problem, 60)
    assert steady("1f1b+", problem) == period
    assert peak(schedule) <= num_devices


def test_1f1b_plus_alternates_shared_blocks_and_stages():
    problem = shape("m", 2, memory=None)
    order = [f"{problem.task_names[task]}.{number}" for task, number in made("1f1b+", problem, 3).orders()[0]]
    assert order == ["f0.0", "f1.0", "f0.1", "f1.1", "b1.0", "b2.0", "f0.2", "f1.2", "b1.1", "b2.1", "b1.2", "b2.2"]


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 3])
def test_chimera_with_equal_times(num_devices, rounds):
    schedule = made("chimera", both_ways(num_devices), rounds * num_devices // 2)
    # A unit of p micro-batches takes 2p slots; the first one comes with p - 2 idle ones, half of 1F1B's bubble or less.
    assert schedule.makespan == 2 * num_devices * rounds + num_devices - 2
    peaks = list(schedule.peak_memory().values())
    assert peaks == peaks[::-1]
    assert num_devices // 2 + 1 == peaks[0] <= max(peaks) <= num_devices


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("weight", [None, 1.0])
def test_dualpipe_holds_one_more_than_devices(num_devices, weight):
    num_microbatches = 2 * num_devices
    schedule = made("dualpipe", both_ways(num_devices, weight=weight), num_microbatches)
    assert peak(schedule) <= num_devices + 1
    work = 2 * num_microbatches * (2 if weight is None else 3)
    assert schedule.makespan - work <= 2 * (num_devices - 1)
    assert steady("dualpipe", both_ways(num_devices, weight=weight)) == work / num_microbatches


# ---- everything else --------------------------------------------------------------------------------------------------


def test_groups_of_devices_run_as_one():
    alone, grouped = chain(over_and_back(2), weight=1.0), chain([(0, 1), (2, 3), (2, 3), (0, 1)], weight=1.0)
    for name in ("gpipe", "1f1b", "zbv", "v-half", "v-min", "dualpipev"):
        assert made(name, grouped, 5).makespan == made(name, alone, 5).makespan


def test_pipelines_beside_each_other_run_as_if_alone():
    names = ("d0", "d1", "d2", "d3")
    first = replace(chain([0, 1], weight=1.0), device_names=names, device_memory=(None,) * 4)
    second = replace(chain([2, 3], weight=1.0), device_names=names, device_memory=(None,) * 4)
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert made(name, together(first, second), 6).makespan == made(name, chain([0, 1], weight=1.0), 6).makespan


def test_a_v_of_inference_without_memory_runs_forward_only():
    problem = replace(chain([0, 1, 2, 3]), blocks=tuple(
        replace(block, memory=0.0) for block in chain([0, 1, 2, 3]).blocks))
    assert made("forward-only", problem, 8).makespan <= made("1f1b", problem, 8).makespan


def test_weight_gradients_come_early_where_memory_is_short():
    problem = chain(range(4), weight=1.0, memory=4.0)
    tight = with_memory(problem, {"d3": 1.0, "d2": 2.0})
    assert "zb-h1" in named_schedules(tight, 8)
    assert made("zb-h1", tight, 8).peak_memory() == {"d0": 4, "d1": 4, "d2": 2, "d3": 1}


def shapes(num_devices: int, kind: str) -> ScheduleProblem:
    match kind:
        case "v" | "x" | "m":
            return shape(kind, num_devices, memory=None)
        case "nn" | "k":
            return shape(kind, num_devices + num_devices % 2, memory=None)
        case "split":
            return chain(range(num_devices), weight=1.0)
        case "over and back":
            return chain(over_and_back(num_devices), weight=1.0)
        case "round":
            return chain(round_and_round(num_devices, 3))
        case "both ways":
            return both_ways(num_devices, weight=1.0)
        case _:
            return shape("m", num_devices, memory=None, training=False)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(kind=st.sampled_from(["v", "x", "m", "nn", "k", "split", "over and back", "round", "both ways", "infer"]),
       num_devices=st.integers(2, 8), num_microbatches=st.integers(1, 12), seed=st.integers(0, 99),
       transfers=st.sampled_from(["none", "delay", "link"]))
def test_any_times_and_numbers(kind, num_devices, num_microbatches, seed, transfers):
    even, problem = shapes(num_devices, kind), uneven(shapes(num_devices, kind), seed, transfers=transfers)
    rows = {row.name: row.schedule for row in compare_named(problem, num_microbatches)}
    assert [name for name, schedule in rows.items() if schedule] == list(named_schedules(even, num_microbatches))
    work = max(problem.device_work[: problem.num_devices]) * num_microbatches
    for schedule in rows.values():
        if schedule is not None:
            check_schedule(schedule)
            assert schedule.makespan >= work * (1 - 1e-9)
    held = {name: peak(schedule) for name, schedule in rows.items() if schedule}
    limits = {"1f1b": num_devices if kind in ("v", "split") else 6 * num_devices, "zb-h1": num_devices,
              "zb-h2": 2 * num_devices - 1, **{name: most(num_devices) for name, most in HALVES.items()},
              "interleaved": 4 * num_devices - 1, "chimera": num_devices + num_devices % 2, "dualpipe": num_devices + 1}
    assert {name: held[name] for name in limits if name in held and held[name] > limits[name]} == {}


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zbv"])
def test_split_backward_is_worth_it(name):
    ratios = []
    for seed in range(20):
        places = over_and_back(4) if name == "zbv" else range(4)
        problem = uneven(chain(places, weight=1.0), seed)
        ratios.append(made(name, problem, 8).makespan / made("1f1b", problem, 8).makespan)
    assert max(ratios) <= 1.05
    assert sum(ratios) / len(ratios) <= 0.98


def test_the_same_again():
    problem = uneven(chain(over_and_back(4), weight=1.0), 3, transfers="link")
    first, second = named_schedules(problem, 7), named_schedules(problem, 7)
    assert all((first[name].starts == second[name].starts).all() for name in first)


def test_many_stages_and_microbatches():
    schedules = named_schedules(chain(over_and_back(16), weight=1.0), 128)
    assert schedules["zbv"].makespan == 6 * 128 + 15
    assert steady("zb-h1", chain(range(16), weight=1.0)) == 3
