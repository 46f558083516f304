"""Is the loss of a batch the mean over its parts? A plan that cuts the batch needs that, and the example shows it.

The module is run on two neighbouring parts at once and on each of them, with gradients, in double precision where it
can be, with dropout switched off. A loss that is a sum, or a mean over words that are not padding, and a forward that
mixes samples, as contrastive losses do, differ by far more than rounding. Batch norm in training mixes samples too, as
it does under gradient accumulation on one device: where nothing else does, that is a note and no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.base.units import format_bytes
from weft.model.forward import autocast_off, checkpoints_noted

LOSS_TOLERANCE: Final = 1e-9
GRADIENT_TOLERANCE: Final = 1e-7
"""In double precision throughout."""
COARSER: Final = {torch.float64: 1.0, torch.float32: 1e4}
"""What tolerances are multiplied by where some operators are computed in another dtype whatever the model is given."""
WHOLLY_COARSE: Final = 30.0
"""What they are multiplied by besides where the model can only be run in its own dtype."""
MAX_FLOP: Final = {"cpu": 4e11, "cuda": 1e13}
"""Work that the check may take: about twenty seconds of one core, or of a GPU in double precision."""
FLOOR: Final = 1e-2
"""Gradients smaller than this part of the model's largest are compared on that scale."""
MEMORY_PART: Final = 0.5
"""Part of the free memory that it may take."""

UNCHECKED: Final = ("it was not checked that the loss is a mean over samples and that samples are not mixed ({}): "
                    "where that is not so, cutting the batch into parts changes the result")
BATCH_NORM: Final = "batch norm takes its statistics over {} samples where one device would take them over {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of the check; neither a problem nor a note if all is well."""

    problem: str = ""
    """Why the batch must not be cut, and what to do."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one sample takes, forward and backward, by the cost model."""

    flop: float
    saved_bytes: float


def check_parts(module: torch.nn.Module, inputs: Sequence[Tensor], parts: Sequence[tuple[int, int]], *, batch: int,
                work: Work, device: torch.device | None = None) -> Verdict:
    """Return whether cutting ``batch`` samples into ``parts``, (first, last-plus-one) each, changes the result.

    ``inputs`` are those of the whole batch. It is done on ``device`` (default: the module's own). Nothing of the module
    is changed.
    """
    if len(parts) < 2:
        return Verdict()
    (_, middle), (_, last) = parts[:2]
    device = device or next((item.device for item in module.parameters()), torch.device("cpu"))
    reason = too_much(module, work, last, device)
    if reason:
        return Verdict(note=UNCHECKED.format(reason))
    rows = [item[:last] if item.ndim and item.shape[0] == batch else item for item in inputs]
    rows = _varied(rows, last)
    cut = [[item[first:end] if item.ndim and item.shape[0] == last else item for item in rows]
           for first, end in ((0, middle), (middle, last))]
    weights = (middle / last, 1 - middle / last)
    return tried(lambda: _compare(_Runs(module, device), rows, cut, weights, sizes=(middle, last)), UNCHECKED, device)


def tried(check: Callable[[], Verdict], unchecked: str, device: torch.device) -> Verdict:
    """Return what ``check`` finds, with random numbers of its own, or the note ``unchecked`` with why it fails."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            return check()
        except Exception as problem:  # the model's own code, or memory: nothing is known then
            reason = f"{type(problem).__name__}: {str(problem)[:160]}".splitlines()[0].removesuffix(": ")
            return Verdict(note=unchecked.format(reason))


def too_much(module: torch.nn.Module, work: Work, num_samples: int, device: torch.device) -> str:
    """Return why the check cannot be done, or nothing."""
    parameters = list(module.parameters())
    if not parameters:
        return "it has no parameters"
    if any(item.is_meta for item in (*parameters, *module.buffers())):
        return "its parameters have no values yet"
    if 2 * num_samples * work.flop > MAX_FLOP.get(device.type, MAX_FLOP["cpu"]):
        return f"it would take {2 * num_samples * work.flop:.1e} operations"
    needed = 4 * 8 * sum(item.numel() for item in parameters) + 2 * num_samples * work.saved_bytes
    free = _free_bytes(device)
    if needed > MEMORY_PART * free:
        return f"it would need {format_bytes(int(needed))}, and {format_bytes(int(free))} are free"
    return ""


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        return float(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return math.inf


def _varied(rows: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the inputs with samples that differ: where an example is repeated, mixing them might not show.

    Numbers are made a little smaller from sample to sample, and whole numbers, which may be indices, are rolled along
    their dimensions, so that all stay values that the model knows.
    """
    per_sample = [item for item in rows if item.ndim and item.shape[0] == count]
    distinct = {tuple(hash(item[index].detach().cpu().numpy().tobytes()) for item in per_sample
                      if item.dtype != torch.bfloat16)  # which numpy does not know
                for index in range(count)}
    if len(distinct) == count or not per_sample:
        return list(rows)
    return [_vary(item) if item.ndim and item.shape[0] == count else item for item in rows]


def _vary(item: Tensor) -> Tensor:
    if item.is_floating_point():
        scale = torch.linspace(1.0, 0.5, item.shape[0], dtype=torch.float64, device=item.device)
        return (item * scale.view(-1, *[1] * (item.ndim - 1))).to(item.dtype)
    if item.ndim < 2:
        return item
    return torch.stack([row.roll(index, dims=-1) for index, row in enumerate(item)])


# ---- how far results are from those expected ------------------------------------------------------------------------
#
# The one measure of checks before a run, of verification, and of comparisons. The error of a tensor is the largest
# absolute difference over its elements, divided by the largest absolute value that is expected. For gradients the
# divisor is at least ``FLOOR`` times the largest value over all gradients of the model, since some are zero up to
# rounding (the bias of attention keys).


def least_divisor(gradients: Iterable[Tensor]) -> float:
    """Return what errors of these gradients are divided by at least."""
    return FLOOR * max((float(item.abs().max()) for item in gradients if item.numel()), default=0.0)


def relative_error(value: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Return the largest absolute difference over the largest absolute expected value (at least ``floor``).

    It is infinite where one of the values is, or is not a number: whether such values are right cannot be told.
    """
    if expected.numel() == 0:
        return 0.0
    value, expected = precise(value), precise(expected)
    difference = float((value - expected).abs().max())
    if not math.isfinite(difference):  # over an infinite divisor it would be no number, which passes for any
        return math.inf
    return difference / max(float(expected.abs().max()), floor, 1e-300)


def precise(tensor: Tensor) -> Tensor:
    """Return the tensor in double precision in the host's memory; complex numbers stay complex."""
    return tensor.to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


# ---- comparing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    loss: float
    parts_loss: float
    loss_error: float
    gradient_error: float
    worst: str
    unknown: str
    """What is not a finite number, so that nothing can be compared with it."""

    def is_within(self, coarseness: float) -> bool:
        """Return whether it is no more than rounding."""
        return (self.loss_error <= LOSS_TOLERANCE * coarseness
                and self.gradient_error <= GRADIENT_TOLERANCE * coarseness)


def _compare(runs: _Runs, rows: Sequence[Tensor], cut: Sequence[Sequence[Tensor]],
             weights: Sequence[float], *, sizes: tuple[int, int]) -> Verdict:
    run = runs.exact_run(rows)
    found = _difference(run, rows, cut, weights)
    if found.unknown or math.isinf(runs.coarseness):
        return Verdict(note=UNCHECKED.format(found.unknown or "it can only be run in half precision"))
    if found.is_within(runs.coarseness):
        return Verdict()
    if _draws(run, rows):
        return Verdict(note=UNCHECKED.format("its forward draws random numbers"))
    runs.fixes_norms = True
    if not _difference(run, rows, cut, weights).is_within(runs.coarseness):
        return Verdict(problem=_describe(found, sizes))
    return Verdict(note=BATCH_NORM.format(sizes[0], sizes[1]) + f": the loss of {sizes[1]} samples is {found.loss:.6g} "
                   f"at once and {found.parts_loss:.6g} in two parts")


def _describe(found: _Difference, sizes: tuple[int, int]) -> str:
    middle, last = sizes
    return (f"the plan cuts the batch, but the model's loss is not a mean over samples, or its forward mixes them: the "
            f"loss of {last} samples of the example is {found.loss:.6g}, the mean over its parts of {middle} and "
            f"{last - middle} is {found.parts_loss:.6g}, and the gradient of {found.worst!r} differs by "
            f"{found.gradient_error:.1%}. Use a plan with one micro-batch on one replica (--microbatches 1, a pipeline "
            "or tensor parallelism; no data parallelism), or make the loss a mean over samples. A later release will "
            "let models declare other reductions")


_Run = Callable[[Sequence[Tensor]], tuple[Tensor, dict[str, Tensor]]]
"""Returns the loss of some samples, and by name the tensors that gradients are wanted for."""


def _difference(run: _Run, rows: Sequence[Tensor], cut: Sequence[Sequence[Tensor]],
                weights: Sequence[float]) -> _Difference:
    loss, gradients = _gradients(run, rows)
    floor = max(least_divisor(gradients.values()), 1e-300)
    sizes = {name: max(float(item.abs().max()) if item.numel() else 0.0, floor) for name, item in gradients.items()}
    strange = next((name for name, item in gradients.items() if not item.isfinite().all()), "")
    total = 0.0
    for part, weight in zip(cut, weights, strict=True):
        value, found = _gradients(run, part)
        total += weight * float(value.double())
        for name, item in found.items():
            gradients[name] = gradients[name] - weight * item if name in gradients else -weight * item
    errors = {name: float(item.abs().max()) / sizes.get(name, floor) if item.isfinite().all() else math.inf
              for name, item in gradients.items() if item.numel()}
    worst = max(errors, key=lambda name: errors[name], default="")
    expected = float(loss.double())
    unknown = (f"its loss on the example is {expected}" if not math.isfinite(expected) else
               f"the gradient of {strange!r} on the example is not finite" if strange else "")
    return _Difference(loss=expected, parts_loss=total, worst=worst, gradient_error=errors.get(worst, 0.0),
                       unknown=unknown, loss_error=abs(total - expected) / max(abs(expected), 1e-12))


def _gradients(run: _Run, rows: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.enable_grad():
        loss, wanted = run(rows)
        return loss.detach(), gradients_of(loss, wanted)


def gradients_of(loss: Tensor, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of these tensors by name, of those that the loss depends on."""
    with autocast_off():  # as after a forward in a script
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: item.detach() for name, item in zip(wanted, found, strict=True) if item is not None}


def _draws(run: _Run, rows: Sequence[Tensor]) -> bool:
    """Return whether the loss is another when other random numbers are drawn."""
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(float(run(rows)[0].double()))
    return abs(losses[0] - losses[1]) > 1e-6 * abs(losses[0])


class _Runs:
    """A module's forward in double precision, or as it is where it cannot be run so; its buffers stay as they are."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self.fixes_norms = False
        """Batch norms take no statistics."""
        self.coarseness = COARSER[torch.float64]
        """How much larger rounding errors may be than in double precision."""

    def exact_run(self, rows: Sequence[Tensor]) -> _Run:
        """Return what runs the module with the least rounding."""
        try:
            with torch.no_grad():
                loss, _ = self._in_double(rows)
            is_double = bool(loss.isfinite())
        except Exception:  # its code asks for certain dtypes
            is_double = False
        if is_double:
            return self._in_double
        self.coarseness = WHOLLY_COARSE * max(
            COARSER.get(item.dtype, math.inf) for item in self._module.parameters() if item.is_floating_point())
        return self._as_it_is

    def _in_double(self, rows: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        module, device = self._module, self._device
        tensors = {name: doubled(item.detach().to(device)).clone().requires_grad_(item.requires_grad)
                   for name, item in module.named_parameters()}
        buffers = {name: doubled(item.to(device)).clone() for name, item in module.named_buffers()}
        given = tuple(doubled(item.to(device)) for item in rows)
        with Settled(self.fixes_norms) as settled, checkpoints_noted():  # in the backward, parameters are others
            loss = _loss(torch.func.functional_call(module, {**tensors, **buffers}, given))
        self.coarseness = max(self.coarseness, settled.coarseness)
        return loss, {name: item for name, item in tensors.items() if item.requires_grad}

    def _as_it_is(self, rows: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        module = self._module
        tensors = dict(module.named_parameters())
        device = next(iter(tensors.values())).device
        with kept_buffers(module), Settled(self.fixes_norms), checkpoints_noted():
            loss = _loss(module(*(item.to(device) for item in rows)))
        return loss, {name: item for name, item in tensors.items() if item.requires_grad}


def doubled(item: Tensor) -> Tensor:
    """Return the tensor in double precision; whole numbers stay as they are."""
    return item.to(torch.complex128) if item.is_complex() else item.double() if item.is_floating_point() else item


def _loss(result: Any) -> Tensor:
    """Return the first tensor of what a forward returns."""
    return next(item for item in pytree.tree_leaves(result) if isinstance(item, Tensor))


@contextmanager
def kept_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Give buffers back the values that they had."""
    kept = {name: item.detach().clone() for name, item in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, item in module.named_buffers():
                if not torch.equal(item, kept[name]):  # what is as it was may be needed by the backward
                    item.copy_(kept[name])


_DROPOUTS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
                    "feature_dropout", "dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_")


class Settled(torch.overrides.TorchFunctionMode):
    """Switches off dropout, of modules and traced graphs, and, if asked to, the statistics that batch norms take."""

    def __init__(self, fixed_norms: bool = False) -> None:
        super().__init__()
        self._fixed_norms = fixed_norms
        self.coarseness = COARSER[torch.float64]
        """By the coarsest dtype of any result."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the function, or what stands for it."""
        given = dict(kwargs or {})
        name = getattr(function, "__name__", "").partition(".")[0]  # of an operator's overload: dropout.default
        if name in _DROPOUTS:
            return args[0] if args else given["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            given |= {} if len(args) > 4 else {"dropout_p": 0.0}
        if name == "batch_norm" and self._fixed_norms:
            return _plain_scale(*args, **given)
        result = function(*args, **given)
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype != torch.float64:
            self.coarseness = max(self.coarseness, COARSER.get(result.dtype, math.inf))
        return result


def _plain_scale(input: Tensor, running_mean: Any = None, running_var: Any = None,  # noqa: A002 - PyTorch's names
                 weight: Tensor | None = None, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return what a batch norm with mean 0 and variance 1 gives."""
    shape = (1, -1, *[1] * (input.ndim - 2))
    scaled = input if weight is None else input * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)
