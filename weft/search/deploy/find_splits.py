"""How devices of a host divide a model's operators, as the sharding search finds it, for searches of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from weft.base.errors import ModelError, NoFeasiblePlan
from weft.cluster.cluster import Cluster, DeviceId
from weft.cost.costs import Costs
from weft.model.folded import FoldedModel, trace_folded
from weft.model.graph import Graph
from weft.model.load import has_module
from weft.model.source import ModelSource, resolve_model
from weft.plan.notes import NOTE, rule_notes
from weft.plan.plan import Mode
from weft.search.common.budget import Budget, OutOfTime, cut_short, time_budget
from weft.search.common.problem import Problem
from weft.search.deploy.splits import NO_SPLITS, Splits, tp_groups_by_degree
from weft.search.shard.tensor_costs import TensorCosts, split_operators

SPLITS_PART: Final = 0.25
"""Part of a time limit that finding out how devices divide operators may take; a guess."""


def load_splits(model: str | ModelSource | None, problem: Problem, costs_of: Callable[[Graph], Costs], *,
                degree: int | None = None, budget: Budget | None = None, report: Callable[[str], None],
                progress: Callable[[str], None] = lambda text: None) -> Splits:
    """Return how devices of a host may divide the model, or that which is called so; nothing if it is not PyTorch's.

    ``budget`` is for the whole search, of which this takes a part; tracing does not count. ``report`` is told why
    operators are not divided, ``progress`` what is done besides.
    """
    if (model is None or next(tp_groups_by_degree(problem.cluster.groups_by_host_and_kind()), None) is None
            or not has_module(model)):
        return NO_SPLITS
    budget = budget or time_budget(None)
    progress("searching how the devices of a host divide operators")
    options, batch = problem.options, problem.graph.batch
    try:
        with budget.paused():
            folded = trace_folded(model, batch=batch) if isinstance(model, ModelSource) else _folded(
                model, options.mode, batch, options.dtype)
        for note in rule_notes(folded.traced):
            progress(f"{NOTE}{note}")
        return find_splits(problem, folded, costs_of, degree=degree, budget=budget.part(SPLITS_PART))
    except ModelError as miss:
        report(f"note: operators are not divided: {miss}")
        return NO_SPLITS


@lru_cache(maxsize=2)
def _folded(model: str, mode: Mode, batch: int, dtype: str) -> FoldedModel:
    """Return the folded model that is called so; one that is asked about again is traced once."""
    source = resolve_model(model, mode=mode, batch=batch, dtype=dtype)
    assert isinstance(source, ModelSource), "it has a module"
    return trace_folded(source, batch=batch)


def find_splits(problem: Problem, folded: FoldedModel, costs_of: Callable[[Graph], Costs], *,
                degree: int | None = None, budget: Budget | None = None) -> Splits:
    """Return how 2, 4, 8, ... devices of each device group divide the model; nothing where no host has several.

    ``folded`` is the folded model of ``problem.graph``; ``costs_of`` gives the costs of its graph. ``degree`` is the
    only number of devices to look at, if given. What the budget cuts short is left out.
    """
    groups = problem.cluster.groups_by_host_and_kind()
    found: dict[tuple[int, int], TensorCosts] = {}
    costs: Costs | None = None
    for count, members in tp_groups_by_degree(groups):
        if degree not in (None, count):
            continue
        try:
            with cut_short(None if budget is None else budget.deadline):
                costs = costs or costs_of(folded.traced.graph)
                firsts = _distinct(problem.cluster, [groups[group][:count] for group in members])
                tables = split_operators(folded, problem.graph, costs, list(dict.fromkeys(firsts)), budget=budget,
                                         optimizer=problem.options.optimizer, is_size_known=is_size_known(problem),
                                         divides_experts=problem.options.ep is not None,
                                         expert_load=problem.options.expert_load)
        except (NoFeasiblePlan, ModelError, OutOfTime):
            break  # no time left, or nothing to divide: the search goes on without
        known = dict(zip(dict.fromkeys(firsts), tables, strict=True))
        found |= {(group, count): known[tp_group] for group, tp_group in zip(members, firsts, strict=True)}
    return found


def is_size_known(problem: Problem) -> bool:
    """Return whether micro-batches have just as many samples as the graph."""
    number = problem.options.microbatches
    return number is not None and problem.options.batch == number * problem.graph.batch


def _distinct(cluster: Cluster, tp_groups: Sequence[Sequence[DeviceId]]) -> list[tuple[DeviceId, ...]]:
    """Return for each tp group the first one that is like it: devices of one kind with equal links between them."""
    known: dict[object, tuple[DeviceId, ...]] = {}
    return [known.setdefault(_like(cluster, tp_group), tuple(tp_group)) for tp_group in tp_groups]


def _like(cluster: Cluster, tp_group: Sequence[DeviceId]) -> object:
    """Return what tp groups of equal devices with equal links have in common; only links inside the tp group count."""
    place = {cluster.devices[device].name: index for index, device in enumerate(tp_group)}
    links = tuple(tuple((place.get(link.target, -1), link.bytes_per_s, link.latency_s)
                        for link in cluster.links_from(cluster.devices[device].name)) for device in tp_group)
    return cluster.devices[tp_group[0]].kind, links
