"""Two ranks that train small models with ``weft.parallelize``: ``python -m tests.training.trainer_ranks FOLDER``.

Each function of ``CHECKS`` runs on both ranks; what it returns goes into ``FOLDER/rankN.json``, for ``test_trainers.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import weft
from tests.run.plans import cut, pipeline_plan, replicated_plan
from weft.model.trace import TracedModel, trace
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Optimizer, Plan, Replica, Stage
from weft.search.joint.placements import with_stored_parameters
from weft.sharding.named_ops import named_ops
from weft.training.parallelize import source_of_module
from weft.training.trainer import Trainer

WIDTH, BATCH = 32, 8
RANK = int(os.environ.get("RANK", "0"))


class Normed(nn.Module):
    """A batch norm after a linear layer, so that it lies in the second half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x).relu())).pow(2).sum(1).mean()


class Masked(nn.Module):
    """The gradient of each weight counts in how many samples dropout has kept it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.5).sum(1).mean()


class Detached(nn.Module):
    """One weight that only a detached value depends on, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.used(x) * self.aside(x).detach() * (self.turn * 1j).abs()).pow(2).sum(1).mean()


class Plain(nn.Module):
    """Two layers and a mean over samples, or their sum."""

    def __init__(self, *, total: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.total = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = self.second(torch.tanh(self.first(x))).pow(2).mean(1)
        return losses.sum() if self.total else losses.mean()


class Otherwise(Plain):
    """Takes another way while it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1.01 if torch.compiler.is_exporting() else x)


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def traced(model: nn.Module) -> TracedModel:
    return trace(source_of_module(model, inputs()[:2]), batch=2, backward="rule")


def two_replicas(model: nn.Module, *, sharded: bool = False) -> Plan:
    plan = replicated_plan(traced(model).graph, [[(0, 0.5), (1, 0.5)]], microbatches=1, batch=BATCH, num_devices=2)
    return replace(plan, optimizer=Optimizer(sharded=sharded))


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def weights(trainer: Trainer) -> dict[str, list[float]]:
    return {name: torch.view_as_real(tensor.detach()).flatten().tolist() if tensor.is_complex()
            else tensor.detach().flatten().tolist() for name, tensor in trainer.named_parameters()}


def saved_statistics(folder: Path) -> dict[str, Any]:
    graph = traced(Normed()).graph
    plan = pipeline_plan(graph, [0, 1], one_f_one_b(2, 4), microbatches=4, ops=cut(graph, 2))
    with weft.parallelize(Normed(), inputs(), plan, optimizer=sgd) as trainer:
        trainer.step(inputs())
        state = load_file(trainer.save_checkpoint(folder / "statistics") / "model.safetensors")
    return {"batches": int(state["norm.num_batches_tracked"]), "mean": float(state["norm.running_mean"].abs().sum())}


def shared_statistics(folder: Path) -> list[float]:
    with weft.parallelize(Normed(), inputs(), two_replicas(Normed()), optimizer=sgd) as trainer:
        trainer.step(inputs())
        return trainer._prepared.buffers["norm.running_mean"].tolist()


def masks(folder: Path) -> list[list[float]]:
    """Steps with the process's generator set anew each time; the last two are the second and third once more."""
    found = []
    with weft.parallelize(Masked(), inputs(), two_replicas(Masked()), optimizer=sgd) as trainer:
        def step() -> None:
            before = torch.tensor(weights(trainer)["weight"])
            torch.manual_seed(7)
            trainer.step(torch.ones(BATCH, WIDTH))
            found.append(((before - torch.tensor(weights(trainer)["weight"])) * BATCH / 2).round().tolist())

        step()
        trainer.save_checkpoint(folder / "masks")
        step()
        step()
        trainer.load_checkpoint(folder / "masks")
        step()
        step()
    return found


def tp_group_masks(folder: Path) -> dict[str, Any]:
    """A tp group whose first device has another state of its process's generator than the second."""
    model = Masked()
    found = traced(model)
    ops, sizes = named_ops(found), (2,)
    shapes = {found.graph.tensor_names[tensor]: found.graph.tensor_shapes[tensor] for tensor in found.graph.parameters}
    sharding = with_stored_parameters({name: ("",) for name, op in ops.items() if op.factors is not None}, ops, shapes, sizes)
    stage = Stage(name="s0", ops=found.graph.op_names, replicas=(Replica(devices=("d0", "d1"), mesh={"tensor": 2}),),
                  sharding=sharding)
    plan = replace(two_replicas(model), stages=(stage,), gradients=(), order=dict.fromkeys(("d0", "d1"), ("s0:F:0", "s0:B:0")))
    with weft.parallelize(model, inputs(), plan, optimizer=sgd) as trainer:
        torch.manual_seed(RANK)
        return {"loss": trainer.step(torch.ones(BATCH, WIDTH)), **weights(trainer)}


def decayed(folder: Path) -> dict[str, Any]:
    with weft.parallelize(Detached(), inputs(), two_replicas(Detached()),
                          optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.5)) as trainer:
        trainer.step(inputs())
        return weights(trainer)


def whole_needed(folder: Path) -> str:
    return message(lambda: weft.parallelize(Normed(), inputs(), two_replicas(Normed(), sharded=True),
                                            optimizer=torch.optim.Adafactor))


def different_models(folder: Path) -> str:
    model = Normed()
    with torch.no_grad():
        model.second.weight[-1, -1] += RANK
    return message(lambda: weft.parallelize(model, inputs(), two_replicas(Normed()), optimizer=sgd))


def pipeline(model: nn.Module) -> Plan:
    graph = traced(model).graph
    return pipeline_plan(graph, [0, 1], one_f_one_b(2, 4), microbatches=4, ops=cut(graph, 2))


def autocast_on(*, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast("cpu", dtype=dtype)


def autocast_later(folder: Path) -> list[Any]:
    """What a step says under an autocast that came later, and the step's loss without it."""
    with weft.parallelize(Plain(), inputs(), pipeline(Plain()), optimizer=sgd) as trainer:
        with autocast_on():
            found = [refusal(lambda: trainer.step(inputs())), refusal(lambda: trainer.eval_loss(inputs()))]
        return [*found, trainer.step(inputs())]


def autocast_traced(folder: Path) -> dict[str, Any]:
    """Losses and weights of a model that was traced under autocast, with and without it around the step."""
    with autocast_on():
        trainer = weft.parallelize(Plain(), inputs(), pipeline(Plain()), optimizer=sgd)
        first = trainer.step(inputs())
    with trainer:
        with autocast_on(dtype=torch.float16):
            other = refusal(lambda: trainer.step(inputs()))
        return {"losses": [first, trainer.step(inputs(1))], "other": other, "weights": weights(trainer)}


def changed_dtype(folder: Path) -> str:
    """What is said when a stage gives another dtype than was planned, on the rank that sends."""
    trainer = weft.parallelize(Plain(), inputs(), pipeline(Plain()), optimizer=sgd)
    found = "" if RANK else refusal(lambda: send_half(trainer))
    torch.distributed.destroy_process_group()
    return found


def send_half(trainer: Trainer) -> None:
    binder = trainer.executor.binder
    channel = next(item for item in trainer.executor.program.channels if item.source == 0)
    (_, make_ready), *_ = binder._parts_to_send(channel)
    make_ready(torch.zeros(2, WIDTH, dtype=torch.bfloat16))


def different_batches(folder: Path) -> list[Any]:
    with weft.parallelize(Plain(), inputs(), two_replicas(Plain()), optimizer=sgd) as trainer:
        shuffled = inputs()[torch.randperm(BATCH, generator=torch.Generator().manual_seed(RANK))]
        found = [refusal(lambda: trainer.step(inputs(RANK))), refusal(lambda: trainer.eval_loss(shuffled)),
                 refusal(lambda: trainer.step(inputs()[: BATCH - RANK])),
                 refusal(lambda: trainer.step(inputs()) if RANK else trainer.eval_loss(inputs()))]
        return [*found, trainer.step(inputs())]


def failing_optimizers(folder: Path) -> list[str]:
    """The user's function fails on one rank: when it is tried out, or when it gets the rank's own parameters."""
    def make(rank: int, *, later: bool) -> Any:
        def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            if rank == RANK and (not later or len(parameters) > 1):
                raise ValueError(f"no learning rate on rank {rank}")
            return sgd(parameters)
        return optimizer

    return [message(partial(weft.parallelize, Plain(), inputs(), two_replicas(Plain()), optimizer=make(rank, later=later)))
            for rank, later in ((0, False), (1, False), (1, True))]


class FailsLater(torch.optim.SGD):
    """Its second step fails on rank 1."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if RANK and self.num_steps == 2:
            raise ValueError("the second step failed")
        return super().step(closure)


def failing_steps(folder: Path) -> list[str]:
    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return FailsLater(parameters, lr=1.0)

    with weft.parallelize(Plain(), inputs(), two_replicas(Plain()), optimizer=make) as trainer:
        trainer.step(inputs())
        return [plainly(lambda: trainer.step(inputs()))]


def other_methods(folder: Path) -> list[str]:
    """The ranks call different methods, none of which either has called before."""
    with weft.parallelize(Plain(), inputs(), two_replicas(Plain()), optimizer=sgd) as trainer:
        found = [refusal(lambda: trainer.eval_loss(inputs()) if RANK else trainer.step(inputs())),
                 refusal(lambda: trainer.step(inputs()) if RANK else trainer.save_checkpoint(folder / "alone")),
                 refusal(lambda: trainer.close() if RANK else trainer.state_dict())]
        trainer._is_closed = False
        return [*found, refusal(lambda: trainer.step(inputs().to_sparse() if RANK else inputs())),
                refusal(lambda: trainer.step(inputs().to("meta") if RANK else inputs()))]


def summed_losses(folder: Path) -> list[Any]:
    model = Plain(total=True)
    found = [message(partial(weft.parallelize, model, inputs(), plan(model), optimizer=sgd)) for plan in (pipeline, two_replicas)]
    graph = traced(model).graph
    whole = pipeline_plan(graph, [0, 1], one_f_one_b(2, 1), microbatches=1, batch=BATCH, ops=cut(graph, 2))
    with weft.parallelize(model, inputs(), whole, optimizer=sgd) as trainer:
        return [*found, trainer.step(inputs())]


def traced_otherwise(folder: Path) -> str:
    """One micro-batch in a pipeline: nothing is cut, so only the trace can be wrong."""
    model = Otherwise()
    graph = traced(model).graph
    plan = pipeline_plan(graph, [0, 1], one_f_one_b(2, 1), microbatches=1, batch=BATCH, ops=cut(graph, 2))
    return message(partial(weft.parallelize, model, inputs(), plan, optimizer=sgd))


def refusal(call: Any) -> str:
    try:
        call()
    except weft.WeftError as problem:
        return str(problem)
    return ""


def plainly(call: Any) -> str:
    try:
        call()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def message(call: Any) -> str:
    try:
        call()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return ""


CHECKS = (saved_statistics, shared_statistics, masks, tp_group_masks, decayed, whole_needed, different_models, autocast_later,
          autocast_traced, changed_dtype, different_batches, failing_optimizers, failing_steps, other_methods, summed_losses,
          traced_otherwise)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {check.__name__: check(folder) for check in CHECKS}
    (folder / f"rank{RANK}.json").write_text(json.dumps(found))
