"""Plans for tests of the runtime, in one line each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from tests.worlds import with_gradients
from weft.model.graph import Graph
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import TracedModel, trace
from weft.model.zoo import MODELS as ZOO
from weft.plan.orders import Order, to_tokens
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage

MODELS = Path(__file__).with_name("models.py")


def source_of(name: str, *, mode: str = "training", dtype: str | None = "float64") -> ModelSource:
    """Return a function of ``models.py``, a model of the zoo, or ``file.py:function``."""
    source = resolve_model(name if ":" in name or name in ZOO else f"{MODELS}:{name}", mode=mode)
    assert isinstance(source, ModelSource)
    return source.with_dtype(dtype)


@cache
def traced(name: str, *, mode: str = "training", batch_dims: bool = False) -> TracedModel:
    return trace(source_of(name, mode=mode), batch=2, backward="rule", batch_dims=batch_dims)


def cut(graph: Graph, num_stages: int) -> list[list[str]]:
    """Return the operators in order, cut into runs that hold about equally many operators that are not constant."""
    ranks = np.cumsum(~graph.is_constant)
    stage = np.minimum((ranks - 1).clip(0) * num_stages // ranks[-1], num_stages - 1)
    return [[graph.op_names[op] for op in np.flatnonzero(stage == index)] for index in range(num_stages)]


def greedy_order(devices: Sequence[int], num_microbatches: int, *, split: bool = False,
                 chains: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None) -> Order:
    """Return an order for stages on any devices: each runs what is ready, backwards first, in unit time.

    ``chains`` are (stages in order, micro-batches); default: all stages, all micro-batches.
    """
    chains = chains or [(range(len(devices)), range(num_microbatches))]
    needs: dict[tuple[int, str, int], list[tuple[int, str, int]]] = {}
    for stages, microbatches in chains:
        for mb in microbatches:
            for index, stage in enumerate(stages):
                back = "I" if split else "B"
                needs[stage, "F", mb] = [(stages[index - 1], "F", mb)] if index else []
                needs[stage, back, mb] = [(stage, "F", mb)] + (
                    [(stages[index + 1], back, mb)] if index + 1 < len(stages) else [])
                if split:
                    needs[stage, "W", mb] = [(stage, "I", mb)]
    order: Order = [[] for _ in range(max(devices) + 1)]
    done: set[tuple[int, str, int]] = set()
    while len(done) < len(needs):
        ready = [action for action, before in needs.items() if action not in done and all(b in done for b in before)]
        chosen = {}
        for action in sorted(ready, key=lambda item: ("BIFW".index(item[1]), item[2], item[0])):
            chosen.setdefault(devices[action[0]], action)
        for device, action in chosen.items():
            order[device].append(action)
            done.add(action)
    return order


def make_plan(graph: Graph, stages: Sequence[Stage], order: dict[str, tuple[str, ...]], *, microbatches: int, batch: int,
              num_devices: int, optimizer: str = "none", mode: str = "training") -> Plan:
    return with_gradients(Plan(
        model=ModelRef(name=graph.name, digest=graph.digest, mode=mode, batch=batch),
        cluster=ClusterRef(digest="test", devices=tuple(f"d{index}" for index in range(num_devices))),
        microbatches=microbatches, stages=tuple(stages), order=order, optimizer=Optimizer(kind=optimizer, lr=0.1)), graph)


def pipeline_plan(graph: Graph, devices: Sequence[int], order: Order, *, microbatches: int, batch: int | None = None,
                  optimizer: str = "none", mode: str = "training", recompute: bool = False,
                  ops: list[list[str]] | None = None) -> Plan:
    """Return one stage for each entry of ``devices``, on that device."""
    parts = ops or cut(graph, len(devices))
    names = tuple(f"s{index}" for index in range(len(devices)))
    stages = [Stage(name=name, ops=tuple(part), replicas=(Replica(devices=(f"d{device}",)),), recompute=recompute)
              for name, part, device in zip(names, parts, devices, strict=True)]
    tokens = {f"d{device}": actions for device, actions in enumerate(to_tokens(order, names))}
    return make_plan(graph, stages, tokens, microbatches=microbatches, batch=batch or 2 * microbatches,
                     num_devices=max(devices) + 1, optimizer=optimizer, mode=mode)


def opposite_plan(graph: Graph, num_devices: int, *, microbatches: int) -> Plan:
    """Return two pipelines over the same devices in opposite directions, each for half of the micro-batches."""
    parts = cut(graph, num_devices)
    down, up = tuple(range(num_devices)), tuple(range(num_devices, 2 * num_devices))
    halves = (tuple(range(0, microbatches, 2)), tuple(range(1, microbatches, 2)))
    devices = [*range(num_devices), *reversed(range(num_devices))]
    order = greedy_order(devices, microbatches, chains=[(down, halves[0]), (up, halves[1])])
    names = tuple([f"down{index}" for index in down] + [f"up{index}" for index in down])
    stages = [Stage(name=names[index], ops=tuple(parts[index % num_devices]), microbatches=halves[index // num_devices],
                    replicas=(Replica(devices=(f"d{devices[index]}",)),)) for index in range(2 * num_devices)]
    tokens = {f"d{device}": actions for device, actions in enumerate(to_tokens(order, names))}
    return make_plan(graph, stages, tokens, microbatches=microbatches, batch=2 * microbatches, num_devices=num_devices)


def replicated_plan(graph: Graph, replicas: Sequence[Sequence[tuple[int, float]]], *, microbatches: int, batch: int,
                    num_devices: int, parts: Sequence[Sequence[str]] | None = None) -> Plan:
    """Return stages in a chain, each with replicas given as (device, share), in GPipe order; ``parts`` are their ops."""
    if parts is None:
        parts = cut(graph, len(replicas)) if len(replicas) > 1 else [list(graph.op_names)]
    stages = [Stage(name=f"s{index}", ops=tuple(part),
                    replicas=tuple(Replica(devices=(f"d{device}",), share=share) for device, share in items))
              for index, (part, items) in enumerate(zip(parts, replicas, strict=True))]
    order = {f"d{device}": tuple(
        f"s{index}:{phase}:{mb}" for phase in "FB" for mb in range(microbatches)
        for index in (range(len(replicas)) if phase == "F" else reversed(range(len(replicas))))
        if device in [item[0] for item in replicas[index]]) for device in range(num_devices)}
    return make_plan(graph, stages, order, microbatches=microbatches, batch=batch, num_devices=num_devices)
