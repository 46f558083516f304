"""``weft run --compare-gradients``, from the command to processes and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.run.plans import MODELS, replicated_plan, traced
from tests.worlds import plain_cluster, with_sufficient_factors
from weft.cli.main import main
from weft.cluster.cluster_file import to_json
from weft.plan.plan import save_plan


@pytest.mark.timeout(120)
def test_both_ways_are_timed_and_compared(tmp_path, capsys):
    graph = traced("products", batch_dims=True).graph
    plan = replicated_plan(graph, [[(0, 0.5), (1, 0.5)]], microbatches=1, batch=4, num_devices=2)
    cluster = plain_cluster(2)
    plan = replace(with_sufficient_factors(plan, graph), cluster=replace(
        plan.cluster, digest=cluster.digest, description=to_json(cluster)),
        model=replace(plan.model, dtype="float64"))
    save_plan(plan, tmp_path / "plan.json")
    code = main(["run", str(tmp_path / "plan.json"), f"{MODELS}:products", "--compare-gradients", "--json", "--verify"])
    facts = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [row["exchange"] for row in facts["ways"]] == ["sufficient_factors", "all_reduce"]
    assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in facts["ways"])
    assert facts["difference"] <= 1e-12
    assert facts["between_ranks"] == 0.0


def test_a_plan_without_exchanges_has_nothing_to_compare(tmp_path, capsys):
    graph = traced("products", batch_dims=True).graph
    plan = replicated_plan(graph, [[(0, 1.0)]], microbatches=1, batch=4, num_devices=1)
    save_plan(plan, tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json"), f"{MODELS}:products", "--compare-gradients"]) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "plan.json"), f"{MODELS}:products", "--profile", "p.db"]) == 2
    assert "--compare-gradients" in capsys.readouterr().err
