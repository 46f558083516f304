"""Tables for people."""

from __future__ import annotations

from tests.cluster.worlds import header, short_form, times_only
from weft.cluster.cluster_file import parse_cluster
from weft.show.cluster_tables import bandwidth_matrix, device_rows, summarize


def test_devices_one_by_one():
    table = device_rows(parse_cluster(short_form()))
    assert table.header[:5] == ("device", "kind", "host", "memory", "memory bandwidth")
    assert len(table.rows) == 10
    assert table.rows[0][:5] == ("a0", "A100-80GB", "a-0", "74.51 GiB", "2.039 TB/s")
    assert dict(zip(table.header, table.rows[0], strict=True))["bfloat16"] == "312 TFLOP/s"
    assert table.title.startswith("cluster: 10 devices, 3 hosts, 26 links, contention link, digest ")


def test_bandwidth_between_devices():
    cluster = parse_cluster(short_form())
    table = bandwidth_matrix(cluster)
    assert table.header == ("", *(row[0] for row in table.rows))
    assert table.rows[0][:3] == ("a0", "-", "300 GB/s")
    assert table.rows[0][10] == "12.5 GB/s"
    assert table.rows[8][9:] == ("-", "31.5 GB/s")


def test_large_clusters_are_shown_by_group():
    hosts = [{"name": "a", "count": 3, "devices": ["6 x H100", "2 x T4"], "intra": "nvlink4"}]
    cluster = parse_cluster(header(hosts=hosts, network="ndr"))
    assert [row[0] for row in device_rows(cluster).rows][:2] == ["a0..a5 (6)", "a6..a7 (2)"]
    table = bandwidth_matrix(cluster)
    assert len(table.rows) == 6
    assert "not shown" not in table.title
    assert table.rows[0][1:4] == ("450 GB/s", "450 GB/s", "50 GB/s")


def test_groups_beyond_the_limit_are_counted():
    hosts = [{"name": "a", "count": 128, "devices": "8 x H100", "intra": "nvlink4"}]
    cluster = parse_cluster(header(hosts=hosts, network="ndr"))
    assert "112 more not shown" in bandwidth_matrix(cluster).title
    assert len(bandwidth_matrix(cluster).rows) == 16


def test_clusters_without_rates_and_links():
    cluster = parse_cluster(times_only())
    assert device_rows(cluster).rows[0] == ("d0", "d0", "d0", "14 B", "-")
    assert bandwidth_matrix(cluster).rows == (("d0", "-", "-"), ("d1", "-", "-"))
    assert summarize(cluster).startswith("cluster: 2 devices, 2 hosts, 0 links, contention port")
