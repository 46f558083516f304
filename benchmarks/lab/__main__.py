"""``python -m benchmarks.lab``: several hosts on one machine, from a Weft cluster file.

    python -m benchmarks.lab run CLUSTER PLAN MODEL [--steps 5]       run a plan with torchrun on every host
    python -m benchmarks.lab links CLUSTER [--out F] [--store F]      measure the links, against the file
    python -m benchmarks.lab profile CLUSTER MODEL --store F          time operators while all hosts compute
    python -m benchmarks.lab clean                                    remove what a killed laboratory has left

Needs root and iproute2. Nothing is sent to anything but the laboratory's own namespaces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.lab import spaces
from benchmarks.lab.lab import Lab
from benchmarks.lab.topology import describe
from weft.base.errors import WeftError
from weft.base.files import encode
from weft.base.units import format_rate, format_time
from weft.cluster.cluster_file import read_cluster, save_cluster
from weft.cost.profile import ProfileStore
from weft.plan.plan import load_plan
from weft.run.result import RunOptions, save_result
from weft.show.tables import make_table, print_table


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code of the command."""
    args = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except WeftError as problem:
        print(f"weft: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        print("weft: interrupted; the laboratory is gone", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description="Several hosts on one machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a plan with torchrun on every host")
    run.add_argument("cluster")
    run.add_argument("plan")
    run.add_argument("model")
    run.add_argument("--steps", type=int, default=5, help="measured steps (default 5)")
    run.add_argument("--warmup", type=int, default=1, help="steps before them (default 1)")
    run.add_argument("--verify", action="store_true", help="compare loss and gradients with one process")
    run.add_argument("--dtype", help="run in this dtype")
    run.add_argument("--out", type=Path, help="folder for the result and the timeline")
    run.set_defaults(command=_run)
    links = commands.add_parser("links", help="measure the links, against the cluster file")
    links.add_argument("cluster")
    links.add_argument("--out", type=Path, help="write the cluster with measured links and cores here")
    links.add_argument("--store", type=Path, help="put fits of collectives into this profile store")
    links.set_defaults(command=_links)
    profile = commands.add_parser("profile", help="time a model's operators while all hosts compute")
    profile.add_argument("cluster")
    profile.add_argument("model")
    profile.add_argument("--batch", type=int, default=4, help="samples on each host (default 4)")
    profile.add_argument("--store", type=Path, required=True, help="profile store to fill")
    profile.set_defaults(command=_profile)
    commands.add_parser("clean", help="remove what a killed laboratory has left").set_defaults(command=_clean)
    for item in (run, links):
        item.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _open(args: argparse.Namespace) -> Lab:
    lab = Lab(read_cluster(args.cluster))
    for line in describe(lab.topology):
        print(line, file=sys.stderr)
    return lab


def _run(args: argparse.Namespace) -> int:
    from weft.run.__main__ import report

    plan = load_plan(args.plan)
    with _open(args) as lab:
        result = lab.run_plan(plan, args.model, options=RunOptions(
            steps=args.steps, warmup=args.warmup, verify=args.verify, dtype=args.dtype))
    if args.out is not None:
        save_result(result, args.out)
    if plan.search.step_time is not None and not args.json:
        print(f"predicted {format_time(plan.search.step_time)}, measured {format_time(result.step_time_s)}")
    return report(result, as_json=args.json)


def _links(args: argparse.Namespace) -> int:
    from benchmarks.lab.links import measure_links

    with _open(args) as lab:
        found = measure_links(lab)
    if args.out is not None:
        save_cluster(found.cluster, args.out)
    if args.store is not None:
        if not found.uniform:
            print("weft: ports differ, so no fits are stored: use the cluster file of --out", file=sys.stderr)
        ProfileStore(args.store).put_comm_fits(found.fits_to_use)
    if args.json:
        print(json.dumps({"pairs": encode(found.pairs), "fits": encode(found.fits)}))
        return 0
    print_table(make_table("messages", ["from", "to", "file", "measured", "share", "latency"], (
        [pair.source, pair.target, format_rate(pair.nominal_bytes_per_s), format_rate(pair.bytes_per_s),
         f"{pair.share:.1%}", format_time(pair.latency_s)] for pair in found.pairs)))
    print_table(make_table("collectives of all hosts", [
        "collective", "rate of a port", "latency of a step", "error of the fit"], (
        [fit.collective, format_rate(1 / fit.s_per_byte), format_time(fit.latency_s), f"{fit.error:.1%}"]
        for fit in found.fits)))
    return 0


def _profile(args: argparse.Namespace) -> int:
    from benchmarks.lab.profiles import profile_together

    store = ProfileStore(args.store)
    with _open(args) as lab:
        profile_together(lab, args.model, store, batch=args.batch)
    print(f"{args.store}: operator times of {', '.join(store.device_kinds())}")
    return 0


def _clean(_: argparse.Namespace) -> int:
    removed = spaces.clean()
    print(f"removed {', '.join(removed)}" if removed else "nothing was left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
