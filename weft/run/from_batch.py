"""What a traced model computes of a batch alone, without parameters: found in the graph and evaluated by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from weft.model.randomness import is_random
from weft.model.trace import TracedProgram, retarget


@dataclass(frozen=True, slots=True, kw_only=True)
class FromBatch:
    """Values that depend on the batch, constants and fixed buffers alone, for parts of the batch."""

    programs: Mapping[int, TracedProgram]
    """The model as traced, by number of samples."""
    buffers: Mapping[str, Tensor]
    """Those that the forward does not change, by path."""
    parts: Sequence[tuple[int, int]]
    """First and last-plus-one sample of each part of the batch whose loss is computed by itself."""
    batch: int

    @property
    def first(self) -> TracedProgram:
        """Return the model as traced for the fewest samples."""
        return self.programs[min(self.programs)]

    def known(self, program: TracedProgram) -> dict[str, bool]:
        """Return the fx nodes that depend on nothing else, with whether they depend on the batch."""
        inputs = {program.tensor_nodes[name] for name in program.inputs if name in program.tensor_nodes}
        fixed = {program.tensor_nodes[name] for name in program.constants if name in program.tensor_nodes}
        fixed |= {node for node, path in program.buffers.items() if path in self.buffers}
        found: dict[str, bool] = {}
        for node in program.fx_graph.nodes:
            if node.op == "placeholder" and node.name in inputs | fixed:
                found[node.name] = node.name in inputs
            elif node.op == "call_function" and not is_random(node) and all(
                    source.name in found for source in node.all_input_nodes):
                found[node.name] = any(found[source.name] for source in node.all_input_nodes)
        return found

    def evaluate(self, names: Sequence[str], inputs: Mapping[str, Tensor], part: tuple[int, int]) -> list[Tensor]:
        """Return the values of such nodes for one part of the batch."""
        first, last = part
        program = self.programs[last - first]
        rows = {name: item[first:last] if item.ndim and item.shape[0] == self.batch else item
                for name, item in inputs.items()}
        device = next(iter(rows.values())).device
        given = {program.tensor_nodes[key]: value for key, value in {**program.constants, **rows}.items()
                 if key in program.tensor_nodes}
        given |= {node: self.buffers[path] for node, path in program.buffers.items() if path in self.buffers}
        values: dict[fx.Node, Any] = {}
        for node in _leading_to(program, names):
            if node.op == "placeholder":
                values[node] = given[node.name].to(device)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                with torch.no_grad():
                    values[node] = node.target(*retarget(args, device), **retarget(kwargs, device))
        return [values[program.nodes[name]] for name in names]


def _leading_to(program: TracedProgram, names: Sequence[str]) -> list[fx.Node]:
    """Return nodes and all that they need, in the graph's order."""
    waiting = [program.nodes[name] for name in names]
    found = set(waiting)
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in found]
        found.update(new)
        waiting.extend(new)
    return [node for node in program.fx_graph.nodes if node in found]
