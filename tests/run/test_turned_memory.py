"""The memory account of pipelines whose cuts fall between tensors that lie in unlike orders, against the allocator."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.random_models import draw_model
from tests.run.plans import greedy_order, pipeline_plan
from tests.run.pretended import prepared
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.plan.program import Program
from weft.run.memory_meter import measure_step
from weft.run.prepare import Tracer
from weft.run.stage import _as_it_lies
from weft.run.wire import memory_order

MICROBATCHES = 3
CASES = [
    (758089, ("pieces.2.transpose_1",), False),  # rows that are changed in place, and a sum behind a linear layer
    (758089, ("pieces.3.select_1",), True),
    (580019, ("pieces.0.norm._native_batch_norm_legit_functional", "pieces.1.norm.layer_norm"), False),
    (1046029, ("pieces.2.squeeze", "flatten"), False),  # a tensor whose gradient lies in another order than it
    (109051, ("pieces.0.t", "pieces.0.expand_as"), True), (301686, ("pieces.1.reshape", "head.linear"), False),
    (205394, ("pieces.1.scaled_dot_product_attention", "pieces.2.matmul"), False)]
"""Seed of the model, the first operators of the second stage and the third, and whether backwards are split."""


def program_of(seed: int, cuts: tuple[str, ...], *, split: bool) -> tuple[Tracer, Program]:
    """Return a pipeline of a random model whose later stages begin with these operators, each on a rank of its own."""
    source = draw_model(seed, "training", scale=8).source
    graph = trace(source, batch=2, batch_dims=True).graph
    at = [0, *(graph.op_names.index(cut) for cut in cuts), graph.num_ops]
    ops, devices = [list(graph.op_names[first:last]) for first, last in pairwise(at)], list(range(len(at) - 1))
    plan = pipeline_plan(graph, devices, greedy_order(devices, MICROBATCHES, split=split), microbatches=MICROBATCHES,
                         batch=2 * MICROBATCHES, ops=ops)
    return Tracer(source), lower(plan, graph)


@pytest.mark.parametrize(("seed", "cuts", "split"), CASES)
def test_what_lies_in_another_order_is_copied_as_the_account_says(seed: int, cuts: tuple[str, ...], split: bool) -> None:
    """Was: 3 to 13 % too little, each of them found in a random plan."""
    tracer, program = program_of(seed, cuts, split=split)
    account, rank = account_memory(program), 1
    ready, executor = prepared(tracer, program.plan, rank)
    executor.step()
    record = measure_step(executor, buffers=ready.buffers.values())
    at = int(np.argmax(record.peak))  # of which the workspace of a kernel, as in a batch norm's backward
    assert record.peak[at] - record.inside[at] <= 1.02 * account.peak_bytes(rank)


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 5, 6, 7), (4, 6)])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", ["batch_norm", "_native_batch_norm_legit_functional"])
def test_a_batch_norm_gives_what_lies_as_what_it_was_given(shape: tuple[int, ...], train: bool, kind: str) -> None:
    """Was: on CPUs in one piece, which nothing else of the trace then was."""
    norm = getattr(torch.ops.aten, kind).default
    rng = np.random.default_rng(len(shape))
    for _ in range(4):
        x = torch.randn(shape, dtype=torch.float64).permute(*rng.permutation(len(shape)).tolist()).requires_grad_()
        weight, bias, mean, var = torch.rand(4, x.shape[1], dtype=torch.float64).unbind()
        rest = (mean.clone(), var.clone(), train, 0.1, 1e-5, *([False] if kind == "batch_norm" else []))
        found, expected = (function(x, weight, bias, mean.clone(), var.clone(), *rest[2:])
                           for function in (partial(_as_it_lies, norm), norm))
        pairs = list(zip(found, expected, strict=True)) if isinstance(found, tuple) else [(found, expected)]
        assert all(torch.allclose(one, two, rtol=1e-12) for one, two in pairs)
        assert pairs[0][0].stride() == x.stride()
        given = torch.randn_like(pairs[0][1])
        grads = [torch.autograd.grad(one, x, given)[0] for one in pairs[0]]
        assert torch.allclose(*grads, rtol=1e-9, atol=1e-12)
        assert grads[0].stride() == x.stride()


def test_a_part_of_a_tensor_is_laid_by_a_message_as_pytorch_lays_what_is_like_it() -> None:
    """Was: as it is counted, so that attention over what had come gave a result that lay otherwise than traced."""
    parts = torch.empty(2, 4, 3, 2, 5).permute(2, 0, 3, 1, 4)
    assert memory_order(parts[0]) == (0, 2, 1, 3)
    assert memory_order(torch.empty(1, 4).expand(3, 4)) == (0, 1)
