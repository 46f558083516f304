"""Targets that a loss leaves out: the mean over those that count is a mean over samples only where all have as many.

``cross_entropy`` and ``nll_loss`` average over the targets that are not ``ignore_index`` (padding). Cut into parts,
each part's loss is divided by its own number of targets, so the mean over the parts is another number than the loss of
the batch. The example may have no padding, so batches are looked at as they come, before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from weft.base.errors import InputError
from weft.model.randomness import is_random
from weft.model.trace import TracedModel, TracedProgram, retarget

aten = torch.ops.aten
MEAN: Final = 1
LOSSES: Final = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default,
                 aten.nll_loss2d.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTargets:
    """The targets of one loss operator that come from the batch alone."""

    programs: Mapping[int, TracedProgram]
    """The model as traced, by number of samples."""
    node: str
    """The fx node of the targets."""
    ignored: int
    parts: Sequence[tuple[int, int]]
    """First and last-plus-one sample of each part of the batch whose loss is computed by itself."""
    batch: int

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` if the parts of the batch have different numbers of targets for each sample."""
        counts = torch.stack([self._count(inputs, first, last) for first, last in self.parts]).tolist()
        rates = [count / (last - first) for count, (first, last) in zip(counts, self.parts, strict=True)]
        if max(rates) != min(rates):
            shown = ", ".join(map(str, counts[:8])) + (", ..." if len(counts) > 8 else "")
            raise InputError(
                f"the loss is a mean over the targets that are not {self.ignored}, but the {len(counts)} parts into "
                f"which the plan cuts the batch have {shown} of them: the mean over parts is not the loss of the "
                "batch. Give all samples as many targets, divide by a fixed number in the forward, or use a plan with "
                "one micro-batch on one replica")

    def _count(self, inputs: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        rows = {name: item[first:last] if item.ndim and item.shape[0] == self.batch else item
                for name, item in inputs.items()}
        return (_evaluate(self.programs[last - first], self.node, rows) != self.ignored).sum().cpu()


def counted_targets(trace: Callable[[int], TracedModel], parts: Sequence[tuple[int, int]], *,
                    batch: int) -> tuple[CountedTargets, ...]:
    """Return the targets of all losses that leave some out; none where the batch is not cut into ``parts``.

    ``trace`` gives the model traced for a number of samples.
    """
    if len(parts) < 2:
        return ()
    sizes = sorted({last - first for first, last in parts})
    nodes = {node.name: ignored for node, ignored in _targets(trace(sizes[0]).program)}
    if not nodes:
        return ()
    programs = {size: trace(size).program for size in sizes}
    return tuple(CountedTargets(programs=programs, node=name, ignored=ignored, parts=parts, batch=batch)
                 for name, ignored in nodes.items())


def _targets(program: TracedProgram) -> list[tuple[fx.Node, int]]:
    """Return the nodes of targets that depend on inputs alone, with the value that is left out."""
    found = []
    for node in program.fx_graph.nodes:
        if node.target not in LOSSES:
            continue
        settings = _settings(node)
        target = settings["target"]
        if settings["reduction"] == MEAN and not target.meta["val"].is_floating_point() and _needs(program, target):
            found.append((target, settings["ignore_index"]))
    return found


def _settings(node: fx.Node) -> dict[str, Any]:
    arguments = node.target._schema.arguments
    given = dict(zip([argument.name for argument in arguments], node.args, strict=False)) | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def _needs(program: TracedProgram, node: fx.Node) -> list[fx.Node]:
    """Return the nodes that lead to one, in order; none if it depends on more than inputs and constants."""
    known = {program.tensor_nodes[name] for name in (*program.inputs, *program.constants)}
    found, waiting = {node}, [node]
    while waiting:
        item = waiting.pop()
        if (item.op == "placeholder" and item.name not in known) or (item.op == "call_function" and is_random(item)):
            return []
        new = [source for source in item.all_input_nodes if source not in found]
        found.update(new)
        waiting.extend(new)
    return [item for item in program.fx_graph.nodes if item in found]


def _evaluate(program: TracedProgram, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the value of a node that depends on inputs and constants alone."""
    device = next(iter(inputs.values())).device
    given = {program.tensor_nodes[key]: value.to(device) for key, value in {**program.constants, **inputs}.items()
             if key in program.tensor_nodes}
    values: dict[fx.Node, Any] = {}
    for node in _needs(program, program.nodes[name]):
        if node.op == "placeholder":
            values[node] = given[node.name]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*retarget(args, device), **retarget(kwargs, device))
    result: Tensor = values[program.nodes[name]]
    return result
