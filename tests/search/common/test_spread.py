"""Spreading a stage over devices: what follows from the largest matrices, and how parameters are then stored."""

from __future__ import annotations

import pytest

from tests.run.sharded_plans import ops_of, parameter_shapes
from weft.search.joint.placements import spread, with_stored_parameters
from weft.sharding.tensor_layout import parse_placement

LLAMA = "llama-tiny:layers=1"


@pytest.fixture(scope="module")
def llama():
    return ops_of(LLAMA), parameter_shapes(LLAMA)


def test_a_transformer_is_spread_as_experts_do(llama):
    sharding = spread(*llama, 2)
    words = {name.removeprefix("model.layers.0."): word for name, (word,) in sharding.ops.items()}
    assert words["self_attn.q_proj.linear"] == words["mlp.up_proj.linear"] == words["lm_head.linear"] == "n"
    assert words["self_attn.scaled_dot_product_attention"] == "kv"
    assert words["self_attn.o_proj.linear"] == words["mlp.down_proj.linear"] == "k"
    assert words["model.embed_tokens.embedding"] == "vocab"
    assert words["cross_entropy_loss"] == "classes"
    assert not any("norm" in name for name in words)
    tensors = sharding.tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"] == ("S0",)
    assert tensors["model.layers.0.self_attn.o_proj.weight"] == ("S1",)
    assert "model.norm.weight" not in tensors
    logits = ops_of(LLAMA)["lm_head.linear"].outputs[0]
    assert tensors[logits] == ("S2",)


def test_a_parameter_that_is_stored_already_stays_so(llama):
    ops, shapes = llama
    head = {name: ops[name] for name in ("lm_head.linear", "reshape", "cross_entropy_loss")}
    assert spread(head, shapes, 2).tensors["lm_head.weight"] == ("S0",)
    sharding = spread(head, shapes, 2, stored={"lm_head.weight": (parse_placement("S1"),)})
    assert sharding.tensors["lm_head.weight"] == ("S1",)
    assert sharding.ops["lm_head.linear"] == ("k",)


def test_more_devices_than_heads_leave_attention_whole(llama):
    sharding = spread(*llama, 4)
    assert not any("scaled_dot_product" in name for name in sharding.ops)
    assert sharding.ops["model.layers.0.mlp.down_proj.linear"] == ("k",)


def test_a_parameter_whose_readers_differ_is_whole_and_summed(llama):
    ops, shapes = llama
    words = {"model.layers.0.input_layernorm.mul_1": ("d1", ""), "lm_head.linear": ("b0", "n")}
    tensors = with_stored_parameters(words, ops, shapes, (2, 2)).tensors
    assert tensors == {"model.layers.0.input_layernorm.weight": ("R:P", "R"), "lm_head.weight": ("R:P", "S0")}
