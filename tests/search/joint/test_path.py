"""The time of a pipeline by its longest path, against closed forms and the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worlds import chain_graph, plain_cluster, plan_of
from weft.cost.costs import estimate_costs
from weft.plan.check import check_plan
from weft.plan.orders import interleaved, one_f_one_b
from weft.search.common.problem import pipeline_order
from weft.search.joint.estimate import pipeline_seconds
from weft.simulate.timing import simulate


@pytest.mark.parametrize(("num_stages", "microbatches"), [(1, 1), (1, 5), (2, 2), (4, 4), (4, 11), (7, 3)])
def test_equal_stages_take_what_the_closed_form_says(num_stages, microbatches):
    order = one_f_one_b(num_stages, microbatches)
    found = pipeline_seconds([1.0] * num_stages, [2.0] * num_stages, [0.0] * num_stages, order)
    assert found == 3.0 * (microbatches + num_stages - 1)


@pytest.mark.parametrize("hop", [0.0, 0.25])
def test_a_single_micro_batch_goes_there_and_back(hop):
    order = one_f_one_b(3, 1)
    assert pipeline_seconds([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [hop] * 3, order) == pytest.approx(21.0 + 4 * hop)


@pytest.mark.parametrize(("chunks", "microbatches"), [(1, 3), (1, 4), (1, 9), (2, 4), (2, 8), (3, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_unequal_stages_take_what_the_simulator_says(chunks, microbatches, seed):
    num_devices = 4
    num_stages = num_devices * chunks
    graph = chain_graph(num_stages)
    rng = np.random.default_rng(seed)
    for column in (graph.flops, graph.input_grad_flops, graph.weight_grad_flops):
        column[:] = rng.integers(1, 9, num_stages)
    cluster = plain_cluster(num_devices, bytes_per_s=1e15)
    costs = estimate_costs(graph, cluster)
    order = pipeline_order(num_devices, chunks, microbatches, training=True)
    plan = plan_of(graph, [[op] for op in range(num_stages)], order=order, cluster=cluster, microbatches=microbatches,
                   devices=[stage % num_devices for stage in range(num_stages)], optimizer="none")
    timeline = simulate(check_plan(plan, graph, cluster), costs, cluster)
    forward, backward = (costs.op_seconds(phase, 1.0)[:, 0].tolist() for phase in ("F", "B"))
    assert pipeline_seconds(forward, backward, [0.0] * num_stages, order) == pytest.approx(timeline.step_time_s, rel=1e-6)


def test_orders_are_those_of_the_mode_and_the_chunks():
    assert pipeline_order(3, 1, 4, training=True) == one_f_one_b(3, 4)
    assert pipeline_order(2, 2, 4, training=True) == interleaved(2, 2, 4)
    assert all(phase == "F" for actions in pipeline_order(3, 1, 4, training=False) for _, phase, _ in actions)
    assert pipeline_seconds([1.0, 1.0, 1.0], [0.0] * 3, [0.0] * 3, pipeline_order(3, 1, 4, training=False)) == 6.0
