"""Figures of the simulator, each beside its reference. Run: python -m benchmarks.bench_simulate [--json] [--quick]

Times are CPU seconds of this process; compiling (numba) is done first and printed on its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass

import numpy as np

from tests.simulate.helpers import bare_cluster, given_graph, pipeline_world
from tests.simulate.python_engine import simulate_python
from tests.simulate.random_tasks import random_placement
from tests.worlds import with_gradients
from weft.cost.costs import estimate_costs
from weft.plan.lower import lower
from weft.plan.orders import one_f_one_b, to_tokens
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage
from weft.simulate.engine import Simulator
from weft.simulate.timing import simulate

NUM_TASKS, NUM_EDGES, NUM_DEVICES = 1000, 2000, 8
SHAPES = {"edges anywhere": None, "edges within 200 tasks": 200, "edges within 50 tasks": 50}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure and what it is held against."""

    what: str
    figure: str
    reference: str
    ok: bool | None = None


def compile_engine() -> list[Row]:
    before = time.process_time()
    Simulator(random_placement(np.random.default_rng(0), num_tasks=10, num_edges=10, num_devices=2)).run()
    seconds = time.process_time() - before
    return [Row("compile or load the engine (excluded below)", f"{seconds:.2f} CPU-s", "4 CPU-s, 0.2 from cache")]


def random_graphs(count: int, **options):
    return [random_placement(np.random.default_rng(seed), num_tasks=NUM_TASKS, num_edges=NUM_EDGES,
                             num_devices=NUM_DEVICES, **options) for seed in range(count)]


def runs_per_second(simulators: list[Simulator], num_rounds: int, num_runs: int = 100) -> list[float]:
    """Return runs per CPU second, once for each round over all simulators."""
    rates = []
    for _ in range(num_rounds):
        before = time.process_time()
        for simulator in simulators:
            for _ in range(num_runs):
                simulator.run()
        rates.append(len(simulators) * num_runs / (time.process_time() - before))
    return rates


def measure_rate(quick: bool) -> list[Row]:
    rows = []
    for name, window in SHAPES.items():
        simulators = [Simulator(graph) for graph in random_graphs(10, window=window)]
        rates = runs_per_second(simulators, 3 if quick else 9)
        rate = statistics.median(rates)
        rows.append(Row(f"{NUM_TASKS} tasks, {NUM_EDGES} edges, {NUM_DEVICES} devices, {name}",
                        f"{rate:,.0f} runs per CPU-s ({min(rates):,.0f} to {max(rates):,.0f})",
                        ">= 10,000 (prototype: 5,000)", rate >= 10_000))
    ports = [Simulator(graph) for graph in random_graphs(10, ports=True)]
    rows.append(Row("the same, transfers hold two ports (no inline tasks)",
                    f"{statistics.median(runs_per_second(ports, 3)):,.0f} runs per CPU-s", "no reference"))
    graph = random_graphs(1)[0]
    before = time.process_time()
    for _ in range(10):
        simulate_python(graph)
    rows.append(Row("the Python twin", f"{10 / (time.process_time() - before):,.0f} runs per CPU-s",
                    "prototype's twin: 250"))
    return rows


def check_equality(quick: bool) -> list[Row]:
    count = 100 if quick else 1000
    windows = [*SHAPES.values()]
    equal = 0
    for seed in range(count):
        rng = np.random.default_rng(10_000 + seed)
        graph = random_placement(rng, num_tasks=NUM_TASKS, num_edges=NUM_EDGES, num_devices=NUM_DEVICES,
                                 window=windows[seed % 3], zero_share=0.3 * (seed % 2), ports=seed % 5 == 4)
        simulator, expected = Simulator(graph), simulate_python(graph)
        simulator.run()
        equal += (simulator.starts.tobytes() == expected.starts.tobytes()
                  and simulator.ends.tobytes() == expected.ends.tobytes())
    return [Row("random programs with all times equal to the twin, bit for bit", f"{equal} of {count}",
                "all of 1000", equal == count)]


def check_closed_forms(quick: bool) -> list[Row]:
    rows = []
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        worst, count = 0.0, 0
        for devices in range(1, 17, 5 if quick else 1):
            step = devices if kind == "interleaved" else 1
            for microbatches in range(step, 65, step * (7 if quick else 1)):
                world = pipeline_world(kind, devices, microbatches, num_chunks=chunks, time_s=1 / chunks)
                expected = (microbatches * chunks + devices - 1) * 3 / chunks
                worst = max(worst, abs(simulate(*world).step_time_s - expected))
                count += 1
        name = f"{kind}, {chunks} chunks" if chunks > 1 else kind
        rows.append(Row(f"{name}: makespan against closed form, {count} cases with p <= 16, m <= 64",
                        f"error at most {worst:.1e} s", "<= 1e-9 (times are 1 and 2 s)", worst <= 1e-9))
    return rows


def large_plan(num_stages: int, num_replicas: int, num_microbatches: int):
    """Return graph, cluster and plan of a 1F1B pipeline with replicated stages, one device for each replica."""
    graph = given_graph([1.0] * num_stages, activation_bytes=8 * num_replicas, batch=num_replicas)
    cluster = bare_cluster(num_stages * num_replicas, bytes_per_s=1e3)
    names = tuple(f"s{stage}" for stage in range(num_stages))
    groups = [[f"d{stage * num_replicas + index}" for index in range(num_replicas)] for stage in range(num_stages)]
    orders = to_tokens(one_f_one_b(num_stages, num_microbatches), names)
    stages = tuple(Stage(name=name, ops=(graph.op_names[index],), replicas=tuple(
        Replica(devices=(device,), share=1 / num_replicas) for device in groups[index]))
        for index, name in enumerate(names))
    plan = Plan(model=ModelRef(name=graph.name, digest=graph.digest, batch=num_microbatches * num_replicas),
                cluster=ClusterRef(digest=cluster.digest, devices=tuple(item.name for item in cluster.devices)),
                microbatches=num_microbatches, stages=stages, optimizer=Optimizer(kind="adamw"),
                order={device: orders[index] for index, group in enumerate(groups) for device in group})
    return graph, cluster, with_gradients(plan, graph)


def simulate_large(num_microbatches: int) -> dict[str, float]:
    """Return size, CPU seconds and memory of one large simulation; to be run in a process of its own."""
    compile_engine()
    graph, cluster, plan = large_plan(64, 16, num_microbatches)
    costs = estimate_costs(graph, cluster)
    before = time.process_time()
    program = lower(plan, graph)
    lowering = time.process_time() - before
    before = time.process_time()
    timeline = simulate(program, costs, cluster)
    simulated = time.process_time()
    timeline.summary()
    done = time.process_time()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tracemalloc.start()
    simulate(program, costs, cluster).summary()
    return {"instructions": program.num_instructions, "devices": program.num_ranks, "lower_s": lowering,
            "simulate_s": simulated - before, "summary_s": done - simulated, "peak_mib": peak_mib,
            "allocated_mib": tracemalloc.get_traced_memory()[1] / 2**20}


def measure_large() -> list[Row]:
    results = []
    for num_microbatches in (83, 166):
        run = subprocess.run([sys.executable, "-m", "benchmarks.bench_simulate", "--large", str(num_microbatches)],
                             capture_output=True, text=True, timeout=600, check=True)
        results.append(json.loads(run.stdout))
    rows = []
    for result in results:
        total = result["simulate_s"] + result["summary_s"]
        rows.append(Row(
            f"{result['instructions']:,} instructions on {result['devices']:,} devices: program to timeline and summary",
            f"{total:.2f} CPU-s (simulate {result['simulate_s']:.2f}, summary {result['summary_s']:.2f}; lowering, "
            f"not counted, {result['lower_s']:.1f})", "<= 5 CPU-s for 1,000,000", total <= 5))
        rows.append(Row("its memory", f"{result['allocated_mib']:.0f} MiB allocated at most, peak of the process "
                        f"with the program {result['peak_mib']:.0f} MiB", "no reference"))
    small, large = ({**result, "each": result["allocated_mib"] * 2**20 / result["instructions"]} for result in results)
    rows.append(Row("bytes allocated per instruction, half size and full size",
                    f"{small['each']:.0f} and {large['each']:.0f}", "linear: not more, +5 %",
                    large["each"] <= small["each"] * 1.05))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the simulator, each beside its reference.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and cases")
    parser.add_argument("--large", type=int, metavar="MICROBATCHES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large:
        print(json.dumps(simulate_large(options.large)))
        return 0
    rows = [*compile_engine(), *measure_rate(options.quick), *check_equality(options.quick),
            *check_closed_forms(options.quick), *measure_large()]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        for row in rows:
            mark = {True: "ok    ", False: "MISSED", None: "      "}[row.ok]
            print(f"{mark} {row.what}\n         {row.figure}   [{row.reference}]")
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
