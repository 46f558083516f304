"""What operators are for: samples, positions, attention and feed-forward of small models of the zoo."""

from __future__ import annotations

import pytest

from tests.search.shard.worlds import cluster_of, parts_of, zoo
from weft.model.folded import trace_folded
from weft.search.shard.named import find_roles

SMALL = "hidden=32,heads=4,vocab=96,seq=16"
BATCH = 4


def roles_of(spec):
    folded = trace_folded(zoo(spec, batch=BATCH))
    parts = parts_of(folded, cluster_of((2,)), (2,))
    return parts, find_roles(parts, folded)


def names(parts, group, kind="parameter"):
    return {parts.parts[index].name for index in group if parts.parts[index].kind == kind}


CASES = {
    "gpt2-tiny:layers=3": (
        {"transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_proj.weight"},
        {"transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_proj.weight"}, "transformer.h.1."),
    "llama-tiny:layers=3": (
        {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"},
        {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}, "model.layers.1."),
    "vit-base:layers=3,hidden=32,heads=4,ffn=64,image=32,classes=8": (None, None, "vit.layers.1."),
}


@pytest.mark.parametrize("spec", CASES)
def test_matrices_of_a_layer_are_attention_or_feed_forward(spec):
    attention, feed_forward, layer = CASES[spec]
    parts, roles = roles_of(spec)
    assert not roles.attention & roles.feed_forward
    assert roles.attention | roles.feed_forward <= roles.layers
    found = [{name for name in names(parts, group) if name.startswith(layer) and name.endswith("weight")}
             for group in (roles.attention, roles.feed_forward)]
    if attention is None:
        assert all(found)
    else:
        assert found == [attention, feed_forward]
    matrices = {part.name for part in parts.parts if part.kind == "parameter" and part.name.startswith(layer)
                and part.stored and len(parts.traced.graph.tensor_shapes[part.tensor]) == 2}
    assert matrices <= found[0] | found[1]
    # samples: every operator with a factor for them names one of the batch's size or a multiple of it
    sizes = {parts.parts[index].choices.op.factors[factor].size for index, factor in roles.samples.items()}
    assert {size % BATCH for size in sizes} == {0}
    linear = [index for index, part in enumerate(parts.parts) if part.kind == "op" and index in roles.layers]
    assert sum(index in roles.samples for index in linear) > 0.8 * len(linear)
