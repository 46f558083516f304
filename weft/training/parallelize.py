"""``weft.parallelize``: an ordinary module in a training script becomes one rank's part of a plan.

    model = weft.parallelize(model, example_inputs, "plan.json", optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3))
    for batch in batches:
        loss = model.step(batch)

The script is started with ``torchrun``, one process for each device of the plan; every process builds the same module
and calls the same methods. Without ``torchrun`` it is one process, for a plan of one device.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from os import PathLike
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from weft.base.errors import ClusterError, InputError, ModelError, RunError
from weft.base.files import load_json
from weft.cluster import read_cluster
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.model.fidelity import check_trace
from weft.model.forward import current_autocast
from weft.model.parts import Verdict
from weft.model.source import ModelSource
from weft.model.zoo import Mode
from weft.plan.cut import check_cut, finest_parts, loss_parts
from weft.plan.notes import plan_notes, rule_notes
from weft.plan.plan import Optimizer, OptimizerKind, Plan, load_plan, parse_plan, plan_to_json
from weft.plan.program import Program
from weft.planning.make import SearchOptions, search_plans
from weft.run.checkpoint import model_state
from weft.run.failures import together
from weft.run.prepare import Tracer, compile_notes, connect_ranks, lower_to_run, prepare_rank
from weft.run.transport import Transport, meeting_store
from weft.run.watch import expect_steps, watch_script
from weft.run.worker import check_world, own_device
from weft.search.common.degrees import NONE_FIXED, Degrees, DegreeWords
from weft.search.common.problem import PlanOptions
from weft.training.batches import Batch, counted_targets, digest
from weft.training.trainer import NEEDS_WHOLE, MakeOptimizer, Trainer, without_optimizer

log = logging.getLogger(__name__)


def parallelize(model: torch.nn.Module, example_inputs: Batch, cluster_or_plan: Plan | Cluster | str | PathLike[str], *,
                optimizer: MakeOptimizer | None = None, batch: int | None = None, microbatches: int | None = None,
                devices: Sequence[str] | None = None, max_grad_norm: float | None = None, device: str | None = None,
                seed: int = 0, timeout_s: float = 300.0, compile: bool | None = None,  # noqa: A002
                **degrees: Unpack[DegreeWords]) -> Trainer:
    """Return this rank's part of ``model``, ready to train under a plan.

    The model's forward takes ``example_inputs`` (a tensor, or several) and returns the loss, a mean over samples, or a
    tuple that begins with it. ``cluster_or_plan`` is a plan or its file, or a cluster, its file or a text such as
    ``"4 x A100-80GB"``: then rank 0 plans, and all ranks follow.

    ``optimizer`` makes the optimizer of a list of parameters; without it the plan's own is used. ``batch`` is the
    number of samples in a step (default: the plan's, else that of the example); ``microbatches`` and ``seed`` are for
    planning. ``devices`` names those of the cluster that are left: then it is planned again for these. With
    ``max_grad_norm`` gradients are scaled so that their norm over the whole model is at most that. ``device`` is
    ``cpu``, ``cuda`` or one for each rank (see ``weft run``); default: GPUs if there is one for each local rank.
    ``timeout_s`` is the longest wait for another rank. ``compile`` runs stages as compiled graphs, or operator by
    operator; default: as planned. ``degrees`` (``tp``, ``pp``, ``dp``, ``zero``, ``recompute`` ...) fix what is known
    of a plan that is to be made: see ``weft.search.common.degrees``.

    The trainer keeps nothing of ``model``: its memory is free once the script has let go of it.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = None
    if dist.is_initialized():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    else:
        store = meeting_store(timeout_s, rank=rank) if "MASTER_ADDR" in os.environ else dist.HashStore()
    where = device or _usual_device()
    transport = Transport(
        rank=rank, num_ranks=num_ranks, device=own_device(where, rank=rank, num_ranks=num_ranks), timeout_s=timeout_s,
        store=store, by_host="," in where)
    watch_script(transport)
    try:
        with together(transport, "looking at the arguments"):
            source, wanted = source_of_module(model, example_inputs, batch), wanted_optimizer(optimizer, model)
            fixed = Degrees(**degrees)
            _check_limit(max_grad_norm)
        plan = _shared_plan(transport, lambda: _find_plan(
            source, cluster_or_plan, batch=batch, microbatches=microbatches, devices=devices, seed=seed,
            num_ranks=num_ranks, optimizer=wanted.kind, whole=wanted.is_whole, compiled=bool(compile), degrees=fixed))
        if compile is not None:
            plan = replace(plan, compiled=compile)
        check_world(plan, num_ranks)
        expect_steps(plan.search.step_time)
        _check_same(model, transport)
        return _make_trainer(model, source, plan, transport, optimizer=optimizer, max_grad_norm=max_grad_norm,
                             seed=seed)
    except BaseException:
        transport.abort()
        transport.close()
        raise


def _make_trainer(model: torch.nn.Module, source: ModelSource, plan: Plan, transport: Transport, *,
                  optimizer: MakeOptimizer | None, max_grad_norm: float | None, seed: int) -> Trainer:
    """Return the rank's part of the model; whatever fails on one rank ends all of them."""
    autocast = _same_autocast(transport)
    with together(transport, "tracing the model"):
        tracer = Tracer(source)
        program = lower_to_run(without_optimizer(plan), tracer)
    with together(transport, "trying the model on its example"):
        examples = source.inputs(plan.model.batch)
        notes = _try_example(program, tracer, model, examples, transport.device) if transport.rank == 0 else ()
        parts = loss_parts(program)
        is_compared = parts[:2] == finest_parts(plan)[:2]
        targets = counted_targets(tracer.trace, parts, batch=plan.model.batch, example=dict(
            zip(tracer.trace(program.graph.batch).program.inputs, examples, strict=True)) if is_compared else None)
    notes = _announced(transport, (*_notes(program, tracer), *notes))
    connect_ranks(program, tracer, transport)
    random_seed = transport.share_record(torch.initial_seed())
    with together(transport, "preparing its part of the model"):
        prepared = prepare_rank(program, tracer, transport, seed=seed, random_seed=random_seed)
    notes += _announced(transport, compile_notes(prepared, transport))
    with together(transport, "preparing its part of the model"):
        return Trainer(plan, prepared, transport, optimizer=optimizer, max_grad_norm=max_grad_norm, notes=notes,
                       state=model_state(model, program, rank=transport.rank, seed=seed), examples=examples,
                       autocast=autocast, targets=targets)


def _same_autocast(transport: Transport) -> str | None:
    """Return the autocast that is on, which is part of the model; raise ``InputError`` unless it is so on all ranks."""
    own = current_autocast()
    expected = transport.share_record(own)
    with together(transport, "tracing the model"):
        if own != expected:
            raise InputError(f"torch.autocast around weft.parallelize is {own or 'off'} here, but {expected or 'off'} "
                             "on rank 0: it is part of the model and must be the same on all ranks")
    return own


def _try_example(program: Program, tracer: Tracer, model: torch.nn.Module, examples: Sequence[Tensor],
                 device: torch.device) -> tuple[str, ...]:
    """Return what is to be noted about the model on its example.

    Raise ``ModelError`` if its trace computes something else, or if its loss is another when the plan cuts the batch.
    """
    traced = tracer.trace(program.graph.batch)
    return (*_judged(check_trace(traced, model, traced.source.inputs(), device=device)),
            *_judged(check_cut(program.plan, program.graph, model, examples, device=device)))


def _judged(verdict: Verdict) -> tuple[str, ...]:
    """Return a verdict's note, if it has one; raise ``ModelError`` for a problem."""
    if verdict.problem:
        raise ModelError(verdict.problem)
    return (verdict.note,) if verdict.note else ()


def _notes(program: Program, tracer: Tracer) -> tuple[str, ...]:
    """Return what the user should know about the model under the plan."""
    plan = program.plan
    notes = (*program.graph.warnings, *plan_notes(program.graph, plan))
    if any(len(replica.devices) > 1 for stage in plan.stages for replica in stage.replicas):
        notes += rule_notes(tracer.trace(program.graph.batch))
    return notes


def _announced(transport: Transport, notes: Sequence[str]) -> tuple[str, ...]:
    """Return rank 0's notes on all ranks, after it has told them."""
    if transport.rank == 0:
        for note in notes:
            log.warning("note: %s", note)
    return tuple(transport.share_record(list(notes)))


def _usual_device() -> str:
    """Return ``cuda`` where there is a GPU for each rank of this machine."""
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= wanted else "cpu"


# ---- the model ------------------------------------------------------------------------------------------------------


class _Given(ModelSource):
    """A module that is there already, in the mode it is in."""

    __slots__ = ()

    def build(self) -> torch.nn.Module:
        """Return the module as it is."""
        return self.builder(self.mode)


def source_of_module(model: torch.nn.Module, example_inputs: Batch, batch: int | None = None) -> ModelSource:
    """Return a module and its inputs as what is traced; ``batch`` is the samples of a step if not those of the example.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    given = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    inputs = tuple(given) if isinstance(given, Sequence) else ()
    if not inputs or not all(isinstance(item, Tensor) for item in inputs):
        kinds = ", ".join(type(item).__name__ for item in inputs) or type(example_inputs).__name__
        raise ModelError("example_inputs must be a tensor or a tuple of tensors, as the model's forward takes them, "
                         f"not {kinds}")
    own = inputs[0].shape[0] if inputs[0].ndim else 1
    if not own:
        raise InputError(f"example_inputs have no samples: the first is of {tuple(inputs[0].shape)}; give at least one")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise InputError(f"batch must be a number of samples, 1 or more, not {batch!r}")

    def sample(mode: Mode, wanted: int, seed: int) -> tuple[Tensor, ...]:
        index = torch.arange(wanted) % own
        return tuple(item[index.to(item.device)] if item.ndim and item.shape[0] == own else item for item in inputs)

    return _Given(name=type(model).__name__, spec="", batch=batch or own, mode="training", builder=lambda mode: model,
                  sampler=sample)


def _check_same(model: torch.nn.Module, transport: Transport) -> None:
    """Raise ``RunError`` on all ranks unless they have built the model with the same parameters and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    digests = {name: f"{digest([tensor])} {tensor.requires_grad}" for name, tensor in tensors if not tensor.is_meta}
    expected = transport.share_record(digests)
    differing = [name for name in (*expected, *digests) if digests.get(name) != expected.get(name)]
    _, first = transport.first_record(differing[:1])
    if first:
        raise RunError(f"the ranks have built different models: {first[0]!r} is not the same on all of them. Call "
                       "torch.manual_seed with the same seed on all ranks before building the model")


def _shared_plan(transport: Transport, find: Callable[[], Plan]) -> Plan:
    """Return the plan that rank 0 finds, on all ranks; what it raises is raised on all."""
    record: dict[str, Any] = {}
    with together(transport, "finding the plan"):
        if transport.rank == 0:
            record = plan_to_json(find())
    return parse_plan(transport.share_record(record))


def _find_plan(source: ModelSource, given: Plan | Cluster | str | PathLike[str], *, batch: int | None,
               microbatches: int | None, devices: Sequence[str] | None, seed: int, num_ranks: int,
               optimizer: OptimizerKind | None, whole: bool, compiled: bool, degrees: Degrees = NONE_FIXED) -> Plan:
    """Return the plan that was given, or one for the cluster, or for what is left of it."""
    item = _read(given) if isinstance(given, str | PathLike) else given
    if not isinstance(item, Plan | Cluster):
        raise InputError(f"cluster_or_plan is {type(given).__name__}: give a plan or its file, or a cluster, its file "
                         "or a text such as '2 x cpu'")
    if isinstance(item, Plan):
        if degrees:
            raise InputError(f"{degrees.describe()} is for planning, but a plan was given: leave it out, or give a "
                             "cluster")
        if item.model.mode != "training":
            raise InputError("the plan is for inference: make one with --mode training")
        if batch is not None and batch != item.model.batch:
            raise InputError(f"batch is {batch}, but the plan is for {item.model.batch} samples: leave it out")
        if devices is None:
            return item
        if optimizer is not None:
            item = replace(item, optimizer=replace(item.optimizer, kind=optimizer))
        return plan_again(item, source, devices, whole_parameters=whole)
    cluster = item if devices is None else devices_left(item, devices)
    if cluster.num_devices != num_ranks:
        raise InputError(f"the cluster has {cluster.num_devices} devices but there are {num_ranks} processes: start as "
                         "many, with torchrun, or name the devices that are left (devices=...)")
    options = PlanOptions(batch=source.batch, microbatches=microbatches, seed=seed, dtype=_dtype_of(source),
                          own_dtypes=True, optimizer=Optimizer(kind=optimizer or "adamw"), compiled=compiled,
                          whole_parameters=whole, degrees=degrees)
    return plan_for(source, cluster, options)


def _read(path: str | PathLike[str]) -> Plan | Cluster:
    """Return what is in the file, or the cluster that the text lists."""
    text = os.fspath(path)
    if os.path.isfile(text) and text.endswith((".json", ".json.gz")):
        value = load_json(text)
        if isinstance(value, dict) and value.get("format") == "weft.plan":
            return load_plan(text)
    return read_cluster(text)


def _dtype_of(source: ModelSource) -> str:
    """Return the dtype of most parameters, for predictions."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in source.build().parameters():
        counts[tensor.dtype] += tensor.numel()
    return str(max(counts, key=counts.__getitem__, default=torch.float32)).removeprefix("torch.")


def _check_limit(max_grad_norm: object) -> None:
    is_number = type(max_grad_norm) is not bool and isinstance(max_grad_norm, Real) and float(max_grad_norm) > 0
    if max_grad_norm is not None and not is_number:
        raise InputError("max_grad_norm must be a number above 0, or None to leave gradients as they are, not "
                         f"{max_grad_norm!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedOptimizer:
    """What planning must know about the user's optimizer."""

    kind: OptimizerKind | None = None
    """The kind whose memory is like its own; None if the plan's is used."""
    is_whole: bool = False
    """It looks at parameters as a whole."""


def wanted_optimizer(make: MakeOptimizer | None, model: torch.nn.Module | None = None) -> WantedOptimizer:
    """Return what the user's function makes of a parameter that is a matrix, as some optimizers take no other."""
    if make is None:
        return WantedOptimizer()
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        name = type(make).__name__
        raise InputError(f"optimizer is {'an' if name[0] in 'AEIOU' else 'a'} {name}, but it must be a function that "
                         "returns one for the parameters that this rank holds, such as `lambda ps: "
                         f"torch.optim.{name if isinstance(make, torch.optim.Optimizer) else 'AdamW'}(ps, lr=1e-3)`")
    made = make([torch.nn.Parameter(torch.zeros(2, 2))])
    own = set() if model is None else {id(item) for item in model.parameters()}
    if any(id(item) in own for group in getattr(made, "param_groups", ()) for item in group["params"]):
        raise InputError("the optimizer is made of the module's own parameters, which the trainer does not use, so "
                         "nothing would be trained: make it of the list that your function is given, such as "
                         "`lambda ps: torch.optim.AdamW(ps, lr=1e-3)`")
    kind: OptimizerKind = "adamw" if isinstance(made, torch.optim.AdamW) else "adam"
    if isinstance(made, torch.optim.SGD) and not made.defaults.get("momentum"):
        kind = "sgd"
    return WantedOptimizer(kind=kind, is_whole=type(made).__name__ in NEEDS_WHOLE)


def plan_for(source: ModelSource, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return the best plan that the planner finds for the model on the cluster."""
    best = search_plans(source, cluster, options, SearchOptions(try_example=False)).comparison.best
    assert best.plan is not None, "the search raises otherwise"
    return best.plan


def plan_again(plan: Plan, source: ModelSource, devices: Sequence[str], *, whole_parameters: bool = False) -> Plan:
    """Return a new plan for the same step on those devices of the old plan's cluster that are left.

    What only saves memory, states in pieces and recomputation, is done again where it is needed.
    """
    options = PlanOptions(batch=plan.model.batch, mode=plan.model.mode, dtype=plan.model.dtype, seed=plan.search.seed,
                          own_dtypes=source.dtype is None, optimizer=replace(plan.optimizer, sharded=False),
                          compiled=plan.compiled, whole_parameters=whole_parameters)
    return plan_for(source, devices_left(cluster_of(plan), devices), options)


def cluster_of(plan: Plan) -> Cluster:
    """Return the cluster that a plan describes."""
    if plan.cluster.description is None:
        raise InputError("the plan does not describe its cluster, so it cannot be planned again: make it with "
                         "`weft plan`, or give a cluster")
    return parse_cluster(plan.cluster.description, where="the plan's cluster.description")


def devices_left(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """Return the cluster with only the devices named, in its own order, and the links among them and switches."""
    unknown = [name for name in names if name not in cluster.device_index]
    if unknown or not names:
        known = ", ".join(device.name for device in cluster.devices[:8])
        raise ClusterError(f"cluster {cluster.name!r} has no device {unknown[0]!r}: it has {known}" if unknown else
                           f"no devices are left: name some of {known}")
    devices = tuple(device for device in cluster.devices if device.name in names)
    gone = {device.name for device in cluster.devices} - set(names)
    links = tuple(link for link in cluster.links if not gone & {link.source, link.target})
    return replace(cluster, devices=devices, links=links)
