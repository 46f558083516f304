"""Weft plans how a neural network runs across many devices, predicts how fast that is, and runs it that way.

    found = weft.make_plan("gpt2", "4 x A100-80GB", batch=64)
    print(found.best.strategy, found.best.step_time_s)
    weft.save_plan(found.best.plan, "plan.json")

Names are imported when first used (from where ``__init__.pyi`` says), so that ``import weft`` stays cheap.
"""

from weft.base.late import names_in_stub

__version__ = "0.1.0"
__all__ = [
    "PlanOptions", "Problem", "WeftError", "check_plan", "compare_strategies", "estimate_costs", "load_graph_for",
    "load_plan", "load_problem", "lower", "make_plan", "parallelize", "place", "problem_from_graph", "read_cluster",
    "run_plan", "save_plan", "schedule",
]

__getattr__ = names_in_stub(__name__, __file__)
