"""The runtime's only way to other ranks: tensors between two ranks, sums over a group, and small records to rank 0.

One class over ``torch.distributed``. Sends and receives go straight to the backend, without the per-call checks of
the public functions, because the program was checked before. Where ranks are on unlike devices, or share one GPU, nccl
cannot connect them: then all use gloo, and what is on a GPU passes through the host's memory. Records travel as JSON,
never as pickles.

gloo keeps messages apart by tags. nccl has none: a communicator is one queue on each of its ranks, where an operation
waits for its partner and all later ones for it. So that no program which ``weft.plan.check`` accepts can hang there:

- Messages from one rank to another have a communicator of their own, made for that direction: a queue of sends on one
  side, of receives on the other, in one order. What goes the other way is never behind it: nothing has to be batched.
- Groups have a communicator for each use: inside stages, exchanges, lanes.
- All of them are made, and used once, in one order on all ranks, before the first step.
- A rank issues everything from the thread that runs its program (or the backward in it), lanes included. So what the
  ranks issue are cuts of one sequence, and even a GPU that runs one operation at a time comes to the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.base.errors import RunError
from weft.run.failures import PeerLost, failure
from weft.run.status import StatusLine
from weft.run.wire import ExchangeGroup, Promise, Staging, Work, gathering, moved_per_entry, settled, to_add, to_move

Pair = tuple[int, int]
"""The source and the target of messages."""

ABORT_S: Final = 10.0
"""How long a rank that has failed waits for its GPU to break off."""


class Transport:
    """The connections of one rank; ``close`` gives them up."""

    is_metered = False
    """While memory is measured: a collective ends when the backend's thread has let go of its tensors."""
    in_pairs = False
    """Messages have a queue for each pair of ranks."""

    def __init__(self, *, rank: int, num_ranks: int, device: torch.device, timeout_s: float = 300.0,
                 store: Any = None, by_host: bool = False, in_pairs: bool | None = None,
                 status: StatusLine | None = None) -> None:
        """Connect to the ranks that meet at ``store``, or else at ``MASTER_ADDR:MASTER_PORT``.

        ``by_host``, the same on all ranks: messages between GPUs pass through the hosts' memory. ``in_pairs``,
        likewise: messages have a queue for each pair of ranks and no tags, as nccl needs it (the default there). Where
        the process has connected to the other ranks before, those connections are used. While the rank waits for
        another, its line ``status`` says so.
        """
        self.status = status or StatusLine(rank=rank)
        self.status.is_cpu = device.type == "cpu"
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.staging = Staging(device) if by_host and device.type != "cpu" else None
        """Where messages pass through the host's memory."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not by_host else "gloo"
        self._is_adopted = dist.is_initialized()
        if store is not None:  # a store may serve several transports of a process, one after the other
            store = dist.PrefixStore(f"weft-{store.add(f'weft-transports-{rank}', 1)}", store)
        try:
            if not self._is_adopted:
                dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks,
                                        timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as problem:
            raise PeerLost(f"rank {rank} cannot connect to the other {num_ranks - 1} ranks at "
                           f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {problem}") from problem
        self._store, self._timeout_s = store, timeout_s
        self._world = dist.group.WORLD
        try:
            self._cpu = self._world._get_backend(torch.device("cpu"))
            self._backend = self._cpu if by_host else self._world._get_backend(device)
        except RuntimeError as problem:
            raise RunError(f"the process group that is there has no backend for cpu or {device.type}: initialize it "
                           f"with 'cpu:gloo,cuda:nccl', or leave that to Weft") from problem
        self.in_pairs = not self.is_gloo if in_pairs is None else in_pairs
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(num_ranks)): self._world} if self.is_gloo else {}
        self._exchange_groups: dict[tuple[int, ...], Any] = {}
        self._lane_groups: dict[tuple[int, ...], Any] = {}
        self._pairs: dict[Pair, Any] = {}
        self._lane_pairs: dict[Pair, Any] = {}
        self._record_tag = 1 << 28
        self._num_meetings = 0

    def connect_groups(self, groups: Iterable[tuple[int, ...]], *, exchanges: Iterable[tuple[int, ...]] = (),
                       lanes: Iterable[tuple[int, ...]] = (), pairs: Iterable[Pair] = (),
                       lane_pairs: Iterable[Pair] = ()) -> None:
        """Make the groups of ranks that stages compute in, those that exchange gradients, and queues of messages.

        All ranks must name the same groups in the same order. Exchanges have groups of their own: they are issued
        beside the collectives inside stages, and those of one group must have one order on all ranks. So have those
        exchanges that run on ``lanes``, beside both. ``pairs`` send messages of the program, ``lane_pairs`` of lanes.
        """
        for wanted, made in ((groups, self._groups), (exchanges, self._exchange_groups), (lanes, self._lane_groups)):
            for ranks in wanted:
                if ranks not in made and len(ranks) > 1:
                    made[ranks] = self._new_group(ranks, _first_sum)
        for ends, queues in ((pairs, self._pairs), (lane_pairs, self._lane_pairs)):
            for pair in sorted({*ends} - queues.keys(), key=_turn) if self.in_pairs else ():
                group = self._new_group(sorted(pair), partial(self._first_message, pair))
                where = torch.device("cpu") if self.is_gloo else self.device
                queues[pair] = group._get_backend(where) if self.rank in pair else None
        if not self.is_gloo:
            torch.cuda.synchronize(self.device)

    def _new_group(self, ranks: Sequence[int], first_use: Callable[[Any, Tensor], Work]) -> Any:
        """Return a new group of the backend; on nccl, which connects a group when it is used, after its first use."""
        if self.is_gloo:
            return dist.new_group(ranks)
        group = dist.new_group(ranks, backend="nccl", timeout=timedelta(seconds=self._timeout_s))
        if self.rank in ranks:
            try:
                first_use(group, torch.zeros(1, device=self.device)).wait()
            except RuntimeError as problem:
                raise self._failure(problem, "connecting", tuple(ranks)) from problem
        return group

    def _first_message(self, pair: Pair, group: Any, number: Tensor) -> Work:
        way = group.send if pair[0] == self.rank else group.recv
        work: Work = way([number], _place_of_other(pair, self.rank), 0)
        return work

    def lane_group(self, ranks: tuple[int, ...]) -> ExchangeGroup | None:
        """Return the group of some ranks for exchanges on lanes; None if this rank is not in it, or alone."""
        if self.rank not in ranks or len(ranks) == 1:
            return None
        pairs = {pair: (group, _place_of_other(pair, self.rank)) for pair, group in self._lane_pairs.items()
                 if self.rank in pair}
        return ExchangeGroup(self._lane_groups[ranks], ranks, ranks.index(self.rank), is_gloo=self.is_gloo, pairs=pairs)

    def _queue(self, source: int, target: int, tag: int) -> tuple[Any, int, int]:
        """Return what carries messages from one rank to another: the backend, the other's place in it, and the tag."""
        other = target if source == self.rank else source
        if not self.in_pairs:
            return self._backend, other, tag
        return self._pairs[source, target], _place_of_other((source, target), self.rank), 0

    def send(self, tensor: Tensor, target: int, tag: int) -> Work:
        """Start sending a contiguous tensor; it must stay as it is until the work is done."""
        queue, place, number = self._queue(self.rank, target, tag)

        def start(sent: Tensor) -> Work:
            try:
                work: Work = queue.send([to_move(settled(sent))], place, number)
            except RuntimeError as problem:
                raise failure(problem, lost=f"rank {self.rank} lost rank {target}",
                              doing=f"sending {_what(sent)} from rank {self.rank} to rank {target}") from problem
            return work

        return start(tensor) if self.staging is None else self.staging.send(tensor, start)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Start receiving into a contiguous tensor."""
        received = tensor if self.staging is None else self.staging.room(tensor.shape, tensor.dtype)
        queue, place, number = self._queue(source, self.rank, tag)
        try:
            work: Work = queue.recv([to_move(received)], place, number)
        except RuntimeError as problem:
            raise failure(problem, lost=f"rank {self.rank} lost rank {source}",
                          doing=f"receiving {_what(tensor)} on rank {self.rank} from rank {source}") from problem
        return work if received is tensor else Promise(work, partial(tensor.copy_, received, non_blocking=True))

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        """Start replacing the tensor by its sum over ``ranks``."""
        def start(summed: Tensor) -> Work:
            try:
                work: Work = self._exchange_groups[ranks].allreduce([to_add(summed)])
            except RuntimeError as problem:
                raise self._failure(problem, f"adding up {_what(summed)}", ranks) from problem
            return work

        return start(tensor) if self.staging is None else self.staging.send(tensor, start, brings_back=True)

    # ---- collectives that wait: between the parts of a stage that several ranks compute together --------------------

    def reduced(self, tensor: Tensor, ranks: tuple[int, ...], how: str = "sum") -> Tensor:
        """Return the sum (or ``max``) of the tensor over ``ranks``, a new tensor."""
        result = self.on_wire(tensor.clone(memory_format=torch.contiguous_format))
        options = dist.AllreduceOptions()
        options.reduceOp = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how]
        return self._collect(lambda group: group.allreduce([to_add(result.detach(), how)], options), result, ranks,
                             "adding up")

    def gathered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Return the tensors of ``ranks``, which have one shape, one after the other along a new first dimension."""
        sent = self.on_wire(settled(tensor))
        result = self._room((len(ranks), *sent.shape), sent.dtype)
        start = partial(gathering, result, sent, ranks.index(self.rank), by_messages=self.is_gloo)
        return self._collect(start, result, ranks, "gathering")

    def sum_scattered(self, tensor: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Return this rank's entry, along the first dimension, of the sum of the tensor, which may become that sum."""
        sent = self.on_wire(settled(tensor))
        if self.is_gloo:  # it would add up a copy of all entries
            return self._collect(lambda group: group.allreduce([to_add(sent.detach())]), sent, ranks,
                                 "adding up and scattering")[ranks.index(self.rank)].clone()
        result = self._room(sent.shape[1:], sent.dtype)
        return self._collect(lambda group: group._reduce_scatter_base(to_add(result).view(-1), to_add(sent).view(-1)),
                             result, ranks, "adding up and scattering")

    def all_to_all(self, flat: Tensor, ranks: tuple[int, ...], *, sent: list[int], received: list[int]) -> Tensor:
        """Return what ``ranks`` have for this one; ``flat`` is what this one has for them, in pieces of these sizes."""
        return self.exchanged(flat, ranks, sent=sent, received=received)()

    def exchanged(self, flat: Tensor, ranks: tuple[int, ...], *, sent: list[int],
                  received: list[int]) -> Callable[[], Tensor]:
        """Start the same, and return what waits for it; ``flat`` must stay as it is until then."""
        given = self.on_wire(settled(flat))
        result, scale = self._room((sum(received),), given.dtype), moved_per_entry(given.dtype)
        return self._begin(lambda group: group.alltoall_base(
            to_move(result.detach()), to_move(given), [scale * size for size in received],
            [scale * size for size in sent]), result, ranks, "exchanging")

    @property
    def is_gloo(self) -> bool:
        """Return whether gloo carries what the ranks compute with; else nccl does."""
        return self.staging is not None or self.device.type == "cpu"

    def on_wire(self, tensor: Tensor) -> Tensor:
        """Return the tensor where the backend can take it: itself, or a copy in the host's memory."""
        return tensor if self.staging is None else self.staging.copy(tensor)

    def through_wire(self, tensor: Tensor, exchange: Callable[[Tensor], None]) -> None:
        """Let ``exchange`` change the tensor where the backend can take it: itself, or a copy in the host's memory."""
        wire = self.on_wire(tensor)
        exchange(wire)
        if wire is not tensor:
            tensor.copy_(wire)

    def _collect(self, start: Callable[[Any], Work], result: Tensor, ranks: tuple[int, ...], verb: str) -> Tensor:
        """Return the result of a collective, on the rank's device, when it is done."""
        return self._begin(start, result, ranks, verb)()

    def _begin(self, start: Callable[[Any], Work], result: Tensor, ranks: tuple[int, ...],
               verb: str) -> Callable[[], Tensor]:
        """Start a collective, and return what waits for its result and gives it on the rank's device."""
        users = _storage_users(result) if self.is_metered else 0
        try:
            started = [start(self._groups[ranks])]
        except RuntimeError as problem:
            raise self._failure(problem, f"{verb} {_what(result)}", ranks) from problem

        def wait() -> Tensor:
            self.status.begin_wait()
            try:
                started.pop().wait()  # it holds its tensors until it is let go of
                while self.is_metered and _storage_users(result) > users:
                    time.sleep(1e-5)
            except RuntimeError as problem:
                raise self._failure(problem, f"{verb} {_what(result)}", ranks) from problem
            self.status.end_wait()
            return result if self.staging is None else result.to(self.device)

        return wait

    def _failure(self, problem: RuntimeError, doing: str, ranks: tuple[int, ...]) -> RunError:
        return failure(problem, lost=f"rank {self.rank} lost one of the ranks {ranks}",
                       doing=f"{doing} over the ranks {ranks}")

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return room for what a collective brings, where the backend can put it."""
        if self.staging is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self.staging.room(shape, dtype)

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._finish(self._cpu.allreduce([torch.zeros(1)]))

    def meet(self) -> None:
        """Return when all ranks have come here, however long they take: no message is under way meanwhile."""
        if self.num_ranks == 1:
            return
        store = self._store if self._store is not None else dist.distributed_c10d._get_default_store()
        self._num_meetings += 1
        self.status.begin_wait()
        try:
            store.add(f"weft-meeting-{self._num_meetings}", 1)
            while store.add(f"weft-meeting-{self._num_meetings}", 0) < self.num_ranks:
                time.sleep(0.02)
        except RuntimeError as problem:
            raise PeerLost(f"rank {self.rank} lost the store: {problem}") from problem
        self.status.end_wait()

    def gather_records(self, record: Any) -> list[Any] | None:
        """Return the JSON records of all ranks on rank 0, None elsewhere."""
        data = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
        parts = [self.gather_tensor(data, source=source) for source in range(self.num_ranks)]
        if self.rank != 0:
            return None
        return [json.loads(bytes(part.numpy())) for part in parts if part is not None]

    def share_record(self, record: Any) -> Any:
        """Return rank 0's JSON record on all ranks."""
        data = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel() if self.rank == 0 else 0], dtype=torch.int64)
        self._finish(self._cpu.allreduce([length]))
        if self.rank != 0:
            data = torch.empty(int(length), dtype=torch.uint8)
        self._finish(self._cpu.broadcast([data]))
        return json.loads(bytes(data.numpy()))

    def first_record(self, record: Any) -> tuple[int, Any]:
        """Return on all ranks the first rank whose JSON record is not empty, and that record; (-1, None) if none is."""
        records = self.gather_records(record) or []
        found = next(((rank, item) for rank, item in enumerate(records) if item), (-1, None))
        rank, first = self.share_record(found)
        return rank, first

    def total(self, number: float) -> float:
        """Return the sum of the ranks' numbers, the same on all ranks."""
        return self.totals([number])[0]

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of the ranks' numbers, place by place, the same on all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64)
        self._finish(self._cpu.allreduce([values]))
        return [float(value) for value in values]

    def gather_tensor(self, tensor: Tensor | None, *, source: int) -> Tensor | None:
        """Return on rank 0 the one-dimensional ``tensor`` of rank ``source``; None on other ranks."""
        if self.rank not in (0, source):
            return None
        if source == 0:
            return tensor
        header = torch.zeros(1, dtype=torch.int64)
        if self.rank == source:
            assert tensor is not None
            data = settled(tensor.detach()).cpu().view(torch.uint8)
            header[0] = data.numel()
            self._finish(self._cpu.send([header], 0, self._record_tag))
            self._finish(self._cpu.send([data], 0, self._record_tag))
            return None
        self._finish(self._cpu.recv([header], source, self._record_tag))
        received = torch.empty(int(header), dtype=torch.uint8)
        self._finish(self._cpu.recv([received], source, self._record_tag))
        return received

    def _finish(self, work: Work) -> None:
        self.status.begin_wait()
        try:
            work.wait()
        except RuntimeError as problem:
            raise failure(problem, lost=f"rank {self.rank} lost another rank",
                          doing=f"a message of rank {self.rank} about the run") from problem
        self.status.end_wait()

    def clock_offset_s(self, rounds: int = 8) -> float:
        """Return what to add to this rank's ``time.perf_counter`` to get rank 0's; zero on the same machine.

        For another machine: half the smallest round trip of a few messages with rank 0, as in NTP.
        """
        machines = self.machines()
        offset = 0.0
        for other, machine in enumerate(machines):
            if machine == machines[0] or self.rank not in (0, other):
                continue
            times = [self._ping(other) for _ in range(rounds)]
            if self.rank == other:
                offset = min(times)[1]
        return offset

    def machines(self) -> list[int]:
        """Return a number for each rank; ranks on one machine have the same."""
        return self.numbers(_machine_number())

    def numbers(self, own: int) -> list[int]:
        """Return the whole number of each rank, on all ranks."""
        found = torch.zeros(self.num_ranks, dtype=torch.int64)
        found[self.rank] = own
        self._finish(self._cpu.allreduce([found]))
        return [int(value) for value in found]

    def _ping(self, other: int) -> tuple[float, float]:
        """Return (round trip, offset) on rank ``other``."""
        stamp = torch.zeros(1, dtype=torch.float64)
        tag = self._record_tag + 1
        if self.rank == 0:
            self._finish(self._cpu.recv([stamp], other, tag))
            stamp[0] = time.perf_counter()
            self._finish(self._cpu.send([stamp], other, tag))
            return 0.0, 0.0
        before = time.perf_counter()
        self._finish(self._cpu.send([stamp], 0, tag))
        self._finish(self._cpu.recv([stamp], 0, tag))
        after = time.perf_counter()
        return after - before, float(stamp) - (before + after) / 2

    def leave(self, patience_s: float = 30.0) -> None:
        """Return when every rank has come here, so that the process may end without breaking another's connection.

        The ranks meet in the store: a last message over the connections themselves could be cut off by an early end.
        Rank 0, which may serve the store, goes last.
        """
        if self.num_ranks == 1:
            return  # it need not even have a store
        store = self._store if self._store is not None else open_store(listen_fd=None, timeout_s=patience_s)
        deadline = time.monotonic() + patience_s
        try:
            if self.rank == 0:
                store.set("weft-finished", "")
                while store.add("weft-left", 0) < self.num_ranks - 1 and time.monotonic() < deadline:
                    time.sleep(0.01)
            else:
                store.wait(["weft-finished"], timedelta(seconds=self._timeout_s))
                store.add("weft-left", 1)
        except RuntimeError as problem:
            raise PeerLost(f"rank {self.rank} lost the store: {problem}") from problem

    def close(self) -> None:
        """Give up the connections, unless they were there before."""
        if dist.is_initialized() and not self._is_adopted:
            dist.destroy_process_group()

    def abort(self) -> None:
        """Break off what nccl has under way on this rank, which has failed; waiting for it could take for ever.

        Groups that were there before are left to who made them. gloo needs nothing: its calls fail with their peers.
        """
        if self.is_gloo or not dist.is_initialized():
            return
        tables = (self._groups, self._exchange_groups, self._lane_groups, self._pairs, self._lane_pairs)
        own = [group for made in tables for group in made.values()
               if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER]
        thread = threading.Thread(target=_abort, args=(own if self._is_adopted else None,), daemon=True)
        thread.start()  # a driver may be stuck
        thread.join(ABORT_S)


def _first_sum(group: Any, number: Tensor) -> Work:
    work: Work = group.allreduce([number])
    return work


def _abort(groups: Sequence[Any] | None) -> None:
    """Break off what some groups have under way, or all that the process has."""
    with contextlib.suppress(RuntimeError, ValueError, AttributeError):  # the first is a private function of PyTorch
        if groups is None:
            dist.distributed_c10d._abort_process_group()
        for group in groups or ():
            group.abort()


def _turn(pair: Pair) -> tuple[int, ...]:
    """Return a key that sorts pairs of ranks so that those which meet at the same time are far from each other.

    Each pair connects when both its ranks have come to it. In plain order those of a pipeline would wait for each other
    in a row; so all pairs at one distance have two turns, in each of which no rank is in two of them.
    """
    first, distance = min(pair), abs(pair[0] - pair[1])
    return distance, first // distance % 2, int(pair[0] > pair[1]), first


def _place_of_other(pair: Pair, rank: int) -> int:
    """Return the place of a rank's partner in the group of both, which is sorted."""
    return int(rank < max(pair))


def _storage_users(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users


def _what(tensor: Tensor) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"


def open_store(*, listen_fd: int | None, timeout_s: float, serve: bool = False) -> Any:
    """Return the store at ``MASTER_ADDR:MASTER_PORT``.

    This process serves it if it is given the listening socket, or is to make one.
    """
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=serve or listen_fd is not None,
            timeout=timedelta(seconds=timeout_s), master_listen_fd=listen_fd, wait_for_workers=False)
    except (RuntimeError, ValueError, KeyError) as problem:
        raise PeerLost(f"no store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: "
                       f"{problem}") from problem
    # torchrun on one host keeps its store when it starts the ranks again, with the addresses of those that died. On
    # several hosts its agents may count restarts differently, but there each attempt has a store of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    is_one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return store if attempt is None or not is_one_host else dist.PrefixStore(f"weft-attempt-{attempt}", store)


def meeting_store(timeout_s: float, *, rank: int) -> Any:
    """Return where the ranks meet: the store of ``torchrun``'s attempt, else one of rank 0 while its process lives.

    With a store for each connection instead, a rank could meet the one that another is about to close.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return open_store(listen_fd=None, timeout_s=timeout_s)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if address not in _own_stores:
        _own_stores[address] = open_store(listen_fd=None, timeout_s=timeout_s, serve=rank == 0)
    return _own_stores[address]


_own_stores: dict[str, Any] = {}


def _machine_number() -> int:
    """Return a number that ranks on one machine share (they share its monotonic clock too)."""
    text = socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        text += boot.read_text()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
