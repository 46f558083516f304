"""``weft cluster show | probe | from-topo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.common import ClusterArgument, JsonOption, check_outputs, print_json

if TYPE_CHECKING:
    from weft.cluster.cluster import Cluster

app = typer.Typer(help="Describe clusters.", no_args_is_help=True)
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Write the cluster file here.")]


@app.command("show")
def show(cluster: ClusterArgument, as_json: JsonOption = False) -> None:
    """Print the devices and the effective bandwidth between them."""
    from weft.cluster import read_cluster

    _present(read_cluster(cluster), as_json=as_json, out=None)


@app.command("probe")
def probe(
    devices: Annotated[int | None, typer.Option(help="Local processes to plan for; one per core if absent.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto for GPUs if there are any.")] = "auto",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: devices, memory, compute rates and link rates between local processes."""
    from weft.cluster.probe import probe as measure

    check_outputs({"--out": out})
    _present(measure(device=device, num_devices=devices), as_json=as_json, out=out)


@app.command("from-topo")
def from_topo(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Text printed by `nvidia-smi topo -m`.")],
    kind: Annotated[str, typer.Option(help="Kind of the GPUs.")] = "H100",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read the output of `nvidia-smi topo -m` as a cluster."""
    from weft.base.errors import ClusterError
    from weft.base.files import read_bytes
    from weft.cluster.nvidia_topo import parse_topo

    check_outputs({"--out": out}, (file,))
    text = read_bytes(file, error=ClusterError).decode(errors="replace")
    _present(parse_topo(text, kind=kind), as_json=as_json, out=out)


def _present(cluster: Cluster, *, as_json: bool, out: Path | None) -> None:
    from weft.cluster.cluster_file import save_cluster, to_json
    from weft.cluster.describe import bandwidth_matrix, device_rows
    from weft.show.tables import print_table

    if out is not None:
        save_cluster(cluster, out)
    if as_json:
        print_json(to_json(cluster))
        return
    for table in (device_rows(cluster), bandwidth_matrix(cluster)):
        print_table(table.header, table.rows, title=table.title)
