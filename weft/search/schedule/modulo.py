"""The steady state as one constraint problem, for a trial period P: blocks, pairs and copies round the clock.

    start(i, k) = offset(i, k) + P * lap(i, k)         0 <= offset < P, for task i of each of K micro-batches
    start(j, k) >= start(i, k) + length(i, k) + delay                 for every edge i -> j                 (_add_edges)
    on every resource, offsets do not overlap round the clock; those of a pair are equal                 (_add_overlaps)
    what a device holds when x starts = sum over holds (take a, release b) on it of
        amount * (lap(b) - lap(a) + [a is not after x] - [b is before x])   <=  limit                      (_add_memory)
    sum over holds of amount * (end of b - start of a)  <=  limit * P     (implied; makes proofs quick)    (_add_memory)

What a copy takes away is, at any time, amount * (ways out that have ended - ways back that have begun), counted in the
same way; a copy that is not made takes no time and ends where it begins. Where copies can be made, what a device holds
counts when a block that takes, or a way back, starts, and releases count where they end (``_add_moved_memory``); what
the host keeps counts when a way out starts (``_add_host``).

Micro-batches are interchangeable, so copies of one task are in order of k and within one period of each other
(``_add_order_of_copies``). With copies to the host that may leave out something, so nothing is proven then.
"""

from __future__ import annotations

import itertools
from random import Random
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64
from weft.search.common.cpsat import Solution
from weft.search.schedule.whole import HostMemory, WholeProblem

Key = tuple[int, int]
"""(task, micro-batch of the period)"""


EventKey = tuple[str, int, int]
"""What happens to a task (``start``, ``end``) or to a copy (``out`` to ``gone``, ``back`` to ``home``), and k."""


class _Event(NamedTuple):
    """A moment that comes once per period: at ``offset`` in lap ``lap``."""

    offset: cp_model.LinearExprT
    lap: cp_model.LinearExprT


class ModuloModel:
    """Variables and constraints of one trial period; see the module's docstring.

    ``is_ordered`` has a literal for the order of every two tasks of a resource, and all that is implied: impossible
    periods are excluded sooner. Without them possible ones are found sooner.
    """

    def __init__(self, whole: WholeProblem, period: int, number: int, *, is_ordered: bool = True) -> None:
        self.whole, self.period, self.number, self.is_ordered = whole, period, number, is_ordered
        self.model = cp_model.CpModel()
        longest = max((whole.times[a] + delay for a, _, delay in whole.edges), default=0)
        # Tasks further apart than this could be moved together by whole periods without harm.
        self.max_lap = max_lap = whole.num_tasks * number * (1 + longest // period) + 2
        self.keys: list[Key] = list(itertools.product(range(whole.num_tasks), range(number)))
        self.offset = {key: self.model.new_int_var(0, period - 1, "") for key in self.keys}
        self.lap = {key: self.model.new_int_var(0, max_lap, "") for key in self.keys}
        self.start = {key: self.offset[key] + period * self.lap[key] for key in self.keys}
        self.size: dict[Key, cp_model.LinearExprT] = {key: whole.times[key[0]] for key in self.keys}
        self.is_alone: dict[Key, cp_model.LiteralT] = {}
        """Of blocks that may be second in a pair: whether they are not."""
        self.away: dict[Key, cp_model.IntVar] = {}
        """By copy and micro-batch: whether it is made."""
        self.events: dict[EventKey, _Event] = {}
        self.not_after: dict[tuple[EventKey, EventKey], cp_model.LiteralT] = {}
        if whole.joint:
            self._add_pairs()
        self.literals: dict[tuple[Key, Key], cp_model.LiteralT] = {}
        first = self.whole.problem.topological[0]
        self.model.add(self.offset[first, 0] == 0)
        self._add_edges()
        self._add_order_of_copies()
        if is_ordered:
            self._add_lags()
        if whole.copy_times:
            self._add_copies()
        for resource, tasks in enumerate(self.whole.problem.resource_tasks):
            keys = list(itertools.product(tasks, range(self.number)))
            self._add_overlaps(keys)
            if resource < self.whole.problem.num_devices and self.whole.limits[resource] is not None:
                self._add_memory(resource, keys)
        if whole.host is not None:
            self._add_host(whole.host)

    def minimize_latency(self, hint: F64) -> None:
        """Minimise the time from the first start to the last end of a micro-batch, beginning with these starts."""
        laps = np.floor(hint / self.period)
        for task, k in self.keys:
            self.model.add_hint(self.lap[task, k], int(laps[task, k]))
            self.model.add_hint(self.offset[task, k], round(float(hint[task, k] - laps[task, k] * self.period)))
        latency = self.model.new_int_var(0, round(float(hint.max() - hint.min())) + max(self.whole.times), "")
        begin = self.model.new_int_var(0, self.period * self.max_lap, "")
        for task, k in self.keys:
            shift = k * self.period // self.number
            self.model.add(begin <= self.start[task, k] - shift + self.period)
            self.model.add(self.start[task, k] + self.whole.times[task] - shift + self.period <= begin + latency)
        self.model.minimize(latency)

    def minimize_weighted(self, rng: Random) -> None:
        """Minimise a random sum of starts."""
        self.model.minimize(sum(rng.randint(0, 3) * self.start[key] for key in self.keys))

    def read(self, solution: Solution) -> F64:
        """Return the starts [tasks, K] of the solution, below them those of copies if there can be any."""
        rows = [[solution.value(self.start[task, k]) for k in range(self.number)]
                for task in range(self.whole.num_tasks)]
        moved = [[self.period * solution.value(event.lap) + solution.value(event.offset)
                  if solution.value(self.away[copy, k]) else np.nan
                  for k in range(self.number) for event in (self.events[way, copy, k],)]
                 for copy in range(len(self.whole.copy_times)) for way in ("out", "back")]
        return np.asarray([*rows, *moved], dtype=np.float64)

    def _add_pairs(self) -> None:
        """Let blocks of overlaps share an offset, each with one other at most."""
        model = self.model
        mine: dict[Key, list[tuple[cp_model.IntVar, int]]] = {}
        second: dict[Key, list[cp_model.IntVar]] = {}
        for item in self.whole.problem.overlaps:
            joint = self.whole.joint[item.blocks]
            for keys in itertools.product(*(itertools.product((block,), range(self.number)) for block in item.blocks)):
                literal = model.new_bool_var("")
                model.add(self.offset[keys[0]] == self.offset[keys[1]]).only_enforce_if(literal)
                second.setdefault(keys[1], []).append(literal)
                for key in keys:
                    mine.setdefault(key, []).append((literal, joint - self.whole.times[key[0]]))
        for key, parts in mine.items():
            time = self.whole.times[key[0]]
            model.add_at_most_one(literal for literal, _ in parts)
            size = self.size[key] = model.new_int_var(time, time + max(extra for _, extra in parts), "")
            model.add(size == time + sum(extra * literal for literal, extra in parts))
        for key, literals in second.items():
            alone = self.is_alone[key] = model.new_bool_var("")
            model.add(alone + sum(literals) == 1)

    def _add_edges(self) -> None:
        for (source, target, delay), k in itertools.product(self.whole.edges, range(self.number)):
            self.model.add(self.start[target, k] >= self.start[source, k] + self.size[source, k] + delay)

    def _add_order_of_copies(self) -> None:
        for task in range(self.whole.num_tasks) if self.number > 1 else ():
            last = self.number - 1
            for k in range(last):
                self.model.add(self.start[task, k + 1] >= self.start[task, k] + self.size[task, k])
            self.model.add(self.start[task, 0] + self.period >= self.start[task, last] + self.size[task, last])

    def _add_overlaps(self, keys: list[Key]) -> None:
        """Forbid overlap round the clock: as a whole, and where wanted for each pair, by the literal of its order."""
        model, size = self.model, self.size
        for one, other in itertools.combinations(keys, 2) if self.is_ordered else ():
            if (one, other) in self.literals or (one[0], other[0]) in self.whole.joint:
                continue
            literal = model.new_bool_var("")
            self.literals[one, other], self.literals[other, one] = literal, ~literal
            for early, late, holds in ((one, other, literal), (other, one, ~literal)):
                model.add(self.offset[late] >= self.offset[early] + size[early]).only_enforce_if(holds)
                model.add(self.offset[early] + self.period >= self.offset[late] + size[late]).only_enforce_if(holds)
        model.add_no_overlap([self._interval(key, lap) for key in keys for lap in range(2)])

    def _interval(self, key: Key, lap: int) -> cp_model.IntervalVar:
        start, size = self.offset[key] + lap * self.period, self.size[key]
        if isinstance(size, int):
            return self.model.new_fixed_size_interval_var(start, size, "")
        end = self.model.new_int_var(0, 3 * self.period, "")
        self.model.add(end == start + size)
        if key in self.is_alone:
            return self.model.new_optional_interval_var(start, size, end, self.is_alone[key], "")
        return self.model.new_interval_var(start, size, end, "")

    def _is_before(self, one: Key, other: Key) -> cp_model.LiteralT:
        """Return the literal that says that ``one`` starts earlier on the clock."""
        literal = self.literals.get((one, other))
        if literal is None:
            literal = self.literals[one, other] = self.model.new_bool_var("")
            self.model.add(self.offset[one] < self.offset[other]).only_enforce_if(literal)
            self.model.add(self.offset[one] >= self.offset[other]).only_enforce_if(~literal)
        return literal

    def _add_memory(self, device: int, keys: list[Key]) -> None:
        limit = self.whole.limits[device]
        assert limit is not None
        holds = [hold for hold in self.whole.holds if hold.device == device]
        amounts: dict[int, int] = {}
        for hold in holds:
            if hold.take is not None:
                amounts[hold.take] = amounts.get(hold.take, 0) + hold.amount
            if hold.release is not None:
                amounts[hold.release] = amounts.get(hold.release, 0) - hold.amount
        total, largest = sum(amounts.values()), max(amounts, key=lambda task: (abs(amounts[task]), task), default=0)
        if abs(total) > 1e-6 * abs(amounts.get(largest, 0)):  # it falls with every micro-batch: there will be room
            return
        if total:  # amounts were rounded
            amounts[largest] -= total
        changing = [key for key in keys if amounts.get(key[0])]
        if device in self.whole.problem.copied:
            self._add_moved_memory(device, limit, {key: amounts[key[0]] for key in changing})
            return
        base = sum(-amounts[key[0]] * self.lap[key] for key in changing)
        for key in changing:
            if amounts[key[0]] > 0:
                earlier = sum(amounts[other[0]] * self._is_counted(other, key, amounts[other[0]])
                              for other in changing if other != key)
                self.model.add(base + amounts[key[0]] + earlier <= limit)
        if self.is_ordered and device in self.whole.balanced:
            late = self.whole.problem.releases_late
            held = sum(hold.amount * (self.start[hold.release, k] + (self.whole.times[hold.release] if late else 0)
                                      - self.start[hold.take, k])
                       for hold in holds for k in range(self.number)
                       if hold.take is not None and hold.release is not None)
            self.model.add(held <= limit * self.period)

    def _is_counted(self, one: Key, other: Key, amount: int) -> cp_model.LiteralT:
        """Return the literal that says that ``one`` has changed memory when ``other`` starts; they may be a pair."""
        if (one[0], other[0]) not in self.whole.joint or (amount < 0 and self.whole.problem.free_at == "end"):
            return self._is_before(one, other)
        return ~self._is_before(other, one)

    # ---- copies to the host

    def _add_copies(self) -> None:
        """Add both ways of every copy: when they run, and that a stream makes one at a time."""
        whole, model, problem = self.whole, self.model, self.whole.problem
        streams: list[list[cp_model.IntervalVar]] = [[] for _ in problem.device_names]
        for (copy, item), k in itertools.product(enumerate(problem.copies), range(self.number)):
            time, is_away = whole.copy_times[copy], model.new_bool_var("")
            self.away[copy, k] = is_away
            out, back = (self._new_event((way, copy, k)) for way in ("out", "back"))
            gone = self._moved(("gone", copy, k), out, time * is_away)
            home = self._moved(("home", copy, k), back, time * is_away)
            model.add(self._at(out) >= self.start[item.block, k] + self.size[item.block, k]).only_enforce_if(is_away)
            model.add(self._at(back) >= self._at(gone)).only_enforce_if(is_away)
            model.add(back.offset == gone.offset).only_enforce_if(~is_away)
            model.add(back.lap == gone.lap).only_enforce_if(~is_away)
            for task in problem.returns[copy]:
                model.add(self.start[task, k] >= self._at(home)).only_enforce_if(is_away)
            for event, lap, device in itertools.product((out, back), range(2), problem.blocks[item.block].devices):
                streams[device].append(model.new_optional_fixed_size_interval_var(
                    event.offset + lap * self.period, time, is_away, ""))
        for stream in streams:
            model.add_no_overlap(stream)

    def _new_event(self, key: EventKey) -> _Event:
        self.events[key] = _Event(self.model.new_int_var(0, self.period - 1, ""),
                                  self.model.new_int_var(0, self.max_lap, ""))
        return self.events[key]

    def _at(self, event: _Event) -> cp_model.LinearExprT:
        return event.offset + self.period * event.lap

    def _moved(self, key: EventKey, event: _Event, time: cp_model.LinearExprT) -> _Event:
        """Return the event that comes so much later."""
        later = self._new_event(key)
        self.model.add(self._at(later) == self._at(event) + time)
        return later

    def _change(self, key: Key, amount: int) -> EventKey:
        """Return when a block changes memory."""
        at_end = amount < 0 and self.whole.problem.free_at == "end"
        name: EventKey = ("end" if at_end else "start", *key)
        if name not in self.events:
            self.events["start", *key] = start = _Event(self.offset[key], self.lap[key])
            if at_end:
                self._moved(name, start, self.size[key])
        return name

    def _count(self, one: EventKey, other: EventKey) -> cp_model.LinearExprT:
        """Return how many micro-batches have come to ``one`` when ``other`` happens, up to a common number."""
        if one == other:
            return 1 - self.events[one].lap
        if (one, other) not in self.not_after:
            literal = self.not_after[one, other] = self.model.new_bool_var("")
            early, late = self.events[one].offset, self.events[other].offset
            self.model.add(early <= late).only_enforce_if(literal)
            self.model.add(early > late).only_enforce_if(~literal)
        return self.not_after[one, other] - self.events[one].lap

    def _add_moved_memory(self, device: int, limit: int, amounts: dict[Key, int]) -> None:
        """Add what the device holds whenever something takes memory of it: a block, or a copy that comes back."""
        changes = {self._change(key, amount): amount for key, amount in amounts.items()}
        mine = {copy: sum(hold.amount for hold in self.whole.holds if hold.device == device and hold.take == item.block)
                for copy, item in enumerate(self.whole.problem.copies)}
        moves = [(copy, k) for copy, k in self.away if mine[copy]]
        for copy, k in moves:
            changes["gone", copy, k], changes["back", copy, k] = -mine[copy], mine[copy]
        for event, amount in changes.items():
            if amount > 0:
                held = sum(change * self._count(other, event) for other, change in changes.items())
                constraint = self.model.add(held <= limit)
                if event[0] == "back":
                    constraint.only_enforce_if(self.away[event[1:]])

    def _add_host(self, host: HostMemory) -> None:
        """Add what the host keeps whenever a copy leaves for it."""
        for copy, k in self.away:
            kept = sum(host.amounts[other] * (self._count(("out", other, n), ("out", copy, k))
                                              - self._count(("home", other, n), ("out", copy, k)))
                       for other, n in self.away)
            self.model.add(kept <= host.limit).only_enforce_if(self.away[copy, k])

    def _add_lags(self) -> None:
        """Add what follows from the edges: a hold is at least as long as the longest path from take to release."""
        pairs = sorted({(hold.take, hold.release) for hold in self.whole.holds
                        if hold.take is not None and hold.release is not None})
        for take, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            lags = self.whole.lags_from(take)
            for (_, release), k in itertools.product(group, range(self.number)):
                lag = lags[release]
                assert lag is not None, "a release depends on its take"
                self.model.add(self.start[release, k] >= self.start[take, k] + lag)
