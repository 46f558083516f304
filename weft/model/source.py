"""Where a model comes from: a function in the user's file, a name from the zoo, an ONNX file or a graph file.

``resolve_model`` turns what the user typed into a ``ModelSource``, which can build the module as often as needed (each
rank of a run builds its own) and make inputs for it, or into a ``Graph`` where the file has no module behind it:

    path/to/file.py:function    the function returns (module, example_inputs); it may take batch, seed and mode
    path/to/file.py:function:in_eval_mode   the same; even for training the module is put in eval mode
    gpt2:layers=4,seq=128       a name from ``weft.model.zoo``, with sizes changed
    model.onnx                  an ONNX file, as a Graph
    graph.json, graph.json.gz   a graph file, as a Graph

The user's file is executed, because the user named it on the command line; no file that Weft reads names another.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.errors import ModelError
from weft.model.graph import Graph
from weft.model.graph_file import load_graph
from weft.model.onnx import load_onnx
from weft.model.zoo import DTYPES, Mode, find_model, is_mixed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_IN_EVAL_MODE: Final = "in_eval_mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that can be built again and again, always the same; see ``resolve_model``."""

    name: str
    """For people and files."""
    spec: str
    """What ``resolve_model`` takes in another process for the same model (with the same batch, mode and dtype)."""
    batch: int
    """Samples per step unless asked otherwise."""
    mode: Mode
    """``training``: the forward returns the loss first; ``inference``: the outputs."""
    builder: Callable[[Mode], torch.nn.Module]
    """Makes the module."""
    sampler: Callable[[Mode, int, int], tuple[Tensor, ...]]
    """Makes inputs for a batch size and a seed."""
    in_eval_mode: bool = False
    """Even for training the module is put in eval mode."""
    dtype: str | None = None
    """Floating-point parameters, buffers and inputs are converted to it; None leaves them as they are. Complex ones
    get its precision, single precision at least."""

    def build(self) -> torch.nn.Module:
        """Return the module, in train or eval mode; zoo models have their parameters on the meta device."""
        module = self.builder(self.mode)
        module.train(self.mode == "training" and not self.in_eval_mode)
        if self.dtype is not None:  # unlike module.to this leaves complex numbers complex
            dtype = self._torch_dtype()
            module._apply(lambda tensor: _as_dtype(tensor, dtype))
        return under_autocast(module, self.autocast) if self.autocast is not None else module

    def inputs(self, batch: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
        """Return inputs of ``batch`` samples (default: the source's own), the same for the same seed."""
        wanted = self.batch if batch is None else batch
        if wanted < 1:
            raise ModelError(f"batch must be 1 or more, not {wanted}")
        tensors = self.sampler(self.mode, wanted, seed)
        if self.dtype is None:
            return tensors
        dtype = self._torch_dtype()
        return tuple(_as_dtype(tensor, dtype) for tensor in tensors)

    def with_mode(self, mode: Mode) -> ModelSource:
        """Return this source for training or for inference."""
        return replace(self, mode=mode)

    def with_dtype(self, dtype: str | None) -> ModelSource:
        """Return this source with another floating-point dtype (``"float64"``, ``"bf16"``, ...)."""
        if dtype is not None and dtype not in DTYPES:
            raise ModelError(f"unknown dtype {dtype!r}: write float32, float64, bfloat16, bfloat16-mixed or float16")
        return replace(self, dtype=None if dtype is None else DTYPES[dtype])

    @property
    def autocast(self) -> str | None:
        """Return the dtype that a mixed model's forward computes in under ``torch.autocast``."""
        return None if self.dtype is None or not is_mixed(self.dtype) else self.dtype.partition("-")[0]

    def _torch_dtype(self) -> torch.dtype:
        import torch

        dtype = torch.float32 if self.autocast is not None else getattr(torch, str(self.dtype))
        assert isinstance(dtype, torch.dtype)
        return dtype


def under_autocast(module: torch.nn.Module, dtype: str) -> torch.nn.Module:
    """Return the module, its forward under autocast on whatever device its parameters are."""
    import torch

    plain = module.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kind = next((item.device.type for item in module.parameters() if item.device.type != "meta"), "cpu")
        with torch.autocast(kind, dtype=getattr(torch, dtype), cache_enabled=False):
            return plain(*args, **kwargs)

    module.forward = forward
    return module


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    import torch

    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def resolve_model(spec: str, *, batch: int | None = None, mode: Mode = "training", dtype: str | None = None,
                  options: Mapping[str, str] | None = None) -> ModelSource | Graph:
    """Return what ``spec`` names; ``options`` set sizes of a zoo model, as its suffix does, or of an ONNX file.

    Raises ``ModelError`` for anything that is not there or not as it must be.
    """
    lower = spec.lower()
    if batch is not None and batch < 1:
        raise ModelError(f"batch must be 1 or more, not {batch}")
    if lower.endswith(".onnx"):
        _refuse_options(spec, None, dtype)
        return load_onnx(spec, dims=_sizes(spec, options or {}), batch=batch)
    if lower.endswith((".json", ".json.gz")):
        _refuse_options(spec, options, dtype)
        return load_graph(spec)
    if ".py:" in spec or lower.endswith(".py"):
        _refuse_options(spec, options, None)
        source = _from_file(spec, batch, mode)
    else:
        source = _from_zoo(spec, batch, mode, options)
    return source if dtype is None else source.with_dtype(dtype)


def _sizes(spec: str, options: Mapping[str, str]) -> dict[str, int]:
    for key, value in options.items():
        if not value.isdecimal() or int(value) < 1:
            raise ModelError(f"option {key}={value} of {spec!r} must be a whole number of 1 or more")
    return {key: int(value) for key, value in options.items()}


def _refuse_options(spec: str, options: Mapping[str, str] | None, dtype: str | None) -> None:
    if options:
        raise ModelError(f"{spec!r} takes no options ({', '.join(options)}): only zoo models and ONNX files do")
    if dtype is not None:
        raise ModelError(f"{spec!r} has its own dtypes: {dtype!r} cannot be set")


def _from_zoo(spec: str, batch: int | None, mode: Mode, options: Mapping[str, str] | None) -> ModelSource:
    from weft.model import zoo_models  # which needs PyTorch

    model, dtype = find_model(spec, options)
    source = ModelSource(
        name=model.name, spec=model.name, batch=batch or model.batch, mode=mode, in_eval_mode=model.in_eval_mode,
        builder=lambda mode: zoo_models.build_model(model, mode),
        sampler=lambda mode, batch, seed: zoo_models.sample_inputs(model, mode, batch, seed))
    return source.with_dtype(dtype)


# ---- a function in the user's file --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _UserFunction:
    """The user's function, called with what it takes and checked."""

    spec: str
    path: str
    function: Callable[..., Any]
    takes: tuple[str, ...]

    def __call__(self, *, batch: int | None, seed: int, mode: Mode) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
        """Return the module and its inputs; the global random state is seeded for the call and restored after it."""
        import torch

        offered = {"batch": batch, "seed": seed, "mode": mode}
        given = {key: value for key, value in offered.items() if key in self.takes and value is not None}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                result = self.function(**given)
            except Exception as problem:
                raise ModelError(f"{self.spec}: the function raised {type(problem).__name__}: {problem}"
                                 f"{_line_in(self.path, problem)}") from problem
        return _check_result(self.spec, result)

    def inputs(self, mode: Mode, batch: int, seed: int) -> tuple[Tensor, ...]:
        """Return inputs of ``batch`` samples."""
        return _rebatch(self.spec, self(batch=batch, seed=seed, mode=mode)[1], batch)


def _from_file(spec: str, batch: int | None, mode: Mode) -> ModelSource:
    path, name, in_eval_mode = _parts_of(spec)
    call = _load_function(spec, path, name)
    _, tensors = call(batch=batch, seed=0, mode=mode)
    own = tensors[0].shape[0] if tensors[0].ndim else 1
    return ModelSource(
        name=name, spec=spec, batch=batch or int(own), mode=mode, in_eval_mode=in_eval_mode,
        builder=lambda mode: call(batch=batch, seed=0, mode=mode)[0], sampler=call.inputs)


def _parts_of(spec: str) -> tuple[str, str, bool]:
    """Return the file, the function, and whether the module is put in eval mode."""
    place = spec.lower().rindex(".py") + len(".py")
    path, rest = spec[:place], spec[place:]
    if not re.fullmatch(r":[^:]+(:[^:]*)?", rest):
        raise ModelError(f"{spec!r}: say which function builds the model, as in {path}:function")
    name, colon, option = rest[1:].partition(":")
    if colon and option != _IN_EVAL_MODE:
        raise ModelError(f"{spec!r}: {option!r} is not an option of a function: there is only {_IN_EVAL_MODE}")
    return path, name, bool(colon)


def _load_function(spec: str, path: str, name: str) -> _UserFunction:
    if not Path(path).is_file():
        raise ModelError(f"{spec!r}: no file {path!r}: check the path")
    module = _execute(str(Path(path).resolve()))
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ModelError(f"{spec!r}: no function {name!r} in {path}: it has {', '.join(known) or 'no functions'}")
    parameters = inspect.signature(function).parameters.values()
    keywords = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty
                and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY,
                                       parameter.POSITIONAL_ONLY) and parameter.name not in ("batch", "seed", "mode")]
    if required:
        raise ModelError(f"{spec!r}: the function needs the arguments {', '.join(required)}, which Weft does not know: "
                         "it may take batch, seed and mode; give others a default")
    return _UserFunction(spec=spec, path=str(Path(path).resolve()), function=function,
                         takes=tuple(key for key in ("batch", "seed", "mode") if key in keywords))


@cache
def _execute(path: str) -> Any:
    """Return the module that the file ``path`` makes; it is run once."""
    name = f"weft_user_{Path(path).stem}_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent))
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        where = f" at {path}:{problem.lineno}" if isinstance(problem, SyntaxError) else _line_in(path, problem)
        raise ModelError(f"{path} cannot be run: {type(problem).__name__}: {problem}{where}") from problem
    finally:
        sys.path.remove(str(Path(path).parent))
    return module


def _line_in(path: str, problem: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == path]
    return f" at {path}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _check_result(spec: str, result: Any) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    import torch

    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module)):
        raise ModelError(f"{spec}: the function must return (module, example_inputs), not {_describe(result)}")
    inputs = (result[1],) if isinstance(result[1], torch.Tensor) else result[1]
    if not isinstance(inputs, tuple | list) or not inputs or not all(isinstance(x, torch.Tensor) for x in inputs):
        raise ModelError(f"{spec}: example_inputs must be a tensor or a tuple of tensors, not {_describe(inputs)}")
    return result[0], tuple(inputs)


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(type(item).__name__ for item in value[:4])})"
    return type(value).__name__


def _rebatch(spec: str, tensors: tuple[Tensor, ...], batch: int) -> tuple[Tensor, ...]:
    """Return ``tensors`` with ``batch`` rows: those as long as the first tensor are repeated or cut along dim 0."""
    import torch

    rows = tensors[0].shape[0] if tensors[0].ndim else 0
    if rows == batch:
        return tensors
    if rows == 0:
        raise ModelError(f"{spec}: the first example input has no batch dimension, so batch {batch} cannot be made: "
                         "let the function take batch")
    index = torch.arange(batch) % rows
    return tuple(tensor[index.to(tensor.device)] if tensor.ndim and tensor.shape[0] == rows else tensor
                 for tensor in tensors)
