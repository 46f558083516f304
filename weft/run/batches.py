"""The batches that a trainer is given: like the example, and the same on all ranks.

Every rank is given the whole batch and uses its samples of it. Ranks that are given different batches would train on a
mixture of them without noticing, so before each step the ranks exchange one number each: what they are about to do, and
for the first steps and now and then a digest of the batch. Where the numbers differ, or a rank has found its batch to
be wrong, all ranks raise the same before anything has been computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from weft.base.errors import InputError
from weft.model.autocast import current_autocast
from weft.run.agreement import error_of
from weft.run.failures import PeerLost
from weft.run.targets import BatchCheck
from weft.run.transport import Transport

Batch: TypeAlias = Tensor | Sequence[Tensor]

FIRST: Final = 3
"""Batches that are compared without exception; later those whose number is a power of two or a multiple of EVERY."""
EVERY: Final = 1000
METHODS: Final = ("step", "eval_loss", "save_checkpoint", "load_checkpoint", "resume", "state_dict", "load_state_dict",
                  "close")
"""What all ranks call together; as many as a power of two."""
CHUNK: Final = 1 << 20
_PRIMES: Final = (0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D)


class Batches:
    """Checks what is passed to a trainer's methods, together with the other ranks."""

    def __init__(self, transport: Transport, expected: Sequence[tuple[str, tuple[int, ...], torch.dtype]], *,
                 num_samples: int, autocast: str | None, targets: Sequence[BatchCheck]) -> None:
        """``expected`` are name, shape and dtype of each input; ``autocast`` is what was on when it was traced."""
        self._transport, self._expected, self._num_samples = transport, expected, num_samples
        self._autocast, self._targets = autocast, targets
        self._num_taken = 0

    def enter(self, method: str) -> None:
        """Raise ``InputError`` on all ranks unless all are about to call this method, which takes no batch."""
        if self._transport.num_ranks > 1:
            self._agree(method, self._num_taken, 0, None)

    def take(self, batch: Batch, method: str) -> dict[str, Tensor]:
        """Return the inputs by name; raise ``InputError`` on all ranks if one of them may not go on with its batch."""
        inputs: dict[str, Tensor] = {}
        problem: Exception | None = None
        number, self._num_taken = self._num_taken, self._num_taken + 1
        seen = 0
        try:
            self._check_autocast(method)
            inputs = self._inputs(batch)
            for item in self._targets:
                item.check(inputs)
            if self._transport.num_ranks > 1 and is_compared(number):
                seen = digest(list(inputs.values()))
        except Exception as found:  # the others would wait for this rank
            problem = found
        if self._transport.num_ranks > 1:
            self._agree(method, number, seen, problem)
        if problem is not None:
            raise problem
        return inputs

    def _agree(self, method: str, number: int, seen: int, problem: Exception | None) -> None:
        """Raise on all ranks unless all are about to do the same with the same batch."""
        own = -1 if problem is not None else ((seen * 31 + number) * len(METHODS) + METHODS.index(method)) & (2**62 - 1)
        try:
            numbers = self._transport.numbers(own)
        except PeerLost as lost:
            raise PeerLost(f"{lost} (while all ranks were to begin {method}, after {number} calls of step or "
                           "eval_loss: if no rank has failed, one has called its methods less often than this one)"
                           ) from lost
        if len(set(numbers)) == 1 and own != -1:
            return
        if len({item % len(METHODS) for item in numbers if item != -1}) > 1:
            self._num_taken = number  # on the ranks that took a batch it does not count
        record = {"problem": None if problem is None else [type(problem).__name__, str(problem)],
                  "call": _call(method, number), "seen": seen}
        records = self._transport.gather_records(record)
        first = self._transport.share_record(None if records is None else _what_differs(records))
        if problem is None:
            raise error_of(*first, doing="taking its batch")

    def _check_autocast(self, method: str) -> None:
        now = current_autocast()
        if now is not None and now != self._autocast:
            before = "off" if self._autocast is None else self._autocast
            raise InputError(f"torch.autocast is on around {method} ({now}), but it was {before} when weft.parallelize "
                             "traced the model, and messages have the dtypes of then: call weft.parallelize inside "
                             "the same torch.autocast, or convert the model (model.to(torch.bfloat16)) before it")

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        names = ", ".join(name for name, _, _ in self._expected)
        if isinstance(batch, Mapping):
            raise InputError("the batch is a dictionary: give its tensors in the order in which the model's forward "
                             f"takes them ({names})")
        if not isinstance(batch, Tensor | Sequence):
            raise InputError(f"the batch is {_kind(batch)}: give a tensor or a tuple of tensors ({names})")
        given = [batch] if isinstance(batch, Tensor) else list(batch)
        if len(given) != len(self._expected):
            raise InputError(f"the batch has {len(given)} tensors, but the model takes {len(self._expected)} ({names})")
        for value, (name, shape, dtype) in zip(given, self._expected, strict=True):
            if not isinstance(value, Tensor):
                raise InputError(f"{name!r} in the batch is {_kind(value)}, not a tensor: make it one")
            if value.layout != torch.strided or value.is_meta:
                raise InputError(f"{name!r} in the batch is a tensor "
                                 + ("without values, on the meta device" if value.is_meta else
                                    f"of the layout {str(value.layout).removeprefix('torch.')}")
                                 + ": give an ordinary one, with values")
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise InputError(f"{name!r} in the batch is {value.dtype} of {tuple(value.shape)}, but the plan is for "
                                 f"{dtype} of {shape}: batches must be like the example, with {self._num_samples} "
                                 "samples")
        return {name: value for (name, _, _), value in zip(self._expected, given, strict=True)}


def _call(method: str, number: int) -> str:
    return f"{method}, call {number + 1}" if method in METHODS[:2] else f"{method} after {number} calls"


def _kind(value: object) -> str:
    return f"of the kind {type(value).__name__}"


def _what_differs(records: Sequence[Any]) -> tuple[int, str, str]:
    """Return rank, kind and text of the error that all ranks raise."""
    for rank, record in enumerate(records):
        if record["problem"]:
            return (rank, *record["problem"])
    calls = [record["call"] for record in records]
    if len(set(calls)) > 1:
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        return other, "InputError", (f"the ranks call different methods: rank 0 is at {calls[0]}, rank {other} at "
                                     f"{calls[other]}. All ranks call the same methods equally often")
    others = [rank for rank, record in enumerate(records) if record["seen"] != records[0]["seen"]]
    shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    return others[0], "InputError", (
        f"the ranks were given different batches: at {calls[0]} rank{'s' if len(others) > 1 else ''} {shown} had "
        "another than rank 0. Give every rank the whole batch, the same on all: no DistributedSampler, and a shuffle "
        "with the same seed on all ranks")


def is_compared(number: int) -> bool:
    """Return whether the batch of that number, from 0, is compared over the ranks."""
    return number < FIRST or number & (number - 1) == 0 or number % EVERY == 0


def digest(tensors: Sequence[Tensor]) -> int:
    """Return a number that differs for tensors that differ in any bit or in order; it waits for their device once."""
    found = [_mixed(tensor) for tensor in tensors]
    total = 0
    for device in dict.fromkeys(item.device for item in found):
        for value in torch.stack([item for item in found if item.device == device]).tolist():
            total = (total * _PRIMES[0] + value) & (2**62 - 1)
    return total


def _mixed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's words, each times a number of its place, modulo 2**64, as a tensor."""
    tensor = tensor.detach()
    data = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, words.numel(), CHUNK):
        part = words[first : first + CHUNK]
        place = torch.arange(first, first + part.numel(), device=data.device) * _PRIMES[1] + 1
        total = total + ((part ^ (part >> 29)) * place).sum()
    rest = data[whole:].long()
    return total + (rest * (torch.arange(rest.numel(), device=data.device) * _PRIMES[0] + 3)).sum()
