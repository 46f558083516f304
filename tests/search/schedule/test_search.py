"""The search as a whole: small and large numbers of micro-batches, limits, interruptions, and the same result each time."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap

import pytest

import weft
from benchmarks.schedule_shapes import SHAPES, shape
from tests.search.schedule.oracle import min_makespan
from tests.search.schedule.pipelines import both_ways, chain, over_and_back, round_and_round, uneven
from weft.base.errors import InputError
from weft.search.schedule.named import NAMED, named_schedules
from weft.search.schedule.schedule import check_schedule
from weft.search.schedule.search import schedule
from weft.search.schedule.tuning import TUNING

NAMED_PROBLEMS = {
    **{name: shape(name, 4, memory=6) for name in SHAPES},
    "six stages, little memory": shape("v", 6, memory=2),
    "split": chain(range(4), weight=1.0, memory=4),
    "over and back, split": chain(over_and_back(3), weight=1.0, memory=6),
    "round and round": chain(round_and_round(3, 2), memory=8),
    "both ways, split": both_ways(4, weight=1.0, memory=8),
    "uneven": uneven(chain(range(5), memory=5), 1, transfers="delay"),
    "uneven on links": uneven(chain(range(4), weight=1.0, memory=4), 2, transfers="link"),
    "uneven over and back": uneven(chain(over_and_back(3), weight=1.0, memory=6), 3)}


def test_it_is_what_the_package_offers():
    assert weft.schedule is schedule


@pytest.mark.parametrize("name", SHAPES)
def test_one_micro_batch(name):
    problem = shape(name, 4, memory=2)
    result = schedule(problem, microbatches=1, time_limit=5.0)
    assert (result.status, result.schedule.num_microbatches) == ("optimal", 1)
    assert result.makespan == result.makespan_bound == min_makespan(problem, 1).makespan
    check_schedule(result.schedule)


@pytest.mark.parametrize("num_microbatches", [2, 3, 5])
def test_fewer_micro_batches_than_stages(num_microbatches):
    result = schedule(shape("v", 8, memory=8), microbatches=num_microbatches, time_limit=5.0)
    assert (result.status, result.makespan) == ("optimal", 4 * (num_microbatches + 7))
    assert result.period == 4.0, "the steady state does not depend on the number"
    check_schedule(result.schedule)


@pytest.mark.parametrize("problem", [shape("nn", 4, memory=6), uneven(shape("m", 4, memory=5), 4, transfers="link")],
                         ids=["nn", "uneven m"])
@pytest.mark.parametrize("time_limit", [1e-9, 1e-3, 0.1])
def test_a_short_time_limit(problem, time_limit):
    result = schedule(problem, microbatches=24, time_limit=time_limit)
    check_schedule(result.schedule)
    assert result.makespan_bound <= result.makespan
    assert result.schedule.num_microbatches == 24
    assert not result.is_interrupted


@pytest.mark.parametrize("call", [1, 2, 5, 8])
def test_ctrl_c_in_a_report(call):
    """From the first line on there is a schedule; whatever was interrupted, the best so far comes back."""
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        if len(lines) == call:
            raise KeyboardInterrupt

    result = schedule(shape("nn", 4, memory=5), microbatches=9, progress=progress)
    assert result.is_interrupted
    assert len(lines) == call, "nothing more is begun"
    check_schedule(result.schedule)
    assert result.makespan_bound <= result.makespan
    assert result.to_json()["microbatches"] == 9


@pytest.mark.parametrize("name", NAMED_PROBLEMS)
def test_never_worse_than_named(name):
    problem = NAMED_PROBLEMS[name]
    for number in (3, 7):
        named = named_schedules(problem, number)
        result = schedule(problem, microbatches=number, time_limit=0.3)
        check_schedule(result.schedule)
        assert result.makespan <= min((item.makespan for item in named.values()), default=float("inf")) * (1 + 1e-9)
        assert result.by == "search" or named[result.by].makespan == result.makespan


def test_enough_of_them_have_named_schedules():
    assert sum(len(named_schedules(problem, 7)) for problem in NAMED_PROBLEMS.values()) >= 20


def test_progress_names_best_and_bound():
    lines: list[str] = []
    result = schedule(shape("v", 4, memory=3), microbatches=8, time_limit=2.0, progress=lines.append)
    offers = [line.partition(": makespan ") for line in lines]
    found = [float(rest.split(",")[0]) for by, is_told, rest in offers if is_told and by in ("search", *NAMED)]
    assert found[-1] == result.makespan
    assert all(before > after for before, after in itertools.pairwise(found))
    assert any("3 per period, trying 16" in line for line in lines)
    assert all("bound" in line for line in lines)


def test_the_same_seed_gives_the_same_result_in_every_process():
    """Whole and real times, links, memory, several per period; whatever the order of sets of strings."""
    script = textwrap.dedent("""
        import json
        from tests.search.schedule.random_problems import random_problem
        from weft.base.errors import NoFeasiblePlan
        from weft.search.schedule.search import schedule
        from benchmarks.schedule_shapes import shape
        cases = [random_problem(seed, max_instances=16) for seed in range(8000, 8012)]
        inputs = [(case.problem, case.num_microbatches) for case in cases] + [(shape("v", 3, memory=2), 7)]
        for problem, number in inputs:
            try:
                result = schedule(problem, microbatches=number, seed=7).to_json()
                del result["seconds"]
            except NoFeasiblePlan as error:
                result = str(error)
            print(json.dumps(result))
    """)
    outputs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}).stdout
               for seed in ("0", "12345")]
    assert outputs[0].count("makespan_bound") >= 6
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("options", "message"), [
    ({"microbatches": 0}, "must be 1 or more, not 0"), ({"microbatches": TUNING.max_instances}, "try fewer micro-batches"),
    ({"microbatches": 2, "time_limit": 0.0}, "must be more than 0 seconds"),
    ({"microbatches": 2, "time_limit": float("nan")}, "must be more than 0 seconds")])
def test_wrong_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        schedule(shape("v", 2, memory=2), **options)
