"""Where the exchanges of a rank that have several steps run, one after the other, beside the program.

Their groups are not those of the program: on one group all ranks must issue collectives in the same order, which two
threads would not keep. With gloo, whose calls wait, they run on a thread of their own. Calls of nccl only queue what
the GPU is to do, which must have one order over all groups (``weft.run.transport``); so they are issued at their place
in the program. On a GPU they have a stream of their own either way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weft.run.failures import failure
from weft.run.wire import Promise


class Lane:
    """Where exchanges run, in the order in which the program issues them."""

    def __init__(self, device: torch.device, *, is_gloo: bool) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-exchange") if is_gloo else None
        self.around: Callable[[], AbstractContextManager[Any]] | None = None
        """Gives a context for exchanges to run in, where somebody watches them."""

    def submit(self, run: Callable[[], None], *, then: Callable[[], None] | None = None) -> Promise:
        """Start an exchange behind those that were started before, and behind what the GPU was told to do until now.

        Whoever waits for it does ``then``.
        """
        ready = None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()
        if self._pool is not None:
            return Promise(self._pool.submit(self._run, run, ready), then)
        assert self._stream is not None, "nccl is for GPUs"
        try:
            self._queue(run, ready)
        except RuntimeError as problem:
            raise failure(problem, lost="an exchange failed", doing="an exchange of gradients") from problem
        return Promise(self._stream.record_event(), then)

    def _run(self, run: Callable[[], None], ready: torch.cuda.Event | None) -> None:
        if self._stream is None:
            with torch.no_grad(), nullcontext() if self.around is None else self.around():
                run()
            return
        self._queue(run, ready)
        self._stream.synchronize()

    def _queue(self, run: Callable[[], None], ready: torch.cuda.Event | None) -> None:
        assert self._stream is not None, "it is a GPU's"
        with torch.no_grad(), nullcontext() if self.around is None else self.around(), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            run()
