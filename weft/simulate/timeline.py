"""The timeline: when each instruction ran, predicted or measured, and what follows from that.

The step time of each rank divides into three parts that add up to the whole:

- *busy*: its compute stream works (computes and the optimizer step);
- *exposed communication*: the stream waits, and a transfer or collective that its next instruction needs is under way;
- *bubble*: the stream waits for anything else: other devices' work, the start and the end of the step.

A timeline holds all it needs to be shown, so that one from a file can be read without the plan and the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from weft.cost.figure import Source
from weft.model.graph import F64, I64, Bool
from weft.plan.memory import CATEGORIES, MemoryAccount, account_memory
from weft.plan.plan import ClusterRef, ModelRef
from weft.plan.program import U8, ByRank, Op, Program
from weft.simulate.wiring import Wiring, wire

Kind = Literal["predicted", "measured"]
MemorySource = Literal["account", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """Where the time of one rank went, and the most memory it held."""

    device: str
    busy_s: float
    exposed_s: float
    """Exposed communication."""
    bubble_s: float
    idle_s: float
    """``exposed_s + bubble_s``; ``busy_s + idle_s`` is the step time."""
    peak_bytes: int
    peak_memory: dict[str, int]
    """Bytes by category when the total is largest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryCurve:
    """What one rank holds over time, in steps."""

    time_s: F64
    """When each step begins; it lasts until the next begins."""
    num_bytes: I64
    """[step, category], in the order of ``CATEGORIES``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline(ByRank):
    """Start and end of every instruction; instructions are in columns, rank after rank, as in ``Program``."""

    kind: Kind
    model: ModelRef
    cluster: ClusterRef
    start_s: F64
    """Seconds since the step began."""
    end_s: F64
    source: U8
    """Code of the ``Source`` of each duration."""
    previous: I64
    """The compute (or step) before each instruction on its rank, or -1."""
    partner: I64
    """The receive of each send and the send of each receive; -1 for others."""
    needs: I64
    """Rows (compute or step, receive or collective that it waits for), ordered by the first."""
    program: Program | None = None
    """The program that was timed; None if the timeline was read from a file without it."""
    stored_labels: tuple[str, ...] | None = None
    """Labels from a file; see ``labels``."""
    stored_memory: MemoryAccount | None = None
    """Memory from a file, or as a run has measured it; see ``memory``."""
    memory_source: MemorySource = "account"
    """Whether ``memory`` is what the account says or what was measured."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the device name of each rank."""
        return self.cluster.devices

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return what each instruction does, for people."""
        if self.stored_labels is not None:
            return self.stored_labels
        assert self.program is not None
        return tuple(self.program.label(index) for index in range(self.num_instructions))

    @cached_property
    def memory(self) -> MemoryAccount:
        """Return the bytes that each rank holds while each instruction runs."""
        if self.stored_memory is not None:
            return self.stored_memory
        assert self.program is not None
        return account_memory(self.program)

    @cached_property
    def rank(self) -> I64:
        """Return the rank of each instruction."""
        return self.rank_of()

    @cached_property
    def runs(self) -> Bool:
        """Return which instructions occupy the compute stream: computes and optimizer steps."""
        return np.isin(self.op, (Op.COMPUTE, Op.STEP))

    @cached_property
    def step_time_s(self) -> float:
        """Return the time from the step's begin to the end of its last instruction."""
        return float(self.end_s.max()) if self.num_instructions else 0.0

    @cached_property
    def busy_s(self) -> F64:
        """Return for each rank how long its compute stream works."""
        return self._sum_by_rank(np.flatnonzero(self.runs), (self.end_s - self.start_s)[self.runs])

    @cached_property
    def exposed_by_need(self) -> F64:
        """Return for each row of ``needs`` how long it is waited for while it is on its way, each moment once."""
        waiting, arriving = self.needs[:, 0], self.needs[:, 1]
        low = np.maximum(self.issue_s[waiting], self.start_s[arriving])
        high = np.minimum(self.start_s[waiting], self.end_s[arriving])
        lengths, kept = np.zeros(len(waiting)), high > low
        lengths[kept] = union_lengths(waiting[kept], low[kept], high[kept])
        return lengths

    @cached_property
    def exposed_s(self) -> F64:
        """Return for each rank how long its compute stream waits while what it needs is on the way."""
        return self._sum_by_rank(self.needs[:, 0], self.exposed_by_need)

    @cached_property
    def idle_s(self) -> F64:
        """Return for each rank how long its compute stream does not work."""
        return np.asarray(self.step_time_s - self.busy_s, dtype=np.float64)

    @property
    def bubble_s(self) -> F64:
        """Return for each rank the idle time that is not exposed communication."""
        return np.asarray(self.idle_s - self.exposed_s, dtype=np.float64)

    @property
    def bubble(self) -> float:
        """Return the part of all ranks' time that is bubble, from 0 to 1."""
        whole = self.step_time_s * self.num_ranks
        return float(self.bubble_s.sum()) / whole if whole else 0.0

    @cached_property
    def issue_s(self) -> F64:
        """Return when the compute before each instruction on its rank ended."""
        return np.where(self.previous >= 0, self.end_s[self.previous], 0.0)

    def memory_curve(self, rank: int) -> MemoryCurve:
        """Return what the rank holds over time; computes count from their start, all else from when it is issued."""
        part = slice(int(self.rank_start[rank]), int(self.rank_start[rank + 1]))
        begins = np.where(self.runs[part], self.start_s[part], self.issue_s[part])
        held = np.repeat(self.memory.static[rank][None, :], len(begins) + 1, axis=0)
        held[1:, CATEGORIES.index("gradients")] += self.memory.gradients[part]
        held[1:, CATEGORIES.index("activations")] += self.memory.activations[part]
        held[1:, CATEGORIES.index("buffers")] += self.memory.buffers[part]
        times = np.concatenate(([0.0], begins))
        changes = np.concatenate((np.diff(times) > 0, [True]))
        return MemoryCurve(time_s=times[changes], num_bytes=held[changes])

    def summary(self) -> tuple[RankSummary, ...]:
        """Return for each rank where its time went and the most memory it held."""
        peaks = [self.memory.peak(rank) for rank in range(self.num_ranks)]
        return tuple(
            RankSummary(device=self.devices[rank], busy_s=float(self.busy_s[rank]),
                        exposed_s=float(self.exposed_s[rank]), bubble_s=float(self.bubble_s[rank]),
                        idle_s=float(self.idle_s[rank]), peak_bytes=sum(peak.values()), peak_memory=peak)
            for rank, peak in enumerate(peaks))

    def _sum_by_rank(self, instructions: I64, values: F64) -> F64:
        sums: F64 = np.bincount(self.rank[instructions], weights=values, minlength=self.num_ranks).astype(np.float64)
        return sums


def make_timeline(
    program: Program, *, start_s: F64, end_s: F64, kind: Kind, source: U8 | None = None, wiring: Wiring | None = None
) -> Timeline:
    """Return the timeline of a program whose instructions ran from ``start_s`` to ``end_s``.

    Without ``source`` all durations count as measured. ``wiring`` is ``wire(program)``, where the caller has it.
    """
    assert start_s.shape == end_s.shape == program.op.shape
    wires = wire(program) if wiring is None else wiring
    if source is None:
        source = np.full(program.num_instructions, Source.MEASURED.code, dtype=np.uint8)
    return Timeline(
        kind=kind, model=program.plan.model, cluster=program.plan.cluster, rank_start=program.rank_start,
        op=program.op, start_s=start_s, end_s=end_s, source=source, previous=wires.previous, partner=wires.partner,
        needs=wires.needs, program=program)


def union_lengths(group: I64, low: F64, high: F64) -> F64:
    """Return for each interval the length that no earlier-starting interval of its group covers, in the given order.

    >>> union_lengths(np.array([0, 0, 1]), np.array([0.0, 1.0, 1.0]), np.array([2.0, 3.0, 3.0]))
    array([2., 1., 2.])
    """
    count = len(group)
    if count == 0:
        return np.zeros(0)
    order = np.lexsort((high, low, group))
    group, low, high = group[order], low[order], high[order]
    # A running maximum that starts anew with each group: ends are replaced by their rank, offset by the group's number.
    by_end = np.argsort(high, kind="stable")
    rank = np.empty(count, dtype=np.int64)
    rank[by_end] = np.arange(count)
    number = np.concatenate(([0], np.cumsum(np.diff(group) != 0)))
    reach = high[by_end[np.maximum.accumulate(number * count + rank) % count]]
    covered = np.concatenate(([-np.inf], reach[:-1]))
    covered[np.flatnonzero(np.diff(number)) + 1] = -np.inf
    result = np.empty(count)
    result[order] = np.maximum(high - np.maximum(low, covered), 0.0)
    return result
