"""Times fused groups on this machine, each distinct one once, and puts them into a profile store.

``estimate_costs(coarse.graph, ..., profile=store)`` then finds them: a group's key is the kind (``fused:...``) and the
shapes of what crosses its border, exactly as for a single operator (``weft.cost.profile``). Groups of one operator are
what ``weft.cost.profiler.profile_model`` times.

A group runs as one function that PyTorch compiles; where that fails (no C++ compiler, an operator that the compiler
does not take) its operators run one after the other, which is noted. The model is run group by group on true inputs, so
that indices and masks have sensible values, and a tensor is dropped after its last reader. Only the forward pass is
timed.
"""

from __future__ import annotations

import datetime
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from weft.coarsen.contract import Coarse, contract
from weft.coarsen.groups import NO_GROUP, Groups
from weft.coarsen.inductor import compile_graph
from weft.cost.clocks import Clock, make_clock
from weft.cost.profile import OpKey, OpTiming, ProfileStore
from weft.cost.profiler import (
    PASSES,
    check_device,
    kind_name,
    op_keys,
    placeholder_values,
    single_purpose,
    spread_of,
)
from weft.model.trace import TracedModel, retarget

_WARM_UP = 2
"""Runs of a group before it is timed; the first of them compiles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProfile:
    """What a run of ``profile_groups`` did."""

    device_kind: str
    num_keys: int
    """Distinct groups of two or more operators."""
    num_timed: int
    """Of them, those timed now; the others were in the store."""
    notes: tuple[str, ...]
    """Groups that could not be compiled, and why: their operators were timed one after the other."""
    seconds_spent: float


def profile_groups(traced: TracedModel, groups: Groups, store: ProfileStore, device: Literal["cpu", "cuda"], *,
                   threads: int = 1, kind: str | None = None, passes: int = PASSES,
                   timestamp: str | None = None) -> GroupProfile:
    """Time the groups of two or more operators on this machine's ``device``, put them into ``store``.

    The arguments are those of ``profile_model``. Groups that the store has for this device kind are not timed again.
    """
    begin = time.perf_counter()
    place = check_device(device, threads, passes)
    name = kind or kind_name(device)
    coarse = contract(traced.graph, groups)
    first = _first_of_key(coarse, op_keys(coarse.graph, name))
    known = {key for key, timing in store.timings(name).items() if timing.threads == threads}
    wanted = {group: key for key, group in first.items() if key not in known}
    notes: list[str] = []
    if wanted:
        with single_purpose(place, threads), torch.no_grad():
            clock = make_clock(place, threads, traced.graph.parameter_bytes)
            samples = _run(traced, coarse, set(wanted), place, _Timer(clock=clock, passes=passes, notes=notes))
        now = timestamp or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        store.put_timings((key, _timing(samples[group], threads, now)) for group, key in wanted.items())
    return GroupProfile(device_kind=name, num_keys=len(first), num_timed=len(wanted), notes=tuple(notes),
                        seconds_spent=time.perf_counter() - begin)


def _first_of_key(coarse: Coarse, keys: Sequence[OpKey]) -> dict[OpKey, int]:
    first: dict[OpKey, int] = {}
    for group, ops in enumerate(coarse.groups.members()):
        if len(ops) > 1:
            first.setdefault(keys[group], group)
    return first


def _timing(seconds: Sequence[float], threads: int, timestamp: str) -> OpTiming:
    return OpTiming(forward_s=statistics.median(seconds), input_grad_s=None, weight_grad_s=None,
                    spread=spread_of(seconds), repeats=len(seconds), threads=threads,
                    torch_version=torch.__version__, recorded_at=timestamp)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timer:
    """Times a function of tensors, compiled if possible."""

    clock: Clock
    passes: int
    notes: list[str]

    def time(self, label: str, module: fx.GraphModule, arguments: Sequence[Any]) -> list[float]:
        """Return the seconds of each pass."""
        function = self._compiled(label, module, arguments)
        times: list[float] = []
        for _ in range(_WARM_UP):
            function(*arguments)
        for _ in range(self.passes):
            mark = self.clock.start()
            function(*arguments)
            self.clock.stop(mark, times.append)
            self.clock.settle()
        floor_s = self.clock.floor()
        return [max(seconds, floor_s) for seconds in times]

    def _compiled(self, label: str, module: fx.GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
        try:
            function = compile_graph(module, arguments)
            function(*arguments)
        except Exception as problem:  # the compiler's errors are of many types, a missing C++ compiler's too
            text = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:160]
            self.notes.append(f"{label} was timed as separate operators: it cannot be compiled ({text})")
            eager: Callable[..., Any] = module
            return eager
        return function


def _run(traced: TracedModel, coarse: Coarse, wanted: set[int], device: torch.device,
         timer: _Timer) -> Mapping[int, list[float]]:
    """Run the model group by group and return the times of the groups in ``wanted``."""
    value_of = placeholder_values(traced, device)
    parts = _parts(traced, coarse)
    last = {node: index for index, part in enumerate(parts) for node in (*part.reads, *part.writes)}
    values: dict[fx.Node, Any] = {}
    samples: dict[int, list[float]] = {}
    left = set(wanted)
    for index, part in enumerate(parts):
        for node in part.reads:
            if node.op == "placeholder" and node not in values:
                values[node] = value_of(node)
        module = _module(part, device)
        arguments = [values[node] for node in part.reads]
        if part.group in left:
            samples[part.group] = timer.time(coarse.graph.op_kinds[part.group], module, arguments)
            left.discard(part.group)
            if not left:
                break
        values.update(zip(part.writes, module(*arguments), strict=True))
        for node in (*part.reads, *part.writes):
            if last[node] == index:
                values.pop(node, None)
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One group, or one constant, as nodes of the traced graph."""

    group: int
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]


def _parts(traced: TracedModel, coarse: Coarse) -> list[_Part]:
    """Return constants, then groups, in an order in which they can run."""
    program, names = traced.program, traced.graph.op_names
    constants = [(NO_GROUP, (op,)) for op in range(len(names)) if coarse.groups.of_op[op] == NO_GROUP]
    parts = []
    for group, ops in (*constants, *enumerate(coarse.groups.members())):
        nodes = tuple(program.nodes[node] for op in ops for node in program.op_nodes[names[op]])
        inside = set(nodes)
        reads = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        writes = tuple(node for node in nodes if any(user not in inside for user in node.users))
        parts.append(_Part(group=group, nodes=nodes, reads=tuple(reads), writes=writes))
    return parts


def _module(part: _Part, device: torch.device) -> fx.GraphModule:
    """Return the part as a function of what it reads that returns what it writes."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"a{index}") for index, node in enumerate(part.reads)}
    for node in part.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.target is not operator.getitem:
            copies[node].args = retarget(copies[node].args, device)
            copies[node].kwargs = retarget(copies[node].kwargs, device)
    graph.output(tuple(copies[node] for node in part.writes))
    return fx.GraphModule({}, graph)
