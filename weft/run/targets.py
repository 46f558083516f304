"""Numbers taken over a whole batch that a loss is divided by: the parts of a batch have others.

A mean over the targets that are not padding is a mean over samples only where all parts of the batch have as many. Cut
into parts, each part's loss is divided by its own number, so the mean over the parts is another number than the loss
of the batch. ``cross_entropy`` and ``nll_loss`` count targets inside (``ignore_index``, class weights); code of one's
own does it in the open, as ``(losses * mask).sum() / mask.sum()``. The example may have no padding, so batches are
looked at as they come, before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, fx

from weft.base.errors import InputError
from weft.model.capture import source_line
from weft.model.trace import TracedModel
from weft.run.from_batch import FromBatch

aten = torch.ops.aten
MEAN: Final = 1
LOSSES: Final = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default,
                 aten.nll_loss2d.default)
_SCALING: Final = ("aten.mul.", "aten.div.", "aten.true_divide.", "aten.divide.", "aten.multiply.")
_CLOSE: Final = 1e-6
_CURE: Final = ("the mean over parts is not the loss of the batch. Give all samples as many targets, divide by a fixed "
                "number in the forward, or use a plan with one micro-batch on one replica")


class BatchCheck(Protocol):
    """What is looked at in every batch."""

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` if the batch must not be cut as the plan does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTargets:
    """The targets of one loss operator that come from the batch alone."""

    values: FromBatch
    node: str
    """The fx node of the targets."""
    weights: str | None
    """That of the weights of classes, where there are any."""
    ignored: int

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` if the parts of the batch have different numbers of targets for each sample."""
        parts = self.values.parts
        counts = [self._count(inputs, part) for part in parts]
        if not _are_equal([count / (last - first) for count, (first, last) in zip(counts, parts, strict=True)]):
            what = "of them" if self.weights is None else "of them, each counted by the weight of its class"
            raise InputError(f"the loss is a mean over the targets that are not {self.ignored}, but the {len(parts)} "
                             f"parts into which the plan cuts the batch have {_shown(counts)} {what}: {_CURE}")

    def _count(self, inputs: Mapping[str, Tensor], part: tuple[int, int]) -> float:
        target, *weights = self.values.evaluate([self.node, *([self.weights] if self.weights else [])], inputs, part)
        counted = target != self.ignored
        if not weights:
            return int(counted.sum())
        return float((weights[0].double()[target.clamp(0, len(weights[0]) - 1)] * counted).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNumber:
    """A number that is taken over all samples of the batch, and that something is multiplied with or divided by."""

    values: FromBatch
    node: str
    place: str

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` if the parts of the batch have different ones."""
        parts = self.values.parts
        found = self.found(inputs, parts)
        sizes = [last - first for first, last in parts]
        if not any(_are_equal([value * size**power for value, size in zip(found, sizes, strict=True)])
                   for power in (0, -1, 1)):  # a mean over samples, a count, or what is divided by one
            raise InputError(f"the forward divides or multiplies by a number that it takes over all samples of the "
                             f"batch{self.place}, which is {_shown(found)} in the {len(parts)} parts into which the "
                             f"plan cuts the batch: {_CURE}")

    def found(self, inputs: Mapping[str, Tensor], parts: Sequence[tuple[int, int]]) -> list[float]:
        """Return the number for each of some parts."""
        return [float(self.values.evaluate([self.node], inputs, part)[0]) for part in parts]


def counted_targets(trace: Callable[[int], TracedModel], parts: Sequence[tuple[int, int]], *,
                    batch: int, example: Mapping[str, Tensor] | None = None) -> tuple[BatchCheck, ...]:
    """Return what to look at in every batch; nothing where the batch is not cut into ``parts``.

    ``trace`` gives the model traced for a number of samples. ``example`` is a batch whose first two parts have been
    found to have the mean of their losses: a number that differs there does no harm.
    """
    if len(parts) < 2:
        return ()
    sizes = sorted({last - first for first, last in parts})
    traced = trace(sizes[0])
    buffers = {name: item for name, item in traced.source.build().named_buffers(remove_duplicate=False)
               if not item.is_meta and name not in traced.program.buffer_updates}
    smallest = FromBatch(programs={sizes[0]: traced.program}, buffers=buffers, parts=parts, batch=batch)
    known = smallest.known(traced.program)
    targets, numbers = _targets(traced.program.fx_graph, known), _numbers(traced.program.fx_graph, known, sizes[0])
    if not targets and not numbers:
        return ()
    values = FromBatch(programs={size: trace(size).program for size in sizes}, buffers=buffers, parts=parts,
                       batch=batch)
    found = [BatchNumber(values=values, node=node.name, place=f" ({line})" if (line := source_line(node)) else "")
             for node in numbers]
    return (*(CountedTargets(values=values, node=target.name, weights=weights and weights.name, ignored=ignored)
              for target, weights, ignored in targets),
            *(item for item in found if example is None or _are_equal(item.found(example, parts[:2]))))


def _targets(graph: fx.Graph, known: Mapping[str, bool]) -> list[tuple[fx.Node, fx.Node | None, int]]:
    """Return the targets of means over some of them that depend on the batch alone, with weights of classes."""
    found = []
    for node in graph.nodes:
        if node.target not in LOSSES:
            continue
        settings = _settings(node)
        target, weights = settings["target"], settings["weight"]
        if settings["reduction"] == MEAN and not target.meta["val"].is_floating_point() and known.get(target.name):
            is_known = weights is not None and weights.name in known
            found.append((target, weights if is_known else None, settings["ignore_index"]))
    return found


def _settings(node: fx.Node) -> dict[str, Any]:
    arguments = node.target._schema.arguments
    given = dict(zip([argument.name for argument in arguments], node.args, strict=False)) | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def _numbers(graph: fx.Graph, known: Mapping[str, bool], num_samples: int) -> list[fx.Node]:
    """Return single numbers that operators make of the batch alone and that others are scaled with."""
    found = {node for node in graph.nodes if node.op == "call_function" and known.get(node.name)
             and _is_number(node.meta.get("val"), num_samples)}
    return [node for node in graph.nodes if node in found and any(
        user not in found and str(user.target).startswith(_SCALING) for user in node.users)]


def _is_number(value: Any, num_samples: int) -> bool:
    return (isinstance(value, Tensor) and not value.is_complex() and value.numel() == 1
            and (value.ndim == 0 or num_samples > 1))


def _are_equal(values: Sequence[float]) -> bool:
    """Return whether numbers are the same up to rounding; none is like one that is not a number."""
    return all(math.isclose(value, values[0], rel_tol=_CLOSE) for value in values[1:])


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:8]) + (", ..." if len(values) > 8 else "")
