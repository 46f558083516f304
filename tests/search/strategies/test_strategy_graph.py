"""Strategy graphs: files are read strictly, and the judge counts right."""

from __future__ import annotations

import copy
import gzip
import json

import numpy as np
import pytest

from tests.search.strategies.random_graphs import random_graph
from weft.base.errors import InputError
from weft.search.strategies.strategy_graph import (
    FORBIDDEN,
    StrategyGraph,
    check_graph,
    evaluate,
    load_strategy_graph,
    parse_strategy_graph,
)

SMALL = {"problem": {
    "name": "small",
    "nodes": {"intervals": [[0, 2], [1, 3], [3, 3]], "costs": [[1, 2], [3, 4, 5], [0]], "usages": [[5, 1], [4, 2, 1], [9]]},
    "edges": {"nodes": [[0, 1], [1, 0], [2, 1]], "costs": [[0, 1, 2, 3, 4, 5], [1, 0, 0, 1, 1, 0], [7, 7, 7]]},
    "usage_limit": 6}}


def edited(path: str, value: object) -> dict:
    """Return the small problem with one field set."""
    result = copy.deepcopy(SMALL)
    *way, last = path.split(".")
    place = result
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return result


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps(SMALL).encode()))
    graph = load_strategy_graph(path)
    check_graph(graph)
    assert (graph.name, graph.num_nodes, graph.usage_limit, graph.is_integral) == ("small", 3, 6, True)
    assert graph.edge_costs[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert graph.edge_costs[1].tolist() == [[1, 0], [0, 1], [1, 0]]


def test_the_judge_adds_parallel_edges_and_half_open_intervals():
    result = evaluate(parse_strategy_graph(SMALL), (0, 1, 0))
    # Nodes 1 + 4 + 0; the parallel edges (0, 1) 1 and (1, 0) 0; edge (2, 1) 7. At time 1 both of the first are alive.
    assert (result.cost, result.usage_peak, result.peak_time, result.num_forbidden) == (1 + 4 + 1 + 0 + 7, 7, 1, 0)
    assert not result.is_feasible(6)
    assert result.is_feasible(7)
    assert result.is_feasible(None)


def test_sums_of_ruled_out_costs_are_exact():
    graph = parse_strategy_graph(edited("problem.nodes.costs", [[10**18, 2], [10**18, 4, 5], [10**19]]))
    result = evaluate(graph, (0, 0, 0))
    assert result.cost == 3 * FORBIDDEN + 0 + 1 + 7
    assert result.num_forbidden == 3


@pytest.mark.parametrize("seed", range(50))
def test_the_judge_agrees_with_counting_time_by_time(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, forbidden=0.0)
    choice = [int(rng.integers(len(cost))) for cost in graph.costs]
    used = [sum(int(graph.usages[node][choice[node]]) for node, (begin, end) in enumerate(graph.intervals.tolist())
                if begin <= time < end) for time in range(12)]
    result = evaluate(graph, choice)
    assert result.usage_peak == max(used)
    assert used[result.peak_time] == max(used)


@pytest.mark.parametrize(("path", "value", "message"), [
    ("problem", 3, "problem must be an object with 'nodes'"),
    ("extra", 3, "extra is not a known field"),
    ("problem.nodes.extra", 3, "problem.nodes.extra is not a known field"),
    ("problem.nodes", {"intervals": [], "costs": []}, "problem.nodes.usages is missing"),
    ("problem.name", 3, "problem.name must be text"),
    ("problem.usage_limit", -1, "problem.usage_limit must be a number from 0"),
    ("problem.usage_limit", "6", "problem.usage_limit must be a number from 0"),
    ("problem.usage_limit", True, "problem.usage_limit must be a number from 0"),
    ("problem.nodes.intervals.1", [1], "problem.nodes.intervals[1] must be two whole numbers"),
    ("problem.nodes.intervals.1", [1, 2.5], "problem.nodes.intervals[1] must be two whole numbers"),
    ("problem.nodes.intervals.1", [1, True], "problem.nodes.intervals[1] must be two whole numbers"),
    ("problem.nodes.intervals", [[0, 1]], "intervals, costs and usages must be as many, not 1, 3, 3"),
    ("problem.nodes.costs.0", [], "problem.nodes.costs[0] must be a list of numbers, at least one"),
    ("problem.nodes.costs.0", [1, "2"], "problem.nodes.costs[0] must be a list of numbers"),
    ("problem.nodes.costs.0", [1, None], "problem.nodes.costs[0] must be a list of numbers"),
    ("problem.nodes.costs.0", [1, True], "problem.nodes.costs[0] must be a list of numbers"),
    ("problem.nodes.costs.0", [1, -2], "problem.nodes.costs[0][1] must not be negative, but is -2"),
    ("problem.nodes.costs.0", [1], "problem.nodes.usages[0] has 2 items, but there are 1 costs"),
    ("problem.nodes.usages.0", [1, 10**18], "problem.nodes.usages[0] has a usage of 10^18 or more"),
    ("problem.edges.nodes.0", [0, 3], "problem.edges.nodes[0] names a node that is not there: [0, 3], nodes are 0 to 2"),
    ("problem.edges.nodes.0", [1, 1], "problem.edges.nodes[0] joins node 1 with itself"),
    ("problem.edges.nodes.0", [0, 1, 2], "problem.edges.nodes[0] must be two whole numbers"),
    ("problem.edges.costs.0", [1, 2], "problem.edges.costs[0] has 2 items, not 2 x 3 for the strategies of nodes 0 and 1"),
    ("problem.edges.costs", [[1]], "problem.edges: nodes and costs must be as many, not 3, 1"),
    ("problem.edges.costs", 5, "problem.edges.costs must be a list"),
])
def test_what_is_wrong_with_a_file_is_named(path, value, message):
    with pytest.raises(InputError) as caught:
        parse_strategy_graph(edited(path, value), where="file.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("file.json: ")


def test_a_problem_needs_no_edges_no_limit_and_no_name():
    graph = parse_strategy_graph({"problem": {"nodes": {"intervals": [[0, 1]], "costs": [[0.5, 1]], "usages": [[1, 2]]}}})
    assert (graph.name, graph.usage_limit, graph.is_integral, len(graph.edges)) == ("problem", None, False, 0)


@pytest.mark.parametrize(("change", "message"), [
    ({"costs": (np.array([np.nan]), np.array([1.0]))}, "costs of node 0 have a value that is not a number"),
    ({"usages": (np.array([-1]), np.array([1]))}, "usages of node 0 must be finite and not negative"),
    ({"usages": (np.array([1, 2]), np.array([1]))}, "nodes.usages[0] has 2 items, but there are 1 costs"),
    ({"usage_limit": float("nan")}, "the usage limit must be finite"),
    ({"edges": np.array([[0, 2]])}, "edges.nodes[0] names a node that is not there: [0, 2], nodes are 0 to 1"),
    ({"edge_costs": (np.ones((1, 2)),)}, "edges.costs[0] has 2 items, not 1 x 1"),
    ({"edge_costs": ()}, "edges: nodes and costs must be as many, not 1, 0"),
])
def test_a_graph_built_in_memory_is_checked(change, message):
    fields = {"intervals": np.zeros((2, 2), dtype=np.int64), "costs": (np.ones(1), np.ones(1)),
              "usages": (np.ones(1), np.ones(1)), "edges": np.array([[0, 1]]), "edge_costs": (np.ones((1, 1)),)}
    check_graph(StrategyGraph(**fields))
    with pytest.raises(InputError) as caught:
        check_graph(StrategyGraph(**{**fields, **change}))
    assert message in str(caught.value)


@pytest.mark.parametrize("choice", [(0, 0), (0, 3, 0), (-1, 0, 0)])
def test_the_judge_refuses_what_is_no_choice(choice):
    with pytest.raises(InputError):
        evaluate(parse_strategy_graph(SMALL), choice)
