"""Cases of ``bench_zoo``: every model of the zoo on eight clusters, half of them with devices of several kinds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import load_cluster
from weft.model.zoo import MODELS
from weft.search.common.problem import PlanOptions, Problem

if TYPE_CHECKING:
    from weft.model.folded import FoldedModel
    from weft.model.graph import Graph
    from weft.search.deploy.splits import Splits

PROBLEMS: Final = Path(__file__).resolve().parent / "problems"
CLUSTERS: Final[Mapping[str, Path]] = {
    **{name: PROBLEMS / "zoo" / f"{name}.yaml" for name in ("box4", "box8", "two-boxes", "eight-boxes", "workstation",
                                                           "three-kinds")},
    "tag-testbed": PROBLEMS / "deploy" / "tag-testbed.yaml", "generations": PROBLEMS / "zoo" / "generations.yaml"}
"""The files, equal clusters first."""
MIXED: Final = frozenset({"workstation", "three-kinds", "tag-testbed", "generations"})
NAMES: Final = tuple(name for name in MODELS if not name.endswith("-tiny"))
DTYPE: Final = "float16"
STEPS: Final = 16
LEAST, MOST = 64, 512
"""A step has so many times the samples of the zoo's table, but at least and at most these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster."""

    model: str
    cluster: str

    @property
    def batch(self) -> int:
        """Return the samples of a step."""
        return min(max(STEPS * MODELS[self.model].batch, LEAST), MOST)

    @property
    def name(self) -> str:
        """Return it in words."""
        return f"{self.model} x{self.batch} on {self.cluster}"


@cache
def cluster_of(name: str) -> Cluster:
    """Return a cluster of the table."""
    return load_cluster(CLUSTERS[name])


@cache
def graph_of(model: str) -> Graph:
    """Return the traced model."""
    from weft.model.load import load_graph_for

    return load_graph_for(model, mode="training", dtype=DTYPE, batch_dims=True)


@cache
def folded_of(model: str) -> FoldedModel | None:
    """Return the folded model, from which follows how devices divide operators; None where it cannot be folded."""
    from weft.base.errors import ModelError
    from weft.model.folded import trace_folded
    from weft.model.source import ModelSource, resolve_model

    batch = graph_of(model).batch
    source = resolve_model(model, batch=batch, dtype=DTYPE)
    assert isinstance(source, ModelSource)
    try:
        return trace_folded(source, batch=batch)
    except ModelError as miss:
        print(f"{model}: operators are not divided: {miss}", file=sys.stderr)
        return None


def problem_of(case: Case, *, seed: int = 0) -> Problem:
    """Return the problem of a case."""
    from weft.cost.costs import estimate_costs

    graph, cluster = graph_of(case.model), cluster_of(case.cluster)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster, dtype=DTYPE),
                   options=PlanOptions(batch=case.batch, dtype=DTYPE, seed=seed))


def splits_of(case: Case, problem: Problem) -> Splits:
    """Return how the devices of a host divide the operators of the model."""
    from weft.cost.costs import estimate_costs
    from weft.search.deploy.find_splits import find_splits

    folded = folded_of(case.model)
    if folded is None:
        return {}
    return find_splits(problem, folded, lambda graph: estimate_costs(graph, problem.cluster, dtype=DTYPE))
