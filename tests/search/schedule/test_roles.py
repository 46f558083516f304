"""Blocks are recognised by devices, dependencies and memory, whatever their names and order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.schedule_shapes import shape
from tests.search.schedule.pipelines import both_ways, chain, over_and_back, round_and_round, together, uneven
from weft.search.schedule.problem import Block, ScheduleProblem, Transfer, load_problem
from weft.search.schedule.roles import Role, Roles, find_roles

PROBLEMS = Path(__file__).resolve().parents[3] / "benchmarks" / "problems" / "schedule"


def roles_of(problem: ScheduleProblem) -> Roles:
    roles = find_roles(problem)
    assert roles is not None
    return roles


def names_of(problem: ScheduleProblem) -> list[list[list[str]]]:
    """Return for each pipeline and stage the names of its blocks."""
    return [[[problem.blocks[block].name for block in (stage.forward, stage.backward, stage.weight)
              if block is not None] for stage in pipeline.stages] for pipeline in roles_of(problem).pipelines]


def test_the_files_with_split_backward():
    problem = load_problem(PROBLEMS / "zb-p4.json")
    assert names_of(problem) == [[[f"f{stage}", f"b{stage}", f"w{stage}"] for stage in range(4)]]
    for file in ("zbv-p4.json", "zbv-p4-comm.json"):
        problem = load_problem(PROBLEMS / file)
        assert names_of(problem) == [[[f"f{stage}", f"b{stage}", f"w{stage}"] for stage in range(8)]]
        (pipeline,) = roles_of(problem).pipelines
        assert [stage.chunk for stage in pipeline.stages] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("num_devices", [2, 4, 8, 16, 32])
def test_shapes_with_backward(num_devices):
    pairs = [[f"f{stage}", f"b{num_devices - 1 - stage}"] for stage in range(num_devices)]
    assert names_of(shape("v", num_devices, memory=4)) == [pairs]
    assert names_of(shape("x", num_devices, memory=4)) == [pairs, [
        [f"f{num_devices + stage}", f"b{2 * num_devices - 1 - stage}"] for stage in range(num_devices)]]
    for name, num_shared in (("m", 1), ("nn", 2)):
        (pipeline,) = roles_of(shape(name, num_devices, memory=4)).pipelines
        assert pipeline.is_training
        assert pipeline.is_chain
        assert not pipeline.is_split
        assert len(pipeline.places) == num_devices == len(pipeline.stages) - num_shared


def test_branches():
    (pipeline,) = roles_of(shape("k", 8, memory=6)).pipelines
    assert pipeline.is_training
    assert not pipeline.is_chain
    assert [stage.is_shared for stage in pipeline.stages] == [False] * 8 + [True]
    assert pipeline.heights() == (4, 4, 3, 3, 2, 2, 1, 1, 0)
    assert [stage.depth for stage in pipeline.stages] == [0, 0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("name", ["v", "x", "m", "nn", "k"])
def test_inference_has_no_backward(name):
    roles = roles_of(shape(name, 4, memory=None, training=False))
    assert not roles.is_training
    assert {item.role for item in roles.of_blocks().values()} == {Role.FORWARD}
    assert len(roles.pipelines) == (2 if name == "x" else 1)


def test_what_each_block_is():
    problem = chain(over_and_back(2), weight=1.0)
    roles = roles_of(problem).of_blocks()
    assert [roles[block].role.value for block in range(12)] == ["F"] * 4 + ["I"] * 4 + ["W"] * 4
    assert [roles[block].stage for block in range(12)] == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
    assert [roles[block].chunk for block in range(4)] == [0, 0, 1, 1]
    whole = roles_of(chain([0, 1])).of_blocks()
    assert [whole[block].role for block in (2, 3)] == [Role.BACKWARD, Role.BACKWARD]


@pytest.mark.parametrize("transfers", ["none", "delay", "link"])
@pytest.mark.parametrize("problem", [
    chain(range(5)), chain(range(8), weight=1.0), chain(over_and_back(4), weight=1.0), chain(round_and_round(3, 3)),
    both_ways(4), both_ways(6, weight=1.0), shape("k", 6, memory=None), shape("nn", 4, memory=None)])
def test_names_order_and_times_do_not_matter(problem, transfers):
    def facts(roles: Roles) -> list[object]:
        return sorted((pipeline.places, pipeline.heights(), pipeline.is_split, pipeline.is_chain,
                       tuple(stage.chunk for stage in pipeline.stages)) for pipeline in roles.pipelines)

    for seed in range(3):
        other = uneven(problem, seed, transfers=transfers)
        roles = roles_of(other)
        assert facts(roles) == facts(roles_of(problem))
        for pipeline in roles.pipelines:
            for stage in pipeline.stages:
                assert stage.backward is not None
                assert other.blocks[stage.forward].memory >= 0 >= other.blocks[stage.backward].memory


def test_a_dependency_that_only_a_transfer_states():
    problem = chain([0, 1])
    blocks = tuple(replace(block, after=tuple(item for item in block.after if item != 0)) for block in problem.blocks)
    moved = replace(problem, blocks=blocks, transfers=(Transfer(source=0, target=1, time=1.0),))
    assert names_of(moved) == [[["a0", "z0"], ["a1", "z1"]]]


def test_stages_on_one_device_and_of_one_stage():
    assert names_of(chain([0])) == [[["a0", "z0"]]]
    assert names_of(chain([0], weight=1.0)) == [[["a0", "z0", "y0"]]]
    assert names_of(chain([0, 0], weight=1.0)) == [[["a0", "z0", "y0"], ["a1", "z1", "y1"]]]


def test_groups_of_devices_are_no_shared_stages():
    (pipeline,) = roles_of(chain([(0, 1), (2, 3)])).pipelines
    assert not pipeline.has_shared
    assert pipeline.places == ((0, 1), (2, 3))


def test_an_input_gradient_may_hold_memory_until_its_weight_gradient():
    problem = chain([0, 1], weight=1.0)
    change = {"a": 2.0, "z": 0.5, "y": -2.5}
    problem = replace(problem, blocks=tuple(replace(block, memory=change[block.name[0]]) for block in problem.blocks))
    assert roles_of(problem).is_split


def test_pipelines_beside_each_other():
    second = replace(chain([2, 3]), device_names=("d0", "d1", "d2", "d3"), device_memory=(None,) * 4)
    first = replace(chain([0, 1]), device_names=second.device_names, device_memory=second.device_memory)
    roles = roles_of(together(first, second))
    assert roles.are_apart
    assert len(roles.pipelines) == 2
    assert not roles_of(both_ways(4)).are_apart


def test_training_beside_inference_is_not_recognised():
    infer = shape("v", 4, memory=None, training=False)
    assert find_roles(together(shape("v", 4, memory=None), infer)) is None


def test_what_is_no_mirror_image_runs_forward_only():
    def problem(devices: str, memory: list[float], after: list[tuple[int, ...]]) -> ScheduleProblem:
        return ScheduleProblem(device_names=("d0", "d1"), device_memory=(None, None), blocks=tuple(
            Block(name=str(index), devices=(int(device),), time=1, memory=amount, after=before)
            for index, (device, amount, before) in enumerate(zip(devices, memory, after, strict=True))))

    in_a_row: list[tuple[int, ...]] = [(), (0,), (1,), (2,)]
    assert roles_of(problem("0110", [1, 1, -1, -1], in_a_row)).is_training
    assert not roles_of(problem("0101", [1, 1, -1, -1], in_a_row)).is_training
    assert not roles_of(problem("0110", [-1, -1, 1, 1], in_a_row)).is_training
    assert not roles_of(problem("0110", [1, 1, -1, -1], [(), (0,), (0,), (2,)])).is_training
