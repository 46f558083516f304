"""The explanation of a plan: what bounds its step, what devices wait for, the second best, and what would help."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes, format_time
from weft.cluster.cluster import Cluster
from weft.explain.path import CriticalPath, DeviceWaits, Kind, critical_path, device_waits, link_times
from weft.explain.whatif import Change, settled, what_would_help
from weft.plan.plan import Plan
from weft.plan.step_rates import StepRates, step_rates
from weft.planning.compare import Candidate, Comparison
from weft.planning.fit import Use
from weft.planning.replan import Request, replan
from weft.search.common.budget import Budget, time_budget
from weft.search.common.problem import Problem
from weft.simulate.timeline import Timeline

WORDS: Final[dict[Kind, str]] = {
    "compute": "computing", "optimizer": "the optimizer", "transfer": "sending tensors between stages",
    "exchange": "exchanging gradients", "latency": "the latency of messages"}
SAME: Final = 1e-9
"""Step times that differ by less, relatively, are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a plan takes as long as it does, and what would change that."""

    plan: Plan
    timeline: Timeline
    path: CriticalPath
    waits: tuple[DeviceWaits, ...]
    memory: tuple[Use, ...]
    links: dict[str, float]
    """Seconds that each link is busy with the step's bytes, the busiest first."""
    rates: StepRates
    comparison: Comparison | None = None
    """What planning again for the same cluster came to; None if it was not tried."""
    changes: tuple[Change, ...] = ()
    is_interrupted: bool = False
    """Ctrl-C has ended the planning."""

    @property
    def busiest(self) -> DeviceWaits:
        """Return the device that computes longest."""
        return max(self.waits, key=lambda item: item.busy_s)

    @property
    def fullest(self) -> Use:
        """Return the device whose memory is used most."""
        return max(self.memory, key=lambda item: (item.used, item.peak_bytes))

    @property
    def faster(self) -> Candidate | None:
        """Return the best of planning again, if it is faster than the plan."""
        best = self.comparison.best if self.comparison is not None else None
        return best if best is not None and best.step_time_s < self.timeline.step_time_s * (1 - SAME) else None

    @property
    def faster_elsewhere_s(self) -> float | None:
        """Return the step of a plan that was found for a change, if it is the best for the cluster as it is too."""
        known = [self.timeline.step_time_s, *([self.faster.step_time_s] if self.faster is not None else [])]
        found = min((item.before_s for item in self.changes if item.before_s is not None), default=float("inf"))
        return found if found < min(known) * (1 - SAME) else None

    @property
    def has_tp_groups(self) -> bool:
        """Return whether devices divide operators, so that their collectives count as computing."""
        return any(len(replica.devices) > 1 for stage in self.plan.stages for replica in stage.replicas)

    @property
    def second(self) -> Candidate | None:
        """Return the fastest of the other strategies' plans that is another one and not faster than this one."""
        if self.comparison is None:
            return None
        others = [item for item in self.comparison.candidates if item.plan is not None
                  and item.strategy != self.plan.search.by.partition(" ")[0] and _shape(item.plan) != _shape(self.plan)
                  and item.step_time_s >= self.timeline.step_time_s * (1 - SAME)]
        return min(others, key=lambda item: item.step_time_s, default=None)


def _shape(plan: Plan) -> object:
    """Return who does what in a plan: equal for plans that differ only in who made them."""
    stages = [(stage.ops, [(replica.devices, round(replica.share, 9)) for replica in stage.replicas], stage.sharding)
              for stage in plan.stages]
    number = {stage.name: str(index) for index, stage in enumerate(plan.stages)}
    order = {device: [(number.get(action.partition(":")[0]), action.partition(":")[2]) for action in actions]
             for device, actions in plan.order.items()}
    return plan.microbatches, stages, order


def explain(plan: Plan, request: Request, cluster: Cluster, timeline: Timeline, *, replans: bool = True,
            comparison: Comparison | None = None, problem: Problem | None = None,
            budget: Budget | None = None) -> Explanation:
    """Return the explanation of a plan that was simulated; with ``replans`` also what planning again says.

    ``comparison`` is what planning for the same cluster came to, where that is known, and ``problem`` what it was
    planned as: what is known of its costs is not computed again. ``budget`` is for all planning; Ctrl-C keeps what
    there is by then.
    """
    problem = problem or request.problem(cluster)
    assert timeline.program is not None
    times = link_times(timeline.program, problem.costs, cluster)
    is_best = comparison is not None and comparison.best.plan is plan  # its timeline may show a part of it
    step_time_s = comparison.best.step_time_s if comparison is not None and is_best else timeline.step_time_s
    result = Explanation(
        plan=plan, timeline=timeline, path=critical_path(timeline.program, problem.costs, cluster),
        waits=device_waits(timeline), memory=_memory(cluster, timeline), comparison=comparison,
        rates=step_rates(plan, problem.graph, cluster, step_time_s=step_time_s),
        links=dict(sorted(times.items(), key=lambda item: (-item[1], item[0]))))
    return _plan_again(result, problem, request, budget or time_budget(None)) if replans else result


def _plan_again(result: Explanation, problem: Problem, request: Request, budget: Budget) -> Explanation:
    """Return the explanation with the comparison of strategies and what would help."""
    changes: list[Change] = []
    try:
        if result.comparison is None:
            budget.report("planning again for the same cluster")
            try:
                result = replace(result, comparison=replan(problem, request, budget=budget.part(1 / 3)))
                if result.comparison is not None and result.comparison.is_interrupted:
                    raise KeyboardInterrupt
            except NoFeasiblePlan as miss:  # the plan at hand may be of a kind that is not searched
                budget.report(f"note: planning again found no plan: {miss}")
        changes.extend(what_would_help(request, problem.cluster, result.timeline, result.comparison, budget))
    except KeyboardInterrupt:
        result = replace(result, is_interrupted=True)
        budget.report("interrupted: nothing further is planned")
    return replace(result, changes=settled(changes))


def _memory(cluster: Cluster, timeline: Timeline) -> tuple[Use, ...]:
    return tuple(Use(
        device=item.device, peak_bytes=item.peak_bytes, largest=max(item.peak_memory, key=item.peak_memory.__getitem__),
        capacity_bytes=cluster.devices[cluster.device_index[item.device]].memory_bytes)
        for item in timeline.summary())


def percent(part: float) -> str:
    """Return a part as a whole percentage."""
    return f"{100 * part:.0f} %"


def sentence(explanation: Explanation) -> str:
    """Return in one sentence what bounds the step.

    Such as ``The step of 20.4 ms is bound by computing (91 %), most of it on a0 (71 %).`` Parts are of the critical
    path.
    """
    path, whole = explanation.path, explanation.path.step_time_s or 1.0
    kind = path.binding
    most = next((share for share in path.shares if share.kind == kind), None)
    part = percent(path.seconds_of(kind) / whole)
    words = f"The step of {format_time(path.step_time_s)} is bound by {WORDS[kind]} ({part}"
    if most is None:
        return words + ")."
    place = "over" if kind in ("transfer", "exchange", "latency") else "on"
    if most.seconds >= path.seconds_of(kind) * (1 - SAME):
        return f"{words} {place} {most.where})."
    return f"{words}), most of it {place} {most.where} ({percent(most.seconds / whole)})."


def memory_sentence(explanation: Explanation) -> str:
    """Return in one sentence which memory is fullest."""
    item = explanation.fullest
    if item.capacity_bytes is None:
        return f"{item.device} holds most: {format_bytes(item.peak_bytes)}, mainly {item.largest}; it has no limit."
    left = format_bytes(item.capacity_bytes - item.peak_bytes)
    return (f"{item.device} is fullest: {format_bytes(item.peak_bytes)} of {format_bytes(item.capacity_bytes)} "
            f"({percent(item.used)}), mainly {item.largest}; {left} are left.")
