"""Counts the bytes of tensors that a thread's operators make, now and at most.

Every operator is looked at while the counter is on: a storage that none of its arguments has is new, and counts until
it is freed, wherever that happens and whoever keeps it (autograd, a message, a list). Views count nothing. It works for
tensors in the host's memory and for those on ``meta``, which have sizes and no memory. What one operator takes and
gives back inside is not seen.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages:
    """Storages on one kind of device; those in ``there`` count from the beginning, others that exist do not."""

    def __init__(self, there: Iterable[Tensor] = (), *, device: str = "cpu") -> None:
        self._device = device
        self._known: dict[int, tuple[Any, int | None]] = {}
        """Bytes by storage, None for those that do not count, with what notices its end."""
        self._freed: deque[int] = deque()
        """Bytes of storages that have ended since somebody looked; it is filled at any time, from any thread."""
        self._lock = threading.RLock()
        self._now = self._peak = 0
        for tensor in there:
            self.add(tensor)
        self.restart()

    def add(self, tensor: Tensor, *, counts: bool = True) -> None:
        """Count the tensor's storage, once; ``counts=False``: it is known, but not counted."""
        if tensor.device.type != self._device or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        with self._lock:
            before = self._known.get(key)
            if before is None:
                self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), num_bytes if counts else None
                self._now += num_bytes if counts else 0
            elif before[1] is not None and before[1] != num_bytes:  # it was resized
                self._known[key] = before[0], num_bytes
                self._now += num_bytes - before[1]

    def _forget(self, key: int) -> None:
        self._freed.append(self._known.pop(key)[1] or 0)

    def made(self, results: Any, arguments: Any) -> None:
        """Note what an operator has given; what it gives of its arguments is not new."""
        tensors = [item for item in pytree.tree_leaves(results) if isinstance(item, Tensor)]
        if not tensors:
            return
        with self._lock:
            self._settle()
            given: set[int] | None = None
            for tensor in tensors:
                if tensor.device.type != self._device or tensor.layout != torch.strided:
                    continue
                key = tensor.untyped_storage()._cdata
                if key not in self._known and given is None:
                    given = {item.untyped_storage()._cdata for item in pytree.tree_leaves(arguments)
                             if isinstance(item, Tensor) and item.layout == torch.strided}
                self.add(tensor, counts=given is None or key not in given)
            self._peak = max(self._peak, self._now)

    def _settle(self) -> None:
        while self._freed:
            self._now -= self._freed.popleft()

    def now(self) -> int:
        """Return the bytes that are held."""
        with self._lock:
            self._settle()
            return self._now

    def peak(self) -> int:
        """Return the most that was held since ``restart``."""
        return max(self._peak, self.now())

    def restart(self) -> None:
        """Let ``peak`` begin with what is held now."""
        with self._lock:
            self._peak = self.now()

    def watching(self) -> TorchDispatchMode:
        """Return a context inside which the thread's new tensors are seen, those of its backward passes too."""
        return _Watch(self)


class _Watch(TorchDispatchMode):
    """Lets a counter see every operator of one thread."""

    def __init__(self, live: LiveStorages) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._live.made(results, (args, kwargs))
        return results
