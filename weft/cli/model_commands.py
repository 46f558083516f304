"""``weft models`` and ``weft profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from weft.cli.common import JsonOption, ModelArgument, QuietOption, choice, print_json, reporter
from weft.plan.plan import Mode


def models(as_json: JsonOption = False) -> None:
    """List the models that Weft can build by name, without weights."""
    from weft.base.files import encode
    from weft.model.zoo import list_models
    from weft.show.tables import print_table

    items = list_models()
    if as_json:
        print_json([encode(item) for item in items])
        return
    print_table(["model", "family", "parameters", "batch", "about"],
                [[item.name, item.family, item.parameters, str(item.batch), item.about] for item in items])


def profile(
    model: ModelArgument,
    device: Annotated[str, typer.Option(help="Where to run the operators: cpu or cuda.")] = "cpu",
    store: Annotated[Path, typer.Option(help="Profile store to fill (sqlite).")] = Path("weft-profile.sqlite"),
    batch: Annotated[int | None, typer.Option(help="Samples at once; the model's default if absent.")] = None,
    mode: Annotated[str, typer.Option(help="training or inference.")] = "training",
    dtype: Annotated[str | None, typer.Option(help="float64, float32, bfloat16 or float16.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    kind: Annotated[str | None, typer.Option(help="Device kind to file the times under; found out if absent.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Time each distinct operator of a model once on this machine's device and keep the times."""
    from weft.base.files import check_output, encode
    from weft.base.units import format_time
    from weft.cost.profile import ProfileStore
    from weft.cost.profiler import profile_model
    from weft.model.load import trace_model
    from weft.show.tables import print_table

    report = reporter(quiet)
    check_output(store)
    report(f"tracing {model}")
    traced = trace_model(model, mode=choice("--mode", mode, get_args(Mode)), batch=batch, dtype=dtype)
    summary = profile_model(traced, choice("--device", device, ("cpu", "cuda")), ProfileStore(store), threads=threads,
                            kind=kind, progress=lambda done, total: report(f"timing operators: pass {done} of {total}"))
    for problem in summary.problems:
        report(f"note: {problem}")
    if as_json:
        print_json(encode(summary))
        return
    print_table(["what", "value"], [
        ["device kind", summary.device_kind], ["operators", str(summary.num_ops)],
        ["distinct", str(summary.num_keys)], ["timed now", str(summary.num_timed)],
        ["sum of forward times", format_time(summary.forward_s)],
        ["sum of backward times", format_time(summary.backward_s)], ["store", str(store)]])
