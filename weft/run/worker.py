"""One rank's life: trace, load, run the steps; then rank 0 collects, verifies and returns the result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from weft.base.errors import InputError, RunError
from weft.model.fidelity import check_trace
from weft.model.source import ModelSource, resolve_model
from weft.model.weights import materialize
from weft.plan.cut import check_cut
from weft.plan.notes import plan_notes
from weft.plan.plan import Plan, load_plan
from weft.plan.program import Op, Program
from weft.run.checkpoint import Checkpoints, model_state
from weft.run.executor import Executor, StepTimes, loaded_executor, measured_timeline
from weft.run.failures import end_process
from weft.run.memory_meter import add_memory, measure_step
from weft.run.prepare import Prepared, Tracer, compile_notes, connect_ranks, lower_to_run, prepare_rank
from weft.run.result import RunOptions, RunResult, Verification, check_folders, rank_devices, save_result
from weft.run.status import Milestone, StatusLine
from weft.run.transport import Transport, meeting_store, open_store
from weft.run.verify import Measured, inspect, run_dtype, verify_again
from weft.run.watch import start_watch

MAX_TIMED_STEPS: Final = 64
"""Times of single instructions are kept for the last so many steps."""


def resolve_source(plan: Plan, model: str, options: RunOptions) -> ModelSource:
    """Return the model to run, in the plan's mode, and in the dtype of the options or else as planned."""
    source = resolve_model(model, mode=plan.model.mode)
    if not isinstance(source, ModelSource):
        raise RunError(f"{model!r} is a graph without a module: only PyTorch models can be run")
    return source.with_dtype(options.dtype or plan.model.conversion)


def check_world(plan: Plan, num_ranks: int) -> None:
    """Raise ``RunError`` unless the plan is for that many ranks."""
    wanted = len(plan.cluster.devices)
    if wanted != num_ranks:
        raise RunError(f"the plan is for {wanted} devices ({', '.join(plan.cluster.devices[:8])}"
                       f"{', ...' if wanted > 8 else ''}) but there are {num_ranks} processes: start {wanted}")


def own_device(text: str, *, rank: int, num_ranks: int) -> torch.device:
    """Return this rank's device, as ``text`` says; GPUs without a number are given out in the order of local ranks."""
    wanted = rank_devices(text, num_ranks)
    if not wanted[rank].startswith("cuda"):
        return torch.device("cpu")
    local = wanted[rank - int(os.environ.get("LOCAL_RANK", rank)):rank]
    _, _, number = wanted[rank].partition("@")[0].partition(":")
    index = int(number) if number else sum(name.startswith("cuda") for name in local)
    count = torch.cuda.device_count()
    if index >= count:
        raise RunError(f"GPU {index} is needed for rank {rank}, but this machine has {count}: start fewer ranks "
                       "on it, or use --device cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if len(set(wanted)) > 1:  # convolutions on a GPU round to 10 bits by default, which a rank on a CPU does not
        torch.backends.cudnn.allow_tf32 = False
    return device


def run_rank(plan_file: str, model: str, options: RunOptions, *, status: StatusLine, folder: Path | None,
             listen_fd: int | None, output: Path | None) -> RunResult | None:
    """Return on rank 0 the result, whose files then are in the launcher's ``folder`` or in ``output``; None elsewhere.

    Without a launcher the ranks watch each other; then a failure is told to all of them and ends the process.
    """
    rank, num_ranks = status.rank, int(os.environ["WORLD_SIZE"])
    wanted, _, place = os.environ.get("WEFT_TEST_FAULT", "").partition(":")
    fault = place if wanted == str(rank) else ""
    plan = load_plan(plan_file)
    check_world(plan, num_ranks)
    source = resolve_source(plan, model, options)
    status.set(Milestone.CONNECTING)
    if fault == "init":
        os.kill(os.getpid(), signal.SIGKILL)
    device = own_device(options.device, rank=rank, num_ranks=num_ranks)
    if options.gpu_memory_bytes is not None and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory  # beyond its part, memory is an error
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gpu_memory_bytes / whole), device)
    store = (meeting_store(options.timeout_s, rank=rank) if folder is None else
             open_store(listen_fd=listen_fd, timeout_s=options.timeout_s))
    transport = Transport(rank=rank, num_ranks=num_ranks, device=device, timeout_s=options.timeout_s, store=store,
                          by_host="," in options.device, status=status)
    watch = None if folder is not None else start_watch(transport, status, predicted_s=plan.search.step_time)
    try:
        if watch is not None and rank == 0:
            check_folders(options, output)
        result = execute(plan, Tracer(source), options, transport=transport, adjust=partial(_break_on_purpose, fault))
        target = folder or output
        if result is not None and target is not None:
            save_result(result, target)
        if watch is not None:
            watch.is_leaving = True
        transport.leave()
    except Exception as problem:
        transport.abort()
        if watch is None:
            raise
        end_process(watch.fail(problem))
    if watch is not None:
        watch.stop()
    return result


def _break_on_purpose(fault: str, executor: Executor) -> None:
    """Let the first instruction of the kind that a test asked for kill the process."""
    text, _, how = fault.partition("!")
    place, _, step = text.partition("@")
    actions, status = executor.binder.actions, executor.transport.status

    def faulty(action: Callable[[], None]) -> None:
        if status.cell[1] >= int(step or 0):
            while how == "hang":
                time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        action()

    for position, item in enumerate(executor.program.instructions(executor.transport.rank) if place else ()):
        kind = item.phase.name if item.op == Op.COMPUTE else "all_reduce" if item.op == Op.COLLECTIVE else ""
        if kind == place:
            actions[position] = partial(faulty, actions[position])
            return


def execute(plan: Plan, tracer: Tracer, options: RunOptions, *, transport: Transport,
            adjust: Callable[[Executor], None] | None = None) -> RunResult | None:
    """Run the plan's steps on this rank; return the result on rank 0, None elsewhere.

    ``adjust`` may change the executor before the first step; it is there for tests.
    """
    status = transport.status
    if options.compiled is not None:
        plan = replace(plan, compiled=options.compiled)
    status.set(Milestone.TRACING)
    program = lower_to_run(plan, tracer)
    status.set(Milestone.LOADING)
    connect_ranks(program, tracer, transport)
    prepared = prepare_rank(program, tracer, transport, seed=options.seed)
    fallbacks = compile_notes(prepared, transport)
    executor = loaded_executor(prepared, tracer.source, transport, seed=options.seed, adjust=adjust)
    checkpoints = None
    if options.checkpoint is not None:
        state = model_state(tracer.source.build(), program, rank=transport.rank, seed=options.seed)
        checkpoints = Checkpoints(prepared, transport, plan=plan, state=state, optimizer=executor.optimizer,
                                  shares=executor.shares)
    measured = _run_steps(executor, prepared, options, checkpoints)
    metered = None
    if options.memory:
        transport.barrier()
        metered = measure_step(executor, buffers=prepared.buffers.values(), number=options.warmup + options.steps)
    status.set(Milestone.COLLECTING)
    result = collect(program, measured, transport)
    if metered is not None:
        result = add_memory(result, program, metered, source=tracer.source, transport=transport)
    if options.verify or options.gradients:
        inspected = inspect(prepared, measured, options, source=tracer.source, transport=transport)
        draws = transport.total(float(prepared.random.is_used)) > 0
        check = inspected.verification
        if check is not None:
            check = _with_reason(replace(check, draws_random=draws), prepared, tracer, options)
        misses = (check is not None and inspected.verification is not None and not (check.passed or draws)
                  and check.reason == inspected.verification.reason and run_dtype(program) != torch.float64)
        if transport.share_record(misses):
            del executor, prepared, measured
            first = replace(inspected, verification=check)
            check = verify_again(plan, tracer, options, first, transport=transport, adjust=adjust)
        if result is not None:
            result = replace(result, verification=check, gradients=inspected.gradients,
                             gradient_spread=inspected.gradient_spread)
    status.set(Milestone.DONE)
    notes = (*program.graph.warnings, *plan_notes(program.graph, plan), *fallbacks)
    return None if result is None else replace(result, notes=notes)


def _with_reason(check: Verification, prepared: Prepared, tracer: Tracer, options: RunOptions) -> Verification:
    """Return a verification after looking whether the trace is right and the plan may cut the batch of this model.

    One process was given the whole batch, so a run that equals it shows that; of a model that takes statistics it was
    given the plan's parts, which would hide a loss that is not a mean over samples.
    """
    plan, graph, source = prepared.program.plan, prepared.program.graph, tracer.source
    if check.passed and (plan.model.mode != "training" or not prepared.takes_statistics):
        return check
    module = materialize(source.build(), options.seed, device=torch.device("cpu"))
    problem = ""
    if not check.passed:
        problem = check_trace(tracer.trace(graph.batch), module, source.inputs(graph.batch, options.seed)).problem
    problem = problem or check_cut(plan, graph, module, source.inputs(plan.model.batch, options.seed)).problem
    return replace(check, passed=check.passed and not problem, reason=problem or check.reason)


def _first_step(options: RunOptions, checkpoints: Checkpoints | None) -> int:
    """Return how many steps are taken already, after loading the latest checkpoint; refuse what makes no sense."""
    if checkpoints is None:
        return 0
    if checkpoints.program.plan.model.mode != "training":
        raise InputError("checkpoints are for training, but the plan is for inference")
    if options.resume and options.verify:
        raise InputError("a resumed run does not begin with the parameters that verify compares: use one or the other")
    found = checkpoints.find(Path(options.checkpoint or "")) if options.resume else None
    if found is None:
        return 0
    step, last = checkpoints.load(found).step, options.warmup + options.steps
    if step >= last:
        raise InputError(f"{str(found)!r} has {step} steps already, so nothing is left of {last}: ask for more steps")
    return step


def _run_steps(executor: Executor, prepared: Prepared, options: RunOptions,
               checkpoints: Checkpoints | None) -> Measured:
    measured, transport, status = Measured(), executor.transport, executor.transport.status
    first, last = _first_step(options, checkpoints), options.warmup + options.steps
    status.set(Milestone.WAITING)
    offset = transport.clock_offset_s()
    wanted = options.verify or options.gradients
    for number in range(first, last):
        transport.barrier()  # a prediction begins with all ranks at once, so a measured step does too
        cpu_start = time.process_time()
        executor.step(number)
        prepared.buffer_shares.spread()
        cpu_s = time.process_time() - cpu_start
        measured.losses.append(executor.take_loss())
        results = executor.take_results()
        if number == first and wanted:
            measured.keep_first(executor, results)
        if number >= options.warmup:
            times = executor.step_times(offset)
            measured.times = [*measured.times[1 - MAX_TIMED_STEPS:], times]
            measured.spans.append(times.span_s)
            measured.cpu_s += cpu_s
        if checkpoints is not None and (number + 1 == last or (number + 1) % (options.checkpoint_every or last) == 0):
            status.set(Milestone.SAVING)
            checkpoints.save(Path(options.checkpoint or ""), step=number + 1)
            status.set(Milestone.WAITING)
    return measured


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
    values = [part.view(torch.float64).numpy().reshape(len(measured.times), 2, -1)[chosen]
              for part in parts if part is not None]
    losses = tuple(float(value) for value in np.asarray([record["losses"] for record in records]).sum(axis=0))
    return RunResult(
        num_ranks=transport.num_ranks, losses=losses if program.plan.model.mode == "training" else (),
        step_times_s=tuple(durations.tolist()), cpu_s=tuple(record["cpu_s"] for record in records),
        timeline=measured_timeline(program, [StepTimes(start_s=start_s, end_s=end_s) for start_s, end_s in values]))
