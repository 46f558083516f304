"""``weft export`` and ``weft import-order``: the order of a plan to and from other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import (
    JsonOption,
    PlanArgument,
    QuietOption,
    choice,
    cluster_of_plan,
    graph_of_plan,
    print_json,
    reporter,
)
from weft.cli.plan_commands import ClusterOption, ModelOption

FORMATS = ("pytorch-csv",)


def export(
    plan: PlanArgument,
    format_: Annotated[str, typer.Option("--format", help="pytorch-csv: the schedule file of "
                                         "torch.distributed.pipelining (compute_only).")] = FORMATS[0],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it here instead of to stdout.")] = None,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write the order of a plan for another runtime, after all checks of the plan."""
    from weft.files import write_atomic
    from weft.plan.check import check_plan
    from weft.plan.pipelining_csv import runtime_notes, to_csv
    from weft.plan.plan import load_plan

    choice("--format", format_, FORMATS)
    item = load_plan(plan)
    text = to_csv(item)
    notes = runtime_notes(check_plan(item, graph_of_plan(item, model), cluster_of_plan(item, cluster)))
    report = reporter(quiet)
    for note in notes:
        report(f"note: {note}")
    if out is not None:
        write_atomic(out, text)
        report(f"schedule written to {out}")
    if as_json:
        print_json({"format": format_, "ranks": len(item.cluster.devices), "stages": len(item.stages),
                    "microbatches": item.microbatches, "notes": notes, "rows": text.splitlines()})
    elif out is None:
        print(text, end="")


def import_order(
    plan: PlanArgument,
    schedule: Annotated[Path, typer.Argument(metavar="CSV", help="A schedule file of torch.distributed.pipelining; "
                                             "row i is the plan's device i, stage s its stage s.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the plan with this order here.")],
    model: ModelOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Give a plan the order in a schedule file, after all checks of both."""
    from weft.plan.check import check_plan
    from weft.plan.pipelining_csv import load_csv, order_from_csv
    from weft.plan.plan import load_plan, save_plan

    item = load_plan(plan)
    changed = order_from_csv(item, load_csv(schedule))
    program = check_plan(changed, graph_of_plan(item, model), cluster_of_plan(item, cluster))
    save_plan(changed, out)
    reporter(quiet)(f"plan written to {out}")
    if as_json:
        print_json({"status": "ok", "ranks": program.num_ranks, "instructions": program.num_instructions})
    else:
        print(f"{out}: ok, {program.num_ranks} ranks, {program.num_instructions} instructions")
