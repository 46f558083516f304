"""The compiled simulation of deployments against that of the plans that come of them, and known cases."""

from __future__ import annotations

import numpy as np
import pytest

from tests.search.deploy.worlds import cluster_of, deployer_of, host, problem_of
from weft.search.common.problem import evaluate_plan as evaluate
from weft.search.deploy.deployer import Deployer, deployment_plan

TWO_HOSTS = (host("a", 2), host("b", 2, rate="2GFLOP/s"))


def index_of(deployer: Deployer, text: str) -> int:
    """Return the number of the action described so."""
    return [f"{action.kind}{' by speed' if action.by_speed else ''} on {'+'.join('ab'[group] for group in action.device_groups)}"
            for action in deployer.actions].index(text)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("graph", [{}, {"skips": ((0, 3), (1, 5))}, {"tied": ((0, 5),)}])
def test_a_deployment_takes_as_long_as_its_plan(microbatches: int, graph: dict[str, object]) -> None:
    problem = problem_of(cluster_of(*TWO_HOSTS), **graph)
    deployer = deployer_of(problem, microbatches=microbatches, use_factors=False)
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(12):
        found = deployer.evaluate(rng.integers(len(deployer.actions), size=6).tolist())
        plan = deployment_plan(deployer, found, by="test")
        ratios.append(found.seconds / evaluate(plan, problem).step_time_s)
    assert min(ratios) > 0.85
    assert max(ratios) < 1.15
    assert np.median(ratios) == pytest.approx(1.0, abs=0.01)


def test_one_device_does_all_work_one_after_the_other() -> None:
    problem = problem_of(cluster_of(*TWO_HOSTS), flops=1e7)
    deployer = deployer_of(problem)
    found = deployer.evaluate([index_of(deployer, "single on a")] * 6)
    device = next(action.devices[0] for action in deployer.actions if action.kind == "single")
    assert found.seconds == pytest.approx(problem.op_seconds(device, 8).sum(), rel=1e-6)


def test_a_link_carries_one_message_at_a_time() -> None:
    # Host b's devices wait for 4 of 8 samples each, 4000 bytes over 1 MB/s, one after the other; the gradients of the
    # first come back while the second message goes out, those of the second after it: 3 x 4 ms.
    problem = problem_of(cluster_of(*TWO_HOSTS, latency="0s"), num_ops=2, flops=0.0, parameter_bytes=4)
    deployer = deployer_of(problem)
    one, both = index_of(deployer, "single on a"), index_of(deployer, "replicate on b")
    assert deployer.evaluate([one, both]).seconds == pytest.approx(0.012, rel=0.02)


def test_memory_that_does_not_fit_is_seen() -> None:
    tight = problem_of(cluster_of(host("a", 2, memory="30kB")), parameter_bytes=4000, activation_bytes=8000)
    deployer = deployer_of(tight)
    alone, cut = index_of(deployer, "single on a"), index_of(deployer, "pipeline on a")
    assert not deployer.evaluate([alone] * 6).fits
    assert deployer.evaluate([cut] * 6).missing_bytes < deployer.evaluate([alone] * 6).missing_bytes


def test_shares_follow_speed() -> None:
    problem = problem_of(cluster_of(host("a", 1), host("b", 1, rate="3GFLOP/s")), batch=8)
    deployer = deployer_of(problem)
    layout = deployer.layouts[deployer.layouts_of([index_of(deployer, "replicate by speed on a+b")] * 6)[0]]
    assert [samples for _, samples in layout.replicas] == [2, 6]
    without = deployer_of(problem, use_shares=False)
    assert not any(action.by_speed for action in without.actions)
