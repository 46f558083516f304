"""What the user should know about a traced model before it runs on many devices: one place for all commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

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
