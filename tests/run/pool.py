"""A few ranks that stay up and run one plan after another, because starting processes takes longer than most tests.

``Pool`` is what tests use. Behind all pools of a session is one process, the server (``python -m tests.run.pool``):
it imports once, traces each model once, and becomes the ranks by forking. Ranks that lack a trace are replaced by new
ones that have it. A job may ask for damage, which a test's control needs: it must make the verification fail.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
JOB_LIMIT_S = 100.0


class Pool:
    """Ranks in processes of their own, as a context manager; they have traced the models named, in float64."""

    def __init__(self, num_ranks: int, folder: Path, *, models: Sequence[str] = ("tiny_gpt",),
                 mode: str = "training") -> None:
        self.num_ranks, self.folder, self.models, self.mode = num_ranks, folder, models, mode
        self.count = 0

    def __enter__(self) -> Pool:
        self.server = _Server.running()
        self.server.tell({"do": "open", "pool": id(self), "num_ranks": self.num_ranks, "models": list(self.models),
                          "mode": self.mode})
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.server.tell({"do": "close", "pool": id(self)})

    def run(self, plan: Any, model: str, *, damage: str = "", **options: Any) -> dict[str, Any]:
        """Return rank 0's result of running the plan; ``damage`` is one of those in ``_damage``."""
        from weft.plan.plan import save_plan

        self.count += 1
        path = self.folder / f"plan{self.count}.json"
        save_plan(plan, path)
        self.server.tell({"do": "run", "pool": id(self), "plan": str(path), "model": model, "damage": damage,
                          "options": {"verify": True, **options}})
        answers = self.server.answers()
        problems = [answer["error"] for answer in answers if "error" in answer]
        assert not problems, "\n".join(problems)
        return answers[0]


class _Server:
    """The process behind the pools, as they see it."""

    current: _Server | None = None

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            self.process = subprocess.Popen([sys.executable, "-m", "tests.run.pool", str(theirs.fileno())], cwd=ROOT,
                                            env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
        self.socket, self.lines = ours, ours.makefile("rw")

    @classmethod
    def running(cls) -> _Server:
        """Return the server of this session, started if there is none."""
        if cls.current is None:
            cls.current = cls()
            atexit.register(cls.end)
        return cls.current

    @classmethod
    def end(cls) -> None:
        """End the server and all ranks; it also ends by itself when this process does."""
        server, cls.current = cls.current, None
        if server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
            with contextlib.suppress(OSError):
                server.lines.close()
            server.socket.close()

    def tell(self, message: dict[str, Any]) -> None:
        self.lines.write(json.dumps(message) + "\n")
        self.lines.flush()

    def answers(self) -> list[dict[str, Any]]:
        """Return what each rank has answered to the job."""
        ready, _, _ = select.select([self.socket], [], [], JOB_LIMIT_S)
        line = self.lines.readline() if ready else ""
        if not line:
            _Server.end()
        assert ready, "the ranks did not answer in time"
        assert line, "the server of the ranks has died"
        return json.loads(line)


class _Ranks:
    """Processes forked from the server: they have its modules and traces."""

    def __init__(self, num_ranks: int, tracers: dict[Any, Any], traces: set[Any]) -> None:
        self.traces = frozenset(traces)
        jobs, answers = [os.pipe() for _ in range(num_ranks)], [os.pipe() for _ in range(num_ranks)]
        self.children: list[int] = []
        gc.freeze()
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listener.getsockname()[1]))
            for rank in range(num_ranks):
                self.children.append(os.fork())
                if self.children[-1] == 0:
                    mine = (jobs[rank][0], answers[rank][1])
                    for fd in (fd for pair in (*jobs, *answers) for fd in pair if fd not in mine):
                        os.close(fd)
                    _serve_rank(rank, num_ranks, listener.fileno(), os.fdopen(mine[0]), os.fdopen(mine[1], "w"),
                                tracers)
                    os._exit(0)
        for fd in (*(job[0] for job in jobs), *(answer[1] for answer in answers)):
            os.close(fd)
        self.jobs = [os.fdopen(job[1], "w") for job in jobs]
        self.answers = [os.fdopen(answer[0]) for answer in answers]

    def run(self, job: str) -> list[dict[str, Any]]:
        with contextlib.suppress(BrokenPipeError):
            for stream in self.jobs:
                stream.write(job)
                stream.flush()
        lines = [stream.readline() for stream in self.answers]
        return [json.loads(line) if line else {"error": f"rank {rank} has died"} for rank, line in enumerate(lines)]

    def end(self) -> None:
        for child in self.children:
            os.kill(child, signal.SIGKILL)
        for child in self.children:
            os.waitpid(child, 0)
        for stream in (*self.jobs, *self.answers):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _serve(control: socket.socket) -> None:
    """Do what the pools ask for, until the test session has ended."""
    import weft.run.worker  # noqa: F401 - so that ranks need not

    tracers: dict[tuple[str, str, str], Any] = {}
    traces: set[Any] = set()
    sizes: dict[int, int] = {}
    ranks: dict[int, _Ranks] = {}
    stream = control.makefile("rw")
    for line in stream:
        message = json.loads(line)
        pool = message["pool"]
        if message["do"] == "open":
            sizes[pool] = message["num_ranks"]
            for model in message["models"]:
                _trace(tracers, traces, (model, message["mode"], "float64"), 2, batch_dims=False)
        elif message["do"] == "run":
            wanted = _trace_ahead(tracers, traces, message)
            if pool in ranks and not wanted <= ranks[pool].traces:
                ranks.pop(pool).end()
            if pool not in ranks:
                ranks[pool] = _Ranks(sizes[pool], tracers, traces)
            answers = ranks[pool].run(line)
            stream.write(json.dumps(answers) + "\n")
            stream.flush()
            if any("error" in answer for answer in answers):
                ranks.pop(pool).end()
        elif pool in ranks:
            ranks.pop(pool).end()
    for item in ranks.values():
        item.end()


def _trace_ahead(tracers: dict[Any, Any], traces: set[Any], job: dict[str, Any]) -> set[Any]:
    """Return the traces that the ranks will ask for, after making them; what cannot be traced they shall report."""
    from weft.base.errors import WeftError
    from weft.plan.plan import load_plan, split_samples

    plan = load_plan(job["plan"])
    key = (job["model"], plan.model.mode, job["options"].get("dtype") or "float64")
    divisions = {split_samples(plan.microbatch_size, tuple(replica.share for replica in stage.replicas))
                 for stage in plan.stages}
    numbers = sorted({number for division in divisions for number in division})
    wanted = {(numbers[0], len(divisions) > 1), *((number, False) for number in numbers)}
    with contextlib.suppress(WeftError):
        for number, batch_dims in sorted(wanted, key=lambda item: (item[0], not item[1])):
            _trace(tracers, traces, key, number, batch_dims=batch_dims)
    return {(key, *item) for item in wanted} & traces


def _trace(tracers: dict[Any, Any], traces: set[Any], key: tuple[str, str, str], number: int, *,
           batch_dims: bool) -> None:
    if (key, number, batch_dims) not in traces:
        _tracer(tracers, *key).trace(number, batch_dims=batch_dims)
        traces.add((key, number, batch_dims))


def _serve_rank(rank: int, num_ranks: int, listen_fd: int, jobs: Any, answers: Any, tracers: dict[Any, Any]) -> None:
    import torch

    from weft.base.files import encode
    from weft.plan.plan import load_plan
    from weft.run.result import RunOptions
    from weft.run.transport import Transport, open_store
    from weft.run.worker import execute

    store = open_store(listen_fd=listen_fd if rank == 0 else None, timeout_s=60)
    transport = Transport(rank=rank, num_ranks=num_ranks, device=torch.device("cpu"), timeout_s=60, store=store)
    for line in jobs:
        job = json.loads(line)
        plan, options = load_plan(job["plan"]), RunOptions(**job["options"])
        try:
            tracer = _tracer(tracers, job["model"], plan.model.mode, options.dtype or "float64")
            counts: dict[str, Counter[str]] = {}
            with _damage(job["damage"], rank, counts) as adjust:
                result = execute(plan, tracer, options, transport=transport, adjust=adjust)
            answer = {} if result is None else {
                "losses": result.losses, "notes": result.notes, "verification": encode(result.verification),
                "gradients": {name: value.tolist() for name, value in (result.gradients or {}).items()},
                "spread": result.gradient_spread,
                "memory": [(item.account_bytes, item.measured_bytes) for item in result.memory or ()],
                "timeline": _spans(result.timeline), "counts": counts}
        except Exception as problem:
            answer = {"error": f"rank {rank}: {type(problem).__name__}: {problem}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


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
def _damage(kind: str, rank: int, counts: dict[str, Counter[str]]) -> Iterator[Any]:
    """Give a function that damages the executor of a rank before its first step, as the control of a test.

    It also lets the collectives inside the computes of the first micro-batch be counted, by phase.
    """
    from weft.run.wiring import Wiring

    weight = Wiring.loss_weight
    if kind == "even_weights":
        def even(self: Any, instance: int) -> float:
            stage = self.program.plan.stages[self.program.instances[instance].stage]
            return 1 / self.program.plan.microbatches / len(stage.replicas)

        Wiring.loss_weight = even  # type: ignore[method-assign]
    try:
        with _lost_collective(kind) if kind.startswith("lost ") else contextlib.nullcontext():
            yield lambda executor: (_adjust(executor, kind, rank), _count(executor, rank, counts))
    finally:
        Wiring.loss_weight = weight  # type: ignore[method-assign]


def _widened(part: Any, shape: Any) -> Any:
    """Return the part at the begin of a tensor of this shape."""
    room = part.new_zeros(shape)
    room[tuple(slice(size) for size in part.shape)] = part
    return room


@contextlib.contextmanager
def _lost_collective(kind: str) -> Iterator[None]:
    """Let one exchange inside a stage not happen, on all ranks: ``lost all_reduce 3`` is the third sum."""
    from weft.run.mesh import AxisGroup

    _, name, number = kind.split()
    instead = {"all_reduce": lambda group, tensor, how="sum": tensor.clone(),
               "all_gather": lambda group, tensor: [tensor] * group.size,
               "all_to_all": lambda group, parts, shapes: [parts[0].new_zeros(shape) for shape in shapes],
               "pass_on": lambda group, tensor: lambda: tensor,
               "reduce_scatter": lambda group, parts, longest: _widened(parts[group.rank], longest)}[name]
    original = getattr(AxisGroup, name)
    left = int(number)

    def damaged(self: Any, *args: Any) -> Any:
        nonlocal left
        left -= 1
        return instead(self, *args) if left == 0 else original(self, *args)

    setattr(AxisGroup, name, damaged)
    try:
        yield
    finally:
        setattr(AxisGroup, name, original)
    assert left <= 0 or left == int(number), f"there were only {int(number) - left} of {name}"


def _count(executor: Any, rank: int, counts: dict[str, Counter[str]]) -> None:
    """Note the collectives of every compute of the first micro-batch."""
    from weft.plan.program import Op

    for position, item in enumerate(executor.program.instructions(rank)):
        if item.op == Op.COMPUTE and item.microbatch == 0:
            mesh = executor.binder.stages[item.instance].mesh
            if mesh is not None:
                into = counts.setdefault(item.phase.name, Counter())
                executor.binder.actions[position] = _counted(executor.binder.actions[position], mesh, into)


def _counted(action: Any, mesh: Any, counts: Counter[str]) -> Any:
    def counted() -> None:
        before = Counter(mesh.counts)
        action()
        counts.update(mesh.counts - before)

    return counted


def _adjust(executor: Any, kind: str, rank: int) -> None:
    import torch

    from weft.plan.program import Op, Phase

    program, actions = executor.program, executor.binder.actions
    for early in executor.binder.early.values():
        if kind == "no_all_reduce":
            early.items.clear()
        elif kind == "too_early":
            early.items[:] = [replace(item, parameters=(), issue=_done_at_once(item)) for item in early.items]
    _damage_units(executor, kind, rank)
    for position, item in enumerate(program.instructions(rank)):
        is_first = item.microbatch == 0 and rank == 0
        if kind == "no_all_reduce" and item.op == Op.COLLECTIVE and not program.buckets[item.bucket].is_of_unit:
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
        places = [given for given in executor.binder.given if given.name in ("tokens", "image", "x")]
        if len(places) > 1:
            a, b = places[:2]
            a.arguments[a.place], b.arguments[b.place] = b.arguments[b.place], a.arguments[a.place]


def _damage_units(executor: Any, kind: str, rank: int) -> None:
    """Let the pieces of rank 1 go wrong in one way."""
    for store in executor.parameters.units.stores.values() if rank == 1 else ():
        if kind == "lost_piece":  # what the others have added is forgotten
            original = store.scatter
            store.scatter = lambda transport, store=store, original=original: (
                original(transport), store.piece_gradient.copy_(store.piece_gradient * 0.5))
        elif kind == "stale_piece":
            original = store.gather
            store.gather = lambda transport, store=store, original=original: (
                original(transport), store.whole[: store.unit.bounds[1] // 2].zero_())
        elif kind == "lost_group_sum":
            original = store.sum_over_groups
            store.sum_over_groups = lambda transport, ranks, store=store, original=original: (
                kept := store.piece_gradient.clone(), original(transport, ranks), store.piece_gradient.copy_(kept))


def _done_at_once(item: Any) -> Any:
    def issue() -> None:
        item.issue()
        item.transfer.wait()

    return issue


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
        for part in executor.binder.actions[position].__closure__:
            if isinstance(part.cell_contents, list):
                tags.append(part.cell_contents[0][-1])
        for part in executor.binder.actions[position].__closure__:
            if part.cell_contents == receive:
                part.cell_contents = swapped


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
