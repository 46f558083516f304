"""``weft run --compare-gradients``: a plan's exchanges against all-reduce, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.errors import RunError
from weft.base.units import format_time
from weft.cli.common import cluster_of_plan, graph_of_plan, print_json

if TYPE_CHECKING:
    from weft.plan.plan import Plan
    from weft.run.result import RunOptions
    from weft.run.verify import GradientComparison


def compare(plan: Plan, model: str, *, options: RunOptions, threads: int, keep: Path | None, profile: Path | None,
            as_json: bool) -> int:
    """Run both ways, print what they take and how far the gradients are apart, and return the exit code."""
    from weft.run.verify import all_reduced, compare_gradients

    predicted = [_predicted(item, model, profile) for item in (plan, all_reduced(plan))]
    result = compare_gradients(plan, model, options=options, threads=threads, keep=keep)
    facts = _facts(plan, result, predicted)
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts)
    checks = [item.verification for item in (result.planned, result.summed)]
    return 0 if all(check is None or check.passed for check in checks) else RunError.exit_code


def _predicted(plan: Plan, model: str, profile: Path | None) -> float | None:
    """Return the simulated time of a step, or None where the plan does not describe its cluster."""
    from weft.cost.costs import load_costs
    from weft.plan.lower import lower
    from weft.simulate.predict import simulate

    if plan.cluster.description is None:
        return None
    graph, cluster = graph_of_plan(plan, model), cluster_of_plan(plan, None)
    return simulate(lower(plan, graph), load_costs(graph, cluster, profile, plan.model.dtype), cluster).step_time_s


def _facts(plan: Plan, result: GradientComparison, predicted: list[float | None]) -> dict[str, Any]:
    methods = sorted({item.method for item in plan.gradients})
    rows = [{"exchange": name, "predicted_s": time_s, "measured_s": run.step_time_s}
            for name, time_s, run in zip((", ".join(methods), "all_reduce"), predicted,
                                         (result.planned, result.summed), strict=True)]
    return {"ways": rows, "difference": result.difference, "worst": result.worst,
            "between_ranks": result.planned.gradient_spread}


def _print_facts(facts: dict[str, Any]) -> None:
    from weft.show.tables import print_table

    rows = [(row["exchange"], "-" if row["predicted_s"] is None else format_time(row["predicted_s"]),
             format_time(row["measured_s"])) for row in facts["ways"]]
    print_table(("exchange", "predicted", "measured"), rows)
    print(f"largest difference of gradients {facts['difference']:.1e} {facts['worst']}; "
          f"between ranks {facts['between_ranks']:.1e}")
