"""What one stage takes for one micro-batch: kept from forward to backward, live inside each, and handed over.

A tensor and its views share one *storage*, known by the tensor that is not a view. Storages that a stage reads from
other stages are not counted inside its forward: they are held as received or handed-over tensors until it ends.

On a device of a stage on several, sizes are those of its parts (``weft.plan.local_tensors``). What is read in another
layout than it is made in is a storage of its own: with ``n`` tensors, tensor ``t`` as readers find it has the number
``n + t``, and where some readers want more of it than others, ``2 n + t`` for them. The moves between these stand in
the list of operators before the first that reads what they bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from weft.model.graph import F64, I64, NO_BATCH_DIM, Bool, Graph, TensorRole
from weft.model.weight_gradients import MADE_FIRST, can_wait
from weft.plan.again_memory import AgainLive, again_live
from weft.plan.gradient_memory import HANDING_ON, GradientsLive, gives_on, gradients_live
from weft.plan.layout import stage_inputs
from weft.plan.local_tensors import LocalTensor
from weft.plan.saving import bundles

KEEPS_RESULT: Final = frozenset(f"aten.{name}" for name in (
    "softmax", "_softmax", "log_softmax", "_log_softmax", "relu", "tanh", "sigmoid", "exp", "expm1", "sqrt", "rsqrt",
    "reciprocal", "tan", "elu", "celu", "selu", "cumprod", "logsumexp", "std", "norm", "linalg_vector_norm", "amax",
    "amin", "scaled_dot_product_attention"))
"""Operators whose backward needs what they gave, and not only what they and others read."""
_PRODUCTS: Final = frozenset(("aten.linear", "aten.matmul", "aten.einsum"))
"""Of tensors of more than two dimensions they are products of matrices between views."""
TRANSPOSES: Final = frozenset(("aten.t", "aten.transpose", "aten.permute"))
"""A product with a parameter behind one of these is split as one with the parameter itself."""


_NONE: Final[I64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage for some number of samples."""

    saved: int
    """Kept from forward to backward."""
    saved_for_weights: int
    """What gradients of weights need after the gradients of inputs: operands and incoming gradients."""
    inputs: int
    """Tensors from other stages."""
    saved_inputs: int
    """The part of ``inputs`` that is also in ``saved``."""
    outputs: int
    """Tensors that other stages read."""
    saved_outputs: int
    """The part of ``outputs`` that is also in ``saved``."""
    input_gradients: int
    """Gradients of ``inputs`` that the backward hands to other stages."""
    forward_peak: int
    """Largest amount live inside the forward, saved tensors included, inputs not."""
    plain_peak: int
    """The same where nothing is saved: in inference, and where the backward begins with the forward once more."""
    backward_work: int
    """Largest amount of gradients live inside the backward, a parameter's until it is added to its sum."""
    backward_rise: int
    """The most that a whole backward takes above ``saved``, of which it lets go while it runs."""
    first_rise: int
    """The same where gradients of the parameters in ``fresh`` appear on the way; these gradients included."""
    split_rise: int
    """The same for the first part of a split backward, which keeps what the second needs."""
    weights_room: int
    """What the second part needs besides ``saved_for_weights``: the largest gradient that is made, then added."""

    def rises(self, *, recompute: bool) -> Rises:
        """Return what the computes take; with ``recompute`` a backward runs the forward again, which saves then."""
        above = self.backward_rise, self.split_rise, self.first_rise
        own = self.saved - self.saved_inputs
        backward, split, first = (max(self.forward_peak, own + rise) if recompute else rise for rise in above)
        return Rises(self.plain_peak if recompute else self.forward_peak, backward, split, self.weights_room, first)


class Rises(NamedTuple):
    """What each compute of a stage takes while it runs, above what is kept for the backward when it begins."""

    forward: int
    backward: int
    split: int
    weights: int
    first: int
    """A backward in which gradients of parameters appear."""


def stage_memory(graph: Graph, ops: I64, *, num_samples: int, training: bool, crossing: I64,
                 local: Mapping[int, LocalTensor] = MappingProxyType({}), fresh: frozenset[int] = frozenset(),
                 arriving: frozenset[int] = frozenset(), handed: frozenset[int] = frozenset(),
                 again: I64 = _NONE) -> StageMemory:
    """Return the memory figures of the stage with these operators; ``crossing`` are the tensors between stages.

    ``local`` is what one device of the stage has of tensors that are not whole there. ``fresh`` are parameters whose
    gradients are not there before the first backward. The gradients of ``arriving`` tensors lie in a message's buffer,
    those of ``handed`` ones with the stage of the rank that made them; others are sums, or put together of pieces.
    Operators in ``again`` run again in the backward, bundle by bundle.
    """
    view = StageView(graph, ops, num_samples, local, again)
    saved = view.saved(training=training)
    handed_over = crossing[view.is_made[crossing]]
    outputs = np.unique(view.root[view.as_read[handed_over]])
    outputs = outputs[~view.is_from_outside[outputs]]
    received = handed_over[view.is_from_outside[view.root[view.as_read[handed_over]]]]
    copied = view.sizes[view.as_read[received]].sum()  # views of what came from outside, when the forward ends
    kept = view.mask(saved)
    inside = view.inside() if training else 0.0
    own_saved = saved[~view.is_from_outside[saved]]
    gradients = view.inputs[graph.needs_gradient[view.inputs]] if training else view.inputs[:0]
    work, first = np.zeros((2, 1))
    rise, split = first, _Split()
    if training:
        begins = view.begins(handed_over, arriving | handed)
        live = view.gradients_live(begins)
        work, above = live.most() + view.weights_room(), live.above(view.released(own_saved), view.again_live())
        rise, first = above + view.weights_room(), above + view.fresh(fresh) + view.weights_room(without=fresh)
        split = view.split(own_saved, begins, handed)
    return StageMemory(
        saved=_whole(view.size[saved].sum() + inside), saved_for_weights=_whole(split.kept),
        inputs=_whole(view.sizes[view.inputs].sum()),
        saved_inputs=_whole(view.size[saved[view.is_from_outside[saved]]].sum()),
        outputs=_whole(view.size[outputs].sum() + copied),
        saved_outputs=_whole(view.size[outputs[kept[outputs]]].sum()),
        input_gradients=_whole(view.sizes[gradients].sum()),
        forward_peak=_whole(view.forward_live(own_saved, training=training, outputs=outputs, copied=copied).max()),
        plain_peak=_whole(view.forward_live(saved[:0], training=False, outputs=outputs, copied=copied).max()),
        backward_work=_whole(work.max()), backward_rise=_whole(rise.max()), first_rise=_whole(first.max()),
        split_rise=_whole(split.rise), weights_room=_whole(split.room))


def _whole(num_bytes: float) -> int:
    return round(float(num_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """What a backward in two parts takes."""

    kept: float = 0.0
    """Between the two: operands, and gradients of results, of operators whose weights can wait."""
    rise: float = 0.0
    room: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An operator, or a move of a tensor to the layout in which it is read."""

    kind: str
    read: list[int]
    written: list[int]
    is_view: bool = False
    weights: tuple[int, ...] = ()
    """Parameters among what it reads."""
    can_wait: bool = False
    """Their gradients can be computed later."""
    keeps_result: bool = False
    """Its backward needs what it wrote."""
    made_first: bool = False
    """Later, they are made first and added then."""
    inside: float = 0.0
    """Bytes kept for the backward besides tensors."""
    forward_room: float = 0.0
    """Bytes needed besides tensors while it runs."""
    backward_room: float = 0.0
    copies_gradient: bool = False
    """Its backward gives a copy, where others of its kind hand on what they are given."""
    gives_views: bool = False
    """The gradients that it gives are views of what it has made for them."""
    bundle: int = -1
    """It runs again in the backward, with this bundle of ``weft.plan.saving``; -1 if it does not."""
    inside_again: float = 0.0
    """What it keeps inside then, from there on."""


class _Uses(NamedTuple):
    """The tensors that a step needs."""

    read: list[int]
    written: list[int]


class StageView:
    """The graph as one device of a stage sees it."""

    def __init__(self, graph: Graph, ops: I64, num_samples: int, local: Mapping[int, LocalTensor],
                 again: I64 = _NONE) -> None:
        self.graph, count, scale = graph, graph.num_tensors, num_samples / graph.batch
        whole: F64 = graph.tensor_bytes.astype(np.float64)
        whole[graph.tensor_batch_dim != NO_BATCH_DIM] *= scale
        copied = [tensor for tensor, item in local.items() if item.is_copied]
        taken = [tensor for tensor, item in local.items() if item.takers]
        self.sizes: F64 = np.tile(whole, 3 if taken else 2 if copied else 1)
        self.as_read: I64 = np.arange(count)
        """The number under which each tensor is read."""
        self.as_read[copied] += count
        for tensor, item in local.items():
            self.sizes[tensor] = whole[tensor] * item.made
            self.sizes[self.as_read[tensor]] = whole[tensor] * item.read
        self.sizes[[2 * count + tensor for tensor in taken]] = [whole[tensor] * local[tensor].taken for tensor in taken]
        self.root: I64 = graph.memory_root
        self.is_saved: Bool = graph.is_saved
        self._is_activation = graph.tensor_role[graph.memory_root] == TensorRole.ACTIVATION
        self._turned = frozenset(np.flatnonzero(graph.has_turned_gradient).tolist())
        self._trained = frozenset(graph.parameters[graph.needs_gradient[graph.parameters]].tolist())
        self._parts = [tensor for tensor in copied if local[tensor].keeps_made]
        """What a stage brings together only to send it, when its forward ends."""
        self.steps = [self._step(op, local, scale) for op in ops.tolist()]
        if copied or taken:
            forgotten = [int(self.as_read[tensor]) for tensor in copied if not local[tensor].is_kept]
            self._divide_storages(ops, copied + taken, forgotten)
            self.is_saved[[tensor for tensor in self._parts if graph.is_saved[tensor]]] = True
        if local:
            self._insert_moves(local, whole)
        self.is_needed: Bool = self.is_saved
        """Storages that a backward needs, whether kept or made again."""
        if len(again):
            self._repeat(ops, again)
        self.is_made = self.mask([tensor for step in self.steps for tensor in step.written])
        self.is_touched = self.is_made | self.mask([tensor for step in self.steps for tensor in step.read])
        self.inputs = stage_inputs(graph, ops)
        outside = self.inputs[~self.is_made[self.root[self.inputs]]]
        self.is_from_outside = self.mask(self.root[outside])
        is_activation = self._twice(graph.tensor_role == TensorRole.ACTIVATION)
        self.size = np.where(is_activation & ~self.is_from_outside, self.sizes, 0.0)
        """By storage; zero for parameters, buffers and inputs of the model. What comes from outside is there once
        for each tensor that comes, not as the storage it was cut from."""
        np.add.at(self.size, self.root[outside], self.sizes[outside])

    def _step(self, op: int, local: Mapping[int, LocalTensor], scale: float) -> _Step:
        """Return an operator; it keeps inside the part of what it reads besides parameters."""
        graph, whole = self.graph, 2 * self.graph.num_tensors
        inputs = graph.op_inputs(op).tolist()
        read = [whole + tensor if tensor in local and op in local[tensor].takers else int(self.as_read[tensor])
                for tensor in inputs]
        part = min((local[tensor].part_for(op) if tensor in local else 1.0 for tensor in inputs
                    if self._is_activation[tensor]), default=1.0)
        weights = tuple(tensor for tensor in inputs if tensor in self._trained)
        kind = graph.op_kinds[op]
        room = scale * part
        made = [(local[tensor], float(graph.tensor_bytes[tensor]) * scale) for tensor in graph.op_outputs(op).tolist()
                if tensor in local]
        written = graph.op_outputs(op).tolist()
        is_view = bool(written) and all(graph.tensor_base[tensor] >= 0 for tensor in written)
        copied = float(graph.tensor_bytes[written].sum()) if len(written) == 1 else 0.0
        copies = (is_view or kind in HANDING_ON) and 0 < copied <= graph.backward_room_bytes[op]
        return _Step(kind=kind, read=read, written=written, weights=weights, is_view=is_view, copies_gradient=copies,
                     gives_views=kind in _PRODUCTS and any(len(graph.tensor_shapes[item]) > 2
                                                           for item in graph.op_inputs(op).tolist()),
                     can_wait=can_wait(kind) and (bool(weights) or self._has_turned_weight(op)),
                     made_first=kind in MADE_FIRST,
                     keeps_result=kind in KEEPS_RESULT or not kind.startswith("aten."),
                     inside=float(graph.saved_inside_bytes[op]) * room,
                     forward_room=float(graph.forward_room_bytes[op]) * room
                     + sum(item.forward_inside * size for item, size in made),
                     backward_room=(float(graph.backward_room_bytes[op]) - copied * copies) * room
                     + sum(item.backward_inside * size for item, size in made))

    def _has_turned_weight(self, op: int) -> bool:
        """Return whether an operator reads a matrix that is a trained parameter the other way round."""
        graph = self.graph
        turned = [tensor for tensor in graph.op_inputs(op).tolist()
                  if graph.tensor_base[tensor] >= 0 and len(graph.tensor_shapes[tensor]) == 2
                  and graph.op_kinds[int(graph.tensor_producer[tensor])] in TRANSPOSES]
        return any(graph.needs_gradient[tensor]
                   and graph.tensor_role[graph.tensor_base[tensor]] == TensorRole.PARAMETER for tensor in turned)

    def mask(self, numbers: list[int] | I64) -> Bool:
        """Return true for these tensors or storages."""
        mask: Bool = np.zeros(len(self.sizes), dtype=bool)
        mask[numbers] = True
        return mask

    def _twice(self, values: Bool) -> Bool:
        """Return the values of tensors also for those that are read in another layout."""
        return np.tile(values, len(self.sizes) // len(values))

    # ---- a device of several ----------------------------------------------------------------------------------------

    def _divide_storages(self, ops: I64, copied: list[int], forgotten: list[int]) -> None:
        """Let views of what is read in another layout be views of that, and find out which of the storages are kept."""
        graph, family, count = self.graph, self.graph.memory_root, self.graph.num_tensors
        self.root = np.concatenate((family, np.arange(count, len(self.sizes))))
        divided = np.zeros(count, dtype=bool)
        divided[family[copied]] = True
        kept = self.mask(np.flatnonzero(graph.is_saved & ~divided))
        for op, step in zip(ops.tolist(), self.steps, strict=True):
            sources = {int(family[tensor % count]): int(self.root[tensor]) for tensor in step.read}
            for tensor in step.written:
                if graph.tensor_base[tensor] >= 0:
                    self.root[tensor] = sources.get(int(family[tensor]), family[tensor])
                elif graph.is_saved[tensor] and graph.op_kinds[op] in KEEPS_RESULT:
                    kept[tensor] = True
            if any(graph.tensor_base[tensor] < 0 for tensor in step.written) and step.kind not in HANDING_ON:
                kept[[int(self.root[tensor]) for tensor in step.read if graph.is_saved[family[tensor % count]]]] = True
        kept[forgotten] = False
        self.is_saved = kept

    def _repeat(self, ops: I64, again: I64) -> None:
        """Note which steps run again, and so what is kept: what these read, and not what they make.

        The move of a tensor to another layout runs again with what makes the tensor.
        """
        bundle_of = {op: number for number, bundle in enumerate(bundles(self.graph, again)) for op in bundle}
        of_op, steps = iter(ops.tolist()), []
        for step in self.steps:
            op = next(of_op) if step.kind else int(self.graph.tensor_producer[step.read[0] % self.graph.num_tensors])
            steps.append(step if op not in bundle_of else replace(
                step, bundle=bundle_of[op], inside=0.0, inside_again=step.inside,
                forward_room=step.forward_room + step.inside))
        self.steps = steps
        self.is_saved = self.is_needed.copy()
        repeated = [step for step in self.steps if step.bundle >= 0]
        self.is_saved[self.root[[tensor for step in repeated for tensor in step.read]]] = True
        self.is_saved[[tensor for step in repeated for tensor in step.written]] = False

    def _insert_moves(self, local: Mapping[int, LocalTensor], whole: F64) -> None:
        """Put each move before the first operator that reads what it brings, or at the end."""
        made = {tensor for step in self.steps for tensor in step.written}
        moves = {int(self.as_read[tensor]): _Step(
            kind="", read=[tensor], written=[int(self.as_read[tensor])] if item.is_copied else [],
            forward_room=item.forward_room * whole[tensor], backward_room=item.backward_room * whole[tensor])
            for tensor, item in local.items()
            if tensor in made and (item.is_copied or item.forward_room or item.backward_room)}
        moves |= {2 * self.graph.num_tensors + tensor: _Step(
            kind="", read=[int(self.as_read[tensor])], written=[2 * self.graph.num_tensors + tensor],
            forward_room=item.taken_room * whole[tensor], backward_room=item.returned_room * whole[tensor])
            for tensor, item in local.items() if tensor in made and item.takers}
        steps = []
        for step in self.steps:
            for number in dict.fromkeys(step.read):
                if number in moves:
                    steps += [moves.pop(source) for source in (*moves[number].read, number) if source in moves]
            steps.append(step)
        self.steps = [*steps, *moves.values()]

    # ---- totals -----------------------------------------------------------------------------------------------------

    def saved(self, *, training: bool) -> I64:
        """Return the storages that are kept for the backward."""
        return self._saved_storages(self.is_touched) if training else np.zeros(0, dtype=np.int64)

    def split(self, saved: I64, begins: Mapping[int, float], handed: frozenset[int]) -> _Split:
        """Return what a backward in two parts takes; ``saved`` are storages of its own.

        What came from outside stays in its buffer until the second part has run. So does a gradient that another rank
        sent, which is counted there; not so one that another stage on the rank has ``handed`` over. An operand of a
        product, or a gradient, that lies in another order is copied again.
        """
        waiting = [step for step in self.steps if step.can_wait]
        operands = np.unique(self.root[self.mask([tensor for step in waiting for tensor in step.read])
                                       | self.is_from_outside])
        operands = operands[self.is_needed[operands]]
        live = self.gradients_live(begins, handed=handed, defers=True)
        inside = [0.0 if step.can_wait else step.inside for step in self.steps[::-1]]
        rise = live.above(self._released(np.setdiff1d(saved, operands), inside),
                          self.again_live(self.mask(operands))) + self.weights_room(waiting=False)
        kept = float(self.size[operands].sum()) + live.deferred + sum(
            step.inside + step.inside_again for step in waiting)
        return _Split(kept=kept, rise=float(rise.max()),
                      room=float(max((self.sizes[list(step.weights)].sum() * step.made_first + step.inside
                                      + step.inside_again + step.backward_room for step in waiting), default=0.0)))

    def _saved_storages(self, chosen: Bool) -> I64:
        storages = np.unique(self.root[chosen])
        return np.asarray(storages[self.is_saved[storages]], dtype=np.int64)

    def inside(self) -> float:
        """Return what operators keep for their backward besides tensors."""
        return sum(step.inside for step in self.steps)

    def forward_live(self, saved: I64, *, training: bool, outputs: I64 | None = None, copied: float = 0.0) -> F64:
        """Return what is live in each step of the forward; of what is saved, that which is made up to then.

        Storages of ``outputs`` stay until it ends, when so many bytes are ``copied``.
        """
        kept = self.mask(saved)
        change = np.asarray([step.inside * training for step in self.steps])
        first, _, storages = self.spans(self.steps, kept)
        np.add.at(change, first, self.size[storages])
        rooms = np.asarray([step.forward_room for step in self.steps])
        rooms[-1:] = np.maximum(rooms[-1:], copied)
        return np.asarray(np.cumsum(change) + self._live(self.steps, self.is_made & ~kept, outputs) + rooms)

    # ---- the backward, from the last operator to the first ----------------------------------------------------------

    def begins(self, outputs: I64, elsewhere: frozenset[int]) -> dict[int, float]:
        """Return the tensors with whose gradients the backward begins: those that others read, and the loss.

        With the bytes that each takes besides those that are counted ``elsewhere``.
        """
        loss = [tensor for tensor in self.graph.outputs[:1] if self.is_made[tensor]]
        found = {int(self.as_read[tensor]): tensor for tensor in (*outputs.tolist(), *loss)
                 if self.graph.needs_gradient[tensor]}
        return {number: 0.0 if tensor in elsewhere else float(self.sizes[number]) for number, tensor in found.items()}

    def gradients_live(self, begins: Mapping[int, float], *, handed: frozenset[int] = frozenset(),
                       defers: bool = False) -> GradientsLive:
        """Return what gradients of activations take while the backward of each operator runs."""
        wanted = self._twice(self.graph.needs_gradient & (self.graph.tensor_role == TensorRole.ACTIVATION))
        elsewhere = {number: float(self.sizes[number]) for number in begins
                     if number % self.graph.num_tensors in handed}
        return gradients_live(self.steps, sizes=self.sizes, wanted=wanted, inputs=self.inputs.tolist(), begins=begins,
                              elsewhere=elsewhere, defers=defers, turned=self._turned)

    def released(self, saved: I64) -> F64:
        """Return what of these storages, and of what operators keep inside, is free when each backward begins.

        And at the end of the last one.
        """
        return self._released(saved, [step.inside for step in self.steps[::-1]])

    def _released(self, saved: I64, inside: Sequence[float]) -> F64:
        change = np.zeros(len(self.steps) + 1)
        change[1:] = inside
        last, storages = self.needed_until(saved)
        np.add.at(change, last + 1, self.size[storages])
        return np.cumsum(change)

    def again_live(self, stay: Bool | None = None) -> AgainLive | None:
        """Return what is made again in the backward takes; what is in ``stay`` is there to its end."""
        if not any(step.bundle >= 0 for step in self.steps):
            return None
        return again_live(self.steps, root=self.root, size=self.size, needed=self.is_needed, stay=stay)

    def needed_until(self, saved: I64) -> tuple[I64, I64]:
        """Return the last backward that needs each of these storages: of a reader, or of what wrote and needs it."""
        steps = [_Uses(step.read, step.written if step.keeps_result else []) for step in self.steps[::-1]]
        _, last, storages = self.spans(steps, self.mask(saved))
        found = dict(zip(storages.tolist(), last.tolist(), strict=True))
        made = self.spans(self.steps[::-1], self.mask(saved))  # what nobody reads, at the latest where it was made
        live = self.again_live()
        if live is not None:  # what only serves to make something again goes when that is made
            readers: dict[int, int] = {}
            for step in self.steps:
                for tensor in step.read if step.bundle >= 0 else ():
                    storage = int(self.root[tensor])
                    if not self.is_needed[storage]:
                        readers[storage] = max(readers.get(storage, 0), live.places[step.bundle])
            found |= readers
        ends = [found.get(storage, end) for storage, end in zip(made[2].tolist(), made[1].tolist(), strict=True)]
        return np.asarray(ends, dtype=np.int64), made[2]

    def weights_room(self, *, without: frozenset[int] = frozenset(), waiting: bool = True,
                     between: bool = True) -> F64:
        """Return what gradients of each operator's parameters take until they are added to their sums.

        Not of those ``without`` sums, and not of those that are computed later unless ``waiting``. What several
        operators read has one gradient, which is there from the first of their backwards to the last; ``between``
        them it counts only on wish.
        """
        rooms = np.zeros(len(self.steps))
        before: dict[int, int] = {}
        for place, step in enumerate(self.steps[::-1]):
            for tensor in step.weights if waiting or not step.can_wait else ():
                if tensor not in without and not gives_on(step, tensor, self.sizes):
                    rooms[place] += self.sizes[tensor]
                    if between and tensor in before:
                        rooms[before[tensor] + 1:place + 1] += self.sizes[tensor]
                    before[tensor] = place
        return rooms

    def fresh(self, parameters: frozenset[int]) -> F64:
        """Return the bytes of these parameters' gradients that are there when each backward has run."""
        change = np.zeros(len(self.steps))
        first, _, storages = self.spans(self.steps[::-1], self.mask(sorted(parameters)))
        np.add.at(change, first, self.sizes[storages])
        return np.cumsum(change)

    def _live(self, steps: Sequence[_Step], counted: Bool, stay: I64 | None) -> F64:
        """Return the total of storages that are live in each step: from the first that has it to the last.

        Those in ``stay`` are so to the end.
        """
        first, last, storages = self.spans(steps, counted)
        if stay is not None:
            last[self.mask([*stay.tolist(), *self._parts])[storages]] = len(steps) - 1
        change = np.zeros(len(steps) + 1)
        np.add.at(change, first, self.size[storages])
        np.add.at(change, last + 1, -self.size[storages])
        return np.cumsum(change)[:-1]

    def spans(self, steps: Sequence[_Step | _Uses], counted: Bool) -> tuple[I64, I64, I64]:
        """Return the first and the last step that has each of the storages, and the storages."""
        counts = [len(step.read) + len(step.written) for step in steps]
        storage = self.root[[tensor for step in steps for tensor in (*step.read, *step.written)]]
        position = np.repeat(np.arange(len(steps)), counts)[counted[storage]]
        storage = storage[counted[storage]]
        found, first = np.unique(storage, return_index=True)
        _, from_end = np.unique(storage[::-1], return_index=True)
        return position[first], position[::-1][from_end], found
