from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.show.helpers import hostile_timeline, many_microbatches, played, simulated
from weft.plan.program import Op, Phase
from weft.show.gantt import draw_gantt, format_gantt, print_gantt
from weft.simulate.timeline import make_timeline


def test_1f1b_on_two_devices_is_drawn_as_by_hand():
    # d0: F0 0-1, F1 1-2, B0 4-6, B1 7-9; d1: F0 1-2, B0 2-4, F1 4-5, B1 5-7. Two cells for a second.
    timeline = simulated("1f1b", 2, 2)
    gantt = draw_gantt(timeline, timeline.program, num_cells=18)
    assert [row.cells for row in gantt.rows] == ["0011....aaaa..bbbb",
                                                 "..00aaaa11bbbb...."]
    assert [row.busy for row in gantt.rows] == pytest.approx([6 / 9, 6 / 9])
    assert gantt.step_time_s == 9.0


def test_gpipe_on_three_devices_is_drawn_as_by_hand():
    timeline = simulated("gpipe", 3, 2)
    gantt = draw_gantt(timeline, timeline.program, num_cells=12)
    assert [row.cells for row in gantt.rows] == ["01......aabb",
                                                 ".01...aabb..",
                                                 "..01aabb...."]


def test_a_cell_shows_what_fills_most_of_it_and_a_dot_if_half_is_idle():
    timeline = simulated("1f1b", 2, 2)
    # Three cells of 3 s, of equals the first. d0: F0 F1 idle | idle B0 | idle B1; d1: idle F0 B0 | B0 F1 B1 | B1 idle.
    assert [row.cells for row in draw_gantt(timeline, timeline.program, num_cells=3).rows] == ["0ab", "0a."]


def test_the_text_has_the_width_asked_for_and_a_legend():
    timeline = simulated("1f1b", 2, 2)
    lines = format_gantt(timeline, timeline.program, width=30).splitlines()
    assert lines == ["d0 |0011....aaaa..bbbb|   67 %",
                     "d1 |..00aaaa11bbbb....|   67 %",
                     "    0      4.5 s   9 s",
                     "0-1 forward, a-b backward of",
                     "the micro-batch; . idle"]


@pytest.mark.parametrize("width", [10, 30, 47, 80, 200])
def test_no_line_is_longer_than_the_width(width):
    timeline = many_microbatches(5, 30)
    assert max(len(line) for line in format_gantt(timeline, timeline.program, width=width).splitlines()) <= max(30, width)


def test_many_devices_are_cut():
    timeline = many_microbatches(64, 2)
    lines = format_gantt(timeline, timeline.program, width=60, max_rows=9).splitlines()
    assert [line.split(" ")[0] for line in lines[:8]] == [f"d{index}" for index in range(8)]
    assert lines[8].strip() == "... 56 more"


def test_of_more_than_ten_microbatches_the_last_digit_counts():
    timeline = many_microbatches(1, 12)
    gantt = draw_gantt(timeline, timeline.program, num_cells=36)
    assert set(gantt.rows[0].cells) <= set("0123456789abcdefghij.+")
    assert "(its last digit)" in gantt.legend
    assert gantt.rows[0].cells.count("0") == 2 * gantt.rows[0].cells.count("5")


def test_split_backwards_and_the_optimizer_have_their_own_marks():
    timeline = simulated("1f1b", 1, 2)
    program = timeline.program
    phase = program.phase.copy()
    backward = np.flatnonzero((program.op == Op.COMPUTE) & (program.phase == Phase.B))
    phase[backward[0]], phase[backward[1]] = Phase.I, Phase.W
    split = replace(program, phase=phase)
    gantt = draw_gantt(timeline, split, num_cells=6)
    assert gantt.rows[0].cells == "0aa1BB"
    assert "a-b backward" in gantt.legend
    assert "A-B weight gradients" in gantt.legend
    stepped = simulated("1f1b", 1, 2, optimizer="sgd")
    step = np.flatnonzero(stepped.program.op == Op.STEP)
    assert len(step) == 1
    end_s = stepped.end_s.copy()
    end_s[step] = stepped.start_s[step] + 6.0
    slow = make_timeline(stepped.program, start_s=stepped.start_s, end_s=end_s, kind="measured")
    gantt = draw_gantt(slow, slow.program, num_cells=12)
    assert gantt.rows[0].cells == "0aa1bb++++++"
    assert "+ optimizer" in gantt.legend


def test_colours_appear_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    timeline = simulated("1f1b", 2, 2)
    plain, coloured = io.StringIO(), Terminal()
    print_gantt(timeline, timeline.program, width=40, file=plain)
    assert plain.getvalue().rstrip() == format_gantt(timeline, timeline.program, width=40)
    print_gantt(timeline, timeline.program, width=40, file=coloured)
    shown = coloured.getvalue()
    assert "\x1b[38;5;16;48;5;75m000\x1b[0m" in shown
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == plain.getvalue()


def test_hostile_device_names_stay_text():
    timeline = hostile_timeline()
    text = format_gantt(timeline, timeline.program, width=90)
    assert all(line.isprintable() for line in text.splitlines())


def test_cells_agree_with_the_times_they_stand_for():
    timeline = played(simulated("interleaved", 2, 4, num_chunks=2).program)
    program, num_cells = timeline.program, 97
    for rank, row in enumerate(draw_gantt(timeline, program, num_cells=num_cells).rows):
        middle = (np.arange(num_cells) + 0.5) * timeline.step_time_s / num_cells
        first, last = timeline.rank_start[rank], timeline.rank_start[rank + 1]
        for cell, index in enumerate(row.instructions.tolist()):
            if index >= 0:
                reach = timeline.step_time_s / num_cells
                assert first <= index < last
                assert timeline.start_s[index] - reach <= middle[cell] <= timeline.end_s[index] + reach
