"""A sequence split over devices equals one process, in fp64: keys gathered or passed round, causal and full; controls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.run.pool import Pool
from tests.run.sharded_plans import ops_of, parameter_shapes, sharded_plan, sharding_of
from tests.run.test_sharded import CONTROL, LLAMA_TENSOR, LLAMA_VOCABULARY, TOLERANCE
from weft.base.errors import InputError, PlanError
from weft.cluster.cluster import DeviceId
from weft.cluster.cluster_file import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.folded import trace_folded
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.plan.plan import Optimizer, Plan, Sharding
from weft.plan.sharding import parse_strategy
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.find_splits import find_contexts
from weft.search.joint.chain import Chain
from weft.search.joint.estimate import Estimator
from weft.search.joint.layouts import Setting, StageMesh
from weft.search.joint.placements import with_stored_parameters
from weft.search.joint.search import evaluate
from weft.sharding.named_ops import named_ops
from weft.sharding.sequence import Passing, find_sequence

GPT, LLAMA = "gpt2-tiny:layers=2", "llama-tiny:layers=2"
BERT = "bert-large:layers=2,hidden=32,heads=4,vocab=60,seq=16,ffn=64"
CASES: dict[str, tuple[str, Mapping[str, int], Passing, bool | None, str]] = {
    "causal, gathered": (LLAMA, {"context": 4}, "gather", None, "lost all_gather 3"),
    "causal, passed round": (LLAMA, {"context": 4}, "ring", None, "lost pass_on 2"),
    "causal, gathered, in order": (GPT, {"context": 4}, "gather", False, "lost reduce_scatter 2"),
    "causal, passed round, in order": (GPT, {"context": 2}, "ring", False, "lost pass_on 3"),
    "full, gathered": (BERT, {"context": 4}, "gather", None, "lost all_gather 3"),
    "full, passed round": (BERT, {"context": 4}, "ring", None, "lost pass_on 5"),
    "with tensor": (LLAMA, {"context": 2, "tensor": 2}, "ring", None, "lost pass_on 1"),
    "in heads and rows": (LLAMA, {"tensor": 2, "context": 2}, "gather", None, "lost all_gather 2"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool"), models=(GPT, LLAMA, BERT)) as running:
        yield running


def context_sharding(model: str, mesh: Mapping[str, int], passing: Passing, zigzag: bool | None) -> Sharding:
    """Return the sharding with the sequence on the axis ``context``, heads and widths on ``tensor``."""
    ops, shapes, sizes = ops_of(model), parameter_shapes(model), tuple(mesh.values())
    own = find_sequence(ops).words(ops, passing, zigzag=zigzag)
    other = sharding_of(model, (2,), [{**LLAMA_TENSOR, **LLAMA_VOCABULARY}]).ops if "tensor" in mesh else {}
    words = {name: tuple(own.get(name, "") if axis == "context" else other.get(name, ("",))[0] for axis in mesh)
             for name in ops}
    return with_stored_parameters(words, ops, shapes, sizes)


def plan_of(case: str, **options: object) -> Plan:
    model, mesh, passing, zigzag, _ = CASES[case]
    return sharded_plan(model, mesh, context_sharding(model, mesh, passing, zigzag), **options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(pool: Pool, case: str) -> None:
    model, mesh, passing, _, damage = CASES[case]
    plan = plan_of(case)
    answer = pool.run(plan, model)
    check = answer["verification"]
    assert check["num_gradients"] >= len(parameter_shapes(model))
    assert check["loss_error"] <= TOLERANCE
    assert check["gradient_error"] <= TOLERANCE, check["worst"]
    counts = answer["counts"]
    if passing == "ring":  # keys and values go round in both passes, their gradients once more
        size, layers = mesh["context"], 2
        assert (counts["F"]["pass_on"], counts["B"]["pass_on"]) == (layers * (size - 1), layers * (2 * size - 1))
    control = pool.run(plan, model, damage=damage)["verification"]
    assert max(control["gradient_error"], control["loss_error"]) > CONTROL


LONG = "llama-tiny:layers=4"


@pytest.mark.timeout(120)
def test_a_searched_plan_with_a_context_axis_in_a_pipeline(pool: Pool) -> None:
    """Two stages on two devices each, which divide the sequence; states are in pieces over them too."""
    cluster = read_cluster("4 x H100-80GB")
    source = resolve_model(LONG, mode="training", batch=4, dtype="float64")
    graph = trace(source, batch=4, batch_dims=True).graph
    problem = Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=PlanOptions(
        batch=4, dtype="float64", optimizer=Optimizer(kind="adamw")))
    contexts = find_contexts(problem, trace_folded(source, batch=1), lambda graph: estimate_costs(graph, cluster))
    assert sorted(contexts) == [2, 4]
    estimator = Estimator(Chain(problem, contexts[2]))
    layout = tuple(StageMesh(((DeviceId(first), DeviceId(first + 1)),)) for first in (0, 2))
    setting = Setting(layout=layout, microbatches=4, cp=2, zero=1)
    plan = evaluate(estimator, estimator(setting)).plan
    assert [dict(stage.replicas[0].mesh) for stage in plan.stages] == [{"context": 2}] * 2
    assert any(word.endswith("@ring") or word == "rows/2z" for words in plan.stages[0].sharding.ops.values()
               for word in words)
    answer = pool.run(plan, LONG)["verification"]
    assert answer["loss_error"] <= TOLERANCE
    assert answer["gradient_error"] <= TOLERANCE, answer["worst"]
    control = pool.run(plan, LONG, damage="no_all_reduce")["verification"]
    assert control["gradient_error"] > CONTROL


@pytest.mark.parametrize(("model", "num_parts", "message"), [
    ("resnet-50:image=64,width=8", 2, "has no sequence to split: it has no attention"),
    (LLAMA, 3, "a context axis of 3 does not divide the sequence of 32 .* the nearest that does is 2"),
    (LLAMA, 32, "the nearest that does is 16"), (BERT, 32, "sequence of 16 .* the nearest that does is 16")])
def test_what_cannot_be_split_is_said_in_a_line(model: str, num_parts: int, message: str) -> None:
    found = find_sequence(named_ops(trace(resolve_model(model, mode="training", batch=2))))
    with pytest.raises(InputError, match=message) as told:
        found.check(num_parts, what=model)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("name", "word", "message"), [
    (".self_attn.scaled_dot_product_attention", "heads@ring", "stands behind the 'rows' of attention"),
    (".self_attn.q_proj.linear", "b1@ring", "stands behind the 'rows' of attention"),
    (".self_attn.scaled_dot_product_attention", "rows/3z", "zig-zag needs an even number"),
    (".self_attn.scaled_dot_product_attention", "rows/64z@ring", "cannot be split in '64z' equal blocks")])
def test_words_that_do_not_fit(name: str, word: str, message: str) -> None:
    op = ops_of(LLAMA)[f"model.layers.0{name}"]
    with pytest.raises(PlanError, match=message):
        parse_strategy(op.factors, (word,), (2,), name=name)
