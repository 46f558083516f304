"""The memory account of pipelines against what the allocator of each rank sees, with pretended others."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.models.transformers_like import GptLike, T5Like, token_pairs
from tests.run.pretended import measured
from weft.cluster import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.source import ModelSource
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.plan.plan import Optimizer, Plan
from weft.run.prepare import Tracer
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.baselines import STRATEGIES
from weft.search.schedule.from_plan import problem_of_plan, with_schedule
from weft.search.schedule.named import named_schedule

SIZE, MICROBATCHES, LENGTH = 4, 8, 64
MODELS = {"gpt": lambda: GptLike(width=64, heads=4, layers=8, length=LENGTH),
          "t5": lambda: T5Like(width=64, heads=4, layers=4, length=LENGTH)}


def source_of(name: str) -> ModelSource:
    return ModelSource(name=name, spec="", batch=SIZE, mode="training", builder=lambda mode: MODELS[name](),
                       sampler=lambda mode, batch, seed: token_pairs(batch, LENGTH, seed))


@cache
def problem_of(name: str) -> Problem:
    graph = trace(source_of(name), batch=SIZE, batch_dims=True).graph
    cluster = read_cluster("4 x A100-80GB")
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(
        batch=SIZE * MICROBATCHES, microbatches=MICROBATCHES, optimizer=Optimizer(kind="sgd")))


def plan_of(name: str, kind: str) -> Plan:
    problem = problem_of(name)
    plan = STRATEGIES["gpipe" if kind == "gpipe" else "1f1b"](problem, MICROBATCHES)
    if kind != "split":
        return plan
    asked = problem_of_plan(plan, problem.graph, problem.costs, problem.cluster, split_backward=True)
    return with_schedule(plan, asked, named_schedule("zb-h2", asked.problem, asked.num_microbatches))


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "split"])
@pytest.mark.parametrize("name", [*MODELS])
def test_the_account_of_a_pipeline_is_what_each_rank_takes(name: str, kind: str) -> None:
    """Was: messages under way, gradients before they are added and what waits for split backwards were missing."""
    plan, tracer = plan_of(name, kind), Tracer(source_of(name))
    account = account_memory(lower(plan, problem_of(name).graph))
    errors = [account.peak_bytes(rank) / measured(tracer, plan, rank) - 1 for rank in range(4)]
    assert max(map(abs, errors)) < 0.05, errors
