"""Tiny mixtures of experts with default experts, for runs with divided experts, and the words of such plans."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import foreign_models
from tests.run.plans import traced
from tests.run.sharded_plans import ops_of, parameter_shapes
from weft.plan.plan import Sharding
from weft.search.joint.placements import with_stored_parameters
from weft.sharding.expert_rows import EXPERTS, experts_sort, find_rows
from weft.sharding.factor_rules import factors_of

FOREIGN = Path(foreign_models.__file__)
HERE = Path(__file__)


def skewed(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a GPT-OSS in which every token falls on the first expert and none on the last."""
    model, inputs = foreign_models.build("gpt_oss", batch=batch, seed=seed)
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):
            parameter.data.copy_(torch.tensor([20.0, 0.0, 0.0, -20.0]))
    return model, inputs


class WithRouterLoss(nn.Module):
    """A Mixtral whose loss also counts how evenly its experts are used."""

    def __init__(self) -> None:
        super().__init__()
        self.model = foreign_models.build("mixtral")[0].model
        self.model.config.output_router_logits = True

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return both losses together."""
        found = self.model(input_ids=input_ids, labels=labels, use_cache=False, output_router_logits=True)
        loss: Tensor = found.loss
        return loss


def with_router_loss(batch: int = 2, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    model = WithRouterLoss()
    generator = torch.Generator().manual_seed(seed)
    return model, (torch.randint(3, 64, (batch, 8), generator=generator),
                   torch.randint(3, 64, (batch, 8), generator=generator))


def by_experts(model: str, mesh: tuple[int, ...], *, axes: tuple[int, ...], ops: frozenset[str] | None = None,
               asks: bool = False) -> Sharding:
    """Return the sharding that divides experts, and what is done with their rows, over some axes of a mesh.

    ``ops`` are the only operators to divide, if given. ``asks``: devices have tokens of their own, and ask each other for
    the rows of their experts, and for the results.
    """
    program = traced(model).program
    nodes = {name: program.nodes[places[0]] for name, places in program.op_nodes.items()}
    rows = find_rows(program.fx_graph.nodes, lambda node: experts_sort(node) is not None, factors_of)
    words = {}
    for name, op in ops_of(model).items():
        if op.factors is None or (ops is not None and name not in ops):
            continue
        node, named = nodes[name], [factor.name for factor in op.factors.factors]
        chosen = EXPERTS if EXPERTS in named else next(
            (named[factor] for place, item in enumerate(node.all_input_nodes) if item in rows
             for factor in op.factors.inputs[place][rows[item].dim]), "")
        if "transpose" in str(node.target) and any(experts_sort(user) is not None for user in node.users):
            chosen = "d0"  # the experts' matrices, turned
        if asks and "exchanged" in named:
            chosen = "exchanged"
        words[name] = tuple(chosen if axis in axes else "" for axis in range(len(mesh)))
    return with_stored_parameters(words, ops_of(model), parameter_shapes(model), mesh)
