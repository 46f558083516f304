"""From a module to one flat, functional fx graph, without using memory for its parameters.

``capture`` runs ``torch.export`` (non-strict) with every parameter, buffer and input replaced by a fake CPU tensor, so
that a model of 70 billion parameters needs no memory, and the module is as it was afterwards. The result holds only
``aten`` operators at the level at which autograd sees them (``linear``, ``layer_norm`` and attention stay whole) and is
*functional*: no operator changes a tensor. Four things need care, because PyTorch's own passes lose them silently:

* a ``no_grad`` block becomes a sub-graph; it is written out here with ``detach`` on its results, since
  ``run_decompositions`` would drop the block and gradients would flow where they must not;
* an operator that changes memory must become one that does not, also through views: ``weft.model.functional`` does
  so where it is simple, and ``run_decompositions({})``, which traces all over again, where it is not;
* a custom ``autograd.Function`` is traced through its forward and loses its own backward: refused for training
  (``weft.model.forward``);
* gradient checkpointing (``torch.utils.checkpoint``) leaves no trace in a graph: it is noted that it was asked for.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

import torch
import torch.export._trace  # export would import it, for half a second, when it is called
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft.base.errors import ModelError
from weft.model import functional
from weft.model.chains import Chain, ChainMismatch, find_chains, standing_in, write_chains
from weft.model.fixed_counts import counts_of_fixed_size
from weft.model.fold import FoldMismatch, check_unchanging
from weft.model.forward import checkpoints_noted, refused_functions

_CHATTY: Final = ("torch._subclasses.fake_tensor", "torch.export", "torch.export._trace",
                  "torch.fx.experimental.symbolic_shapes")
_EVAL_MODE_HELPS: Final = (
    "In eval mode (no dropout, no layer drop, statistics of batch norm as stored) the model can be traced: to train it "
    "so, write path/to/file.py:function:in_eval_mode, or call model.eval() before weft.parallelize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A functional fx graph and what its placeholders and results mean; nodes carry ``val``, ``module``, ``source``."""

    graph: fx.Graph
    parameters: Mapping[str, str]
    """Parameter path by placeholder name; of tied parameters the first path."""
    buffers: Mapping[str, str]
    """Buffer path by placeholder name."""
    constants: Mapping[str, torch.Tensor]
    """Value by placeholder name of tensors that are neither parameters, buffers nor inputs."""
    inputs: tuple[str, ...]
    """Placeholder names of the model's inputs, in order."""
    outputs: tuple[str, ...]
    """Node names of the model's results, in order."""
    buffer_updates: Mapping[str, str]
    """Node name of the new value, by path of each buffer that the forward pass changes."""
    tied: tuple[tuple[str, ...], ...]
    """Paths that share one parameter or buffer."""
    asks_recompute: bool = False
    """The forward calls ``torch.utils.checkpoint``: parts of it are to be computed again in the backward pass."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


def capture(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, training: bool, fold: bool = True) -> Capture:
    """Return the functional graph of ``module`` called with ``inputs``; ``ModelError`` if it cannot be traced."""
    try:
        return _capture(module, inputs, training=training, fold=fold)
    except ModelError as problem:
        if module.training and _is_traceable_in_eval_mode(module, inputs, training=training):
            raise ModelError(f"{problem}. {_EVAL_MODE_HELPS}") from problem
        raise


def _is_traceable_in_eval_mode(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, training: bool) -> bool:
    """Return whether the module can be traced in eval mode; it is as it was afterwards."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        _capture(module, inputs, training=training, fold=True)
    except ModelError:
        return False
    finally:
        for child, mode in modes.items():
            child.training = mode
    return True


def _capture(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, training: bool, fold: bool) -> Capture:
    if fold and (found := _capture_folded(module, inputs, training=training, is_whole=True)) is not None:
        return found[0]
    return _captured(module, inputs, training=training)


def capture_chains(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *,
                   training: bool) -> tuple[Capture, tuple[Chain, ...]]:
    """Return the functional graph in which every chain of equal layers has at most three copies, and the chains.

    The copies are the first, one that stands for all in the middle, and the last. Chains whose copies turn out to
    differ are traced in full.
    """
    found = _capture_folded(module, inputs, training=training, is_whole=False)
    return found or (capture(module, inputs, training=training), ())


def _capture_folded(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, training: bool,
                    is_whole: bool) -> tuple[Capture, tuple[Chain, ...]] | None:
    """Return the graph traced with most copies in chains stood in for, and the chains; None if there are none.

    ``is_whole``: all copies are written out. Chains whose copies differ are left out, and traced in full.
    """
    differing: set[tuple[str, ...]] = set()
    while chains := [item for item in find_chains(module, is_whole=is_whole) if item.paths not in differing]:
        try:
            return _captured(module, inputs, training=training, chains=chains), tuple(chains)
        except ChainMismatch as problem:
            differing.add(problem.chain.paths)
        except FoldMismatch:
            return None
        except ModelError:
            if is_whole:
                raise
            return None  # a hollow layer may be looked into: tracing all tells what is wrong
    return None


def tied_names(module: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that share one parameter or buffer, in the order of the module."""
    groups: dict[int, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            groups.setdefault(id(tensor), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


# ---- tensors without memory ---------------------------------------------------------------------------------------


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")


@contextmanager
def fake_parameters(module: torch.nn.Module) -> Iterator[FakeTensorMode]:
    """Replace the parameters and buffers of ``module`` by fake CPU tensors while the body runs."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes: dict[int, torch.Tensor] = {}
    saved = [(child, name, tensor) for child in module.modules()
             for name, tensor in (*child._parameters.items(), *child._buffers.items()) if tensor is not None]
    try:
        for child, name, tensor in saved:
            if id(tensor) not in fakes:
                fake = _fake(mode, tensor)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            setattr(child, name, fakes[id(tensor)])  # not through _parameters: nn.LSTM keeps a second list
        yield mode
    finally:
        for child, name, tensor in saved:
            setattr(child, name, tensor)


@contextmanager
def _forward_as_written(training: bool) -> Iterator[None]:
    """Keep PyTorch from taking shortcuts while tracing, and refuse what a trace would get wrong."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        stack.enter_context(redirect_stderr(io.StringIO()))  # PyTorch prints what it has traced when it fails
        for name in _CHATTY:
            logger = logging.getLogger(name)
            stack.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
        stack.enter_context(counts_of_fixed_size())
        if training:
            stack.enter_context(refused_functions(_own_line))
        yield


# ---- tracing ------------------------------------------------------------------------------------------------------


def _captured(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, training: bool,
              chains: Sequence[Chain] = ()) -> Capture:
    tied = tied_names(module)
    with (standing_in(module, chains), fake_parameters(module) as mode, _forward_as_written(training),
          checkpoints_noted() as noted):
        fakes = tuple(_fake(mode, tensor) for tensor in inputs)
        try:
            with _without_code(), _forward_frames_only():
                program = torch.export.export(module, fakes, strict=False)
            notes = _autocast_notes(program.graph_module)
            functional.inline_blocks(program.graph_module)
            program, updates = _functional(program)
        except (FoldMismatch, ModelError):
            raise
        except Exception as problem:
            raise ModelError(_why_untraceable(problem)) from problem
        return replace(_described(program, updates, tied, chains), notes=notes, asks_recompute=bool(noted))


def _autocast_notes(root: fx.GraphModule) -> tuple[str, ...]:
    """Return what is lost of ``autocast`` blocks: those for a GPU do nothing on the CPU tensors of a trace."""
    kinds = {str(node.args[0]) for module in root.modules() if isinstance(module, fx.GraphModule)
             for node in module.graph.nodes if node.target is functional.AUTOCAST and node.args[2]} - {"cpu"}
    return tuple(f"the forward switches autocast on for {kind}, which is left out: write the casts into the forward, "
                 "or convert the model" for kind in sorted(kinds))


@contextmanager
def _without_code() -> Iterator[None]:
    """Let no Python code be written for graphs before it is run: export does so ten times, for nothing."""
    recompile = fx.GraphModule.recompile

    def later(self: fx.GraphModule) -> None:
        type(self).forward = run

    def run(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        recompile(self)
        return self.forward(*args, **kwargs)

    fx.GraphModule.recompile = later
    try:
        yield
    finally:
        fx.GraphModule.recompile = recompile


class _ForwardFrames:
    """The frames of ``forward`` functions on the stack, as PyTorch asks for them for each node."""

    @staticmethod
    def extract() -> _ForwardFrames:
        """Return the stack that can be asked for; it is read at once, in ``summary``."""
        return _ForwardFrames()

    def summary(self) -> traceback.StackSummary:
        """Return the frames, outermost first."""
        frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "forward":
                frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, "forward", line=""))
            frame = frame.f_back
        return traceback.StackSummary.from_list(frames[::-1])


@contextmanager
def _forward_frames_only() -> Iterator[None]:
    """Let nodes note only the frames that PyTorch keeps in the end: reading the others takes a tenth of the time."""
    original = fx.proxy.CapturedTraceback
    fx.proxy.CapturedTraceback = _ForwardFrames
    try:
        yield
    finally:
        fx.proxy.CapturedTraceback = original


def _functional(program: Any) -> tuple[Any, dict[str, fx.Node]]:
    """Return the program made functional, and the new value of each buffer that it changes, by path."""
    graph: fx.Graph = program.graph
    has_blocks = any(node.op == "get_attr" for node in graph.nodes)
    if not has_blocks and not any(functional.changes_memory(node) for node in graph.nodes):
        return program, {}
    check_unchanging(graph, functional.changed_tensors, functional.owner_of)
    buffers = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs
               if spec.kind is InputKind.BUFFER}
    updates = None if has_blocks else functional.make_functional(graph, buffers)
    if updates is not None:
        return program, updates
    for node in graph.nodes:
        _annotate(node)
    program = program.run_decompositions({})
    results = zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True)
    return program, {spec.target: node for spec, node in results if spec.kind is OutputKind.BUFFER_MUTATION}


def _why_untraceable(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    operator = next((match[1] for line in lines if (match := re.search(r"(aten\.\w+(?:\.\w+)?)", line))), None)
    data_dependent = "DataDependent" in type(problem).__name__ or "data-dependent" in str(problem).lower()
    operator = "aten.item" if data_dependent else operator
    place = _user_line(problem)
    reason = "the flow of the program depends on values of tensors" if data_dependent else lines[0][:300]
    parts = [f"the model cannot be traced: {reason}"]
    parts += [f"operator {operator}"] if operator else []
    parts += [f"at {place}"] if place else []
    advice = ("Use torch.where instead of Python's if and while on values of tensors, and no .item()"
              if data_dependent else "The forward pass must run on tensors without values")
    return ", ".join(parts) + f". {advice}"


def _user_line(problem: BaseException) -> str | None:
    """Return ``file.py:12 (source text)`` of the innermost frame that is not PyTorch's own."""
    frames = [frame for error in (problem, problem.__cause__, problem.__context__) if error is not None
              for frame in traceback.extract_tb(error.__traceback__)]
    return _own_line(frames)


def _own_line(frames: Iterable[traceback.FrameSummary]) -> str | None:
    own = [frame for frame in frames if "/torch/" not in frame.filename and "/weft/model/" not in frame.filename
           and not frame.filename.startswith("<")]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else None


# ---- describing ---------------------------------------------------------------------------------------------------


def _described(program: Any, updates: dict[str, fx.Node], tied: tuple[tuple[str, ...], ...],
               chains: Sequence[Chain]) -> Capture:
    graph: fx.Graph = program.graph
    first = {name: names[0] for names in tied for name in names}
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    for spec in program.graph_signature.input_specs:
        match spec.kind:
            case InputKind.PARAMETER:
                parameters[spec.arg.name] = first.get(spec.target, spec.target)
            case InputKind.BUFFER:
                buffers[spec.arg.name] = first.get(spec.target, spec.target)
            case InputKind.CONSTANT_TENSOR:
                constants[spec.arg.name] = program.constants[spec.target]
            case InputKind.USER_INPUT:
                inputs.append(spec.arg.name)
            case _:
                raise ModelError(f"the model uses {spec.arg.name!r} of a kind that cannot be planned: {spec.kind}")
    for node in graph.nodes:
        _annotate(node)
    outputs = _outputs(program)
    graph.output_node().args = ((*updates.values(), *outputs),)
    write_chains(graph, {**parameters, **buffers}, chains)
    functional.simplify(graph)  # before sizes are looked at: values that only checks use are gone then
    for node in graph.nodes:
        _check_sizes(node)
    functional.free_of_strides(graph)
    functional.check_precisions(graph)
    results = [node.name for node in graph.output_node().args[0]]
    return Capture(
        graph=graph, parameters=parameters, buffers=buffers, constants=constants, inputs=tuple(inputs),
        outputs=tuple(results[len(updates) :]), tied=tied,
        buffer_updates={first.get(path, path): name for path, name in zip(updates, results, strict=False)})


def _outputs(program: Any) -> list[fx.Node]:
    """Return the nodes of the model's own results; plain values among them are left out."""
    outputs: list[fx.Node] = []
    for spec, node in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            outputs += [node] if isinstance(node, fx.Node) else []
        elif spec.kind is not OutputKind.BUFFER_MUTATION:
            raise ModelError(f"the forward pass changes {spec.target!r} in place, an input or a parameter: "
                             "copy it first (x = x.clone())")
    return outputs


def _check_sizes(node: fx.Node) -> None:
    """Raise ``ModelError`` if the size of the node's result depends on values."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    sizes = [size for item in values for size in (item.shape if isinstance(item, torch.Tensor) else (item,))]
    if node.op == "call_function" and any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool)
                                          for size in sizes):
        raise ModelError("the model cannot be traced: the size of the result of operator "
                         f"{node.target}{functional.place_of(node)} depends on values of tensors. Use masks or "
                         "torch.where, which keep sizes fixed")


def _annotate(node: fx.Node) -> None:
    """Note the innermost module's path and the user's source line on the node, where they are not noted yet."""
    if node.op != "call_function":
        return
    stack = node.meta.get("nn_module_stack")
    if "module" not in node.meta:
        path = next(reversed(stack.values()))[0] if stack else ""
        node.meta["module"] = re.sub(r"@\d+", "", path)
