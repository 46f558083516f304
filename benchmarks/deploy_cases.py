"""Cases of ``bench_deploy``: traced models that no training family is like, on clusters that training does not see.

Traced graphs are kept in ``out/deploy-graphs``, named by model, batch, dtype and the code that traces.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from weft.cluster.cluster_file import load_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.model.graph_file import load_graph, save_graph
from weft.search.common.problem import PlanOptions, Problem

HERE = Path(__file__).resolve().parent
CLUSTERS = HERE / "problems" / "deploy"
TRACER = ("capture", "columns", "fold", "forward", "functional", "graph", "probe", "source", "trace", "zoo", "zoo_models")
"""Modules that decide what a traced graph looks like."""
GRAPHS = HERE.parent / "out" / "deploy-graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster."""

    model: str
    batch: int
    cluster: str
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Return it in words."""
        return f"{self.model} x{self.batch}{'' if self.dtype == 'float32' else ' ' + self.dtype} on {self.cluster}"


def _cases(*rows: tuple[str, int, tuple[str, ...]]) -> tuple[Case, ...]:
    """Return the cases, one cluster of every model after the other, so that the first few have all models."""
    most = max(len(clusters) for _, _, clusters in rows)
    return tuple(_case(model, batch, clusters[place]) for place in range(most)
                 for model, batch, clusters in rows if place < len(clusters))


def _case(model: str, batch: int, cluster: str) -> Case:
    """Return a case in float16 where the cluster has A100, whose peers are far behind in it, else in float32."""
    return Case(model=model, batch=batch, cluster=cluster,
                dtype="float16" if cluster in ("two-generations", "box-and-rest") else "float32")


UNSEEN = _cases(
    ("gpt2:seq=512", 32, ("tag-testbed", "random8-1", "star-slow-link")),
    ("t5-base:seq=256", 32, ("tag-six", "random8-2", "racks")),
    ("inception-v3", 128, ("random8-5", "tag-testbed", "two-generations")),
    ("mt5-base:seq=128", 32, ("tag-six", "random8-3", "two-sites")),
    ("flava", 64, ("two-generations", "tag-six", "random8-2")),
    ("swin-t", 128, ("tag-testbed", "random8-6", "box-and-rest")),
    ("llama-7b:layers=4,seq=512", 16, ("box-and-rest", "tag-testbed", "two-sites")),
    ("whisper-base", 32, ("random8-4", "tag-six", "star-slow-link")),
    ("convnext-t", 128, ("two-sites", "tag-testbed", "random8-1")),
    ("opt-1.3b:layers=8,seq=256", 16, ("random8-3", "racks", "tag-six")),
    ("t5-large:seq=256", 16, ("tag-testbed", "two-generations", "random8-6")),
    ("lstm", 256, ("star-slow-link", "racks", "random8-4")),
    ("gpt2-xl:seq=256", 16, ("racks", "box-and-rest", "tag-testbed")),
)
"""39 cases: TAG's three kinds of clusters (two testbeds, random ones of 8 GPUs) and five more."""
RELATED = _cases(
    ("vgg-19", 64, ("tag-testbed", "random8-1")),
    ("resnet-50", 128, ("tag-six", "star-slow-link")),
    ("bert-large:seq=128", 32, ("tag-testbed", "two-sites")),
    ("vit-base", 64, ("random8-5", "racks")),
)
"""Models like those of a training family, on clusters that training does not see."""
LARGE = Case(model="t5-large:seq=256", batch=16, cluster="tag-testbed")
"""2,256 operators on 16 devices."""


def graph_path(case: Case) -> Path:
    """Return the file that keeps the traced graph."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{case.model}-{case.batch}-{case.dtype}".lower())
    return GRAPHS / f"{name}-{_tracer_digest()}.json.gz"


@cache
def _tracer_digest() -> str:
    folder = HERE.parent / "weft" / "model"
    return hashlib.sha256(b"".join((folder / f"{name}.py").read_bytes() for name in TRACER)).hexdigest()[:12]


def trace_graph(case: Case) -> float:
    """Trace the model of a case and keep its graph; return the CPU seconds that the tracing took."""
    import time

    from weft.model.load import load_graph_for

    begin = time.process_time()
    graph = load_graph_for(case.model, mode="training", batch=case.batch, dtype=case.dtype, batch_dims=True)
    seconds = time.process_time() - begin
    GRAPHS.mkdir(parents=True, exist_ok=True)
    save_graph(graph, graph_path(case))
    return seconds


@cache
def _graph(path: Path) -> Graph:
    return load_graph(path)


def problem_of(case: Case, *, seed: int = 0) -> Problem:
    """Return the problem of a case, whose graph is there; nothing that an earlier search worked out is kept in it."""
    graph, cluster = replace(_graph(graph_path(case))), load_cluster(CLUSTERS / f"{case.cluster}.yaml")
    options = PlanOptions(batch=case.batch, dtype=case.dtype, seed=seed)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster), options=options)
