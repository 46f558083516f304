"""How gradients are cut into buckets, so that their exchange runs beside the backward that makes them.

A bucket is exchanged when the last of its gradients is final (``weft.simulate.finality``), one after the other. With
``r_k`` the time at which bucket ``k`` is final and ``t_k`` that of its exchange, all is done at

    e_k = max(e_(k-1), r_k) + t_k

More buckets begin earlier and leave less for the end, but each costs the latency of a collective and the host's time to
issue it: of some numbers of buckets that is taken which ends first (``_best_cut``). Parameters go into buckets in the
order in which they become final, as many bytes in each. Only what can overlap is cut (``weft.plan.overlap``):
parameters of one stage, whose last backward is whole and sends no gradients to other stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from weft.cost.costs import Costs
from weft.model.graph import F64, I64, Graph
from weft.plan.holders import parameter_parts
from weft.plan.layout import stage_inputs
from weft.plan.plan import GradientExchange, Plan, split_samples
from weft.simulate.exchange_time import reduce_seconds
from weft.simulate.finality import final_times

COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)
"""So many buckets are tried."""
WORTHWHILE: Final = 0.005
"""More buckets must shorten backward and exchange by this part."""
ISSUE_S: Final = 5e-5
"""What the host does to issue a collective (20 to 100 us), which the costs of collectives do not know."""


def cut_gradients(plan: Plan, graph: Graph, costs: Costs) -> Plan:
    """Return the plan with its exchanges cut into buckets, in the order in which their gradients are final."""
    if not plan.gradients:
        return plan
    stages = _stages_by_parameter(plan, graph)
    cuts: dict[tuple[str, ...], list[tuple[float, tuple[str, ...]]]] = {}
    found: list[tuple[float, GradientExchange]] = []
    for exchange in plan.gradients:
        if exchange.parameters not in cuts:
            stage = _only_stage(plan, graph, stages, exchange)
            cuts[exchange.parameters] = [(np.inf, exchange.parameters)] if stage is None else _best_cut(
                _Timing.of(plan, graph, costs, stage, exchange))
        found.extend((at, replace(exchange, parameters=names)) for at, names in cuts[exchange.parameters])
    return replace(plan, gradients=tuple(item for _, item in sorted(found, key=lambda pair: pair[0])))


def _stages_by_parameter(plan: Plan, graph: Graph) -> dict[str, set[int]]:
    result: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        read = {int(tensor) for name in stage.ops for tensor in graph.op_inputs(graph.op_index[name])}
        for tensor in read.intersection(graph.parameters.tolist()):
            result.setdefault(graph.tensor_names[tensor], set()).add(index)
    return result


def _only_stage(plan: Plan, graph: Graph, stages: dict[str, set[int]], exchange: GradientExchange) -> int | None:
    """Return the stage that makes all gradients of an exchange, if its last backward ends with them; else None."""
    users = set().union(*(stages[name] for name in exchange.parameters))
    if len(users) > 1:
        return None
    (index,) = users
    stage = plan.stages[index]
    inputs = stage_inputs(graph, np.asarray([graph.op_index[name] for name in stage.ops], dtype=np.int64))
    splits = any(token.startswith(f"{stage.name}:W:") for actions in plan.order.values() for token in actions)
    return None if splits or graph.needs_gradient[inputs].any() else index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """When the parameters of an exchange are final, and how long parts of it take."""

    costs: Costs
    devices: tuple[int, ...]
    names: tuple[str, ...]
    order: I64
    """The places of the names in the order in which they are final, which is also that of the next three."""
    final_s: F64
    whole_bytes: F64
    held_bytes: F64
    """What a device holds of each."""
    backward_s: float

    @staticmethod
    def of(plan: Plan, graph: Graph, costs: Costs, index: int, exchange: GradientExchange) -> _Timing:
        """Return the timing of an exchange of one stage, on the replica with the longest backward."""
        stage, place = plan.stages[index], costs.cluster.device_index
        shares = tuple(replica.share for replica in stage.replicas)
        counts = split_samples(plan.microbatch_size, shares)
        slowest = max(range(len(shares)), key=lambda number: stage.replicas[number].times.get("B", 0.0))
        replica = stage.replicas[slowest]
        tensors = [graph.tensor_index[name] for name in exchange.parameters]
        times = final_times(
            graph, costs, np.sort([graph.op_index[name] for name in stage.ops]),
            [place[name] for name in replica.devices], [(tensor,) for tensor in tensors],
            fraction=counts[slowest] / graph.batch, recompute=stage.recompute)
        backward_s = replica.times.get("B", float(times[-1]))
        times *= backward_s / (times[-1] or 1.0)
        order = np.argsort(times[:-1], kind="stable")
        parts = parameter_parts(plan, graph) if stage.sharding else {}
        held = [parts[tensor][exchange.devices[0]] if parts else 1.0 for tensor in tensors]
        whole = graph.tensor_bytes[tensors].astype(np.float64)
        return _Timing(
            costs=costs, devices=tuple(place[name] for name in exchange.devices),
            names=exchange.parameters, order=order, final_s=times[:-1][order],
            whole_bytes=whole[order], held_bytes=(whole * held)[order], backward_s=backward_s)

    def end_s(self, ends: list[int]) -> float:
        """Return when backward and exchange are done with buckets that end before these parameters."""
        done, first = 0.0, 0
        for last in ends:
            size = float(self.held_bytes[first:last].sum())
            seconds = reduce_seconds(self.costs, size, self.devices)
            done, first = max(done, float(self.final_s[last - 1])) + seconds + ISSUE_S, last
        return max(done, self.backward_s)


def _best_cut(timing: _Timing) -> list[tuple[float, tuple[str, ...]]]:
    """Return the buckets that end first: when each is final, as a part of the backward, and its parameters."""
    best, best_s = [len(timing.names)], timing.end_s([len(timing.names)])
    total = np.cumsum(timing.whole_bytes)
    for count in COUNTS[1:]:
        marks = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
        ends = sorted({*marks.tolist(), len(timing.names)})
        end_s = timing.end_s(ends)
        if end_s < best_s * (1 - WORTHWHILE):
            best, best_s = ends, end_s
    whole_s = timing.backward_s or 1.0
    return [(float(timing.final_s[last - 1]) / whole_s,
             tuple(timing.names[place] for place in np.sort(timing.order[first:last]).tolist()))
            for first, last in zip([0, *best[:-1]], best, strict=True)]
