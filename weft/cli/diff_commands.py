"""``weft diff``: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from weft.cli.common import (
    JsonOption,
    ProfileOption,
    cluster_of_plan,
    graph_of_plan,
    has_unaligned_replicas,
    print_json,
)

if TYPE_CHECKING:
    from weft.model.graph import Graph
    from weft.plan.plan import Plan
    from weft.show.diff_tables import Predicted

SAME: Final = 0
DIFFERENT: Final = 1
"""Exit codes."""


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another plan file.")],
    model: Annotated[str | None, typer.Option(
        "--model", help="The model of both plans, where it is not from `weft models`.")] = None,
    cluster: Annotated[str | None, typer.Option(
        "--cluster", help="The cluster of both plans, instead of the one that each describes.")] = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say what differs between two plans: stages, placement, sharding, order, exchanges, and what is predicted.

    Exit codes: 0 the plans are the same, 1 they differ, 2 bad input.
    """
    from weft.plan.diff import diff_plans
    from weft.plan.plan import load_plan
    from weft.show.diff_tables import diff_json, print_diff

    one, other = load_plan(a), load_plan(b)
    graphs = _load_graphs(one, other, model)
    predicted = [_predict(plan, graph, cluster, profile) for plan, graph in zip((one, other), graphs, strict=True)]
    found = diff_plans(predicted[0].plan, predicted[1].plan, *graphs)
    if as_json:
        print_json(diff_json(found, *predicted))
    else:
        print_diff(found, *predicted)
    return SAME if found.is_same else DIFFERENT


def _load_graphs(one: Plan, other: Plan, model: str | None) -> tuple[Graph, Graph]:
    """Return the graphs of both plans, traced once where one will do."""
    keys = [(plan.model.name, plan.model.mode, plan.microbatch_size, plan.model.conversion,
             has_unaligned_replicas(plan)) for plan in (one, other)]
    first = graph_of_plan(one, model)
    return first, first if keys[0] == keys[1] else graph_of_plan(other, model)


def _predict(plan: Plan, graph: Graph, cluster: str | None, profile: Path | None) -> Predicted:
    """Return what the simulator says about a plan that passes all checks."""
    from weft.cost.costs import load_costs
    from weft.plan.check import check_plan
    from weft.show.diff_tables import Predicted
    from weft.simulate.predict import simulate
    from weft.simulate.traffic import link_bytes

    target = cluster_of_plan(plan, cluster)
    program = check_plan(plan, graph, target)
    costs = load_costs(graph, target, profile, plan.model.dtype)
    return Predicted(plan=program.plan, timeline=simulate(program, costs, target),
                     link_bytes=link_bytes(program, costs, target))
