"""The report in a real browser: what is drawn, and how it answers to wheel, mouse and keys."""

from __future__ import annotations

import json

import pytest

from tests.show.browser import Browser, find_chromium
from tests.show.helpers import (
    HOSTILE,
    hostile_cluster,
    hostile_timeline,
    many_microbatches,
    simulated,
    stretched,
    wide_timeline,
)
from weft.show.facts import StrategyFacts
from weft.show.html import write_report

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="no chromium executable found (Debian: apt-get install chromium; "
                       "or set WEFT_CHROMIUM to its path)"),
    pytest.mark.timeout(150),
]


@pytest.fixture(scope="module")
def browser():
    with Browser(deadline_s=140) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write the pages once: a pipeline predicted and measured, hostile names, and many instructions."""
    folder = tmp_path_factory.mktemp("pages")
    timeline = simulated("1f1b", 2, 2, activation_bytes=1)
    write_report(folder / "both.html", [timeline, stretched(timeline, 1.25)], capacities={"d0": 40, "d1": 40})
    write_report(folder / "hostile.html", [hostile_timeline()], cluster=hostile_cluster(), comparison=[
        StrategyFacts(strategy=HOSTILE[0], reason=HOSTILE[1])])
    wide = wide_timeline(8, 8, 16)
    write_report(folder / "wide.html", [wide, stretched(wide, 1.1)])
    write_report(folder / "many.html", [many_microbatches(64, 200)])
    return folder, timeline


def state(browser):
    data = json.loads(browser.evaluate("JSON.stringify(document.getElementById('chart').dataset)"))
    return {name: float(value) for name, value in data.items()}


def place(browser, selector="#canvas"):
    return browser.evaluate(f"""(() => {{
        const box = document.querySelector({selector!r}).getBoundingClientRect();
        return {{ x: box.x, y: box.y, w: box.width, h: box.height }}; }})()""")


def spot(browser, time_fraction, row=0.0):
    """Return where a time of the whole step is on the screen, in the first device's compute track."""
    box = place(browser)
    return box["x"] + 138 + time_fraction * (box["w"] - 146), box["y"] + 28 + 7 + 12 + row


def pixel(browser, x, y):
    """Return (red, green, blue) of the canvas at a place on the screen."""
    return tuple(browser.evaluate(f"""(() => {{
        const canvas = document.getElementById('canvas'), box = canvas.getBoundingClientRect();
        return [...canvas.getContext('2d').getImageData({x} - box.x, {y} - box.y, 1, 1).data].slice(0, 3); }})()"""))


def test_every_instruction_is_drawn_and_choices_hide_some(browser, pages):
    folder, timeline = pages
    browser.open(folder / "both.html")
    assert state(browser)["drawn"] == 2 * timeline.num_instructions
    choose = "[...document.querySelectorAll('#choice button')].find(b => b.textContent === '{}').click()"
    browser.evaluate(choose.format("Measured"))
    browser.settle()
    assert state(browser)["drawn"] == timeline.num_instructions
    browser.evaluate("document.getElementById('show-communication').click()")
    browser.settle()
    assert state(browser)["drawn"] == int(timeline.runs.sum())
    assert browser.complaints() == []


def test_forward_backward_and_idle_differ_and_backward_is_darker(browser, pages):
    folder, timeline = pages
    browser.open(folder / "both.html")
    browser.evaluate("document.querySelectorAll('#choice button')[1].click()")  # predicted alone
    browser.settle()
    span = timeline.step_time_s * 1.25  # the axis is as long as the longer timeline
    first = int(timeline.rank_start[0])
    labels = {timeline.labels[index]: index for index in range(first, int(timeline.rank_start[1]))}
    # A third from the left of the box, beside the number in its middle.
    colours = {}
    for name in ("F s0 mb 0", "B s0 mb 0", "F s0 mb 1"):
        index = labels[name]
        time = timeline.start_s[index] + 0.15 * (timeline.end_s[index] - timeline.start_s[index])
        colours[name] = pixel(browser, *spot(browser, time / span))
    idle = pixel(browser, *spot(browser, (timeline.end_s[labels["F s0 mb 1"]] + 0.5) / span))
    assert len({*colours.values(), idle}) == 4
    assert sum(colours["B s0 mb 0"]) < sum(colours["F s0 mb 0"]) - 60


def test_hover_tells_about_the_instruction(browser, pages):
    folder, timeline = pages
    browser.open(folder / "both.html")
    browser.evaluate("document.getElementById('chart').scrollIntoView()")
    browser.settle()
    span = timeline.step_time_s * 1.25
    browser.mouse("mouseMoved", *spot(browser, 0.5 / span))
    text = browser.evaluate("document.getElementById('tip').innerText")
    for part in ("F s0 mb 0 (predicted)", "d0", "Start", "0 s", "End", "1 s", "1.25 s (+25 %)"):
        assert part in text, text
    browser.mouse("mouseMoved", *spot(browser, 1.5 / span, row=26 / 2 + 3 + 3))
    text = browser.evaluate("document.getElementById('tip').innerText")
    assert "send s0>s1 mb 0" in text
    assert "Bytes" in text
    assert "1 B" in text
    browser.mouse("mouseMoved", *spot(browser, 1.5 / span, row=26 / 2 + 3 + 13 + 3 + 8))
    text = browser.evaluate("document.getElementById('tip').innerText")
    assert "Memory of d0" in text
    assert "40 B" in text
    browser.mouse("mouseMoved", 5, 5)
    assert browser.evaluate("document.getElementById('tip').hidden")


def test_wheel_keys_buttons_and_drag_zoom_and_pan(browser, pages):
    folder, _ = pages
    browser.open(folder / "both.html")
    browser.evaluate("document.getElementById('chart').scrollIntoView()")
    browser.evaluate("new Promise(done => setTimeout(done, 400))")  # a wheel right after scrolling scrolls on
    whole = state(browser)
    x, y = spot(browser, 0.5)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    wheeled = state(browser)
    assert wheeled["to"] - wheeled["from"] < whole["to"] - whole["from"]
    assert (wheeled["from"] + wheeled["to"]) / 2 == pytest.approx(whole["to"] / 2, rel=0.02)
    browser.evaluate("document.getElementById('chart').focus()")
    browser.key("+")
    zoomed = state(browser)
    assert zoomed["to"] - zoomed["from"] < wheeled["to"] - wheeled["from"]
    browser.key("ArrowRight")
    assert state(browser)["from"] > zoomed["from"]
    browser.key("-")
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    before = state(browser)
    browser.mouse("mouseMoved", x + 100, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 100, y, button="left", clickCount=1)
    after = state(browser)
    assert after["from"] < before["from"]
    assert after["to"] - after["from"] == pytest.approx(before["to"] - before["from"])
    browser.key("0")
    assert (state(browser)["from"], state(browser)["to"]) == (whole["from"], whole["to"])
    browser.evaluate("document.getElementById('zoom-in').click()")
    browser.settle()
    assert state(browser)["to"] - state(browser)["from"] == pytest.approx(0.6 * (whole["to"] - whole["from"]))
    browser.evaluate("document.getElementById('zoom-fit').click()")
    browser.settle()
    assert state(browser)["to"] == whole["to"]


def test_the_table_alternative_lists_the_instructions(browser, pages):
    folder, timeline = pages
    browser.open(folder / "both.html")
    browser.evaluate("document.getElementById('instructions').open = true")
    browser.wait_for("document.getElementById('table-body').rows.length > 0")
    rows = browser.evaluate("[...document.getElementById('table-body').rows].map(row => row.innerText)")
    assert len(rows) == int(timeline.rank_start[1])
    assert rows[0].split("\t") == ["F s0", "0", "0 s", "1 s", "1 s", ""]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_its_window_in_both_colour_schemes(browser, pages, width, dark):
    folder, _ = pages
    browser.open(folder / "both.html", width=width, height=844, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(paper.split("(")[1].split(",")[0])
    assert (red < 60) == dark
    assert state(browser)["drawn"] > 0


def test_hostile_names_do_nothing_and_nothing_is_fetched(browser, pages):
    folder, _ = pages
    browser.events.clear()
    browser.open(folder / "hostile.html")
    browser.evaluate("document.getElementById('instructions').open = true")
    browser.wait_for("document.getElementById('table-body').rows.length > 0")
    browser.mouse("mouseMoved", *spot(browser, 0.1))
    assert browser.evaluate("document.querySelectorAll('img, [onload], [onerror], [onmouseover]').length") == 0
    assert browser.evaluate("document.scripts.length") == 2
    assert HOSTILE[0] in browser.evaluate("document.querySelector('h1').textContent")
    assert HOSTILE[0] in browser.evaluate("document.getElementById('table-body').textContent")
    assert browser.evaluate("[...document.querySelectorAll('#table-device option')].map(o => o.textContent)") == (
        list(HOSTILE[4:]))
    assert not [event for event in browser.events if event.get("method") == "Page.javascriptDialogOpening"]
    assert browser.requests() == [(folder / "hostile.html").resolve().as_uri()]
    assert browser.complaints() == []


def test_an_injected_script_would_not_run(browser, pages):
    """Control for the escaping: even a page that forgot it is held back by its policy."""
    folder, _ = pages
    text = (folder / "both.html").read_text()
    broken = text.replace("<h1>", "<h1><script>window.broken = true</script><img src=x onerror='window.broken = true'>")
    assert broken != text
    (folder / "broken.html").write_text(broken)
    browser.open(folder / "broken.html")
    assert browser.evaluate("window.broken") is None
    assert browser.complaints() != []
    browser.events.clear()


def test_many_instructions_are_drawn_with_a_bounded_number_of_boxes(browser, pages):
    folder, _ = pages
    browser.open(folder / "many.html")
    total = browser.evaluate("JSON.parse(document.getElementById('weft-data').textContent).program.what.length")
    assert total >= 50_000
    width = place(browser)["w"]
    rows = int(browser.evaluate("document.getElementById('canvas').clientHeight")) // 80 + 2
    assert 0 < state(browser)["drawn"] <= 4 * width * rows
    browser.evaluate("document.getElementById('chart').focus()")
    for _ in range(12):
        browser.key("+")
    zoomed = state(browser)
    assert 0 < zoomed["drawn"] < 0.02 * total
    browser.evaluate("document.getElementById('chart').scrollTop = 1e9")
    browser.settle()
    assert browser.evaluate("document.getElementById('chart').scrollTop") > 1000
    assert state(browser)["drawn"] > 0
    assert browser.complaints() == []


TIP = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"


def test_every_section_is_drawn_without_a_request_or_a_complaint(browser, pages):
    folder, _ = pages
    browser.events.clear()
    browser.open(folder / "wide.html")
    titles = browser.evaluate("[...document.querySelectorAll('h2')].map(title => title.textContent)")
    assert titles == ["Timeline", "Predicted against measured", "Cluster", "Stages", "Layers", "Devices", "Memory",
                      "Communication by link", "Gradient exchanges", "About this plan"]
    box = place(browser, ".cluster")
    assert box["w"] > 300
    assert box["h"] > 80
    assert browser.evaluate("document.querySelectorAll('svg.memory').length") == 8
    assert place(browser, "svg.memory path")["h"] > 5
    assert browser.evaluate("document.querySelectorAll('#communication-by-link ~ .card tbody tr').length") > 1
    assert browser.evaluate("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash) !== null)")
    assert browser.requests() == [(folder / "wide.html").resolve().as_uri()]
    assert browser.complaints() == []


def test_alike_devices_share_a_row_that_says_how_many_they_are(browser, pages):
    folder, _ = pages
    browser.open(folder / "wide.html")
    names = browser.evaluate("[...document.querySelectorAll('#table-device option')].map(o => o.textContent)")
    assert names == [f"h{index} \u00d7 8" for index in range(8)]
    browser.evaluate("document.getElementById('chart').scrollIntoView()")
    browser.settle()
    browser.mouse("mouseMoved", *spot(browser, 0.5))
    text = browser.evaluate(TIP)
    assert "Devices" in text
    assert "h0, h8, h16" in text


def test_the_repeating_part_is_marked_and_moves_with_the_zoom(browser, pages):
    folder, _ = pages
    browser.open(folder / "wide.html")
    whole = state(browser)
    left, right = spot(browser, 0)[0] - place(browser)["x"], spot(browser, 1)[0] - place(browser)["x"]
    assert left < whole["periodFrom"] < whole["periodTo"] < right
    assert "one period" in browser.evaluate("document.getElementById('legend').innerText")
    browser.evaluate("document.getElementById('zoom-in').click()")
    browser.settle()
    zoomed = state(browser)
    assert zoomed["periodTo"] - zoomed["periodFrom"] == pytest.approx((whole["periodTo"] - whole["periodFrom"]) / 0.6)


def test_keys_go_from_box_to_box_and_from_device_to_device(browser, pages):
    folder, timeline = pages
    browser.open(folder / "both.html")
    browser.evaluate("document.getElementById('chart').focus()")
    browser.key("n")
    assert "F s0 mb 0 (predicted)" in browser.evaluate(TIP)
    browser.key("n")
    assert "F s0 mb 1 (predicted)" in browser.evaluate(TIP)
    browser.key("p")
    assert "F s0 mb 0 (predicted)" in browser.evaluate(TIP)
    browser.key("ArrowDown")
    text = browser.evaluate(TIP)
    assert "F s1 mb 0 (predicted)" in text
    assert "d1" in text
    for _ in range(6):
        browser.key("+")
    browser.key("n")
    browser.key("n")
    moved = state(browser)
    index = timeline.labels.index("F s1 mb 1")
    assert "F s1 mb 1 (predicted)" in browser.evaluate(TIP)
    assert moved["from"] <= timeline.end_s[index]
    assert moved["to"] >= timeline.start_s[index], "the view follows"
    browser.key("Escape")
    assert browser.evaluate(TIP) == ""
    assert browser.complaints() == []


def test_steps_can_be_drawn_equally_long_and_tell_the_same_times(browser, pages):
    folder, timeline = pages
    browser.open(folder / "both.html")
    browser.evaluate("document.getElementById('chart').scrollIntoView()")
    browser.settle()
    last = int(timeline.end_s.argmax())
    assert timeline.rank[last] == 0
    middle = (timeline.start_s[last] + timeline.end_s[last]) / 2 / timeline.step_time_s
    browser.mouse("mouseMoved", *spot(browser, middle))
    assert timeline.labels[last] not in browser.evaluate(TIP), "the predicted step ends before"
    browser.evaluate("document.getElementById('stretch').click()")
    browser.settle()
    browser.mouse("mouseMoved", *spot(browser, middle))
    text = browser.evaluate(TIP)
    assert f"{timeline.labels[last]} (predicted)" in text
    assert f"{timeline.end_s[last]:g} s" in text
    assert "(+25 %)" in text
    browser.evaluate("document.getElementById('stretch').click()")
    browser.settle()
    browser.mouse("mouseMoved", *spot(browser, middle))
    assert timeline.labels[last] not in browser.evaluate(TIP)
    assert browser.complaints() == []
