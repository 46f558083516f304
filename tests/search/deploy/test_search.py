"""The search for deployments: against all deployments, against its own parts, and for bad input."""

from __future__ import annotations

import itertools

import pytest

from tests.search.deploy.worlds import cluster_of, deployer_of, host, problem_of
from weft.base.errors import ClusterError, InputError, NoFeasiblePlan
from weft.plan.check import check_plan
from weft.search.deploy.local import Annealer
from weft.search.deploy.policy import UniformPolicy
from weft.search.deploy.search import DeployOptions, TreeSearch, deploy, microbatch_numbers

TWO_HOSTS = (host("a", 1), host("b", 1, rate="2GFLOP/s"))


def test_the_tree_finds_the_best_of_all_deployments() -> None:
    problem = problem_of(cluster_of(*TWO_HOSTS), num_ops=3)
    deployer = deployer_of(problem)
    every = itertools.product(range(len(deployer.actions)), repeat=3)
    best = min(deployer.evaluate(choice).seconds for choice in every)
    tree = TreeSearch([deployer], UniformPolicy())
    for _ in range(600):
        tree.step()
    assert tree.best is not None
    assert tree.best.evaluation.seconds == pytest.approx(best)


def test_annealing_never_returns_worse_than_it_began_with() -> None:
    problem = problem_of(cluster_of(*TWO_HOSTS))
    deployer = deployer_of(problem)
    start = deployer.find((0,) * 6)
    assert Annealer([deployer], start, seed=1).run(200).key <= start.key


def test_it_is_never_slower_than_data_parallelism_or_heft() -> None:
    problem = problem_of(cluster_of(host("a", 2), host("b", 2, rate="4GFLOP/s"), network="100kB/s"))
    found = {method: deploy(problem, DeployOptions(method=method, max_simulations=1500)).step_time_s
             for method in ("data-parallel", "heft", "auto")}
    assert found["auto"] <= min(found.values())
    assert found["auto"] >= problem.work_bound()


def test_clusters_of_too_many_devices_for_all_pairs_are_refused_at_once() -> None:
    with pytest.raises(ClusterError, match=r"has 1,025 devices, and the search for deployments, .* at most 1,024: use `weft plan`"):
        deploy(problem_of(cluster_of(host("a", 1025))))


def test_the_same_seed_gives_the_same_plan() -> None:
    problem = problem_of(cluster_of(*TWO_HOSTS))
    first, second = (deploy(problem, DeployOptions(max_simulations=900, seed=3)) for _ in range(2))
    assert first.plan == second.plan
    assert first.num_simulations == second.num_simulations


def test_the_plan_passes_all_checks_and_says_what_it_is() -> None:
    problem = problem_of(cluster_of(*TWO_HOSTS))
    found = deploy(problem, DeployOptions(max_simulations=300))
    check_plan(found.plan, problem.graph, problem.cluster)
    assert found.plan.search.status == "feasible"
    assert found.plan.search.step_time == found.step_time_s
    assert found.plan.search.bound is not None
    assert found.plan.search.bound <= found.step_time_s


def test_one_device_is_a_plan_too() -> None:
    assert len(deploy(problem_of(cluster_of(host("a", 1))), DeployOptions(max_simulations=50)).plan.stages) == 1


def test_what_cannot_fit_is_said() -> None:
    problem = problem_of(cluster_of(host("a", 2, memory="2kB")))
    with pytest.raises(NoFeasiblePlan, match="too little"):
        deploy(problem, DeployOptions(max_simulations=200))


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(InputError, match="no method 'magic'"):
        deploy(problem_of(cluster_of(*TWO_HOSTS)), DeployOptions(method="magic"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "numbers"), [(8, [1, 2, 4, 8]), (9, [1, 3, 9]), (12, [1, 2, 4])])
def test_numbers_of_microbatches_divide_the_batch(batch: int, numbers: list[int]) -> None:
    assert microbatch_numbers(problem_of(cluster_of(*TWO_HOSTS), batch=batch)) == numbers
