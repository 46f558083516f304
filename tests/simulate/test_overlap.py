"""Gradients exchanged beside the backward: closed forms, and what may not overlap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.simulate.helpers import bare_cluster, given_graph, pipeline_world, with_lists
from tests.simulate.python_engine import simulate_python
from weft.cluster.cluster import Cluster
from weft.cost.costs import Costs, estimate_costs
from weft.model.graph import Graph
from weft.plan.check import check_program
from weft.plan.lower import lower
from weft.plan.plan import ClusterRef, GradientExchange, ModelRef, Optimizer, Plan, Replica, Stage
from weft.plan.program import Op, Phase, Program, inside_backward
from weft.simulate.timeline import Timeline
from weft.simulate.timeline_file import parse_timeline, timeline_to_json
from weft.simulate.timing import simulate, time_program

World = tuple[Program, Costs, Cluster]


def world_of(graph: Graph, buckets: Sequence[Sequence[str]], *, shares: Sequence[float] = (0.5, 0.5), rate: float = 8.0,
             microbatches: int = 1, recompute: bool = False, split: bool = False, optimizer: str = "none") -> World:
    """Return one stage of the whole graph, replicated, whose gradients are exchanged in these buckets."""
    cluster = bare_cluster(len(shares), bytes_per_s=rate)
    devices = tuple(device.name for device in cluster.devices)
    backward = ("I", "W") if split else ("B",)
    actions = tuple(f"s:{phase}:{mb}" for mb in range(microbatches) for phase in ("F", *backward))
    plan = Plan(
        model=ModelRef(name="chain", digest=graph.digest, batch=microbatches * graph.batch),
        cluster=ClusterRef(digest=cluster.digest, devices=devices), microbatches=microbatches,
        stages=(Stage(name="s", ops=graph.op_names, recompute=recompute, replicas=tuple(
            Replica(devices=(name,), share=share) for name, share in zip(devices, shares, strict=True))),),
        order=dict.fromkeys(devices, actions), optimizer=Optimizer(kind=optimizer),
        gradients=tuple(GradientExchange(parameters=tuple(names), devices=devices) for names in buckets))
    program = lower(plan, graph)
    check_program(program)
    return program, estimate_costs(graph, cluster), cluster


def without_overlap(world: World, monkeypatch) -> Timeline:
    with monkeypatch.context() as patch:
        patch.setattr("weft.simulate.wiring.inside_backward", lambda program: np.full(program.num_instructions, -1))
        return simulate(*world)


def collectives(timeline: Timeline, rank: int = 0) -> list[tuple[float, float]]:
    places = [place for place in range(int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1]))
              if timeline.op[place] == Op.COLLECTIVE]
    return [(float(timeline.start_s[place]), float(timeline.end_s[place])) for place in places]


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 6])
@pytest.mark.parametrize("rate", [1.0, 8.0, 40.0])
def test_closed_form_of_equal_buckets(num_buckets, rate, monkeypatch):
    """With n buckets, each b seconds of backward and c of exchange: forward + max(n b + c, b + n c)."""
    graph = given_graph([1.0] * 6, parameter_bytes=8, batch=2)
    size = 6 // num_buckets
    buckets = [[f"w{op}" for op in range(first, first + size)] for first in range(0, 6, size)][::-1]
    world = world_of(graph, buckets, rate=rate)
    timeline = simulate(*world)
    forward, backward = 3.0, 6.0
    part, exchange = backward / num_buckets, world[1].collective("all_reduce", 8 * size, (0, 1)).seconds
    expected = forward + max(num_buckets * part + exchange, part + num_buckets * exchange)
    assert timeline.step_time_s == pytest.approx(expected, rel=1e-12)
    assert timeline.busy_s.tolist() == pytest.approx([9.0, 9.0])
    assert collectives(timeline)[0][0] == pytest.approx(forward + part)
    after = without_overlap(world, monkeypatch).step_time_s
    assert after == pytest.approx(forward + backward + num_buckets * exchange)
    assert timeline.step_time_s <= after


def test_one_bucket_that_is_final_at_the_end_is_as_without_overlap(monkeypatch):
    graph = given_graph([1.0, 2.0, 0.5], parameter_bytes=8, batch=4)
    world = world_of(graph, [["w0", "w1", "w2"]], shares=(0.75, 0.25), optimizer="sgd", microbatches=2)
    timeline, after = simulate(*world), without_overlap(world, monkeypatch)
    assert timeline.start_s.tolist() == after.start_s.tolist()
    assert timeline.end_s.tolist() == after.end_s.tolist()


def test_buckets_in_the_wrong_order_wait_for_each_other():
    graph = given_graph([1.0] * 4, parameter_bytes=8, batch=2)
    timeline = simulate(*world_of(graph, [["w0"], ["w3"]] + [["w1", "w2"]]))
    assert [start for start, _ in collectives(timeline)] == pytest.approx([6.0, 7.0, 8.0])


def test_tied_weights_are_final_with_their_first_reader():
    graph = given_graph([1.0] * 4, parameter_bytes=8, batch=2, tied=((0, 3),))
    timeline = simulate(*world_of(graph, [["w2"], ["w1"], ["w0"]]))
    # Forward until 2, then one second of backward for each operator from the last: w2 after 2, w1 after 3, w0 after 4.
    assert [start for start, _ in collectives(timeline)] == pytest.approx([4.0, 5.0, 6.0])


def test_recomputation_comes_before_all_gradients():
    graph = given_graph([1.0] * 2, parameter_bytes=8, batch=2)
    timeline = simulate(*world_of(graph, [["w1"], ["w0"]], recompute=True))
    # Forward until 1, again until 2, backward of op1 until 3 and of op0 until 4.
    assert [start for start, _ in collectives(timeline)] == pytest.approx([3.0, 4.0])


def test_only_the_last_backward_of_a_step_overlaps():
    graph = given_graph([1.0] * 2, parameter_bytes=8, batch=2)
    program, costs, cluster = world_of(graph, [["w1"], ["w0"]], microbatches=3)
    found = inside_backward(program)
    assert (program.microbatch[found[found >= 0]] == 2).all()
    assert [start for start, _ in collectives(simulate(program, costs, cluster))] == pytest.approx([8.0, 9.0])


def test_nothing_overlaps_with_weight_gradients():
    graph = given_graph([1.0] * 2, parameter_bytes=8, batch=2)
    program, costs, cluster = world_of(graph, [["w1"], ["w0"]], split=True)
    assert (inside_backward(program) == -1).all()
    assert [start for start, _ in collectives(simulate(program, costs, cluster))] == pytest.approx([3.0, 4.0])


def test_a_message_between_backward_and_collective_keeps_it_outside():
    program, _, _ = world_of(given_graph([1.0] * 2, batch=2), [["w1"], ["w0"]])
    pipeline, _, _ = pipeline_world("gpipe", 2, 1)
    lists = [list(program.instructions(rank)) for rank in range(2)]
    send = next(item for item in pipeline.instructions(0) if item.op is Op.SEND)
    changed = with_lists(program, [[*lists[0][:3], send, *lists[0][3:]], lists[1]], channels=pipeline.channels)
    assert inside_backward(program)[:4].tolist() == [-1, -1, 1, 1]
    assert inside_backward(changed)[:5].tolist() == [-1, -1, 1, -1, -1]


@pytest.mark.parametrize("method", ["hierarchical", "parameter_server", "sufficient_factors"])
def test_every_method_is_issued_inside(method):
    program, _, _ = world_of(given_graph([1.0] * 3, batch=2), [["w2"], ["w1"], ["w0"]])
    first, second, third = program.buckets
    program = replace(program, buckets=(first, replace(second, method=method), third))
    assert inside_backward(program)[:5].tolist() == [-1, -1, 1, 1, 1]


def joint(program: Program) -> Program:
    """Return the program as if both ranks ran one instance together."""
    instance = replace(program.instances[0], ranks=(0, 1))
    lists = [[replace(item, instance=min(item.instance, 0)) for item in program.instructions(rank)] for rank in range(2)]
    return with_lists(program, lists, instances=(instance,))


def test_devices_of_one_instance_must_be_followed_by_the_same_parameters():
    program = joint(world_of(given_graph([1.0] * 2, batch=2), [["w1"], ["w0"]])[0])
    assert (inside_backward(program) >= 0).tolist() == [False, False, True, True] * 2
    one, other = program.buckets
    same = replace(program, buckets=(one, other, replace(one, ranks=(1,)), replace(one, parameters=other.parameters)))
    lists = [list(program.instructions(rank)) for rank in range(2)]
    assert (inside_backward(with_lists(same, [lists[0], [*lists[1][:2], replace(lists[1][2], bucket=2),
                                                         replace(lists[1][3], bucket=3)]])) >= 0).sum() == 4
    for last in (lists[1][:3], [*lists[1][:2], lists[1][3], lists[1][2]]):
        assert (inside_backward(with_lists(program, [lists[0], last])) == -1).all()


def test_a_backward_of_several_devices_is_cut_on_all_of_them():
    program, costs, cluster = world_of(given_graph([1.0] * 2, parameter_bytes=8, batch=2), [["w1"], ["w0"]])
    timeline = simulate(joint(program), costs, cluster)
    # The first replica's half of the samples: forward until 1, then one second for each operator.
    for rank in range(2):
        assert [start for start, _ in collectives(timeline, rank)] == pytest.approx([2.0, 3.0])


def reference(world: World) -> list[float]:
    """Return when each bucket's exchange ends, by the semantics read literally."""
    program, costs, _ = world
    graph, ends = program.graph, []
    for bucket in program.buckets:
        start = ends[-1] if ends else 0.0
        for rank, instance in enumerate(program.instances):
            share, count = instance.num_samples / graph.batch, program.plan.microbatches
            forward, backward = (costs.stage_figure(np.arange(graph.num_ops), rank, phase, share).seconds for phase in "FB")
            now = count * forward * (2 if program.plan.stages[0].recompute else 1) + (count - 1) * backward
            readers = [op for op in range(graph.num_ops) if set(graph.op_inputs(op)) & set(bucket.parameters)]
            made = np.arange(min(readers), graph.num_ops)
            start = max(start, now + costs.stage_figure(made, rank, "B", share).seconds)
        ends.append(start + costs.collective("all_reduce", bucket.num_bytes, bucket.ranks).seconds)
    return ends


@pytest.mark.parametrize("seed", range(25))
def test_any_buckets_follow_the_semantics_and_are_never_later_than_without_overlap(seed, monkeypatch):
    rng = Random(seed)
    num_ops = rng.randint(2, 9)
    tied = tuple((op - 2, op) for op in range(2, num_ops) if rng.random() < 0.2)
    graph = given_graph([rng.choice([0.0, 0.5, 1.0, 2.5]) for _ in range(num_ops)], parameter_bytes=rng.choice([4, 24]),
                        batch=4, tied=tied)
    names = [graph.tensor_names[tensor] for tensor in graph.parameters]
    rng.shuffle(names)
    if rng.random() < 0.7:
        names.sort(key=lambda name: -int(name[1:]))
    cuts = sorted({0, len(names), *(rng.randint(0, len(names)) for _ in range(4))})
    buckets = [names[first:last] for first, last in itertools.pairwise(cuts)]
    world = world_of(graph, buckets, shares=rng.choice([(0.5, 0.5), (0.75, 0.25), (0.25, 0.25, 0.5)]),
                     rate=rng.choice([2.0, 8.0, 64.0]), microbatches=rng.randint(1, 3), recompute=rng.random() < 0.3,
                     optimizer=rng.choice(["none", "sgd"]))
    timeline = simulate(*world)
    for rank in range(timeline.num_ranks):
        assert [end for _, end in collectives(timeline, rank)] == pytest.approx(reference(world))
    after = without_overlap(world, monkeypatch)
    assert (timeline.end_s <= after.end_s + 1e-9).all()
    assert timeline.busy_s == pytest.approx(after.busy_s)
    timed = time_program(*world)
    twin = simulate_python(timed.graph)
    assert np.array_equal(twin.starts[timed.wiring.first], timeline.start_s)
    assert np.array_equal(twin.ends[timed.wiring.task], timeline.end_s)


def test_the_timeline_shows_one_backward_and_what_is_still_exposed():
    graph = given_graph([1.0] * 4, parameter_bytes=8, batch=2)
    program, costs, cluster = world_of(graph, [["w3", "w2"], ["w1"], ["w0"]], optimizer="sgd", rate=16.0)
    timeline = simulate(program, costs, cluster)
    labels = [label for label, rank in zip(timeline.labels, timeline.rank, strict=True) if rank == 0]
    assert labels == ["F s.0 mb 0", "B s.0 mb 0", "all_reduce 2 parameters (bucket 0)",
                      "all_reduce 1 parameters (bucket 1)", "all_reduce 1 parameters (bucket 2)", "sgd step"]
    assert (timeline.start_s[1], timeline.end_s[1]) == (2.0, pytest.approx(6.0))
    last = collectives(timeline)[-1]
    assert timeline.exposed_s[0] == pytest.approx(last[1] - last[0])
    assert timeline.busy_s[0] + timeline.idle_s[0] == pytest.approx(timeline.step_time_s)
    assert (np.diff(timeline.memory_curve(0).time_s) > 0).all()
    again = parse_timeline(timeline_to_json(timeline), program)
    assert again.start_s.tolist() == timeline.start_s.tolist()
    assert again.exposed_s.tolist() == timeline.exposed_s.tolist()


def test_devices_that_share_a_unit_run_a_backward_as_one():
    program, costs, cluster = world_of(given_graph([1.0] * 2, parameter_bytes=8, batch=2), [["w1"], ["w0"]])
    shared = replace(cluster, devices=tuple(replace(device, unit="gpu") for device in cluster.devices))
    timeline = simulate(program, costs, shared)
    backwards = sorted((float(timeline.start_s[index]), float(timeline.end_s[index])) for index in
                       np.flatnonzero((program.op == Op.COMPUTE) & (program.phase == Phase.B)))
    assert backwards == [(2.0, 4.0), (4.0, 6.0)]
    assert collectives(timeline)[0][0] == 6.0
