"""A plan for a model that has several dtypes runs in those: ``weft shard --plan`` wrote plans that were refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import weft
from weft.cli.common import graph_of_plan
from weft.cluster import read_cluster
from weft.model.folded import trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.plan.plan import Plan, load_plan, save_plan
from weft.planning.make import SearchOptions, search_plans
from weft.run.prepare import Tracer, lower_to_run
from weft.run.result import RunOptions
from weft.run.worker import resolve_source
from weft.search.common.problem import PlanOptions
from weft.search.shard.compare import search_plan
from weft.training.parallelize import plan_again

HERE = Path(__file__)
KINDS = ("bfloat16", "float64")


class Mixed(nn.Module):
    """Parameters of one dtype, with buffers in float32 and int64 beside them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 4, dtype=dtype)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.register_buffer("places", torch.arange(16).flip(0))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))[:, self.places]
        hidden = (hidden.float() * self.scale).to(x.dtype)
        return functional.mse_loss(self.last(hidden), target)


def _mixed(dtype: torch.dtype, batch: int, seed: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return Mixed(dtype), tuple(torch.randn(batch, size, generator=generator).to(dtype) for size in (8, 4))


def mixed_bfloat16(batch: int = 4, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _mixed(torch.bfloat16, batch, seed)


def mixed_float64(batch: int = 4, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return _mixed(torch.float64, batch, seed)


def spec_of(kind: str) -> str:
    return f"{HERE}:mixed_{kind}"


def sharded(spec: str) -> Plan:
    source = resolve_model(spec)
    assert isinstance(source, ModelSource)
    return search_plan(trace_folded(source), read_cluster("2 x cpu"), shape=(2,))


def planned(kind: str, strategy: str) -> Plan:
    found = search_plans(spec_of(kind), read_cluster("2 x cpu"), PlanOptions(batch=4, dtype=kind),
                         SearchOptions(strategies=[strategy])).comparison.best.plan
    assert found is not None
    return found


def lowered(plan: Plan, spec: str) -> ModelSource:
    """Return the model that a run would build, after binding the plan to it as a run does."""
    source = resolve_source(plan, spec, RunOptions())
    lower_to_run(plan, Tracer(source))
    return source


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_plan_was_refused_for_a_buffer_of_another_dtype(kind, tmp_path):
    plan = sharded(spec_of(kind))
    save_plan(plan, tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert plan.model.dtype == kind
    module = lowered(plan, spec_of(kind)).build()
    assert (module.scale.dtype, module.places.dtype) == (torch.float32, torch.int64)
    assert graph_of_plan(plan, spec_of(kind)).digest == plan.model.digest
    again = plan_again(plan, resolve_source(plan, spec_of(kind), RunOptions()), ["a0"])
    assert again.model.own_dtypes
    assert not again.compiled
    compiled = plan_again(replace(plan, compiled=True), resolve_source(plan, spec_of(kind), RunOptions()), ["a0"])
    assert compiled.compiled  # it was lost where a plan was made again for what is left
    assert lowered(again, spec_of(kind)).dtype is None


@pytest.mark.parametrize("strategy", ["data-parallel", "gpipe"])
@pytest.mark.parametrize("kind", KINDS)
def test_plans_in_one_dtype_convert_everything(kind, strategy):
    """``weft plan`` is told a dtype, and says so in the plan: then buffers have it, too."""
    plan = planned(kind, strategy)
    assert not plan.model.own_dtypes
    assert lowered(plan, spec_of(kind)).build().scale.dtype == getattr(torch, kind)


def test_a_plan_that_a_script_has_made_runs_from_the_command_line(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    module, example = mixed_float64()
    with weft.parallelize(module, example, "1 x cpu") as trainer:
        plan = trainer.plan
    assert plan.model.own_dtypes
    assert lowered(plan, spec_of("float64")).build().scale.dtype == torch.float32


def test_plans_of_before_are_in_one_dtype(tmp_path):
    plan = planned("float64", "data-parallel")
    save_plan(plan, tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert '"own_dtypes": false' in text
    (tmp_path / "plan.json").write_text(text.replace('"own_dtypes": false,', "").replace(',\n  "own_dtypes": false', ""))
    assert load_plan(tmp_path / "plan.json") == plan
