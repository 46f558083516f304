"""What plans may keep in pieces: units, what is refused, where collectives stand, and what a rank holds of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.run.plans import traced
from tests.run.unit_plans import FSDP, unit_plan
from weft.base.errors import PlanError
from weft.plan.check import check_program
from weft.plan.lower import lower
from weft.plan.memory import CATEGORIES, account_memory
from weft.plan.plan import Plan, Storage, parse_plan, plan_to_json
from weft.plan.program import Op, Phase, Program
from weft.plan.unit_flow import unit_flow
from weft.plan.units import _bounds, find_units, storage_text
from weft.simulate.wiring import wire

EVEN = [(device, 0.25) for device in range(4)]
HALVES = [[(0, 0.5), (1, 0.5)], [(2, 0.5), (3, 0.5)]]


@pytest.fixture(scope="module")
def graph():
    return traced("tiny_gpt").graph


def with_storage(plan: Plan, storage: Storage, *stages: int) -> Plan:
    return replace(plan, stages=tuple(replace(stage, storage=storage) if index in stages else stage
                                      for index, stage in enumerate(plan.stages)))


# ---- units ----------------------------------------------------------------------------------------------------------


def test_pieces_are_cut_between_rows_and_cover_everything(graph):
    for shares in ((), (0.4, 0.3, 0.2, 0.1)):
        for unit in find_units(unit_plan(graph, [EVEN], replace(FSDP, shares=shares), num_units=3), graph):
            assert unit.bounds[0] == 0
            assert unit.bounds[-1] == sum(int(np.prod(shape)) for shape in unit.shapes)
            assert list(unit.bounds) == sorted(unit.bounds)
            for tensor, shape in zip(unit.parameters, unit.shapes, strict=True):
                rows = sorted(unit.rows(rank)[tensor] for rank in unit.ranks if tensor in unit.rows(rank))
                assert [0, *(last for _, last in rows)] == [*(first for first, _ in rows), shape[0]]
            assert sum(unit.piece_bytes(rank) for rank in unit.ranks) == pytest.approx(unit.num_bytes, abs=4)


@pytest.mark.parametrize(("shapes", "shares", "expected"), [
    ([(4,), (3, 4)], [1, 1, 1], (0, 4, 12, 16)), ([(8, 2)], [1, 3], (0, 4, 16)), ([()], [1, 1], (0, 0, 1)),
    ([(1, 100)], [1, 1], (0, 0, 100)), ([(2, 5), (2, 5)], [1, 1], (0, 10, 20))])
def test_bounds(shapes, shares, expected):
    assert _bounds(shapes, shares) == expected


def test_tied_parameters_are_a_unit_of_their_own():
    graph = traced("tied_gpt").graph
    units = find_units(unit_plan(graph, [EVEN], num_units=4), graph)
    assert [unit.stages for unit in units].count((0, 3)) == 1
    assert sorted(tensor for unit in units for tensor in unit.parameters) == sorted(graph.parameters.tolist())


def test_a_plan_file_without_storage_means_none(graph):
    plan = unit_plan(graph, [EVEN], Storage())
    text = plan_to_json(plan)
    for stage in text["stages"]:
        del stage["storage"]
    assert parse_plan(text) == plan
    assert parse_plan(plan_to_json(unit_plan(graph, [EVEN]))).stages[0].storage == FSDP


def test_storage_in_words():
    assert storage_text(Storage()) == ""
    assert storage_text(Storage(pieces="gradients", groups=((0, 1), (2, 3)), shares=(1.0, 3.0), accumulates=True)) == (
        "zero-2, 2 groups of 2, pieces 1:3, scattered once")


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("storage", "message"), [
    (Storage(keeps=True), "with pieces 'none' nothing else may be said"),
    (replace(FSDP, groups=((0, 1), (2, 2))), "must name each of the 4 replicas once"),
    (replace(FSDP, groups=((0, 1, 2), (3,))), "groups of the same size, 2 or more; here they have 3, 1"),
    (replace(FSDP, shares=(1.0, 0.0, 1.0, 1.0)), r"shares must be 4 numbers above zero"),
    (Storage(pieces="gradients", keeps=True), "keeps is for gathered parameters"),
    (Storage(pieces="states", accumulates=True), "gradients are whole with pieces 'states' anyway"),
])
def test_storage_that_cannot_be(graph, storage, message):
    plan = unit_plan(graph, [EVEN])
    with pytest.raises(PlanError, match=message):
        lower(with_storage(plan, storage, 0, 1), graph)


def test_pieces_need_replicas(graph):
    with pytest.raises(PlanError, match="here they have 1"):
        lower(unit_plan(graph, [[(0, 1.0)]], num_devices=1), graph)


def test_stages_that_share_a_parameter_agree():
    graph = traced("tied_gpt").graph
    plan = unit_plan(graph, [EVEN], num_units=2)
    with pytest.raises(PlanError, match=r"share parameter .* on one device: give them one storage"):
        lower(with_storage(plan, Storage(pieces="gradients"), 1), graph)
    with pytest.raises(PlanError, match="not all in the same pieces"):
        lower(with_storage(unit_plan(graph, HALVES, num_units=1), Storage(), 1), graph)


def test_exchanges_of_what_is_scattered_are_refused(graph):
    whole = unit_plan(graph, [EVEN], Storage())
    with pytest.raises(PlanError, match="is scattered as the storage of its stage says: leave it out"):
        lower(with_storage(whole, FSDP, 0, 1), graph)


def test_devices_of_a_group_need_one_order(graph):
    plan = unit_plan(graph, [EVEN])
    tokens = list(plan.order["d2"])
    tokens[0], tokens[4] = tokens[4], tokens[0]
    with pytest.raises(PlanError, match=r"order.d2: .* comes where 'd0' has .*same order"):
        lower(replace(plan, order={**plan.order, "d2": tuple(tokens)}), graph)


# ---- programs -------------------------------------------------------------------------------------------------------


def without(program: Program, chosen: int) -> Program:
    """Return the program without one instruction."""
    keep = np.arange(program.num_instructions) != chosen
    start = program.rank_start - np.searchsorted([chosen], program.rank_start, side="left")
    columns = {name: getattr(program, name)[keep] for name in (
        "op", "instance", "microbatch", "phase", "channel", "bucket")}
    return replace(program, rank_start=start.astype(np.int64), **columns)


def swapped(program: Program, at: int) -> Program:
    order = np.arange(program.num_instructions)
    order[[at, at + 1]] = order[[at + 1, at]]
    return replace(program, **{name: getattr(program, name)[order] for name in (
        "op", "instance", "microbatch", "phase", "channel", "bucket")})


def place_of(program: Program, method: str, number: int = 0) -> int:
    found = [index for index in range(program.num_instructions) if program.op[index] == Op.COLLECTIVE
             and program.buckets[program.bucket[index]].method == method]
    return found[number]


def test_the_checker_sees_what_is_missing_or_too_late(graph):
    program = lower(unit_plan(graph, [EVEN], replace(FSDP, groups=((0, 1), (2, 3))), num_units=2, microbatches=1,
                              batch=4, optimizer="adamw"), graph)
    check_program(program)
    for method, message in (("all_gather", "comes before the all_gather of its parameters|waits for ever"),
                            ("reduce_scatter", "reduce_scatter of"), ("sum_pieces", "over groups is missing")):
        with pytest.raises(PlanError, match=message):
            check_program(without(program, place_of(program, method)))
    scattering = place_of(program, "reduce_scatter")
    with pytest.raises(PlanError, match=r"no backward before it|waits for ever"):
        check_program(swapped(program, scattering - 1))


def test_a_collective_that_a_member_lacks_has_no_timing(graph):
    program = lower(unit_plan(graph, [EVEN]), graph)
    wire(program)
    with pytest.raises(PlanError, match="is there on 3 ranks"):
        wire(without(program, place_of(program, "all_gather")))


def test_a_compute_waits_for_its_gather_and_no_other(graph):
    program = lower(unit_plan(graph, [EVEN], num_units=3), graph)
    flow = unit_flow(program, 1)
    for at, collective in flow.waits:
        bucket = program.buckets[program.bucket[collective]]
        if program.op[at] == Op.COMPUTE and bucket.method == "all_gather":
            stage = program.instances[program.instance[at]].stage
            assert stage in program.units[bucket.units[0]].stages
            assert collective < at
    computes = [item.index for item in program.instructions(1) if item.op == Op.COMPUTE]
    assert {at for at, _ in flow.waits} >= set(computes)


@pytest.mark.parametrize("pieces", ["states", "gradients", "parameters"])
def test_what_is_kept_falls_as_the_pieces_say(graph, pieces):
    whole = account_memory(lower(unit_plan(graph, [EVEN], Storage(), num_units=4, optimizer="adamw"), graph)).static
    divided = account_memory(lower(unit_plan(graph, [EVEN], Storage(pieces=pieces), num_units=4, optimizer="adamw"),
                                   graph)).static
    for name, least in (("optimizer", "states"), ("gradients", "gradients"), ("parameters", "parameters")):
        column = CATEGORIES.index(name)
        is_divided = ["states", "gradients", "parameters"].index(pieces) >= [
            "states", "gradients", "parameters"].index(least)
        assert divided[:, column].sum() == pytest.approx(whole[:, column].sum() * (0.25 if is_divided else 1.0), rel=0.01)
        assert divided[:, column].max() <= whole[:, column].max() * (0.28 if is_divided else 1.0)


def test_two_units_at_most_are_gathered_at_once(graph):
    program = lower(unit_plan(graph, [EVEN], num_units=4), graph)
    spans = unit_flow(program, 0).gathered
    for row in range(int(program.rank_start[1])):
        held = [span.unit for span in spans if span.first <= row <= span.last]
        assert len(held) == len(set(held)) <= 2
    backwards = np.flatnonzero((program.op == Op.COMPUTE) & (program.phase == Phase.B))
    assert len(backwards)
