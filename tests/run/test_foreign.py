"""A few of the architectures of ``benchmarks.bench_foreign``: both ways to run them equal one process."""

from __future__ import annotations

import pytest

from benchmarks.bench_foreign import Result, main, run_case


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["mixtral", "llava", "opt"])
def test_an_architecture_that_weft_was_not_made_for_equals_one_process(name, tmp_path):
    """Default experts were refused in training, a checked value in llava, and layer drop in opt without a way out."""
    found = run_case(name, tmp_path)
    assert found.passed, found
    assert int(found.num_split.partition("/")[0]) >= 10
    assert found.note == ("eval mode" if name == "opt" else "")


def test_what_was_not_run_has_not_passed():
    assert not Result(name="x", pipeline_error=0.0).passed
    assert not Result(name="x", pipeline_error=0.0, sharding_error=2e-10).passed
    assert Result(name="x", pipeline_error=0.0, sharding_error=1e-11).passed


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "no_such_model"])
    assert "there is no 'no_such_model'" in capsys.readouterr().err
