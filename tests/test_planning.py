"""One way to a plan: for the command line, for Python and for training scripts."""

from __future__ import annotations

import json

import pytest
import torch

import weft
from tests.run.plans import source_of
from weft.cli.main import main
from weft.cluster import read_cluster
from weft.errors import NoFeasiblePlan
from weft.plan.plan import plan_to_json
from weft.planning import SearchOptions, search_plans
from weft.run.parallelize import _needs_whole, _optimizer_kind
from weft.search.problem import PlanOptions

CLUSTER = "2 x A100-80GB, 2 x V100-16GB"


def test_python_and_the_command_line_find_the_same_plan(tmp_path):
    found = weft.make_plan("gpt2-tiny", CLUSTER, batch=16)
    assert main(["plan", "gpt2-tiny", CLUSTER, "--batch", "16", "--out", str(tmp_path / "plan.json"), "--quiet"]) == 0
    assert plan_to_json(found.best.plan) == json.loads((tmp_path / "plan.json").read_text())
    assert {"joint", "deploy", "1f1b"} <= {item.strategy for item in found.candidates}


def test_a_module_of_ones_own_is_searched_as_a_named_one_is():
    found = weft.make_plan(source_of("tiny_gpt"), read_cluster("4 x A100-80GB"), batch=16)
    joint = next(item for item in found.candidates if item.strategy == "joint")
    degrees = {len(team) for tried in joint.tried for mesh in tried.setting.layout for team in mesh.teams}
    assert degrees > {1}, "devices of a host divide operators"


def test_nothing_is_divided_where_parameters_must_be_whole():
    options = PlanOptions(batch=16, whole_parameters=True)
    found = search_plans("gpt2-tiny", read_cluster(CLUSTER), options, SearchOptions()).comparison
    for item in found.candidates:
        for tried in item.tried:
            assert not tried.setting.sharded_states
            assert {len(team) for mesh in tried.setting.layout for team in mesh.teams} == {1}
        if item.plan is not None:
            assert not item.plan.optimizer.sharded
            assert {len(replica.devices) for stage in item.plan.stages for replica in stage.replicas} == {1}


@pytest.mark.parametrize(("make", "kind", "whole"), [
    (None, None, False), (lambda ps: torch.optim.SGD(ps, lr=1.0), "sgd", False),
    (lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.9), "adam", False),
    (lambda ps: torch.optim.AdamW(ps), "adamw", False), (lambda ps: torch.optim.Adafactor(ps), "adam", True),
    (lambda ps: torch.optim.Muon(ps), "adam", True)], ids=["none", "sgd", "momentum", "adamw", "adafactor", "muon"])
def test_what_is_known_of_the_users_optimizer(make, kind, whole):
    assert (_optimizer_kind(make), _needs_whole(make)) == (kind, whole)


def test_nothing_fits():
    with pytest.raises(NoFeasiblePlan, match="no strategy gives a plan"):
        weft.make_plan("llama-7b", "1 x RTX3090", batch=8)
