"""Training problems: right graphs, the same for the same seed, different from family to family, and solvable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy_training.cases import (
    LEAST_LOAD,
    MAX_DEVICES,
    MOST_LOAD,
    PRESETS,
    network_load,
    state_bytes,
    training_case,
)
from benchmarks.policy_training.models import FAMILIES, GraphDraft, random_model
from weft.cluster.cluster import DeviceId
from weft.cluster.cluster_file import load_cluster
from weft.cluster.presets import kind_presets
from weft.cost.op_classes import op_class
from weft.model.graph import TensorRole, check_graph
from weft.plan.plan import Optimizer
from weft.search.common.problem import Problem
from weft.search.deploy.deployer import Deployer
from weft.search.deploy.exchange import linear_layers
from weft.search.deploy.op_groups import group_operators

SEEDS = range(40)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return [training_case(seed) for seed in SEEDS]


def family(problem: Problem) -> str:
    return problem.graph.name.split("-")[0]


def deployer(problem: Problem, microbatches: int) -> Deployer:
    seconds = problem.op_seconds(problem.devices[0], problem.options.batch)
    return Deployer(problem, group_operators(problem.graph, seconds), microbatches)


def test_graphs_are_right_and_end_in_a_loss(problems: Sequence[Problem]) -> None:
    for problem in problems:
        graph = problem.graph
        check_graph(graph)
        assert graph.has_backward
        assert graph.batch == problem.options.batch
        assert graph.tensor_shapes[graph.outputs[0]] == ()
        assert graph.tensor_producer[graph.outputs[0]] == graph.num_ops - 1
        assert all(op_class(kind) != "other" for kind in graph.op_kinds), graph.op_kinds
        assert not graph.is_saved[graph.tensor_base >= 0].any(), "the tensor that a view is of is marked instead"
        read = set(graph.inputs.tolist())
        assert all(tensor in read for tensor in range(graph.num_tensors) if tensor not in graph.outputs)


def test_work_of_a_matrix_product_is_that_of_the_formula() -> None:
    draft = GraphDraft("one", 8, "bfloat16")
    x = draft.relu(draft.linear(draft.input((5, 32)), 16))
    graph = draft.finish(draft.linear(x, 10))
    first, second = (op for op in range(graph.num_ops) if graph.op_kinds[op] == "aten.linear")
    assert graph.flops[first] == 2 * 8 * 5 * 32 * 16
    assert graph.input_grad_flops[first] == 0, "the model's input needs no gradient"
    assert graph.weight_grad_flops[first] == graph.flops[first]
    assert graph.input_grad_flops[second] == graph.weight_grad_flops[second] == graph.flops[second]
    assert graph.bytes_read[second] == 2 * (8 * 5 * 16 + 16 * 10 + 10)
    assert graph.bytes_written[second] == 2 * 8 * 5 * 10
    saved = {graph.tensor_names[tensor] for tensor in np.flatnonzero(graph.is_saved)}
    assert saved == {"input", "relu"}


def test_linear_layers_of_every_family_can_exchange_factors() -> None:
    for name in FAMILIES:
        graph = random_model(name, np.random.default_rng(3), name=name, batch=16, dtype="float32")
        found = {layer.op for layer in linear_layers(graph)}
        assert found == {op for op, kind in enumerate(graph.op_kinds) if kind == "aten.linear"}, name


def test_same_seed_gives_the_same_problem_and_another_seed_another() -> None:
    for seed in (0, 5, 11):
        one, two = training_case(seed), training_case(seed)
        assert one.graph.digest == two.graph.digest
        assert one.cluster == two.cluster
        assert one.options == two.options
        np.testing.assert_array_equal(one.costs.forward_s, two.costs.forward_s)
    assert len({training_case(seed).graph.digest for seed in range(12)}) == 12


def test_families_are_all_drawn_and_differ_in_structure(problems: Sequence[Problem]) -> None:
    assert {family(problem) for problem in problems} == set(FAMILIES)
    kinds = {name: Counter(kind for problem in problems if family(problem) == name for kind in problem.graph.op_kinds)
             for name in FAMILIES}
    assert kinds["encoder"]["aten.scaled_dot_product_attention"]
    assert kinds["unet"]["aten.upsample_nearest2d"]
    assert kinds["mlp"].keys().isdisjoint({"aten.conv2d", "aten.scaled_dot_product_attention"})
    assert not kinds["vgg"]["aten.add"]
    assert kinds["residual"]["aten.add"]
    assert any(len(sources(problem)) > 1 for problem in problems if family(problem) == "towers")


def sources(problem: Problem) -> set[int]:
    """Return the operators that read an input of the model, but for the loss."""
    graph = problem.graph
    reads_input = graph.tensor_role[graph.inputs] == TensorRole.INPUT
    return set(graph.consumer_op[reads_input].tolist()) - {graph.num_ops - 1}


def test_clusters_are_of_many_shapes_and_use_no_held_out_preset(problems: Sequence[Problem]) -> None:
    held_out = set(kind_presets()) - set(PRESETS)
    hosts, sizes = set(), set()
    for problem in problems:
        cluster = problem.cluster
        assert held_out.isdisjoint(device.kind for device in cluster.devices)
        assert 2 <= cluster.num_devices <= MAX_DEVICES
        hosts.add(len({device.host for device in cluster.devices}))
        sizes.add(cluster.num_devices)
    assert hosts == {1, 2, 3, 4}
    assert len(sizes) > 6


def test_network_is_neither_idle_nor_hopeless_in_most_cases(problems: Sequence[Problem]) -> None:
    loads = [network_load(problem.graph, problem.cluster, problem.options.dtype) for problem in problems]
    assert np.mean([LEAST_LOAD <= load <= MOST_LOAD for load in loads]) > 0.8


def test_states_are_counted_with_gradients_and_moments() -> None:
    graph = training_case(2).graph
    plain, adam = (state_bytes(graph, Optimizer(kind=kind)).sum() for kind in ("none", "adam"))
    assert plain == 2 * graph.parameter_bytes
    assert adam > plain


def test_problems_can_be_evaluated_and_nearly_all_fit_somehow(problems: Sequence[Problem]) -> None:
    num_fitting = 0
    for problem in problems[:12]:
        some = [microbatches for microbatches in (1, 4) if problem.options.batch % microbatches == 0]
        found = [one.evaluate([action] * one.groups.num_groups) for one in (deployer(problem, number) for number in some)
                 for action in range(len(one.actions))]
        assert all(math.isfinite(item.seconds) and item.seconds > 0 for item in found)
        num_fitting += any(item.fits for item in found)
    assert num_fitting >= 11


def test_held_out_clusters_have_no_kind_that_training_sees() -> None:
    files = sorted((Path(__file__).parents[3] / "benchmarks" / "problems" / "deploy").glob("*.yaml"))
    assert len(files) >= 10
    for path in files:
        cluster = load_cluster(path)
        assert {device.kind for device in cluster.devices}.isdisjoint(PRESETS), path.name
        ends = range(cluster.num_devices)
        assert all(cluster.route(DeviceId(a), DeviceId(b)).bytes_per_s > 0 for a in ends for b in ends)


def test_simulations_are_counted_to_the_best_known_and_only_from_where_memory_suffices() -> None:
    from benchmarks.deploy_compare import simulations_needed
    from benchmarks.deploy_pool import Result, fitting

    # 5.0 did not fit the memory: what came after it is slower.
    assert fitting([(1, 0.1, 5.0), (9, 0.2, 8.0), (20, 0.3, 7.0)]) == ((9, 0.2, 8.0), (20, 0.3, 7.0))
    quick = Result(case="c", what="a", step_time_s=7.0, num_simulations=50, history=((9, 0.2, 8.0), (20, 0.3, 7.0)))
    slow = Result(case="c", what="b", step_time_s=7.5, num_simulations=90, history=((1, 0.1, 9.0), (80, 0.9, 7.5)))
    assert simulations_needed({"a": quick, "b": slow}) == {"a": (20, True), "b": (90, False)}
