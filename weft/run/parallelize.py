"""``weft.parallelize``: an ordinary module in a training script becomes one rank's part of a plan.

    model = weft.parallelize(model, example_inputs, "plan.json", optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3))
    for batch in batches:
        loss = model.step(batch)

The script is started with ``torchrun``, one process for each device of the plan; every process builds the same module
and calls the same methods. Without ``torchrun`` it is one process, for a plan of one device.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import InputError, ModelError, RunError, WeftError
from weft.model.source import ModelSource
from weft.model.zoo import Mode
from weft.plan.plan import Optimizer, OptimizerKind, Plan, load_plan, parse_plan, plan_to_json
from weft.run.__main__ import own_device
from weft.run.checkpoint import model_state
from weft.run.prepare import Tracer, connect_ranks, lower_to_run, prepare_rank
from weft.run.replan import devices_left, plan_again, plan_for
from weft.run.trainer import NEEDS_WHOLE, Batch, MakeOptimizer, Trainer, without_optimizer
from weft.run.transport import Transport, torchrun_store
from weft.run.worker import check_world

if TYPE_CHECKING:
    from weft.cluster.cluster import Cluster

NUM_HASHED = 4096
"""Bytes of each parameter and buffer whose order counts when ranks compare their models."""


def parallelize(model: torch.nn.Module, example_inputs: Batch, cluster_or_plan: Plan | Cluster | str | PathLike[str], *,
                optimizer: MakeOptimizer | None = None, batch: int | None = None, microbatches: int | None = None,
                devices: Sequence[str] | None = None, max_grad_norm: float | None = None, device: str | None = None,
                seed: int = 0, timeout_s: float = 300.0) -> Trainer:
    """Return this rank's part of ``model``, ready to train under a plan.

    The model's forward takes ``example_inputs`` (a tensor, or several) and returns the loss, a mean over samples, or a
    tuple that begins with it. ``cluster_or_plan`` is a plan or its file, or a cluster, its file or a text such as
    ``"4 x A100-80GB"``: then rank 0 plans, and all ranks follow.

    ``optimizer`` makes the optimizer of a list of parameters; without it the plan's own is used. ``batch`` is the
    number of samples in a step (default: the plan's, else that of the example); ``microbatches`` and ``seed`` are for
    planning. ``devices`` names those of the cluster that are left: then it is planned again for these. With
    ``max_grad_norm`` gradients are scaled so that their norm over the whole model is at most that. ``device`` is
    ``cpu``, ``cuda`` or one for each rank (see ``weft run``); default: GPUs if there is one for each local rank.
    ``timeout_s`` is the longest wait for another rank.

    The trainer keeps nothing of ``model``: its memory is free once the script has let go of it.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = None
    if dist.is_initialized():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    else:
        store = torchrun_store(timeout_s, rank=rank) if "MASTER_ADDR" in os.environ else dist.HashStore()
    where = device or _usual_device()
    transport = Transport(
        rank=rank, num_ranks=num_ranks, device=own_device(where, rank=rank, num_ranks=num_ranks), timeout_s=timeout_s,
        store=store, by_host="," in where)
    source = source_of_module(model, example_inputs, batch)
    plan = _shared_plan(transport, lambda: _find_plan(
        source, cluster_or_plan, batch=batch, microbatches=microbatches, devices=devices, seed=seed,
        num_ranks=num_ranks, optimizer=_optimizer_kind(optimizer), whole=_needs_whole(optimizer)))
    check_world(plan, num_ranks)
    _check_same(model, transport)
    tracer = Tracer(source)
    program = lower_to_run(without_optimizer(plan), tracer)
    connect_ranks(program, tracer, transport)
    prepared = prepare_rank(program, tracer, transport, seed=seed,
                            random_seed=transport.share_record(torch.initial_seed()))
    return Trainer(plan, prepared, transport, state=model_state(model, program, rank=rank, seed=seed),
                   examples=source.inputs(plan.model.batch), optimizer=optimizer, max_grad_norm=max_grad_norm)


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
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    if not inputs or not all(isinstance(item, Tensor) for item in inputs):
        raise ModelError("example_inputs must be a tensor or a tuple of tensors, as the model's forward takes them")
    own = inputs[0].shape[0] if inputs[0].ndim else 1

    def sample(mode: Mode, wanted: int, seed: int) -> tuple[Tensor, ...]:
        index = torch.arange(wanted) % own
        return tuple(item[index.to(item.device)] if item.ndim and item.shape[0] == own else item for item in inputs)

    return _Given(name=type(model).__name__, spec="", batch=batch or own, mode="training", builder=lambda mode: model,
                  sampler=sample)


def _check_same(model: torch.nn.Module, transport: Transport) -> None:
    """Raise ``RunError`` on all ranks unless they have built the model with the same parameters and buffers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    digests = {name: _digest(tensor) + str(tensor.requires_grad) for name, tensor in tensors if not tensor.is_meta}
    expected = transport.share_record(digests)
    differing = [name for name in (*expected, *digests) if digests.get(name) != expected.get(name)]
    records = transport.gather_records(differing[:1]) or []
    first = transport.share_record(next((name for record in records for name in record), None))
    if first is not None:
        raise RunError(f"the ranks have built different models: {first!r} is not the same on all of them. Call "
                       "torch.manual_seed with the same seed on all ranks before building the model")


def _digest(tensor: Tensor) -> str:
    """Return what differs for tensors that differ: of the first entries a hash, of all a sum, which is quick."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    total = int(words.sum()) + int(data[words.numel() * 8 :].sum())
    return hashlib.sha256(bytes(data[:NUM_HASHED].cpu().numpy()) + str(total).encode()).hexdigest()[:16]


# ---- the plan -------------------------------------------------------------------------------------------------------


def _shared_plan(transport: Transport, find: Callable[[], Plan]) -> Plan:
    """Return the plan that rank 0 finds, on all ranks; what it raises is raised on all."""
    record: dict[str, Any] = {}
    problem: WeftError | None = None
    if transport.rank == 0:
        try:
            record = {"plan": plan_to_json(find())}
        except WeftError as found:
            problem, record = found, {"problem": str(found)}
    record = transport.share_record(record)
    if problem is not None:
        raise problem
    if "problem" in record:
        raise InputError(f"rank 0 has no plan: {record['problem']}")
    return parse_plan(record["plan"])


def _find_plan(source: ModelSource, given: Plan | Cluster | str | PathLike[str], *, batch: int | None,
               microbatches: int | None, devices: Sequence[str] | None, seed: int, num_ranks: int,
               optimizer: OptimizerKind | None, whole: bool) -> Plan:
    """Return the plan that was given, or one for the cluster, or for what is left of it."""
    item = _read(given) if isinstance(given, str | PathLike) else given
    if isinstance(item, Plan):
        if item.model.mode != "training":
            raise InputError("the plan is for inference: make one with --mode training")
        if batch is not None and batch != item.model.batch:
            raise InputError(f"batch is {batch}, but the plan is for {item.model.batch} samples: leave it out")
        if optimizer is not None and devices is not None:
            item = replace(item, optimizer=replace(item.optimizer, kind=optimizer))
        return item if devices is None else plan_again(item, source, devices, whole_parameters=whole)
    cluster = item if devices is None else devices_left(item, devices)
    if cluster.num_devices != num_ranks:
        raise InputError(f"the cluster has {cluster.num_devices} devices but there are {num_ranks} processes: start as "
                         "many, with torchrun, or name the devices that are left (devices=...)")
    from weft.search.problem import PlanOptions

    options = PlanOptions(batch=source.batch, microbatches=microbatches, seed=seed, dtype=_dtype_of(source),
                          optimizer=Optimizer(kind=optimizer or "adamw"), whole_parameters=whole)
    return plan_for(source, cluster, options)


def _read(path: str | PathLike[str]) -> Plan | Cluster:
    """Return what is in the file, or the cluster that the text lists."""
    from weft.cluster import read_cluster

    text = os.fspath(path)
    if os.path.isfile(text) and text.endswith((".json", ".json.gz")):
        from weft.files import load_json

        value = load_json(text)
        if isinstance(value, dict) and value.get("format") == "weft.plan":
            return load_plan(text)
    return read_cluster(text)


def _dtype_of(source: ModelSource) -> str:
    """Return the dtype of most parameters, for predictions."""
    counts: dict[str, int] = {}
    for tensor in source.build().parameters():
        name = str(tensor.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + tensor.numel()
    return max(counts, key=lambda name: counts[name], default="float32")


def _optimizer_kind(make: MakeOptimizer | None) -> OptimizerKind | None:
    """Return the kind of optimizer whose memory is like that of what the user's function makes."""
    if make is None:
        return None
    made = _example(make)
    if isinstance(made, torch.optim.SGD) and not made.defaults.get("momentum"):
        return "sgd"
    return "adamw" if isinstance(made, torch.optim.AdamW) else "adam"


def _needs_whole(make: MakeOptimizer | None) -> bool:
    """Return whether the user's optimizer looks at parameters as a whole."""
    return make is not None and type(_example(make)).__name__ in NEEDS_WHOLE


def _example(make: MakeOptimizer) -> object:
    """Return the user's optimizer for a parameter that is a matrix, as some of them take no other."""
    return make([torch.nn.Parameter(torch.zeros(2, 2))])
