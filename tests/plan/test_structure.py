"""Every rule that a plan must keep, broken once, with the sentence that names the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.plan.bases import custom_plan
from tests.worlds import chain_graph, dag_graph, pipeline, plain_cluster
from weft.base.errors import PlanError
from weft.plan.check import check_plan
from weft.plan.plan import GradientExchange, Plan, Replica, Sharding, Stage
from weft.plan.structure import parse_action, stage_patterns, structure_problems

GRAPH, PLAN = pipeline("gpipe", 2, 2)
CLUSTER = plain_cluster(2)
D0 = ("s0:F:0", "s0:F:1", "s0:B:0", "s0:B:1")


def change(part: str, **changes: object) -> Callable[[Plan], Plan]:
    """Return a function that replaces fields of the plan's ``model``, ``cluster``, ``optimizer`` or itself."""
    def apply(plan: Plan) -> Plan:
        return replace(plan, **changes) if part == "plan" else replace(
            plan, **{part: replace(getattr(plan, part), **changes)})
    return apply


def stage(index: int = 0, **changes: object) -> Callable[[Plan], Plan]:
    """Return a function that replaces fields of one stage."""
    def apply(plan: Plan) -> Plan:
        stages = list(plan.stages)
        stages[index] = replace(stages[index], **changes)
        return replace(plan, stages=tuple(stages))
    return apply


def replica(**changes: object) -> Callable[[Plan], Plan]:
    """Return a function that replaces fields of the first stage's replica."""
    return lambda plan: stage(replicas=(replace(plan.stages[0].replicas[0], **changes),))(plan)


def shard(**words: dict[str, tuple[str, ...]]) -> Callable[[Plan], Plan]:
    """Return a function that shards the first stage over a mesh of one axis."""
    return lambda plan: stage(sharding=Sharding(**words))(replica(mesh={"tensor": 1})(plan))


def order(*actions: str, device: str = "d0") -> Callable[[Plan], Plan]:
    """Return a function that replaces the order of one device."""
    return lambda plan: replace(plan, order={**plan.order, device: actions})


def inference(plan: Plan) -> Plan:
    """Return the plan as an inference plan."""
    only_forward = {device: tuple(item for item in actions if ":F:" in item) for device, actions in plan.order.items()}
    return replace(change("model", mode="inference")(plan), order=only_forward)


def exchange(*exchanges: GradientExchange) -> Callable[[Plan], Plan]:
    """Return a function that replaces the gradient exchanges."""
    return change("plan", gradients=exchanges)


def both(*devices: str, **fields: object) -> GradientExchange:
    return GradientExchange(devices=devices or ("d0", "d1"), **fields)


TWO = (Replica(devices=("d0",), share=0.5), Replica(devices=("d1",), share=0.5))

BROKEN: dict[str, tuple[Callable[[Plan], Plan], list[str]]] = {
    "another model": (change("model", digest="x"), [
        f"model.digest is 'x' but the model 'chain' has {GRAPH.digest!r}: the plan was made for another model (or "
        "another version of it); plan again. What differs: its operators have the plan's names, so their wiring or the "
        "shapes of its parameters differ"]),
    "another cluster": (change("cluster", digest="y"), [
        f"cluster.digest is 'y' but the cluster 'plain' has {CLUSTER.digest!r}: the plan was made for another "
        "cluster; plan again"]),
    "unknown device": (change("cluster", devices=("d0", "d1", "d7")), [
        "cluster.devices[2]: there is no device 'd7' in the cluster"]),
    "no devices": (change("cluster", devices=()), [
        "cluster.devices is empty",
        "stages[0].replicas[0].devices[0]: 'd0' is not in cluster.devices",
        "stages[1].replicas[0].devices[0]: 'd1' is not in cluster.devices"]),
    "device twice": (change("cluster", devices=("d0", "d1", "d0")), ["cluster.devices: 'd0' is there 2 times"]),
    "no micro-batch": (change("plan", microbatches=0), [
        "microbatches (0) and model.batch (2) must be 1 or more, and at most 2147483647"]),
    "negative batch": (change("model", batch=-4), [
        "microbatches (2) and model.batch (-4) must be 1 or more, and at most 2147483647"]),
    "huge batch": (change("model", batch=2**40), [
        f"microbatches (2) and model.batch ({2**40}) must be 1 or more, and at most 2147483647"]),
    "uneven micro-batches": (change("model", batch=3), [
        "model.batch (3) is not a multiple of microbatches (2); change one of them"]),
    "far more micro-batches than actions": (lambda plan: change("model", batch=10**9)(
        replace(plan, microbatches=10**9)), [
        "order has 8 actions for 1000000000 micro-batches: each needs at least one"]),
    "no stages": (change("plan", stages=()), ["stages is empty"]),
    "negative learning rate": (change("optimizer", lr=-1.0), ["optimizer.lr is -1.0: it must be zero or more"]),
    "learning rate NaN": (change("optimizer", lr=math.nan), ["optimizer.lr is nan: it must be zero or more"]),
    "stage name twice": (stage(1, name="s0"), ["stages: the name 's0' is there 2 times"]),
    "stage name empty": (stage(name=""), ["stages[0].name '' must not be empty or contain ':'"]),
    "stage name with colon": (stage(name="a:b"), ["stages[0].name 'a:b' must not be empty or contain ':'"]),
    "stage without operators": (stage(ops=()), ["stages[0].ops is empty"]),
    "unknown operator": (stage(ops=("op0", "conv9")), ["stages[0].ops[1]: the model has no operator 'conv9'"]),
    "operator twice in a stage": (stage(ops=("op0", "op0")), ["stages[0].ops names an operator twice"]),
    "micro-batch twice": (stage(microbatches=(0, 1, 1)), [
        "stages[0].microbatches must name at least one micro-batch, each once"]),
    "no micro-batches": (stage(microbatches=()), [
        "stages[0].microbatches must name at least one micro-batch, each once"]),
    "micro-batch out of range": (stage(microbatches=(0, 2)), [
        "stages[0].microbatches[1] is 2, but there are 2 micro-batches"]),
    "sharding of an unknown tensor": (shard(tensors={"zz": ("R",)}), [
        "stages[0].sharding.tensors: the model has no tensor 'zz'"]),
    "sharding of an operator elsewhere": (shard(ops={"op1": ("",)}), [
        "stages[0].sharding.ops: the stage has no operator 'op1'"]),
    "sharding with too many words": (shard(ops={"op0": ("k", "")}, tensors={"y0": ("S0", "R")}), [
        "stages[0].sharding.ops.op0 has 2 words for 1 axes", "stages[0].sharding.tensors.y0 has 2 words for 1 axes"]),
    "sharding that is not a placement": (shard(tensors={"y0": ("Q",)}), [
        "stages[0].sharding.tensors.y0: 'Q' is not a placement: use R, P, S0, S2/3, S1/2z or S1x64"]),
    "sharding of a missing dimension": (shard(tensors={"y0": ("S2",)}), [
        "stages[0].sharding.tensors.y0: axis 'tensor' splits dimension 2, but the tensor has 2 dimensions"]),
    "sharding in blocks that do not fit": (shard(tensors={"y0": ("S1/3",)}), [
        "stages[0].sharding.tensors.y0: S1/3 does not fit dimension 1 of size 2: it is no multiple of 3"]),
    "sharding with unlike axes": (stage(sharding=Sharding(ops={"op0": ("k",)}), replicas=(
        Replica(devices=("d0",), mesh={"tensor": 1}, share=0.5), Replica(devices=("d1",), mesh={"data": 1}, share=0.5))), [
        "stages[0].replicas: shares [0.5, 0.5] of 1 samples leave a replica without one; try fewer micro-batches or "
        "replicas",
        "stages[0].replicas: a stage that shards needs the same axes in every replica, in the same order"]),
    "no replicas": (stage(replicas=()), ["stages[0].replicas is empty"]),
    "replica without devices": (replica(devices=()), ["stages[0].replicas[0].devices is empty",
                                                      "stages[0].replicas[0].mesh {} has 1 places for 0 devices"]),
    "replica on an unknown device": (replica(devices=("d9",)), [
        "stages[0].replicas[0].devices[0]: 'd9' is not in cluster.devices"]),
    "device twice in a stage": (stage(replicas=(TWO[0], TWO[0])), [
        "stages[0].replicas[1].devices[0]: 'd0' already runs this stage",
        "stages[0].replicas: shares [0.5, 0.5] of 1 samples leave a replica without one; try fewer micro-batches or "
        "replicas"]),
    "mesh too small": (replica(devices=("d0", "d1")), ["stages[0].replicas[0].mesh {} has 1 places for 2 devices"]),
    "mesh size zero": (replica(mesh={"tensor": 0}), [
        "stages[0].replicas[0].mesh {'tensor': 0}: sizes must be from 1 to the number of devices (1)"]),
    "mesh size huge": (replica(mesh={"a": 2**62, "b": 2**62}), [
        f"stages[0].replicas[0].mesh {{'a': {2**62}, 'b': {2**62}}}: sizes must be from 1 to the number of devices "
        "(1)"]),
    "share zero": (replica(share=0.0), ["stages[0].replicas[0].share is 0.0: it must be more than zero"]),
    "share NaN": (replica(share=math.nan), ["stages[0].replicas[0].share is nan: it must be more than zero"]),
    "shares that do not add up": (replica(share=0.75), ["stages[0].replicas: the shares add up to 0.75, not 1"]),
    "unknown phase of a time": (replica(times={"X": 1.0}), [
        "stages[0].replicas[0].times.X is 1.0: phases are F, B, I, W, and times are zero or more"]),
    "negative time": (replica(times={"F": -1.0}), [
        "stages[0].replicas[0].times.F is -1.0: phases are F, B, I, W, and times are zero or more"]),
    "endless time": (replica(times={"F": math.inf}), [
        "stages[0].replicas[0].times.F is inf: phases are F, B, I, W, and times are zero or more"]),
    "replica without a sample": (stage(replicas=TWO), [
        "stages[0].replicas: shares [0.5, 0.5] of 1 samples leave a replica without one; try fewer micro-batches or "
        "replicas"]),
    "operator in no stage": (lambda plan: replace(plan, stages=plan.stages[:1], order={"d0": D0}), [
        "stages: operator 'op1' is in no stage"]),
    "operator in two stages": (stage(1, ops=("op1", "op0")), [
        "stages: operator 'op0' is in more than one stage",
        "gradients: parameter 'w0' is held by d0, d1 but its gradient is not exchanged"]),
    "operator in no stage for a micro-batch": (lambda plan: order("s0:F:0", "s0:B:0")(stage(microbatches=(0,))(plan)), [
        "stages: operator 'op0' is in no stage for micro-batch 1"]),
    "order of an unknown device": (order(device="d5"), ["order: 'd5' is not in cluster.devices"]),
    "no order for a device": (lambda plan: replace(plan, order={"d0": D0}), [
        "order.d1: 's1:F:0' is missing", "order.d1: 's1:F:1' is missing"]),
    "strange action": (order(*D0, "s0-F-0"), [
        "order.d0[4]: 's0-F-0' is not of the form stage:F:0 with a phase F, B, I or W"]),
    "action of no stage": (order(*D0, "s9:F:0"), ["order.d0[4]: there is no stage 's9'"]),
    "action of another device": (order(*D0, "s1:F:0"), ["order.d0[4]: 'd0' does not run stage 's1'"]),
    "action for a micro-batch too many": (order(*D0, "s0:F:2"), [
        "order.d0[4]: stage 's0' does not handle micro-batch 2"]),
    "backward in inference": (lambda plan: order("s0:F:0", "s0:F:1", "s0:B:0")(inference(plan)), [
        "order.d0[2]: 's0:B:0' is a backward action, but the plan is for inference"]),
    "action twice": (order(*D0, "s0:F:1"), ["order.d0[4]: 's0:F:1' is there already, at order.d0[1]"]),
    "forward missing": (order("s0:F:0", "s0:B:0", "s0:B:1"), ["order.d0: 's0:F:1' is missing"]),
    "backward missing": (order("s0:F:0", "s0:F:1", "s0:B:0"), ["order.d0: 's0:B:1' is missing"]),
    "B and I": (order(*D0, "s0:I:0"), [
        "order.d0: stage 's0' micro-batch 0 has both B and I or W; use B, or I and W"]),
    "W missing": (order("s0:F:0", "s0:F:1", "s0:B:0", "s0:I:1"), ["order.d0: 's0:W:1' is missing"]),
    "I missing": (order("s0:F:0", "s0:F:1", "s0:B:0", "s0:W:1"), ["order.d0: 's0:I:1' is missing"]),
    "backward before forward": (order("s0:B:0", "s0:F:0", "s0:F:1", "s0:B:1"), [
        "order.d0[0]: 's0:B:0' stands before 's0:F:0'"]),
    "W before I": (order("s0:F:0", "s0:F:1", "s0:W:0", "s0:I:0", "s0:B:1"), [
        "order.d0[2]: 's0:W:0' stands before 's0:I:0'"]),
    "exchange in inference": (lambda plan: exchange(both(parameters=("w0",)))(inference(plan)), [
        "gradients: an inference plan exchanges none"]),
    "exchange of no parameter": (exchange(both(parameters=("y0",))), [
        "gradients[0].parameters[0]: no stage has a parameter 'y0'"]),
    "exchange among others": (exchange(both(parameters=("w0",))), [
        "gradients[0].parameters[0]: 'w0' is held by d0, but exchanged among d0, d1"]),
    "exchanged twice": (exchange(both("d0", parameters=("w0",)), both("d0", parameters=("w0",))), [
        "gradients[1].parameters[0]: 'w0' is exchanged already in gradients[0]"]),
    "exchange with a device twice": (exchange(both("d0", "d0", parameters=("w0",))), [
        "gradients[0] must name parameters and devices, each device once"]),
    "exchange of nothing": (exchange(both(parameters=())), [
        "gradients[0] must name parameters and devices, each device once"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plan_is_refused_with_the_field(name):
    breaking, expected = BROKEN[name]
    with pytest.raises(PlanError) as caught:
        check_plan(breaking(PLAN), GRAPH, CLUSTER)
    assert caught.value.problems == tuple(expected)
    assert all(problem in str(caught.value) for problem in expected)


def test_the_plan_that_the_table_breaks_is_good():
    check_plan(PLAN, GRAPH, CLUSTER)
    assert structure_problems(PLAN, GRAPH) == []
    check_plan(inference(PLAN), GRAPH, CLUSTER)


def test_all_problems_are_reported_at_once():
    broken = stage(1, ops=("nope",))(replica(share=-1.0)(change("model", batch=3)(PLAN)))
    with pytest.raises(PlanError) as caught:
        check_plan(broken, GRAPH, CLUSTER)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "model.batch", "stages[0].replicas[0].share", "stages[1].ops[0]:"]
    assert str(caught.value).startswith("the plan has 3 problems: \n  - model.batch")


def test_what_follows_from_another_model_is_not_listed():
    broken = stage(ops=("nope",))(change("model", digest="x")(PLAN))
    with pytest.raises(PlanError, match=r"the plan has 1 problem: model\.digest is 'x'"):
        check_plan(broken, GRAPH, CLUSTER)


def test_message_lists_twenty_problems_and_counts_the_rest():
    with pytest.raises(PlanError) as caught:
        check_plan(stage(ops=tuple(f"no{index}" for index in range(30)))(PLAN), GRAPH, CLUSTER)
    assert len(caught.value.problems) == 30
    assert str(caught.value).count("\n  - ") == 21
    assert "... and 10 more" in str(caught.value)


def test_sizes_beyond_all_bounds_are_refused_before_they_overflow():
    graph = replace(GRAPH, tensor_bytes=np.full(GRAPH.num_tensors, 2**40, dtype=np.int64))
    plan = change("model", batch=2**30)(PLAN)
    assert structure_problems(plan, graph) == [
        f"model.batch is {2**30}: the tensors of one step would take 5.369e+09 TiB"]


def test_training_needs_a_scalar_loss():
    graph = replace(GRAPH, tensor_shapes=tuple((2, 2) for _ in GRAPH.tensor_shapes))
    plan = change("model", digest=graph.digest)(PLAN)
    assert structure_problems(plan, graph) == [
        "model.mode is 'training' but the model's first output is not a scalar loss"]


def test_training_needs_backward_costs():
    graph = replace(GRAPH, has_backward=False)
    assert structure_problems(PLAN, graph) == [
        "model.mode is 'training' but the graph was traced without backward costs"]


def test_gradient_of_a_shared_parameter_must_be_exchanged():
    graph = chain_graph(2, tied=((0, 1),))
    broken = change("plan", gradients=())(change("model", digest=graph.digest)(PLAN))
    assert structure_problems(broken, graph) == [
        "gradients: parameter 'w0' is held by d0, d1 but its gradient is not exchanged"]


def test_stages_that_feed_each_other():
    graph = chain_graph(4)
    broken = replace(PLAN, model=replace(PLAN.model, digest=graph.digest), stages=(
        replace(PLAN.stages[0], ops=("op0", "op2")), replace(PLAN.stages[1], ops=("op1", "op3"))))
    assert structure_problems(broken, graph) == [
        "stages: s0 -> s1 -> s0 feed each other in a cycle; stages must be convex sets of operators"]


def test_a_cycle_of_three_stages_is_found_among_others():
    graph = dag_graph([[-1], [0], [1], [2], [0, 3], [4]])
    names = {"a": (0,), "b": (1, 3), "c": (2, 4), "d": (5,)}
    stages = tuple(Stage(name=name, ops=tuple(f"op{op}" for op in ops), replicas=(Replica(devices=("d0",)),))
                   for name, ops in names.items())
    actions = tuple(f"{name}:{phase}:{index}" for phase in "FB" for name in names for index in (0, 1))
    broken = replace(PLAN, model=replace(PLAN.model, digest=graph.digest), stages=stages, order={"d0": actions})
    assert structure_problems(broken, graph) == [
        "stages: b -> c -> b feed each other in a cycle; stages must be convex sets of operators"]


def test_devices_of_one_stage_use_one_style_of_backward():
    graph = chain_graph(1)
    plan = custom_plan(graph, [[0]], [((("d0",), 0.5), (("d1",), 0.5))], microbatches=1, size=2, num_devices=2)
    plan = replace(plan, order={"d0": ("s0:F:0", "s0:B:0"), "d1": ("s0:F:0", "s0:I:0", "s0:W:0")})
    assert structure_problems(plan, graph) == [
        "order.d1: stage 's0' micro-batch 0 uses I here but B on 'd0'; use one of them on all its devices"]


def test_constants_may_be_in_any_number_of_stages():
    graph = dag_graph([[-1], [], [0, 1], [1, 2]], weights=[0, None, 2, 3])
    assert graph.is_constant.tolist() == [False, True, False, False]
    for first, second in (([0, 1, 2], [3]), ([0, 2], [3]), ([0, 1, 2], [1, 3])):
        plan = custom_plan(graph, [first, second], [((("d0",), 1.0),), ((("d1",), 1.0),)], microbatches=2, size=1,
                           num_devices=2)
        program = check_plan(plan, graph, CLUSTER)
        assert [channel.tensors for channel in program.channels] == [(graph.tensor_index["y2"],)] * 2


def test_names_that_a_terminal_would_obey_are_shown_as_escapes():
    bad = "s\x1b[2J\ud800"
    with pytest.raises(PlanError) as caught:
        check_plan(order(*D0, f"{bad}:F:0")(stage(1, name=bad)(PLAN)), GRAPH, CLUSTER)
    assert "\x1b" not in str(caught.value)
    assert all("\x1b" not in problem and problem.encode() for problem in caught.value.problems)


@pytest.mark.parametrize("token", ["", "s0", "s0:F", "s0:F:", "s0:F:x", "s0:F:-1", "s0:G:0", "s0:F:0:0", "s0:F:1e3",
                                   "s0:F:" + "9" * 10, "s0:f:0", "s0:F: 1", "s0:F:\u0661"])
def test_what_is_not_an_action(token):
    assert parse_action(token) is None


def test_an_action():
    assert parse_action("stage one:W:12") == ("stage one", "W", 12)


def test_patterns_group_the_stages_that_serve_a_micro_batch():
    named = {"a": None, "b": (0, 2), "c": (1, 3), "d": (3,)}
    stages = tuple(Stage(name=name, ops=("op0",), replicas=(), microbatches=handled) for name, handled in named.items())
    plan = replace(PLAN, microbatches=4, stages=stages)
    assert stage_patterns(plan) == {(0, 1): [0, 2], (0, 2): [1], (0, 2, 3): [3]}
    assert stage_patterns(replace(plan, stages=stages[:1])) == {(0,): [0, 1, 2, 3]}


def test_large_orders_are_checked_in_linear_time():
    """With 20,000 micro-batches a look through all of them for each action would take minutes."""
    graph, plan = pipeline("1f1b", 2, 20_000)
    assert structure_problems(plan, graph) == []
    assert np.sum([len(actions) for actions in plan.order.values()]) == 80_000


def test_a_flood_of_problems_is_cut_off():
    graph, plan = pipeline("gpipe", 2, 2000)
    assert len(structure_problems(replace(plan, order={"d0": ("?",) * 5000}), graph)) == 1000
