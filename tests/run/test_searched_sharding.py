"""A searched sharding, executed by four processes: loss and gradients as in one."""

from __future__ import annotations

import pytest

from benchmarks.bench_shard_run import slow_cluster
from tests.run.pool import Pool
from weft.cluster.cluster_file import parse_cluster
from weft.model.folded import trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.plan.plan import Optimizer
from weft.search.shard.compare import search_plan


@pytest.mark.timeout(300)
def test_the_best_sharding_of_a_llama_on_a_2x2_mesh(tmp_path):
    """It has fewer heads of keys than the mesh has devices, a vocabulary-split loss and split samples."""
    source = resolve_model("llama-tiny", mode="training", batch=4, dtype="float64")
    assert isinstance(source, ModelSource)
    plan = search_plan(trace_folded(source, batch=4), parse_cluster(slow_cluster()), shape=(2, 2),
                       optimizer=Optimizer(kind="none"))
    assert len(plan.stages[0].sharding.ops) > 100
    with Pool(4, tmp_path, models=()) as pool:
        check = pool.run(plan, "llama-tiny", dtype="float64")["verification"]
    assert check["passed"], check
    assert check["tolerance"] == 1e-10
    assert check["num_gradients"] > 100
