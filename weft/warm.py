"""``python -m weft.warm``: compiles the numerical code once, so that no later command has to wait for it.

Compiled functions are kept on disk beside their modules. Everything is called once on a small problem.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Final

import numpy as np

from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph_file import parse_graph
from weft.model.load import load_graph_for
from weft.search.common.budget import Budget
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.search import DeployOptions, deploy
from weft.search.place import kernel
from weft.search.place.latency.anneal import Annealer
from weft.search.place.methods import METHODS
from weft.search.place.partition.problem import parse_partition
from weft.search.place.partition.search import solve_partition
from weft.search.place.problem import PlaceProblem, problem_from_graph
from weft.search.place.throughput.search import solve_throughput
from weft.search.schedule import anneal
from weft.search.schedule.problem import Block, ScheduleProblem
from weft.search.strategies.search import solve
from weft.search.strategies.strategy_graph import StrategyGraph
from weft.simulate.engine import Simulator
from weft.simulate.tasks import make_task_graph

NUM_OPS = 48


def main(names: list[str]) -> int:
    """Warm the parts named, one after the other; without names all of them, side by side in processes of their own."""
    if names:
        for name in names:
            PARTS[name]()
        return 0
    begin = time.monotonic()
    print("compiling the numerical code, once ...", file=sys.stderr, flush=True)
    runs = [subprocess.Popen([sys.executable, "-m", "weft.warm", name]) for name in PARTS]
    code = max(run.wait() for run in runs)
    print(f"compiled in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return code


def _small_problem() -> PlaceProblem:
    ops = [{"name": f"op{i}", "kind": "op", "times": {"a": 1.0 + i % 3, "b": 2.0}, "memory": 1} for i in range(NUM_OPS)]
    edges = [{"from": f"op{i}", "to": f"op{j}", "bytes": 10} for i in range(NUM_OPS) for j in (i + 1, i + 3)
             if j < NUM_OPS]
    graph = parse_graph({"format": "weft.graph", "version": 1, "ops": ops, "edges": edges})
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "contention": "link",
        "devices": [{"name": "a", "kind": "a", "memory": 100}, {"name": "b", "kind": "b", "memory": 100}],
        "links": [{"from": "a", "to": "b", "bandwidth": "10B/s", "latency": "1us"}]})
    return problem_from_graph(graph, cluster, estimate_costs(graph, cluster))


def _warm_placement() -> None:
    problem = _small_problem()
    found = [method(problem) for method in METHODS.values()]
    start = found[0]
    kernel.decode(kernel.Arrays.of(problem), start.device, start.order)
    Annealer(problem).run(start.device, start.order, steps=10_000, seed=0, hot=0.02, cold=0.001)


def _warm_loads() -> None:
    problem = _small_problem()
    start = np.zeros(problem.num_ops, dtype=np.int64)
    for contiguous in (False, True):
        solve_throughput(problem, contiguous=contiguous, budget=Budget(effort=0.1), seed=0, starts=[start])


def _warm_partition() -> None:
    nodes = [{"id": i, "supportedOnFpga": True, "cpuLatency": 10.0, "fpgaLatency": 1.0 + i % 3, "isBackwardNode": False,
              "colorClass": i // 2, "size": 1.0} for i in range(NUM_OPS)]
    edges = [{"sourceId": i, "destId": j, "cost": 0.5} for i in range(NUM_OPS) for j in (i + 1, i + 3) if j < NUM_OPS]
    problem = parse_partition({"maxSizePerFPGA": 20.0, "maxFPGAs": 3, "maxCPUs": 1, "nodes": nodes, "edges": edges})
    for objective in ("throughput", "latency"):
        solve_partition(problem, objective=objective, time_limit=0.3)


def _strategy_graph(limit: int | None, steps: tuple[int, ...] = (1, 3, 7)) -> StrategyGraph:
    rng = np.random.default_rng(0)
    edges = [(i, j) for i in range(NUM_OPS) for j in (i + step for step in steps) if j < NUM_OPS]
    return StrategyGraph(
        intervals=np.tile([0, 1], (NUM_OPS, 1)), costs=tuple(rng.integers(0, 100, (NUM_OPS, 5))),
        usages=tuple(rng.integers(0, 100, (NUM_OPS, 5))), edges=np.array(edges), usage_limit=limit,
        edge_costs=tuple(rng.integers(0, 100, (len(edges), 5, 5))))


def _warm_shard() -> None:
    for limit in (None, 30 * NUM_OPS):
        for _ in range(2):  # The first is over before everything has been compiled.
            solve(_strategy_graph(limit), time_limit=1.0)
    solve(_strategy_graph(None, steps=(1, 2)), time_limit=1.0)  # nodes between two others, which are taken out


def _warm_simulator() -> None:
    graph = make_task_graph([2.0, 1.0, 5.0], edges=[(0, 2)], holds=[(0, 0), (1, 0)], num_resources=1)
    Simulator(graph).run(np.array([1.0, 1.0, 1.0]))


def _training_problem() -> Problem:
    graph = load_graph_for("vgg-19:width=8,image=32", batch=16, dtype="float32", batch_dims=True)
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "network": {"bandwidth": "10Gbit/s", "latency": "20us"},
        "hosts": [{"name": "a", "devices": "2 x A100-80GB", "intra": "nvlink3"}, {"name": "b", "devices": "1 x V100"}]})
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(batch=16))


def _warm_deploy() -> None:
    deploy(_training_problem(), DeployOptions(max_simulations=100))


def _warm_schedules() -> None:
    blocks = (Block(name="f", devices=(0,), time=1.0, memory=1.0),
              Block(name="b", devices=(0,), time=1.0, memory=-1.0, after=(0,)))
    problem = ScheduleProblem(device_names=("a",), device_memory=(1.0,), blocks=blocks)
    anneal.Annealer(problem, 1.0, 0).run(np.array([[0.0], [0.5]]), 0.01, Budget(effort=1.0))


PARTS: Final = {"placement": _warm_placement, "loads": _warm_loads, "partition": _warm_partition,
                "shard": _warm_shard, "simulator": _warm_simulator, "deploy": _warm_deploy,
                "schedules": _warm_schedules}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
