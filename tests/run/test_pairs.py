"""Messages on a queue for each pair of ranks and direction, as nccl needs them, and what is made and broken off there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from weft.run import lane as lane_module
from weft.run import transport as transport_module
from weft.run.lane import Lane
from weft.run.status import StatusLine
from weft.run.transport import Transport, _place_of_other, _turn

PAIRS = ((0, 1), (1, 0))


def bare(rank: int, num_ranks: int, device: str) -> Transport:
    """Return a transport that is connected to nobody."""
    transport = object.__new__(Transport)
    transport.rank, transport.num_ranks, transport.device, transport.staging = rank, num_ranks, torch.device(device), None
    transport.in_pairs, transport._timeout_s, transport._is_adopted, transport.status = True, 20.0, False, StatusLine()
    for name in ("_groups", "_exchange_groups", "_lane_groups", "_pairs", "_lane_pairs"):
        setattr(transport, name, {})
    return transport


@pytest.fixture
def two() -> list[Transport]:
    """Give the transports of two ranks, which are threads, with a gloo group for each direction."""
    store, made = dist.HashStore(), [bare(rank, 2, "cpu") for rank in range(2)]

    def connect(rank: int) -> None:
        for pair in PAIRS:
            made[rank]._pairs[pair] = dist.ProcessGroupGloo(dist.PrefixStore(str(pair), store), rank, 2,
                                                            timedelta(seconds=20))

    on_both(connect)
    return made


def on_both(function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2), timeout=30))


@pytest.mark.timeout(60)
def test_messages_are_matched_in_order_whatever_their_tags(two):
    def run(rank: int) -> list[float]:
        if rank == 0:
            for work in [two[0].send(torch.full((4,), float(number)), 1, 10 + number) for number in range(3)]:
                work.wait()
            return []
        rooms = [torch.empty(4) for _ in range(3)]
        for work in [two[1].receive(room, 0, tag) for room, tag in zip(rooms, (12, 10, 11), strict=True)]:
            work.wait()
        return [float(room[0]) for room in rooms]

    assert on_both(run)[1] == [0, 1, 2]


@pytest.mark.timeout(60)
def test_ranks_may_send_head_on(two):
    def run(rank: int) -> float:
        sent = two[rank].send(torch.full((1 << 20,), float(rank)), 1 - rank, 0)
        room = torch.empty(1 << 20)
        two[rank].receive(room, 1 - rank, 0).wait()
        sent.wait()
        return float(room[-1])

    assert on_both(run) == [1, 0]


@pytest.mark.timeout(60)
def test_lanes_send_on_queues_of_their_own(two):
    for transport in two:
        transport._lane_pairs, transport._pairs = transport._pairs, {}
        transport._lane_groups = {(0, 1): None}

    def run(rank: int) -> float:
        group, value = two[rank].lane_group((0, 1)), torch.full((3,), float(rank))
        if rank == 0:
            group.send(value + 5, 1)
            group.receive((value, 1))
        else:
            received = torch.empty(3)
            group.receive((received, 0))
            group.send(received * 2, 0)
        return float(value[0])

    assert on_both(run) == [10, 1]


def test_pairs_that_connect_in_one_turn_share_no_rank():
    pairs = [(a, b) for a in range(12) for b in range(12) if a != b]
    turns: dict[tuple[int, ...], list[int]] = {}
    for pair in pairs:
        turns.setdefault(_turn(pair)[:3], []).extend(pair)
    assert all(len(ranks) == len(set(ranks)) for ranks in turns.values())
    assert len({_turn(pair) for pair in pairs}) == len(pairs)
    assert [_place_of_other(pair, rank) for pair in ((2, 5), (5, 2)) for rank in (2, 5)] == [1, 0, 1, 0]


class Group:
    """What nccl would make, which notes that it is used."""

    def __init__(self, ranks: tuple[int, ...], uses: list[Any]) -> None:
        self.ranks, self.uses = ranks, uses

    def _use(self, what: str) -> Group:
        self.uses.append((self.ranks, what))
        return self

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def abort(self) -> None:
        self.uses.append("broken off")

    def allreduce(self, tensors: list[Tensor]) -> Group:
        return self._use("sum")

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Group:
        return self._use(f"to {self.ranks[place]}")

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> Group:
        return self._use(f"from {self.ranks[place]}")

    def wait(self) -> None:
        pass


def test_all_ranks_make_and_use_communicators_in_one_order(monkeypatch):
    made: list[list[tuple[int, ...]]] = []
    uses: list[list[Any]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for rank in range(4):
        made.append([])
        uses.append([])

        def new_group(ranks, *, backend, timeout, made=made[rank], uses=uses[rank]):
            made.append(tuple(ranks))
            assert (backend, timeout) == ("nccl", timedelta(seconds=20))
            return Group(tuple(ranks), uses)

        monkeypatch.setattr(dist, "new_group", new_group)
        transport = bare(rank, 4, "meta")
        for _ in range(2):  # what is there already is not made again
            transport.connect_groups([(0, 1), (0, 1, 2, 3), (2,)], exchanges=[(0, 1), (1, 3)], lanes=[(1, 3)],
                                     pairs=iter([(2, 3), (0, 1), (1, 0), (0, 1), (1, 2)]), lane_pairs=[(3, 1)])
        assert len(transport._pairs) == 4
    assert made[0] == [(0, 1), (0, 1, 2, 3), (0, 1), (1, 3), (1, 3), (0, 1), (2, 3), (0, 1), (1, 2), (1, 3)]
    assert all(item == made[0] for item in made)
    assert uses[1][-4:] == [((0, 1), "from 0"), ((0, 1), "to 0"), ((1, 2), "to 2"), ((1, 3), "from 3")]
    while any(uses):  # each waits for its partners
        moved = [ranks for ranks in {queue[0][0] for queue in uses if queue}
                 if all(uses[rank] and uses[rank][0][0] == ranks for rank in ranks)]
        assert moved, f"nobody goes on: {[queue[:1] for queue in uses]}"
        for rank in moved[0]:
            uses[rank].pop(0)


def test_what_failed_is_broken_off_and_not_waited_for(monkeypatch):
    aborted: list[Any] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append("all"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    gpu, cpu = bare(0, 2, "meta"), bare(0, 2, "cpu")
    gpu._groups = {(0, 1): Group((0, 1), aborted), (1, 2): dist.GroupMember.NON_GROUP_MEMBER}
    gpu._pairs = {(0, 1): Group((0, 1), aborted), (1, 2): None}
    cpu.abort()
    assert aborted == []
    gpu.abort()
    assert aborted == ["all"]
    gpu._is_adopted = True
    gpu.abort()
    assert aborted == ["all", "broken off", "broken off"]
    monkeypatch.setattr(transport_module, "ABORT_S", 0.1)
    monkeypatch.setattr(Group, "abort", lambda self: time.sleep(5))
    begin = time.monotonic()
    gpu.abort()
    assert time.monotonic() - begin < 3


class Stream:
    """A stream that notes what it is told."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name, self.device = notes, name, "gpu"

    def record_event(self) -> Stream:
        self.notes.append(f"mark {self.name}")
        return self

    def wait_event(self, event: Stream) -> None:
        self.notes.append(f"{self.name} waits for {event.name}")

    def wait(self) -> None:
        self.notes.append(f"wait for {self.name}")


def test_on_nccl_a_lane_queues_its_exchanges_at_once_on_its_stream(monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(lane_module.torch.cuda, "Stream", lambda device: Stream(notes, "lane"))
    monkeypatch.setattr(lane_module.torch.cuda, "current_stream", lambda device: Stream(notes, "main"))
    monkeypatch.setattr(lane_module.torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    lane = Lane(torch.device("cuda"), is_gloo=False)
    work = lane.submit(lambda: notes.append(f"run on {threading.current_thread().name}"), then=lambda: notes.append("then"))
    work.wait()
    assert notes == ["mark main", "lane waits for main", f"run on {threading.current_thread().name}", "mark lane",
                     "wait for lane", "then"]
