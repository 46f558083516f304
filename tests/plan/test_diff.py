"""Differences of plans: what means the same is the same, and each kind of change is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from tests.plan.generate import random_plan
from tests.worlds import chain_graph, plain_cluster, plan_of, with_gradients
from weft.plan.diff import diff_plans, match_stages, plan_order_name
from weft.plan.orders import gpipe, interleaved, one_f_one_b
from weft.plan.plan import GradientExchange, Optimizer, Plan, Replica, SearchInfo, Sharding, Stage

GRAPH = chain_graph(4, tied=((0, 3),))
BASE = plan_of(GRAPH, [[0, 1], [2, 3]], order=one_f_one_b(2, 3), devices=[0, 1], microbatches=3, num_devices=3)


def diff(a: Plan, b: Plan, graph=GRAPH):
    return diff_plans(a, b, graph, graph)


def renamed(plan: Plan, rng: Random) -> Plan:
    """Return the plan with other names of stages, in another order of the list, made by somebody else."""
    names = {stage.name: f"t{index}" for index, stage in enumerate(rng.sample(plan.stages, len(plan.stages)))}
    stages = [replace(stage, name=names[stage.name], modules=("x",), ops=tuple(rng.sample(stage.ops, len(stage.ops))),
                      replicas=tuple(replace(replica, times={"F": rng.random()}) for replica in stage.replicas))
              for stage in rng.sample(plan.stages, len(plan.stages))]
    order = {device: tuple(f"{names[token.partition(':')[0]]}:{token.partition(':')[2]}" for token in tokens)
             for device, tokens in reversed(plan.order.items())}
    gradients = rng.sample(plan.gradients, len(plan.gradients))
    return replace(plan, stages=tuple(stages), order=order, gradients=tuple(gradients), search=SearchInfo(by="else"))


@pytest.mark.parametrize("seed", range(25))
def test_names_times_and_lists_do_not_matter(seed):
    rng = Random(seed)
    graph, _, plan = random_plan(rng)
    found = diff(plan, renamed(plan, rng), graph)
    assert found.is_same, found


@pytest.mark.parametrize("seed", range(25))
def test_different_plans_differ_both_ways(seed):
    graph, _, plan = random_plan(Random(seed))
    device = next(iter(plan.order))
    if len(plan.order[device]) < 2:
        return
    other = replace(plan, order={**plan.order, device: plan.order[device][1:] + plan.order[device][:1]})
    assert diff(plan, other, graph).parts == diff(other, plan, graph).parts == ("order",)


def stage(plan: Plan, index: int = 0, **changes) -> Plan:
    stages = [replace(item, **changes) if position == index else item for position, item in enumerate(plan.stages)]
    return replace(plan, stages=tuple(stages))


def moved(plan: Plan) -> Plan:
    one, other = plan.stages
    stages = (replace(one, ops=(*one.ops, other.ops[0])), replace(other, ops=other.ops[1:]))
    return with_gradients(replace(plan, stages=stages), GRAPH)


def split_over(*shares: float) -> tuple[Replica, ...]:
    return tuple(Replica(devices=(f"d{index}",), share=share) for index, share in enumerate(shares))


CHANGES: list[tuple[Callable[[Plan], Plan], tuple[str, ...], Callable[[object], object], object]] = [
    (lambda plan: replace(plan, model=replace(plan.model, batch=9)), ("settings",),
     lambda found: [(item.what, item.a, item.b) for item in found.settings], [("batch", "3", "9")]),
    (lambda plan: replace(plan, model=replace(plan.model, digest="other")), ("settings",),
     lambda found: [item.b for item in found.settings], ["chain (other)"]),
    (lambda plan: replace(plan, model=replace(plan.model, name="an alias")), (), lambda found: found.is_same, True),
    (lambda plan: replace(plan, cluster=replace(plan.cluster, digest="other")), ("settings",),
     lambda found: [(item.what, item.b) for item in found.settings], [("cluster", "d0, d1, d2 (other)")]),
    (lambda plan: replace(plan, optimizer=Optimizer(kind="adamw", sharded=True)), ("settings",),
     lambda found: [item.b for item in found.settings], ["adamw, lr 0.001, state divided"]),
    (lambda plan: stage(plan, recompute=True), ("stages",),
     lambda found: [(item.a, [(change.what, change.b) for change in item.changes]) for item in found.stages],
     [("s0", [("recompute", "yes")])]),
    (lambda plan: stage(plan, microbatches=(0, 1, 2)), (), lambda found: found.is_same, True),
    (lambda plan: stage(plan, microbatches=(0, 2)), ("stages",),
     lambda found: found.stages[0].changes[0].b, "0, 2"),
    (lambda plan: stage(plan, replicas=split_over(0.5, 0.5)), ("stages", "placement"),
     lambda found: [(change.what, change.a, change.b) for change in found.stages[0].changes],
     [("devices", "d0", "d0, d1"), ("shares", "1", "0.5, 0.5")]),
    (moved, ("stages", "placement"),
     lambda found: [(item.a, item.b, item.ops, item.modules, item.parameter_bytes) for item in found.moves],
     [(("d1",), ("d0",), ("op2",), ("layers.2",), 4)]),
    (lambda plan: replace(plan, order={**plan.order, "d0": plan.order["d0"][:-1]}), ("order",),
     lambda found: [(item.device, item.position, item.a, item.b) for item in found.orders], [("d0", 5, "s0:B:2", "")]),
    (lambda plan: replace(plan, gradients=(replace(plan.gradients[0], method="parameter_server", server="d1"),)),
     ("gradient exchanges",), lambda found: [(item.a, item.b, item.parameters, item.num_bytes) for item in found.exchanges],
     [("all_reduce among d0, d1", "parameter_server among d0, d1 at d1", ("w0",), 4)]),
    (lambda plan: replace(plan, gradients=()), ("gradient exchanges",), lambda found: found.exchanges[0].b, "none"),
    (lambda plan: stage(plan, sharding=Sharding(ops={"op0": ("n",)}, tensors={"w0": ("S0",)})), ("sharding",),
     lambda found: [(item.kind, item.name, item.a) for item in found.sharding],
     [("operator", "op0", "whole"), ("tensor", "w0", "whole")]),
]


@pytest.mark.parametrize(("change", "parts", "look", "expected"), CHANGES)
def test_each_change_is_found_alone(change, parts, look, expected):
    base = stage(BASE, replicas=(Replica(devices=("d0",), mesh={"tensor": 1}),)) if parts == ("sharding",) else BASE
    found = diff(base, change(base))
    assert found.parts == parts
    assert look(found) == expected
    assert found.is_same == (not parts)


def test_buckets_count():
    names = ("w0", "w1")
    one = GradientExchange(parameters=names, devices=("d0", "d1"))
    two = tuple(replace(one, parameters=(name,)) for name in names)
    found = diff(replace(BASE, gradients=(one,)), replace(BASE, gradients=two))
    assert found.parts == ("gradient exchanges",)
    assert (found.exchanges[0].a, found.exchanges[0].b) == ("1 buckets", "2 other buckets")
    assert diff(replace(BASE, gradients=(one,)), replace(BASE, gradients=(replace(one, parameters=names[::-1]),))).is_same


def test_layers_of_one_class_are_one_row():
    graph = chain_graph(6)
    plan = plan_of(graph, [[*range(6)]], order=one_f_one_b(1, 1), devices=[0], microbatches=1)

    def words(word: str) -> Plan:
        names = {f"layers.{index}.mlp": (word,) for index in range(5)}
        return stage(plan, replicas=(Replica(devices=("d0",), mesh={"tensor": 1}),), sharding=Sharding(ops=names))

    found = diff(words("n"), words("k"), graph).sharding
    assert [(item.name, item.count, item.a, item.b) for item in found] == [("layers.*.mlp", 5, "tensor n", "tensor k")]


def test_stages_are_matched_by_what_they_hold():
    def stages(groups: list[list[int]], devices: list[int]) -> Plan:
        return plan_of(GRAPH, groups, order=one_f_one_b(len(groups), 3), devices=devices, microbatches=3)

    other = stages([[0], [1, 2], [3]], [0, 1, 2])
    assert match_stages(BASE, other) == ((0, 0), (1, 1), (None, 2)), "on the same devices"
    assert match_stages(BASE, stages([[0, 1], [2, 3]], [1, 0])) == ((0, 0), (1, 1)), "with the same operators"
    assert match_stages(BASE, stages([[0], [1, 2, 3]], [3, 2])) == ((0, 0), (1, 1)), "with most in common"
    found = diff(BASE, other)
    assert [(item.a, item.b) for item in found.stages] == [("s0", "s0"), ("s1", "s1"), (None, "s2")]
    assert found.stages[-1].changes[0].b == "1 operators on d2"


def test_equal_operators_go_with_equal_devices():
    """Opposite pipelines: two stages hold the same operators."""
    ops = BASE.stages[0].ops
    both = tuple(Stage(name=name, ops=ops, replicas=(Replica(devices=(device,)),), microbatches=handled)
                 for name, device, handled in (("down", "d0", (0, 2)), ("up", "d1", (1,))))
    assert match_stages(replace(BASE, stages=both), replace(BASE, stages=both[::-1])) == ((0, 1), (1, 0))


def test_models_with_other_operators():
    other = chain_graph(5)
    plan = plan_of(other, [[0, 1, 2], [3, 4]], order=one_f_one_b(2, 3), devices=[0, 1], microbatches=3, num_devices=3)
    found = diff_plans(BASE, plan, GRAPH, other)
    assert "settings" in found.parts
    assert [(item.a, item.b, item.ops) for item in found.moves] == [(("d1",), ("d0",), ("op2",)), ((), ("d1",), ("op4",))]


def test_orders_have_names():
    graph = chain_graph(4)

    def named(order, devices):
        groups = [[op] for op in range(len(devices) - 1)] + [list(range(len(devices) - 1, 4))]
        return plan_order_name(plan_of(graph, groups, order=order, devices=devices, microbatches=4))

    assert named(one_f_one_b(2, 4), [0, 1]) == "1f1b"
    assert named(gpipe(2, 4), [0, 1]) == "gpipe"
    assert named(interleaved(2, 2, 4), [0, 1, 0, 1]) == "interleaved-1f1b"
    order = one_f_one_b(2, 4)
    order[1] = order[1][1:] + order[1][:1]
    assert named(order, [0, 1]) is None


def test_the_base_is_sound():
    from weft.plan.check import check_plan

    check_plan(BASE, GRAPH, plain_cluster(3))
    check_plan(moved(BASE), GRAPH, plain_cluster(3))
