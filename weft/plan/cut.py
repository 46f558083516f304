"""How a program cuts the batch, and whether the model may be cut so."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from weft.model.fidelity import graph_work
from weft.model.graph import Graph
from weft.model.parts import Verdict, check_parts
from weft.plan.plan import Plan, split_samples
from weft.plan.program import Program


def loss_parts(program: Program) -> list[tuple[int, int]]:
    """Return the samples that each run of the stage with the loss sees, first and last-plus-one, in order."""
    plan, graph = program.plan, program.graph
    loss = int(graph.tensor_producer[graph.outputs[0]])
    return sorted(
        (microbatch * plan.microbatch_size + item.samples[0], microbatch * plan.microbatch_size + item.samples[1])
        for item in program.instances if loss in program.stage_ops[item.stage] for microbatch in item.microbatches)


def finest_parts(plan: Plan) -> list[tuple[int, int]]:
    """Return the parts of the batch such that no stage sees samples of two of them unless it sees all of both."""
    ends = {0, plan.model.batch}
    for stage in plan.stages:
        counts = split_samples(plan.microbatch_size, tuple(replica.share for replica in stage.replicas))
        for microbatch in range(plan.microbatches):
            first = microbatch * plan.microbatch_size
            ends.update(first + sum(counts[:index]) for index in range(len(counts) + 1))
    bounds = sorted(ends)
    return list(pairwise(bounds))


def check_cut(plan: Plan, graph: Graph, module: torch.nn.Module, inputs: Sequence[Tensor], *,
              device: torch.device | None = None) -> Verdict:
    """Return whether the plan may cut the batch of this module; ``inputs`` are those of the whole batch.

    ``device`` is where to find out (default: where the module is).
    """
    if plan.model.mode != "training":
        return Verdict()
    return check_parts(module, inputs, finest_parts(plan), batch=plan.model.batch, work=graph_work(graph),
                       device=device)
