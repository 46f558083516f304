"""What the sections of ``bench_place`` share: rows, and searches in processes of their own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.search.place.problem import PlaceProblem

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SLACK = 1e-6
"""Relative: values this close are equal."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    data: Path = DATA
    time_limit: float = 60.0
    num_problems: int = 500
    models: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    batch: int | None = None
    fuse: str = "rules"


def at_most(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit * (1 + SLACK)


def search(graph: Path, cluster: Path, time_limit: float, *, methods: bool = False, method: str = "auto",
           fuse: str = "none") -> dict[str, Any]:
    """Return what a fresh process finds, with its CPU seconds (imports included) and its largest memory.

    With ``methods`` the named methods are run as well, after the search, and are not in its figures.
    """
    command = [sys.executable, "-m", "benchmarks.place_common", str(graph), str(cluster), "--method", method,
               "--time-limit", str(time_limit), "--fuse", fuse, *(["--methods"] if methods else [])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if run.returncode:
        return {"error": run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit {run.returncode}"}
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def load_problem(graph: str, cluster: str, fuse: str) -> PlaceProblem:
    """Return the problem of two files, with what the backend fuses as one operator if asked for."""
    from weft.cluster.cluster_file import load_cluster
    from weft.cost.costs import estimate_costs
    from weft.model.graph_file import load_graph
    from weft.search.place.problem import problem_from_graph

    content, devices = load_graph(graph), load_cluster(cluster)
    if fuse != "none":
        content = fused(content)
    return problem_from_graph(content, devices, estimate_costs(content, devices))


def fused(graph: Any) -> Any:
    """Return the graph with every fused group as one operator."""
    from weft.coarsen.coarsen import contract
    from weft.coarsen.rules import fuse_by_rules

    return contract(graph, fuse_by_rules(graph)).graph


def _run(args: Any) -> dict[str, Any]:
    from weft.search.place.search import place
    from weft.search.place.timetable import check_timetable

    problem = load_problem(args.graph, args.cluster, args.fuse)
    before = time.process_time()
    result = place(problem, objective="latency", method=args.method, time_limit=args.time_limit,
                   progress=lambda line: None)
    after = time.process_time()
    found = {"value": result.value, "bound": result.bound, "status": result.status, "by": result.by,
             "search_cpu_s": after - before, "cpu_s": after, "num_ops": problem.num_ops,
             "num_devices": problem.num_devices,
             "max_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
             "num_used": len(set(result.timetable.device.tolist()))}
    check_timetable(result.timetable)
    return {**found, "methods": named_values(problem) if args.methods else {}}


def named_values(problem: PlaceProblem) -> dict[str, float | str]:
    """Return the latency of every named method, or why it has none."""
    from weft.base.errors import NoFeasiblePlan
    from weft.search.place.methods import METHODS
    from weft.search.place.timetable import check_timetable, make_timetable

    values: dict[str, float | str] = {}
    for name, method in METHODS.items():
        try:
            found = method(problem)
        except NoFeasiblePlan as reason:
            values[name] = str(reason)
            continue
        timetable = make_timetable(problem, found.device, found.order)
        check_timetable(timetable)
        values[name] = timetable.latency_s
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    """Search one problem and print what came out, for ``search``."""
    import argparse

    parser = argparse.ArgumentParser(description="Place one graph on one cluster and print the figures as JSON.")
    parser.add_argument("graph")
    parser.add_argument("cluster")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--time-limit", type=float, default=15.0)
    parser.add_argument("--fuse", default="none", choices=["none", "rules"])
    parser.add_argument("--methods", action="store_true", help="run the named methods as well")
    print(json.dumps(_run(parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
