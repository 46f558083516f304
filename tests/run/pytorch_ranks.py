"""Ranks that run schedule CSVs in PyTorch's own pipeline runtime; ``test_pytorch_runs_csv`` starts this as a program.

    python -m tests.run.pytorch_ranks FOLDER NUM_RANKS

``FOLDER/cases.json`` lists the cases; rank ``r`` leaves its gradients of case ``c`` in ``FOLDER/c.r.pt``, by
``stage.parameter``. It imports once and becomes the ranks by forking; they meet through a file, so no port is taken.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH, SAMPLES = 6, 3
LIMIT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One schedule to run: ``devices[s]`` is the rank of stage ``s``."""

    name: str
    csv: str
    devices: list[int]
    microbatches: int


class Layer(nn.Module):
    """A residual layer, so that gradients do not fade over the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def make_stage(stage: int) -> nn.Module:
    """Return the stage's module, the same in every process."""
    torch.manual_seed(stage)
    return nn.Sequential(Layer(), Layer()).double()


def make_batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and target of all micro-batches."""
    torch.manual_seed(1000)
    return torch.randn(2, microbatches * SAMPLES, WIDTH, dtype=torch.float64).unbind()


def gradients_of(stages: dict[int, nn.Module]) -> dict[str, torch.Tensor]:
    """Return the gradients of the stages' parameters by ``stage.parameter``."""
    return {f"{stage}.{name}": value.grad for stage, module in stages.items() for name, value in module.named_parameters()}


def run_case(case: Case, rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return this rank's gradients after one step of PyTorch's runtime with the case's CSV."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    modules = {stage: make_stage(stage) for stage, device in enumerate(case.devices) if device == rank}
    stages = [PipelineStage(module, stage, len(case.devices), torch.device("cpu"), group=group)
              for stage, module in modules.items()]
    schedule = _PipelineScheduleRuntime(stages, case.microbatches, loss_fn=nn.functional.mse_loss, scale_grads=True)
    schedule._load_csv(case.csv, format="compute_only")
    if rank == 0:
        schedule._dump_csv(f"{case.csv}.comms", format="compute_comms")
    inputs, target = make_batch(case.microbatches)
    schedule.step(*([inputs] if 0 in modules else []), target=target if len(case.devices) - 1 in modules else None)
    return gradients_of(modules)


def main(folder: Path, num_ranks: int) -> int:
    """Fork into the ranks and return 0 if all of them end well."""
    children = []
    for rank in range(num_ranks):
        children.append(os.fork())
        if children[-1] == 0:
            serve(folder, rank, num_ranks)
            os._exit(0)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


def serve(folder: Path, rank: int, num_ranks: int) -> None:
    """Run all cases as one rank; those for fewer ranks in a group of the first ones."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=LIMIT_S))
    for case in load_cases(folder):
        size = max(case.devices) + 1
        group = dist.new_group(list(range(size)))
        if rank < size:
            torch.save(run_case(case, rank, group), folder / f"{case.name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def save_cases(folder: Path, cases: list[Case]) -> None:
    """Write the cases where the ranks look for them."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


def load_cases(folder: Path) -> list[Case]:
    """Return the cases in the folder."""
    return [Case(**case) for case in json.loads((folder / "cases.json").read_text())]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
