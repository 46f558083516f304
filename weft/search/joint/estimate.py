"""How long a step takes with a setting, by prefix sums alone: cuts into stages that fit, and the time of the pipeline.

With ``F_s`` and ``B_s`` the times of stage ``s`` for one micro-batch (of the slowest tp group; ``B`` with the second
forward where it recomputes), ``D_d`` their sum over the stages of mesh ``d`` and ``v`` stages on each of ``p`` meshes,

    step = m max(D, C) + (sum(D) - max(D)) / v + sum(2 c_s) + max over stages of (exchange that is not hidden + update)

where ``c_s`` is the time of the transfers behind stage ``s`` and ``C`` the most that one mesh sends. Cuts make
``max(D)`` as small as possible (bisection; each stage in turn takes as much as the trial time and its memory allow,
which leaves least for the rest; then also with stages somewhat shorter where less is to be sent). The estimate ranks
settings; plans made of the best are simulated.

The time of a pipeline by its longest path: every forward and backward of every stage, in the order of the schedule.

For clusters too large to simulate every device. Replicas of a stage are alike, so one pipeline stands for all; messages
take their time beside the computes, without waiting for each other.
"""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cost.collectives import Line
from weft.cost.op_classes import op_classes
from weft.model.graph import F64, I64
from weft.plan.orders import HELD, Order
from weft.plan.plan import split_samples
from weft.search.common.problem import fair_samples, pipeline_order
from weft.search.deploy.splits import TpGroup
from weft.search.joint.chain import Chain, Load
from weft.search.joint.cut import Reach, shortest_longest
from weft.search.joint.layouts import Setting, StageMesh
from weft.search.joint.tuning import TUNING
from weft.simulate.exchange_time import MAX_EXCHANGE, TYPICAL_BYTES, exchange_limits, large_reduce_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Where a setting cuts the model, and how long a step is said to take."""

    setting: Setting
    cuts: tuple[int, ...]
    """Places of the chain: stage ``i`` goes from ``cuts[i]`` to ``cuts[i + 1]``."""
    step_time_s: float
    pipeline_s: float
    exchange_s: float
    """Not hidden, with the update."""


class Estimator:
    """Estimates settings for one model and cluster."""

    def __init__(self, chain: Chain, contexts: Mapping[int, Estimator] = MappingProxyType({})) -> None:
        """``contexts`` estimate the settings in which so many devices divide the sequence."""
        self.chain, self.problem, self.contexts = chain, chain.problem, contexts
        self._exchanges: dict[tuple[frozenset[tuple[int, int, float]], int, int], Line] = {}
        self._segments: dict[tuple[tuple[int, int], float, Load, int, int], tuple[list[int], float]] = {}
        self.members, self._sorts = cache(self._find_members), cache(self._find_sorts)
        self._inside, self._host_meshes = cache(self._find_inside), cache(self._find_host_meshes)
        self._at_once, self._ways_out = cache(self._find_at_once), cache(self._find_ways_out)
        self._listed = cache(self._find_listed)
        self._ends, self._first_alike = cache(self._find_ends), dict[tuple[int, int], TpGroup]()

    def of(self, setting: Setting) -> Estimator:
        """Return what estimates the setting."""
        return self.contexts.get(setting.cp, self)

    def for_batch(self, batch: int) -> Estimator:
        """Return an estimator for another batch; what is known of the model is shared."""
        chain = copy.copy(self.chain)
        chain.problem = replace(self.problem, options=replace(self.problem.options, batch=batch, microbatches=None))
        return Estimator(chain)

    def counts(self, mesh: StageMesh, size: int) -> tuple[int, ...] | None:
        """Return the samples of each tp group by speed; None where one would have none."""
        if size < len(mesh.tp_groups):
            return None
        if len(self._sorts(mesh)) == 1:
            counts = split_samples(size, (1.0,) * len(mesh.tp_groups))
        else:
            counts = fair_samples(size, len(mesh.tp_groups), lambda member, samples: sum(
                float(column[-1]) for column in self.chain.passes(mesh.tp_groups[member], samples)))
        return counts if min(counts) > 0 else None

    def _find_members(self, mesh: StageMesh, size: int) -> tuple[tuple[TpGroup, int], ...]:
        """Return a tp group of each sort with its number of samples; none where a tp group would have no samples."""
        if len(self._sorts(mesh)) == 1:
            even, more = divmod(size, len(mesh.tp_groups))
            return tuple((mesh.tp_groups[0], count) for count in sorted({even + (more > 0), even})) if even else ()
        table = {(*self.chain.figures_key(tp_group), self.chain.capacity(tp_group), count): (tp_group, count)
                 for tp_group, count in zip(mesh.tp_groups, self.counts(mesh, size) or (), strict=False)}
        return tuple(table.values())

    def _find_sorts(self, mesh: StageMesh) -> frozenset[tuple[int, int, float]]:
        """Return what tp groups of the mesh differ in."""
        return frozenset((*self.chain.figures_key(tp_group), self.chain.capacity(tp_group))
                         for tp_group in mesh.tp_groups)

    def bound(self, setting: Setting) -> float:
        """Return seconds that no cuts for this setting can beat, as an even pipeline that sends nothing would take.

        Infinite where a tp group would have no samples.
        """
        size = self.problem.options.batch // setting.microbatches
        rate = 0.0
        for mesh in setting.layout:
            if not self.members(mesh, size):
                return float("inf")
            rate += 1.0 / max(float(self._times(mesh, size, recompute=setting.recompute)[-1]), 1e-12)
        fill = (len(setting.layout) - 1) / setting.chunks
        return (setting.microbatches + fill) / rate

    def __call__(self, setting: Setting) -> Estimate:
        """Return the estimate; raise ``NoFeasiblePlan`` where the model does not fit or cannot be cut so often."""
        size, num_stages = self.problem.options.batch // setting.microbatches, len(setting.mesh_of)
        if num_stages >= self.chain.num_places:
            raise NoFeasiblePlan(f"the model has {self.chain.num_places - 1} pieces, too few for {num_stages} stages")
        if not all(self.members(mesh, size) for mesh in setting.layout):
            raise NoFeasiblePlan(f"a micro-batch of {size} has too few samples for all replicas")
        need, have = self._least_bytes(setting, size)
        if need > have:
            raise self._too_large(setting, size)
        of_mesh = [self._times(mesh, size, recompute=setting.recompute) for mesh in setting.layout]
        times = [of_mesh[mesh] for mesh in setting.mesh_of]
        reach = [self._limits(setting, stage, size) for stage in range(num_stages)]
        found = [cuts for slack in TUNING.slacks
                 for cuts in shortest_longest(times, reach, self.chain.crossing, slack=slack)]
        judged = sorted((self._judge(setting, cuts, times, size) for cuts in found), key=lambda item: item.step_time_s)
        best = next((item for item in judged if self._fit_together(setting, item.cuts, size)), None)
        if best is None:
            raise self._too_large(setting, size)
        return best

    def by_path(self, estimate: Estimate) -> Estimate:
        """Return the estimate with the pipeline's time by its longest path."""
        setting, cuts = estimate.setting, estimate.cuts
        size = self.problem.options.batch // setting.microbatches
        forward, backward, hops = [], [], []
        for stage, (first, last) in enumerate(itertools.pairwise(cuts)):
            mesh, after = (setting.layout[index % len(setting.layout)] for index in (stage, stage + 1))
            ahead, whole = (self._times(mesh, size, recompute=setting.recompute, only_forward=flag)
                            for flag in (True, False))
            forward.append(float(ahead[last] - ahead[first]))
            backward.append(float(whole[last] - whole[first]) - forward[-1])
            hops.append(self._hop(mesh, after, self._bytes_at(mesh, after, last, size)))
        order = pipeline_order(len(setting.layout), setting.chunks, setting.microbatches,
                               training=self.problem.is_training)
        pipeline_s = pipeline_seconds(forward, backward, hops, order)
        return replace(estimate, pipeline_s=pipeline_s, step_time_s=pipeline_s + estimate.exchange_s)

    def _times(self, mesh: StageMesh, size: int, *, recompute: bool, only_forward: bool = False) -> F64:
        """Return the seconds of forward and backward up to each place on the slowest tp group."""
        tables = []
        for tp_group, count in self.members(mesh, size):
            forward, backward = self.chain.passes(tp_group, count)
            again = forward if recompute and self.problem.is_training else 0.0
            tables.append(forward if only_forward else forward + backward + again)
        return max(tables, key=lambda table: float(table[-1]))

    def in_flight(self, setting: Setting, stage: int) -> float:
        """Return for how many micro-batches a stage keeps activations at once."""
        if not self.problem.is_training or setting.is_tight:
            return 1.0
        if setting.chunks == 1:
            return min(setting.microbatches, len(setting.layout) - stage)
        if setting.is_v:
            return turned_in_flight(setting)
        return most_in_flight(len(setting.layout), setting.chunks, setting.microbatches)[setting.mesh_of[stage]]

    def _fit_together(self, setting: Setting, cuts: Sequence[int], size: int) -> bool:
        """Return whether the stages of each mesh fit together, where each was given its part of the memory.

        They keep activations of different numbers of micro-batches, the first stages those of more, and one with more
        to do than the others needs all its room while it is at work.
        """
        training = self.problem.is_training
        for number, mesh in enumerate(setting.layout) if setting.chunks > 1 and training else ():
            pieces = [cuts[stage:stage + 2] for stage, other in enumerate(setting.mesh_of) if other == number]
            if setting.recompute:
                pieces = [self.segments(setting, number, first, last) for first, last in pieces]
            held = np.full((1, 2), turned_in_flight(setting)) if setting.is_v else held_by_mesh(
                len(setting.layout), setting.chunks, setting.microbatches)[number]
            for tp_group, count in self.members(mesh, size):
                loads = (replace(self.load(setting, number, count), in_flight=in_flight, chunks=chunks)
                         for in_flight, chunks in ((0.0, math.inf), (1.0, math.inf), (1.0, 1.0)))
                none, one, working = (np.array([self.chain.segmented_bytes(tp_group, ends, load) for ends in pieces])
                                      for load in loads)
                if none.sum() + (held @ (one - none)).max() + (working - one).max() > self.chain.capacity(tp_group):
                    return False
        return True

    def _limits(self, setting: Setting, stage: int, size: int) -> Reach:
        """Return where the stage may end: see ``cut.Reach``."""
        mesh = setting.layout[setting.mesh_of[stage]]
        fits = [self._fitting(setting, stage, tp_group, count) for tp_group, count in self.members(mesh, size)
                if self.chain.capacity(tp_group) < float("inf")]
        narrow = self.chain.narrow_places

        @cache
        def last_place(begin: int, end: int) -> int:
            def last_of(places: I64) -> int:
                """Return how many of the places in a row a stage may end at."""
                return bisect_left(places, 1, key=lambda place: not all(fit(begin, int(place)) for fit in fits))

            if end <= begin or all(fit(begin, end) for fit in fits):
                return end
            near = narrow[(narrow > begin) & (narrow < end)]
            known = last_of(near)
            low = int(near[known - 1]) if known else begin
            between = np.arange(low + 1, near[known] if known < len(near) else end)
            return low + last_of(between)

        return last_place

    def _fitting(self, setting: Setting, stage: int, tp_group: TpGroup, count: int) -> Callable[[int, int], bool]:
        """Return what says whether a stage from place to place fits on a device of the tp group."""
        capacity = self.chain.capacity(tp_group) * self._part(setting, stage)
        load = self.load(setting, stage, count)
        if setting.recompute:
            ruling = self._ruling(setting, stage)
            return lambda begin, end: self._segmented_bytes(tp_group, load, ruling, begin, end) <= capacity
        rows = cache(lambda begin: self.chain.stage_bytes(tp_group, begin, load))
        return lambda begin, end: bool(rows(begin)[end - begin] <= capacity)

    def _part(self, setting: Setting, stage: int) -> float:
        """Return the part of a device's memory for a stage: over and back as they need it where all take equally long.

        There the first and the last stage, with what is large at the ends of a model, share a device.
        """
        num_stages, size = len(setting.mesh_of), self.problem.options.batch // setting.microbatches
        if not setting.is_v:
            return 1 / setting.chunks
        mesh, needs = setting.layout[setting.mesh_of[stage]], []
        table = self._times(mesh, size, recompute=setting.recompute)
        tp_group, count = self.members(mesh, size)[0]
        for other in (stage, num_stages - 1 - stage):
            ends = np.searchsorted(table, table[-1] * np.array([other, other + 1]) / num_stages)
            begin = min(int(ends[0]), len(table) - 2)
            end = min(max(begin + 1, int(ends[1])), len(table) - 1)
            needs.append(self.stage_bytes(setting, other, tp_group, count, begin, end))
        return needs[0] / sum(needs)

    def load(self, setting: Setting, stage: int, count: int) -> Load:
        """Return what goes through a stage whose tp group takes so many samples of a micro-batch."""
        num_copies = setting.copies(setting.layout[setting.mesh_of[stage]])
        return Load(num_samples=count, in_flight=self.in_flight(setting, stage), recompute=setting.recompute,
                    zero=setting.zero, part=1 / self.group_size(setting, setting.layout[setting.mesh_of[stage]]),
                    chunks=setting.chunks, microbatches=setting.microbatches, is_alone=num_copies == 1)

    def group_size(self, setting: Setting, mesh: StageMesh) -> int:
        """Return how many copies of a stage have a whole of it together."""
        if setting.zero_group == "all" or not setting.zero:
            return setting.copies(mesh)
        return min(self._hosts(mesh).values())

    def has_host_groups(self, layout: Sequence[StageMesh]) -> bool:
        """Return whether the tp groups of each stage lie on several hosts, on each as many, and several."""
        counts = [self._hosts(mesh) for mesh in layout]
        return all(len(hosts) > 1 and len(set(hosts.values())) == 1 and min(hosts.values()) > 1 for hosts in counts)

    def _hosts(self, mesh: StageMesh) -> Counter[str]:
        devices = self.problem.cluster.devices
        return Counter(devices[tp_group[0]].host for tp_group in mesh.tp_groups)

    def stage_bytes(self, setting: Setting, stage: int, tp_group: TpGroup, count: int, begin: int, end: int) -> float:
        """Return what a stage from place to place takes on a device of the tp group."""
        load = self.load(setting, stage, count)
        if load.recompute:
            return self._segmented_bytes(tp_group, load, self._ruling(setting, stage), begin, end)
        return self.chain.segmented_bytes(tp_group, [begin, end], load)

    def segments(self, setting: Setting, stage: int, first: int, last: int) -> list[int]:
        """Return where a stage that recomputes is cut into segments."""
        return self._find_segments(*self._ruling(setting, stage), first, last)[0]

    def _ruling(self, setting: Setting, stage: int) -> tuple[TpGroup, Load]:
        """Return the tp group by which a stage is cut into segments, and what goes through it."""
        mesh = setting.layout[setting.mesh_of[stage]]
        tp_group, count = self.members(mesh, self.problem.options.batch // setting.microbatches)[0]
        return tp_group, self.load(setting, stage, count)

    def _segmented_bytes(self, tp_group: TpGroup, load: Load, ruling: tuple[TpGroup, Load], first: int,
                         last: int) -> float:
        """Return what a stage takes on a tp group, in the segments that suit the ``ruling`` one."""
        ends, need = self._find_segments(*ruling, first, last)
        return need if (tp_group, load) == ruling else self.chain.segmented_bytes(tp_group, ends, load)

    def _find_segments(self, tp_group: TpGroup, load: Load, first: int, last: int) -> tuple[list[int], float]:
        """Return where segments of about equal time end, and what a stage of them takes.

        The fewest that leave room, since each costs a little time; else those that need least memory.
        """
        key = self.chain.figures_key(tp_group), self.chain.capacity(tp_group), load, first, last
        if load.in_units:
            ends = self.chain.units_between(first, last)
            return ends, self.chain.segmented_bytes(tp_group, ends, load)
        if key not in self._segments:
            room = TUNING.room * self.chain.capacity(tp_group) / load.chunks
            alike = self._first_alike.setdefault(key[0], tp_group)
            best: tuple[float, list[int]] | None = None
            for number in (number for number in TUNING.segment_counts if number <= last - first):
                ends = self._ends(alike, first, last, number)
                need = self.chain.segmented_bytes(tp_group, ends, load)
                if best is None or need < best[0]:
                    best = need, ends
                if need <= room:
                    break
            assert best is not None, "a stage has one piece at least"
            self._segments[key] = best[1], best[0]
        return self._segments[key]

    def _find_ends(self, tp_group: TpGroup, first: int, last: int, count: int) -> list[int]:
        """Return where segments of about equal time end: up to half a segment away, where least is to be kept."""
        forward, crossing = self._listed(tp_group)
        begin, length = forward[first], (forward[last] - forward[first]) / count
        ends = [first]
        for number in range(1, count):
            target = begin + number * length
            low = max(bisect_left(forward, target - length / 2, first, last + 1), ends[-1] + 1)
            high = min(bisect_left(forward, target + length / 2, first, last + 1), last - 1)
            if low <= high:
                least = min(crossing[low : high + 1])
                ends.append(min((abs(forward[at] - target), at)
                                for at in range(low, high + 1) if crossing[at] == least)[1])
        return [*ends, last]

    def _find_listed(self, tp_group: TpGroup) -> tuple[list[float], list[float]]:
        """Return the seconds of a sample's forward up to each place, and the bytes that cross it, as quick to read."""
        return self.chain.passes(tp_group, 1.0)[0].tolist(), self.chain.crossing.tolist()

    def _least_bytes(self, setting: Setting, size: int) -> tuple[float, float]:
        """Return what all stages together hold at least, on a device of each, and what these devices have."""
        need, have = 0.0, 0.0
        for stage, mesh in enumerate(setting.layout):
            tp_group, count = self.members(mesh, size)[0]
            pieces = self.chain.pieces(tp_group)
            parameters, gradients, states, _ = (float(table[0, -1]) for table in pieces.lasting)
            part = 1 / self.group_size(setting, mesh)
            whole = sum(size * (part if setting.zero >= level else 1.0)
                        for size, level in ((parameters, 3), (gradients, 2), (states, 1)))
            if not setting.recompute:
                whole += self.in_flight(setting, stage) * float(pieces.passing(count).saved[0, -1])
            need += whole / len(setting.layout)
            have += self.chain.capacity(tp_group)
        return need, have

    def _too_large(self, setting: Setting, size: int) -> NoFeasiblePlan:
        """Return what is missing at least."""
        need, have = self._least_bytes(setting, size)
        missing = max(1, int(need - have))
        short = f"{format_bytes(missing)} too little in all" if need > have else "too little where it is needed"
        return NoFeasiblePlan(f"{setting.describe()}: the stages need {format_bytes(need)} or more on one device each "
                              f"and have {format_bytes(have)}: {short}", missing_bytes=missing)

    def _judge(self, setting: Setting, cuts: Sequence[int], times: Sequence[F64], size: int) -> Estimate:
        num_meshes = len(setting.layout)
        seconds = np.array([time[last] - time[first] for time, first, last in
                            zip(times, cuts[:-1], cuts[1:], strict=True)])
        if setting.in_units:
            seconds = np.array([self._with_units(setting, cuts, stage, size) for stage in range(len(seconds))])
        loads = np.bincount(setting.mesh_of, weights=seconds)
        once, sent = self._transfers(setting, cuts, size)
        period = max(float(loads.max()), sent)
        if setting.is_tight:  # one micro-batch after the other, at worst
            period = float(loads.sum()) + 2 * once
        turns = 1.5 if setting.is_v else setting.chunks  # V-Min idles for 2/3 of what 1F1B does (weft.plan.orders)
        pipeline_s = (setting.microbatches * period + (float(loads.sum()) - float(loads.max())) / turns
                      + once * (2 if self.problem.is_training else 1))
        exchange_s = max((self._exchange(setting, cuts, mesh, float(loads[mesh])) for mesh in range(num_meshes)),
                         default=0.0) if self.problem.is_training else 0.0
        return Estimate(setting=setting, cuts=tuple(cuts), step_time_s=pipeline_s + exchange_s, pipeline_s=pipeline_s,
                        exchange_s=exchange_s)

    def _transfers(self, setting: Setting, cuts: Sequence[int], size: int) -> tuple[float, float]:
        """Return the seconds of one micro-batch's way over all cuts, and the largest load of a mesh's way out."""
        total, sent = 0.0, np.zeros(len(setting.layout))
        for (mesh, after), place in zip(itertools.pairwise(setting.mesh_of), cuts[1:-1], strict=True):
            here, there = setting.layout[mesh], setting.layout[after]
            seconds = self._hop(here, there, self._bytes_at(here, there, place, size))
            total += seconds
            sent[mesh] += seconds
        return total, float(sent.max(initial=0.0))

    def _bytes_at(self, here: StageMesh, there: StageMesh, place: int, size: int) -> float:
        """Return the bytes of one message of a micro-batch over a place."""
        return float(self.chain.crossing[place]) * size / min(len(here.tp_groups), len(there.tp_groups))

    def _hop(self, here: StageMesh, there: StageMesh, num_bytes: float) -> float:
        """Return the seconds of a message between two meshes, all devices of a host sending theirs at once."""
        if here is there:
            return 0.0
        source, target = here.tp_groups[-1][0], there.tp_groups[0][0]
        return self.problem.costs.transfer(num_bytes * self._at_once(here, there), source, target).seconds

    def _find_at_once(self, here: StageMesh, there: StageMesh) -> int:
        """Return how many messages between the meshes share a link."""
        if len(here.devices) == 1:
            return 1
        cluster = self.problem.cluster
        host = cluster.devices[here.tp_groups[-1][0]].host
        senders = [device for device in here.devices if cluster.devices[device].host == host]
        receivers = itertools.cycle(there.devices)
        counts = Counter(link for sender, receiver in zip(senders, receivers, strict=False) if sender != receiver
                         for link in cluster.route(sender, receiver).links)
        return max(counts.values(), default=1)

    def _exchange(self, setting: Setting, cuts: Sequence[int], index: int, load_s: float) -> float:
        """Return the seconds that the gradients' exchange adds on a mesh, and the update."""
        mesh = setting.layout[index]
        stages = [stage for stage, number in enumerate(setting.mesh_of) if number == index]
        gradients, states = (float(sum(table[cuts[stage], cuts[stage + 1]] for stage in stages))
                             for table in self.chain.pieces(mesh.tp_groups[0]).lasting[1:3])
        if setting.in_units:
            return self._scattered(setting, mesh, gradients, states)
        states /= setting.copies(mesh) if setting.zero else 1
        exchange_s = self._all_reduce(mesh, gradients, setting.cp) * self._crowd(setting.layout, mesh)
        exchange_s += self._inside(mesh.tp_groups[0])
        spread_s = exchange_s / 2 if setting.zero else 0.0  # what each has updated is gathered by all
        hidden_s = min(TUNING.hidden * exchange_s, load_s / 2)
        return spread_s + exchange_s - hidden_s + self._update(mesh, 3 * gradients + 2 * states)

    def _find_inside(self, tp_group: TpGroup) -> float:
        """Return the seconds in which devices that divide operators add up the few gradients that they have parts of.

        They have few bytes, so those of all stages count for each.
        """
        split = self.chain.split_of(tp_group)
        if split is None or not split.summed:
            return 0.0
        num_bytes = float(self.problem.graph.tensor_bytes[list(split.summed)].sum())
        return large_reduce_line(self.problem.costs, tp_group).at(num_bytes)

    def _scattered(self, setting: Setting, mesh: StageMesh, gradients: float, states: float) -> float:
        """Return the seconds behind the last backward where gradients are scattered after each."""
        part = 1 / self.group_size(setting, mesh)
        after_s = 0.0 if setting.zero == 3 else self._unit_seconds(setting, mesh, gradients, 1)
        if setting.zero_group == "host":
            after_s += self._all_reduce(self._host_meshes(mesh)[1], gradients)  # each place its part, side by side
        return after_s + self._inside(mesh.tp_groups[0]) + self._update(mesh, part * (3 * gradients + 2 * states))

    def _find_host_meshes(self, mesh: StageMesh) -> tuple[StageMesh, StageMesh]:
        """Return the tp groups of one host, and one of each host."""
        devices = self.problem.cluster.devices
        first = {devices[tp_group[0]].host: tp_group for tp_group in reversed(mesh.tp_groups)}
        host = devices[mesh.tp_groups[0][0]].host
        return (StageMesh(tuple(item for item in mesh.tp_groups if devices[item[0]].host == host)),
                StageMesh(tuple(first.values())))

    def _unit_seconds(self, setting: Setting, mesh: StageMesh, num_bytes: float, num_units: int) -> float:
        """Return the seconds in which so many units, of so many bytes together, are gathered or scattered."""
        if setting.zero_group == "all":
            group, crowd = mesh, self._crowd(setting.layout, mesh)
        else:
            group, crowd = self._host_meshes(mesh)[0], 1
        return num_units * self._all_reduce(group, num_bytes / num_units) / 2 * crowd

    def _with_units(self, setting: Setting, cuts: Sequence[int], stage: int, size: int) -> float:
        """Return the seconds of a stage's forward and backward where its units come and go beside them."""
        mesh, first, last = setting.layout[setting.mesh_of[stage]], cuts[stage], cuts[stage + 1]
        table = self.chain.pieces(mesh.tp_groups[0]).lasting
        units = len(self.chain.units_between(first, last)) - 1
        ahead, whole = (self._times(mesh, size, recompute=setting.recompute, only_forward=flag)
                        for flag in (True, False))
        forward_s = float(ahead[last] - ahead[first])
        backward_s = float(whole[last] - whole[first]) - forward_s
        gather_s = self._unit_seconds(setting, mesh, float(table.parameters[first, last]), units)
        scatter_s = self._unit_seconds(setting, mesh, float(table.gradients[first, last]), units)
        gather_s *= setting.zero == 3
        return max(forward_s, gather_s) + max(backward_s, gather_s + scatter_s) + (gather_s + scatter_s) / units

    def _all_reduce(self, mesh: StageMesh, num_bytes: float, cp: int = 1) -> float:
        count = len(mesh.tp_groups) * cp
        if count < 2 or num_bytes <= 0:
            return 0.0
        key = self._sorts(mesh), count, len({self.problem.cluster.devices[tp_group[0]].host
                                             for tp_group in mesh.tp_groups[:MAX_EXCHANGE]})
        if key not in self._exchanges:
            self._exchanges[key] = large_reduce_line(self.problem.costs, [
                device for tp_group in mesh.tp_groups for device in tp_group[:: len(tp_group) // cp]])
        return self._exchanges[key].at(num_bytes)

    def _crowd(self, layout: Sequence[StageMesh], mesh: StageMesh) -> int:
        """Return how many exchanges need the link that limits those of the mesh: one comes after the other there."""
        host = self.problem.cluster.devices[mesh.tp_groups[0][0]].host
        own = self._ways_out(mesh).get(host, ())
        if not own:
            return 1
        counts = Counter(resource for other in layout for resource in self._ways_out(other).get(host, ()))
        return max(counts[resource] for resource in own)

    def _find_ways_out(self, mesh: StageMesh) -> dict[str, list[int]]:
        """Return by host what limits exchanges of the mesh with other hosts, once for each place in its tp groups."""
        devices, found = self.problem.cluster.devices, defaultdict[str, list[int]](list)
        for place in range(min(map(len, mesh.tp_groups))):
            members = [tp_group[place] for tp_group in mesh.tp_groups]
            first_on = {devices[member].host: member for member in reversed(members)}
            for host, device in first_on.items():
                other = next((member for member in members if devices[member].host != host), None)
                if other is not None:
                    found[host] += exchange_limits(self.problem.costs, TYPICAL_BYTES, (device, other))
        return found

    def _update(self, mesh: StageMesh, num_bytes: float) -> float:
        kind = self.problem.cluster.kind_of(mesh.tp_groups[0][0])
        if kind.memory_bytes_per_s is None:
            return 0.0
        return num_bytes / (kind.memory_bytes_per_s * op_classes()["elementwise"].on(kind.type).memory)


@cache
def held_by_mesh(num_meshes: int, chunks: int, microbatches: int) -> tuple[F64, ...]:
    """Return by mesh [moments, chunks] of how many micro-batches it keeps activations in each of its stages at once.

    From some rounds of micro-batches on everything comes again.
    """
    found = []
    for actions in pipeline_order(num_meshes, chunks, min(microbatches, 3 * num_meshes), training=True):
        chunk, sign = np.array([(stage // num_meshes, 1 if phase == "F" else -1) for stage, phase, _ in actions]).T
        change = np.zeros((len(actions) + 1, chunks))
        np.add.at(change, (np.arange(len(actions)) + (sign < 0), chunk), sign)
        found.append(np.unique(np.cumsum(change, axis=0), axis=0))
    return tuple(found)


@cache
def most_in_flight(num_meshes: int, chunks: int, microbatches: int) -> tuple[float, ...]:
    """Return by mesh the most micro-batches that it keeps activations of at once, for each of its stages on average."""
    return tuple(float(held.sum(axis=1).max()) / chunks for held in held_by_mesh(num_meshes, chunks, microbatches))


def turned_in_flight(setting: Setting) -> float:
    """Return the same over and back, about alike on all meshes; in less than this no published order fits."""
    return min(setting.microbatches, HELD["v-min"](len(setting.layout)) / 2)


# ---- the longest path ------------------------------------------------------------------------------------------------


def pipeline_seconds(forward_s: Sequence[float], backward_s: Sequence[float], hop_s: Sequence[float],
                     order: Order) -> float:
    """Return when the last action ends; ``hop_s[s]`` is the time of a message between stages ``s`` and ``s + 1``.

    >>> from weft.plan.orders import one_f_one_b
    >>> pipeline_seconds([1, 1], [2, 2], [0], one_f_one_b(2, 2))
    9.0
    """
    last = len(forward_s) - 1
    done: dict[tuple[int, str, int], float] = {}
    place, clock = [0] * len(order), [0.0] * len(order)
    moved = True
    while moved:
        moved = False
        for mesh, actions in enumerate(order):
            while place[mesh] < len(actions):
                stage, phase, index = actions[place[mesh]]
                if phase == "F":
                    before = (stage - 1, "F", index) if stage else None
                    hop, seconds = hop_s[stage - 1] if stage else 0.0, forward_s[stage]
                else:
                    before = (stage + 1, phase, index) if stage < last else (stage, "F", index)
                    hop, seconds = hop_s[stage] if stage < last else 0.0, backward_s[stage]
                if before is not None and before not in done:
                    break
                ready = done[before] + hop if before is not None else 0.0
                clock[mesh] = done[stage, phase, index] = max(clock[mesh], ready) + seconds
                place[mesh] += 1
                moved = True
    return float(max(clock))
