"""What is planned: ``weft models``, ``profile`` and ``cluster show | probe | from-topo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from weft.base.errors import ClusterError
from weft.base.files import check_output, encode, read_bytes
from weft.base.units import format_time
from weft.cli import common, late
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import save_cluster, to_json
from weft.model.zoo import list_models
from weft.plan.plan import Mode
from weft.show.tables import make_table, print_table


def models(as_json: common.JsonOption = False) -> None:
    """List the models that Weft can build by name, without weights."""

    items = list_models()
    common.print_result(as_json, lambda: [encode(item) for item in items], lambda: print_table(make_table(
        "", ["model", "family", "parameters", "batch", "about"],
        ([item.name, item.family, item.parameters, str(item.batch), item.about] for item in items))))


def profile(
    model: common.ModelArgument,
    device: Annotated[str, typer.Option(help="Where to run the operators: cpu or cuda.")] = "cpu",
    store: Annotated[Path, typer.Option(help="Profile store to fill (sqlite).")] = Path("weft-profile.sqlite"),
    batch: Annotated[int | None, typer.Option(help="Samples at once; the model's default if absent.")] = None,
    mode: Annotated[str, typer.Option(help="training or inference.")] = "training",
    dtype: Annotated[str | None, typer.Option(help="float64, float32, bfloat16 or float16.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    kind: Annotated[str | None, typer.Option(help="Device kind to file the times under; found out if absent.")] = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Time each distinct operator of a model once on this machine's device and keep the times."""
    report = common.reporter(quiet)
    check_output(store)
    report(f"tracing {model}")
    traced = late.trace_model(model, mode=common.choice("--mode", mode, get_args(Mode)), batch=batch, dtype=dtype)
    summary = late.profile_model(traced, common.choice("--device", device, ("cpu", "cuda")), late.ProfileStore(store),
                                 threads=threads, kind=kind,
                                 progress=lambda done, total: report(f"timing operators: pass {done} of {total}"))
    for problem in summary.problems:
        report(f"note: {problem}")
    common.print_result(as_json, lambda: encode(summary), lambda: print_table(make_table("", ["what", "value"], [
        ["device kind", summary.device_kind], ["operators", str(summary.num_ops)],
        ["distinct", str(summary.num_keys)], ["timed now", str(summary.num_timed)],
        ["sum of forward times", format_time(summary.forward_s)],
        ["sum of backward times", format_time(summary.backward_s)], ["store", str(store)]])))


app = typer.Typer(help="Describe clusters.", no_args_is_help=True)
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Write the cluster file here.")]


@app.command("show")
def show(cluster: common.ClusterArgument, as_json: common.JsonOption = False) -> None:
    """Print the devices and the effective bandwidth between them."""

    _present(read_cluster(cluster), as_json=as_json, out=None)


@app.command("probe")
def probe(
    devices: Annotated[int | None, typer.Option(help="Local processes to plan for; one per core if absent.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto for GPUs if there are any.")] = "auto",
    out: OutOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Measure this machine: devices, memory, compute rates and link rates between local processes."""
    common.check_outputs({"--out": out})
    _present(late.probe_machine(device=device, num_devices=devices), as_json=as_json, out=out)


@app.command("from-topo")
def from_topo(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Text printed by `nvidia-smi topo -m`.")],
    kind: Annotated[str, typer.Option(help="Kind of the GPUs.")] = "H100",
    out: OutOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Read the output of `nvidia-smi topo -m` as a cluster."""
    common.check_outputs({"--out": out}, (file,))
    text = read_bytes(file, error=ClusterError).decode(errors="replace")
    _present(late.parse_topo(text, kind=kind), as_json=as_json, out=out)


def _present(cluster: Cluster, *, as_json: bool, out: Path | None) -> None:
    if out is not None:
        save_cluster(cluster, out)
    if as_json:
        common.print_json(to_json(cluster))
        return
    for table in (late.device_rows(cluster), late.bandwidth_matrix(cluster)):
        print_table(table)
