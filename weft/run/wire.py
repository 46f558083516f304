"""Tensors on their way between ranks: as the backends take them, by way of the host's memory, and over a group.

gloo and nccl do not know complex numbers in all of their calls, and neither knows every narrow dtype. What is only
moved may be seen as anything of the same bytes; what is added up may be seen as real numbers if it is complex.

Where a GPU's messages go by way of the host's memory (``Staging``), what is sent is copied on a stream of its own,
which waits for what the rank has computed so far; a thread sends the copy when it is there, while the rank goes on. One
thread, so that collectives start in the order in which they were asked for. What arrives is copied back when the rank
waits for it, in the stream that will read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.base.errors import RunError

_REAL: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_KNOWN: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                           torch.int8, torch.uint8, torch.bool})
"""Dtypes that all backends move; they add up all of them but truth values."""
_GATHERING: Final = 1 << 29
"""The tag of messages that gather: beyond those of all other messages, which may go between the same ranks."""
_SCATTERING: Final = _GATHERING + 1
"""The tag of messages with pieces that are added up."""


def settled(tensor: Tensor) -> Tensor:
    """Return the tensor, or one copy of it where it is not contiguous or a conjugate, a mark on another's values."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def memory_order(value: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor from the slowest to the fastest, as they lie in memory.

    Where the tensor is a part of another, or is expanded, as PyTorch lays a new tensor that is to be like it. Messages
    between ranks keep this order: what arrives lies as what was made, so that its readers view and copy what they were
    traced to, and give results that lie as traced.
    """
    like = torch.empty_like(value, device="meta")
    return tuple(sorted(range(value.dim()), key=lambda dim: -like.stride(dim)))


def strides_in(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor in one piece whose dimensions lie in this order, from the slowest to the fastest.

    >>> strides_in((2, 3, 4), (0, 2, 1))
    (12, 1, 3)
    """
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(1, shape[dim])
    return tuple(strides)


def to_move(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as one of a dtype that backends move: itself, or a flat view of it."""
    if tensor.dtype in _KNOWN:
        return tensor
    return tensor.view(-1).view(_REAL.get(tensor.dtype, torch.uint8))


def to_add(tensor: Tensor, how: str = "sum") -> Tensor:
    """Return a contiguous tensor as one that backends add up: itself, or a flat view of it; else raise."""
    if tensor.dtype in _REAL and how == "sum":
        return tensor.view(-1).view(_REAL[tensor.dtype])
    if tensor.dtype not in _KNOWN or tensor.dtype == torch.bool:
        verb = "added up" if how == "sum" else "compared"
        raise RunError(f"tensors of {str(tensor.dtype).removeprefix('torch.')} cannot be {verb} over ranks: use a plan "
                       "that does not split what makes them, or another dtype")
    return tensor


def moved_per_entry(dtype: torch.dtype) -> int:
    """Return how many entries ``to_move`` makes of one."""
    if dtype in _KNOWN:
        return 1
    return 2 if dtype in _REAL else int(dtype.itemsize)


class Work(Protocol):
    """A transfer or collective under way."""

    def wait(self) -> Any:
        """Return when it is done (on a GPU: when later kernels will see its result)."""


class Promise:
    """A work, or one that another thread will have begun; what is to be done ``then`` is done by who waits for it."""

    def __init__(self, work: Future[Work | None] | Work, then: Callable[[], object] | None = None) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        """Return when it is done, its last step here; or raise what it raised."""
        work = self._work.result() if isinstance(self._work, Future) else self._work
        if work is not None:
            work.wait()
        if self._then is not None:
            self._then()

    def is_completed(self) -> bool:
        """Return whether ``wait`` would not wait for other ranks."""
        return isinstance(self._work, Future) and self._work.done()


class Staging:
    """The stream and the thread of one rank's outgoing copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return room in memory that the GPU copies from and to at full speed."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._is_cuda)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in the host's memory, when it is there."""
        return self.room(tensor.shape, tensor.dtype).copy_(tensor)

    def send(self, tensor: Tensor, start: Callable[[Tensor], Work], *, brings_back: bool = False) -> Promise:
        """Copy the tensor and ``start`` a transfer of the copy; what that leaves in it may be to be brought back.

        The tensor must stay as it is until the work has been waited for.
        """
        copy = self.room(tensor.shape, tensor.dtype)
        is_there = self._begin_copy(copy, tensor)

        def run() -> Work:
            if is_there is not None:
                is_there.synchronize()
            return start(copy)

        bring_back = partial(tensor.copy_, copy, non_blocking=True) if brings_back else None
        return Promise(self._thread.submit(run), bring_back)

    def _begin_copy(self, copy: Tensor, tensor: Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            copy.copy_(tensor)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
            is_there = torch.cuda.Event()
            is_there.record(self._stream)
        tensor.record_stream(self._stream)
        return is_there


class _AllOf:
    """Several transfers as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are done."""
        for work in self._works:
            work.wait()


def gathering(result: Tensor, own: Tensor, place: int, group: Any, *, by_messages: bool) -> Work:
    """Start gathering the group's tensors of one shape, of which this is its own, as the entries of ``result``.

    ``by_messages``, for gloo, whose gathering takes room for all of them once more.
    """
    if not by_messages:
        work: Work = group._allgather_base(to_move(result).view(-1), to_move(own).view(-1))
        return work
    others = [index for index in range(len(result)) if index != place]
    works = [group.send([to_move(own)], index, _GATHERING) for index in others]
    works += [group.recv([to_move(result[index])], index, _GATHERING) for index in others]
    result[place].copy_(own)
    return _AllOf(works)


class ExchangeGroup:
    """Some ranks, seen from one of them; every call returns when it is done (on a GPU: in the order of its stream).

    Tensors are contiguous and on the device that the group's backend serves. A lost rank raises ``RuntimeError``.
    """

    def __init__(self, group: Any, ranks: Sequence[int], place: int, *, is_gloo: bool,
                 pairs: Mapping[tuple[int, int], tuple[Any, int]] | None = None) -> None:
        """``place`` is that of this rank among the ranks.

        ``pairs``: what carries messages from one rank to another, with the place of this rank's partner in it, where
        that is not the group.
        """
        self._group, self._ranks, self._place, self._is_gloo = group, tuple(ranks), place, is_gloo
        self._pairs = pairs or {}

    def sum_all(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the ranks."""
        self._group.allreduce([to_add(tensor)]).wait()

    def sum_at(self, tensor: Tensor, root: int) -> None:
        """Replace the tensor by its sum over the ranks on ``root``, and by anything on the others."""
        options = dist.ReduceOptions()
        options.rootRank = self._ranks.index(root)
        self._group.reduce([to_add(tensor)], options).wait()

    def spread(self, tensor: Tensor, root: int) -> None:
        """Replace the tensor by that of ``root``."""
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(root)
        self._group.broadcast([to_move(tensor)], options).wait()

    def gather(self, flat: Tensor) -> Tensor:
        """Return the one-dimensional tensors of all ranks, which have one size, as rows."""
        result = flat.new_empty((len(self._ranks), flat.numel()))
        gathering(result, settled(flat), self._place, self._group, by_messages=self._is_gloo).wait()
        return result

    def gather_pieces(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Bring the pieces of all ranks together in a flat tensor, in which this rank's is already."""
        pieces = _pieces(flat, bounds)
        own = pieces[self._place]
        if not self._is_gloo:
            whole, parts = to_move(flat).view(-1), [to_move(piece).view(-1) for piece in pieces]
            work = self._group._allgather_base(whole, parts[self._place]) if _are_equal(bounds) else (
                self._group.allgather([parts], [parts[self._place]]))
            work.wait()
            return
        others = [index for index, piece in enumerate(pieces) if index != self._place and piece.numel()]
        works = [self._group.recv([to_move(pieces[index])], index, _GATHERING) for index in others]
        if own.numel():
            works += [self._group.send([to_move(own)], index, _GATHERING) for index in range(len(pieces))
                      if index != self._place]
        _AllOf(works).wait()

    def scatter_pieces(self, flat: Tensor, bounds: Sequence[int], into: Tensor, *, room: Tensor, adds: bool) -> None:
        """Set ``into`` to this rank's piece of the sum of the ranks' flat tensors, or add that to it.

        It may be the rank's piece of its own tensor. ``room`` is as large.
        """
        pieces = _pieces(flat, bounds)
        own = pieces[self._place]
        if not self._is_gloo:
            parts = [to_add(piece).view(-1) for piece in pieces]
            work = self._group._reduce_scatter_base(to_add(room).view(-1), to_add(flat).view(-1)) if _are_equal(
                bounds) else self._group.reduce_scatter([to_add(room).view(-1)], [parts])
            work.wait()
            into.add_(room) if adds else into.copy_(room)
            return
        others = [index for index in range(len(pieces)) if index != self._place]
        works = [self._group.send([to_move(pieces[index])], index, _SCATTERING) for index in others
                 if pieces[index].numel()]
        if own.numel():
            if adds:
                into.add_(own)
            elif into.data_ptr() != own.data_ptr():
                into.copy_(own)
            for index in others:
                self._group.recv([to_move(room)], index, _SCATTERING).wait()
                into.add_(room)
        _AllOf(works).wait()

    def send(self, tensor: Tensor, *targets: int) -> None:
        """Send the tensor to these ranks at once."""
        queues = [self._pairs.get((self._ranks[self._place], target), (self._group, self._ranks.index(target)))
                  for target in targets]
        for work in [queue.send([to_move(tensor)], place, 0) for queue, place in queues]:
            work.wait()

    def receive(self, *parts: tuple[Tensor, int]) -> None:
        """Receive into tensors, each from a rank, at once."""
        queues = [(tensor, *self._pairs.get((source, self._ranks[self._place]),
                                            (self._group, self._ranks.index(source)))) for tensor, source in parts]
        for work in [queue.recv([to_move(tensor)], place, 0) for tensor, queue, place in queues]:
            work.wait()


def _pieces(flat: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    return [flat[first:last] for first, last in itertools.pairwise(bounds)]


def _are_equal(bounds: Sequence[int]) -> bool:
    return len({last - first for first, last in itertools.pairwise(bounds)}) == 1
