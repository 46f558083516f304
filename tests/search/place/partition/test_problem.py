"""The reader of dnn-partitioning problems: what it accepts, and what it says about what it does not."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.base.errors import InputError
from weft.search.place.partition import problem as partition_problem
from weft.search.place.partition.problem import parse_partition
from weft.search.place.partition.search import load_partition

Json = dict[str, Any]

VALUE: Json = {
    "maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1,
    "nodes": [
        {"id": 7, "supportedOnFpga": True, "cpuLatency": 10, "fpgaLatency": 1, "isBackwardNode": False, "name": "a",
         "colorClass": 4, "layerId": 1, "size": 5.0},
        {"id": 3, "supportedOnFpga": 0, "cpuLatency": 20.5, "fpgaLatency": 2, "isBackwardNode": 0},
        {"id": 9, "supportedOnFpga": 1, "cpuLatency": 30, "fpgaLatency": 3, "isBackwardNode": 1, "colorClass": 4}],
    "edges": [{"sourceId": 7, "destId": 3, "cost": 0.5, "size": 8}, {"sourceId": 7, "destId": 9, "cost": 0.5000001},
              {"sourceId": 3, "destId": 9, "cost": 2}, {"sourceId": 7, "destId": 3, "cost": 0.5}]}


def test_reads_a_file_with_its_extra_fields(tmp_path: Path) -> None:
    path = tmp_path / "small_inference.json"
    path.write_text(json.dumps(VALUE))
    problem = load_partition(path)
    assert problem.name == "small_inference"
    assert problem.node_ids == (7, 3, 9)
    assert (problem.num_accelerators, problem.num_cpus, problem.capacity) == (2, 1, 100.0)
    assert problem.cpu_s.tolist() == [10.0, 20.5, 30.0]
    assert problem.size.tolist() == [5.0, 0.0, 0.0]
    assert problem.is_supported.tolist() == [True, False, True]
    assert problem.is_backward.tolist() == [False, False, True]
    assert problem.cost_s.tolist() == [0.5, 2.0, 0.0]
    assert problem.edges.tolist() == [[0, 1], [0, 2], [1, 2]]
    assert problem.unit_of_node.tolist() == [0, 1, 0]
    assert problem.device_names == ("fpga0", "fpga1", "cpu0")


def test_reads_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps(VALUE).encode()))
    assert load_partition(path).name == "small"


def _put(key: str, item: Any) -> Callable[[Json], None]:
    return lambda value: value.__setitem__(key, item)


def _node(index: int, **fields: Any) -> Callable[[Json], None]:
    return lambda value: value["nodes"][index].update(fields)


def _edge(index: int, **fields: Any) -> Callable[[Json], None]:
    return lambda value: value["edges"][index].update(fields)


BROKEN: list[tuple[Callable[[Json], None], str]] = [
    (lambda value: value.pop("maxFPGAs"), "maxFPGAs is missing"),
    (lambda value: value["nodes"][1].pop("cpuLatency"), r"nodes\[1\].cpuLatency is missing"),
    (_put("speed", 1), "speed is not a known field"),
    (_node(0, containedNodes=[]), r"nodes\[0\].containedNodes is not a known field"),
    (_edge(0, weight=1), r"edges\[0\].weight is not a known field"),
    (_put("maxFPGAs", -1), "maxFPGAs must be between 0 and 1024, not -1"),
    (_put("maxCPUs", 2000), "maxCPUs must be between 0 and 1024, not 2000"),
    (lambda value: value.update(maxFPGAs=0, maxCPUs=0), "both 0: there is no device"),
    (_put("maxFPGAs", 1.5), "maxFPGAs must be a whole number, not 1.5"),
    (_put("maxSizePerFPGA", -2), "maxSizePerFPGA must be between 0 and 1e"),
    (_put("nodes", []), "nodes is empty"),
    (_put("nodes", {}), "nodes must be a list"),
    (_node(1, id=7), r"nodes\[1\].id is there twice: 7"),
    (_node(1, id="x"), r"nodes\[1\].id must be a whole number, not 'x'"),
    (_node(1, supportedOnFpga=2), r"nodes\[1\].supportedOnFpga must be true, false, 0 or 1, not 2"),
    (_node(1, supportedOnFpga="False"), r"nodes\[1\].supportedOnFpga must be"),
    (_node(2, fpgaLatency=-1.0), r"nodes\[2\].fpgaLatency must be between 0 and 1e\+30, not -1.0"),
    (_node(2, size=1e40), r"nodes\[2\].size must be between 0 and 1e\+30"),
    (_node(2, cpuLatency="slow"), r"nodes\[2\].cpuLatency must be a number, not 'slow'"),
    (_node(2, colorClass=1.5), r"nodes\[2\].colorClass must be a whole number"),
    (_edge(0, sourceId=8), r"edges\[0\].sourceId names no node: 8"),
    (_edge(1, destId=8), r"edges\[1\].destId names no node: 8"),
    (_edge(1, destId=7), r"edges\[1\] goes from node 7 to itself"),
    (_edge(1, cost=0.6), r"edges\[1\].cost is 0.6, but an earlier edge of node 7 has 0.5"),
    (_edge(2, cost=-1), r"edges\[2\].cost must be between 0 and 1e\+30, not -1.0"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_says_what_is_wrong_and_where(change: Callable[[Json], None], message: str) -> None:
    value = copy.deepcopy(VALUE)
    change(value)
    with pytest.raises(InputError, match=message):
        parse_partition(value)


def test_a_value_that_is_no_object() -> None:
    with pytest.raises(InputError, match="must be an object, not a list"):
        parse_partition([1])


def test_too_many_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_problem, "MAX_NODES", 2)
    with pytest.raises(InputError, match="nodes has 3 items, more than 2"):
        parse_partition(VALUE)


def test_all_problems_are_listed_at_once() -> None:
    value = copy.deepcopy(VALUE)
    value["nodes"][0]["size"] = -1
    value["edges"][0]["destId"] = 55
    with pytest.raises(InputError, match=r"nodes\[0\].size .*edges\[0\].destId names no node: 55"):
        parse_partition(value)


def test_a_circle_is_named_where_order_matters() -> None:
    value = copy.deepcopy(VALUE)
    value["edges"].append({"sourceId": 9, "destId": 7, "cost": 1})
    problem = parse_partition(value)
    with pytest.raises(InputError, match="in a circle through some of the nodes 7, 3, 9"):
        _ = problem.order
    assert np.isfinite(problem.cost_s).all()
