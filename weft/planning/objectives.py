"""What else may be asked of a plan: the time of one request, the fewest devices for a target, memory that stays free.

    latency     inference of one micro-batch: a step is one request, from its arrival to its answer
    target      devices in the order of their speed, group by group; how many groups are enough, then how many devices
                of the last one, both by bisection: more devices are never slower. Numbers whose work bound already
                misses the target are not planned.
    headroom    plans are made for devices with less memory

In all cases the plan is for the whole cluster; devices without work stay idle.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

from weft.base.errors import ClusterError, InputError, NoFeasiblePlan
from weft.base.units import format_bytes, format_time, parse_bytes, parse_time
from weft.cluster.cluster import Cluster, DeviceId
from weft.cluster.cluster_file import to_json
from weft.cost.costs import Costs
from weft.model.graph import Graph
from weft.plan.plan import ClusterRef, Mode
from weft.planning.compare import Candidate, Comparison
from weft.search.common.problem import Problem, evaluate_plan
from weft.search.deploy.splits import Splits

Objective = Literal["throughput", "latency"]
Search = Callable[[Problem, Splits], Comparison]
CostsOf = Callable[[Graph, Cluster], Costs]
DEFAULT_BATCH: Final = 32
REQUEST: Final = 1
"""Samples in a step, and in a request, where the user says nothing."""
_SLACK: Final = 1 + 1e-9
_RATE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*/\s*s\s*")
_PERCENT: Final = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]*)?)\s*%\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """How an objective is planned for."""

    mode: Mode
    batch: int
    microbatches: int | None


def request_for(objective: Objective, *, mode: Mode | None, batch: int | None,
                microbatches: int | None) -> StepRequest:
    """Return the settings that the objective means, None standing for what the user left open."""
    if objective == "throughput":
        return StepRequest(mode=mode or "training", batch=DEFAULT_BATCH if batch is None else batch,
                       microbatches=microbatches)
    if mode == "training":
        raise InputError("--objective latency is the time of one request, which is inference: leave out --mode "
                         "training, or use --objective throughput")
    if microbatches not in (None, 1):
        raise InputError(f"--objective latency plans one micro-batch, not {microbatches}: leave out --microbatches, or "
                         "use --objective throughput")
    return StepRequest(mode="inference", batch=REQUEST if batch is None else batch, microbatches=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is to be reached."""

    text: str
    """As the user wrote it."""
    step_time_s: float
    """A step of at most so many seconds reaches it."""


def parse_target(text: str, *, batch: int) -> Target:
    """Return the target that ``'500/s'`` (samples per second) or ``'200ms'`` (a step) means for this batch."""
    rate = _RATE.fullmatch(text)
    if rate is not None:
        if not float(rate[1]) > 0:
            raise InputError(f"--target {text!r} must be more than zero")
        return Target(text=text.strip(), step_time_s=batch / float(rate[1]))
    if re.fullmatch(r"[0-9.eE+-]*", text.strip()):
        raise InputError(f"--target {text!r} has no unit: write samples per second as '500/s' or a step's time as "
                         "'200ms'")
    seconds = parse_time(text)
    if not seconds > 0:
        raise InputError(f"--target {text!r} must be more than zero")
    return Target(text=text.strip(), step_time_s=seconds)


def with_headroom(cluster: Cluster, text: str) -> Cluster:
    """Return the cluster with less memory on every device: ``'10%'`` of it, or ``'4GiB'``, stay free."""
    percent = _PERCENT.fullmatch(text)
    if percent is not None and not 0 <= float(percent[1]) < 100:
        raise InputError(f"--headroom {text!r} must be at least 0% and less than 100%")
    try:
        extra = 0 if percent is not None else parse_bytes(text)
    except InputError as problem:
        raise InputError(f"--headroom is a size such as 4GiB or a percentage such as 10%: {problem}") from problem
    devices = []
    for device in cluster.devices:
        if (size := device.memory_bytes) is not None:
            free = round(size * float(percent[1]) / 100) if percent is not None else extra
            if free >= size:
                raise InputError(f"--headroom {text!r} leaves no memory on {device.name!r}, which has "
                                 f"{format_bytes(size)}: give less, or a percentage")
            size -= free
        devices.append(replace(device, memory_bytes=size))
    return replace(cluster, devices=tuple(devices))


def bind_to_cluster(comparison: Comparison, problem: Problem) -> Comparison:
    """Return the comparison with plans for the problem's cluster, which has the devices of the one planned for."""
    return replace(comparison, candidates=tuple(_bind(item, problem) for item in comparison.candidates))


def with_bound(comparison: Comparison, bound_s: float) -> Comparison:
    """Return the comparison with another bound, in all its plans too."""
    def change(item: Candidate) -> Candidate:
        if item.plan is None:
            return item
        return replace(item, plan=replace(item.plan, search=replace(item.plan.search, bound=bound_s)))

    return replace(comparison, bound_s=bound_s, candidates=tuple(map(change, comparison.candidates)))


def _bind(candidate: Candidate, problem: Problem) -> Candidate:
    if candidate.plan is None:
        return candidate
    cluster = problem.cluster
    plan = replace(candidate.plan, cluster=ClusterRef(
        digest=cluster.digest, description=to_json(cluster), devices=tuple(item.name for item in cluster.devices)))
    assert candidate.timeline is not None, "it has a plan"
    if candidate.predicted_s is not None and candidate.predicted_s != candidate.timeline.step_time_s:
        return replace(candidate, plan=plan)  # too large to be simulated as a whole
    timeline = evaluate_plan(plan, problem)
    predicted_s = None if candidate.predicted_s is None else timeline.step_time_s
    return replace(candidate, plan=plan, timeline=timeline, predicted_s=predicted_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What so many devices came to."""

    devices: tuple[str, ...]
    bound_s: float
    """No plan on them can be faster."""
    step_time_s: float | None = None
    """None where nothing was planned, since the bound misses the target, or where nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The fewest devices that reach a target."""

    comparison: Comparison
    """For the whole cluster, as is its bound."""
    devices: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    """In the order in which they were made."""


def fewest_devices(problem: Problem, target: Target, search: Search, *, splits: Splits, costs_of: CostsOf,
                   progress: Callable[[str], None] = lambda text: None,
                   is_late: Callable[[], bool] = lambda: False) -> Reached:
    """Return the fewest devices, in the order of their speed, whose plan reaches the target.

    Once it ``is_late``, or after Ctrl-C, no smaller number is planned any more: the fewest known by then are returned.

    Raise ``NoFeasiblePlan``, which says what the whole cluster reaches, if it does not reach it.
    """
    trials = _Trials(problem, target, search, splits, costs_of, progress, is_late)
    groups = _by_speed(problem)
    ends = [sum(len(group) for group in groups[: index + 1]) for index in range(len(groups))]
    order = [device for group in groups for device in group]
    if trials.plan(order) is None:
        if trials.interrupted_in:
            progress(f"interrupted before the target {target.text} was reached")
            raise KeyboardInterrupt
        raise _not_reached(problem, target, trials)
    last = _first_true(len(ends), lambda index: trials.plan(order[: ends[index]]) is not None)
    first = ends[last - 1] if last else 0
    count = first + 1 + _first_true(ends[last] - first, lambda index: trials.plan(order[: first + 1 + index])
                                    is not None)
    found = trials.plan(order[:count])
    assert found is not None, "it was planned above"
    names = tuple(problem.cluster.devices[device].name for device in sorted(order[:count]))
    comparison = with_bound(bind_to_cluster(found, problem), problem.work_bound())
    comparison = replace(comparison, interrupted_in=trials.interrupted_in)
    return Reached(comparison=comparison, devices=names, attempts=tuple(trials.attempts.values()))


def _first_true(count: int, is_true: Callable[[int], bool]) -> int:
    """Return the first of ``count`` numbers from 0 on for which it is true, as for all after it; the last one is."""
    return bisect_left(range(count - 1), True, key=is_true)


def _by_speed(problem: Problem) -> list[tuple[DeviceId, ...]]:
    """Return the device groups, fast devices first, of equal ones the larger group."""
    def key(group: tuple[DeviceId, ...]) -> tuple[float, int, int]:
        return float(problem.op_seconds(group[0], problem.graph.batch).sum()), -len(group), group[0]

    return sorted(problem.cluster.groups_by_host_and_kind(), key=key)


class _Trials:
    """Plans for some of the devices; each set is planned once."""

    def __init__(self, problem: Problem, target: Target, search: Search, splits: Splits, costs_of: CostsOf,
                 progress: Callable[[str], None], is_late: Callable[[], bool]) -> None:
        self.problem, self.target, self.search, self.splits = problem, target, search, splits
        self.costs_of, self.progress, self.is_late = costs_of, progress, is_late
        self.attempts: dict[tuple[DeviceId, ...], Attempt] = {}
        self.known = cache(self._plan)
        self.miss: NoFeasiblePlan | None = None
        self.is_complete = True
        """The whole cluster was planned for to the end."""
        self.interrupted_in = ""
        """The strategy in whose search Ctrl-C came."""

    def plan(self, devices: Sequence[DeviceId]) -> Comparison | None:
        """Return the comparison for these devices if its best plan reaches the target."""
        return self.known(tuple(sorted(devices)))

    def _plan(self, devices: tuple[DeviceId, ...]) -> Comparison | None:
        names = tuple(self.problem.cluster.devices[device].name for device in devices)
        is_all = len(names) == self.problem.cluster.num_devices
        if not is_all and (self.interrupted_in or self.is_late()):
            why = "interrupted" if self.interrupted_in else "time limit"
            self.progress(f"{why}: {len(names)} devices are not tried")
            return None
        try:
            part = self.problem if is_all else part_of(self.problem, devices, self.costs_of)
        except ClusterError:
            self.attempts[devices] = Attempt(devices=names, bound_s=float("inf"))
            return None
        bound_s, limit_s = part.work_bound(), self.target.step_time_s * _SLACK
        self.attempts[devices] = Attempt(devices=names, bound_s=bound_s)
        if bound_s > limit_s and not is_all:
            return None
        self.progress(f"target {self.target.text}: planning for {len(names)} of "
                      f"{self.problem.cluster.num_devices} devices")
        try:
            comparison = self.search(part, splits_of_part(self.problem.cluster, self.splits, part.cluster))
        except NoFeasiblePlan as miss:
            self.miss = miss
            return None
        except KeyboardInterrupt:
            if is_all:
                raise
            self.interrupted_in = f"fewer devices ({len(names)})"
            return None
        self.interrupted_in = comparison.interrupted_in
        self.is_complete &= comparison.is_complete or not is_all
        seconds = comparison.best.step_time_s
        self.attempts[devices] = Attempt(devices=names, bound_s=bound_s, step_time_s=seconds)
        self.progress(f"target {self.target.text}: {len(names)} devices take {format_time(seconds)}")
        return comparison if seconds <= limit_s else None


def _not_reached(problem: Problem, target: Target, trials: _Trials) -> NoFeasiblePlan:
    attempt = next(iter(trials.attempts.values()))
    if attempt.step_time_s is None:
        assert trials.miss is not None, "the whole cluster is always planned"
        return trials.miss
    batch, seconds = problem.options.batch, attempt.step_time_s
    more = "" if trials.is_complete else "The time limit ended the search: with more time it may be. "
    return NoFeasiblePlan(
        f"the target {target.text} (a step of {format_time(target.step_time_s)}) is not reached: the best plan for all "
        f"{problem.cluster.num_devices} devices takes {format_time(seconds)} ({batch / seconds:.4g} samples/s), and "
        f"none can take less than {format_time(attempt.bound_s)}. {more}Try a target of {format_time(seconds)} or "
        f"{batch / seconds:.4g}/s, a larger batch, or more devices.")


def part_of(problem: Problem, devices: Sequence[DeviceId], costs_of: CostsOf) -> Problem:
    """Return the problem on some of the devices alone; raise ``ClusterError`` where nothing joins them."""
    cluster = part_of_cluster(problem.cluster, devices)
    for device in range(1, cluster.num_devices):
        cluster.route(DeviceId(0), DeviceId(device))
        cluster.route(DeviceId(device), DeviceId(0))
    return replace(problem, cluster=cluster, costs=costs_of(problem.graph, cluster))


def part_of_cluster(cluster: Cluster, devices: Sequence[DeviceId]) -> Cluster:
    """Return the cluster with these devices only, and the links between them and all switches."""
    kept = tuple(cluster.devices[device] for device in sorted(devices))
    gone = {device.name for device in cluster.devices} - {device.name for device in kept}
    links = tuple(link for link in cluster.links if link.source not in gone and link.target not in gone)
    return replace(cluster, devices=kept, links=links)


def splits_of_part(cluster: Cluster, splits: Splits, part: Cluster) -> Splits:
    """Return how the device groups of a part divide operators, as those they belong to do."""
    whole = {(cluster.devices[group[0]].host, cluster.devices[group[0]].kind): index
             for index, group in enumerate(cluster.groups_by_host_and_kind())}
    groups = part.groups_by_host_and_kind()
    origins = [whole[part.devices[group[0]].host, part.devices[group[0]].kind] for group in groups]
    return {(index, degree): splits[origin, degree] for index, origin in enumerate(origins)
            for degree in sorted({degree for _, degree in splits})
            if (origin, degree) in splits and len(groups[index]) >= degree}
