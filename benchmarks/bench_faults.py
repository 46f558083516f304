"""Faults drawn at random in mid-step: how soon the run ends, whether it says why, and what it leaves behind.

    python -m benchmarks.bench_faults [--faults N] [--seed N] [--only TEXT] [--json]

A signal goes to a rank or to the launcher at a random moment after all ranks have taken a step: SIGKILL, SIGTERM, SIGHUP
and SIGINT to either, SIGSTOP to ranks. The launchers are ``weft run``, ``torchrun -m weft.run`` and a script with
``weft.parallelize`` under ``torchrun``; the plans data parallel, pipelines and tensor parallel on 2 to 4 ranks. What must
hold: the launcher and all ranks have ended within 20 seconds (which the limit of 15 for stopped ranks leaves room for),
the message names the rank and the cause, the exit code is the documented one (``torchrun`` has its own: 1), and no
process, port, shared memory or temporary folder of Weft is left. After SIGKILL of the launcher of ``weft run`` its
folder goes when the next run begins: that sweep is done, then looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.run.plans import cut, pipeline_plan, replicated_plan, traced
from tests.run.sharded_plans import sharded_plan, sharding_of
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Plan, save_plan

FILE = Path(__file__).with_name("models") / "faults.py"
MODEL = f"{FILE}:layers"
LIMIT_S, START_LIMIT_S = 20.0, 120.0
LAUNCHERS = ("weft run", "torchrun", "torchrun script")
KINDS = ("data parallel", "pipeline", "tensor parallel")
ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
FAULTS = (*(("rank", number) for number in (*ENDING, signal.SIGSTOP)), *(("launcher", number) for number in ENDING))
TENSOR = {r"(up|more)\.linear": "n", r"relu(_1)?": "d1", r"(down|less)\.linear": "k"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One case."""

    launcher: str
    kind: str
    num_ranks: int
    target: int | None
    """A rank, or None for the launcher."""
    signal: str
    after_s: float
    """Since the first step of the last rank."""

    @property
    def where(self) -> str:
        """Return who gets the signal."""
        return "launcher" if self.target is None else f"rank {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it."""

    ended_after_s: float
    code: int
    code_right: bool
    cause_right: bool
    left: tuple[str, ...]
    text: str

    @property
    def ok(self) -> bool:
        """Return whether all is as it must be."""
        return self.ended_after_s <= LIMIT_S and self.code_right and self.cause_right and not self.left


def draw(number: int, seed: int) -> list[Fault]:
    """Return the faults: every kind of fault under every launcher as equally often as it comes out, in random order."""
    rng = random.Random(seed)
    combos: list[tuple[str, tuple[str, signal.Signals]]] = []
    while len(combos) < number:
        combos += rng.sample(list(itertools.product(LAUNCHERS, FAULTS)), len(LAUNCHERS) * len(FAULTS))
    found = []
    for launcher, (target, sent) in combos[:number]:
        kind = rng.choice(KINDS)
        ranks = rng.choice((2, 4) if kind == "tensor parallel" else (2, 3, 4))
        found.append(Fault(launcher=launcher, kind=kind, num_ranks=ranks, signal=sent.name,
                           target=rng.randrange(ranks) if target == "rank" else None, after_s=rng.uniform(0, 1.5)))
    return found


def make_plan(kind: str, num_ranks: int) -> Plan:
    """Return a plan of the kind for the model."""
    graph = traced(MODEL).graph
    if kind == "data parallel":
        shares = [(rank, 1 / num_ranks) for rank in range(num_ranks)]
        return replicated_plan(graph, [shares], microbatches=1, batch=2 * num_ranks, num_devices=num_ranks)
    if kind == "pipeline":
        return pipeline_plan(graph, list(range(num_ranks)), one_f_one_b(num_ranks, 4), microbatches=4,
                             ops=cut(graph, num_ranks))
    sharding = sharding_of(MODEL, (num_ranks,), [TENSOR])
    return sharded_plan(MODEL, {"tensor": num_ranks}, sharding, num_devices=num_ranks, microbatches=2)


class Trial:
    """One run that gets a fault."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder, self.name = fault, folder, uuid.uuid4().hex
        self.marks, self.temporary = folder / "marks", folder / "tmp"
        self.marks.mkdir()
        self.temporary.mkdir()
        save_plan(make_plan(fault.kind, fault.num_ranks), folder / "plan.json")
        self.shared = set(os.listdir("/dev/shm"))
        root = str(Path(__file__).resolve().parents[1])
        self.environment = {**os.environ, "TMPDIR": str(self.temporary), "WEFT_FAULT_MARKS": str(self.marks),
                            "WEFT_FAULT_NAME": self.name, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}

    def run(self) -> Outcome:
        """Start it, let the fault happen, and look at what comes of it."""
        with open(self.folder / "text", "w+b") as text:
            launcher = subprocess.Popen(self._command(), env=self.environment, stdin=subprocess.DEVNULL, stdout=text,
                                        stderr=text, start_new_session=True)
            try:
                processes = self._first_steps(launcher)
                ports = set(self._ports())
                time.sleep(self.fault.after_s)
                begin = time.monotonic()
                os.kill(launcher.pid if self.fault.target is None else processes[self.fault.target],
                        signal.Signals[self.fault.signal])
                while time.monotonic() - begin < 4 * LIMIT_S and (
                        self._processes() or launcher.poll() is None or any(port in ports for _, port in _listening())):
                    time.sleep(0.1)
                ended_after_s = time.monotonic() - begin
                left = tuple(self._left(ports))
            finally:
                self._clean_up(launcher)
            text.seek(0)
            said = text.read().decode(errors="replace")
        code = launcher.returncode
        return Outcome(ended_after_s=ended_after_s, code=code, code_right=code == expected_code(self.fault), left=left,
                       cause_right=re.search(expected_cause(self.fault), said) is not None, text=said)

    def _command(self) -> list[str]:
        plan, ranks = str(self.folder / "plan.json"), str(self.fault.num_ranks)
        if self.fault.launcher == "weft run":
            return [sys.executable, "-m", "weft", "run", plan, MODEL, "--steps", "1000000"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", "0",
                    "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        if self.fault.launcher == "torchrun":
            return [*torchrun, "-m", "weft.run", plan, MODEL, "--steps", "1000000"]
        return [*torchrun, str(FILE), plan]

    def _first_steps(self, launcher: subprocess.Popen[bytes]) -> list[int]:
        """Return the processes of the ranks when all have taken a step."""
        deadline = time.monotonic() + START_LIMIT_S
        marks = [self.marks / str(rank) for rank in range(self.fault.num_ranks)]
        while not all(mark.exists() for mark in marks):
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run did not begin: {(self.folder / 'text').read_text()}")
            time.sleep(0.05)
        return [int(mark.read_text()) for mark in marks]

    def _processes(self) -> list[int]:
        """Return all processes of this trial that are there: they have its name in their environment."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    if self.name.encode() in (path / "environ").read_bytes():
                        found.append(int(path.name))
                except OSError:
                    continue
        return found

    def _ports(self) -> Iterator[int]:
        """Yield the ports at which processes of this trial listen."""
        sockets = set()
        for process in self._processes():
            for handle in Path(f"/proc/{process}/fd").iterdir():
                try:
                    sockets.add(os.readlink(handle))
                except OSError:
                    continue
        for inode, port in _listening():
            if f"socket:[{inode}]" in sockets:
                yield port

    def _left(self, ports: set[int]) -> Iterator[str]:
        """Yield what is still there that should not be."""
        yield from (f"process {process}" for process in self._processes())
        yield from (f"port {port}" for _, port in _listening() if port in ports)
        yield from (f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - self.shared) if not _is_used(name))
        if self.fault.launcher == "weft run" and self.fault.target is None and self.fault.signal == "SIGKILL":
            subprocess.run([sys.executable, "-c", "from weft.base.scratch import sweep; sweep('weft-run-')"], check=True,
                           env=self.environment)
        yield from (path.name for path in self.temporary.iterdir() if path.name.startswith(("weft", ".weft")))

    def _clean_up(self, launcher: subprocess.Popen[bytes]) -> None:
        for process in self._processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        launcher.wait()


def _is_used(name: str) -> bool:
    """Return whether a process that lives has mapped this shared memory, or it is gone: then it is not of the trial."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if f"/dev/shm/{name}" in (path / "maps").read_text():
                    return True
    return not Path("/dev/shm", name).exists()


def _listening() -> Iterator[tuple[str, int]]:
    """Yield (inode, port) of the sockets of this machine that listen."""
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(name).read_text().splitlines()[1:] if Path(name).exists() else ():
            fields = line.split()
            if fields[3] == "0A":
                yield fields[9], int(fields[1].rpartition(":")[2], 16)


def expected_code(fault: Fault) -> int:
    """Return the exit code of the launcher; torchrun ends with 1 whatever it was."""
    if fault.target is None and fault.signal == "SIGKILL":
        return -signal.SIGKILL
    if fault.launcher != "weft run":
        return 1
    return 4 if fault.target is not None else 128 + signal.Signals[fault.signal]


def expected_cause(fault: Fault) -> str:
    """Return the expression that the output must match."""
    name, rank = fault.signal, fault.target
    if rank is None:
        if name == "SIGKILL":
            return "" if fault.launcher == "weft run" else r"weft: rank \d: the job's store is gone"
        told = {"SIGINT": "weft: interrupted"}.get(name, f"weft: ended by {name}")
        return told if fault.launcher == "weft run" else f"got signal: {signal.Signals[name].value}\\b"
    if name == "SIGSTOP":
        return rf"weft: rank {rank}( \(d{rank}\))? is stopped .*; it was (at instruction|waiting|updating|in the script)"
    if fault.launcher == "weft run":
        return rf"weft: rank {rank} \(d{rank}\) was killed by {name} while (at instruction|waiting|updating)"
    if fault.launcher == "torchrun" and name != "SIGKILL":
        return rf"weft: rank {rank} was ended by {name}; it was (at instruction|waiting|updating)"
    by_weft = rf"weft: rank {rank} is gone; it was (at instruction|waiting|updating|in the script)"
    if fault.launcher == "torchrun":
        return by_weft
    return rf"{by_weft}|rank +: {rank} \(local_rank: {rank}\)\n +exitcode +: -\d+ \(pid: \d+\) +\({name}\)"


def main() -> int:
    """Return 1 if a case was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose line has this text")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored, and what is started too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    rows: list[dict[str, Any]] = []
    for number, fault in enumerate(draw(args.faults, args.seed)):
        line = (f"{number:3} {fault.launcher:16} {fault.kind:16} {fault.num_ranks} ranks  {fault.signal:8} "
                f"{fault.where:9}")
        if args.only not in line:
            continue
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            outcome = Trial(fault, Path(folder)).run()
        rows.append({**asdict(fault), **asdict(outcome), "ok": outcome.ok})
        if not args.json:
            print(f"{'ok    ' if outcome.ok else 'MISSED'} {line} ended after {outcome.ended_after_s:5.1f} s  "
                  f"cause {'right' if outcome.cause_right else 'WRONG'}  code {outcome.code:4} "
                  f"{'' if outcome.code_right else '(WRONG) '}left behind: {', '.join(outcome.left) or 'nothing'}",
                  flush=True)
            if not outcome.ok:
                print(outcome.text[-6000:], file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))
    missed = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} faults ended as they must", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
