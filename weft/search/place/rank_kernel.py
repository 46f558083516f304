"""Compiled passes over a placement problem's edges: ranks, the optimistic cost table and the critical path.

Edges are (producer, reader, tensor) rows in the readers' order, operators are in topological order: read backwards,
every operator is complete before it is used; read forwards as well.
"""

from __future__ import annotations

import numpy as np

from weft.base.compiled import compiled
from weft.model.graph import F64, I64


@compiled
def upward(op_s: F64, sent_s: F64, edges: I64) -> F64:
    """Return [n] the longest way from the start of each operator to the end."""
    after = np.zeros(len(op_s))
    for row in range(len(edges) - 1, -1, -1):
        op, reader, tensor = edges[row]
        after[op] = max(after[op], sent_s[tensor] + op_s[reader] + after[reader])
    return op_s + after


@compiled
def downward(op_s: F64, sent_s: F64, edges: I64) -> F64:
    """Return [n] the longest way from the beginning to the start of each operator."""
    before = np.zeros(len(op_s))
    for row in range(len(edges)):
        op, reader, tensor = edges[row]
        before[reader] = max(before[reader], before[op] + op_s[op] + sent_s[tensor])
    return before


@compiled
def optimistic(time_s: F64, sent_s: F64, edges: I64) -> F64:
    """Return [n, m] the longest way from each operator's end on a device, every later operator where it is best."""
    table = np.zeros(time_s.shape)
    for row in range(len(edges) - 1, -1, -1):
        op, reader, tensor = edges[row]
        elsewhere = np.min(table[reader] + time_s[reader]) + sent_s[tensor]
        for device in range(time_s.shape[1]):
            best = min(elsewhere, table[reader, device] + time_s[reader, device])
            table[op, device] = max(table[op, device], best)
    return table


@compiled
def critical_path(up: F64, sent_s: F64, edges: I64) -> I64:
    """Return the operators of a longest way, first to last, given the upward ranks."""
    following = np.full(len(up), -1, dtype=np.int64)
    longest = np.full(len(up), -1.0)
    for row in range(len(edges)):
        op, reader, tensor = edges[row]
        if sent_s[tensor] + up[reader] > longest[op]:
            longest[op] = sent_s[tensor] + up[reader]
            following[op] = reader
    path = np.empty(len(up), dtype=np.int64)
    count = 0
    op = np.argmax(up)
    while op >= 0:
        path[count] = op
        count += 1
        op = following[op]
    return path[:count].copy()
