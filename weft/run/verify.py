"""Does a run equal one device? The original module, eager, on the whole batch, against what the ranks computed.

Both start from the same parameters and inputs. The error of a gradient is the largest absolute difference over its
elements, divided by the largest absolute value of the reference gradient; that divisor is at least ``FLOOR`` times the
largest absolute value over all gradients of the model, since some gradients are zero up to rounding (the bias of
attention keys). The error of the loss is relative to the loss.

A model that takes statistics over the samples it sees (batch norm in training) gives other results for micro-batches
than for the batch, on one device too: for such a model the reference takes the same micro-batches, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.run.result import Verification

FLOOR: Final = 1e-2
"""Gradients smaller than this part of the model's largest are compared on that scale."""
TOLERANCES: Final = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest error that counts as equal, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one device computes."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]


def reference_run(module: torch.nn.Module, inputs: Sequence[Tensor], *, training: bool, batch: int,
                  parts: Sequence[tuple[int, int]] = ()) -> Reference:
    """Return the outputs and gradients of the module on the whole batch.

    With ``parts``, (first, last-plus-one) sample of each, the loss and gradients are the weighted sums over those.
    """
    if not training:
        with torch.no_grad():
            return Reference(outputs=_outputs(module, inputs), gradients={})
    loss = torch.zeros((), dtype=torch.float64)
    for first, last in parts or [(0, batch)]:
        rows = [item[first:last] if item.ndim and item.shape[0] == batch else item for item in inputs]
        weighted = _outputs(module, rows)[0] * ((last - first) / batch)
        weighted.backward()
        loss += weighted.detach().double().cpu()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return Reference(outputs=(loss,), gradients=gradients)


def _outputs(module: torch.nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(item for item in pytree.tree_leaves(module(*inputs)) if isinstance(item, Tensor))


def verify_training(reference: Reference, *, loss: float, gradients: Iterable[tuple[str, int, Tensor]],
                    dtype: torch.dtype) -> Verification:
    """Return how far the loss and the gradients, given as (name, rank, value), are from the reference."""
    expected = float(reference.outputs[0].double())
    scale = max((float(item.abs().max()) for item in reference.gradients.values() if item.numel()), default=0.0)
    worst, largest, count, seen = "", 0.0, 0, set()
    for name, rank, value in gradients:
        if name not in reference.gradients:
            continue
        error = relative_error(value, reference.gradients[name], floor=FLOOR * scale)
        count += 1
        seen.add(name)
        if not error <= largest:
            worst, largest = f"{name} (rank {rank})", error
    for name in sorted(reference.gradients.keys() - seen):
        if float(reference.gradients[name].abs().max()) > 0:
            worst, largest = f"{name} (on no rank)", float("inf")
    tolerance = TOLERANCES[dtype]
    loss_error = abs(loss - expected) / max(abs(expected), 1e-300)
    return Verification(passed=max(loss_error, largest) <= tolerance, tolerance=tolerance, loss_error=loss_error,
                        gradient_error=largest, worst=worst, num_gradients=count, reference_loss=expected)


def verify_inference(reference: Reference, outputs: Mapping[int, Tensor], *, dtype: torch.dtype) -> Verification:
    """Return how far the model's outputs, by position, are from the reference."""
    errors = {position: relative_error(value, reference.outputs[position]) for position, value in outputs.items()}
    worst = max(errors, key=lambda position: errors[position])
    return Verification(passed=errors[worst] <= TOLERANCES[dtype], tolerance=TOLERANCES[dtype],
                        loss_error=errors[worst], gradient_error=0.0, worst=f"output {worst}", num_gradients=0,
                        reference_loss=0.0)


def relative_error(value: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Return the largest absolute difference over the largest absolute expected value (at least ``floor``)."""
    if expected.numel() == 0:
        return 0.0
    value, expected = value.double().cpu(), expected.double().cpu()
    difference = float((value - expected).abs().max())
    if difference != difference:
        return float("inf")
    return difference / max(float(expected.abs().max()), floor, 1e-300)
