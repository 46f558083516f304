"""The list methods: published examples, hand-made cases, and what must hold on random problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.search.place.random_problems import random_problem
from weft.base.errors import NoFeasiblePlan
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph_file import parse_graph
from weft.search.place.lists import (
    best_heft,
    cpop,
    device_speeds,
    device_subsets,
    etf,
    favourite_children,
    heft,
    heft_on,
    latency_of,
    m_sct,
    peft,
    speed_groups,
)
from weft.search.place.methods import METHODS
from weft.search.place.problem import PlaceProblem, problem_from_graph
from weft.search.place.timetable import Assignment, check_timetable, make_timetable

CONTENTIONS = ("link", "port", "none")
LISTS = ("heft", "heft-subsets", "peft", "cpop", "etf", "m-sct", "getf")


def make_problem(times: Sequence[Sequence[float | None]], edges: Sequence[tuple[int, int, float]], *,
                 memory: Sequence[int] | None = None, keeps: Sequence[int] | None = None, contention: str = "none",
                 colocate: Sequence[str | None] | None = None) -> PlaceProblem:
    """Return the problem with ``times[op][device]`` (None: not there) and (from, to, seconds between any devices)."""
    devices = [f"d{index}" for index in range(len(times[0]))]
    ops: list[dict[str, Any]] = []
    for op, row in enumerate(times):
        given = {name: value for name, value in zip(devices, row, strict=True) if value is not None}
        ops.append({"name": f"op{op}", "times": given, "on": list(given), "memory": keeps[op] if keeps else 0})
        if colocate and colocate[op]:
            ops[-1]["colocate"] = colocate[op]
    pairs = [f"{one}>{other}" for one in devices for other in devices if one != other]
    wires = [{"from": f"op{source}", "to": f"op{target}", "times": dict.fromkeys(pairs, sent)}
             for source, target, sent in edges]
    graph = parse_graph({"format": "weft.graph", "version": 1, "ops": ops, "edges": wires})
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "contention": contention,
        "devices": [{"name": name, "kind": name, "memory": memory[index] if memory else None}
                    for index, name in enumerate(devices)]})
    return problem_from_graph(graph, cluster, estimate_costs(graph, cluster))


def topcuoglu() -> PlaceProblem:
    """Return the example of figure 2 in the HEFT paper."""
    times = [[14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10], [13, 16, 9], [7, 15, 11], [5, 11, 14],
             [18, 12, 20], [21, 7, 16]]
    edges = [(1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23), (4, 8, 27),
             (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13)]
    return make_problem(times, [(source - 1, target - 1, sent) for source, target, sent in edges])


def arabnejad() -> PlaceProblem:
    """Return the example of figure 1 in the PEFT paper."""
    times = [[22, 21, 36], [22, 18, 18], [32, 27, 43], [7, 10, 4], [29, 27, 35], [26, 17, 24], [14, 25, 30],
             [29, 23, 36], [15, 21, 8], [13, 16, 33]]
    edges = [(1, 2, 17), (1, 3, 31), (1, 4, 29), (1, 5, 13), (1, 6, 7), (2, 8, 3), (2, 9, 30), (3, 7, 16), (4, 8, 11),
             (4, 9, 7), (5, 9, 57), (6, 8, 5), (7, 10, 9), (8, 10, 42), (9, 10, 7)]
    return make_problem(times, [(source - 1, target - 1, sent) for source, target, sent in edges])


def value(problem: PlaceProblem, assignment: Assignment) -> float:
    """Return the latency of the timetable, which must pass the checker."""
    timetable = make_timetable(problem, assignment.device, assignment.order)
    check_timetable(timetable)
    assert latency_of(problem, assignment) == timetable.latency_s
    return timetable.latency_s


# ---- published and hand-made examples -----------------------------------------------------------------------------


def test_lists_reach_the_values_of_their_papers() -> None:
    problem = topcuoglu()
    assert value(problem, heft(problem)) == 80
    assert value(problem, cpop(problem)) == 86
    assert value(problem, peft(problem)) == 85
    problem = arabnejad()
    assert value(problem, heft(problem)) == 133
    assert value(problem, peft(problem)) == 122


def test_heft_fills_a_gap() -> None:
    """The last operator has the lowest rank and fits on d0 while that waits for the long transfer."""
    problem = make_problem([[2, 90], [90, 5], [4, 90], [3, 90]], [(0, 1, 1), (1, 2, 1)])
    found = heft(problem)
    assert found.device.tolist() == [0, 1, 0, 0]
    assert found.order.tolist() == [0, 3, 1, 2] or found.order.tolist() == [0, 1, 3, 2]
    assert value(problem, found) == 2 + 1 + 5 + 1 + 4


def test_etf_takes_the_pair_that_starts_first() -> None:
    """The second operator can start on d1 at once, so ETF puts it there although d0 would end it sooner."""
    problem = make_problem([[2, 9], [1, 9]], [])
    found = etf(problem)
    assert found.device.tolist() == [1, 0] or found.device.tolist() == [0, 1]
    assert value(problem, found) == 9
    assert value(problem, heft(problem)) == 3


def test_ports_are_counted_by_the_lists() -> None:
    """Two tensors over one port come one after the other: it is better to stay than to move the last operator."""
    times: list[list[float | None]] = [[1, None], [1, None], [12, 3]]
    edges = [(0, 2, 5.0), (1, 2, 5.0)]
    assert heft(make_problem(times, edges, contention="none")).device.tolist() == [0, 0, 1]
    congested = make_problem(times, edges, contention="port")
    assert heft(congested).device.tolist() == [0, 0, 0] or value(congested, heft(congested)) <= 14
    assert value(congested, heft(congested)) == min(1 + 1 + 12, 1 + 5 + 5 + 3)


def test_m_sct_keeps_favourite_children_on_the_device() -> None:
    """A fork on equal devices: only one of the two children can stay beside its parent, the costlier transfer."""
    problem = make_problem([[2, 2]] * 3, [(0, 1, 1), (0, 2, 6)])
    assert favourite_children(problem).tolist() == [2, -1, -1]
    found = m_sct(problem)
    assert found.device[2] == found.device[0]
    assert value(problem, found) <= 6


@pytest.mark.parametrize("limit", [0, 10_000])
def test_favourite_children_have_one_parent(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.search.place.lists.MAX_EDGES", limit)
    for seed in range(20):
        problem = random_problem(np.random.default_rng(seed), 20, 3)
        favourite = favourite_children(problem)
        chosen = favourite[favourite >= 0]
        assert len(set(chosen.tolist())) == len(chosen)
        pairs = {(source, reader) for source, reader, _ in problem.edges.tolist()}
        assert all((op, child) in pairs for op, child in enumerate(favourite.tolist()) if child >= 0)
        assert len(chosen) > 0


def test_getf_groups_devices_by_speed() -> None:
    problem = make_problem([[1, 3.5, 1.2, 3, 40]] * 4, [(0, 1, 0.1)])
    assert speed_groups(problem) == ((1, 3), (0, 2))
    assert np.allclose(device_speeds(problem), [1, 1 / 3.5, 1 / 1.2, 1 / 3, 1 / 40])
    found = METHODS["getf"](problem)
    assert set(found.device.tolist()) <= {0, 2}


# ---- subsets ------------------------------------------------------------------------------------------------------


def test_subsets_save_heft_from_slow_links() -> None:
    """HEFT moves to the other device too early and pays for the way back; one device is better."""
    rng = np.random.default_rng(3)
    better = 0
    for _ in range(30):
        problem = random_problem(rng, 15, 3, limited=False)
        best, every = value(problem, best_heft(problem)), value(problem, heft(problem))
        alone = min(value(problem, heft_on(problem, [device])) for device in range(3))
        assert best <= min(every, alone)
        better += best < every
    assert better > 5


def test_subsets_are_all_up_to_eight_devices_and_few_above() -> None:
    small = random_problem(np.random.default_rng(0), 4, 4)
    assert sorted(device_subsets(small)) == sorted(
        tuple(d for d in range(4) if mask >> d & 1) for mask in range(1, 16))
    large = random_problem(np.random.default_rng(0), 4, 12, limited=False)
    subsets = list(device_subsets(large))
    assert subsets[0] == tuple(range(12))
    assert len(subsets) < 60
    assert all((device,) in subsets for device in range(12))


def test_heft_on_uses_only_these_devices_and_says_where_it_cannot() -> None:
    problem = make_problem([[1, 1, 5], [None, 2, 6], [1, 1, 1]], [(0, 1, 0)])
    assert set(heft_on(problem, [1, 2]).device.tolist()) <= {1, 2}
    with pytest.raises(NoFeasiblePlan, match="'op1'"):
        heft_on(problem, [0])
    assert value(problem, best_heft(problem)) <= value(problem, heft(problem))


# ---- memory -------------------------------------------------------------------------------------------------------


def test_a_unit_is_counted_as_a_whole_when_its_first_operator_is_placed() -> None:
    """Both operators of the unit are fastest on d0, which has room for one of them only."""
    problem = make_problem([[1, 5], [1, 5], [1, 5]], [], memory=[10, 20], keeps=[6, 6, 6], colocate=["u", None, "u"])
    for name in LISTS:
        found = METHODS[name](problem)
        assert found.device[0] == found.device[2] == 1
        value(problem, found)


def test_shared_weights_count_once_per_device() -> None:
    problem = make_problem([[1, 9], [1, 9]], [(0, 1, 5)], memory=[10, 10], keeps=[10, 10])
    assert heft(problem).device.tolist() == [0, 1]
    shared = replace(problem, weights=np.zeros(2, dtype=np.int64))
    assert heft(shared).device.tolist() == [0, 0]


@pytest.mark.parametrize("name", LISTS)
def test_a_dead_end_is_left_by_keeping_room(name: str) -> None:
    """The small operators come first and are faster on d0, the only device that has room for the large one."""
    problem = make_problem([[1, 4], [1, 4], [1, 4]], [(0, 1, 0), (1, 2, 0)], memory=[10, 6], keeps=[2, 2, 10])
    found = METHODS[name](problem)
    assert found.device.tolist() == [1, 1, 0]
    value(problem, found)


@pytest.mark.parametrize("name", METHODS)
def test_what_fits_nowhere_is_named(name: str) -> None:
    problem = make_problem([[1, 2], [1, 2]], [], memory=[10, 16], keeps=[3, 21])
    with pytest.raises(NoFeasiblePlan) as caught:
        METHODS[name](problem)
    assert caught.value.device in ("d0", "d1")
    assert (caught.value.missing_bytes or 0) >= 5
    assert "'op1'" in str(caught.value)
    assert "missing" in str(caught.value)


# ---- random problems ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contention", CONTENTIONS)
@pytest.mark.parametrize("tight_memory", [False, True])
def test_every_method_gives_what_the_checker_accepts(contention: str, tight_memory: bool) -> None:
    rng = np.random.default_rng(17)
    found, failed = 0, set()
    for turn in range(25):
        problem = random_problem(
            rng, int(rng.integers(1, 20)), int(rng.integers(1, 5)), contention=contention, tight_memory=tight_memory,
            colocate=turn % 3 == 0, lifetimes=turn % 4 == 1, shared_cores=turn % 5 == 2, shared_weights=turn % 2 == 1)
        for name, method in METHODS.items():
            try:
                assignment = method(problem)
            except NoFeasiblePlan:
                failed.add(name)
                continue
            found += 1
            assert sorted(assignment.order.tolist()) == list(range(problem.num_ops))
            value(problem, assignment)
    assert found > 150
    assert tight_memory or not failed.intersection(LISTS)


def test_methods_repeat_themselves() -> None:
    for seed in range(5):
        first = random_problem(np.random.default_rng(seed), 18, 3, colocate=True)
        second = random_problem(np.random.default_rng(seed), 18, 3, colocate=True)
        for name in LISTS:
            one, other = METHODS[name](first), METHODS[name](second)
            assert one.device.tolist() == other.device.tolist()
            assert one.order.tolist() == other.order.tolist()
