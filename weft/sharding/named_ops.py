"""The operators of a traced model with their factors, and their tensors by the names of its ``Graph``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.sharding.factor_rules import factors_of
from weft.sharding.factors import OpFactors

if TYPE_CHECKING:
    from weft.model.trace import TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOp:
    """One operator; its tensors stand in the order of its factors' ``inputs`` and ``outputs``."""

    factors: OpFactors | None
    """None if it cannot be split."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def named_ops(traced: TracedModel) -> dict[str, NamedOp]:
    """Return the operators by name, in the order of the model; constant ones have no factors here."""
    program, graph = traced.program, traced.graph
    result, names = {}, program.names_of_nodes
    for index, op in enumerate(graph.op_names):
        node = program.nodes[program.op_nodes[op][0]]
        result[op] = NamedOp(
            factors=None if graph.is_constant[index] else factors_of(node),
            inputs=tuple(names.get(item, item.name) for item in node.all_input_nodes),
            outputs=tuple(graph.tensor_names[tensor] for tensor in graph.op_outputs(index)))
    return result
