"""Where the names of ``weft`` are from."""

from weft.base.errors import WeftError as WeftError
from weft.cluster.cluster_file import read_cluster as read_cluster
from weft.cost.costs import estimate_costs as estimate_costs
from weft.model.load import load_graph_for as load_graph_for
from weft.plan.check import check_plan as check_plan
from weft.plan.lower import lower as lower
from weft.plan.plan import load_plan as load_plan
from weft.plan.plan import save_plan as save_plan
from weft.planning.compare import compare_strategies as compare_strategies
from weft.planning.make import make_plan as make_plan
from weft.run.launch import run_plan as run_plan
from weft.search.common.problem import PlanOptions as PlanOptions
from weft.search.common.problem import Problem as Problem
from weft.search.place.problem import problem_from_graph as problem_from_graph
from weft.search.place.search import place as place
from weft.search.schedule.problem import load_problem as load_problem
from weft.search.schedule.search import schedule as schedule
from weft.training.parallelize import parallelize as parallelize

__version__: str
