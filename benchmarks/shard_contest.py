"""The strategy graphs of the ASPLOS/EuroSys 2025 contest, each within its time limit on the clock, beside the best submitted."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.sections import Row


@dataclass(frozen=True, slots=True)
class Contest:
    """What is known about a problem of the contest."""

    limit_s: float
    best: int
    """Best cost submitted, on 8 cores."""
    demand: float
    """Contest score (best submitted cost / ours) to reach."""


CONTEST = {"A": Contest(60, 6_548_641_531, 0.99), "B": Contest(60, 532_843, 1.0), "G": Contest(120, 217_039, 1.0),
           "M": Contest(180, 49_928_460_991, 0.75), "S": Contest(240, 1_534_613_444, 0.78)}


def contest(options: Any) -> Iterator[Row]:
    """Yield a row for every problem in the folder: its score against the one to reach."""
    for name, known in CONTEST.items():
        path = options.data / "shard" / f"{name}.json.gz"
        if not path.exists() or (options.problem and name not in options.problem):
            continue
        limit = known.limit_s * options.share
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-m", "weft", "shard", str(path), "--json", "--quiet", "--time-limit", str(limit - START_S),
                   "--seed", str(options.seed)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit + 60, check=True)
        wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        result = json.loads(run.stdout)
        judge(path, result)
        score = known.best / result["cost"]
        gap = 100.0 * (result["cost"] - result["bound"]) / result["cost"]
        yield Row(f"contest problem {name}",
                  f"score {score:.6f}: cost {result['cost']}, bound {result['bound']} (gap {gap:.4f} %), {result['status']}, "
                  f"{wall:.1f} s wall, {cpu:.1f} CPU-s",
                  f"score >= {known.demand:g} in {limit:g} s; best submitted {known.best}",
                  score >= known.demand and wall <= limit, {"name": name, "score": score, "wall_s": wall, "cpu_s": cpu} |
                  {key: result[key] for key in ("status", "cost", "bound", "usage_peak")})


START_S = 1.5
"""Of the limit, for starting the interpreter and printing the answer."""


def judge(path: Any, result: dict[str, Any]) -> None:
    """Check the answer against the file itself."""
    from weft.search.strategies.strategy_graph import evaluate, load_strategy_graph

    graph = load_strategy_graph(path)
    judged = evaluate(graph, result["choice"])
    assert judged.is_feasible(graph.usage_limit), path
    assert (judged.cost, judged.usage_peak) == (result["cost"], result["usage_peak"]), path
    assert result["bound"] <= result["cost"], path
