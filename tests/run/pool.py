"""A few ranks that stay up and run one plan after another, because starting processes takes longer than most tests.

As a program (``python -m tests.run.pool RANK ...``) this is one rank; ``Pool`` starts and drives them. A job may ask for
damage, which a test's control needs: it must make the verification fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
JOB_LIMIT_S = 100.0


class Pool:
    """Ranks in processes of their own, as a context manager."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self.num_ranks, self.folder = num_ranks, folder
        self.children: list[subprocess.Popen[str]] = []
        self.count = 0

    def __enter__(self) -> Pool:
        import socket

        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            for rank in range(self.num_ranks):
                environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
                               "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
                self.children.append(subprocess.Popen(
                    [sys.executable, "-m", "tests.run.pool", str(rank), str(self.num_ranks), str(listener.fileno())],
                    cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    pass_fds=[listener.fileno()]))
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()

    def run(self, plan: Any, model: str, *, damage: str = "", **options: Any) -> dict[str, Any]:
        """Return rank 0's result of running the plan; ``damage`` is one of those in ``_damage``."""
        from weft.plan.plan import save_plan

        self.count += 1
        path = self.folder / f"plan{self.count}.json"
        save_plan(plan, path)
        job = {"plan": str(path), "model": model, "damage": damage, "options": {"verify": True, **options}}
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
        answers = [self._answer(child) for child in self.children]
        problems = [answer["error"] for answer in answers if "error" in answer]
        assert not problems, "\n".join(problems)
        return answers[0]

    def _answer(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        assert child.stdout is not None
        deadline = time.monotonic() + JOB_LIMIT_S
        while not select.select([child.stdout], [], [], 0.2)[0]:
            assert time.monotonic() < deadline, "a rank did not answer in time"
            assert child.poll() is None, "a rank has died"
        line = child.stdout.readline()
        assert line, "a rank has died"
        return json.loads(line)


def _serve(rank: int, num_ranks: int, listen_fd: int) -> None:
    import torch

    from weft.files import encode
    from weft.plan.plan import load_plan
    from weft.run.prepare import Tracer
    from weft.run.result import RunOptions
    from weft.run.status import StatusLine
    from weft.run.transport import Transport, open_store
    from weft.run.worker import execute

    store = open_store(listen_fd=listen_fd if rank == 0 else None, timeout_s=60)
    transport = Transport(rank=rank, num_ranks=num_ranks, device=torch.device("cpu"), timeout_s=60, store=store)
    tracers: dict[tuple[str, str, str], Tracer] = {}
    for line in sys.stdin:
        job = json.loads(line)
        plan, options = load_plan(job["plan"]), RunOptions(**job["options"])
        try:
            tracer = _tracer(tracers, job["model"], plan.model.mode, options.dtype or "float64")
            with _damage(job["damage"], rank) as adjust:
                result = execute(plan, tracer, options, transport=transport, status=StatusLine(), adjust=adjust)
            answer = {} if result is None else {
                "losses": result.losses, "verification": encode(result.verification), "timeline": _spans(result.timeline),
                "cpu_s": result.cpu_s, "gradients": {name: value.tolist() for name, value in (result.gradients or {}).items()}}
        except Exception as problem:
            answer = {"error": f"rank {rank}: {type(problem).__name__}: {problem}"}
        print(json.dumps(answer), flush=True)


def _tracer(tracers: dict[tuple[str, str, str], Any], model: str, mode: str, dtype: str) -> Any:
    from tests.run.plans import source_of
    from weft.run.prepare import Tracer

    key = (model, mode, dtype)
    if key not in tracers:
        tracers[key] = Tracer(source_of(model, mode=mode, dtype=dtype))
    return tracers[key]


def _spans(timeline: Any) -> dict[str, Any]:
    return {"start_s": timeline.start_s.tolist(), "end_s": timeline.end_s.tolist(), "labels": timeline.labels,
            "rank": timeline.rank.tolist()}


@contextlib.contextmanager
def _damage(kind: str, rank: int) -> Iterator[Any]:
    """Give a function that damages the executor of a rank before its first step, as the control of a test."""
    from weft.run.wiring import Wiring

    weight = Wiring.loss_weight
    if kind == "even_weights":
        def even(self: Any, instance: int) -> float:
            stage = self.program.plan.stages[self.program.instances[instance].stage]
            return 1 / self.program.plan.microbatches / len(stage.replicas)

        Wiring.loss_weight = even  # type: ignore[method-assign]
    try:
        yield lambda executor: _adjust(executor, kind, rank)
    finally:
        Wiring.loss_weight = weight  # type: ignore[method-assign]


def _adjust(executor: Any, kind: str, rank: int) -> None:
    import torch

    from weft.plan.program import Op, Phase

    program, actions = executor.program, executor.bound.actions
    for position, item in enumerate(program.instructions(rank)):
        is_first = item.microbatch == 0 and rank == 0
        if kind == "no_all_reduce" and item.op == Op.COLLECTIVE:
            actions[position] = lambda: None
        elif kind == "lost_weight_gradient" and item.op == Op.COMPUTE and item.phase != Phase.F and is_first:
            actions[position] = _without_gradients(actions[position], executor.parameters)
        elif kind == "swapped_channel" and item.op == Op.RECV and item.microbatch in (0, 1) and rank == 1:
            _swap(executor)
            return
    if kind == "changed_weight" and rank == 1:
        tensor = executor.parameters.tensors[min(executor.parameters.tensors)]
        with torch.no_grad():
            tensor.add_(1e-5 * torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape))
    if kind == "swapped_inputs":
        places = [given for given in executor.bound.given if given.name in ("tokens", "image")]
        if len(places) > 1:
            a, b = places[:2]
            a.arguments[a.place], b.arguments[b.place] = b.arguments[b.place], a.arguments[a.place]


def _without_gradients(action: Any, parameters: Any) -> Any:
    def damaged() -> None:
        before = {name: parameters.gradient(name).clone() for name in parameters.tensors}
        action()
        for name, value in before.items():
            if parameters.tensors[name].grad is not None:
                parameters.tensors[name].grad.copy_(value)

    return damaged


def _swap(executor: Any) -> None:
    """Let rank 1 take the first two messages of its first channel for each other."""
    program = executor.program
    receives = [(position, item) for position, item in enumerate(program.instructions(1)) if item.op.name == "RECV"]
    channel = receives[0][1].channel
    first, second = [position for position, item in receives if item.channel == channel][:2]
    receive = executor.transport.receive
    tags: list[int] = []

    def swapped(tensor: Any, source: int, tag: int) -> Any:
        return receive(tensor, source, {tags[0]: tags[1], tags[1]: tags[0]}.get(tag, tag))

    for position in (first, second):
        for part in executor.bound.actions[position].__closure__:
            if isinstance(part.cell_contents, list):
                tags.append(part.cell_contents[0][1])
        for part in executor.bound.actions[position].__closure__:
            if part.cell_contents == receive:
                part.cell_contents = swapped


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
