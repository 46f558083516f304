"""Collectives of a group of ranks that wait until they are done, for exchanges of gradients on a lane.

An exchange of several steps runs on a thread beside the program, the rank's *lane*, one exchange after the other in the
order in which the program issues them. Its groups are not those of the main thread: on one group all ranks must issue
collectives in the same order, which two threads would not keep. On a GPU it has its own stream too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.run.wire import settled, to_add, to_move


class ExchangeGroup:
    """Some ranks, seen from one of them; every call returns when it is done (on a GPU: in the order of its stream).

    Tensors are contiguous and on the device that the group's backend serves. A lost rank raises ``RuntimeError``.
    """

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, tuple(ranks)

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
        self._group.allgather([[to_move(row) for row in result]], [to_move(settled(flat))]).wait()
        return result

    def send(self, tensor: Tensor, *targets: int) -> None:
        """Send the tensor to these ranks at once."""
        for work in [self._group.send([to_move(tensor)], self._ranks.index(target), 0) for target in targets]:
            work.wait()

    def receive(self, *parts: tuple[Tensor, int]) -> None:
        """Receive into tensors, each from a rank, at once."""
        for work in [self._group.recv([to_move(tensor)], self._ranks.index(source), 0) for tensor, source in parts]:
            work.wait()


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
    """The thread on which a rank's exchanges run one after the other, and on a GPU their stream."""

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
