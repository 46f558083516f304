"""Without a launcher: whoever misses a rank says so once, and all ranks end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from weft.run import watch as watch_module
from weft.run.status import Limits, Milestone, StatusLine, create_status_file, process_state, read_status_file
from weft.run.watch import Watch

pytestmark = pytest.mark.timeout(60)
LABELS = ("F s0 mb 0", "send s0>s1 mb 0", "recv s1>s0 mb 0", "F s1 mb 0", "B s1 mb 0")
GONE = "rank 1 hangs: no sign of life for 1 s; it was at instruction 4 (B s1 mb 0) of step 3"


@pytest.fixture
def store():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                             master_listen_fd=listener.detach())


def start(store, rank, ended, status=None, *, neighbours=(), still_s=30.0):
    event = threading.Event()

    def end(code):
        ended.append((rank, code))
        event.set()

    watch = Watch(rank=rank, num_ranks=2, status=status or StatusLine(rank=rank), store=store, end=end, neighbours=neighbours,
                  limits=Limits(silence_s=0.5, still_s=still_s))
    watch.start()
    return watch, event


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watch_module, "BEAT_S", 0.05)


def test_a_silent_rank_is_named_once_and_both_end(store, capfd):
    ended: list[tuple[int, int]] = []
    dist.PrefixStore("weft-watch", store).set("beat/1", "4 3 99 4 0 -1 7 50|at instruction 4 (B s1 mb 0) of step 3")
    watch, event = start(store, 0, ended)
    assert event.wait(20)
    assert ended == [(0, 4)]
    assert capfd.readouterr().err == f"weft: {GONE}\n"
    _, other = start(store, 1, ended)
    assert other.wait(20)
    assert capfd.readouterr().err == ""
    assert watch.verdict() == GONE


def test_ranks_that_end_in_order_alarm_nobody(store, capfd):
    ended: list[tuple[int, int]] = []
    first, _ = start(store, 0, ended)
    second, _ = start(store, 1, ended)
    time.sleep(0.3)
    second.stop()
    time.sleep(1.2)
    assert ended == []
    first.stop()
    assert capfd.readouterr().err == ""
    assert first.verdict(patience_s=0.1) is None


@pytest.fixture
def lines(tmp_path):
    """The lines of two ranks of this machine, both at their first message."""
    create_status_file(tmp_path / "status", 2)
    found = [StatusLine(tmp_path / "status", rank) for rank in range(2)]
    for line in found:
        line.name_instructions(lambda rank: LABELS)
        line.cell[0], line.cell[1], line.cell[3] = 2, 5, 6
    return found


def test_the_rank_that_hangs_is_named_and_not_the_one_that_waits_for_it(store, lines, capfd):
    ended: list[tuple[int, int]] = []
    lines[0].begin_wait(2)
    watches = [start(store, rank, ended, lines[rank], neighbours=(0, 1), still_s=0.4) for rank in range(2)]
    for line in lines:
        line.is_cpu = False
    assert all(event.wait(20) for _, event in watches)
    assert sorted(ended) == [(0, 4), (1, 4)]
    text = capfd.readouterr().err
    assert text.startswith("weft: rank 1 hangs: for ")
    assert text.endswith("s it has not got on, and it waits for no other rank; it was at instruction 2 (recv s1>s0 mb 0) of step 5\n")


def test_ranks_that_wait_for_each_other_are_all_named(store, lines, capfd):
    ended: list[tuple[int, int]] = []
    lines[0].begin_wait(2)
    lines[1].cell[0] = 1
    lines[1].begin_wait(1)
    events = [start(store, rank, ended, lines[rank], neighbours=(0, 1), still_s=0.4)[1] for rank in range(2)]
    assert all(event.wait(20) for event in events)
    text = capfd.readouterr().err
    assert "rank 1 is the furthest behind, at instruction 1 (send s0>s1 mb 0) of step 5, waiting for other ranks; rank 0 at" in text


def test_a_stopped_process_is_named_and_ended(store, lines, capfd):
    """Rank 1 is a process that stops; torchrun alone would wait for it for another 30 seconds."""
    ended: list[tuple[int, int]] = []
    child = subprocess.Popen(["sleep", "60"])
    try:
        lines[1].cell[2], lines[1].cell[6] = child.pid, 1
        dist.PrefixStore("weft-watch", store).set("beat/1", " ".join(map(str, lines[1].read())) + "|")
        os.kill(child.pid, signal.SIGSTOP)
        _, event = start(store, 0, ended, lines[0], neighbours=(0, 1))
        assert event.wait(20)
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
    assert capfd.readouterr().err == ("weft: rank 1 is stopped (by SIGSTOP or a debugger): no sign of life for 1 s; it was at "
                                      "instruction 2 (recv s1>s0 mb 0) of step 5\n")
    assert process_state(child.pid) == "gone"


def test_a_rank_beats_before_its_first_turn_is_over(store, lines, monkeypatch):
    """Until then it counts as starting up, which may take a minute: a rank that is stopped in its first second."""
    monkeypatch.setattr(watch_module, "BEAT_S", 30.0)
    watch, _ = start(store, 0, [], lines[0], neighbours=(0, 1))
    deadline = time.monotonic() + 10
    while lines[1].read(0).beat == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines[1].read(0).beat == 1
    watch.stop()


def test_status_lines_are_readable_from_outside(tmp_path):
    path = tmp_path / "status"
    create_status_file(path, 3)
    lines = [StatusLine(path, rank) for rank in range(3)]
    assert read_status_file(path, 2) == "starting up"
    lines[1].set(Milestone.TRACING)
    lines[2].name_instructions(lambda rank: ("F s0 mb 0", "send s0>s1 mb 0"))
    lines[2].cell[0], lines[2].cell[1] = 1, 5
    assert read_status_file(path, 0) == "starting up"
    assert read_status_file(path, 1) == "tracing the model"
    assert read_status_file(path, 2) == "at instruction 1 (send s0>s1 mb 0) of step 5"
    assert lines[0].describe(1) == "tracing the model"
    assert not lines[0].has_died(1)


@pytest.mark.timeout(60)
def test_a_script_that_nobody_keeps_from_ctrl_c_ends_by_it_after_its_exit_functions():
    """It could abort instead, while libraries were torn down, and torchrun told that."""
    script = ("import atexit, os, signal, threading\n"
              "from weft.run.watch import end_by_ctrl_c_at_once\n"
              "end_by_ctrl_c_at_once()\n"
              "atexit.register(print, 'put away')\n"
              "class Torn:\n"
              "    def __del__(self):\n"
              "        os.abort()\n"
              "kept = Torn()\n"
              "signal.raise_signal(signal.SIGINT)\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "put away\n"
    assert "KeyboardInterrupt" in done.stderr
