"""Fused groups, timed and found again by the cost model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.cost.worlds import SLOW, make_cluster
from tests.model.helpers import source_of
from weft.coarsen import measure
from weft.coarsen.coarsen import coarsen, fusion_report
from weft.cost.costs import estimate_costs
from weft.cost.figure import Source
from weft.cost.profile import ProfileStore
from weft.model.trace import trace


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 16), nn.ReLU())

    def forward(self, x):
        scale = torch.arange(16, dtype=x.dtype)
        return self.layers(x) * scale


@pytest.fixture(scope="module")
def traced():
    return trace(source_of(Mlp, (8,), mode="inference"))


@pytest.fixture
def quick(monkeypatch):
    """Do not wait for a C++ compiler."""
    def fail(_module, _arguments):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(measure, "compile_graph", fail)


def test_timed_groups_are_found_by_the_cost_model(traced, tmp_path, quick):
    coarse = coarsen(traced)
    assert coarse.graph.op_kinds == ("fused:linear+relu", "aten.linear", "fused:linear+relu+mul")
    store = ProfileStore(tmp_path / "profile.db")
    first = measure.profile_groups(traced, coarse.groups, store, "cpu", kind="slow", passes=3)
    assert (first.num_keys, first.num_timed) == (2, 2)
    assert len(first.notes) == 2
    assert "fused:linear+relu was timed as separate operators" in first.notes[0]
    costs = estimate_costs(coarse.graph, make_cluster((1,), kinds=(SLOW,)), profile=store)
    assert [costs.source[op, 0] == Source.MEASURED.code for op in range(3)] == [True, False, True]
    timing = next(iter(store.timings("slow").values()))
    assert timing.forward_s > 0
    assert timing.repeats == 3
    again = measure.profile_groups(traced, coarse.groups, store, "cpu", kind="slow", passes=3)
    assert (again.num_keys, again.num_timed) == (2, 0)


def test_a_compiled_group_gives_what_its_operators_give(traced, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    coarse = coarsen(traced)
    part = next(part for part in measure._parts(traced, coarse) if part.group == 0)
    module = measure._module(part, torch.device("cpu"))
    arguments = [torch.randn(tuple(node.meta["val"].shape), dtype=torch.float64) for node in part.reads]
    try:
        compiled = measure.compile_graph(module, arguments)
    except Exception as problem:
        pytest.skip(f"no C++ compiler: {problem}")
    assert coarse.groups.labels[0] == "linear+relu"
    torch.testing.assert_close(compiled(*arguments)[0], module(*arguments)[0])


def test_measured_groups_of_one_kind_do_not_answer_for_another(traced, tmp_path, quick):
    coarse = coarsen(traced)
    store = ProfileStore(tmp_path / "profile.db")
    measure.profile_groups(traced, coarse.groups, store, "cpu", kind="slow", passes=1)
    other = make_cluster((1,), kinds=(replace(SLOW, name="other"),))
    assert not (estimate_costs(coarse.graph, other, profile=store).source == Source.MEASURED.code).any()


def test_the_report_counts_before_and_after():
    row, = fusion_report(["gpt2-tiny:layers=1"])
    assert row.num_rules < row.num_ops / 3
    assert row.num_constants > 0
    assert row.num_inductor is None


def test_coarsening_by_rules_needs_no_torch():
    code = "import sys, weft.coarsen.coarsen; sys.exit('torch' in sys.modules or 'onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
