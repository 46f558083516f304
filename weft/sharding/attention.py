"""Attention on a device whose rows are a part of the sequence: part by part, put together by their log-sum-exp.

A device has some ranges of rows (one, or two in zig-zag) and meets keys and values in *rounds*. Where these are
gathered there is one round; where they are passed round there is one for each device: it computes with what it holds
while that goes on to the next device. Each round is cut into *parts*, rows that see all of some keys, or the causal
square of both:

    rows 0 1 | 6 7 of 8, keys gathered:   0 1 with 0 1, causal;   6 7 with 0..5;   6 7 with 6 7, causal

A part is a call of a fused kernel, which returns the log of each row's sum of exponentials ``l`` beside its result
``o``. Of the parts i of a row:

    l = log(sum of exp(l_i))        o = sum of exp(l_i - l) o_i

Backward, each kernel gets ``o`` and ``l`` of all parts, and so gives its part of the gradients. Those of keys and
values travel with them, and come home after as many messages as there are devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Range = tuple[int, int]
Ranges = tuple[Range, ...]


class Ring(Protocol):
    """Devices in a circle."""

    size: int
    rank: int

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start sending to the next device; return what waits for the tensor, of the same shape, of the one before."""
        ...


class Part(NamedTuple):
    """Some of a device's rows and keys, as places in what it holds; causal if the n-th row sees the first n keys."""

    rows: Range
    keys: Range
    is_causal: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """Which rows meet which keys on a device, round by round."""

    rounds: tuple[tuple[Part, ...], ...]
    scale: float
    ring: Ring | None = None
    """Where keys and values are passed round."""


def parts_of(rows: Ranges, keys: Ranges, *, is_causal: bool) -> tuple[Part, ...]:
    """Return the parts in which a device's rows meet keys; both are given by their places in the sequence.

    >>> parts_of(((0, 2), (6, 8)), ((0, 8),), is_causal=True)[1:]
    (Part(rows=(2, 4), keys=(0, 6), is_causal=False), Part(rows=(2, 4), keys=(6, 8), is_causal=True))
    """
    num_rows, num_keys = (sum(stop - start for start, stop in ranges) for ranges in (rows, keys))
    if not is_causal or rows == keys:  # rows are in order, so the same ranges make one square
        return (Part((0, num_rows), (0, num_keys), is_causal),)
    found: list[Part] = []
    for (row, row_stop), own in _placed(rows):
        for (key, key_stop), held in _placed(keys):
            begin, end = max(row, key), min(row_stop, key_stop)
            seen = min(key_stop, row)
            if key < seen:
                found.append(Part((own, own + row_stop - row), (held, held + seen - key), False))
            if begin < end:
                square = held + begin - key, held + end - key
                found.append(Part((own + begin - row, own + end - row), square, True))
                if end < row_stop:
                    found.append(Part((own + end - row, own + row_stop - row), square, False))
    return _joined(found)


def _placed(ranges: Ranges) -> list[tuple[Range, int]]:
    places, place = [], 0
    for start, stop in ranges:
        places.append(((start, stop), place))
        place += stop - start
    return places


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return fewer parts: those that see all keys, with the same rows or keys and next to each other, as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is None or part.is_causal or last.is_causal:
            found.append(part)
        elif last.rows == part.rows and last.keys[1] == part.keys[0]:
            found[-1] = Part(last.rows, (last.keys[0], part.keys[1]), False)
        elif last.keys == part.keys and last.rows[1] == part.rows[0]:
            found[-1] = Part((last.rows[0], part.rows[1]), last.keys, False)
        else:
            found.append(part)
    return tuple(found)


def attend(query: Tensor, key: Tensor, value: Tensor, meeting: Meeting) -> Tensor:
    """Return the attention of a device's rows; tensors are [batch, heads, places, width], keys may have fewer heads."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (item.to(torch.get_autocast_dtype(device)) for item in (query, key, value))
    result: Tensor = _Attention.apply(query, key, value, meeting)
    return result


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the tensors are as ``attend`` wants them."""
    return all(item.dim() == 4 and item.shape[0] == query.shape[0] for item in (query, key, value))


class _Attention(torch.autograd.Function):
    """Attention in rounds; see the module's docstring."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, meeting: Meeting) -> Tensor:
        found = _Sum(query, value)
        held, last = _Pair(key, value), len(meeting.rounds) - 1
        for number, parts in enumerate(meeting.rounds):
            coming = _pass_on(meeting, held) if number < last else None
            for part in parts:
                found.add(part, *_forward(_cut(query, part.rows), *held.cut(part.keys), part.is_causal, meeting.scale))
            if coming is not None:
                held = coming()
        result, sums = found.done(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.meeting = meeting
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, result, sums = ctx.saved_tensors
        meeting: Meeting = ctx.meeting
        held, last, home = _Pair(key, value), len(meeting.rounds) - 1, None
        of_query = torch.zeros_like(query, dtype=_wide(query.dtype))
        for number, parts in enumerate(meeting.rounds):
            coming = _pass_on(meeting, held) if number < last else None
            of_held = _Pair.zeros(key, value)
            for part in parts:
                gradient, queries, results = (_cut(item, part.rows) for item in (gradients[0], query, result))
                own_sums = sums.narrow(-1, part.rows[0], part.rows[1] - part.rows[0])
                found = _backward(gradient, queries, results, own_sums, *held.cut(part.keys), part.is_causal,
                                  meeting.scale)
                _cut(of_query, part.rows).add_(found[0])
                for own, more in zip(of_held.cut(part.keys), found[1:], strict=True):
                    own.add_(more)
                del found, more
            if home is not None:
                of_held.add(home())
            home = None if meeting.ring is None else _pass_on(meeting, of_held)
            if coming is not None:
                held = coming()
        if home is not None:
            of_held = home()
        return of_query.to(query.dtype), of_held.key.to(key.dtype), of_held.value.to(value.dtype), None


def _pass_on(meeting: Meeting, pair: _Pair) -> Callable[[], _Pair]:
    """Start sending keys and values to the next device; return what waits for those of the one before."""
    assert meeting.ring is not None, "several rounds need it"
    arriving = meeting.ring.pass_on(pair.in_one_piece())
    shapes = pair.key.shape, pair.value.shape
    return lambda: _Pair.cut_from(arriving(), *shapes)


def _cut(tensor: Tensor, places: Range) -> Tensor:
    return tensor.narrow(-2, places[0], places[1] - places[0])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Pair(NamedTuple):
    """Keys and values, or their gradients."""

    key: Tensor
    value: Tensor
    whole: Tensor | None = None
    """Both one after the other, where they lie so."""

    @staticmethod
    def cut_from(whole: Tensor, key: torch.Size, value: torch.Size) -> _Pair:
        first, second = whole.split([key.numel(), value.numel()])
        return _Pair(first.view(key), second.view(value), whole)

    @staticmethod
    def zeros(key: Tensor, value: Tensor) -> _Pair:
        room = torch.zeros(key.numel() + value.numel(), dtype=_wide(key.dtype), device=key.device)
        return _Pair.cut_from(room, key.shape, value.shape)

    def in_one_piece(self) -> Tensor:
        return torch.cat([self.key.reshape(-1), self.value.reshape(-1)]) if self.whole is None else self.whole

    def cut(self, places: Range) -> tuple[Tensor, Tensor]:
        return _cut(self.key, places), _cut(self.value, places)

    def add(self, other: _Pair) -> None:
        self.key.add_(other.key)
        self.value.add_(other.value)


class _Sum:
    """The result of the parts so far."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self.query, self.shape = query, (*query.shape[:-1], value.shape[-1])
        self.result: Tensor | None = None

    def add(self, part: Part, found: Tensor, sums: Tensor) -> None:
        dtype = _wide(self.query.dtype)
        if self.result is None and found.shape == self.shape:
            self.result, self.sums = found, sums  # as a rule the only part, or the first of a few
            return
        if self.result is None:
            self.result = torch.zeros(self.shape, dtype=dtype, device=found.device)
            self.sums = torch.full(self.shape[:-1], -torch.inf, dtype=dtype, device=found.device)
        self.result = self.result.to(dtype)
        result, before = _cut(self.result, part.rows), self.sums.narrow(-1, part.rows[0], part.rows[1] - part.rows[0])
        total = torch.logaddexp(before, sums.to(before.dtype))
        result.mul_(torch.exp(before - total).unsqueeze(-1))
        result.add_(found.to(dtype).mul_(torch.exp(sums - total).unsqueeze(-1)))
        before.copy_(total)

    def done(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert self.result is not None, "every row sees a key"
        return self.result.to(dtype), self.sums


# ---- kernels --------------------------------------------------------------------------------------------------------
#
# Each returns the result of a part with the log-sum-exp of its rows; and its gradients, from those of all parts.

_CPU, _CPU_BACK = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
                   torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
_GPU, _GPU_BACK = (torch.ops.aten._scaled_dot_product_flash_attention,
                   torch.ops.aten._scaled_dot_product_flash_attention_backward)


def _forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    match _kernel(query, value):
        case "cuda":
            found = _GPU(query, key, value, 0.0, is_causal, scale=scale)
            return found[0], found[1]
        case "cpu":
            result, sums = _CPU(query, key, value, 0.0, is_causal, scale=scale)
            return result, sums
        case _:
            key, value = _for_heads(query, key, value)
            scores = _scores(query, key, is_causal, scale)
            sums = torch.logsumexp(scores, -1)
            return torch.exp(scores - sums.unsqueeze(-1)) @ value.to(scores.dtype), sums


def _backward(gradient: Tensor, query: Tensor, result: Tensor, sums: Tensor, key: Tensor, value: Tensor,
              is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _kernel(query, value)
    if kernel == "cuda":
        none = torch.zeros(0, dtype=torch.int64, device=query.device)  # nothing is drawn
        found = _GPU_BACK(gradient, query, key, value, result, sums.contiguous(), None, None, query.shape[-2],
                          key.shape[-2], 0.0, is_causal, none, none, scale=scale)
        return found[0], found[1], found[2]
    if kernel == "cpu":
        found = _CPU_BACK(gradient, query, key, value, result, sums.contiguous(), 0.0, is_causal, scale=scale)
        return found[0], found[1], found[2]
    keys, values = _for_heads(query, key, value)
    shares = torch.exp(_scores(query, keys, is_causal, scale) - sums.unsqueeze(-1))
    gradient, keys, values = (item.to(shares.dtype) for item in (gradient, keys, values))
    of_value = shares.transpose(-1, -2) @ gradient
    own = (gradient * result).sum(-1, keepdim=True)
    of_scores = shares * (gradient @ values.transpose(-1, -2) - own) * scale
    of_query, of_key = of_scores @ keys, of_scores.transpose(-1, -2) @ query.to(shares.dtype)
    if query.shape[-3] != key.shape[-3]:
        of_key, of_value = (item.unflatten(-3, (key.shape[-3], -1)).sum(-3) for item in (of_key, of_value))
    return of_query, of_key, of_value


def _kernel(query: Tensor, value: Tensor) -> str:
    """Return which kernel can do it: ``cuda``, ``cpu``, or ``plain`` products, which keep all scores for a while."""
    if query.shape[-1] == value.shape[-1]:
        if query.device.type == "cpu":
            return "cpu"
        if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16) and not query.shape[-1] % 8:
            return "cuda"
    return "plain"


def _for_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values once for each head of the queries."""
    times = query.shape[-3] // key.shape[-3]
    return (key, value) if times == 1 else (key.repeat_interleave(times, -3), value.repeat_interleave(times, -3))


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    dtype = _wide(query.dtype)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -torch.inf)
    return scores
