"""The simple strategies: cuts against brute force, shares, bounds, and what they say when nothing fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.worlds import chain_graph
from weft.base.errors import InputError, NoFeasiblePlan
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.planning.compare import compare_strategies, microbatch_choices
from weft.search.common.problem import PlanOptions, Problem, block_of, divisors
from weft.search.common.problem import evaluate_plan as evaluate
from weft.search.deploy.search import DeployOptions
from weft.search.joint.baselines import STRATEGIES, balanced_cuts, equal_cuts


def mixed_cluster(speeds: list[float], *, memory: str = "1GB", bandwidth: str = "100GB/s") -> Cluster:
    devices = [{"name": f"d{i}", "kind": f"k{i}", "memory": memory, "flops": {"float32": speed}, "memory_bandwidth": "100TB/s"}
               for i, speed in enumerate(speeds)]
    links = [{"from": f"d{i}", "to": "switch", "bandwidth": bandwidth, "latency": "1us"} for i in range(len(speeds))]
    return parse_cluster({"format": "weft.cluster", "version": 1, "devices": devices, "switches": ["switch"], "links": links})


def problem_of(num_ops: int = 12, *, cluster: Cluster | None = None, batch: int = 16, seed: int = 0, **options) -> Problem:
    rng = np.random.default_rng(seed)
    graph = chain_graph(num_ops, batch=4, parameter_bytes=4000, activation_bytes=4000)
    object.__setattr__(graph, "flops", rng.integers(1, 20, num_ops) * 1e9)
    object.__setattr__(graph, "input_grad_flops", graph.flops)
    object.__setattr__(graph, "weight_grad_flops", graph.flops)
    cluster = cluster or mixed_cluster([1e12, 2e12, 1e12, 4e12])
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                   options=PlanOptions(batch=batch, **options))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("bandwidth", ["100GB/s", "100kB/s"])
def test_balanced_cuts_have_the_smallest_period(seed, bandwidth):
    problem = problem_of(9, seed=seed, microbatches=4, cluster=mixed_cluster([1e12, 2e12, 1e12, 4e12], bandwidth=bandwidth))
    cuts = balanced_cuts(problem, 4)
    seconds = [problem.op_seconds(device, 4) for device in problem.devices]
    transfer = problem.costs.transfer(4000, 0, 1).seconds

    def period(bounds):
        result, rest = 0.0, 0.0
        for stage in reversed(range(4)):
            first, last = bounds[stage], bounds[stage + 1]
            if last > first:
                load, sent = float(seconds[stage][first:last].sum()), 0.0 if last == 9 else 2 * transfer
                rest += load + sent
                result = max(result, load, sent, rest / (4 - stage))
        return result

    best = min(period((0, *inner, 9)) for inner in itertools.combinations_with_replacement(range(10), 3))
    assert period(cuts) == pytest.approx(best, rel=1e-5)


def test_a_long_model_is_cut_at_few_places_and_well():
    problem = problem_of(1000, microbatches=8, cluster=mixed_cluster([1e12] * 4))
    cuts = balanced_cuts(problem, 8)
    loads = [float(problem.op_seconds(0, 2)[first:last].sum()) for first, last in itertools.pairwise(cuts)]
    assert max(loads) <= 1.02 * sum(loads) / 4


def test_balanced_cuts_respect_memory():
    tight = problem_of(8, cluster=mixed_cluster([1e12, 1e12], memory="100kB"), batch=4, microbatches=1)
    cuts = balanced_cuts(tight, 1)
    assert cuts[0] == 0
    assert cuts[-1] == 8
    with pytest.raises(NoFeasiblePlan, match=r"the model needs .* the 2 devices have .* too little"):
        balanced_cuts(problem_of(8, cluster=mixed_cluster([1e12, 1e12], memory="10kB"), batch=4, microbatches=1), 1)


def test_equal_cuts_count_layers_not_operators():
    problem = problem_of(12)
    modules = ["embed", *(f"h.{i}.fc" for i in range(8) for _ in range(1)), "norm", "head", "loss"]
    object.__setattr__(problem.graph, "op_modules", tuple(modules))
    assert equal_cuts(problem) == [0, 3, 5, 7, 12]


def test_block_of_takes_the_path_up_to_its_first_number():
    assert [block_of(m) for m in ("transformer.h.3.attn", "lm_head", "", "a.0.b.1")] == [
        "transformer.h.3", "lm_head", "", "a.0"]


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_shares_follow_speed():
    plan = STRATEGIES["data-parallel-by-speed"](problem_of(cluster=mixed_cluster([1e12, 3e12]), batch=16), 1)
    assert [replica.share for replica in plan.stages[0].replicas] == [0.25, 0.75]


def test_every_strategy_gives_a_checked_plan_above_the_bound():
    problem = problem_of()
    comparison = compare_strategies(problem)
    assert {item.strategy for item in comparison.candidates if item.plan is not None} == set(STRATEGIES)
    for item in comparison.candidates:
        assert item.step_time_s >= comparison.bound_s
        assert item.plan.search.step_time == item.step_time_s
    assert comparison.best.step_time_s == min(item.step_time_s for item in comparison.candidates)


def test_a_deployment_is_a_candidate_where_it_is_asked_for():
    problem = problem_of(cluster=mixed_cluster([1e12, 1e12, 3e12]), batch=24)
    problem = replace(problem, graph=replace(problem.graph, tensor_batch_dim=np.zeros_like(problem.graph.tensor_batch_dim)))
    comparison = compare_strategies(problem, ["single", "1f1b"], deployments=DeployOptions(max_simulations=300))
    assert [item.strategy for item in comparison.candidates] == ["single", "1f1b", "deploy"]
    assert comparison.best.strategy == "deploy"
    assert comparison.bound_s <= comparison.best.step_time_s


def test_a_heavy_head_is_not_cut_where_its_output_is_large():
    problem = problem_of(12, microbatches=8, cluster=mixed_cluster([1e12] * 4, bandwidth="1GB/s", memory="100GB"))
    graph = problem.graph
    graph.flops[10] = graph.input_grad_flops[10] = graph.weight_grad_flops[10] = 50e9
    graph.tensor_bytes[graph.op_outputs(10)] = 10**9
    problem = Problem(graph=graph, cluster=problem.cluster, costs=estimate_costs(graph, problem.cluster), options=problem.options)
    assert 11 not in balanced_cuts(problem, 8)
    equal = evaluate(STRATEGIES["1f1b"](problem, 8), problem)
    balanced = evaluate(STRATEGIES["1f1b-balanced"](problem, 8), problem)
    assert balanced.step_time_s < equal.step_time_s


def test_inference_plans_have_forwards_only():
    comparison = compare_strategies(problem_of(mode="inference"))
    plan = comparison.best.plan
    assert all(":F:" in action for actions in plan.order.values() for action in actions)
    assert plan.gradients == ()


def test_recomputation_saves_memory_and_costs_time():
    plain = problem_of(microbatches=8)
    again = problem_of(microbatches=8, recompute=True)
    first = evaluate(STRATEGIES["gpipe"](plain, 8), plain)
    second = evaluate(STRATEGIES["gpipe"](again, 8), again)
    assert second.step_time_s > first.step_time_s
    assert max(r.peak_bytes for r in second.summary()) < max(r.peak_bytes for r in first.summary())


def test_same_input_same_bytes():
    from weft.plan.plan import format_plan
    assert format_plan(compare_strategies(problem_of()).best.plan) == format_plan(compare_strategies(problem_of()).best.plan)


def test_too_small_a_cluster_says_what_is_missing():
    with pytest.raises(NoFeasiblePlan, match=r"(?s)no strategy gives a plan for .* that fits.*too little") as caught:
        compare_strategies(problem_of(cluster=mixed_cluster([1e12, 1e12], memory="5kB")))
    assert caught.value.exit_code == 3


def test_one_device_has_only_the_single_strategy():
    comparison = compare_strategies(problem_of(cluster=read_cluster("1 x A100-80GB")))
    assert comparison.best.strategy == "single"
    assert all(item.reason for item in comparison.candidates if item.strategy != "single")


def test_options_are_checked():
    with pytest.raises(InputError, match="cannot be divided into 5 equal micro-batches; try 4"):
        PlanOptions(batch=16, microbatches=5)
    with pytest.raises(InputError, match="1 or more"):
        PlanOptions(batch=0)
    with pytest.raises(InputError, match="there is no strategy 'magic'"):
        compare_strategies(problem_of(), ["magic"])


def test_microbatch_choices_are_the_users_or_divisors():
    assert microbatch_choices(problem_of(microbatches=8), "1f1b") == [8]
    assert microbatch_choices(problem_of(batch=24), "single") == [1, 2, 3, 4, 6, 8, 12, 24]
    assert microbatch_choices(problem_of(batch=96), "1f1b") == [32, 24, 16, 12, 8, 48, 96]


def test_more_micro_batches_are_tried_where_memory_needs_them():
    problem = problem_of(batch=96)
    few, many = (evaluate(STRATEGIES["single"](problem, number), problem).memory.peak_bytes(3) for number in (48, 96))
    devices = tuple(replace(device, memory_bytes=(few + many) // 2) for device in problem.cluster.devices)
    tight = replace(problem, cluster=replace(problem.cluster, devices=devices))
    assert compare_strategies(tight, ["single"]).best.plan.microbatches == 96


def test_a_time_limit_keeps_what_was_found():
    lines = []
    comparison = compare_strategies(problem_of(), time_limit_s=0.0, progress=lines.append)
    assert [item.strategy for item in comparison.candidates] == ["single"]
    assert lines[-1] == "time limit: data-parallel and what follows are not tried"


def test_an_interrupt_keeps_what_was_found(monkeypatch):
    def interrupted(problem, microbatches):
        raise KeyboardInterrupt

    monkeypatch.setitem(STRATEGIES, "gpipe", interrupted)
    comparison = compare_strategies(problem_of())
    assert [item.strategy for item in comparison.candidates] == [
        "single", "data-parallel", "data-parallel-by-speed", "fsdp"]
    monkeypatch.setitem(STRATEGIES, "single", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare_strategies(problem_of())
