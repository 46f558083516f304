"""Timeline files: what is saved comes back, and anything else is refused with a message."""

from __future__ import annotations

import contextlib
import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.helpers import pipeline_world
from weft.base.errors import InputError, PlanError
from weft.simulate.timeline_file import load_timeline, parse_timeline, save_timeline, timeline_to_json
from weft.simulate.timing import simulate

PROGRAM, COSTS, CLUSTER = pipeline_world("1f1b", 2, 3, activation_bytes=8, optimizer="adamw")
TIMELINE = simulate(PROGRAM, COSTS, CLUSTER)
DOCUMENT = json.loads(json.dumps(timeline_to_json(TIMELINE)))


@pytest.mark.parametrize("name", ["timeline.json", "timeline.json.gz"])
@pytest.mark.parametrize("program", [None, PROGRAM])
def test_round_trip(tmp_path, name, program):
    save_timeline(TIMELINE, tmp_path / name)
    loaded = load_timeline(tmp_path / name, program)
    for column in ("rank_start", "op", "start_s", "end_s", "source", "previous", "partner", "needs"):
        assert np.array_equal(getattr(loaded, column), getattr(TIMELINE, column)), column
    assert loaded.labels == TIMELINE.labels
    assert loaded.summary() == TIMELINE.summary()
    assert loaded.step_time_s == TIMELINE.step_time_s
    assert np.array_equal(loaded.memory_curve(1).num_bytes, TIMELINE.memory_curve(1).num_bytes)
    assert timeline_to_json(loaded) == timeline_to_json(TIMELINE)


def test_saving_twice_gives_the_same_bytes(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        save_timeline(TIMELINE, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def edit(*path_and_value) -> dict:
    """Return the document with the value at the path replaced."""
    *path, last, value = path_and_value
    document = copy.deepcopy(DOCUMENT)
    place = document
    for step in path:
        place = place[step]
    place[last] = value
    return document


@pytest.mark.parametrize(("document", "message"), [
    (edit("format", "weft.plan"), "format must be 'weft.timeline'"),
    (edit("version", 2), "version must be 1"),
    (edit("kind", "guessed"), "kind must be one of 'predicted', 'measured'"),
    (edit("ranks", 0, "color", "red"), r"ranks\[0\].color is not a known field"),
    (edit("ranks", 0, "op", 0, "jump"), r"ranks\[0\].op\[0\] must be one of"),
    (edit("ranks", 1, "source", 2, "rumour"), r"ranks\[1\].source\[2\] must be one of"),
    (edit("ranks", 0, "start_s", [0.0]), r"ranks\[0\]: the columns differ in length"),
    (edit("ranks", 0, "start_s", 0, 1e9), r"ranks\[0\]: an instruction runs from 1000000000.0 to"),
    (edit("ranks", 0, "start_s", 0, -1.0), r"ranks\[0\]: an instruction runs from -1.0 to"),
    (edit("ranks", 1, "device", "d7"), "ranks are of devices"),
    (edit("ranks", 1, "static", {"parameters": 1}), r"ranks\[1\].static must have parameters, gradients"),
    (edit("ranks", 1, "buffers", 0, -5), r"ranks\[1\]: -5 bytes of memory"),
    (edit("ranks", 1, "buffers", 0, 2**62), "bytes of memory"),
    (edit("step_time_s", 1.5), "step_time_s is 1.5, but the last instruction ends at"),
    (edit("pairs", 0, 0, 10**6), r"pairs\[0\]: instruction 1000000 is missing, not send"),
    (edit("pairs", []), "pairs must name every send once"),
    (edit("needs", 0, 0, -1), r"needs\[0\]: instruction -1 is missing, not compute or step"),
    ([], "must be an object"),
])
def test_broken_documents_are_refused(document, message):
    with pytest.raises(PlanError, match=message):
        parse_timeline(document)


def test_timeline_of_another_program_is_refused():
    other, *_ = pipeline_world("gpipe", 2, 3, activation_bytes=8, optimizer="adamw")
    with pytest.raises(PlanError, match=r"the timeline has .* where the program has rank \d \(d\d\), instruction"):
        parse_timeline(DOCUMENT, other)
    longer, *_ = pipeline_world("1f1b", 2, 4, activation_bytes=8, optimizer="adamw")
    with pytest.raises(PlanError, match="instructions by rank, but the program"):
        parse_timeline(DOCUMENT, longer)
    wider, *_ = pipeline_world("1f1b", 3, 3, activation_bytes=8, optimizer="adamw")
    with pytest.raises(PlanError, match="the timeline is of model"):
        parse_timeline(DOCUMENT, wider)


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.floats(), st.text(max_size=4), st.just([]),
                 st.just({}), st.just(2**70), st.just([[0, 1]]))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_mutated_documents_load_or_raise_input_errors(data):
    document = copy.deepcopy(DOCUMENT)
    for _ in range(data.draw(st.integers(1, 3))):
        place = document
        while True:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and data.draw(st.integers(0, 3)):
                place = place[key]
            elif data.draw(st.booleans()):
                place[key] = copy.deepcopy(data.draw(JUNK))
                break
            else:
                del place[key]
                break
    try:
        timeline = parse_timeline(document)
    except InputError:
        return
    assert timeline.summary() is not None
    assert timeline_to_json(timeline)["ranks"]


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_mutated_bytes_load_or_raise_input_errors(tmp_path_factory, position, junk):
    path = tmp_path_factory.mktemp("mutated") / "timeline.json"
    save_timeline(TIMELINE, path)
    raw = bytearray(path.read_bytes())
    raw[position:position + len(junk)] = junk
    path.write_bytes(bytes(raw))
    with contextlib.suppress(InputError):
        load_timeline(path, PROGRAM)
