"""From the values of files to placement problems."""

from __future__ import annotations

from typing import Any

from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph_file import parse_graph
from weft.search.place.problem import PlaceProblem, problem_from_graph


def problem_of(graph: dict[str, Any], cluster: dict[str, Any]) -> PlaceProblem:
    """Return the placement problem of a graph file's and a cluster file's value."""
    parsed, devices = parse_graph(graph), parse_cluster(cluster)
    return problem_from_graph(parsed, devices, estimate_costs(parsed, devices))
