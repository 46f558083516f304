"""Coarsening: a model in, its graph of fused groups out, by the fusions that are asked for.

    coarse = coarsen(traced)                     by the table of rules
    coarse = coarsen(traced, "inductor")         as PyTorch's compiler fuses
    costs = estimate_costs(coarse.graph, cluster)
    device_of_op = expand(coarse, device_of_group)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, assert_never, get_args

from weft.base.errors import InputError
from weft.coarsen.backends import fuse_by_inductor, fuse_by_onnxruntime
from weft.coarsen.contract import Coarse, contract
from weft.coarsen.groups import Groups, How, single_groups
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
            return fuse_by_inductor(model)
        case "onnxruntime":
            if path is None:
                raise InputError(f"ONNX Runtime needs the ONNX file of {graph.name!r}: give its path, or coarsen by "
                                 "rules")
            return fuse_by_onnxruntime(graph, path)
        case _:
            assert_never(how)
