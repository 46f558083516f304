"""Stages that keep what they name and make the rest again give the gradients of one process, by any operator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.run import test_sharded_memory as sharded_memory
from tests.run.plans import cut, greedy_order, pipeline_plan, replicated_plan, source_of, traced
from tests.run.pool import Pool
from tests.run.pretended import measured, prepared
from tests.run.sharded_plans import sharded_plan, sharding_of
from tests.run.test_executor import Dropped, numbers, one_rank_plan, source_from
from tests.run.test_sharded import CASES as SHARDED
from weft.model.graph import Graph
from weft.model.source import ModelSource
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Plan
from weft.plan.saving import made_storages, repeated_ops, saved_names
from weft.run.prepare import Tracer
from weft.run.random_state import RankRandom
from weft.search.recompute.choose import Chooser
from weft.search.recompute.pieces import pieces_of
from weft.search.recompute.stages import again_of, choose_within

TOLERANCE = 1e-10


def keeping(plan: Plan, graph: Graph, seed: int, share: float = 0.4) -> Plan:
    """Return the plan in which every stage keeps some of what it makes, by chance, and the rest is made again."""
    chance, stages = random.Random(seed), []
    for stage in plan.stages:
        ops = np.sort([graph.op_index[name] for name in stage.ops])
        kept = [storages[0] for op in ops.tolist() if (storages := made_storages(graph, op)) and chance.random() < share]
        again = repeated_ops(graph, ops, kept)
        stages.append(replace(stage, recompute=True, saved=saved_names(graph, ops, again)) if len(again) else stage)
    assert any(stage.saved for stage in stages)
    return replace(plan, stages=tuple(stages))


PIPELINES = {
    "1F1B": ("tiny_gpt", lambda graph: pipeline_plan(graph, [0, 1, 2, 3], one_f_one_b(4, 4), microbatches=4)),
    "split": ("tiny_gpt", lambda graph: pipeline_plan(
        graph, [0, 1, 2, 3], greedy_order([0, 1, 2, 3], 3, split=True), microbatches=3)),
    "split with skips": ("skip_net", lambda graph: pipeline_plan(
        graph, [0, 1, 2, 3], greedy_order([0, 1, 2, 3], 3, split=True), microbatches=3)),
    "replicas 3:1": ("tiny_gpt", lambda graph: replicated_plan(
        graph, [[(0, 0.75), (1, 0.25)], [(2, 0.75), (3, 0.25)]], microbatches=2, batch=8, num_devices=4)),
    "tied": ("tied_gpt", lambda graph: pipeline_plan(graph, [0, 1, 2, 3], one_f_one_b(4, 4), microbatches=4)),
    "stages back": ("tiny_gpt", lambda graph: pipeline_plan(
        graph, [0, 1, 2, 3, 3, 2, 1, 0], greedy_order([0, 1, 2, 3, 3, 2, 1, 0], 3), microbatches=3, ops=cut(graph, 8))),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines_equal_one_process(pool: Pool, case: str) -> None:
    model, make = PIPELINES[case]
    graph = traced(model).graph
    plan = keeping(make(graph), graph, seed=len(case))
    check = pool.run(plan, model)["verification"]
    assert check["num_gradients"] > 0
    assert max(check["loss_error"], check["gradient_error"]) <= TOLERANCE, check["worst"]
    damage = "lost_weight_gradient" if "split" in case else "changed_weight"
    assert not pool.run(plan, model, damage=damage)["verification"]["passed"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("case", "split"), [("gpt on 2", False), ("gpt in sequence on 2", True), ("tensor and data", False)])
def test_stages_on_several_devices_equal_one_process(pool: Pool, case: str, split: bool) -> None:
    model, mesh, axes, _ = SHARDED[case]
    plan = sharded_plan(model, mesh, sharding_of(model, tuple(mesh.values()), axes), split=split)
    plan = keeping(plan, traced(model).graph, seed=3)
    check = pool.run(plan, model)["verification"]
    assert check["num_gradients"] > 0
    assert max(check["loss_error"], check["gradient_error"]) <= TOLERANCE, check["worst"]
    assert not pool.run(plan, model, damage="changed_weight")["verification"]["passed"]


@pytest.mark.parametrize("share", [0.3, pytest.param(0.7, marks=pytest.mark.xfail(
    strict=True, reason="15 % more is held than accounted where a divided stage makes pointwise operators again"))])
def test_the_account_of_stages_on_several_devices_is_what_a_rank_takes(share: float) -> None:
    plan, tracer = sharded_memory.plan_of(sharded_memory.ZOO, 2, "megatron"), sharded_memory.tracer_of(sharded_memory.ZOO)
    graph = tracer.trace(sharded_memory.BATCH).graph
    ops, seconds = np.arange(graph.num_ops), graph.flops + graph.bytes_read + 1.0
    chooser = Chooser([item.piece for item in pieces_of(graph, ops, seconds=seconds, fraction=1.0)])
    budget = chooser.least_bytes + share * (chooser.most_bytes - chooser.least_bytes)
    again = again_of(*choose_within(graph, ops, budget, seconds=seconds, fraction=1.0))
    chosen = replace(plan, stages=(replace(plan.stages[0], recompute=True, saved=saved_names(graph, ops, again)),))
    account, whole = (sharded_memory.accounted(sharded_memory.ZOO, item) for item in (chosen, plan))
    assert account == pytest.approx(measured(tracer, chosen), rel=0.05)
    assert account < 0.95 * whole, "else it would also hold where nothing is made again"


def gradients(source: ModelSource, plan: Plan) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    ready, executor = prepared(Tracer(source), plan)
    executor.step()
    return {name: tensor.grad.clone() for name, tensor in ready.parameters.tensors.items() if tensor.grad is not None}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_choice_gives_the_same_gradients(seed: int, split: bool) -> None:
    source = source_of("tiny_gpt")
    plain = one_rank_plan(source, 2, microbatches=2, split=split)
    plan = keeping(plain, Tracer(source).trace(1).graph, seed, share=(0.05, 0.3, 0.6, 0.9)[seed])
    wanted, found = gradients(source, plain), gradients(source, plan)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-15)


def dropped_plan() -> tuple[ModelSource, Plan, Plan]:
    """Return a model with dropout, and plans that keep all, and that make dropout's result again."""
    source = source_from(Dropped, numbers)
    plain = one_rank_plan(source, 1, microbatches=2)
    graph = Tracer(source).trace(1).graph
    first = next(op for op in range(graph.num_ops) if "tanh" in graph.op_kinds[op])
    plan = replace(plain, stages=(replace(plain.stages[0], recompute=True, saved=(
        graph.tensor_names[made_storages(graph, first)[0]],)),))
    again = repeated_ops(graph, np.arange(graph.num_ops), [graph.tensor_index[plan.stages[0].saved[0]]])
    assert any("dropout" in graph.op_kinds[op] for op in again)
    return source, plain, plan


def test_random_numbers_are_drawn_again() -> None:
    source, plain, plan = dropped_plan()
    wanted, found = gradients(source, plain), gradients(source, plan)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-15)


def test_other_random_numbers_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: with numbers that go on instead, gradients differ."""
    @contextmanager
    def going_on(self: RankRandom, states: object) -> Iterator[None]:
        yield

    source, plain, plan = dropped_plan()
    wanted = gradients(source, plain)
    monkeypatch.setattr(RankRandom, "as_it_was", going_on)
    found = gradients(source, plan)
    assert any((found[name] - value).abs().max() > 1e-6 for name, value in wanted.items())


def test_what_ran_again_is_not_held_after_the_step() -> None:
    import gc
    import weakref

    from weft.run.again import _Tape

    source = source_of("tiny_gpt")
    tapes: list[weakref.ref[_Tape]] = []
    original = _Tape.__init__

    def noted(self: _Tape, *args: object) -> None:
        tapes.append(weakref.ref(self))
        original(self, *args)  # type: ignore[arg-type]

    plan = keeping(one_rank_plan(source, 2, microbatches=2), Tracer(source).trace(1).graph, 1)
    gc.disable()
    try:
        _Tape.__init__ = noted  # type: ignore[method-assign,assignment]
        gradients(source, plan)
        assert tapes
        assert not any(item() for item in tapes), "something refers to itself"
    finally:
        _Tape.__init__ = original  # type: ignore[method-assign]
        gc.enable()
