"""Runs a model's operators for timing: each distinct one where it first occurs, in the order of the model.

A pass over the model executes only the *chosen* nodes (the first of each kind that is to be timed) and what they need:

- Values of floating-point tensors do not matter for the time, so a tensor whose producer was not chosen is random data
  of the right shape and layout, just written, as if its producer had run. So of a model with 80 equal layers one
  layer's worth of operators runs, and one layer's worth of parameters is held.
- Whole numbers and truth values do matter (they are indices and masks): their producers run, and so does everything
  that depends on no parameter, such as position ids.

Between two passes of a large model the caches are overwritten (``Clock.settle``). So a timed operator finds its
parameters in memory, and its activations in cache if its producer left them there, as in a run of the whole model; an
operator repeated in place would find everything in cache. Freeing what is used for the last time counts, as in a run.

For training, each chosen operator runs on detached inputs and keeps its little autograd graph; then the passes go back
through them in reverse order and time ``torch.autograd.grad`` on each: on even passes for all inputs, on odd ones for
activations only. The difference is what the parameters' gradients take. What a call of autograd costs by itself (a
whole model pays it once) is timed in between, on a view of one number, to be subtracted. Additions that join two
gradients of a tensor (``gradient_sums``) come last.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from weft.model.trace import retarget

# ---- clocks: thread CPU time, wall time, or CUDA events -------------------------------------------------------------

_CALIBRATION_RUNS: Final = 200
_EVICT_BYTES: Final = 128 * 2**20
CACHE_BYTES: Final = 32 * 2**20
"""A model with less than this in parameters may stay in cache from step to step."""
_SLEEP_CYCLES: Final = 2_000_000
"""About a millisecond: longer than the host needs to queue an operator and its backward."""


class CpuClock:
    """Thread CPU time for one thread, so that other processes do not count; wall time for several.

    A clock takes the time between ``start`` and ``stop``, which gives it to a sink at the latest when the pass over the
    model ends with ``settle``. That also clears what caches hold of it if the model is large.
    """

    def __init__(self, threads: int, *, evict: bool) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter
        self._own_s = 0.0
        self._own_s = _median_time(self._now, lambda: None)
        self.floor_s = 0.0
        """The least time that a single operator takes in a running model; here small ones are timed as they are."""
        self._scratch = torch.zeros(_EVICT_BYTES // 4 if evict else 0)

    def start(self) -> float:
        """Return the present time."""
        return self._now()

    def stop(self, mark: float, sink: Callable[[float], None]) -> None:
        """Give the time since ``mark``, less what reading the clock takes."""
        sink(max(self._now() - mark - self._own_s, 0.0))

    def settle(self) -> None:
        """Write more memory than the caches hold: a large model's parameters are not in them when a layer runs."""
        self._scratch.add_(1.0)


class CudaClock:
    """Time on the GPU between two events in its stream.

    The stream pauses before each operator until the host has queued it, so what is timed is the work of the GPU, as in
    a model that keeps it busy. A model of tiny operators waits for the host instead and takes longer than their sum.
    """

    def __init__(self, *, evict: bool) -> None:
        self._open: list[tuple[Any, Any, Callable[[float], None]]] = []
        self._scratch = torch.zeros(_EVICT_BYTES // 4 if evict else 0, device="cuda")
        self._own_s = 0.0
        self._own_s = self._empty_time()
        self.floor_s = self._launch_time()
        """The time between two launches of tiny operators."""

    def _empty_time(self) -> float:
        times: list[float] = []
        for _ in range(_CALIBRATION_RUNS // 10):
            self.stop(self.start(), times.append)
        self.settle()
        return statistics.median(times)

    def _launch_time(self) -> float:
        tiny = torch.zeros(1, device="cuda")
        for _ in range(_CALIBRATION_RUNS):
            tiny = tiny + 1
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_CALIBRATION_RUNS):
            tiny = tiny + 1
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / _CALIBRATION_RUNS

    def start(self) -> Any:
        """Return an event in the stream, behind a pause in which the host gets ahead."""
        torch.cuda._sleep(_SLEEP_CYCLES)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, mark: Any, sink: Callable[[float], None]) -> None:
        """Note the event pair; the time is known when the pass settles."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._open.append((mark, event, sink))

    def settle(self) -> None:
        """Wait for the GPU, deliver all times, and overwrite its cache."""
        self._scratch.add_(1.0)
        torch.cuda.synchronize()
        for begin, end, sink in self._open:
            sink(max(begin.elapsed_time(end) / 1e3 - self._own_s, 0.0))
        self._open.clear()


Clock = CpuClock | CudaClock


def make_clock(device: torch.device, threads: int, parameter_bytes: int) -> Clock:
    """Return the clock for ``device`` and a model of ``parameter_bytes``, which says whether caches are cleared."""
    evict = parameter_bytes > CACHE_BYTES
    return CudaClock(evict=evict) if device.type == "cuda" else CpuClock(threads, evict=evict)


def _median_time(now: Callable[[], float], work: Callable[[], None]) -> float:
    times = []
    for _ in range(_CALIBRATION_RUNS):
        begin = now()
        work()
        times.append(now() - begin)
    return statistics.median(times)


# ---- the walk -------------------------------------------------------------------------------------------------------


class Flags(NamedTuple):
    """What a node's value depends on."""

    parameter: bool
    data: bool
    """On the model's inputs."""
    grad: bool
    """It is a floating-point tensor whose gradient training needs."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """One node to run; ``args`` and ``kwargs`` refer to other nodes directly."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_timed: bool
    made_up: tuple[fx.Node, ...]
    """Inputs that are random data and count as just written."""
    release: tuple[fx.Node, ...]


@dataclass(slots=True, kw_only=True)
class Samples:
    """The times of one chosen node, one per pass."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    input_grad: list[float] = field(default_factory=list)
    has_weights: bool = False
    has_activations: bool = False
    problem: str = ""
    """Why it could not be run; empty if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumToTime:
    """An addition of two gradients, and its times, one per pass."""

    like: Tensor
    in_place: bool
    seconds: list[float] = field(default_factory=list)


class _Pending(NamedTuple):
    """A forward run whose backward is still to be timed."""

    node: fx.Node
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    activations: tuple[Tensor, ...]


def node_flags(graph: fx.Graph, parameters: Mapping[str, str], inputs: Sequence[str]) -> dict[fx.Node, Flags]:
    """Return what every node of ``graph`` depends on; ``parameters`` and ``inputs`` name placeholders."""
    flags: dict[fx.Node, Flags] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_parameter = node.name in parameters
            grad = is_parameter and node.meta["val"].is_floating_point() and node.meta["val"].requires_grad
            flags[node] = Flags(is_parameter, node.name in inputs, grad)
        elif node.op == "call_function":
            before = [flags[source] for source in node.all_input_nodes]
            grad = any(item.grad for item in before) and any(_are_float(node)) and node.target is not _DETACH
            flags[node] = Flags(any(item.parameter for item in before), any(item.data for item in before), grad)
    return flags


_DETACH: Final = torch.ops.aten.detach.default
_CANNOT_RUN: Final = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""What operators raise; NotImplementedError is a RuntimeError."""


def _are_float(node: fx.Node) -> list[bool]:
    """Return for each tensor of the node's result whether it is of floating-point or complex numbers."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [leaf.is_floating_point() or leaf.is_complex() for leaf in leaves if isinstance(leaf, Tensor)]


class Walk:
    """Passes over the chosen nodes of a model; see the module's docstring."""

    def __init__(self, graph: fx.Graph, chosen: Sequence[fx.Node], flags: Mapping[fx.Node, Flags],
                 stored: Callable[[fx.Node], Tensor], *, device: torch.device, training: bool,
                 sums: Sequence[SumToTime] = ()) -> None:
        """``stored`` gives the value of a placeholder; it is asked once, and only for those that are needed.

        ``sums`` are additions of gradients to be timed besides.
        """
        self._flags = flags
        self._device = device
        self._training = training
        self._storages: dict[tuple[Any, ...], Tensor] = {}
        self._filled: dict[fx.Node, Any] = {}
        executed = self._needed(chosen)
        self.samples = {node: Samples() for node in chosen}
        self.start_times: list[float] = []
        self._sums = sums
        self._values = {node: stored(node) for node in graph.nodes
                        if node.op == "placeholder" and any(user in executed for user in node.users)}
        self._steps = self._plan([node for node in graph.nodes if node in executed], set(chosen))

    def _needed(self, chosen: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the nodes that run: the chosen ones and those whose values matter to them."""
        executed: set[fx.Node] = set()
        waiting = list(chosen)
        while waiting:
            node = waiting.pop()
            if node in executed or node.op != "call_function":
                continue
            executed.add(node)
            for source in node.all_input_nodes:
                if source.op == "call_function" and self._must_run(source):
                    waiting.append(source)
        return executed

    def _must_run(self, node: fx.Node) -> bool:
        are_float = _are_float(node)
        return node.target is operator.getitem or not (self._flags[node].parameter and are_float and all(are_float))

    def _plan(self, order: Sequence[fx.Node], chosen: set[fx.Node]) -> list[_Step]:
        running = set(order)
        last: dict[fx.Node, fx.Node] = {}
        for node in order:
            last.update(dict.fromkeys(node.all_input_nodes, node))
        steps = []
        for node in order:
            sources = [source for source in node.all_input_nodes if source.op == "call_function"]
            made_up = tuple(source for source in sources if source not in running)
            for source in made_up:
                self._filled[source] = self._fill(source)
            steps.append(_Step(
                node=node, args=retarget(node.args, self._device), kwargs=retarget(node.kwargs, self._device),
                is_timed=node in chosen, made_up=tuple(source for source in made_up if self._flags[source].data),
                release=tuple(source for source in sources if source in running and last[source] is node)))
        return steps

    def _fill(self, node: fx.Node) -> Any:
        """Return made-up values for a node's result: random numbers, or zeros where whole numbers are due."""
        return pytree.tree_map_only(Tensor, self._fill_one, node.meta["val"])

    def _fill_one(self, like: Tensor) -> Tensor:
        key = (_extent(like), like.dtype)
        if key not in self._storages:
            flat = torch.zeros(key[0], dtype=like.dtype, device=self._device)
            self._storages[key] = flat.normal_() if like.is_floating_point() else flat
        return self._storages[key].as_strided(tuple(like.shape), like.stride())

    # ---- passes ----

    def run(self, clock: Clock, passes: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Run a warm-up pass and ``passes`` timed ones; ``samples`` holds the times, clean of the warm-up's."""
        self._pass(clock, 0)
        lists = [times for item in self.samples.values() for times in (item.forward, item.backward, item.input_grad)]
        for times in (self.start_times, *(item.seconds for item in self._sums), *lists):
            times.clear()
        for index in range(passes):
            self._pass(clock, index)
            if progress is not None:
                progress(index + 1, passes)

    def _pass(self, clock: Clock, index: int) -> None:
        with torch.set_grad_enabled(self._training):
            pending = self._forward(clock)
            while pending:
                self._start_backward(clock)
                self._backward(pending.pop(), clock, only_activations=index % 2 == 1)
        for item in self._sums:
            self._add_gradients(item, clock)
        clock.settle()

    def _forward(self, clock: Clock) -> list[_Pending]:
        env: dict[fx.Node, Any] = {**self._values, **self._filled}
        pending: list[_Pending] = []
        for step in self._steps:
            if not step.is_timed or self.samples[step.node].problem:
                self._run_untimed(step, env)
                continue
            for source in step.made_up:
                for tensor in pytree.tree_leaves(self._filled[source]):
                    if isinstance(tensor, Tensor) and tensor.is_floating_point():
                        self._touch(tensor)
            try:
                self._run_timed(step, env, clock, pending)
            except _CANNOT_RUN as problem:
                self.samples[step.node].problem = str(problem).splitlines()[0][:200]
                self._run_untimed(step, env)
        return pending

    def _touch(self, tensor: Tensor) -> None:
        """Write the tensor's memory without changing it; ``data`` keeps autograd from noticing."""
        tensor.data.as_strided((_extent(tensor),), (1,)).mul_(1.0)

    def _run_untimed(self, step: _Step, env: dict[fx.Node, Any]) -> None:
        """Run a node for its value; one that cannot run on made-up inputs has a made-up result."""
        with torch.no_grad():
            try:
                env[step.node] = step.node.target(*_fetch(step.args, env), **_fetch(step.kwargs, env))
            except _CANNOT_RUN:
                env[step.node] = self._fill(step.node)
        for source in step.release:
            env.pop(source, None)

    def _run_timed(self, step: _Step, env: dict[fx.Node, Any], clock: Clock, pending: list[_Pending]) -> None:
        node, target, args, kwargs, release = step.node, step.node.target, step.args, step.kwargs, step.release
        leaves = {source: pytree.tree_map_only(Tensor, _leaf, env[source]) for source in node.all_input_nodes
                  if self._training and self._flags[source].grad}
        originals = {source: env[source] for source in leaves}
        env.update(leaves)
        sink = self.samples[node].forward.append
        mark = clock.start()
        result = target(*_fetch(args, env), **_fetch(kwargs, env))
        env[node] = result
        if not leaves:
            for source in release:
                env.pop(source, None)
        clock.stop(mark, sink)
        env.update(originals)
        if self._training:
            env[node] = pytree.tree_map_only(Tensor, Tensor.detach, result)
            self._keep(node, result, leaves, pending)
            for source in release:
                env.pop(source, None)

    def _keep(self, node: fx.Node, result: Any, leaves: Mapping[fx.Node, Any], pending: list[_Pending]) -> None:
        outputs = tuple(tensor for tensor in pytree.tree_leaves(result)
                        if isinstance(tensor, Tensor) and tensor.requires_grad)
        sides: dict[bool, list[Tensor]] = {False: [], True: []}
        for source, value in leaves.items():
            tensors = [tensor for tensor in pytree.tree_leaves(value) if isinstance(tensor, Tensor)]
            sides[self._flags[source].data].extend(tensor for tensor in tensors if tensor.requires_grad)
        samples = self.samples[node]
        samples.has_weights, samples.has_activations = bool(sides[False]), bool(sides[True])
        if outputs and leaves:
            pending.append(_Pending(node, outputs, tuple(sides[False]), tuple(sides[True])))

    def _start_backward(self, clock: Clock) -> None:
        """Time autograd on an operator that does nothing."""
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        output, seed = (leaf.view(1),), [torch.ones(1, device=self._device)]
        mark = clock.start()
        torch.autograd.grad(output, (leaf,), seed, allow_unused=True)
        clock.stop(mark, self.start_times.append)

    def _backward(self, item: _Pending, clock: Clock, *, only_activations: bool) -> None:
        samples = self.samples[item.node]
        both = bool(item.weights) and bool(item.activations)
        partial = only_activations and both
        wanted = item.activations if partial else item.weights + item.activations
        seeds = [torch.randn_like(output) for output in item.outputs]
        sink = (samples.input_grad if partial else samples.backward).append
        try:
            mark = clock.start()
            torch.autograd.grad(item.outputs, wanted, seeds, allow_unused=True)
            clock.stop(mark, sink)
        except RuntimeError as problem:
            samples.problem = str(problem).splitlines()[0][:200]

    def _add_gradients(self, item: SumToTime, clock: Clock) -> None:
        shape, dtype = tuple(item.like.shape), item.like.dtype
        first, second = (torch.randn(shape, dtype=dtype, device=self._device) for _ in range(2))
        mark = clock.start()
        result = first.add_(second) if item.in_place else first + second
        clock.stop(mark, item.seconds.append)
        del result


def _extent(tensor: Tensor) -> int:
    """Return how many elements of memory the tensor spans."""
    if tensor.numel() == 0:
        return 0
    return int(1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))


def _leaf(tensor: Tensor) -> Tensor:
    """Return the tensor as a leaf of its own autograd graph."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _fetch(arguments: Any, env: Mapping[fx.Node, Any]) -> Any:
    """Return ``arguments`` with every node replaced by its value."""
    if isinstance(arguments, fx.Node):
        return env[arguments]
    if isinstance(arguments, list | tuple):
        return [_fetch(item, env) for item in arguments]
    if isinstance(arguments, dict):
        return {key: _fetch(item, env) for key, item in arguments.items()}
    return arguments
