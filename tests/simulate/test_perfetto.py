"""Traces: no slice overlaps another on its track, arrows join slices, names agree between predicted and measured."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.helpers import pipeline_world
from tests.simulate.test_timeline import pipelines
from weft.plan.program import Op
from weft.simulate.timeline import make_timeline
from weft.simulate.timeline_file import TICKS_PER_US, assign_lanes, trace_events, write_trace
from weft.simulate.timing import simulate


def assert_no_overlap(events: list[dict]) -> None:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            # What a reader computes: whole nanoseconds, cut off.
            start = int(event["ts"] * 1000)
            tracks[event["pid"], event["tid"]].append((start, start + int(event["dur"] * 1000)))
    for slices in tracks.values():
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(slices))


@given(pipelines(), st.floats(1e-7, 10.0), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_slices_never_overlap_on_a_track(timeline, scale, seed):
    """Also for measured times that overlap anyhow."""
    length = np.random.default_rng(seed).random(timeline.num_instructions) * scale
    measured = make_timeline(timeline.program, start_s=timeline.start_s * scale,
                             end_s=timeline.start_s * scale + length, kind="measured")
    events = list(trace_events([timeline, measured]))
    assert_no_overlap(events)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * timeline.num_instructions
    assert all(event["dur"] >= 0 and (event["ts"] * TICKS_PER_US).is_integer() for event in slices)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=20))
def test_lanes_are_as_few_as_possible(rows):
    ticks = np.array([(start, start + length) for start, length in rows], dtype=np.int64).reshape(-1, 2)
    lanes = assign_lanes(ticks)
    for lane in set(lanes):
        mine = sorted(tuple(row) for row, other in zip(ticks.tolist(), lanes, strict=True) if other == lane)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
    deepest = max((sum(start <= point < end for start, end in ticks.tolist()) for point in range(30)), default=0)
    assert len(set(lanes)) <= max(deepest + 1, 1)


def test_trace_file_of_two_timelines(tmp_path):
    program, costs, cluster = pipeline_world("1f1b", 2, 3, activation_bytes=8)
    predicted = simulate(program, costs, cluster)
    measured = make_timeline(program, start_s=predicted.start_s + 0.5, end_s=predicted.end_s + 0.75, kind="measured")
    path = tmp_path / "trace.json.gz"
    write_trace([predicted, measured], path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sorted(processes) == ["d0 measured", "d0 predicted", "d1 measured", "d1 predicted"]
    numbers = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert sorted(numbers, key=numbers.get) == ["d0 predicted", "d0 measured", "d1 predicted", "d1 measured"]
    names = {title: sorted(event["name"] for event in events if event["ph"] == "X" and event["pid"] in (
        numbers[f"d0 {title}"], numbers[f"d1 {title}"])) for title in ("predicted", "measured")}
    assert names["predicted"] == names["measured"] == sorted(predicted.labels)


def test_two_timelines_of_one_kind_are_told_apart():
    timeline = simulate(*pipeline_world("1f1b", 1, 1))
    events = trace_events([timeline, timeline])
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "d0 predicted", "d0 predicted 2"]


def test_tracks_arrows_and_memory():
    program, costs, cluster = pipeline_world("1f1b", 3, 4, activation_bytes=8)
    timeline = simulate(program, costs, cluster)
    events = list(trace_events([timeline]))
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "send", "receive", "collective"} <= tracks
    slices = {(event["pid"], event["tid"], event["ts"]) for event in events if event["ph"] == "X"}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == int((timeline.op == Op.SEND).sum())
    assert starts.keys() == ends.keys()
    for number, event in starts.items():
        assert (event["pid"], event["tid"], event["ts"]) in slices
        assert (ends[number]["pid"], ends[number]["tid"], ends[number]["ts"]) in slices
        assert ends[number]["pid"] != event["pid"]
    for rank, summary in enumerate(timeline.summary()):
        counters = [event["args"] for event in events if event["ph"] == "C" and event["pid"] == rank + 1]
        assert max(sum(values.values()) for values in counters) == summary.peak_bytes


@given(pipelines(), st.floats(0.1, 3.0), st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_prediction_and_run_have_the_same_names(timeline, scale, seed):
    """Also where the run overlaps more, or less, than was predicted: the two can be laid side by side."""
    length = np.random.default_rng(seed).random(timeline.num_instructions) * scale
    measured = make_timeline(timeline.program, start_s=timeline.start_s, end_s=timeline.start_s + length, kind="measured")
    events = list(trace_events([timeline, measured]))
    devices = {event["pid"]: event["args"]["name"].rsplit(" ", 1) for event in events if event["name"] == "process_name"}
    names = defaultdict(set)
    for event in events:
        device, kind = devices[event["pid"]]
        if event["name"] == "thread_name":
            names[kind].add((device, "track", event["tid"], event["args"]["name"]))
        elif event["ph"] == "X":
            names[kind].add((device, "slice", event["cat"], event["name"]))
        elif event["ph"] == "C":
            names[kind].add((device, "counter", event["name"], tuple(event["args"])))
    assert set(names) == {"predicted", "measured"}
    assert names["predicted"] == names["measured"]
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= tracks
    order = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    numbers = [event["pid"] for event in events if event["name"] == "process_name"]
    side_by_side = [name for _, name in sorted(zip(numbers, order, strict=True))]
    assert side_by_side == [f"{device} {kind}" for device in timeline.devices for kind in ("predicted", "measured")]
