"""The laboratory: several hosts on one machine, each with its own network port of limited rate, for real runs of plans.

    with Lab(load_cluster("cluster.yaml")) as lab:
        result = lab.run_plan("plan.json", "model.py:make", options=RunOptions(steps=5, warmup=1))

Each host runs plain ``torchrun -m weft.run``, as on separate machines. Processes have one thread and are pinned to
cores; ``lab.cluster`` says which devices share one, so that predictions know. All of it is gone when the context ends,
also by an error, Ctrl-C or SIGTERM; ``clean`` removes what a killed process has left.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any, Final

from benchmarks.lab import spaces
from benchmarks.lab.topology import PORT, Host, build_commands, namespaces, on_cores, read_topology
from weft.base.errors import PlanError, RunError
from weft.cluster.cluster import Cluster
from weft.plan.plan import Plan, load_plan, save_plan
from weft.run.result import RunOptions, RunResult, load_result

ROOT: Final = Path(__file__).resolve().parents[2]
TIMEOUT_S: Final = 600.0
POLL_S: Final = 0.05
_PATIENCE_S: Final = 15.0
"""How long others may take to say why, after one has failed."""
_PORT_NUMBER: Final = 29500


class Lab:
    """Hosts of a cluster as network namespaces; a context manager."""

    def __init__(self, cluster: Cluster) -> None:
        """Raise ``ClusterError`` if the cluster is no star or tree of hosts with one port each."""
        self.cores = tuple(sorted(os.sched_getaffinity(0)))
        self.topology = read_topology(cluster, len(self.cores))
        self.cluster = on_cores(cluster, len(self.cores))
        """The cluster with a ``unit`` for each core that several devices share: plan and predict with this one."""
        self.prefix = spaces.new_prefix()
        self._names = namespaces(self.topology, self.prefix)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._signals: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Lab:
        problem = spaces.why_not()
        if problem:
            raise RunError(problem)
        self._catch_signals()
        try:
            self._folder = tempfile.TemporaryDirectory(prefix=self.prefix)
            spaces.execute(build_commands(self.topology, self.prefix, self.cores))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the laboratory and remove it; Ctrl-C waits until that is done."""
        is_main = threading.current_thread() is threading.main_thread()
        held = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        before: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in held}
        try:
            spaces.remove(self.prefix)
            if self._folder is not None:
                self._folder.cleanup()
        finally:
            for number, handler in {**before, **self._signals}.items():
                signal.signal(number, handler)
            self._signals = {}

    def _catch_signals(self) -> None:
        """Let SIGTERM and a lost terminal end the context as Ctrl-C does."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._signals[number] = signal.signal(number, _end)

    # ---- programs on the hosts --------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Return a folder that all hosts see and that goes with the laboratory."""
        assert self._folder is not None, "the laboratory is open"
        return Path(self._folder.name)

    def new_path(self, name: str) -> Path:
        """Return a path in that folder which nothing has yet."""
        return self.folder / f"{next(self._numbers)}-{name}"

    def run(self, command: Callable[[Host], Sequence[str] | None], *, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Return what each host's program printed, when all have ended well; None stands for no program on a host.

        The programs of all hosts run at once. Raise ``RunError`` when one fails or time is up; then all are ended.
        """
        folder = self.new_path("job")
        folder.mkdir()
        jobs = {}
        try:
            for index, host in enumerate(self.topology.hosts):
                words = command(host)
                if words is not None:
                    jobs[host.name] = spaces.start(
                        self._names[host.name], words, cores=[self.cores[core] for core in host.cores],
                        environment=_environment(), output=folder / str(index))
            failed = _wait(jobs, timeout_s)
            words_of = {host.name: (folder / str(index)).read_text(errors="replace")
                        for index, host in enumerate(self.topology.hosts) if host.name in jobs}
            if failed:
                raise RunError(_failure(failed, words_of, timeout_s))
            return words_of
        finally:
            spaces.stop([*self._names.values()])
            for process in jobs.values():
                process.wait()

    def run_plan(self, plan: Plan | str | PathLike[str], model: str, *, options: RunOptions | None = None,
                 timeout_s: float = TIMEOUT_S) -> RunResult:
        """Return the result of the plan, run by ``torchrun`` on every host."""
        options = options or RunOptions()
        given = plan if isinstance(plan, Plan) else load_plan(plan)
        hosts = self._hosts_in_order(given)
        path, output = self.new_path("plan.json"), self.new_path("result")
        port = _PORT_NUMBER + next(self._numbers)
        save_plan(given, path)

        def command(host: Host) -> list[str] | None:
            if host not in hosts:
                return None
            used = sum(device in host.devices for device in given.cluster.devices)
            return [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--nproc-per-node",
                    str(used), "--node-rank", str(hosts.index(host)), "--master-addr", hosts[0].address,
                    "--master-port", str(port), "--local-addr", host.address, "-m", "weft.run",
                    str(path), absolute(model), "--output", str(output), *_flags(options)]

        self.run(command, timeout_s=timeout_s)
        return load_result(output)

    def _hosts_in_order(self, plan: Plan) -> list[Host]:
        """Return the hosts as ``torchrun`` is to number them, so that rank ``i`` is the plan's device ``i``."""
        known = {device.name for device in self.cluster.devices}
        for name in plan.cluster.devices:
            if name not in known:
                raise PlanError(f"the plan uses device {name!r}, which the laboratory does not have: plan for its "
                                "cluster")
        hosts = [self.topology.host_of(name) for name in plan.cluster.devices]
        runs = [host for index, host in enumerate(hosts) if index == 0 or host != hosts[index - 1]]
        if len(runs) != len(set(runs)):
            raise PlanError("the plan's devices jump between hosts, but torchrun numbers the ranks of a host one after "
                            "the other: list the devices of each host together in the cluster file")
        return runs


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": PORT, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _wait(jobs: Mapping[str, subprocess.Popen[bytes]], timeout_s: float) -> dict[str, int | None]:
    """Return, by host, the exit codes that are not zero (None: still running) once there is nothing to wait for."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = {name: process.poll() for name, process in jobs.items()}
        if not any(codes.values()) and None not in codes.values():
            return {}
        if any(codes.values()):
            deadline = min(deadline, time.monotonic() + _PATIENCE_S)
        if time.monotonic() > deadline or None not in codes.values():
            return {name: code for name, code in codes.items() if code != 0}
        time.sleep(POLL_S)


def _failure(failed: Mapping[str, int | None], words: Mapping[str, str], timeout_s: float) -> str:
    """Return one message: Weft's own if a host printed one, else the last words of the first host that ended badly."""
    for name in failed:
        for line in words[name].splitlines():
            if line.startswith("weft: "):
                return f"host {name!r}: {line.removeprefix('weft: ')}"
    ended = [name for name, code in failed.items() if code is not None]
    if not ended:
        return f"{', '.join(failed)}: not done after {timeout_s:g} s; all were ended"
    lines = words[ended[0]].strip().splitlines()
    last = lines[-1] if lines else "none"
    return f"host {ended[0]!r} ended with exit code {failed[ended[0]]}; its last words: {last}"


def absolute(model: str) -> str:
    """Return the model with the path of a file made absolute."""
    path, colon, function = model.rpartition(":")
    return f"{Path(path).resolve()}:{function}" if colon and path.endswith(".py") else model


def _flags(options: RunOptions) -> list[str]:
    flags = ["--steps", str(options.steps), "--warmup", str(options.warmup), "--seed", str(options.seed),
             "--timeout", str(options.timeout_s)]
    flags += ["--dtype", options.dtype] if options.dtype is not None else []
    return flags + ["--verify"] * options.verify + ["--gradients"] * options.gradients
