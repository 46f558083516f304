"""Objectives beyond the fastest step: latency, the fewest devices for a target, memory that stays free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.search.deploy.worlds import cluster_of, host, problem_of
from tests.search.joint.worlds import equal_problem, mixed_problem, tensor_world
from weft.base.errors import InputError, NoFeasiblePlan
from weft.cost.costs import estimate_costs
from weft.plan.check import check_plan
from weft.planning.compare import compare_strategies
from weft.planning.objectives import (
    StepRequest,
    bind_to_cluster,
    fewest_devices,
    parse_target,
    part_of_cluster,
    request_for,
    splits_of_part,
    with_headroom,
)
from weft.search.common.problem import evaluate_plan as evaluate


def search(problem, splits):
    """Return a small comparison, so that planning often takes little time."""
    return compare_strategies(problem, ["single", "data-parallel-by-speed"])


def fewest(problem, text, **options):
    return fewest_devices(problem, parse_target(text, batch=problem.options.batch), search, splits={},
                          costs_of=estimate_costs, **options)


@pytest.mark.parametrize(("text", "seconds"), [
    ("500/s", 0.064), ("0.5 / s", 64.0), ("1e3/s", 0.032), ("200ms", 0.2), (" 2 s", 2.0), ("50us", 5e-5)])
def test_targets(text, seconds):
    assert parse_target(text, batch=32).step_time_s == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "message"), [
    ("500", "has no unit: write samples per second as '500/s' or a step's time as '200ms'"), ("0/s", "more than zero"),
    ("0ms", "more than zero"), ("fast", "cannot read time 'fast'"), ("5GB", "cannot read time"), ("-3/s", "cannot read")])
def test_targets_that_make_no_sense(text, message):
    with pytest.raises(InputError, match=message):
        parse_target(text, batch=32)


def test_headroom_is_a_part_or_an_amount():
    cluster = cluster_of(host("a", 2, memory="1000MB"), host("b", 1, rate="2GFLOP/s", memory="500MB"))
    assert [device.memory_bytes for device in with_headroom(cluster, "10%").devices] == [9 * 10**8, 9 * 10**8, 45 * 10**7]
    assert [device.memory_bytes for device in with_headroom(cluster, "0.1GB").devices] == [9 * 10**8, 9 * 10**8, 4 * 10**8]
    assert with_headroom(cluster, "0%").digest == cluster.digest
    with pytest.raises(InputError, match=r"leaves no memory on 'b0', which has .*: give less, or a percentage"):
        with_headroom(cluster, "0.6GB")
    with pytest.raises(InputError, match="must be at least 0% and less than 100%"):
        with_headroom(cluster, "100%")
    with pytest.raises(InputError, match="cannot read size"):
        with_headroom(cluster, "much")


def test_plans_with_headroom_are_for_the_real_cluster_and_keep_the_memory_free():
    problem = mixed_problem(activation_bytes=800_000)
    full = max(item.peak_bytes for item in search(problem, {}).best.timeline.summary())
    tight = replace(problem.cluster, devices=tuple(replace(item, memory_bytes=full) for item in problem.cluster.devices))
    problem = replace(problem, cluster=tight, costs=estimate_costs(problem.graph, tight))
    narrow = with_headroom(tight, "30%")
    found = search(replace(problem, cluster=narrow, costs=estimate_costs(problem.graph, narrow)), {})
    best = bind_to_cluster(found, problem).best
    assert best.plan.cluster.digest == tight.digest != narrow.digest
    check_plan(best.plan, problem.graph, tight)
    assert best.timeline.program.plan == best.plan
    assert max(item.peak_bytes for item in best.timeline.summary()) <= 0.7 * full
    assert best.step_time_s >= search(problem, {}).best.step_time_s


def test_the_fewest_devices_are_what_trying_all_numbers_finds():
    problem = equal_problem(6, num_ops=12, batch=24)
    times = [search(replace(problem, cluster=part, costs=estimate_costs(problem.graph, part)), {}).best.step_time_s
             for part in (part_of_cluster(problem.cluster, range(count)) for count in range(1, 7))]
    for count, seconds in enumerate(times, start=1):
        reached = fewest(problem, f"{1.001e3 * seconds:.6f}ms")
        assert len(reached.devices) == count
        best = reached.comparison.best
        assert best.plan.cluster.digest == problem.cluster.digest
        assert best.step_time_s == pytest.approx(evaluate(best.plan, problem).step_time_s)
        assert best.step_time_s <= 1.001 * seconds
        assert {name for name, actions in best.plan.order.items() if actions} <= set(reached.devices)
        assert len(reached.attempts) <= 5, "it bisects"


def test_fast_devices_come_first_and_whole_groups_before_single_devices():
    problem = problem_of(cluster_of(host("a", 2), host("b", 2, rate="4GFLOP/s"), host("c", 2, rate="2GFLOP/s"),
                                    inside="10GB/s", network="1GB/s", latency="10us"), num_ops=12, batch=24)
    fast = part_of_cluster(problem.cluster, (2, 3))
    alone_s = search(replace(problem, cluster=fast, costs=estimate_costs(problem.graph, fast)), {}).best.step_time_s
    reached = fewest(problem, f"{1.001e3 * alone_s:.6f}ms")
    assert reached.devices == ("b0", "b1")
    more = fewest(problem, f"{0.9e3 * alone_s:.6f}ms")
    assert more.devices == ("b0", "b1", "c0")
    assert next(item.devices for item in more.attempts
                if item.step_time_s is not None and item.step_time_s <= 0.9 * alone_s) == tuple(
        device.name for device in problem.cluster.devices), "the whole cluster is tried first"


def test_numbers_whose_bound_misses_the_target_are_not_planned():
    problem, lines = equal_problem(6, num_ops=12, batch=24), []
    all_s = search(problem, {}).best.step_time_s
    reached = fewest(problem, f"{1.001e3 * all_s:.6f}ms", progress=lines.append)
    assert len(reached.devices) == 6
    assert [item.step_time_s is None for item in reached.attempts] == [False, *[True] * (len(reached.attempts) - 1)]
    assert [line for line in lines if "planning" in line] == [f"target {1.001e3 * all_s:.6f}ms: planning for 6 of 6 devices"]


def test_a_target_out_of_reach_says_what_is_reached():
    problem = equal_problem(2)
    with pytest.raises(NoFeasiblePlan, match=(
            r"the target 1us \(a step of 1 us\) is not reached: the best plan for all 2 devices takes .* samples/s\), and "
            r"none can take less than .*\. Try a target of .* or .*/s, a larger batch, or more devices\.")) as caught:
        fewest(problem, "1us")
    assert caught.value.exit_code == 3
    best = search(problem, {}).best.step_time_s
    assert f"{problem.options.batch / best:.4g}/s" in str(caught.value)


def test_too_little_memory_is_said_as_without_a_target():
    problem = equal_problem(2, activation_bytes=800_000, microbatches=1, memory="60kB")
    with pytest.raises(NoFeasiblePlan, match="no strategy gives a plan"):
        fewest(problem, "100s")


def test_a_part_of_a_cluster_divides_operators_as_the_whole_does():
    problem, splits = tensor_world()
    second = part_of_cluster(problem.cluster, (2, 3))
    assert splits_of_part(problem.cluster, splits, second) == {(0, 2): splits[1, 2]}
    assert splits_of_part(problem.cluster, splits, part_of_cluster(problem.cluster, (0, 2, 3))) == {(1, 2): splits[1, 2]}
    assert splits_of_part(problem.cluster, splits, problem.cluster) == dict(splits)
    assert second.switches == problem.cluster.switches
    assert not [link for link in second.links if "a0" in (link.source, link.target)]


def test_latency_is_inference_of_one_micro_batch():
    assert request_for("latency", mode=None, batch=None, microbatches=None) == StepRequest(
        mode="inference", batch=1, microbatches=1)
    assert request_for("latency", mode="inference", batch=8, microbatches=1).batch == 8
    assert request_for("throughput", mode=None, batch=None, microbatches=None) == StepRequest(
        mode="training", batch=32, microbatches=None)
    with pytest.raises(InputError, match="is the time of one request, which is inference: leave out --mode training"):
        request_for("latency", mode="training", batch=None, microbatches=None)
    with pytest.raises(InputError, match="plans one micro-batch, not 4: leave out --microbatches"):
        request_for("latency", mode=None, batch=8, microbatches=4)
