"""A sharding in words, its collectives, and its exports."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from weft.base.errors import InputError
from weft.cluster import read_cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.cost.mesh import Mesh
from weft.model.folded import trace_folded
from weft.model.source import resolve_model
from weft.plan.plan import Optimizer
from weft.search.common.budget import Budget
from weft.search.shard.compare import sensible_shapes
from weft.search.shard.model_search import MeshSearch
from weft.search.shard.named import find_roles, named
from weft.show.sharding_facts import OUTSIDE, heads_note, sharding_facts
from weft.show.sharding_tables import layers_table, parallelize_plan, print_sharding, titan_settings

LAYERS = 5


@pytest.fixture(scope="module")
def folded():
    return trace_folded(resolve_model(f"llama-tiny:layers={LAYERS}", mode="training", batch=8), batch=8)


def search(folded, shape, limit=None):
    cluster = read_cluster("4 x A100-80GB")
    return MeshSearch(folded, estimate_costs(folded.traced.graph, cluster), Mesh(cluster, range(4), shape),
                      optimizer=Optimizer(), limit_bytes=limit, budget=Budget(effort=float("inf")))


def facts_of(folded, name, shape):
    item = search(folded, shape)
    found = item.run(named(name, find_roles(item.parts, folded), len(shape)))
    return sharding_facts(found, folded)


def layers_of(facts):
    """Return the class with most layers, as words of the last axis by module."""
    main = max((layer for layer in facts.layers if layer.title != OUTSIDE), key=lambda layer: layer.count)
    return main, {use.name: use.words[-1] for use in main.uses}


def test_megatron_in_words(folded):
    facts = facts_of(folded, "megatron", (2, 2))
    main, words = layers_of(facts)
    assert [axis.name for axis in facts.axes] == ["data", "tensor"]
    assert {words[f"self_attn.{name}_proj"] for name in "qkv"} == {"column"}
    assert words["self_attn attention"] == "heads"
    assert words["self_attn.o_proj"] == words["mlp.down_proj"] == "row"
    assert words["mlp.gate_proj"] == words["mlp.up_proj"] == "column"
    assert words["input_layernorm"] == "whole"
    assert sum(layer.count for layer in facts.layers if layer.title != OUTSIDE) == LAYERS
    sums = {(item.direction, facts.axes[item.axis].name): item.count for item in main.exchanges
            if item.kind == "all_reduce"}
    assert sums == {("forward", "tensor"): 2, ("backward", "tensor"): 2, ("gradients", "data"): 9}, "as Megatron has"


def test_figures_add_up(folded):
    for name in ("data", "zero1", "zero3", "megatron"):
        facts = facts_of(folded, name, (2, 2))
        total = facts.compute_s + sum(axis.seconds for axis in facts.axes)
        assert total == pytest.approx(facts.sharding.seconds, rel=1e-9), name
        assert facts.parameter_bytes + facts.activation_bytes == pytest.approx(facts.sharding.held_bytes), name


def test_storage_in_words(folded):
    for name, word in (("data", "whole"), ("zero1", "states"), ("zero3", "pieces")):
        main, _ = layers_of(facts_of(folded, name, (4,)))
        assert {use.stored for use in main.uses if use.is_matrix} == {(word,)}, name
        directions = {item.direction for item in main.exchanges}
        assert ("update" in directions) == (name == "zero1")
        assert ("weights" in directions) == (name == "zero3")
        assert "gradients" in directions


def test_layers_of_two_kinds_are_two_classes(folded):
    free = search(folded, (4,))
    roles = find_roles(free.parts, folded)
    most, least = (free.run(named(name, roles, 1)) for name in ("zero1", "zero3"))
    narrow = search(folded, (4,), (most.held_bytes + least.held_bytes) / 2)
    facts = sharding_facts(narrow.run(), folded)
    counts = [layer.count for layer in facts.layers if layer.title != OUTSIDE]
    assert sum(counts) == LAYERS
    graph = folded.traced.graph
    assert {name for op, name in enumerate(graph.op_names) if not graph.is_constant[op]} <= set(facts.ops)
    assert len({name for name in facts.ops if name.endswith("mlp.down_proj.linear")}) == LAYERS


def test_tables_are_printed(folded):
    stream = io.StringIO()
    facts = facts_of(folded, "megatron", (2, 2))
    with redirect_stdout(stream):
        print_sharding(facts)
    assert "2x2 (data 2, tensor 2)" in stream.getvalue()
    rows = layers_table(facts).rows
    assert any("self_attn.q_proj" in row[1] and "column" in row for row in rows)


def test_why_heads_do_not_divide():
    assert heads_note("heads", 32, "tensor", 8) == ""
    assert "25 heads do not divide evenly by the 8 devices of axis 'tensor'" in heads_note("heads", 25, "tensor", 8)
    assert "cannot be split by heads" in heads_note("kv", 2, "tensor", 8)


def test_meshes_follow_hosts():
    one = read_cluster("8 x A100-80GB")
    assert sensible_shapes(one, range(8)) == [(8,), (2, 4), (2, 2, 2)]
    many = parse_cluster({"format": "weft.cluster", "version": 1, "network": "ethernet100", "hosts": [
        {"name": "a", "count": 8, "devices": "8 x A100-80GB", "intra": "nvlink3"}]}, where="here")
    assert sensible_shapes(many, range(64)) == [(64,), (8, 8)]


# ---- exports --------------------------------------------------------------------------------------------------------


def test_torchtitan_settings(folded):
    found = titan_settings(facts_of(folded, "megatron", (2, 2)))["parallelism"]
    assert (found["data_parallel_replicate_degree"], found["tensor_parallel_degree"]) == (2, 2)
    assert found["enable_sequence_parallel"] is False
    found = titan_settings(facts_of(folded, "zero3", (4,)))["parallelism"]
    assert (found["data_parallel_shard_degree"], found["fsdp_reshard_after_forward"]) == (4, "always")
    assert titan_settings(facts_of(folded, "sequence", (2, 2)))["parallelism"]["enable_sequence_parallel"] is True


def test_torchtitan_has_no_axis_on_which_all_devices_do_the_same(folded):
    facts = sharding_facts(search(folded, (4,)).run(lambda parts, index: None if parts.parts[index].kind != "op" else [
        set(strategy) == {-1} for strategy in parts.parts[index].choices.strategies]), folded)
    assert [axis.name for axis in facts.axes] == ["unused"]
    with pytest.raises(InputError, match=r"is done by every device on axis 'unused'"):
        titan_settings(facts)


def test_data_parallel_is_no_plan_of_parallelize_module(folded):
    with pytest.raises(InputError, match=r"'model.layers.0.self_attn.q_proj' \(linear\) is split by samples"):
        parallelize_plan(facts_of(folded, "data", (4,)), folded)


def test_parallelize_module_takes_the_plan(folded):
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor import parallel as styles
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plan = parallelize_plan(facts_of(folded, "megatron", (2, 2)), folded)["plan"]
    assert plan["model.layers.3.mlp.down_proj"]["style"] == "RowwiseParallel"
    layouts = {"Replicate": Replicate(), "Partial": Partial()} | {f"Shard({dim})": Shard(dim) for dim in range(3)}
    made = {name: getattr(styles, item["style"])(**{key: layouts[value] for key, value in item.items()
                                                    if key != "style"}) for name, item in plan.items()}
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        source = resolve_model(f"llama-tiny:layers={LAYERS}", mode="training", batch=8)
        module = styles.parallelize_module(source.build(), mesh["tensor"], made)
        weight = module.get_parameter("model.layers.3.mlp.down_proj.weight")
        assert isinstance(weight, DTensor)
        assert weight.placements == (Shard(1),)
        assert module.get_parameter("model.layers.3.self_attn.q_proj.weight").placements == (Shard(0),)
    finally:
        torch.distributed.destroy_process_group()
