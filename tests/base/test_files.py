"""Reading files into types: strict, bounded, and with the path of what is wrong."""

from __future__ import annotations

import enum
import gzip
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft.base.files
from weft.base.errors import (
    ClusterError,
    InputError,
    ModelError,
    NoFeasiblePlan,
    PlanError,
    RunError,
    WeftError,
    printable,
)
from weft.base.files import (
    JsonLimits,
    check_header,
    decode,
    encode,
    excess,
    load_json,
    parse_json,
    read_bytes,
    write_atomic,
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    value: float
    from_: str = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    name: str
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, str] | None = None
    by_name: Mapping[str, Leaf] = field(default_factory=dict)
    colour: Colour = Colour.RED
    size: Literal["small", "large"] = "small"
    count: int | None = None
    flag: bool = False
    anything: Any = None
    either: int | str = 0


FULL = {"name": "t", "leaves": [{"value": 1, "from": "a"}], "pair": [1, "x"], "by_name": {"k": {"value": 2.5}},
        "colour": "blue", "size": "large", "count": 3, "flag": True, "anything": {"a": [1, None, "x", 0.5, True]},
        "either": "text"}


def test_values_become_types():
    tree = decode(Tree, FULL, where="f")
    assert tree == Tree(name="t", leaves=(Leaf(value=1.0, from_="a"),), pair=(1, "x"), by_name={"k": Leaf(value=2.5)},
                        colour=Colour.BLUE, size="large", count=3, flag=True,
                        anything={"a": [1, None, "x", 0.5, True]}, either="text")
    assert type(tree.leaves[0].value) is float


def test_types_become_values_and_the_same_types_again():
    tree = decode(Tree, FULL, where="f")
    assert decode(Tree, encode(tree), where="f") == tree
    assert encode(tree)["leaves"] == [{"value": 1.0, "from": "a"}]
    assert encode(Colour.RED) == "red"


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"nmae": 1}, "f: nmae is not a known field (known: anything, by_name, colour, count, either, flag, leaves, name, "
                  "pair, size)"),
    ({"leaves": [{"value": 1}, {"valu": 2}]}, "f: leaves[1].valu is not a known field (known: from, value); "
                                              "leaves[1].value is missing"),
    ({"leaves": [{"value": 1, "from_": "x"}]}, "f: leaves[0].from_ is not a known field"),
    ({"leaves": {"value": 1}}, "f: leaves must be a list, not an object"),
    ({"leaves": [3]}, "f: leaves[0] must be an object, not 3"),
    ({"name": 3}, "f: name must be text, not 3"),
    ({"name": None}, "f: name must be text, not None"),
    ({"pair": [1]}, "f: pair must have 2 items, not 1"),
    ({"pair": ["x", 1]}, "f: pair[0] must be a whole number, not 'x'; pair[1] must be text, not 1"),
    ({"by_name": []}, "f: by_name must be an object, not a list"),
    ({"by_name": {"k": {"value": "high"}}}, "f: by_name.k.value must be a number, not 'high'"),
    ({"by_name": {3: {"value": 1}}}, "f: by_name: the key 3 must be text"),
    ({"colour": "green"}, "f: colour must be one of 'red', 'blue', not 'green'"),
    ({"colour": ["red"]}, "f: colour must be one of 'red', 'blue', not a list"),
    ({"size": "medium"}, "f: size must be one of 'small', 'large', not 'medium'"),
    ({"size": {}}, "f: size must be one of 'small', 'large', not an object"),
    ({"count": 1.5}, "f: count must be a whole number, not 1.5"),
    ({"count": True}, "f: count must be a whole number, not True"),
    ({"count": 2**63}, f"f: count must be a whole number of at most 64 bits, not {2**63}"),
    ({"count": 16**5000}, "f: count must be a whole number of at most 64 bits, not a number of more than 40 digits"),
    ({"flag": 0}, "f: flag must be true or false, not 0"),
    ({"leaves": [{"value": float("nan")}]}, "f: leaves[0].value must be a finite number, not nan"),
    ({"leaves": [{"value": 10**400}]}, "f: leaves[0].value must be a finite number, not a number of more than 40"),
    ({"leaves": [{"value": True}]}, "f: leaves[0].value must be a number, not True"),
    ({"either": 1.5}, "f: either must be a whole number, not 1.5"),
    ({"anything": {"a": [float("inf")]}}, "f: anything.a[0] must be a finite number, not inf"),
    ({"anything": [2**64]}, "f: anything[0] must be a whole number of at most 64 bits"),
    ({"anything": object}, "f: anything must be a plain value, not <class 'object'>"),
    ({"x" * 500: 1}, "f: 'xxx"),
])
def test_what_does_not_fit_is_named_with_its_path(changes, sentence):
    with pytest.raises(ModelError) as caught:
        decode(Tree, FULL | changes, where="f", error=ModelError)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 400


def test_whole_numbers_may_be_written_with_a_point():
    assert decode(Tree, {"name": "t", "count": 3.0}, where="f").count == 3


def test_not_an_object_at_all():
    with pytest.raises(InputError, match="f: the file must be an object, not a list"):
        decode(Tree, [], where="f")


def test_at_most_twenty_problems_are_shown():
    with pytest.raises(InputError, match=r"leaves\[19\] must be .*; \.\.\. and 5 more$"):
        decode(Tree, {"name": "t", "leaves": [1] * 25}, where="f")


def test_depth_of_untyped_values_is_limited():
    value: Any = 1
    for _ in range(49):
        value = [value]
    decode(Tree, {"name": "t", "anything": value}, where="f")
    with pytest.raises(InputError, match="is nested more than 50 deep"):
        decode(Tree, {"name": "t", "anything": [[value]]}, where="f")


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(value=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([*FULL, "value", "from", "k"]) | st.text(max_size=3) | st.integers(), inner, max_size=4),
    max_leaves=12))
def test_whatever_is_decoded_only_the_given_error_comes_back(value):
    try:
        decode(Tree, value, where="f", error=ClusterError)
    except ClusterError as error:
        str(error).encode()


# ---- headers and JSON text -----------------------------------------------------------------------------------------

def header(value: Any) -> dict[str, Any]:
    return check_header(value, format_name="weft.x", version=1, where="f", error=ModelError)


def test_header_is_taken_off():
    assert header({"format": "weft.x", "version": 1, "a": 2}) == {"a": 2}


@pytest.mark.parametrize(("value", "sentence"), [
    ([], "f must be an object with a 'format' field, not a list"), (None, "f must be an object"),
    ({}, "f: format must be 'weft.x', not None"), ({"format": {"a": 1}}, "f: format must be 'weft.x', not an object"),
    ({"format": "weft.x"}, "f: version must be 1, not None; this Weft reads no other"),
    ({"format": "weft.x", "version": True}, "f: version must be 1, not True"),
    ({"format": "weft.x", "version": "1"}, "f: version must be 1, not '1'"),
    ({"format": "weft.x", "version": 10**4000}, "f: version must be 1, not a number of more than 40 digits"),
])
def test_header_that_does_not_fit(value, sentence):
    with pytest.raises(ModelError, match=re.escape(sentence)):
        header(value)


@pytest.mark.parametrize(("text", "sentence"), [
    ('{"a": 1, "a": 2}', "the key 'a' is there twice"), ('{"a": NaN}', "NaN is not a JSON number"),
    ("[-Infinity]", "-Infinity is not a JSON number"), ("[1,", "f is not valid JSON"), (b"\xff\xfe\xfd", "f is not valid"),
    ("[" * 100_000, "f is nested more than 100 deep"), ("1" * 5000, "f is not valid JSON"), (b"", "f is not valid JSON"),
    (b'{"a": "\xed\xa0\x80"}', "f is not valid JSON"),
])
def test_text_that_is_not_json(text, sentence):
    with pytest.raises(PlanError, match=re.escape(sentence)):
        parse_json(text, where="f", error=PlanError)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.binary(max_size=40))
def test_random_bytes_only_raise_the_given_error(data):
    try:
        parse_json(data, where="f", error=PlanError)
    except PlanError as error:
        str(error).encode()


# ---- files ---------------------------------------------------------------------------------------------------------

def test_files_come_back_as_written(tmp_path):
    for name in ("a.json", "deep/er/b.json", "c.json.gz"):
        write_atomic(tmp_path / name, '{"a": "\u00e9"}')
        assert load_json(tmp_path / name) == {"a": "\u00e9"}
    assert (tmp_path / "c.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o644
    write_atomic(str(tmp_path / "raw"), b"\x00\x01")
    assert read_bytes(tmp_path / "raw") == b"\x00\x01"


def test_compressed_files_are_the_same_bytes_each_time(tmp_path):
    write_atomic(tmp_path / "a.gz", "x" * 1000)
    write_atomic(tmp_path / "b.gz", "x" * 1000)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@pytest.mark.parametrize(("content", "name", "sentence"), [
    (b"not gzip", "a.json.gz", "cannot read"), (gzip.compress(b"x" * 999, mtime=0)[:-9], "a.json.gz", "cannot read"),
    (gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20, "a.json.gz", "cannot read"), (b"", "a.json.gz", "not valid JSON"),
])
def test_damaged_compression(content, name, sentence, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        load_json(tmp_path / name, error=ModelError)


def test_files_that_are_not_there_or_not_files(tmp_path):
    with pytest.raises(PlanError, match=r"no file '.*nothing\.json': check the path"):
        read_bytes(tmp_path / "nothing.json", error=PlanError)
    with pytest.raises(PlanError, match="cannot read"):
        read_bytes(tmp_path, error=PlanError)
    with pytest.raises(PlanError, match="cannot read"):
        read_bytes("a\0b", error=PlanError)
    with pytest.raises(PlanError, match="cannot read"):
        read_bytes("x" * 5000, error=PlanError)


def test_large_files_are_refused_also_when_they_are_small_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(weft.base.files, "MAX_FILE_BYTES", 1000)
    for name in ("a.json", "a.json.gz"):
        write_atomic(tmp_path / name, " " * 1001)
        with pytest.raises(InputError, match="is larger than 1000 bytes: not read"):
            read_bytes(tmp_path / name)


def fail(*_args: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["replace", "fdopen", "chmod"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(step, tmp_path, monkeypatch):
    write_atomic(tmp_path / "a.json", "old")
    monkeypatch.setattr(f"weft.base.files.os.{step}", fail)
    with pytest.raises(InputError, match=r"cannot write .*No space left on device"):
        write_atomic(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a.json", "old")

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.base.files.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "inside.json", "a\0b", tmp_path):
        with pytest.raises(InputError, match="cannot write"):
            write_atomic(path, "x")
    assert os.listdir(tmp_path) == ["file"]


def test_long_names_can_be_written(tmp_path):
    write_atomic(tmp_path / ("n" * 250), "x")
    assert (tmp_path / ("n" * 250)).read_text() == "x"


# ---- errors --------------------------------------------------------------------------------------------------------

def test_exit_codes():
    assert {kind: kind.exit_code for kind in (InputError, ModelError, ClusterError, PlanError, NoFeasiblePlan, RunError)
            } == {InputError: 2, ModelError: 2, ClusterError: 2, PlanError: 2, NoFeasiblePlan: 3, RunError: 4}
    assert all(issubclass(kind, WeftError) for kind in (InputError, NoFeasiblePlan, RunError))


def test_messages_show_what_a_terminal_would_obey():
    error = PlanError("name '\x1b[2J\ud800\u202e' is\n\twrong", ["\x07", "plain"])
    assert str(error) == "name '\\x1b[2J\\ud800\\u202e' is\n\twrong"
    assert error.problems == ("\\x07", "plain")
    assert printable("Gr\u00f6\u00dfe 3 \u00b5s, \u6a21\u578b") == "Gr\u00f6\u00dfe 3 \u00b5s, \u6a21\u578b"


@pytest.mark.parametrize(("text", "sentence"), [
    ("[" + "[]," * 2_600_000 + "[]]", "has more than 5,000,000 values"),
    ("[" + "{}," * 2_600_000 + "{}]", "has more than 5,000,000 values"),
    ("[" + "0," * 5_100_000 + "0]", "has more than 5,000,000 values"),
    ('{"a":[' + '{"":0},' * 2_600_000 + '0]}', "has more than 5,000,000 values"),
    ("[" * 101 + "]" * 101, "is nested more than 100 deep"),
    ('[{"a":' * 60 + "1" + "}]" * 60, "is nested more than 100 deep"),
    (" " * 100_000_001, "is larger than 100000000 bytes"),
], ids=["lists", "objects", "numbers", "keys", "deep", "mixed", "blanks"])
@pytest.mark.parametrize("name", ["bomb.json.gz"])
def test_a_small_file_of_many_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch, name, text, sentence):
    (tmp_path / name).write_bytes(gzip.compress(text.encode(), compresslevel=1))
    monkeypatch.setattr(weft.base.files.json, "loads", lambda *_args, **_options: pytest.fail("it was parsed"))
    with pytest.raises(PlanError, match=sentence):
        load_json(tmp_path / name, error=PlanError)


@given(st.recursive(st.one_of(st.text('[]{},"\\ab\n'), st.integers(), st.none()),
                    lambda inner: st.one_of(st.lists(inner, max_size=4),
                                            st.dictionaries(st.text('[]{},:"\\k'), inner, max_size=4)), max_leaves=30))
@settings(max_examples=200, deadline=None)
def test_values_and_depth_are_counted_as_the_parser_finds_them(value):
    def depth_of(item: object) -> int:
        if isinstance(item, list | dict):
            return 1 + max(map(depth_of, item.values() if isinstance(item, dict) else item), default=0)
        return 0

    def lists_in(item: object) -> int:
        if isinstance(item, list | dict):
            return 1 + sum(map(lists_in, item.values() if isinstance(item, dict) else item))
        return 0

    text = json.dumps(value, ensure_ascii=False).encode()
    depth, lists = depth_of(value), lists_in(value)
    assert excess(text, JsonLimits(depth=depth, lists=lists)) is None
    assert depth == 0 or "deep" in excess(text, JsonLimits(depth=depth - 1))
    assert lists == 0 or "lists" in excess(text, JsonLimits(lists=lists - 1))


def test_a_value_with_a_million_faults_is_described_in_short():
    with pytest.raises(InputError, match=r"leaves\[0\] must be an object, not 0; .*; \.\.\. and more$") as caught:
        decode(Tree, {"name": "t", "leaves": [0] * 1_000_000}, where="f")
    assert len(str(caught.value)) < 2000
    with pytest.raises(InputError, match="name is text of 100001 characters, more than 100000"):
        decode(Tree, {"name": "x" * 100_001}, where="f")
    with pytest.raises(InputError, match=r"either\[0\] must be|either must be"):
        decode(Tree, {"name": "t", "either": ["\x01" * 1_000_000]}, where="f")
