"""What searches for a placement need of the compiled code, loaded before their time begins to run."""

from __future__ import annotations

from typing import Final

from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph_file import parse_graph
from weft.search.place.methods import METHODS
from weft.search.place.problem import problem_from_graph
from weft.search.place.timetable import check_timetable, make_timetable

FIRST_METHODS: Final = ("single", "heft")
"""Under a time limit these are tried first."""


def load_compiled() -> None:
    """Read from the disk what every search needs of the compiled code, or compile it.

    Before a search under a time limit, so that it does not count against it.
    """
    ops = [{"name": name, "kind": "op", "times": {"gpu": 1.0}, "memory": 1} for name in ("a", "b")]
    graph = parse_graph({"format": "weft.graph", "version": 1, "ops": ops,
                         "edges": [{"from": "a", "to": "b", "bytes": 1}]})
    cluster = parse_cluster({"format": "weft.cluster", "version": 1,
                             "devices": [{"name": name, "kind": "gpu", "memory": 2} for name in ("x", "y")],
                             "links": [{"from": "x", "to": "y", "bandwidth": "1GB/s", "latency": "1us"}]})
    problem = problem_from_graph(graph, cluster, estimate_costs(graph, cluster))
    for name in FIRST_METHODS:
        found = METHODS[name](problem)
        check_timetable(make_timetable(problem, found.device, found.order))
