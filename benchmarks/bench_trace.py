"""What tracing costs: CPU seconds and resident memory for every model of the zoo, each in a fresh process.

    python benchmarks/bench_trace.py                 all models, training shapes; about four minutes
    python benchmarks/bench_trace.py gpt2 llama-70b  only these
    python benchmarks/bench_trace.py --json          the same facts for machines

A process starts Python, imports PyTorch and transformers, builds the model without memory and traces it with its
backward costs. ``trace s`` is the CPU time (user and system) of the last step alone, ``whole s`` that of the process, and
``MiB`` the most memory it had resident (getrusage). llama-70b (sequence 4096, batch 1) is held against its limits,
taken over the whole process: 15 CPU-seconds and 1 GiB; exit status 1 if it is over them. ``every layer s`` (only with
``--full``) is the time of ``trace`` when equal layers are not folded.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LIMITS = {"llama-70b": {"cpu_s": 15.0, "resident_mib": 1024.0}}
LIMIT_S = 600


def measure(spec: str, fold: bool) -> dict[str, Any]:
    """Return the facts about one trace, in this process."""
    from weft.model.source import ModelSource, resolve_model
    from weft.model.trace import trace

    source = resolve_model(spec)
    assert isinstance(source, ModelSource)
    source.build()  # what it imports is not part of the trace
    start = time.process_time()
    graph = trace(source, fold=fold).graph
    traced_s = time.process_time() - start
    return {"model": spec, "batch": graph.batch, "operators": graph.num_ops, "backward": graph.backward_source,
            "parameters": int(sum(_count(graph.tensor_shapes[tensor]) for tensor in graph.parameters)),
            "forward_flops": float(graph.flops.sum()), "trace_cpu_s": traced_s, "cpu_s": time.process_time(),
            "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _count(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def in_fresh_process(spec: str, *, fold: bool = True) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", spec, *([] if fold else ["--no-fold"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{spec} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def print_row(row: dict[str, Any]) -> None:
    from weft.base.units import format_count

    full = f"{row['every_layer_cpu_s']:8.1f}" if "every_layer_cpu_s" in row else ""
    print(f"{row['model']:13} {row['batch']:5} {row['operators']:6} {format_count(row['parameters']):>7} "
          f"{format_count(row['forward_flops']):>8} {row['backward']:8} {row['trace_cpu_s']:7.1f} {row['cpu_s']:7.1f} "
          f"{row['resident_mib']:6.0f} {full}", flush=True)


def print_limits(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for key, limit in LIMITS.get(row["model"], {}).items():
            verdict = "kept" if row[key] <= limit else "MISSED"
            print(f"{row['model']}: {key} {row[key]:.1f}, limit {limit:.0f}: {verdict}")


def main() -> None:
    from weft.model.zoo import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="zoo names or specs (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--full", action="store_true", help="also time the trace of every layer, equal or not")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--no-fold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, fold=not options.no_fold)))
        return
    if not options.json:
        print(f"{'model':13} {'batch':>5} {'ops':>6} {'params':>7} {'flops':>8} {'backward':8} {'trace s':>7} "
              f"{'whole s':>7} {'MiB':>6} {'every layer s' if options.full else ''}")
    rows = []
    for spec in options.models:
        row = in_fresh_process(spec)
        if options.full:
            row["every_layer_cpu_s"] = in_fresh_process(spec, fold=False)["trace_cpu_s"]
        rows.append(row)
        if not options.json:
            print_row(row)
    kept = all(row[key] <= limit for row in rows for key, limit in LIMITS.get(row["model"], {}).items())
    if options.json:
        print(json.dumps({"rows": rows, "limits": LIMITS, "kept": kept}, indent=1))
    else:
        print_limits(rows)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
