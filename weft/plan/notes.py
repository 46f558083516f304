"""What the user should know about a model under a certain plan."""

from __future__ import annotations

from collections.abc import Iterator

from weft.model.graph import Graph
from weft.plan.plan import Plan


def recompute_notes(graph: Graph, plan: Plan) -> Iterator[str]:
    """Yield what becomes of the gradient checkpointing that a model asks for."""
    if not graph.asks_recompute or plan.model.mode != "training":
        return
    if all(stage.recompute for stage in plan.stages):
        yield ("the model asks for gradient checkpointing: the plan's stages keep their inputs and compute the rest "
               "again")
    elif any(stage.recompute for stage in plan.stages):
        yield ("the model asks for gradient checkpointing: some of the plan's stages compute again, the others keep "
               "their activations")
    else:
        yield ("the model asks for gradient checkpointing, which is ignored: this plan keeps activations. Plan with "
               "--recompute to compute them again")
