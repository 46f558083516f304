"""Evaluations that end at a limit agree with whole simulations; seeds by dynamic program with all pipelines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.policy_training.cases import training_case
from tests.search.deploy.worlds import cluster_of, deployer_of, host, problem_of
from weft.search.deploy.deployer import Deployer
from weft.search.deploy.local import Annealer
from weft.search.deploy.search import DeployOptions, make_deployers
from weft.search.deploy.seeds import (
    data_parallel_choices,
    find_taste,
    heft_choices,
    least_limit,
    least_sums,
    staged_choices,
    uniform_choices,
)

TWO_HOSTS = (host("a", 2), host("b", 2, rate="2GFLOP/s"))


def random_choice(deployer: Deployer, rng: np.random.Generator) -> tuple[int, ...]:
    """Return runs of groups with actions at random."""
    num_groups = deployer.groups.num_groups
    actions = rng.integers(len(deployer.actions), size=num_groups)
    return tuple(np.repeat(actions, rng.integers(1, 8, size=num_groups))[:num_groups].tolist())


@pytest.mark.parametrize("seed", range(6))
def test_a_limit_separates_what_is_slower_from_what_is_not(seed: int) -> None:
    problem, rng = training_case(seed), np.random.default_rng(seed)
    whole, limited = (make_deployers(problem, DeployOptions(max_groups=20)) for _ in range(2))
    for plain, quick in zip(whole, limited, strict=True):
        for _ in range(10):
            choice = random_choice(plain, rng)
            found = plain.evaluate(choice)
            assert quick.bound(choice) <= found.seconds * (1 + 1e-9)
            assert quick.evaluate_within(choice, found.seconds * (1 - 1e-6)) is None
            within = quick.evaluate_within(choice, found.seconds)
            assert (within is not None) == found.fits
            assert within is None or within.seconds == found.seconds


def test_what_a_bound_rules_out_costs_no_simulation() -> None:
    deployer = deployer_of(problem_of(cluster_of(*TWO_HOSTS)))
    alone = next(index for index, action in enumerate(deployer.actions) if action.kind == "single")
    assert deployer.evaluate_within([alone] * 6, deployer.bound([alone] * 6) / 2) is None
    assert deployer.num_simulations == 0
    assert deployer.num_asked == 1


def test_inference_has_bounds_without_a_backward() -> None:
    problem = problem_of(cluster_of(*TWO_HOSTS))
    deployer = deployer_of(replace(problem, options=replace(problem.options, mode="inference")), microbatches=2)
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = random_choice(deployer, rng)
        assert deployer.bound(choice) <= deployer.evaluate(choice).seconds * (1 + 1e-9)


def test_a_pipeline_spelled_out_is_the_same_deployment() -> None:
    deployer = deployer_of(problem_of(cluster_of(*TWO_HOSTS)))
    for index, action in enumerate(deployer.actions):
        choice = deployer.spelled_out([index] * 6)
        assert deployer.layouts_of(choice).tolist() == deployer.layouts_of([index] * 6).tolist()
        assert all(deployer.actions[item].kind in ("single", "replicate") for item in choice)
        assert action.kind not in ("pipeline", "pipeline groups") or len(set(choice)) > 1


def test_data_parallelism_is_tried_even_and_by_speed() -> None:
    deployer = deployer_of(problem_of(cluster_of(*TWO_HOSTS)))
    tried = [deployer.actions[choice[0]] for _, choice in data_parallel_choices([deployer])]
    assert [(len(action.devices), action.by_speed) for action in tried] == [(4, False), (4, True)]


def test_seeds_of_one_action_come_in_the_order_of_their_bounds() -> None:
    deployer = deployer_of(problem_of(cluster_of(*TWO_HOSTS)))
    bounds = [deployer.bound(choice) for _, choice in uniform_choices([deployer])]
    assert bounds == sorted(bounds)
    assert len(bounds) == len(deployer.actions)


def test_heft_needs_devices_with_actions_of_their_own() -> None:
    deployer = deployer_of(problem_of(cluster_of(*TWO_HOSTS)))
    assert [len(choice) for _, choice in heft_choices([deployer])] == [6]


def test_quick_annealing_is_never_worse_than_it_began_with_and_repeats_itself() -> None:
    problem = problem_of(cluster_of(*TWO_HOSTS))
    results = []
    for _ in range(2):
        deployer = deployer_of(problem, microbatches=2)
        start = deployer.find((0,) * 6)
        annealer = Annealer([deployer], start, seed=1, taste=find_taste([deployer], [start]))
        annealer.peers = [tuple(range(6))]
        results.append(annealer.run(300))
        assert results[-1].key < start.key
        assert deployer.evaluate(results[-1].choice).seconds == results[-1].evaluation.seconds
    assert results[0].choice == results[1].choice


# ---- pipelines ------------------------------------------------------------------------------------------------------


def every_pipeline(num_places: int, num_groups: int) -> list[list[tuple[int, int, int]]]:
    """Return all pipelines as lists of (place, first, stop) in which each place is used once at most."""
    found = []
    for length in range(1, num_places + 1):
        for places in itertools.permutations(range(num_places), length):
            for cuts in itertools.combinations(range(1, num_groups), length - 1):
                ends = (0, *cuts, num_groups)
                found.append([(place, ends[at], ends[at + 1]) for at, place in enumerate(places)])
    return found


def test_the_dynamic_program_finds_the_best_of_all_pipelines() -> None:
    rng = np.random.default_rng(0)
    num_places, num_groups = 3, 5
    work = np.concatenate([np.zeros((num_places, 1)), np.cumsum(rng.random((num_places, num_groups)), axis=1)], axis=1)
    crossing = rng.random((num_places, num_groups + 1))
    crossing[:, 0] = 0.0
    digits, taken = np.full(num_places, 2), np.eye(num_places, dtype=np.int64)

    def times(pipeline: list[tuple[int, int, int]]) -> list[float]:
        return [value for place, first, stop in pipeline
                for value in (work[place, stop] - work[place, first], crossing[place, first])]

    every = [times(pipeline) for pipeline in every_pipeline(num_places, num_groups)]
    limit = float(least_limit(digits, taken, work, crossing))
    assert limit == pytest.approx(min(map(max, every)))
    for factor in (1.0, 1.3, 3.0):
        sums, _ = least_sums(digits, taken, work, crossing, limit * factor * (1 + 1e-9))
        assert sums.min() == pytest.approx(min(sum(item) for item in every if max(item) <= limit * factor * (1 + 1e-9)))


def test_two_devices_of_a_group_can_be_two_stages() -> None:
    deployer = deployer_of(problem_of(cluster_of(host("a", 3), network="1MB/s", inside="1GB/s")), microbatches=4)
    stages = [[deployer.actions[index].devices for index in dict.fromkeys(choice)]
              for choice in staged_choices(deployer)]
    assert any(len(item) > 1 and all(len(devices) == 1 for devices in item) for item in stages)


def test_groups_that_share_a_parameter_are_in_one_stage_of_the_first_pipelines() -> None:
    deployer = deployer_of(problem_of(cluster_of(*TWO_HOSTS), tied=((0, 5),)), microbatches=2)
    first = next(iter(staged_choices(deployer)))
    assert first[0] == first[5]


def test_large_clusters_have_pipelines_of_whole_device_groups() -> None:
    hosts = [host(name, 16) for name in "abcd"]
    deployer = deployer_of(problem_of(cluster_of(*hosts), batch=64), microbatches=2)
    choices = list(staged_choices(deployer))
    assert choices
    assert all(deployer.actions[index].kind == "replicate" for choice in choices for index in choice)
