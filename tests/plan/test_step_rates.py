"""Tokens per second and MFU against the formulas of the field, written out by hand."""

from __future__ import annotations

import pytest

from weft.cluster.cluster_file import read_cluster
from weft.model.load import load_graph_for
from weft.plan.step_rates import model_flop, step_rates, tokens_per_sample
from weft.planning.make import make_plan


@pytest.mark.parametrize(("model", "layers", "hidden", "weights", "seq"), [
    ("gpt2-tiny", 4, 64, 4 * 12 * 64 * 64 + 256 * 64, 32),
    ("llama-tiny", 4, 64, 4 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128) + 256 * 64, 32)])
def test_model_flop_is_six_per_weight_and_token_and_attention(model, layers, hidden, weights, seq):
    graph = load_graph_for(model, mode="training", batch=2)
    by_hand = seq * (6 * weights + 12 * layers * hidden * seq)
    assert model_flop(graph, training=True) == pytest.approx(by_hand, rel=1e-9)
    assert model_flop(graph, training=False) == pytest.approx(by_hand / 3, rel=1e-9)


@pytest.mark.parametrize(("model", "tokens"), [("gpt2-tiny", 32), ("lstm", 64), ("vit-base", None)])
def test_tokens_are_known_of_models_that_embed_them(model, tokens):
    assert tokens_per_sample(load_graph_for(model, mode="inference", batch=2)) == tokens


def test_rates_of_a_plan_are_of_the_devices_with_work():
    found = make_plan("gpt2-tiny", "4 x A100-80GB", batch=16, dtype="bfloat16", tp=1, pp=2, dp=2)
    graph, cluster, plan = load_graph_for("gpt2-tiny", batch=4), read_cluster("4 x A100-80GB"), found.best.plan
    assert plan is not None
    rates = step_rates(plan, graph, cluster, step_time_s=0.5)
    assert rates.samples_per_s == 32
    assert rates.tokens_per_s == 1024
    assert rates.tokens_per_s_per_device == 256
    assert rates.mfu == pytest.approx(model_flop(graph, training=True) * 16 / (0.5 * 4 * 312e12))
