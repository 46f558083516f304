"""A few of the architectures of ``benchmarks.bench_foreign``: both ways to run them equal one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_foreign import Result, main, run_case
from tests.run.pool import Pool
from tests.run.sharded_plans import ops_of, parameter_shapes, sharded_plan
from weft.search.joint.placements import spread


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["mixtral", "llava", "opt"])
def test_an_architecture_that_weft_was_not_made_for_equals_one_process(name, tmp_path):
    """Default experts were refused in training, a checked value in llava, and layer drop in opt without a way out."""
    found = run_case(name, tmp_path)
    assert found.passed, found
    assert int(found.num_split.partition("/")[0]) >= 10
    assert found.note == ("eval mode" if name == "opt" else "")


@pytest.mark.timeout(120)
def test_operators_of_foreign_models_equal_one_process_on_ranks(tmp_path):
    """Bags, sums by letters, samples of images, windows, transforms and losses of two classes, split over two ranks."""
    model = f"{Path(__file__).with_name('foreign_ops.py')}:mixed"  # its loss is no mean of samples
    plan = sharded_plan(model, {"tensor": 2}, spread(ops_of(model), parameter_shapes(model), 2), microbatches=1)
    split = " ".join(plan.stages[0].sharding.ops)
    kinds = ("embedding_bag", "einsum", "grid_sampler", "_weight_norm", "view_as_complex", "view_as_real")
    assert all(kind in split for kind in kinds)
    with Pool(2, tmp_path, models=()) as pool:
        check = pool.run(plan, model)["verification"]
        assert max(check["loss_error"], check["gradient_error"]) <= 1e-10, check["worst"]
        assert not pool.run(plan, model, damage="lost all_reduce 1")["verification"]["passed"]


def test_what_was_not_run_has_not_passed():
    assert not Result(name="x", pipeline_error=0.0).passed
    assert not Result(name="x", pipeline_error=0.0, sharding_error=2e-10).passed
    assert Result(name="x", pipeline_error=0.0, sharding_error=1e-11).passed


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "no_such_model"])
    assert "there is no 'no_such_model'" in capsys.readouterr().err
