"""What is said about a placement: waits, the critical path, use of devices and links, memory over time, tables."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.show.place_results import (
    DIAMOND,
    PAIR,
    diamond,
    hostile,
    pipelined,
    problem_of,
    random_result,
    result_of,
    view_of,
)
from weft.search.place.timetable import MethodResult, check_timetable
from weft.show.chart import number
from weft.show.place_facts import (
    critical_items,
    critical_path,
    device_rows,
    device_use,
    find_waits,
    item_names,
    link_rows,
    transfer_use,
)
from weft.show.place_tables import (
    critical_table,
    devices_table,
    loads_table,
    methods_table,
    path_text,
    print_placement,
    sorted_methods,
    summary_table,
)

RANDOM = [random_result(40, 3, seed, contention=contention, lifetimes=bool(seed % 2))
          for seed, contention in enumerate(("link", "port", "none", "link", "port", "none"))]


def test_the_results_used_here_are_allowed_timetables():
    for result in [diamond(), pipelined(), *RANDOM, hostile()]:
        check_timetable(result.timetable)


# ---- waits and the critical path


def test_the_diamonds_critical_path_is_as_by_hand():
    table = diamond().timetable
    names = item_names(table)
    segments = critical_path(table)
    assert [(part.where, [names[item] for item in part.items], part.start_s, part.end_s, part.why) for part in segments] == [
        ("g", ["in"], 0.0, 1.0, "start"), ("g>c", ["in to c"], 1.0, 1.5, "input"), ("c", ["right"], 1.5, 4.5, "transfer"),
        ("c>g", ["right to g"], 4.5, 5.5, "input"), ("g", ["out"], 5.5, 6.5, "transfer")]
    assert path_text(segments, table.latency_s) == "in all: 46.2 % on c, 30.8 % on g, 23.1 % transfers"


def test_on_one_device_the_path_is_one_part_and_names_the_busy_device():
    table = diamond((0, 0, 0, 0)).timetable
    (part,) = critical_path(table)
    assert (part.where, len(part.items), part.time_s) == ("g", 4, 8.0)
    waits = find_waits(table)
    assert waits.why == ("start", "input", "device", "input")
    assert waits.after.tolist() == [-1, 0, 1, 2]


def test_a_busy_link_is_told_from_an_input():
    graph = {**DIAMOND, "edges": [{"from": "in", "to": "left", "bytes": 100}, {"from": "in", "to": "right", "bytes": 100},
                                  {"from": "left", "to": "out", "bytes": 1}, {"from": "right", "to": "out", "bytes": 1}]}
    table = result_of(problem_of(graph, PAIR), [0, 1, 1, 1]).timetable
    names, waits = item_names(table), find_waits(table)
    assert [(names[item], waits.why[item]) for item in range(4, 6)] == [("in to c", "input"), ("in to c", "link")]
    assert waits.start_s[5] == waits.end_s[4]


@pytest.mark.parametrize("result", RANDOM)
def test_the_critical_path_explains_the_whole_latency(result):
    table = result.timetable
    waits, segments = find_waits(table), critical_path(table)
    assert segments[0].start_s == 0.0
    assert segments[-1].end_s == table.latency_s
    for before, after in pairwise(segments):
        assert after.start_s == pytest.approx(before.end_s, abs=1e-9)
    assert sum(part.time_s for part in segments) == pytest.approx(table.latency_s)
    items = critical_items(waits, result.problem.num_ops)
    assert [item for part in segments for item in part.items] == items
    # Nothing starts before what it waited for has ended, and what waits for nothing starts at once.
    has_wait = waits.after >= 0
    assert (waits.start_s[has_wait] >= waits.end_s[waits.after[has_wait]] - 1e-9).all()
    assert (waits.start_s[~has_wait] == 0).all()


def test_a_timetable_with_idle_time_has_a_path_that_says_so():
    table = diamond((0, 0, 0, 0)).timetable
    late = replace(table, start_s=table.start_s + np.array([0.0, 2.0, 2.0, 2.0]))
    segments = critical_path(late)
    assert late.latency_s == 10.0
    assert "20.0 % idle" in path_text([replace(part, end_s=part.start_s + 8.0) for part in segments], 10.0)


# ---- rows, devices, links, memory


@pytest.mark.parametrize("result", RANDOM)
def test_rows_have_every_operator_and_every_transfer(result):
    table = result.timetable
    rows = device_rows(table)
    assert sorted(item for row in rows for item in row.items.tolist()) == list(range(result.problem.num_ops))
    links = link_rows(table)
    assert {item for row in links for item in row.items.tolist()} == set(
        range(result.problem.num_ops, result.problem.num_ops + len(table.transfers)))
    assert len({tuple(row.items.tolist()) for row in links}) == len(links)
    for row in [*rows, *links]:
        assert (np.diff(row.starts) >= 0).all()
        assert row.busy <= table.latency_s + 1e-9
        if result.problem.resource_names or not row.is_link:
            assert row.busy == pytest.approx((row.ends - row.starts).sum())


def test_a_way_of_several_links_is_one_row_named_by_its_devices():
    result = random_result(6, 2)
    assert {row.name for row in link_rows(result.timetable)} <= {"d0>d1", "d1>d0"}


def test_overlapping_transfers_count_once():
    result = RANDOM[2]
    assert not result.problem.resource_names
    for row in link_rows(result.timetable):
        grid = np.linspace(0, result.timetable.latency_s, 20001)
        covered = np.zeros(len(grid), dtype=bool)
        for start, end in zip(row.starts, row.ends, strict=True):
            covered |= (grid >= start) & (grid < end)
        assert row.busy == pytest.approx(covered.mean() * result.timetable.latency_s, rel=0.02)


def test_use_of_devices_and_links():
    g, c = device_use(diamond())
    assert (g.name, g.num_ops, g.busy_s, g.share, g.peak_bytes, g.capacity) == ("g", 3, 6.0, pytest.approx(6 / 6.5), 300.0, 1000.0)
    assert (c.num_ops, c.busy_s, c.peak_bytes, c.capacity) == (1, 3.0, 300.0, None)
    use = transfer_use(diamond())
    assert (use.count, use.num_bytes, use.time_s, use.busiest, use.busiest_s) == (2, 150.0, 1.5, "c>g", 1.0)
    alone = transfer_use(diamond((0, 0, 0, 0)))
    assert (alone.count, alone.busiest) == (0, None)


@pytest.mark.parametrize("result", RANDOM)
def test_memory_curves_have_the_peaks(result):
    table = result.timetable
    peaks, resident = table.peak_bytes(), result.problem.resident_bytes(table.device)
    for device, (times, amounts) in enumerate(table.memory_curves()):
        assert (np.diff(times) > 0).all()
        assert amounts.max() == pytest.approx(peaks[device])
        assert amounts[-1] == pytest.approx(resident[device])


# ---- tables


def text_of(view, **options) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        print_placement(view, **options)
    return out.getvalue()


def test_the_summary_says_value_bound_gap_and_fusion():
    rows = dict(summary_table(view_of(diamond(), fusion="rules", num_ops_before=12)).rows)
    assert rows == {"latency": "6.5 s (bound 3.25 s, gap 50.0 %)", "status": "feasible, by hand",
                    "operators": "4 of 12 before fusion (rules)", "transfers": "2, 150 B, 1.5 s in all; busiest c>g with 1 s",
                    "search": "0.25 CPU seconds"}
    plain = dict(summary_table(view_of(diamond((0, 0, 0, 0), is_interrupted=True), to_text=number)).rows)
    assert plain["latency"] == "8 (bound 4, gap 50.0 %)"
    assert plain["status"] == "feasible, by hand, interrupted"
    assert plain["operators"] == "4"
    assert plain["transfers"] == "none"


def test_devices_and_the_critical_path_are_tables():
    assert devices_table(view_of(diamond())).rows == (
        ("g", "3", "6 s", "92.3 %", "300 B", "1000 B", "30.0 %"), ("c", "1", "3 s", "46.2 %", "300 B", "no limit", "-"))
    kinds = devices_table(view_of(diamond(), kinds={"g": "A100", "c": "xeon"}))
    assert kinds.rows[0][:3] == ("g", "A100", "3")
    assert kinds.numeric == frozenset(range(2, 8))
    table = critical_table(view_of(diamond()))
    assert table.rows[1] == ("1 s", "g>c", "send in to c", "500 ms", "7.7 %", "input")
    assert table.rows[2] == ("1.5 s", "c", "right", "3 s", "46.2 %", "transfer")
    assert table.notes[1].startswith("longest: right 3 s (46.2 %), ")


def test_of_a_long_path_the_longest_parts_are_shown_in_their_order():
    result = random_result(80, 4)
    segments = critical_path(result.timetable)
    table = critical_table(view_of(result, to_text=number), limit=5)
    starts, times = ([float(row[column]) for row in table.rows] for column in (0, 3))
    assert len(starts) == 5
    assert starts == sorted(starts)
    assert min(times) == pytest.approx(sorted(part.time_s for part in segments)[-5], rel=1e-5)
    assert f"not shown: {len(segments) - 5} shorter parts" in table.notes[0]


def test_throughput_names_the_bottleneck():
    table = loads_table(view_of(pipelined()))
    assert table.rows == (("g", "6 s", "100 %"), ("c", "3 s", "50.0 %"), ("c>g", "1 s", "16.7 %"), ("g>c", "500 ms", "8.3 %"))
    assert table.notes == ("g is the bottleneck; longest: left 4 s (66.7 %), in 1 s (16.7 %), out 1 s (16.7 %)",)
    text = text_of(view_of(pipelined()))
    assert "Critical path" not in text
    rows = dict(summary_table(view_of(pipelined())).rows)
    assert rows["time per request"] == "6 s (bound 5 s, gap 16.7 %)"
    assert rows["latency of one request"] == "6.5 s"
    by_link = loads_table(view_of(pipelined(), to_text=number))
    assert by_link.rows[0] == ("g", "6", "100 %")
    crowded = pipelined()
    crowded = replace(crowded, loads={**crowded.loads, "c>g": 9.0}, value=9.0)
    assert loads_table(view_of(crowded)).notes == ("c>g is the bottleneck; longest: right to g 1 s (11.1 %)",)


METHODS = sorted_methods([MethodResult(method="heft", value=9.75), MethodResult(method="auto", value=6.5),
                          MethodResult(method="sequential", value=None, reason="does not fit: 30 bytes are missing")])


def test_methods_are_sorted_with_their_ratio_and_reason():
    table = methods_table(view_of(diamond(), methods=METHODS))
    assert table.rows == (("auto", "6.5 s", "1.000", ""), ("heft", "9.75 s", "1.500", ""),
                          ("sequential", "-", "-", "does not fit: 30 bytes are missing"))
    assert table.marked == {0}
    assert methods_table(view_of(diamond(), methods=METHODS[:2])).header == ("method", "latency", "of the best")


@pytest.mark.parametrize("width", [30, 60, 100, 200])
def test_everything_prints_within_the_width_and_names_stay_text(width):
    for result in (diamond(), hostile(), RANDOM[0], pipelined()):
        text = text_of(view_of(result, methods=METHODS, title="a\x1b[2Jb"), width=width)
        assert all(line.isprintable() for line in text.splitlines())
        assert max(map(len, text.splitlines())) <= max(width, 60)
