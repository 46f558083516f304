"""Presets: all that were promised, sane figures, forgiving names."""

from __future__ import annotations

import pytest

from weft.base.errors import ClusterError
from weft.cluster import presets
from weft.cluster.presets import find_kind, find_link, kind_presets, lookup_kind

GPUS = ("V100-16GB", "V100-32GB", "P100", "T4", "1080Ti", "RTX3090", "RTX4090", "A10", "L4", "A100-40GB", "A100-80GB",
        "H100", "H200", "B200", "GH200-96GB")
LINKS = (*(f"nvlink{i}" for i in range(1, 6)), "pcie3", "pcie4", "pcie5", "loopback",
         *(f"ethernet{i}" for i in (1, 10, 25, 40, 100, 200, 400)), *(f"infiniband-{i}" for i in ("edr", "hdr", "ndr")))


@pytest.mark.parametrize("name", GPUS)
def test_gpus_are_described_completely(name):
    preset = find_kind(name)
    kind = preset.kind
    assert kind.name == name
    assert kind.type == "gpu"
    assert set(kind.flop_per_s) >= {"float64", "float32", "float16", "bfloat16"}
    assert 1e11 < kind.flop_per_s["float64"] <= kind.flop_per_s["float32"] <= kind.flop_per_s["float16"] < 3e15
    assert 10**10 < kind.memory_bytes < 2 * 10**11
    assert 2e11 < kind.memory_bytes_per_s < 1e13
    assert 1e-6 < kind.overhead_s < 1e-4
    assert "NVIDIA" in kind.source
    find_link(preset.link)


def test_memory_in_the_name_is_the_memory():
    for name in ("V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "GH200-96GB"):
        assert f"{find_kind(name).kind.memory_bytes // 10**9}GB" == name.split("-")[1]


def test_every_preset_says_where_its_figures_are_from():
    assert all(preset.kind.source for preset in kind_presets().values())
    assert all(preset.source for preset in presets.link_presets().values())
    assert {preset.kind.type for preset in kind_presets().values()} == {"gpu", "cpu"}


@pytest.mark.parametrize("name", LINKS)
def test_links_are_there(name):
    preset = find_link(name)
    assert preset.name == name
    assert 0 < preset.latency_s < 1e-3
    assert preset.bytes_per_s > 1e8


def test_link_rates_are_per_direction():
    assert find_link("nvlink3").bytes_per_s / find_link("nvlink3").lanes == 25e9
    assert find_link("ethernet100").bytes_per_s == 12.5e9
    assert find_link("infiniband-ndr").bytes_per_s == 50e9
    assert find_link("pcie4").bytes_per_s == pytest.approx(16e9 * 16 / 8 * 128 / 130, rel=1e-3)


@pytest.mark.parametrize(("text", "name"), [
    ("A100", "A100-80GB"), ("a100 80gb", "A100-80GB"), ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
    ("Tesla V100-SXM2-32GB", "V100-32GB"), ("GTX 1080 Ti", "1080Ti"), ("NVIDIA GeForce RTX 3090", "RTX3090"),
    ("NVIDIA H100 80GB HBM3", "H100"), ("nvidia h200", "H200"), ("rtx_4090", "RTX4090"), ("Tesla T4", "T4"),
    ("NVIDIA GH200 480GB", "GH200-96GB"), ("CPU", "cpu"),
])
def test_names_are_forgiving(text, name):
    assert find_kind(text).kind.name == name


def test_unknown_names_are_answered_with_similar_ones():
    with pytest.raises(ClusterError, match=r"unknown device kind 'A100-8GB' \(did you mean 'A100-80GB'"):
        find_kind("A100-8GB")
    with pytest.raises(ClusterError, match=r"unknown link 'ethernet11' \(did you mean 'ethernet1'"):
        find_link("ethernet11")
    assert lookup_kind("no such thing") is None
