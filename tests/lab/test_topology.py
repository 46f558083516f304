"""From cluster files to hosts, cables and commands; nothing is executed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lab.links import PairRate, measured_cluster
from benchmarks.lab.profiles import merge
from benchmarks.lab.topology import (
    BURST_BYTES,
    PORT,
    build_commands,
    describe,
    namespaces,
    on_cores,
    read_topology,
)
from benchmarks.lab_runs import star
from weft.base.errors import ClusterError
from weft.cluster.cluster_file import parse_cluster
from weft.cost.profile import OpKey, OpTiming

MEGABIT = 1e6 / 8


def cluster(**fields):
    return parse_cluster({"format": "weft.cluster", "version": 1, **fields})


def hosts(*names, devices="cpu", **more):
    return [{"name": name, "devices": devices, **more} for name in names]


NETWORK = {"bandwidth": "1Gbit/s", "latency": "100us"}


def test_a_star_has_a_cable_for_each_host_with_its_own_rate():
    found = read_topology(star(3, "1Gbit/s", c="100Mbit/s"), 2)
    assert [host.name for host in found.hosts] == ["a", "b", "c"]
    assert found.switches == ("network",)
    assert {cable.ends[0]: cable.bytes_per_s[0] / MEGABIT for cable in found.cables} == {"a": 1000, "b": 1000, "c": 100}
    assert all(cable.ends[1] == "network" for cable in found.cables)
    assert len({host.address for host in found.hosts}) == 3


def test_directions_may_differ_and_switches_form_a_tree():
    given = cluster(devices=[{"name": name, "kind": "cpu"} for name in "abcd"], switches=["left", "right"], links=[
        {"from": "a", "to": "left", "bandwidth": "1Gbit/s"}, {"from": "b", "to": "left", "bandwidth": "1Gbit/s"},
        {"from": "c", "to": "right", "bandwidth": "1Gbit/s"},
        {"from": "d", "to": "right", "bandwidth": "80Mbit/s", "directed": True},
        {"from": "right", "to": "d", "bandwidth": "40Mbit/s", "directed": True},
        {"from": "left", "to": "right", "bandwidth": "100Mbit/s"}])
    cables = {cable.ends: cable.bytes_per_s for cable in read_topology(given, 4).cables}
    assert cables["d", "right"] == pytest.approx((80 * MEGABIT, 40 * MEGABIT))
    assert cables["left", "right"] == pytest.approx((100 * MEGABIT, 100 * MEGABIT))
    assert len(cables) == 5


def test_devices_of_one_host_share_its_port():
    found = read_topology(cluster(hosts=hosts("a", "b", devices="2 x cpu", intra="loopback"), network=NETWORK), 2)
    assert [host.devices for host in found.hosts] == [("a0", "a1"), ("b0", "b1")]
    assert [host.cores for host in found.hosts] == [(0, 1), (0, 1)]
    assert len(found.cables) == 2


@pytest.mark.parametrize(("fields", "message"), [
    ({"hosts": hosts("a"), "network": NETWORK}, r"has 1 host\(s\)"),
    ({"hosts": hosts("a", "b"), "network": NETWORK, "contention": "none"}, "only 'link' can be built"),
    ({"hosts": hosts("a", "b"), "network": {**NETWORK, "shared": True}}, "the medium 'network' is shared by 4 ways"),
    ({"hosts": hosts("a", "b", devices="2 x cpu", intra="loopback"), "network": {**NETWORK, "per": "device"}},
     "there are 2 links from 'a' to 'network'"),
    ({"devices": [{"name": "a", "kind": "cpu"}, {"name": "b", "kind": "cpu"}],
      "links": [{"from": "a", "to": "b", "bandwidth": "1Gbit/s"}]}, "'a' and 'b' are linked directly"),
    ({"hosts": hosts("a", "b"), "network": NETWORK, "switches": ["other"],
      "links": [{"from": "a0", "to": "other", "bandwidth": "1Gbit/s"},
                {"from": "b0", "to": "other", "bandwidth": "1Gbit/s"}]}, "host 'a' has 2 network ports"),
    ({"hosts": hosts("a", "b"), "network": NETWORK, "switches": ["x", "y"],
      "links": [{"from": "network", "to": "x", "bandwidth": "1Gbit/s"},
                {"from": "x", "to": "y", "bandwidth": "1Gbit/s"},
                {"from": "y", "to": "network", "bandwidth": "1Gbit/s"}]}, "linked in a circle"),
])
def test_what_cannot_be_built_is_refused(fields, message):
    with pytest.raises(ClusterError, match=message):
        read_topology(cluster(**fields), 2)


def test_commands_limit_both_ends_of_every_cable():
    topology = read_topology(star(2, "1Gbit/s", b="100Mbit/s"), 2)
    spaces = namespaces(topology, "x-")
    commands = build_commands(topology, "x-", (4, 40))
    made = [command[3] for command in commands if command[:3] == ("ip", "netns", "add")]
    assert made == ["x-h0", "x-h1", "x-s0"] == list(spaces.values())
    limits = {(command[2], command[6]): command[command.index("rate") + 1] for command in commands
              if command[0] == "tc"}
    assert limits == {("x-h0", PORT): "1000000000bit", ("x-s0", "port0"): "1000000000bit",
                      ("x-h1", PORT): "100000000bit", ("x-s0", "port1"): "100000000bit"}
    bursts = [int(command[command.index("burst") + 1]) for command in commands if command[0] == "tc"]
    assert min(bursts) == BURST_BYTES
    assert max(len(word) for command in commands for word in command if word.startswith("port")) <= 15
    masks = {(command[3], command[6].split("/")[4]): command[6].split(" echo ")[1].split(" ")[0] for command in commands
             if command[:3] == ("ip", "netns", "exec")}
    assert masks == {("x-h0", PORT): "10", ("x-s0", "port0"): "10", ("x-h1", PORT): "100,00000000",
                     ("x-s0", "port1"): "100,00000000"}
    assert describe(topology)[1] == "b - network: 12.5 MB/s (b0; core 1)"


def test_more_devices_than_cores_share_them_by_turns():
    given = star(4, "1Gbit/s")
    assert [device.unit for device in on_cores(given, 2).devices] == ["core0", "core1", "core0", "core1"]
    assert on_cores(given, 4) == given
    assert [host.cores for host in read_topology(given, 2).hosts] == [(0,), (1,), (0,), (1,)]


def test_units_of_the_file_are_kept_or_refused():
    given = star(3, "1Gbit/s")
    units = ("x", "x", "y")
    given = replace(given, devices=tuple(replace(device, unit=unit)
                                         for device, unit in zip(given.devices, units, strict=True)))
    assert on_cores(given, 2) == given
    assert [host.cores for host in read_topology(given, 2).hosts] == [(0,), (0,), (1,)]
    with pytest.raises(ClusterError, match="compute on 2 units at once, but there are 1 cores"):
        on_cores(given, 1)


def test_measured_links_take_the_share_of_pairs_with_their_rate():
    given = star(3, "1Gbit/s", c="100Mbit/s")
    fast, slow = 1000 * MEGABIT, 100 * MEGABIT

    def pair(source, target, nominal, share):
        return PairRate(source=source, target=target, bytes_per_s=nominal * share, latency_s=2e-4,
                        nominal_bytes_per_s=nominal)

    found = measured_cluster(given, [pair("a", "b", fast, 0.8), pair("b", "a", fast, 0.8), pair("a", "c", slow, 1.0),
                                     pair("c", "a", slow, 1.0)])
    rates = {link.name: link.bytes_per_s for link in found.links}
    assert rates["a0>network"] == pytest.approx(0.8 * fast)
    assert rates["network>c0"] == pytest.approx(slow)
    assert found.route(found.device_index["a0"], found.device_index["b0"]).latency_s == pytest.approx(2e-4)


def test_profiles_of_hosts_become_their_mean():
    def timing(forward_s, weight_grad_s):
        return OpTiming(forward_s=forward_s, input_grad_s=None, weight_grad_s=weight_grad_s, spread=0.1, repeats=9,
                        threads=1, torch_version="", recorded_at="")

    both, once = OpKey("cpu", "aten.relu", "[4]", "float32"), OpKey("cpu", "aten.exp", "[4]", "float32")
    (entry,) = merge([{both: timing(1.0, 2.0), once: timing(1.0, 1.0)}, {both: timing(3.0, 4.0)}])
    assert entry[0] == both
    assert (entry[1].forward_s, entry[1].input_grad_s, entry[1].weight_grad_s, entry[1].repeats) == (2.0, None, 3.0, 18)
