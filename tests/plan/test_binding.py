"""A plan made with one version of a library runs with another, whose list of operators differs for the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.run.plans import greedy_order, pipeline_plan
from tests.run.pool import Pool
from tests.run.sharded_plans import sharded_plan, sharding_of
from weft.base.errors import PlanError
from weft.cluster import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.plan.binding import bind_plan
from weft.plan.check import check_plan
from weft.plan.plan import Plan, format_plan, parse_plan
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.baselines import STRATEGIES

HERE = __file__


class Block(nn.Module):
    def __init__(self, hidden: int, version: str) -> None:
        super().__init__()
        self.up, self.down, self.version = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden), version

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1]) if self.version == "new" else x.flatten(0, 1)
        if self.version == "costly":
            rows = rows + self.down(torch.relu(self.up(rows)))
        result = self.down(torch.relu(self.up(rows)))
        if self.version == "new":
            result = result.unsqueeze(0).squeeze(0)
        return x + result.reshape(x.shape)


class Net(nn.Module):
    """Four blocks; a version writes the same with other views, and its own scale outside of them."""

    def __init__(self, version: str, hidden: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden, version) for _ in range(layers))
        self.head, self.version = nn.Linear(hidden, 4), version

    def forward(self, x, y):
        if self.version == "new":
            x = x.unsqueeze(0).squeeze(0)
        for block in self.blocks:
            x = block(x)
        error = self.head(x) - y
        return (error.reshape(-1) if self.version == "new" else error).square().mean()


def _inputs(length: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(4, length, 8, generator=generator, dtype=torch.float64),
            torch.randn(4, length, 4, generator=generator, dtype=torch.float64))


def old():
    return Net("old").double(), _inputs()


def new():
    return Net("new").double(), _inputs()


def costly():
    return Net("costly").double(), _inputs()


def shallow():
    return Net("new", layers=3).double(), _inputs()


def wide():
    generator = torch.Generator().manual_seed(1)
    return Net("new", hidden=16).double(), (torch.randn(4, 3, 16, generator=generator).double(), _inputs()[1])


def longer():
    return Net("new").double(), _inputs(5)


def graph_of(name: str, batch: int = 2):
    source = resolve_model(f"{HERE}:{name}")
    assert isinstance(source, ModelSource)
    return trace(source, batch=batch).graph


def planned(name: str = "old") -> Plan:
    """Return what the planner makes of a version: two stages, with all that it writes into the file."""
    graph, cluster = graph_of(name), read_cluster("2 x A100-80GB")
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                      options=PlanOptions(batch=4, microbatches=2, dtype="float64"))
    return STRATEGIES["1f1b"](problem, 2)


def as_written_before(plan: Plan) -> Plan:
    """Return the plan as an earlier release would have written it, read from its file."""
    value = json.loads(format_plan(plan))
    for field in ("parameters", "inputs"):
        del value["model"][field]
    for stage in value["stages"]:
        del stage["flops"], stage["bytes"]
    return parse_plan(value)


def test_the_versions_have_different_operators_and_the_planner_writes_what_they_have_in_common():
    plan, graph = planned(), graph_of("new")
    assert plan.model.digest != graph.digest
    assert plan.model.parameters["blocks.0.up.weight"] == "float64 16x8"
    assert plan.model.inputs == {"x": "float64 3x8", "y": "float64 3x4"}
    assert all(stage.flops > 0 and stage.bytes > 0 for stage in plan.stages)
    assert parse_plan(json.loads(format_plan(plan))) == plan


@pytest.mark.parametrize("written", [lambda plan: plan, as_written_before])
def test_a_plan_is_bound_to_another_version_by_module_path(written):
    plan, graph = planned(), graph_of("new")
    bound = check_plan(written(plan), graph, read_cluster("2 x A100-80GB")).plan
    assert bound.model.digest == graph.digest
    assert sorted(op for stage in bound.stages for op in stage.ops) == sorted(graph.op_names)
    for before, now in zip(plan.stages, bound.stages, strict=True):
        assert {op.partition(".linear")[0] for op in before.ops if ".linear" in op} == {
            op.partition(".linear")[0] for op in now.ops if ".linear" in op}
    assert (bound.order, bound.gradients) == (plan.order, plan.gradients)


def test_another_batch_size_is_the_same_work():
    plan = planned()
    assert bind_plan(plan, graph_of("new", batch=3)).model.digest == graph_of("new", batch=3).digest


@pytest.mark.parametrize(("name", "message"), [
    ("wide", r"parameter 'blocks\.0\.up\.weight' \(stage s0\) is float64 16x8 in the plan and float64 32x16"),
    ("shallow", r"parameter 'blocks\.3\.up\.weight' \(stage s1\) is float64 16x8 in the plan and not there"),
    ("costly", r"stage s0: \S+ FLOPs for a sample, \S+ in the plan \(\+\d+\.\d %\)"),
    ("longer", r"input 'x' is float64 3x8 in the plan and float64 5x8")])
def test_another_model_is_refused_with_the_stage_and_what_differs(name, message):
    with pytest.raises(PlanError, match=message) as problem:
        bind_plan(planned(), graph_of(name))
    assert "made for another model" in str(problem.value)


def test_other_operators_for_one_sample_are_told_from_another_model():
    """Was: a model that does less for one sample than for two was said to be another one, and to be planned again."""
    with pytest.raises(PlanError, match="it was traced for one sample, and may have other operators"):
        bind_plan(planned(), graph_of("costly", batch=1))
    with pytest.raises(PlanError) as problem:
        bind_plan(planned(), graph_of("costly", batch=2))
    assert "one sample," not in str(problem.value)


def test_an_older_plan_for_a_model_without_one_of_its_modules_is_refused_with_the_stage():
    with pytest.raises(PlanError, match=r"stage s1 begins in module 'blocks\.\d.*which has no operators") as problem:
        bind_plan(_cut_in_the_last_block(), graph_of("shallow"))
    assert "s1" in str(problem.value)


def _cut_in_the_last_block() -> Plan:
    graph = graph_of("old")
    place = next(index for index, op in enumerate(graph.op_names) if op.startswith("blocks.3.up"))
    return pipeline_plan(graph, [0, 1], greedy_order([0, 1], 2), microbatches=2,
                         ops=[list(graph.op_names[:place]), list(graph.op_names[place:])])


@pytest.mark.parametrize("factor", [1.011, 0.989])
def test_a_stage_may_differ_by_one_percent_and_no_more(factor):
    plan, graph = planned(), graph_of("new")
    near = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], flops=plan.stages[1].flops * 1.009)))
    assert bind_plan(near, graph).stages[1].name == "s1"
    for field in ("flops", "bytes"):
        far = replace(plan.stages[1], **{field: getattr(plan.stages[1], field) * factor})
        with pytest.raises(PlanError, match="What differs: stage s1: "):
            bind_plan(replace(plan, stages=(plan.stages[0], far)), graph)


# ---- stages that devices divide -------------------------------------------------------------------------------------

BY_COLUMNS = {r".*\.up\.linear": "n", r"blocks\.\d\.relu": "d1", r".*\.down\.linear": "k"}


def divided(name: str) -> Plan:
    model = f"{HERE}:{name}"
    return sharded_plan(model, {"tensor": 2}, sharding_of(model, (2,), [BY_COLUMNS]), num_devices=2)


def test_a_divided_stage_keeps_its_words_under_the_new_names():
    plan, graph = divided("old"), graph_of("new")
    bound = bind_plan(plan, graph).stages[0].sharding
    assert len(bound.ops) == len(plan.stages[0].sharding.ops)
    assert {op for op in bound.ops if ".linear" in op} == {op for op in plan.stages[0].sharding.ops if ".linear" in op}
    assert {name for name in bound.tensors if name.endswith("weight")} == {
        name for name in plan.stages[0].sharding.tensors if name.endswith("weight")}


def test_a_new_operator_between_parts_is_refused_with_the_stage_and_the_tensor():
    plan = divided("old")
    sharding = plan.stages[0].sharding
    scattered = replace(sharding, tensors={**sharding.tensors, "blocks.1.down.linear": ("S0",)})
    with pytest.raises(PlanError, match=r"stage s0 is divided.*operator 'blocks\.1\.unsqueeze'.*'blocks\.1\.down\.linear'"):
        bind_plan(replace(plan, stages=(replace(plan.stages[0], sharding=scattered),)), graph_of("new"))


def test_a_divided_operator_that_has_vanished_is_refused():
    plan = divided("old")
    sharding = replace(plan.stages[0].sharding, ops={**plan.stages[0].sharding.ops, "blocks.2.flatten": ("d0",)})
    with pytest.raises(PlanError, match=r"stage s0 is divided.*operator 'blocks\.2\.flatten', which they divide, is not"):
        bind_plan(replace(plan, stages=(replace(plan.stages[0], sharding=sharding),)), graph_of("new"))


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(2, tmp_path_factory.mktemp("pool"), models=(f"{HERE}:new",)) as running:
        yield running


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [planned, lambda: as_written_before(planned()), lambda: divided("old")])
def test_a_plan_of_one_version_runs_another_and_equals_one_process(pool, make):
    check = pool.run(make(), f"{HERE}:new")["verification"]
    assert check["passed"]
    assert check["gradient_error"] <= 1e-10
    assert check["num_gradients"] >= 18


@pytest.mark.parametrize("figure", [float("inf"), 0.0, -1.0])
def test_a_figure_that_no_stage_can_have_is_not_taken_for_the_models(figure):
    plan = planned()
    broken = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], flops=figure)))
    with pytest.raises(PlanError, match="What differs: stage s1: "):
        bind_plan(broken, graph_of("new"))


def test_a_plan_with_very_many_operators_of_one_module_is_refused_at_once():
    plan, graph = as_written_before(planned()), graph_of("new")
    many = replace(plan.stages[1], ops=(*plan.stages[1].ops, *(f"mul_{number}" for number in range(200_000))))
    with pytest.raises(PlanError, match="operators of one module differ from 20000"):
        bind_plan(replace(plan, stages=(plan.stages[0], many)), graph)
