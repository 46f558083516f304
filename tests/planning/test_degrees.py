"""Degrees by hand: plans have them, what cannot be is refused with what works, and a fixed degree spares work."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest

from tests.search.joint.worlds import equal_problem, estimates_of, mixed_problem, tensor_world
from weft.base.errors import InputError, NoFeasiblePlan
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import read_cluster
from weft.plan.plan import Plan
from weft.planning.compare import compare_strategies
from weft.planning.degrees import check_model_degrees, check_searches, settle_degrees
from weft.search.common.degrees import Degrees, DegreeWords
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.splits import Splits


def settled(text: str, *, batch: int = 32, microbatches: int | None = None, mode: Any = "training",
            whole: bool = False, **degrees: Any) -> PlanOptions:
    return settle_degrees(PlanOptions(batch=batch, microbatches=microbatches, mode=mode, whole_parameters=whole,
                                      degrees=Degrees(**degrees)), read_cluster(text))


def with_degrees(problem: Problem, **degrees: Any) -> Problem:
    """Return the problem with its options as they follow from the degrees."""
    options = replace(problem.options, degrees=Degrees(**degrees))
    return replace(problem, options=settle_degrees(options, problem.cluster))


def shape_of(plan: Plan) -> dict[str, int]:
    """Return the sizes of a plan: meshes of devices, their replicas, and the devices of each."""
    meshes = {stage.replicas[0].devices: stage for stage in plan.stages}
    (dp,) = {len(stage.replicas) for stage in plan.stages}
    (tp,) = {len(replica.devices) for stage in plan.stages for replica in stage.replicas}
    return {"tp": tp, "pp": len(meshes), "dp": dp}


def best_plan(problem: Problem, splits: Splits | None = None) -> Plan:
    plan = compare_strategies(problem, joint=True, splits=splits or {}).best.plan
    assert plan is not None
    return plan


def test_words_are_those_of_the_dataclass():
    assert set(get_type_hints(DegreeWords)) == {item.name for item in fields(Degrees)}


@pytest.mark.parametrize("degrees", [
    {"pp": 2}, {"pp": 4}, {"dp": 4}, {"pp": 2, "dp": 2}, {"pp": 4, "interleave": 2}, {"dp": 2, "zero": 1},
    {"dp": 4, "zero": 0}, {"pp": 2, "recompute": "full"}, {"pp": 2, "recompute": "none"},
    {"dp": 2, "microbatch_size": 2}])
def test_best_plan_has_the_degrees(degrees):
    problem = with_degrees(equal_problem(), **degrees)
    plan, options = best_plan(problem), problem.options
    shape = shape_of(plan)
    assert {name: shape[name] for name in degrees if name in shape} == {
        name: size for name, size in degrees.items() if name in shape}
    if "zero" in degrees:
        assert plan.optimizer.sharded == bool(degrees["zero"])
    if "recompute" in degrees:
        assert all(stage.recompute == (degrees["recompute"] == "full") for stage in plan.stages)
    if "interleave" in degrees:
        assert len(plan.stages) == 8
    if "microbatch_size" in degrees:
        assert plan.microbatches == options.batch // (2 * 2)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 1}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}])
def test_tensor_degree_is_kept(degrees):
    problem, splits = tensor_world()
    plan = best_plan(with_degrees(problem, **degrees), splits)
    shape = shape_of(plan)
    assert {name: shape[name] for name in degrees} == degrees


def test_fixed_degrees_leave_few_settings():
    problem = equal_problem(8)
    free, fixed = (len(estimates_of(item)[1]) for item in (problem, with_degrees(problem, pp=4, interleave=1)))
    assert 0 < fixed < free / 4


def test_uneven_devices_take_what_they_can():
    assert shape_of(best_plan(with_degrees(mixed_problem(), pp=2)))["pp"] == 2
    with pytest.raises(NoFeasiblePlan, match="no layout of these devices has pp 3, dp 2"):
        compare_strategies(replace(mixed_problem(), options=PlanOptions(batch=24, degrees=Degrees(pp=3, dp=2))), (),
                           joint=True)


def test_two_axes_give_the_third_and_micro_batches_follow():
    assert settled("8 x A100-80GB", tp=2, pp=2).degrees.dp == 2
    assert settled("8 x A100-80GB", tp=2, dp=4).degrees.pp == 1
    assert settled("8 x A100-80GB", pp=2, dp=1).degrees.tp == 4
    assert settled("8 x A100-80GB", tp=2, pp=2, microbatch_size=4).microbatches == 4
    assert settled("8 x A100-80GB", microbatches=8, microbatch_size=1).degrees.dp == 4
    assert settled("8 x A100-80GB", zero=1).optimizer.sharded
    assert settled("8 x A100-80GB", recompute="full").recompute


@pytest.mark.parametrize(("degrees", "message"), [
    ({"tp": 3}, "--tp 3 devices of one host cannot divide operators.*Try 2 or 4"),
    ({"tp": 16}, "Try 8"),
    ({"tp": 2, "pp": 3}, "--tp 2 x --pp 3 are 6 devices, and the cluster has 8: try --pp 2 or 4"),
    ({"pp": 5}, "--pp 5 is 5 devices, and the cluster has 8: try --pp 4 or 8"),
    ({"tp": 2, "pp": 2, "dp": 3}, "--tp 2 x --pp 2 x --dp 3 are 12 devices.*try --dp 2"),
    ({"dp": 8, "batch": 20}, "--dp 8 replicas do not divide a batch of 20: try --batch 16 or 24"),
    ({"dp": 8, "microbatches": 8}, "each of 8 micro-batches has 4 samples.*try --microbatches 4"),
    ({"microbatch_size": 5}, "a batch of 32 is not made of micro-batches of 5: try --microbatch-size 4 or 8"),
    ({"microbatch_size": 2, "microbatches": 4, "dp": 2}, "16 samples, not the batch of 32.*try --dp 4"),
    ({"pp": 1, "interleave": 2}, "--interleave 2 needs a pipeline, and --pp 1 is none"),
    ({"tp": 8, "interleave": 2, "dp": 1}, "leave none on 8 devices"),
    ({"pp": 4, "interleave": 2, "microbatches": 2}, "that --pp 4 divides, not 2: try --microbatches 4"),
    ({"pp": 8, "interleave": 2, "batch": 4}, "a batch of 4 has none: try --batch 8"),
    ({"zero": 0, "zero_group": "all"}, "--zero 0 keeps whole"),
    ({"zero": 3, "tp": 2, "pp": 4}, r"--zero 3 keeps pieces on replicas, and there is one of each stage"),
    ({"zero": 3, "cp": 2}, "--zero 3 is not planned together with --cp 2"),
    ({"zero": 2, "pp": 2, "interleave": 2}, "--zero 2 is not planned together with --interleave 2"),
    ({"zero": 3, "zero_group": "host"}, "replicas on several hosts, and the cluster has one"),
    ({"ep": 3}, "--ep 3 devices of one host cannot divide operators"),
    ({"zero": 1, "mode": "inference"}, "--zero is for training"),
    ({"recompute": "full", "mode": "inference"}, "--recompute is for training"),
    ({"tp": 2, "whole": True}, "this optimizer needs them whole"),
])
def test_what_cannot_be_is_refused_with_what_works(degrees, message):
    with pytest.raises(InputError, match=message):
        settled("8 x A100-80GB", **degrees)


@pytest.mark.parametrize(("degrees", "message"), [
    ({"tp": 0}, "--tp must be a whole number, 1 or more, not 0"), ({"pp": True}, "--pp must be"),
    ({"microbatch_size": 1.5}, "--microbatch-size must be"), ({"zero": 4}, "--zero must be 0, 1, 2 or 3, not 4"),
    ({"zero_group": "rack"}, "must be host or all"), ({"recompute": "some"}, "none, full, selective or a number"),
    ({"recompute": "-1GiB"}, "none, full, selective or a number")])
def test_nonsense_is_refused(degrees, message):
    with pytest.raises(InputError, match=message):
        Degrees(**degrees)


def test_model_must_be_divisible():
    graph = tensor_world()[0].graph
    for degrees, message in (({"tp": 8}, "--tp 8 does not divide the 4 attention heads of 'llama-tiny': try 4"),
                             ({"pp": 512, "interleave": 4}, "too few for 2048 stages")):
        with pytest.raises(InputError, match=message):
            check_model_degrees(PlanOptions(batch=8, degrees=Degrees(**degrees)), graph)
    check_model_degrees(PlanOptions(batch=8, degrees=Degrees(tp=4, pp=4, ep=1)), graph)


def test_searches_that_cannot_follow_are_refused_where_they_were_asked_for():
    cluster: Cluster = read_cluster("4 x A100-80GB")
    options = PlanOptions(batch=8, degrees=Degrees(pp=2, dp=2))
    for asked, message in (({"strategies": ["single"]}, "--strategy single makes no plans with --pp 2 --dp 2 on 4"),
                           ({"strategies": None, "deploy": True}, "--deploy chooses itself"),
                           ({"strategies": None, "placements": ("v",)}, "--placement v chooses itself")):
        with pytest.raises(InputError, match=message):
            check_searches(options, cluster, **asked)
    check_searches(options, cluster, strategies=None)
