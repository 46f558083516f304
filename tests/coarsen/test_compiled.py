"""Costs of compiled stages: chains in one kernel, products as they are."""

from __future__ import annotations

import json

import numpy as np
import pytest

from weft.cli.main import main
from weft.cluster import read_cluster
from weft.coarsen.compiled import COMPILER_STEPS, compiled_costs
from weft.coarsen.rules import Role, fuse_by_rules
from weft.cost.costs import estimate_costs
from weft.model.source import resolve_model
from weft.model.trace import trace

CLUSTER = read_cluster("1 x H100-80GB")


@pytest.fixture(scope="module")
def graph():
    return trace(resolve_model("gpt2:layers=2,seq=256", mode="training", dtype="bf16"), batch=4).graph


def test_products_and_attention_stay_what_they_are(graph):
    for step in COMPILER_STEPS:
        for rule in step:
            assert not {Role.MATMUL, Role.CONV, Role.ATTENTION} & {*rule.chain, rule.gives}
    eager = estimate_costs(graph, CLUSTER)
    compiled = compiled_costs(graph, eager)
    heavy = [op for op, kind in enumerate(graph.op_kinds) if "addmm" in kind or "attention" in kind]
    assert heavy
    assert np.array_equal(compiled.forward_s[heavy], eager.forward_s[heavy])
    assert np.array_equal(compiled.weight_grad_s, eager.weight_grad_s)


def test_a_group_takes_one_launch_and_what_crosses_its_border(graph):
    eager = estimate_costs(graph, CLUSTER)
    compiled = compiled_costs(graph, eager)
    assert (compiled.forward_s <= eager.forward_s).all()
    assert (compiled.input_grad_s <= eager.input_grad_s).all()
    overhead_s = CLUSTER.kinds[CLUSTER.devices[0].kind].overhead_s
    groups = [np.asarray(ops) for ops in fuse_by_rules(graph, COMPILER_STEPS).members() if len(ops) > 3]
    assert groups
    for ops in groups:
        launches = (eager.terms[0]["forward"].overhead_s[ops] > 0).sum()
        assert compiled.forward_s[ops].sum() <= eager.forward_s[ops].sum() - (launches - 1) * overhead_s + 1e-12
        assert compiled.forward_s[ops].sum() >= overhead_s


def test_the_planner_prices_what_it_plans(tmp_path, capsys):
    steps = {}
    for flag in ("--eager", "--compile"):
        file = tmp_path / f"{flag}.json"
        assert main(["plan", "gpt2:layers=2,seq=256", "2 x H100-80GB", "--batch", "8", "--precision", "bf16", "--strategy",
                     "1f1b", flag, "-o", str(file), "-q"]) == 0
        plan = json.loads(file.read_text())
        assert plan["compiled"] is (flag == "--compile")
        capsys.readouterr()
        assert main(["simulate", str(file), "--json"]) == 0
        steps[flag] = json.loads(capsys.readouterr().out)["step_time"]
        assert steps[flag] == pytest.approx(plan["search"]["step_time"], rel=0.05)
        assert main(["show", str(file)]) == 0
        assert ("bfloat16, compiled" in capsys.readouterr().out) is (flag == "--compile")
    assert steps["--compile"] < steps["--eager"]
