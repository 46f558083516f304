"""Stages that name what they keep: which operators run again, what is wrong with names, time, and the account."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.run.pretended import measured
from tests.worlds import with_gradients
from weft.base.errors import PlanError
from weft.cluster import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage, parse_plan, plan_to_json
from weft.plan.saving import bundles, made_storages, repeated_ops, saved_names
from weft.plan.structure import structure_problems
from weft.run.prepare import Tracer
from weft.search.recompute.stages import attention_ops
from weft.simulate.timing import stage_figure

BATCH = 4


@cache
def source() -> ModelSource:
    return resolve_model("gpt2-tiny", mode="training", batch=BATCH)


@cache
def graph() -> Graph:
    return trace(source(), batch=BATCH, batch_dims=True).graph


def plan_of(saved: tuple[str, ...], *, recompute: bool = True, split: bool = False) -> Plan:
    phases = ("F", "I", "W") if split else ("F", "B")
    order = tuple(f"s0:{phase}:{number}" for number in range(2) for phase in phases)
    stage = Stage(name="s0", ops=graph().op_names, replicas=(Replica(devices=("d0",)),), recompute=recompute, saved=saved)
    return with_gradients(Plan(
        model=ModelRef(name="gpt2-tiny", digest=graph().digest, batch=2 * BATCH),
        cluster=ClusterRef(digest="t", devices=("d0",)), microbatches=2, stages=(stage,), order={"d0": order},
        optimizer=Optimizer(kind="sgd")), graph())


def all_ops() -> np.ndarray:
    return np.arange(graph().num_ops)


def names_for(kind: str) -> tuple[str, ...]:
    if kind == "attention":
        return saved_names(graph(), all_ops(), attention_ops(graph(), all_ops()))
    if kind == "norms":
        chosen = [op for op in all_ops().tolist() if "layer_norm" in graph().op_kinds[op]]
        return saved_names(graph(), all_ops(), np.asarray(chosen))
    blocks = [op for op in all_ops().tolist() if ".h." in f".{graph().op_modules[op]}."]
    ends = {graph().op_modules[op].split(".h.")[1].split(".")[0]: op for op in blocks}
    return saved_names(graph(), all_ops(), np.asarray([op for op in blocks if op not in ends.values()]))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["attention", "norms", "blocks"])
def test_the_account_is_what_a_rank_takes(kind: str, split: bool) -> None:
    plan = plan_of(names_for(kind), split=split)
    account = account_memory(lower(plan, graph())).peak_bytes(0)
    assert account == pytest.approx(measured(Tracer(source()), plan), rel=0.05)
    whole = account_memory(lower(plan_of((), recompute=False, split=split), graph())).peak_bytes(0)
    assert account < whole, "something is not kept"


def test_without_the_names_the_account_would_be_far_off() -> None:
    """A control: what the test above compares depends on what the stage says it keeps."""
    account = account_memory(lower(plan_of(names_for("attention")), graph())).peak_bytes(0)
    assert account_memory(lower(plan_of(names_for("blocks")), graph())).peak_bytes(0) < 0.8 * account


def test_names_ask_for_exactly_the_operators_that_they_were_made_for() -> None:
    chosen = attention_ops(graph(), all_ops())
    names = saved_names(graph(), all_ops(), chosen)
    again = repeated_ops(graph(), all_ops(), [graph().tensor_index[name] for name in names])
    assert again.tolist() == chosen.tolist()
    kinds = {graph().op_kinds[op] for op in chosen if made_storages(graph(), int(op))}
    assert "aten.scaled_dot_product_attention" in kinds
    assert not kinds & {"aten.linear", "aten.addmm", "aten.layer_norm"}
    layers = sum("scaled_dot" in kind for kind in graph().op_kinds)
    assert len(bundles(graph(), again)) == layers, "one for each layer"


def test_a_backward_takes_what_runs_again() -> None:
    costs = estimate_costs(graph(), read_cluster("1 x A100-80GB"))
    again = attention_ops(graph(), all_ops())
    plain, more, whole = (stage_figure(costs, all_ops(), [0], "B", fraction=1.0, again=item, sharded=False).seconds
                          for item in (all_ops()[:0], again, all_ops()))
    assert more - plain == pytest.approx(costs.stage_figure(again, 0, "F").seconds)
    assert plain < more < plain + 0.5 * (whole - plain)


@pytest.mark.parametrize(("names", "changes", "message"), [
    (("nothing",), {}, r"stages\[0\]\.saved names 'nothing', which is not a tensor of the model"),
    (("transformer.wte.weight",), {}, "which no operator of the stage makes"),
    (("transformer.add", "transformer.add"), {}, "more than once"),
    (("transformer.add",), {"recompute": False}, "recompute is false"),
])
def test_names_that_cannot_be_kept_are_refused(names: tuple[str, ...], changes: dict[str, bool], message: str) -> None:
    plan = plan_of(names)
    plan = replace(plan, stages=(replace(plan.stages[0], **changes),))
    problems = "\n".join(structure_problems(plan, graph()))
    assert __import__("re").search(message, problems), problems


def test_compiled_stages_cannot_choose() -> None:
    plan = replace(plan_of(names_for("attention")), compiled=True)
    assert any("compiled stages cannot choose" in item for item in structure_problems(plan, graph()))


def test_plans_of_earlier_releases_load() -> None:
    written = plan_to_json(plan_of((), recompute=True))
    for stage in written["stages"]:
        del stage["saved"]
    assert parse_plan(written) == plan_of((), recompute=True)
    assert parse_plan(written).stages[0].keeps_only_inputs
    with pytest.raises(PlanError):
        parse_plan({**written, "stages": [{**written["stages"][0], "saved": "all"}]})
