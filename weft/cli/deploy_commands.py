"""``weft deploy`` and ``train-policy``."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from weft.base.errors import InputError, NoFeasiblePlan
from weft.cli import common, late
from weft.cluster import read_cluster
from weft.plan.plan import plan_to_json
from weft.search.common.budget import Budget, OutOfTime, cut_short, time_budget
from weft.show.tables import print_tables, seconds

PLAIN_GRACE_S: Final = 0.3
"""So long data parallelism, to compare with, may take after the time limit: small models need less."""


SOURCE: Final = Path(__file__).resolve().parents[2]
"""The folder that has the package in it; a checkout of the source has more beside it."""
TRAINING: Final = "benchmarks/policy_training"
"""What trains the network, in the source."""


def deploy(
    model: common.ModelArgument,
    cluster: common.ClusterArgument,
    batch: Annotated[int, typer.Option(help="Samples in one step.")] = 32,
    microbatches: Annotated[int | None, typer.Option(help="Parts of the batch; chosen if absent.")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="none, sgd, adam or adamw.")] = "adamw",
    method: Annotated[str, typer.Option(help="auto, tree, anneal, heft or data-parallel.")] = "auto",
    weights: Annotated[Path | None, typer.Option(help="Weights of the network; by default those that come with "
                                                 "Weft.")] = None,
    tensor: Annotated[bool, typer.Option(help="Let the devices of a host divide operators among them.")] = True,
    factors: Annotated[bool, typer.Option(help="Let layers exchange sufficient factors where that is faster.")] = True,
    profile: common.ProfileOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here.")] = None,
    seed: common.SeedOption = 0,
    time_limit: common.TimeLimitOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Lay the training of a model over any cluster: which devices run and share which part, how gradients travel."""
    report = common.reporter(quiet)
    import_s = late.import_seconds("search_deployments", "load_splits", "load_policy", "load_graph_for", "plan_tables")
    common.check_time_limit(time_limit)
    common.check_outputs({"--out": out}, (model.partition(":")[0], cluster, profile, weights))
    options = late.PlanOptions(batch=batch, microbatches=microbatches, dtype=common.dtype_choice(dtype), seed=seed,
                               optimizer=common.optimizer_choice(optimizer))
    searching = late.DeployOptions(method=common.choice("--method", method, late.DEPLOY_METHODS), seed=seed,
                                   use_factors=factors)
    target = read_cluster(cluster)
    report(f"tracing {model}")
    budget = time_budget(time_limit, report)
    with budget.paused():
        graph = late.load_graph_for(model, batch=batch // microbatches if microbatches else None, dtype=dtype,
                                    batch_dims=True)
    report(f"traced in {budget.paused_s:.1f} s")
    for warning in graph.warnings:
        report(f"note: {warning}")

    def costs_of(graph: late.Graph) -> late.Costs:
        return late.load_costs(graph, target, profile, dtype)

    problem = late.Problem(graph=graph, cluster=target, costs=costs_of(graph), options=options)
    splits = late.load_splits(model, problem, costs_of, report=report, progress=report,
                              budget=budget) if tensor and searching.method == "auto" else {}
    found = late.search_deployments(problem, searching, splits=splits, policy=late.load_policy(weights), budget=budget)
    for note in late.plan_notes(graph, found.plan):
        report(f"note: {note}")
    common.write_plan(out, found.plan, report)
    plain = _data_parallel(problem, budget)
    common.print_result(as_json, lambda: {
        "status": found.plan.search.status, "method": found.method, "step_time": found.step_time_s,
        "bound": found.bound_s, "data_parallel": plain if isinstance(plain, float) else None,
        "data_parallel_reason": None if isinstance(plain, float) else plain, "microbatches": found.plan.microbatches,
        "simulations": found.num_simulations, "seconds": found.cpu_seconds, "import_seconds": import_s,
        "tracing_seconds": budget.paused_s, "plan": plan_to_json(found.plan)}, lambda: _print_deployment(found, plain))
    common.end_if_interrupted(budget.is_interrupted)


def _data_parallel(problem: late.Problem, budget: Budget) -> float | str:
    """Return the step time of plain data parallelism with all-reduce, or why it is not known."""
    if budget.is_interrupted:
        return "not timed: interrupted"
    end = None if budget.deadline is None else max(budget.deadline, time.monotonic() + PLAIN_GRACE_S)
    try:
        with cut_short(end):
            return late.search_deployments(problem, late.DeployOptions(method="data-parallel")).step_time_s
    except NoFeasiblePlan:
        return "does not fit"
    except OutOfTime:
        return "not timed: the time limit was reached"
    except KeyboardInterrupt:
        budget.is_interrupted = True
        return "not timed: interrupted"


def _print_deployment(found: late.Deployment, plain: float | str) -> None:
    table, *others = late.plan_tables(found.plan, [found.timeline])
    against = plain if isinstance(plain, str) else f"{seconds(plain)}, {plain / found.step_time_s:.2f} times this"
    print_tables(replace(table, rows=(*table.rows, ("data parallel", against))), *others)


def train_policy(
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the weights here, and the loss curve (.json) beside "
                                      "them.")] = Path("policy.safetensors"),
    rounds: Annotated[int, typer.Option(help="Rounds of expert iteration.")] = 3,
    cases: Annotated[int, typer.Option(help="Generated models on generated clusters, new in each round.")] = 1000,
    epochs: Annotated[int, typer.Option(help="Passes over all examples in each round.")] = 20,
    seed: Annotated[int, typer.Option(min=0, max=common.MAX_SEED, help="Seed of cases and weights.")] = 0,
    resume: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Keep examples and weights of each round here, and go on from what is there; by default a "
        "folder beside the weights.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that make examples.")] = 2,
    device: Annotated[str, typer.Option(help="Where the network learns: cpu or cuda.")] = "cpu",
    quiet: common.QuietOption = False,
) -> None:
    """Train the network that guides the search for deployments; it takes hours on a laptop."""
    if workers < 1:
        raise InputError(f"--workers must be 1 or more, not {workers}")
    if out.suffix != ".safetensors":
        raise InputError(f"--out must end in .safetensors, not {str(out)!r}")
    common.check_outputs({"--out": out, "the loss curve": out.with_suffix(".json")},
                         folders={"--resume": resume or out.with_suffix(".training")})
    training = _training_code()
    training.check_device(device)
    options = training.TrainOptions(rounds=rounds, cases=cases, epochs=epochs, seed=seed)
    training.train_policy(out, resume or out.with_suffix(".training"), options, workers=workers, device=device,
                          report=common.reporter(quiet))


def _training_code() -> Any:
    """Return the module that trains the network: it is in the source of Weft, not in an installed package.

    Nobody plans with it, and the random models and clusters that it learns from are of use to nothing else.
    """
    if not (SOURCE / TRAINING).is_dir():
        raise InputError(f"there is no folder {TRAINING} in {str(SOURCE)!r}: train-policy needs the random models and "
                         "clusters in it, which come with the source of Weft and not with an installed package. Get "
                         "the source, install it with 'pip install -e .', and try again")
    if str(SOURCE) not in sys.path:
        sys.path.insert(0, str(SOURCE))  # processes that make examples get the same path
    return importlib.import_module(f"{TRAINING.replace('/', '.')}.train")
