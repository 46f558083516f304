"""Placements become plans that pass every check, whatever the graph, and take the time that the placement says."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.worlds import chain_graph, dag_graph, plain_cluster
from weft.base.errors import InputError, NoFeasiblePlan, PlanError
from weft.cluster.cluster import Cluster, Contention
from weft.coarsen.coarsen import contract
from weft.coarsen.groups import number_groups
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.plan.check import check_plan, excess_bytes
from weft.plan.plan import Plan
from weft.search.common.problem import PlanOptions, Problem
from weft.search.place.placed_plan import (
    OpPlacement,
    cut_segments,
    placed_plan,
    placement_of_groups,
    plan_within_memory,
    with_constants,
)
from weft.search.place.problem import problem_from_graph
from weft.search.place.timetable import Timetable, make_timetable
from weft.simulate.timing import simulate

ROOT = Path(__file__).resolve().parents[3]


def random_graph(rng: random.Random, num_ops: int, *, constants: bool = False) -> Graph:
    """Return a graph whose operators read up to three earlier ones; every one is read or is the last."""
    reads: list[list[int]] = []
    for op in range(num_ops):
        back = min(op, rng.choice([2, 5, num_ops]))
        count = rng.randint(0 if constants else 1, 3)
        reads.append(sorted({op - 1 - rng.randrange(back) for _ in range(count)}) if back else [-1])
    unread = set(range(num_ops - 1)) - {source for items in reads for source in items}
    reads[-1] = sorted({*reads[-1], *unread})
    weights = [None if constants and rng.random() < 0.4 else op for op in range(num_ops)]
    weights[-1] = num_ops - 1
    return dag_graph(reads, weights=weights, sizes=[rng.choice([2, 8, 64]) for _ in range(num_ops)])


def inference(graph: Graph, cluster: Cluster, *, batch: int = 1) -> Problem:
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                   options=PlanOptions(batch=batch, mode="inference"))


def random_order(rng: random.Random, graph: Graph) -> np.ndarray:
    """Return a random order in which every operator comes after those it reads from."""
    before = {op: set() for op in range(graph.num_ops)}
    for source, reader, _ in graph.edges.tolist():
        before[reader].add(source)
    order: list[int] = []
    while before:
        op = rng.choice([op for op, sources in before.items() if sources.issubset(order)])
        order.append(op)
        del before[op]
    return np.asarray(order, dtype=np.int64)


def random_placement(rng: random.Random, graph: Graph, num_devices: int) -> OpPlacement:
    """Return devices that change often (1) or seldom (0) along the graph, and a random order."""
    restless = rng.random()
    device = [rng.randrange(num_devices)]
    for _ in range(graph.num_ops - 1):
        device.append(rng.randrange(num_devices) if rng.random() < restless else device[-1])
    return OpPlacement(device=np.asarray(device, dtype=np.int64), order=random_order(rng, graph))


def predicted_s(problem: Problem, plan: Plan) -> float:
    program = check_plan(plan, problem.graph, problem.cluster)
    return simulate(program, problem.costs, problem.cluster).step_time_s


@pytest.mark.parametrize("constants", [False, True], ids=["plain", "constants"])
def test_segments_of_any_placement_pass_all_checks(constants):
    rng = random.Random(4)
    num_stages = []
    for _ in range(150):
        graph = random_graph(rng, rng.randint(1, 30), constants=constants)
        num_devices = rng.randint(1, 4)
        problem = inference(graph, plain_cluster(num_devices), batch=2)
        placement = random_placement(rng, graph, num_devices)
        for microbatches in (1, 2):
            plan = placed_plan(problem, placement, microbatches=microbatches)
            check_plan(plan, graph, problem.cluster)  # coverage, convex stages, progress of all ranks
        num_stages.append(len(plan.stages))
    assert max(num_stages) > 15
    assert min(num_stages) == 1


def test_a_cut_too_few_is_found_by_the_checker():
    """The control of the test above: a device's operators as one stage feed each other in a cycle."""
    graph = chain_graph(3)
    problem = inference(graph, plain_cluster(2))
    placement = OpPlacement(device=np.array([0, 1, 0]), order=np.arange(3))
    plan = placed_plan(problem, placement)
    assert [stage.ops for stage in plan.stages] == [("op0",), ("op1",), ("op2",)]
    joined = replace(plan.stages[0], ops=("op0", "op2"))
    order = {"d0": ("s0:F:0",), "d1": ("s1:F:0",)}
    with pytest.raises(PlanError, match="in a cycle"):
        check_plan(replace(plan, stages=(joined, plan.stages[1]), order=order), graph, problem.cluster)


def test_segments_join_where_nothing_new_arrives_or_leaves():
    graph = dag_graph([[-1], [0], [1], [0, 2], [3], [4]])
    placement = OpPlacement(device=np.array([0, 1, 1, 1, 1, 0]), order=np.arange(6))
    # op3 reads y0 again, which is on device 1 already; op4 is read by op5 on device 0.
    assert [ops.tolist() for ops in cut_segments(graph, placement)] == [[0], [1, 2, 3, 4], [5]]


def test_a_segment_ends_where_another_device_reads():
    graph = dag_graph([[-1], [0], [0], [1, 2]])
    placement = OpPlacement(device=np.array([0, 0, 1, 0]), order=np.array([0, 1, 2, 3]))
    assert [ops.tolist() for ops in cut_segments(graph, placement)] == [[0], [1], [2], [3]]


def test_groups_are_not_cut_apart():
    graph = dag_graph([[-1], [0], [0], [1, 2], [3]])
    device = np.array([0, 0, 1, 0, 0])
    placement = OpPlacement(device=device, order=np.arange(5), group=np.array([0, 1, 2, 3, 3]))
    assert [ops.tolist() for ops in cut_segments(graph, placement)] == [[0], [1], [2], [3, 4]]
    torn = OpPlacement(device=device, order=np.arange(5), group=np.array([0, 1, 1, 3, 3]))
    with pytest.raises(InputError, match="'op1' and 'op2' are in one group but on two devices"):
        cut_segments(graph, torn)
    crossed = OpPlacement(device=np.array([0, 0, 1, 0, 0]), order=np.arange(5), group=np.array([0, 1, 2, 1, 1]))
    with pytest.raises(InputError, match="takes 'op3' before 'op2'"):
        cut_segments(graph, crossed)


def test_groups_of_a_random_graph_stay_whole():
    rng = random.Random(2)
    for _ in range(60):
        graph = random_graph(rng, rng.randint(2, 25))
        order = random_order(rng, graph)
        group = np.zeros(graph.num_ops, dtype=np.int64)
        group[order] = np.sort([rng.randrange(graph.num_ops) for _ in range(graph.num_ops)])
        device = np.asarray([rng.randrange(3) for _ in range(graph.num_ops)])[group]
        placement = OpPlacement(device=device, order=order, group=group)
        problem = inference(graph, plain_cluster(3))
        check_plan(placed_plan(problem, placement), graph, problem.cluster)
        owner = {op: index for index, ops in enumerate(cut_segments(graph, placement)) for op in ops.tolist()}
        for number in set(group.tolist()):
            assert len({owner[op] for op in np.flatnonzero(group == number).tolist()}) == 1


def test_a_placement_of_fused_groups_is_one_of_operators():
    rng = random.Random(6)
    for _ in range(40):
        graph = random_graph(rng, rng.randint(3, 25), constants=True)
        numbers = np.sort([rng.randrange(graph.num_ops) for _ in range(graph.num_ops)])
        coarse = contract(graph, number_groups(graph, numbers.tolist(), how="rules"))
        num_groups = coarse.groups.num_groups
        device = np.asarray([rng.randrange(3) for _ in range(num_groups)], dtype=np.int64)
        placement = placement_of_groups(coarse, device, random_order(rng, coarse.graph))
        problem = inference(graph, plain_cluster(3))
        plan = placed_plan(problem, placement)
        check_plan(plan, graph, problem.cluster)
        stage_of = {op: stage for stage in plan.stages for op in stage.ops}
        for group, ops in enumerate(coarse.groups.members()):
            names = {graph.op_names[op] for op in ops if not graph.is_constant[op]}
            assert len({stage_of[name].name for name in names}) <= 1
            assert all(stage_of[name].replicas[0].devices == (f"d{device[group]}",) for name in names)


def test_an_order_that_is_none_is_refused():
    graph = chain_graph(3)
    with pytest.raises(InputError, match="each of the 3 operators once"):
        cut_segments(graph, OpPlacement(device=np.zeros(3, dtype=np.int64), order=np.array([0, 1, 1])))
    with pytest.raises(InputError, match="takes 'op1' before 'op0'"):
        cut_segments(graph, OpPlacement(device=np.zeros(3, dtype=np.int64), order=np.array([1, 0, 2])))


def test_constants_are_with_all_who_need_them():
    graph = dag_graph([[], [0], [-1, 1], [2, 1], [3]], weights=[None, None, 2, 3, 4])
    assert graph.is_constant.tolist() == [True, True, False, False, False]
    placement = OpPlacement(device=np.array([-1, -1, 0, 1, 1]), order=np.arange(5))
    segments = cut_segments(graph, placement)
    assert [ops.tolist() for ops in segments] == [[2], [3, 4]]
    assert [ops.tolist() for ops in with_constants(graph, segments)] == [[0, 1, 2], [0, 1, 3, 4]]
    problem = inference(graph, plain_cluster(2))
    check_plan(placed_plan(problem, placement), graph, problem.cluster)


# ---- times ----------------------------------------------------------------------------------------------------------


def timetable(problem: Problem, placement: OpPlacement) -> Timetable:
    place = problem_from_graph(problem.graph, problem.cluster, problem.costs)
    return make_timetable(place, placement.device, placement.order)


@pytest.mark.parametrize("contention", [Contention.NONE, Contention.LINK])
def test_the_plan_takes_as_long_as_the_timetable(contention):
    """Without contention exactly; with it, where transfers meet they may go in another order."""
    rng = random.Random(9)
    ratios = []
    for _ in range(80):
        graph = random_graph(rng, rng.randint(2, 25))
        num_devices = rng.randint(2, 4)
        cluster = plain_cluster(num_devices, bytes_per_s=rng.choice([4.0, 16.0, 1e9]), latency_s=0.1,
                                contention=contention)
        problem = inference(graph, cluster)
        placement = random_placement(rng, graph, num_devices)
        table = timetable(problem, placement)
        in_time = OpPlacement(device=placement.device, order=table.order)
        ratios.append(predicted_s(problem, placed_plan(problem, in_time)) / table.latency_s)
    if contention is Contention.NONE:
        assert max(ratios) <= 1 + 1e-9
    assert np.median(ratios) == pytest.approx(1.0, abs=0.01)
    assert np.mean(ratios) < 1.05
    assert min(ratios) > 0.8


def test_requests_in_a_pipeline_take_as_long_as_the_busiest_device():
    graph = chain_graph(6)
    problem = inference(graph, plain_cluster(3), batch=32)
    placement = OpPlacement(device=np.array([0, 1, 2, 2, 1, 0]), order=np.arange(6))
    plan = placed_plan(problem, placement, microbatches=32)
    assert len(plan.stages) == 5
    op_s = float(problem.costs.op_seconds("F")[0, 0])
    # Each device has two operators of a request, of which 32 follow each other; filling takes a little longer.
    assert 2 * 32 * op_s <= predicted_s(problem, plan) <= 1.1 * 2 * 32 * op_s
    single = placed_plan(problem, placement, microbatches=32, in_flight=1)
    assert predicted_s(problem, single) == pytest.approx(6 * 32 * op_s, rel=0.01)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory_bytes", "num_searches"), [(450, 1), (404, 2)])
def test_a_search_is_repeated_with_less_memory_until_the_plan_fits(memory_bytes, num_searches):
    problem = inference(chain_graph(8, parameter_bytes=100), plain_cluster(3, memory_bytes=memory_bytes))
    asked: list[dict[str, int]] = []

    def search(reserve: Mapping[str, int]) -> OpPlacement:
        """Fill one device after the other with the parameters that there is room for."""
        asked.append(dict(reserve))
        rooms = [(memory_bytes - reserve.get(name, 0)) // 100 for name in ("d0", "d1", "d2")]
        return OpPlacement(device=np.repeat([0, 1, 2], rooms)[:8], order=np.arange(8))

    plan = plan_within_memory(problem, search)
    assert not excess_bytes(plan, problem.graph, problem.cluster)
    assert len(asked) == num_searches
    assert len({stage.replicas[0].devices for stage in plan.stages}) == num_searches + 1


def test_a_search_that_does_not_listen_ends():
    problem = inference(chain_graph(8, parameter_bytes=100), plain_cluster(2, memory_bytes=402))
    placement = OpPlacement(device=np.repeat([0, 1], 4), order=np.arange(8))
    with pytest.raises(NoFeasiblePlan, match="more than 'd1' has, after 4 searches") as caught:
        plan_within_memory(problem, lambda reserve: placement)
    assert caught.value.missing_bytes == excess_bytes(placed_plan(problem, placement), problem.graph, problem.cluster)["d1"]


def test_fewer_requests_are_let_in_before_memory_is_kept_free():
    graph = chain_graph(5, parameter_bytes=4, activation_bytes=1000)
    placement = OpPlacement(device=np.array([0, 1, 1, 1, 0]), order=np.arange(5))
    limits = [plain_cluster(2, memory_bytes=num_bytes) for num_bytes in (40_000, 6_500)]
    loose, tight = (inference(graph, cluster, batch=16) for cluster in limits)
    fast = predicted_s(loose, plan_within_memory(loose, lambda reserve: placement, microbatches=16))
    plan = plan_within_memory(tight, lambda reserve: placement, microbatches=16)
    assert excess_bytes(placed_plan(tight, placement, microbatches=16), tight.graph, tight.cluster)
    assert not excess_bytes(plan, tight.graph, tight.cluster)
    assert predicted_s(tight, plan) >= fast
