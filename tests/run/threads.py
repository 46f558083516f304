"""Ranks as threads of this process, with the collectives of a transport and nothing else: quick enough for many cases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIMIT_S = 20.0


class _Meeting:
    """Where the ranks of one group put what they have, and take what the others have."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.items: dict[int, Any] = {}

    def exchange(self, rank: int, item: Any) -> dict[int, Any]:
        self.items[rank] = item
        self.barrier.wait()
        everything = dict(self.items)
        self.barrier.wait()
        return everything


class ThreadTransport:
    """The calls of ``weft.run.transport.Transport`` that stages on several ranks use."""

    def __init__(self, rank: int, meetings: dict[tuple[int, ...], _Meeting], lock: threading.Lock) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self._meetings, self._lock = meetings, lock

    def _exchange(self, ranks: tuple[int, ...], item: Any) -> list[Any]:
        assert self.rank in ranks
        assert list(ranks) == sorted(ranks)
        with self._lock:
            meeting = self._meetings.setdefault(ranks, _Meeting(len(ranks)))
        everything = meeting.exchange(self.rank, item)
        return [everything[rank] for rank in ranks]

    def reduced(self, tensor: Tensor, ranks: tuple[int, ...], how: str = "sum") -> Tensor:
        stacked = torch.stack(self._exchange(ranks, tensor.detach()))
        return stacked.sum(0) if how == "sum" else stacked.amax(0)

    def gathered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        return torch.stack(self._exchange(ranks, tensor.detach()))

    def sum_scattered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        return torch.stack(self._exchange(ranks, tensor.detach())).sum(0)[ranks.index(self.rank)]

    def all_to_all(self, flat: Tensor, ranks: tuple[int, ...], *, sent: list[int], received: list[int]) -> Tensor:
        pieces = self._exchange(ranks, flat.detach().split(sent))
        mine = [item[ranks.index(self.rank)] for item in pieces]
        assert [item.numel() for item in mine] == received
        return torch.cat(mine)


def on_ranks(num_ranks: int, function: Callable[[ThreadTransport], Any]) -> Sequence[Any]:
    """Return what the function returns on each rank; raise what it raises on any."""
    meetings: dict[tuple[int, ...], _Meeting] = {}
    lock = threading.Lock()
    results: list[Any] = [None] * num_ranks
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(rank, meetings, lock))
        except BaseException as problem:
            problems.append(problem)
            for meeting in list(meetings.values()):
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LIMIT_S)
    if problems:
        raise next((item for item in problems if not isinstance(item, threading.BrokenBarrierError)), problems[0])
    assert not any(thread.is_alive() for thread in threads), "a rank did not end in time"
    return results
