"""What ``bench_zoo`` holds plans against: how people run models without a search, each with its best numbers.

    data parallel   the whole model on every device, even shares
    1F1B            one stage on each device, equal numbers of layers
    ZeRO-like       data parallel with divided optimizer states; recomputation where memory needs it
    Megatron-style  tp groups of 1, 2, 4, ... devices of a host, as few stages as memory needs, data parallel across, even
                    shares; stages are cut by cost, recomputation where memory needs it
    HEFT            each group of operators on the device where it ends first

Each takes the fastest number of micro-batches. The first two recompute where nothing fits without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weft.base.errors import NoFeasiblePlan
from weft.plan.plan import split_samples
from weft.planning.compare import compare_strategies
from weft.search.common.problem import Problem, divisors
from weft.search.common.problem import evaluate_plan as evaluate
from weft.search.deploy.search import DeployOptions, deploy
from weft.search.deploy.splits import Splits, TpGroup
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimate, Estimator
from weft.search.joint.layouts import Layout, Setting, StageMesh, tp_groups_of
from weft.search.joint.search import build_plan

NUM_SIMULATED: Final = 3
MAX_ATTEMPTS: Final = 8
MAX_MICROBATCHES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a way of running comes to."""

    name: str
    step_time_s: float
    """Infinite where nothing fits."""


class EvenEstimator(Estimator):
    """Estimates settings in which all tp groups of a stage have equally many samples, or one more than others."""

    def counts(self, mesh: StageMesh, size: int) -> tuple[int, ...] | None:
        """Return equal numbers; None where one would have none."""
        counts = split_samples(size, (1.0,) * len(mesh.tp_groups))
        return counts if min(counts) > 0 else None


def references(problem: Problem, splits: Splits, known: Mapping[str, float]) -> list[Reference]:
    """Return the best of each way of running; ``known`` are step times of strategies that fit."""
    even = EvenEstimator(Chain(problem, splits))
    ways: dict[str, Callable[[], float]] = {
        "data parallel": lambda: known.get("data-parallel") or _recomputed(problem, "data-parallel"),
        "1F1B": lambda: known.get("1f1b") or _recomputed(problem, "1f1b"),
        "ZeRO-like": lambda: _best_simulated(even, _zero(even)),
        "Megatron-style": lambda: _best_simulated(even, _megatron(even, splits)),
        "HEFT": lambda: _heft(problem)}
    return [Reference(name=name, step_time_s=find()) for name, find in ways.items()]


def _recomputed(problem: Problem, name: str) -> float:
    asked = replace(problem, options=replace(problem.options, recompute=True))
    try:
        return compare_strategies(asked, [name]).best.step_time_s
    except NoFeasiblePlan:
        return float("inf")


def _heft(problem: Problem) -> float:
    try:
        return deploy(problem, DeployOptions(method="heft")).step_time_s
    except NoFeasiblePlan:
        return float("inf")


def _best_simulated(estimator: Estimator, estimates: Iterable[Estimate]) -> float:
    """Return the least simulated time of the best estimates."""
    times: list[float] = []
    for estimate in sorted(estimates, key=lambda item: item.step_time_s)[:MAX_ATTEMPTS]:
        try:
            times.append(evaluate(build_plan(estimator, estimate), estimator.problem).step_time_s)
        except NoFeasiblePlan:
            continue
        if len(times) == NUM_SIMULATED:
            break
    return min(times, default=float("inf"))


def _zero(estimator: Estimator) -> Iterator[Estimate]:
    layout = (StageMesh(tp_groups_of(estimator.problem.devices, 1)),)
    for recompute in (False, True):
        yield from _estimates(estimator, layout, recompute=recompute, sharded=True)


def _megatron(estimator: Estimator, splits: Splits) -> Iterator[Estimate]:
    groups = estimator.problem.cluster.groups_by_host_and_kind()
    for degree in sorted({1, *(degree for _, degree in splits)}):
        if any(len(group) % degree for group in groups):
            continue
        tp_groups = [tp_group for group in groups for tp_group in tp_groups_of(group, degree)]
        for recompute in (False, True):
            yield from _fewest_stages(estimator, tp_groups, recompute=recompute)


def _fewest_stages(estimator: Estimator, tp_groups: Sequence[TpGroup], *, recompute: bool) -> Iterator[Estimate]:
    for num_stages in divisors(len(tp_groups)):
        width = len(tp_groups) // num_stages
        layout = tuple(StageMesh(tuple(tp_groups[first : first + width])) for first in range(0, len(tp_groups), width))
        found = list(_estimates(estimator, layout, recompute=recompute))
        if found:
            yield from found
            return


def _estimates(estimator: Estimator, layout: Layout, *, recompute: bool, sharded: bool = False) -> Iterator[Estimate]:
    for microbatches in divisors(estimator.problem.options.batch):
        if microbatches > MAX_MICROBATCHES:
            return
        try:
            yield estimator(Setting(layout=layout, microbatches=microbatches, recompute=recompute,
                                    zero=int(sharded)))
        except NoFeasiblePlan:
            continue
