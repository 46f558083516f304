"""Does the traced graph compute what the module does? The example shows it.

Code may ask whether it is being traced and take another way then: some of transformers' models make a causal mask while
they are exported and none in a plain call. So the module and its graph are run once on the example, with the same
random numbers, in the model's own dtype. Both call almost the same kernels: what differs by more than a few of the last
digits is compared with what rounding does to the module itself, that is, with the module in double precision.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.model import parts
from weft.model.forward import autocast_off, checkpoints_noted
from weft.model.graph import Graph
from weft.model.parts import Settled, Verdict, Work, doubled, kept_buffers
from weft.model.trace import TracedModel, run_program

TOLERANCES: Final = {"float64": 1e-10, "complex128": 1e-10, "float32": 1e-5, "complex64": 1e-5}
"""What counts as equal, by the least precise dtype of the graph."""
COARSE_TOLERANCE: Final = 1e-3
"""The same for all other dtypes."""
MOST_TIMES_ROUNDING: Final = 3.0
"""The graph may be so many times as far from the module as rounding brings the module from double precision."""
UNKNOWN_ROUNDING: Final = 30.0
"""What rounding is taken for where that is not known, as a multiple of the tolerance."""
MOST_PLACES: Final = 6
"""Lines of code that are named in a message."""
SEED: Final = 1
_QUESTIONS: Final = ((torch.compiler, "is_exporting"), (torch.compiler, "is_compiling"), (torch.jit, "is_tracing"))

UNCHECKED: Final = ("it was not checked that the traced graph computes what the module does ({}): a forward that takes "
                    "another way while it is traced would give other results")
_OTHER_WAY: Final = (
    "The forward takes another way while it is traced than in a plain call: its code, or that of a library, asks "
    "whether it is traced ({}). Let it compute the same in both: without torch.compiler.is_exporting and is_compiling; "
    "for a model of transformers try attn_implementation=\"eager\", or give token_type_ids as an input; or try "
    "eval mode")
_NOWHERE: Final = "no such place was found; if there is none, it is a fault of Weft"
_CHANGING: Final = (
    "The module itself gives something else each time it is called: it draws numbers from Python's random or numpy, or "
    "keeps something outside its buffers, and a trace has what it did once. Draw them with torch, or keep it in a "
    "buffer; or try eval mode")


def graph_work(graph: Graph) -> Work:
    """Return what one sample of a traced model takes, forward and backward."""
    saved = 2 * float(graph.tensor_bytes[graph.is_saved].sum()) + float(graph.saved_inside_bytes.sum())
    return Work(flop=3 * float(graph.flops.sum()) / graph.batch, saved_bytes=saved / graph.batch)


def check_trace(traced: TracedModel, module: torch.nn.Module, inputs: Sequence[Tensor], *,
                device: torch.device | None = None) -> Verdict:
    """Return whether the traced graph gives what ``module`` gives for ``inputs``, as many samples as were traced.

    In training the loss and the gradients are compared, in inference all outputs. It is done on ``device`` (default:
    the module's own). Nothing of the module is changed.
    """
    own = next((item.device for item in module.parameters()), torch.device("cpu"))
    device = device or own
    reason = parts.too_much(module, graph_work(traced.graph), traced.graph.batch, device)
    if reason:
        return Verdict(note=UNCHECKED.format(reason))
    example = _Example(traced, module, inputs, device=device, is_moved=device != own)
    kinds = {name for name in traced.graph.tensor_dtypes if "float" in name or "complex" in name}
    tolerance = max((TOLERANCES.get(name, COARSE_TOLERANCE) for name in kinds), default=0.0)
    return parts.tried(lambda: _compare(example, tolerance), UNCHECKED, device)


def _compare(example: _Example, tolerance: float) -> Verdict:
    plain = example.plain()
    if not plain.is_finite:
        return Verdict(note=UNCHECKED.format("what it gives on the example is not finite"))
    if _difference(plain, example.graph()).largest <= tolerance:
        return Verdict()
    with Settled():  # what is drawn for dropout in another order is not an error
        plain = example.plain()
        found = _difference(plain, example.graph())
        if found.largest <= tolerance:
            return Verdict()
        if _difference(plain, example.plain()).largest > UNKNOWN_ROUNDING * tolerance:
            return Verdict(problem=_describe(found, _CHANGING))
        if _draws(example, tolerance):
            return Verdict(note=UNCHECKED.format("its forward draws random numbers"))
        if found.largest <= MOST_TIMES_ROUNDING * _rounding(example, plain, tolerance):
            return Verdict()
    asked = example.askers()
    return Verdict(problem=_describe(found, _OTHER_WAY.format(f"in {', '.join(asked)}" if asked else _NOWHERE)))


def _draws(example: _Example, tolerance: float) -> bool:
    """Return whether the module or its graph gives something else when other random numbers are drawn."""
    return any(_difference(run(), run(seed=SEED + 1)).largest > tolerance for run in (example.plain, example.graph))


def _rounding(example: _Example, plain: _Results, tolerance: float) -> float:
    """Return how far the module is from itself in double precision, or a guess where it cannot be run so."""
    try:
        found = _difference(example.plain(in_double=True), plain).largest
    except Exception:  # its code asks for certain dtypes
        found = math.inf
    return found if math.isfinite(found) else UNKNOWN_ROUNDING * tolerance


def _describe(found: _Difference, why: str) -> str:
    return f"the traced graph computes something else than the module: on the example {found.what}. {why}"


# ---- differences ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    outputs: tuple[Tensor, ...]
    """In training the loss alone."""
    gradients: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        """Return whether all numbers are."""
        return all(bool(item.isfinite().all()) for item in (*self.outputs, *self.gradients.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    largest: float
    what: str


def _difference(expected: _Results, found: _Results) -> _Difference:
    """Return how far results are from those expected, each relative to its largest value."""
    if len(expected.outputs) != len(found.outputs):
        return _Difference(largest=math.inf, what=f"the module has {len(expected.outputs)} outputs, the graph "
                           f"{len(found.outputs)}")
    errors = {f"output {index}": _error(value, item)
              for index, (value, item) in enumerate(zip(expected.outputs, found.outputs, strict=True))}
    what = (f"the module's loss is {float(expected.outputs[0]):.6g} and the graph's {float(found.outputs[0]):.6g}"
            if expected.gradients else f"{max(errors, key=errors.__getitem__)} differs by {max(errors.values()):.1%}")
    floor = parts.least_divisor(expected.gradients.values())
    gradients = {name: _error(expected.gradients.get(name, torch.zeros_like(item)), item, floor=floor)
                 for name, item in found.gradients.items()}
    gradients |= {name: 1.0 for name, item in expected.gradients.items()
                  if name not in gradients and bool(item.any())}
    if gradients:
        worst = max(gradients, key=gradients.__getitem__)
        what += f", and the gradient of {worst!r} differs by {gradients[worst]:.1%}"
    return _Difference(largest=max((*errors.values(), *gradients.values()), default=0.0), what=what)


def _error(expected: Tensor, found: Tensor, *, floor: float = 0.0) -> float:
    if expected.shape != found.shape:
        return math.inf
    if expected.numel() and not (expected.is_floating_point() or expected.is_complex()):
        return float((expected != found).double().mean())
    return parts.relative_error(found, expected, floor=floor)


# ---- runs -----------------------------------------------------------------------------------------------------------


class _Example:
    """A module, its graph and an example, for both in turn."""

    def __init__(self, traced: TracedModel, module: torch.nn.Module, inputs: Sequence[Tensor], *, device: torch.device,
                 is_moved: bool) -> None:
        self._program, self._module = traced.program, module
        self._is_training, self._device, self._is_moved = traced.source.mode == "training", device, is_moved
        self._inputs = inputs

    def plain(self, *, seed: int = SEED, in_double: bool = False) -> _Results:
        """Return what the module gives, in double precision if asked to."""
        change = doubled if in_double else _as_it_is
        tensors, given = self._parameters(change), self._given(change)
        with self._seeded(seed), kept_buffers(self._module), checkpoints_noted():
            if not (in_double or self._is_moved):
                return self._results(self._module(*given), tensors)
            buffers = {name: change(item.to(self._device)).clone() for name, item in self._module.named_buffers()}
            return self._results(torch.func.functional_call(self._module, {**tensors, **buffers}, given), tensors)

    def graph(self, *, seed: int = SEED) -> _Results:
        """Return what the traced graph gives."""
        tensors = self._parameters(_as_it_is)
        buffers = {name: item.to(self._device) for name, item in self._module.named_buffers()}
        with self._seeded(seed), autocast_off():
            result = run_program(self._program, {**tensors, **buffers}, self._given(_as_it_is))
            return self._results(result, tensors)

    def askers(self) -> tuple[str, ...]:
        """Return some places in the module's code, as ``file.py:12``, that ask whether it is being traced."""
        with _askers_noted() as found:
            self.plain()
        return tuple(found)[:MOST_PLACES]

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        torch.manual_seed(seed)
        with torch.set_grad_enabled(self._is_training):
            yield

    def _given(self, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        """Return inputs that may be changed."""
        return tuple(change(item.to(self._device)).clone() for item in self._inputs)

    def _parameters(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the parameters by name, or copies where they must be moved or changed."""
        own = dict(self._module.named_parameters())
        if change is _as_it_is and not self._is_moved:
            return dict(own.items())
        return {name: change(item.detach().to(self._device)).clone().requires_grad_(item.requires_grad)
                for name, item in own.items()}

    def _results(self, result: Any, tensors: Mapping[str, Tensor]) -> _Results:
        outputs = [item for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]
        if not self._is_training:
            return _Results(outputs=tuple(item.detach() for item in outputs), gradients={})
        wanted = {name: item for name, item in tensors.items() if item.requires_grad}
        return _Results(outputs=(outputs[0].detach(),), gradients=parts.gradients_of(outputs[0], wanted))


def _as_it_is(item: Tensor) -> Tensor:
    return item


@contextmanager
def _askers_noted() -> Iterator[dict[str, None]]:
    """Note the lines that ask whether they are being traced while the body runs."""
    found: dict[str, None] = {}

    def noting(original: Callable[[], bool]) -> Callable[[], bool]:
        def ask() -> bool:
            _note_line(found, sys._getframe(1))
            return original()
        return ask

    with ExitStack() as stack:
        for owner, name in _QUESTIONS:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, noting(original))
        yield found


def _note_line(found: dict[str, None], frame: FrameType) -> None:
    """Note the line that wants to know: functions such as ``is_tracing`` only pass the answer on."""
    while frame.f_back is not None and frame.f_code.co_name.startswith("is_"):
        frame = frame.f_back
    if "/torch/" not in frame.f_code.co_filename:
        found[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] = None
