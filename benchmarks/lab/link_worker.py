"""Runs on every host: times messages between hosts and collectives of all of them over gloo; rank 0 prints the result.

    python -m benchmarks.lab.link_worker RANK NUM_RANKS STORE SPEC

SPEC is JSON: ``pairs`` with sizes for each ordered pair, ``collectives`` with sizes by name, ``repeats``, ``seconds``.
A message's time is the least of all repeats, which is what the link does; a collective's is the median.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

SMALL_BYTES: Final = 1 << 17
"""Up to this size, measuring more often costs nothing."""


def main(arguments: list[str]) -> None:
    """Take part in all measurements."""
    rank, num_ranks, spec = int(arguments[0]), int(arguments[1]), json.loads(arguments[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments[2]}", rank=rank, world_size=num_ranks,
                            timeout=timedelta(seconds=spec["seconds"]))
    messages = [[source, target, size, _message_s(rank, source, target, size, spec["repeats"])]
                for source, target, sizes in spec["pairs"] for size in sizes]
    collectives = {name: [[size, _collective_s(name, rank, num_ranks, size, spec["repeats"])] for size in sizes]
                   for name, sizes in spec["collectives"].items()}
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, messages)
    if rank == 0:  # the sender knows how long a message took
        known = [row for index, rows in enumerate(found) for row in rows if row[0] == index]
        print(json.dumps({"messages": known, "collectives": collectives}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _message_s(rank: int, source: int, target: int, size: int, repeats: int) -> float:
    """Return on the sender the seconds from sending ``size`` bytes until an answer of one byte is there."""
    data, answer = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    dist.barrier()
    times = []
    for _ in range((repeats if size > SMALL_BYTES else 10 * repeats) + 1):
        begin = time.perf_counter()
        if rank == source:
            dist.send(data, target)
            dist.recv(answer, target)
        elif rank == target:
            dist.recv(data, source)
            dist.send(answer, source)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


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
