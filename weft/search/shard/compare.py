"""The best sharding over several shapes of mesh, beside the best of each named plan: ``compare_meshes``.

From a model to a plan of one sharded stage that runs: what ``weft shard --plan`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes, format_time
from weft.cluster.cluster import Cluster
from weft.cost.costs import Costs, estimate_costs
from weft.cost.mesh import Mesh
from weft.model.folded import FoldedModel
from weft.model.trace import trace
from weft.plan.check import check_plan
from weft.plan.notes import without_rule_notes
from weft.plan.plan import Optimizer, Plan
from weft.search.common.budget import Budget, OutOfTime, cut_short
from weft.search.common.problem import PlanOptions, Problem
from weft.search.shard.mesh import mesh_shapes
from weft.search.shard.model_search import TUNING, MeshSearch, ShardedModel
from weft.search.shard.named import find_roles, named
from weft.search.shard.tensor_costs import stage_times
from weft.search.shard.to_plan import sharded_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedResult:
    """The best of a named plan over all shapes, or why there is none."""

    name: str
    sharding: ShardedModel | None
    reason: str = ""
    least_bytes: float | None = None
    """There are such plans, but none fits the memory: what a device holds at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshComparison:
    """What was found over all shapes."""

    best: ShardedModel
    named: tuple[NamedResult, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Those that were tried."""


def sensible_shapes(cluster: Cluster, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Return shapes of mesh worth trying for a group of devices, with one to three axes, at most ``TUNING.max_shapes``.

    Axes follow hosts: those that join hosts come first. Where all devices are in one host, their order says nothing, so
    that of shapes with the same sizes only one is returned.
    """
    hosts: dict[str, int] = {}
    for device in devices:
        name = cluster.devices[device].host
        hosts[name] = hosts.get(name, 0) + 1
    per_host = len(devices) // len(hosts)
    shapes = mesh_shapes(len(devices))
    if len(hosts) == 1:
        shapes = [shape for shape in shapes if list(shape) == sorted(shape)]
    elif len(set(hosts.values())) == 1 and len(devices) > TUNING.all_shapes:
        shapes = [shape for shape in shapes if len(shape) == 1 or (
            len(shape) == 2 and _follows(shape, len(hosts), per_host))]
    return shapes[:TUNING.max_shapes]


def _follows(shape: tuple[int, ...], num_hosts: int, per_host: int) -> bool:
    """Return whether the first axes join the hosts and the others are inside them, sizes not falling in each."""
    for count in range(1, len(shape)):
        first, rest = list(shape[:count]), list(shape[count:])
        if (prod(first), prod(rest)) == (num_hosts, per_host) and sorted(first) == first and sorted(rest) == rest:
            return True
    return per_host == 1


def compare_meshes(folded: FoldedModel, cluster: Cluster, costs: Costs, *, shapes: Sequence[tuple[int, ...]],
                   names: Sequence[str] = (), optimizer: Optimizer | None = None, limit_bytes: float | None = None,
                   budget: Budget | None = None, progress: Callable[[str], None] = lambda text: None
                   ) -> MeshComparison:
    """Return the best sharding over these shapes of a mesh of all devices, and the best of each named plan.

    Raises ``NoFeasiblePlan``, with the smallest limit over all shapes, if nothing fits the memory.
    """
    budget = budget or Budget(effort=float("inf"))
    best: ShardedModel | None = None
    misses: list[NoFeasiblePlan] = []
    rows = {name: NamedResult(name=name, sharding=None) for name in names}
    tried: list[tuple[int, ...]] = []
    for shape in shapes:
        if best is not None and budget.is_spent:
            break
        mesh = Mesh(cluster, range(cluster.num_devices), shape, comm_fits=costs.comm_fits)
        try:
            with cut_short(None if best is None else budget.deadline):
                search = MeshSearch(folded, costs, mesh, optimizer=optimizer or Optimizer(), limit_bytes=limit_bytes,
                                    budget=budget)
                if not tried:
                    for note in without_rule_notes(search.parts.without_rule):
                        progress(f"warning: {note}")
                tried.append(shape)
                found = _searched(search, mesh.name, misses, progress)
        except NoFeasiblePlan as problem:  # out of time
            misses.append(problem)
            break
        except OutOfTime:
            progress(f"time limit: mesh {mesh.name} is cut short")
            break
        best = found if found is not None and (best is None or found.seconds < best.seconds) else best
        for name in names:
            rows[name] = _better(rows[name], _run_named(search, folded, name, len(shape), budget))
    if best is None:
        raise min(misses, key=lambda problem: inf if problem.missing_bytes is None else problem.missing_bytes)
    return MeshComparison(best=best, named=tuple(rows.values()), shapes=tuple(tried))


def _searched(search: MeshSearch, name: str, misses: list[NoFeasiblePlan],
              progress: Callable[[str], None]) -> ShardedModel | None:
    """Return the best sharding on one mesh; where nothing fits, None, and why is added to ``misses``."""
    try:
        found = search.run()
    except NoFeasiblePlan as problem:
        misses.append(problem)
        progress(f"mesh {name}: does not fit")
        return None
    progress(f"mesh {found.mesh.name}: {format_time(found.seconds)}, bound {format_time(found.bound)}, holds "
             f"{format_bytes(found.held_bytes)}")
    return found


def _run_named(search: MeshSearch, folded: FoldedModel, name: str, num_axes: int, budget: Budget) -> NamedResult:
    """Return what a named plan comes to; one that the deadline cuts short has no result."""
    try:
        with cut_short(budget.deadline):
            restriction = named(name, find_roles(search.parts, folded), num_axes)
            return NamedResult(name=name, sharding=search.run(restriction))
    except OutOfTime:
        return NamedResult(name=name, sharding=None, reason="the time limit was reached before it was planned")
    except NoFeasiblePlan as problem:
        least = None if problem.missing_bytes is None or search.limit is None else search.limit + problem.missing_bytes
        return NamedResult(name=name, sharding=None, reason=str(problem), least_bytes=least)


def _better(old: NamedResult, new: NamedResult) -> NamedResult:
    """Return the faster of two results; of two that failed, the one that lacks least memory."""
    if old.sharding is None:
        lacks_less = (new.least_bytes or inf) <= (old.least_bytes or inf)
        return new if new.sharding is not None or lacks_less else old
    return new if new.sharding is not None and new.sharding.seconds < old.sharding.seconds else old


# ---- the plan on one mesh --------------------------------------------------------------------------------------------


def search_plan(folded: FoldedModel, cluster: Cluster, *, shape: Sequence[int], limit_bytes: float | None = None,
                optimizer: Optimizer | None = None, name: str | None = None, budget: Budget | None = None,
                has_context: bool = False) -> Plan:
    """Return the best sharding on a mesh of this shape as a checked plan (of those with ``name``, if given).

    With ``has_context`` the first axis divides the sequence.

    Optimizer states and parameters are in no smaller pieces than they are used in: the runtime has no others yet.
    """
    optimizer = optimizer or Optimizer()
    source = folded.traced.source
    costs = estimate_costs(folded.traced.graph, cluster)
    mesh = Mesh(cluster, range(cluster.num_devices), shape, comm_fits=costs.comm_fits)
    search = MeshSearch(folded, costs, mesh, optimizer=optimizer, limit_bytes=limit_bytes,
                        budget=budget or Budget(effort=float("inf")), splits_states=False, has_context=has_context)
    restriction = None if name is None else named(name, find_roles(search.parts, folded), len(shape))
    found = search.run(restriction)
    full = trace(source, batch_dims=True).graph
    problem = Problem(graph=full, cluster=cluster, costs=estimate_costs(full, cluster),
                      options=PlanOptions(batch=source.batch, mode=source.mode, optimizer=optimizer,
                                          dtype=source.dtype or full.parameter_dtype,
                                          own_dtypes=source.dtype is None))
    plan = sharded_plan(problem, found, folded, stage_times(found, folded, full, costs))
    check_plan(plan, full, cluster)
    return plan
