"""The search with little memory, against all choices there are, and against itself."""

from __future__ import annotations

import math
import re
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from tests.search.shard.worlds import cluster_of, search_of, source_of, zoo
from weft.base.errors import NoFeasiblePlan
from weft.cost.costs import estimate_costs
from weft.cost.mesh import Mesh
from weft.model.folded import trace_folded
from weft.plan.plan import Optimizer
from weft.search.common.budget import Budget
from weft.search.shard.compare import compare_meshes
from weft.search.shard.model_search import MeshSearch
from weft.search.shard.named import find_roles, named


class Pair(nn.Module):
    def __init__(self, width=8, inner=16):
        super().__init__()
        self.a, self.b = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Sum(Pair):
    def forward(self, x):
        return super().forward(x).sum()


class Residual(Pair):
    def forward(self, x):
        return x + super().forward(x)


class Deep(nn.Module):
    def __init__(self, count=8):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList([Residual() for _ in range(count)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


CLUSTER = cluster_of((2,), flop_per_s=1e9, memory_bytes_per_s=1e12, link=(1e9, 1e-8))


@cache
def folded(kind, batch):
    return trace_folded(source_of(kind, (8,), batch=batch))


def everything(graph):
    """Return the cost and usage of all choices."""
    problem = graph.problem
    index = np.indices([len(costs) for costs in problem.costs]).reshape(problem.num_nodes, -1)
    cost = sum(costs[row] for costs, row in zip(problem.costs, index, strict=True))
    used = sum(usage[row] for usage, row in zip(problem.usages, index, strict=True))
    for (a, b), matrix in zip(problem.edges.tolist(), problem.edge_costs, strict=True):
        cost = cost + matrix[index[a], index[b]]
    return cost, used


def least_of(problem):
    return int(re.search(r"holds at least .* \((\d+) bytes\)", str(problem.value))[1])


@pytest.mark.parametrize("batch", [4, 64])
def test_it_finds_the_best_of_all_choices_for_every_limit(batch):
    cost, used = everything(search_of(folded(Sum, batch), CLUSTER, (2,)).assembler.assemble())
    for limit in (None, *np.unique(np.quantile(used, [0.0, 0.02, 0.1, 0.3]))):
        found = search_of(folded(Sum, batch), CLUSTER, (2,), limit=limit).run()
        best = cost[used <= (np.inf if limit is None else limit)].min()
        assert found.seconds == pytest.approx(best, rel=1e-9)
        assert found.bound <= best * (1 + 1e-9)
        assert found.status == "optimal"
        assert limit is None or found.held_bytes <= limit


@pytest.mark.parametrize("kind", [Sum, Deep])
def test_the_least_that_it_names_is_enough_and_one_byte_less_is_not(kind):
    with pytest.raises(NoFeasiblePlan, match="Try more devices, a smaller batch or micro-batches") as problem:
        search_of(folded(kind, 5), CLUSTER, (2,), limit=1.0).run()
    least = least_of(problem)
    assert problem.value.exit_code == 3
    assert problem.value.missing_bytes == least - 1
    assert search_of(folded(kind, 5), CLUSTER, (2,), limit=least).run().held_bytes <= least
    with pytest.raises(NoFeasiblePlan):
        search_of(folded(kind, 5), CLUSTER, (2,), limit=least - 1).run()


def test_more_memory_is_never_slower():
    free = search_of(folded(Deep, 64), CLUSTER, (2,)).run()
    with pytest.raises(NoFeasiblePlan) as problem:
        search_of(folded(Deep, 64), CLUSTER, (2,), limit=1.0).run()
    least = least_of(problem)
    previous = np.inf
    for limit in np.linspace(least, free.held_bytes, 5):
        found = search_of(folded(Deep, 64), CLUSTER, (2,), limit=limit).run()
        assert found.held_bytes <= limit
        assert free.seconds * (1 - 1e-9) <= found.bound <= found.seconds <= previous * (1 + 1e-9)
        previous = found.seconds
    assert previous == pytest.approx(free.seconds)


def test_it_is_no_worse_than_named_plans_under_the_same_limit():
    model = folded(Deep, 64)
    item = search_of(model, CLUSTER, (2,))
    roles = find_roles(item.parts, model)
    limit = item.run(named("zero1", roles, 1)).held_bytes
    limited = search_of(model, CLUSTER, (2,), limit=limit)
    assert limited.run().seconds <= limited.run(named("zero1", roles, 1)).seconds * (1 + 1e-9)
    with pytest.raises(NoFeasiblePlan):
        limited.run(named("data", roles, 1))


def test_of_several_meshes_the_best_is_kept_and_the_smallest_miss_is_told():
    cluster = cluster_of((2, 2), flop_per_s=1e9, memory_bytes_per_s=1e12, link=(1e9, 1e-8))
    model = folded(Deep, 64)
    costs = estimate_costs(model.traced.graph, cluster)
    shapes = [(4,), (2, 2)]
    alone = [compare_meshes(model, cluster, costs, shapes=[shape]).best.seconds for shape in shapes]
    assert compare_meshes(model, cluster, costs, shapes=shapes).best.seconds == pytest.approx(min(alone))
    missing = []
    for group in ([shapes[0]], [shapes[1]], shapes):
        with pytest.raises(NoFeasiblePlan) as problem:
            compare_meshes(model, cluster, costs, shapes=group, limit_bytes=1.0)
        missing.append(problem.value.missing_bytes)
    assert missing[2] == min(missing[:2])


def test_of_equally_fast_shardings_the_one_that_holds_least_is_found():
    cluster = cluster_of((4,), flop_per_s=1e10, memory_bytes_per_s=1e10, link=(1e9, 1e-7))
    model = trace_folded(zoo("gpt2-tiny:layers=4", batch=8))
    free = search_of(model, cluster, (2, 2)).run()
    assert free.status == "optimal"
    tighter = search_of(model, cluster, (2, 2), limit=free.held_bytes * 0.999).run()
    assert tighter.seconds > free.seconds * (1 + 1e-7)


def test_when_time_ends_before_there_is_a_sharding_the_message_says_so():
    model = folded(Deep, 64)
    with pytest.raises(NoFeasiblePlan, match=r"on a mesh of 2 were being listed, .* Try a longer time limit"):
        MeshSearch(model, estimate_costs(model.traced.graph, CLUSTER), Mesh(CLUSTER, range(2), (2,)),
                   optimizer=Optimizer(), limit_bytes=None, budget=Budget(effort=math.inf, deadline=0.0))


def test_when_time_ends_the_best_of_the_meshes_so_far_is_kept():
    cluster = cluster_of((2, 2), flop_per_s=1e9, memory_bytes_per_s=1e12, link=(1e9, 1e-8))
    model = folded(Deep, 64)
    budget = Budget(effort=math.inf)
    costs = estimate_costs(model.traced.graph, cluster)

    def after_the_first(text):
        budget.is_interrupted = text.startswith("mesh")

    found = compare_meshes(model, cluster, costs, shapes=[(4,), (2, 2)], budget=budget, progress=after_the_first)
    assert found.shapes == ((4,),)
    assert found.best.seconds == compare_meshes(model, cluster, costs, shapes=[(4,)]).best.seconds
