"""m-SCT: small communication times with memory, after Baechi.

Each operator has at most one *favourite child*, which should follow it on its device without a transfer, and is the
favourite child of at most one operator. With ``p_i`` mean times, ``c_e`` mean transfer times, ``s_i`` starts, ``x_e``
0 for an edge to a favourite child and 1 for others, they come from the linear program (``_solve``)

    minimise w    with    s_i + p_i + c_e x_e <= s_j    for every edge e = (i, j)
                          s_i + p_i <= w                for every operator
                          sum of x over the edges out of i >= their number - 1, over the edges into j likewise
                          0 <= x <= 1,  s >= 0

rounded: an edge with ``x_e < 1/2`` leads to a favourite child; by the sums there is at most one such edge out of and
into an operator. ETF then places, and a device whose last operator has a favourite child waits for it: any other
operator may start there only once what it reads could be everywhere (``weft.search.place.earliest_kernel``). A device
without room for the child does not wait. Times are means because SCT was made for equal devices; ETF uses those of each
device.

Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020; the linear program is of Hanen and
Munier, "An approximation algorithm for scheduling dependent tasks on m processors with small communication delays",
1995.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

import numpy as np

from weft.model.graph import F64, I64
from weft.search.place.assignment import Assignment, with_room_for_tensors
from weft.search.place.lists import by_earliest_start, check_allowed, make_means
from weft.search.place.problem import PlaceProblem

MAX_EDGES: Final = 8_000
"""Above this, favourite children are chosen greedily: the linear program would take longer than all else."""


class _Pairs(NamedTuple):
    """The edges between operators, each pair once."""

    source: I64
    target: I64
    sent_s: F64
    """The mean transfer times of all tensors between the two."""


def m_sct(problem: PlaceProblem) -> Assignment:
    """Return the placement of m-SCT; see the module's docstring.

    With more than ``MAX_EDGES`` edges, favourite children are chosen without the linear program: edges by falling
    transfer time, where neither end has one yet.
    """
    check_allowed(problem, problem.is_allowed)
    return with_room_for_tensors(problem, partial(by_earliest_start, favourite=favourite_children(problem)))


def favourite_children(problem: PlaceProblem) -> I64:
    """Return [n] the favourite child of each operator, or -1."""
    means = make_means(problem, problem.is_allowed)
    pairs = _pairs(problem, means.sent_s)
    favourite = np.full(problem.num_ops, -1, dtype=np.int64)
    if 0 < len(pairs.source) <= MAX_EDGES:
        chosen = np.flatnonzero(_solve(means.op_s, pairs) < 0.5)
        favourite[pairs.source[chosen]] = pairs.target[chosen]
        return favourite
    has_parent = np.zeros(problem.num_ops, dtype=np.bool_)
    for edge in np.argsort(-pairs.sent_s, kind="stable").tolist():
        source, target = pairs.source[edge], pairs.target[edge]
        if favourite[source] < 0 and not has_parent[target]:
            favourite[source] = target
            has_parent[target] = True
    return favourite


def _pairs(problem: PlaceProblem, sent_s: F64) -> _Pairs:
    keys = problem.edges[:, 0] * problem.num_ops + problem.edges[:, 1]
    unique, index = np.unique(keys, return_inverse=True)
    return _Pairs(unique // max(1, problem.num_ops), unique % max(1, problem.num_ops),
                  np.bincount(index, weights=sent_s[problem.edges[:, 2]], minlength=len(unique)).astype(np.float64))


def _solve(op_s: F64, pairs: _Pairs) -> F64:
    """Return [edges] x of the linear program; all 1 if the solver gives up. Times are scaled to a mean of 1."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    num_ops, num_edges = len(op_s), len(pairs.source)
    scale = 1.0 / max(float(op_s.mean()), float(pairs.sent_s.mean()), 1e-300)
    ops, edges, size = np.arange(num_ops), np.arange(num_edges), num_ops + num_edges + 1
    one = np.ones(num_edges)
    starts = csr_array((np.concatenate([one, -one, pairs.sent_s * scale]),
                        (np.tile(edges, 3), np.concatenate([pairs.source, pairs.target, num_ops + edges]))),
                       shape=(num_edges, size))
    ends = csr_array((np.concatenate([np.ones(num_ops), -np.ones(num_ops)]),
                      (np.tile(ops, 2), np.concatenate([ops, np.full(num_ops, size - 1)]))), shape=(num_ops, size))
    out = csr_array((-one, (pairs.source, num_ops + edges)), shape=(num_ops, size))
    into = csr_array((-one, (pairs.target, num_ops + edges)), shape=(num_ops, size))
    limits = np.concatenate([-op_s[pairs.source] * scale, -op_s * scale,
                             1.0 - np.bincount(pairs.source, minlength=num_ops),
                             1.0 - np.bincount(pairs.target, minlength=num_ops)])
    upper = np.concatenate([np.full(num_ops, np.inf), one, [np.inf]])
    objective = np.zeros(size)
    objective[-1] = 1.0
    result = linprog(objective, A_ub=vstack([starts, ends, out, into]), b_ub=limits, method="highs",
                     bounds=np.stack([np.zeros(size), upper], axis=1))
    return one if result.x is None else np.asarray(result.x[num_ops:-1], dtype=np.float64)
