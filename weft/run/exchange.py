"""The ways in which the gradients of a bucket become equal on all ranks that hold its parameters.

``make_exchange`` returns the function that starts the exchange of one bucket. ``all_reduce`` is one collective of the
backend; the other methods have several steps and run beside the program on a ``Lane``:

    hierarchical        sum in each group at its first rank, all-reduce among the first ranks, send back in the group
    parameter_server    everyone sends to the server, which adds in the order of ranks and sends the sum to everyone
    sufficient_factors  ``weft.run.exchange_factors``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from weft.plan.program import Bucket, Program
from weft.run.exchange_factors import FactorBlock, FactorExchange
from weft.run.exchange_group import Lane
from weft.run.parameters import Parameters
from weft.run.staging import Work
from weft.run.transport import Transport

Start = Callable[[], Sequence[Work]]


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
            run = _on_wire(_hierarchical(bucket, transport), flat, transport)
        case "parameter_server":
            run = _on_wire(_parameter_server(bucket, transport), flat, transport)
        case "sufficient_factors":
            block = factors[index]
            exchange = FactorExchange(program, bucket, block, parameters=parameters, transport=transport)
            return _with_factors(exchange, block, lane, later)
    return lambda: [lane.submit(run)]


def _with_factors(exchange: FactorExchange, block: FactorBlock, lane: Lane,
                  later: list[Callable[[], None]] | None) -> Start:
    then = exchange.multiply if later is None else None
    if later is not None:
        later.append(exchange.multiply)

    def start() -> Sequence[Work]:
        block.complete()
        return [lane.submit(exchange.gather, then=then)]

    return start


def _on_wire(exchange: Callable[[Tensor], None], flat: Sequence[Tensor], transport: Transport) -> Callable[[], None]:
    """Return what exchanges the tensors one after the other, where needed through copies in the host's memory."""

    def run() -> None:
        for tensor in flat:
            wire = transport.on_wire(tensor)
            exchange(wire)
            if wire is not tensor:
                tensor.copy_(wire)

    return run


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
