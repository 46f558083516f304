"""Does a run equal one device? The original module, eager, on the whole batch, against what the ranks computed.

Both start from the same parameters and inputs. Errors are those of ``weft.model.parts``; that of the loss is
relative to the loss. Gradients and outputs travel to rank 0 one tensor at a time, so that it needs memory for the
reference run and one tensor.

A model that takes statistics over the samples it sees (batch norm in training) gives other results for micro-batches
than for the batch, on one device too: for such a model the reference takes the same micro-batches, one after the other.
PyTorch's grouped products know only narrow numbers, so in float64 they are computed group by group.

Is it rounding or an error? Where a run misses the tolerance of its dtype, its first step is taken again in float64
(``verify_again``). A plan adds numbers up in another order than one process does, and some models make much of the last
digit: a batch norm over two values gives plus or minus one, whatever they are. An error stays as large in float64,
rounding all but vanishes. Besides, one process in the run's dtype must be about as far from itself in float64 as the
run is from one process: what is much farther off than rounding can bring it is an error, even one that does not come
twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from weft.base.errors import WeftError
from weft.model.graph import F64, Graph
from weft.model.parts import least_divisor, precise, relative_error
from weft.model.source import ModelSource
from weft.model.weights import materialize
from weft.model.zoo import is_mixed
from weft.plan.cut import loss_parts
from weft.plan.holders import parameter_holdings
from weft.plan.plan import Plan
from weft.plan.program import Program
from weft.plan.sharding import Region
from weft.run.executor import Executor, StepTimes, loaded_executor
from weft.run.parameters import gradient_regions, put_region
from weft.run.prepare import Prepared, Tracer, connect_ranks, lower_to_run, prepare_rank
from weft.run.result import RunOptions, Verification
from weft.run.status import Milestone
from weft.run.transport import Transport


class GroupedProducts(TorchFunctionMode):
    """Computes grouped products of float64 rows; everything else is as it is."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if func is torch._grouped_mm and args[0].dtype is torch.float64 and (args[0].ndim, args[1].ndim) == (2, 3):
            return _product(args[0], args[1], args[2] if len(args) > 2 else given["offs"])
        return func(*args, **given)


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return each row times the matrix of its group; rows behind the last group give zeros."""
    bounds = [0, *ends.tolist()]
    pieces = [rows[first:last] @ matrix for first, last, matrix in zip(bounds, bounds[1:], matrices, strict=False)]
    return torch.cat([*pieces, rows.new_zeros(len(rows) - bounds[-1], matrices.shape[-1])])


TOLERANCES: Final = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest error that counts as equal, by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one device computes."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]


def reference_run(module: torch.nn.Module, inputs: Sequence[Tensor], *, training: bool, batch: int,
                  parts: Sequence[tuple[int, int]] = ()) -> Reference:
    """Return the outputs and gradients of the module on the whole batch.

    With ``parts``, (first, last-plus-one) sample of each, the loss and gradients are the weighted sums over those.
    """
    if not training:
        with torch.no_grad():
            return Reference(outputs=_outputs(module, inputs), gradients={})
    loss = torch.zeros((), dtype=torch.float64)
    for first, last in parts or [(0, batch)]:
        rows = [item[first:last] if item.ndim and item.shape[0] == batch else item for item in inputs]
        weighted = _outputs(module, rows)[0] * ((last - first) / batch)
        weighted.backward()
        loss += weighted.detach().double().cpu()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return Reference(outputs=(loss,), gradients=gradients)


def _outputs(module: torch.nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with GroupedProducts():
        results = module(*inputs)
    return tuple(item for item in pytree.tree_leaves(results) if isinstance(item, Tensor))


def verify_training(reference: Reference, *, loss: float, gradients: Iterable[tuple[str, int, Tensor]],
                    dtype: torch.dtype) -> Verification:
    """Return how far the loss and the gradients, given as (name, rank, value), are from the reference."""
    expected = float(reference.outputs[0].double())
    floor = least_divisor(reference.gradients.values())
    worst, largest, count, seen = "", 0.0, 0, set()
    for name, rank, value in gradients:
        if name not in reference.gradients:
            continue
        error = relative_error(value, reference.gradients[name], floor=floor)
        count += 1
        seen.add(name)
        if not error <= largest:
            worst, largest = f"{name} (rank {rank})", error
    for name in sorted(reference.gradients.keys() - seen):
        if float(reference.gradients[name].abs().max()) > 0:
            worst, largest = f"{name} (on no rank)", float("inf")
    tolerance, strange = TOLERANCES[dtype], _strange(reference)
    reason = f"{strange} in one process as well, and what is not finite cannot be compared" if strange else ""
    loss_error = abs(loss - expected) / max(abs(expected), 1e-300)
    return Verification(passed=max(loss_error, largest) <= tolerance, tolerance=tolerance, loss_error=loss_error,
                        gradient_error=largest, worst=worst, num_gradients=count, reference_loss=expected,
                        reason=reason)


def _strange(reference: Reference) -> str:
    """Return what in it is not finite."""
    loss = float(reference.outputs[0].double())
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    name = next((name for name, item in reference.gradients.items() if not item.isfinite().all()), None)
    return "" if name is None else f"the gradient of {name!r} is not finite"


def verify_inference(reference: Reference, outputs: Mapping[int, Tensor], *, dtype: torch.dtype) -> Verification:
    """Return how far the model's outputs, by position, are from the reference."""
    errors = {position: relative_error(value, reference.outputs[position]) for position, value in outputs.items()}
    worst = max(errors, key=lambda position: errors[position])
    return Verification(passed=errors[worst] <= TOLERANCES[dtype], tolerance=TOLERANCES[dtype],
                        loss_error=errors[worst], gradient_error=0.0, worst=f"output {worst}", num_gradients=0,
                        reference_loss=0.0)


class Measured:
    """What one rank has from its steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.cpu_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.times: list[StepTimes] = []
        self.first_gradients: dict[str, Tensor] = {}
        self.first_results: list[tuple[int, int, dict[str, Tensor]]] = []

    def keep_first(self, executor: Executor, results: list[tuple[int, int, dict[str, Tensor]]]) -> None:
        """Keep the results of the first step and, in training, copies of its gradients."""
        self.first_results = results
        if executor.program.plan.model.mode == "training":  # else copies of zeros would fill the memory
            parameters = executor.parameters
            self.first_gradients = {name: parameters.gradient(name).detach().clone()
                                    for name, tensor in parameters.tensors.items() if tensor.requires_grad}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """What rank 0 found out about the first step; empty on other ranks."""

    verification: Verification | None = None
    gradients: dict[str, F64] | None = None
    gradient_spread: float | None = None
    reference: Reference | None = None
    """What it was compared with."""


def inspect(prepared: Prepared, measured: Measured, options: RunOptions, *, source: ModelSource, transport: Transport,
            dtype: torch.dtype | None = None) -> Inspected:
    """Return on rank 0 how the first step compares with one device, and its gradients, as the options ask.

    The tolerance is that of ``dtype``, or else of the least precise among parameters and outputs.
    """
    program, reference = prepared.program, None
    dtype = dtype or run_dtype(program)
    if options.verify and transport.rank == 0:
        transport.status.set(Milestone.VERIFYING)
        # A GPU whose memory was limited for the run may have too little for the whole model.
        device = transport.device if options.gpu_memory_bytes is None else torch.device("cpu")
        model = program.plan.model
        reference = reference_run(
            materialize(source.build(), options.seed, device=device), training=model.mode == "training",
            inputs=[item.to(device) for item in source.inputs(model.batch, options.seed)], batch=model.batch,
            parts=loss_parts(program) if prepared.takes_statistics else ())
    if program.plan.model.mode == "inference":
        outputs = _gather_outputs(program, measured.first_results, transport)
        return Inspected() if reference is None else Inspected(
            verification=verify_inference(reference, outputs, dtype=dtype), reference=reference)
    records = transport.gather_records(measured.losses[0])
    kept: dict[str, F64] = {}
    first: dict[str, Tensor] = {}
    spread = [0.0]

    def gathered() -> Iterator[tuple[str, int, Tensor]]:
        for name, rank, value in _gather_gradients(program, measured.first_gradients, transport):
            if name in first:
                spread.append(_difference(first[name], value))
            else:
                first.clear()  # gradients of one name come one after the other
                first[name] = value
            if options.gradients:
                kept.setdefault(name, precise(value).numpy())
            yield name, rank, value

    verification = None
    if reference is not None and records is not None:
        verification = verify_training(reference, loss=sum(records), gradients=gathered(), dtype=dtype)
    else:
        deque(gathered(), maxlen=0)
    return Inspected(verification=verification, gradients=kept if options.gradients else None,
                     gradient_spread=max(spread), reference=reference)


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference between two tensors; infinity where it is not a number."""
    if torch.equal(one, other):
        return 0.0
    found = float((precise(one) - precise(other)).abs().max())
    return found if found == found else float("inf")


def run_dtype(program: Program) -> torch.dtype:
    """Return the least precise dtype among the parameters and the outputs: the one that bounds the accuracy."""
    graph = program.graph
    if is_mixed(program.plan.model.dtype):
        return torch.bfloat16
    names = {graph.tensor_dtypes[tensor] for tensor in (*graph.parameters.tolist(), *graph.outputs)}
    return _least_precise(names, ("bfloat16", "float16", "float32"))


def _least_precise(names: Collection[str], narrow: Sequence[str]) -> torch.dtype:
    """Return the first of the ``narrow`` dtypes that is among the names, or float64."""
    found = {"float32" if name == "complex64" else name for name in names}
    dtype: torch.dtype = getattr(torch, next((name for name in narrow if name in found), "float64"))
    return dtype


def _gather_gradients(program: Program, own: Mapping[str, Tensor],
                      transport: Transport) -> Iterator[tuple[str, int, Tensor]]:
    """Yield on rank 0 (parameter, rank, gradient) for each rank that holds it; all ranks must run through it.

    The parts of a sharded one are put together; each rank's part is looked at within those of the others. A frozen
    parameter has none.
    """
    graph = program.graph
    ranks = {device: rank for rank, device in enumerate(program.rank_names)}
    regions = [gradient_regions(program, rank) for rank in range(program.num_ranks)]
    for tensor, held in parameter_holdings(program.plan, graph).items():
        name, shape, dtype = graph.tensor_names[tensor], graph.tensor_shapes[tensor], _dtype_of(graph, tensor)
        parts: list[tuple[int, Region, Tensor]] = []
        for device in held:
            mine = _flat(own.get(name, torch.empty(0, dtype=dtype)))
            data = transport.gather_tensor(mine, source=ranks[device])
            if data is not None and transport.rank == 0 and data.numel():
                parts.append((ranks[device], regions[ranks[device]][name], data.view(dtype)))
        whole = torch.full(shape, float("nan"), dtype=dtype) if any(region for _, region, _ in parts) else None
        for _, region, part in reversed(parts) if whole is not None else ():
            put_region(whole, region, part)
        for rank, region, part in parts:
            if whole is not None:
                put_region(whole, region, part)
            yield name, rank, part.view(shape) if whole is None else whole.clone()


def _gather_outputs(program: Program, results: list[tuple[int, int, dict[str, Tensor]]],
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
            shape = graph.tensor_shapes[tensor]  # its first dimension is the batch, unless it is a number
            shape = (shape[0] // graph.batch * instance.num_samples, *shape[1:]) if shape else ()
            for microbatch in instance.microbatches:
                mine = own.get((index, microbatch, graph.tensor_names[tensor]))
                data = transport.gather_tensor(_flat(mine), source=instance.ranks[0])
                if data is not None and transport.rank == 0:
                    sample = microbatch * program.plan.microbatch_size + instance.samples[0]
                    found.setdefault(position, []).append(
                        (sample, instance.num_samples, data.view(_dtype_of(graph, tensor)).view(shape)))
    return {position: _put_together(sorted(parts, key=lambda part: part[0])) for position, parts in found.items()}


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


MOST_TIMES_ROUNDING: Final = 10.0
"""A run may be so many times as far from one process as rounding brings one process from float64."""
_PRECISE: Final = (torch.float64, torch.float32)


def verify_again(plan: Plan, tracer: Tracer, options: RunOptions, first: Inspected, *, transport: Transport,
                 adjust: Callable[[Executor], None] | None) -> Verification | None:
    """Return on rank 0 the verdict with what float64 says about it, None elsewhere; all ranks call this together.

    ``first`` is what was found about the step in question.
    """
    again = Tracer(tracer.source.with_dtype("float64"))
    problem, prepared = _room_problem(transport.device, options), None
    if not problem:
        try:
            program = lower_to_run(plan, again)
            connect_ranks(program, again, transport)  # the same groups as before: nothing is exchanged
            prepared = prepare_rank(program, again, transport, seed=options.seed)
            if (dtype := _computed_dtype(prepared)) not in _PRECISE:
                problem = f"it computes in {str(dtype).removeprefix('torch.')} by itself"
        except (WeftError, RuntimeError, TypeError, ValueError) as found:
            problem = f"{type(found).__name__}: {found}"
    problem = transport.first_record(problem)[1]
    if problem:
        return None if first.verification is None else replace(
            first.verification, note="whether this is rounding is not known: the model cannot be run in float64 "
            f"({problem})")
    assert prepared is not None
    executor = loaded_executor(prepared, again.source, transport, seed=options.seed, adjust=adjust)
    executor.step(0)
    measured = Measured()
    measured.losses.append(executor.take_loss())
    measured.keep_first(executor, executor.take_results())
    second = inspect(prepared, measured, replace(options, verify=True, gradients=False), source=again.source,
                     transport=transport, dtype=_computed_dtype(prepared))
    if first.verification is None or first.reference is None or second.verification is None or (
            second.reference is None):
        return None
    own = _distance(first.reference, second.reference, training=plan.model.mode == "training")
    return verdict(first.verification, second.verification, own)


def verdict(check: Verification, precise: Verification, own: float) -> Verification:
    """Return the verdict, given that in float64, and how far one process in this dtype is from itself in float64."""
    error, again = largest_error(check), largest_error(precise)
    is_explained = error <= MOST_TIMES_ROUNDING * max(own, check.tolerance)
    note = ""
    if precise.passed and not is_explained:
        note = (f"in float64 the same plan is equal to {again:.1e}, but rounding moves one process by {own:.1e} alone: "
                "something else went wrong, perhaps not every time")
    elif not precise.passed:
        note = f"in float64 the same plan differs by {again:.1e}: this is not rounding"
    return replace(check, passed=precise.passed and is_explained, float64_error=again, rounding_error=own,
                   note="" if precise.reason else note, reason=precise.reason)


def largest_error(check: Verification) -> float:
    """Return the largest of a verification's errors; infinity where one is not a number."""
    errors = (check.loss_error, check.gradient_error)
    return max(errors) if all(item == item for item in errors) else float("inf")


def _distance(reference: Reference, precise: Reference, *, training: bool) -> float:
    """Return how far one process is from itself in float64."""
    if training:
        gradients = ((name, 0, value) for name, value in reference.gradients.items())
        return largest_error(verify_training(precise, loss=float(reference.outputs[0].double()), gradients=gradients,
                                             dtype=torch.float64))
    return largest_error(verify_inference(precise, dict(enumerate(reference.outputs)), dtype=torch.float64))


def _computed_dtype(prepared: Prepared) -> torch.dtype:
    """Return the least precise dtype that the model computes in even when it is converted to float64."""
    return _least_precise(set(prepared.program.graph.tensor_dtypes),
                          ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32"))


def _room_problem(device: torch.device, options: RunOptions) -> str:
    """Return why a GPU may have too little memory for the step in float64, which takes up to four times as much."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    room = min(free + torch.cuda.memory_reserved(device), options.gpu_memory_bytes or total)
    needed = 4 * torch.cuda.max_memory_allocated(device)
    return "" if needed <= room else (f"it may take {needed} bytes of a GPU that has {room} for it: run it with "
                                      "--device cpu")
