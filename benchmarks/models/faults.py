"""The model and the script of ``bench_faults``: four layers, and steps without end.

As a script (``torchrun faults.py PLAN``) it trains with ``weft.parallelize``. Where ``WEFT_FAULT_MARKS`` names a folder,
every rank notes there that it has taken its first step: so the benchmark knows when steps are under way, and who is who.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from weft.run.executor import Executor

WIDTH, BATCH = 64, 8


class Layers(nn.Module):
    """Twice a wide layer and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.more, self.less = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.down(self.up(x).relu())
        return self.less(self.more(x).relu()).pow(2).mean()


def layers(batch: int = BATCH, seed: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the model with inputs."""
    return Layers(), (torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def _mark_first_step(folder: str) -> None:
    step = Executor.step

    def marking(self: Executor, number: int = 0) -> None:
        step(self, number)
        mark = Path(folder) / os.environ["RANK"]
        if not mark.exists():
            mark.with_suffix(".new").write_text(str(os.getpid()))
            mark.with_suffix(".new").rename(mark)

    Executor.step = marking  # type: ignore[method-assign]


if "RANK" in os.environ and "WEFT_FAULT_MARKS" in os.environ:
    _mark_first_step(os.environ["WEFT_FAULT_MARKS"])

if __name__ == "__main__":
    import weft

    plan = weft.load_plan(sys.argv[1])
    model, inputs = layers(plan.model.batch)
    trainer = weft.parallelize(model, inputs, plan, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-3))
    while True:
        trainer.step(inputs)
