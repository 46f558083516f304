"""What the user should know about a model, and about a model under a certain plan: one place for all commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from weft.model.graph import Graph
from weft.plan.expert_load import EVEN, parse_load, rows_by_experts
from weft.plan.plan import Plan
from weft.sharding.factor_rules import has_rule

if TYPE_CHECKING:
    from weft.model.trace import TracedModel

NOTE: Final = "note: "
"""What such lines begin with where they are reported."""


def rule_notes(traced: TracedModel) -> tuple[str, ...]:
    """Return the operators that devices cannot divide, because there is no rule for them."""
    program, graph = traced.program, traced.graph
    found: dict[str, str] = {}
    for index, name in enumerate(graph.op_names):
        target = program.nodes[program.op_nodes[name][0]].target
        if not graph.is_constant[index] and not has_rule(target):
            found[str(target)] = (graph.sources[index] if graph.sources else "") or name
    return without_rule_notes(found)


def without_rule_notes(found: Mapping[str, str]) -> tuple[str, ...]:
    """Return the notes on operators without a rule, given by kind with a place each."""
    return tuple(f"{kind} has no rule, so every device does all of it: {where}" for kind, where in found.items())


def plan_notes(graph: Graph, plan: Plan, *, load: str = EVEN) -> Iterator[str]:
    """Yield what the user should know about a model under a plan; ``load`` is that of experts, as it was planned."""
    yield from recompute_notes(graph, plan)
    yield from load_notes(graph, load)


def load_notes(graph: Graph, load: str) -> Iterator[str]:
    """Yield what the costs of experts assume about how many rows each of them gets."""
    for num_experts, num_rows in rows_by_experts(graph).items():
        if load != EVEN:
            shares = parse_load(load, num_experts)
            yield (f"of the {num_rows:,} rows for {graph.batch} samples that fall on {num_experts} experts, "
                   f"{max(shares):.1%} are assumed to fall on one and {min(shares):.1%} on another ({load}); memory is "
                   "accounted for as if all got equally many")
            continue
        yield (f"all {num_experts} experts are assumed to be chosen equally often: {num_rows / num_experts:,.0f} rows "
               f"each of the {num_rows:,} for {graph.batch} samples")


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
