"""Run every benchmark, one after the other; each prints its figures beside their references.

    make bench        or        python -m benchmarks.all
"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("bench_startup", "bench_trace", "bench_recompute", "bench_simulate", "bench_profile", "bench_checker", "bench_runtime",
              "bench_resume", "bench_faults", "bench_random_plans", "bench_schedule", "bench_place", "bench_partition",
              "bench_fusion", "bench_shard", "bench_shard_models", "bench_shard_run", "bench_deploy", "bench_golden",
              "bench_limits", "bench_lab", "bench_mps", "bench_context")


def main() -> None:
    failed = []
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
