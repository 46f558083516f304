"""Graphs for tests of coarsening, in two lines: ``make(("conv", "aten.conv2d", "x w"), ("relu", "aten.relu", "conv"))``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.model.graph import GivenCosts, Graph, TensorRole, check_graph

Row = tuple[str, str, str]

FREE = ("aten.view", "aten.transpose", "aten.reshape", "aten.split", "Reshape", "Flatten")
CONSTANT = ("aten.arange", "aten.zeros")


def make(*rows: Row, outputs: Sequence[str] = (), sizes: Mapping[str, int] | None = None,
         given: Mapping[str, Mapping[str, object]] | None = None) -> Graph:
    """Return a graph with one operator for each (name, kind, what it reads), and one tensor each of the same name.

    What is no operator's name is a parameter (``w``, ``b``, ...), or an input if it begins with ``x``. Kinds in FREE
    are views of the first thing read, kinds in CONSTANT and what reads only those are constants. Tensors have 100
    bytes unless ``sizes`` says otherwise. The last operator's result is the output unless ``outputs`` are named.
    """
    names = [name for name, _, _ in rows]
    outside = list(dict.fromkeys(text for _, _, reads in rows for text in reads.split() if text not in names))
    tensors = [*outside, *names]
    index = {name: position for position, name in enumerate(tensors)}
    size = {name: (sizes or {}).get(name, 100) for name in tensors}
    constant: dict[str, bool] = {}
    base = [-1] * len(tensors)
    for name, kind, reads in rows:
        depends = [text for text in reads.split() if not constant.get(text, False)]
        constant[name] = kind in CONSTANT or (bool(reads) and not depends)
        if kind in FREE:
            first = index[reads.split()[0]]
            base[index[name]] = base[first] if base[first] >= 0 else first
    is_free = np.array([kind in FREE for _, kind, _ in rows])
    reads_bytes = np.array([sum(size[text] for text in reads.split()) for _, _, reads in rows], dtype=np.float64)
    zero = np.zeros(len(rows))
    graph = Graph(
        name="test", op_names=tuple(names), op_kinds=tuple(kind for _, kind, _ in rows), op_modules=("",) * len(rows),
        flops=np.where(is_free, 0.0, 1000.0 + np.arange(len(rows))), bytes_read=np.where(is_free, 0.0, reads_bytes),
        bytes_written=np.where(is_free, 0.0, [size[name] for name in names]), input_grad_flops=zero,
        input_grad_bytes=zero, weight_grad_flops=zero, weight_grad_bytes=zero,
        is_constant=np.array([constant[name] for name in names], dtype=np.bool_),
        input_start=np.cumsum([0, *(len(reads.split()) for _, _, reads in rows)]).astype(np.int64),
        inputs=np.array([index[text] for _, _, reads in rows for text in reads.split()], dtype=np.int64),
        tensor_names=tuple(tensors), tensor_shapes=tuple((size[name] // 4,) for name in tensors),
        tensor_dtypes=("float32",) * len(tensors),
        tensor_role=np.array([TensorRole.ACTIVATION if name in names else TensorRole.INPUT if name.startswith("x") else
                              TensorRole.PARAMETER for name in tensors], dtype=np.int64),
        tensor_producer=np.array([names.index(name) if name in names else -1 for name in tensors], dtype=np.int64),
        tensor_bytes=np.array([size[name] for name in tensors], dtype=np.int64),
        tensor_base=np.array(base, dtype=np.int64), is_saved=np.zeros(len(tensors), dtype=np.bool_),
        tensor_batch_dim=np.zeros(len(tensors), dtype=np.int64),
        outputs=tuple(index[name] for name in outputs or names[-1:]),
        given=_given(names, len(tensors), given) if given is not None else None)
    check_graph(graph)
    return graph


def _given(names: Sequence[str], num_tensors: int, given: Mapping[str, Mapping[str, object]]) -> GivenCosts:
    def column(field: str, default: object) -> tuple[object, ...]:
        return tuple(given.get(name, {}).get(field, default) for name in names)

    return GivenCosts(times=column("times", {"gpu": 1.0}), memory_bytes=column("memory", 0),
                      allowed_kinds=column("on", None), colocate=column("colocate", None),
                      transfer_times=(None,) * num_tensors)
