"""CPU time and imports of ``weft --help``: it must be quick and load no heavy library.

    python -m benchmarks.bench_startup [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys

LIMIT_CPU_S = 0.5
HEAVY = ("torch", "ortools", "numba")
SCRIPT = ("import sys; from weft.cli.main import main; main(['--help']); "
          f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)")


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    times, loaded = [], "[]"
    for _ in range(options.repeats):
        before = cpu_seconds()
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
        times.append(cpu_seconds() - before)
        loaded = done.stderr.strip()
    result = {"cpu_s": statistics.median(times), "limit_cpu_s": LIMIT_CPU_S, "heavy_imports": loaded,
              "ok": statistics.median(times) <= LIMIT_CPU_S and loaded == "[]"}
    if options.json:
        print(json.dumps(result))
    else:
        print(f"weft --help: {result['cpu_s']:.2f} CPU-s (limit {LIMIT_CPU_S}), heavy imports {loaded} (must be [])")


if __name__ == "__main__":
    main()
