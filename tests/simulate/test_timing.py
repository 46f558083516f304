"""Programs with hand-computed times: pipelines, contention, joint stages, collectives, and programs that cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulate.helpers import bare_cluster, given_graph, named_order, pipeline_world, with_lists
from tests.worlds import chain_graph, plain_cluster, plan_of, with_gradients
from weft.base.errors import PlanError
from weft.cluster.cluster import Contention
from weft.cost.costs import estimate_costs
from weft.cost.figure import SOURCES, Source
from weft.plan.lower import lower
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage
from weft.plan.program import Instruction, Op, Program
from weft.simulate.timeline import Timeline
from weft.simulate.timing import simulate


def spans(timeline: Timeline, device: int, *ops: Op) -> list[tuple[str, float, float]]:
    """Return (label, start, end) of a device's instructions, all or those of some kinds."""
    places = range(int(timeline.rank_start[device]), int(timeline.rank_start[device + 1]))
    return [(timeline.labels[i], float(timeline.start_s[i]), float(timeline.end_s[i])) for i in places
            if not ops or timeline.op[i] in ops]


def run_chain(times, devices, *, order, microbatches=1, cluster=None, skips=(), activation_bytes=8, **options):
    graph = given_graph(times, activation_bytes=activation_bytes, skips=skips)
    cluster = cluster or bare_cluster(max(devices) + 1, bytes_per_s=8.0)
    plan = plan_of(graph, [[op] for op in range(len(times))], devices=devices, order=order, microbatches=microbatches,
                   cluster=cluster, **{"optimizer": "none", **options})
    return simulate(lower(plan, graph), estimate_costs(graph, cluster), cluster)


def test_two_stages_with_transfers():
    timeline = run_chain([1.0, 1.0], [0, 1], order=named_order("1f1b", 2, 1))
    assert spans(timeline, 0) == [("F s0 mb 0", 0.0, 1.0), ("send s0>s1 mb 0", 1.0, 2.0),
                                  ("recv grad s1>s0 mb 0", 5.0, 6.0), ("B s0 mb 0", 6.0, 8.0)]
    assert spans(timeline, 1) == [("recv s0>s1 mb 0", 1.0, 2.0), ("F s1 mb 0", 2.0, 3.0), ("B s1 mb 0", 3.0, 5.0),
                                  ("send grad s1>s0 mb 0", 5.0, 6.0)]
    assert timeline.step_time_s == 8.0
    assert timeline.busy_s.tolist() == [3.0, 3.0]
    assert timeline.exposed_s.tolist() == [1.0, 1.0]
    assert timeline.bubble_s.tolist() == [4.0, 4.0]


def test_transfers_overlap_with_compute():
    # Two micro-batches forward only: while stage 1 works on the first, the second is on its way.
    timeline = run_chain([2.0, 2.0], [0, 1], microbatches=2, mode="inference",
                         order=[[(0, "F", 0), (0, "F", 1)], [(1, "F", 0), (1, "F", 1)]])
    assert spans(timeline, 1, Op.COMPUTE) == [("F s1 mb 0", 3.0, 5.0), ("F s1 mb 1", 5.0, 7.0)]
    assert spans(timeline, 1, Op.RECV) == [("recv s0>s1 mb 0", 2.0, 3.0), ("recv s0>s1 mb 1", 4.0, 5.0)]
    assert timeline.exposed_s.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("contention", "second"), [
    (Contention.LINK, (2.0, 3.0)), (Contention.PORT, (2.0, 3.0)), (Contention.NONE, (1.0, 2.0))])
def test_two_transfers_from_one_device_share_its_way_out(contention, second):
    cluster = bare_cluster(3, bytes_per_s=8.0, contention=contention)
    timeline = run_chain([1.0, 1.0, 1.0], [0, 1, 2], skips=((0, 2),), mode="inference", cluster=cluster,
                         order=[[(stage, "F", 0)] for stage in range(3)])
    sends = spans(timeline, 0, Op.SEND)
    assert [span[1:] for span in sends] == [(1.0, 2.0), second]
    assert timeline.step_time_s == 5.0


def test_two_transfers_to_one_device_share_its_way_in():
    # Stages 0 and 1 end at 1 on their devices; both send to device 2.
    graph = given_graph([1.0, 0.0, 1.0, 1.0], activation_bytes=8, skips=((0, 3),))
    cluster = bare_cluster(3, bytes_per_s=8.0)
    order = [[(0, "F", 0)], [(1, "F", 0), (2, "F", 0)], [(3, "F", 0)]]
    plan = plan_of(graph, [[0], [1], [2], [3]], devices=[0, 1, 1, 2], order=order, microbatches=1, cluster=cluster,
                   mode="inference", optimizer="none")
    timeline = simulate(lower(plan, graph), estimate_costs(graph, cluster), cluster)
    receives = sorted(span[1:] for span in spans(timeline, 2, Op.RECV))
    # Device 0 sends to 1 and 2 one after the other (1..3); device 1 computes 2..3 and sends 3..4.
    assert receives == [(2.0, 3.0), (3.0, 4.0)]
    assert spans(timeline, 2, Op.COMPUTE) == [("F s3 mb 0", 4.0, 5.0)]


def joint_world() -> tuple[Program, Plan]:
    """Stage a on d0, then stage b on d0 and d1 together, forward only, two micro-batches."""
    graph = given_graph([1.0, 2.0], activation_bytes=8)
    cluster = bare_cluster(2, bytes_per_s=8.0)
    plan = Plan(
        model=ModelRef(name="chain", digest=graph.digest, batch=2, mode="inference"),
        cluster=ClusterRef(digest=cluster.digest, devices=("d0", "d1")), microbatches=2,
        stages=(Stage(name="a", ops=("op0",), replicas=(Replica(devices=("d0",)),)),
                Stage(name="b", ops=("op1",), replicas=(Replica(devices=("d0", "d1"), mesh={"tensor": 2}),))),
        order={"d0": ("a:F:0", "a:F:1", "b:F:0", "b:F:1"), "d1": ("b:F:0", "b:F:1")},
        optimizer=Optimizer(kind="none"))
    return lower(plan, graph), plan


def test_joint_stage_runs_on_all_its_devices_at_once():
    program, _ = joint_world()
    cluster = bare_cluster(2, bytes_per_s=8.0)
    timeline = simulate(program, estimate_costs(program.graph, cluster), cluster)
    expected = [("F b mb 0", 2.0, 4.0), ("F b mb 1", 4.0, 6.0)]
    assert spans(timeline, 0, Op.COMPUTE) == [("F a mb 0", 0.0, 1.0), ("F a mb 1", 1.0, 2.0), *expected]
    assert spans(timeline, 1, Op.COMPUTE) == expected
    assert spans(timeline, 1, Op.RECV) == [("recv a>b mb 0", 1.0, 2.0), ("recv a>b mb 1", 2.0, 3.0)]
    assert timeline.busy_s.tolist() == [6.0, 4.0]


def test_joint_stage_lasts_as_long_as_its_slowest_device():
    program, _ = joint_world()
    given = program.graph.given
    slow = replace(given, times=(given.times[0], {"d0": 2.0, "d1": 3.0}))
    graph = replace(program.graph, given=slow)
    cluster = bare_cluster(2, bytes_per_s=8.0)
    timeline = simulate(replace(program, graph=graph), estimate_costs(graph, cluster), cluster)
    assert spans(timeline, 0, Op.COMPUTE)[2:] == [("F b mb 0", 2.0, 5.0), ("F b mb 1", 5.0, 8.0)]


def replicated_world(shares=(0.5, 0.5), *, batch=4, optimizer="none", recompute=False, method="all_reduce"):
    """One stage of two operators (1 s for the traced batch of 4) on two devices, two micro-batches."""
    graph = given_graph([0.5, 0.5], activation_bytes=8, batch=batch)
    cluster = bare_cluster(len(shares), bytes_per_s=8.0)
    devices = tuple(device.name for device in cluster.devices)
    actions = ("s:F:0", "s:B:0", "s:F:1", "s:B:1")
    plan = with_gradients(Plan(
        model=ModelRef(name="chain", digest=graph.digest, batch=2 * batch),
        cluster=ClusterRef(digest=cluster.digest, devices=devices), microbatches=2,
        stages=(Stage(name="s", ops=("op0", "op1"), recompute=recompute,
                      replicas=tuple(Replica(devices=(name,), share=share)
                                     for name, share in zip(devices, shares, strict=True))),),
        order=dict.fromkeys(devices, actions), optimizer=Optimizer(kind=optimizer)), graph)
    server = "d0" if method == "parameter_server" else None
    plan = replace(plan, gradients=tuple(replace(item, method=method, server=server) for item in plan.gradients))
    return lower(plan, graph), estimate_costs(graph, cluster), cluster


def test_collective_waits_for_all_members_and_is_exposed_before_the_step():
    program, costs, cluster = replicated_world((0.75, 0.25), optimizer="sgd")
    timeline = simulate(program, costs, cluster)
    exchange = costs.collective("all_reduce", 8, (0, 1)).seconds
    assert exchange > 0
    # 3 of 4 samples: forward 0.75 and backward 1.5, twice.
    assert spans(timeline, 0, Op.COMPUTE)[-1] == ("B s.0 mb 1", 3.0, 4.5)
    assert spans(timeline, 1, Op.COMPUTE)[-1] == ("B s.1 mb 1", 1.0, 1.5)
    for device in (0, 1):
        assert spans(timeline, device, Op.COLLECTIVE) == [("all_reduce 2 parameters", 4.5, 4.5 + exchange)]
        assert spans(timeline, device, Op.STEP) == [("sgd step", 4.5 + exchange, 4.5 + exchange)]
    assert timeline.exposed_s.tolist() == [exchange, exchange]
    assert timeline.bubble_s.tolist() == pytest.approx([0.0, 3.0])


def test_collectives_of_a_rank_follow_each_other_in_list_order():
    # On rank 0 exchange 0 (with slow rank 1) comes before exchange 1 (with rank 2), which has to wait behind it.
    program, costs, cluster = replicated_world((0.25, 0.5, 0.25))
    computes = [[item for item in program.instructions(rank) if item.op is Op.COMPUTE] for rank in range(3)]
    exchanges = [Instruction(index=0, op=Op.COLLECTIVE, bucket=bucket) for bucket in (0, 1)]
    buckets = tuple(replace(program.buckets[0], ranks=ranks) for ranks in ((0, 1), (0, 2)))
    lists = [computes[0] + exchanges, computes[1] + exchanges[:1], computes[2] + exchanges[1:]]
    timeline = simulate(with_lists(program, lists, buckets=buckets), costs, cluster)
    # The ranks' work ends at 1.5, 3 and 1.5; an exchange of 8 bytes between two devices takes 1 s.
    assert timeline.start_s[timeline.op == Op.COLLECTIVE].tolist() == [3.0, 4.0, 3.0, 4.0]


def test_parameter_server_serves_one_member_after_the_other():
    program, costs, cluster = replicated_world((0.5, 0.5), method="parameter_server")
    timeline = simulate(program, costs, cluster)
    (_, start, end), = spans(timeline, 0, Op.COLLECTIVE)
    assert end - start == 2 * costs.transfer(8, 0, 1).seconds == 2.0


def test_recomputation_takes_the_forward_again():
    plain, recomputed = (simulate(*replicated_world(recompute=flag)) for flag in (False, True))
    assert plain.busy_s.tolist() == [3.0, 3.0]
    assert recomputed.busy_s.tolist() == [4.0, 4.0]


def test_split_backward_times_add_up():
    order = [[(0, "F", 0), (0, "I", 0), (0, "W", 0)], [(1, "F", 0), (1, "I", 0), (1, "W", 0)]]
    timeline = run_chain([1.0, 1.0], [0, 1], order=order)
    assert spans(timeline, 1, Op.COMPUTE) == [("F s1 mb 0", 2.0, 3.0), ("I s1 mb 0", 3.0, 4.0), ("W s1 mb 0", 4.0, 5.0)]
    # The gradient leaves after I, beside W.
    assert spans(timeline, 0, Op.COMPUTE)[1:] == [("I s0 mb 0", 5.0, 6.0), ("W s0 mb 0", 6.0, 7.0)]


def test_optimizer_step_moves_parameters_gradients_and_state():
    graph = chain_graph(1, parameter_bytes=1000)
    cluster = plain_cluster(1)
    plan = plan_of(graph, [[0]], devices=[0], order=named_order("gpipe", 1, 1), microbatches=1, cluster=cluster,
                   optimizer="adamw")
    timeline = simulate(lower(plan, graph), estimate_costs(graph, cluster), cluster)
    (_, start, end), = spans(timeline, 0, Op.STEP)
    # 2 x parameters, gradients, 2 x (two states), at 1e12 B/s and the efficiency of pointwise operators.
    assert 7000 / 1e12 <= end - start <= 2 * 7000 / 1e12
    assert start == spans(timeline, 0, Op.COMPUTE)[-1][2]


def test_given_transfer_times_replace_bytes():
    graph = given_graph([1.0, 1.0], activation_bytes=8)
    tensor = graph.tensor_index["y0"]
    times = tuple({"d0>d1": 5.0} if index == tensor else None for index in range(graph.num_tensors))
    graph = replace(graph, given=replace(graph.given, transfer_times=times))
    cluster = bare_cluster(2, bytes_per_s=8.0)
    plan = plan_of(graph, [[0], [1]], devices=[0, 1], order=named_order("gpipe", 2, 1), microbatches=1,
                   cluster=cluster, optimizer="none")
    timeline = simulate(lower(plan, graph), estimate_costs(graph, cluster), cluster)
    assert spans(timeline, 1, Op.RECV) == [("recv s0>s1 mb 0", 1.0, 6.0)]
    assert spans(timeline, 1, Op.SEND) == [("send grad s1>s0 mb 0", 9.0, 10.0)]


def test_every_duration_keeps_its_source():
    timeline = run_chain([1.0, 1.0], [0, 1], order=named_order("1f1b", 2, 1))
    by_label = dict(zip(timeline.labels, (SOURCES[code] for code in timeline.source), strict=True))
    assert by_label["F s0 mb 0"] is Source.GIVEN
    assert by_label["send s0>s1 mb 0"] is by_label["recv s0>s1 mb 0"] is Source.ROOFLINE


@pytest.mark.parametrize("num_devices", [1, 2, 4, 5])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_closed_form_of_gpipe_and_1f1b(kind, num_devices, num_microbatches):
    timeline = simulate(*pipeline_world(kind, num_devices, num_microbatches))
    assert timeline.step_time_s == pytest.approx((num_microbatches + num_devices - 1) * 3.0, abs=1e-9)
    assert timeline.bubble == pytest.approx((num_devices - 1) / (num_microbatches + num_devices - 1), abs=1e-12)


@pytest.mark.parametrize(("num_devices", "num_chunks", "rounds"), [(2, 2, 1), (4, 2, 3), (3, 3, 2), (4, 4, 1)])
def test_closed_form_of_interleaved(num_devices, num_chunks, rounds):
    num_microbatches = num_devices * rounds
    world = pipeline_world("interleaved", num_devices, num_microbatches, num_chunks=num_chunks, time_s=1 / num_chunks)
    expected = (num_microbatches * num_chunks + num_devices - 1) * 3.0 / num_chunks
    assert simulate(*world).step_time_s == pytest.approx(expected, abs=1e-9)


def find(program: Program, label: str) -> int:
    return next(index for index in range(program.num_instructions) if program.label(index) == label)


def edited(program: Program, label: str, **changes) -> Program:
    """Return the program with one instruction changed."""
    index = find(program, label)
    lists = [[replace(item, **changes) if item.index == index else item for item in program.instructions(rank)]
             for rank in range(program.num_ranks)]
    return with_lists(program, lists)


def test_message_with_one_side_only_is_refused_with_its_place():
    program, costs, cluster = pipeline_world("gpipe", 2, 2)
    with pytest.raises(PlanError, match=r"rank 1 \(d1\), instruction \d+: recv s0>s1 mb 0: it is there a second time"):
        simulate(edited(program, "recv s0>s1 mb 1", microbatch=0), costs, cluster)
    with pytest.raises(PlanError, match=r"rank 0 \(d0\), instruction \d+: send s0>s1 mb 1: there is no other side"):
        simulate(edited(program, "recv s0>s1 mb 1", op=Op.STEP), costs, cluster)


def test_collective_missing_on_a_member_is_refused():
    program, costs, cluster = replicated_world()
    with pytest.raises(PlanError, match=r"bucket 0 .* does not hold for rank 0 \(d0\)"):
        simulate(edited(program, "all_reduce 2 parameters", op=Op.STEP), costs, cluster)


def test_circular_waiting_is_reported_with_places():
    program, costs, cluster = pipeline_world("gpipe", 2, 1)
    # Rank 1 runs its forward before it posts the receive that the forward needs.
    ranks = [list(program.instructions(rank)) for rank in range(2)]
    ranks[1][:2] = ranks[1][1::-1]
    with pytest.raises(PlanError, match=r"can never run.*rank 1 \(d1\), instruction 0: F s1 mb 0"):
        simulate(with_lists(program, ranks), costs, cluster)


def test_cluster_without_the_plans_device_is_refused():
    program, costs, _ = pipeline_world("gpipe", 3, 1)
    with pytest.raises(PlanError, match="device 'd2', which cluster 'plain' does not have"):
        simulate(program, costs, bare_cluster(2))


def test_operator_that_may_not_run_there_is_refused():
    program, _, cluster = pipeline_world("gpipe", 2, 1)
    graph = replace(program.graph, given=replace(program.graph.given, allowed_kinds=(("d1",), None)))
    with pytest.raises(PlanError, match="stage 's0' holds an operator that may not run on 'd0'"):
        simulate(replace(program, graph=graph), estimate_costs(graph, cluster), cluster)
