"""Problems in series: cuts by their definition, and parts that add up to the optimum."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.search.place.odd_inputs import chain, cluster, diamond, edge, graph, op
from tests.search.place.oracle import min_latency
from tests.search.place.random_problems import random_problem
from tests.search.place.test_timetable import random_order, random_placement
from tests.search.place.worlds import problem_of
from weft.search.place.latency.exact import ANY, Series, Solved, find_cuts, solve_series, split
from weft.search.place.problem import PlaceProblem
from weft.search.place.search import adopt
from weft.search.place.timetable import check_timetable, make_timetable

CONTENTIONS = ("link", "port", "none")


def series_files(rng: np.random.Generator, num_cuts: int, *, ends: int = 0, num_devices: int = 2) -> dict[str, Any]:
    """Return a graph of cuts with up to two operators and up to two more tensors between neighbours.

    ``ends`` operators are before the first cut and as many after the last, each a source or a sink of its own.
    """
    names = "xyz"[:num_devices]
    ops: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []

    def add(name: str) -> None:
        ops.append({"name": name, "times": {device: int(rng.integers(0, 8)) for device in names}})

    def join(source: str, target: str) -> None:
        times = {f"{one}>{other}": int(rng.integers(0, 5)) for one in names for other in names if one != other}
        edges.append({"from": source, "to": target, "times": times})

    for index in range(ends):
        add(f"first{index}")
        join(f"first{index}", "cut0")
    for cut in range(num_cuts):
        add(f"cut{cut}")
        if cut + 1 == num_cuts:
            break
        middle = [f"mid{cut},{index}" for index in range(int(rng.integers(0, 3)))]
        for name in middle:
            add(name)
            join(f"cut{cut}", name)
            join(name, f"cut{cut + 1}")
        for _ in range(int(rng.integers(0 if middle else 1, 3))):
            join(f"cut{cut}", f"cut{cut + 1}")
    for index in range(ends):
        add(f"last{index}")
        join(f"cut{num_cuts - 1}", f"last{index}")
    return graph(ops, edges)


def draw(seed: int, num_cuts: int = 3) -> PlaceProblem:
    rng = np.random.default_rng(seed)
    num_devices = 2 + seed % 2
    files = series_files(rng, num_cuts, ends=(0, 2, 0, 1)[seed % 4], num_devices=num_devices)
    return problem_of(files, cluster("xyz"[:num_devices], contention=CONTENTIONS[seed % 3]))


def slow_cuts(problem: PlaceProblem) -> list[int]:
    """Return the operators that all others lead to or come from and that no tensor passes by."""
    below: list[set[int]] = [set() for _ in range(problem.num_ops)]
    for source, reader, _ in sorted(problem.edges.tolist(), reverse=True):
        below[source] |= {reader} | below[reader]
    cuts = []
    for op_index in range(problem.num_ops):
        above = {other for other in range(problem.num_ops) if op_index in below[other]}
        is_all = len(above) + len(below[op_index]) + 1 == problem.num_ops
        if is_all and not any(a in above and b in below[op_index] for a, b, _ in problem.edges.tolist()):
            cuts.append(op_index)
    return cuts


def brute_force(problem: PlaceProblem, bound: float, limit: float, share: float) -> Solved:
    best = min_latency(problem, zero_occupies=True)
    if best is None:
        return Solved(bound=float("inf"))
    return Solved(bound=best.latency_s, timetable=best.timetable)


# ---- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_cuts_by_their_definition(seed):
    rng = np.random.default_rng(seed)
    random = random_problem(rng, int(rng.integers(1, 9)), 2)
    assert find_cuts(random) == slow_cuts(random)
    series = draw(seed, 1 + seed % 5)
    found = find_cuts(series)
    assert found == slow_cuts(series)
    assert {f"cut{index}" for index in range(1 + seed % 5)} <= {series.op_names[op_index] for op_index in found}


def test_random_graphs_have_cuts_and_have_none():
    counts = [len(find_cuts(random_problem(np.random.default_rng(seed), 5, 2))) for seed in range(60)]
    assert counts.count(0) > 10
    assert sum(count > 0 for count in counts) > 10


@pytest.mark.parametrize(("edges", "cuts"), [
    ("ab bc cd", "abcd"),
    ("ab ac bd cd", "ad"),
    ("ac bc cd", "cd"),  # two sources
    ("ab bc bd", "ab"),  # two sinks
    ("ab bc cd ac", "acd"),  # a's tensor passes b by
    ("ab bc cd ad", "ad"),
    ("ac bd", ""),
    ("ab cd", ""),
])
def test_cuts_by_hand(edges, cuts):
    problem = problem_of(graph([op(name) for name in "abcd"], [edge(*pair, 1) for pair in edges.split()]), cluster())
    assert "".join(problem.op_names[op_index] for op_index in find_cuts(problem)) == cuts


def test_a_lone_operator_is_a_cut_and_two_are_none():
    assert find_cuts(problem_of(graph([op("a")]), cluster())) == [0]
    assert find_cuts(problem_of(graph([op("a"), op("b")]), cluster())) == []


# ---- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_parts_hold_every_operator_and_every_tensor(seed):
    problem = draw(seed)
    parts = split(problem)
    inner = [op_index for part in parts for op_index in part.ops[1 if part.has_entry else 0 :].tolist()]
    assert inner == list(range(problem.num_ops))
    assert sum(part.problem.num_tensors for part in parts) == problem.num_tensors
    for one, other in itertools.pairwise(parts):
        assert one.has_exit
        assert other.has_entry
        assert one.ops[-1] == other.ops[0]
    assert not parts[0].has_entry


def test_the_parts_of_a_diamond():
    problem = problem_of(diamond(1, 0.5), cluster())
    first, middle = split(problem)
    assert first.ops.tolist() == [0]
    assert middle.ops.tolist() == [0, 1, 2, 3]
    assert middle.problem.time_s[0].tolist() == [0, 0]  # it has ended
    fixed = middle.fixed(1, 0)
    assert fixed.is_allowed.tolist() == [[False, True], [True, True], [True, True], [True, False]]
    assert fixed.time_s[3, 0] == 1
    assert np.isfinite(middle.problem.time_s).all()  # the part itself is as it was


def test_a_problem_without_cuts_is_one_part():
    problem = problem_of(graph([op("a", 1), op("b", 2)]), cluster())
    series = Series(problem)
    assert len(series.parts) == 1
    assert not series.parts[0].has_entry
    assert series.devices_after(0) == [ANY]
    series.record(0, ANY, ANY, brute_force(series.parts[0].fixed(ANY, ANY), 0, 0, 1))
    assert series.shortest(by_bound=False).seconds == 2


# ---- the shortest way --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_parts_add_up_to_the_optimum(seed):
    problem = draw(seed)
    best = min_latency(problem, zero_occupies=True)
    assert best is not None
    series = Series(problem)
    reports: list[float] = []
    solve_series(series, brute_force, upper=float("inf"), is_spent=lambda: False, report=reports.append)
    assert reports == sorted(reports)
    assert reports[0] <= best.latency_s * (1 + 1e-9)
    assert series.shortest(by_bound=True).seconds == pytest.approx(best.latency_s)
    way = series.shortest(by_bound=False)
    assert way.seconds == pytest.approx(best.latency_s)
    table = series.timetable(way)
    check_timetable(table)
    assert table.latency_s == pytest.approx(best.latency_s)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_before_anything_is_solved_are_within_the_optimum(seed):
    problem = draw(seed)
    best = min_latency(problem, zero_occupies=True)
    assert best is not None
    assert Series(problem).shortest(by_bound=True).seconds <= best.latency_s * (1 + 1e-9)


def test_memory_and_units_across_parts_leave_a_bound():
    """x holds one of three operators and two share a device: the parts know neither, and bound all the same."""
    files = chain(3, 1, 2)
    for index, times in enumerate(({"x": 1, "y": 9}, {"x": 9, "y": 1}, {"x": 9, "y": 1})):
        files["ops"][index].update(times=times, memory=10)
    files["ops"][0]["colocate"] = files["ops"][2]["colocate"] = "g"
    problem = problem_of(files, cluster(memory={"x": 10, "y": 30}))
    best = min_latency(problem, zero_occupies=True)
    assert best is not None
    series = Series(problem)
    solve_series(series, brute_force, upper=best.latency_s, is_spent=lambda: False, report=lambda seconds: None)
    assert series.shortest(by_bound=True).seconds == 1 + 2 + 1 + 1 < best.latency_s


def test_it_ends_when_told_and_when_nothing_better_is_left():
    problem = draw(1, 4)
    best = min_latency(problem, zero_occupies=True)
    assert best is not None
    calls: list[float] = []

    def count(part: PlaceProblem, bound: float, limit: float, share: float) -> Solved:
        calls.append(limit - bound)
        return brute_force(part, bound, limit, share)

    solve_series(Series(problem), count, upper=float("inf"), is_spent=lambda: True, report=lambda seconds: None)
    assert not calls
    lower = Series(problem).shortest(by_bound=True).seconds
    solve_series(Series(problem), count, upper=lower, is_spent=lambda: False, report=lambda seconds: None)
    assert not calls
    solve_series(Series(problem), count, upper=best.latency_s * 1.5, is_spent=lambda: False, report=lambda seconds: None)
    assert calls
    assert max(calls) <= best.latency_s * 1.5 - lower + 1e-9  # no part may use more than all are short of


def test_equal_parts_are_solved_once():
    files = graph([op(f"op{index}", 1 + index % 2) for index in range(9)],
                  [edge(f"op{a}", f"op{b}", 3) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6),
                                                            (5, 6), (6, 7), (7, 8))])
    files["ops"][4], files["ops"][5] = {**files["ops"][1], "name": "op4"}, {**files["ops"][2], "name": "op5"}
    files["ops"][6] = {**files["ops"][3], "name": "op6"}
    series = Series(problem_of(files, cluster()))
    assert series.signatures[1] == series.signatures[2]
    calls: list[PlaceProblem] = []

    def count(part: PlaceProblem, bound: float, limit: float, share: float) -> Solved:
        calls.append(part)
        return brute_force(part, bound, limit, share)

    solve_series(series, count, upper=float("inf"), is_spent=lambda: False, report=lambda seconds: None)
    keys = {(part.time_s.tobytes(), part.inputs.tobytes()) for part in calls}
    assert len(keys) == len(calls)


# ---- whole timetables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_what_a_timetable_does_between_cuts_adds_up_to_one_that_is_not_longer(seed):
    problem = draw(seed, 2 + seed % 4)
    rng = np.random.default_rng(seed)
    series, latest = Series(problem), float("inf")
    for _ in range(4):
        table = make_timetable(problem, random_placement(rng, problem), random_order(rng, problem))
        table = make_timetable(problem, table.device, table.order)
        adopt(series, table)
        way = series.shortest(by_bound=False)
        assert way.seconds <= min(latest, table.latency_s) * (1 + 1e-9)
        latest = way.seconds
        joined = series.timetable(way)
        check_timetable(joined)
        assert joined.latency_s == pytest.approx(way.seconds)


def test_the_better_of_two_timetables_is_kept_and_bounds_only_rise():
    problem = problem_of(diamond(1, 0.5), cluster())
    series = Series(problem)
    slow, fast = (make_timetable(series.parts[1].fixed(0, 0), np.array(device), np.arange(4))
                  for device in ([0, 0, 0, 0], [0, 1, 0, 0]))
    assert fast.latency_s < slow.latency_s
    series.record(1, 0, 0, Solved(bound=5.2, timetable=fast))
    series.record(1, 0, 0, Solved(bound=2.0, timetable=slow))
    entry = series.entry(1, 0, 0)
    assert entry.timetable is fast
    assert entry.bound == 5.2
    assert not entry.is_closed
    series.record(1, 0, 0, Solved(bound=fast.latency_s))
    assert series.entry(1, 0, 0).is_closed
    assert series.entry(1, 0, 1).timetable is None  # other devices are another entry


def test_cuts_that_follow_each_other_need_no_search_unless_they_share_two_tensors():
    one, two = ([edge("a", "b", 2)] * count for count in (1, 2))
    plain = Series(problem_of(graph([op("a", 1), op("b", 1)], one), cluster()))
    assert plain.entry(1, 0, 1).is_plain
    assert plain.entry(1, 0, 1).value == 3
    assert plain.entry(1, 0, 0).value == 1
    both = Series(problem_of(graph([op("a", 1), op("b", 1)], two), cluster()))
    assert not both.entry(1, 0, 1).is_plain
    both.record(1, 0, 1, brute_force(both.parts[1].fixed(0, 1), 0, 9, 1))
    assert both.entry(1, 0, 1).value == 5  # one after the other over one link


def test_transfer_tables_of_parts_are_those_of_the_whole():
    files = chain(4, 1, 2)
    files["edges"][1] = edge("op1", "op2", bytes=8)
    problem = problem_of(files, cluster(links=[{"from": "x", "to": "y", "bandwidth": 2}]))
    parts = split(problem)
    assert [part.problem.transfer_table[0, 0, 1] for part in parts[1:]] == pytest.approx([2, 4, 2])
    assert parts[1].problem.capacity.tolist() == [np.inf, np.inf]
