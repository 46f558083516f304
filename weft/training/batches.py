"""The batches that a trainer is given: like the example, the same on all ranks, and such that they may be cut.

Every rank is given the whole batch and uses its samples of it. Ranks that are given different batches would train on a
mixture of them without noticing, so before each step the ranks exchange one number each: what they are about to do, and
for the first steps and now and then a digest of the batch. Where the numbers differ, or a rank has found its batch to
be wrong, all ranks raise the same before anything has been computed.

A mean over the targets that are not padding is a mean over samples only where all parts of the batch have as many. Cut
into parts, each part's loss is divided by its own number, so the mean over the parts is another number than the loss
of the batch. ``cross_entropy`` and ``nll_loss`` count targets inside (``ignore_index``, class weights); other
code does it in the open, as ``(losses * mask).sum() / mask.sum()``. The example may have no padding, so what the model
computes of the batch alone, without parameters (``FromBatch``), is looked at as batches come, before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

from weft.base.errors import InputError
from weft.model.columns import TracedProgram
from weft.model.forward import current_autocast
from weft.model.functional import source_line
from weft.model.probe import is_random
from weft.model.trace import TracedModel, run_program
from weft.run.failures import PeerLost, error_of
from weft.run.transport import Transport
from weft.run.wire import settled
from weft.sharding.factor_rules.common import arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class FromBatch:
    """Values that depend on the batch, constants and fixed buffers alone, for parts of the batch."""

    programs: Mapping[int, TracedProgram]
    """The model as traced, by number of samples."""
    buffers: Mapping[str, Tensor]
    """Those that the forward does not change, by path."""
    parts: Sequence[tuple[int, int]]
    """First and last-plus-one sample of each part of the batch whose loss is computed by itself."""
    batch: int

    def known(self, program: TracedProgram) -> dict[str, bool]:
        """Return the fx nodes that depend on nothing else, with whether they depend on the batch."""
        names = (program.inputs, program.constants)
        inputs, fixed = ({program.tensor_nodes[name] for name in items} for items in names)
        fixed |= {node for node, path in program.buffers.items() if path in self.buffers}
        found: dict[str, bool] = {}
        for node in program.fx_graph.nodes:
            if node.op == "placeholder" and node.name in inputs | fixed:
                found[node.name] = node.name in inputs
            elif node.op == "call_function" and not is_random(node) and all(
                    source.name in found for source in node.all_input_nodes):
                found[node.name] = any(found[source.name] for source in node.all_input_nodes)
        return found

    def evaluate(self, names: Sequence[str], inputs: Mapping[str, Tensor], part: tuple[int, int]) -> tuple[Tensor, ...]:
        """Return the values of such nodes for one part of the batch."""
        first, last = part
        program = self.programs[last - first]
        rows = {name: item[first:last] if item.ndim and item.shape[0] == self.batch else item
                for name, item in inputs.items()}
        with torch.no_grad():
            return run_program(program, self.buffers, [rows[name] for name in program.inputs], nodes=names)


aten = torch.ops.aten
MEAN: Final = 1
LOSSES: Final = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default,
                 aten.nll_loss2d.default)
_SCALING: Final = ("aten.mul.", "aten.div.", "aten.true_divide.", "aten.divide.", "aten.multiply.")
_CLOSE: Final = 1e-6
_CURE: Final = ("the mean over parts is not the loss of the batch. Give all samples as many targets, divide by a fixed "
                "number in the forward, or use a plan with one micro-batch on one replica")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTargets:
    """The targets of one loss operator that come from the batch alone."""

    values: FromBatch
    node: str
    """The fx node of the targets."""
    weights: str | None
    """That of the weights of classes, where there are any."""
    ignored: int

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` if the parts of the batch have different numbers of targets for each sample."""
        parts = self.values.parts
        counts = [self._count(inputs, part) for part in parts]
        if not _are_equal([count / (last - first) for count, (first, last) in zip(counts, parts, strict=True)]):
            what = "of them" if self.weights is None else "of them, each counted by the weight of its class"
            raise InputError(f"the loss is a mean over the targets that are not {self.ignored}, but the {len(parts)} "
                             f"parts into which the plan cuts the batch have {_shown(counts)} {what}: {_CURE}")

    def _count(self, inputs: Mapping[str, Tensor], part: tuple[int, int]) -> float:
        target, *weights = self.values.evaluate([self.node, *([self.weights] if self.weights else [])], inputs, part)
        counted = target != self.ignored
        if not weights:
            return int(counted.sum())
        return float((weights[0].double()[target.clamp(0, len(weights[0]) - 1)] * counted).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNumber:
    """A number that is taken over all samples of the batch, and that something is multiplied with or divided by."""

    values: FromBatch
    node: str
    place: str

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` if the parts of the batch have different ones."""
        parts = self.values.parts
        found = self.found(inputs, parts)
        sizes = [last - first for first, last in parts]
        if not any(_are_equal([value * size**power for value, size in zip(found, sizes, strict=True)])
                   for power in (0, -1, 1)):  # a mean over samples, a count, or what is divided by one
            raise InputError(f"the forward divides or multiplies by a number that it takes over all samples of the "
                             f"batch{self.place}, which is {_shown(found)} in the {len(parts)} parts into which the "
                             f"plan cuts the batch: {_CURE}")

    def found(self, inputs: Mapping[str, Tensor], parts: Sequence[tuple[int, int]]) -> list[float]:
        """Return the number for each of some parts."""
        return [float(self.values.evaluate([self.node], inputs, part)[0]) for part in parts]


BatchCheck: TypeAlias = CountedTargets | BatchNumber
"""What is looked at in every batch."""


def counted_targets(trace: Callable[[int], TracedModel], parts: Sequence[tuple[int, int]], *,
                    batch: int, example: Mapping[str, Tensor] | None = None) -> tuple[BatchCheck, ...]:
    """Return what to look at in every batch; nothing where the batch is not cut into ``parts``.

    ``trace`` gives the model traced for a number of samples. ``example`` is a batch whose first two parts have been
    found to have the mean of their losses: a number that differs there does no harm.
    """
    if len(parts) < 2:
        return ()
    sizes = sorted({last - first for first, last in parts})
    traced = trace(sizes[0])
    buffers = {name: item for name, item in traced.source.build().named_buffers(remove_duplicate=False)
               if not item.is_meta and name not in traced.program.buffer_updates}
    smallest = FromBatch(programs={sizes[0]: traced.program}, buffers=buffers, parts=parts, batch=batch)
    known = smallest.known(traced.program)
    targets, numbers = _targets(traced.program.fx_graph, known), _numbers(traced.program.fx_graph, known, sizes[0])
    if not targets and not numbers:
        return ()
    values = FromBatch(programs={size: trace(size).program for size in sizes}, buffers=buffers, parts=parts,
                       batch=batch)
    found = [BatchNumber(values=values, node=node.name, place=f" ({line})" if (line := source_line(node)) else "")
             for node in numbers]
    return (*(CountedTargets(values=values, node=target.name, weights=weights and weights.name, ignored=ignored)
              for target, weights, ignored in targets),
            *(item for item in found if example is None or _are_equal(item.found(example, parts[:2]))))


def _targets(graph: fx.Graph, known: Mapping[str, bool]) -> list[tuple[fx.Node, fx.Node | None, int]]:
    """Return the targets of means over some of them that depend on the batch alone, with weights of classes."""
    found = []
    for node in (node for node in graph.nodes if node.target in LOSSES):
        settings = arguments(node.target, node.args, node.kwargs)
        target, weights = settings["target"], settings["weight"]
        if settings["reduction"] == MEAN and not target.meta["val"].is_floating_point() and known.get(target.name):
            is_known = weights is not None and weights.name in known
            found.append((target, weights if is_known else None, settings["ignore_index"]))
    return found


def _numbers(graph: fx.Graph, known: Mapping[str, bool], num_samples: int) -> list[fx.Node]:
    """Return single numbers that operators make of the batch alone and that others are scaled with."""
    found = {node for node in graph.nodes if node.op == "call_function" and known.get(node.name)
             and isinstance(value := node.meta.get("val"), Tensor) and value.numel() == 1 and not value.is_complex()
             and (value.ndim == 0 or num_samples > 1)}
    return [node for node in graph.nodes if node in found and any(
        user not in found and str(user.target).startswith(_SCALING) for user in node.users)]


def _are_equal(values: Sequence[float]) -> bool:
    """Return whether numbers are the same up to rounding; none is like one that is not a number."""
    return all(math.isclose(value, values[0], rel_tol=_CLOSE) for value in values[1:])


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:8]) + (", ..." if len(values) > 8 else "")


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
    data = settled(tensor.detach()).reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, words.numel(), CHUNK):
        part = words[first : first + CHUNK]
        place = torch.arange(first, first + part.numel(), device=data.device) * _PRIMES[1] + 1
        total = total + ((part ^ (part >> 29)) * place).sum()
    rest = data[whole:].long()
    return total + (rest * (torch.arange(rest.numel(), device=data.device) * _PRIMES[0] + 3)).sum()
