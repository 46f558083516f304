"""For a request that nothing fits: the smallest changes that make it possible, each found by search and planned.

Settings come first, since they cost nothing to change: more micro-batches, recomputation, lower precision, the
optimizer's state divided among devices, several of these together; then a smaller batch; then hardware: the least
memory that would have to be added to every device, the fewest devices of the largest kind.

Whether a change is enough is found out by the memory of the plain strategies' plans (``least_missing``), and where
these lack some, by the joint search (``best_joint``). What is found is planned as `weft plan` would, and only then
reported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weft.base.errors import NoFeasiblePlan, WeftError
from weft.base.units import format_bytes
from weft.cost.costs import estimate_costs
from weft.explain.whatif import with_memory, with_more_devices
from weft.planning.compare import Candidate, microbatch_choices
from weft.planning.replan import THRIFTY, Request, best_joint, find_splits, least_missing, replan
from weft.search.common.budget import Budget, OutOfTime, cut_short, time_budget
from weft.search.common.degrees import option
from weft.search.common.problem import Problem, divisors
from weft.search.deploy.splits import NO_SPLITS, Splits

LOWER: Final = {"float64": ("float32", "bfloat16"), "float32": ("bfloat16",)}
"""Precisions below each one."""
MOST_DEVICES: Final = 256
"""So many more devices are tried at most."""
STEP_BYTES: Final = 2**16
"""More memory is found to about this, or to one part in ``FINENESS`` of it."""
FINENESS: Final = 256
BY_CAPACITY: Final = ("1f1b-balanced", "single")
"""Strategies whose plans depend on how much memory there is."""
PIPELINES: Final = ("1f1b-balanced", "1f1b")
"""Strategies that need less memory with more devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A change that is enough by the account of memory, before it is planned."""

    kind: str
    """``degrees``, ``microbatches``, ``recompute``, ``dtype``, ``sharded``, ``together``, ``batch``, ``memory`` or
    ``devices``."""
    change: str
    """In words."""
    options: str = ""
    """For `weft plan`, where a setting is changed and it has an option for that."""
    problem: Problem
    """The request with the change."""
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation(_Found):
    """A change that makes the request possible."""

    best: Candidate
    """The fastest plan that was found then."""


def smallest_relaxation(problem: Problem, request: Request | None = None, *,
                        budget: Budget | None = None) -> list[Relaxation]:
    """Return the changes, settings before hardware; empty if nothing was found in the time of the budget.

    ``request`` is what ``problem`` was made from: with it, other precisions are tried too. Ctrl-C ends the search as
    well, and marks the ``budget``.
    """
    budget = budget or time_budget(None)
    asked = request or Request(graph=problem.graph, options=problem.options,
                               costs_of=lambda graph, cluster: estimate_costs(graph, cluster,
                                                                              dtype=problem.options.dtype))
    splits = find_splits(problem, asked, budget=time_budget(budget.seconds_left))
    enough, searches = _Enough(splits=splits, problem=problem, budget=budget), (_settings, _batch, _memory, _devices)
    result: list[Relaxation] = []
    try:
        with cut_short(budget.deadline):
            for number, search in enumerate(searches):
                for found in search(problem, asked, enough):
                    _plan(found, budget, 1 / (len(searches) - number), result)
    except OutOfTime:
        budget.report("time limit: nothing further is tried")
    except KeyboardInterrupt:
        budget.report("interrupted: nothing further is tried")
        if not result:
            raise
        budget.is_interrupted = True
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Enough:
    """Says whether a problem has a plan; what is not known by the deadline counts as none."""

    problem: Problem
    """The request, for whose model and devices ``splits`` are."""
    splits: Splits
    budget: Budget

    def __call__(self, problem: Problem, strategies: Sequence[str] = THRIFTY) -> bool:
        if self.budget.is_late:
            return False
        if least_missing(problem, strategies) <= 0:
            return True
        same = problem.graph is self.problem.graph and len(problem.devices) == len(self.problem.devices)
        found = best_joint(problem, self.splits if same else NO_SPLITS, self.budget)
        if self.budget.is_interrupted:
            raise KeyboardInterrupt
        return found is not None


def _plan(found: _Found, budget: Budget, share: float, result: list[Relaxation]) -> None:
    """Add the change with its best plan, in a share of the time, unless the planner finds none after all.

    Raise ``KeyboardInterrupt`` or ``OutOfTime`` where nothing more is to be tried.
    """
    budget.report(f"planning with {found.change}")
    try:
        planned = replan(found.problem, found.request, budget=budget.part(share))
        result.append(Relaxation(kind=found.kind, change=found.change, options=found.options, problem=found.problem,
                                 request=found.request, best=planned.best))
        if planned.is_interrupted:
            raise KeyboardInterrupt
    except NoFeasiblePlan as miss:
        budget.report(f"note: {found.change} is not enough for the planner: {miss}")
    if budget.is_late:
        raise OutOfTime


# Settings ------------------------------------------------------------------------------------------------------------


def _settings(problem: Problem, request: Request, enough: _Enough) -> Iterator[_Found]:
    """Yield the mildest value of each setting that is enough by itself; if none is, several together."""
    several = [next((item for item in values(problem, request) if enough(item.problem)), None)
               for values in (_free, _microbatches, _recompute, _sharded, _precisions)]
    found = [item for item in several if item is not None]
    yield from found or _together(problem, request, enough)


def _with(problem: Problem, request: Request, kind: str, change: str, flags: str, **options: object) -> _Found:
    changed = replace(problem.options, **options)  # type: ignore[arg-type]
    return _Found(kind=kind, change=change, options=flags, problem=replace(problem, options=changed),
                  request=replace(request, options=changed))


def _free(problem: Problem, request: Request) -> Iterator[_Found]:
    """Yield what was fixed by hand left to the search: options by themselves, the axes together, then all."""
    degrees = problem.options.degrees
    axes = [name for name in degrees.given if name in ("tp", "pp", "dp", "cp", "ep")]
    parts = [[name] for name in degrees.given if name not in axes] + [axes] * bool(axes)
    for names in [*parts, [*degrees.given]][: None if len(parts) > 1 else len(parts)]:
        words = " ".join(f"{option(name)} {degrees.given[name]}" for name in names)
        changes: dict[str, object] = {"recompute": False} if "recompute" in names else {}
        if "zero" in names:
            changes["optimizer"] = replace(problem.options.optimizer, sharded=False)
        if "microbatch_size" in names:
            changes["microbatches"] = None
        yield _with(problem, request, "degrees", f"{words} left to the search", "",
                    degrees=replace(degrees, **dict.fromkeys(names)), **changes)


def _microbatches(problem: Problem, request: Request) -> Iterator[_Found]:
    """Yield more micro-batches than any strategy tries by itself."""
    if problem.options.degrees.microbatch_size is not None:
        return
    tried = max(max(microbatch_choices(problem, name), default=1) for name in ("1f1b", "single"))
    for number in divisors(problem.options.batch):
        if number > tried:
            yield _with(problem, request, "microbatches", f"{number} micro-batches", f"--microbatches {number}",
                        microbatches=number)


def _recompute(problem: Problem, request: Request) -> Iterator[_Found]:
    if problem.is_training and not problem.options.recompute and problem.options.degrees.recompute is None:
        yield _with(problem, request, "recompute", "recomputation", "--recompute full", recompute=True)


def _sharded(problem: Problem, request: Request) -> Iterator[_Found]:
    optimizer = problem.options.optimizer
    if (problem.options.degrees.zero is None and problem.is_training and not optimizer.sharded
            and optimizer.kind in ("adam", "adamw")):
        yield _with(problem, request, "sharded", "the optimizer's state divided among devices", "",
                    optimizer=replace(optimizer, sharded=True))


def _precisions(problem: Problem, request: Request) -> Iterator[_Found]:
    for dtype in LOWER.get(problem.options.dtype, ()):
        if (lowered := request.in_dtype(dtype)) is not None:
            yield _Found(kind="dtype", change=dtype, options=f"--dtype {dtype}", request=lowered,
                         problem=lowered.problem(problem.cluster))


def _together(problem: Problem, request: Request, enough: _Enough) -> Iterator[_Found]:
    """Yield the first of these that is enough: the most micro-batches, then recomputed, then in lower precision too."""
    batch = problem.options.batch
    bases = [_with(problem, request, "together", "", ""), *_precisions(problem, request)]
    for base in bases:
        words, flags = [base.change] * bool(base.change), [base.options] * bool(base.options)
        for again in ((False, True) if problem.is_training and problem.options.degrees.recompute is None else (False,)):
            found = _with(base.problem, base.request, "together",
                          ", ".join([*words, f"{batch} micro-batches", *["recomputation"] * again]),
                          " ".join([*flags, f"--microbatches {batch}", *["--recompute full"] * again]),
                          microbatches=batch, recompute=again)
            if enough(found.problem):
                yield found
                return


# A smaller batch, and hardware ---------------------------------------------------------------------------------------


def _batch(problem: Problem, request: Request, enough: _Enough) -> Iterator[_Found]:
    """Yield the largest smaller batch that bisection finds, in the micro-batches that were asked for."""
    parts = problem.options.microbatches or 1

    def smaller(size: int) -> _Found:
        batch = size * parts
        return _with(problem, request, "batch", f"a batch of {batch}", f"--batch {batch}", batch=batch)

    largest = bisect_left(range(1, problem.options.batch // parts), True,
                          key=lambda size: not enough(smaller(size).problem))
    if largest:
        yield smaller(largest)


def _memory(problem: Problem, request: Request, enough: _Enough) -> Iterator[_Found]:
    """Yield the least memory that is to be added to every device.

    What the nearest plan lacks is enough. With less, only strategies that look at the memory may still find a plan.
    """
    high = least_missing(problem, enough=-1.0)
    if not 0 < high < float("inf"):
        return
    low = 0.0
    while high - low > max(STEP_BYTES, high / FINENESS):
        middle = (low + high) / 2
        trial = replace(problem, cluster=with_memory(problem.cluster, int(middle)))  # costs do not depend on it
        low, high = (low, middle) if enough(trial, BY_CAPACITY) else (middle, high)
    extra = -(-int(high) // STEP_BYTES) * STEP_BYTES
    cluster = with_memory(problem.cluster, extra)
    yield _Found(kind="memory", change=f"{format_bytes(extra)} more memory on every device",
                 problem=request.problem(cluster), request=request)


def _devices(problem: Problem, request: Request, enough: _Enough) -> Iterator[_Found]:
    """Yield the fewest devices like the one with most memory: doubled until they are enough, then bisected."""
    devices = problem.cluster.devices
    like = max(problem.devices, key=lambda device: (devices[device].memory_bytes or 0, -device))

    def more(count: int) -> Problem:
        return request.problem(with_more_devices(problem.cluster, like, count))

    try:
        low, high, missing = 0, 1, [float("inf")] * 2
        while not enough(more(high), PIPELINES):
            missing.append(least_missing(more(high), PIPELINES))
            if missing[-1] >= missing[-3] or high >= MOST_DEVICES or enough.budget.is_late:
                return  # twice and four times as many do not help
            low, high = high, 2 * high
        high = low + 1 + bisect_left(range(low + 1, high), True, key=lambda count: enough(more(count), PIPELINES))
        name = devices[like].kind
        yield _Found(kind="devices", change=f"{high} more {name} on host {devices[like].host}",
                     problem=more(high), request=request)
    except WeftError:
        return  # such as times that a graph file gives for the devices it names
