"""This machine as a cluster; nothing is asserted about how fast it is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import pytest

from weft.base.errors import ClusterError
from weft.cluster import probe
from weft.cluster import probe as link_probe
from weft.cluster.cluster_file import parse_cluster, to_json


@pytest.mark.timeout(120)
def test_two_local_processes():
    import torch

    threads = torch.get_num_threads()
    cluster = probe.probe(2, device="cpu", time_limit_s=90)
    assert torch.get_num_threads() == threads
    assert [device.name for device in cluster.devices] == ["cpu0", "cpu1"]
    kind = cluster.kind_of(0)
    assert set(kind.flop_per_s) == {"float64", "float32", "float16", "bfloat16"}
    assert kind.flop_per_s["float32"] > 1e8
    assert kind.memory_bytes_per_s > 1e8
    assert kind.memory_bytes == probe.memory_bytes() // 2
    assert 0 < kind.overhead_s < 1e-3
    assert kind.source.startswith("measured on one thread")
    assert {link.origin for link in cluster.links} == {"measured between two processes over gloo"}
    assert cluster.route(0, 1).bytes_per_s > 1e6
    assert parse_cluster(to_json(cluster)) == cluster


@pytest.mark.timeout(60)
def test_a_link_measurement_that_hangs_is_ended(monkeypatch, tmp_path, caplog):
    started = []
    command = [sys.executable, "-c", "import time; time.sleep(60)"]

    def start(rank, folder, time_limit_s):
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(link_probe, "_start", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begin = time.monotonic()
    devices = parse_cluster({"format": "weft.cluster", "version": 1, "hosts": [{"name": "a", "devices": "2 x cpu"}]})
    links = probe._local_links(devices.devices, "a", 0.5)
    assert time.monotonic() - begin < 20
    assert links[0].origin == ("preset loopback, because measuring failed: the link measurement took longer than 0.5 s")
    assert links[0].bytes_per_s == 2e9
    assert "could not be measured" in caplog.text
    assert all(process.returncode is not None for process in started), "no process is left"
    assert os.listdir(tmp_path) == [], "no file is left"


@pytest.mark.timeout(60)
def test_a_link_measurement_that_fails_says_why(monkeypatch):
    def start(rank, folder, time_limit_s):
        code = "import sys; sys.exit('no interface')" if rank else "import time; time.sleep(60)"
        with open(folder / f"stderr{rank}", "wb") as stderr:
            return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr)

    monkeypatch.setattr(link_probe, "_start", start)
    with pytest.raises(ClusterError, match=r"failed in rank 1 \(exit code 1\): no interface"):
        link_probe.measure_link(time_limit_s=50)


@pytest.mark.parametrize("output", [b"", b"hello", b"[]", b'{"bytes_per_s": 1}', b'{"bytes_per_s": 0, "latency_s": 0}'])
def test_a_result_that_makes_no_sense_is_refused(output):
    with pytest.raises(ClusterError, match="gave no"):
        link_probe._read_result(output)


def test_bad_options():
    with pytest.raises(ClusterError, match="must be 1 to 65536, not 0"):
        probe.probe(0)
    with pytest.raises(ClusterError, match="must be 'auto', 'cpu' or 'cuda', not 'tpu'"):
        probe.probe(device="tpu")


def test_cuda_without_a_gpu_is_refused():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ClusterError, match="PyTorch sees no GPU"):
        probe.probe(device="cuda")


def test_importing_the_probe_does_not_import_torch():
    code = "import sys, weft.cluster.probe; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"
