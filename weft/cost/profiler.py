"""Times a model's operators on this machine, each distinct one once, and puts them into a profile store.

Operators with one key (kind, shapes, dtype; see ``profile``) that differ in constant arguments, in memory layout or in
which inputs need gradients are *variants*: each is timed where it first occurs (``walk``), and the key's entry is the
mean over the model's operators of that key. Keys that the store has for this device kind are not timed again.

Needs torch and numpy only, so that it runs on a machine that carries nothing else; copy the store back from there.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx

from weft.base.errors import InputError
from weft.cluster.presets import lookup_kind
from weft.cluster.probe import cpu_threads
from weft.cost.entries import SUM_KIND, gradient_sums, sum_key
from weft.cost.profile import OpKey, OpTiming, ProfileStore, op_signature
from weft.cost.roofline import op_dtypes
from weft.cost.walk import Flags, Samples, SumToTime, Walk, make_clock, node_flags
from weft.model.graph import Graph
from weft.model.trace import TracedModel

PASSES: Final = 9
"""Timed passes over the model; twice as many for training, whose passes alternate."""
_NOTHING_S: Final = 5e-7
"""Less than any kernel takes on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """What a profiling run did."""

    device_kind: str
    num_ops: int
    num_keys: int
    """Distinct operators of the model."""
    num_timed: int
    """Of them, those timed now; the others were in the store, or failed."""
    problems: tuple[str, ...]
    """Operators that could not be run alone, and why; their costs stay estimates."""
    forward_s: float
    """Sum over all the model's operators of their times in the store."""
    backward_s: float
    seconds_spent: float


def profile_model(traced: TracedModel, device: Literal["cpu", "cuda"], store: ProfileStore, *, threads: int = 1,
                  kind: str | None = None, passes: int = PASSES, timestamp: str | None = None,
                  progress: Callable[[int, int], None] | None = None) -> ProfileSummary:
    """Time the operators of ``traced`` on this machine's ``device``, put them into ``store``, return what was done.

    ``kind`` is the name that cluster files use for such a device: unless given, ``local-cpu`` as the probe calls it,
    or the GPU's name without its maker's. ``threads`` is how many CPU threads an operator may use. ``timestamp``
    (default: now) is noted with each entry. ``progress`` is called with (passes done, all passes).
    """
    begin = time.perf_counter()
    place = check_device(device, threads, passes)
    name = kind or kind_name(device)
    known = {key for key, timing in store.timings(name).items()
             if timing.threads == threads and (
                 not traced.graph.has_backward or timing.input_grad_s is not None or key.op_kind == SUM_KIND)}
    work = _find_work(traced, name, known)
    entries: list[tuple[OpKey, OpTiming]] = []
    problems: list[str] = []
    if work.variants or work.sums:
        with single_purpose(place, threads):
            record = _time(traced, work, place, threads, passes, progress)
        now = timestamp or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entries, problems = record.entries(work, threads, now)
        store.put_timings(entries)
    forward_s, backward_s = _sum_times(traced.graph, name, store)
    return ProfileSummary(
        device_kind=name, num_ops=traced.graph.num_ops, num_keys=len(set(op_keys(traced.graph, name))),
        num_timed=len(entries), problems=tuple(problems), forward_s=forward_s, backward_s=backward_s,
        seconds_spent=time.perf_counter() - begin)


def _time(traced: TracedModel, work: _Work, device: torch.device, threads: int, passes: int,
          progress: Callable[[int, int], None] | None) -> _Record:
    training = traced.graph.has_backward
    walk = Walk(traced.program.fx_graph, [variant.nodes[0] for variant in work.variants], work.flags,
                placeholder_values(traced, device), device=device, training=training, sums=list(work.sums.values()))
    clock = make_clock(device, threads, traced.graph.parameter_bytes)
    walk.run(clock, 2 * passes if training else passes, progress)
    start_s = statistics.median(walk.start_times) if walk.start_times else 0.0
    return _Record(walk=walk, start_s=start_s, floor_s=clock.floor_s, training=training)


def _sum_times(graph: Graph, kind: str, store: ProfileStore) -> tuple[float, float]:
    """Return the sums of the forward and backward times of all operators that the store knows."""
    timings = store.timings(kind)
    found = [timings[key] for key in op_keys(graph, kind) if key in timings]
    sums = (timings.get(sum_key(graph, item, kind)) for item in gradient_sums(graph))
    backward_s = sum((item.input_grad_s or 0.0) + (item.weight_grad_s or 0.0) for item in found)
    return sum(item.forward_s for item in found), backward_s + sum(item.forward_s for item in sums if item is not None)


def check_device(device: str, threads: int, passes: int) -> torch.device:
    """Return the device to profile on; raise ``InputError`` if it is not there or a number is out of range."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"cannot profile on {device!r}: choose 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("cannot profile on 'cuda': this machine's PyTorch sees no GPU. Profile on 'cpu', or run this "
                         "on a machine with a GPU and copy the profile store back")
    if threads < 1 or passes < 1:
        raise InputError(f"threads and passes must be 1 or more, not {threads} and {passes}")
    return torch.device(device)


def kind_name(device: str) -> str:
    """Return what this machine's device is called unless a name is given: ``local-cpu``, or the GPU's name.

    That is the preset's; where presets cannot be read, its own without the maker's.
    """
    if device != "cuda":
        return "local-cpu"
    name = str(torch.cuda.get_device_name())
    try:
        preset = lookup_kind(name)
    except ImportError:  # a machine with PyTorch and nothing else has no YAML reader
        preset = None
    return preset.kind.name if preset is not None else name.removeprefix("NVIDIA ").removeprefix("AMD ")


def _input_nodes(traced: TracedModel) -> tuple[str, ...]:
    return tuple(traced.program.tensor_nodes[name] for name in traced.program.inputs)


def placeholder_values(traced: TracedModel, device: torch.device) -> Callable[[fx.Node], Tensor]:
    """Return what gives each placeholder's value: true inputs, buffers and constants, and random parameters."""
    program = traced.program
    module = traced.source.build()
    ready = dict(zip(_input_nodes(traced), traced.source.inputs(), strict=True))
    ready |= {program.tensor_nodes[name]: value for name, value in program.constants.items()}
    made: dict[str, Tensor] = {}

    def value(node: fx.Node) -> Tensor:
        if node.name in ready:
            return ready[node.name].to(device)
        if node.name in program.buffers:
            return module.get_buffer(program.buffers[node.name]).to(device)
        path = program.parameters[node.name]
        if path not in made:
            like: Tensor = node.meta["val"]
            made[path] = torch.empty_strided(tuple(like.shape), like.stride(), dtype=like.dtype, device=device)
            made[path].normal_(std=0.02) if like.is_floating_point() else made[path].zero_()
        return made[path]

    return value


def op_keys(graph: Graph, kind: str) -> list[OpKey]:
    """Return every operator's key on the device kind ``kind``."""
    return [OpKey(kind, graph.op_kinds[op], op_signature(graph, op, dtype), dtype)
            for op, dtype in enumerate(op_dtypes(graph))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """Operators that are the same in all that their time may depend on; the first is the one to time."""

    key: OpKey
    nodes: list[fx.Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is to be timed."""

    variants: list[_Variant]
    sums: dict[OpKey, SumToTime]
    flags: Mapping[fx.Node, Flags]


def _find_work(traced: TracedModel, kind: str, known: set[OpKey]) -> _Work:
    """Return the variants and gradient sums that are not known, in the order of the model."""
    program, graph = traced.program, traced.graph
    flags = node_flags(program.fx_graph, program.parameters, _input_nodes(traced))
    variants: dict[tuple[Any, ...], _Variant] = {}
    for name, key in zip(graph.op_names, op_keys(graph, kind), strict=True):
        if key in known:
            continue
        node = program.nodes[program.op_nodes[name][0]]
        layouts = tuple((flags[source].grad, flags[source].data, _strides(source)) for source in node.all_input_nodes)
        constants = repr(fx.node.map_arg((node.args, node.kwargs), lambda _: None))
        variants.setdefault((key, layouts, constants), _Variant(key=key, nodes=[])).nodes.append(node)
    sums: dict[OpKey, SumToTime] = {}
    for item in gradient_sums(graph):
        key = sum_key(graph, item, kind)
        node = program.nodes[program.tensor_nodes[graph.tensor_names[item.tensor]]]
        if key not in known:
            sums.setdefault(key, SumToTime(like=node.meta["val"], in_place=not item.is_weight))
    return _Work(variants=list(variants.values()), flags=flags, sums=sums)


def _strides(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return value.stride() if isinstance(value, Tensor) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The times that a walk took, and how they become entries of the store."""

    walk: Walk
    start_s: float
    floor_s: float
    training: bool

    def entries(self, work: _Work, threads: int, timestamp: str) -> tuple[list[tuple[OpKey, OpTiming]], list[str]]:
        """Return the entries of all keys that could be timed, and what went wrong with the others."""
        by_key: dict[OpKey, list[tuple[int, Samples]]] = {}
        for variant in work.variants:
            by_key.setdefault(variant.key, []).append((len(variant.nodes), self.walk.samples[variant.nodes[0]]))
        problems = [f"{key.op_kind} {key.signature}: {item.problem}" for key, samples in by_key.items()
                    for _, item in samples if item.problem]
        blank = OpTiming(forward_s=0.0, input_grad_s=None, weight_grad_s=None, spread=0.0, repeats=0, threads=threads,
                         torch_version=torch.__version__, recorded_at=timestamp)
        entries = [(key, self._timing(samples, blank)) for key, samples in by_key.items()
                   if not any(item.problem for _, item in samples)]
        for key, item in work.sums.items():
            times = item.seconds
            entries.append((key, replace(blank, forward_s=statistics.median(times), spread=spread_of(times),
                                         repeats=len(times))))
        return entries, problems

    def _timing(self, samples: Sequence[tuple[int, Samples]], blank: OpTiming) -> OpTiming:
        """Return the mean over a key's operators; ``samples`` are (number of operators, times of one of them)."""
        total = sum(count for count, _ in samples)

        def mean(part: Callable[[Samples], float]) -> float:
            return sum(count * part(item) for count, item in samples) / total

        return replace(
            blank, forward_s=mean(self._forward),
            spread=mean(lambda item: spread_of(item.forward)), repeats=sum(len(item.forward) for _, item in samples),
            input_grad_s=mean(self._input_grad) if self.training else None,
            weight_grad_s=mean(lambda item: self._backward(item) - self._input_grad(item)) if self.training else None)

    def _backward(self, samples: Samples) -> float:
        return self._net(samples.backward)

    def _input_grad(self, samples: Samples) -> float:
        """Return the activations' part, at most all of it: the two are measured apart and may cross by noise."""
        if not samples.has_weights:
            return self._backward(samples)
        return min(self._net(samples.input_grad), self._backward(samples)) if samples.has_activations else 0.0

    def _forward(self, samples: Samples) -> float:
        return self._with_launch(statistics.median(samples.forward))

    def _net(self, seconds: Sequence[float]) -> float:
        """Return the median less what starting autograd costs."""
        return self._with_launch(max(statistics.median(seconds) - self.start_s, 0.0)) if seconds else 0.0

    def _with_launch(self, seconds: float) -> float:
        """Return at least the time of a launch, unless nothing was launched."""
        return max(seconds, self.floor_s) if seconds > _NOTHING_S else seconds


def spread_of(seconds: Sequence[float]) -> float:
    """Return half the distance of the quartiles relative to the median."""
    if len(seconds) < 2 or statistics.median(seconds) == 0:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle


@contextmanager
def single_purpose(device: torch.device, threads: int) -> Iterator[None]:
    """Set the number of threads and keep the random state, and put both back."""
    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    with cpu_threads(torch, threads), torch.random.fork_rng(devices=gpus):
        yield
