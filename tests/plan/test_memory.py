"""The memory account against a plain recount that walks through every rank with a dictionary of what it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from tests.plan.bases import custom_plan
from tests.plan.explore import rows_of
from tests.plan.generate import random_plan
from tests.plan.meaning import Meaning, Member
from tests.worlds import chain_graph, dag_graph, pipeline, plain_cluster, plan_of
from weft.base.errors import NoFeasiblePlan
from weft.model.graph import Graph, TensorRole
from weft.plan.check import check_memory, check_plan
from weft.plan.gradient_memory import gradients_live
from weft.plan.layout import stage_inputs
from weft.plan.lower import lower
from weft.plan.memory import CATEGORIES, MOST_BYTES, account_memory, optimizer_bytes, static_bytes
from weft.plan.orders import gpipe
from weft.plan.plan import Optimizer
from weft.plan.program import Op, Phase, Program
from weft.plan.stage_memory import StageMemory, StageView, stage_memory


class Recount:
    """What one stage takes for some samples, by looping over its operators and tensors."""

    def __init__(self, graph: Graph, meaning: Meaning, member: Member) -> None:
        self.graph, self.training = graph, meaning.training
        self.samples = meaning.samples[member][1] - meaning.samples[member][0]
        self.ops = sorted(graph.op_names.index(name) for name in meaning.plan.stages[member[0]].ops)
        self.made, self.inputs = meaning.makes[member[0]], meaning.reads[member[0]]
        self.differentiable = meaning.differentiable
        crossing = set().union(*meaning.reads)
        self.outputs = {self.base(tensor) for tensor in self.made & crossing}
        touched = {int(item) for op in self.ops for item in (*graph.op_inputs(op), *graph.op_outputs(op))}
        self.saved = {self.base(item) for item in touched if graph.is_saved[self.base(item)]} if self.training else set()

    def base(self, tensor: int) -> int:
        return int(self.graph.tensor_base[tensor]) if self.graph.tensor_base[tensor] >= 0 else tensor

    def size(self, tensor: int) -> float:
        grows = self.graph.tensor_batch_dim[tensor] != -1
        return float(self.graph.tensor_bytes[tensor]) * (self.samples / self.graph.batch if grows else 1.0)

    def storage(self, base: int) -> float:
        """Return the bytes that this stage has of a storage: what it made, or the tensors that came."""
        came = [tensor for tensor in self.inputs if self.base(tensor) == base]
        if came and base not in self.made:
            return sum(self.size(tensor) for tensor in came)
        return self.size(base) if self.graph.tensor_role[base] == TensorRole.ACTIVATION else 0.0

    def total(self, bases: set[int]) -> int:
        return round(sum(self.storage(base) for base in bases))

    def waits(self, op: int) -> bool:
        """Return whether the gradients of an operator's parameters can be computed later."""
        return bool(self.weights(op)) and self.graph.op_kinds[op] in ("aten.linear", "aten.embedding", "aten.layer_norm")

    def weights(self, op: int) -> set[int]:
        return {int(item) for item in self.graph.op_inputs(op)
                if self.graph.tensor_role[item] == TensorRole.PARAMETER and self.differentiable(int(item))}

    def needs(self, op: int) -> set[int]:
        """Return the storages that an operator's backward needs: what it read, and what relu wrote."""
        wrote = [int(item) for item in self.graph.op_outputs(op)] if self.graph.op_kinds[op] == "aten.relu" else []
        return {self.base(int(item)) for item in (*self.graph.op_inputs(op), *wrote)}

    def operands(self) -> set[int]:
        read = {self.base(int(item)) for op in self.ops if self.waits(op) for item in self.graph.op_inputs(op)}
        return self.saved & (read | {self.base(tensor) for tensor in self.inputs} - self.made)

    def kept_for_weights(self, begins: dict[int, str]) -> int:
        return round(sum(self.storage(base) for base in self.operands()) + self.gradients(begins, split=True)[2])

    def weights_room(self) -> int:
        return round(max((sum(map(self.size, self.weights(op))) for op in self.ops
                          if self.waits(op) and self.graph.op_kinds[op] != "aten.linear"), default=0.0))

    def peak(self, ops: list[int], wanted: set[int]) -> float:
        """Return the most that the wanted storages take while each lives from its first operator to its last."""
        of_op = [{self.base(int(item)) for item in (*self.graph.op_inputs(op), *self.graph.op_outputs(op))} & wanted
                 for op in ops]
        most = 0.0
        for step in range(len(ops)):
            before, after = set().union(*of_op[:step + 1]), set().union(*of_op[step:])
            most = max(most, sum(self.storage(base) for base in before & after))
        return most

    def touched(self, op: int) -> set[int]:
        return {self.base(int(item)) for item in (*self.graph.op_inputs(op), *self.graph.op_outputs(op))}

    def forward_peak(self, *, saves: bool = True) -> int:
        """Return the most that is live: to the end what is saved or handed over, the rest until its last operator."""
        own = {self.base(tensor) for tensor in self.made} & self.made
        kept = (self.own() if saves else set()) | self.outputs & own
        most = 0.0
        for step in range(len(self.ops)):
            before = set().union(*map(self.touched, self.ops[:step + 1]))
            after = set().union(*map(self.touched, self.ops[step:]))
            most = max(most, sum(map(self.storage, before & (own - kept) & after | before & kept)))
        return round(most)

    def gradients(self, begins: dict[int, str], *, split: bool) -> tuple[list[float], list[float], float]:
        """Return what gradients take in the backward of each operator, after it, and what is left for later.

        Blocks of memory are numbered; those of the caller and of the queue have users that never let go.
        """
        sizes: list[float] = []
        place: dict[int, int] = {}
        caller, queue, elsewhere = set(), set(), {}
        for tensor, how in begins.items():
            place[tensor] = len(sizes)
            caller.add(len(sizes))
            elsewhere[len(sizes)] = self.size(tensor) if how == "handed" else 0.0
            sizes.append(self.size(tensor) if how == "sum" else 0.0)

        def total(more: list[int]) -> float:
            return sum(sizes[block] for block in {*place.values(), *caller, *queue, *more})

        def is_free(tensor: int, more: list[int]) -> bool:
            block = place[tensor]
            return list(place.values()).count(block) == 1 and block not in {*caller, *queue, *more}

        def new(size: float) -> int:
            sizes.append(size)
            return len(sizes) - 1

        during, after = [], []
        for op in self.ops[::-1]:
            given = [place.pop(int(item)) for item in self.graph.op_outputs(op) if int(item) in place]
            read = [int(item) for item in self.graph.op_inputs(op)] if given else []
            wanted = [item for item in read if self.differentiable(item)
                      and self.graph.tensor_role[item] == TensorRole.ACTIVATION]
            hands_on = self.graph.op_kinds[op] == "aten.add"
            written = [int(item) for item in self.graph.op_outputs(op)]
            made = [(item, given[0] if hands_on and self.size(item) == self.size(written[0]) else new(self.size(item)))
                    for item in wanted]
            during.append(total(given + [block for _, block in made]))
            queue |= set(given) if split and self.waits(op) else set()
            most = total([block for _, block in made])
            while made:
                tensor, block = made.pop(0)
                rest = [item for _, item in made]
                if tensor not in place:
                    place[tensor] = block
                elif not is_free(tensor, [block, *rest]):
                    old, place[tensor] = place[tensor], new(self.size(tensor))
                    most = max(most, total([old, block, *rest]))
            for tensor in self.inputs & set(place):
                left = [item for item in self.ops if item < op and tensor in self.graph.op_inputs(item)]
                if not left and not is_free(tensor, []) and tensor in map(int, self.graph.op_inputs(op)):
                    old, place[tensor] = place[tensor], new(self.size(tensor))
                    most = max(most, total([old]))
            after.append(most)
        return during, after, sum(elsewhere.get(block, 0.0) + sizes[block] for block in queue)

    def rise(self, begins: dict[int, str], *, let_go: set[int], fresh: set[int] = frozenset(),
             split: bool = False) -> int:
        """Return the most above what is kept at first, in the backward of any operator.

        Gradients, less what is let go of, new ones of parameters, and those that are added to their sums; ``split``:
        where those of weights are left for later.
        """
        ops = self.ops[::-1]
        totals = []
        for step, (op, during, after) in enumerate(zip(ops, *self.gradients(begins, split=split)[:2], strict=True)):
            weights = sum(self.size(tensor) for tensor in self.new_weights(op) - fresh)
            if split and self.waits(op):
                weights = 0.0
            weights += sum(self.size(tensor) for tensor in self.parameters() - fresh if self.is_waiting(
                tensor, [split and self.waits(item) for item in ops], step))
            weights += sum(self.size(tensor) for tensor in fresh & set().union(*map(self.touched_tensors, ops[:step + 1])))
            totals += [during + weights - self.gone(let_go, step), after + weights - self.gone(let_go, step + 1)]
        return round(max(totals))

    def is_waiting(self, tensor: int, later: list[bool], step: int) -> bool:
        """Return whether a backward before has left a gradient of the parameter, and this or a later one adds to it."""
        makers = [place for place, op in enumerate(self.ops[::-1])
                  if not later[place] and tensor in self.new_weights(op)]
        return any(place < step for place in makers) and any(place >= step for place in makers)

    def gone(self, let_go: set[int], step: int) -> float:
        """Return what nobody needs any more when so many backwards have run."""
        ops = self.ops[::-1]
        left, needed = set().union(*map(self.touched, ops[step:])), set().union(*map(self.needs, ops[step:]))
        unread = {base for base in let_go if not any(base in self.needs(item) for item in ops)}
        return sum(self.storage(base) for base in let_go if (base not in left if base in unread else base not in needed))

    def touched_tensors(self, op: int) -> set[int]:
        return {int(item) for item in (*self.graph.op_inputs(op), *self.graph.op_outputs(op))}

    def new_weights(self, op: int) -> set[int]:
        """Return the parameters whose gradient an operator makes; one that hands its own on makes none."""
        size = self.size(int(self.graph.op_outputs(op)[0]))
        hands_on = self.graph.op_kinds[op] == "aten.add"
        return {tensor for tensor in self.weights(op) if not (hands_on and self.size(tensor) == size)}

    def own(self) -> set[int]:
        """Return the storages that are kept besides what came."""
        return self.saved - {self.base(tensor) for tensor in self.inputs} | self.saved & self.made

    def parameters(self) -> set[int]:
        return {int(item) for op in self.ops for item in self.graph.op_inputs(op)
                if self.graph.tensor_role[int(item)] == TensorRole.PARAMETER}

    def given_back(self) -> int:
        return round(sum(self.size(tensor) for tensor in self.inputs if self.differentiable(tensor)))


def recount(program: Program) -> list[list[int]]:
    """Return, for each rank, the dynamic bytes held during each instruction."""
    meaning = Meaning(program.plan, program.graph)
    stages = {member: Recount(program.graph, meaning, member) for member in meaning.members()}
    return [_recount_rank(program, meaning, stages, rank) for rank in range(program.num_ranks)]


def _readers(program: Program, meaning: Meaning, rank: int) -> dict[tuple[object, ...], int]:
    """Return the last position on the rank at which each thing that waits is read."""
    last: dict[tuple[object, ...], int] = {}
    rows = rows_of(program)[rank]
    for position, (op, instance, microbatch, phase, channel_id, _) in enumerate(rows):
        if op == Op.SEND:
            channel = program.channels[channel_id]
            kind = "output" if channel.kind == "activation" else "gradient"
            key = kind, member_of(program, channel.producer), microbatch
            last[key] = max(last.get(key, -1), _waited_for(program, rows, position))
        elif op == Op.COMPUTE and phase != Phase.W:
            member = member_of(program, instance)
            needed = meaning.feeds(member, microbatch) if phase == Phase.F else meaning.gradients(member, microbatch)
            for _, other in needed:
                if rank in meaning.ranks[other]:
                    if phase == Phase.F and _leaf_tensors(program, meaning, other, member, rank):
                        backward = next(place for place, row in enumerate(rows) if row[0] == Op.COMPUTE and row[1:3] == (
                            instance, microbatch) and row[3] in (Phase.B, Phase.I))
                        last["leaf", other, microbatch] = max(last.get(("leaf", other, microbatch), -1), backward)
                    key = "output" if phase == Phase.F else "gradient", other, microbatch
                    last[key] = max(last.get(key, -1), position)
        if op == Op.COMPUTE:
            for index, channel in enumerate(program.channels):
                if channel.target == rank and instance in channel.consumers:
                    last["arrived", index, microbatch] = position
                    if phase == Phase.F and channel.kind == "activation":
                        last["arriving", index, microbatch] = position
    return last


def _leaf_tensors(program: Program, meaning: Meaning, maker: Member, reader: Member, rank: int) -> set[int]:
    """Return what a reader on the maker's rank holds of it until its backward, for the gradient, though nobody saves it."""
    graph, plan = program.graph, program.plan
    is_near = rank in meaning.ranks[maker] and rank in meaning.ranks[reader]
    if (plan.model.mode != "training" or plan.stages[reader[0]].recompute or not is_near
            or meaning.samples[maker] != meaning.samples[reader] or not instance_reads(meaning, reader, maker)):
        return set()
    made = {graph.op_index[op] for op in plan.stages[maker[0]].ops}
    return {int(graph.memory_root[tensor]) for tensor in meaning.reads[reader[0]] if graph.tensor_producer[tensor] in made
            and graph.needs_gradient[tensor] and not graph.is_saved[graph.memory_root[tensor]]}


def _leaves(program: Program, meaning: Meaning, stages: dict[Member, Recount], maker: Member, rank: int) -> int:
    found = set().union(*(_leaf_tensors(program, meaning, maker, reader, rank) for reader in meaning.members()))
    return round(sum(map(stages[maker].size, found)))


def _waited_for(program: Program, rows: list[tuple[int, ...]], position: int) -> int:
    """Return the last position during which what a send has sent is held."""
    _, _, microbatch, _, channel_id, _ = rows[position]
    channel = program.channels[channel_id]
    if channel.kind == "activation":
        for place, (op, instance, other, phase, _, _) in enumerate(rows):
            if op == Op.COMPUTE and (instance, other) == (channel.producer, microbatch) and phase in (Phase.B, Phase.I):
                return max(position, place - 1)
    later = [place for place, row in enumerate(rows) if row[0] == Op.SEND and row[4] == channel_id and place > position]
    end = len(rows) - (2 if rows[-1][0] == Op.STEP else 1)
    return later[1] if len(later) > 1 else max(position, end)


def member_of(program: Program, instance: int) -> Member:
    return program.instances[instance].stage, program.instances[instance].replica


def _recount_rank(program: Program, meaning: Meaning, stages: dict[Member, Recount], rank: int) -> list[int]:
    last = _readers(program, meaning, rank)
    held: dict[tuple[object, ...], int] = {}
    there: set[int] = set()
    result = []
    for position, (op, instance, microbatch, phase, channel, _) in enumerate(rows_of(program)[rank]):
        during, size = 0, program.graph.tensor_bytes
        if op == Op.RECV:
            _receive(program, channel, microbatch, held)
        if op == Op.COMPUTE:
            fresh = _fresh(program, stages, instance, rank) if phase in (Phase.B, Phase.W) else set()
            anywhere = set().union(*(_fresh(program, stages, instance, item)
                                     for item in program.instances[instance].ranks)) if fresh - there else set()
            during = _inside(program, meaning, stages, instance, Phase(phase), anywhere)
            there |= fresh if phase == Phase.W else set()
            during += sum(int(size[tensor]) for tensor in there)
            there |= fresh
        else:
            during = sum(int(size[tensor]) for tensor in there)
        result.append(sum(held.values()) + during)
        if op == Op.COMPUTE:
            _after(program, meaning, stages, instance, microbatch, Phase(phase), held)
        for key in [key for key in held if key[0] != "kept" and last.get(key, -1) <= position]:
            del held[key]
            leaf = ("leaf", *key[1:])
            if key[0] == "output" and last.get(leaf, -1) > position:
                held[leaf] = _leaves(program, meaning, stages, key[1], rank)
    assert not held, f"rank {rank} never lets go of {held}"
    return result


def _receive(program: Program, index: int, microbatch: int, held: dict[tuple[object, ...], int]) -> None:
    """Note what arrives: until its forward what counts as kept from then on, until the last compute the rest."""
    channel, graph = program.channels[index], program.graph
    again = any(program.plan.stages[program.instances[item].stage].recompute for item in channel.consumers)
    total = sum(int(graph.tensor_bytes[tensor]) for tensor in channel.tensors)
    lost = sum(int(graph.tensor_bytes[tensor]) for tensor in channel.tensors if not graph.is_saved[tensor])
    if channel.kind == "gradient":
        rest = channel.num_bytes
    elif not channel.whole and program.plan.model.mode == "training":
        rest = 0  # pieces are put together in the forward, which is the last to need them
    elif program.plan.model.mode != "training" or again:
        rest = 0
    else:
        rest = round(channel.num_bytes * lost / total)
    held["arrived", index, microbatch] = rest
    held["arriving", index, microbatch] = channel.num_bytes - rest


def _fresh(program: Program, stages: dict[Member, Recount], instance: int, rank: int) -> set[int]:
    """Return the parameters whose gradients have no place in an exchange of the rank."""
    exchanged = {tensor for bucket in program.buckets if rank in bucket.ranks for tensor in bucket.parameters}
    return stages[member_of(program, instance)].parameters() - exchanged


def _begins(program: Program, meaning: Meaning, stage: Recount, instance: int) -> dict[int, str]:
    """Return where the gradients are that a backward begins with: in one message, handed over on the rank, or a sum."""
    item, graph = program.instances[instance], program.graph
    crossing = set().union(*meaning.reads)
    result = {}
    for tensor in sorted(stage.made & crossing | stage.made & {graph.outputs[0]}):
        ways = {rank: [] for rank in item.ranks}
        for channel in program.channels:
            if channel.kind == "gradient" and instance in channel.consumers and tensor in channel.tensors:
                is_lent = graph.depends_on_inputs[tensor]  # else it may become a parameter's gradient: it is copied
                ways[channel.target].append("message" if channel.whole and is_lent else "piece")
        for other in meaning.members():
            if tensor in meaning.reads[other[0]] and instance_reads(meaning, other, member_of(program, instance)):
                same = meaning.samples[other] == meaning.samples[member_of(program, instance)]
                for rank in set(meaning.ranks[other]) & set(item.ranks):
                    ways[rank].append("handed" if same else "piece")
        found = [way for way in ways.values() if way]
        is_single = found and all(len(way) == 1 and way != ["piece"] for way in found)
        if stage.differentiable(tensor):
            result[tensor] = ("message" if any(way == ["message"] for way in found) else "handed") if is_single else "sum"
    return result


def instance_reads(meaning: Meaning, reader: Member, maker: Member) -> bool:
    return any(other == maker for microbatch in meaning.microbatches[reader[0]]
               for _, other in meaning.feeds(reader, microbatch))


def _inside(program: Program, meaning: Meaning, stages: dict[Member, Recount], instance: int, phase: Phase,
            fresh: set[int]) -> int:
    item = program.instances[instance]
    stage = stages[item.stage, item.replica]
    if phase == Phase.F:
        cut = any(not program.channels[index].whole for index in item.forward_channels)
        return stage.forward_peak(saves=not program.plan.stages[item.stage].recompute) + (
            round(sum(map(stage.size, stage.inputs))) if cut else 0)
    if phase == Phase.W:
        return stage.weights_room()
    begins = _begins(program, meaning, stage, instance)
    rise = stage.rise(begins, let_go=stage.own(), fresh=fresh) if phase == Phase.B else stage.rise(
        begins, let_go=stage.own() - stage.operands(), split=True)
    if program.plan.stages[item.stage].recompute:  # its forward runs before, and has saved what is its own when it ends
        return max(stage.forward_peak(), stage.total(stage.own()) + rise)
    return rise


def _after(program: Program, meaning: Meaning, stages: dict[Member, Recount], instance: int, microbatch: int,
           phase: Phase, held: dict[tuple[object, ...], int]) -> None:
    member = member_of(program, instance)
    stage, again = stages[member], program.plan.stages[member[0]].recompute
    if phase == Phase.F:
        keeps = stage.training and not again
        held["output", member, microbatch] = stage.total(stage.outputs) - (
            stage.total(stage.outputs & stage.saved) if keeps else 0)
        if stage.training:
            held["kept", member, microbatch] = (round(sum(map(stage.size, stage.inputs))) if again else stage.total(
                stage.saved)) + _assembled(program, stage, instance)
    elif phase == Phase.I:
        held["kept", member, microbatch] = stage.kept_for_weights(
            _begins(program, meaning, stage, instance)) + _assembled(program, stage, instance)
        if again and program.instances[instance].forward_channels:  # buffers of what came, until the weights' gradients
            came = {stage.base(tensor) for tensor in stage.inputs} - stage.made
            held["kept", member, microbatch] += round(sum(map(stage.size, stage.inputs))) - stage.total(came & stage.saved)
    else:
        del held["kept", member, microbatch]
    if phase in (Phase.B, Phase.I):
        held["gradient", member, microbatch] = stage.given_back()


def _assembled(program: Program, stage: Recount, instance: int) -> int:
    """Return the inputs that are put together of pieces and stay though no backward needs them."""
    item = program.instances[instance]
    if program.plan.stages[item.stage].recompute or all(
            program.channels[index].whole for index in item.forward_channels):
        return 0
    came = {stage.base(tensor) for tensor in stage.inputs} - stage.made
    return round(sum(map(stage.size, stage.inputs))) - stage.total(came & stage.saved)


@pytest.mark.parametrize("part", range(4))
def test_account_equals_the_recount_on_generated_plans(part):
    for seed in range(part, 160, 4):
        rng = Random(seed)
        graph, cluster, plan = random_plan(rng, num_ops=rng.randint(1, 12), num_devices=rng.randint(1, 5),
                                           microbatches=rng.randint(1, 4))
        program = check_plan(plan, graph, cluster)
        account = account_memory(program)
        for rank, expected in enumerate(recount(program)):
            found = account.held(rank) - account.static[rank].sum()
            assert found.tolist() == expected, f"seed {seed}, rank {rank}"


def test_account_is_never_negative_and_returns_to_the_static_amount():
    for seed in range(120):
        rng = Random(seed)
        graph, cluster, plan = random_plan(rng, num_ops=10, num_devices=4, microbatches=3)
        program = check_plan(replace(plan, optimizer=Optimizer(kind="adamw")), graph, cluster)
        account, static = account_memory(program), static_bytes(program)
        assert account.gradients.min() >= 0
        assert account.activations.min() >= 0
        assert account.buffers.min() >= 0
        assert account.static.min() >= 0
        if plan.model.mode == "training":
            for rank in range(4):
                assert account.held(rank)[-1:].tolist() in ([], [static[rank].sum()])


def test_chain_in_numbers():
    """Two stages of one op each, 8 bytes between them, written out instruction by instruction."""
    graph, plan = pipeline("gpipe", 2, 1)
    program = lower(plan, graph)
    account = account_memory(program)
    rows = {program.place(index).split(": ", 1)[1]: (int(account.activations[index]), int(account.buffers[index]))
            for index in range(program.num_instructions)}
    assert rows["F s0 mb 0"] == (8, 0)  # y0 is made
    assert rows["send s0>s1 mb 0"] == (8, 0)  # and kept for the backward, so sending it takes nothing more
    assert rows["recv s0>s1 mb 0"] == (0, 8)
    assert rows["F s1 mb 0"] == (4, 8)  # the loss, and y0 in the buffer it came in
    assert rows["B s1 mb 0"] == (8 + 4 + 8 + 4, 0)  # y0 and the loss are kept; their gradients are live
    assert rows["send grad s1>s0 mb 0"] == (0, 8)  # the gradient waits to be sent
    assert rows["recv grad s1>s0 mb 0"] == (8, 8)
    assert rows["B s0 mb 0"] == (8, 8)  # y0; its gradient is in the buffer it came in, and none is made
    assert rows["sgd step"] == (0, 0)
    assert account.peak(0) == {"parameters": 4, "gradients": 4, "optimizer": 0, "activations": 8, "buffers": 8}
    assert account.peak_bytes(0) == 24


def test_receives_of_a_stage_on_several_devices_end_on_their_own_rank():
    """Was: a receive on the first rank of a group was held into the lists of the ranks after it."""
    graph = chain_graph(2)
    plan = custom_plan(graph, [[0], [1]], [((("d2",), 1.0),), ((("d0", "d1"), 1.0),)], microbatches=1, size=1,
                       num_devices=4)
    program = lower(plan, graph)
    account, static = account_memory(program), static_bytes(program)
    for rank in range(4):
        assert account.held(rank)[-1:].tolist() in ([], [static[rank].sum()])


def test_what_one_stage_hands_to_another_on_its_rank_is_held_in_between():
    """Was: in inference nothing was held between two stages on one device."""
    graph = chain_graph(3, skips=((0, 2),))
    plan = custom_plan(graph, [[0], [1], [2]], [((("d0",), 1.0),)] * 3, microbatches=1, size=1, num_devices=1)
    plan = replace(plan, model=replace(plan.model, mode="inference"), order={"d0": ("s0:F:0", "s1:F:0", "s2:F:0")})
    account = account_memory(lower(plan, graph))
    assert account.buffers.tolist() == [0, 8, 16]
    assert account.activations.tolist() == [8, 8, 4]


@pytest.mark.parametrize(("recompute", "kept"), [(False, 8 + 8 + 8 + 4), (True, 8)])
def test_recomputation_keeps_the_inputs_only(recompute, kept):
    graph = chain_graph(6)
    groups = [[0, 1, 2], [3, 4, 5]]
    plan = plan_of(graph, groups, order=gpipe(2, 4), devices=[0, 1], microbatches=4, recompute=recompute)
    program = lower(plan, graph)
    account = account_memory(program)
    rows = {program.label(index): int(account.activations[index] + account.gradients[index])
            for index in range(program.num_instructions)}
    inside = 8 + 8 + 4  # y3, y4 and the loss
    assert rows["F s1 mb 3"] == 3 * kept + (8 + 8 if recompute else inside), "y3 goes before the loss if nobody keeps it"
    # The most is there in the first of three backwards: gradients of the loss, of y4 and of a weight; then y4 can go.
    assert rows["B s1 mb 0"] == 4 * kept + (4 + 8) + 4 + (inside if recompute else 0)
    # Later all weights have their sums, and what is new is there beside them until it is added.
    assert rows["B s1 mb 1"] == 3 * kept + (4 + 8) + 4 + 3 * 4 + (inside if recompute else 0)


def test_a_backward_that_recomputes_takes_the_larger_of_its_parts():
    """Was: the peaks of the forward that runs again and of the backward were added, though the one ends before the other."""
    graph = replace(chain_graph(2), forward_room_bytes=np.asarray([0.0, 1000.0]), backward_room_bytes=np.asarray([300.0, 0.0]))
    stage = figures(graph, [0, 1])
    assert (stage.forward_peak, stage.plain_peak, stage.saved, stage.backward_rise) == (1012, 1012, 12, 304)
    assert stage.rises(recompute=True)[:2] == (1012, 1012)
    assert stage.rises(recompute=False)[:2] == (1012, 304)
    plain = figures(replace(graph, forward_room_bytes=np.zeros(2)), [0, 1])
    assert plain.rises(recompute=True).backward == 12 + plain.backward_rise


def test_frozen_parameters_have_neither_gradients_nor_states():
    """Was: a parameter with ``requires_grad`` off was charged, exchanged and updated as if it were trained."""
    graph = chain_graph(2, parameter_bytes=4000)
    frozen = replace(graph, is_frozen=np.asarray([name == "w0" for name in graph.tensor_names]))
    plan = plan_of(graph, [[0, 1]], order=gpipe(1, 1), devices=[0], microbatches=1)
    plan = replace(plan, optimizer=Optimizer(kind="adamw"))
    whole, less = (static_bytes(lower(plan, item))[0, :3].tolist() for item in (graph, frozen))
    assert (whole, less) == ([8000, 8000, 16000], [8000, 4000, 8000])
    assert account_memory(lower(plan, graph)).peak(0)["gradients"] == 8000
    assert account_memory(lower(plan, frozen)).peak(0)["gradients"] == 4000
    assert not frozen.needs_gradient[frozen.tensor_index["y0"]], "nothing before it is trained"


def figures(graph: Graph, ops: list[int], *, samples: int = 1, training: bool = True,
            others: list[list[int]] | None = None) -> StageMemory:
    """Return the figures of the stage with these ops, where the other stages have the ``others``."""
    stages = [np.asarray(group, dtype=np.int64) for group in (ops, *(others or []))]
    crossing = np.unique(np.concatenate([stage_inputs(graph, group) for group in stages]))
    return stage_memory(graph, stages[0], num_samples=samples, training=training, crossing=crossing)


def test_saved_bytes_inside_operators_count():
    graph = replace(chain_graph(2), saved_inside_bytes=np.asarray([100.0, 7.0]))
    plain = chain_graph(2)
    assert figures(graph, [0, 1]).saved == figures(plain, [0, 1]).saved + 107
    assert figures(graph, [0, 1]).forward_peak == figures(plain, [0, 1]).forward_peak + 107
    assert figures(graph, [0], samples=3).saved == figures(plain, [0], samples=3).saved + 300
    assert figures(graph, [0, 1], training=False) == figures(plain, [0, 1], training=False)


def test_tensors_without_a_batch_are_not_scaled():
    graph = dag_graph([[-1], [], [0, 1], [2]], unbatched=(1,), sizes=[80, 1000, 80, 4], batch=8)
    assert figures(graph, [0, 1, 2, 3], samples=1).saved == 10 + 1000 + 10 + 4
    assert figures(graph, [0, 1, 2, 3], samples=16).saved == 160 + 1000 + 160 + 4
    assert figures(graph, [2, 3], samples=1, others=[[0, 1]]).inputs == 10 + 1000


def with_views(graph: Graph, base_of: dict[str, str], *, saved: set[str]) -> Graph:
    """Return the graph with some tensors as views of others, and only these tensors saved."""
    base = graph.tensor_base.copy()
    for view, source in base_of.items():
        base[graph.tensor_index[view]] = graph.tensor_index[source]
    return replace(graph, tensor_base=base, is_saved=np.asarray([name in saved for name in graph.tensor_names]))


def test_a_view_takes_no_memory_of_its_own():
    graph = with_views(chain_graph(3), {"y1": "y0"}, saved={"y0"})
    assert figures(graph, [0, 1, 2]).saved == 8
    assert figures(graph, [0, 1, 2]).forward_peak == 8 + 4


def test_a_view_that_comes_from_another_stage_is_kept_as_what_came():
    """Was: the consumer of a view kept nothing, because only what the view is of is marked as saved."""
    graph = with_views(dag_graph([[-1], [0], [1]], sizes=[100, 30, 4]), {"y1": "y0"}, saved={"y0"})
    last = figures(graph, [2], others=[[0, 1]])
    assert (last.inputs, last.saved) == (30, 30)
    first = figures(graph, [0, 1], others=[[2]])
    assert (first.outputs, first.saved_outputs, first.saved) == (100, 100, 100)


def test_a_view_of_what_came_is_copied_once_to_be_handed_on():
    """Was: counted as it came, and once more as the copy that is sent; the copy was not there while the forward ran."""
    graph = with_views(dag_graph([[-1], [0], [1]], sizes=[100, 30, 4]), {"y1": "y0"}, saved=set())
    middle = figures(graph, [1], others=[[0], [2]])
    assert (middle.outputs, middle.saved_outputs, middle.forward_peak) == (30, 0, 30)


def test_what_is_handed_over_stays_until_the_forward_ends():
    graph = dag_graph([[-1], [0], [1], [2, 0]], sizes=[100, 8, 8, 4], weights=[0, 0, 0, 0])
    assert figures(graph, [0, 1, 2], others=[[3]], training=False).forward_peak == 100 + 8 + 8
    assert figures(graph, [0, 1, 2], training=False).forward_peak == 100 + 8


def test_a_view_of_a_parameter_is_not_counted():
    graph = with_views(chain_graph(2), {"y0": "w0"}, saved={"w0", "y1"})
    assert figures(graph, [0, 1]).saved == 4


def test_inputs_of_a_stage_are_counted_once_while_its_forward_runs():
    """Was: a received tensor that the backward needs was counted in its buffer and again among the saved."""
    graph = chain_graph(2)
    assert figures(graph, [1], others=[[0]]).forward_peak == 4
    assert figures(graph, [1], others=[[0]]).saved == 8 + 4


def test_buffers_of_the_model_count_once_for_each_rank():
    graph = dag_graph([[-1], [0], [1]], weights=[0, 0, 0])
    roles = graph.tensor_role.copy()
    roles[graph.tensor_index["w0"]] = TensorRole.BUFFER
    graph = replace(graph, tensor_role=roles)
    plan = custom_plan(graph, [[0], [1], [2]], [((("d0",), 1.0),), ((("d0",), 1.0),), ((("d1",), 1.0),)],
                       microbatches=1, size=1, num_devices=2)
    assert static_bytes(lower(plan, graph))[:, CATEGORIES.index("parameters")].tolist() == [16, 16]


@pytest.mark.parametrize(("kind", "dtype", "expected"), [
    ("none", "float32", 0), ("sgd", "float32", 0), ("adam", "float32", 800), ("adamw", "float32", 800),
    ("adamw", "float64", 800), ("none", "bfloat16", 0), ("sgd", "bfloat16", 800), ("adamw", "bfloat16", 2400),
])
def test_optimizer_states(kind, dtype, expected):
    graph = replace(chain_graph(1, parameter_bytes=400), tensor_dtypes=(dtype,) * 3)
    assert optimizer_bytes(graph, graph.tensor_index["w0"], Optimizer(kind=kind)) == expected


def test_sharded_optimizer_states_are_divided_among_the_holders():
    graph = chain_graph(1, parameter_bytes=400)
    plan = custom_plan(graph, [[0]], [((("d0",), 0.5), (("d1",), 0.25), (("d2",), 0.25))], microbatches=1, size=4,
                       num_devices=3)
    for sharded, each in ((False, 800), (True, 267)):
        program = lower(replace(plan, optimizer=Optimizer(kind="adamw", sharded=sharded)), graph)
        assert static_bytes(program)[:, 2].tolist() == [each] * 3


def test_a_plan_that_does_not_fit_says_where_and_how_much_is_missing():
    graph, plan = pipeline("gpipe", 2, 4)
    first, second = (account_memory(lower(plan, graph)).peak_bytes(rank) for rank in (0, 1))
    assert (first, second) == (56, 68)
    check_memory(lower(plan, graph), plain_cluster(2, memory_bytes=68))
    for capacity, others in ((65, ""), (54, ", and 1 more devices have too little as well")):
        cluster = plain_cluster(2, memory_bytes=capacity)
        with pytest.raises(NoFeasiblePlan) as caught:
            check_plan(replace(plan, cluster=replace(plan.cluster, digest=cluster.digest)), graph, cluster)
        assert str(caught.value) == (
            f"'d1' needs 68 B but has {capacity} B: {68 - capacity} B too little (parameters 4 B, gradients 4 B, "
            f"activations 60 B){others}. Try more micro-batches, recomputation, another strategy, or more devices.")
        assert caught.value.exit_code == 3
        assert (caught.value.missing_bytes, caught.value.device) == (68 - capacity, "d1")


def test_in_flight_microbatches_of_1f1b_show_in_the_peak():
    graph, plan = pipeline("1f1b", 6, 8)
    account = account_memory(lower(plan, graph))
    for rank in range(1, 5):
        most = account.activations[account.rank_start[rank]:account.rank_start[rank + 1]].max()
        assert most == (6 - rank) * (8 + 8) + 8 + 4  # what each keeps, the gradient that one makes, and its weight's


def walked(graph: Graph, *, begins: dict[int, float], inputs: list[int] | None = None, defers: bool = False,
           elsewhere: dict[int, float] | None = None) -> tuple[list[float], list[float], float]:
    """Return what gradients take during the backward of each operator, when it is done, and what is left for later."""
    ops = range(graph.num_ops)
    steps = [Walked(kind=graph.op_kinds[op], read=graph.op_inputs(op).tolist(), written=graph.op_outputs(op).tolist(),
                    can_wait=graph.op_kinds[op] == "aten.linear") for op in ops]
    live = gradients_live(steps, sizes=graph.tensor_bytes.astype(float), inputs=inputs or [], begins=begins,
                          wanted=graph.needs_gradient & (graph.tensor_role == TensorRole.ACTIVATION),
                          elsewhere=elsewhere or {}, defers=defers)
    return live.during.tolist(), live.joining.tolist(), live.deferred


@dataclass
class Walked:
    kind: str
    read: list[int]
    written: list[int]
    can_wait: bool = False
    is_view: bool = False
    copies_gradient: bool = False
    gives_views: bool = False
    backward_room: float = 0.0


def kinds_of(graph: Graph, kinds: dict[int, str]) -> Graph:
    return replace(graph, op_kinds=tuple(kinds.get(op, "aten.mul") for op in range(graph.num_ops)))


def test_gradients_of_several_readers_are_there_together_until_they_are_added():
    """Was: one gradient for a tensor however many read it."""
    graph = kinds_of(dag_graph([[-1], [0], [0], [1, 2]], sizes=[100, 100, 100, 4], weights=[0, None, None, None]), {})
    loss = graph.tensor_index["y3"]
    during, joining, _ = walked(graph, begins={loss: 4.0})
    # 3: gradients of y1 and y2; 2: y2's and one of y0 beside y1's; 1: y1's, another of y0 beside the first; 0: y0's.
    assert during == [4 + 200, 4 + 300, 4 + 300, 4 + 100]
    assert joining == [4 + 200, 4 + 200, 4 + 200, 4]


def test_an_addition_hands_its_gradient_on_and_it_is_added_to_in_place_when_it_is_free():
    graph = kinds_of(dag_graph([[-1], [0], [0, 1], [2]], sizes=[100, 100, 100, 4], weights=[0, None, None, None]),
                     {2: "aten.add"})
    during, joining, _ = walked(graph, begins={graph.tensor_index["y3"]: 4.0})
    # 3: y2's; 2: handed on to y0 and y1; 1: a new one for y0, which is free to be added to by then; 0: y0's.
    assert during == [4 + 100, 4 + 100, 4 + 200, 4 + 100]
    assert joining == [4 + 100, 4 + 100, 4 + 200, 4], "y1's, which was y0's as well, goes before y0's are added"
    held = gradients_live([Walked(kind="aten.mul", read=[0], written=[1])], sizes=np.asarray([100.0, 4.0]), inputs=[],
                          wanted=np.asarray([True, True]), begins={0: 100.0, 1: 4.0}, elsewhere={}, defers=False)
    assert held.joining.tolist() == [4 + 300], "what the caller holds is not added to in place: the sum is a third"


def test_a_view_whose_gradient_lies_in_another_order_gives_a_copy():
    """Was: the gradient of a view's operand was always in the memory of the view's own."""
    graph = kinds_of(dag_graph([[-1], [0], [1]], sizes=[100, 100, 4], weights=[0, None, None]), {1: "aten.reshape"})
    copying = replace(graph, backward_room_bytes=np.asarray([0.0, 100.0, 0.0]))
    during = [StageView(item, np.arange(3), 1, {}).gradients_live({graph.tensor_index["y2"]: 4.0}).during.tolist()
              for item in (graph, copying)]
    assert during == [[4 + 100, 4 + 100, 4 + 100], [4 + 100, 4 + 200, 4 + 100]]


def test_an_operand_in_another_order_is_copied_again_for_gradients_of_weights():
    """Was: 3 % too little in ``W`` behind a normalization whose result is read the other way round."""
    graph = replace(chain_graph(2), op_kinds=("aten.linear", "aten.linear"))
    rooms = [figures(replace(graph, saved_inside_bytes=np.asarray([0.0, inside])), [0, 1]).weights_room for inside in (0.0, 64.0)]
    assert rooms[1] - rooms[0] == 64


def test_a_gradient_that_is_a_view_is_not_added_to_in_place():
    """Was: 3 % too little where two linear layers read a tensor of three dimensions, whose gradients are views."""
    sizes, wanted = np.asarray([100.0, 4.0, 4.0]), np.asarray([True, True, True])
    for gives_views, most in ((False, 200), (True, 300)):
        steps = [Walked(kind="aten.linear", read=[0], written=[number], gives_views=gives_views) for number in (1, 2)]
        live = gradients_live(steps, sizes=sizes, inputs=[], wanted=wanted, begins={1: 4.0, 2: 4.0}, elsewhere={}, defers=False)
        assert live.joining.tolist() == [8 + 100, 8 + most]
    deep = replace(dag_graph([[-1], [0], [0]], sizes=[100, 4, 4], weights=[None, 0, 1]), op_kinds=("aten.mul", "aten.linear", "aten.linear"))
    shapes = [(2, 3, 4) if name == "y0" else shape for name, shape in zip(deep.tensor_names, deep.tensor_shapes, strict=True)]
    for graph, expected in ((deep, [False] * 3), (replace(deep, tensor_shapes=tuple(shapes)), [False, True, True])):
        assert [step.gives_views for step in StageView(graph, np.arange(3), 1, {}).steps] == expected


def test_an_addition_hands_a_view_on_as_a_view():
    """Was: 3 % too little where a sum is read by a linear layer, and by what is then added up out of place."""
    sizes, wanted = np.asarray([100.0, 100.0, 100.0, 4.0, 4.0]), np.asarray([True] * 5)
    steps = [Walked(kind="aten.mul", read=[0], written=[3]), Walked(kind="aten.add", read=[0], written=[2]),
             Walked(kind="aten.linear", read=[2], written=[4], gives_views=True)]
    live = gradients_live(steps, sizes=sizes, inputs=[], wanted=wanted, begins={3: 4.0, 4: 4.0}, elsewhere={}, defers=False)
    assert live.joining.tolist() == [8 + 100, 8 + 100, 8 + 300]


def test_the_gradient_of_a_part_that_is_put_into_a_tensor_is_a_view_of_that_tensors():
    """Was: up to 7 % too little where rows are changed in place: what was given stays as long as the part's does."""
    sizes, wanted = np.asarray([100.0, 4.0, 100.0, 4.0, 4.0]), np.asarray([True] * 5)
    steps = [Walked(kind="aten.tanh", read=[3], written=[1]), Walked(kind="aten.select_scatter", read=[0, 1], written=[2]),
             Walked(kind="aten.mul", read=[2], written=[4])]
    live = gradients_live(steps, sizes=sizes, inputs=[], wanted=wanted, begins={4: 4.0}, elsewhere={}, defers=False)
    assert live.joining.tolist() == [4 + 100, 4 + 200, 4 + 104]


def test_what_a_backward_begins_with_stays_and_an_input_gets_a_gradient_of_its_own():
    """Was: gradients that are put together of pieces counted until their producer's backward, as others do."""
    graph = kinds_of(dag_graph([[-1], [0]], sizes=[100, 100], weights=[0, None]), {1: "aten.add"})
    y0, y1 = (graph.tensor_index[name] for name in ("y0", "y1"))
    steps = [Walked(kind="aten.add", read=[y0], written=[y1])]
    live = gradients_live(steps, sizes=graph.tensor_bytes.astype(float), inputs=[y0], begins={y1: 100.0},
                          wanted=graph.needs_gradient, elsewhere={}, defers=False)
    assert live.during.tolist() == [100]
    assert live.joining.tolist() == [200], "the sum, which the caller has, and a copy to hand on"


def test_gradients_that_wait_for_those_of_weights_count_once_and_what_was_handed_over_after_the_backward():
    graph = kinds_of(dag_graph([[-1], [0]], sizes=[100, 100]), {0: "aten.linear", 1: "aten.linear"})
    y1 = graph.tensor_index["y1"]
    assert walked(graph, begins={y1: 0.0}, defers=True)[2] == 100, "that of y0; a message's buffer counts elsewhere"
    assert walked(graph, begins={y1: 0.0}, elsewhere={y1: 100.0}, defers=True)[2] == 200
    assert walked(graph, begins={y1: 100.0}, defers=True)[2] == 200


def test_what_lies_scattered_as_traced_is_copied_to_be_sent():
    """Was: only what transpositions and the like give was; an elementwise operator keeps its operand's strides."""
    graph, plan = pipeline("gpipe", 2, 1)
    plain = account_memory(lower(plan, graph)).buffers
    scattered = replace(graph, is_scattered=np.asarray([name == "y0" for name in graph.tensor_names]))
    copied = account_memory(lower(plan, scattered)).buffers - plain
    assert copied.max() == 8
    nothing = replace(graph, is_scattered=np.zeros(graph.num_tensors, dtype=bool), op_kinds=("aten.transpose",) * 2)
    plan = replace(plan, model=replace(plan.model, digest=nothing.digest))
    assert (account_memory(lower(plan, nothing)).buffers == plain).all(), "what was looked at counts, not the kind"


def test_what_is_sent_as_a_copy_is_left_when_it_is_sent():
    """Was: both were held until the backward, though nobody reads the original any more."""
    graph, plan = pipeline("gpipe", 2, 2)
    unsaved = replace(graph, is_saved=np.zeros(graph.num_tensors, dtype=bool))
    scattered = replace(unsaved, is_scattered=np.asarray([name == "y0" for name in graph.tensor_names]))
    plain, copied = (account_memory(lower(plan, item)).buffers.tolist()[:4] for item in (unsaved, scattered))
    assert plain == [0, 8, 8, 16], "the messages wait for the backward"
    assert copied == [0, 16, 8, 24], "so do the copies, but not what was copied"


def test_more_bytes_than_64_bits_hold_are_told_as_very_many():
    """It was an OverflowError: a graph file may say so of what an operator keeps, and of its room."""
    graph, plan = pipeline("gpipe", 2, 1)
    size = graph.num_ops
    graph = replace(graph, saved_inside_bytes=np.full(size, 1e25), forward_room_bytes=np.full(size, 1e28),
                    backward_room_bytes=np.full(size, 1e28))
    account = account_memory(lower(plan, graph))
    assert account.activations.max() == MOST_BYTES
    assert 0 < account.peak_bytes(0) < 2**63


def test_a_compiled_backward_makes_all_gradients_of_its_stage_before_it_adds_them():
    graph, plan = pipeline("gpipe", 2, 3)
    program, compiled = (lower(replace(plan, compiled=flag), graph) for flag in (False, True))
    one_by_one, at_once = account_memory(program), account_memory(compiled)
    more = {program.place(row).split(": ", 1)[1]: int(at_once.gradients[row] - one_by_one.gradients[row])
            for row in range(program.num_instructions)}
    assert all(name.startswith("B ") for name, value in more.items() if value)
    assert sorted(value for name, value in more.items() if name.startswith("B s1")) == [0, 4, 4]  # the first become sums
    assert np.array_equal(one_by_one.activations, at_once.activations)
