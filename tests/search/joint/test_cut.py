"""Cuts: every stage fits, also where a longer stage fits though a shorter one does not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.search.joint.worlds import equal_problem, staged, with_memory
from weft.cost.costs import estimate_costs
from weft.search.joint.chain import Chain
from weft.search.joint.cut import shortest_longest
from weft.search.joint.estimate import Estimator


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slack", [0.0, 0.2])
def test_stages_end_only_where_they_may(seed, slack):
    rng = np.random.default_rng(seed)
    times = np.concatenate(([0.0], np.cumsum(rng.uniform(0.5, 2.0, 12))))
    may = rng.random((3, 13, 13)) < 0.7
    may[:, :, -1] = may[:, 4::4, 8] = may[:, 0, 4] = True  # one way at least: 0, 4, 8, 12
    reach = [lambda begin, end, table=table: max([begin, *(np.flatnonzero(table[begin, :end + 1]).tolist())])
             for table in may]
    for cuts in shortest_longest([times] * 3, reach, rng.uniform(1, 2, 13), slack=slack):
        assert all(may[stage, begin, end] for stage, (begin, end) in enumerate(itertools.pairwise(cuts)))


def test_a_stage_that_recomputes_may_end_behind_a_place_where_much_crosses():
    """Three of four tensors are too large to be kept for many micro-batches: shorter stages do not fit."""
    problem = equal_problem(num_ops=16, activation_bytes=8_000)
    sizes, made_by = problem.graph.tensor_bytes.copy(), problem.graph.tensor_producer
    sizes[(made_by >= 0) & (made_by % 4 != 3)] *= 20
    graph = replace(problem.graph, tensor_bytes=sizes)
    problem = with_memory(replace(problem, graph=graph, costs=estimate_costs(graph, problem.cluster)), 100_000)
    estimate = Estimator(Chain(problem))(staged(problem, recompute=True, microbatches=16))
    assert estimate.cuts == (0, 4, 8, 12, 16)
