"""This machine as a cluster: its devices, their memory and their rates as measured here.

GPUs if PyTorch sees any, else one device per local process, each with one core and its share of the memory. Rates are
what small benchmarks reach: matrix products for each dtype, a copy for memory bandwidth, an addition of one element
for the time that starting an operator takes, and tensors sent between two processes (CPU) or GPUs for links. Every
figure's ``source`` says that it was measured; a link that could not be measured says which preset stands in and why.

For the rate and latency between two local processes, ``measure_link`` starts this module twice as a program (rank 0 and
rank 1), which send tensors back and forth over ``torch.distributed`` with gloo; rank 0 prints the result. Both find
each other through a file in a temporary folder and talk over the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from weft.base.errors import ClusterError
from weft.base.scratch import scratch_folder
from weft.cluster.cluster import MAX_DEVICES, Cluster, Device, DeviceKind, Link, both_ways, check_cluster
from weft.cluster.presets import find_link, lookup_kind

logger = logging.getLogger(__name__)

DTYPES: Final = ("float64", "float32", "float16", "bfloat16")
_BUDGET_S: Final = 0.1
_CPU_MATRIX: Final = 384
_GPU_MATRIX: Final = 4096
_CPU_COPY_BYTES: Final = 64 << 20
_GPU_COPY_BYTES: Final = 256 << 20
LARGE_BYTES: Final = 8 << 20
NUM_LARGE: Final = 12
NUM_SMALL: Final = 200


def probe(num_devices: int | None = None, *, device: str = "auto", time_limit_s: float = 60.0) -> Cluster:
    """Return this machine as a cluster, measured.

    ``num_devices`` is the number of local processes on a CPU (default: cores) or of GPUs to use (default: all).
    ``device`` is ``cpu``, ``cuda`` or ``auto`` (GPUs if there are any). ``time_limit_s`` bounds the measurement of the
    link between processes, the only one that can hang.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ClusterError(f"the device to probe must be 'auto', 'cpu' or 'cuda', not {device!r}")
    if num_devices is not None and not 1 <= num_devices <= MAX_DEVICES:
        raise ClusterError(f"the number of devices must be 1 to {MAX_DEVICES}, not {num_devices}")
    import torch

    has_gpu = bool(torch.cuda.is_available())
    if device == "cuda" and not has_gpu:
        raise ClusterError("PyTorch sees no GPU on this machine: probe with device 'cpu'")
    use_gpu = has_gpu and device != "cpu"
    cluster = _probe_gpus(torch, num_devices) if use_gpu else _probe_cpu(torch, num_devices, time_limit_s)
    check_cluster(cluster)
    return cluster


def _host_name() -> str:
    """Return the machine's name, with what a cluster file does not allow left out."""
    return "".join(letter for letter in platform.node() if letter.isalnum() or letter in "-._")[:80] or "local"


# CPU -----------------------------------------------------------------------------------------------------------------


def _probe_cpu(torch: Any, num_devices: int | None, time_limit_s: float) -> Cluster:
    count = num_devices or num_cores()
    with cpu_threads(torch, 1):
        kind = _measured(
            torch, "local-cpu", "cpu", memory=memory_bytes() // count, matrix=_CPU_MATRIX, copied=_CPU_COPY_BYTES,
            source=f"measured on one thread ({platform.machine()}, torch {torch.__version__}); memory is the "
                   f"machine's, divided by {count}")
    host = _host_name()
    cores = num_cores()
    devices = tuple(Device(name=f"cpu{index}", kind=kind.name, host=host, memory_bytes=kind.memory_bytes,
                           unit=f"core{index % cores}" if count > cores else None) for index in range(count))
    links = _local_links(devices, host, time_limit_s) if count > 1 else ()
    return Cluster(name=host, kinds={kind.name: kind}, devices=devices, links=links)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the machine's memory, or the control group's limit where that is less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError, IndexError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return total


def _local_links(devices: tuple[Device, ...], host: str, time_limit_s: float) -> tuple[Link, ...]:
    try:
        rate, origin = measure_link(time_limit_s=time_limit_s), "measured between two processes over gloo"
    except (ClusterError, OSError) as problem:
        preset = find_link("loopback")
        rate = LinkRate(bytes_per_s=preset.bytes_per_s, latency_s=preset.latency_s)
        origin = f"preset loopback, because measuring failed: {problem}"
        logger.warning("the link between local processes could not be measured, so the preset 'loopback' stands in: %s",
                       problem)
    return _star(devices, f"{host}/fabric", rate, origin)


def _star(devices: tuple[Device, ...], switch: str, rate: LinkRate, origin: str) -> tuple[Link, ...]:
    return tuple(link for device in devices for link in both_ways(
        device.name, switch, bytes_per_s=rate.bytes_per_s, latency_s=rate.latency_s / 2, origin=origin))


# GPU -----------------------------------------------------------------------------------------------------------------


def _probe_gpus(torch: Any, num_devices: int | None) -> Cluster:
    available = int(torch.cuda.device_count())
    count = num_devices or available
    if count > available:
        raise ClusterError(f"{count} GPUs were asked for, but PyTorch sees {available}")
    host = _host_name()
    kinds: dict[str, DeviceKind] = {}
    devices = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        preset = lookup_kind(properties.name)
        name = preset.kind.name if preset else properties.name
        if name not in kinds:
            kinds[name] = _measured(
                torch, name, f"cuda:{index}", memory=int(properties.total_memory), matrix=_GPU_MATRIX,
                copied=_GPU_COPY_BYTES, source=f"measured on {properties.name} (torch {torch.__version__})")
        devices.append(Device(name=f"gpu{index}", kind=name, host=host, memory_bytes=int(properties.total_memory)))
    links: tuple[Link, ...] = ()
    if count > 1:
        links = _star(tuple(devices), f"{host}/fabric", _gpu_link_rate(torch), "measured by copies from GPU 0 to GPU 1")
    return Cluster(name=host, kinds=kinds, devices=tuple(devices), links=links)


def _gpu_link_rate(torch: Any) -> LinkRate:
    def copy_s(num_bytes: int) -> float:
        source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")

        return statistics.median(_times(lambda: target.copy_(source), lambda: [*map(torch.cuda.synchronize, (0, 1))]))

    latency_s = copy_s(1)
    transfer_s = max(copy_s(_GPU_COPY_BYTES) - latency_s, 1e-9)
    return LinkRate(bytes_per_s=_GPU_COPY_BYTES / transfer_s, latency_s=latency_s)


# Small benchmarks ----------------------------------------------------------------------------------------------------


@contextmanager
def cpu_threads(torch: Any, count: int) -> Iterator[None]:
    """Let operators use so many threads, and put their number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measured(torch: Any, name: str, device: str, *, memory: int, matrix: int, copied: int, source: str) -> DeviceKind:
    """Return the kind of a device: multiplied matrices have ``matrix`` rows, ``copied`` bytes are copied."""
    return DeviceKind(
        name=name, flop_per_s={dtype: _matrix_rate(torch, dtype, device, matrix) for dtype in DTYPES},
        memory_bytes=memory, memory_bytes_per_s=_copy_rate(torch, device, copied),
        overhead_s=_start_time(torch, device), type="cpu" if device == "cpu" else "gpu", source=source)


def _times(run: Callable[[], object], finish: Callable[[], object], *, inner: int = 1) -> list[float]:
    """Return the time of one ``run``, measured again and again until ``_BUDGET_S`` has passed (at least 3 times)."""
    run()
    finish()
    times: list[float] = []
    end = time.perf_counter() + _BUDGET_S
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(inner):
            run()
        finish()
        times.append((time.perf_counter() - start) / inner)
    return times


def _finisher(torch: Any, device: str) -> Callable[[], object]:
    return (lambda: None) if device == "cpu" else (lambda: torch.cuda.synchronize(device))


def _matrix_rate(torch: Any, dtype: str, device: str, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    times = _times(lambda: torch.matmul(a, b, out=out), _finisher(torch, device), inner=1 if device == "cpu" else 5)
    return float(2 * size**3 / min(times))


def _copy_rate(torch: Any, device: str, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = _times(lambda: target.copy_(source), _finisher(torch, device))
    return 2 * num_bytes / min(times)


def _start_time(torch: Any, device: str) -> float:
    one = torch.ones(1, device=device)
    return statistics.median(_times(lambda: one.add(one), _finisher(torch, device), inner=100))


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
    command = [sys.executable, "-m", "weft.cluster.probe", str(rank), str(folder / "store"), str(time_limit_s)]
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
