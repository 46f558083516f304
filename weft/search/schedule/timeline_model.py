"""All micro-batches as one constraint problem: starts, pairs, copies and memory of a schedule in whole ticks.

    end(i, n) = start(i, n) + time(i) + sum over its pairs p of p * (joint - time(i))                  (_add_pairs)
    at most one p of a block is 1; if p is 1, both blocks of the pair start together                    (_add_pairs)
    start(j, n) >= end(i, n) + delay                              for every edge i -> j                 (add_order)
    start(i, n+1) >= end(i, n)                                    micro-batches are alike               (add_order)
    no two tasks of a resource overlap; of a pair only the first block is there, as long as both       (add_resources)
    a copy that is made: end of its block <= out, out + time <= in, in + time <= start of what gives back (_add_copies)
    no two copies of a stream overlap; what is away from out to in + time fits the host                (_add_copies)
    sum of the amounts of holds at any time <= limit, on every device                                  (add_memory)

A hold is from the start of ``take`` to the end of ``release``, or to its start where memory is given back then and
something else may run. Where a copy is made, it is from the start of ``take`` to the end of the way out, and from the
start of the way back to ``release``. With copies the order of micro-batches does matter (the one that left may be
needed later), so only the first task of each is in order then.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from ortools.sat.python import cp_model

from weft.model.graph import F64
from weft.search.common.cpsat import Solution
from weft.search.schedule.pairs import find_pairs
from weft.search.schedule.tuning import TUNING
from weft.search.schedule.whole import Hold, WholeProblem

Key = tuple[int, int]
"""(task, micro-batch)"""
Starts = Mapping[Key, cp_model.LinearExprT]


class TimelineModel:
    """Constraints on the starts of so many micro-batches; makes the variables of pairs and copies itself."""

    def __init__(self, model: cp_model.CpModel, whole: WholeProblem, start: Starts, num_microbatches: int,
                 horizon: int) -> None:
        self.model, self.whole, self.start = model, whole, start
        self.num_microbatches, self.horizon = num_microbatches, horizon
        self.end: dict[Key, cp_model.LinearExprT] = {
            key: start[key] + whole.times[key[0]] for key in itertools.product(
                range(whole.num_tasks), range(num_microbatches))}
        self.size: dict[Key, cp_model.IntVar] = {}
        """Of blocks that may be in a pair."""
        self.pairs: dict[tuple[Key, Key], cp_model.IntVar] = {}
        self.is_alone: dict[Key, cp_model.IntVar] = {}
        """Of blocks that may be second in a pair: whether they are not."""
        self.is_complete = True
        """Whether the model has all schedules."""
        self.away: dict[Key, cp_model.IntVar] = {}
        """By copy and micro-batch: whether it is made."""
        self.moves: dict[tuple[int, int, int], cp_model.LinearExprT] = {}
        """By copy, micro-batch and way (0: out, 1: back): its start."""
        if whole.joint:
            self._add_pairs()
        for time, tasks in zip(whole.copy_times, whole.problem.returns, strict=True):
            if not time and not (whole.problem.releases_late and all(whole.times[task] for task in tasks)):
                self.is_complete = False  # it might be back for an instant, which no interval says

    # ---- pairs

    def _add_pairs(self) -> None:
        mine: dict[Key, list[tuple[cp_model.IntVar, int]]] = {}
        second: dict[Key, list[cp_model.IntVar]] = {}
        overlaps, count = self.whole.problem.overlaps, self.num_microbatches
        reach = max(1, TUNING.max_paired // (2 * len(overlaps) * count))
        self.is_complete &= reach >= count - 1
        for item in overlaps:
            joint = self.whole.joint[item.blocks]
            for one, other in itertools.product(range(count), repeat=2):
                if abs(one - other) > reach:
                    continue
                keys = (item.blocks[0], one), (item.blocks[1], other)
                literal = self.pairs[keys] = self.model.new_bool_var("")
                self.model.add(self.start[keys[0]] == self.start[keys[1]]).only_enforce_if(literal)
                for key in keys:
                    mine.setdefault(key, []).append((literal, joint - self.whole.times[key[0]]))
                second.setdefault(keys[1], []).append(literal)
        for key, parts in mine.items():
            time, longest = self.whole.times[key[0]], max(extra for _, extra in parts)
            self.model.add_at_most_one(literal for literal, _ in parts)
            size = self.size[key] = self.model.new_int_var(time, time + longest, "")
            end = self.model.new_int_var(0, self.horizon, "")
            self.model.add(size == time + sum(extra * literal for literal, extra in parts))
            self.model.add(end == self.start[key] + size)
            self.end[key] = end
        for key, literals in second.items():
            alone = self.is_alone[key] = self.model.new_bool_var("")
            self.model.add(alone + sum(literals) == 1)

    # ---- order and resources

    def add_order(self) -> None:
        """Add what waits for what in a micro-batch, and that micro-batches, which are alike, go in order."""
        whole, model = self.whole, self.model
        first = whole.problem.topological[0]
        for index in range(self.num_microbatches):
            for source, target, delay in whole.edges:
                model.add(self.start[target, index] >= self.end[source, index] + delay)
            for task in range(whole.num_tasks):
                if index and (not whole.copy_times or task == first):
                    model.add(self.start[task, index] >= self.end[task, index - 1])

    def add_resources(self) -> None:
        """Add that no two tasks of a resource overlap, and no two copies of a stream."""
        for tasks in self.whole.resource_tasks:
            self.model.add_no_overlap([self._interval((task, index)) for task in tasks
                                       for index in range(self.num_microbatches)])
        if self.whole.copy_times:
            self._add_copies()

    def _interval(self, key: Key) -> cp_model.IntervalVar:
        if key in self.is_alone:
            return self.model.new_optional_interval_var(self.start[key], self.size[key], self.end[key],
                                                        self.is_alone[key], "")
        if key in self.size:
            return self.model.new_interval_var(self.start[key], self.size[key], self.end[key], "")
        return self.model.new_fixed_size_interval_var(self.start[key], self.whole.times[key[0]], "")

    # ---- copies

    def _add_copies(self) -> None:
        whole, model, problem = self.whole, self.model, self.whole.problem
        streams: list[list[cp_model.IntervalVar]] = [[] for _ in problem.device_names]
        kept: list[tuple[cp_model.IntervalVar, int]] = []
        for (copy, item), index in itertools.product(enumerate(problem.copies), range(self.num_microbatches)):
            time, is_away = whole.copy_times[copy], model.new_bool_var("")
            out, back = (model.new_int_var(0, self.horizon, "") for _ in range(2))
            self.away[copy, index] = is_away
            self.moves[copy, index, 0], self.moves[copy, index, 1] = out, back
            model.add(out >= self.end[item.block, index]).only_enforce_if(is_away)
            model.add(back >= out + time).only_enforce_if(is_away)
            for task in problem.returns[copy]:
                model.add(self.start[task, index] >= back + time).only_enforce_if(is_away)
            for start, device in itertools.product((out, back), problem.blocks[item.block].devices):
                streams[device].append(model.new_optional_fixed_size_interval_var(start, time, is_away, ""))
            if whole.host is not None:
                kept.append((model.new_optional_interval_var(out, model.new_int_var(0, self.horizon, ""), back + time,
                                                             is_away, ""), whole.host.amounts[copy]))
        for stream in streams:
            model.add_no_overlap(stream)
        if whole.host is not None:
            model.add_cumulative([interval for interval, _ in kept], [amount for _, amount in kept], whole.host.limit)

    # ---- memory

    def add_memory(self, device: int, *, excess: cp_model.LinearExprT = 0) -> None:
        """Add that what the device holds at any time is at most its limit and ``excess``; it may have no limit."""
        whole, model = self.whole, self.model
        limit = whole.limits[device]
        holds = [hold for hold in whole.holds if hold.device == device]
        if limit is None or not holds:
            return
        before = sum(hold.amount for hold in holds if hold.take is None) * self.num_microbatches
        copies = {item.block: copy for copy, item in enumerate(whole.problem.copies)}
        intervals, amounts = [], []
        for hold, index in itertools.product(holds, range(self.num_microbatches)):
            begin = 0 if hold.take is None else self.start[hold.take, index]
            end = self._released(hold, index)
            copy = None if hold.take is None else copies.get(hold.take)
            if copy is not None:
                is_away, time = self.away[copy, index], whole.copy_times[copy]
                intervals.append(model.new_optional_interval_var(
                    self.moves[copy, index, 1], model.new_int_var(1, self.horizon, ""), end, is_away, ""))
                amounts.append(hold.amount)
                left = model.new_int_var(0, self.horizon, "")
                model.add(left == self.moves[copy, index, 0] + time).only_enforce_if(is_away)
                model.add(left == end).only_enforce_if(~is_away)
                end = left
            intervals.append(model.new_interval_var(begin, model.new_int_var(0, self.horizon, ""), end, ""))
            amounts.append(hold.amount)
        model.add_cumulative(intervals, amounts, limit + before + excess)

    def _released(self, hold: Hold[int], index: int) -> cp_model.LinearExprT:
        """Return when the memory of a hold is free again."""
        if hold.release is None:
            return self.horizon
        key = hold.release, index
        return self.end[key] if self.whole.problem.releases_late else self.start[key]

    # ---- hints and values

    def add_hint(self, rows: F64) -> None:
        """Start the search from these pairs and copies; starts are hinted by whoever made them."""
        tasks = self.whole.num_tasks
        paired = set(find_pairs(self.whole.problem, rows[:tasks], 0.0)) if self.pairs else set()
        for keys, literal in self.pairs.items():
            self.model.add_hint(literal, keys in paired)
        for (copy, index), literal in self.away.items():
            is_away = len(rows) > tasks and not np.isnan(rows[tasks + 2 * copy, index])
            self.model.add_hint(literal, is_away)
            for way in (0, 1) if is_away else ():
                self.model.add_hint(self.moves[copy, index, way], round(float(rows[tasks + 2 * copy + way, index])))

    def read(self, solution: Solution) -> F64:
        """Return the starts of tasks, and of copies if there can be any; NaN where none is made."""
        rows = [[solution.value(self.start[task, index]) for index in range(self.num_microbatches)]
                for task in range(self.whole.num_tasks)]
        moved = [[solution.value(self.moves[copy, index, way]) if solution.value(self.away[copy, index]) else np.nan
                  for index in range(self.num_microbatches)]
                 for copy in range(len(self.whole.copy_times)) for way in (0, 1)]
        return np.asarray([*rows, *moved], dtype=np.float64)
