"""Pictures of placements: text, SVG and page; what is drawn where, what is marked, and that names stay text."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.show.browser import Browser, find_chromium
from tests.show.helpers import HOSTILE
from tests.show.place_results import diamond, hostile, pipelined, random_result, view_of
from tests.show.test_browser import spot, state
from tests.show.test_html import Page
from tests.show.test_place_tables import METHODS, RANDOM
from weft.show.chart import number, part_colour
from weft.show.drawing import format_chart, print_chart, render_svg
from weft.show.place_facts import (
    critical_items,
    device_rows,
    find_waits,
    item_letters,
    item_names,
    link_rows,
    place_chart,
    placement_data,
)
from weft.show.place_tables import render_placement_report

SPACE = "{http://www.w3.org/2000/svg}"


def write_report(path, view):
    path.write_text(render_placement_report(view), encoding="utf-8")


# ---- text


def test_the_diamond_is_drawn_as_by_hand():
    lines = format_chart(place_chart(diamond().timetable), width=39).splitlines()
    assert lines[:5] == ["g   |AAAAbbbbbbbbbbbbbbbb..DDDD|   92 %",
                         "c   |......CCCCCCCCCCCC........|   46 %",
                         "g>c |....AA....................|    8 %",
                         "c>g |..................CCCC....|   15 %",
                         "     0         3.25 s     6.5 s"]
    assert " ".join(lines[5:]) == "a in, b left, c right, d out; capitals: on the critical path; . idle"


def test_letters_follow_the_graph_from_a_to_z():
    result = random_result(260, 2)
    letters = item_letters(result.timetable)
    assert letters[:260].tolist() == [op // 10 for op in range(260)]
    for index, sent in enumerate(result.timetable.transfers):
        assert letters[260 + index] == letters[result.problem.producer[sent.tensor]]
    assert "from the first to the last of the graph" in " ".join(format_chart(place_chart(result.timetable)).split())


@pytest.mark.parametrize("width", [1, 30, 47, 100, 250])
@pytest.mark.parametrize("result", [diamond(), *RANDOM[:3], random_result(300, 24)])
def test_no_line_is_longer_than_the_width(width, result):
    lines = format_chart(place_chart(result.timetable), width=width, max_rows=9).splitlines()
    assert max(map(len, lines)) <= max(30, width)
    rows = len(device_rows(result.timetable)) + len(link_rows(result.timetable))
    assert len([line for line in lines if "|" in line]) == min(rows, 9 if rows == 9 else 8 if rows > 9 else rows)
    assert any(f"... {rows - 8} more" in line for line in lines) == (rows > 9)


def test_colours_appear_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    plain, coloured = io.StringIO(), Terminal()
    with redirect_stdout(plain):
        print_chart(place_chart(diamond().timetable), width=60)
    with redirect_stdout(coloured):
        print_chart(place_chart(diamond().timetable), width=60)
    assert plain.getvalue().rstrip() == format_chart(place_chart(diamond().timetable), width=60)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.getvalue()) == plain.getvalue()
    assert "\x1b[1;" in coloured.getvalue()


def test_operators_without_duration_can_be_drawn():
    result = diamond()
    problem = replace(result.problem, time_s=np.zeros_like(result.problem.time_s), tensor_bytes=np.zeros(3))
    table = replace(result.timetable, problem=problem, start_s=np.zeros(4), transfers=())
    still = replace(result, timetable=replace(table, device=np.zeros(4, dtype=np.int64)), value=0.0, bound=0.0)
    assert "g |....." in format_chart(place_chart(still.timetable))
    assert ElementTree.fromstring(render_svg(view_of(still).chart())) is not None
    assert placement_data(still.timetable)["timelines"][0]["step_time_s"] == 0.0
    assert "nothing takes any time" in render_placement_report(view_of(still))


# ---- SVG


def boxes_of(text: str):
    return [box for box in ElementTree.fromstring(text).iter(f"{SPACE}rect") if (box.get("class") or "").startswith("box")]


def test_boxes_are_at_their_times_and_the_critical_path_is_strong():
    boxes = {box.find(f"{SPACE}title").text: box for box in boxes_of(render_svg(view_of(diamond()).chart(), width=124 + 650))}
    assert set(boxes) == {
        "in: 0 us to 1 s (1 s), waited for nothing", "left: 1 s to 5 s (4 s), waited for input",
        "right: 1.5 s to 4.5 s (3 s), waited for transfer", "out: 5.5 s to 6.5 s (1 s), waited for transfer",
        "in to c: 1 s to 1.5 s (500 ms), waited for input", "right to g: 4.5 s to 5.5 s (1 s), waited for input"}
    right = boxes["right: 1.5 s to 4.5 s (3 s), waited for transfer"]
    assert float(right.get("x")) == pytest.approx(112 + 150, abs=0.1)
    assert float(right.get("width")) == pytest.approx(299, abs=0.1)
    assert right.get("fill") == part_colour(2 / 3, is_strong=True)
    left = boxes["left: 1 s to 5 s (4 s), waited for input"]
    assert (left.get("class"), left.get("fill")) == ("box", part_colour(1 / 3))
    assert boxes["right to g: 4.5 s to 5.5 s (1 s), waited for input"].get("fill") == right.get("fill")


def test_pictures_of_large_placements_are_bounded():
    result = random_result(10_000, 16)
    assert len(render_svg(view_of(result).chart())) < 4e6
    assert len(format_chart(place_chart(result.timetable)).splitlines()) < 45
    assert "... 33 more" in render_svg(view_of(random_result(400, 20, contention="port")).chart(), max_rows=28)


def test_hostile_names_stay_text_in_svg(tmp_path):
    (tmp_path / "a.svg").write_text(render_svg(view_of(hostile(), title=HOSTILE[1]).chart()))
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} == {"svg", "title", "rect", "line", "text"}
    assert any(box.find(f"{SPACE}title").text.startswith("<img src=x onerror=alert(1)>: ")
               for box in boxes_of((tmp_path / "a.svg").read_text()))
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]


# ---- the page


def test_the_page_has_the_figures_the_devices_the_path_and_the_methods():
    page = Page(render_placement_report(view_of(diamond(), title="net on pair", methods=METHODS, fusion="rules", num_ops_before=9)))
    for part in ("net on pair", "4 of 9 before fusion (rules) operators on 2 devices, by hand", "Latency6.5 sstatus feasible", "gap 50.0 %",
                 "150 B; busiest c>g: 1 s", "on g, 30.0 % used", "Critical path", "46.2 % on c", "send right to g", "busy 6 s, 92.3 %",
                 "300 B of 1000 B", "Methods", "1.500", "30 bytes are missing", "Waited for"):
        assert part.replace(" ", "") in page.text.replace(" ", ""), part
    alone = Page(render_placement_report(view_of(pipelined())))
    assert "Methods" not in alone.text
    assert "Critical path" not in alone.text
    assert "g is the bottleneck" in alone.text
    assert "of one request alone" in alone.text


@pytest.mark.parametrize("result", [diamond(), *RANDOM])
def test_the_data_says_what_the_timetable_says(result):
    table, data = result.timetable, placement_data(result.timetable)
    waits, names = find_waits(table), item_names(table)
    critical = set(critical_items(waits, result.problem.num_ops))
    rows = [*device_rows(table), *link_rows(table)]
    program, timeline = data["program"], data["timelines"][0]
    start = np.asarray(timeline["start"]) * timeline["unit_s"]
    end = start + np.asarray(timeline["duration"]) * timeline["unit_s"]
    for rank, row in enumerate(rows):
        first, last = program["rank_start"][rank: rank + 2]
        assert last - first == len(row.items)
        assert data["devices"][rank]["link"] == row.is_link
        for place, item in zip(range(first, last), row.items.tolist(), strict=True):
            what = data["what"][program["what"][place]]
            assert what["label"] == names[item]
            assert what["strong"] == (item in critical)
            assert (what["op"] == "send") == row.is_link
            assert start[place] == pytest.approx(waits.start_s[item], abs=1e-7 * table.latency_s)
            assert end[place] == pytest.approx(waits.end_s[item], abs=1e-7 * table.latency_s)
            before = program["after"][place]
            expected = None if waits.after[item] < 0 else names[waits.after[item]]
            assert (None if before < 0 else data["what"][program["what"][before]]["label"]) == expected
    if result.problem.has_lifetimes:
        peaks = [max(curve["bytes"]) for curve in timeline["memory"][: result.problem.num_devices]]
        assert peaks == pytest.approx(table.peak_bytes().tolist())
    else:
        assert "memory" not in timeline
    json.dumps(data, allow_nan=False)
    assert placement_data(result.timetable, number)["plain"] is True


def test_large_graphs_stay_loadable():
    result = random_result(10_000, 16)
    assert len(render_placement_report(view_of(result))) < 8e6


def test_runs_of_short_operators_are_one_box_on_a_very_large_page(monkeypatch):
    result = random_result(9_000, 3, contention="none")
    fine = placement_data(result.timetable)
    monkeypatch.setattr("weft.show.place_facts.MAX_BOXES", 1000)
    data = placement_data(result.timetable)
    assert len(data["what"]) < len(fine["what"])
    joined = [what for what in data["what"] if " in a row: " in what["label"]]
    assert joined
    counts = [int(what["label"].split()[0]) for what in joined]
    assert sum(counts) + len(data["what"]) - len(joined) == len(fine["what"])
    program, timeline = data["program"], data["timelines"][0]
    for first, last in zip(program["rank_start"][:3], program["rank_start"][1:4], strict=True):
        start = np.asarray(timeline["start"][first:last])
        assert (start[1:] >= start[:-1] + np.asarray(timeline["duration"][first:last])[:-1] - 1).all()


def test_hostile_names_stay_text_in_the_page(tmp_path):
    methods = (METHODS[0], replace(METHODS[2], method=HOSTILE[0], reason=HOSTILE[1]))
    write_report(tmp_path / "a.html", view_of(hostile(), title=HOSTILE[1], methods=methods))
    text = (tmp_path / "a.html").read_text()
    page, clean = Page(text), Page(render_placement_report(view_of(diamond(), methods=METHODS)))
    assert set(page.tags) <= set(clean.tags)
    assert page.tags.count("script") == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert not [value for _, name, value in page.attributes if name in ("src", "srcset", "action", "formaction")]
    raw = re.search(r'<script type="application/json" id="weft-data">(.*?)</script>', text, re.DOTALL)[1]
    assert not re.search(r"[<>&\u2028\u2029\x7f-\uffff]", raw)


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    with Browser(deadline_s=110) as opened:
        yield opened


@pytest.mark.skipif(find_chromium() is None, reason="no chromium executable found (Debian: apt-get install chromium; or set "
                    "WEFT_CHROMIUM to its path)")
@pytest.mark.timeout(120)
class TestInBrowser:
    def test_every_operator_and_transfer_is_drawn_and_hover_says_what_it_waited_for(self, browser, tmp_path):
        write_report(tmp_path / "a.html", view_of(diamond()))
        browser.open(tmp_path / "a.html")
        assert state(browser)["drawn"] == 6
        browser.evaluate("document.getElementById('chart').scrollIntoView()")
        browser.settle()
        browser.mouse("mouseMoved", *spot(browser, 2.5 / 6.5))
        lines = browser.evaluate("document.getElementById('tip').innerText").splitlines()
        assert lines[0] == "left"
        assert dict(zip(lines[1::2], lines[2::2], strict=False)) == {
            "Device": "g", "Start": "1 s", "End": "5 s", "Duration": "4 s", "Waited for": "input: in"}
        # The first link's row is below those of two devices.
        browser.mouse("mouseMoved", *spot(browser, 1.25 / 6.5, row=2 * (26 + 14) - 6))
        lines = browser.evaluate("document.getElementById('tip').innerText").splitlines()
        assert lines[0] == "in to c"
        assert dict(zip(lines[1::2], lines[2::2], strict=False)) == {
            "Link": "g>c", "Start": "1 s", "End": "1.5 s", "Duration": "500 ms", "Waited for": "input: in", "Critical path": "yes",
            "Bytes": "50 B"}
        legend = browser.evaluate("document.getElementById('legend').innerText")
        assert "on the critical path" in legend
        assert "micro-batch" not in legend
        assert browser.evaluate("document.getElementById('show-memory')") is None
        assert browser.complaints() == []

    def test_link_rows_can_be_hidden_and_the_table_has_the_waits(self, browser, tmp_path):
        write_report(tmp_path / "a.html", view_of(RANDOM[1]))
        browser.open(tmp_path / "a.html")
        tall = browser.evaluate("document.getElementById('chart-space').offsetHeight")
        browser.evaluate("document.getElementById('show-communication').click()")
        browser.settle()
        assert browser.evaluate("document.getElementById('chart-space').offsetHeight") < tall
        assert "memory held" in browser.evaluate("document.getElementById('legend').innerText")
        browser.evaluate("document.getElementById('instructions').open = true")
        browser.wait_for("document.getElementById('table-body').rows.length > 0")
        rows = browser.evaluate("[...document.getElementById('table-body').rows].map(row => row.innerText)")
        assert any("busy device: " in row or "transfer: " in row for row in rows)
        assert browser.complaints() == []

    def test_a_large_page_draws_quickly_enough_to_use(self, browser, tmp_path):
        write_report(tmp_path / "a.html", view_of(random_result(10_000, 16)))
        browser.open(tmp_path / "a.html")
        assert state(browser)["drawn"] > 1000
        assert browser.complaints() == []

    @pytest.mark.parametrize("dark", [False, True])
    def test_hostile_names_do_nothing_on_a_narrow_page(self, browser, tmp_path, dark):
        write_report(tmp_path / "a.html", view_of(hostile(), title=HOSTILE[0], methods=METHODS))
        browser.events.clear()
        browser.open(tmp_path / "a.html", width=390, height=844, dark=dark)
        browser.mouse("mouseMoved", *spot(browser, 0.1))
        assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert browser.evaluate("document.querySelectorAll('img, [onload], [onerror], [onmouseover]').length") == 0
        assert browser.requests() == [(tmp_path / "a.html").resolve().as_uri()]
        assert browser.complaints() == []
