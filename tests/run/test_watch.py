"""Without a launcher: whoever misses a rank says so once, and all ranks end."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch.distributed as dist

from weft.run import watch as watch_module
from weft.run.status import Milestone, StatusLine, create_status_file, read_status_file
from weft.run.watch import Watch

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                             master_listen_fd=listener.detach())


def start(store, rank, ended, status=None):
    event = threading.Event()

    def end(code):
        ended.append((rank, code))
        event.set()

    watch = Watch(rank=rank, num_ranks=2, status=status or StatusLine(), store=store, end=end)
    watch.start()
    return watch, event


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watch_module, "BEAT_S", 0.05)
    monkeypatch.setattr(watch_module, "SILENCE_S", 0.5)
    monkeypatch.setattr(watch_module, "START_S", 1.0)


def test_a_silent_rank_is_named_once_and_both_end(store, capfd):
    ended: list[tuple[int, int]] = []
    line = StatusLine()
    line.name_instructions(lambda rank: ("F s0 mb 0", "send s0>s1 mb 0"))
    line.cell[0], line.cell[1] = 1, 3
    dist.PrefixStore("weft-watch", store).set("beat/1", "7|at instruction 4 (B s1 mb 0) of step 3")
    watch, event = start(store, 0, ended, line)
    assert event.wait(20)
    assert ended == [(0, 4)]
    assert capfd.readouterr().err == "weft: rank 1 is gone; it was at instruction 4 (B s1 mb 0) of step 3\n"
    _, other = start(store, 1, ended)
    assert other.wait(20)
    assert capfd.readouterr().err == ""
    assert watch.verdict() == "rank 1 is gone; it was at instruction 4 (B s1 mb 0) of step 3"


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
