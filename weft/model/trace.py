"""Trace a PyTorch model: ``trace(source) -> TracedModel``, a ``Graph`` to plan with and a program to run.

The steps: ``capture`` exports the module to a functional fx graph without using memory (equal layers are traced once,
``weft.model.chains``), ``probe`` costs each distinct operator forward and backward on meta tensors, and ``columns``
writes operators, tensors and costs down as a ``Graph``.

``TracedModel`` is what the runtime's partitioner reads:

    traced = trace(resolve_model("gpt2-tiny"))
    traced.graph                  the ``Graph``: names, wiring, costs
    traced.program.fx_graph       a ``torch.fx.Graph`` that is functional: placeholders, ``call_function`` nodes whose
                                  targets are aten overloads or ``operator.getitem``, and one output node. It is the
                                  level autograd works on: run the nodes under autograd and ``backward`` is right
                                  (``detach`` nodes stand where the model had ``no_grad`` blocks)
    traced.program.nodes          every fx node by its fx name
    traced.program.op_nodes       operator name -> names of its fx nodes: the call, then its ``getitem`` nodes
    traced.program.tensor_nodes   tensor name -> name of the fx node whose value it is: a call, a ``getitem`` or a
                                  placeholder. Parameters and buffers are named by their path in the module
    traced.program.inputs         tensor names of the inputs, in the order of ``source.inputs()``
    traced.program.outputs        tensor names of the results, in order; for training the first is the loss
    traced.program.constants      tensor name -> value of tensors that are neither parameters, buffers of the module nor
                                  inputs (literals in the forward); in the graph their role is BUFFER
    traced.program.buffer_updates path of a buffer -> name of the tensor that is its new value after the step
                                  (batch-norm statistics in training)
    traced.program.parameters     placeholder name -> path (of tied parameters the first); ``buffers`` likewise
    traced.source                 the ``ModelSource``: ``build()`` gives the module with its parameters and buffers

Two placeholders may stand for one tied parameter (``parameters`` maps both to one path); ``tensor_nodes`` names one.
Operators that make tensors (``arange``, ``zeros``, ``full``, ``_to_copy`` ...) carry ``device=cpu`` in their arguments:
``retarget`` changes such arguments to another device. ``run_program`` executes the whole graph in one process, as the
plainest example of all this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import fx

from weft.model.capture import capture
from weft.model.columns import Backward, TracedProgram, make_columns
from weft.model.forward import current_autocast, within
from weft.model.graph import NO_BATCH_DIM, UNKNOWN_BATCH_DIM, Graph, check_graph, collector_paused
from weft.model.source import ModelSource
from weft.model.zoo import Mode


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A traced model: what to plan with, what to run, and where it came from."""

    graph: Graph
    program: TracedProgram
    source: ModelSource


def trace(source: ModelSource, *, batch: int | None = None, mode: Mode | None = None, batch_dims: bool = False,
          backward: Literal["auto", "joint", "rule", "none"] = "auto", fold: bool = True) -> TracedModel:
    """Return ``source`` traced for ``batch`` samples (default: its own).

    ``mode`` overrides the source's. ``batch_dims`` traces once more at another batch size to find the dimension of
    each tensor that grows with it. ``backward`` says where backward costs come from: ``auto`` and ``joint`` run every
    distinct operator forward and backward on meta tensors, ``rule`` doubles the forward (``weft.model.columns``),
    ``none`` leaves them out; inference has none. An autocast that is on is part of the model. ``fold=False`` traces
    every layer, even equal ones. ``ModelError`` if the model cannot be traced, with the operator and the line.
    """
    source = source if mode is None else source.with_mode(mode)
    kind: Backward = "none" if source.mode == "inference" else "joint" if backward == "auto" else backward
    size = source.batch if batch is None else batch
    traced = _traced(source, size, kind, fold)
    if batch_dims:
        other = size + 1 if size > 1 else 3  # 2 would hide behind dimensions of 2 made by stacking pairs
        graph = _with_batch_dims(traced.graph, _traced(source, other, "none", fold).graph, size, other)
        traced = replace(traced, graph=graph)
    check_graph(traced.graph)
    return traced


def _traced(source: ModelSource, batch: int, backward: Backward, fold: bool) -> TracedModel:
    module = source.build()
    inputs = source.inputs(batch, 0)
    training = source.mode == "training"
    with collector_paused(), within(module, current_autocast()):
        found = capture(module, inputs, training=training, fold=fold)
        graph, program = make_columns(found, name=source.name, batch=batch, training=training, backward=backward)
    return TracedModel(graph=graph, program=program, source=replace(source, batch=batch))


def _with_batch_dims(graph: Graph, other: Graph, batch: int, other_batch: int) -> Graph:
    """Return ``graph`` with the dimensions in which its tensors differ from the same model's at another batch."""
    if (graph.op_names, graph.tensor_names) != (other.op_names, other.tensor_names):
        text = f"the operators at batch {batch} differ from those at {other_batch}: batch dimensions are not known"
        return replace(graph, warnings=(*graph.warnings, text))
    dims = [_grown_dim(a, b, batch, other_batch)
            for a, b in zip(graph.tensor_shapes, other.tensor_shapes, strict=True)]
    return replace(graph, tensor_batch_dim=np.array(dims, dtype=np.int64))


def _grown_dim(shape: tuple[int, ...], other: tuple[int, ...], batch: int, other_batch: int) -> int:
    if shape == other:
        return NO_BATCH_DIM
    changed = [dim for dim, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
    if len(shape) == len(other) and len(changed) == 1:
        dim = changed[0]
        if shape[dim] * other_batch == other[dim] * batch:
            return dim
    return UNKNOWN_BATCH_DIM


# ---- running the whole graph --------------------------------------------------------------------------------------


def retarget(value: Any, device: torch.device) -> Any:
    """Return an operator's arguments with every device in them replaced by ``device``."""
    return fx.node.map_aggregate(value, lambda item: device if isinstance(item, torch.device) else item)


def run_program(program: TracedProgram, tensors: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], *,
                nodes: Sequence[str] = ()) -> tuple[torch.Tensor, ...]:
    """Return the values of these fx nodes (default: the model's outputs) of the traced graph run on ``inputs``.

    Parameters and buffers are taken by path from ``tensors``. Only what the nodes need is computed.
    """
    wanted = [program.nodes[name] for name in nodes or [program.tensor_nodes[name] for name in program.outputs]]
    needed = set(wanted)
    for node in reversed(program.fx_graph.nodes):
        needed.update(node.all_input_nodes if node in needed else ())
    paths, device = {**program.parameters, **program.buffers}, inputs[0].device
    given = {node: tensors[path] for node, path in paths.items() if path in tensors}
    given |= {program.tensor_nodes[name]: tensor
              for name, tensor in (*zip(program.inputs, inputs, strict=True), *program.constants.items())}
    values: dict[fx.Node, Any] = {}
    for node in (node for node in program.fx_graph.nodes if node in needed):
        if node.op == "placeholder":
            values[node] = given[node.name].to(device)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*retarget(args, device), **retarget(kwargs, device))
    return tuple(values[node] for node in wanted)
