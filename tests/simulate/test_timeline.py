"""What follows from a timeline: where the time went and what memory was held."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.helpers import pipeline_world
from weft.plan.memory import CATEGORIES, account_memory
from weft.plan.program import Op
from weft.simulate.timeline import Timeline, make_timeline, union_lengths
from weft.simulate.timing import simulate


@st.composite
def pipelines(draw: st.DrawFn) -> Timeline:
    """Simulated pipelines of several kinds, with and without transfer times."""
    kind = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    num_devices = draw(st.integers(1, 4))
    num_microbatches = num_devices * draw(st.integers(1, 3))
    num_chunks = draw(st.integers(1, 2)) if kind == "interleaved" else 1
    return simulate(*pipeline_world(
        kind, num_devices, num_microbatches, num_chunks=num_chunks, activation_bytes=draw(st.integers(0, 3)),
        recompute=draw(st.booleans()), optimizer=draw(st.sampled_from(["none", "adamw"]))))


@given(pipelines())
@settings(max_examples=40, deadline=None)
def test_busy_exposed_and_bubble_add_up(timeline):
    total = timeline.busy_s + timeline.exposed_s + timeline.bubble_s
    assert total == pytest.approx([timeline.step_time_s] * timeline.num_ranks)
    assert timeline.bubble_s.min() >= -1e-9 * timeline.step_time_s
    assert 0 <= timeline.bubble <= 1
    for rank, item in enumerate(timeline.summary()):
        assert item.idle_s == pytest.approx(item.exposed_s + item.bubble_s)
        assert item.device == timeline.devices[rank]


@given(pipelines())
@settings(max_examples=20, deadline=None)
def test_exposed_communication_against_sampling(timeline):
    """Count instants at which the stream is idle and something its next instruction needs is under way."""
    instants = (np.arange(4000) + 0.5) / 4000 * timeline.step_time_s
    for rank in range(timeline.num_ranks):
        exposed = np.zeros(len(instants), dtype=bool)
        before = 0.0
        for index in range(int(timeline.rank_start[rank]), int(timeline.rank_start[rank + 1])):
            if timeline.op[index] not in (Op.COMPUTE, Op.STEP):
                continue
            for other in timeline.needs[timeline.needs[:, 0] == index, 1]:
                exposed |= ((instants >= before) & (instants < timeline.start_s[index])
                            & (instants >= timeline.start_s[other]) & (instants < timeline.end_s[other]))
            before = timeline.end_s[index]
        assert exposed.mean() * timeline.step_time_s == pytest.approx(
            timeline.exposed_s[rank], abs=timeline.step_time_s * 0.02)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 6)), max_size=12))
def test_union_lengths_against_counting(rows):
    group, low, length = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)) if rows else (
        np.zeros(0, dtype=np.int64),) * 3
    found = union_lengths(group, low.astype(float), (low + length).astype(float))
    for number in range(3):
        covered = {point for which, start, size in rows if which == number for point in range(start, start + size)}
        assert found[group == number].sum() == len(covered)


def test_peak_memory_by_category_is_at_one_instant():
    program, costs, cluster = pipeline_world("1f1b", 4, 6, activation_bytes=100, optimizer="adamw")
    timeline = simulate(program, costs, cluster)
    account = account_memory(program)
    for rank, summary in enumerate(timeline.summary()):
        assert tuple(summary.peak_memory) == CATEGORIES
        assert summary.peak_bytes == sum(summary.peak_memory.values()) == int(account.held(rank).max())
    # Under 1F1B the second stage of four holds the activations of three micro-batches, the last stage those of one.
    activations = [summary.peak_memory["activations"] for summary in timeline.summary()]
    assert activations[1] > activations[2] > activations[3] > 0


@given(pipelines())
@settings(max_examples=20, deadline=None)
def test_memory_curve_begins_static_rises_and_reaches_the_peak(timeline):
    for rank in range(timeline.num_ranks):
        curve = timeline.memory_curve(rank)
        assert (np.diff(curve.time_s) > 0).all()
        assert curve.time_s[0] == 0.0
        assert curve.time_s[-1] <= timeline.step_time_s
        assert (curve.num_bytes >= timeline.memory.static[rank]).all()
        assert curve.num_bytes.sum(axis=1).max() == timeline.summary()[rank].peak_bytes


def test_memory_curve_follows_the_account_from_instruction_to_instruction():
    program, costs, cluster = pipeline_world("gpipe", 2, 2, activation_bytes=8)
    timeline = simulate(program, costs, cluster)
    curve = timeline.memory_curve(1)
    account = account_memory(program)
    first = int(program.rank_start[1])
    for index in range(first, int(program.rank_start[2])):
        if timeline.op[index] == Op.COMPUTE and timeline.end_s[index] > timeline.start_s[index]:
            step = int(np.searchsorted(curve.time_s, timeline.start_s[index], side="right")) - 1
            assert curve.time_s[step] == timeline.start_s[index]
            assert curve.num_bytes[step].sum() == account.held(1)[index - first]
    # The second micro-batch arrives while the first is worked on.
    assert curve.num_bytes[:, CATEGORIES.index("buffers")].max() >= 16


def test_measured_timeline_has_the_same_form():
    program, costs, cluster = pipeline_world("1f1b", 2, 3, activation_bytes=8)
    predicted = simulate(program, costs, cluster)
    measured = make_timeline(program, start_s=predicted.start_s * 2, end_s=predicted.end_s * 2, kind="measured")
    assert measured.labels == predicted.labels
    assert measured.step_time_s == 2 * predicted.step_time_s
    assert measured.exposed_s == pytest.approx(2 * predicted.exposed_s)
    assert measured.bubble == pytest.approx(predicted.bubble)
    assert np.array_equal(measured.needs, predicted.needs)


def test_same_input_gives_same_bytes():
    first, second = (simulate(*pipeline_world("interleaved", 3, 6, num_chunks=2, activation_bytes=3)) for _ in range(2))
    assert first.start_s.tobytes() == second.start_s.tobytes()
    assert first.end_s.tobytes() == second.end_s.tobytes()
