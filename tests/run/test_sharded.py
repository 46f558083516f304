"""Stages on several devices together equal one process, in fp64, for strategies written by hand; each control fails.

The patterns say which factor of which operators an axis splits; the rest is derived from the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.run.plans import traced
from tests.run.pool import Pool
from tests.run.sharded_plans import ops_of, parameter_shapes, sharded_plan, sharding_of
from weft.base.errors import PlanError
from weft.plan.plan import Plan, Sharding
from weft.plan.sharding import parse_layout, parse_strategy
from weft.plan.structure import structure_problems

TOLERANCE = 1e-10
CONTROL = 1e-7
"""A control must be at least this far off."""
GPT, LLAMA = "gpt2-tiny:layers=2", "llama-tiny:layers=2"
"""Four heads of 16; the second has two heads of keys and values."""

GPT_TENSOR = {
    r".*c_attn\.addmm": "n/3", r".*c_attn\.reshape_1": "d2/3", r".*attn\.split": "d2",
    r".*\.attn\.(reshape|transpose)(_[012])?": "d2", r".*\.scaled_dot_product_attention": "heads",
    r".*\.attn\.transpose_3": "d1", r".*\.attn\.reshape_3": "d2a", r".*c_proj\.reshape": "d1", r".*c_proj\.addmm": "k",
    r".*c_proj\.reshape_1": "+0", r".*c_fc\.addmm": "n", r".*c_fc\.reshape_1": "d2", r".*mlp\.act\..*": "d2"}
GPT_VOCABULARY = {r"transformer\.wte\.embedding": "vocab", r"lm_head\.linear": "n", r"reshape": "d1",
                  r"cross_entropy_loss": "classes"}
LLAMA_TENSOR = {
    r".*\.[qkv]_proj\.linear": "n", r".*attn\.(reshape|transpose)(_[012])?": "d2",
    r".*attn\.(mul|slice|neg|cat|add)(_\d)?": "d1", r".*\.scaled_dot_product_attention": "kv",
    r".*attn\.transpose_3": "d1", r".*attn\.reshape_3": "d2a", r".*\.o_proj\.linear": "k",
    r".*\.(gate|up)_proj\.linear": "n", r".*\.mlp\..*(silu|mul)": "d2", r".*\.down_proj\.linear": "k"}
QUERY_ROPE = r".*attn\.(mul|mul_1|slice|slice_1|neg|cat|add)"
LLAMA_QUERIES = {  # two heads of keys and values on more devices: they stay whole, and attention is split by queries
    **{key: word for key, word in LLAMA_TENSOR.items() if "attn" not in key and "qkv" not in key},
    r".*\.q_proj\.linear": "n", r".*attn\.(reshape|transpose)": "d2", QUERY_ROPE: "d1",
    r".*\.scaled_dot_product_attention": "rows", r".*attn\.transpose_3": "d2", r".*attn\.reshape_3": "d1"}
LLAMA_VOCABULARY = {r"model\.embed_tokens\.embedding": "vocab", r"lm_head\.linear": "n", r"reshape": "d1",
                    r"cross_entropy_loss": "classes"}
DATA = {r".*": "t0 b0 d0a d0 m rows0", r".*wpe\.embedding": ":P"}
GPT_SEQUENCE = {**GPT_TENSOR, r".*\.ln_[12]\.layer_norm": "d1", r"transformer\.h\.\d\.add(_1)?": "d1",
                r".*\.(c_attn|c_fc)\.reshape": ":P"}
LLAMA_SEQUENCE = {**LLAMA_TENSOR, r".*layernorm\..*": "d1", r"model\.layers\.\d\.add(_1)?": "d1"}

CASES = {
    "gpt on 2": (GPT, {"tensor": 2}, [GPT_TENSOR], "lost all_reduce 2"),
    "gpt on 4": (GPT, {"tensor": 4}, [GPT_TENSOR], "lost all_reduce 7"),
    "gpt with vocabulary on 4": (GPT, {"tensor": 4}, [{**GPT_TENSOR, **GPT_VOCABULARY}], "lost all_reduce 1"),
    "gpt in sequence on 2": (GPT, {"tensor": 2}, [GPT_SEQUENCE], "lost all_gather 2"),
    "llama in sequence on 2": (LLAMA, {"tensor": 2}, [LLAMA_SEQUENCE], "lost reduce_scatter 6"),
    "llama on 2": (LLAMA, {"tensor": 2}, [LLAMA_TENSOR], "lost all_reduce 6"),
    "llama with fewer keys than devices": (LLAMA, {"tensor": 4}, [LLAMA_QUERIES], "lost all_to_all 2"),
    "llama in uneven parts": (LLAMA, {"tensor": 3}, [{**LLAMA_QUERIES, **LLAMA_VOCABULARY}], "lost all_gather 3"),
    "data parallel": (GPT, {"data": 2}, [DATA], "no_all_reduce"),
    "data and tensor": (GPT, {"data": 2, "tensor": 2}, [DATA, {**GPT_TENSOR, **GPT_VOCABULARY}], "no_all_reduce"),
    "tensor and data": (LLAMA, {"tensor": 2, "data": 2}, [LLAMA_TENSOR, DATA], "lost all_reduce 3"),
    "tensor twice": (LLAMA, {"one": 2, "two": 2}, [LLAMA_VOCABULARY, {
        **LLAMA_VOCABULARY, r".*\.(gate|up)_proj\.linear": "n", r".*\.mlp\..*(silu|mul)": "d2",
        r".*\.down_proj\.linear": "k"}], "lost all_reduce 2"),
    "nothing split": (GPT, {"tensor": 2}, [{}], "changed_weight"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool"), models=(GPT, LLAMA)) as running:
        yield running


def plan_of(case: str, **options: object) -> Plan:
    model, mesh, axes, _ = CASES[case]
    return sharded_plan(model, mesh, sharding_of(model, tuple(mesh.values()), axes), **options)


def check_equal(pool: Pool, plan: Plan, model: str, **options: object) -> dict[str, object]:
    answer = pool.run(plan, model, **options)
    check = answer["verification"]
    assert check["num_gradients"] >= len(parameter_shapes(model))
    assert check["loss_error"] <= TOLERANCE
    assert check["gradient_error"] <= TOLERANCE, check["worst"]
    return answer


COUNTS = {
    "gpt on 2": ({"all_reduce": 4}, {"all_reduce": 4}),
    "gpt on 4": ({"all_reduce": 4}, {"all_reduce": 4}),
    "llama on 2": ({"all_reduce": 4}, {"all_reduce": 4}),
    "gpt in sequence on 2": ({"all_gather": 5, "reduce_scatter": 4}, {"all_gather": 5, "reduce_scatter": 4}),
    "llama in sequence on 2": ({"all_gather": 5, "reduce_scatter": 4}, {"all_gather": 5, "reduce_scatter": 4}),
    "data parallel": ({"all_reduce": 2}, {}),  # the number of targets, and the loss
    "nothing split": ({}, {}),
}
"""Collectives of two layers: a block split as Megatron-LM does it issues two sums in the forward, two in the backward."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process_with_no_more_collectives_than_needed(pool, case):
    model, _, _, damage = CASES[case]
    plan = plan_of(case)
    counts = check_equal(pool, plan, model)["counts"]
    if case in COUNTS:
        assert (counts.get("F", {}), counts.get("B", {})) == COUNTS[case]
    control = pool.run(plan, model, damage=damage)["verification"]
    assert not control["passed"]
    assert max(control["gradient_error"], control["loss_error"]) > CONTROL


@pytest.mark.timeout(120)
def test_parameters_in_parts_that_are_gathered_for_use(pool):
    """Data parallel, with every matrix stored in parts: gathered in the forward, gradients scattered in the backward."""
    parts = dict.fromkeys(parameter_shapes(GPT), ("S0",))
    plan = sharded_plan(GPT, {"data": 2}, Sharding(ops=sharding_of(GPT, (2,), [DATA]).ops, tensors=parts))
    assert plan.gradients == ()
    counts = check_equal(pool, plan, GPT)["counts"]
    assert counts["F"]["all_gather"] == counts["B"]["reduce_scatter"] == len(parts)
    assert not pool.run(plan, GPT, damage="lost reduce_scatter 5")["verification"]["passed"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("option", ["recompute", "split"])
def test_recomputation_and_split_backward(pool, option):
    plan = plan_of("gpt with vocabulary on 4", **{option: True})
    check_equal(pool, plan, GPT)


@pytest.mark.timeout(120)
def test_devices_in_any_order(pool):
    check_equal(pool, plan_of("data and tensor", devices=(3, 0, 2, 1)), GPT)


@pytest.mark.timeout(120)
def test_steps_of_the_optimizer_equal_those_of_one_device(pool):
    one = sharded_plan(GPT, {}, Sharding(), optimizer="adam")
    expected = pool.run(one, GPT, steps=3)["losses"]
    found = pool.run(plan_of("data and tensor", optimizer="adam"), GPT, steps=3)["losses"]
    assert expected[2] != expected[0]
    assert found == pytest.approx(expected, rel=1e-10)


def test_parameters_are_held_in_parts():
    plan = plan_of("gpt with vocabulary on 4")
    tensors, graph = plan.stages[0].sharding.tensors, traced(GPT).graph
    assert tensors["lm_head.weight" if "lm_head.weight" in tensors else "transformer.wte.weight"] == ("S0",)
    split = sum(int(graph.tensor_bytes[graph.tensor_index[name]]) for name, words in tensors.items()
                if parse_layout(words).value[0].is_split)
    assert split > 0.9 * graph.tensor_bytes[graph.parameters].sum()


@pytest.mark.parametrize(("words", "message"), [
    ({"lm_head.linear": ("q",)}, r"sharding.ops.lm_head.linear: there is no factor 'q'; it has b0, b1, n, k"),
    ({"lm_head.linear": ("+7",)}, r"'\+7' is none of its 2 sets of operands"),
    ({"lm_head.linear": ("n/7",)}, r"'n' cannot be split in '7' equal blocks: its size is 256"),
    ({"transformer.wte.embedding": ("vocab/2",)}, r"'vocab' cannot be split in '2' equal blocks: it is looked up"),
    ({"transformer.h.0.attn.scaled_dot_product_attention": ("heads",)}, r"\['heads'\] does not fit axes of sizes \[8\]"),
    ({"transformer.arange": ("d0",)}, r"sharding.ops.transformer.arange: there is no rule for this operator"),
])
def test_words_that_do_not_fit_are_refused(words, message):
    for name, word in words.items():
        with pytest.raises(PlanError, match=message):
            parse_strategy(ops_of(GPT)[name].factors, word, (8,), name=name)


def test_a_gradient_that_is_left_a_sum_must_be_exchanged():
    plan = plan_of("gpt on 2")
    first = plan.stages[0]
    tensors = {**first.sharding.tensors, "transformer.h.0.mlp.c_fc.bias": ("R:P",)}
    changed = replace(plan, stages=(replace(first, sharding=replace(first.sharding, tensors=tensors)),))
    assert structure_problems(changed, traced(GPT).graph) == [
        "gradients: parameter 'transformer.h.0.mlp.c_fc.bias' is held by d0, d1 but its gradient is not exchanged"]


def test_gradients_are_exchanged_along_the_axes_on_which_they_are_sums():
    plan = plan_of("data and tensor")
    sets = {name: exchange.devices for exchange in plan.gradients for name in exchange.parameters
            if exchange.devices[0] == "d0"}
    assert sets["transformer.h.0.mlp.c_fc.weight"] == sets["transformer.ln_f.weight"] == ("d0", "d2")
    assert sets["transformer.h.0.mlp.c_proj.bias"] == ("d0", "d1", "d2", "d3")
    assert len(plan.gradients) == 3


@pytest.mark.timeout(120)
def test_inference(tmp_path):
    with Pool(2, tmp_path, models=(LLAMA,), mode="inference") as pool:
        sharding = sharding_of(LLAMA, (2,), [LLAMA_TENSOR], mode="inference")
        plan = sharded_plan(LLAMA, {"tensor": 2}, sharding, num_devices=2, mode="inference")
        answer = pool.run(plan, LLAMA)
        assert answer["verification"]["loss_error"] <= TOLERANCE
        assert answer["counts"] == {"F": {"all_reduce": 4}}
        assert not pool.run(plan, LLAMA, damage="lost all_reduce 3")["verification"]["passed"]
