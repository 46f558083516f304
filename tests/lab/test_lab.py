"""Real hosts in namespaces: rates hold, a plan runs as on one process, and nothing stays behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.lab import spaces
from benchmarks.lab.lab import Lab
from benchmarks.lab_runs import model_spec, star
from weft.base.errors import RunError
from weft.cost.costs import estimate_costs
from weft.model.load import trace_model
from weft.plan.plan import Optimizer
from weft.run.result import RunOptions
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.baselines import data_parallel

ROOT = Path(__file__).resolve().parents[2]
WHY_NOT = spaces.why_not()
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
LIMIT_S = 15.0

RECEIVE = """
import socket, struct, time
connection, _ = socket.create_server(("", 5000)).accept()
received = b""
while data := connection.recv(1 << 16):
    received += data
print(len(received), time.monotonic() - struct.unpack("d", received[:8])[0])
"""
SEND = """
import socket, struct, sys, time
for _ in range(200):
    try:
        connection = socket.create_connection((sys.argv[1], 5000))
        break
    except OSError:
        time.sleep(0.05)
connection.sendall(struct.pack("d", time.monotonic()) + bytes(999_992))  # all hosts have one clock
"""
HOLD = """
import sys
from benchmarks.lab.lab import Lab
from benchmarks.lab_runs import star
with Lab(star(2, "1Gbit/s")) as lab:
    print(lab.prefix, flush=True)
    lab.run(lambda host: ["sleep", "60"])
"""


def test_a_link_lets_through_its_rate_and_no_more():
    with Lab(star(2, "40Mbit/s")) as lab:
        first, second = lab.topology.hosts
        words = lab.run(lambda host: [sys.executable, "-c", RECEIVE] if host == first else
                        [sys.executable, "-c", SEND, first.address], timeout_s=30)
        assert lab.prefix in " ".join(spaces.existing())
    count, seconds = words[first.name].split()
    assert int(count) == 1_000_000
    assert int(count) / float(seconds) < 1.1 * 40e6 / 8
    assert words[second.name] == ""
    assert spaces.existing(lab.prefix) == []


def test_a_plan_runs_on_two_hosts_as_in_one_process():
    model = model_spec("small")
    lab = Lab(star(2, "1Gbit/s"))
    graph = trace_model(model, batch=4).graph
    plan = data_parallel(Problem(graph=graph, cluster=lab.cluster, costs=estimate_costs(graph, lab.cluster),
                                 options=PlanOptions(batch=8, dtype="float64", optimizer=Optimizer(kind="sgd"))), 1)
    with lab:
        result = lab.run_plan(plan, model, options=RunOptions(steps=2, verify=True, dtype="float64"), timeout_s=90)
    assert result.num_ranks == 2
    assert result.verification is not None
    assert result.verification.passed
    assert result.timeline is not None
    assert result.timeline.devices == ("a0", "b0")
    assert spaces.existing(lab.prefix) == []


def test_a_program_that_fails_ends_the_others_with_its_words():
    with Lab(star(2, "1Gbit/s")) as lab, pytest.raises(RunError, match=r"host 'b' ended with exit code 3; .* broken"):
        lab.run(lambda host: ["sh", "-c", "echo is broken; exit 3"] if host.name == "b" else ["true"])
    assert spaces.existing(lab.prefix) == []


def test_time_that_is_up_ends_all():
    with Lab(star(2, "1Gbit/s")) as lab:
        with pytest.raises(RunError, match=r"not done after 0\.5 s"):
            lab.run(lambda host: ["sleep", "60"], timeout_s=0.5)
        assert lab.run(lambda host: ["echo", host.name]) == {"a": "a\n", "b": "b\n"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(how):
    owner = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                             cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert owner.stdout is not None
        prefix = owner.stdout.readline().strip()
        assert prefix.startswith(spaces.PREFIX)
        _wait_for(lambda: any(spaces._processes(name) for name in spaces.existing(prefix)))
        sleepers = [pid for name in spaces.existing(prefix) for pid in spaces._processes(name)]
        owner.send_signal(how)
        owner.wait(timeout=LIMIT_S)
        if how == signal.SIGKILL:
            assert spaces.existing(prefix)
            assert set(spaces.clean()) >= {f"{prefix}h0", f"{prefix}h1", f"{prefix}s0"}
        assert spaces.existing(prefix) == []
        assert not list(Path(tempfile.gettempdir()).glob(f"{prefix}*"))
        _wait_for(lambda: all(spaces._is_ended(pid) for pid in sleepers))
    finally:
        owner.kill()
        owner.communicate()
        spaces.remove(prefix)


def _wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
