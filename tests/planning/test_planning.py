"""One way to a plan: for the command line, for Python and for training scripts."""

from __future__ import annotations

import json

import pytest
import torch

import weft
from tests.run.plans import source_of
from weft.base.errors import NoFeasiblePlan
from weft.cli.main import main
from weft.cluster import read_cluster
from weft.plan.plan import plan_to_json
from weft.planning.make import SearchOptions, search_plans
from weft.search.common.problem import PlanOptions
from weft.training.parallelize import wanted_optimizer

CLUSTER = "2 x A100-80GB, 2 x V100-16GB"


def test_python_and_the_command_line_find_the_same_plan(tmp_path):
    found = weft.make_plan("gpt2-tiny", CLUSTER, batch=16)
    assert main(["plan", "gpt2-tiny", CLUSTER, "--batch", "16", "--out", str(tmp_path / "plan.json"), "--quiet"]) == 0
    assert plan_to_json(found.best.plan) == json.loads((tmp_path / "plan.json").read_text())
    assert {"joint", "deploy", "1f1b"} <= {item.strategy for item in found.candidates}


def test_a_module_of_ones_own_is_searched_as_a_named_one_is():
    found = weft.make_plan(source_of("tiny_gpt"), read_cluster("4 x A100-80GB"), batch=16)
    joint = next(item for item in found.candidates if item.strategy == "joint")
    degrees = {len(tp_group) for tried in joint.tried for mesh in tried.setting.layout for tp_group in mesh.tp_groups}
    assert degrees > {1}, "devices of a host divide operators"


def test_nothing_is_divided_where_parameters_must_be_whole():
    options = PlanOptions(batch=16, whole_parameters=True)
    found = search_plans("gpt2-tiny", read_cluster(CLUSTER), options, SearchOptions()).comparison
    for item in found.candidates:
        for tried in item.tried:
            assert not tried.setting.zero
            assert {len(tp_group) for mesh in tried.setting.layout for tp_group in mesh.tp_groups} == {1}
        if item.plan is not None:
            assert not item.plan.optimizer.sharded
            assert {len(replica.devices) for stage in item.plan.stages for replica in stage.replicas} == {1}


@pytest.mark.parametrize(("make", "kind", "whole"), [
    (None, None, False), (lambda ps: torch.optim.SGD(ps, lr=1.0), "sgd", False),
    (lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.9), "adam", False),
    (lambda ps: torch.optim.AdamW(ps), "adamw", False), (lambda ps: torch.optim.Adafactor(ps), "adam", True),
    (lambda ps: torch.optim.Muon(ps), "adam", True)], ids=["none", "sgd", "momentum", "adamw", "adafactor", "muon"])
def test_what_is_known_of_the_users_optimizer(make, kind, whole):
    wanted = wanted_optimizer(make)
    assert (wanted.kind, wanted.is_whole) == (kind, whole)


def test_nothing_fits():
    with pytest.raises(NoFeasiblePlan, match="no strategy gives a plan"):
        weft.make_plan("llama-7b", "1 x RTX3090", batch=8)


MODEL = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.norm(checkpoint(self.first, x, use_reentrant=False))
        return torch.renorm(self.last(x), 2, 0, 1.0).pow(2).mean()

class Contrastive(Net):
    def forward(self, x):
        unit = nn.functional.normalize(self.last(self.first(x).relu()), dim=-1)
        return nn.functional.cross_entropy(4 * unit @ unit.T, torch.arange(len(x)))

class Otherwise(Net):
    def forward(self, x):
        return self.last(self.first(x * 2 if torch.compiler.is_compiling() else x)).pow(2).mean()

def otherwise(batch=8):
    return Otherwise(), torch.randn(batch, 8)

def net(batch=8):
    return Net(), torch.randn(batch, 8)

def contrastive(batch=8):
    return Contrastive(), torch.randn(batch, 8)
"""


def test_notes_of_the_planner_are_on_stderr_and_in_json(tmp_path, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    assert main(["plan", f"{tmp_path / 'model.py'}:net", "2 x cpu", "--batch", "8", "--joint", "--strategy", "data-parallel", "--json"]) == 0
    captured = capsys.readouterr()
    notes = json.loads(captured.out)["notes"]
    assert "note: batch normalisation in training uses the statistics" in captured.err
    assert all(f"note: {note}" in captured.err for note in notes)
    for text in ("batch normalisation in training", "aten.renorm.default has no rule, so every device does all of it: ",
                 "the model asks for gradient checkpointing: the plan's stages keep their inputs"):
        assert any(text in note for note in notes), text


def test_a_model_that_mixes_samples_is_planned_only_where_its_batch_is_whole(tmp_path, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    command = ["plan", f"{tmp_path / 'model.py'}:contrastive", "2 x cpu", "--batch", "8", "--out", str(tmp_path / "plan.json")]
    assert main([*command, "--strategy", "data-parallel"]) == 2
    assert "the plan cuts the batch, but the model's loss is not a mean over samples" in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()
    assert main([*command, "--strategy", "gpipe", "--microbatches", "1"]) == 0


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_model_that_takes_another_way_while_it_is_traced_is_not_planned(tmp_path, capsys, mode):
    """It was planned as it was traced, without a word, also where nothing cuts its batch."""
    (tmp_path / "model.py").write_text(MODEL)
    assert main(["plan", f"{tmp_path / 'model.py'}:otherwise", "2 x cpu", "--batch", "8", "--mode", mode, "--strategy", "gpipe",
                 "--microbatches", "1", "--out", str(tmp_path / "plan.json")]) == 2
    told = capsys.readouterr().err
    assert "the traced graph computes something else than the module: on the example " in told
    assert "asks whether it is traced (in model.py:" in told
    assert not (tmp_path / "plan.json").exists()
