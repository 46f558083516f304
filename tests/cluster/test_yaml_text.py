"""The YAML subset: types, keys, tags, aliases and limits."""

from __future__ import annotations

import pytest

from weft.base.errors import ClusterError
from weft.cluster.yaml_text import MAX_TEXT, parse_yaml


@pytest.mark.parametrize(("text", "value"), [
    ("a: 5", {"a": 5}),
    ("a: -0.5e-3", {"a": -0.0005}),
    ("a: 5e-6", {"a": 5e-6}),
    ("a: true", {"a": True}),
    ("a: null\nb: ~\nc:", {"a": None, "b": None, "c": None}),
    ("a: no", {"a": "no"}),
    ("on: off", {"on": "off"}),
    ("a: 010", {"a": "010"}),
    ("a: 1:30", {"a": "1:30"}),
    ("a: 0x10", {"a": "0x10"}),
    ("a: 2020-01-01", {"a": "2020-01-01"}),
    ("a: .nan", {"a": ".nan"}),
    ("a: 80GiB", {"a": "80GiB"}),
    ("a: '5'", {"a": "5"}),
    ("[1, {b: 2}]", [1, {"b": 2}]),
    ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
    ("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
    ("", None),
])
def test_values(text, value):
    parsed = parse_yaml(text, where="f")
    assert parsed == value
    assert repr(parsed) == repr(value), "types are the same too"


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 10) + "]\n" for i in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {k0: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}], k{i}: 1}}\n" for i in range(1, 12)
)


@pytest.mark.parametrize(("text", "message"), [
    ("a: 1\na: 2", "the key 'a' is there twice"),
    ("{x: {a: 1, 'a': 2}}", "the key 'a' is there twice"),
    ("1: 2", "a key must be text; put it in quotes"),
    ("[1]: 2", "a key must be text"),
    ("? {a: b}\n: 2", "a key must be text"),
    ("null: 2", "a key must be text"),
    ("a: !!python/object/apply:os.system [ls]", "tags are not read here"),
    ("a: !!int ''", "tags are not read here"),
    ("a: !!binary aGk=", "tags are not read here"),
    ("&a [*a]", "an alias stands inside what it repeats"),
    ("a: *b", "undefined alias"),
    ("a: 1\n---\nb: 2", "expected a single document"),
    ("a: [", "is not valid YAML"),
    ("a: \"\\UFFFFFFFF\"", "is not valid YAML"),
    ("a: " + "9" * 5000, "is not valid YAML"),
    ("[" * 5000, "is nested too deeply"),
    ("a: \0", "is not valid YAML"),
    (BOMB, "more than 250000 values, aliases counted"),
    (MERGE_BOMB, "more than 250000 values, aliases counted"),
    ("x" * (MAX_TEXT + 1), "write it as a .json file"),
])
def test_refused(text, message):
    with pytest.raises(ClusterError) as caught:
        parse_yaml(text, where="some.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("some.yaml")
