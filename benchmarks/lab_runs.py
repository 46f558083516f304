"""Sections of ``bench_lab``: links, ways to exchange gradients, and one slow port; predicted and measured."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.lab.lab import ROOT, Lab
from benchmarks.lab.links import LinkReport, measure_links
from benchmarks.lab.profiles import measured_kind, profile_together
from benchmarks.lab.spaces import why_not
from benchmarks.sections import Row
from tests.worlds import with_sufficient_factors
from weft.base.units import format_rate
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.cost.profile import ProfileStore
from weft.model.load import trace_model
from weft.plan.plan import Optimizer, Plan
from weft.run.result import RunOptions, RunResult
from weft.search.common.problem import PlanOptions, Problem
from weft.search.common.problem import evaluate_plan as evaluate
from weft.search.deploy.policy import load_policy
from weft.search.deploy.search import DeployOptions, deploy
from weft.search.joint.baselines import data_parallel, gpipe_equal

MODELS: Final = ("vgg_like", "perceptron")
"""Functions of ``benchmarks/models/fully_connected.py``."""
BATCH: Final = 4
"""Samples on each host."""
RATE: Final = "200Mbit/s"
HOSTS: Final = (2, 4)
WITHIN: Final = 0.15
FASTER: Final = 3.0
FASTER_SLOW_PORT: Final = 1.5
LINK_WITHIN: Final = 0.05
SEARCH_S: Final = 8.0
"""CPU seconds of a search."""
SHORT_S: Final = 0.5
ROUNDS: Final = 3
"""A step up to ``SHORT_S`` long is predicted and measured so often: such steps vary most on shared cores."""
QUIET: Final = 0.2
"""More than so many cores busy with other work during a run is said in its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line sets."""

    steps: int = 7
    hosts: Sequence[int] = HOSTS
    models: Sequence[str] = MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An open laboratory and what was measured in it."""

    lab: Lab
    links: LinkReport
    cluster: Cluster
    """With measured links and cores."""
    store: ProfileStore
    options: Options

    def problem(self, model: str) -> Problem:
        """Return the model with costs as measured here just now, for a batch with equal parts for all devices."""
        spec = model_spec(model)
        profile_together(self.lab, spec, self.store, batch=BATCH)
        graph = trace_model(spec, batch=BATCH, batch_dims=True).graph
        return Problem(graph=graph, cluster=self.cluster,
                       costs=estimate_costs(graph, self.cluster, profile=self.store),
                       options=PlanOptions(batch=BATCH * self.cluster.num_devices, optimizer=Optimizer(kind="sgd")))

    def rehearsed(self, model: str) -> Problem:
        """Return the same with operators as slow as runs of two other plans show.

        These are data parallel, exchanging factors, and a pipeline over all devices. The CPU time of their ranks against
        the predicted busy time tells what computing and messages cost each other where more processes than cores run,
        which operators measured without messages do not show.
        """
        problem = self.problem(model)
        cpu_s, busy_s = 0.0, 0.0
        for plan in (with_sufficient_factors(data_parallel(problem, 1), problem.graph), gpipe_equal(problem, 1)):
            timeline = evaluate(plan, problem)
            result = self.run(plan, model, expected_s=timeline.step_time_s)
            cpu_s += sum(result.cpu_s) / len(result.step_times_s)
            busy_s += sum(rank.busy_s for rank in timeline.summary())
        return slowed(problem, cpu_s / busy_s)

    def run(self, plan: Plan, model: str, *, expected_s: float) -> RunResult:
        """Return the result of the plan in the laboratory; short steps are repeated more often."""
        times = 1 if expected_s > SHORT_S else 4
        return self.lab.run_plan(plan, model_spec(model), options=RunOptions(
            steps=times * self.options.steps, warmup=times))


def slowed(problem: Problem, factor: float) -> Problem:
    """Return the problem with all operators ``factor`` times as slow."""
    costs = problem.costs
    return replace(problem, costs=replace(
        costs, forward_s=factor * costs.forward_s, input_grad_s=factor * costs.input_grad_s,
        weight_grad_s=factor * costs.weight_grad_s))


def model_spec(name: str) -> str:
    return f"{ROOT / 'benchmarks' / 'models' / 'fully_connected.py'}:{name}"


def star(num_hosts: int, rate: str, **slow: str) -> Cluster:
    """Return hosts ``a``, ``b``, ... with one device each on one switch; ``slow`` gives hosts another rate."""
    names = "abcdefgh"[:num_hosts]
    return parse_cluster({
        "format": "weft.cluster", "version": 1, "name": f"{num_hosts} hosts at {rate}",
        "hosts": [{"name": name, "devices": "cpu"} for name in names],
        "network": {"bandwidth": rate, "latency": "100us"},
        "links": [{"from": f"{name}0", "to": "network", "bandwidth": other, "latency": "50us"}
                  for name, other in slow.items()]})


@contextmanager
def opened(cluster: Cluster, options: Options) -> Iterator[Bench]:
    """Yield the laboratory of a cluster with its links and cores measured."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-lab-") as folder, Lab(cluster) as lab:
        links = measure_links(lab)
        store = ProfileStore(Path(folder) / "profile.sqlite")
        store.put_comm_fits(links.fits_to_use)
        measured = replace(links.cluster, kinds=measured_kind(lab).kinds)
        yield Bench(lab=lab, links=links, cluster=measured, store=store, options=options)


def skipped() -> list[Row]:
    """Return one row where there can be no laboratory, else none."""
    problem = why_not()
    return [Row("laboratory", "skipped", problem)] if problem else []


# ---- sections -----------------------------------------------------------------------------------------------------


def links(options: Options) -> Iterator[Row]:
    """Yield what the links do, against the cluster file."""
    if no := skipped():
        yield from no
        return
    for cluster in (*(star(count, RATE) for count in options.hosts), star(4, "1Gbit/s", d="100Mbit/s")):
        with Lab(cluster) as lab:
            found = measure_links(lab)
        shares = [pair.share for pair in found.pairs]
        yield Row(f"{cluster.name}{'' if found.uniform else ', one at 100Mbit/s'}: messages between all pairs",
                  f"{min(shares):.1%} to {max(shares):.1%} of the file's rate", f"within {LINK_WITHIN:.0%}",
                  all(abs(share - 1) <= LINK_WITHIN for share in shares))
        yield Row("  collectives of all hosts, rate of the slowest port",
                  ", ".join(f"{fit.collective} {format_rate(1 / fit.s_per_byte)}" for fit in found.fits), "reported")


def exchange(options: Options) -> Iterator[Row]:
    """Yield data parallelism at 200 Mbit/s: all gradients all-reduced, and factors gathered for linear layers."""
    if no := skipped():
        yield from no
        return
    for count in options.hosts:
        with opened(star(count, RATE), options) as bench:
            for model in options.models:
                yield from _compare_methods(bench, model, f"{model}, {count} hosts at {RATE}")


def _compare_methods(bench: Bench, model: str, what: str) -> Iterator[Row]:
    problem = bench.problem(model)
    plain = data_parallel(problem, 1)
    factors = with_sufficient_factors(plain, problem.graph)

    def measure_again() -> Problem:
        return bench.problem(model)

    row = _predicted(bench, plain, problem, measure_again, f"{what}, all_reduce")
    yield row
    other = _predicted(bench, factors, problem, measure_again, f"{what}, sufficient_factors")
    yield other
    gain = _seconds(row) / _seconds(other)
    yield Row(f"{what}: step with sufficient factors", f"{gain:.2f} x faster", f">= {FASTER:g} x", gain >= FASTER)


def slow_port(options: Options) -> Iterator[Row]:
    """Yield the plan of ``weft deploy`` against data parallelism where one of four hosts has a slow port."""
    if no := skipped():
        yield from no
        return
    with opened(star(4, "1Gbit/s", d="100Mbit/s"), options) as bench:
        for model in options.models:
            problem, what = bench.rehearsed(model), f"{model}, 3 hosts at 1Gbit/s and one at 100Mbit/s"

            def measure_again(model: str = model) -> Problem:
                return bench.rehearsed(model)

            row = _predicted(bench, data_parallel(problem, 1), problem, measure_again,
                             f"{what}, data parallel with all_reduce")
            yield row
            best = deploy(problem, DeployOptions(cpu_seconds=SEARCH_S), policy=load_policy())
            other = _predicted(bench, best.plan, problem, measure_again,
                               f"{what}, weft deploy, {described(best.plan)}")
            yield other
            gain = _seconds(row) / _seconds(other)
            yield Row(f"{what}: step of the plan of weft deploy", f"{gain:.2f} x faster", f">= {FASTER_SLOW_PORT:g} x",
                      gain >= FASTER_SLOW_PORT)


# ---- parts --------------------------------------------------------------------------------------------------------


def described(plan: Plan) -> str:
    """Return the devices of each stage, with the shares of those that share it, and the number of micro-batches."""
    stages = [" + ".join(f"{'+'.join(replica.devices)}{f' {replica.share:.0%}' if len(stage.replicas) > 1 else ''}"
                         for replica in stage.replicas) for stage in plan.stages]
    return f"{' | '.join(stages)}, {plan.microbatches} micro-batches"


def _predicted(bench: Bench, plan: Plan, problem: Problem, measure_again: Callable[[], Problem], what: str) -> Row:
    """Return the row of one plan: measured step beside the predicted one, in the median of rounds.

    A round measures operators, predicts and runs; a long step takes one. ``problem`` is the first round's.
    """
    rounds: list[dict[str, Any]] = []
    before = _clocks()
    while not rounds or (rounds[0]["predicted_s"] <= SHORT_S and len(rounds) < ROUNDS):
        predicted_s = evaluate(plan, measure_again() if rounds else problem).step_time_s
        result = bench.run(plan, plan.model.name, expected_s=predicted_s)
        rounds.append({"predicted_s": predicted_s, "measured_s": result.step_time_s,
                       "error": predicted_s / result.step_time_s - 1, "steps_s": list(result.step_times_s)})
    busy_s, own_s, wall_s = (after - first for after, first in zip(_clocks(), before, strict=True))
    others = (busy_s - own_s) / wall_s
    typical = sorted(rounds, key=lambda item: float(item["error"]))[(len(rounds) - 1) // 2]
    details = {**typical, "rounds": rounds, "other_cores": others}
    disturbed = f"; meanwhile {others:.1f} cores were busy with other work" if others > QUIET else ""
    errors = ", ".join(f"{item['error']:+.1%}" for item in rounds)
    return Row(what, f"step {typical['measured_s'] * 1e3:.0f} ms, predicted {typical['predicted_s'] * 1e3:.0f} ms: "
               f"{typical['error']:+.1%} (rounds: {errors}){disturbed}", f"prediction within {WITHIN:.0%}",
               abs(typical["error"]) <= WITHIN, details)


def _clocks() -> tuple[float, float, float]:
    """Return the busy seconds of all cores, those of our own ended processes, and the time."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, interrupts, soft, _ = (int(word) / os.sysconf("SC_CLK_TCK") for word in words)
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return user + nice + system + interrupts + soft, own.ru_utime + own.ru_stime, time.monotonic()


def _seconds(row: Row) -> float:
    assert row.details is not None
    return float(row.details["measured_s"])
