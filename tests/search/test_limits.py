"""Time limits and Ctrl-C: whatever a search is doing, it ends soon after, and what it had is the answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.limit_cases import place_cluster, place_graph, schedule_problem, strategy_graph
from tests.search.joint.worlds import equal_problem
from weft.base.compiled import compiled
from weft.base.errors import NoFeasiblePlan
from weft.cli.main import main
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.explain import whatif
from weft.model.graph_file import parse_graph
from weft.plan.check import check_plan
from weft.plan.plan import load_plan
from weft.planning import compare as planner
from weft.planning import fit as fitting
from weft.planning.compare import compare_strategies
from weft.search.common import budget as budgets
from weft.search.common.budget import Budget, OutOfTime, cut_short, ended_by_ctrl_c, time_budget
from weft.search.deploy import search as deploying
from weft.search.joint import search as joint
from weft.search.place import search as placing
from weft.search.place.problem import problem_from_graph
from weft.search.schedule import search as scheduling
from weft.search.schedule.problem import parse_problem
from weft.search.strategies.search import Search, first_choice, lowest_cost, solve
from weft.search.strategies.strategy_graph import evaluate, parse_strategy_graph

LIMIT_S = 0.05
TOO_LONG_S = 20.0


def endless(*arguments, **options):
    """Work that nobody asks for the time; it ends so that a test fails rather than hangs."""
    end = time.monotonic() + TOO_LONG_S
    while time.monotonic() < end:
        pass
    raise AssertionError("nothing has ended it")


class Clock:
    """Goes on by a step whenever it is looked at."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s, self.num_looks = 0.0, step_s, 0

    def __call__(self) -> float:
        self.num_looks += 1
        self.now += self.step_s
        return self.now


def test_a_budget_counts_by_its_clock_and_not_while_it_is_paused():
    budget = Budget(effort=float("inf"), deadline=10.0, clock=Clock(1.0))
    assert budget.seconds_left == 9.0
    assert budget.part(0.5).deadline == 3.0 + 0.5 * 8.0
    assert budget.has_s(2.0)
    assert not budget.has_s(9.0)
    with budget.paused():
        for _ in range(20):
            budget.clock()
    assert (budget.paused_s, budget.deadline) == (21.0, 31.0)
    assert not budget.is_late
    assert Budget(effort=1.0).part(0.5).deadline is None


@pytest.mark.parametrize("seconds", [1e12, 1e300])
def test_a_limit_beyond_what_clocks_count_is_none(seconds):
    outside_s = signal.setitimer(signal.ITIMER_REAL, 0)[0]  # the alarm of the test's own limit
    try:
        with cut_short(time.monotonic() + seconds), cut_short(time.monotonic() + 2 * seconds):
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 1e6
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, outside_s)


def test_work_that_never_asks_for_the_time_is_cut_short_and_no_longer_than_inside():
    handler, before_s = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    with pytest.raises(OutOfTime), cut_short(time.monotonic() + LIMIT_S):
        endless()
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] <= before_s
    with cut_short(time.monotonic() + TOO_LONG_S):
        with pytest.raises(OutOfTime), cut_short(time.monotonic() + LIMIT_S):
            endless()
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= TOO_LONG_S


def test_the_sooner_of_two_deadlines_counts_and_the_outer_one_comes_again():
    seen = []

    def work():
        try:
            with cut_short(time.monotonic() + TOO_LONG_S):
                endless()
        except OutOfTime:
            seen.append("inner")
        endless()

    with pytest.raises(OutOfTime), cut_short(time.monotonic() + LIMIT_S):
        work()
    assert seen == ["inner"]


def test_other_threads_and_packages_that_mind_are_not_interrupted(monkeypatch):
    done = []

    def work():
        with cut_short(time.monotonic() - 1.0):
            done.append(sum(range(1000)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
    monkeypatch.setattr(budgets, "NOT_INSIDE", frozenset((__name__.partition(".")[0],)))
    with cut_short(time.monotonic() - 1.0):
        end = time.monotonic() + 3 * budgets.AGAIN_S
        while time.monotonic() < end:
            pass


def test_what_python_calls_on_its_own_is_not_interrupted_but_what_comes_after_it(monkeypatch):
    lost = []
    monkeypatch.setattr("sys.unraisablehook", lost.append)

    class Slow:
        def __del__(self):
            end = time.monotonic() + 3 * budgets.AGAIN_S
            while time.monotonic() < end:
                pass

    with pytest.raises(OutOfTime), cut_short(time.monotonic() + budgets.AGAIN_S):  # noqa: PT012
        item = Slow()
        del item
        endless()
    assert not lost


def test_the_end_of_an_outer_time_is_not_taken_for_that_of_the_first_strategy(monkeypatch):
    def ended(*arguments, **options):
        raise OutOfTime

    monkeypatch.setitem(planner.STRATEGIES, "data-parallel", ended)
    with pytest.raises(OutOfTime):  # it was ValueError: nothing to take the best of
        compare_strategies(equal_problem(), ["data-parallel"], time_limit_s=LIMIT_S)


def test_records_that_numpy_compares_do_not_make_a_type_error_of_the_end():
    records = np.zeros(3, dtype="i8,i8")
    for _ in range(20):
        with pytest.raises(OutOfTime), cut_short(time.monotonic() + 1e-3):  # noqa: PT012
            while True:
                _ = records[1:] != records[:-1]  # numpy asks Python for the dtype of both


def test_time_that_runs_out_inside_compiled_code_counts_when_it_returns(monkeypatch):
    """Was: a list schedule of 6,000 operators went on for 16 s, since what came back was always being unpacked."""
    @compiled
    def busy():
        end = time.monotonic() + 3 * budgets.AGAIN_S
        while time.monotonic() < end:
            pass

    busy.dispatcher = busy.function
    monkeypatch.setattr(budgets, "NOT_IN_FUNCTION", frozenset(("busy",)))
    with pytest.raises(OutOfTime), cut_short(time.monotonic() + budgets.AGAIN_S):  # noqa: PT012
        for _ in range(3):
            busy()


def test_a_pause_inside_moves_the_end_and_nothing_is_raised_in_it():
    budget = time_budget(4 * LIMIT_S)
    seen = []

    def work():
        with budget.paused():
            end = time.monotonic() + 8 * LIMIT_S
            while time.monotonic() < end:
                pass
        seen.append(budget.paused_s)
        endless()

    with pytest.raises(OutOfTime), cut_short(budget):
        work()
    assert seen[0] >= 8 * LIMIT_S
    assert budget.is_late


def test_ctrl_c_that_tracing_swallows_is_raised_after_it():
    budget, before, done = time_budget(None), signal.getsignal(signal.SIGINT), []

    def swallow():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        done.append("traced")

    with pytest.raises(KeyboardInterrupt), budget.paused():
        swallow()
    assert done == ["traced"]
    assert signal.getsignal(signal.SIGINT) is before
    with ended_by_ctrl_c(budget), budget.paused():  # whoever marks it has not lost it
        swallow()
    assert budget.is_interrupted


def test_ctrl_c_in_a_search_inside_another_ends_both():
    outer, inner, later = time_budget(None), time_budget(None), time_budget(None)
    before = signal.getsignal(signal.SIGINT)
    with ended_by_ctrl_c(outer):
        with ended_by_ctrl_c(inner):
            signal.raise_signal(signal.SIGINT)
        with ended_by_ctrl_c(later):
            pass
    assert signal.getsignal(signal.SIGINT) is before
    assert (outer.is_interrupted, inner.is_interrupted, later.is_interrupted) == (True, True, False)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_joint_search_that_takes_for_ever_leaves_the_plans_before_it(monkeypatch):
    problem = equal_problem()
    monkeypatch.setattr(planner, "joint_search", endless)
    found = compare_strategies(problem, ["single"], joint=True, time_limit_s=LIMIT_S)
    assert [item.strategy for item in found.candidates] == ["single"]
    assert not found.is_complete
    assert not found.is_interrupted
    check_plan(found.best.plan, problem.graph, problem.cluster)


def test_a_deadline_around_a_comparison_that_has_nothing_yet_ends_it_all(monkeypatch):
    monkeypatch.setattr(planner, "joint_search", endless)
    with pytest.raises(OutOfTime), cut_short(time.monotonic() + LIMIT_S):
        compare_strategies(equal_problem(), [], joint=True, time_limit_s=TOO_LONG_S)


def test_the_joint_search_keeps_what_it_had_when_it_is_cut_short(monkeypatch):
    problem = equal_problem()
    original, calls = joint.evaluate, []

    def first_only(*arguments):
        calls.append(arguments)
        return original(*arguments) if len(calls) == 1 else endless()

    monkeypatch.setattr(joint, "evaluate", first_only)
    with cut_short(time.monotonic() + 1.0):
        found = joint.joint_search(problem)
    assert len(calls) == 2
    check_plan(found.plan, problem.graph, problem.cluster)


def test_estimates_end_a_look_at_the_clock_after_the_deadline():
    clock = Clock(1.0)
    estimator = joint.Estimator(joint.Chain(equal_problem(), {}))
    ranked, _ = joint.rank_settings(estimator, budget=Budget(effort=float("inf"), deadline=3.0, clock=clock),
                                    progress=lambda text: None)
    assert len(ranked) >= 1
    assert clock.num_looks <= 4


def test_ctrl_c_in_the_joint_search_writes_the_best_and_says_what_was_interrupted(monkeypatch, tmp_path, capsys):
    original, out = joint.evaluate, tmp_path / "plan.json"

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(joint, "evaluate", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main(["plan", "gpt2-tiny", "2 x A100-80GB", "--batch", "4", "--no-deploy", "-o", str(out)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    text = capsys.readouterr().err
    assert "interrupted during the search of joint; the best so far" in text
    assert f"is written to {out}" in text
    assert "joint: " in text
    assert load_plan(out).search.step_time
    assert main(["check", str(out)]) == 0


def test_the_fewest_devices_known_are_the_answer_when_the_time_is_up():
    from weft.planning.objectives import Target, fewest_devices

    problem = equal_problem()
    found = fewest_devices(problem, Target(text="slow", step_time_s=1e9), lambda part, splits: compare_strategies(
        part, ["single", "data-parallel"]), splits={}, costs_of=lambda graph, cluster: estimate_costs(graph, cluster),
        is_late=lambda: True)
    assert len(found.devices) == problem.cluster.num_devices
    assert len(found.attempts) == 1


def test_a_change_that_is_not_planned_in_time_is_listed(monkeypatch):
    problem = equal_problem()
    plan = compare_strategies(problem, ["data-parallel"]).best
    monkeypatch.setattr(whatif, "_try", endless)
    request = whatif.Request(graph=problem.graph, options=problem.options,
                             costs_of=lambda graph, cluster: estimate_costs(graph, cluster))
    changes = [*whatif.what_would_help(request, problem.cluster, plan.timeline, None,
                                       time_budget(LIMIT_S))]
    notes = [item.note for item in changes]
    assert "the time limit ended the search before anything was known" in notes
    assert "not tried: the time limit was reached" in notes
    assert all(item.step_time_s is None for item in changes)


def test_fit_says_which_strategies_fit_of_those_it_had_time_for(monkeypatch):
    problem = equal_problem()
    monkeypatch.setattr(fitting._Fitter, "_copies", endless)
    found = fitting.fit(problem, budget=time_budget(LIMIT_S))
    assert [item.setting.strategy for item in found.candidates] == ["single"]
    assert not found.is_complete


def test_a_deployment_that_is_cut_short_is_at_least_data_parallel(monkeypatch):
    problem = equal_problem()
    monkeypatch.setattr(deploying, "_seed", endless)
    found = deploying.deploy(problem, budget=time_budget(LIMIT_S))
    check_plan(found.plan, problem.graph, problem.cluster)
    assert found.plan.search.status == "feasible"


def test_ctrl_c_keeps_what_fits_and_the_fewest_devices_that_are_known(monkeypatch):
    from weft.planning.objectives import Target, fewest_devices

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    problem, budget = equal_problem(), time_budget(None)
    monkeypatch.setattr(fitting._Fitter, "_copies", interrupted)
    found = fitting.fit(problem, budget=budget)
    assert [item.setting.strategy for item in found.candidates] == ["single"]
    assert (found.is_complete, budget.is_interrupted) == (False, True)

    sizes = []

    def search(part, splits):
        sizes.append(part.cluster.num_devices)
        return compare_strategies(part, ["single"]) if len(sizes) == 1 else interrupted()

    reached = fewest_devices(problem, Target(text="slow", step_time_s=1e9), search, splits={},
                             costs_of=lambda graph, cluster: estimate_costs(graph, cluster))
    assert len(sizes) == 2
    assert len(reached.devices) == problem.cluster.num_devices
    assert reached.comparison.is_interrupted


def test_a_deployment_that_may_fit_with_more_time_is_not_called_impossible(monkeypatch):
    monkeypatch.setattr(deploying, "_seed", endless)

    def nothing_fits(*arguments):
        raise NoFeasiblePlan("a0 has too little", missing_bytes=5, device="a0")

    monkeypatch.setattr(deploying, "evaluate_plan", nothing_fits)
    with pytest.raises(NoFeasiblePlan, match="within the time limit, though there may be one") as caught:
        deploying.deploy(equal_problem(), budget=time_budget(LIMIT_S))
    assert (caught.value.missing_bytes, caught.value.device) == (5, "a0")


# ---- problem files -----------------------------------------------------------------------------------------------------


def graph_problem(num_ops: int = 500, *, memory: str = "80GB"):
    cluster = parse_cluster(place_cluster(4, every_link=True, memory=memory))
    graph = parse_graph(place_graph(num_ops, "layered", 1))
    return problem_from_graph(graph, cluster, estimate_costs(graph, cluster))


def test_a_placement_that_is_cut_short_has_an_answer_and_a_bound(monkeypatch):
    problem = graph_problem()
    monkeypatch.setattr(placing, "heads_and_tails", endless)
    found = placing.place(problem, time_limit=LIMIT_S)
    assert (found.status, found.is_interrupted) == ("feasible", False)
    assert 0 < problem.work_bound() <= found.bound <= found.value < np.inf


def test_placement_for_throughput_is_cut_short(monkeypatch):
    from weft.search.place.throughput import search as stream

    problem = graph_problem()
    monkeypatch.setattr(stream, "solve_throughput", endless)
    found = placing.place(problem, objective="throughput", time_limit=LIMIT_S)
    assert 0 < found.bound <= found.value < np.inf


def test_a_named_method_is_given_up_in_time_and_compared_without(monkeypatch):
    problem = graph_problem(50)
    monkeypatch.setattr(placing, "METHODS", {**placing.METHODS, "etf": endless})
    with pytest.raises(placing.NoFeasiblePlan, match="'etf' was not done when the time limit ended it"):
        placing.place(problem, method="etf", time_limit=LIMIT_S)
    rows = {row.method: row for row in placing.compare(problem, time_limit=LIMIT_S)}
    assert rows["etf"].result is None
    assert rows["auto"].result is not None


def test_methods_are_not_begun_after_the_time_limit():
    rows = {row.method: row for row in placing.compare(graph_problem(50), time_limit=1e-6)}
    assert rows["auto"].result is not None
    assert {row.reason for row in rows.values()} == {"not tried: the time limit was reached", ""}


def test_compiled_code_is_loaded_by_a_problem_of_two_operators():
    placing.load_compiled()
    assert (next(iter(placing.METHODS)), placing.TUNING.quick_method) == ("single", "heft")


def test_the_first_choice_of_strategies_fits_and_is_the_answer_if_there_is_no_time(monkeypatch):
    for seed in range(5):
        graph = parse_strategy_graph(strategy_graph(300, seed, tightness=0.5))
        choice = first_choice(graph, Budget(effort=1.0))
        assert choice is not None
        assert evaluate(graph, choice).is_feasible(graph.usage_limit)
        assert evaluate(graph, choice).cost < evaluate(graph, first_choice(graph, Budget(effort=0.0))).cost
    monkeypatch.setattr(Search, "run", endless)
    found = solve(graph, time_limit=LIMIT_S)
    assert (found.status, found.bound) == ("feasible", lowest_cost(graph))
    assert evaluate(graph, found.choice).cost == found.cost


def test_reductions_leave_time_for_the_search():
    graph = parse_strategy_graph(strategy_graph(400, 3, tightness=0.5))
    search = Search(graph, budget=Budget(effort=float("inf"), deadline=time.monotonic() - 1.0), seed=0)
    search._begin -= 10.0
    search.run()
    assert evaluate(graph, search.best.answer).is_feasible(graph.usage_limit)
    assert search.best.bound <= evaluate(graph, search.best.answer).cost


def test_a_schedule_that_is_cut_short_is_the_best_so_far(monkeypatch):
    problem = parse_problem(schedule_problem(4))
    monkeypatch.setattr(scheduling._Search, "find_steady", endless)
    found = scheduling.schedule(problem, microbatches=6, time_limit=0.3)
    assert found.makespan_bound <= found.makespan < np.inf


def test_a_large_schedule_begins_with_one_micro_batch_moved(monkeypatch):
    from weft.search.schedule import first as first_ones
    from weft.search.schedule.schedule import find_problems

    for transfers in ([], [{"from": "f0", "to": "f1", "time": 0.5, "link": "d0-d1"}]):
        problem = parse_problem(schedule_problem(4, chunks=2, room=0.5) | {"transfers": transfers})
        played = first_ones.sequential(problem, 9)
        moved = first_ones.repeated(problem, 9)
        assert find_problems(moved) == []
        assert moved.starts.shape == played.starts.shape
        assert moved.makespan >= played.makespan
        monkeypatch.setattr(first_ones, "TUNING", replace(first_ones.TUNING, max_played=1))
        first = first_ones.first_schedule(problem, 9, Budget(effort=1.0))
        assert (first.starts == moved.starts).all()


def test_hopeful_named_schedules_come_first_where_there_is_little_time():
    from weft.search.schedule.named import named_rows, named_schedules

    problem = parse_problem(schedule_problem(4))
    names = [row.name for row in named_rows(problem, 6, hopeful_first=True) if row.is_usable]
    assert names[0] == "1f1b"
    assert sorted(names) == sorted(named_schedules(problem, 6))


def test_large_results_are_written_without_line_breaks():
    from weft.cli import common

    value = {"starts": [[index, index + 0.5] for index in range(common.LARGE_RESULT + 1)]}
    assert "\n" not in common.to_json_text(value)
    assert json.loads(common.to_json_text(value)) == value
    assert common.to_json_text({"a": [1]}) == json.dumps({"a": [1]}, indent=1)


@pytest.mark.parametrize("command", [("shard", "s.json"), ("schedule", "p.json", "-n", "4"), ("place", "g.json", "c.json")])
def test_imports_are_reported_by_every_searcher(command, tmp_path, monkeypatch, capsys):
    for name, value in (("s.json", strategy_graph(20, 1, tightness=None)), ("p.json", schedule_problem(2)),
                        ("g.json", place_graph(20, "chain", 1)), ("c.json", place_cluster(2, every_link=True))):
        (tmp_path / name).write_text(json.dumps(value))
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--time-limit", "1", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["import_seconds"] >= 0


def test_earliest_start_in_slices_is_the_same_as_at_once(monkeypatch):
    from weft.search.place import list_kernel as earliest_kernel
    from weft.search.place.lists import etf

    problem = graph_problem(300)
    whole = etf(problem)
    calls, some = [], earliest_kernel._place_some

    def counted(*arguments):
        calls.append(arguments[-2])
        return some.function(*arguments)

    monkeypatch.setattr(earliest_kernel, "SLICE", 200)
    monkeypatch.setattr(earliest_kernel, "_place_some", counted)
    sliced = etf(problem)
    assert len(calls) > 5
    assert (sliced.device == whole.device).all()
    assert (sliced.order == whole.order).all()
