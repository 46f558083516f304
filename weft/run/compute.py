"""The closures of compute instructions: forward, whole backward, and backward in two parts.

Forward keeps the edges of the autograd graph at the stage's outputs (not the outputs themselves, so that their memory
can go) and the leaves at its inputs. Backward runs autograd from those edges with the gradients that have arrived, and
leaves the gradients of the inputs in the cell.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from weft.run.exchange import EarlyExchanges
from weft.run.random_state import RankRandom
from weft.run.split_backward import WeightGradients
from weft.run.stage import Forward
from weft.run.transport import Transfer
from weft.run.wiring import Cell

Action = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What forwards and backwards alike need to know."""

    position: int
    """Of the instruction, for its start time."""
    starts: array[int]
    cell: Cell
    arrivals: Sequence[Transfer]
    """Messages to wait for; before a backward the cell's own activations on their way out as well."""

    def await_arrivals(self) -> None:
        """Wait for what must have arrived, and note the time."""
        if self.arrivals:
            for arrival in self.arrivals:
                arrival.wait()
            self.starts[self.position] = time.perf_counter_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork(_Work):
    """All that a forward needs to know."""

    arguments: list[Any]
    """Arguments of the stage; those that do not change from step to step are filled in."""
    dynamic: Sequence[tuple[int, Callable[[], Tensor]]]
    """The other arguments: place, and function that returns the value."""
    call: Forward
    leaf_places: Sequence[int]
    """The arguments that need a gradient."""
    root_places: Sequence[int]
    """The outputs that get a gradient."""
    updates: Sequence[tuple[int, Tensor]]
    """Outputs that are new values of buffers."""
    keep: bool
    """Somebody reads the outputs later."""
    report: Callable[[tuple[Tensor, ...]], None] | None
    """Takes the outputs where they hold the loss or other results of the model."""

    def begin(self) -> None:
        """Wait for what must have arrived, note the time, and complete the arguments."""
        self.await_arrivals()
        for place, fetch in self.dynamic:
            self.arguments[place] = fetch()

    def end(self, outputs: tuple[Tensor, ...]) -> None:
        """Hand the outputs on, and let go of arguments that are used once."""
        if self.keep:
            self.cell.outputs = outputs
        if self.report is not None:
            self.report(outputs)
        for place, buffer in self.updates:
            buffer.data.copy_(outputs[place].detach())
        for place, _ in self.dynamic:
            self.arguments[place] = None

    def connect(self, outputs: tuple[Tensor, ...]) -> None:
        """Keep what the backward needs of the autograd graph."""
        cell, arguments = self.cell, self.arguments
        cell.edges = [_edge(outputs[place]) for place in self.root_places]
        cell.leaves = [arguments[place] for place in self.leaf_places]


def _edge(output: Tensor) -> GradientEdge:
    """Return where the gradient of ``output`` enters the graph; it keeps the graph alive, but not the output.

    The node of a Python function would not: a view of the output has a node that does.
    """
    node = output.grad_fn
    if isinstance(node, BackwardCFunction):
        return GradientEdge(output.view_as(output).grad_fn, 0)
    return GradientEdge(node, output.output_nr)


def forward(work: ForwardWork, *, is_training: bool) -> Action:
    """Return the forward; in inference nothing is kept for a backward."""
    begin, end, connect, call, arguments = work.begin, work.end, work.connect, work.call, work.arguments

    def action() -> None:
        begin()
        outputs = call(*arguments)
        if is_training:
            connect(outputs)
        end(outputs)

    return action


def forgetful_forward(work: ForwardWork, *, random: RankRandom | None) -> Action:
    """Return the forward of a stage that recomputes: it keeps its arguments only.

    Where it draws from ``random``, it keeps the states that it met as well.
    """

    def action() -> None:
        work.begin()
        if random is not None:
            work.cell.random_states = random.snapshot()
        with torch.no_grad():
            outputs = work.call(*work.arguments)
        work.cell.arguments = list(work.arguments)
        work.end(outputs)

    return action


def recompute(work: ForwardWork, *, random: RankRandom | None) -> Action:
    """Return what a backward does first in a stage that recomputes: it draws the same numbers again."""

    def action() -> None:
        cell = work.cell
        work.arguments[:], cell.arguments = cell.arguments, []
        with nullcontext() if random is None else random.replaying(cell.random_states):
            work.connect(work.call(*work.arguments))
        for place, _ in work.dynamic:
            work.arguments[place] = None

    return action


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWork(_Work):
    """All that a backward needs to know."""

    gradients: Sequence[Tensor | Callable[[], Tensor]]
    """For each root the gradient, or a function that returns it."""
    prepare: Action | None
    """Runs the forward again, in a stage that recomputes."""
    queue: WeightGradients | None
    """Where split operators leave the gradients of weights; None for a whole backward."""
    keep: bool
    """Somebody reads the gradients of the inputs."""
    used_up: Sequence[Cell]
    """Cells of the rank whose gradients this backward is the last to read."""
    early: EarlyExchanges | None
    """Exchanges of gradients that are issued inside."""


def backward(work: BackwardWork) -> Action:
    """Return the backward, whole or its first part."""
    cell, queue, prepare, early = work.cell, work.queue, work.prepare, work.early
    fixed = None if any(callable(item) for item in work.gradients) else tuple(work.gradients)

    def action() -> None:
        work.await_arrivals()
        if prepare is not None:
            prepare()
        gradients = fixed or [item() if callable(item) else item for item in work.gradients]
        if early is None:
            _run(cell.edges, gradients)
        else:
            with early:
                _run(cell.edges, gradients)
        for other in work.used_up:
            other.gradients = []
        leaves = cell.leaves
        if work.keep:
            cell.gradients = [_own(leaf.grad, gradients) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        cell.edges, cell.leaves = [], []
        if queue is not None:
            cell.deferred = queue.take()

    return action


def _own(gradient: Tensor | None, given: Sequence[Any]) -> Tensor | None:
    """Return the gradient of an input in memory of its own.

    Behind an operator that only views, autograd hands on a view of what was given, and that may be a buffer which a
    later message overwrites while this gradient is still read or on its way.
    """
    if gradient is None:
        return None
    places = {item.untyped_storage().data_ptr() for item in given}
    return gradient.clone() if gradient.untyped_storage().data_ptr() in places else gradient


def _run(edges: list[GradientEdge], gradients: Sequence[Any]) -> None:
    for edge in edges:
        if edge.node is None:  # an output that no parameter reaches after all
            pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if edge.node is not None]
            edges, gradients = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            break
    if edges:  # ``torch.autograd.backward`` does the same after checks of about ten microseconds
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def weight_gradients(cell: Cell) -> Action:
    """Return the second part of a backward; autograd must not follow it, since its factors are part of its graph."""

    def action() -> None:
        with torch.no_grad():
            for item in cell.deferred:
                item.accumulate()
        cell.deferred = []

    return action
