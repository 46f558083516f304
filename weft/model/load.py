"""From what the user typed to a traced model or a graph, whatever kind of model it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.base.errors import ModelError
from weft.model.graph import Graph
from weft.model.source import resolve_model
from weft.model.zoo import Mode

if TYPE_CHECKING:
    from weft.model.source import ModelSource
    from weft.model.trace import TracedModel


def trace_model(spec: str | ModelSource, *, mode: Mode = "training", batch: int | None = None, dtype: str | None = None,
                batch_dims: bool = False) -> TracedModel:
    """Return the PyTorch model that ``spec`` names, traced for ``batch`` samples (default: the model's own).

    A source is traced as it is, in its own mode and precision.
    """
    source = resolve_model(spec, batch=batch, mode=mode, dtype=dtype) if isinstance(spec, str) else spec
    if isinstance(source, Graph):
        raise ModelError(f"{spec!r} has no PyTorch module behind it: it can be planned, but not run or profiled")
    from weft.model.trace import trace

    return trace(source, batch=batch, batch_dims=batch_dims)


def has_module(spec: str | ModelSource) -> bool:
    """Return whether ``spec`` is a PyTorch model or its name, not that of a file with a graph."""
    return not isinstance(spec, str) or not spec.lower().endswith((".json", ".json.gz", ".onnx"))


def load_graph_for(spec: str | ModelSource, *, mode: Mode = "training", batch: int | None = None,
                   dtype: str | None = None, batch_dims: bool = False) -> Graph:
    """Return the graph of any kind of model; PyTorch models are traced for ``batch`` samples."""
    if not isinstance(spec, str) or has_module(spec):
        return trace_model(spec, mode=mode, batch=batch, dtype=dtype, batch_dims=batch_dims).graph
    graph = resolve_model(spec, mode=mode)
    assert isinstance(graph, Graph)
    if mode == "training" and not graph.has_backward:
        raise ModelError(f"{spec!r} has no backward pass, so training cannot be planned: use --mode inference")
    return graph
