from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.show.helpers import HOSTILE, hostile_timeline, many_microbatches, simulated, stretched
from weft.base.errors import InputError, PlanError
from weft.plan.program import Op
from weft.show.facts import StrategyFacts
from weft.show.html import render_report, write_report
from weft.show.page import embed_json
from weft.show.timeline_chart import report_data

ROWS = (StrategyFacts(strategy="1f1b", is_chosen=True, step_time_s=9.0, samples_per_s=2 / 9, microbatches=2, bubble=1 / 3,
                      peak_bytes={"d0": 1 << 30, "d1": 2 << 30}, bound_s=6.0, status="feasible"),
        StrategyFacts(strategy="gpipe", step_time_s=13.5, samples_per_s=2 / 13.5, microbatches=2, status="heuristic"),
        StrategyFacts(strategy=HOSTILE[0], reason=HOSTILE[1]))


class Page(HTMLParser):
    """Elements, attributes and text of a page, as a browser without scripts would see them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.blocks: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag in self.blocks:
            self.blocks[tag].append("")

    def handle_data(self, data):
        if self.cdata_elem in self.blocks:
            self.blocks[self.cdata_elem][-1] += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split()).replace("\u00a0", " ")

    @property
    def data(self):
        return json.loads(self.blocks["script"][0])


def test_the_page_has_the_plan_the_tables_and_the_comparison():
    timeline = simulated(activation_bytes=1)
    page = Page(render_report([timeline, stretched(timeline, 1.1)], comparison=ROWS, capacities={"d0": 64, "d1": 64}))
    for part in ("chain on 2 devices", "2 in 2 micro-batches of 1", "Predicted step", "Measured step",
                 "+10.0 % against the prediction", "Stages", "layers.0", "Devices", "of 64 B", "Strategies", "fastest",
                 "+50.0 %", f"gap {100 * (timeline.step_time_s / 6 - 1):.1f} %", "1 - 2 GiB", "About this plan",
                 timeline.program.plan.model.digest):
        assert part in page.text, part
    assert ("html", "lang", "en") in page.attributes
    assert "title" in page.tags
    assert "noscript" in page.tags


def test_a_page_without_comparison_and_capacity_has_neither():
    page = Page(render_report([simulated()]))
    assert "Strategies" not in page.text
    assert "none known, status heuristic" in page.text
    assert page.data["devices"] == [{"name": "d0", "capacity": None}, {"name": "d1", "capacity": None}]


def test_hostile_names_stay_text():
    timeline = hostile_timeline()
    text = render_report([timeline], comparison=ROWS)
    page = Page(text)
    clean = Page(render_report([simulated()], comparison=ROWS[:2]))
    assert set(page.tags) <= set(clean.tags) | {"noscript"}
    assert page.tags.count("script") == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert not [value for _, name, value in page.attributes if name in ("src", "srcset", "action", "formaction")]
    for name in HOSTILE[:4]:
        assert " ".join(name.split()) in page.text
    data = page.data
    assert [device["name"] for device in data["devices"]] == list(HOSTILE[4:])
    assert any(HOSTILE[0] in what["label"] for what in data["what"])
    raw = re.search(r'<script type="application/json" id="weft-data">(.*?)</script>', text, re.DOTALL)[1]
    assert not re.search(r"[<>&\u2028\u2029\x7f-\uffff]", raw)
    assert json.loads(raw) == data


def test_placeholders_in_names_are_not_filled():
    page = Page(render_report([hostile_timeline()]))
    assert "<!-- {{data}} ]]>" in page.text
    assert len(page.blocks["script"]) == 2


@pytest.mark.parametrize("value", [*HOSTILE, "</SCRIPT>", "\u2029", "\ud800", "&amp;"])
def test_embedded_json_reads_back(value):
    text = embed_json({"name": value})
    assert json.loads(text) == {"name": value}
    assert not set("<>&") & set(text)
    assert text.isascii()


def test_nothing_is_loaded_from_anywhere():
    text = render_report([simulated()], comparison=ROWS)
    page = Page(text)
    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|importScripts|sendBeacon|innerHTML|eval\(", text)
    links = [value for _, name, value in page.attributes if name in ("href", "src")]
    assert all(value.startswith(("#", "data:,")) for value in links)
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and name == "content"
                  and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_policy_admits_the_script_and_the_style_of_the_page():
    import base64
    import hashlib
    page = Page(render_report([simulated()]))
    policy = next(value for tag, name, value in page.attributes if name == "content" and "default-src" in (value or ""))
    for block in (page.blocks["script"][1], page.blocks["style"][0]):
        assert base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() in policy


def test_the_data_says_what_the_program_and_the_timelines_say():
    timeline = simulated("1f1b", 3, 4, activation_bytes=1, optimizer="sgd")
    measured, program = stretched(timeline, 1.7), timeline.program
    data = report_data(program, [timeline, measured], {"d0": 7})
    assert data["devices"][0] == {"name": "d0", "capacity": 7}
    assert [item["title"] for item in data["timelines"]] == ["predicted", "measured"]
    for item, source in zip(data["timelines"], (timeline, measured), strict=True):
        start = np.asarray(item["start"]) * item["unit_s"]
        end = start + np.asarray(item["duration"]) * item["unit_s"]
        assert np.abs(start - source.start_s).max() <= 1e-8 * source.step_time_s
        assert np.abs(end - source.end_s).max() <= 1e-8 * source.step_time_s
        peaks = [max(curve["bytes"]) for curve in item["memory"]]
        assert peaks == [row.peak_bytes for row in source.summary()]
    for index in range(program.num_instructions):
        what, microbatch = data["what"][data["program"]["what"][index]], data["program"]["microbatch"][index]
        assert program.label(index) == what["label"] + (f" mb {microbatch}" if microbatch >= 0 else "")
        instruction = program.instruction(index)
        assert what["op"] == instruction.op.name.lower()
        if instruction.op in (Op.SEND, Op.RECV):
            assert what["bytes"] == program.channels[instruction.channel].num_bytes
            assert what["backward"] == (program.channels[instruction.channel].kind == "gradient")


def test_two_timelines_of_a_kind_are_numbered():
    timeline = simulated()
    titles = [item["title"] for item in report_data(
        timeline.program, [timeline, stretched(timeline, 1.1), stretched(timeline, 1.2)], {})["timelines"]]
    assert titles == ["predicted", "measured 1", "measured 2"]


def test_the_data_grows_linearly():
    sizes = []
    for num_microbatches in (64, 128, 256):
        timeline = many_microbatches(4, num_microbatches)
        sizes.append(len(embed_json(report_data(timeline.program, [timeline], {}))))
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert 0 < first < second < 2.4 * first
    assert sizes[2] / many_microbatches(4, 256).num_instructions < 60


def test_the_report_is_written_whole_and_is_the_same_each_time(tmp_path):
    timeline = simulated()
    write_report(tmp_path / "deep" / "a.html", [timeline])
    write_report(tmp_path / "b.html", [timeline])
    assert (tmp_path / "deep" / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_report(tmp_path / "file" / "a.html", [timeline])
    with pytest.raises(PlanError, match="none of the timelines"):
        write_report(tmp_path / "c.html", [])
    assert not (tmp_path / "c.html").exists()
