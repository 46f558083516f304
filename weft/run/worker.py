"""One rank's life: connect, trace, load, run the steps, send what was measured to rank 0, which verifies and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from weft.errors import RunError
from weft.model.source import ModelSource, resolve_model
from weft.model.weights import materialize
from weft.plan.plan import Plan
from weft.plan.program import Program
from weft.plan.structure import parameter_holders
from weft.run.executor import Executor, StepTimes, measured_timeline
from weft.run.parameters import Parameters
from weft.run.prepare import Prepared, Tracer, lower_to_run, prepare_rank
from weft.run.result import RunOptions, RunResult, Verification
from weft.run.status import Milestone, StatusLine
from weft.run.transport import Transport
from weft.run.verify import reference_run, verify_inference, verify_training

MAX_TIMED_STEPS: Final = 64
"""Times of single instructions are kept for the last so many steps."""


def resolve_source(plan: Plan, model: str, options: RunOptions) -> ModelSource:
    """Return the model to run, in the plan's mode and the run's dtype."""
    source = resolve_model(model, mode=plan.model.mode)
    if not isinstance(source, ModelSource):
        raise RunError(f"{model!r} is a graph without a module: only PyTorch models can be run")
    return source if options.dtype is None else source.with_dtype(options.dtype)


def check_world(plan: Plan, num_ranks: int) -> None:
    """Raise ``RunError`` unless the plan is for that many ranks."""
    wanted = len(plan.cluster.devices)
    if wanted != num_ranks:
        raise RunError(f"the plan is for {wanted} devices ({', '.join(plan.cluster.devices[:8])}"
                       f"{', ...' if wanted > 8 else ''}) but there are {num_ranks} processes: start {wanted}")


def execute(plan: Plan, tracer: Tracer, options: RunOptions, *, transport: Transport, status: StatusLine,
            adjust: Callable[[Executor], None] | None = None) -> RunResult | None:
    """Run the plan's steps on this rank; return the result on rank 0, None elsewhere.

    ``adjust`` may change the executor before the first step; it is there for tests.
    """
    status.set(Milestone.TRACING)
    program = lower_to_run(plan, tracer)
    status.set(Milestone.LOADING)
    transport.connect_groups(bucket.ranks for bucket in program.buckets)
    prepared = prepare_rank(program, tracer, transport.rank, device=transport.device, seed=options.seed)
    executor = Executor(program, stages=prepared.stages, parameters=prepared.parameters, transport=transport,
                        status=status)
    inputs = tracer.source.inputs(plan.model.batch, options.seed)
    executor.load(dict(zip(prepared.input_names, inputs, strict=True)))
    if adjust is not None:
        adjust(executor)
    measured = _run_steps(executor, options, transport, status)
    status.set(Milestone.COLLECTING)
    result = _collect(program, measured, transport)
    verification, gradients = _inspect(program, prepared, measured, options, tracer.source, transport, status)
    status.set(Milestone.DONE)
    return None if result is None else replace(result, verification=verification, gradients=gradients)


class _Measured:
    """What one rank has from its steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.cpu_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.times: list[StepTimes] = []
        self.first_gradients: dict[str, Tensor] = {}
        self.first_results: list[tuple[int, int, tuple[Tensor, ...]]] = []


def _run_steps(executor: Executor, options: RunOptions, transport: Transport, status: StatusLine) -> _Measured:
    measured = _Measured()
    status.set(Milestone.WAITING)
    offset = transport.clock_offset_s()
    transport.barrier()
    wanted = options.verify or options.gradients
    cpu_start = time.process_time()
    for number in range(options.warmup + options.steps):
        if number == options.warmup:
            status.set(Milestone.WAITING)
            transport.barrier()
            cpu_start = time.process_time()
        executor.step(number)
        measured.losses.append(executor.take_loss())
        results = executor.take_results()
        if number == 0 and wanted:
            measured.first_results = results
            measured.first_gradients = copy_gradients(executor.parameters)
        if number >= options.warmup:
            times = executor.step_times(offset)
            measured.times = [*measured.times[1 - MAX_TIMED_STEPS:], times]
            measured.spans.append(times.span_s)
    measured.cpu_s = time.process_time() - cpu_start
    return measured


def copy_gradients(parameters: Parameters) -> dict[str, Tensor]:
    """Return copies of all gradients of a rank, by parameter."""
    return {name: parameters.gradient(name).detach().clone()
            for name, tensor in parameters.tensors.items() if tensor.requires_grad}


def _collect(program: Program, measured: _Measured, transport: Transport) -> RunResult | None:
    """Return on rank 0 the losses, times and timeline of all ranks."""
    records = transport.gather_records(
        {"losses": measured.losses, "spans": measured.spans, "cpu_s": measured.cpu_s})
    mine = np.stack([np.stack([item.start_s, item.end_s]) for item in measured.times])
    parts = [transport.gather_tensor(torch.from_numpy(mine).reshape(-1) if rank == transport.rank else None, source=rank)
             for rank in range(transport.num_ranks)]
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


def _inspect(program: Program, prepared: Prepared, measured: _Measured, options: RunOptions, source: ModelSource,
             transport: Transport, status: StatusLine) -> tuple[Verification | None, Any]:
    """Return on rank 0 how the first step compares with one device, and its gradients, where asked for."""
    if not options.verify and not options.gradients:
        return None, None
    training = program.plan.model.mode == "training"
    kept: dict[str, Any] = {}
    if not options.verify:
        for name, _, value in _gather_gradients(program, measured.first_gradients, transport):
            kept.setdefault(name, value.double().numpy())
        return None, kept
    reference = None
    if transport.rank == 0:
        status.set(Milestone.VERIFYING)
        module = materialize(source.build(), options.seed, device=transport.device)
        inputs = [item.to(transport.device) for item in source.inputs(program.plan.model.batch, options.seed)]
        reference = reference_run(module, inputs, training=training)
    dtype = _run_dtype(program)
    if not training:
        outputs = _gather_outputs(program, prepared, measured.first_results, transport)
        return None if reference is None else verify_inference(reference, outputs, dtype=dtype), None
    loss = _sum_of(measured.losses[0], transport)
    gathered = _gather_gradients(program, measured.first_gradients, transport)
    if reference is None:
        for _ in gathered:
            pass
        return None, None

    def keep() -> Iterator[tuple[str, int, Tensor]]:
        for name, rank, value in gathered:
            if options.gradients:
                kept.setdefault(name, value.double().numpy())
            yield name, rank, value

    return verify_training(reference, loss=loss, gradients=keep(), dtype=dtype), kept if options.gradients else None


def _run_dtype(program: Program) -> torch.dtype:
    """Return the least precise dtype among the parameters and the outputs: the one that bounds the accuracy."""
    graph = program.graph
    names = {graph.tensor_dtypes[tensor] for tensor in (*graph.parameters.tolist(), *graph.outputs)}
    for name in ("bfloat16", "float16", "float32"):
        if name in names:
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    return torch.float64


def _sum_of(value: float, transport: Transport) -> float:
    records = transport.gather_records(value)
    return sum(records) if records is not None else 0.0


def _gather_gradients(program: Program, own: Mapping[str, Tensor], transport: Transport) -> Iterator[tuple[str, int, Tensor]]:
    """Yield on rank 0 (parameter, rank, gradient) for each rank that holds it; all ranks must run through it."""
    names = {device: rank for rank, device in enumerate(program.rank_names)}
    for tensor, devices in parameter_holders(program.plan, program.graph).items():
        name = program.graph.tensor_names[tensor]
        for device in devices:
            mine = own.get(name)
            data = transport.gather_tensor(None if mine is None else mine.cpu().reshape(-1), source=names[device])
            if data is not None and transport.rank == 0:
                dtype = getattr(torch, program.graph.tensor_dtypes[tensor])
                yield name, names[device], data.view(dtype).view(program.graph.tensor_shapes[tensor])


def _gather_outputs(program: Program, prepared: Prepared, results: list[tuple[int, int, tuple[Tensor, ...]]],
                    transport: Transport) -> dict[int, Tensor]:
    """Return on rank 0 the model's outputs for the whole batch, by position."""
    found: dict[int, list[tuple[int, Tensor]]] = {}
    plan, graph = program.plan, program.graph
    for position, tensor in enumerate(graph.outputs):
        name = graph.tensor_names[tensor]
        for index, instance in enumerate(program.instances):
            if int(graph.tensor_producer[tensor]) not in program.stage_ops[instance.stage]:
                continue
            for microbatch in instance.microbatches:
                mine = next((values[prepared.stages[index].module.outputs.index(name)]
                             for owner, number, values in results if (owner, number) == (index, microbatch)), None)
                data = transport.gather_tensor(None if mine is None else mine.cpu().reshape(-1), source=instance.ranks[0])
                if data is not None and transport.rank == 0:
                    first = microbatch * plan.microbatch_size + instance.samples[0]
                    value = data.view(getattr(torch, graph.tensor_dtypes[tensor]))
                    shape = _shape_for(graph.tensor_shapes[tensor], graph.batch, instance.num_samples)
                    found.setdefault(position, []).append((first, value.view(shape)))
    return {position: torch.cat([value for _, value in sorted(parts, key=lambda part: part[0])])
            for position, parts in found.items()}


def _shape_for(shape: tuple[int, ...], batch: int, num_samples: int) -> tuple[int, ...]:
    """Return an output's shape for another number of samples; its first dimension is the batch."""
    return (shape[0] // batch * num_samples, *shape[1:])
