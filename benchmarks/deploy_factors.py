"""Sufficient factors: for known cases, which linear layers use them, and what both ways take by the cost model.

A layer that shares no input saves bytes only if all workers together have fewer rows than 2 in out / (in + out), where
both ways are even. Whether it saves time depends on links and compute rates, so every case names its cluster. The
seconds of a shape are those of its first layer, with an input of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.sections import Row
from weft.base.units import format_time
from weft.cluster.cluster import Cluster
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.model.load import load_graph_for
from weft.search.deploy.exchange import Decision, LayerTerms, decide_on_cluster, linear_layers

LAB = {"devices": "1 x cpu", "network": {"bandwidth": "200Mbit/s", "latency": "100us"}}
TAG = {"devices": "1 x V100-16GB", "network": {"bandwidth": "2.81GB/s", "latency": "12us"}}
ETHERNET = {"devices": "1 x A100-80GB", "network": "ethernet10"}
NVLINK = {"devices": "8 x A100-80GB", "intra": "nvlink3", "network": "ethernet100"}
CLUSTERS = {"cpu cores at 200 Mbit/s": LAB, "V100 at 2.81 GB/s": TAG, "A100 at 10 Gbit/s": ETHERNET,
            "A100 in boxes of 8 with NVLink": NVLINK}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster, and the shapes (in, out) that must use factors or must not."""

    what: str
    model: str
    samples_per_worker: int
    workers: tuple[int, ...]
    clusters: tuple[str, ...] = ("V100 at 2.81 GB/s", "A100 at 10 Gbit/s")
    dtype: str | None = None
    on: tuple[tuple[int, int], ...] | None = ()
    """These must use factors; if empty, none may; None: shown, not judged."""

    def is_met(self, decision: Decision) -> bool | None:
        """Return whether the decision is the one wanted."""
        if self.on is None:
            return None
        chosen = {(layer.num_in, layer.num_out) for layer in decision.chosen}
        return set(self.on) <= chosen if self.on else not chosen


VGG_LINEAR = ((25088, 4096), (4096, 4096), (4096, 1000))
CASES = (
    Case(what="VGG-19, batch 4 each", model="vgg-19", samples_per_worker=4, workers=(2, 4, 8, 16),
         clusters=tuple(CLUSTERS), on=VGG_LINEAR),
    Case(what="BERT large, 256 tokens in all", model="bert-large:seq=128", samples_per_worker=1, workers=(2,),
         on=((1024, 4096), (4096, 1024))),
    Case(what="BERT large, 256 tokens each", model="bert-large:seq=128", samples_per_worker=2, workers=(2,),
         on=((1024, 4096), (4096, 1024))),
    Case(what="BERT large, 256 tokens each", model="bert-large:seq=128", samples_per_worker=2, workers=(2,), on=None,
         clusters=("A100 in boxes of 8 with NVLink",)),
    Case(what="GPT-2 pre-training, 8,192 tokens each", model="gpt2", samples_per_worker=8, workers=(2, 16),
         dtype="bf16", clusters=("cpu cores at 200 Mbit/s", "A100 in boxes of 8 with NVLink")),
    Case(what="LLaMA 7B (2 layers), 2,048 tokens each", model="llama-7b:layers=2", samples_per_worker=1, workers=(2, 8),
         dtype="bf16", on=None),
)


def cluster_of(name: str, num_workers: int) -> Cluster:
    """Return a cluster of at least that many devices."""
    given = CLUSTERS[name]
    per_host = int(given["devices"].split()[0])
    host = {"name": "h", "count": -(-num_workers // per_host), **{key: given[key] for key in ("devices", "intra") if key in given}}
    return parse_cluster({"format": "weft.cluster", "version": 1, "hosts": [host], "network": given["network"]})


@cache
def graph_of(model: str, batch: int, dtype: str | None) -> Graph:
    return load_graph_for(model, mode="training", batch=batch, dtype=dtype)


def factors(options: Any) -> Iterator[Row]:
    """Yield a row for each case, cluster and number of workers."""
    for case in CASES:
        graph = graph_of(case.model, case.samples_per_worker, case.dtype)
        layers = linear_layers(graph)
        for name in case.clusters:
            for num_workers in case.workers:
                costs = estimate_costs(graph, cluster_of(name, num_workers))
                begin = time.process_time()
                found = decide_on_cluster(layers, costs, range(num_workers),
                                          num_samples=num_workers * case.samples_per_worker)
                yield Row(f"{case.what}, {num_workers} x {name}", describe(found), wanted(case), case.is_met(found),
                          details(found) | {"model": case.model, "cluster": name, "workers": num_workers,
                                            "cpu_seconds": time.process_time() - begin})
    yield from convolutions()


def convolutions() -> Iterator[Row]:
    """Yield a row for models of convolutions: none may be a candidate."""
    for model in ("vgg-19", "resnet-50"):
        graph = graph_of(model, 4, None)
        convs = {op for op, kind in enumerate(graph.op_kinds) if kind.startswith("aten.conv")}
        found = [layer for layer in linear_layers(graph) if layer.op in convs]
        yield Row(f"convolutions of {model}", f"{len(found)} of {len(convs)} use factors", "off", not found and bool(convs))


def break_even_rows(num_in: int, num_out: int) -> float:
    """Return the rows of all workers below which factors are fewer bytes to move than the gradient, in rings."""
    return 2 * num_in * num_out / (num_in + num_out)


def factors_s(term: LayerTerms) -> float:
    """Return the seconds of factors if no other layer read the input."""
    return term.input_s + term.gradient_s + term.compute_s


def by_shape(decision: Decision) -> dict[tuple[int, int], list[LayerTerms]]:
    groups: dict[tuple[int, int], list[LayerTerms]] = {}
    for term in decision.terms:
        groups.setdefault((term.layer.num_in, term.layer.num_out), []).append(term)
    return groups


def describe(decision: Decision) -> str:
    """Return the decision by shape, with the seconds of one layer both ways."""
    parts = []
    for (num_in, num_out), terms in by_shape(decision).items():
        num_on, first = sum(term.uses_factors for term in terms), terms[0]
        word = "off" if not num_on else "on" if num_on == len(terms) else f"on for {num_on} of {len(terms)}"
        parts.append(f"{num_in}x{num_out} {word} ({first.num_rows} rows, even at {break_even_rows(num_in, num_out):.0f}; "
                     f"{format_time(factors_s(first))} against {format_time(first.reduce_s)})")
    return (f"{format_time(decision.seconds)} against {format_time(decision.all_reduce_s)} for all layers\n         "
            + "\n         ".join(parts))


def details(decision: Decision) -> dict[str, Any]:
    shapes = [{"in": num_in, "out": num_out, "layers": len(terms), "on": sum(term.uses_factors for term in terms),
               "rows": terms[0].num_rows, "break_even_rows": break_even_rows(num_in, num_out),
               "factors_s": factors_s(terms[0]), "all_reduce_s": terms[0].reduce_s}
              for (num_in, num_out), terms in by_shape(decision).items()]
    return {"seconds": decision.seconds, "all_reduce_s": decision.all_reduce_s,
            "gathered_bytes": decision.gathered_bytes, "shapes": shapes}


def wanted(case: Case) -> str:
    if case.on is None:
        return "shown only"
    return "on for " + ", ".join(f"{num_in}x{num_out}" for num_in, num_out in case.on) if case.on else "off"
