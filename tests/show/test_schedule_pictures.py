"""Pictures of schedules: text, SVG and page; what is drawn where, the marked period, and that names stay text."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.search.schedule.test_pairs_and_copies import good as good_joint_schedule
from tests.show.browser import Browser, find_chromium
from tests.show.helpers import HOSTILE
from tests.show.schedule_results import chain, hostile, in_groups, joint, one_f_one_b, pipelined, result_of
from tests.show.test_browser import place, spot, state
from tests.show.test_html import Page
from weft.search.schedule.schedule import ScheduleResult, check_schedule
from weft.show.chart import box_colour, shortened
from weft.show.drawing import COOL_DOWN, LEFT, RIGHT, WARM_UP, format_chart, print_chart, render_svg
from weft.show.schedule_tables import (
    ScheduleFacts,
    block_shades,
    find_steady,
    memory_curves,
    render_schedule_report,
    rows_of,
    schedule_chart,
    schedule_data,
    summary_table,
)

SPACE = "{http://www.w3.org/2000/svg}"


def write_report(path, *args, **options):
    path.write_text(render_schedule_report(*args, **options), encoding="utf-8")


def grouped(size: int, num_microbatches: int = 8):
    """Return micro-batches that run in groups, so that a period has as many as a group."""
    schedule = in_groups(joint(), num_microbatches, size)
    return result_of(schedule, float(schedule.starts[0, size] - schedule.starts[0, 0]), size)


RESULTS = [pipelined(2, 6), pipelined(4, 8), pipelined(4, 40), grouped(1), grouped(2), grouped(3), grouped(3, 11),
           pipelined(3, 12, free_at="start")]


def test_the_results_used_here_are_allowed_schedules():
    for result in [*RESULTS, pipelined(3, 5, links=True), result_of(one_f_one_b(hostile(), 3))]:
        check_schedule(result.schedule)


# ---- the steady part


@pytest.mark.parametrize("result", RESULTS)
def test_every_block_starts_once_for_each_microbatch_of_the_marked_period(result):
    steady, starts = find_steady(result), result.schedule.starts
    assert steady is not None
    assert steady.period_end - steady.period_start == pytest.approx(result.period)
    inside = (starts >= steady.period_start - 1e-6) & (starts < steady.period_end - 1e-6)
    assert (inside.sum(axis=1) == result.period_microbatches).all()
    phases = np.asarray(result.phases())
    assert (phases[inside] == "steady").all()
    assert steady.start <= steady.period_start
    assert steady.period_end <= steady.end


def test_the_period_is_cut_where_nothing_runs_if_there_is_such_a_place():
    result = grouped(2)
    cut, schedule = find_steady(result).period_start, result.schedule
    assert not ((schedule.starts < cut - 1e-6) & (schedule.ends > cut + 1e-6)).any()


@pytest.mark.parametrize("result", [
    pipelined(4, 1), pipelined(4, 3), result_of(one_f_one_b(chain(2), 6), None, None), result_of(one_f_one_b(chain(2), 3), 8.0, 4),
    result_of(one_f_one_b(chain(2), 2), 9.0, 9), result_of(one_f_one_b(chain(2), 6), 5.0, 1)])
def test_without_a_whole_period_nothing_is_marked(result):
    assert find_steady(result) is None
    assert "[" not in format_chart(schedule_chart(result))
    assert "class='period'" not in render_svg(schedule_chart(result))
    assert "period" not in schedule_data(result)


def test_a_long_steady_part_is_shortened_by_whole_periods():
    result = pipelined(4, 40)
    view = shortened(schedule_chart(result), 80.0)
    assert view.span == pytest.approx(result.makespan - 4.0 * view.num_periods)
    assert 76.0 < view.span <= 80.0
    whole = shortened(schedule_chart(result), 1000.0)
    assert (whole.span, whole.gap, whole.num_periods) == (result.makespan, None, 0)
    for short, full in zip(view.rows, whole.rows, strict=True):
        # What is left out is as much work as so many periods have, and boxes still do not overlap.
        lost = (full.ends - full.starts).sum() - (short.ends - short.starts).sum()
        assert lost == pytest.approx(4.0 * view.num_periods)
        assert (np.diff(short.starts) >= -1e-9).all()
        assert (short.starts[1:] >= short.ends[:-1] - 1e-9).all()
    least = shortened(schedule_chart(result), 1.0)
    assert least.steady.period_end == least.gap
    assert least.span > 1.0


# ---- shades and memory


def test_shades_come_from_what_blocks_do():
    assert block_shades(chain(2, links=True)) == ("forward", "forward", "backward", "backward", "forward", "backward")
    assert block_shades(joint()) == ("forward",) * 3 + ("backward",) * 3
    split = replace(chain(1), blocks=(
        *(replace(block, memory=0.0) if block.memory < 0 else block for block in chain(1).blocks),
        replace(chain(1).blocks[1], name="x", after=(1,), memory=-1.0)))
    assert block_shades(split) == ("forward", "backward", "weight")
    odd = chain(3)  # no mirror image: the last backward is on the wrong device
    odd = replace(odd, blocks=(*odd.blocks[:-1], replace(odd.blocks[-1], devices=(1,))))
    assert block_shades(odd) == ("forward",) * 3 + ("backward",) * 3
    inference = replace(chain(3), blocks=chain(3).blocks[:3])
    assert block_shades(inference) == ("forward",) * 3


@pytest.mark.parametrize("free_at", ["start", "end"])
def test_the_memory_curve_has_the_peak_and_ends_where_it_began(free_at):
    result = pipelined(3, 7, free_at=free_at)
    peaks = result.schedule.peak_memory()
    for row, (times, amounts) in zip(rows_of(result), memory_curves(result.schedule), strict=False):
        assert (np.diff(times) >= 0).all()
        assert amounts.max() == peaks[row.name]
        assert amounts[-1] == 0.0
        assert times[0] == row.starts[0]
    curve = list(memory_curves(result.schedule))[2]  # forward at 2, backward from 3 to 6
    assert curve[0][:2].tolist() == [2.0, 3.0 if free_at == "start" else 6.0]


# ---- text


def test_a_pipeline_is_drawn_as_by_hand():
    lines = format_chart(schedule_chart(pipelined(2, 6)), width=40).splitlines()
    assert lines[:4] == ["d0 |01...aaa2bbb3ccc4ddd5eee.fff|   86 %",
                         "d1 |.0aaa1bbb2ccc3ddd4eee5fff...|   86 %",
                         "         --------[==]-------",
                         "    0            14           28"]
    assert " ".join(lines[4:]) == ("0-5 forward, a-f backward of the micro-batch; . idle; [=] one period, 4 for "
                                   "1 micro-batch, - the rest of the steady part")


def test_warm_up_and_cool_down_are_named_where_there_is_room():
    text = format_chart(schedule_chart(pipelined(4, 8)), width=100)
    assert re.search(r"^ +warm-up +-*\[=+\]-* cool-down$", text, re.MULTILINE)


def test_links_have_rows_of_their_own_below_the_devices():
    lines = format_chart(schedule_chart(pipelined(2, 3, links=True)), width=60).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["d0", "d1", "l0+", "l0-"]
    assert set(lines[2].split("|")[1]) == set(".012")
    assert set(lines[3].split("|")[1]) == set(".abc")


def test_of_a_long_schedule_the_ends_and_one_period_are_drawn():
    result = pipelined(4, 128)
    text = format_chart(schedule_chart(result), width=100)
    rows = [line.split("|")[1] for line in text.splitlines()[:4]]
    left_out = int(re.search(r"~ (\d+) more periods, not shown", " ".join(text.split()))[1])
    assert all(row.count("~") == 1 for row in rows)
    assert rows[0].startswith("0123")
    assert rows[3].rstrip(".").endswith("7hhh")
    assert result.makespan - 4 * left_out <= len(rows[0])  # each block has a character
    assert text.splitlines()[5].split() == ["0", "524"]


@pytest.mark.parametrize("width", [1, 30, 47, 100, 250])
@pytest.mark.parametrize("result", [pipelined(4, 8), pipelined(12, 300), grouped(3), pipelined(3, 5, links=True)])
def test_no_line_is_longer_than_the_width_and_the_period_is_marked_once(width, result):
    text = format_chart(schedule_chart(result), width=width, max_rows=9)
    lines = text.splitlines()
    assert max(map(len, lines)) <= max(30, width)
    assert len([line for line in lines if "|" in line]) <= 9
    marks = [line for line in lines if re.search(r"\[=*\]", line) and "one period" not in line and line.startswith("  ")]
    assert len(marks) == (find_steady(result) is not None)
    assert all(line.count("[") == line.count("]") == 1 for line in marks)
    assert ("... 4 more" in text) == (len(rows_of(result)) == 12)


def test_colours_appear_on_a_terminal_only_and_joint_blocks_are_underlined(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    plain, coloured, alone = io.StringIO(), Terminal(), Terminal()
    with redirect_stdout(plain):
        print_chart(schedule_chart(grouped(2)), width=60)
    with redirect_stdout(coloured):
        print_chart(schedule_chart(grouped(2)), width=60)
    with redirect_stdout(alone):
        print_chart(schedule_chart(pipelined(2, 4)), width=60)
    assert plain.getvalue().rstrip() == format_chart(schedule_chart(grouped(2)), width=60)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.getvalue()) == plain.getvalue()
    assert "\x1b[1;4;38;5;16;48;5;75m" in coloured.getvalue()
    assert "\x1b[1;4" not in alone.getvalue()
    assert "\x1b[38;5;16;48;5;75m" in alone.getvalue()


def test_hostile_names_cannot_move_the_cursor():
    out = io.StringIO()
    with redirect_stdout(out):
        print_chart(schedule_chart(result_of(one_f_one_b(hostile(), 3))))
    assert all(line.isprintable() for line in out.getvalue().splitlines())
    out.getvalue().encode()


def test_blocks_without_duration_and_empty_devices_can_be_drawn():
    problem = replace(joint(), device_names=("d0", "d1", "spare"), device_memory=(8.0, None, 0.0), blocks=tuple(
        replace(block, time=0.0) for block in joint().blocks))
    result = result_of(in_groups(problem, 3, 1), None, None, makespan_bound=0.0)
    assert "spare |....." in format_chart(schedule_chart(result))
    assert ElementTree.fromstring(render_svg(schedule_chart(result))) is not None
    assert schedule_data(result)["timelines"][0]["step_time_s"] == 0.0
    assert "spare" in render_schedule_report(result)


# ---- SVG


def boxes_of(text: str):
    return [box for box in ElementTree.fromstring(text).iter(f"{SPACE}rect") if box.get("class") == "box"]


def titles_of(text: str) -> list[str]:
    return [box.find(f"{SPACE}title").text for box in boxes_of(text)]


@pytest.mark.parametrize("result", [pipelined(3, 7), grouped(2), pipelined(3, 4, links=True)])
def test_every_block_is_a_box_in_the_row_of_each_of_its_devices(result):
    problem = result.schedule.problem
    names = Counter(title.split(" of micro-batch ")[0] for title in titles_of(render_svg(schedule_chart(result))))
    assert names == {name: len(resources) * result.schedule.num_microbatches
                     for name, resources in zip(problem.task_names, problem.task_resources, strict=True)}


def test_boxes_are_at_their_times_in_the_micro_batches_colours():
    result = pipelined(2, 6)  # a makespan of 28
    boxes = {box.find(f"{SPACE}title").text: box for box in boxes_of(render_svg(schedule_chart(result), width=LEFT + RIGHT + 2800))}
    box = boxes["b0 of micro-batch 0: 5 to 8, steady"]
    assert float(box.get("x")) == pytest.approx(LEFT + 500, abs=0.1)
    assert float(box.get("width")) == pytest.approx(299, abs=0.1)
    assert box.get("fill") == box_colour(0, 6, "backward")
    assert boxes["f0 of micro-batch 0: 0 to 1, warm-up"].get("fill") == box_colour(0, 6, "forward")
    assert boxes["f1 of micro-batch 3: 13 to 14, steady"].get("fill") == box_colour(3, 6, "forward")
    assert not [box for box in boxes.values() if box.get("stroke")]


def test_joint_blocks_have_an_outline():
    for box in boxes_of(render_svg(schedule_chart(grouped(2)))):
        assert (box.get("stroke") is not None) == (box.find(f"{SPACE}title").text[0] in "eh")


@pytest.mark.parametrize("result", RESULTS)
def test_one_period_is_framed_and_phases_are_tinted(result):
    root = ElementTree.fromstring(render_svg(schedule_chart(result)))
    rects = list(root.iter(f"{SPACE}rect"))
    frames = [rect for rect in rects if rect.get("class") == "period"]
    assert len(frames) == 1
    view = shortened(schedule_chart(result), result.makespan if not any(rect.get("class") == "gap" for rect in rects) else (1080 - LEFT - RIGHT) / 8)
    scale = (1080 - LEFT - RIGHT) / view.span
    assert float(frames[0].get("width")) == pytest.approx(result.period * scale, abs=0.1)
    tints = {name: [rect for rect in rects if rect.get("class") == name] for name in ("warm-up", "steady", "cool-down")}
    assert len(tints["steady"]) == len(rows_of(result))
    assert {rect.get("fill") for rect in tints["warm-up"]} <= {WARM_UP}
    assert {rect.get("fill") for rect in tints["cool-down"]} <= {COOL_DOWN}
    if result is RESULTS[1]:
        assert len(tints["warm-up"]) == 4
        assert len(tints["cool-down"]) == 3  # d0 is the last to end


def test_pictures_of_large_schedules_are_bounded():
    result = pipelined(32, 256)
    without = replace(result, period=None, period_microbatches=None)
    assert len(render_svg(schedule_chart(result))) < 1e6
    assert len(render_svg(schedule_chart(without))) < 3e6  # nothing to leave out: all 16384 blocks, as narrow as they are
    assert len(render_schedule_report(result)) < 2e6
    assert len(format_chart(schedule_chart(result), width=200).splitlines()) < 45
    assert "... 33 more" in render_svg(schedule_chart(pipelined(40, 2)), max_rows=8)


def test_hostile_names_stay_text_in_svg(tmp_path):
    result = result_of(one_f_one_b(hostile(), 3))
    (tmp_path / "a.svg").write_text(render_svg(schedule_chart(result, HOSTILE[1])))
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} == {"svg", "title", "rect", "line", "text"}
    assert any(title.startswith("<img src=x onerror=alert(1)> of micro-batch 0") for title in titles_of(
        (tmp_path / "a.svg").read_text()))
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]


# ---- the page

COMPARED = (ScheduleFacts(name="search", is_search=True, is_best=True, makespan=44.0, idle=0.25, peak_memory={"d0": 4.0, "d1": 3.5}),
            ScheduleFacts(name="gpipe", makespan=55.0, idle=0.4, peak_memory={"d0": 8.0}, reason="d0 needs 8 and has 4"),
            ScheduleFacts(name="chimera", reason=HOSTILE[1]))


def test_the_page_has_the_figures_the_devices_and_the_comparison():
    page = Page(render_schedule_report(pipelined(4, 8), title="v-train", compared=COMPARED))
    for part in ("v-train", "8 micro-batches of 8 blocks on 4 devices, by search", "Makespan 44 status feasible".replace(" ", ""),
                 "bound 2; 1 micro-batch in a period of 4", "gap 100 %", "Named schedules", "best", "+25.0 %", "3.5 - 4",
                 "d0 needs 8 and has 4", HOSTILE[1], "Devices", "4 of 4", "released when it ends"):
        assert part.replace(" ", "") in page.text.replace(" ", ""), part
    alone = Page(render_schedule_report(pipelined(1, 1), title="one"))
    assert "Named schedules" not in alone.text
    assert "1 micro-batch of 2 blocks on 1 device," in alone.text


@pytest.mark.parametrize("result", [pipelined(3, 7), grouped(2), pipelined(3, 4, links=True)])
def test_the_data_says_what_the_schedule_says(result):
    schedule, problem, data = result.schedule, result.schedule.problem, schedule_data(result)
    program, timeline, phases = data["program"], data["timelines"][0], result.phases()
    start = np.asarray(timeline["start"]) * timeline["unit_s"]
    end = start + np.asarray(timeline["duration"]) * timeline["unit_s"]
    seen = Counter()
    for device in range(problem.num_devices):
        for place_ in range(program["rank_start"][device], program["rank_start"][device + 1]):
            task, index = program["what"][place_], program["microbatch"][place_]
            seen[task, index] += 1
            what = data["what"][task]
            assert what["label"] == problem.task_names[task]
            assert what["joint"] == (len(problem.task_resources[task]) > 1)
            sends = task >= problem.num_blocks
            assert (what["op"] == "send") == sends
            assert device in (problem.blocks[problem.linked[task - problem.num_blocks].source].devices if sends else
                              problem.task_resources[task])
            assert start[place_] == pytest.approx(schedule.starts[task, index], abs=1e-7 * result.makespan)
            assert end[place_] == pytest.approx(schedule.ends[task, index], abs=1e-7 * result.makespan)
            assert data["parts"][program["part"][place_]] == phases[task][index]
    assert seen == {(task, index): 1 if task >= problem.num_blocks else len(problem.task_resources[task])
                    for task in range(problem.num_tasks) for index in range(schedule.num_microbatches)}
    assert [device["capacity"] for device in data["devices"]] == list(problem.device_memory)
    assert [max(curve["bytes"]) for curve in timeline["memory"]] == list(schedule.peak_memory().values())


def test_hostile_names_stay_text_in_the_page(tmp_path):
    result = result_of(one_f_one_b(hostile(), 3), by=HOSTILE[2])
    write_report(tmp_path / "a.html", result, title=HOSTILE[1], compared=[
        replace(COMPARED[0], name=HOSTILE[0]), COMPARED[2]])
    text = (tmp_path / "a.html").read_text()
    page, clean = Page(text), Page(render_schedule_report(pipelined(2, 3), title="a", compared=COMPARED))
    assert set(page.tags) <= set(clean.tags)
    assert page.tags.count("script") == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert not [value for _, name, value in page.attributes if name in ("src", "srcset", "action", "formaction")]
    assert all(value.startswith(("#", "data:,")) for _, name, value in page.attributes if name == "href")
    assert {what["label"] for what in page.data["what"][:4]} == set(HOSTILE[:4])
    raw = re.search(r'<script type="application/json" id="weft-data">(.*?)</script>', text, re.DOTALL)[1]
    assert not re.search(r"[<>&\u2028\u2029\x7f-\uffff]", raw)
    policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


# ---- in a browser

in_browser = [pytest.mark.skipif(find_chromium() is None, reason="no chromium executable found (Debian: apt-get install "
                                 "chromium; or set WEFT_CHROMIUM to its path)"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def browser():
    with Browser(deadline_s=110) as opened:
        yield opened


class TestInBrowser:
    pytestmark = in_browser

    def test_every_block_is_drawn_and_hover_tells_about_it(self, browser, tmp_path):
        result = pipelined(2, 6)
        write_report(tmp_path / "a.html", result, title="a")
        browser.open(tmp_path / "a.html")
        assert state(browser)["drawn"] == 4 * 6
        browser.evaluate("document.getElementById('chart').scrollIntoView()")
        browser.settle()
        browser.mouse("mouseMoved", *spot(browser, 6.0 / 28))
        text = browser.evaluate("document.getElementById('tip').innerText")
        facts = dict(zip(text.splitlines()[1::2], text.splitlines()[2::2], strict=False))
        assert text.splitlines()[0] == "b0 mb 0"
        assert facts == {"Device": "d0", "Micro-batch": "0", "Start": "5", "End": "8", "Duration": "3", "Phase": "steady"}
        browser.mouse("mouseMoved", *spot(browser, 0.5 / 28, row=26 / 2 + 3 + 8))
        text = browser.evaluate("document.getElementById('tip').innerText")
        assert "Memory of d0" in text
        assert "Capacity" in text
        assert browser.complaints() == []

    def test_the_period_is_marked_where_it_is(self, browser, tmp_path):
        result = pipelined(2, 6)
        write_report(tmp_path / "a.html", result, title="a")
        browser.open(tmp_path / "a.html")
        steady, box = find_steady(result), place(browser)
        left, right = state(browser)["periodFrom"], state(browser)["periodTo"]
        assert left == pytest.approx(138 + steady.period_start / 28 * (box["w"] - 146), abs=1.5)
        assert right == pytest.approx(138 + steady.period_end / 28 * (box["w"] - 146), abs=1.5)
        legend = browser.evaluate("document.getElementById('legend').innerText")
        for part in ("forward of micro-batch", "warm-up", "cool-down", "one period: 4", "memory capacity"):
            assert part in legend
        assert "several" not in legend

    def test_transfers_and_joint_blocks(self, browser, tmp_path):
        write_report(tmp_path / "links.html", pipelined(2, 3, links=True), title="links")
        browser.open(tmp_path / "links.html")
        assert state(browser)["drawn"] == 6 * 3
        browser.evaluate("document.getElementById('chart').scrollIntoView()")
        browser.settle()
        makespan = pipelined(2, 3, links=True).makespan
        browser.mouse("mouseMoved", *spot(browser, 1.25 / makespan, row=26 / 2 + 3 + 3))
        text = browser.evaluate("document.getElementById('tip').innerText")
        assert "f0>f1 mb 0" in text
        assert "l0+" in text
        write_report(tmp_path / "joint.html", grouped(2), title="joint")
        browser.open(tmp_path / "joint.html")
        assert browser.evaluate("document.getElementById('show-communication')") is None
        assert state(browser)["drawn"] == 8 * (4 + 2 * 2)
        assert "on several devices" in browser.evaluate("document.getElementById('legend').innerText")
        browser.evaluate("document.getElementById('instructions').open = true")
        browser.wait_for("document.getElementById('table-body').rows.length > 0")
        rows = browser.evaluate("[...document.getElementById('table-body').rows].map(row => row.innerText)")
        assert rows[0].split("\t") == ["e", "0", "0", "1", "1", "steady"]
        assert len(rows) == 4 * 8
        assert browser.complaints() == []

    @pytest.mark.parametrize("dark", [False, True])
    def test_hostile_names_do_nothing_on_a_narrow_page(self, browser, tmp_path, dark):
        write_report(tmp_path / "a.html", result_of(one_f_one_b(hostile(), 3)), title=HOSTILE[0], compared=COMPARED)
        browser.events.clear()
        browser.open(tmp_path / "a.html", width=390, height=844, dark=dark)
        browser.mouse("mouseMoved", *spot(browser, 0.1))
        assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert browser.evaluate("document.querySelectorAll('img, [onload], [onerror], [onmouseover]').length") == 0
        assert HOSTILE[0] in browser.evaluate("document.querySelector('h1').textContent")
        assert browser.requests() == [(tmp_path / "a.html").resolve().as_uri()]
        assert browser.complaints() == []


def test_embedded_data_has_no_nan():
    json.dumps(schedule_data(pipelined(2, 2)), allow_nan=False)


# ---- blocks at once, memory that leaves


def joint_result():
    """Return two micro-batches on one device; b0 of the first runs beside f0 of the second, whose memory leaves twice."""
    schedule = good_joint_schedule()
    return ScheduleResult(schedule=schedule, status="feasible", makespan_bound=10.0, period=None, period_microbatches=None,
                          period_bound=None, seconds=0.0)


def test_blocks_at_once_and_copies_are_drawn_in_text():
    lines = format_chart(schedule_chart(joint_result()), width=72).splitlines()
    assert lines[0].startswith("d        |")
    assert lines[1].startswith("d copies |")
    at_once = lines[0].split("|")[1][21:30]
    assert set(at_once) == {"1", "a"}
    assert "at once" in " ".join(lines)
    assert "copies, to the host" in " ".join(lines)
    assert lines[0].endswith(" 74 %")


def test_blocks_at_once_are_halves_of_a_row_and_copies_a_row_of_their_own():
    text = render_svg(schedule_chart(joint_result()))
    boxes = {box.find(f"{SPACE}title").text: box for box in boxes_of(text) if box.find(f"{SPACE}title") is not None}
    upper = boxes["f0 of micro-batch 1: 6 to 8.5, at once with b0 of micro-batch 0"]
    lower = boxes["b0 of micro-batch 0: 6 to 8.5, at once with f0 of micro-batch 1"]
    assert upper.get("x") == lower.get("x")
    assert upper.get("width") == lower.get("width")
    assert float(lower.get("y")) == float(upper.get("y")) + float(upper.get("height"))
    alone = boxes["f1 of micro-batch 0: 1 to 2"]
    assert float(alone.get("height")) == 2 * float(upper.get("height"))
    away = boxes["what f0 of micro-batch 0 takes, to the host: 1.25 to 1.75"]
    assert float(away.get("y")) > float(lower.get("y"))


def test_the_page_and_the_tables_have_both():
    result = joint_result()
    page = render_schedule_report(result)
    assert "f0 away" in page
    assert "f0 back" in page
    rows = dict(summary_table(result).rows)
    assert rows["pairs"] == "1 pair of blocks at once"
    assert rows["offload"] == "2 of 4; the host keeps 1 at most (limit 2)"
