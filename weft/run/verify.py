"""Does a run equal one device? The original module, eager, on the whole batch, against what the ranks computed.

Both start from the same parameters and inputs. Errors are those of ``weft.model.differences``; that of the loss is
relative to the loss.

A model that takes statistics over the samples it sees (batch norm in training) gives other results for micro-batches
than for the batch, on one device too: for such a model the reference takes the same micro-batches, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.model.differences import least_divisor, relative_error
from weft.run.grouped_products import GroupedProducts
from weft.run.parameters import Parameters
from weft.run.result import Verification

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
    with GroupedProducts():
        results = module(*inputs)
    return tuple(item for item in pytree.tree_leaves(results) if isinstance(item, Tensor))


def verify_training(reference: Reference, *, loss: float, gradients: Iterable[tuple[str, int, Tensor]],
                    dtype: torch.dtype) -> Verification:
    """Return how far the loss and the gradients, given as (name, rank, value), are from the reference."""
    expected = float(reference.outputs[0].double())
    floor = least_divisor(reference.gradients.values())
    worst, largest, count, seen = "", 0.0, 0, set()
    for name, rank, value in gradients:
        if name not in reference.gradients:
            continue
        error = relative_error(value, reference.gradients[name], floor=floor)
        count += 1
        seen.add(name)
        if not error <= largest:
            worst, largest = f"{name} (rank {rank})", error
    for name in sorted(reference.gradients.keys() - seen):
        if float(reference.gradients[name].abs().max()) > 0:
            worst, largest = f"{name} (on no rank)", float("inf")
    tolerance, strange = TOLERANCES[dtype], _strange(reference)
    reason = f"{strange} in one process as well, and what is not finite cannot be compared" if strange else ""
    loss_error = abs(loss - expected) / max(abs(expected), 1e-300)
    return Verification(passed=max(loss_error, largest) <= tolerance, tolerance=tolerance, loss_error=loss_error,
                        gradient_error=largest, worst=worst, num_gradients=count, reference_loss=expected,
                        reason=reason)


def _strange(reference: Reference) -> str:
    """Return what in it is not finite."""
    loss = float(reference.outputs[0].double())
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    name = next((name for name, item in reference.gradients.items() if not item.isfinite().all()), None)
    return "" if name is None else f"the gradient of {name!r} is not finite"


def verify_inference(reference: Reference, outputs: Mapping[int, Tensor], *, dtype: torch.dtype) -> Verification:
    """Return how far the model's outputs, by position, are from the reference."""
    errors = {position: relative_error(value, reference.outputs[position]) for position, value in outputs.items()}
    worst = max(errors, key=lambda position: errors[position])
    return Verification(passed=errors[worst] <= TOLERANCES[dtype], tolerance=TOLERANCES[dtype],
                        loss_error=errors[worst], gradient_error=0.0, worst=f"output {worst}", num_gradients=0,
                        reference_loss=0.0)


def copy_gradients(parameters: Parameters) -> dict[str, Tensor]:
    """Return copies of all gradients of a rank, by parameter."""
    return {name: parameters.gradient(name).detach().clone()
            for name, tensor in parameters.tensors.items() if tensor.requires_grad}
