"""Groups of operators: how they are cut, and what flows between them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.search.deploy.worlds import cluster_of, host, problem_of
from weft.search.deploy.op_groups import _cut, group_operators
from weft.search.deploy.tuning import TUNING


def total(prefix: np.ndarray, cost: np.ndarray, cap: float, chosen: tuple[int, ...]) -> float:
    """Return what a cut costs, from the formula in the module."""
    excess = sum(max(0.0, (prefix[b] - prefix[a]) / cap - 1.0) for a, b in itertools.pairwise(chosen))
    return float(sum(cost[place] for place in chosen[1:-1]) + TUNING.overweight * excess)


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_places = int(rng.integers(2, 10))
    prefix = np.concatenate(([0.0], np.cumsum(rng.random(num_places - 1))))
    cost, cap = rng.random(num_places) * 0.5, 0.3 * prefix[-1]
    every = [(0, *inner, num_places - 1) for size in range(num_places - 1)
             for inner in itertools.combinations(range(1, num_places - 1), size)]
    best = min(total(prefix, cost, cap, chosen) for chosen in every)
    assert total(prefix, cost, cap, tuple(_cut(prefix, cost, cap))) == pytest.approx(best)


def test_few_groups_in_order_that_hold_everything() -> None:
    problem = problem_of(cluster_of(host("a", 2)), num_ops=200)
    groups = group_operators(problem.graph, np.ones(200), max_groups=7)
    assert groups.num_groups <= 7
    assert groups.start[0] == 0
    assert groups.start[-1] == 200
    assert (np.diff(groups.start) > 0).all()
    assert np.diff(groups.start).max() <= 2 * 200 / 7 * 1.5


def test_no_cut_where_samples_are_mixed() -> None:
    problem = problem_of(cluster_of(host("a", 2)), num_ops=6)
    graph = problem.graph
    mixed = graph.op_outputs(3)[0]
    dims = graph.tensor_batch_dim.copy()
    dims[mixed] = -1
    changed = type(graph)(**{**{name: getattr(graph, name) for name in graph.__dataclass_fields__},
                             "tensor_batch_dim": dims})
    starts = group_operators(changed, np.ones(6), max_groups=6).start.tolist()
    assert 4 not in starts
    assert 3 in starts


def test_bundles_count_each_tensor_once_for_all_its_readers() -> None:
    problem = problem_of(cluster_of(host("a", 2)), num_ops=5, skips=((0, 3), (0, 4)), activation_bytes=800, batch=8)
    from weft.search.deploy.op_groups import OpGroups

    groups = OpGroups(graph=problem.graph, start=np.arange(6))
    first = [bundle for bundle in groups.bundles if bundle.producer == 0]
    assert [bundle.consumers for bundle in first] == [(1, 3, 4)]
    assert first[0].bytes_per_sample == 100
