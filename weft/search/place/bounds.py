"""Times that no placement can beat.

*Ways*: ``heads[i, d]`` is the earliest start of operator i on device d if every operator that it needs could run on the
device that suits i best, as if operators could be copied and nothing were shared:

    heads[i, d] = max over tensors t that i reads of min over devices c of
                  heads[w, c] + time[w, c] + transfer(t, c, d)        w = writer of t

and ``tails[i, d]`` likewise the least time from the end of i on d to the end of all. So head + time + tail bounds the
latency of every placement that has i on d, and the largest of the smallest over d bounds every placement.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.model.graph import F64
from weft.search.place.problem import PlaceProblem


def heads_and_tails(problem: PlaceProblem) -> tuple[F64, F64]:
    """Return the least time before and after every operator on every device, [n, m] each."""
    num_ops, num_devices = problem.time_s.shape
    heads, tails = np.zeros((num_ops, num_devices)), np.zeros((num_ops, num_devices))
    for op in range(num_ops):
        for tensor in problem.inputs[problem.input_start[op] : problem.input_start[op + 1]].tolist():
            writer = int(problem.producer[tensor])
            ready = (heads[writer] + problem.time_s[writer])[:, None] + transfers_of(problem, tensor)
            np.maximum(heads[op], _least(problem, ready, writer, op, axis=0), out=heads[op])
    for op in range(num_ops - 1, -1, -1):
        for tensor in problem.inputs[problem.input_start[op] : problem.input_start[op + 1]].tolist():
            writer = int(problem.producer[tensor])
            rest = transfers_of(problem, tensor) + (problem.time_s[op] + tails[op])[None, :]
            np.maximum(tails[writer], _least(problem, rest, writer, op, axis=1), out=tails[writer])
    return heads, tails


def _least(problem: PlaceProblem, seconds: F64, writer: int, op: int, *, axis: int) -> F64:
    """Return the least over the other end's devices; operators that share a device have no choice."""
    if problem.unit_of_op[writer] == problem.unit_of_op[op]:
        return np.asarray(np.diagonal(seconds), dtype=np.float64)
    return np.asarray(seconds.min(axis=axis), dtype=np.float64)


def transfers_of(problem: PlaceProblem, tensor: int) -> F64:
    """Return [m, m] the transfer times of one tensor, zero on the diagonal."""
    row = problem.given_row[tensor]
    table = problem.given_s[row].copy() if row >= 0 else (
        problem.latency_s + problem.s_per_byte * problem.tensor_bytes[tensor])
    np.fill_diagonal(table, 0.0)
    return np.asarray(table, dtype=np.float64)


def way_bound(problem: PlaceProblem, heads: F64, tails: F64) -> float:
    """Return the latency that no placement beats by the longest way alone."""
    through = heads + problem.time_s + tails
    return float(through.min(axis=1, initial=np.inf).max(initial=0.0)) if problem.num_ops else 0.0


def tighten(problem: PlaceProblem, limit: float) -> PlaceProblem | None:
    """Return the problem without devices that no placement faster than ``limit`` can use; None if there is no such one.

    A unit cannot be on a device if the way through one of its operators there takes too long; every device that goes
    makes the ways of others longer, so this is repeated until nothing changes.
    """
    while True:
        heads, tails = heads_and_tails(problem)
        is_late = heads + problem.time_s + tails >= limit * (1 - 1e-12)
        late_units = np.zeros((problem.num_units, problem.num_devices), dtype=np.bool_)
        np.logical_or.at(late_units, problem.unit_of_op, is_late)
        keep = problem.is_allowed & ~late_units
        if not keep.any(axis=1).all():
            return None
        if np.array_equal(keep, problem.is_allowed):
            return problem
        problem = replace(problem, time_s=np.where(keep[problem.unit_of_op], problem.time_s, np.inf))
