"""Named plans: data parallel is data parallel, Megatron's is the textbook's, and the best is no worse than any."""

from __future__ import annotations

from functools import cache

import pytest

from tests.search.shard.worlds import cluster_of, search_of, zoo
from weft.base.errors import InputError
from weft.model.folded import trace_folded
from weft.search.shard.named import NAMES, find_roles, named
from weft.search.shard.op_choices import describe
from weft.sharding.tensor_layout import WHOLE

CLUSTER = cluster_of((4,), flop_per_s=1e10, memory_bytes_per_s=1e10, link=(1e9, 1e-7))


@cache
def search(shape=(2,), batch=4):
    return search_of(trace_folded(zoo("gpt2-tiny:layers=4", batch=batch)), CLUSTER, shape)


def plan(name, shape=(2,), batch=4):
    item = search(shape, batch)
    return item.run(named(name, find_roles(item.parts, item.folded), len(shape)))


def words(found):
    """Return the choice of every part in words, by name."""
    result = {}
    for part, index in zip(found.graph.node_part, found.choice, strict=True):
        item = found.parts.parts[part]
        if item.kind == "op":
            result[item.name] = describe(item.choices, index, ["x"] * len(found.mesh.shape))
        elif item.kind == "parameter":
            result[item.name] = str(item.stored[index].layout[-1])
    return result


def test_data_parallel_splits_samples_and_keeps_parameters_whole():
    item = search()
    found, roles = plan("data"), find_roles(item.parts, item.folded)
    for part, index in zip(found.graph.node_part, found.choice, strict=True):
        choice = item.parts.parts[part]
        if choice.kind == "parameter":
            assert set(choice.stored[index].layout) == set(choice.stored[index].gradient) == {WHOLE}
        elif choice.kind == "op" and part in roles.samples:
            assert choice.choices.strategies[index] == (roles.samples[part],)


def test_megatron_is_the_textbooks():
    found = words(plan("megatron"))
    layer = "transformer.h.1."
    stored = {name.removeprefix(layer): layout for name, layout in found.items()
              if name.startswith(layer) and name.endswith("weight") and ".ln" not in name}
    stored = {name: layout for name, layout in stored.items() if "ln_" not in name}
    # GPT-2 keeps matrices as (input, output): queries, keys and values are split in each of three blocks of columns
    assert stored == {"attn.c_attn.weight": "S1/3", "attn.c_proj.weight": "S0", "mlp.c_fc.weight": "S1",
                      "mlp.c_proj.weight": "S0"}


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_the_best_is_no_worse_than_any_named_plan(shape):
    best = search(shape).run()
    times = {name: plan(name, shape).seconds for name in NAMES}
    assert all(best.seconds <= seconds * (1 + 1e-9) for seconds in times.values())
    assert times["megatron"] <= min(times["attention"], times["ffn"]) * 10  # they exist and are of one order
    assert times["data"] <= times["zero3"] * (1 + 1e-9)


def test_pieces_hold_less():
    data, zero1, zero3 = (plan(name).held_bytes for name in ("data", "zero1", "zero3"))
    assert zero3 < zero1 < data


def test_an_unknown_name_is_refused():
    item = search()
    with pytest.raises(InputError, match="no plan named 'fsdp': choose one of data, zero1"):
        named("fsdp", find_roles(item.parts, item.folded), 1)


def test_a_batch_that_divides_over_one_axis_only_is_split_over_that_one():
    """Two samples on a mesh of 2 x 2: either axis can split them, both cannot."""
    found = plan("data", (2, 2), batch=2)
    item = search((2, 2), batch=2)
    roles = find_roles(item.parts, item.folded)
    split = [(item.parts.parts[part].choices, index, roles.samples[part])
             for part, index in zip(found.graph.node_part, found.choice, strict=True) if part in roles.samples]
    split = [(choices.strategies[index], samples) for choices, index, samples in split
             if choices.op.factors[samples].size == 2]
    assert len(split) > 30
    assert all(sorted(strategy) == sorted((-1, samples)) for strategy, samples in split)


def test_a_view_that_merges_samples_and_positions_is_no_obstacle():
    """Mixtral's experts see one list of tokens: it cannot be split by samples and by positions at once."""
    item = search_of(trace_folded(zoo("mixtral-8x:layers=4,hidden=32,ffn=64,seq=8", batch=4)), CLUSTER, (2, 2))
    found = item.run(named("sequence", find_roles(item.parts, item.folded), 2))
    assert item.run().seconds <= found.seconds * (1 + 1e-9)
