from __future__ import annotations

from xml.etree import ElementTree

from tests.show.helpers import hostile_cluster, hostile_timeline, wide_timeline
from weft.cluster.cluster_file import parse_cluster
from weft.show.facts import plan_cluster
from weft.show.plan_drawings import ClusterFacts, cluster_facts, cluster_html


def facts_of(timeline) -> ClusterFacts:
    plan = timeline.program.plan
    return cluster_facts(plan_cluster(plan), plan)


def texts(drawing: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawing).iter() if len(element) == 0]


def test_hosts_have_their_devices_stages_and_rates():
    facts = facts_of(wide_timeline(2, 2, 4))
    assert facts.kinds == {"A100-80GB": 4}
    assert [host.names for host in facts.hosts] == [("h-0",), ("h-1",)]
    assert [(chip.names, chip.work) for chip in facts.hosts[1].chips] == [(("h2",), ("s0 50 %",)), (("h3",), ("s1 50 %",))]
    assert facts.hosts[0].inside == (300e9,)
    assert facts.hosts[0].outside == {"network": 12.5e9}
    assert facts.switches == ("network",)
    shown = texts(cluster_html(facts))
    assert {"Host h-0", "Host h-1", "h0", "h3", "s0 50 %", "A100-80GB", "300 GB/s", "12.5 GB/s to network", "network"} <= set(shown)


def test_alike_hosts_are_one_and_say_how_many_they_are():
    facts = facts_of(wide_timeline(16, 4, 4))
    assert len(facts.hosts) == 1
    assert len(facts.hosts[0].names) == 16
    assert [len(chip.names) for chip in facts.hosts[0].chips] == [16] * 4
    assert "Host h-0 - h-15 \u00d7 16" in texts(cluster_html(facts))


def test_hosts_with_other_stages_stay_apart_and_their_alike_devices_are_one():
    facts = facts_of(wide_timeline(8, 8, 4, along_hosts=True))
    assert [chip.work for host in facts.hosts for chip in host.chips] == [(f"s{index} 12.5 %",) for index in range(8)]
    assert "h0 - h7 \u00d7 8" in texts(cluster_html(facts))
    many = facts_of(wide_timeline(40, 1, 1, along_hosts=True))
    assert len(many.hosts) == 1, "too many to draw: equal hardware is one, with all stages"
    assert len(many.hosts[0].chips[0].work) == 40


def test_the_drawing_is_bounded_however_large_the_cluster():
    assert len(cluster_html(facts_of(wide_timeline(64, 8, 2)))) < 12_000


def test_unused_devices_are_idle_and_direct_links_are_named():
    timeline = wide_timeline(1, 2, 2)
    plan = timeline.program.plan
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "kinds": {"k": {"flops": {"float32": 1e12}, "memory": "1GiB",
                                                                "memory_bandwidth": "1GB/s"}},
        "devices": [{"name": "h0", "kind": "k", "host": "x"}, {"name": "h1", "kind": "k", "host": "y"},
                    {"name": "z", "kind": "k", "host": "y"}],
        "links": [{"from": "h0", "to": "h1", "bandwidth": "2GB/s", "latency": "1us"},
                  {"from": "h1", "to": "z", "bandwidth": "4GB/s", "latency": "1us"}]})
    facts = cluster_facts(cluster, plan)
    assert facts.direct == (("h0", "h1", 2e9),)
    assert facts.hosts[1].inside == (4e9,)
    assert facts.hosts[1].chips[1].work == ()
    assert texts(cluster_html(facts)).count("idle") == 1


def test_hostile_names_stay_text():
    root = ElementTree.fromstring(cluster_html(cluster_facts(hostile_cluster(), hostile_timeline().program.plan)))
    assert {element.tag for element in root.iter()} == {"div", "p", "b", "span", "ul", "li", "small"}
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
