"""A model that trains under a plan: one rank's part of it, with the steps and checkpoints that all ranks take together.

``weft.training.parallelize`` makes trainers. A step loads the batch, executes the plan's program, and then lets the
optimizer change the parameters that this rank holds; ranks that hold the same parameters change them alike, because
they have the same gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weft.base.errors import InputError, RunError
from weft.model.forward import autocast_off
from weft.plan.lower import lower
from weft.plan.plan import Optimizer, Plan
from weft.run.checkpoint import Checkpoints, ModelState
from weft.run.checkpoint_folder import CheckpointRecord
from weft.run.executor import Executor
from weft.run.failures import raise_on_all
from weft.run.optimizers import make_optimizer
from weft.run.prepare import Prepared
from weft.run.status import Milestone
from weft.run.transport import Transport
from weft.training.batches import Batch, BatchCheck, Batches

MakeOptimizer: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

NEEDS_WHOLE = ("Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP")
"""Optimizers that look at a parameter as a whole: they give other results for its parts."""


def _in_step(method: Callable[[Trainer, Batch], float]) -> Callable[[Trainer, Batch], float]:
    """Return the method so that what comes after it, or after its failure, counts as time of the script."""
    @functools.wraps(method)
    def call(self: Trainer, batch: Batch) -> float:
        try:
            return method(self, batch)
        finally:
            self.transport.status.set(Milestone.BETWEEN)

    return call


class Trainer(torch.nn.Module):
    """One rank's part of a model in training. All ranks call each method together, with the same arguments.

    ``named_parameters`` and ``parameters`` are what this rank holds, by the model's own names; of a parameter that is
    split, the rank's part. The model's mode and device are those it was traced for, and stay so.
    """

    def __init__(self, plan: Plan, prepared: Prepared, transport: Transport, *, state: ModelState,
                 examples: Sequence[Tensor], optimizer: MakeOptimizer | None, max_grad_norm: float | None,
                 autocast: str | None = None, targets: Sequence[BatchCheck] = (),
                 notes: tuple[str, ...] = ()) -> None:
        """``examples`` are inputs of a whole batch, on any device; ``autocast`` what was on when it was traced."""
        super().__init__()
        self.plan, self.transport, self.notes = plan, transport, notes
        """The notes are what the user should know about the model under this plan."""
        self.num_steps = 0
        """Steps taken since the beginning, those before a checkpoint that was loaded included."""
        self.gradient_norm = math.nan
        """Of the last step, before clipping; not computed unless ``max_grad_norm`` is given."""
        self._prepared, self._tensors = prepared, prepared.parameters.tensors
        self._max_grad_norm = max_grad_norm
        expected = [(name, tuple(item.shape), item.dtype)
                    for name, item in zip(prepared.input_names, examples, strict=True)]
        self._batches = Batches(transport, expected, num_samples=plan.model.batch, autocast=autocast, targets=targets)
        self.executor = Executor(prepared, transport)
        self._evaluator: Executor | None = None
        self.optimizer = self._make_optimizer(optimizer)
        """Of this rank's parameters; None where the plan has none and none was given."""
        self._checkpoints = Checkpoints(prepared, transport, plan=plan, state=state, optimizer=self.optimizer,
                                         shares=self.executor.shares)
        units = prepared.parameters.units.of
        self._owned = [self._tensors[name] for name in self._checkpoints.owned() if name not in units]
        self._pieces = [store.own[name] for name, store in units.items() if name in store.own]
        self._own_pieces = [store.own[name] for name, store in units.items() if name in store.own and (
            store.unit.is_first)]
        """Of those, what no other rank counts."""
        self._saved: Path | None = None
        self._is_closed = False

    def _make_optimizer(self, make: MakeOptimizer | None) -> torch.optim.Optimizer | None:
        """Return the optimizer of what this rank trains; where that is nothing, of an empty parameter."""
        trained = self.executor.trained or [torch.nn.Parameter(torch.zeros(0, 2, device=self.transport.device))]
        if make is None:
            return make_optimizer(trained, self.plan.optimizer)
        made = make(trained)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(f"optimizer must be a function that returns a torch.optim.Optimizer for a list of "
                             f"parameters, such as `lambda ps: torch.optim.AdamW(ps, lr=1e-3)`; it returned "
                             f"{type(made).__name__}")
        shapes = {name: self._prepared.program.graph.tensor_shapes[self._prepared.program.graph.tensor_index[name]]
                  for name in self._tensors}
        parts = [name for name, tensor in self.executor.shares.tensors.items() if tuple(tensor.shape) != shapes[name]]
        if parts and type(made).__name__ in NEEDS_WHOLE:
            raise RunError(f"{type(made).__name__} needs whole parameters, but this plan divides {parts[0]!r} and "
                           f"{len(parts) - 1} more, or their state: use an elementwise optimizer, such as AdamW, or "
                           "another plan")
        if isinstance(made, torch.optim.LBFGS):
            raise InputError("LBFGS evaluates the loss several times in a step, which trainers do not: use another "
                             "optimizer")
        return made

    # ---- steps ------------------------------------------------------------------------------------------------------

    @_in_step
    def step(self, batch: Batch) -> float:
        """Return the loss of the batch, the same on all ranks, after one training step on it.

        ``batch`` is what the model's forward takes, for all samples: a tensor, or several in a tuple or list. Every
        rank gets the same and uses its samples of it.
        """
        inputs = self._batches.take(batch, "step")
        with autocast_off():  # where it was on when the model was traced, its casts are in the graph
            self.executor.load(inputs)
            self.executor.step(self.num_steps)
            self._prepared.buffer_shares.spread()
            self.transport.status.set(Milestone.UPDATING)
            self.executor.shares.take_gradients()
            if self._max_grad_norm is not None:
                self._clip(self._max_grad_norm)
            problem = self._update()
            loss, failed = self.transport.totals([self.executor.take_loss(), float(problem is not None)])
            if failed:
                raise_on_all(self.transport, problem, "taking its optimizer's step")
            if self.optimizer is not None:
                self.executor.shares.spread()
        self.num_steps += 1
        return loss

    def _update(self) -> Exception | None:
        """Let the optimizer, which may be the user's, change the parameters; return what it raises."""
        try:
            if self.optimizer is not None:
                self.optimizer.step()
        except Exception as problem:
            return problem
        return None

    def _clip(self, limit: float) -> None:
        """Scale the gradients of all ranks so that their norm together is at most ``limit``."""
        norms = _norms([tensor.grad for tensor in (*self._owned, *self._own_pieces)
                        if tensor.grad is not None and tensor.requires_grad])
        square = float(torch.stack(norms).square().sum()) if norms else 0.0  # one wait for all of them
        self.gradient_norm = math.sqrt(self.transport.total(square))
        factor = limit / (self.gradient_norm + 1e-6)
        units = self._prepared.parameters.units.of
        whole = [tensor for name, tensor in self._tensors.items() if name not in units]
        found = [tensor.grad for tensor in (*whole, *self._pieces) if tensor.grad is not None]
        if not factor >= 1.0 and found:
            torch._foreach_mul_(found, factor)

    @_in_step
    def eval_loss(self, batch: Batch) -> float:
        """Return the loss of a batch, the same on all ranks, and change nothing.

        The model is in the mode it was traced in: one that draws random numbers or takes statistics there is refused.
        """
        inputs = self._batches.take(batch, "eval_loss")
        if self._evaluator is None:
            self._evaluator = self._make_evaluator()
        evaluator, graph = self._evaluator, self._prepared.program.graph
        with autocast_off():
            evaluator.load(inputs)
            evaluator.step()
        name, loss = graph.tensor_names[graph.outputs[0]], 0.0
        for instance, _, values in evaluator.take_results():
            if name in values:
                weight = evaluator.program.instances[instance].num_samples / self.plan.model.batch
                loss += weight * float(values[name].double())
        return self.transport.total(loss)

    def forward(self, *batch: Tensor) -> float:
        """Return ``eval_loss`` of the batch."""
        return self.eval_loss(batch)

    def _make_evaluator(self) -> Executor:
        """Return what executes the forwards of the plan alone, with the same stages."""
        program = self._prepared.program
        uses_random = any(stage.module.uses_random for stage in self._prepared.stages.values())
        if self.transport.total(float(uses_random or self._prepared.takes_statistics)):
            raise RunError("the model draws random numbers or takes statistics over its samples in the mode that it "
                           "was traced in, so its loss is not an evaluation: load a checkpoint into the plain module")
        plan = replace(program.plan, gradients=(), model=replace(program.plan.model, mode="inference"), order={
            device: tuple(token for token in tokens if token.split(":")[1] == "F")
            for device, tokens in program.plan.order.items()})
        return Executor(replace(self._prepared, program=lower(plan, program.graph), factors={}), self.transport)

    # ---- state ------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: str | PathLike[str], *, keep: int | None = 2,
                        extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint to the folder and return where it is: ``folder/step-00000012``.

        Rank 0 writes it; a checkpoint that is there is whole, and the ``keep`` latest stay (None for all). ``extra`` is
        anything that JSON can say, for ``load_checkpoint`` to return. Nothing happens if this step was saved there.
        """
        self._batches.enter("save_checkpoint")
        target = Path(folder) / f"step-{self.num_steps:08d}"
        if self._saved != target:
            self._saved = self._checkpoints.save(Path(folder), step=self.num_steps, keep=keep, extra=extra)
        return target

    def load_checkpoint(self, path: str | PathLike[str], *, optimizer: bool = True) -> CheckpointRecord:
        """Go on from a checkpoint, written under this plan or another, and return what it says about itself.

        ``path`` is a checkpoint, or a folder of which the latest is taken. With ``optimizer=False`` the state of the
        optimizer is left alone.
        """
        self._batches.enter("load_checkpoint")
        found = self._checkpoints.find(Path(path))
        if found is None:
            raise InputError(f"there is no checkpoint in {str(path)!r}: it must hold folders named step-...")
        return self._load(found, optimizer)

    def resume(self, folder: str | PathLike[str]) -> int:
        """Go on from the latest checkpoint in the folder, if there is one; return how many steps were taken before."""
        self._batches.enter("resume")
        found = self._checkpoints.find(Path(folder))
        if found is not None:
            self._load(found, True)
        return self.num_steps

    def _load(self, path: Path, with_optimizer: bool) -> CheckpointRecord:
        record = self._checkpoints.load(path, with_optimizer=with_optimizer)
        self.num_steps, self._saved = record.step, path
        return record

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return on rank 0 the whole model's ordinary state dict, in the host's memory; an empty one on other ranks."""
        self._batches.enter("state_dict")
        return self._checkpoints.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Take the parts of a whole state dict that this rank holds; every rank is given the same."""
        self._batches.enter("load_state_dict")
        self._checkpoints.load_state_dict(state_dict, strict=strict)

    def named_parameters(self, prefix: str = "", recurse: bool = True,
                         remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield what this rank holds, by the model's own names."""
        for name, tensor in self._tensors.items():
            yield f"{prefix}.{name}" if prefix else name, tensor

    def train(self, mode: bool = True) -> Trainer:
        """Return self; the mode that the model was traced in cannot be changed."""
        if not mode:
            raise RunError("a plan's model cannot change to eval mode: call eval_loss, or load a checkpoint into the "
                           "plain module")
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Trainer:
        raise RunError("a plan's model cannot be moved or converted: do that before weft.parallelize")

    # ---- end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Return when all ranks have come here, and give up the connections."""
        if not self._is_closed:
            self._is_closed = True
            self._batches.enter("close")
            self.transport.leave()
            self.transport.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.transport.abort()


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of gradients in double precision."""
    real = [item for item in gradients if not item.is_complex()]
    found = list(torch._foreach_norm(real, 2.0, torch.float64)) if real else []
    return found + [torch.linalg.vector_norm(item, dtype=torch.complex128) for item in gradients if item.is_complex()]


def without_optimizer(plan: Plan) -> Plan:
    """Return the plan without its optimizer step: the trainer takes that itself."""
    return replace(plan, optimizer=Optimizer(kind="none", sharded=plan.optimizer.sharded))
