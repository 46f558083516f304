"""The plans that the self-test runs: a tiny model in every kind of plan, for any number of ranks from two on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from weft.model.graph import F64, Graph
from weft.model.source import ModelSource
from weft.plan.holders import exchange_sets
from weft.plan.orders import (
    PLACES,
    Action,
    Order,
    Position,
    by_pattern,
    by_place,
    forward_only,
    interleaved,
    one_after_another,
    one_f_one_b,
    to_tokens,
)
from weft.plan.plan import ClusterRef, GradientExchange, ModelRef, Optimizer, Plan, Replica, Sharding, Stage, Storage

WIDTH: Final = 16
ADAM: Final = Optimizer(kind="adam", lr=1e-3)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class _Net(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Layer() for _ in range(num_layers)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        result: Tensor = self.head(self.layers(x))
        return result if target is None else torch.nn.functional.mse_loss(result, target)


def model_of(num_ranks: int) -> ModelSource:
    """Return the model that all kinds run: two layers for each rank."""
    def build(mode: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return _Net(2 * num_ranks)

    def sample(mode: str, batch: int, seed: int) -> tuple[Tensor, ...]:
        random = torch.Generator().manual_seed(seed)
        values = tuple(torch.randn(batch, 3, size, generator=random) for size in (WIDTH, 4))
        return values if mode == "training" else values[:1]

    return ModelSource(name="selftest", spec="", batch=4, mode="training", builder=build, sampler=sample,
                       dtype="float64")


# ---- kinds of plans -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class World:
    """What plans are made for: the ranks, and the model as it was traced for one sample."""

    num_ranks: int
    graph: Graph
    mode: Any = "training"

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the name of each rank's device."""
        return tuple(f"d{rank}" for rank in range(self.num_ranks))

    def parts(self, num_parts: int) -> list[tuple[str, ...]]:
        """Return the operators in order, cut between layers into so many parts."""
        found: list[list[str]] = [[] for _ in range(num_parts)]
        part = 0
        for name in self.graph.op_names:
            if name.startswith("layers."):
                part = int(name.split(".")[1]) * num_parts // (2 * self.num_ranks)
            found[part].append(name)
        return [tuple(items) for items in found]

    def plan(self, stages: Sequence[Stage], order: Mapping[str, tuple[str, ...]], *, microbatches: int,
             samples: int = 2) -> Plan:
        """Return the plan of these stages with so many samples in a micro-batch; all-reduce sums the gradients."""
        plan = Plan(model=ModelRef(name="selftest", digest=self.graph.digest, mode=self.mode,
                                   batch=microbatches * samples, dtype="float64"),
                    cluster=ClusterRef(digest="", devices=self.devices), microbatches=microbatches,
                    stages=tuple(stages), order=order, optimizer=ADAM)
        names: dict[tuple[str, ...], list[str]] = {}
        for tensor, sets in exchange_sets(plan, self.graph).items() if self.mode == "training" else ():
            for devices in sets:
                names.setdefault(devices, []).append(self.graph.tensor_names[tensor])
        return replace(plan, gradients=tuple(GradientExchange(parameters=tuple(items), devices=devices)
                                             for devices, items in names.items()))

    def pipeline(self, order: Order, *, chunks: int = 1, recompute: bool = False) -> Plan:
        """Return a pipeline over all ranks with this order."""
        parts = self.parts(chunks * self.num_ranks)
        stages = [Stage(name=f"s{index}", ops=part, recompute=recompute,
                        replicas=(Replica(devices=(self.devices[index % self.num_ranks],)),))
                  for index, part in enumerate(parts)]
        tokens = to_tokens(order, tuple(stage.name for stage in stages))
        return self.plan(stages, dict(zip(self.devices, tokens, strict=True)), microbatches=2 * self.num_ranks)

    def replicas(self, shares: Sequence[int], **changes: Any) -> Plan:
        """Return data parallelism with these samples of a micro-batch on each rank; exchanges are changed."""
        replicas = tuple(Replica(devices=(device,), share=share / sum(shares))
                         for device, share in zip(self.devices, shares, strict=True))
        order = tuple(f"s0:{phase}:{number}" for number in range(2) for phase in "FB")
        plan = self.plan([Stage(name="s0", ops=self.graph.op_names, replicas=replicas)],
                         dict.fromkeys(self.devices, order), microbatches=2, samples=sum(shares))
        names = plan.gradients[0].parameters
        half = len(names) // 4 * 2  # a weight stays with its bias
        return replace(plan, gradients=tuple(replace(plan.gradients[0], parameters=part, **changes)
                                             for part in (names[half:], names[:half])))

    def pieces(self, storage: Storage) -> Plan:
        """Return data parallelism in three units that keep in pieces what ``storage`` says."""
        replicas = tuple(Replica(devices=(device,), share=1 / self.num_ranks) for device in self.devices)
        stages = [Stage(name=f"s{index}", ops=part, replicas=replicas, storage=storage)
                  for index, part in enumerate(self.parts(3))]
        return self.plan(stages, dict.fromkeys(self.devices, _by_units(len(stages))), microbatches=2,
                         samples=self.num_ranks)

    def split(self, *devices: str, ops: tuple[str, ...], name: str = "s0") -> Stage:
        """Return a stage whose layers these devices split as Megatron-LM does: columns, then rows."""
        words: dict[str, tuple[str, ...]] = {}
        tensors: dict[str, tuple[str, ...]] = {}
        for op in ops:
            layer, _, what = op.rpartition("layers.")[2].partition(".")
            word = {"up.linear": "n", "tanh": "d2", "down.linear": "k"}.get(what)
            if word is not None:
                words[op] = (word,)
                tensors |= {f"layers.{layer}.{key}": (place,) for key, place in (
                    ("up.weight", "S0"), ("up.bias", "S0"), ("down.weight", "S1"))}
        return Stage(name=name, ops=ops, replicas=(Replica(devices=devices, mesh={"tensor": len(devices)}),),
                     sharding=Sharding(ops=words, tensors=tensors))


def _data_parallel(world: World) -> Plan:
    return world.replicas([1] * world.num_ranks)


def _uneven(world: World) -> Plan:
    return world.replicas([2, *[1] * (world.num_ranks - 1)])


def _divided_states(world: World) -> Plan:
    return replace(_data_parallel(world), optimizer=replace(ADAM, sharded=True))


def _by_units(num_units: int) -> tuple[str, ...]:
    """Return two micro-batches, each forward through all units and back."""
    return tuple(f"s{unit}:{phase}:{number}" for number in range(2) for phase in "FB"
                 for unit in (range(num_units) if phase == "F" else reversed(range(num_units))))


def _zero_2(world: World) -> Plan:
    return world.pieces(Storage(pieces="gradients"))


def _fsdp(world: World) -> Plan:
    return world.pieces(Storage(pieces="parameters"))


def _hybrid(world: World) -> Plan:
    """Wholes in pairs of ranks; where the ranks are no pairs, one whole that is kept from forward to backward."""
    pairs = tuple((first, first + 1) for first in range(0, world.num_ranks, 2))
    is_pairs = world.num_ranks % 2 == 0 and world.num_ranks > 2
    return world.pieces(Storage(pieces="parameters", groups=pairs if is_pairs else (), keeps=not is_pairs))


def _tensor_and_fsdp(world: World) -> Plan:
    """Two replicas that each split the layers and keep half of their parts."""
    half = world.num_ranks // 2
    stages = []
    for index, part in enumerate(world.parts(2)):
        stage = world.split(*world.devices[:half], ops=part, name=f"s{index}")
        first = replace(stage.replicas[0], share=0.5)
        second = replace(first, devices=world.devices[half : 2 * half])
        stages.append(replace(stage, replicas=(first, second), storage=Storage(pieces="parameters")))
    return world.plan(stages, dict.fromkeys(world.devices[: 2 * half], _by_units(2)), microbatches=2)


def _sufficient_factors(world: World) -> Plan:
    return world.replicas([1] * world.num_ranks, method="sufficient_factors")


def _parameter_server(world: World) -> Plan:
    return world.replicas([1] * world.num_ranks, method="parameter_server", server=world.devices[-1])


def _hierarchical(world: World) -> Plan:
    groups = tuple(world.devices[first : first + 2] for first in range(0, world.num_ranks, 2))
    return world.replicas([1] * world.num_ranks, method="hierarchical", groups=groups)


def _one_f_one_b(world: World) -> Plan:
    return world.pipeline(one_f_one_b(world.num_ranks, 2 * world.num_ranks))


def _interleaved(world: World) -> Plan:
    return world.pipeline(interleaved(world.num_ranks, 2, 2 * world.num_ranks), chunks=2)


def _zero_bubble(world: World) -> Plan:
    order: Order = []
    for rank in range(world.num_ranks):
        order.append([])
        waiting: list[Action] = []
        for kind, number in by_pattern("zb-h1", rank, world.num_ranks, 2 * world.num_ranks):
            order[-1] += [(rank, "I" if kind == "I0" else "F", number), *waiting]  # W comes one action after I
            waiting = [(rank, "W", number)] if kind == "I0" else []
        order[-1] += waiting
    return world.pipeline(order)


def _opposite(world: World) -> Plan:
    num_ranks, parts = world.num_ranks, world.parts(world.num_ranks)
    halves = tuple(tuple(range(first, 2 * num_ranks, 2)) for first in range(2))
    stages = [Stage(name=f"{way}{index}", ops=parts[index], microbatches=half, replicas=(Replica(devices=(device,)),))
              for way, half, devices in (("down", halves[0], world.devices), ("up", halves[1], world.devices[::-1]))
              for index, device in enumerate(devices)]
    numbers = np.arange(num_ranks, dtype=np.float64)
    order = {}
    for rank, device in enumerate(world.devices):
        names: list[str] = []
        rows: list[F64] = []
        for way, place in (("down", rank), ("up", num_ranks - 1 - rank)):
            at = Position(height=num_ranks - place, num_stages=num_ranks, highest=num_ranks, width=num_ranks)
            names += [f"{way}{place}:F", f"{way}{place}:B"]
            rows += PLACES["chimera"](at, numbers)
        order[device] = tuple(f"{names[row]}:{halves[row // 2][number]}" for row, number in by_place(rows))
    return world.plan(stages, order, microbatches=2 * num_ranks)


def _recompute(world: World) -> Plan:
    return world.pipeline(one_f_one_b(world.num_ranks, 2 * world.num_ranks), recompute=True)


def _tensor_parallel(world: World) -> Plan:
    order = tuple(f"s0:{phase}:{number}" for number in range(2) for phase in "FB")
    return world.plan([world.split(*world.devices, ops=world.graph.op_names)], dict.fromkeys(world.devices, order),
                      microbatches=2)


def _tensor_and_data(world: World) -> Plan:
    """Two replicas that each split the layers; of an odd number of ranks the last has nothing to do."""
    half = world.num_ranks // 2
    stage = world.split(*world.devices[:half], ops=world.graph.op_names)
    second = replace(stage.replicas[0], devices=world.devices[half : 2 * half], share=0.5)
    order = tuple(f"s0:{phase}:{number}" for number in range(2) for phase in "FB")
    return world.plan([replace(stage, replicas=(replace(stage.replicas[0], share=0.5), second))],
                      dict.fromkeys(world.devices[: 2 * half], order), microbatches=2)


def _wide_stage(world: World) -> Plan:
    """The first rank computes the first half, the others (all, if there are two) split the second."""
    first, second = world.parts(2)
    wide = world.devices[world.num_ranks > 2 :]
    stages = [Stage(name="s0", ops=first, replicas=(Replica(devices=world.devices[:1]),)),
              world.split(*wide, ops=second, name="s1")]
    tokens = to_tokens(one_after_another([0, 0], 4), ("s0", "s1"))[0]
    order = {device: tuple(token for token in tokens if device in {"s0": world.devices[:1], "s1": wide}[token[:2]])
             for device in world.devices}
    return world.plan(stages, order, microbatches=4)


def _inference(world: World) -> Plan:
    return world.pipeline(forward_only(world.num_ranks, 2 * world.num_ranks))


KINDS: Final[Mapping[str, Callable[[World], Plan]]] = {
    "data-parallel": _data_parallel, "uneven-shares": _uneven, "divided-states": _divided_states, "zero-2": _zero_2,
    "fsdp": _fsdp, "hybrid": _hybrid, "sufficient-factors": _sufficient_factors,
    "parameter-server": _parameter_server, "hierarchical": _hierarchical, "1f1b": _one_f_one_b,
    "interleaved": _interleaved, "zero-bubble": _zero_bubble, "opposite": _opposite, "recompute": _recompute,
    "tensor-parallel": _tensor_parallel, "tensor-and-data": _tensor_and_data, "tensor-and-fsdp": _tensor_and_fsdp,
    "wide-stage": _wide_stage, "inference": _inference}
"""Makers of plans by name."""
