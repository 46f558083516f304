"""Section ``tight-run`` of ``bench_schedule``: searched schedules with less memory than 1F1B, run on four processes.

A GPT on four CPU processes (gloo), with one stage on each, or two, over all of them and back. The order is searched with
all, a half and a third of what 1F1B's fullest device holds. Each run must have the gradients of one process, and take
at its peak what the account of its plan says; so 1F1B's own run must not fit the account of half its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.schedule_common import Options
from benchmarks.sections import Row
from weft.cluster import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.plan.check import check_plan
from weft.plan.plan import Optimizer, Plan
from weft.run.launch import run_plan
from weft.run.result import RankMemory, RunOptions
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.placements import PLACEMENTS
from weft.search.joint.scheduled import Search, schedule_search
from weft.search.schedule.from_plan import problem_of_plan, with_schedule
from weft.search.schedule.named import named_schedule
from weft.search.schedule.problem import with_memory

MODEL: Final = "gpt2:layers=8,hidden=64,heads=4,seq=64,vocab=256"
SHARES: Final = {"all": 1.0, "half": 1 / 2, "a third": 1 / 3}
SIZE, MICROBATCHES = 2, 8
NEAR: Final = 0.05
"""Measured peaks are this close to the account, as a part of it."""


def tight_run(options: Options) -> Iterator[Row]:
    """Yield the errors and peaks of runs with all, half and a third of 1F1B's memory, and the control."""
    source = resolve_model(MODEL, mode="training", batch=SIZE, dtype="float64")
    assert isinstance(source, ModelSource)
    graph, cluster = trace(source, batch=SIZE, batch_dims=True).graph, read_cluster("4 x A100-80GB")
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster, dtype="float64"), options=PlanOptions(
        batch=SIZE * MICROBATCHES, microbatches=MICROBATCHES, dtype="float64", optimizer=Optimizer(kind="none")))
    search = schedule_search(time_limit=options.time_limit)
    for placement, split in (("v", False), ("v", True), ("vv", True)):
        peaks = {}
        for words, share in SHARES.items():
            plan = tight_plan(problem, placement, MICROBATCHES, share, search, split_backward=split)
            result = run_plan(plan, MODEL, options=RunOptions(verify=True, memory=True, dtype="float64"))
            check, ranks = result.verification, result.memory
            assert check is not None, "asked for"
            assert ranks is not None, "asked for"
            peaks[words] = ranks
            error, off = max(check.loss_error, check.gradient_error), max(abs(rank.difference) for rank in ranks)
            yield Row(f"placement {placement}, {'split' if split else 'whole'} backward, {words} of 1F1B's memory",
                      f"error {error:.1e}; peaks {_megabytes(ranks)} MB, {off:.1%} from the account at most",
                      f"1e-10, {NEAR:.0%}", error <= 1e-10 and off <= NEAR)
        exceeded = all(before.measured_bytes > (1 + NEAR) * now.account_bytes
                       for before, now in zip(peaks["all"][:1], peaks["half"][:1], strict=True))
        yield Row("control: the run with all of the memory against the account of half", f"exceeds it: {exceeded}",
                  "must exceed it", exceeded)


def _megabytes(ranks: Sequence[RankMemory]) -> str:
    return ", ".join(f"{rank.measured_bytes / 1e6:.3f}" for rank in ranks)


def tight_plan(problem: Problem, placement: str, microbatches: int, share: float, search: Search, *,
               split_backward: bool) -> Plan:
    """Return the placement in the best order found that holds at most this share of what 1F1B's fullest device does."""
    plan = PLACEMENTS[placement](problem, microbatches)
    asked = problem_of_plan(plan, problem.graph, problem.costs, problem.cluster, split_backward=split_backward)
    room = share * max(named_schedule("1f1b", asked.problem, asked.num_microbatches).peak_memory().values())
    found = search(with_memory(asked.problem, dict.fromkeys(asked.problem.device_names, room)), asked.num_microbatches)
    plan = with_schedule(plan, asked, found.schedule)
    check_plan(plan, problem.graph, problem.cluster)
    return plan
