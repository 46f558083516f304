"""``weft run``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.base.errors import InputError, RunError
from weft.base.units import parse_bytes
from weft.cli import common, late
from weft.plan.plan import Plan, load_plan, save_plan
from weft.show.tables import make_table, print_table, seconds


def run(
    plan: common.PlanArgument,
    model: common.ModelArgument,
    steps: Annotated[int, typer.Option(help="Measured steps, all on the same inputs.")] = 1,
    warmup: Annotated[int, typer.Option(help="Steps before the measured ones.")] = 0,
    verify: Annotated[bool, typer.Option(help="Compare loss and every gradient with one process.")] = False,
    memory: Annotated[bool, typer.Option(
        "--memory", help="Measure the memory of every process in one more step, beside the account.")] = False,
    dtype: Annotated[str | None, typer.Option(
        "--precision", "--dtype", help="Run in this precision instead of the plan's.")] = None,
    device: Annotated[str, typer.Option(
        help="cpu (gloo) or cuda (nccl) for all, or one for each process with gloo: cuda,cpu; cuda:0@25% is part of a "
             "GPU, by the multi-process service.")] = "cpu",
    compiled: Annotated[bool | None, typer.Option(
        "--compile/--eager", help="Run stages as compiled graphs, or by operator; default: as planned.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(
        help="The most that a process may take of its GPU's memory, such as 4GiB.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each process.")] = 1,
    seed: Annotated[int, typer.Option(help="For initial parameters and inputs.")] = 0,
    timeout: Annotated[float, typer.Option(help="Longest wait for a message, in seconds.")] = 300.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for result, timeline and gradients.")] = None,
    compare_gradients: Annotated[bool, typer.Option(
        "--compare-gradients", help="Run with the plan's exchanges of gradients and with all-reduce for all, and print "
        "what both take and how the gradients differ.")] = False,
    profile: Annotated[Path | None, typer.Option(
        "--profile", metavar="FILE", help="A profile store for the predictions of --compare-gradients.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Folder for checkpoints of a training run; one is written after the last step.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(metavar="N", help="Also after every N steps.")] = None,
    resume: Annotated[bool, typer.Option(
        "--resume", help="Go on from the latest checkpoint, if there is one; its steps count as taken.")] = False,
    devices: Annotated[str | None, typer.Option(
        metavar="A,B", help="Plan again for these devices of the plan, the others being gone.")] = None,
    replan: Annotated[bool, typer.Option(
        "--replan", help="When a process is lost, plan again for the devices that are left and go on from the latest "
        "checkpoint.")] = False,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> int:
    """Run a plan with one local process for each of its devices; `torchrun -m weft.run` does it on many hosts."""
    common.check_outputs({}, folders={"--out": out, "--checkpoint": checkpoint})
    item = load_plan(plan)
    options = late.RunOptions(steps=steps, warmup=warmup, seed=seed, dtype=dtype, verify=verify, memory=memory,
                              timeout_s=timeout, device=device, compiled=compiled,
                              gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
                              gradients=out is not None, checkpoint=None if checkpoint is None else str(checkpoint),
                              checkpoint_every=checkpoint_every, resume=resume)
    if profile is not None and not compare_gradients:
        raise InputError("--profile is for the predictions of --compare-gradients: give both, or see `weft simulate`")
    if memory and compare_gradients:
        raise InputError("--compare-gradients prints no memory: give it or --memory")
    if replan and checkpoint is None:
        raise InputError("--replan goes on from a checkpoint: give --checkpoint DIR as well")
    if verify and (replan or resume):
        raise InputError("--verify compares the first step from the initial parameters, but a resumed run begins "
                         "elsewhere: leave out --verify, or --replan and --resume")
    tell = common.reporter(quiet)
    if devices is not None:
        item, options = _plan_left(item, model, options, devices.split(","), tell)
    tell(f"starting {len(item.cluster.devices)} processes")
    if compare_gradients:
        return _compare_gradients(item, model, options, threads, out, profile, as_json=as_json)
    if replan:
        return late.report_run(_run_on_what_is_left(item, model, options, threads, out, tell), as_json=as_json)
    return late.report_run(late.run_plan(item, model, options=options, threads=threads, keep=out, tell=tell),
                           as_json=as_json)


def _run_on_what_is_left(plan: Plan, model: str, options: late.RunOptions, threads: int, keep: Path | None,
                         tell: Callable[[str], None]) -> late.RunResult:
    """Return the result of the run that came to its end; each time a process is lost, its device is left out."""
    while True:
        try:
            return late.run_plan(plan, model, options=options, threads=threads, keep=keep, tell=tell)
        except late.RankLost as lost:
            left = [name for name in plan.cluster.devices if name != lost.device]
            if not left:
                raise
            tell(f"weft: {lost}")
            plan, options = _plan_left(plan, model, replace(options, resume=True), left, tell)


def _plan_left(plan: Plan, model: str, options: late.RunOptions, names: list[str],
               tell: Callable[[str], None]) -> tuple[Plan, late.RunOptions]:
    """Return a plan for the devices that are left, and the options for it; the plan goes beside the checkpoints."""
    tell(f"planning again for {', '.join(names)}")
    new = late.plan_again(plan, late.resolve_source(plan, model, options), names)
    kinds = dict(zip(plan.cluster.devices, late.rank_devices(options.device, len(plan.cluster.devices)), strict=True))
    if "," in options.device:
        options = replace(options, device=",".join(kinds[name] for name in new.cluster.devices))
    if options.checkpoint is not None:
        path = Path(options.checkpoint) / "plan.json"
        save_plan(new, path)
        tell(f"the new plan ({new.search.by}) is {path}")
    return new, options


def _compare_gradients(plan: Plan, model: str, options: late.RunOptions, threads: int, keep: Path | None,
                       profile: Path | None, *, as_json: bool) -> int:
    """Run a plan with its own exchanges and with all-reduce, print how they compare, and return the exit code.

    What is compared is the time of a step and the gradients of the first: their difference is the largest over the
    elements of one, relative to its largest element.
    """
    import torch


    if not plan.gradients:
        raise InputError("the plan exchanges no gradients, so there is nothing to compare: it is for inference, or no "
                         "two devices share a parameter")
    summed = replace(plan, gradients=tuple(
        replace(item, method="all_reduce", groups=(), server=None) for item in plan.gradients))
    methods = ", ".join(sorted({item.method for item in plan.gradients}))
    ways = ((methods, plan, keep), ("all_reduce", summed, None if keep is None else keep / "all_reduce"))
    predicted = [_predicted(item, model, profile) for _, item, _ in ways]
    results = [late.run_plan(item, model, options=replace(options, gradients=True), threads=threads, keep=folder)
               for _, item, folder in ways]
    own, expected = ({name: torch.from_numpy(value) for name, value in (result.gradients or {}).items()}
                     for result in results)
    floor = late.least_divisor(expected.values())
    errors = {"": 0.0, **{name: late.relative_error(own[name], value, floor=floor) for name, value in expected.items()}}
    worst = max(errors, key=lambda name: errors[name])
    rows: list[dict[str, Any]] = [
        {"exchange": way[0], "predicted_s": time_s, "measured_s": result.step_time_s}
        for way, time_s, result in zip(ways, predicted, results, strict=True)]
    if as_json:
        common.print_json({"ways": rows, "difference": errors[worst], "worst": worst,
                           "between_ranks": results[0].gradient_spread})
    else:
        print_table(make_table("", ("exchange", "predicted", "measured"), (
            (row["exchange"], seconds(row["predicted_s"]), seconds(row["measured_s"])) for row in rows)))
        print(f"largest difference of gradients {errors[worst]:.1e} {worst}; "
              f"between ranks {results[0].gradient_spread:.1e}")
    checks = [result.verification for result in results]
    return 0 if all(check is None or check.passed for check in checks) else RunError.exit_code


def _predicted(plan: Plan, model: str, profile: Path | None) -> float | None:
    """Return the simulated time of a step, or None where the plan does not describe its cluster."""
    if plan.cluster.description is None:
        return None
    graph, cluster = common.graph_of_plan(plan, model), common.cluster_of_plan(plan, None)
    costs = late.planned_costs(graph, cluster, profile, plan.model.dtype, compiled=plan.compiled)
    return late.simulate(late.lower(plan, graph), costs, cluster).step_time_s
