"""``weft run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import JsonOption, ModelArgument, PlanArgument, QuietOption, reporter
from weft.cli.compare_gradients import compare
from weft.errors import InputError


def run(
    plan: PlanArgument,
    model: ModelArgument,
    steps: Annotated[int, typer.Option(help="Measured steps, all on the same inputs.")] = 1,
    warmup: Annotated[int, typer.Option(help="Steps before the measured ones.")] = 0,
    verify: Annotated[bool, typer.Option(help="Compare loss and every gradient with one process.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Run in this dtype instead of the plan's.")] = None,
    device: Annotated[str, typer.Option(
        help="cpu (gloo) or cuda (nccl) for all, or one for each process with gloo: cuda,cpu; cuda:0@25% is part of a "
             "GPU, by the multi-process service.")] = "cpu",
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
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Run a plan with one local process for each of its devices; `torchrun -m weft.run` does it on many hosts."""
    from weft.plan.plan import load_plan
    from weft.run.__main__ import report
    from weft.run.launch import run_plan
    from weft.run.result import RunOptions
    from weft.units import parse_bytes

    item = load_plan(plan)
    options = RunOptions(steps=steps, warmup=warmup, seed=seed, dtype=dtype, verify=verify, timeout_s=timeout,
                         device=device, gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory),
                         gradients=out is not None)
    if profile is not None and not compare_gradients:
        raise InputError("--profile is for the predictions of --compare-gradients: give both, or see `weft simulate`")
    reporter(quiet)(f"starting {len(item.cluster.devices)} processes")
    if compare_gradients:
        return compare(item, model, options=options, threads=threads, keep=out, profile=profile, as_json=as_json)
    result = run_plan(item, model, options=options, threads=threads, keep=out)
    return report(result, as_json=as_json)
