"""The lowering over generated plans: it never fails on a good one, and what it writes works when it is played."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.plan.explore import rank_faults, rows_of, walk
from tests.plan.generate import random_plan
from tests.plan.meaning import Meaning
from tests.worlds import chain_graph, pipeline, plan_of
from weft.base.errors import PlanError
from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.plan.check import check_plan, check_program
from weft.plan.lower import lower
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Plan
from weft.plan.program import Op, Phase, Program
from weft.plan.structure import structure_problems

NUM_PLANS = 240
COLUMNS = ("rank_start", "op", "instance", "microbatch", "phase", "channel", "bucket")


def generated(seed: int) -> tuple[Graph, Cluster, Plan]:
    rng = Random(seed)
    return random_plan(rng, num_ops=rng.randint(1, 12), num_devices=rng.randint(1, 5), microbatches=rng.randint(1, 4))


def lowered(seed: int) -> Program:
    graph, _, plan = generated(seed)
    return lower(plan, graph)


@pytest.mark.parametrize("part", range(6))
def test_generated_plans_lower_check_and_play_to_the_end(part):
    for seed in range(part, NUM_PLANS, 6):
        graph, cluster, plan = generated(seed)
        program = check_plan(plan, graph, cluster)
        meaning = Meaning(plan, graph)
        faults = [fault for rank in range(program.num_ranks) for fault in rank_faults(program, meaning, rank)]
        assert not faults, f"seed {seed}: {faults[:3]}"
        assert walk(program, Random(seed)), f"seed {seed} does not come to its end"


def test_generated_plans_are_of_every_kind():
    programs = [lowered(seed) for seed in range(NUM_PLANS)]
    has = {
        "opposite pipelines": lambda item: any(stage.microbatches is not None for stage in item.plan.stages),
        "stage on several devices": lambda item: any(len(instance.ranks) > 1 for instance in item.instances),
        "rows cut out": lambda item: any(not channel.whole for channel in item.channels),
        "one message for several stages": lambda item: any(len(channel.consumers) > 1 for channel in item.channels),
        "shared gradients": lambda item: len(item.buckets) > 0,
        "split backward": lambda item: bool(np.any(item.phase == Phase.W)),
        "inference": lambda item: item.plan.model.mode == "inference",
        "several stages on a device": lambda item: len({rank for it in item.instances for rank in it.ranks})
        < sum(len(it.ranks) for it in item.instances),
    }
    for kind, test in has.items():
        assert sum(map(test, programs)) >= 8, kind


def test_each_device_computes_exactly_its_order():
    for seed in range(60):
        graph, _, plan = generated(seed)
        program = lower(plan, graph)
        for rank, device in enumerate(plan.cluster.devices):
            names = [f"{plan.stages[program.instances[row[1]].stage].name}:{Phase(row[3]).name}:{row[2]}"
                     for row in rows_of(program)[rank] if row[0] == Op.COMPUTE]
            assert tuple(names) == plan.order.get(device, ())


def messages(program: Program, op: Op) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return (channel, micro-batch) in order, by (sending rank, receiving rank)."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, rows in enumerate(rows_of(program)):
        for row in rows:
            if row[0] == op:
                channel = program.channels[row[4]]
                assert rank == (channel.source if op == Op.SEND else channel.target)
                found.setdefault((channel.source, channel.target), []).append((row[4], row[2]))
    return found


def test_sends_and_receives_of_two_ranks_are_the_same_list():
    for seed in range(60):
        program = lowered(seed)
        assert messages(program, Op.SEND) == messages(program, Op.RECV)
        used = sum(len(channel.microbatches) for channel in program.channels)
        assert sum(len(items) for items in messages(program, Op.SEND).values()) == used


def test_lowering_twice_gives_the_same_columns():
    for seed in range(40):
        first, second = lowered(seed), lowered(seed)
        assert all(np.array_equal(getattr(first, name), getattr(second, name)) for name in COLUMNS)
        assert (first.instances, first.channels, first.buckets) == (second.instances, second.channels, second.buckets)


def can_run(plan: Plan, graph: Graph) -> bool:
    """Return whether the devices, each doing its own order, come to the end; by trying what can go next."""
    meaning = Meaning(plan, graph)
    names = {stage.name: index for index, stage in enumerate(plan.stages)}
    queues = [list(plan.order.get(device, ())) for device in plan.cluster.devices]
    done: set[tuple[tuple[int, int], str, int]] = set()
    moved = True
    while moved:
        moved = False
        for member, ranks in meaning.ranks.items():
            token = queues[ranks[0]][0] if queues[ranks[0]] else ""
            if not token or names[token.split(":")[0]] != member[0] or any(
                    queues[rank][:1] != [token] for rank in ranks):
                continue
            _, phase, number = token.split(":")
            microbatch = int(number)
            needs = [(source, ("F",)) for _, source in meaning.feeds(member, microbatch)]
            if phase in ("B", "I"):
                needs = [(reader, ("B", "I")) for _, reader in meaning.gradients(member, microbatch)]
            if phase == "W" or all(any((item, choice, microbatch) in done for choice in choices)
                                   for item, choices in needs):
                done.add((member, phase, microbatch))
                for rank in ranks:
                    queues[rank].pop(0)
                moved = True
    return not any(queues)


def test_orders_that_block_are_refused_and_all_others_run():
    outcomes = {True: 0, False: 0}
    for seed in range(300):
        graph, _, plan = generated(seed)
        rng = Random(seed)
        order = {device: tuple(rng.sample(actions, len(actions))) for device, actions in plan.order.items()}
        mixed = replace(plan, order=order if rng.random() < 0.3 else {**plan.order, **dict([rng.choice(
            list(order.items()))])})
        if structure_problems(mixed, graph):
            continue
        outcomes[can_run(mixed, graph)] += 1
        if can_run(mixed, graph):
            check_program(lower(mixed, graph))
        else:
            with pytest.raises(PlanError) as caught:
                lower(mixed, graph)
            assert all(problem.startswith("order.d") and "which never comes" in problem
                       for problem in caught.value.problems)
    assert outcomes[True] >= 20
    assert outcomes[False] >= 20


def test_an_early_receive_moves_data_beside_the_compute_that_was_running():
    """Rank 1 gets micro-batch 1 while it computes micro-batch 0, so the receive stands before that compute."""
    program = lower(*pipeline("1f1b", 2, 3)[::-1])
    labels = [program.label(index) for index in range(int(program.rank_start[1]), int(program.rank_start[2]))]
    assert labels.index("recv s0>s1 mb 1") < labels.index("F s1 mb 0") < labels.index("F s1 mb 1")


def test_predicted_times_decide_the_order_of_messages_and_nothing_else():
    graph, plan = pipeline("1f1b", 3, 4)
    slow = tuple(replace(stage, replicas=(replace(stage.replicas[0], times={"F": 9.0 if index == 2 else 0.0}),))
                 for index, stage in enumerate(plan.stages))
    first, second = lower(plan, graph), lower(replace(plan, stages=slow), graph)
    check_program(second)
    for one, other in zip(rows_of(first), rows_of(second), strict=True):
        assert sorted(one) == sorted(other)
        assert [row for row in one if row[0] == Op.COMPUTE] == [row for row in other if row[0] == Op.COMPUTE]
    assert rows_of(first) != rows_of(second)


def test_no_optimizer_no_step():
    graph = chain_graph(2)
    plan = plan_of(graph, [[0], [1]], order=one_f_one_b(2, 2), devices=[0, 1], microbatches=2, optimizer="none")
    program = lower(plan, graph)
    check_program(program)
    assert not np.any(program.op == Op.STEP)


def test_the_step_is_last_on_every_rank_that_computes():
    for seed in range(40):
        graph, _, plan = generated(seed)
        program = lower(plan, graph)
        steps = plan.model.mode == "training" and plan.optimizer.kind != "none"
        for rows in rows_of(program):
            assert [row[0] == Op.STEP for row in rows] == [False] * (len(rows) - 1) + [steps] * bool(rows)
