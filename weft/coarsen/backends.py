"""Groups as backends make them: an adapter to inductor, PyTorch's compiler, and one to ONNX Runtime.

**Inductor** is stopped before it generates any code. The traced graph is lowered for the CPU with tensors that have no
data, and inductor's hook after fusion is handed the kernels. Each kernel knows which operators it came from (their
*origins*). One operator may occur in several kernels, since inductor rather computes a cheap value again than reads it,
and since what prepares operands carries the names of those who read them: it belongs to the kernel that is the call of
a library for it (matrix products, convolutions, attention), else to the first that comes after what the operator reads.
Operators that no kernel knows (a copy that was not needed, a cast to the same type) belong to the first kernel that
reads what they made.

These are the fusions of inductor's CPU back end, for the forward pass. No compiler and no weights are needed.

**ONNX Runtime** optimises a file, and what comes out is read. It writes the optimised model with its fused nodes
(``FusedConv``, ``SkipLayerNormalization``, ...). Whatever they are called, an optimised node computes everything that
lies between the tensors it reads and the tensors it writes, and tensors keep their names: its group is what the
original graph has on the way back from its results to tensors that some optimised node writes as well. So the adapter
knows no fusion by name. A node that writes only tensors of its own making belongs with the node that reads them.
Operators that were done away with (folded into weights, an identity) belong to the first group that reads what they
made.

The level is ``extended``: it holds all fusions, while ``all`` adds layouts of one processor that hide the names of
tensors. ONNX Runtime reads the weights, so the file with all its data must be there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.errors import InputError
from weft.base.scratch import scratch_folder
from weft.coarsen.groups import Groups, choose_kernels, number_groups
from weft.model.graph import Graph

if TYPE_CHECKING:
    import torch
    from torch import fx

    from weft.model.columns import TracedProgram
    from weft.model.trace import TracedModel

_HOOK: Final = "_post_fusion_custom_pass"
_OP: Final = "weft_op"
"""The key in a node's ``custom`` metadata, which PyTorch hands on to what the node is lowered to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """One kernel that inductor would generate or call."""

    ops: tuple[int, ...]
    """The operators that it came from."""
    called: tuple[int, ...]
    """Of them the last, where the kernel is a call of a library: what comes before led to its operands."""


class _Stop(Exception):  # noqa: N818 - it ends a compilation that has told all we want to know
    """Raised in the hook."""


def fuse_by_inductor(traced: TracedModel) -> Groups:
    """Return the groups of the kernels that inductor would generate for the forward pass.

    Raise ``InputError`` if this PyTorch has no such hook, or if inductor cannot compile the model.
    """
    graph = traced.graph
    kernels = _kernels(traced)
    known: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for column in ("called", "ops"):
        for number, kernel in enumerate(kernels):
            for op in getattr(kernel, column):
                known[op].append(number)
    return number_groups(graph, choose_kernels(graph, known), how="inductor")


def _kernels(traced: TracedModel) -> list[_Kernel]:
    """Return the kernels in the order in which they would run."""
    import torch
    from torch._inductor import config

    if not hasattr(config, _HOOK):
        raise InputError(f"PyTorch {torch.__version__} has no torch._inductor.config.{_HOOK}, so that the groups of "
                         "inductor are not known: coarsen by rules instead, or install the version of PyTorch that "
                         "Weft was tested with (2.13)")
    module, inputs = _marked_module(traced)
    kernels: list[_Kernel] = []
    stop = _Stop()

    def after_fusion(nodes: Sequence[Any]) -> Any:
        kernels.extend(map(_kernel, nodes))
        raise stop

    with _quiet_inductor(config, after_fusion), torch.no_grad():
        from torch._inductor.compile_fx import compile_fx

        try:
            compile_fx(module, inputs)
        except Exception as problem:  # inductor wraps whatever is raised inside, and raises errors of many types
            if not _is_caused_by(problem, stop):
                text = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]
                raise InputError(f"inductor cannot compile {traced.graph.name!r}: {text}. Coarsen by rules "
                                 "instead") from problem
    return kernels


@contextmanager
def _quiet_inductor(config: Any, hook: Any) -> Iterator[None]:
    """Set the hook, and let inductor neither read nor write its caches nor start processes that compile."""
    from torch._functorch import config as functorch_config

    with config.patch({_HOOK: hook, "fx_graph_cache": False, "compile_threads": 1}), functorch_config.patch(
            enable_autograd_cache=False):
        yield


def _is_caused_by(problem: BaseException | None, stop: _Stop) -> bool:
    while problem is not None:
        if problem is stop or getattr(problem, "inner_exception", None) is stop:
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def _kernel(scheduled: Any) -> _Kernel:
    """Return what a scheduled kernel came from."""
    buffers = [part.node for part in scheduled.get_nodes() if part.node is not None]
    marks = {origin.meta.get("custom", {}).get(_OP) for buffer in buffers for origin in buffer.origins}
    ops = tuple(sorted(marks - {None}))
    return _Kernel(ops=ops, called=ops[-1:] if scheduled.is_extern() else ())


def _marked_module(traced: TracedModel) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return a copy of the traced graph whose nodes carry their operator's number, and inputs without data."""
    import torch
    from torch import fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    program = traced.program
    number = _op_numbers(traced.graph, program)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[torch.Tensor] = []
    with FakeTensorMode():
        for node in program.fx_graph.nodes:
            if node.op == "output":
                continue
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            value = copy.meta.pop("val", None)
            if node.op == "placeholder":
                inputs.append(torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype))
            else:
                copy.meta["custom"] = {_OP: number[node.name]}
    nodes = program.nodes
    graph.output(tuple(copies[nodes[program.tensor_nodes[name]]] for name in program.outputs))
    return fx.GraphModule({}, graph), inputs


def _op_numbers(graph: Graph, program: TracedProgram) -> dict[str, int]:
    return {node: op for op, name in enumerate(graph.op_names) for node in program.op_nodes[name]}


# ---- ONNX Runtime ---------------------------------------------------------------------------------------------------


def fuse_by_onnxruntime(graph: Graph, path: str | os.PathLike[str]) -> Groups:
    """Return the groups of ``graph``, read from the ONNX file ``path``, as ONNX Runtime fuses it for the CPU.

    Raise ``InputError`` if ONNX Runtime is not installed or cannot read the file.
    """
    nodes = _optimised_nodes(Path(path))
    index = graph.tensor_index
    written = {index[name] for outputs in nodes for name in outputs if name in index}
    known: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for number, outputs in enumerate(nodes):
        for op in _computed(graph, [index[name] for name in outputs if name in index], written):
            known[op].append(number)
    return number_groups(graph, choose_kernels(graph, known), how="onnxruntime")


def _computed(graph: Graph, results: list[int], written: Collection[int]) -> set[int]:
    """Return the operators on the way back from ``results`` to tensors that are ``written`` by other nodes."""
    found: set[int] = set()
    waiting = list(results)
    while waiting:
        op = int(graph.tensor_producer[waiting.pop()])
        if op >= 0 and op not in found:
            found.add(op)
            waiting.extend(tensor for tensor in graph.op_inputs(op).tolist() if tensor not in written)
    return found


def _optimised_nodes(path: Path) -> list[list[str]]:
    """Return the tensors that each node of the optimised model writes, in the order in which the nodes run."""
    onnx, runtime = _packages()
    if not path.is_file():
        raise InputError(f"there is no ONNX file {str(path)!r}: check the path")
    with scratch_folder("weft-onnx-") as folder:
        target = folder / "optimised.onnx"
        options = runtime.SessionOptions()
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(target)
        options.log_severity_level = 3
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # Weights beside the model: a file of its format holds 2 GiB at most, and nobody reads these.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
        try:
            runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            model = onnx.load(str(target), load_external_data=False)
        except Exception as problem:  # errors of ONNX Runtime share no type
            text = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]
            raise InputError(f"ONNX Runtime cannot optimise {str(path)!r}: {text}. Coarsen by rules "
                             "instead") from problem
    return [[name for name in node.output if name] for node in model.graph.node]


def _packages() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
    except ImportError as problem:
        raise InputError(f"the groups of ONNX Runtime need a package that is not installed ({problem.name}): "
                         "pip install onnx onnxruntime, or coarsen by rules instead") from problem
    return onnx, onnxruntime
