"""What arrives lies in buffers that later messages overwrite: nothing that lives longer may be a view of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.run.plans import make_plan, pipeline_plan, source_of, traced
from tests.run.pool import Pool
from tests.run.pretended import prepared
from weft.plan.orders import forward_only, one_f_one_b, to_tokens
from weft.plan.plan import Replica, Stage
from weft.plan.program import Op, Phase
from weft.run.prepare import Tracer

TURNED, BARE = (f"{Path(__file__)}:{name}" for name in ("turned", "bare"))


class Turned(nn.Module):
    """Gives a product the other way round, laid out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).transpose(1, 2).contiguous()


def turned(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = Turned()
    torch.manual_seed(seed)
    return model, (torch.randn(batch, 3, 4),)


class Bare(nn.Module):
    """Has a view between two products, of which a plan may make a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.last(self.first(x).unsqueeze(1)), target)


def bare(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    model = Bare()
    torch.manual_seed(seed)
    return model, (torch.randn(batch, 4), torch.randn(batch, 1, 4))


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(2, tmp_path_factory.mktemp("pool"), models=(TURNED,), mode="inference") as running:
        yield running


@pytest.mark.timeout(120)
def test_an_output_that_arrived_in_one_piece_outlives_the_next_message(pool):
    """Was: all requests gave what the last one gave, because ``contiguous`` made no copy of the message."""
    graph = traced(TURNED, mode="inference").graph
    assert graph.op_kinds[-1] in ("aten.clone", "aten.contiguous")
    plan = pipeline_plan(graph, [0, 1], forward_only(2, 3), microbatches=3, mode="inference",
                         ops=[list(graph.op_names[:-1]), [graph.op_names[-1]]])
    check = pool.run(plan, TURNED)["verification"]
    assert check["loss_error"] <= 1e-10, check


def test_the_gradient_that_a_view_hands_on_is_no_view_of_a_message():
    """Was: it was one, so that the next message could overwrite it before it was sent."""
    graph = traced(BARE).graph
    place = list(graph.op_kinds).index("aten.unsqueeze")
    parts = [graph.op_names[:place], graph.op_names[place:place + 1], graph.op_names[place + 1:]]
    names = ("s0", "s1", "s2")
    stages = [Stage(name=name, ops=part, replicas=(Replica(devices=(f"d{number}",)),))
              for number, (name, part) in enumerate(zip(names, parts, strict=True))]
    order = {f"d{device}": actions for device, actions in enumerate(to_tokens(one_f_one_b(3, 2), names))}
    plan = make_plan(graph, stages, order, microbatches=2, batch=4, num_devices=3)
    _, executor = prepared(Tracer(source_of(BARE)), plan, rank=1)
    wiring, looked = executor.binder.wiring, []
    for item, action in zip(wiring.instructions, executor.binder.actions, strict=True):
        action()
        if item.op == Op.COMPUTE and item.phase == Phase.B:
            (gradient,) = wiring.cells[item.instance, item.microbatch].gradients
            buffers = {tensor.untyped_storage()._cdata for tensors in wiring.arrived.values() for tensor in tensors}
            looked.append(gradient.untyped_storage()._cdata not in buffers)
    assert looked == [True, True]
