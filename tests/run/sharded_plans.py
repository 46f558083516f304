"""Plans of one stage on all devices together, with strategies written by factor names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache

from tests.run.plans import make_plan, traced
from weft.plan.plan import Plan, Replica, Sharding, Stage
from weft.search.joint.placements import with_stored_parameters
from weft.sharding.named_ops import NamedOp, named_ops

Patterns = Mapping[str, str]
"""From a regular expression over names of operators to the word for one axis; the last that matches counts."""


@cache
def ops_of(model: str, *, mode: str = "training") -> dict[str, NamedOp]:
    return named_ops(traced(model, mode=mode))


def parameter_shapes(model: str) -> dict[str, tuple[int, ...]]:
    graph = traced(model).graph
    return {graph.tensor_names[tensor]: graph.tensor_shapes[tensor] for tensor in graph.parameters}


def sharding_of(model: str, mesh: Sequence[int], axes: Sequence[Patterns], *, mode: str = "training") -> Sharding:
    """Return the sharding in which each axis splits what its patterns say, with parameters stored as used."""
    words = {}
    for name, op in ops_of(model, mode=mode).items():
        if op.factors is not None:
            words[name] = tuple(_word(patterns, name, op) for patterns in axes)
    return with_stored_parameters(words, ops_of(model, mode=mode), parameter_shapes(model), mesh)


def _word(patterns: Patterns, name: str, op: NamedOp) -> str:
    found = [word for pattern, word in patterns.items() if re.fullmatch(pattern, name)]
    known = {factor.name for factor in op.factors.factors}
    words = [word for word in (found[-1].split() if found else ())
             if word.partition("/")[0] in known or word[0] in "+:"]
    return words[0] if words else ""


def sharded_plan(model: str, mesh: Mapping[str, int], sharding: Sharding, *, microbatches: int = 2, num_devices: int = 4,
                 optimizer: str = "none", recompute: bool = False, split: bool = False, devices: Sequence[int] = (),
                 mode: str = "training") -> Plan:
    """Return the whole model as one stage on a mesh, with some micro-batches of two samples."""
    graph = traced(model, mode=mode).graph
    members = tuple(f"d{index}" for index in devices or range(math.prod(mesh.values())))
    stage = Stage(name="s0", ops=graph.op_names, replicas=(Replica(devices=members, mesh=mesh),), sharding=sharding,
                  recompute=recompute)
    backward = [f"s0:{phase}:{mb}" for mb in range(microbatches) for phase in (("I", "W") if split else ("B",))]
    actions = (*(f"s0:F:{mb}" for mb in range(microbatches)), *(backward if mode == "training" else ()))
    return make_plan(graph, [stage], dict.fromkeys(members, actions), microbatches=microbatches, batch=2 * microbatches,
                     num_devices=num_devices, optimizer=optimizer, mode=mode)
