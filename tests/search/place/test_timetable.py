"""Timetables: the plain decoder against the compiled one, the checker against broken ones, memory by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import cluster, edge, graph, op
from tests.search.place.random_problems import random_problem
from tests.search.place.worlds import problem_of
from weft.base.errors import InputError, PlanError
from weft.model.graph import I64
from weft.search.place import kernel
from weft.search.place.latency.exact import Clock
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import Sent, Timetable, check_timetable, make_timetable

CONTENTIONS = ("link", "port", "none")


def random_placement(rng: np.random.Generator, problem: PlaceProblem) -> I64:
    """Return allowed devices, one for each unit."""
    of_unit = np.array([rng.choice(np.flatnonzero(row)) for row in problem.is_allowed])
    return of_unit[problem.unit_of_op]


def random_order(rng: np.random.Generator, problem: PlaceProblem) -> I64:
    """Return the operators in a random order that respects what they read."""
    missing = np.zeros(problem.num_ops, dtype=np.int64)
    for _, reader, _ in problem.edges.tolist():
        missing[reader] += 1
    ready, order = [op for op in range(problem.num_ops) if missing[op] == 0], []
    while ready:
        order.append(ready.pop(int(rng.integers(len(ready)))))
        for source, reader, _ in problem.edges.tolist():
            if source == order[-1]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    ready.append(reader)
    return np.array(order, dtype=np.int64)


def draw(seed: int, num_ops: int, *, lifetimes: bool = False) -> PlaceProblem:
    rng = np.random.default_rng(seed)
    return random_problem(rng, num_ops, 2 + seed % 3, contention=CONTENTIONS[seed % 3], colocate=seed % 2 == 0,
                          shared_tensors=seed % 4 != 0, shared_cores=seed % 5 == 0, lifetimes=lifetimes)


def decode(problem, device, order):
    """Return the start of each operator and of each transfer [tensors, devices]; ``kernel.decode`` in plain Python."""
    clock = Clock(problem, device)
    for number in order.tolist():
        here = int(device[number])
        inputs = problem.inputs_of(number).tolist()
        for tensor in sorted(inputs, key=lambda tensor: clock.end_s[problem.producer[tensor]]):
            if device[problem.producer[tensor]] != here and (tensor, here) not in clock.sent:
                clock.send(tensor, here)
        clock.run(number)
    sent_s = np.full((problem.num_tensors, problem.num_devices), np.inf)
    for sent in clock.sent.values():
        sent_s[sent.tensor, sent.target] = sent.start_s
    return clock.start_s, sent_s


# ---- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_plain_and_compiled_decoding_are_equal_and_pass_the_checker(seed):
    problem = draw(seed, 5 + seed)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        device, order = random_placement(rng, problem), random_order(rng, problem)
        start_s, sent_s = decode(problem, device, order)
        compiled = kernel.decode(kernel.Arrays.of(problem), device, order)
        assert np.array_equal(start_s, compiled[0])
        assert np.array_equal(sent_s, compiled[1])
        table = make_timetable(problem, device, order)
        check_timetable(table)
        again = make_timetable(problem, device, table.order)
        assert sorted(table.order.tolist()) == list(range(problem.num_ops))
        check_timetable(again)


def test_timetables_are_decoded_by_the_compiled_code():
    problem = random_problem(np.random.default_rng(2), 320, 3, contention="port")
    rng = np.random.default_rng(0)
    device, order = random_placement(rng, problem), random_order(rng, problem)
    table = make_timetable(problem, device, order)
    check_timetable(table)
    start_s, sent_s = decode(problem, device, order)
    assert np.array_equal(table.start_s, start_s)
    assert len(table.transfers) == np.isfinite(sent_s).sum()
    assert all(sent_s[sent.tensor, sent.target] == sent.start_s for sent in table.transfers)


# Four operators on two devices; a's tensor t is read by c and d, b's by d.
GRAPH = graph([op("a", 1, 2, memory=6), op("b", 3, 4, memory=5), op("c", 5, 5, on=["y"], memory=1, colocate="g"),
               op("d", 1, 1, colocate="g")],
              [edge("a", "c", 2, tensor="t"), edge("a", "d", 2, tensor="t"), edge("b", "d", 3)])
CLUSTER = cluster(contention="port", memory={"x": 11, "y": 7})
ON = np.array([0, 0, 1, 1])


def good() -> Timetable:
    """Return a and b on x, c and d on y: a sends at 1, b at 4, c runs from 3, d last."""
    return make_timetable(problem_of(GRAPH, CLUSTER), ON, np.arange(4))


def test_a_timetable_by_hand():
    table = good()
    assert table.start_s.tolist() == [0, 1, 3, 8]
    assert [tuple(sent) for sent in table.transfers] == [(0, 0, 1, 1, 3), (1, 0, 1, 4, 7)]
    assert table.end_s.tolist() == [1, 4, 8, 9]
    assert table.latency_s == 9
    assert table.peak_bytes().tolist() == [11, 1]
    check_timetable(table)


def test_tensors_that_an_operator_waits_for_go_in_the_order_in_which_they_were_written():
    """Both transfers share the port; b is written first although the operator reads a's tensor first."""
    problem = problem_of(graph([op("a", 1, on=["x"]), op("b", 1, on=["x"]), op("c", 1, on=["y"])],
                               [edge("a", "c", 2), edge("b", "c", 3)]), cluster(contention="port"))
    table = make_timetable(problem, np.array([0, 0, 1]), np.array([1, 0, 2]))
    assert [(sent.tensor, sent.start_s) for sent in table.transfers] == [(1, 1), (0, 4)]
    assert table.latency_s == 7


def test_devices_with_one_core_run_one_operator_at_a_time():
    problem = problem_of(graph([op("a", 2), op("b", 3)]), cluster(units={"x": "core", "y": "core"}))
    assert make_timetable(problem, np.array([0, 1]), np.arange(2)).start_s.tolist() == [0, 2]


def test_what_may_not_run_there_is_not_timed():
    with pytest.raises(InputError, match="'c' may not run on 'x'"):
        make_timetable(problem_of(GRAPH, CLUSTER), np.zeros(4, dtype=np.int64), np.arange(4))


# ---- the checker ------------------------------------------------------------------------------------------------------


def changed(*, device: dict[int, int] | None = None, start: dict[int, float] | None = None,
            sent: dict[int, Sent | None] | None = None) -> Timetable:
    """Return the good timetable with some entries replaced; None takes a transfer out."""
    table = good()
    devices, starts, transfers = table.device.copy(), table.start_s.copy(), dict(enumerate(table.transfers))
    for op_index, where in (device or {}).items():
        devices[op_index] = where
    for op_index, when in (start or {}).items():
        starts[op_index] = when
    transfers.update(sent or {})  # type: ignore[arg-type]
    return replace(table, device=devices, start_s=starts,
                   transfers=tuple(item for item in transfers.values() if item is not None))


BROKEN = {
    "starts before the tensor has arrived": (
        {"start": {2: 2.5}}, "'c' starts at 2.5, before it has what it reads from 'a' at 3"),
    "starts before all tensors have arrived": (
        {"start": {3: 6.5}}, "'d' starts at 6.5, before it has what it reads from 'b' at 7"),
    "starts before time 0": ({"start": {0: -1.0}}, "an operator starts before time 0"),
    "a transfer is missing": ({"sent": {1: None}}, "'d' never gets what it reads from 'b'"),
    "a shared transfer is missing": ({"sent": {0: None}}, "'c' never gets what it reads from 'a'"),
    "two operators at once": ({"start": {1: 0.5}}, "'a' and 'b' run at the same time on 'x'"),
    "two transfers at once": (
        {"start": {1: 0.0, 0: 3.0, 2: 6.0, 3: 11.0}, "sent": {0: Sent(0, 0, 1, 4, 6), 1: Sent(1, 0, 1, 3.5, 6.5)}},
        "'a tensor of b' and 'a tensor of a' run at the same time over 'x out'"),
    "a transfer is too short": (
        {"sent": {1: Sent(1, 0, 1, 4, 6)}}, "a tensor of 'b' is sent in 2 s, which takes 3 s"),
    "a transfer before its tensor": ({"sent": {0: Sent(0, 0, 1, 0.5, 2.5)}}, "a tensor of 'a' is sent before it is"),
    "a transfer from elsewhere": ({"sent": {0: Sent(0, 1, 1, 1, 3)}}, "a tensor of 'a' is sent before it is there"),
    "a torn unit": ({"device": {3: 0}}, "operators 'c' and 'd' must share a device"),
    "a forbidden device": ({"device": {2: 0, 3: 0}}, "operator 'c' may not run on 'x'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_timetable_is_refused(name):
    changes, sentence = BROKEN[name]
    with pytest.raises(PlanError) as caught:
        check_timetable(changed(**changes))
    assert sentence in str(caught.value)
    assert any(sentence in problem for problem in caught.value.problems)


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(PlanError) as caught:
        check_timetable(changed(start={1: 0.5, 2: 2.0}, sent={1: None}))
    assert len(caught.value.problems) == 3


def test_an_order_on_one_device_is_checked():
    problem = problem_of(graph([op("a", 2), op("b", 1)], [edge("a", "b", 1)]), cluster("x"))
    table = Timetable(problem=problem, device=np.zeros(2, dtype=np.int64), start_s=np.array([1.0, 0.0]), transfers=())
    with pytest.raises(PlanError, match="'b' starts at 0, before it has what it reads from 'a' at 3"):
        check_timetable(table)


def test_what_overlaps_a_long_operator_is_found_behind_a_short_one():
    problem = problem_of(graph([op("a", 9), op("b", 1), op("c", 1)]), cluster("x"))
    table = Timetable(problem=problem, device=np.zeros(3, dtype=np.int64), start_s=np.array([0.0, 1.0, 5.0]), transfers=())
    with pytest.raises(PlanError) as caught:
        check_timetable(table)
    assert [text for text in caught.value.problems if "'a' and 'c' run at the same time on 'x'" in text]


def test_cores_are_checked_across_devices():
    problem = problem_of(graph([op("a", 2), op("b", 2)]), cluster(units={"x": "core", "y": "core"}))
    table = Timetable(problem=problem, device=np.array([0, 1]), start_s=np.zeros(2), transfers=())
    with pytest.raises(PlanError, match="'a' and 'b' run at the same time on 'x'"):
        check_timetable(table)
    check_timetable(replace(table, start_s=np.array([0.0, 2.0])))


@pytest.mark.parametrize(("contention", "is_wrong"), [("port", True), ("link", True), ("none", False)])
def test_transfers_may_overlap_only_where_nothing_is_occupied(contention, is_wrong):
    problem = problem_of(graph([op("a", 1), op("b", 1), op("c", 1)], [edge("a", "c", 5), edge("b", "c", 5)]),
                         cluster(contention=contention))
    table = Timetable(problem=problem, device=np.array([0, 0, 1]), start_s=np.array([0.0, 1.0, 7.0]),
                      transfers=(Sent(0, 0, 1, 1.0, 6.0), Sent(1, 0, 1, 2.0, 7.0)))
    if is_wrong:
        with pytest.raises(PlanError, match="run at the same time over"):
            check_timetable(table)
    else:
        check_timetable(table)


@pytest.mark.parametrize(("start", "is_wrong"), [(0.0, False), (2.0, True), (4.0, False)])
def test_what_takes_no_time_must_not_run_inside_another(start, is_wrong):
    problem = problem_of(graph([op("a", 4), op("b", 0)]), cluster("x"))
    table = Timetable(problem=problem, device=np.zeros(2, dtype=np.int64), start_s=np.array([0.0, start]), transfers=())
    if is_wrong:
        with pytest.raises(PlanError, match="'a' and 'b' run at the same time on 'x'"):
            check_timetable(table)
    else:
        check_timetable(table)


def test_too_much_memory_is_refused():
    table = good()
    full = replace(table, problem=replace(table.problem, capacity=np.array([10.0, 7.0])))
    with pytest.raises(PlanError, match="'x' holds 11 bytes but has 10"):
        check_timetable(full)
    check_timetable(replace(table, problem=replace(table.problem, capacity=np.array([11.0, 1.0]))))


# ---- memory with lifetimes ----------------------------------------------------------------------------------------------


def living(capacity: tuple[float, float] = (np.inf, np.inf)) -> Timetable:
    """Return the good timetable where tensors take memory: t 100 bytes, b's 10."""
    table = good()
    return replace(table, problem=replace(table.problem, has_lifetimes=True, tensor_bytes=np.array([100.0, 10.0]),
                                          capacity=np.array(capacity)))


def test_tensors_take_memory_while_they_live():
    """On x, t lives from 0 until it is sent at 3, b's from 1 to 7; on y, t from 1 until d ends at 9, b's from 4."""
    table = living()
    assert table.peak_bytes().tolist() == [11 + 110, 1 + 110]
    check_timetable(living((121, 111)))
    with pytest.raises(PlanError, match="'x' holds 121 bytes but has 120"):
        check_timetable(living((120, 111)))
    with pytest.raises(PlanError, match="'y' holds 111 bytes but has 110"):
        check_timetable(living((121, 110)))


def test_tensors_that_follow_each_other_share_their_memory():
    chain = graph([op("a", 1), op("b", 1), op("c", 1), op("d", 1)],
                  [edge("a", "b", 1), edge("b", "c", 1), edge("c", "d", 1)])
    problem = replace(problem_of(chain, cluster("x")), has_lifetimes=True, tensor_bytes=np.array([5.0, 7.0, 4.0]))
    table = make_timetable(problem, np.zeros(4, dtype=np.int64), np.arange(4))
    assert table.peak_bytes().tolist() == [12]  # a's is free when c begins


def slow_peaks(table: Timetable) -> list[float]:
    """Return the peaks by looking at every instant at which something begins, and summing what is alive then."""
    problem, ends = table.problem, table.end_s
    spans = []
    for tensor, writer in enumerate(problem.producer.tolist()):
        readers = [reader for _, reader, item in problem.edges.tolist() if item == tensor]
        sends = [sent for sent in table.transfers if sent.tensor == tensor]
        home = int(table.device[writer])
        until = [ends[writer], *(sent.end_s for sent in sends), *(ends[op] for op in readers if table.device[op] == home)]
        spans.append((home, table.start_s[writer], max(until), problem.tensor_bytes[tensor]))
        spans += [(sent.target, sent.start_s, max(ends[op] for op in readers if table.device[op] == sent.target),
                   problem.tensor_bytes[tensor]) for sent in sends]
    peaks = []
    for device in range(problem.num_devices):
        keeps = {int(item) for op in range(problem.num_ops) if table.device[op] == device
                 for item in problem.weights[problem.weight_start[op] : problem.weight_start[op + 1]]}
        instants = [since for where, since, _, _ in spans if where == device]
        alive = [sum(size for where, since, until, size in spans if where == device and since <= now < until)
                 for now in instants]
        peaks.append(sum(problem.weight_bytes[item] for item in keeps) + max(alive, default=0.0))
    return peaks


@pytest.mark.parametrize("seed", range(20))
def test_peaks_equal_a_slow_account(seed):
    problem = draw(seed, 6 + seed, lifetimes=True)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        table = make_timetable(problem, random_placement(rng, problem), random_order(rng, problem))
        assert table.peak_bytes() == pytest.approx(slow_peaks(table))
        check_timetable(table)
