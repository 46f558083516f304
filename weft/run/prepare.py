"""From a plan and a model to what one rank executes: program, stages, parameters.

The traced graph has fixed sizes, so the model is traced once for every number of samples that the rank's instances
process (usually one). All ranks lower the plan with the same graph, that of the smallest number, and so get the same
program. Each rank makes values for its own parameters only, and of those that it shares with others for its parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.base.errors import ModelError, PlanError
from weft.model.graph import Graph, TensorRole
from weft.model.source import ModelSource
from weft.model.trace import TracedModel, trace
from weft.model.weights import initial_value
from weft.plan.check import check_program
from weft.plan.lower import lower
from weft.plan.plan import Plan, split_samples
from weft.plan.program import Op, Phase, Program
from weft.plan.saving import repeated_in
from weft.plan.sharding import Region, axis_sizes
from weft.run import parameters
from weft.run.again import mark_repeated
from weft.run.compiled import Compiler
from weft.run.exchange import FactorBlock, check_rows, collect_factors, lane_groups, lane_pairs, make_blocks
from weft.run.mesh import ReplicaMesh, axis_weights, mesh_groups
from weft.run.parameters import BufferShares, Parameters
from weft.run.pieces import Units
from weft.run.random_state import RankRandom
from weft.run.shard_stage import shard_stage
from weft.run.stage import Compilation, Stage, build_stage, model_graph
from weft.run.status import Milestone, StatusLine
from weft.run.transport import Transport
from weft.run.wiring import Routes

log = logging.getLogger(__name__)


class Tracer:
    """Traces one model for any number of samples, each number once."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._traced: dict[tuple[int, bool], TracedModel] = {}

    def trace(self, num_samples: int, *, batch_dims: bool = False) -> TracedModel:
        """Return the model traced for that many samples, without measuring its backward pass."""
        for key in ((num_samples, True), (num_samples, batch_dims)):
            if key in self._traced:
                return self._traced[key]
        traced = trace(self.source, batch=num_samples, batch_dims=batch_dims, backward="rule")
        self._traced[num_samples, batch_dims] = traced
        return traced


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """What one rank executes."""

    program: Program
    stages: dict[int, Stage]
    """By instance."""
    parameters: Parameters
    buffers: dict[str, Tensor]
    """Buffers of the model, and constants of its forward, that the stages read or change."""
    factors: dict[int, FactorBlock]
    """By bucket, where factors are exchanged."""
    input_names: tuple[str, ...]
    """Tensor names of the model's inputs, in the order of ``source.inputs``."""
    takes_statistics: bool
    """The forward changes buffers: what it gives for a batch is not what it gives for its parts (batch norm)."""
    buffer_shares: BufferShares
    random: RankRandom
    compiler: Compiler | None = None
    """What the stages are compiled with; None where operators run one by one."""


def lower_to_run(plan: Plan, tracer: Tracer) -> Program:
    """Return the program of a plan for a model, checked; raise if the plan is for another or cannot be executed yet."""
    divisions = {split_samples(plan.microbatch_size, tuple(replica.share for replica in stage.replicas))
                 for stage in plan.stages}  # ways in which stages divide the samples of a micro-batch among replicas
    traced = tracer.trace(min(min(counts) for counts in divisions), batch_dims=len(divisions) > 1)
    program = lower(plan, traced.graph)
    check_program(program)
    return program


def connect_ranks(program: Program, tracer: Tracer, transport: Transport) -> None:
    """Make the groups of ranks that the program needs; all ranks call this together."""
    updates = tracer.trace(program.graph.batch).program.buffer_updates
    transport.connect_groups(mesh_groups(program.plan),
                             exchanges=(item.ranks for item in program.buckets if item.method == "all_reduce"),
                             lanes=(*lane_groups(program), *(ranks for _, ranks in parameters.divided_states(program)),
                                    *parameters.buffer_holders(program, updates).values()),
                             pairs=((channel.source, channel.target) for channel in program.channels),
                             lane_pairs=lane_pairs(program))


def prepare_rank(program: Program, tracer: Tracer, transport: Transport, *, seed: int,
                 random_seed: int | None = None) -> Prepared:
    """Return what a rank executes, with its parameters, or its parts of them, at their initial values.

    ``random_seed``, the same on all ranks, is for what the model draws (default: ``seed``).
    """
    rank, device = transport.rank, transport.device
    own = [index for index, item in enumerate(program.instances) if rank in item.ranks]
    sizes = {program.instances[index].num_samples for index in own} or {program.graph.batch}
    traced = {size: tracer.trace(size) for size in sorted(sizes)}
    for model in traced.values():
        _require_same(program.graph, model.graph)
    graphs = {size: model_graph(model) for size, model in traced.items()}
    first = next(iter(traced.values()))
    units = Units(program, rank, device)
    values = _Values(tracer.source, first, device=device, seed=seed, regions=parameters.held_regions(program, rank),
                     units=units)
    split = set(program.instance[(program.op == Op.COMPUTE) & (program.phase == Phase.I)].tolist())
    routes, factors = Routes(program, rank), make_blocks(program, rank, device)
    random = RankRandom(device, seed=seed if random_seed is None else random_seed, rank=rank,
                        num_ranks=transport.num_ranks)
    compiler = _compiler(transport.status) if program.plan.compiled else None
    stages = {}
    for index in own:
        item = program.instances[index]
        ops = [program.graph.op_names[op] for op in program.stage_ops[item.stage].tolist()]
        outputs = [program.graph.tensor_names[tensor] for tensor in routes.outputs(item.stage)]
        module = build_stage(graphs[item.num_samples], ops, outputs, values=values.value, device=device,
                             lets_go=program.plan.stages[item.stage].storage.pieces == "parameters")
        again = _again(program, item.stage)
        mark_repeated(module.op_names, module.module.graph, again)
        mesh = None
        if len(item.ranks) > 1:
            stage = program.plan.stages[item.stage]
            replica = stage.replicas[item.replica]
            mesh = ReplicaMesh(transport, item.ranks, axis_sizes(replica), axis_weights(program.plan, replica))
            module = shard_stage(module, stage.sharding, mesh, random=random,
                                 parameters=parameters.parameter_layouts(program, index, rank))
        module = collect_factors(module, factors, num_microbatches=len(item.microbatches))
        stages[index] = Stage(module, split=index in split, mesh=mesh, random=random, again=bool(again),
                              compilation=_compilation(program, index, compiler, transport))
    if compiler is not None:
        transport.status.set(Milestone.LOADING)
    check_rows(factors)
    names, updates = program.graph.tensor_names, first.program.buffer_updates
    buckets = [tuple(names[tensor] for tensor in bucket.parameters)
               if rank in bucket.ranks and not bucket.is_of_unit else () for bucket in program.buckets]
    return Prepared(program=program, stages=stages, parameters=Parameters(values.parameters, buckets, units),
                    buffers=values.buffers, factors=factors, input_names=first.program.inputs,
                    takes_statistics=bool(updates), random=random,
                    buffer_shares=BufferShares(program, updates, values.buffers, transport), compiler=compiler)


def _again(program: Program, stage: int) -> frozenset[str]:
    """Return the operators of a stage that run again inside its backward."""
    if program.plan.stages[stage].keeps_only_inputs or program.plan.model.mode != "training":
        return frozenset()
    again = repeated_in(program.graph, program.stage_ops[stage], program.plan.stages[stage])
    return frozenset(program.graph.op_names[op] for op in again.tolist())


def _compiler(status: StatusLine) -> Compiler:
    """Return what compiles a rank's stages; its line says so meanwhile, and counts the graphs."""
    def say(text: str) -> None:
        status.cell[1] += 1
        log.info("%s", text)

    status.cell[1] = 0
    status.set(Milestone.COMPILING)
    return Compiler(say=say)


def compile_notes(prepared: Prepared, transport: Transport) -> tuple[str, ...]:
    """Return why pieces of the ranks' stages are not compiled, the same on all ranks."""
    own = [] if prepared.compiler is None else prepared.compiler.fallbacks
    if not prepared.program.plan.compiled:
        return ()
    transport.meet()  # some ranks compile for longer than a message may take
    found = transport.gather_records(own) or []
    return tuple(transport.share_record(list(dict.fromkeys(text for texts in found for text in texts))))


def _compilation(program: Program, index: int, compiler: Compiler | None,
                 transport: Transport) -> Compilation | None:
    """Return how the stage of an instance is compiled; None if it is not."""
    if compiler is None:
        return None
    graph, stage = program.graph, program.plan.stages[program.instances[index].stage]
    is_training = program.plan.model.mode == "training"
    return Compilation(
        compiler=compiler, name=f"stage {stage.name}", device=transport.device,
        writes_updates=not stage.keeps_only_inputs,
        borders=_borders(program, index, transport.rank) if is_training else frozenset(),
        differentiable=frozenset(name for name, needed, role in zip(
            graph.tensor_names, graph.needs_gradient, graph.tensor_role, strict=True)
            if is_training and needed and role == TensorRole.ACTIVATION))


def _borders(program: Program, index: int, rank: int) -> frozenset[str]:
    """Return the operators of a stage before whose backward the gradients of a bucket are final."""
    graph, ops = program.graph, program.stage_ops[program.instances[index].stage]
    is_own = np.isin(graph.consumer_op, ops)
    tensors, readers = graph.inputs[is_own], graph.consumer_op[is_own]
    firsts = [int(readers[np.isin(tensors, bucket.parameters)].min(initial=graph.num_ops))
              for bucket in program.buckets if rank in bucket.ranks and not bucket.is_of_unit]
    found = sorted(op for op in firsts if op < graph.num_ops)
    return frozenset(graph.op_names[op] for op in found[1:])


def value_of(name: str, tensor: Tensor, seed: int) -> Tensor:
    """Return the value of a parameter or buffer; that of a parameter on the meta device is made from the seed."""
    if not tensor.is_meta:
        return tensor.detach()
    if not isinstance(tensor, torch.nn.Parameter):
        raise ModelError(f"buffer {name!r} is on the meta device and has no value: give buffers real values")
    return initial_value(name, tensor.shape, tensor.dtype, seed)


class _Values:
    """The values of parameters and buffers, made when asked for; a parameter that is asked for twice is one tensor.

    Of a parameter that the rank holds a part of, the whole is there while the part is cut out.
    """

    def __init__(self, source: ModelSource, traced: TracedModel, *, device: torch.device, seed: int,
                 regions: Mapping[str, Region], units: Units) -> None:
        self._module, self._device, self._seed, self._regions = source.build(), device, seed, regions
        self._units = units
        self._parameters = dict(self._module.named_parameters(remove_duplicate=False))
        self._buffers = dict(self._module.named_buffers(remove_duplicate=False)) | dict(traced.program.constants)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        """Return the parameter, buffer or constant of that name, on the run's device."""
        if name not in self._parameters:
            if name not in self.buffers:
                self.buffers[name] = value_of(name, self._buffers[name], self._seed).to(self._device, copy=True)
            return self.buffers[name]
        if name not in self.parameters:
            given = self._parameters[name]
            value = parameters.cut_region(value_of(name, given, self._seed), self._regions.get(name, ()))
            needs_gradient = given.requires_grad and (given.is_floating_point() or given.is_complex())
            if name in self._units.of:
                self.parameters[name] = self._units.of[name].fill(name, value, needs_gradient=needs_gradient)
            else:
                value = value.to(self._device, copy=not given.is_meta)
                self.parameters[name] = torch.nn.Parameter(value, requires_grad=needs_gradient)
        return self.parameters[name]


def _require_same(graph: Graph, other: Graph) -> None:
    if graph.op_names != other.op_names or graph.tensor_names != other.tensor_names:
        mine, theirs = set(graph.op_names), set(other.op_names)
        differing = sorted(mine ^ theirs) or ["their order"]
        raise PlanError(f"the model traced for {graph.batch} and for {other.batch} samples has different operators "
                        f"({', '.join(differing[:3])}): give all replicas the same share")
