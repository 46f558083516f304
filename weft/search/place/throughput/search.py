"""The search for the highest throughput: the least largest load of any device or of anything that transfers occupy.

    x[u]     the device of unit u, one of those where time[u, d] is finite                    (``kernel._may_go``)
    K[c]     load of core c:      sum of time[u, x[u]] of the units on its devices            (``kernel.fill``)
                                  + sum of touch[t, d] of the tensors t that leave or enter
                                  one of its devices d                                        (``kernel.add_tensor``)
    R[r]     load of resource r:  sum of seconds[t, i, j] of the tensors t that are sent from
                                  i to j over it, once to each device j                       (``kernel.add_tensor``)

    minimise T over x with   T >= K[c],  T >= R[r]   for all c and r                          (``LoadProblem.value``)
                             bytes of the items kept on d <= capacity[d]                      (``kernel.excess``)
                             seconds[t, i, j] finite for all that is sent                     (``kernel.excess``)
                             no path leaves a device and comes back, if that is asked         (``kernel.are_convex``)

Starts are intervals of an order of the units, one for each device, balanced by time and memory (``seeds``), what named
methods choose, and the best intervals of many random orders that keep together what shares tensors (``Orders``). Short
annealing runs from a few of them give a first value (``_Search.start``). It makes the problem smaller
(``reduce_problem``), and often CP-SAT then ends the matter (``exact``). What effort is left goes into longer annealing
of the smaller problem, and into a last attempt at a proof.

``place_stream`` is the way from a placement problem to its result: loads know only what is resident, so it searches
again with less room for weights until the tensors of one request fit beside them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.model.graph import F64, I64, topological
from weft.search.common.budget import Budget, OutOfTime, cut_short
from weft.search.common.incumbent import Incumbent
from weft.search.place.fit import fitting_devices
from weft.search.place.kernel import pieces
from weft.search.place.methods import METHODS
from weft.search.place.problem import PlaceProblem, csr
from weft.search.place.throughput.exact import average_bound, improve_or_prove, shared_bound
from weft.search.place.throughput.kernel import State, anneal, cut_order, grow_order
from weft.search.place.throughput.model import LoadProblem, Reduced, blocks_of, load_problem, merge, reduce_problem
from weft.search.place.timetable import TOLERANCE, Assignment, PlaceResult, Timetable, make_timetable


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was chosen for the search, and why. None was tuned on a recorded set: take them for guesses that work."""

    proven: float = 1e-6
    """Relative: a bound so close to the value is a proof; CP-SAT's whole numbers are no finer."""
    equal: float = 1e-9
    """Relative: nothing but rounding of sums in double precision."""
    heat: tuple[float, ...] = (0.02, 0.003, 0.0005, 0.008)
    """Starting temperatures in turn, in parts of the energy."""
    first_heat: tuple[float, ...] = (0.02, 0.001)
    """Those of the first runs from each start."""
    cold: float = 1e-5
    """The last temperature, in the same parts."""
    piece_s: float = 0.4
    """Effort between looks at the clock, so that Ctrl-C is answered in about half a second."""
    first_s: float = 0.01
    """Effort of the first runs at most, for each unit: small problems are proven sooner than annealed."""
    run_steps: int = 5_000_000
    """Steps of one annealing run at most."""
    noise: tuple[float, ...] = (0.01, 0.1, 0.3, 1.0)
    """What chance adds to the weights that grow an order, in turn, in parts of their mean: little to much."""
    orders_part: float = 0.03
    """Part of the effort in which random orders are cut after the first runs. On o-resnet50_inference 12 orders led to
    124.349, where annealing alone had ended at 128.07."""
    max_orders: int = 4_000
    """So many at most: no recorded problem gained from more."""
    restarts_part: float = 0.35
    """Part of the effort in which short runs begin from new orders. On o-bert_l-6_training they end at 71.642, once in
    ten runs about; one long run ended at 73.35."""
    fresh_orders: tuple[int, ...] = (10, 100)
    """Orders of which the best is such a beginning, in turn; only the best of very many, and any, were both worse."""
    fresh_heat: tuple[float, ...] = (0.03, 0.06)
    """Starting temperatures of these runs in turn; with 0.01 none of 20 left where it began for long."""
    fresh_cold: float = 1e-4
    """The last temperature of these runs."""
    fresh_steps: int = 200_000
    """Steps of such a run: enough for the 250 units of the largest recorded problem, by its loads."""
    bisections: int = 40
    """Of the largest time of intervals: to a part in 10^12."""
    starts_part: float = 0.3
    """Part of a time limit in which the named methods are tried as starts."""
    max_rounds: int = 6
    """Searches at most, each with less room for weights, until tensors fit beside them."""


TUNING: Final = Tuning()

# ---- starts -------------------------------------------------------------------------------------------------------


def blocks_in_order(problem: LoadProblem, *, contiguous: bool) -> list[I64]:
    """Return the units in blocks, so that any interval of blocks is contiguous; single units where that is not asked.

    Blocks follow the order of the nodes. Units whose nodes depend on each other both ways are one block.
    """
    a, position = problem.arrays, _positions(problem)
    if not contiguous:
        return list(np.argsort(position, kind="stable")[:, None])
    reader = np.repeat(a.node_unit, np.diff(a.source_start))
    blocks, follow = blocks_of(a.node_unit[a.sources], reader, problem.num_units)
    return [blocks[index] for index in topological(follow, [float(position[block].min()) for block in blocks])]


def _positions(problem: LoadProblem) -> F64:
    """Return where each unit stands in the order of the nodes; units without nodes stand beside those they feed."""
    a = problem.arrays
    position = np.full(problem.num_units, np.inf)
    np.minimum.at(position, a.node_unit, np.arange(len(a.node_unit), dtype=np.float64))
    owner = np.repeat(a.owner, np.diff(a.reader_start))
    for _ in range(3):
        near = np.full(problem.num_units, np.inf)
        np.minimum.at(near, a.readers, position[owner])
        np.minimum.at(near, owner, position[a.readers])
        position = np.where(np.isinf(position), near + 0.5, position)
    return position


class Intervals:
    """Blocks in order, of which each device gets an interval."""

    def __init__(self, problem: LoadProblem, *, contiguous: bool) -> None:
        self.problem, self.blocks = problem, blocks_in_order(problem, contiguous=contiguous)
        self.times = np.array([problem.arrays.time_s[block].sum(axis=0) for block in self.blocks])
        self.sizes = np.array([problem.unit_bytes[block].sum() for block in self.blocks])
        self.highest = float(np.where(np.isfinite(self.times), self.times, 0.0).max(axis=1).sum())

    def best(self, sequence: list[int]) -> I64 | None:
        """Return the placement over the devices in this sequence with the least largest time, if any fits."""
        low, high = 0.0, self.highest + 1e-300
        best = self.packed(sequence, self.sizes, high)
        for _ in range(TUNING.bisections if best is not None else 0):
            middle = (low + high) / 2
            found = self.packed(sequence, self.sizes, middle)
            low, high = (middle, high) if found is None else (low, middle)
            best = found if found is not None else best
        return best

    def packed(self, sequence: list[int], sizes: F64, limit: float) -> I64 | None:
        """Return the devices of units with no device's time above the limit, filling one after the other."""
        device, capacity = np.zeros(self.problem.num_units, dtype=np.int64), self.problem.arrays.capacity
        turn, time_s, size = 0, 0.0, 0.0
        for block, times, more in zip(self.blocks, self.times, sizes, strict=True):
            while turn < len(sequence) and (time_s + times[sequence[turn]] > limit
                                            or size + more > capacity[sequence[turn]]):
                turn, time_s, size = turn + 1, 0.0, 0.0
            if turn == len(sequence):
                return None
            device[block] = sequence[turn]
            time_s += times[sequence[turn]]
            size += more
        return device


def _fastest_first(problem: LoadProblem) -> list[int]:
    """Return the devices by the time that they would take for everything that they may run."""
    times = problem.arrays.time_s
    order = np.argsort(np.where(np.isfinite(times), times, 0.0).sum(axis=0), kind="stable")
    return [int(device) for device in order]


def seeds(problem: LoadProblem) -> list[I64]:
    """Return placements by intervals for a few sequences of the devices, and those on one device; allowed ones only."""
    fast = _fastest_first(problem)
    orders = [Intervals(problem, contiguous=contiguous) for contiguous in ((True,) if problem.contiguous else
                                                                            (True, False))]
    found = [intervals.best(sequence) for intervals in orders for sequence in
             (fast, fast[::-1], list(range(problem.num_devices)), fast[1:] + fast[:1])]
    found += [np.full(problem.num_units, device, dtype=np.int64) for device in range(problem.num_devices)]
    kept: list[I64] = []
    for device in found:
        if device is not None and not any((device == other).all() for other in kept) and np.isfinite(
                problem.value(device)):
            kept.append(device)
    return sorted(kept, key=problem.value)


def hopeful(problem: LoadProblem) -> list[I64]:
    """Return placements that may hold too much, for a search to repair: the largest units first, and intervals."""
    a = problem.arrays
    device = np.argmin(a.time_s, axis=1).astype(np.int64)
    free = a.capacity.copy()
    for unit in np.argsort(-problem.unit_bytes, kind="stable").tolist():
        room = np.where(np.isfinite(a.time_s[unit]), free, -np.inf)
        device[unit] = int(np.argmax(room))
        free[device[unit]] -= problem.unit_bytes[unit]
    intervals = Intervals(problem, contiguous=problem.contiguous)
    limit = intervals.highest / max(1, problem.num_devices - 1) + 1e-300
    packed = intervals.packed(_fastest_first(problem), np.zeros(len(intervals.blocks)), limit)
    return [*([] if problem.contiguous else [device]), *([] if packed is None else [packed])]


class Orders:
    """Random linear orders of the units, each cut into one interval for every device where that is best.

    An order keeps together what shares heavy tensors (``kernel.grow_order``), so few tensors lead out of any interval;
    ``kernel.cut_order`` finds the best intervals of an order exactly, but for what transfers occupy. With contiguity
    orders are topological, and blocks of units that depend on each other both ways stay whole.
    """

    def __init__(self, problem: LoadProblem, seed: int) -> None:
        a, count = problem.arrays, problem.num_units
        self.group, follow = np.arange(count, dtype=np.int64), [set[int]() for _ in range(count)]
        if problem.contiguous:
            blocks, follow = blocks_of(a.node_unit[a.sources], np.repeat(a.node_unit, np.diff(a.source_start)), count)
            for index, block in enumerate(blocks):
                self.group[block] = index
        self.problem, self.blocks = problem, merge(problem, self.group) if problem.contiguous else problem
        """The problem, and its blocks."""
        self.follow_start, self.follow = csr([sorted(items) for items in follow])
        self.weight = self.blocks.tensor_weights
        self.rng, self.random = np.random.default_rng(seed), np.array([seed * 7919 + 12345], dtype=np.int64)
        size, num_pins = self.blocks.num_units, len(self.blocks.arrays.owner) + len(self.blocks.arrays.readers)
        self.seconds = 1e-5 + 1e-9 * size * (size + num_pins) * (problem.num_devices + 1)
        """CPU seconds that one order takes, about."""

    def placement(self, turn: int) -> I64:
        """Return the devices of the units by another order."""
        a, mean = self.blocks.arrays, float(self.weight.sum()) / max(1, len(self.weight))
        order = grow_order(a, self.weight, self.follow_start, self.follow,
                           mean * TUNING.noise[turn % len(TUNING.noise)], self.random)
        sequence = self.rng.permutation(self.problem.num_devices)
        return np.asarray(cut_order(a, order, sequence, self.blocks.unit_bytes)[self.group], dtype=np.int64)


# ---- the search ---------------------------------------------------------------------------------------------------


def minimise(problem: LoadProblem, *, budget: Budget, seed: int, starts: Sequence[I64] = ()) -> Incumbent[I64]:
    """Return the best devices of the units; none where no placement was found, with an infinite bound if there is none.
    """
    search = _Search(problem, budget, seed)
    best = search.best
    try:
        search.start([*starts, *seeds(problem)])
        if best.answer is None:
            search.find_any(0.5 * budget.effort)
        if best.answer is None:
            return best
        effort = budget.effort
        search.bound_shared(0.05 * effort)
        search.prove(0.15 * effort)
        search.restart_for(TUNING.restarts_part * effort)
        search.prove(0.1 * effort)
        search.anneal_for(0.75 * budget.effort)
        search.bound_shared(0.15 * effort)
        if search.proof_bound >= best.bound:  # the solver knew more than the other bounds
            search.prove(0.7 * budget.effort)
        search.anneal_for(budget.effort)
    except (KeyboardInterrupt, OutOfTime) as ended:
        budget.is_interrupted |= isinstance(ended, KeyboardInterrupt)
        if best.answer is None:
            raise
    if best.bound >= best.value * (1 - TUNING.equal):
        best.bound = best.value
    return best


class _Search:
    """The best placement so far, and what was tried."""

    def __init__(self, problem: LoadProblem, budget: Budget, seed: int) -> None:
        self.problem, self.budget, self.seed = problem, budget, seed
        self.best = Incumbent[I64](budget=budget, what="largest load", proof=TUNING.proven,
                                   bound=average_bound(problem))
        self.num_runs = 0
        self.proof_value = float("inf")
        self.proof_bound = 0.0
        self.last: tuple[float, Reduced, I64] | None = None
        self.orders: Orders | None = None

    @property
    def is_done(self) -> bool:
        return self.budget.is_spent or self.best.is_proven

    def offer(self, device: I64) -> None:
        """Take the placement if it is better."""
        self.best.offer(self.problem.value(device), device.astype(np.int64))

    def start(self, starts: Sequence[I64]) -> None:
        """Take the best start, and improve the best few shortly; where none is allowed, look for one."""
        allowed = [device for device in starts if np.isfinite(self.problem.value(device))]
        for device in allowed:
            self.offer(device)
        chosen = sorted(allowed, key=self.problem.value)[:2] or hopeful(self.problem)
        for device, heat in itertools.product(chosen, TUNING.first_heat):
            effort = min(0.02 * self.budget.effort, TUNING.first_s * self.problem.num_units)
            self._run(self.problem, device, effort=effort, heat=heat)
        found = self.cut_orders(TUNING.max_orders, TUNING.orders_part * self.budget.effort)
        if found is not None:
            reduced, device = found
            for heat in TUNING.first_heat:
                self._run(reduced.problem, device, effort=0.02 * self.budget.effort, heat=heat, expand=reduced)

    def cut_orders(self, count: int, effort: float) -> tuple[Reduced, I64] | None:
        """Return the best placement of random orders of what the value known leaves, if any is allowed; offer it."""
        reduced = self.reduced()[0] if self.best.answer is not None else _whole(self.problem)
        if self.orders is None or self.orders.problem is not reduced.problem:
            self.orders = Orders(reduced.problem, self.seed + self.num_runs)
        found, least = None, float("inf")
        for turn in range(min(count, int(effort / self.orders.seconds))):
            if self.is_done:
                break
            device = self.orders.placement(turn)
            self.budget.effort -= self.orders.seconds
            value = reduced.problem.value(device)
            if value < least:
                found, least = (reduced, device), value
        if found is not None:
            self.offer(reduced.expand(found[1]))
        return found

    def restart_for(self, effort: float) -> None:
        """Anneal shortly from the best of a few random orders, again and again: many basins rather than one."""
        least = self.budget.effort - effort
        while not self.is_done and self.budget.effort > max(least, 0.0) + 0.01:
            count = TUNING.fresh_orders[self.num_runs % len(TUNING.fresh_orders)]
            found = self.cut_orders(count, self.budget.effort - least)
            if found is None:
                return
            reduced, device = found
            heat = TUNING.fresh_heat[self.num_runs // len(TUNING.fresh_orders) % len(TUNING.fresh_heat)]
            self._run(reduced.problem, device, effort=TUNING.fresh_steps * seconds_per_step(reduced.problem), heat=heat,
                      cold=TUNING.fresh_cold, expand=reduced)

    def _run(self, problem: LoadProblem, device: I64, *, effort: float, heat: float, cold: float = TUNING.cold,
             expand: Reduced | None = None) -> None:
        """Anneal once, in pieces, between which the clock and Ctrl-C are looked at."""
        if self.is_done:
            return
        seconds, state = seconds_per_step(problem), State.empty(problem.arrays, device)
        scale = min(max(float(problem.loads(device).max(initial=0.0)), 1e-300), self.best.value)
        self.num_runs += 1
        for piece in pieces(min(TUNING.run_steps, max(1000, int(effort / seconds))), size=TUNING.piece_s / seconds,
                            hot=heat * scale, fall=cold / heat, is_done=lambda: self.is_done):
            found, value = anneal(problem.arrays, state, piece.steps, piece.hot, piece.cold,
                                  (1000 * self.seed + self.num_runs) * 1000 + piece.number, problem.contiguous)
            self.budget.effort -= piece.steps * seconds
            if np.isfinite(value):
                self.offer(found if expand is None else expand.expand(found))

    def find_any(self, effort: float) -> None:
        """Let CP-SAT look for any placement; the bound is infinite if there is none."""
        if not self.is_done:
            device, bound = improve_or_prove(self.problem, None, budget=self.budget, effort=effort, seed=self.seed)
            if device is not None:
                self.offer(device)
            elif np.isinf(bound):
                self.best.raise_bound(bound)

    def reduced(self) -> tuple[Reduced, I64]:
        """Return the problem made smaller by the value known, and the best placement in it."""
        if self.last is None or self.last[0] != self.best.value:
            self.last = (self.best.value, *self._reduced())
        return self.last[1], self.last[2]

    def _reduced(self) -> tuple[Reduced, I64]:
        value, best = self.best.value, self.best.answer
        assert best is not None, "it is the value of the best that makes the problem smaller"
        reduced = reduce_problem(self.problem, value)
        first = np.full(reduced.problem.num_units, -1, dtype=np.int64)
        for unit in reversed(range(self.problem.num_units)):
            if self.problem.arrays.time_s[unit].max() > 0 or first[reduced.group[unit]] < 0:
                first[reduced.group[unit]] = unit
        device = best[first]
        if not reduced.problem.value(device) <= value * (1 + TUNING.equal):
            return _whole(self.problem), best
        return reduced, device

    def prove(self, effort: float) -> None:
        """Let CP-SAT improve the best placement or raise the bound, if the value is new to it."""
        if self.is_done or self.best.value >= self.proof_value:
            return
        self.proof_value = self.best.value
        reduced, device = self.reduced()
        found, bound = improve_or_prove(reduced.problem, device, budget=self.budget, effort=effort, seed=self.seed)
        self.proof_bound = min(bound, self.best.value)
        self.best.raise_bound(bound)
        if found is not None:
            self.offer(reduced.expand(found))

    def bound_shared(self, effort: float) -> None:
        """Raise the bound by what one of several equal devices must take."""
        if not self.is_done:
            reduced, _ = self.reduced()
            self.best.raise_bound(shared_bound(reduced.problem, self.best.value, budget=self.budget, effort=effort,
                                               seed=self.seed))

    def anneal_for(self, effort: float) -> None:
        """Anneal the reduced problem from the best placement, from hot to less hot, again and again."""
        least = self.budget.effort - effort
        while not self.is_done and self.budget.effort > max(least, 0.0) + 0.01:
            reduced, device = self.reduced()
            share = min(self.budget.effort - least, 0.25 * effort)
            heat = TUNING.heat[self.num_runs % len(TUNING.heat)]
            self._run(reduced.problem, device, effort=share, heat=heat, expand=reduced)


def _whole(problem: LoadProblem) -> Reduced:
    """Return the problem as it is."""
    return Reduced(problem=problem, group=np.arange(problem.num_units, dtype=np.int64))


def seconds_per_step(problem: LoadProblem) -> float:
    """Return about how long one annealing step takes, so that effort is spent alike on any machine."""
    a = problem.arrays
    degree = (len(a.owner) + len(a.readers)) / max(1, problem.num_units)
    contiguity = 2e-9 * (len(a.node_unit) + len(a.sources)) if problem.contiguous else 0.0
    return 8e-7 + 3e-8 * (a.num_cores + a.num_resources) + 5.5e-8 * degree * problem.num_devices + contiguity


def warm_up(problem: LoadProblem) -> None:
    """Import and compile everything that a search uses, with a problem that is very small."""
    where = np.zeros(problem.num_units, dtype=np.int64)
    problem.value(where)
    average_bound(problem)
    anneal(problem.arrays, State.empty(problem.arrays, where), 1, 1.0, 1.0, 0, False)
    Orders(problem, 0).placement(0)


# ---- graphs on clusters -------------------------------------------------------------------------------------------


def solve_throughput(problem: PlaceProblem, *, contiguous: bool, budget: Budget, seed: int,
                     starts: Sequence[I64] = ()) -> Incumbent[I64]:
    """Return the best devices of the operators found from the starts (devices of operators) and Weft's own.

    Raises ``NoFeasiblePlan`` where none was found that fits the memory.
    """
    best = minimise(load_problem(problem, contiguous=contiguous), budget=budget, seed=seed,
                    starts=[np.asarray(start)[problem.first_op] for start in starts])
    if best.answer is None:
        fitting_devices(problem, seed=seed)  # raises where memory alone is too small
        raise _not_placed(problem, contiguous=contiguous, is_proven=bool(np.isinf(best.bound)))
    return replace(best, answer=np.asarray(best.answer[problem.unit_of_op], dtype=np.int64))


def _not_placed(problem: PlaceProblem, *, contiguous: bool, is_proven: bool) -> NoFeasiblePlan:
    """Return the error for problems that would fit the memory, if that were all."""
    has_limits = bool(np.isfinite(problem.capacity).any())
    wanted = ["every operator gets what it reads"] + ["no path leaves a device and comes back"] * contiguous + [
        "all fits the memory"] * has_limits
    hints = ["without --contiguous"] * contiguous + ["links between more devices"] + ["more memory"] * has_limits
    return NoFeasiblePlan(f"{'there is no placement' if is_proven else 'no placement was found'} of {problem.name!r} "
                          f"in which {' and '.join(wanted)}. Try {' or '.join(hints)}.")


def place_stream(problem: PlaceProblem, *, method: str, contiguous: bool, budget: Budget, seed: int,
                 begin: float) -> PlaceResult:
    """Return the placement with the least largest load; ``begin`` is when CPU seconds are counted from."""
    starts = _starts(problem, METHODS if method == "auto" else (method,), budget.part(TUNING.starts_part).deadline)
    stream = _Stream(problem, starts, budget, contiguous=contiguous, seed=seed)
    value, table = stream.run() if method == "auto" else stream.as_it_is(starts[0], method)
    names = (*problem.device_names, *problem.resource_names)
    return PlaceResult(
        timetable=table, objective="throughput", value=value, bound=min(stream.bound, value),
        status="optimal" if stream.bound >= value * (1 - TUNING.proven) else "feasible",
        by="loads" if method == "auto" else method, seconds=time.process_time() - begin,
        is_interrupted=budget.is_interrupted,
        loads=dict(zip(names, stream.asked.loads(table.device[problem.first_op]).tolist(), strict=True)))


class _Stream:
    """Searches until the tensors of one request fit, too; placements are (largest load, timetable of one request)."""

    def __init__(self, problem: PlaceProblem, starts: Sequence[Assignment], budget: Budget, *, contiguous: bool,
                 seed: int) -> None:
        self.problem, self.starts, self.budget, self.seed = problem, starts, budget, seed
        self.asked = load_problem(problem, contiguous=contiguous)
        self.found: list[Assignment] = []
        self.bound = problem.work_bound()
        """Once there is a search: that of the first, in which weights had all the room."""

    def search(self, capacity: F64, share: float, more: Sequence[Assignment] = ()) -> Incumbent[I64]:
        """Search with so much memory for weights and so much of the effort."""
        with self.budget.without((1 - share) * self.budget.effort):
            best = solve_throughput(replace(self.problem, capacity=capacity), contiguous=self.asked.contiguous,
                                    budget=self.budget, seed=self.seed,
                                    starts=[start.device for start in (*self.starts, *more)])
        assert best.answer is not None, "else it raises"
        if not self.found:
            self.bound = best.bound
        self.found.append(Assignment(device=best.answer, order=np.arange(self.problem.num_ops)))
        return best

    def run(self) -> tuple[float, Timetable]:
        """Return what the search finds; where the deadline cuts it, the best of what it had and of the starts."""
        try:
            with cut_short(self.budget.deadline):
                return self.search_with_tensors()
        except OutOfTime:
            fitting = self.fitting([*self.found, *self.starts])
        if not fitting:
            raise NoFeasiblePlan(f"no placement of {self.problem.name!r} was found within the time limit, though there "
                                 "may be one: give it more time")
        return min(fitting, key=lambda item: item[0])

    def search_with_tensors(self) -> tuple[float, Timetable]:
        """Return the best placement found in which the tensors of one request fit beside the weights.

        Loads know only what is resident. If tensors that are alive for a while do not fit beside it, weights get less
        room where they do not, and so on.
        """
        problem, limit = self.problem, self.problem.capacity
        if not problem.has_lifetimes or not np.isfinite(limit).any():
            return self.search(limit, 1.0).value, self.last_table()
        best = self.search(limit, 0.5)
        table = self.last_table()
        for _ in range(TUNING.max_rounds):
            over = self.lacking(table)
            if not over.any():
                break
            limit = np.where(over > 0, np.minimum(limit - over, problem.resident_bytes(table.device) - 1), limit)
            try:
                best = self.search(limit, 0.5)
            except NoFeasiblePlan:
                break
            table = self.last_table()
        over = self.lacking(table)
        fitting = self.fitting([*self.starts, self.found[-1]])
        if not fitting:
            raise _no_room_for_tensors(problem, table, over)
        if not over.any() and not best.is_proven:
            self.search(limit, 1.0, self.found[-1:])
            fitting += self.fitting(self.found[-1:])
        return min(fitting, key=lambda item: item[0])

    def last_table(self) -> Timetable:
        """Return the timetable of one request with operators in the graph's order, as the last search places them."""
        return make_timetable(self.problem, self.found[-1].device, self.found[-1].order)

    def lacking(self, table: Timetable) -> F64:
        """Return [m] the bytes that do not fit."""
        return np.maximum(table.peak_bytes() - self.problem.capacity * (1 + TOLERANCE), 0.0)

    def fitting(self, found: Iterable[Assignment]) -> list[tuple[float, Timetable]]:
        """Return those that can be used as they are."""
        kept = []
        for item in found:
            value = self.asked.value(item.device[self.problem.first_op])
            if np.isfinite(value):
                table = make_timetable(self.problem, item.device, item.order)
                if (table.peak_bytes() <= self.problem.capacity * (1 + TOLERANCE)).all():
                    kept.append((value, table))
        return kept

    def as_it_is(self, found: Assignment, method: str) -> tuple[float, Timetable]:
        """Return what a named method's placement comes to; raise ``NoFeasiblePlan`` if it cannot be used as asked."""
        value = self.asked.value(found.device[self.problem.first_op])
        if not np.isfinite(value):
            what = " contiguously," if self.asked.contiguous else ""
            raise NoFeasiblePlan(f"{method} does not place {self.problem.name!r}{what} on devices with a way between "
                                 "them: use the method auto, or add links to the cluster file")
        self.bound = average_bound(self.asked)
        return value, make_timetable(self.problem, found.device, found.order)


def _no_room_for_tensors(problem: PlaceProblem, table: Timetable, over: F64) -> NoFeasiblePlan:
    worst = int(np.argmax(over))
    name, missing = problem.device_names[worst], int(np.ceil(over[worst]))
    return NoFeasiblePlan(
        f"no placement of {problem.name!r} was found that fits: its weights do, but not with the tensors that are "
        f"alive at the same time ({missing} bytes are missing on {name!r} in the last one tried, which would hold "
        f"{format_bytes(table.peak_bytes()[worst])}). Try a smaller batch or a device with more memory.",
        missing_bytes=missing, device=name)


def _starts(problem: PlaceProblem, names: Iterable[str], deadline: float | None) -> list[Assignment]:
    """Return what the methods choose, once one has, until the deadline; raise ``NoFeasiblePlan`` if nothing can fit."""
    found: list[Assignment] = []
    misses = []
    try:
        for name in names:
            try:
                with cut_short(deadline if found else None):
                    found.append(METHODS[name](problem))
            except NoFeasiblePlan as miss:
                misses.append(miss)
    except OutOfTime:
        assert found, "nothing is cut short before"
    if not found:
        device = fitting_devices(problem)  # raises where even the weights do not fit
        if len(misses) == 1:
            raise misses[0]
        found.append(Assignment(device=device, order=np.arange(problem.num_ops)))
    return found
