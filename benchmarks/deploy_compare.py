"""Sections of ``bench_deploy`` that search: methods against each other on cases that training did not see.

Every method gets the same CPU seconds for a case. A step time is that of the plan which a method ends with, checked and
simulated in full. Simulations are counted up to the first deployment whose estimated time is within 1 % of the best
that any method found. For that count plain tree search gets ``PATIENT`` times the CPU seconds; where it does not come
there even so, it is counted with all that it made, which favours it. Ours, where it does not come there, is counted as
infinite, which is why the median is judged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from benchmarks.deploy_cases import LARGE, RELATED, UNSEEN, Case, graph_path, trace_graph
from benchmarks.deploy_pool import Job, Result, open_pool, search
from benchmarks.sections import Row
from weft.base.units import format_time

OURS, TREE, DATA = "network + search", "tree search", "data parallel"
PATIENT = 10
"""So many times the CPU seconds has tree search when its simulations are counted."""
LONG = f"tree search, {PATIENT} x as long"
METHODS: tuple[dict[str, Any], ...] = (
    {"what": DATA, "method": "data-parallel", "use_factors": False, "use_shares": False},
    {"what": "HEFT", "method": "heft"},
    {"what": "annealing", "method": "anneal"},
    {"what": TREE, "method": "tree"},
    {"what": LONG, "method": "tree", "times": PATIENT},
    {"what": "network + tree search", "method": "tree", "prior": "network"},
    {"what": OURS, "method": "auto", "prior": "network"},
)
OTHERS = ("HEFT", "annealing", TREE)
ABLATION: tuple[dict[str, Any], ...] = (
    {"what": "all", "method": "auto", "prior": "network"},
    {"what": "nothing off, another seed", "method": "auto", "prior": "network", "seed": 1},
    {"what": "network off", "method": "auto"},
    {"what": "feedback off", "method": "auto", "prior": "network without feedback"},
    {"what": "sufficient factors off", "method": "auto", "prior": "network", "use_factors": False},
    {"what": "uneven shares off", "method": "auto", "prior": "network", "use_shares": False},
)
EQUAL = 1.0 + 1e-6
"""Step times this close are equal."""
NEAR = 1.01
"""Within 1 % of the best known."""
Times = Mapping[str, Result]


def unseen(options: Any) -> Iterator[Row]:
    """Yield a row for each held-out case, then the summary."""
    yield weights_row()
    found: list[Times] = []
    for results in by_case(options, UNSEEN, METHODS):
        found.append(results)
        yield case_row(results)
    yield from summary(found)


def related(options: Any) -> Iterator[Row]:
    """Yield a row for each case whose model is like a training family; nothing is asked of them."""
    for results in by_case(options, RELATED, METHODS):
        yield case_row(results)


def by_case(options: Any, cases: Sequence[Case], methods: Sequence[Mapping[str, Any]]) -> Iterator[Times]:
    """Yield the results of all methods, case by case."""
    jobs = [Job(**{"case": case, "cpu_seconds": options.cpu_seconds * method.get("times", 1), "seed": options.seed,
                   **{name: value for name, value in method.items() if name != "times"}})
            for case in cases[: options.cases] for method in methods]
    with open_pool(options.workers, options.lines) as pool:
        for _, group in groupby(pool.run(jobs), key=lambda result: result.case):
            yield {result.what: result for result in group}


def weights_row() -> Row:
    """Return whether the network has weights."""
    from weft.search.deploy.policy import WEIGHTS

    size = f"{WEIGHTS.stat().st_size / 1e6:.2f} MB" if WEIGHTS.exists() else "none: the network knows nothing"
    return Row("weights of the network", size, "at most 2 MB", WEIGHTS.exists() and WEIGHTS.stat().st_size <= 2_000_000)


# ---- one case -------------------------------------------------------------------------------------------------------


def seconds(result: Result) -> float:
    return math.inf if result.step_time_s is None else result.step_time_s


def case_row(results: Times) -> Row:
    """Return the step times of all methods for one case, and who is best."""
    ours, others = seconds(results[OURS]), min(seconds(results[name]) for name in OTHERS)
    best = min(map(seconds, results.values()))
    parts = [f"{name} {shown(result)}{'*' if seconds(result) <= best * EQUAL else ''}"
             for name, result in results.items()]
    figure = (f"{', '.join(parts)}\n         {factor(others, ours)} the speed of the best other, "
              f"{factor(seconds(results[TREE]), ours)} of tree search, {factor(seconds(results[DATA]), ours)} of data "
              f"parallel; {results[OURS].num_stages} stages, {results[OURS].microbatches} micro-batches")
    return Row(results[OURS].case, figure, "* best", None, details(results))


def shown(result: Result) -> str:
    if result.failed:
        return f"FAILED ({result.reason})"
    return "no room" if result.step_time_s is None else format_time(result.step_time_s)


def factor(slower: float, faster: float) -> str:
    if not math.isfinite(slower):
        return "beyond" if math.isfinite(faster) else "-"
    return f"{slower / faster:.2f} x" if math.isfinite(faster) else "none of"


def details(results: Times) -> dict[str, Any]:
    needed = simulations_needed(results)
    return {name: {"step_time_s": result.step_time_s, "num_simulations": result.num_simulations,
                   "cpu_seconds": result.cpu_seconds, "bound_s": result.bound_s, "reason": result.reason,
                   "simulations_to_1_percent": needed.get(name)} for name, result in results.items()}


def simulations_needed(results: Times) -> dict[str, tuple[int, bool]]:
    """Return, by method, the simulations up to 1 % of the best estimate of all, and whether it came there."""
    ends = [result.history[-1][2] for result in results.values() if result.history]
    needed = {}
    for name, result in results.items():
        near = [count for count, _, value in result.history if value <= NEAR * min(ends)]
        if result.num_simulations:
            needed[name] = (near[0], True) if near else (result.num_simulations, False)
    return needed


# ---- all cases ------------------------------------------------------------------------------------------------------


def summary(found: Sequence[Times]) -> Iterator[Row]:
    """Yield the rows that are judged."""
    failed = [result for results in found for result in results.values() if result.failed]
    if failed:
        yield Row("searches that failed", f"{len(failed)}, such as {failed[0].case}: {failed[0].reason}", "none", False)
    solved = [results for results in found if math.isfinite(seconds(results[OURS]))]
    yield Row("cases", f"{len(found)}, {len(solved)} with a plan", "30 or more",
              len(solved) >= 30 if len(found) == len(UNSEEN) else None)
    if solved:
        yield _effort(solved)
        yield from _against_others(solved)
        yield _against_data_parallel(solved)
        yield from _simulations(solved)


def _effort(found: Sequence[Times]) -> Row:
    """Return what the methods took in the mean: those that end by themselves take less than they may."""
    parts = []
    for name in found[0]:
        some = [results[name] for results in found if results[name].num_simulations]
        if some:
            parts.append(f"{name} {np.mean([result.cpu_seconds for result in some]):.1f} CPU-s and "
                         f"{np.mean([result.num_simulations for result in some]):,.0f} simulations")
    return Row("effort in the mean", "; ".join(parts), "the same CPU seconds at most")


def _against_others(found: Sequence[Times]) -> Iterator[Row]:
    wins = [seconds(results[OURS]) <= EQUAL * min(seconds(results[name]) for name in OTHERS) for results in found]
    yield Row("step time at most that of the best of tree search, annealing and HEFT",
              f"{sum(wins)} of {len(wins)} cases, {100 * np.mean(wins):.0f} %", "80 %", bool(np.mean(wins) >= 0.8))
    for name in (*OTHERS, "network + tree search"):
        gains = ratios(found, name)
        needed = 1.05 if name == TREE else None
        yield Row(f"times as fast as {name}", spread(gains, len(found)), "1.05 in the mean" if needed else "shown only",
                  None if needed is None else bool(gains) and mean(gains) >= needed)


def _against_data_parallel(found: Sequence[Times]) -> Row:
    gains = ratios(found, DATA)
    return Row("times as fast as data parallel with all-reduce, even shares", spread(gains, len(found)),
               "1.3 in the mean, 4 somewhere", bool(gains) and mean(gains) >= 1.3 and max(gains) >= 4.0)


def ratios(found: Sequence[Times], name: str) -> list[float]:
    """Return how many times as fast ours is, where the other method has a plan."""
    return [seconds(results[name]) / seconds(results[OURS]) for results in found
            if math.isfinite(seconds(results[name]))]


def mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


def spread(gains: Sequence[float], num_cases: int) -> str:
    if not gains:
        return "it has no plan in any case"
    low, quarter, middle, three, high = np.quantile(gains, [0, 0.25, 0.5, 0.75, 1])
    return (f"{mean(gains):.3f} in the geometric mean of {len(gains)} cases (it has no plan in {num_cases - len(gains)}); "
            f"least {low:.2f}, quartiles {quarter:.2f} {middle:.2f} {three:.2f}, most {high:.2f}")


def _simulations(found: Sequence[Times]) -> Iterator[Row]:
    for name in (OURS, "network + tree search"):
        pairs = [(needed[name], needed[LONG]) for results in found
                 if name in (needed := simulations_needed(results)) and LONG in needed]
        if pairs:
            parts = [mine[0] / max(1, tree[0]) if mine[1] else math.inf for mine, tree in pairs]
            came = [sum(pair[side][1] for pair in pairs) for side in (0, 1)]
            finite = [part for part in parts if math.isfinite(part)]
            middle = float(np.quantile(parts, 0.5, method="higher"))
            yield Row(f"simulations of {name} to come within 1 % of the best known, as a part of tree search's",
                      f"median {middle:.3f}, {mean(finite) if finite else math.inf:.3f} in the geometric mean of those that "
                      f"came there; it came there in {came[0]} of {len(pairs)} cases, {LONG} in {came[1]}",
                      "0.5" if name == OURS else "shown only", middle <= 0.5 if name == OURS else None)


# ---- ablation -------------------------------------------------------------------------------------------------------


def ablation(options: Any) -> Iterator[Row]:
    """Yield what each part is worth: step times without it, as a part of those with all.

    The row with another seed says how much of an effect is chance.
    """
    few = UNSEEN if options.cases is not None else UNSEEN[::2]
    found = list(by_case(options, few, ABLATION))
    for name in (entry["what"] for entry in ABLATION[1:]):
        parts = [seconds(results[name]) / seconds(results["all"]) for results in found
                 if math.isfinite(seconds(results[name])) and math.isfinite(seconds(results["all"]))]
        lost = sum(math.isfinite(seconds(results["all"])) and not math.isfinite(seconds(results[name]))
                   for results in found)
        changed = sum(abs(part - 1) > 1e-3 for part in parts)
        yield Row(name, f"step times {mean(parts):.4f} x in the geometric mean of {len(parts)} cases, most "
                  f"{max(parts):.3f} x, least {min(parts):.3f} x; {changed} cases differ, {lost} have no plan any more"
                  if parts else "no case has a plan", "1 is no effect", None,
                  {results[name].case: [results["all"].step_time_s, results[name].step_time_s] for results in found})


# ---- time -----------------------------------------------------------------------------------------------------------


def planning(options: Any) -> Iterator[Row]:
    """Yield the CPU seconds of planning a model of 2,000 operators for 16 devices in a fresh process."""
    from weft.model.graph_file import load_graph

    with open_pool(1) as pool:
        traced = pool.executor.submit(trace_graph, LARGE).result()
    job = Job(case=LARGE, what=OURS, method="auto", prior="network", seed=options.seed,
              cpu_seconds=options.planning_seconds)
    result, total, load = fresh_search(job)
    graph = load_graph(graph_path(LARGE))
    yield Row(f"planning {LARGE.name}: {graph.num_ops:,} operators",
              f"{total:.1f} CPU-s in all: {result.cpu_seconds:.1f} of search, {load:.1f} of imports and loading; "
              f"{result.num_simulations:,} simulations, step {shown(result)}, bound {format_time(result.bound_s)}; tracing "
              f"beside it {traced:.1f} CPU-s", "at most 30 CPU-s", total <= 30 and result.step_time_s is not None,
              {"total_cpu_s": total, "search_cpu_s": result.cpu_seconds, "tracing_cpu_s": traced})
    more, *_ = fresh_search(replace(job, cpu_seconds=4 * options.planning_seconds))
    yield Row("the same with four times as long", f"step {shown(more)}, {factor(seconds(result), seconds(more))} as fast",
              "within 5 %", seconds(result) <= 1.05 * seconds(more))


def fresh_search(job: Job) -> tuple[Result, float, float]:
    """Return what a process finds that has nothing loaded yet, its CPU seconds, and those before the search."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(_timed, job).result()


def _timed(job: Job) -> tuple[Result, float, float]:
    result = search(job)
    total = time.process_time()
    return result, total, total - result.cpu_seconds
