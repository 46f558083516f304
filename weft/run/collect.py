"""Rank 0 gathers what the ranks measured and computed, and compares the first step with one device.

Gradients and outputs travel one tensor at a time, so that rank 0 needs memory for the reference run and one tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.model.differences import precise
from weft.model.graph import F64, Graph
from weft.model.source import ModelSource
from weft.model.weights import materialize
from weft.plan.cut import loss_parts
from weft.plan.holders import parameter_holdings
from weft.plan.program import Program
from weft.plan.sharding import Region
from weft.run.executor import StepTimes, measured_timeline
from weft.run.prepare import Prepared
from weft.run.result import RunOptions, RunResult, Verification
from weft.run.shard_parameters import put_region
from weft.run.status import Milestone, StatusLine
from weft.run.transport import Transport
from weft.run.verify import Reference, reference_run, verify_inference, verify_training


class Measured:
    """What one rank has from its steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.cpu_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.times: list[StepTimes] = []
        self.first_gradients: dict[str, Tensor] = {}
        self.first_results: list[tuple[int, int, dict[str, Tensor]]] = []


def collect(program: Program, measured: Measured, transport: Transport) -> RunResult | None:
    """Return on rank 0 the losses, times and timeline of all ranks."""
    records = transport.gather_records({"losses": measured.losses, "spans": measured.spans, "cpu_s": measured.cpu_s})
    mine = np.stack([np.stack([item.start_s, item.end_s]) for item in measured.times])
    own = torch.from_numpy(mine).reshape(-1)
    parts = [transport.gather_tensor(own, source=rank) for rank in range(transport.num_ranks)]
    if records is None:
        return None
    spans = np.asarray([record["spans"] for record in records])
    durations = spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)
    kept = durations[-len(measured.times):]
    chosen = int(np.argsort(kept, kind="stable")[len(kept) // 2])
    times = [_unpack(part, len(measured.times), chosen) for part in parts if part is not None]
    losses = tuple(float(value) for value in np.asarray([record["losses"] for record in records]).sum(axis=0))
    return RunResult(
        num_ranks=transport.num_ranks, losses=losses if program.plan.model.mode == "training" else (),
        step_times_s=tuple(durations.tolist()), cpu_s=tuple(record["cpu_s"] for record in records),
        timeline=measured_timeline(program, times))


def _unpack(part: Tensor, num_steps: int, chosen: int) -> StepTimes:
    values = part.view(torch.float64).numpy().reshape(num_steps, 2, -1)
    return StepTimes(start_s=values[chosen, 0], end_s=values[chosen, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """What rank 0 found out about the first step; empty on other ranks."""

    verification: Verification | None = None
    gradients: dict[str, F64] | None = None
    gradient_spread: float | None = None
    reference: Reference | None = None
    """What it was compared with."""


def inspect(program: Program, prepared: Prepared, measured: Measured, options: RunOptions, *, source: ModelSource,
            transport: Transport, status: StatusLine, dtype: torch.dtype | None = None) -> Inspected:
    """Return on rank 0 how the first step compares with one device, and its gradients, as the options ask.

    The tolerance is that of ``dtype``, or else of the least precise among parameters and outputs.
    """
    reference, dtype = None, dtype or run_dtype(program)
    if options.verify and transport.rank == 0:
        status.set(Milestone.VERIFYING)
        # A GPU whose memory was limited for the run may have too little for the whole model.
        device = transport.device if options.gpu_memory_bytes is None else torch.device("cpu")
        reference = _reference(program, prepared, source, options, device)
    if program.plan.model.mode == "inference":
        outputs = _gather_outputs(program, prepared, measured.first_results, transport)
        return Inspected() if reference is None else Inspected(
            verification=verify_inference(reference, outputs, dtype=dtype), reference=reference)
    records = transport.gather_records(measured.losses[0])
    kept: dict[str, F64] = {}
    spread = _Spread()

    def gathered() -> Iterator[tuple[str, int, Tensor]]:
        for name, rank, value in _gather_gradients(program, measured.first_gradients, transport):
            spread.add(name, value)
            if options.gradients:
                kept.setdefault(name, precise(value).numpy())
            yield name, rank, value

    verification = None
    if reference is not None and records is not None:
        verification = verify_training(reference, loss=sum(records), gradients=gathered(), dtype=dtype)
    else:
        deque(gathered(), maxlen=0)
    return Inspected(verification=verification, gradients=kept if options.gradients else None,
                     gradient_spread=spread.largest, reference=reference)


class _Spread:
    """The largest difference between gradients that come one after the other under the same name."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._first: tuple[str, Tensor] | None = None

    def add(self, name: str, value: Tensor) -> None:
        """Compare a gradient with the first of its name."""
        if self._first is None or self._first[0] != name:
            self._first = name, value
        elif not torch.equal(self._first[1], value):
            difference = float((precise(self._first[1]) - precise(value)).abs().max())
            self.largest = max(self.largest, difference) if difference == difference else float("inf")


def _reference(program: Program, prepared: Prepared, source: ModelSource, options: RunOptions,
               device: torch.device) -> Reference:
    plan = program.plan
    module = materialize(source.build(), options.seed, device=device)
    inputs = [item.to(device) for item in source.inputs(plan.model.batch, options.seed)]
    return reference_run(module, inputs, training=plan.model.mode == "training", batch=plan.model.batch,
                         parts=loss_parts(program) if prepared.takes_statistics else ())


def run_dtype(program: Program) -> torch.dtype:
    """Return the least precise dtype among the parameters and the outputs: the one that bounds the accuracy."""
    graph = program.graph
    names = {graph.tensor_dtypes[tensor] for tensor in (*graph.parameters.tolist(), *graph.outputs)}
    names |= {"float32" for name in names if name == "complex64"}
    for name in ("bfloat16", "float16", "float32"):
        if name in names:
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    return torch.float64


def _gather_gradients(program: Program, own: Mapping[str, Tensor],
                      transport: Transport) -> Iterator[tuple[str, int, Tensor]]:
    """Yield on rank 0 (parameter, rank, gradient) for each rank that holds it; all ranks must run through it.

    The parts of a sharded one are put together; each rank's part is looked at within those of the others. A frozen
    parameter has none.
    """
    graph = program.graph
    ranks = {device: rank for rank, device in enumerate(program.rank_names)}
    for tensor, held in parameter_holdings(program.plan, graph).items():
        name, shape, dtype = graph.tensor_names[tensor], graph.tensor_shapes[tensor], _dtype_of(graph, tensor)
        parts: list[tuple[int, Region, Tensor]] = []
        for device, holdings in held.items():
            mine = _flat(own.get(name, torch.empty(0, dtype=dtype)))
            data = transport.gather_tensor(mine, source=ranks[device])
            if data is not None and transport.rank == 0 and data.numel():
                parts.append((ranks[device], holdings[0].region, data.view(dtype)))
        whole = torch.full(shape, float("nan"), dtype=dtype) if any(region for _, region, _ in parts) else None
        for _, region, part in reversed(parts) if whole is not None else ():
            put_region(whole, region, part)
        for rank, region, part in parts:
            if whole is not None:
                put_region(whole, region, part)
            yield name, rank, part.view(shape) if whole is None else whole.clone()


def _gather_outputs(program: Program, prepared: Prepared, results: list[tuple[int, int, dict[str, Tensor]]],
                    transport: Transport) -> dict[int, Tensor]:
    """Return on rank 0 the model's outputs for the whole batch, by position."""
    graph = program.graph
    own = {(instance, microbatch, name): value for instance, microbatch, values in results
           for name, value in values.items()}
    found: dict[int, list[tuple[int, int, Tensor]]] = {}
    for position, tensor in enumerate(graph.outputs):
        for index, instance in enumerate(program.instances):
            if int(graph.tensor_producer[tensor]) not in program.stage_ops[instance.stage]:
                continue
            shape = _output_shape(graph, tensor, instance.num_samples)
            for microbatch in instance.microbatches:
                mine = own.get((index, microbatch, graph.tensor_names[tensor]))
                data = transport.gather_tensor(_flat(mine), source=instance.ranks[0])
                if data is not None and transport.rank == 0:
                    sample = microbatch * program.plan.microbatch_size + instance.samples[0]
                    found.setdefault(position, []).append(
                        (sample, instance.num_samples, data.view(_dtype_of(graph, tensor)).view(shape)))
    return {position: _put_together(sorted(parts, key=lambda part: part[0])) for position, parts in found.items()}


def _output_shape(graph: Graph, tensor: int, num_samples: int) -> tuple[int, ...]:
    """Return the shape of an output for so many samples: its first dimension is the batch, unless it is a number."""
    shape = graph.tensor_shapes[tensor]
    return (shape[0] // graph.batch * num_samples, *shape[1:]) if shape else ()


def _put_together(parts: list[tuple[int, int, Tensor]]) -> Tensor:
    """Return an output of the whole batch from those of (first sample, number of samples); numbers are means."""
    if parts[0][2].dim():
        return torch.cat([value for _, _, value in parts])
    total = sum(count for _, count, _ in parts)
    return sum((value * (count / total) for _, count, value in parts), torch.zeros((), dtype=parts[0][2].dtype))


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().reshape(-1)


def _dtype_of(graph: Graph, tensor: int) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, graph.tensor_dtypes[tensor])
    return dtype
