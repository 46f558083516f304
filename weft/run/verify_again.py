"""Is it rounding or an error? Where a run misses the tolerance of its dtype, its first step again in float64.

A plan adds numbers up in another order than one process does, and some models make much of the last digit: a batch
norm over two values gives plus or minus one, whatever they are. An error stays as large in float64, rounding all but
vanishes. Besides, one process in the run's dtype must be about as far from itself in float64 as the run is from one
process: what is much farther off than rounding can bring it is an error, even one that does not come twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from weft.base.errors import WeftError
from weft.plan.plan import Plan
from weft.plan.program import Program
from weft.run.collect import Measured, inspect
from weft.run.executor import Executor
from weft.run.prepare import Prepared, Tracer, connect_ranks, lower_to_run, prepare_rank
from weft.run.result import RunOptions, Verification
from weft.run.status import StatusLine
from weft.run.transport import Transport
from weft.run.verify import Reference, copy_gradients, verify_inference, verify_training

MOST_TIMES_ROUNDING: Final = 10.0
"""A run may be so many times as far from one process as rounding brings one process from float64."""
_PRECISE: Final = (torch.float64, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The step in question, on rank 0; empty on other ranks."""

    check: Verification | None
    reference: Reference | None


def verify_again(plan: Plan, tracer: Tracer, options: RunOptions, first: FirstStep, *, transport: Transport,
                 status: StatusLine, adjust: Callable[[Executor], None] | None) -> Verification | None:
    """Return on rank 0 the verdict with what float64 says about it, None elsewhere; all ranks call this together."""
    again = Tracer(tracer.source.with_dtype("float64"))
    problem, program, prepared = _room_problem(transport.device, options), None, None
    if not problem:
        try:
            program = lower_to_run(plan, again)
            connect_ranks(program, again, transport)  # the same groups as before: nothing is exchanged
            prepared = prepare_rank(program, again, transport, seed=options.seed)
            problem = _precision_problem(program)
        except (WeftError, RuntimeError, TypeError, ValueError) as found:
            problem = f"{type(found).__name__}: {found}"
    problems = transport.gather_records(problem)
    problem = transport.share_record("" if problems is None else next(filter(None, problems), ""))
    if problem:
        return None if first.check is None else replace(
            first.check, note=f"whether this is rounding is not known: the model cannot be run in float64 ({problem})")
    assert program is not None
    assert prepared is not None
    measured = _step(program, prepared, again, options, transport, status, adjust)
    wanted = replace(options, verify=True, gradients=False)
    second = inspect(program, prepared, measured, wanted, source=again.source, transport=transport, status=status,
                     dtype=_least_precise(program))
    if first.check is None or first.reference is None or second.verification is None or second.reference is None:
        return None
    own = _distance(first.reference, second.reference, training=plan.model.mode == "training")
    return verdict(first.check, second.verification, own)


def _step(program: Program, prepared: Prepared, tracer: Tracer, options: RunOptions, transport: Transport,
          status: StatusLine, adjust: Callable[[Executor], None] | None) -> Measured:
    """Return what the first step in float64 gives."""
    executor = Executor(program, stages=prepared.stages, parameters=prepared.parameters, transport=transport,
                        status=status, factors=prepared.factors)
    inputs = tracer.source.inputs(program.plan.model.batch, options.seed)
    executor.load(dict(zip(prepared.input_names, inputs, strict=True)))
    if adjust is not None:
        adjust(executor)
    executor.step(0)
    measured = Measured()
    measured.losses, measured.first_results = [executor.take_loss()], executor.take_results()
    if program.plan.model.mode == "training":
        measured.first_gradients = copy_gradients(executor.parameters)
    return measured


def verdict(check: Verification, precise: Verification, own: float) -> Verification:
    """Return the verdict, given that in float64, and how far one process in this dtype is from itself in float64."""
    error, again = largest_error(check), largest_error(precise)
    is_explained = error <= MOST_TIMES_ROUNDING * max(own, check.tolerance)
    note = ""
    if precise.passed and not is_explained:
        note = (f"in float64 the same plan is equal to {again:.1e}, but rounding moves one process by {own:.1e} alone: "
                "something else went wrong, perhaps not every time")
    elif not precise.passed:
        note = f"in float64 the same plan differs by {again:.1e}: this is no rounding"
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


def _least_precise(program: Program) -> torch.dtype:
    """Return the least precise dtype that the model computes in even when it is converted to float64."""
    names = set(program.graph.tensor_dtypes)
    for name in ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32"):
        if name in names or (name == "float32" and "complex64" in names):
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    return torch.float64


def _precision_problem(program: Program) -> str:
    dtype = _least_precise(program)
    name = str(dtype).removeprefix("torch.")
    return "" if dtype in _PRECISE else f"it computes in {name} by itself"


def _room_problem(device: torch.device, options: RunOptions) -> str:
    """Return why a GPU may have too little memory for the step in float64, which takes up to four times as much."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    room = min(free + torch.cuda.memory_reserved(device), options.gpu_memory_bytes or total)
    needed = 4 * torch.cuda.max_memory_allocated(device)
    return "" if needed <= room else (f"it may take {needed} bytes of a GPU that has {room} for it: run it with "
                                      "--device cpu")
