"""Sections of ``bench_mps``: shares of samples by speed, and plans of many kinds; predicted and measured."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.mps import CONTROL
from benchmarks.mps_measure import Bench, Case, Ran, note, opened
from benchmarks.mps_plans import Named, mixed, plan_makers
from benchmarks.sections import Row
from weft.base.errors import WeftError
from weft.plan.plan import Plan
from weft.search.deploy.policy import load_policy
from weft.search.deploy.search import DeployOptions, deploy
from weft.search.joint.baselines import data_parallel, data_parallel_by_speed
from weft.simulate.timeline import Timeline

FASTER: Final = 1.4
SHARES_WITHIN: Final = 0.10
PLANS_WITHIN: Final = 0.08
MEMORY_WITHIN: Final = 0.05
APART: Final = 0.05
"""Plans whose measured times differ by more than this must be ranked rightly."""
FASTER_PLAN: Final = 1.2
NUM_PLANS: Final = 12
SEARCH_S: Final = 8.0
"""CPU seconds of a search."""
SMALL_BYTES: Final = 64 << 20
"""Ranks with less than this are left out of the comparison of memory: libraries take as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line sets."""

    device: str = "cuda"
    steps: int = 3
    keep: Path | None = None
    models: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model and how much of it is done in a step."""

    name: str
    batch: int
    traced_batch: int
    microbatches: int = 1
    pair_batch: int = 0
    """Samples of a step on two devices that split the operators."""
    verified_batch: int = 16
    """Samples of the step that is compared with one process."""


SHARED: Final = {
    "cuda": (Model(name="wide_gpt", batch=96, traced_batch=8), Model(name="looped_gpt", batch=96, traced_batch=8)),
    "cpu": (Model(name="small_gpt", batch=16, traced_batch=2), Model(name="small_t5", batch=16, traced_batch=2))}
PLANNED: Final = {
    "cuda": (Model(name="gpt_like", batch=64, traced_batch=8, microbatches=8, pair_batch=8),
             Model(name="t5_like", batch=64, traced_batch=8, microbatches=8, pair_batch=8)),
    "cpu": (Model(name="small_gpt", batch=16, traced_batch=4, microbatches=4, pair_batch=4),
            Model(name="small_t5", batch=16, traced_batch=4, microbatches=4, pair_batch=4))}


def skipped(options: Options) -> list[Row]:
    """Return one row where there is no GPU or no way to divide it, else none."""
    if options.device != "cuda":
        return []
    import torch

    problem = "PyTorch sees no GPU" if not torch.cuda.is_available() else (
        f"there is no {CONTROL}" if shutil.which(CONTROL) is None else "")
    return [Row("parts of one GPU", "skipped", problem)] if problem else []


@contextmanager
def prepared(options: Options, section: str, load: str) -> Iterator[Bench]:
    """Yield the processes; meanwhile the searches' code is compiled, where that was not done before."""
    warm = [subprocess.Popen([sys.executable, "-m", "weft.warm", name]) for name in ("simulator", "deploy")
            if options.device == "cuda"]
    try:
        with opened(options.device, options.keep and options.keep / section, load) as bench:
            _ = bench.cluster
            for process in warm:
                process.wait(timeout=180)
            yield bench
    finally:
        for process in warm:
            process.kill()
            process.wait()


def chosen(models: Sequence[Model], options: Options) -> list[Model]:
    return [model for model in models if not options.models or model.name in options.models]


# ---- shares -------------------------------------------------------------------------------------------------------


def shares(options: Options) -> Iterator[Row]:
    """Yield data parallelism with even shares against the plan of weft deploy, on unequal parts of one GPU."""
    if no := skipped(options):
        yield from no
        return
    models = chosen(SHARED[options.device], options)
    with prepared(options, "shares", models[0].name) as bench:
        for model in models:
            case = bench.case(model.name, batch=model.traced_batch)
            yield from _compare_shares(bench, case, model, options)


def _compare_shares(bench: Bench, case: Case, model: Model, options: Options) -> Iterator[Row]:
    problem = case.problem(model.batch)
    found = {"even shares": data_parallel(problem, 1), "shares by speed": data_parallel_by_speed(problem, 1),
             "weft deploy": deploy(problem, DeployOptions(cpu_seconds=SEARCH_S), policy=load_policy()).plan}
    rows = {}
    for name, plan in found.items():
        rows[name] = measured_row(case, bench.run(case, plan, steps=options.steps), plan, f"{model.name}, {name}")
        yield rows[name]
    for name in ("shares by speed", "weft deploy"):
        gain = seconds_of(rows["even shares"]) / seconds_of(rows[name])
        yield Row(f"{model.name}, {name} against even shares", f"step {gain:.2f} x faster", f">= {FASTER:g} x",
                  gain >= FASTER)
    few = data_parallel_by_speed(case.problem(model.verified_batch), 1)
    yield _verified(bench, case, few, f"{model.name}, shares by speed")


def _verified(bench: Bench, case: Case, plan: Plan, what: str) -> Row:
    check = bench.verify(case, plan)
    return Row(f"{what} in double precision, gradients against one process: {described(plan)}",
               f"loss {check.loss_error:.1e}, gradients {check.gradient_error:.1e} over {check.num_gradients}",
               f"<= {check.tolerance:.0e}", check.passed)


def described(plan: Plan) -> str:
    """Return the devices of each stage with their shares, and the number of micro-batches."""
    stages = [" + ".join(f"{'&'.join(replica.devices)}{f' {replica.share:.0%}' if len(stage.replicas) > 1 else ''}"
                         for replica in stage.replicas) for stage in plan.stages]
    return f"{' | '.join(stages)}; {plan.microbatches} micro-batches"


def measured_row(case: Case, ran: Ran, plan: Plan, what: str, predicted: Timeline | None = None) -> Row:
    """Return the row of one plan: measured step beside the predicted one."""
    timeline = predicted or case.predict(plan)
    predicted_s, measured_s, times = timeline.step_time_s, ran.result.step_time_s, sorted(ran.result.step_times_s)
    error = predicted_s / measured_s - 1
    details: dict[str, Any] = {"predicted_s": predicted_s, "measured_s": measured_s, "steps_s": times,
                               "plan": described(plan)}
    return Row(f"{what}: {described(plan)}", f"step {measured_s * 1e3:.0f} ms (of {len(times)}: {times[0] * 1e3:.0f} to "
               f"{times[-1] * 1e3:.0f}), predicted {predicted_s * 1e3:.0f} ms: {error:+.1%}",
               f"prediction within {SHARES_WITHIN:.0%}", abs(error) <= SHARES_WITHIN, details)


def seconds_of(row: Row) -> float:
    assert row.details is not None
    return float(row.details["measured_s"])


# ---- plans --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One plan's prediction and measurement."""

    named: Named
    predicted_s: float
    measured_s: float
    memory_errors: tuple[float, ...]
    """Of the peaks of all ranks that hold much."""
    largest_memory_error: float | None
    """Of the rank that holds most."""

    @property
    def error(self) -> float:
        """Return the prediction's error, relative to the measurement."""
        return self.predicted_s / self.measured_s - 1


def plans(options: Options) -> Iterator[Row]:
    """Yield plans of many kinds of two models: step times, memory, ranking, and the searched plan's gain."""
    if no := skipped(options):
        yield from no
        return
    outcomes: list[Outcome] = []
    models = chosen(PLANNED[options.device], options)
    with prepared(options, "plans", models[0].name) as bench:
        for model in models:
            case = bench.case(model.name, batch=model.traced_batch)
            own: list[Outcome] = []
            for make in plan_makers(case, model.batch, model.microbatches, model.pair_batch, search_s=SEARCH_S):
                named = None
                try:
                    named = make()
                    outcome, row = _measure(bench, case, named, options)
                except (WeftError, ImportError) as problem:
                    yield Row(f"{model.name}, {named.name if named else 'a plan'}", f"not run: {problem}", "a run", False)
                    continue
                own.append(outcome)
                yield row
            few = mixed(case.problem(model.verified_batch), 2, ((0,), (1, 2, 3)))
            yield _verified(bench, case, few, f"{model.name}, pipeline of one and three parts")
            yield from _ranking(model.name, own)
            outcomes += own
    yield from _totals(outcomes)


def _measure(bench: Bench, case: Case, named: Named, options: Options) -> tuple[Outcome, Row]:
    note(f"{case.name}, {named.name}")
    timeline = case.predict(named.plan)
    predicted_s = timeline.step_time_s
    ran = bench.run(case, named.plan, steps=options.steps)
    expected = [timeline.memory.peak_bytes(rank) for rank in range(timeline.num_ranks)]
    errors = {rank: want / peak - 1 for rank, (want, peak) in enumerate(zip(expected, ran.peak_bytes, strict=True))
              if peak is not None and want > SMALL_BYTES}
    largest = max(errors, key=lambda rank: ran.peak_bytes[rank] or 0, default=0)
    outcome = Outcome(named=named, predicted_s=predicted_s, measured_s=ran.result.step_time_s,
                      memory_errors=tuple(errors.values()), largest_memory_error=errors.get(largest))
    times = sorted(ran.result.step_times_s)
    memory = f"; peak memory {', '.join(f'{error:+.1%}' for error in errors.values())}" if errors else ""
    figure = (f"step {outcome.measured_s * 1e3:.0f} ms (of {len(times)}: {times[0] * 1e3:.0f} to {times[-1] * 1e3:.0f}), "
              f"predicted {predicted_s * 1e3:.0f} ms: {outcome.error:+.1%}{memory}")
    details = {"predicted_s": predicted_s, "measured_s": outcome.measured_s, "steps_s": times, "peaks": ran.peak_bytes,
               "expected_peaks": expected}
    return outcome, Row(f"{case.name}, {named.name}: {described(named.plan)}", figure, "reported", None, details)


def _ranking(name: str, outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Yield whether plans of one step are in the right order, and what the best searched one gains."""
    same = [item for item in outcomes if item.named.is_whole_step]
    pairs = [(a, b) for index, a in enumerate(same) for b in same[index + 1:]
             if max(a.measured_s, b.measured_s) > (1 + APART) * min(a.measured_s, b.measured_s)]
    wrong = [f"{a.named.name} / {b.named.name}" for a, b in pairs
             if (a.measured_s < b.measured_s) != (a.predicted_s < b.predicted_s)]
    yield Row(f"{name}: order of plans that are more than {APART:.0%} apart",
              f"{len(pairs) - len(wrong)} of {len(pairs)} pairs right{''.join(f'; not {text}' for text in wrong[:3])}",
              "all", not wrong)
    uniform = [item for item in same if item.named.is_uniform]
    searched = [item for item in same if item.named.is_searched]
    if uniform and searched:
        best, other = (min(items, key=lambda item: item.measured_s) for items in (searched, uniform))
        gain = other.measured_s / best.measured_s
        yield Row(f"{name}: {best.named.name} against {other.named.name}, the best uniform plan", f"{gain:.2f} x faster",
                  f">= {FASTER_PLAN:g} x", gain >= FASTER_PLAN)


def _totals(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    if not outcomes:
        return
    yield Row("plans that were run", f"{len(outcomes)}", f">= {NUM_PLANS}", len(outcomes) >= NUM_PLANS)
    errors = [abs(item.error) for item in outcomes]
    mean = statistics.fmean(errors)
    yield Row("step times: mean error", f"{mean:.1%}, largest {max(errors):.1%}", f"mean <= {PLANS_WITHIN:.0%}",
              mean <= PLANS_WITHIN)
    peaks = [abs(item.largest_memory_error) for item in outcomes if item.largest_memory_error is not None]
    if peaks:
        yield Row("peak memory of a plan, on the device that holds most: largest error",
                  f"{max(peaks):.1%}, mean {statistics.fmean(peaks):.1%} over {len(peaks)} plans",
                  f"<= {MEMORY_WITHIN:.0%}", max(peaks) <= MEMORY_WITHIN)
        ranks = [abs(error) for item in outcomes for error in item.memory_errors]
        yield Row("peak memory of every device: mean error",
                  f"{statistics.fmean(ranks):.1%}, largest {max(ranks):.1%} over {len(ranks)} devices",
                  f"mean <= {MEMORY_WITHIN:.0%}", statistics.fmean(ranks) <= MEMORY_WITHIN)
