"""Searches of ``bench_deploy`` in processes of their own, several at a time; limits and figures are CPU seconds."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from benchmarks.deploy_cases import Case, graph_path, problem_of, trace_graph

Method = Literal["auto", "tree", "anneal", "heft", "data-parallel"]
Prior = Literal["none", "network", "network without feedback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One search."""

    case: Case
    what: str
    """The name of the method, for people."""
    method: Method
    prior: Prior = "none"
    use_factors: bool = True
    use_shares: bool = True
    cpu_seconds: float = 10.0
    max_simulations: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a search found."""

    case: str
    what: str
    step_time_s: float | None
    """None if nothing fitted."""
    reason: str = ""
    failed: bool = False
    """The search ended with an error of its own."""
    num_simulations: int = 0
    cpu_seconds: float = 0.0
    bound_s: float = 0.0
    num_stages: int = 0
    microbatches: int = 0
    history: tuple[tuple[int, float, float], ...] = field(default=(), repr=False)
    """(simulations, CPU seconds, estimated step time) whenever it got better; from the first that fits on."""


class Pool:
    """Processes that search."""

    def __init__(self, executor: ProcessPoolExecutor, lines: Path | None) -> None:
        self.executor, self.lines = executor, lines

    def trace(self, cases: Sequence[Case]) -> dict[str, float]:
        """Trace what is not there yet; return the CPU seconds by file."""
        missing = {graph_path(case): case for case in cases if not graph_path(case).exists()}
        waiting = {path.name: self.executor.submit(trace_graph, case) for path, case in missing.items()}
        return {name: future.result() for name, future in waiting.items()}

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Yield the results in the order of the jobs; each is appended to the file of lines when its turn comes."""
        self.trace([job.case for job in jobs])
        futures: list[Future[Result]] = [self.executor.submit(search, job) for job in jobs]
        for job, future in zip(jobs, futures, strict=True):
            result = future.result()
            if self.lines is not None:
                with self.lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"job": asdict(job), "result": asdict(result)}) + "\n")
            yield result


@contextmanager
def open_pool(num_workers: int, lines: Path | None = None) -> Iterator[Pool]:
    """Give a pool of fresh processes with one thread for PyTorch each."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes when they import torch
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(max_workers=num_workers, mp_context=context, initializer=_warm_up)
    try:
        yield Pool(executor, lines)
    finally:
        executor.shutdown(cancel_futures=True)


def _warm_up() -> None:
    """Load compiled code and the network once, so that no search pays for it."""
    from benchmarks.policy_training.cases import training_case
    from weft.search.deploy.search import DeployOptions, deploy

    deploy(training_case(5), DeployOptions(method="auto", max_simulations=300), policy=policy("network"))


@cache
def policy(prior: Prior) -> Any:
    """Return the prior of the tree search; without weights the network's knows nothing, with a warning."""
    from benchmarks.policy_training.blind import load_blind_policy
    from weft.search.deploy.policy import UniformPolicy, load_policy

    return UniformPolicy() if prior == "none" else load_policy() if prior == "network" else load_blind_policy()


def search(job: Job) -> Result:
    """Return what one search finds."""
    from weft.base.errors import NoFeasiblePlan
    from weft.search.deploy.search import DeployOptions, deploy

    options = DeployOptions(method=job.method, cpu_seconds=job.cpu_seconds, max_simulations=job.max_simulations,
                            seed=job.seed, use_factors=job.use_factors, use_shares=job.use_shares)
    try:
        found = deploy(problem_of(job.case, seed=job.seed), options, policy=policy(job.prior))
    except NoFeasiblePlan as reason:
        return Result(case=job.case.name, what=job.what, step_time_s=None, reason=str(reason)[:300])
    except Exception as error:  # an hour of other cases must not be lost for one: the summary counts it as a failure
        return Result(case=job.case.name, what=job.what, step_time_s=None, failed=True,
                      reason=f"{type(error).__name__}: {error}"[:300])
    return Result(case=job.case.name, what=job.what, step_time_s=found.step_time_s,
                  num_simulations=found.num_simulations, cpu_seconds=found.cpu_seconds, bound_s=found.bound_s,
                  num_stages=len(found.plan.stages), microbatches=found.plan.microbatches,
                  history=fitting(found.history))


def fitting(history: Sequence[tuple[int, float, float]]) -> tuple[tuple[int, float, float], ...]:
    """Return the part of a history from where step times only fall: before, what was found did not fit the memory."""
    first = max((place for place in range(1, len(history)) if history[place][2] > history[place - 1][2]), default=0)
    return tuple(history[first:])
