"""One process beside the ranks: loss, outputs, gradients, parameters after the step and buffers, to 1e-10."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.random_models import DrawnModel
from benchmarks.random_ranks import RankOutcome
from weft.plan.program import Op, Phase, Program
from weft.run.optimizers import make_optimizer
from weft.run.parameters import buffer_holders, cut_region
from weft.run.prepare import Tracer

TOLERANCE = 1e-10
FLOOR: Final = 1e-3
"""Gradients are compared relative to the largest of their own, and at least to this part of the largest of all."""
NOISE: Final = 1e-12
"""Smaller gradients, as parts of the largest, are rounding alone. Adam divides each by its own size, so that noise moves
a parameter: where there is no more than that, parameters are not compared."""
Samples = tuple[int, int]


def differences(model: DrawnModel, program: Program, outcomes: Sequence[RankOutcome], tracer: Tracer) -> list[str]:
    """Return what differs from one process, in words; nothing if all is equal."""
    updates = tracer.trace(program.graph.batch).program.buffer_updates
    module = model.source.build()
    inputs = model.source.inputs(program.plan.model.batch, 0)
    if program.plan.model.mode == "inference":
        return [*_outputs(program, module, inputs, outcomes)]
    parts = _parts(program) if updates else [(0, program.plan.model.batch)]
    start = copy.deepcopy(module)
    loss = sum(_backward(module, inputs, part, program.plan.model.batch) for part in parts)
    found = list(_differing("loss", torch.tensor(sum(item.loss for item in outcomes)), torch.tensor(loss)))
    named = dict(module.named_parameters())
    gradients = {name: torch.zeros_like(item) if item.grad is None else item.grad for name, item in named.items()}
    scale = max(float(item.abs().max()) for item in gradients.values())
    found += _tensors("gradient", outcomes, gradients, floor=FLOOR * scale)
    optimizer = make_optimizer([item for item in named.values() if item.grad is not None], program.plan.optimizer)
    if optimizer is not None:
        optimizer.step()
    noise = {name: item.abs() < NOISE * scale for name, item in gradients.items()}
    found += _tensors("parameter", outcomes, {name: item.detach() for name, item in named.items()}, noise=noise)
    return found + [*_buffers(program, start, inputs, outcomes, updates)]


def _rows(inputs: Sequence[Tensor], part: Samples, batch: int) -> list[Tensor]:
    return [item[part[0]:part[1]] if item.shape[0] == batch else item for item in inputs]


def _results(module: torch.nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(module(*inputs)) if isinstance(item, Tensor)]


def _backward(module: torch.nn.Module, inputs: Sequence[Tensor], part: Samples, batch: int) -> float:
    loss = _results(module, _rows(inputs, part, batch))[0] * ((part[1] - part[0]) / batch)
    loss.backward()
    return float(loss.detach())


def _parts(program: Program) -> list[Samples]:
    """Return the samples that each run of the loss sees: where samples are mixed, they are mixed within those."""
    graph = program.graph
    loss = int(graph.tensor_producer[graph.outputs[0]])
    return sorted(_samples(program, index, mb) for index, item in enumerate(program.instances)
                  if loss in program.stage_ops[item.stage] for mb in item.microbatches)


def _samples(program: Program, instance: int, microbatch: int) -> Samples:
    item, first = program.instances[instance], microbatch * program.plan.microbatch_size
    return first + item.samples[0], first + item.samples[1]


def _differing(what: str, value: Tensor, expected: Tensor, floor: float = 0.0) -> Iterator[str]:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        yield f"{what}: {tuple(value.shape)} {value.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    elif not value.is_floating_point() and not value.is_complex():
        if not torch.equal(value, expected):
            yield f"{what}: other values"
    elif value.numel():
        size = max(float(expected.abs().max()), floor, 1e-300)
        error = float((value - expected).abs().max()) / size
        if not error <= TOLERANCE:
            yield f"{what}: off by {error:.1e}"


def _tensors(what: str, outcomes: Sequence[RankOutcome], expected: dict[str, Tensor], floor: float = 0.0,
             noise: dict[str, Tensor] | None = None) -> list[str]:
    found, seen = [], set()
    for rank, outcome in enumerate(outcomes):
        values, regions = (outcome.gradients, outcome.gradient_regions) if what == "gradient" else (
            outcome.parameters, outcome.regions)
        for name, value in values.items():
            whole = cut_region(expected[name], regions.get(name, ()))
            if noise is not None:
                value = torch.where(cut_region(noise[name], regions.get(name, ())).reshape(value.shape),
                                    whole.reshape(value.shape), value)
            found += _differing(f"{what} {name} (rank {rank})", value, whole.reshape(value.shape), floor)
            seen.add(name)
    lost = [name for name, value in expected.items() if name not in seen and bool(value.abs().max() > 0)]
    return found + ([f"gradient {name}: on no rank" for name in lost] if what == "gradient" else [])


def _buffers(program: Program, module: torch.nn.Module, inputs: Sequence[Tensor], outcomes: Sequence[RankOutcome],
             updates: dict[str, str]) -> Iterator[str]:
    """Yield buffers that differ: each is as the first of its ranks has changed it, by the samples it saw in order."""
    expected = dict(module.named_buffers())
    for path, ranks in buffer_holders(program, updates).items():
        fresh = copy.deepcopy(module)
        op = int(program.graph.tensor_producer[program.graph.tensor_index[updates[path]]])
        for item in program.instructions(ranks[0]):
            if item.op == Op.COMPUTE and item.phase == Phase.F and (
                    op in program.stage_ops[program.instances[item.instance].stage]):
                part = _samples(program, item.instance, item.microbatch)
                with torch.no_grad():
                    fresh(*_rows(inputs, part, program.plan.model.batch))
        expected[path] = fresh.get_buffer(path)
    for rank, outcome in enumerate(outcomes):
        for name, value in outcome.buffers.items():
            if name in expected:
                yield from _differing(f"buffer {name} (rank {rank})", value, expected[name])


def _outputs(program: Program, module: torch.nn.Module, inputs: Sequence[Tensor],
             outcomes: Sequence[RankOutcome]) -> Iterator[str]:
    graph = program.graph
    with torch.no_grad():
        expected = _results(module, inputs)
    for position, tensor in enumerate(graph.outputs):
        name, parts = graph.tensor_names[tensor], {}
        for outcome in outcomes:
            for instance, microbatch, values in outcome.outputs:
                if name in values:
                    parts[_samples(program, instance, microbatch)] = values[name]
        if sum(last - first for first, last in parts) != program.plan.model.batch:
            yield f"output {position}: there for {sorted(parts)} of {program.plan.model.batch} samples"
            continue
        yield from _differing(f"output {position}", torch.cat([parts[key] for key in sorted(parts)]), expected[position])
