"""The front door: a model in, its coarse graph out, by the fusions that are asked for.

    coarse = coarsen(traced)                     by the table of rules
    coarse = coarsen(traced, "inductor")         as PyTorch's compiler fuses
    costs = estimate_costs(coarse.graph, cluster)
    device_of_op = expand(coarse, device_of_group)
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never, get_args

from weft.base.errors import InputError
from weft.coarsen.contract import Coarse, contract
from weft.coarsen.groups import NO_GROUP, Groups, How, single_groups
from weft.coarsen.rules import fuse_by_rules
from weft.model.graph import Graph

if TYPE_CHECKING:
    from weft.model.trace import TracedModel


def coarsen(model: Graph | TracedModel, how: How = "rules", *, path: str | os.PathLike[str] | None = None) -> Coarse:
    """Return the model's graph with one operator for each group that ``how`` finds.

    ``inductor`` needs a traced model, ``onnxruntime`` the ``path`` of the ONNX file that the graph was read from;
    ``none`` only leaves out constants.
    """
    graph = model if isinstance(model, Graph) else model.graph
    return contract(graph, find_groups(model, how, path=path))


def find_groups(model: Graph | TracedModel, how: How = "rules", *,
                path: str | os.PathLike[str] | None = None) -> Groups:
    """Return the groups that ``how`` finds; see ``coarsen``."""
    if how not in get_args(How):
        raise InputError(f"there is no way to coarsen called {how!r}: choose one of {', '.join(get_args(How))}")
    graph = model if isinstance(model, Graph) else model.graph
    match how:
        case "none":
            return single_groups(graph)
        case "rules":
            return fuse_by_rules(graph)
        case "inductor":
            if isinstance(model, Graph):
                raise InputError(f"inductor needs a PyTorch model, and {graph.name!r} is only a graph: coarsen by "
                                 "rules")
            from weft.coarsen.inductor import fuse_by_inductor

            return fuse_by_inductor(model)
        case "onnxruntime":
            if path is None:
                raise InputError(f"ONNX Runtime needs the ONNX file of {graph.name!r}: give its path, or coarsen by "
                                 "rules")
            from weft.coarsen.onnxruntime import fuse_by_onnxruntime

            return fuse_by_onnxruntime(graph, path)
        case _:
            assert_never(how)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionRow:
    """How many operators one model has before and after fusion."""

    model: str
    num_ops: int
    num_constants: int
    """Of them, those that any device computes for itself: they are not placed."""
    num_rules: int
    """Groups by the table of rules."""
    num_inductor: int | None
    """Groups by inductor; None where it was not asked."""
    rules_s: float
    """CPU seconds of the rules and the contraction."""
    inductor_s: float | None


def fusion_report(models: Iterable[str], *, inductor: Collection[str] = (), batch: int = 1) -> Iterator[FusionRow]:
    """Yield one row for each zoo model, traced for inference; those in ``inductor`` also as inductor fuses them."""
    from weft.model.load import trace_model

    for name in models:
        traced = trace_model(name, mode="inference", batch=batch)
        start = time.process_time()
        coarse = coarsen(traced)
        rules_s = time.process_time() - start
        num_inductor, inductor_s = None, None
        if name in inductor:
            start = time.process_time()
            num_inductor = find_groups(traced, "inductor").num_groups
            inductor_s = time.process_time() - start
        yield FusionRow(model=name, num_ops=traced.graph.num_ops,
                        num_constants=int((coarse.groups.of_op == NO_GROUP).sum()), num_rules=coarse.groups.num_groups,
                        num_inductor=num_inductor, rules_s=rules_s, inductor_s=inductor_s)
