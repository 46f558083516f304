"""Mixed precision: float32 parameters, a forward under autocast, the same losses as the plain module's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.run.plans import cut, pipeline_plan
from tests.run.pool import Pool
from weft.base.errors import ModelError
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Optimizer

MODEL = "gpt2-tiny:layers=2"
STEPS, RATE = 50, 0.01
ROUNDING = torch.finfo(torch.bfloat16).eps
"""The distance of neighbours in bfloat16, relative: the measure of 'the same losses' over all steps."""


def test_parameters_are_single_and_products_half_precision():
    source = resolve_model(MODEL, mode="training", dtype="bf16-mixed")
    graph = trace(source, batch=2).graph
    assert {graph.tensor_dtypes[int(item)] for item in graph.parameters} == {"float32"}
    kinds = {graph.op_kinds[op]: graph.tensor_dtypes[int(graph.op_outputs(op)[0])] for op in range(graph.num_ops)}
    assert kinds["aten.addmm"] == "bfloat16"
    assert kinds["aten.layer_norm"] == kinds["aten.embedding"] == "float32"
    assert graph.tensor_dtypes[graph.outputs[0]] == "float32"


def test_an_unknown_precision_is_refused():
    with pytest.raises(ModelError, match="bfloat16-mixed"):
        resolve_model(MODEL).with_dtype("fp8-mixed")


@pytest.mark.timeout(120)
def test_fifty_steps_have_the_losses_of_plain_autocast(tmp_path):
    source = resolve_model(MODEL, mode="training", dtype="bf16-mixed")
    graph = trace(source, batch=4, backward="rule").graph
    plan = pipeline_plan(graph, [0, 1], one_f_one_b(2, 2), microbatches=2, batch=8, ops=cut(graph, 2))
    plan = replace(plan, optimizer=Optimizer(kind="sgd", lr=RATE))
    with Pool(2, tmp_path, models=()) as pool:
        found = torch.tensor(pool.run(plan, MODEL, dtype="bf16-mixed", steps=STEPS, verify=False)["losses"])
    expected = torch.tensor(plain_losses(source))
    torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0.0)
    assert expected[-1] < 0.95 * expected[0]  # it learns, so the comparison is of something
    single = torch.tensor(plain_losses(source.with_dtype("float32")))
    assert not torch.equal(single, expected)  # else nothing ran in half precision


def plain_losses(source) -> list[float]:
    from weft.model.weights import materialize

    module, inputs, losses = materialize(source.build(), 0, device=torch.device("cpu")), source.inputs(8, 0), []
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(*inputs)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
