"""``weft export`` and ``weft import-order``: plans for other tools, and orders from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from weft.base.errors import InputError
from weft.base.files import write_atomic
from weft.cli import common, late
from weft.cli.plan_commands import print_checked
from weft.plan.plan import load_plan

FORMATS: Final = {"pytorch-csv": "schedule", "device-map": "device map", "onnx": "model", "torchtitan": "settings",
                  "vllm": "options", "llama-cpp": "options"}
"""What each of them is, in a word."""
BY_LAYER: Final = ("torchtitan", "vllm", "llama-cpp")
"""Those that give whole layers to devices."""


def export(
    plan: common.PlanArgument,
    format_: Annotated[str, typer.Option(
        "--format", help="pytorch-csv: the schedule file of torch.distributed.pipelining (compute_only). device-map: "
        "accelerate's device_map, where the placement is by module. onnx: the .onnx file given with --model, with "
        "device and stage in the metadata of each node. torchtitan: degrees of parallelism, modules of stages and "
        "schedule (TOML, and a CSV beside it where the schedule has no name). vllm: layers of each pipeline rank and "
        "degrees of parallelism. llama-cpp: how layers are split over GPUs.")] = "pytorch-csv",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it here instead of to stdout.")] = None,
    nearest: Annotated[bool, typer.Option(
        "--nearest", help="torchtitan, vllm, llama-cpp: give a layer that the plan cuts to the stage with most of it, "
        "instead of refusing.")] = False,
    model: common.ModelOption = None,
    cluster: common.ClusterOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Write a plan for another tool, after all checks of the plan."""
    common.choice("--format", format_, tuple(FORMATS))
    if nearest and format_ not in BY_LAYER:
        raise InputError(f"--nearest is for {', '.join(BY_LAYER)}, which take whole layers, not for {format_}")
    common.check_outputs({"--out": out}, (plan, model, cluster))
    item = load_plan(plan)
    if format_ == "onnx" and (model is None or not model.lower().endswith(".onnx")):
        raise InputError("--format onnx needs the ONNX file that was planned: give it with --model FILE.onnx")
    if format_ == "onnx" and out is None:
        raise InputError("--format onnx writes a binary file: say where with --out FILE.onnx")
    program = late.check_plan(item, common.graph_of_plan(item, model), common.cluster_of_plan(item, cluster))
    report = common.reporter(quiet)
    text: str | None = None
    match format_:
        case "onnx":
            facts = _export_onnx(program, model, out)
        case "device-map":
            text, facts = _device_map(program, model, cluster)
        case "torchtitan":
            text, facts = _titan(program, out, report, nearest)
        case "vllm" | "llama-cpp":
            text, facts = _server_options(program, cluster, format_, nearest)
        case _:
            text, facts = _pipelining_csv(program)
    if out is not None and text is not None:
        write_atomic(out, text)
    for note in facts.get("notes", ()):
        report(f"note: {note}")
    if out is not None:
        report(f"{FORMATS[format_]} written to {out}")
    if as_json or out is None:
        common.print_result(as_json, lambda: {"format": format_, **facts}, lambda: print(text, end=""))


def _pipelining_csv(program: late.Program) -> tuple[str, dict[str, Any]]:
    plan, text = program.plan, late.to_csv(program.plan)
    return text, {"ranks": len(plan.cluster.devices), "stages": len(plan.stages), "microbatches": plan.microbatches,
                  "notes": late.runtime_notes(program), "rows": text.splitlines()}


def _device_map(program: late.Program, model: str | None, cluster: str | None) -> tuple[str, dict[str, Any]]:
    plan = program.plan
    source = late.resolve_model(model or plan.model.name, mode=plan.model.mode)
    if isinstance(source, late.Graph):
        raise InputError(f"{plan.model.name!r} is a graph without a PyTorch module, and a device map is of modules: "
                         "for an ONNX file use --format onnx")
    found = late.to_device_map(plan, program.graph, common.cluster_of_plan(plan, cluster),
                               state=source.build().state_dict())
    return json.dumps(found.entries, indent=1) + "\n", {"device_map": found.entries, "notes": found.notes}


def _titan(program: late.Program, out: Path | None, report: Callable[[str], None],
           nearest: bool) -> tuple[str, dict[str, Any]]:
    schedule = None if out is None else out.with_suffix(".csv")
    if schedule is not None and schedule == out:
        raise InputError(f"--out {str(out)!r} is the name of the schedule beside the settings: choose one that ends in "
                         ".toml")
    settings = late.to_titan(program, csv_path=None if schedule is None else str(schedule), nearest=nearest)
    if settings.csv is not None:
        assert schedule is not None, "to_titan asks for it"
        write_atomic(schedule, settings.csv)
        report(f"schedule written to {schedule}")
    return late.format_toml(settings), {**settings.sections, "ranks": settings.ranks, "notes": settings.notes}


def _server_options(program: late.Program, cluster: str | None, format_: str,
                    nearest: bool) -> tuple[str, dict[str, Any]]:
    target = common.cluster_of_plan(program.plan, cluster)
    if format_ == "vllm":
        options, words = late.to_layer_partition(program, target, nearest=nearest), ("vllm", "serve", "MODEL")
    else:
        options, words = late.to_tensor_split(program, target, nearest=nearest), ("llama-server", "-m", "MODEL.gguf")
    return options.command(*words) + "\n", {"environment": options.environment, "arguments": options.arguments,
                                            "devices": options.devices, "notes": options.notes}


def _export_onnx(program: late.Program, model: str | None, out: Path | None) -> dict[str, Any]:
    assert model is not None
    assert out is not None
    done = late.annotate_onnx(model, out, program.graph, late.op_properties(program.plan, program.graph))
    return {"nodes": done.num_nodes, "annotated": done.num_annotated}


def import_order(
    plan: common.PlanArgument,
    schedule: Annotated[Path, typer.Argument(metavar="CSV", help="A schedule file of torch.distributed.pipelining; "
                                             "row i is the plan's device i, stage s its stage s.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the plan with this order here.")],
    model: common.ModelOption = None,
    cluster: common.ClusterOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Give a plan the order in a schedule file, after all checks of both."""
    common.check_outputs({"--out": out}, (schedule, cluster))
    item = load_plan(plan)
    changed = late.order_from_csv(item, late.load_csv(schedule))
    program = late.check_plan(changed, common.graph_of_plan(item, model), common.cluster_of_plan(item, cluster))
    common.write_plan(out, changed, common.reporter(quiet))
    print_checked(program, out, as_json=as_json)
