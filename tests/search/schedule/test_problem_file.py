"""Schedule problem files: what is read, every kind of bad input by its message, and what is written loads as it was."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search.schedule.random_problems import random_problem
from weft.base.errors import InputError, WeftError
from weft.search.schedule.problem import load_problem, parse_problem, problem_to_json, save_problem, with_memory

PROBLEMS = Path(__file__).resolve().parents[3] / "benchmarks" / "problems" / "schedule"


def form() -> dict:
    """Return the example of the format's description."""
    return {"format": "weft.schedule-problem", "version": 1,
            "devices": [{"name": "d0", "memory": 4}, {"name": "d1", "memory": None}, {"name": "d2"}],
            "free_at": "start",
            "blocks": [{"name": "f0", "devices": ["d0"], "time": 1, "memory": 1, "after": []},
                       {"name": "f1", "devices": ["d2", "d1"], "time": 1.5, "memory": 1, "after": ["f0"]},
                       {"name": "b1", "devices": ["d1"], "time": 2, "memory": -1, "after": ["f1"]},
                       {"name": "b0", "devices": ["d0"], "time": 2}],
            "transfers": [{"from": "f0", "to": "f1", "time": 0.1, "link": "wire"}, {"from": "b1", "to": "b0", "time": 0.2},
                          {"from": "f1", "to": "b0", "time": 0.5, "link": "wire"}]}


def test_the_example():
    problem = parse_problem(form())
    assert (problem.device_names, problem.device_memory) == (("d0", "d1", "d2"), (4.0, None, None))
    assert problem.free_at == "start"
    assert problem.blocks[1].devices == (1, 2)
    assert problem.blocks[3].memory == 0
    assert problem.task_names == ("f0", "f1", "b1", "b0", "f0>f1", "f1>b0")
    assert problem.resource_names == ("d0", "d1", "d2", "wire+", "wire-")
    assert problem.task_resources[4:] == ((3,), (4,))
    assert [(edge.source, edge.target, edge.delay) for edge in problem.edges] == [
        (0, 1, 0), (0, 4, 0), (1, 2, 0), (1, 5, 0), (2, 3, 0.2), (4, 1, 0), (5, 3, 0)]
    assert problem.device_work == (3, 3.5, 1.5, 0.1, 0.5)


def test_left_out_fields_have_their_documented_meaning():
    problem = parse_problem({"format": "weft.schedule-problem", "version": 1, "devices": [{"name": "d"}],
                             "blocks": [{"name": "a", "devices": ["d"], "time": 0}]})
    assert (problem.free_at, problem.device_memory, problem.transfers) == ("end", (None,), ())
    assert (problem.blocks[0].memory, problem.blocks[0].after) == (0, ())


def test_the_longest_of_parallel_delays_counts():
    value = form()
    value["transfers"] = [{"from": "f0", "to": "f1", "time": 0.1}, {"from": "f0", "to": "f1", "time": 0.3}]
    assert [edge.delay for edge in parse_problem(value).predecessors[1]] == [0.3]


def broken(*path, value=None, drop=False) -> dict:
    result = form()
    place = result
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


BROKEN = [
    (broken("format", value="weft.plan"), "weft.schedule-problem"),
    (broken("version", value=2), "version"),
    (broken("blocks", drop=True), "blocks"),
    (broken("blocks", value=[]), "blocks is empty"),
    (broken("devices", value=[]), "names no device: 'd0'"),
    (broken("free_at", value="later"), "free_at"),
    (broken("extra", value=1), "extra"),
    (broken("blocks", 0, "colour", value=1), r"blocks\[0\].*colour|colour"),
    (broken("blocks", 0, "time", value=-1), r"blocks\[0\]\.time must not be negative"),
    (broken("blocks", 0, "time", value="1"), r"blocks\[0\]\.time"),
    (broken("blocks", 0, "time", value=True), r"blocks\[0\]\.time"),
    (broken("blocks", 0, "time", drop=True), r"blocks\[0\].*time"),
    (broken("blocks", 0, "devices", value=[]), r"blocks\[0\]\.devices is empty"),
    (broken("blocks", 0, "devices", value=["d9"]), r"blocks\[0\]\.devices names no device: 'd9'"),
    (broken("blocks", 0, "devices", value=["d0", "d0"]), r"blocks\[0\]\.devices names a device twice"),
    (broken("blocks", 1, "after", value=["f9"]), r"blocks\[1\]\.after names no block: 'f9'"),
    (broken("blocks", 1, "after", value=["f0", "f0"]), r"blocks\[1\]\.after names a block twice"),
    (broken("blocks", 1, "name", value="f0"), r"blocks\[1\]\.name is there twice: 'f0'"),
    (broken("devices", 1, "name", value="d0"), r"devices\[1\]\.name is there twice: 'd0'"),
    (broken("devices", 0, "memory", value=-1), r"devices\[0\]\.memory must not be negative"),
    (broken("devices", 0, "memory", value="4GB"), r"devices\[0\]\.memory"),
    (broken("transfers", 0, "time", value=-0.1), r"transfers\[0\]\.time must not be negative"),
    (broken("transfers", 0, "from", value="f9"), r"transfers\[0\]\.from names no block: 'f9'"),
    (broken("transfers", 0, "to", value="f9"), r"transfers\[0\]\.to names no block: 'f9'"),
    (broken("transfers", 0, "to", value="f0"), r"transfers\[0\] goes from a block to itself"),
    (broken("transfers", 0, "link", value=3), r"transfers\[0\]\.link"),
    (broken("blocks", 0, "after", value=["f0"]), "circle: f0 after f0"),
    (broken("blocks", 0, "after", value=["b1"]), "circle: .*f0"),
    ([], "weft.schedule-problem|object"),
    (None, "weft.schedule-problem|object"),
]


@pytest.mark.parametrize(("value", "message"), BROKEN)
def test_broken_files_are_refused_by_name(value, message):
    with pytest.raises(InputError, match=message):
        parse_problem(value)


def test_a_circle_closed_by_a_transfer_is_refused():
    value = form()
    value["transfers"].append({"from": "b0", "to": "f0", "time": 0})
    with pytest.raises(InputError, match="wait for each other in a circle"):
        parse_problem(value)


def test_all_problems_are_listed_at_once():
    value = form()
    value["blocks"][0]["time"] = -1
    value["blocks"][1]["devices"] = ["d8"]
    value["transfers"][0]["to"] = "f9"
    with pytest.raises(InputError) as caught:
        parse_problem(value, where="some.json")
    for part in ("some.json", "blocks[0].time", "'d8'", "transfers[0].to"):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["1e999", "-1e999", "NaN", "Infinity"])
@pytest.mark.parametrize("field", ["time", "memory"])
def test_numbers_must_be_finite(tmp_path, text, field):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(form()).replace(f'"{field}": 1,', f'"{field}": {text},', 1))
    with pytest.raises(InputError):
        load_problem(path)


@pytest.mark.parametrize("path", sorted(PROBLEMS.glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_problems_round_trip(path, tmp_path):
    problem = load_problem(path)
    assert parse_problem(problem_to_json(problem)) == problem
    save_problem(problem, tmp_path / "copy.json")
    assert load_problem(tmp_path / "copy.json") == problem
    with gzip.open(tmp_path / "copy.json.gz", "wt") as stream:
        stream.write((tmp_path / "copy.json").read_text())
    assert load_problem(tmp_path / "copy.json.gz") == problem


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_round_trip(seed):
    problem = random_problem(seed).problem
    assert parse_problem(json.loads(json.dumps(problem_to_json(problem)))) == problem


def test_with_memory():
    problem = parse_problem(form())
    assert with_memory(problem, {"d0": None, "d2": 7.0}).device_memory == (None, None, 7.0)
    assert problem.device_memory == (4.0, None, None)


def _places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


ANY = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just([]), st.just({}),
                st.sampled_from(["f0", "f1", "d0", "d1"]), st.lists(st.sampled_from(["f0", "b0", "d0"]), max_size=3))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([path for path in _places(form()) if path]), ANY)
def test_any_change_gives_a_problem_or_a_named_error(path, value):
    changed = copy.deepcopy(form())
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with contextlib.suppress(WeftError):
        problem = parse_problem(changed)
        assert len(problem.topological) == problem.num_tasks
        assert parse_problem(problem_to_json(problem)) == problem
