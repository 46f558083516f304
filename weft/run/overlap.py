"""Exchanges of gradients that are issued inside a backward, each when the gradients of its parameters are final.

PyTorch calls a hook when it has added a gradient to ``parameter.grad``, once in a backward even if many operators read
the parameter. The hooks are there during one backward only, the last that adds to these gradients
(``weft.plan.overlap`` says which). In what order they are called does not matter: an exchange waits for those before it
in the rank's list, so that every rank issues them in the same order. What the hooks have not issued when the backward
is done, because the loss does not depend on a parameter after all, is issued after it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from weft.model.graph import DETACH, Bool, Graph
from weft.run.cells import Transfer


class Watched(Protocol):
    """A parameter, or what else a backward makes final and calls a hook for (``weft.run.exchange_factors``)."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Return a handle whose ``remove`` ends the watching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """One exchange that may be issued inside a backward."""

    position: int
    """Of its instruction."""
    parameters: Sequence[Watched]
    """Those of its parameters whose gradients the backward makes final, and the factors that it completes."""
    issue: Callable[[], None]
    transfer: Transfer


class EarlyExchanges:
    """The exchanges of one backward, in the order of the list; ``begin`` and ``end`` enclose the backward."""

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

    def begin(self) -> None:
        """Watch the parameters, and issue what waits for none of them."""
        self._missing = [len(item.parameters) for item in self.items]
        self._issued, self._seen = [], 0
        if self._device.type == "cuda":
            self._origin = (time.perf_counter_ns(), self._mark())
        self._handles = [parameter.register_post_accumulate_grad_hook(self._counter(number))
                         for number, item in enumerate(self.items) for parameter in item.parameters]
        self._issue()

    def end(self) -> None:
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
