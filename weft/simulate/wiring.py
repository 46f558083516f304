"""Who waits for whom in a program, in columns: the part of timing that needs no costs.

Instructions that happen together are one *task*: a send and its receive, the shares of all members in a collective,
and the compute of an instance that has several ranks. A task is known by one of its instructions, its *leader*: the
send, or the one on the lowest rank. Tasks are numbered by their leaders' positions.

    rank 0:  F s0 mb 0, send, ...            tasks: 0 F s0 mb 0,  1 transfer,  2 F s1 mb 0
    rank 1:  receive, F s1 mb 0, ...         the receive belongs to task 1

A backward inside which collectives are issued (``weft.plan.program``) is several tasks, one after the other: its parts.
The first ends where the first of those collectives may start, and so on; the last ends the backward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from weft.base.errors import PlanError
from weft.model.graph import I64, Bool
from weft.plan.program import Op, Phase, Program, inside_backward, last_before
from weft.plan.unit_flow import unit_flows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wiring:
    """Tasks of a program and what they wait for; instructions are known by their position in the program's columns."""

    task: I64
    """The task of each instruction; of one in parts the last."""
    first: I64
    """The first task of each instruction."""
    leader: I64
    """The instruction that stands for each task."""
    previous: I64
    """The compute (or step) before each instruction on its rank, or -1."""
    after: I64
    """The task on its rank that each instruction waits for: the compute before it, or a part of that; or -1."""
    partner: I64
    """The receive of each send and the send of each receive; -1 for others."""
    needs: I64
    """Rows (compute or step, receive or collective that it waits for), ordered by the first."""

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks."""
        return len(self.leader)


def wire(program: Program, *, inside: I64 | None = None) -> Wiring:
    """Return the tasks of the program and what they wait for.

    ``inside`` is which collectives are issued inside which backwards, if it is not what ``inside_backward`` says.
    Raises ``PlanError`` if a send has no receive, or if a collective is missing on a member.
    """
    inside = inside_backward(program) if inside is None else inside
    partner = _match_transfers(program)
    leader_of = np.arange(program.num_instructions, dtype=np.int64)
    received = np.flatnonzero(program.op == Op.RECV)
    leader_of[received] = partner[received]
    _lead_collectives(program, leader_of)
    _lead_joint_computes(program, leader_of)
    num_tasks = np.zeros(program.num_instructions, dtype=np.int64)
    num_tasks[leader_of] = 1
    early = np.flatnonzero(inside >= 0)
    place = early - inside[early]
    np.maximum.at(num_tasks, leader_of[inside[early]], place + 1)
    last = np.cumsum(num_tasks) - 1
    task, first = last[leader_of], (last - num_tasks + 1)[leader_of]
    runs = (program.op == Op.COMPUTE) | (program.op == Op.STEP)
    previous = last_before(program.rank_start, runs)
    after = np.where(previous >= 0, task[previous], -1)
    after[early] = first[inside[early]] + place - 1
    needs = np.concatenate([_channel_needs(program), _collective_needs(program), _unit_needs(program, runs)])
    return Wiring(task=task, first=first, leader=np.repeat(np.arange(program.num_instructions), num_tasks),
                  partner=partner, previous=previous, after=after,
                  needs=needs[np.argsort(needs[:, 0], kind="stable")])


def expand(first: I64, stop: I64) -> tuple[I64, I64]:
    """Return all numbers of the ranges ``first[i] .. stop[i] - 1``, and for each of them the range it is from.

    >>> expand(np.array([2, 0]), np.array([3, 2]))
    (array([2, 0, 1]), array([0, 1, 1]))
    """
    counts = stop - first
    owner = np.repeat(np.arange(len(first), dtype=np.int64), counts)
    inside = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return first[owner] + inside, owner


def _message_keys(program: Program, instructions: I64) -> I64:
    """Return what a send and its receive have in common: channel and micro-batch, as one number."""
    return program.channel[instructions].astype(np.int64) * program.plan.microbatches + program.microbatch[instructions]


def _match_transfers(program: Program) -> I64:
    partner = np.full(program.num_instructions, -1, dtype=np.int64)
    sends, receives = np.flatnonzero(program.op == Op.SEND), np.flatnonzero(program.op == Op.RECV)
    send_keys, receive_keys = _message_keys(program, sends), _message_keys(program, receives)
    by_send, by_receive = np.argsort(send_keys, kind="stable"), np.argsort(receive_keys, kind="stable")
    for keys, order, items in ((send_keys, by_send, sends), (receive_keys, by_receive, receives)):
        double = np.flatnonzero(np.diff(keys[order]) == 0)
        if len(double):
            raise PlanError(f"{program.place(int(items[order[double[0] + 1]]))}: it is there a second time")
    alone = np.concatenate([sends[~np.isin(send_keys, receive_keys)], receives[~np.isin(receive_keys, send_keys)]])
    if len(alone):
        raise PlanError(f"{program.place(int(alone[0]))}: there is no other side to it in the program")
    partner[sends[by_send]] = receives[by_receive]
    partner[receives[by_receive]] = sends[by_send]
    return partner


def _lead_collectives(program: Program, leader_of: I64) -> None:
    """Point the members' instructions of each collective to the first."""
    instructions = np.flatnonzero(program.op == Op.COLLECTIVE)
    if len(instructions) == 0:
        return
    of_unit = np.asarray([bucket.is_of_unit for bucket in program.buckets], dtype=np.bool_)
    _lead_unit_collectives(program, instructions[of_unit[program.bucket[instructions]]], leader_of)
    instructions = instructions[~of_unit[program.bucket[instructions]]]
    buckets = program.bucket[instructions].astype(np.int64)
    ranks = np.searchsorted(program.rank_start, instructions, side="right") - 1
    if len(instructions) == 0:
        return
    wanted = np.concatenate([index * program.num_ranks + np.asarray(sorted(bucket.ranks), dtype=np.int64)
                             for index, bucket in enumerate(program.buckets)])
    found = np.sort(buckets * program.num_ranks + ranks)
    used = np.zeros(len(program.buckets), dtype=np.bool_)
    used[buckets] = True
    wanted = wanted[used[wanted // program.num_ranks]]
    if not np.array_equal(found, wanted):
        here, there = Counter(found.tolist()), Counter(wanted.tolist())
        bucket, rank = divmod(min((here - there) | (there - here)), program.num_ranks)
        raise PlanError(f"bucket {bucket} must be exchanged once on each of its ranks {program.buckets[bucket].ranks}, "
                        f"but that does not hold for rank {rank} ({program.rank_names[rank]})")
    first = np.full(len(program.buckets), -1, dtype=np.int64)
    first[buckets[::-1]] = instructions[::-1]
    leader_of[instructions] = first[buckets]


def _lead_unit_collectives(program: Program, instructions: I64, leader_of: I64) -> None:
    """Point the members' instructions of each collective of a unit to the first."""
    keys = program.bucket[instructions].astype(np.int64) * (len(program.instances) + 1) + program.instance[instructions]
    keys = (keys * (program.plan.microbatches + 1) + program.microbatch[instructions]) * len(Phase)
    keys += program.phase[instructions]
    _, first, group, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    members = np.asarray([len(bucket.ranks) for bucket in program.buckets], dtype=np.int64)
    wrong = np.flatnonzero(counts != members[program.bucket[instructions[first]]])
    if len(wrong):
        at, count = int(instructions[first[wrong[0]]]), int(counts[wrong[0]])
        raise PlanError(f"{program.place(at)}: is there on {count} ranks, but is to be done by "
                        f"{program.buckets[program.bucket[at]].ranks} together")
    leader_of[instructions] = instructions[first[group]]


def _lead_joint_computes(program: Program, leader_of: I64) -> None:
    """Point the computes of instances with several ranks to the one on the lowest rank."""
    is_joint = np.asarray([len(instance.ranks) > 1 for instance in program.instances], dtype=np.bool_)
    if not is_joint.any():
        return
    computes = np.flatnonzero(program.op == Op.COMPUTE)
    computes = computes[is_joint[program.instance[computes]]]
    keys = program.instance[computes].astype(np.int64) * len(Phase) + program.phase[computes]
    keys = keys * program.plan.microbatches + program.microbatch[computes]
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    leader_of[computes] = computes[first[group]]


def _channel_needs(program: Program) -> I64:
    """Return rows (compute, receive that it waits for)."""
    receives = np.flatnonzero(program.op == Op.RECV)
    computes = np.flatnonzero((program.op == Op.COMPUTE) & (program.phase != Phase.W))
    if len(receives) == 0 or len(computes) == 0:
        return np.empty((0, 2), dtype=np.int64)
    # Group 2 i holds the channels before the forward of instance i, group 2 i + 1 those before its backward.
    lists = [channels for item in program.instances for channels in (item.forward_channels, item.gradient_channels)]
    start = np.concatenate(([0], np.cumsum([len(channels) for channels in lists]))).astype(np.int64)
    channels = np.asarray([channel for item in lists for channel in item], dtype=np.int64)
    groups = program.instance[computes].astype(np.int64) * 2 + (program.phase[computes] != Phase.F)
    position, mention = expand(start[groups], start[groups + 1])
    wanted = channels[position] * program.plan.microbatches + program.microbatch[computes][mention]
    keys = _message_keys(program, receives)
    order = np.argsort(keys)
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    found = keys[order][place] == wanted
    return np.stack([computes[mention[found]], receives[order][place[found]]], axis=1)


def _unit_needs(program: Program, runs: Bool) -> I64:
    """Return rows (compute, collective of a unit that it waits for); what another collective waits for is waited for
    by the compute behind that."""
    rows: list[I64] = []
    following = np.append(np.flatnonzero(runs), program.num_instructions)
    for rank, flow in enumerate(unit_flows(program)) if program.units else ():
        waits = np.asarray(flow.waits, dtype=np.int64).reshape(-1, 2)
        place = following[np.searchsorted(following, waits[:, 0])]
        is_own = place < program.rank_start[rank + 1]
        rows.append(np.stack([place[is_own], waits[is_own, 1]], axis=1))
    return np.unique(np.concatenate([np.empty((0, 2), dtype=np.int64), *rows]), axis=0)


def _collective_needs(program: Program) -> I64:
    """Return rows (step, collective before it on its rank)."""
    steps, collectives = np.flatnonzero(program.op == Op.STEP), np.flatnonzero(program.op == Op.COLLECTIVE)
    ranks = np.searchsorted(program.rank_start, steps, side="right") - 1
    first = np.searchsorted(collectives, program.rank_start[ranks]).astype(np.int64)
    position, mention = expand(first, np.searchsorted(collectives, steps).astype(np.int64))
    return np.stack([steps[mention], collectives[position]], axis=1)
