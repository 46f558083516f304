"""The public way to run a plan: started processes, one result or one message, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.run.plans import MODELS, pipeline_plan, replicated_plan, source_of, traced
from weft.base.errors import InputError, ModelError, PlanError, RunError
from weft.base.scratch import sweep
from weft.plan.orders import one_f_one_b
from weft.plan.plan import save_plan
from weft.run import launch
from weft.run.__main__ import main
from weft.run.launch import RankLost, run_plan
from weft.run.prepare import Tracer, lower_to_run
from weft.run.result import RunOptions
from weft.run.worker import check_world

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]
MODEL = f"{MODELS}:tiny_gpt"
END_LIMIT_S = 15.0


@pytest.fixture(scope="module")
def graph():
    return traced("tiny_gpt").graph


@pytest.fixture(scope="module")
def data_parallel(graph):
    return replicated_plan(graph, [[(0, 0.5), (1, 0.5)]], microbatches=2, batch=8, num_devices=2)


@pytest.fixture
def started(monkeypatch):
    """The processes that the launcher starts."""
    children = []
    real = subprocess.Popen

    def record(*args, **kwargs):
        children.append(real(*args, **kwargs))
        return children[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", record)
    yield children
    for child in children:
        child.kill()


def test_run_plan_returns_losses_times_timeline_and_gradients(graph, tmp_path, started):
    """With a device named for each rank; the other tests name one for all."""
    plan = pipeline_plan(graph, [0, 1], one_f_one_b(2, 4), microbatches=4, optimizer="sgd")
    result = run_plan(plan, MODEL, keep=tmp_path / "out", options=RunOptions(
        steps=2, warmup=1, dtype="float64", device="cpu,cpu", verify=True, gradients=True))
    assert result.verification is not None
    assert result.verification.passed
    assert len(result.losses) == 3
    assert result.losses[0] > result.losses[1] > result.losses[2]
    assert len(result.step_times_s) == 2
    assert min(result.step_times_s) > 0
    assert len(result.cpu_s) == 2
    assert result.timeline is not None
    assert result.timeline.kind == "measured"
    assert result.timeline.devices == ("d0", "d1")
    assert "F s1 mb 3" in result.timeline.labels
    source = source_of("tiny_gpt")
    module = source.build()
    module(*source.inputs(8, 0)).backward()
    expected = {name: value.grad.numpy() for name, value in module.named_parameters()}
    assert result.gradients is not None
    assert result.gradients.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(result.gradients[name], value, rtol=1e-9, atol=1e-14)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"result.json", "timeline.json.gz", "gradients.npz"}
    assert [child.returncode for child in started] == [0, 0]


@pytest.mark.parametrize(("place", "doing"), [
    ("init", r"connecting to the other ranks"), ("B", r"at instruction 2 \(B s0\.1 mb 0\) of step 0"),
    ("all_reduce", r"at instruction 4 \(all_reduce 29 parameters\) of step 0")])
def test_a_killed_rank_ends_all_with_one_message(data_parallel, started, monkeypatch, place, doing):
    monkeypatch.setenv("WEFT_TEST_FAULT", f"1:{place}")
    deaths: list[float] = []
    watcher = threading.Thread(target=_note_first_death, args=(started, deaths), daemon=True)
    watcher.start()
    with pytest.raises(RunError) as caught:
        run_plan(data_parallel, MODEL, options=RunOptions(dtype="float64"))
    ended = time.monotonic()
    watcher.join(5)
    assert re.search(rf"^rank 1 \(d1\) was killed by SIGKILL while {doing}; the other 1 rank", str(caught.value))
    assert ended - deaths[0] < END_LIMIT_S
    assert all(child.returncode is not None for child in started)


def _note_first_death(children, deaths):
    while not deaths:
        for child in list(children):
            try:
                state = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                state = "gone"
            if state in ("Z", "gone"):
                deaths.append(time.monotonic())
        time.sleep(0.02)


@pytest.mark.parametrize(("fault", "said"), [("1:B", "is gone"), ("1:B!stop", r"is stopped \(by SIGSTOP or a debugger\): .*")])
def test_without_a_launcher_the_other_rank_ends_too(data_parallel, tmp_path, fault, said):
    """Ranks as ``torchrun`` starts them; the one killed or stopped is named by the other, once, and does not stay."""
    save_plan(data_parallel, tmp_path / "plan.json")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WEFT_TEST_FAULT": fault, "WEFT_BEAT_LIMIT_S": "2.5"}
    command = [sys.executable, "-m", "weft.run", str(tmp_path / "plan.json"), MODEL, "--dtype", "float64"]
    ranks = [subprocess.Popen(command, cwd=ROOT, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
             for rank in range(2)]
    try:
        ranks[1].wait(timeout=90)
        died = time.monotonic()
        _, text = ranks[0].communicate(timeout=30)
        assert time.monotonic() - died < END_LIMIT_S
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode == RunError.exit_code
    assert text.count("weft:") == 1
    assert re.search(rf"rank 1 {said}; it was at instruction 2 \(B s0\.1 mb 0\) of step 0", text)


@pytest.mark.parametrize(("fault", "message"), [
    ("1:B@2!stop", r"rank 1 \(d1\) is stopped \(by SIGSTOP or a debugger\): no sign of life for \d+ s"),
    ("0:B@2!hang", r"rank 0 \(d0\) hangs: for \d+ s it has not got on, and it waits for no other rank")])
def test_a_rank_that_hangs_is_named_and_not_the_one_that_waits_for_it(data_parallel, started, monkeypatch, fault, message):
    monkeypatch.setenv("WEFT_TEST_FAULT", fault)
    monkeypatch.setenv("WEFT_BEAT_LIMIT_S", "2.5")
    monkeypatch.setenv("WEFT_STEP_LIMIT_S", "2.5")
    with pytest.raises(RankLost) as caught:
        run_plan(data_parallel, MODEL, options=RunOptions(dtype="float64", steps=9))
    rank = int(fault[0])
    assert re.search(rf"^{message}; it was at instruction 2 \(B s0\.{rank} mb 0\) of step 2; all 2 ranks were ended$", str(caught.value))
    assert caught.value.device == f"d{rank}"
    assert all(child.returncode is not None for child in started)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_launcher(data_parallel, tmp_path, monkeypatch, how):
    save_plan(data_parallel, tmp_path / "plan.json")
    launcher = subprocess.Popen([sys.executable, "-m", "weft.run", str(tmp_path / "plan.json"), MODEL], cwd=ROOT,
                                stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        children = _wait_for(lambda: _children_of(launcher.pid, 2), 30)
        launcher.send_signal(how)
        launcher.wait(timeout=END_LIMIT_S)
        _wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), END_LIMIT_S)
        assert launcher.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        sweep("weft-run-")  # as the next run does when it begins
        assert not list(tmp_path.glob("weft-run-*"))
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize(("command", "how"), [(("weft.cli.main", "run"), signal.SIGHUP), (("weft.run",), signal.SIGTERM)])
def test_a_run_that_is_told_to_end_leaves_nothing_behind(data_parallel, tmp_path, command, how):
    save_plan(data_parallel, tmp_path / "plan.json")
    launcher = subprocess.Popen([sys.executable, "-m", *command, str(tmp_path / "plan.json"), MODEL, "--steps", "100000"],
                                cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        children = _wait_for(lambda: _children_of(launcher.pid, 2), 60)
        assert list(tmp_path.glob("weft-run-*"))
        launcher.send_signal(how)
        assert launcher.wait(timeout=END_LIMIT_S) == 128 + how
        _wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), END_LIMIT_S)
        assert not list(tmp_path.glob("weft-run-*"))
    finally:
        launcher.kill()
        launcher.communicate()


def _children_of(pid: int, count: int) -> list[int]:
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found if len(found) == count else []


def _wait_for(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def test_what_is_wrong_with_the_model_arrives_as_a_model_error(data_parallel, started):
    with pytest.raises(ModelError, match="no function 'other'"):
        run_plan(data_parallel, f"{MODELS}:other")
    assert all(child.returncode is not None for child in started)


def test_command_line_reports_bad_input_with_its_code(tmp_path, capsys):
    assert main([str(tmp_path / "none.json"), "gpt2-tiny"]) == 2
    assert "none.json" in capsys.readouterr().err


def test_world_size_that_does_not_fit(data_parallel):
    with pytest.raises(RunError, match=r"the plan is for 2 devices \(d0, d1\) but there are 3 processes: start 2"):
        check_world(data_parallel, 3)


def test_options_that_make_no_sense(data_parallel):
    with pytest.raises(InputError, match="steps"):
        run_plan(data_parallel, MODEL, options=RunOptions(steps=0))


def test_plan_for_another_model_is_refused(data_parallel):
    tracer = Tracer(source_of("tied_gpt"))
    with pytest.raises(PlanError, match="the plan was made for another model"):
        lower_to_run(data_parallel, tracer)
