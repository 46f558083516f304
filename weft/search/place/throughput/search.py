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

Starts are what named methods choose, and the best intervals, one for each device, of the nodes' own order and of many
random ones that keep together what shares tensors (``Orders``). Short annealing runs from a few of them give a first
value (``_Search.start``). It makes the problem smaller (``reduce_problem``). A bound by prices of units follows
(``prices``), which is often the optimum before the placement is found; where it is not, CP-SAT may end the matter
(``exact``). What effort is left goes into rounds: short annealing runs from new orders or from the best
(``_Search.anneal_for``); then CP-SAT divides anew what the fullest device has together with one or two others, all else
staying where it is, as long as that helps (``_Search.divide_for``, ``part_of``). Last comes another attempt at a proof.

``place_stream`` is the way from a placement problem to its result: loads know only what is resident, so it searches
again with less room for weights until the tensors of one request fit beside them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.model.graph import F64, I64, topological
from weft.search.common.budget import Budget, OutOfTime, cut_short
from weft.search.common.cpsat import SECONDS_PER_CONSTRAINT
from weft.search.common.incumbent import Incumbent
from weft.search.place.fit import fitting_devices
from weft.search.place.kernel import pieces
from weft.search.place.methods import METHODS
from weft.search.place.problem import PlaceProblem, starts_of
from weft.search.place.throughput.exact import average_bound, improve_or_prove, model_size, shared_bound
from weft.search.place.throughput.kernel import State, anneal, cut_order, grow_order
from weft.search.place.throughput.model import (
    LoadProblem,
    Reduced,
    blocks_of,
    load_problem,
    merge,
    paired,
    part_of,
    reduce_problem,
)
from weft.search.place.throughput.prices import priced_bound
from weft.search.place.timetable import (
    TOLERANCE,
    Assignment,
    PlaceResult,
    Timetable,
    make_timetable,
    no_room_for_tensors,
    with_room_for_tensors,
)

Kind: TypeAlias = Literal["orders", "levels", "best"]
"""Where annealing begins: at random orders cut into intervals, at groups of units, or at the best placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was chosen for the search, and why. Where no measurement is named, it is a guess that works."""

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
    squarings: tuple[int, ...] = (5, 7)
    """Of loads, for the norms that annealing makes small: p is 32 or 128. On 5 random graphs of 690 to 1,220 operators
    either was the better one on some, by 0.5 to 1.1 %."""
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
    anneal_parts: dict[Kind, float] = field(default_factory=lambda: {"orders": 0.025, "levels": 0.025, "best": 0.1})
    """Parts of the effort in which runs are annealed, in turn, each with dividing anew what it comes to. On
    o-bert_l-6_training rounds of 3 and 5.7 seconds ended at 75.0, of 2.3 and 7.6 at 74.9; of 1 and 2.3 at 71.64, since
    it is the third or fourth start that leads there. On random graphs of 1,000 operators and more, with 16 devices,
    long runs from the best find what many short ones do not."""
    divide_part: float = 0.06
    """Part of the effort in which what a few devices have is divided anew, at most, each time."""
    least_divide_part: float = 0.02
    """That part is halved each time that it has not helped, down to this."""
    divided: tuple[int, ...] = (1, 2)
    """Devices whose units are divided anew with those of the fullest: with one other, most such problems are solved in
    hundredths of a second; on o-bert_l-6_training it is two others that help."""
    divide_s: float = 0.5
    """Effort of one such division at most: those that helped in the runs looked at took less, but for one of 0.8 s."""
    part_s: float = 5e-6
    """Effort of making such a problem, for each unit and reader: its plain Python was measured."""
    bound_part: float = 0.08
    """Part of the effort for a bound by prices, first. Of the public problems six are proven by a twentieth of that,
    once the best placement is found; those of l-resnet50 gain until five seconds."""
    last_bound_part: float = 0.8
    """Of what is left in the end; the rest is for CP-SAT."""
    proof_part: float = 0.15
    """Part of the effort that is left for a proof in the end."""
    fresh_orders: tuple[int, ...] = (10, 100)
    """Orders of which the best is such a beginning, in turn; only the best of very many, and any, were both worse."""
    fresh_heat: tuple[float, ...] = (0.03, 0.06)
    """Starting temperatures of these runs in turn; with 0.01 none of 20 left where it began for long."""
    fresh_cold: float = 1e-4
    """The last temperature of these runs."""
    unit_steps: int = 800
    """Steps of such a run for each unit."""
    least_steps: int = 20_000
    """So many at least."""
    grain: int = 8
    """Groups of units for each device, about, with which runs by levels begin. This and the next three are guesses."""
    part: int = 4
    """A group has at most this part of what one device has."""
    least_fall: float = 0.93
    """More than so many times as many groups as there were units are no further level."""
    levels_heat: tuple[float, ...] = (0.05, 0.1)
    """Starting temperatures of the largest groups in turn."""
    finer_heat: float = 0.002
    """That of smaller ones: of 0.002, 0.005 and 0.01 it left what was found best as it was."""
    max_blocks: int = 600
    """Of an order that is cut: so many units or more become blocks of neighbours, since the cut takes their square."""
    starts_part: float = 0.3
    """Part of a time limit in which the named methods are tried as starts."""


TUNING: Final = Tuning()

# ---- starts -------------------------------------------------------------------------------------------------------


class Orders:
    """Linear orders of the units, each cut into one interval for every device where that is best.

    The first orders are the nodes' own, for a few sequences of the devices. The others are random and keep together
    what shares heavy tensors (``kernel.grow_order``), so few tensors lead out of any interval. ``kernel.cut_order``
    finds the best intervals of an order exactly, but for what transfers occupy. With contiguity orders are topological,
    and blocks of units that depend on each other both ways stay whole; of very many units neighbours are one block.
    """

    def __init__(self, problem: LoadProblem, seed: int) -> None:
        a, count = problem.arrays, problem.num_units
        position = np.full(count, len(a.node_unit))
        np.minimum.at(position, a.node_unit, np.arange(len(a.node_unit)))
        reader = np.repeat(a.node_unit, np.diff(a.source_start))
        if problem.contiguous:
            blocks, follow = blocks_of(a.node_unit[a.sources], reader, count)
            order = topological(follow, [int(position[block].min()) for block in blocks])
            in_order = [blocks[index] for index in order]
        else:
            in_order = list(np.argsort(position, kind="stable")[:, None])
        self.group = np.zeros(count, dtype=np.int64)
        for index, block in enumerate(in_order):
            self.group[block] = index * min(len(in_order), TUNING.max_blocks) // len(in_order)
        self.problem, self.blocks = problem, merge(problem, self.group)
        """The problem, and its blocks, in the order of the nodes."""
        size, steps = self.blocks.num_units, self.group[np.stack([a.node_unit[a.sources], reader], axis=1)]
        steps = np.unique(steps[(steps[:, 0] != steps[:, 1]) & problem.contiguous], axis=0)
        self.follow_start, self.follow = starts_of(steps[:, 0], size), steps[:, 1].copy()
        self.weight = self.blocks.tensor_weights
        self.rng, self.random = np.random.default_rng(seed), np.array([seed * 7919 + 12345], dtype=np.int64)
        num_pins = len(self.blocks.arrays.owner) + len(self.blocks.arrays.readers)
        self.seconds = 1e-5 + 1e-9 * size * (size + num_pins) * (problem.num_devices + 1)
        """CPU seconds that one order takes, about."""

    def placement(self, turn: int) -> I64:
        """Return the devices of the units by another random order."""
        mean = float(self.weight.sum()) / max(1, len(self.weight))
        order = grow_order(self.blocks.arrays, self.weight, self.follow_start, self.follow,
                           mean * TUNING.noise[turn % len(TUNING.noise)], self.random)
        return self.cut(order, self.rng.permutation(self.problem.num_devices))

    def cut(self, order: I64, sequence: I64, *, has_room: bool = False) -> I64:
        """Return the devices of the units by the best intervals of an order, for the devices in this sequence.

        With ``has_room`` memory is left out.
        """
        sizes = self.blocks.unit_bytes * (not has_room)
        return np.asarray(cut_order(self.blocks.arrays, order, sequence, sizes)[self.group], dtype=np.int64)

    def first(self) -> list[I64]:
        """Return the placements by the nodes' order, for a few sequences of the devices, and those on one device."""
        count, fast = self.problem.num_devices, self.fastest_first()
        order = np.arange(self.blocks.num_units)
        return [*(self.cut(order, items) for items in (fast, fast[::-1].copy(), np.arange(count), np.roll(fast, -1))),
                *(np.full(self.problem.num_units, device) for device in range(count))]

    def hopeful(self) -> list[I64]:
        """Return placements that may hold too much, for a search to repair: intervals, and the largest units first."""
        a, sizes = self.problem.arrays, self.problem.unit_bytes
        packed = self.cut(np.arange(self.blocks.num_units), self.fastest_first(), has_room=True)
        device, free = packed.copy(), a.capacity.copy()
        for unit in np.argsort(-sizes, kind="stable").tolist():
            device[unit] = int(np.argmax(np.where(np.isfinite(a.time_s[unit]), free, -np.inf)))
            free[device[unit]] -= sizes[unit]
        return [packed] if self.problem.contiguous else [device, packed]

    def fastest_first(self) -> I64:
        """Return the devices by the time that they would take for everything that they may run."""
        times = self.problem.arrays.time_s
        return np.argsort(np.where(np.isfinite(times), times, 0.0).sum(axis=0), kind="stable")

# ---- the search ---------------------------------------------------------------------------------------------------


def minimise(problem: LoadProblem, *, budget: Budget, seed: int, starts: Sequence[I64] = ()) -> Incumbent[I64]:
    """Return the best devices of the units; none where no placement was found, with an infinite bound if there is none.
    """
    search = _Search(problem, budget, seed)
    best = search.best
    try:
        search.start(starts)
        if best.answer is None:
            search.find_any(0.5 * budget.effort)
        if best.answer is None:
            return best
        effort = budget.effort
        search.bound_priced(TUNING.bound_part * effort)
        search.divide_for(TUNING.divide_part * effort, search.answer)
        search.prove(0.1 * effort)
        left, part = float("inf"), TUNING.divide_part
        for turn in itertools.count():
            if search.is_done or budget.effort < TUNING.proof_part * effort or budget.effort >= left:
                break  # a round of so little effort that nothing begins takes none
            left, kind = budget.effort, search.kinds[turn % len(search.kinds)]
            start = search.anneal_for(TUNING.anneal_parts[kind] * effort, by=kind)
            has_helped = search.divide_for(part * effort, start)
            part = TUNING.divide_part if has_helped else max(TUNING.least_divide_part, part / 2)
        search.bound_priced(TUNING.last_bound_part * budget.effort)
        search.prove(budget.effort)
        search.anneal_for(budget.effort, by="best")
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
        self.priced_value = float("inf")
        self.price: F64 | None = None
        self.work_s = problem.arrays.time_s.min(axis=1) + 1e-300
        self.last: tuple[float, Reduced] | None = None
        self.orders, self.rng = Orders(problem, seed), np.random.default_rng(seed)
        self.kinds: tuple[Kind, ...] = ("orders", "best") if problem.contiguous else ("orders", "levels", "best")

    @property
    def is_done(self) -> bool:
        return self.budget.is_spent or self.best.is_proven

    @property
    def answer(self) -> I64:
        """Return the best placement."""
        assert self.best.answer is not None, "only asked where there is one"
        return self.best.answer

    def offer(self, device: I64) -> None:
        """Take the placement if it is better."""
        self.best.offer(self.problem.value(device), device.astype(np.int64))

    def start(self, starts: Sequence[I64]) -> None:
        """Take the best start, and improve the best few shortly; where none is allowed, look for one."""
        found = {device.tobytes(): device.astype(np.int64) for device in (*starts, *self.orders.first())}
        allowed = [device for device in found.values() if np.isfinite(self.problem.value(device))]
        for device in allowed:
            self.offer(device)
        chosen = sorted(allowed, key=self.problem.value)[:2] or self.orders.hopeful()
        most = TUNING.first_s * self.problem.num_units
        effort = min(0.02 * self.budget.effort, most)
        for device, heat in itertools.product(chosen, TUNING.first_heat):
            self._run(_whole(self.problem), device, effort=effort, heat=heat)
        best_cut = self.cut_orders(TUNING.max_orders, min(TUNING.orders_part * self.budget.effort, most))
        if best_cut is not None:
            for heat in TUNING.first_heat:
                self._run(*best_cut, effort=effort, heat=heat)

    def cut_orders(self, count: int, effort: float) -> tuple[Reduced, I64] | None:
        """Return the best placement of random orders of what the value known leaves, if any is allowed; offer it."""
        reduced = self.reduced(self.answer)[0] if self.best.answer is not None else _whole(self.problem)
        if self.orders.problem is not reduced.problem:
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

    def anneal_for(self, effort: float, *, by: Kind) -> I64:
        """Return the best of some annealing runs from the best placement, or from new ones of this kind."""
        least, found, value = self.budget.effort - effort, self.answer, float("inf")
        while not self.is_done and self.budget.effort > max(least, 0.0) + 0.01:
            if by == "levels":
                device = self.by_levels()
            else:
                turn, kinds = self.num_runs, len(TUNING.fresh_orders)
                is_fresh, left = by == "orders", self.budget.effort - least
                cut = self.cut_orders(TUNING.fresh_orders[turn % kinds], left) if is_fresh else None
                heats, cold = (TUNING.heat, TUNING.cold) if cut is None else (TUNING.fresh_heat, TUNING.fresh_cold)
                reduced, device = cut or self.reduced(self.answer)
                device = self._run(reduced, device, effort=self.budget.effort - least, cold=cold,
                                   heat=heats[turn // kinds % len(heats)],
                                   steps=TUNING.run_steps if cut is None else self.fresh_steps(reduced))
            if self.problem.value(device) < value:
                found, value = device, self.problem.value(device)
        return found

    def fresh_steps(self, reduced: Reduced) -> int:
        """Return the steps of a run from a new placement."""
        return max(TUNING.least_steps, TUNING.unit_steps * reduced.problem.num_units)

    def by_levels(self) -> I64:
        """Return the placement found with random groups of units, of groups of these and so on, the largest first."""
        levels = [self.reduced(self.answer)[0]]
        while levels[-1].problem.num_units > TUNING.grain * self.problem.num_devices:
            group = paired(levels[-1].problem, self.rng, 1 / TUNING.part)
            if group.max() + 1 > TUNING.least_fall * len(group):
                break
            levels.append(Reduced(problem=merge(levels[-1].problem, group), group=group[levels[-1].group]))
        turn, orders = self.num_runs, Orders(levels[-1].problem, self.seed + self.num_runs)
        device = min((orders.placement(item) for item in range(TUNING.fresh_orders[0])), key=levels[-1].problem.value)
        device = levels[-1].expand(device)
        for index, reduced in enumerate(reversed(levels)):
            first = np.unique(reduced.group, return_index=True)[1]
            heat = TUNING.finer_heat if index else TUNING.levels_heat[turn % len(TUNING.levels_heat)]
            device = self._run(reduced, device[first], effort=self.budget.effort, heat=heat, cold=TUNING.fresh_cold,
                               steps=self.fresh_steps(reduced))
        return device

    def divide_for(self, effort: float, device: I64) -> bool:
        """Let CP-SAT divide anew what a few devices have, the fullest among them, again and again, while that helps.

        Return whether it did.
        """
        least, tried, has_helped = self.budget.effort - effort, set[tuple[int, ...]](), False
        if self.is_done:
            return False
        reduced, device = self.reduced(device)
        problem, value = reduced.problem, reduced.problem.value(device)
        while not self.is_done and self.budget.effort > max(least, 0.0) + 0.01:
            fullest, *others = problem.fullest_first(device)
            chosen = next((items for size in TUNING.divided for more in itertools.combinations(others[::-1], size)
                           if (items := (fullest, *more)) not in tried), None)
            if chosen is None:
                break
            tried.add(chosen)
            part, home = part_of(problem, device, chosen)
            self.budget.effort -= TUNING.part_s * (problem.num_units + len(problem.arrays.readers))
            found, _ = improve_or_prove(part.problem, home, budget=self.budget, seed=self.seed,
                                        effort=min(TUNING.divide_s, self.budget.effort - least))
            if found is not None and problem.value(part.expand(found)) < value * (1 - TUNING.equal):
                device, value = part.expand(found), problem.value(part.expand(found))
                self.offer(reduced.expand(device))
                tried.clear()
                has_helped = True
        return has_helped

    def _run(self, reduced: Reduced, device: I64, *, effort: float, heat: float, cold: float = TUNING.cold,
             steps: int = TUNING.run_steps) -> I64:
        """Return the best of one run of annealing, in pieces, between which the clock and Ctrl-C are looked at."""
        best, least = device, float("inf")
        if self.is_done:
            return reduced.expand(best)
        problem = reduced.problem
        seconds, state = seconds_per_step(problem), State.empty(problem.arrays, device)
        scale = min(max(float(problem.loads(device).max(initial=0.0)), 1e-300), self.best.value)
        self.num_runs += 1
        squarings = int(self.rng.choice(TUNING.squarings))
        for piece in pieces(min(steps, max(1000, int(effort / seconds))), size=TUNING.piece_s / seconds,
                            hot=heat * scale, fall=cold / heat, is_done=lambda: self.is_done):
            found, value = anneal(problem.arrays, state, piece.steps, piece.hot, piece.cold,
                                  (1000 * self.seed + self.num_runs) * 1000 + piece.number, problem.contiguous,
                                  squarings)
            self.budget.effort -= piece.steps * seconds
            if value < least:
                best, least = found, value
                self.offer(reduced.expand(found))
        return reduced.expand(best if np.isfinite(least) else state.device)

    def find_any(self, effort: float) -> None:
        """Let CP-SAT look for any placement; the bound is infinite if there is none."""
        if not self.is_done:
            device, bound = improve_or_prove(self.problem, None, budget=self.budget, effort=effort, seed=self.seed)
            if device is not None:
                self.offer(device)
            elif np.isinf(bound):
                self.best.raise_bound(bound)

    def reduced(self, device: I64) -> tuple[Reduced, I64]:
        """Return the problem made smaller by the value of a placement, and the placement in it."""
        value = self.problem.value(device)
        if self.last is None or self.last[0] != value:
            self.last = (value, reduce_problem(self.problem, value))
        reduced = self.last[1]
        first = np.full(reduced.problem.num_units, -1, dtype=np.int64)
        for unit in reversed(range(self.problem.num_units)):
            if self.problem.arrays.time_s[unit].max() > 0 or first[reduced.group[unit]] < 0:
                first[reduced.group[unit]] = unit
        if not reduced.problem.value(device[first]) <= value * (1 + TUNING.equal):
            return _whole(self.problem), device
        return reduced, device[first]

    def prove(self, effort: float) -> None:
        """Let CP-SAT improve the best placement or raise the bound, if the value is new to it."""
        if self.is_done or self.best.value >= self.proof_value:
            return
        self.proof_value = self.best.value
        reduced, device = self.reduced(self.answer)
        if SECONDS_PER_CONSTRAINT * model_size(reduced.problem) > effort / 2:
            return  # to read the model in takes it all
        found, bound = improve_or_prove(reduced.problem, device, budget=self.budget, effort=effort, seed=self.seed)
        self.proof_bound = min(bound, self.best.value)
        self.best.raise_bound(bound)
        if found is not None:
            self.offer(reduced.expand(found))

    def bound_priced(self, effort: float) -> None:
        """Raise the bound by a device's share of the prices of units; where the graph is wide, by that of work, too."""
        if self.is_done or self.best.value >= self.priced_value:
            return
        reduced, _ = self.reduced(self.answer)
        price = None if self.price is None else np.bincount(reduced.group, weights=self.price).astype(np.float64)
        found = priced_bound(reduced.problem, self.best.value, low=self.best.bound, budget=self.budget, effort=effort,
                             price=price)
        if found is not None:
            self.best.raise_bound(found.bound)
            time_s = np.bincount(reduced.group, weights=self.work_s)
            self.price = (found.price / time_s)[reduced.group] * self.work_s
            self.priced_value = self.best.value if found.is_done else self.priced_value
        if (found is None or not found.is_exact) and not self.is_done:
            self.best.raise_bound(shared_bound(reduced.problem, self.best.value, budget=self.budget, effort=effort,
                                               seed=self.seed))


def _whole(problem: LoadProblem) -> Reduced:
    """Return the problem as it is."""
    return Reduced(problem=problem, group=np.arange(problem.num_units, dtype=np.int64))


def seconds_per_step(problem: LoadProblem) -> float:
    """Return about how long one annealing step takes, so that effort is spent alike on any machine."""
    a = problem.arrays
    degree = (len(a.owner) + len(a.readers)) / max(1, problem.num_units)
    contiguity = 2e-9 * (len(a.node_unit) + len(a.sources)) if problem.contiguous else 0.0
    return 1.4e-6 + 2e-8 * (a.num_cores + a.num_resources) + 4e-9 * degree * problem.num_devices + contiguity


def warm_up(problem: LoadProblem) -> None:
    """Import and compile everything that a search uses, with a problem that is very small."""
    where = np.zeros(problem.num_units, dtype=np.int64)
    problem.value(where)
    average_bound(problem)
    anneal(problem.arrays, State.empty(problem.arrays, where), 1, 1.0, 1.0, 0, False, 0)
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
        self.problem, self.budget, self.seed = problem, budget, seed
        self.asked = load_problem(problem, contiguous=contiguous)
        self.found = list(starts)
        self.bound = problem.work_bound()
        """Once there is a search: that of the first, in which weights had all the room."""
        self.searched: list[tuple[F64, bool]] = []
        """The memory for weights in each search, and whether its best is proven."""

    def search(self, capacity: F64, share: float) -> Assignment:
        """Search with so much memory for weights and so much of the effort."""
        with self.budget.without((1 - share) * self.budget.effort):
            best = solve_throughput(replace(self.problem, capacity=capacity), contiguous=self.asked.contiguous,
                                    budget=self.budget, seed=self.seed, starts=[start.device for start in self.found])
        assert best.answer is not None, "else it raises"
        if not self.searched:
            self.bound = best.bound
        self.searched.append((capacity, best.is_proven))
        self.found.append(Assignment(device=best.answer, order=np.arange(self.problem.num_ops)))
        return self.found[-1]

    def run(self) -> tuple[float, Timetable]:
        """Return the best of what the searches find and of the starts, also where the deadline cuts a search."""
        problem, missed = self.problem, None
        counts_tensors = problem.has_lifetimes and bool(np.isfinite(problem.capacity).any())
        try:
            with cut_short(self.budget.deadline):
                share = 0.5 if counts_tensors else 1.0
                with_room_for_tensors(problem, lambda limited: self.search(limited.capacity, share))
                capacity, is_proven = self.searched[-1]
                if counts_tensors and not is_proven:
                    self.search(capacity, 1.0)
        except OutOfTime:
            missed = NoFeasiblePlan(f"no placement of {problem.name!r} was found within the time limit, though there "
                                    "may be one: give it more time")
        except NoFeasiblePlan as miss:
            if not self.searched:
                raise
            missed = no_room_for_tensors(problem, miss)
        fitting = self.fitting()
        if not fitting:
            assert missed is not None, "what was found last has room for its tensors"
            raise missed
        return min(fitting, key=lambda item: item[0])

    def fitting(self) -> list[tuple[float, Timetable]]:
        """Return what was found that can be used as it is."""
        kept = []
        for item in self.found:
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
