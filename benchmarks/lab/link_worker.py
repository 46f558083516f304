"""Runs on every host: times messages between hosts and collectives of all of them over gloo; rank 0 prints the result.

    python -m benchmarks.lab.link_worker RANK NUM_RANKS STORE SPEC

SPEC is JSON: ``pairs`` with sizes for each ordered pair, ``collectives`` with sizes by name, ``repeats``, ``seconds``.
A message's time is the least of all repeats, which is what the link does; a collective's is the median. ``waits`` are
means of messages of one byte while the hosts that have no part in them compute, as in a run: what a process takes to
notice a message where cores are shared.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

SMALL_BYTES: Final = 1 << 17
"""Up to this size, measuring more often costs nothing."""
WAITS: Final = 100
"""Messages of one byte, while other hosts compute."""


def main(arguments: list[str]) -> None:
    """Take part in all measurements."""
    rank, num_ranks, spec = int(arguments[0]), int(arguments[1]), json.loads(arguments[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments[2]}", rank=rank, world_size=num_ranks,
                            timeout=timedelta(seconds=spec["seconds"]))
    messages = [[source, target, size, _message_s(rank, source, target, size, spec["repeats"])]
                for source, target, sizes in spec["pairs"] for size in sizes]
    waits = [[source, target, _wait_s(rank, source, target, WAITS)] for source, target, _ in spec["pairs"]]
    collectives = {name: [[size, _collective_s(name, rank, num_ranks, size, spec["repeats"])] for size in sizes]
                   for name, sizes in spec["collectives"].items()}
    if rank == 0:
        print(json.dumps({"messages": _senders(messages, num_ranks), "waits": _senders(waits, num_ranks),
                          "collectives": collectives}), flush=True)
    else:
        _senders(messages, num_ranks), _senders(waits, num_ranks)
    dist.barrier()
    dist.destroy_process_group()


def _senders(rows: list[Any], num_ranks: int) -> list[Any]:
    """Return each row as its first rank has it: the sender knows how long a message took."""
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, rows)
    return [row for index, own in enumerate(found) for row in own if row[0] == index]


def _wait_s(rank: int, source: int, target: int, repeats: int) -> float:
    """Return on the sender the mean seconds of a message of one byte and its answer while other hosts compute."""
    with _computing(rank not in (source, target)):
        dist.barrier()
        return statistics.mean(_round_trips(rank, source, target, 1, repeats))


@contextmanager
def _computing(is_wanted: bool) -> Iterator[None]:
    """Let a process of this host compute meanwhile."""
    process = multiprocessing.get_context("fork").Process(target=_compute, daemon=True)
    if is_wanted:
        process.start()
    try:
        yield
    finally:
        if is_wanted:
            process.kill()
            process.join()


def _compute() -> None:
    left, right = torch.ones(128, 2048), torch.ones(2048, 512)
    while True:
        left @ right


def _message_s(rank: int, source: int, target: int, size: int, repeats: int) -> float:
    """Return on the sender the least seconds from sending ``size`` bytes until an answer of one byte is there."""
    dist.barrier()
    return min(_round_trips(rank, source, target, size, repeats if size > SMALL_BYTES else 10 * repeats))


def _round_trips(rank: int, source: int, target: int, size: int, repeats: int) -> list[float]:
    data, answer = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        if rank == source:
            dist.send(data, target)
            dist.recv(answer, target)
        elif rank == target:
            dist.recv(data, source)
            dist.send(answer, source)
        times.append(time.perf_counter() - begin)
    return times[1:]


def _collective_s(name: str, rank: int, num_ranks: int, size: int, repeats: int) -> float:
    """Return the seconds of a collective over ``size`` bytes in all, on the slowest rank."""
    data = torch.zeros(max(size // 4, num_ranks))
    part = torch.zeros(len(data) // num_ranks)
    run: Callable[[], object] = {
        "all_reduce": lambda: dist.all_reduce(data),
        "all_gather": lambda: dist.all_gather_into_tensor(data[: len(part) * num_ranks], part)}[name]
    times = []
    for _ in range((repeats if size > SMALL_BYTES else 4 * repeats) + 1):
        dist.barrier()
        begin = time.perf_counter()
        run()
        taken = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(float(taken))
    return statistics.median(times[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
