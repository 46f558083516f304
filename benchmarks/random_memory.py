"""The peaks of ranks as measured beside those that the memory account of their plan promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.random_ranks import RankOutcome
from weft.model.trace import TracedModel, trace
from weft.plan.memory import account_memory
from weft.plan.program import Program
from weft.run.memory_meter import MeterRecord, compare_memory
from weft.run.prepare import Tracer
from weft.run.result import RankMemory

SLACK: Final = 1.02
"""So many times the account's peak still counts as within it: adding counters and other tensors of a few bytes."""

FAR_BELOW: Final = 0.9
"""Who holds less than this part of what was promised is told, and what was promised too much."""
_SURPLUS: Final = {
    "activations": "tensors that another stage's backward keeps, and gradients that were joined in place or freed before",
    "buffers": "room for exchanges that may begin inside the backward, and had not, and messages that had come later",
    "gradients": "gradients that no backward gave", "optimizer": "states of what was never updated",
    "parameters": "parameters that are read in part"}
"""By category, what the account holds at its peak that a run need not."""


class FullTracer(Tracer):
    """Traces as a planner does, with what autograd keeps looked at, so that the account is the plan's promise."""

    def trace(self, num_samples: int, *, batch_dims: bool = False) -> TracedModel:
        """Return the model traced for that many samples, each number once."""
        key = num_samples, True
        if key not in self._traced:
            self._traced[key] = trace(self.source, batch=num_samples, batch_dims=True)
        return self._traced[key]


@dataclass(kw_only=True)
class Peaks:
    """What came of one plan."""

    ratios: list[float] = field(default_factory=list)
    """Measured over promised peak memory, for each rank."""
    above: list[str] = field(default_factory=list)
    """Where more was measured than promised, and why."""
    below: list[str] = field(default_factory=list)
    """Where far less was measured, and of what more was promised."""
    unexplained: int = 0
    """On so many ranks nobody knows why."""


def compare_peaks(program: Program, outcomes: Sequence[RankOutcome]) -> Peaks:
    """Return what the ranks have held at most beside what the account promised."""
    result, records = Peaks(), [item.memory for item in outcomes if item.memory is not None]
    for rank, item in enumerate(compare_memory(program, account_memory(program), records)):
        if item.account_bytes:
            result.ratios.append(item.measured_bytes / item.account_bytes)
            if result.ratios[-1] > SLACK:
                causes, is_explained = _causes(item, records[rank], outcomes[rank].libraries)
                result.unexplained += not is_explained
                more = {name: item.measured[name] - item.account[name] for name in item.account}
                result.above.append(f"rank {rank}: {item.measured_bytes} for {item.account_bytes} promised "
                                    f"({item.difference:+.1%}) in {item.measured_at} (account {item.account_at}), by "
                                    f"category {more}, inside {item.inside}; {causes}")
            elif result.ratios[-1] < FAR_BELOW:
                surplus = {name: item.account[name] - item.measured[name] for name in item.account}
                name = max(surplus, key=lambda key: surplus[key])
                result.below.append(f"rank {rank}: {item.measured_bytes} for {item.account_bytes} promised "
                                    f"({item.difference:+.1%}) in {item.account_at}: {surplus[name]} too much of {name} "
                                    f"({_SURPLUS[name]})")
    return result


def _causes(item: RankMemory, record: MeterRecord, libraries: int) -> tuple[str, bool]:
    """Return the parts of a difference, and whether the promise is kept without them."""
    at = record.peak.index(max(record.peak))
    running = next((name for name in record.at[at] if name.startswith("aten::")), "nothing that PyTorch names")
    outside = next((f" in {name}" for name in record.at[at][::-1]
                    if not name.startswith(("aten::", "autograd::", "gloo:"))), "")
    counters = max(0, item.measured["optimizer"] - item.account["optimizer"])
    rest = item.measured_bytes - record.inside[at] - libraries - counters - item.account_bytes
    is_explained = rest <= (SLACK - 1) * item.account_bytes
    return (f"workspace of {running}{outside} {record.inside[at]}, cuBLAS's {libraries}, the optimizer's counters {counters}, "
            f"{'rest' if is_explained else 'UNEXPLAINED'} {rest}"), is_explained
