"""From what ``weft place`` found to a plan file: the placement of fused operators as one of the model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from weft.cluster.cluster import Cluster
from weft.coarsen.contract import Coarse
from weft.cost.costs import Costs
from weft.model.graph import Graph
from weft.plan.check import check_plan
from weft.plan.plan import Plan, SearchInfo, save_plan
from weft.search.common.problem import PlanOptions, Problem
from weft.search.place.placed_plan import OpPlacement, placement_of_groups, plan_within_memory
from weft.search.place.problem import PlaceProblem
from weft.search.place.result import PlaceResult
from weft.search.place.timetable import Timetable
from weft.simulate.predict import simulate

NUM_REQUESTS: Final = 8
"""A plan for throughput runs so many requests, one after the other through the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The graph to place, and what it was before fusion."""

    fine: Graph
    coarse: Coarse | None
    fusion: str

    @property
    def graph(self) -> Graph:
        """Return the graph whose operators get devices."""
        return self.fine if self.coarse is None else self.coarse.graph


def write_plan(path: Path, loaded: Loaded, cluster: Cluster, result: PlaceResult,
               search: Callable[[PlaceProblem], PlaceResult], *, costs: Costs, dtype: str | None, seed: int) -> Plan:
    """Write the plan of a placement, and return it: checked, and within memory by the plan's own account.

    ``search`` finds another placement where that account has more than a device holds. ``costs`` are of the model's own
    operators.
    """
    num_requests = 1 if result.objective == "latency" else NUM_REQUESTS
    options = PlanOptions(batch=loaded.fine.batch * num_requests, microbatches=num_requests, mode="inference",
                          dtype=dtype or float_dtype(loaded.fine), seed=seed)
    problem = Problem(graph=loaded.fine, cluster=cluster, costs=costs, options=options)

    def placed(reserve: Mapping[str, int]) -> OpPlacement:
        if not any(reserve.values()):
            return op_placement(loaded, result.timetable)
        kept = np.array([reserve.get(name, 0) for name in result.problem.device_names], dtype=np.float64)
        less = replace(result.problem, capacity=np.maximum(0.0, result.problem.capacity - kept))
        return op_placement(loaded, search(less).timetable)

    plan = plan_within_memory(problem, placed, microbatches=num_requests)
    step_time = simulate(check_plan(plan, loaded.fine, cluster), costs, cluster).step_time_s
    plan = replace(plan, search=SearchInfo(by="place", status="heuristic", step_time=step_time, seed=seed))
    save_plan(plan, path)
    return plan


def op_placement(loaded: Loaded, timetable: Timetable) -> OpPlacement:
    """Return where every operator of the model runs, and in which order."""
    if loaded.coarse is None:
        return OpPlacement(device=timetable.device, order=timetable.order)
    return placement_of_groups(loaded.coarse, timetable.device, timetable.order)


def fused_groups(coarse: Coarse) -> dict[str, list[str]]:
    """Return the model's operators in every group of several, by the name under which the group is placed."""
    return {coarse.graph.op_names[group]: [coarse.fine.op_names[op] for op in ops]
            for group, ops in enumerate(coarse.groups.members()) if len(ops) > 1}


def float_dtype(graph: Graph) -> str:
    """Return the floating-point type of the model's parameters, or float32 where they have none."""
    names = [graph.tensor_dtypes[tensor] for tensor in graph.parameters.tolist()]
    return next((name for name in names if name.startswith(("float", "bfloat"))), "float32")
