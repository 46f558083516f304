"""Schedule problems of plans: the simulator and the memory account are the oracles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.search.joint.test_baselines import mixed_cluster, problem_of
from tests.search.schedule.greedy import greedy_search, list_orders, result_of
from weft.base.errors import InputError, NoFeasiblePlan
from weft.cluster.cluster import Contention
from weft.cost.costs import estimate_costs
from weft.plan.check import check_plan
from weft.plan.orders import gpipe
from weft.plan.plan import Optimizer, Plan
from weft.plan.program import Op
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.search.joint.placements import PLACEMENTS
from weft.search.joint.scheduled import find_schedule
from weft.search.schedule.from_plan import order_of_schedule, problem_of_plan, resource_name, with_schedule
from weft.search.schedule.schedule import check_schedule, find_problems, replay
from weft.simulate.timing import simulate

SHAPES = ["v", "x", "interleaved", "vv"]


def world(*, contention: Contention = Contention.NONE, bandwidth: str = "100kB/s", memory: str = "1GB", num_ops: int = 12,
          speeds=(1e12, 2e12, 1e12, 4e12), **options) -> Problem:
    """Return a chain with unequal operators on unequal devices, where a message takes about as long as an operator."""
    cluster = replace(mixed_cluster(list(speeds), bandwidth=bandwidth, memory=memory), contention=contention)
    return problem_of(num_ops, cluster=cluster, **{"batch": 24, "optimizer": Optimizer(kind="sgd"), **options})


def problem_for(plan: Plan, problem: Problem, **options):
    return problem_of_plan(plan, problem.graph, problem.costs, problem.cluster, **{"split_backward": False, **options})


def last_compute(plan: Plan, problem: Problem) -> float:
    program = check_plan(plan, problem.graph, problem.cluster)
    timeline = simulate(program, problem.costs, problem.cluster)
    return float(timeline.end_s[program.op == Op.COMPUTE].max())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bandwidth", "in_flight"), [("100kB/s", 1), ("100GB/s", 3), ("100GB/s", 6)])
def test_a_schedule_takes_as_long_as_the_simulated_plan(shape, split_backward, recompute, bandwidth, in_flight):
    """Exact where one message is under way at a time; else receives are posted a little late, by a transfer or so."""
    problem = world(recompute=recompute, bandwidth=bandwidth)
    plan = PLACEMENTS[shape](problem, 6)
    plan_problem = problem_for(plan, problem, split_backward=split_backward)
    orders = list_orders(plan_problem.problem, plan_problem.num_microbatches, in_flight)
    schedule = replay(plan_problem.problem, plan_problem.num_microbatches, orders)
    found = with_schedule(plan, plan_problem, schedule)
    exact = in_flight == 1 and shape != "x"
    if exact or bandwidth != "100kB/s":
        assert last_compute(found, problem) == pytest.approx(schedule.makespan, rel=1e-9 if exact else 1e-3)
    assert last_compute(found, problem) >= schedule.makespan * (1 - 1e-9)
    phases = {token.split(":")[1] for tokens in found.order.values() for token in tokens}
    assert phases == ({"F", "I", "W"} if split_backward else {"F", "B"})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contention", [Contention.LINK, Contention.PORT])
def test_links_never_make_the_schedule_longer_than_the_simulation(shape, contention):
    problem = world(contention=contention)
    plan = PLACEMENTS[shape](problem, 6)
    plan_problem = problem_for(plan, problem)
    result = greedy_search(plan_problem.problem, plan_problem.num_microbatches)
    check_schedule(result.schedule)
    simulated = last_compute(with_schedule(plan, plan_problem, result.schedule), problem)
    free = problem_for(plan, replace(problem, cluster=replace(problem.cluster, contention=Contention.NONE)))
    assert all(transfer.link is None for transfer in free.problem.transfers)
    devices = range(plan_problem.problem.num_devices)
    without = replay(free.problem, free.num_microbatches, [result.schedule.orders()[device] for device in devices])
    assert without.makespan <= result.makespan * (1 + 1e-9)
    assert without.makespan <= simulated * (1 + 1e-9)


def test_a_slow_link_is_named_and_a_fast_one_is_a_delay():
    slow = world(contention=Contention.LINK, bandwidth="100kB/s")
    named = problem_for(PLACEMENTS["v"](slow, 6), slow).problem.transfers
    assert any(transfer.link for transfer in named)
    assert {transfer.link for transfer in named} - {None} <= {link.name for link in slow.cluster.links}
    fast = world(contention=Contention.LINK, bandwidth="100GB/s")
    delays = problem_for(PLACEMENTS["v"](fast, 6), fast).problem.transfers
    assert len(delays) > 0
    assert all(transfer.link is None and transfer.time > 0 for transfer in delays)


def test_resources_have_names_that_people_know():
    cluster = mixed_cluster([1e12, 1e12])
    assert resource_name(cluster, 0) == cluster.links[0].name
    ports = replace(cluster, contention=Contention.PORT)
    assert [resource_name(ports, item) for item in range(4)] == ["d0:out", "d1:out", "d0:in", "d1:in"]
    assert resource_name(replace(cluster, links=()), 1) == "d0>d1"


def test_blocks_say_what_the_stages_do():
    problem = world(speeds=(1e12, 1e12))
    plan = PLACEMENTS["v"](problem, 4)
    found = problem_for(plan, problem)
    blocks = found.problem.blocks
    assert [block.name for block in blocks] == ["s0:F", "s1:F", "s1:B", "s0:B"]
    assert [block.after for block in blocks] == [(), (0,), (1,), (0, 2)]
    assert [block.time for block in blocks] == pytest.approx(
        [plan.stages[0].replicas[0].times["F"], plan.stages[1].replicas[0].times["F"], plan.stages[1].replicas[0].times["B"],
         plan.stages[0].replicas[0].times["B"]])
    assert [block.memory for block in blocks] == [block.memory for block in blocks[:2]] + [-blocks[1].memory, -blocks[0].memory]
    kept = len(plan.stages[0].ops) * 4000 * 6 / 4
    assert blocks[0].memory == kept
    split = problem_for(plan, problem, split_backward=True).problem
    assert [block.name for block in split.blocks] == ["s0:F", "s1:F", "s1:I", "s0:I", "s1:W", "s0:W"]
    for stage in ("s0", "s1"):
        assert sum(block.memory for block in split.blocks if block.name.startswith(stage)) == 0
    forward_only = world(mode="inference", speeds=(1e12, 1e12))
    assert [(block.name, block.memory) for block in problem_for(PLACEMENTS["v"](forward_only, 4), forward_only).problem.blocks] == [
        ("s0:F", 0.0), ("s1:F", 0.0)]


def test_recomputation_adds_the_forward_to_the_backward_and_keeps_only_inputs():
    plain, again = world(), world(recompute=True)
    first, second = (problem_for(PLACEMENTS["v"](plain, 4), item).problem if item is plain else
                     problem_for(replace(PLACEMENTS["v"](plain, 4), stages=tuple(
                         replace(stage, recompute=True) for stage in PLACEMENTS["v"](plain, 4).stages)), item).problem
                     for item in (plain, again))
    for one, other in zip(first.blocks, second.blocks, strict=True):
        forward = next(block for block in first.blocks if block.name == f"{one.name[:2]}:F")
        assert other.time == pytest.approx(one.time + (forward.time if one.name.endswith("B") else 0.0))
        assert abs(other.memory) <= abs(one.memory)


def test_opposite_pipelines_are_two_lanes():
    problem = world()
    plan = PLACEMENTS["x"](problem, 6)
    found = problem_for(plan, problem)
    assert found.lanes == ((0, 2, 4), (1, 3, 5))
    assert found.num_microbatches == 3
    assert found.problem.num_blocks == 4 * len(plan.stages) // 2
    order = order_of_schedule(found, greedy_search(found.problem, 3).schedule)
    served = {stage.name: set(stage.microbatches) for stage in plan.stages}
    for tokens in order.values():
        assert all(int(token.split(":")[2]) in served[token.split(":")[0]] for token in tokens)
    uneven = replace(plan, microbatches=6, stages=tuple(replace(stage, microbatches=(0, 1, 2, 4) if 0 in stage.microbatches
                                                                 else (3, 5)) for stage in plan.stages))
    order = {device: tuple(f"{stage.name}:{phase}:{index}" for phase in "FB" for index in range(6)
                           for stage in (uneven.stages if phase == "F" else uneven.stages[::-1])
                           if index in stage.microbatches and device in stage.replicas[0].devices) for device in plan.order}
    with pytest.raises(InputError, match="4, 2 of each kind"):
        problem_for(replace(uneven, order=order), problem)


def test_replicas_are_one_block_that_lasts_as_long_as_the_slowest():
    problem = world(speeds=(1e12, 2e12, 1e12))
    specs = [StageSpec(ops=np.arange(6), replicas=(((0,), 0.5), ((1,), 0.5))), StageSpec(ops=np.arange(6, 12), replicas=(((2,), 1.0),))]
    actions = [[(stage, phase, 0) for phase in "FB"] for stage in (0, 0, 1)]
    plan = make_plan(problem, specs, actions, microbatches=1, by="test")
    blocks = {block.name: block for block in problem_for(plan, problem).problem.blocks}
    assert blocks["s0:F"].devices == (0, 1)
    assert blocks["s0:F"].time == pytest.approx(plan.stages[0].replicas[0].times["F"])
    assert plan.stages[0].replicas[0].times["F"] > plan.stages[0].replicas[1].times["F"]


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"mode": "inference"}], ids=["plain", "recompute", "inference"])
def test_a_schedule_within_the_limits_passes_the_memory_check(shape, split_backward, options):
    """For many capacities, from too little to plenty: never a schedule that the plan's own account refuses.

    Whole and split backwards take turns: together they go through all capacities in steps of 15 kB.
    """
    found = 0
    for kilobytes in range(45 if split_backward else 30, 400, 30):
        problem = world(memory=f"{kilobytes}kB", speeds=(1e12,) * 4, **options)
        try:
            plan = PLACEMENTS[shape](problem, 8)
            plan_problem = problem_for(plan, problem, split_backward=split_backward)
            result = greedy_search(plan_problem.problem, plan_problem.num_microbatches)
        except NoFeasiblePlan:
            continue
        found += 1
        check_plan(with_schedule(plan, plan_problem, result.schedule), problem.graph, problem.cluster)
    assert found > 2


def test_searches_with_less_memory_until_the_plan_fits():
    """A fast device sends gradients to one that runs all forwards first: more wait than the first search provides for."""
    retries = 0
    for kilobytes in range(120, 160):
        problem = world(memory=f"{kilobytes}kB", speeds=(1e12, 20e12))
        specs = [StageSpec(ops=np.arange(4), replicas=(((0,), 1.0),)), StageSpec(ops=np.arange(4, 12), replicas=(((1,), 1.0),))]
        plan = make_plan(problem, specs, gpipe(2, 8), microbatches=8, by="test")
        limits = []

        def search(item, microbatches, limits=limits):
            limits.append(item.device_memory)
            orders = [[(block, index) for block in (0, 3) for index in range(microbatches)],
                      [(block, index) for index in range(microbatches) for block in (1, 2)]]
            ahead = replay(item, microbatches, orders)
            return greedy_search(item, microbatches) if find_problems(ahead) else result_of(ahead)

        try:
            found = find_schedule(plan, problem, search, split_backward=False)
        except NoFeasiblePlan:
            continue
        check_plan(found.plan, problem.graph, problem.cluster)
        retries += len(limits) > 1
        assert all(after <= before for one, other in itertools.pairwise(limits)
                   for before, after in zip(one, other, strict=True))
    assert retries > 0


def test_a_device_without_room_is_named():
    problem = world()
    plan = PLACEMENTS["v"](problem, 4)
    small = mixed_cluster([1e12, 2e12, 1e12, 4e12], bandwidth="100kB/s", memory="20kB")
    costs = estimate_costs(problem.graph, small)
    plan = replace(plan, cluster=replace(plan.cluster, digest=small.digest))
    with pytest.raises(NoFeasiblePlan, match=r"'d\d' has 19.53 KiB, which is .* too little") as caught:
        problem_of_plan(plan, problem.graph, costs, small, split_backward=False)
    assert caught.value.missing_bytes > 0
    assert caught.value.device.startswith("d")


def test_memory_binds_only_where_some_schedule_could_exceed_it():
    roomy = world()
    assert not problem_for(PLACEMENTS["v"](roomy, 8), roomy).memory_binds
    tight = world(memory="150kB", speeds=(1e12,) * 4)
    assert problem_for(PLACEMENTS["v"](tight, 8), tight).memory_binds
