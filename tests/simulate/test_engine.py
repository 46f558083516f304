"""The compiled engine against its Python twin, hand-computed schedules, and the rules that every schedule keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.python_engine import simulate_python
from tests.simulate.random_tasks import random_placement
from weft.base.errors import InputError, PlanError
from weft.simulate.engine import Simulator, inline_tasks
from weft.simulate.tasks import TaskGraph, make_task_graph


@st.composite
def task_graphs(draw: st.DrawFn) -> TaskGraph:
    """Small graphs with many ties: few distinct durations, zeros among them, 0 to 3 resources per task."""
    num_tasks = draw(st.integers(1, 14))
    num_resources = draw(st.integers(1, 4))
    durations = draw(st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 0.1]), min_size=num_tasks, max_size=num_tasks))
    pairs = [(a, b) for a in range(num_tasks) for b in range(a + 1, num_tasks)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=25)) if pairs else []
    holds = [(task, resource) for task in range(num_tasks)
             for resource in draw(st.sets(st.integers(0, num_resources - 1), max_size=3))]
    number = draw(st.permutations(range(num_tasks))) if draw(st.booleans()) else list(range(num_tasks))
    return make_task_graph(
        [durations[number.index(task)] for task in range(num_tasks)],
        edges=[(number[a], number[b]) for a, b in edges], holds=[(number[task], held) for task, held in holds],
        num_resources=num_resources)


def assert_equals_twin(graph: TaskGraph, simulator: Simulator, durations: np.ndarray | None = None) -> None:
    expected = simulate_python(graph, durations)
    assert simulator.run(durations) == expected.makespan
    assert simulator.starts.tobytes() == expected.starts.tobytes()
    assert simulator.ends.tobytes() == expected.ends.tobytes()


@given(task_graphs())
@settings(max_examples=300, deadline=None)
def test_equals_twin_on_small_graphs_with_ties(graph):
    assert_equals_twin(graph, Simulator(graph))


@pytest.mark.parametrize("ports", [False, True])
@pytest.mark.parametrize("zero_share", [0.0, 0.5])
def test_equals_twin_on_random_placements(zero_share, ports):
    for seed in range(30):
        graph = random_placement(np.random.default_rng(seed), num_tasks=200, num_edges=400, num_devices=8,
                                 zero_share=zero_share, ports=ports)
        simulator = Simulator(graph)
        assert simulator.run() == simulate_python(graph).makespan
        assert_equals_twin(graph, simulator, np.random.default_rng(seed + 1000).random(graph.num_tasks))
        assert_equals_twin(graph, simulator)


def test_transfers_on_links_of_one_sender_are_inline():
    graph = random_placement(np.random.default_rng(0), num_tasks=1000, num_edges=2000, num_devices=8)
    assert inline_tasks(graph).sum() == graph.num_tasks - 1000


def test_link_fed_by_two_devices_is_not_inline():
    # Tasks 2 and 3 share link 2; their predecessors are on devices 0 and 1.
    graph = make_task_graph([2.0, 1.0, 1.0, 1.0], edges=[(0, 2), (1, 3)], holds=[(0, 0), (1, 1), (2, 2), (3, 2)],
                            num_resources=3)
    assert not inline_tasks(graph).any()
    simulator = Simulator(graph)
    assert simulator.run() == 3.0
    assert simulator.starts.tolist() == [0.0, 0.0, 2.0, 1.0]


def test_inline_transfers_of_equal_ready_time_go_by_id():
    # Task 2 takes no time: both transfers are ready at 1, and 3 goes before 4 although 4's sender was handled first.
    graph = make_task_graph([1.0, 1.0, 0.0, 5.0, 5.0], edges=[(0, 2), (1, 4), (2, 3)],
                            holds=[(1, 0), (2, 0), (3, 1), (4, 1)], num_resources=2)
    assert inline_tasks(graph)[3:].all()
    simulator = Simulator(graph)
    simulator.run()
    assert simulator.starts[3] == 1.0
    assert simulator.starts[4] == 6.0
    assert_equals_twin(graph, simulator)


def test_nothing_is_inline_without_topological_ids():
    # At time 1 task 1 is ready, and task 2, a delay of zero, which then makes task 0 ready: too late to go before 1.
    graph = make_task_graph([1.0, 1.0, 0.0, 1.0, 1.0], edges=[(3, 2), (2, 0), (4, 1)],
                            holds=[(0, 0), (1, 0), (3, 1), (4, 2)], num_resources=3)
    assert not inline_tasks(graph).any()
    simulator = Simulator(graph)
    simulator.run()
    assert simulator.starts.tolist() == [2.0, 1.0, 1.0, 0.0, 0.0]
    assert_equals_twin(graph, simulator)


def test_ready_order_not_id_order_decides():
    graph = make_task_graph([3.0, 1.0, 1.0, 1.0], edges=[(0, 2), (1, 3)], holds=[(0, 0), (1, 1), (2, 2), (3, 2)],
                            num_resources=3)
    simulator = Simulator(graph)
    assert simulator.run() == 4.0
    assert simulator.starts.tolist() == [0.0, 0.0, 3.0, 1.0]


def test_joint_task_holds_all_its_resources():
    # Task 2 needs both devices; it waits for the later one and keeps the earlier one from task 3.
    graph = make_task_graph([1.0, 4.0, 2.0, 1.0], edges=[(0, 2), (0, 3)],
                            holds=[(0, 0), (1, 1), (2, 0), (2, 1), (3, 0)], num_resources=2)
    simulator = Simulator(graph)
    assert simulator.run() == 7.0
    assert simulator.starts.tolist() == [0.0, 0.0, 4.0, 6.0]


@given(task_graphs())
@settings(max_examples=200, deadline=None)
def test_every_schedule_keeps_the_rules(graph):
    simulator = Simulator(graph)
    makespan = simulator.run()
    starts, ends = simulator.starts, simulator.ends
    assert np.array_equal(ends, starts + graph.durations)
    assert (starts[graph.successors] >= ends[graph.edge_sources()]).all()
    for resource in range(graph.num_resources):
        holders = np.repeat(np.arange(graph.num_tasks), graph.num_held())[graph.resources == resource]
        order = np.lexsort((ends[holders], starts[holders]))
        assert (starts[holders[order[1:]]] >= ends[holders[order[:-1]]]).all()
    assert makespan == ends.max()


def test_a_cycle_is_reported_with_its_tasks():
    graph = make_task_graph([1.0] * 5, edges=[(0, 1), (1, 2), (2, 3), (3, 1), (3, 4)], holds=[], num_resources=0)
    for run in (Simulator(graph).run, lambda: simulate_python(graph)):
        with pytest.raises(PlanError, match=r"4 of 5 tasks can never run.*task [123]; task [123]; task [123]$"):
            run()
    with pytest.raises(PlanError, match="mine 1"):
        Simulator(graph, describe=lambda task: f"mine {task}").run()


def test_a_failed_run_does_not_spoil_the_next_simulator():
    graph = make_task_graph([1.0, 1.0], edges=[(0, 1)], holds=[], num_resources=0)
    simulator = Simulator(graph)
    assert simulator.run() == 2.0
    assert simulator.run(np.array([5.0, 0.0])) == 5.0
    assert simulator.run() == 2.0


def test_empty_graph():
    graph = make_task_graph([], edges=[], holds=[], num_resources=0)
    assert Simulator(graph).run() == 0.0
    assert simulate_python(graph).makespan == 0.0


@pytest.mark.parametrize(("durations", "edges", "holds", "message"), [
    ([-1.0], [], [], "duration of task 0 is -1.0"),
    ([1.0, float("nan")], [], [], "duration of task 1 is nan"),
    ([float("inf")], [], [], "duration of task 0 is inf"),
    ([1.0], [(0, 1)], [], "an edge names task 1, but there are 1"),
    ([1.0], [], [(0, 7)], "holds names resource 7, but there are 2"),
    ([1.0], [], [(3, 0)], "holds names task 3, but there are 1"),
    ([1.0], [(0, 1, 2)], [], "rows of two numbers"),
])
def test_bad_input_is_refused(durations, edges, holds, message):
    with pytest.raises(InputError, match=message):
        make_task_graph(durations, edges=edges, holds=holds, num_resources=2)
