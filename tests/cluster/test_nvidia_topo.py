"""Topologies as ``nvidia-smi topo -m`` prints them."""

from __future__ import annotations

import itertools

import pytest

from weft.base.errors import ClusterError
from weft.cluster.nvidia_topo import parse_topo

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def nvswitch_text(num_gpus: int = 8) -> str:
    gpus = [f"GPU{i}" for i in range(num_gpus)]
    lines = ["\t\x1b[4m" + "\t".join([*gpus, "mlx5_0", "mlx5_1", "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for i, gpu in enumerate(gpus):
        cells = [" X " if i == j else "NV12" for j in range(num_gpus)]
        lines.append("\t".join([gpu, *cells, "PXB", "SYS", "48-63,176-191", "3"]))
    lines.append("\t".join(["mlx5_0", *["PXB"] * num_gpus, " X ", "SYS"]))
    lines.append("\t".join(["mlx5_1", *["SYS"] * num_gpus, "SYS", " X "]))
    return "\n".join(lines) + "\n" + LEGEND


PCIE_BOX = """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PIX     SYS     SYS     0-15            0               N/A
GPU1    PIX      X      SYS     SYS     0-15            0               N/A
GPU2    SYS     SYS      X      PHB     16-31           1               N/A
GPU3    SYS     SYS     PHB      X      16-31           1               N/A
""" + LEGEND

# Eight V100s, six NVLinks each, not all pairs joined
CUBE_MESH = """
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tCPU Affinity
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\t0-19
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\t0-19
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\t0-19
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\t0-19
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\t20-39
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\t20-39
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\t20-39
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \t20-39
"""


def test_eight_a100_behind_a_switch():
    cluster = parse_topo(nvswitch_text(), kind="A100-80GB")
    assert [device.name for device in cluster.devices] == [f"GPU{i}" for i in range(8)]
    assert {device.kind for device in cluster.devices} == {"A100-80GB"}
    assert cluster.switches == ("nvswitch0",)
    for a, b in itertools.permutations(range(8), 2):
        assert cluster.route(a, b).bytes_per_s == 300e9
        assert cluster.route(a, b).latency_s == pytest.approx(2e-6)
    assert not set(cluster.transfer_resources(0, 1)) & set(cluster.transfer_resources(2, 3))
    assert set(cluster.transfer_resources(0, 1)) & set(cluster.transfer_resources(0, 3))


def test_four_gpus_on_pcie_with_two_sockets():
    cluster = parse_topo(PCIE_BOX, kind="RTX3090")
    near, bridge, far = cluster.route(0, 1), cluster.route(2, 3), cluster.route(0, 2)
    assert near.bytes_per_s == bridge.bytes_per_s == 31.5e9
    assert far.bytes_per_s == 20.8e9
    assert far.latency_s > near.latency_s
    crossing, other, back = (set(cluster.transfer_resources(*pair)) for pair in ((0, 2), (1, 3), (3, 1)))
    assert crossing & other, "transfers between the sockets share the interconnect"
    assert not crossing & back, "but not with the other direction"
    assert not set(cluster.transfer_resources(0, 1)) & crossing - set(cluster.transfer_resources(0, 2))
    assert not set(cluster.transfer_resources(1, 0)) & crossing, "inside a socket nothing is shared with them"


def test_partly_linked_gpus_go_over_the_sockets_and_not_through_other_gpus():
    cluster = parse_topo(CUBE_MESH, kind="V100-16GB")
    assert cluster.route(0, 1).bytes_per_s == 25e9
    assert cluster.route(0, 3).bytes_per_s == 50e9
    assert len(cluster.route(0, 4).links) == 1
    far = cluster.route(0, 5)
    assert far.bytes_per_s == 15.75e9
    assert cluster.links[far.links[0]].target == "sys0"
    assert set(cluster.transfer_resources(0, 5)) & set(cluster.transfer_resources(6, 1)), "one medium for all of SYS"


def test_nested_levels_share_the_link_upwards():
    text = PCIE_BOX.replace("SYS     SYS", "PXB     PXB").replace("PHB", "PIX")
    cluster = parse_topo(text, kind="T4")
    assert cluster.switches == ("pix0", "pix1", "pxb0")
    assert set(cluster.transfer_resources(0, 2)) & set(cluster.transfer_resources(1, 3))


def test_one_gpu():
    cluster = parse_topo("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t0\n")
    assert (cluster.num_devices, cluster.links) == (1, ())
    assert cluster.devices[0].kind == "H100"


@pytest.mark.parametrize(("text", "kind", "message"), [
    ("", "H100", "this is no output of 'nvidia-smi topo -m'"),
    ("hello\nworld", "H100", "this is no output of 'nvidia-smi topo -m'"),
    (PCIE_BOX.replace("PHB", "FOO"), "H100", "the topology has 'FOO' for GPU2 and GPU3"),
    (PCIE_BOX.replace("PIX", "NV0"), "H100", "the topology has 'NV0' for GPU0 and GPU1"),
    (PCIE_BOX.replace("GPU3    SYS     SYS     PHB", "GPU3    SYS     SYS     PXB"), "H100",
     "the topology says PHB from GPU2 to GPU3 but PXB back"),
    ("\n".join(PCIE_BOX.splitlines()[:4]), "H100", "the topology has no row of 4 cells for GPU2, GPU3"),
    (nvswitch_text(), "T4", "says NV12 between GPU0 and GPU1, but the kind 'T4' has 0 NVLinks"),
    (nvswitch_text(), "V100-16GB", "but the kind 'V100-16GB' has 6 NVLinks"),
    (nvswitch_text(), "A1000", "unknown device kind 'A1000'"),
    ("\tGPU0\tGPU0\tCPU Affinity\n", "H100", "names a column twice"),
])
def test_bad_texts(text, kind, message):
    with pytest.raises(ClusterError) as caught:
        parse_topo(text, kind=kind)
    assert message in str(caught.value)
