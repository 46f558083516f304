from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.show.helpers import hostile_timeline, many_microbatches, played, simulated
from weft.plan.program import Op, Phase
from weft.show.chart import Chart
from weft.show.drawing import format_chart, print_chart, render_svg, row_cells
from weft.show.timeline_chart import timeline_chart
from weft.simulate.timeline import make_timeline


def cells(chart: Chart, num_cells: int) -> list[str]:
    """Return the characters of each row, so many for the whole step."""
    return ["".join(chart.look(item).mark if item >= 0 else "." for item in row_cells(row, chart.span, num_cells))
            for row in chart.rows]


def test_1f1b_on_two_devices_is_drawn_as_by_hand():
    # d0: F0 0-1, F1 1-2, B0 4-6, B1 7-9; d1: F0 1-2, B0 2-4, F1 4-5, B1 5-7. Two cells for a second.
    timeline = simulated("1f1b", 2, 2)
    gantt = timeline_chart(timeline)
    assert cells(gantt, 18) == ["0011....aaaa..bbbb",
                                                 "..00aaaa11bbbb...."]
    assert [row.share(gantt.whole) for row in gantt.rows] == pytest.approx([6 / 9, 6 / 9])
    assert gantt.whole == 9.0


def test_gpipe_on_three_devices_is_drawn_as_by_hand():
    timeline = simulated("gpipe", 3, 2)
    assert cells(timeline_chart(timeline), 12) == ["01......aabb",
                                                 ".01...aabb..",
                                                 "..01aabb...."]


def test_a_cell_shows_what_fills_most_of_it_and_a_dot_if_half_is_idle():
    timeline = simulated("1f1b", 2, 2)
    # Three cells of 3 s, of equals the first. d0: F0 F1 idle | idle B0 | idle B1; d1: idle F0 B0 | B0 F1 B1 | B1 idle.
    assert cells(timeline_chart(timeline), 3) == ["0ab", "0a."]


def test_the_text_has_the_width_asked_for_and_a_legend():
    timeline = simulated("1f1b", 2, 2)
    lines = format_chart(timeline_chart(timeline), width=30).splitlines()
    assert lines == ["d0 |0011....aaaa..bbbb|   67 %",
                     "d1 |..00aaaa11bbbb....|   67 %",
                     "    0      4.5 s   9 s",
                     "0-1 forward, a-b backward of",
                     "the micro-batch; . idle"]


def test_a_wide_chart_looks_at_each_box_once_in_a_row():
    """Was: once for each cell, so that a chart of a million columns took 9 s."""
    chart, seen = timeline_chart(simulated("1f1b", 2, 2)), []
    format_chart(replace(chart, look=lambda item: seen.append(item) or chart.look(item)), width=5000)
    assert len(seen) == 8


@pytest.mark.parametrize("width", [10, 30, 47, 80, 200])
def test_no_line_is_longer_than_the_width(width):
    timeline = many_microbatches(5, 30)
    assert max(len(line) for line in format_chart(timeline_chart(timeline), width=width).splitlines()) <= max(30, width)


def test_many_devices_are_cut():
    timeline = many_microbatches(64, 2)
    lines = format_chart(timeline_chart(timeline), width=60, max_rows=9).splitlines()
    assert [line.split(" ")[0] for line in lines[:8]] == [f"d{index}" for index in range(8)]
    assert lines[8].strip() == "... 56 more"


def test_of_more_than_ten_microbatches_the_last_digit_counts():
    timeline = many_microbatches(1, 12)
    gantt = timeline_chart(timeline)
    (row,) = cells(gantt, 36)
    assert set(row) <= set("0123456789abcdefghij.+")
    assert "(its last digit)" in gantt.legend
    assert row.count("0") == 2 * row.count("5")


def test_split_backwards_and_the_optimizer_have_their_own_marks():
    timeline = simulated("1f1b", 1, 2)
    program = timeline.program
    phase = program.phase.copy()
    backward = np.flatnonzero((program.op == Op.COMPUTE) & (program.phase == Phase.B))
    phase[backward[0]], phase[backward[1]] = Phase.I, Phase.W
    split = replace(program, phase=phase)
    gantt = timeline_chart(timeline, split)
    assert cells(gantt, 6) == ["0aa1BB"]
    assert "a-b backward" in gantt.legend
    assert "A-B weight gradients" in gantt.legend
    stepped = simulated("1f1b", 1, 2, optimizer="sgd")
    step = np.flatnonzero(stepped.program.op == Op.STEP)
    assert len(step) == 1
    end_s = stepped.end_s.copy()
    end_s[step] = stepped.start_s[step] + 6.0
    slow = make_timeline(stepped.program, start_s=stepped.start_s, end_s=end_s, kind="measured")
    gantt = timeline_chart(slow)
    assert cells(gantt, 12) == ["0aa1bb++++++"]
    assert "+ optimizer" in gantt.legend


def test_colours_appear_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    timeline = simulated("1f1b", 2, 2)
    plain, coloured = io.StringIO(), Terminal()
    with redirect_stdout(plain):
        print_chart(timeline_chart(timeline), width=40)
    assert plain.getvalue().rstrip() == format_chart(timeline_chart(timeline), width=40)
    with redirect_stdout(coloured):
        print_chart(timeline_chart(timeline), width=40)
    shown = coloured.getvalue()
    assert "\x1b[38;5;16;48;5;75m000\x1b[0m" in shown
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == plain.getvalue()


def test_hostile_device_names_stay_text():
    timeline = hostile_timeline()
    text = format_chart(timeline_chart(timeline), width=90)
    assert all(line.isprintable() for line in text.splitlines())


def test_cells_agree_with_the_times_they_stand_for():
    timeline = played(simulated("interleaved", 2, 4, num_chunks=2).program)
    program, num_cells = timeline.program, 97
    for rank, row in enumerate(timeline_chart(timeline, program).rows):
        middle = (np.arange(num_cells) + 0.5) * timeline.step_time_s / num_cells
        first, last = timeline.rank_start[rank], timeline.rank_start[rank + 1]
        for cell, index in enumerate(row_cells(row, timeline.step_time_s, num_cells)):
            if index >= 0:
                reach = timeline.step_time_s / num_cells
                assert first <= index < last
                assert timeline.start_s[index] - reach <= middle[cell] <= timeline.end_s[index] + reach


# ---- SVG

SPACE = "{http://www.w3.org/2000/svg}"


def test_every_instruction_is_a_box_at_its_time():
    timeline = simulated("1f1b", 2, 2, activation_bytes=1)
    root = ElementTree.fromstring(render_svg(timeline_chart(timeline), width=1124))  # 1000 pixels for the step
    boxes = {box.find(f"{SPACE}title").text: box for box in root.iter(f"{SPACE}rect") if len(box)}
    assert sorted(boxes) == sorted(set(timeline.labels))
    for index, label in enumerate(timeline.labels):
        wanted = 112 + 1000 * timeline.start_s[index] / timeline.step_time_s
        assert abs(float(boxes[label].get("x")) - wanted) <= 0.051
    colours = {label: box.get("fill") for label, box in boxes.items()}
    assert colours["F s0 mb 0"] == colours["F s1 mb 0"] != colours["F s0 mb 1"]
    assert colours["B s0 mb 0"] != colours["F s0 mb 0"]


def test_the_picture_is_bounded_and_says_what_is_left_out():
    timeline = many_microbatches(40, 400)
    text = render_svg(timeline_chart(timeline), width=400, max_rows=4)
    assert "... 37 more" in text
    assert text.count("<rect") < 3 * 400 * 4


def test_hostile_names_stay_text_in_pictures():
    timeline = hostile_timeline()
    root = ElementTree.fromstring(render_svg(timeline_chart(timeline)))
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} == {"svg", "title", "rect", "line", "text"}
