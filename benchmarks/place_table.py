"""Sections of ``bench_place`` that search in fresh processes: Moirai's graphs, the zoo, large graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.place_common import SLACK, Options, at_most, search
from benchmarks.place_models import BRANCHING, CLUSTERS, MODELS, cluster_file, graph_file, large_files
from benchmarks.sections import Row

HEFT_SUBSETS = "heft-subsets"
ACCELERATE = ("accelerate-sequential", "accelerate-balanced")


@dataclass(frozen=True, slots=True)
class _Known:
    """One public problem and what is to be reached."""

    name: str
    time_limit: float
    cpu_s: float
    """CPU seconds allowed, start of the process included."""
    value: float
    bound: float
    is_optimal: bool
    about: str


KNOWN = (
    _Known("moirai-example-1", 15.0, 5.0, 30.0, 30.0, True, "30 optimal, <= 5 CPU-s; the authors' schedule has 31"),
    _Known("moirai-googlenet", 12.5, 15.0, 1.310e-3, 0.817e-3, False,
           "<= 1.310 ms in 15 CPU-s, bound > 0.817; HEFT 1.551, CP-SAT 1.449, annealing 1.308"),
    _Known("moirai-googlenet", 57.0, 60.0, 1.288e-3, 0.817e-3, False,
           "<= 1.288 ms in 60 CPU-s, bound > 0.817; annealing 1.288"),
    _Known("moirai-yolov5x", 28.0, 30.0, 23.745e-3, 23.745e-3, True, "23.745 ms optimal, <= 30 CPU-s; HEFT 23.766"),
)


def moirai(options: Options) -> Iterator[Row]:
    """Yield the public problems with latencies known."""
    folder = options.data / "place"
    if not folder.is_dir():
        yield Row("Moirai's graphs", "skipped", f"no folder {folder}: give --data")
        return
    for known in KNOWN:
        graph, cluster = (folder / f"{known.name}.{suffix}" for suffix in ("graph.json.gz", "cluster.json"))
        found = search(graph, cluster, known.time_limit)
        what = f"{known.name}, {known.cpu_s:.0f} CPU-s"
        if "error" in found:
            yield Row(what, found["error"], known.about, False)
            continue
        ok = at_most(found["value"], known.value) and found["bound"] >= known.bound * (1 - SLACK) and (
            found["cpu_s"] <= known.cpu_s) and (found["status"] == "optimal" or not known.is_optimal)
        yield Row(what, f"{found['value']:.6g} {found['status']}, bound {found['bound']:.6g}, {found['cpu_s']:.1f} "
                  f"CPU-s (search {found['search_cpu_s']:.1f}), by {found['by']}", known.about, ok, found)


# ---- the zoo ------------------------------------------------------------------------------------------------------

BATCH = {"inception-v3": 8, "flava": 8, "towers": 8, "swin-t": 8, "gpt2": 1, "t5-base": 1, "vit-base": 8,
         "mixtral-8x:seq=32": 1, "resnet-50": 8}
"""Samples of one request."""


def zoo(options: Options) -> Iterator[Row]:
    """Yield a row for each model and cluster, and means over the branching models."""
    clusters = options.clusters or tuple(sorted(path.stem for path in CLUSTERS.glob("*.yaml")))
    gains: dict[str, list[float]] = {}
    for model in options.models or MODELS:
        batch = options.batch or BATCH[model]
        graph = graph_file(model, batch)
        for name in clusters:
            cluster = cluster_file(name, graph, options.fuse)
            found = search(graph, cluster, options.time_limit, methods=True, fuse=options.fuse)
            row = _zoo_row(f"{model} (batch {batch}) on {name}", found)
            if row.details is not None and row.details["gain"] is not None:
                gains.setdefault(model, []).append(row.details["gain"])
            yield row
    yield from _means(gains)


def _zoo_row(what: str, found: Mapping[str, Any]) -> Row:
    if "error" in found:
        return Row(what, str(found["error"]), "a placement", False)
    values = {name: value for name, value in found["methods"].items() if not isinstance(value, str)}
    text = ", ".join(f"{name} {value * 1e3:.4g}" if isinstance(value, float) else f"{name} does not fit"
                     for name, value in found["methods"].items())
    auto, gain = found["value"], _gain(values, [HEFT_SUBSETS], found["value"])
    worse = [name for name, value in values.items() if auto > value * (1 + SLACK)]
    rules = _gain(values, ACCELERATE, auto)
    figure = (f"{found['num_ops']} ops, {found['num_devices']} devices ({found['num_used']} used): auto "
              f"{auto * 1e3:.4g} ms ({found['status']}, by {found['by']}), bound {found['bound'] * 1e3:.4g}, gap "
              f"{1 - found['bound'] / auto:.1%}, below {HEFT_SUBSETS} {_percent(gain)}, below accelerate's best rule "
              f"{_percent(rules)}, {found['cpu_s']:.0f} CPU-s\n         {text}")
    return Row(what, figure, "never worse than a named method" + (f"; worse than {', '.join(worse)}" if worse else ""),
               not worse and found["bound"] <= auto * (1 + SLACK), {**found, "gain": gain, "gain_rules": rules})


def _gain(values: Mapping[str, float], names: Sequence[str], auto: float) -> float | None:
    """Return how far auto is below the best of these methods, as a part of it; None if none of them fits."""
    best = min((values[name] for name in names if name in values), default=None)
    return None if best is None else 1 - auto / best


def _percent(part: float | None) -> str:
    return "(does not fit)" if part is None else f"{part:.1%}"


def _means(gains: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    for what, models in (("branching models", [name for name in gains if name in BRANCHING]),
                         ("other models", [name for name in gains if name not in BRANCHING])):
        parts = [gain for name in models for gain in gains[name]]
        if parts:
            mean = sum(parts) / len(parts)
            is_branching = what.startswith("branching")
            yield Row(f"mean over {what} ({', '.join(models)})", f"{mean:.1%} below {HEFT_SUBSETS}, {len(parts)} cases",
                      ">= 10 %" if is_branching else "", mean >= 0.1 if is_branching else None)


# ---- scale --------------------------------------------------------------------------------------------------------

SCALE_CPU_S, SCALE_BYTES = 120.0, 2 * 2**30


def scale(options: Options) -> Iterator[Row]:
    """Yield large graphs on 16 devices: better than HEFT within limits of time and memory."""
    del options
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("layered", "branches"):
            graph, cluster = large_files(kind, 10_000, Path(folder))
            heft, etf = (search(graph, cluster, 100.0, method=name) for name in ("heft", "etf"))
            found = search(graph, cluster, 105.0)
            what = f"10,000 operators ({kind}) on 16 devices"
            error = found.get("error") or heft.get("error") or etf.get("error")
            if error is not None:
                yield Row(what, str(error), "a placement", False)
                continue
            is_within = found["cpu_s"] <= SCALE_CPU_S and found["max_rss"] <= SCALE_BYTES
            ok = is_within and found["value"] < heft["value"] and at_most(found["value"], etf["value"])
            yield Row(what, f"{found['num_ops']} ops: HEFT {heft['value'] * 1e3:.4g} ms in {heft['cpu_s']:.1f} CPU-s, "
                      f"ETF {etf['value'] * 1e3:.4g} ms in {etf['cpu_s']:.1f} CPU-s, "
                      f"auto {found['value'] * 1e3:.4g} ms ({1 - found['value'] / heft['value']:.1%} below), bound "
                      f"{found['bound'] * 1e3:.4g}, {found['cpu_s']:.0f} CPU-s, {found['max_rss'] / 2**30:.2f} GiB",
                      "better than HEFT, not worse than ETF, <= 120 CPU-s, <= 2 GiB", ok, found)
