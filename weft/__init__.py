"""Weft plans how a neural network runs across many devices, predicts how fast that is, and runs it that way.

    found = weft.make_plan("gpt2", "4 x A100-80GB", batch=64)
    print(found.best.strategy, found.best.step_time_s)
    weft.save_plan(found.best.plan, "plan.json")

Names are imported when first used, so that ``import weft`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.base.errors import WeftError
    from weft.cluster.cluster_file import read_cluster
    from weft.cost.costs import estimate_costs
    from weft.model.load import load_graph_for
    from weft.plan.check import check_plan
    from weft.plan.lower import lower
    from weft.plan.plan import load_plan, save_plan
    from weft.planning.compare import compare_strategies
    from weft.planning.make import make_plan
    from weft.run.launch import run_plan
    from weft.search.common.problem import PlanOptions, Problem
    from weft.search.place.problem import problem_from_graph
    from weft.search.place.search import place
    from weft.search.schedule.problem import load_problem
    from weft.search.schedule.search import schedule
    from weft.training.parallelize import parallelize

__version__ = "0.1.0"
__all__ = [
    "PlanOptions", "Problem", "WeftError", "check_plan", "compare_strategies", "estimate_costs", "load_graph_for",
    "load_plan", "load_problem", "lower", "make_plan", "parallelize", "place", "problem_from_graph", "read_cluster",
    "run_plan", "save_plan", "schedule",
]

_HOME = {
    "PlanOptions": "weft.search.common.problem", "Problem": "weft.search.common.problem",
    "WeftError": "weft.base.errors",
    "check_plan": "weft.plan.check", "compare_strategies": "weft.planning.compare", "estimate_costs": "weft.cost.costs",
    "load_graph_for": "weft.model.load", "load_plan": "weft.plan.plan",
    "load_problem": "weft.search.schedule.problem", "lower": "weft.plan.lower", "make_plan": "weft.planning.make",
    "parallelize": "weft.training.parallelize", "place": "weft.search.place.search",
    "problem_from_graph": "weft.search.place.problem",
    "read_cluster": "weft.cluster.cluster_file", "run_plan": "weft.run.launch", "save_plan": "weft.plan.plan",
    "schedule": "weft.search.schedule.search",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
