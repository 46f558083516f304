"""Network namespaces on this machine: made, used and removed, with what runs in them; leftovers of dead owners too.

All names begin with ``weftlab-`` and the number of the process that made them, so that nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.lab.topology import Command
from weft.base.errors import RunError

PREFIX: Final = "weftlab-"
_COUNTER: Final = itertools.count()
_PR_SET_PDEATHSIG: Final = 1
_END_S: Final = 10.0


def new_prefix() -> str:
    """Return what the names of a new laboratory begin with."""
    return f"{PREFIX}{os.getpid()}-{next(_COUNTER)}-"


def why_not() -> str | None:
    """Return in one line why no laboratory can be built here, or None; the answer is found by trying."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need the command {tool!r}: install the package iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root: run this as root, or in a container with the capability SYS_ADMIN"
    prefix = new_prefix()
    try:
        execute([("ip", "netns", "add", f"{prefix}try"),
                 ("ip", "-n", f"{prefix}try", "link", "add", "b0", "type", "bridge"),
                 ("ip", "-n", f"{prefix}try", "link", "add", "v0", "type", "veth", "peer", "name", "v1"),
                 ("tc", "-n", f"{prefix}try", "qdisc", "add", "dev", "v0", "root", "tbf", "rate", "1mbit", "burst",
                  "10000", "limit", "100000")])
    except RunError as problem:
        return f"network namespaces with limited links are not permitted here: {problem}"
    finally:
        remove(prefix)
    return None


def execute(commands: Sequence[Command]) -> None:
    """Run commands one after the other; raise ``RunError`` at the first that fails."""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise RunError(f"{' '.join(command)}: {lines[-1] if lines else f'exit code {done.returncode}'}")


def start(space: str, command: Sequence[str], *, cores: Sequence[int], environment: Mapping[str, str],
          output: Path) -> subprocess.Popen[bytes]:
    """Return the command's process, started in the namespace on these cores; its words go to the file ``output``.

    It ends when this process ends, however that happens.
    """
    pinned = ("taskset", "--cpu-list", ",".join(map(str, cores))) if shutil.which("taskset") else ()
    with open(output, "wb") as stream:
        return subprocess.Popen(["ip", "netns", "exec", space, *pinned, *command], stdin=subprocess.DEVNULL,
                                stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **environment},
                                start_new_session=True, preexec_fn=_end_with_parent)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stop(spaces: Sequence[str]) -> None:
    """End every process in the namespaces, and return when they are gone."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        found = [pid for space in spaces for pid in _processes(space)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes(space: str) -> list[int]:
    """Return what runs in the namespace; ended processes that nobody has waited for yet do not count."""
    done = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split() if word.isdecimal() and not _is_ended(int(word))]


def _is_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return True


def existing(prefix: str = PREFIX) -> list[str]:
    """Return the namespaces whose names begin with the prefix."""
    if shutil.which("ip") is None:
        return []
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    return [name for name in names if name.startswith(prefix)]


def remove(prefix: str) -> list[str]:
    """Remove the namespaces whose names begin with the prefix, with all that runs in them; return their names."""
    names = existing(prefix)
    stop(names)
    for name in names:  # interfaces and rates go with them
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return names


def clean() -> list[str]:
    """Remove what laboratories of processes that are gone have left behind, folders too; return the names."""
    removed = [name for left in existing() if _is_left(left) for name in remove(left)]
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if _is_left(path.name):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed


def _is_left(name: str) -> bool:
    owner = name.removeprefix(PREFIX).partition("-")[0]
    return not owner.isdecimal() or _is_ended(int(owner))
