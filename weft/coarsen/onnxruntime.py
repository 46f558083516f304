"""Groups as ONNX Runtime makes them: one adapter, which lets it optimise a file and reads what comes out.

ONNX Runtime writes the optimised model with its fused nodes (``FusedConv``, ``SkipLayerNormalization``, ...). Whatever
they are called, an optimised node computes everything that lies between the tensors it reads and the tensors it writes,
and tensors keep their names: its group is what the original graph has on the way back from its results to tensors that
some optimised node writes as well. So the adapter knows no fusion by name. A node that writes only tensors of its own
making belongs with the node that reads them. Operators that were done away with (folded into weights, an identity)
belong to the first group that reads what they made.

The level is ``extended``: it holds all fusions, while ``all`` adds layouts of one processor that hide the names of
tensors. ONNX Runtime reads the weights, so the file with all its data must be there.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.scratch import scratch_folder
from weft.coarsen.groups import Groups, choose_kernels, number_groups
from weft.model.graph import Graph


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
