"""How devices of a host divide a model's operators, as the sharding search finds it, for searches of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from weft.base.errors import InputError, ModelError, NoFeasiblePlan
from weft.cluster.cluster import Cluster, DeviceId
from weft.cost.costs import Costs
from weft.model.folded import FoldedModel, trace_folded
from weft.model.graph import Graph
from weft.model.load import has_module
from weft.model.source import ModelSource, resolve_model
from weft.plan.local_tensors import ATTENTION
from weft.plan.notes import NOTE, rule_notes
from weft.plan.plan import Mode
from weft.search.common.budget import Budget, OutOfTime, cut_short, time_budget
from weft.search.common.problem import Problem, divisors
from weft.search.deploy.splits import NO_SPLITS, Splits, SplitsWithContexts, tp_groups_by_degree
from weft.search.shard.tensor_costs import TensorCosts, split_operators
from weft.sharding.named_ops import named_ops
from weft.sharding.sequence import find_sequence

SPLITS_PART: Final = 0.25
"""Part of a time limit that finding out how devices divide operators may take; a guess."""
CONTEXT_LENGTH: Final = 16384
"""Samples of so many places are worth a search for how devices divide them; of shorter ones there are many in a step,
so that each replica has some. A guess."""


def load_splits(model: str | ModelSource | None, problem: Problem, costs_of: Callable[[Graph], Costs], *,
                degree: int | None = None, budget: Budget | None = None, report: Callable[[str], None],
                progress: Callable[[str], None] = lambda text: None) -> Splits:
    """Return how devices of a host may divide the model, or that which is called so; nothing if it is not PyTorch's.

    ``budget`` is for the whole search, of which this takes a part; tracing does not count. ``report`` is told why
    operators are not divided, ``progress`` what is done besides.
    """
    groups, cp = problem.cluster.groups_by_host_and_kind(), problem.options.degrees.cp
    is_long = cp is None and _longest(problem.graph) >= CONTEXT_LENGTH
    if (model is None or (degree == 1 and not is_long and (cp or 1) == 1)
            or next(tp_groups_by_degree(groups), None) is None or not has_module(model)):
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
        part = SPLITS_PART if options.degrees.tp is None else 1.0  # without it there is no plan at all
        found = {} if (cp or 1) > 1 or degree == 1 else find_splits(problem, folded, costs_of, degree=degree,
                                                                    budget=budget.part(part))
        if not is_long and (cp or 1) == 1:
            return found
        progress("searching how they divide the sequence of a sample")
        with budget.paused():
            alone = folded if batch == 1 else trace_folded(model, batch=1) if isinstance(
                model, ModelSource) else _folded(model, options.mode, 1, options.dtype)
        return SplitsWithContexts(found, find_contexts(problem, alone, costs_of, degree=degree,
                                                       budget=budget.part(SPLITS_PART)))
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
                                         divides_experts=(problem.options.degrees.ep or 1) > 1,
                                         expert_load=problem.options.expert_load)
        except (NoFeasiblePlan, ModelError, OutOfTime):
            break  # no time left, or nothing to divide: the search goes on without
        known = dict(zip(dict.fromkeys(firsts), tables, strict=True))
        found |= {(group, count): known[tp_group] for group, tp_group in zip(members, firsts, strict=True)}
    return found


def _longest(graph: Graph) -> int:
    """Return the most rows that any attention has."""
    return max((graph.tensor_shapes[tensor][-2] for op, kind in enumerate(graph.op_kinds) if kind == ATTENTION
                for tensor in graph.op_outputs(op).tolist()), default=0)


def find_contexts(problem: Problem, folded: FoldedModel, costs_of: Callable[[Graph], Costs], *,
                  degree: int | None = None, budget: Budget | None = None) -> dict[int, Splits]:
    """Return the same where 2, 4, 8, ... of the devices divide the sequence, by how many do.

    ``folded`` has one sample, as each replica is to have at a time: its words fit no other number. ``degree`` is the
    only number of devices that divide operators beside, if given.
    """
    if any(name not in problem.graph.op_index for name in folded.traced.graph.op_names):
        return {}  # with one sample it has other operators
    groups = problem.cluster.groups_by_host_and_kind()
    costs, sequence = costs_of(folded.traced.graph), find_sequence(named_ops(folded.traced))
    found: dict[int, dict[tuple[int, int], TensorCosts]] = {}
    for count, members in tp_groups_by_degree(groups):
        for cp in (number for number in divisors(count) if number > 1 and degree in (None, count // number)
                   and problem.options.degrees.admit(cp=number)):
            try:
                sequence.check(cp)
                with cut_short(None if budget is None else budget.deadline):
                    firsts = _distinct(problem.cluster, [groups[group][:count] for group in members])
                    tables = split_operators(folded, problem.graph, costs, list(dict.fromkeys(firsts)), budget=budget,
                                             optimizer=problem.options.optimizer, is_size_known=True, cp=cp)
            except InputError:
                if problem.options.degrees.cp == cp:
                    raise
                continue  # it does not divide the sequence
            except (NoFeasiblePlan, OutOfTime):
                return dict(found)
            known = dict(zip(dict.fromkeys(firsts), tables, strict=True))
            found.setdefault(cp, {}).update({(group, count): known[tp_group]
                                             for group, tp_group in zip(members, firsts, strict=True)})
    return dict(found)


def is_size_known(problem: Problem) -> bool:
    """Return whether micro-batches have just as many samples on a replica as the graph, as far as replicas are known.
    """
    number, dp = problem.options.microbatches, problem.options.degrees.dp or 1
    return number is not None and problem.options.batch == number * dp * problem.graph.batch


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
