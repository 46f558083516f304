"""Cluster files: both forms, every named bad input, one-line texts, and what is written loads as it was."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.worlds import header, long_form, mixed_form, short_form, times_only
from weft.base.errors import ClusterError
from weft.cluster import Contention, load_cluster, read_cluster, save_cluster
from weft.cluster.cluster import MAX_DEVICES
from weft.cluster.cluster_file import parse_cluster, parse_cluster_text, to_json

SHORT_YAML = """
format: weft.cluster
version: 1
hosts:
  - {name: a, count: 2, devices: "4 x A100-80GB", intra: nvlink3}
  - {name: b, devices: "2 x RTX3090", intra: pcie4}
network: {bandwidth: 100Gbit/s, latency: 10us}
"""


def write(tmp_path: Path, text: str, name: str = "box.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_short_form_yaml(tmp_path):
    cluster = load_cluster(write(tmp_path, SHORT_YAML))
    assert cluster.name == "box"
    assert [device.name for device in cluster.devices] == [f"a{i}" for i in range(8)] + ["b0", "b1"]
    assert [device.host for device in cluster.devices] == ["a-0"] * 4 + ["a-1"] * 4 + ["b"] * 2
    assert cluster.kind_of(0).flop_per_s["bfloat16"] == 312e12
    assert (cluster.devices[0].memory_bytes, cluster.devices[9].memory_bytes) == (80 * 10**9, 24 * 10**9)
    assert cluster.contention is Contention.LINK
    assert cluster.switches == ("a-0/fabric", "network", "a-1/fabric", "b/fabric")


def test_json_and_yaml_give_the_same(tmp_path):
    text = json.dumps(short_form())
    from_json = load_cluster(write(tmp_path, text, "box.json"))
    assert from_json == load_cluster(write(tmp_path, SHORT_YAML))
    assert from_json == load_cluster(write(tmp_path, text, "box.yml")), "JSON is YAML"
    assert load_cluster(write(tmp_path, text, "box")).devices == from_json.devices, "JSON by its first letter"


def test_long_form():
    cluster = parse_cluster(long_form())
    assert cluster.name == "bench"
    assert [device.memory_bytes for device in cluster.devices] == [32 << 30, 16 << 30, 16 * 10**9, 8 * 10**9]
    assert cluster.kinds["npu"].flop_per_s == {"float32": 10e12, "bfloat16": 80e12}
    assert cluster.kinds["npu"].source == "vendor"
    assert cluster.kinds["mine"].memory_bytes_per_s == 100e9
    assert [device.host for device in cluster.devices] == ["h0", "h0", "h1", "x0"]
    there, back = cluster.route(0, 3), cluster.route(3, 0)
    assert (there.bytes_per_s, back.bytes_per_s) == (1e9, 2e9), "directed links may differ"
    assert cluster.route(0, 1).latency_s == 2e-6


def test_both_directions_of_a_link_may_be_listed_without_saying_directed():
    file = long_form()
    for link in file["links"][-2:]:
        del link["directed"]
    assert parse_cluster(file) == parse_cluster(long_form())
    for link in file["links"][-2:]:
        link["shared"] = True
    last = parse_cluster(file).links[-2:]
    assert [(link.name, link.bytes_per_s, link.shared) for link in last] == [("s>x0", 1e9, "s-x0"), ("x0>s", 2e9, "s-x0")]


def test_mixed_forms_join_by_host_and_network():
    cluster = parse_cluster(mixed_form())
    assert [device.name for device in cluster.devices] == ["a0", "a1", "a2", "c", "lone"]
    assert cluster.devices[3].kind == "xeon-32c"
    assert cluster.route(0, 3).bytes_per_s == 10e9, "'c' is on the fabric of its host"
    assert cluster.route(0, 4).bytes_per_s == pytest.approx(25e9 / 8), "'lone' is on the network"
    assert {link.shared for link in cluster.links} == {"a/bus", None}


def test_devices_of_a_host_without_entry_share_its_card():
    devices = [{"name": name, "kind": "T4", "host": host} for name, host in (("x", "h"), ("y", "h"), ("z", "i"))]
    cluster = parse_cluster(header(devices=devices, network="ethernet10"))
    x, y, z = range(3)
    assert set(cluster.transfer_resources(x, z)) & set(cluster.transfer_resources(y, z))
    assert set(cluster.transfer_resources(x, z))
    own = [{"from": "x", "to": "network", "bandwidth": "1GB/s"}]
    assert parse_cluster(header(devices=devices, network="ethernet10", links=own)).route(x, z).bytes_per_s == 1e9


def test_a_card_for_each_device():
    value = short_form()
    value["network"]["per"] = "device"
    cluster = parse_cluster(value)
    assert not set(cluster.transfer_resources(0, 8)) & set(cluster.transfer_resources(1, 9))
    assert cluster.route(0, 1).bytes_per_s == 300e9
    assert cluster.route(0, 8).bytes_per_s == 12.5e9


def test_a_shared_network_carries_one_transfer_at_a_time():
    value = short_form()
    value["network"]["shared"] = True
    cluster = parse_cluster(value)
    assert set(cluster.transfer_resources(0, 4)) & set(cluster.transfer_resources(8, 1))


def test_own_kinds_come_before_presets_and_kinds_are_found_by_alias():
    value = header(kinds={"T4": {"memory": "1GB"}}, hosts=[{"name": "a", "devices": ["1 x T4", "tesla v100-32gb"]}])
    cluster = parse_cluster(value)
    assert [device.kind for device in cluster.devices] == ["T4", "V100-32GB"]
    assert [device.memory_bytes for device in cluster.devices] == [10**9, 32 * 10**9]


def test_rates_and_links_may_be_left_out():
    cluster = parse_cluster(times_only())
    assert cluster.links == ()
    assert cluster.kind_of(0).flop_per_s == {}
    assert cluster.devices[0].memory_bytes == 14
    assert parse_cluster(header(devices=[{"name": "d", "kind": "gpu"}])).devices[0].memory_bytes is None
    assert parse_cluster(header(devices=[{"name": "d", "kind": "T4", "memory": None}])).devices[0].memory_bytes is None


def test_the_clusters_of_the_placement_benchmark_load():
    folder = Path(__file__).parents[3] / "shared" / "data" / "place"
    if not folder.exists():
        pytest.skip("the benchmark inputs are not here")
    for path in sorted(folder.glob("*.cluster.json")):
        cluster = load_cluster(path)
        assert cluster.contention is Contention.PORT
        assert [device.name for device in cluster.devices][:3] == ["d0", "d1", "d2"]


@pytest.mark.parametrize("form", [short_form, long_form, mixed_form, times_only])
def test_what_is_written_loads_as_it_was(form, tmp_path):
    cluster = parse_cluster(form())
    assert parse_cluster(to_json(cluster)) == cluster
    for name in ("c.json", "c.json.gz", "c.yaml"):
        save_cluster(cluster, tmp_path / name)
        loaded = load_cluster(tmp_path / name)
        assert loaded == cluster
        assert loaded.digest == cluster.digest


def test_saving_twice_gives_the_same_bytes(tmp_path):
    for name in ("one.json", "two.json"):
        save_cluster(parse_cluster(short_form()), tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_cluster_text():
    cluster = read_cluster("2x A100-80GB, 2 x RTX3090")
    assert [device.name for device in cluster.devices] == ["a0", "a1", "a2", "a3"]
    assert [device.kind for device in cluster.devices] == ["A100-80GB"] * 2 + ["RTX3090"] * 2
    assert {device.host for device in cluster.devices} == {"a"}
    assert cluster.route(0, 3).bytes_per_s == 31.5e9
    assert parse_cluster_text("2 x A100, 1 x V100").route(0, 1).bytes_per_s == 15.75e9, "the oldest PCIe counts"
    assert parse_cluster_text("8 x H100 over nvlink4").route(0, 7).bytes_per_s == 450e9
    assert parse_cluster_text("4 x cpu").route(0, 1).bytes_per_s == 2e9
    assert parse_cluster_text("H100").links == ()


def test_read_cluster_takes_a_path(tmp_path):
    assert read_cluster(str(write(tmp_path, SHORT_YAML))).num_devices == 10


@pytest.mark.parametrize(("text", "message"), [
    ("4 x A10O-80GB", "did you mean 'A100-80GB'"),
    ("", "there is no file '', and it lists no devices"),
    ("4 x A100-80GB,", "cannot read ''"),
    ("0 x H100", "the count in '0 x H100' must be 1 to 65536"),
    ("2 x H100 over nvlnk4", "did you mean 'nvlink4'"),
    ("nowhere.yaml", "no file 'nowhere.yaml'"),
    ("no/where", "no file 'no/where'"),
    ("a\0b", "'a\\x00b'"),
    ("-3 x H100", "unknown device kind '-3 x H100'"),
])
def test_bad_texts_and_paths(text, message):
    with pytest.raises(ClusterError) as caught:
        read_cluster(text)
    assert message in str(caught.value)


def changed(form, *path, to):
    """Return the form with the value at ``path`` replaced (or added, or removed if ``to`` is ``...``)."""
    value = copy.deepcopy(form())
    item = value
    for step in path[:-1]:
        item = item[step]
    if to is ...:
        del item[path[-1]]
    else:
        item[path[-1]] = to
    return value


BAD = {
    # structure
    "not an object": ([], "must be an object with a 'format' field"),
    "no format": (changed(short_form, "format", to=...), "format must be 'weft.cluster', not None"),
    "other version": (changed(short_form, "version", to=2), "version must be 1, not 2"),
    "unknown field": (changed(short_form, "netwrok", to={}), "netwrok is not a known field"),
    "unknown field of a host": (changed(short_form, "hosts", 1, "nodes", to=3), "hosts[1].nodes is not a known field"),
    "unknown field of rates": (changed(mixed_form, "hosts", 0, "intra", "lag", to=1),
                               "hosts[0].intra.lag is not a known"),
    "unknown field of the network": (changed(short_form, "network", "x", to=1), "network.x is not a known field"),
    "unknown field of a device": (changed(long_form, "devices", 2, "mem", to=1), "devices[2].mem is not a known field"),
    "unknown field of a link": (changed(long_form, "links", 0, "rate", to=1), "links[0].rate is not a known field"),
    "unknown field of a kind": (changed(long_form, "kinds", "npu", "x", to=1), "kinds.npu.x is not a known field"),
    "missing field": (changed(long_form, "links", 0, "bandwidth", to=...), "links[0].bandwidth is missing"),
    "missing end": (changed(long_form, "links", 0, "from", to=...), "links[0].from is missing"),
    "wrong type": (changed(short_form, "hosts", 0, "count", to="two"),
                   "hosts[0].count must be a whole number, not 'two'"),
    "contention": (changed(short_form, "contention", to="bus"), "contention must be one of 'link', 'port', 'none'"),
    "kind of kind": (changed(long_form, "kinds", "npu", "type", to="tpu"),
                     "kinds.npu.type must be one of 'gpu', 'cpu'"),
    # units
    "memory without B": (changed(long_form, "devices", 1, "memory", to="80G"),
                         "devices[1].memory: cannot read size '80G': write GB (10^n) or GiB (2^n)"),
    "memory in bits": (changed(long_form, "devices", 1, "memory", to="400Gb"),
                       "devices[1].memory: cannot read size '400Gb'"),
    "bandwidth without time": (changed(short_form, "network", "bandwidth", to="400Gb"),
                               "network.bandwidth: cannot read bandwidth '400Gb': say per second"),
    "bandwidth without unit of size": (changed(long_form, "links", 0, "bandwidth", to="50G/s"), "links[0].bandwidth: "),
    "latency": (changed(short_form, "network", "latency", to="10 \u03bcs"), "network.latency: cannot read time"),
    "compute rate": (changed(long_form, "kinds", "npu", "flops", "float32", to="10T"),
                     "kinds.npu.flops.float32: cannot read compute rate '10T'"),
    "unit where an object stands": (changed(long_form, "links", 0, "bandwidth", to={"a": 1}),
                                    "links[0].bandwidth: "),
    "endless unit": (changed(long_form, "links", 0, "bandwidth", to="1" + " " * 10**6 + "x\n"),
                     "links[0].bandwidth is text of 1000003 characters, more than 100000"),
    # rates
    "zero bandwidth": (changed(short_form, "network", "bandwidth", to=0),
                       "network.bandwidth: bandwidth 0 must be more"),
    "negative bandwidth": (changed(long_form, "links", 2, "bandwidth", to=-5),
                           "links[2].bandwidth: bandwidth -5 must be"),
    "negative text": (changed(long_form, "links", 2, "bandwidth", to="-5GB/s"), "links[2].bandwidth: "),
    "NaN bandwidth": (changed(long_form, "links", 2, "bandwidth", to=math.nan),
                      "links[2].bandwidth must be a finite number"),
    "infinite latency": (changed(short_form, "network", "latency", to=math.inf), "network.latency must be a finite number"),
    "negative latency": (changed(short_form, "network", "latency", to=-1),
                         "network.latency: time -1 must be zero or more"),
    "zero rate": (changed(long_form, "kinds", "npu", "flops", "float32", to=0),
                  "kinds.npu.flops.float32: compute rate 0"),
    "zero memory": (changed(long_form, "kinds", "npu", "memory", to="0GB"),
                    "kinds.npu.memory: memory '0GB' must be at least 1"),
    "absurd memory": (changed(long_form, "devices", 0, "memory", to=1e30), "devices[0].memory: size 1e+30"),
    "true as a rate": (changed(short_form, "network", "bandwidth", to=True),
                       "network.bandwidth: bandwidth must be a number"),
    "huge whole number": (changed(short_form, "network", "bandwidth", to=10**400),
                          "network.bandwidth is a number that is too"),
    # names
    "duplicate device": (changed(long_form, "devices", 1, "name", to="n0"),
                         "devices[1].name: the name 'n0' is there already, from devices[0].name"),
    "duplicate across forms": (changed(mixed_form, "devices", 1, "name", to="a1"),
                               "the name 'a1' is there already, from hosts[0]"),
    "duplicate host": (changed(short_form, "hosts", 1, "name", to="a-1"),
                       "hosts[1].name: the host 'a-1' is there already"),
    "device named as the network": (changed(mixed_form, "devices", 1, "name", to="network"),
                                    "'network' is there already"),
    "empty name": (changed(long_form, "devices", 0, "name", to=""), "devices[0].name: the name '' must have 1 to 100"),
    "name with an arrow": (changed(long_form, "devices", 2, "name", to="a>b"),
                           "devices[2].name: the name 'a>b' must have no"),
    "host with a space": (changed(long_form, "devices", 2, "host", to="a b"),
                          "devices[2].host: the name 'a b' must have no"),
    "link to an unknown node": (changed(long_form, "links", 3, "to", to="q9"),
                                "links[3].to: there is no device or switch 'q9'"),
    "link to a near name": (changed(long_form, "links", 3, "from", to="g00"),
                            "no device or switch 'g00' (did you mean 'g0'?)"),
    "self link": (changed(long_form, "links", 0, "to", to="n0"), "links[0]: 'n0' is linked to itself"),
    "double link": (changed(long_form, "links", 5, "from", to="g0"), "the link 'g0>s' is there 2 times"),
    "unlinked switch": (changed(long_form, "switches", to=["s", "t"]), "switches[1]: no link reaches the switch 't'"),
    # kinds and presets
    "unknown kind": (changed(short_form, "hosts", 0, "devices", to="4 x A10O-80GB"),
                     "hosts[0].devices: unknown device kind 'A10O-80GB' (did you mean 'A100-80GB'"),
    "unknown kind in a list": (changed(mixed_form, "hosts", 0, "devices", 1, to="T5000"),
                               "hosts[0].devices[1]: unknown device kind"),
    "near own kind": (changed(long_form, "hosts", to=[{"name": "z", "devices": "npuu"}]), "did you mean 'npu'"),
    "kind like a preset": (changed(times_only, "devices", 0, "kind", to="A100-81GB"),
                           "devices[0].kind: unknown device kind"),
    "unknown intra": (changed(short_form, "hosts", 0, "intra", to="nvlnk3"),
                      "hosts[0].intra: unknown link 'nvlnk3' (did you mean"),
    "unknown network": (changed(short_form, "network", to="ethernet99"),
                        "network: unknown link 'ethernet99' (did you mean"),
    "unknown dtype": (changed(long_form, "kinds", "npu", "flops", "fp15", to=1),
                      "kinds.npu.flops.fp15 is not a known dtype"),
    "dtype twice": (changed(long_form, "kinds", "npu", "flops", "bfloat16", to=1),
                    "the rate of bfloat16 is there twice"),
    "rates for a known kind": (changed(long_form, "devices", 2, "flops", to={"float32": 1}),
                               "the kind 'T4' has its own"),
    "two rates for one kind": (changed(long_form, "devices", 2,
                                       to={"name": "g0", "kind": "mine", "flops": {"float32": 1}}),
                               "devices[3].flops and memory_bandwidth differ from devices[2]"),
    # counts
    "no devices": (header(), "there are no devices: add 'hosts:' or 'devices:'"),
    "no devices on a host": (changed(short_form, "hosts", 0, "devices", to=[]), "hosts[0].devices has no device"),
    "zero devices": (changed(short_form, "hosts", 0, "devices", to="0 x T4"),
                     "hosts[0].devices: the count in '0 x T4' must be"),
    "zero hosts": (changed(short_form, "hosts", 0, "count", to=0), "hosts[0].count must be at least 1, not 0"),
    "negative hosts": (changed(short_form, "hosts", 0, "count", to=-2), "hosts[0].count must be at least 1, not -2"),
    "absurd hosts": (changed(short_form, "hosts", 0, "count", to=10**9), f"are more than the limit of {MAX_DEVICES}"),
    "absurd devices": (changed(short_form, "hosts", 0, "devices", to="99999999 x T4"), f"must be 1 to {MAX_DEVICES}"),
    # connections
    "disconnected hosts": (changed(short_form, "network", to=...),
                           "disconnected: 'a4', 'a5', 'a6', 'a7', 'b0', 'b1' cannot be reached from 'a0'"),
    "disconnected device": (changed(long_form, "links", 3, to=...), "disconnected: 'g0' cannot be reached from 'n0'"),
    "one way only": (changed(long_form, "links", 5, to=...), "disconnected: 'x0' cannot reach 'n0'"),
    "no intra": (changed(short_form, "hosts", 1, "intra", to=...),
                 "hosts[1].intra is missing: say how the 2 devices of"),
    # odd values
    "key that is no text": (header(hosts=[{1: 2}]), "hosts[0] has a key that is not plain text"),
    "bytes": (header(name=b"x"), "name is neither text, number, list nor object, but bytes"),
    "half a character": (header(name="\ud800"), "name is text with half a character"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_field(case):
    value, message = BAD[case]
    with pytest.raises(ClusterError) as caught:
        parse_cluster(value, "some.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("some.yaml")
    assert len(str(caught.value)) < 2000


def test_all_problems_come_at_once():
    value = changed(long_form, "devices", 1, "memory", to="80G")
    value["links"][0]["bandwidth"] = "1Gb"
    with pytest.raises(ClusterError, match=r"(?s)devices\[1\]\.memory.*links\[0\]\.bandwidth"):
        parse_cluster(value)


def test_many_problems_are_cut_short():
    value = header(hosts=[{"name": "a", "devices": ["1 x nothing"] * 100_000}])
    with pytest.raises(ClusterError, match="and perhaps more"):
        parse_cluster(value)


def test_deep_nesting_is_refused():
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ClusterError, match="is nested too deeply"):
        parse_cluster(header(hosts=value))


def test_a_value_that_holds_itself_is_refused():
    value = header(hosts=[])
    value["hosts"].append(value)
    with pytest.raises(ClusterError, match="is nested too deeply"):
        parse_cluster(value)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.json", b'{"format": "weft.cluster", "format": 1}', "the key 'format' is there twice"),
    ("a.json", b'{"version": NaN}', "NaN is not a JSON number"),
    ("a.json", b"[" * 100_000, "is nested more than 100 deep"),
    ("a.json", b"\xff\xfe\xff", "is not valid JSON"),
    ("a.json", b"1" * 5000, "is not valid JSON"),
    ("a.json.gz", b"not compressed", "cannot read"),
    ("a.yaml", b"", "must be an object with a 'format' field, not None"),
    ("a.yaml", b"\xff\xfe\xff", "is not valid YAML"),
])
def test_files_that_are_not_even_values(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ClusterError) as caught:
        load_cluster(tmp_path / name)
    assert message in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ClusterError, match="no file"):
        load_cluster(tmp_path / "none.yaml")
    with pytest.raises(ClusterError, match="cannot read"):
        load_cluster(tmp_path)


def test_importing_and_reading_json_needs_no_heavy_module(tmp_path):
    save_cluster(parse_cluster(short_form()), tmp_path / "c.json")
    code = (f"import sys, weft.cluster; weft.cluster.load_cluster({str(tmp_path / 'c.json')!r}); "
            "print([m for m in ('torch', 'yaml', 'numba', 'ortools', 'rich') if m in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
