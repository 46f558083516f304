"""What any contiguous piece of a model takes on a device: tables over the places where pieces may begin and end.

With places ``0 .. P`` (operators before which a stage may begin, and the end), ``table[a, b]`` is about the operators
from place ``a`` up to place ``b``. All figures are those of ``weft.plan.memory`` and ``weft.plan.stage_memory``, which
stay the one account:

- *held once however often it is read* (parameters, their optimizer states, buffers, tensors that come from before
  ``a``): a tensor read at operators ``t_1 < t_2 < ...`` is in the piece if some ``t_i`` is, so it counts at the first
  of them, where the one before (or its maker) lies before ``a``:

      table[a, b] = sum of the bytes of all (t_(i-1), t_i) with t_(i-1) < place a <= t_i < place b        (_first_in)

- *made inside and kept for the backward*: prefix sums ``kept`` at the places.
- *live while it runs*: what is held at operator ``i`` where the whole model is one stage (``weft.plan.step_memory``),
  less what operators before ``a`` have kept. The most of the piece counts; it is never less than the account's, and
  more only by what passes over the whole piece:

      forward[a, b]  = max over i of forward_i  - kept_a                                                     (_most)
      backward[a, b] = max over i of backward_i - kept_a + released_a + released_b

  where ``released_a`` is what is made before ``a`` and only needed behind it: in the whole model it is released there.

Sizes are ``fixed + samples * per_sample``. The largest of several such sums is not one itself, but convex in the
samples: figures by operator are taken from the line through those for no samples and for the most that a step has,
which is never below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from weft.model.graph import F64, I64, NO_BATCH_DIM, Bool, Graph, TensorRole
from weft.plan.local_tensors import LocalTensor
from weft.plan.memory import optimizer_bytes, scattered_tensors
from weft.plan.op_bytes import crossing_tensors, prefix_sums
from weft.plan.plan import Optimizer
from weft.plan.step_memory import step_memory


class Lasting(NamedTuple):
    """[begin, end]: bytes that a device holds throughout, of a piece."""

    parameters: F64
    gradients: F64
    states: F64
    """Of the optimizer, not divided."""
    buffers: F64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passing:
    """Bytes of a piece that come and go with each micro-batch, for some number of samples."""

    saved: F64
    """[begin, end] kept from forward to backward, inputs that are kept included."""
    inputs: F64
    """[begin, end] what comes from other stages."""
    saved_inputs: F64
    """[begin, end] the part of it that is also in ``saved``."""
    input_gradients: F64
    """[begin, end] gradients that go back."""
    outputs: F64
    """[place] what goes over each place."""
    output_gradients: F64
    """[place] the gradients that come back over it."""
    kept_outputs: F64
    """[place] the part of ``outputs`` that the backward of its maker keeps."""
    copied_outputs: F64
    """[place] the part of ``outputs`` that is copied to be sent."""
    forward: F64
    """[begin, end] the most that is live in a forward: what it has kept included, its inputs not."""
    backward: F64
    """[begin, end] the most that is live in a backward, with what is still kept of what was made inside."""
    first_backward: F64
    """[begin, end] the same in the only backward of a step, with the gradients of parameters that appear in it."""


class PieceMemory:
    """The tables of one model, on a device alone or with the parts that a device of several holds (``local``)."""

    def __init__(self, graph: Graph, ops: I64, places: I64, *, training: bool, optimizer: Optimizer, max_samples: int,
                 local: Mapping[int, LocalTensor] = MappingProxyType({})) -> None:
        """``ops`` are the operators that are cut, in order, and ``places`` are positions among them.

        ``max_samples`` are the most that a micro-batch may have on a device.
        """
        self.graph, self.ops, self.places, self.training = graph, ops, places, training
        self.optimizer, self.max_samples, self.local = optimizer, max(1, max_samples), local
        self._known: dict[float, Passing] = {}

    @cached_property
    def lasting(self) -> Lasting:
        """Return the tables of what lasts."""
        graph = self.graph
        sizes, states = graph.tensor_bytes.astype(np.float64), np.zeros(graph.num_tensors)
        if self.training:
            states[graph.parameters] = [optimizer_bytes(graph, int(tensor), self.optimizer)
                                        for tensor in graph.parameters]
        part = np.ones(graph.num_tensors)
        part[list(self.local)] = [item.made for item in self.local.values()]
        is_parameter, is_buffer = (graph.tensor_role == role for role in (TensorRole.PARAMETER, TensorRole.BUFFER))
        is_trained = is_parameter & graph.needs_gradient & self.training
        return Lasting(parameters=self._first_in(is_parameter, sizes * part),
                       gradients=self._first_in(is_trained, sizes * part),
                       states=self._first_in(is_parameter, states * part), buffers=self._first_in(is_buffer, sizes))

    def passing(self, num_samples: float) -> Passing:
        """Return the tables of what comes and goes for so many samples at once."""
        if num_samples not in self._known:
            share = num_samples / self.max_samples
            none, most = self._ends
            self._known[num_samples] = self._tables(_Columns(*(low + share * (high - low)
                                                               for low, high in zip(none, most, strict=True))))
        return self._known[num_samples]

    # ---- tables -----------------------------------------------------------------------------------------------------

    def _tables(self, columns: _Columns) -> Passing:
        graph, kept, released = self.graph, columns.kept, columns.released_before
        moves = graph.tensor_producer >= 0
        moves[moves] &= ~graph.is_constant[graph.tensor_producer[moves]]
        is_kept, has_gradient = self._is_kept, graph.needs_gradient & self.training
        inputs, kept_inputs, gradients = (self._first_in(chosen, columns.sizes) for chosen in (
            moves, moves & is_kept, moves & has_gradient))
        border = released[:, None] + released[None, :] - kept[:, None]
        return Passing(
            saved=np.triu(kept[None, :] - kept[:, None]) + kept_inputs, inputs=inputs, saved_inputs=kept_inputs,
            input_gradients=gradients, outputs=self._over(moves, columns.sizes),
            output_gradients=self._over(moves & has_gradient, columns.sizes),
            kept_outputs=self._over(moves & is_kept, columns.sizes),
            copied_outputs=self._over(moves & scattered_tensors(graph), columns.sizes),
            forward=np.triu(_most(columns.forward) - kept[:, None], 1),
            backward=np.triu(_most(columns.backward) + border + self._waiting(columns.sizes), 1),
            first_backward=np.triu(_most(columns.first_backward) + border - columns.new_gradients[None, :], 1))

    @property
    def _is_kept(self) -> Bool:
        return np.asarray(self.graph.is_saved[self.graph.memory_root] & self.training)

    def _first_in(self, chosen: Bool, sizes: F64) -> F64:
        """Return [begin, end] bytes of the chosen tensors that a piece reads and does not make, each counted once."""
        before, at, tensors = self._reads
        wanted = chosen[tensors]
        events = np.zeros((len(self.places), len(self.places)))
        np.add.at(events, (self._place_after[before[wanted]], self._piece[at[wanted]]), sizes[tensors[wanted]])
        table = np.cumsum(np.cumsum(events, axis=0), axis=1)
        table = np.concatenate((np.zeros((len(table), 1)), table[:, :-1]), axis=1)  # up to the end, without it
        return np.triu(table - np.diagonal(table)[:, None])

    def _waiting(self, sizes: F64) -> F64:
        """Return [begin, end] bytes of gradients that wait in a piece, because an operator before reads the same."""
        before, at, tensors = self._reads
        is_trained = (self.graph.tensor_role == TensorRole.PARAMETER) & self.graph.needs_gradient & self.training
        pairs = is_trained[tensors] & (before >= 0) & (before < at)
        events = np.zeros((len(self.places), len(self.places)))
        np.add.at(events, (self._piece[before[pairs]], self._piece[at[pairs]]), sizes[tensors[pairs]])
        table = np.cumsum(np.cumsum(events[::-1], axis=0)[::-1], axis=1)
        return np.concatenate((np.zeros((len(table), 1)), table[:, :-1]), axis=1)

    def _over(self, chosen: Bool, sizes: F64) -> F64:
        """Return [place] bytes of the chosen tensors that are made before a place and read behind it."""
        tensors, made, last = self._crossing
        wanted = chosen[tensors]
        change = np.zeros(len(self.places) + 1)
        np.add.at(change, self._place_after[made[wanted]], sizes[tensors[wanted]])
        np.add.at(change, self._place_after[last[wanted]], -sizes[tensors[wanted]])
        return np.cumsum(change)[:-1]

    @cached_property
    def _piece(self) -> I64:
        """Return by position the last place at or before it."""
        return np.repeat(np.arange(len(self.places) - 1), np.diff(self.places))

    @cached_property
    def _place_after(self) -> I64:
        """Return by position the first place behind it; the last entry, for position -1, is the first place."""
        return np.concatenate((self._piece + 1, [0])).astype(np.int64)

    @cached_property
    def _crossing(self) -> tuple[I64, I64, I64]:
        return crossing_tensors(self.graph, self.ops)

    @cached_property
    def _reads(self) -> tuple[I64, I64, I64]:
        """Return (position before, position, tensor) of every read: before it, the tensor was read last or made."""
        graph = self.graph
        position = np.full(graph.num_ops + 1, -1, dtype=np.int64)
        position[self.ops] = np.arange(len(self.ops))
        inside = position[graph.consumer_op] >= 0
        at, tensor = position[graph.consumer_op][inside], graph.inputs[inside]
        order = np.lexsort((at, tensor))
        at, tensor = at[order], tensor[order]
        made = np.where(graph.tensor_producer[tensor] >= 0, position[graph.tensor_producer[tensor]], -1)
        again = np.concatenate(([False], tensor[1:] == tensor[:-1]))
        return np.maximum(np.where(again, np.concatenate(([-1], at[:-1])), made), made), at, tensor

    # ---- columns ----------------------------------------------------------------------------------------------------

    @cached_property
    def _ends(self) -> tuple[_Columns, _Columns]:
        """Return the columns for no samples and for the most."""
        return self._columns(0), self._columns(self.max_samples)

    def _columns(self, num_samples: int) -> _Columns:
        graph, firsts = self.graph, self.places[:-1]
        sizes = graph.tensor_bytes.astype(np.float64)
        sizes[graph.tensor_batch_dim != NO_BATCH_DIM] *= num_samples / graph.batch
        steps = step_memory(graph, self.ops, num_samples=num_samples, training=self.training, local=self.local)
        return _Columns(sizes=sizes, kept=prefix_sums(np.add.reduceat(steps.kept, firsts)),
                        forward=np.maximum.reduceat(steps.forward, firsts),
                        backward=np.maximum.reduceat(steps.backward, firsts),
                        first_backward=np.maximum.reduceat(steps.first_backward, firsts),
                        new_gradients=steps.new_gradients[self.places],
                        released_before=steps.released_before[self.places])


class _Columns(NamedTuple):
    """Bytes for a number of samples: of tensors, at the places, and of the smallest pieces between them."""

    sizes: F64
    """[tensor], whole."""
    kept: F64
    """[place] of all that is made before it."""
    forward: F64
    """[piece]"""
    backward: F64
    """[piece]"""
    first_backward: F64
    """[piece]"""
    new_gradients: F64
    """[place] of parameters behind it."""
    released_before: F64
    """[place]"""


def _most(rows: F64) -> F64:
    """Return [begin, end] the largest of ``rows[begin:end]``; 0 where there is none."""
    count = len(rows)
    table = np.full((count + 1, count + 1), -np.inf)
    table[:count, 1:] = np.where(np.tri(count, count, -1, dtype=bool), -np.inf, rows[None, :])
    table = np.maximum.accumulate(table, axis=1)
    return np.where(np.isinf(table), 0.0, table)
