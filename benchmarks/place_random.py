"""Sections of ``bench_place`` on random problems: against brute force, and with too little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.place_common import Options, named_values
from benchmarks.sections import Row
from weft.search.place.problem import PlaceProblem

CONTENTIONS = ("link", "port", "none")
SLACK = 1e-6
Json = dict[str, Any]


def draw(seed: int) -> PlaceProblem:
    """Return a problem of 2 to 8 operators on 2 or 3 devices; the seed decides what is special about it.

    Whole-number times in half of them, others in the rest; operators are up to four times as long as transfers.
    """
    from tests.search.place.random_problems import random_problem

    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng, int(rng.integers(2, 9)), int(rng.integers(2, 4)), contention=CONTENTIONS[seed % 3],
        tight_memory=bool(seed // 3 % 2), colocate=bool(seed // 6 % 2), shared_tensors=bool(seed % 8),
        limited=bool(seed % 4 == 0), shared_cores=bool(seed % 7 == 0), shared_weights=bool(seed % 5 == 0))
    factor = float(rng.choice([1.0, 2.0, 4.0])) if seed % 2 else float(rng.uniform(0.5, 4.0))
    return replace(problem, time_s=problem.time_s * factor)


def oracle(options: Options) -> Iterator[Row]:
    """Yield how the search's claims stand against brute force."""
    from tests.search.place.oracle import min_latency
    from weft.search.place.search import place
    from weft.search.place.timetable import check_timetable

    counts: Counter[str] = Counter()
    bad: list[str] = []
    before = time.process_time()
    for seed in range(options.num_problems):
        problem = draw(seed)
        optimum = min_latency(problem)
        assert optimum is not None
        best = optimum.latency_s
        result = place(problem, objective="latency", time_limit=5.0, progress=lambda line: None)
        check_timetable(result.timetable)
        slack = SLACK * best
        counts[result.status] += 1
        counts["best"] += abs(result.value - best) <= slack
        if abs(result.timetable.latency_s - result.value) > slack:
            bad.append(f"seed {seed}: the timetable takes {result.timetable.latency_s}, not {result.value}")
        if result.status == "optimal" and abs(result.value - best) > slack:
            bad.append(f"seed {seed}: {result.value} claimed optimal, the optimum is {best}")
        if not result.bound - slack <= best <= result.value + slack:
            bad.append(f"seed {seed}: bound {result.bound}, optimum {best}, value {result.value}")
    total = options.num_problems
    yield Row(f"{total} random problems of up to 8 operators x 3 devices against brute force",
              f"{counts['optimal']} claimed optimal, {counts['best']} equal to the optimum, {len(bad)} wrong claims, "
              f"{time.process_time() - before:.0f} CPU-s" + "".join(f"\n         {line}" for line in bad[:10]),
              "optimal is optimal; bound <= optimum <= value", not bad)


# ---- memory -------------------------------------------------------------------------------------------------------


def infeasible(options: Options) -> Iterator[Row]:
    """Yield what is said where memory is too small, and what is found where it just suffices."""
    del options
    wrong = []
    for seed in range(20):
        with tempfile.TemporaryDirectory() as folder:
            problem = _try_too_little(seed, Path(folder))
        if problem:
            wrong.append(f"seed {seed}: {problem}")
    yield Row("20 problems with too little memory, on the command line", f"{20 - len(wrong)} of 20 as they should be"
              + "".join(f"\n         {line}" for line in wrong[:5]),
              "exit 3; the message names missing bytes and operators", not wrong)
    yield _tight()


def _too_little(seed: int) -> tuple[Json, Json]:
    """Return files of a problem that memory does not admit, in one of three ways."""
    from tests.search.place.random_problems import random_files

    rng = np.random.default_rng(1000 + seed)
    graph, cluster = random_files(rng, int(rng.integers(3, 12)), int(rng.integers(2, 4)),
                                  contention=CONTENTIONS[seed % 3], colocate=seed % 2 == 0, limited=False)
    total = sum(op["memory"] for op in graph["ops"]) + len(graph["ops"])
    for op in graph["ops"]:
        op["memory"] += 1
    match seed % 4:
        case 0:  # one operator is larger than every device
            graph["ops"][1]["memory"] = 10 * total
        case 1:  # all together are larger than all devices together
            for device in cluster["devices"]:
                device["memory"] = max(1, total // len(cluster["devices"]) - 1)
        case 2:  # a group is larger than every device
            for op in graph["ops"][:3]:
                op.update(colocate="big", memory=total)
            for device in cluster["devices"]:
                device["memory"] = 2 * total
        case _:  # what must be on one device is larger than it
            for op in graph["ops"][:2]:
                op.update(on=["d0"], memory=total)
            for device in cluster["devices"]:
                device["memory"] = 100 * total
            cluster["devices"][0]["memory"] = 2 * total - 1
    return graph, cluster


def _try_too_little(seed: int, folder: Path) -> str:
    """Return what is wrong with the answer of the command line, or nothing."""
    graph, cluster = _too_little(seed)
    paths = [folder / "graph.json", folder / "cluster.json"]
    for path, value in zip(paths, (graph, cluster), strict=True):
        path.write_text(json.dumps(value))
    run = subprocess.run([sys.executable, "-m", "weft", "place", *map(str, paths), "--json", "--time-limit", "5"],
                         capture_output=True, text=True, timeout=300, check=False)
    message = run.stderr.strip()
    if run.returncode != 3:
        return f"exit {run.returncode}: {message[-200:]}"
    if run.stdout:
        return "something on stdout"
    has_bytes = any(word in message for word in (" B", "bytes", "KiB", "KB", "MiB", "MB"))
    if not has_bytes or not any(op["name"] in message for op in graph["ops"]):
        return f"the message does not name bytes and operators: {message[-300:]}"
    return ""


def _tight() -> Row:
    """Return how often there is a placement where named methods find none."""
    from tests.search.place.random_problems import random_problem
    from weft.base.errors import NoFeasiblePlan
    from weft.search.place.search import place

    failed: Counter[str] = Counter()
    missed = []
    for seed in range(40):
        rng = np.random.default_rng(2000 + seed)
        problem = random_problem(rng, int(rng.integers(6, 30)), int(rng.integers(2, 5)),
                                 contention=CONTENTIONS[seed % 3], tight_memory=True, colocate=seed % 3 == 0)
        try:
            place(problem, objective="latency", time_limit=1.0, progress=lambda line: None)
        except NoFeasiblePlan:
            missed.append(seed)
        failed.update(name for name, value in named_values(problem).items() if isinstance(value, str))
    text = ", ".join(f"{name} {count}" for name, count in sorted(failed.items()))
    return Row("40 problems whose memory is just enough", f"auto fails on {len(missed)} {missed or ''}; named methods "
               f"fail on: {text}", "auto finds a placement wherever there is one", not missed)
