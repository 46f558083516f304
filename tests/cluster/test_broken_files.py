"""Mutated cluster files: only ``ClusterError`` comes out, and what loads is a sound cluster."""

from __future__ import annotations

import copy
import datetime
import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cluster.worlds import long_form, mixed_form, short_form, times_only
from weft.base.errors import ClusterError
from weft.cluster import Cluster, check_cluster, load_cluster
from weft.cluster.cluster_file import parse_cluster, to_json

FORMS = (short_form, long_form, mixed_form, times_only)
JSON_VALUES = [None, True, False, 0, -1, 1, 3, 10**9, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320, math.nan, math.inf, "",
               " ", "a0", "n0", "s", "network", "a/fabric", "80G", "80GB", "400Gb", "400Gb/s", "4 x T4", "0 x T4", "T4",
               "999999999999999999999 x T4", "nvlink3", "port", "a\nb", "a>b", "\u0000", "\U0001f600", "x" * 5000,
               "5us", [], {}, [[]], [None], [{}], {"": 1}, {"bandwidth": "1GB/s"}, {"float32": "1TFLOP/s"}, ["T4", 7]]
KEYS = ["name", "from", "to", "devices", "memory", "flops", "shared", "per", "x", "", "count", "intra", "network",
        "links", "switches", "kinds", "hosts", "__class__", "from_"]
YAML_ONLY = [datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), b"bytes", {1: 2}, {None: 1}, {2.5: []}, {"a"},
             {True: False}, {datetime.date(2020, 1, 1): 1}]
SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.extend(places(item, (*path, key)))
    return found


def mutate(draw: st.DrawFn, value: Any, values: list[Any]) -> Any:
    path = draw(st.sampled_from(places(value)))
    new = copy.deepcopy(draw(st.sampled_from(values)))
    if not path:
        return new if draw(st.integers(0, 9)) == 0 else value
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    match draw(st.sampled_from(["replace", "remove", "repeat", "rename", "add", "swap"])):
        case "replace":
            parent[path[-1]] = new
        case "remove":
            del parent[path[-1]]
        case "repeat" if isinstance(parent, list):
            parent.extend(copy.deepcopy(parent[path[-1]]) for _ in range(draw(st.integers(1, 3))))
        case "rename" if isinstance(parent, dict):
            parent[draw(st.sampled_from(KEYS))] = parent.pop(path[-1])
        case "add" if isinstance(parent, dict):
            parent[draw(st.sampled_from(KEYS))] = new
        case _:
            other = draw(st.sampled_from(places(value)))
            item = value
            for step in other:
                item = item[step]
            parent[path[-1]] = copy.deepcopy(item)
    return value


@st.composite
def mutated(draw: st.DrawFn, values: list[Any]) -> Any:
    value = draw(st.sampled_from(FORMS))()
    for _ in range(draw(st.integers(1, 4))):
        if isinstance(value, dict | list):
            value = mutate(draw, value, values)
    return value


def load_or_refuse(path) -> Cluster | None:
    try:
        cluster = load_cluster(path)
    except ClusterError as problem:
        str(problem).encode()  # a message that can be printed
        return None
    check_cluster(cluster)
    if cluster.num_devices < 100:
        assert parse_cluster(to_json(cluster)) == cluster
        for other in range(cluster.num_devices):
            assert max(cluster.transfer_resources(0, other), default=0) < max(cluster.num_resources, 1)
    return cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("broken")


@settings(SETTINGS, max_examples=250)
@given(value=mutated(JSON_VALUES))
def test_mutated_json(folder, value):
    path = folder / "c.json"
    path.write_text(json.dumps(value))
    load_or_refuse(path)


@settings(SETTINGS, max_examples=200)
@given(value=mutated(JSON_VALUES + YAML_ONLY))
def test_mutated_yaml(folder, value):
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    load_or_refuse(path)


PIECES = st.sampled_from([
    b"{", b"}", b"[", b"]", b":", b",", b"\n", b"  ", b"-", b'"', b"'", b"&a ", b"*a", b"!!int ", b"<<: ", b"? ", b"|", b">",
    b"%YAML 9.9\n", b"---\n", b"#", b"\t", b"\x00", b"\xff", b"\\U99999999", b"1e999", b"@", b"`", b"NaN", b"~",
]) | st.binary(min_size=1, max_size=4)


@settings(SETTINGS, max_examples=200)
@given(data=st.data(), form=st.sampled_from(FORMS), name=st.sampled_from(["c.json", "c.yaml", "c", "c.json.gz"]))
def test_mutated_bytes(folder, data, form, name):
    is_yaml = name == "c.yaml"
    raw = bytearray((yaml.safe_dump(form()) if is_yaml else json.dumps(form())).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        length = data.draw(st.integers(0, 3))
        raw[start : start + length] = data.draw(PIECES)
    (folder / name).write_bytes(raw)
    load_or_refuse(folder / name)


@settings(SETTINGS, max_examples=100)
@given(text=st.text(max_size=80))
def test_any_text(folder, text):
    path = folder / "t.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert load_or_refuse(path) is None


def test_the_mutations_are_not_all_refused():
    """Guard against a test that only ever meets broken headers: the unmutated forms load."""
    for form in FORMS:
        assert parse_cluster(form()).num_devices >= 2
