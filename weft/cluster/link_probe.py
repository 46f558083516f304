"""The rate and latency between two local processes over ``torch.distributed`` with gloo, measured.

``measure_link`` starts this module twice as a program (rank 0 and rank 1), which send tensors back and forth; rank 0
prints the result. Both find each other through a file in a temporary folder and talk over the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from weft.base.errors import ClusterError
from weft.base.scratch import scratch_folder

LARGE_BYTES: Final = 8 << 20
NUM_LARGE: Final = 12
NUM_SMALL: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """What a link was measured to do in one direction."""

    bytes_per_s: float
    latency_s: float


def measure_link(*, time_limit_s: float) -> LinkRate:
    """Return the measured rate between two local processes; raise ``ClusterError`` if that fails or takes longer."""
    deadline = time.monotonic() + time_limit_s
    with scratch_folder("weft-probe-") as folder, contextlib.ExitStack() as stack:
        processes = [_start(rank, folder, time_limit_s) for rank in range(2)]
        for process in processes:
            stack.callback(_end, process)
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline:
                raise ClusterError(f"the link measurement took longer than {time_limit_s:g} s")
            time.sleep(0.02)
        for rank, code in enumerate(codes):
            if code:
                said = (folder / f"stderr{rank}").read_text(errors="replace").strip().splitlines()
                raise ClusterError(f"the link measurement failed in rank {rank} (exit code {code}): "
                                   f"{said[-1][:300] if said else 'no message'}")
        return _read_result(processes[0].communicate()[0])


def _start(rank: int, folder: Path, time_limit_s: float) -> subprocess.Popen[bytes]:
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "weft.cluster.link_probe", str(rank), str(folder / "store"), str(time_limit_s)]
    with open(folder / f"stderr{rank}", "wb") as stderr:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=stderr,
                                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _read_result(output: bytes) -> LinkRate:
    try:
        value = json.loads(output.decode().strip().splitlines()[-1])
        rate = LinkRate(bytes_per_s=float(value["bytes_per_s"]), latency_s=float(value["latency_s"]))
    except (ValueError, IndexError, KeyError, TypeError) as problem:
        raise ClusterError(f"the link measurement gave no result: {output[:200]!r}") from problem
    if not (math.isfinite(rate.bytes_per_s) and rate.bytes_per_s > 0 and 0 <= rate.latency_s < math.inf):
        raise ClusterError(f"the link measurement gave no sensible result: {rate}")
    return rate


def _round_trip_s(dist: Any, tensor: Any, rank: int) -> float:
    start = time.perf_counter()
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)
    return time.perf_counter() - start


def main(arguments: list[str]) -> None:
    """Run one of the two ranks: arguments are the rank, the path of the rendezvous file and the time limit."""
    import torch
    import torch.distributed as dist

    rank, store, limit_s = int(arguments[0]), arguments[1], float(arguments[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=limit_s))
    small, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    small_s = [_round_trip_s(dist, small, rank) for _ in range(NUM_SMALL)]
    large_s = [_round_trip_s(dist, large, rank) for _ in range(NUM_LARGE)]
    latency_s = statistics.median(small_s) / 2
    transfer_s = max(statistics.median(large_s) / 2 - latency_s, 1e-9)
    if rank == 0:
        print(json.dumps({"bytes_per_s": LARGE_BYTES / transfer_s, "latency_s": latency_s}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
