"""A sequence split over devices equals one process, in fp64: keys gathered or passed round, causal and full; controls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.run.pool import Pool
from tests.run.sharded_plans import ops_of, parameter_shapes, sharded_plan, sharding_of
from tests.run.test_sharded import CONTROL, LLAMA_TENSOR, LLAMA_VOCABULARY, TOLERANCE
from weft.plan.plan import Plan, Sharding
from weft.search.joint.placements import with_stored_parameters
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
