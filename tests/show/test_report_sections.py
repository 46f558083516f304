"""What the sections of the report beside the chart say, without a browser."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.show.helpers import (
    HOSTILE,
    hostile_cluster,
    hostile_timeline,
    played,
    simulated,
    stretched,
    wide_timeline,
)
from tests.show.test_html import Page
from tests.simulate.helpers import pipeline_world
from tests.worlds import chain_graph, plan_of
from weft.cost.costs import estimate_costs
from weft.plan.lower import lower
from weft.plan.memory import CATEGORIES
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Replica
from weft.plan.program import Op
from weft.show.facts import (
    ExchangeFacts,
    StrategyFacts,
    TriedFacts,
    error_facts,
    extra_parts,
    link_facts,
    link_title,
    mean_error,
    mean_parts,
    plan_cluster,
)
from weft.show.html import exchanges, links, render_report
from weft.show.page import embed_json
from weft.show.plan_drawings import COLUMNS, MAX_PANELS, fullest, memory_panels, panel_svg, scale_of
from weft.show.timeline_chart import MAX_INSTRUCTIONS, report_data, shown_rows
from weft.simulate.timeline import make_timeline
from weft.simulate.timing import link_bytes


@pytest.fixture(scope="module")
def wide():
    return wide_timeline(8, 8, 32)


def test_the_page_has_every_section(wide):
    page = Page(render_report([wide, stretched(wide, 1.1)]))
    headings = [value for tag, name, value in page.attributes if tag == "h2" and name == "id"]
    assert headings == ["timeline-title", "predicted-against-measured", "cluster", "stages", "layers", "devices", "memory",
                        "communication-by-link", "gradient-exchanges", "about-this-plan"]
    links = {value for tag, name, value in page.attributes if tag == "a" and name == "href" and value.startswith("#")}
    assert links == {"#timeline", *(f"#{name}" for name in headings[1:])}
    for part in ("wide, 64 of 64 devices", "8 stages, 8 replicas", "Recomputationnone", "state whole on each device",
                 "all reduce (16 parameters)", "repeats every", "8 alike"):
        assert part in page.text, part


def test_settings_name_what_was_decided():
    timeline = simulated("1f1b", 2, 2)
    program = timeline.program
    plan = replace(program.plan, optimizer=replace(program.plan.optimizer, kind="adamw", sharded=True),
                   stages=(replace(program.plan.stages[0], recompute=True), program.plan.stages[1]))
    page = Page(render_report([replace(timeline, program=replace(program, plan=plan))]))
    for part in ("adamw, state sharded", "Recomputations0", "nothing to exchange", "2 of 2 devices"):
        assert part in page.text, part


def test_links_carry_what_the_simulator_counts(wide):
    program, cluster = wide.program, plan_cluster(wide.program.plan)
    rows = link_facts(program, cluster, wide.step_time_s)
    expected = link_bytes(program, estimate_costs(program.graph, cluster), cluster)
    assert {name: row.num_bytes for row in rows for name in row.names} == expected
    rates = {link.name: link.bytes_per_s for link in cluster.links}
    for row in rows:
        assert {rates[name] for name in row.names} == {row.bytes_per_s}
        assert row.busy == pytest.approx(row.num_bytes / row.bytes_per_s / wide.step_time_s)
    assert [row.busy for row in rows] == sorted((row.busy for row in rows), reverse=True)
    assert len(rows) < len(expected) / 4, "alike links share a row"


def test_a_link_that_cannot_carry_its_bytes_in_the_step_is_marked(wide):
    rows = link_facts(wide.program, plan_cluster(wide.program.plan), wide.step_time_s)
    assert "over" not in links(rows)
    marked = links((replace(rows[0], busy=1.24), *rows[1:]))
    assert '<span class="over">124&nbsp;%</span>' in marked
    assert "longer than predicted" in marked


def test_without_links_pairs_are_named_and_have_no_rate():
    program, _, cluster = pipeline_world("1f1b", 2, 2, activation_bytes=5)
    rows = link_facts(program, replace(cluster, links=()), 1.0)
    assert [(row.names, row.bytes_per_s, row.num_bytes) for row in rows] == [(("d0>d1", "d1>d0"), None, 10)]


def test_errors_are_those_that_were_put_in():
    predicted = simulated("1f1b", 2, 4, activation_bytes=1, optimizer="sgd")
    program = predicted.program
    slower = np.where((program.op == Op.COMPUTE) & (program.phase == 1), 1.25, 1.0)
    measured = make_timeline(program, start_s=predicted.start_s,
                             end_s=predicted.start_s + slower * (predicted.end_s - predicted.start_s), kind="measured")
    rows = error_facts(program, predicted, measured)
    found = {(row.stage, row.what): row for row in rows}
    assert found["", "forward"].error == pytest.approx(0.0)
    assert found["", "backward"].error == pytest.approx(-0.2)
    assert found["s1", "backward"].error == pytest.approx(-0.2)
    assert found["", "backward"].count == 8
    assert found["", "transfers"].error == pytest.approx(0.0)
    assert mean_error(rows) == pytest.approx(0.2 * 2.5 / 3.5)
    page = Page(render_report([predicted, measured]))
    assert "-20.0 %" in page.text
    assert "s1 backward" in page.text
    assert "Predicted against measured" not in Page(render_report([predicted])).text


def test_memory_panels_lose_no_peak_and_join_alike_devices(wide):
    peaks = {row.device: row.peak_bytes for row in wide.summary()}
    panels = memory_panels(wide, dict.fromkeys(peaks, 80_000_000_000))
    assert {name: panel.peak_bytes for panel in panels for name in panel.devices} == peaks
    assert sorted(len(panel.devices) for panel in panels) == [8] * 8
    assert panels[0].num_bytes.shape == (COLUMNS, len(CATEGORIES))
    assert not panels[0].shows_capacity
    near = memory_panels(wide, dict.fromkeys(peaks, 600 << 20))
    assert near[0].shows_capacity
    assert 'class="limit"' in panel_svg(near[0], scale_of(near))
    assert 'class="limit"' not in panel_svg(panels[0], scale_of(panels))


def test_of_many_different_devices_the_fullest_are_drawn():
    timeline = simulated("1f1b", 30, 30, activation_bytes=1)
    panels = memory_panels(timeline, {})
    assert len(panels) == 30
    drawn = fullest(panels)
    assert len(drawn) == MAX_PANELS
    assert min(panel.peak_bytes for panel in drawn) >= max(
        panel.peak_bytes for panel in panels if not any(panel is other for other in drawn))
    page = Page(render_report([timeline]))
    assert "6 more devices are not" in page.text


def test_strategies_say_why_they_lost():
    best, other = simulated("1f1b", 4, 8), simulated("gpipe", 4, 2)
    rows = [StrategyFacts(strategy=name, step_time_s=item.step_time_s, parts=mean_parts(item), is_chosen=name == "1f1b",
                          status="heuristic") for name, item in (("1f1b", best), ("gpipe", other))]
    assert sum(rows[0].parts.values()) == pytest.approx(best.step_time_s)
    slow = replace(rows[0], strategy="slow", is_chosen=False, step_time_s=best.step_time_s + 9.0,
                   parts={**rows[0].parts, "bubble": rows[0].parts["bubble"] + 8.8,
                          "computing": rows[0].parts["computing"] + 0.2})
    assert extra_parts(slow, rows[0]) == {"bubble": pytest.approx(8.8)}, "0.2 of 9 is not worth a word"
    told = replace(slow, strategy="told", reason=HOSTILE[0])
    page = Page(render_report([best], comparison=[rows[0], slow, told, replace(rows[0], strategy="same", is_chosen=False)]))
    for part in ("8.8 s more bubble", "as fast as the chosen one", HOSTILE[0]):
        assert part in page.text, part


def test_alike_devices_of_many_share_a_row_of_the_chart(wide):
    rows = shown_rows(wide.program, [wide])
    assert [len(row.members) for row in rows] == [8] * 8
    data = report_data(wide.program, [wide], {})
    assert data["devices"][0]["count"] == 8
    assert data["devices"][0]["alike"] == "h0, h8, h16, h24, h32, h40, h48, h56"
    assert data["left_out"] == 0
    assert len(data["program"]["what"]) == data["program"]["rank_start"][-1] == wide.num_instructions / 8
    for row, name in zip(rows, ("h0", "h1"), strict=False):
        assert wide.devices[row.rank] == name
    few = report_data(simulated().program, [simulated()], {})
    assert "count" not in few["devices"][0]


def test_pages_of_many_devices_and_micro_batches_stay_small():
    timeline = wide_timeline(64, 1, 340, along_hosts=True)
    assert timeline.num_instructions > MAX_INSTRUCTIONS
    text = render_report([timeline])
    assert len(text) < 8_000_000
    data = Page(text).data
    assert data["left_out"] > 0
    assert data["program"]["rank_start"][-1] <= MAX_INSTRUCTIONS
    assert len(embed_json(wide_page := report_data(timeline.program, [timeline], {}))) < 7_000_000
    assert len(wide_page["devices"]) + wide_page["left_out"] == 64


def test_hostile_clusters_stay_text():
    text = render_report([hostile_timeline()], cluster=hostile_cluster())
    page = Page(text)
    assert page.tags.count("script") == 2
    assert not {"img", "iframe", "object"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for heading in ("cluster", "memory", "communication-by-link"):
        assert ("h2", "id", heading) in page.attributes


def test_the_period_is_in_the_data():
    timeline = simulated("1f1b", 4, 8)
    data = Page(render_report([timeline, stretched(timeline, 1.2)])).data
    assert data["period"]["to"] - data["period"]["from"] == pytest.approx(3.0)
    assert "steady" in data["timelines"][0]
    assert "steady" not in data["timelines"][1]
    assert "period" not in Page(render_report([simulated("gpipe", 4, 8)])).data


def test_everything_that_a_strategy_tried_is_there_with_the_reason():
    timeline = simulated()
    tried = (TriedFacts(setting="2 stages", estimate_s=8.0, step_time_s=9.0, reason=""),
             TriedFacts(setting="1 stage", estimate_s=8.5, step_time_s=9.9, reason=""),
             TriedFacts(setting="3 stages", estimate_s=20.0, step_time_s=None, reason=""),
             TriedFacts(setting=HOSTILE[0], estimate_s=None, step_time_s=None, reason=HOSTILE[1]))
    page = Page(render_report([timeline], comparison=[
        StrategyFacts(strategy="joint", is_chosen=True, step_time_s=9.0, tried=tried, status="heuristic")]))
    for part in ("4 settings of joint", "+10.0 %", "not simulated: others were estimated to be faster", HOSTILE[0],
                 HOSTILE[1]):
        assert part in page.text, part
    assert page.tags.count("script") == 2


def test_a_part_of_a_large_plan_is_named_as_such():
    """The part has the whole cluster's devices, of which all but two are idle."""
    graph = chain_graph(2)
    part = plan_of(graph, [[0], [1]], devices=[0, 1], order=one_f_one_b(2, 4), microbatches=4, num_devices=40)
    timeline = played(lower(part, graph))
    stages = tuple(replace(stage, replicas=tuple(Replica(devices=(f"d{index + 2 * number}",), share=0.05)
                                                 for number in range(20))) for index, stage in enumerate(part.stages))
    whole = replace(part, stages=stages, microbatches=8, search=replace(part.search, step_time=12.5))
    assert [row.members for row in shown_rows(timeline.program, [timeline], only_used=True)] == [(0,), (1,)]
    assert len(shown_rows(timeline.program, [timeline])) == 3, "idle ones are a row of their own"
    page = Page(render_report([timeline], plan=whole))
    assert "stands for the rest: 2 of 40 devices and 4 of 8 micro-batches" in page.text
    assert "12.5 s" in page.text
    assert [device["name"] for device in page.data["devices"]] == ["d0", "d1"]
    assert "d2" not in page.text
    assert "stands for the rest" not in Page(render_report([timeline], plan=part)).text


@pytest.mark.parametrize(("names", "title"), [
    (["a0>n"], "a0 > n"), (["n>a0", "n>a1", "n>a2"], "n > a0 - a2"), (["a0>n", "a1>n", "n>b"], "a0 - a1 > n, n > b"),
    (["bus"], "bus"), (["a>b", "c>d", "e>f", "g>h", "i>j"], "a > b, c > d, e > f, 2 more"), (["<a>b</a>"], "<a>b</a>")])
def test_alike_links_have_a_short_title(names, title):
    assert link_title(names) == title


def test_alike_exchanges_of_many_groups_are_one_row():
    page = Page(render_report([wide_timeline(4, 2, 4)]))
    assert "h0, h2, h4, h6" in page.text, "two stages, each exchanged among the four hosts"
    rows = tuple(ExchangeFacts(method="all_reduce", parameters=("w",), devices=(f"a{index}", f"b{index}"), num_bytes=8,
                               time_s=1.0) for index in range(9))
    text = Page(exchanges((*rows, replace(rows[0], num_bytes=9)))).text
    assert "9 alike" in text
    assert "a5, b5; 3 more groups" in text
    assert text.count("all reduce") == 2
