"""The ways in which the gradients of a bucket become equal on all ranks that hold its parameters, and when they begin.

``make_exchange`` returns the function that starts the exchange of one bucket. ``all_reduce`` is one collective of the
backend; the other methods have several steps and run beside the program on a ``Lane``:

    hierarchical        sum in each group at its first rank, all-reduce among the first ranks, send back in the group
    parameter_server    everyone sends to the server, which adds in the order of ranks and sends the sum to everyone
    sufficient_factors  ``weft.run.exchange_factors``

An exchange may be issued inside a backward, when the gradients of its parameters are final. PyTorch calls a hook when
it has added a gradient to ``parameter.grad``, once in a backward even if many operators read the parameter. The hooks
are there during one backward only, the last that adds to these gradients (``weft.plan.program`` says which). In what
order they are called does not matter: an exchange waits for those before it in the rank's list, so that every rank
issues them in the same order. What the hooks have not issued when the backward is done, because the loss does not
depend on a parameter after all, is issued after it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.model.graph import DETACH, Bool, Graph
from weft.plan.program import Bucket, Program
from weft.run.cells import Transfer
from weft.run.exchange_factors import FactorBlock, FactorExchange, FactorRows
from weft.run.parameters import Parameters
from weft.run.transport import Transport
from weft.run.wire import Work

Start = Callable[[], Sequence[Work]]


class _Pending:
    def __init__(self, future: Future[None], then: Callable[[], None] | None) -> None:
        self._future, self._then = future, then

    def wait(self) -> None:
        """Return when the exchange is done, its last step here; or raise what it raised."""
        self._future.result()
        if self._then is not None:
            self._then()

    def is_completed(self) -> bool:
        """Return whether ``wait`` would not wait for other ranks."""
        return self._future.done()


class Lane:
    """The thread on which a rank's exchanges run one after the other, and on a GPU their stream.

    They run in the order in which the program issues them. Their groups are not those of the main thread: on one group
    all ranks must issue collectives in the same order, which two threads would not keep.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-exchange")
        self.around: Callable[[], AbstractContextManager[Any]] | None = None
        """Gives a context for exchanges to run in, where somebody watches them."""

    def submit(self, run: Callable[[], None], *, then: Callable[[], None] | None = None) -> _Pending:
        """Start an exchange behind those that were started before, and behind what the GPU was told to do until now.

        Whoever waits for it does ``then``.
        """
        ready = None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()
        return _Pending(self._pool.submit(self._run, run, ready), then)

    def _run(self, run: Callable[[], None], ready: torch.cuda.Event | None) -> None:
        with torch.no_grad(), nullcontext() if self.around is None else self.around():
            if self._stream is None:
                run()
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                run()
            self._stream.synchronize()


def lane_groups(program: Program) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that exchanges on lanes run over, sorted, in the same order on every rank."""
    for bucket in program.buckets:
        if bucket.method == "hierarchical":
            yield from (tuple(sorted(group)) for group in bucket.groups)
            yield _leaders(bucket)
        elif bucket.method != "all_reduce":
            yield bucket.ranks


def make_exchange(program: Program, index: int, *, parameters: Parameters, factors: Mapping[int, FactorBlock],
                  transport: Transport, lane: Lane, later: list[Callable[[], None]] | None) -> Start:
    """Return what starts the exchange of a bucket; its works end when the gradients are there.

    What is left to compute then is added to ``later``; where that is None, waiting for the works computes it.
    """
    bucket, flat = program.buckets[index], parameters.flat[index]
    match bucket.method:
        case "all_reduce":
            return lambda: [transport.all_reduce(tensor, bucket.ranks) for tensor in flat]
        case "hierarchical":
            exchange = _hierarchical(bucket, transport)
        case "parameter_server":
            exchange = _parameter_server(bucket, transport)
        case "sufficient_factors":
            block = factors[index]
            factored = FactorExchange(program, bucket, block, parameters=parameters, transport=transport)
            if later is not None:
                later.append(factored.multiply)

            def start() -> Sequence[Work]:
                block.complete()
                return [lane.submit(factored.gather, then=factored.multiply if later is None else None)]

            return start

    def run() -> None:
        for tensor in flat:
            transport.through_wire(tensor, exchange)

    return lambda: [lane.submit(run)]


def _leaders(bucket: Bucket) -> tuple[int, ...]:
    return tuple(sorted(group[0] for group in bucket.groups))


def _hierarchical(bucket: Bucket, transport: Transport) -> Callable[[Tensor], None]:
    mine = next(group for group in bucket.groups if transport.rank in group)
    inside, leaders = transport.lane_group(tuple(sorted(mine))), transport.lane_group(_leaders(bucket))

    def exchange(tensor: Tensor) -> None:
        if inside is not None:
            inside.sum_at(tensor, mine[0])
        if leaders is not None and transport.rank == mine[0]:
            leaders.sum_all(tensor)
        if inside is not None:
            inside.spread(tensor, mine[0])

    return exchange


def _parameter_server(bucket: Bucket, transport: Transport) -> Callable[[Tensor], None]:
    group, server = transport.lane_group(bucket.ranks), bucket.server
    assert group is not None, "an exchange is among several ranks"
    assert server is not None, "the plan was checked"
    others = [rank for rank in bucket.ranks if rank != server]

    def serve(tensor: Tensor) -> None:
        received = [torch.empty_like(tensor) for _ in others]
        group.receive(*zip(received, others, strict=True))
        for item in received:
            tensor.add_(item)
        group.send(tensor, *others)

    def ask(tensor: Tensor) -> None:
        group.send(tensor, server)
        group.receive((tensor, server))

    return serve if transport.rank == server else ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """One exchange that may be issued inside a backward."""

    position: int
    """Of its instruction."""
    parameters: Sequence[torch.nn.Parameter | FactorRows]
    """Those of its parameters whose gradients the backward makes final, and the factors that it completes."""
    issue: Callable[[], None]
    transfer: Transfer


class EarlyExchanges:
    """The exchanges of one backward, in the order of the list; a context that encloses the backward."""

    def __init__(self, items: Sequence[Early], *, starts: array[int], device: torch.device) -> None:
        self.items = list(items)
        self._starts, self._device = starts, device
        self._missing: list[int] = []
        self._issued: list[Any] = []
        """When each exchange was issued, so far."""
        self._handles: list[Any] = []
        self._origin: tuple[int, Any] = (0, None)
        self._seen = 0
        """So many exchanges were seen to be done."""

    def __enter__(self) -> None:
        """Watch the parameters, and issue what waits for none of them."""
        self._missing = [len(item.parameters) for item in self.items]
        self._issued, self._seen = [], 0
        if self._device.type == "cuda":
            self._origin = (time.perf_counter_ns(), self._mark())
        self._handles = [parameter.register_post_accumulate_grad_hook(self._counter(number))
                         for number, item in enumerate(self.items) for parameter in item.parameters]
        self._issue()

    def __exit__(self, *_: object) -> None:
        """Leave the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def instruction(self, number: int) -> Callable[[], None]:
        """Return what the instruction of an exchange does, after the backward: issue it, unless that was done."""
        item = self.items[number]

        def action() -> None:
            if number < len(self._issued):
                self._starts[item.position] = self._time_ns(self._issued[number])
            else:
                item.issue()

        return action

    def _counter(self, number: int) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._issue()
            elif self._seen < len(self._issued) and self.items[self._seen].transfer.is_seen_done():
                self._seen += 1

        return hook

    def _issue(self) -> None:
        while (number := len(self._issued)) < len(self.items) and self._missing[number] == 0:
            self._issued.append(self._mark())
            self.items[number].issue()

    # On a GPU the host runs ahead of the device: there an event marks the time, which is read when all is done.

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _time_ns(self, mark: Any) -> int:
        if self._device.type != "cuda":
            return int(mark)
        host_ns, event = self._origin
        return host_ns + int(event.elapsed_time(mark) * 1e6)


def leads_to_loss(graph: Graph) -> Bool:
    """Return which operators the loss sends gradients to: others leave none, and nothing goes through a detach."""
    leads = np.zeros(graph.num_ops, dtype=np.bool_)
    producers = graph.tensor_producer.tolist()
    todo = [producers[tensor] for tensor in graph.outputs[:1]]
    while todo:
        op = todo.pop()
        if op >= 0 and not leads[op] and graph.op_kinds[op] != DETACH:
            leads[op] = True
            todo.extend(producers[tensor] for tensor in graph.op_inputs(op).tolist())
    return leads


def with_gradient(graph: Graph) -> set[str]:
    """Return the parameters that the loss sends gradients to: on one device, others have none and never change."""
    leads = leads_to_loss(graph)
    read = {tensor for op in range(graph.num_ops) if leads[op] for tensor in graph.op_inputs(op).tolist()}
    return {graph.tensor_names[tensor] for tensor in graph.parameters.tolist() if tensor in read}
