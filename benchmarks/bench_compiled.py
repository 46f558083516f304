"""One GPU, one rank: a step of Weft's runtime beside the plain module, both compiled or both operator by operator.

    python -m benchmarks.bench_compiled [--rows gpt2,vit-base] [--microbatches 1,4] [--eager] [--together 4] [--kernels FOLDER] [--json]
    python -m benchmarks.bench_compiled --predict       what is predicted without a profile, beside steps measured once

Models in bfloat16 with float32 masters and fused AdamW. Each row is a process of its own: it makes both sides, takes
their warm-up steps (which compile), and waits; when all rows of a group are that far, one after the other measures:
the two sides in turn, ``ROUNDS`` times ``STEPS`` steps, each step waited for. The figures are medians of steps, and the
peaks of the allocator without what the other side holds. Needs a GPU (or ``--device cpu``, to try the script).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from weft.cluster import read_cluster
from weft.coarsen.compiled import compiled_costs
from weft.cost.costs import estimate_costs
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.plan.lower import lower
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage
from weft.run.executor import Executor, loaded_executor
from weft.run.prepare import Tracer, connect_ranks, lower_to_run, prepare_rank
from weft.run.transport import Transport
from weft.simulate.timing import simulate

ROWS: Final = {
    "gpt2": ("gpt2:seq=1024", 16), "gpt2-xl": ("gpt2-xl:layers=16,seq=1024", 8),
    "llama-3-8b": ("llama-3-8b:layers=4,seq=4096", 4), "bert-large": ("bert-large:seq=512", 32),
    "vit-base": ("vit-base", 128), "resnet-50": ("resnet-50", 128), "t5-base": ("t5-base:seq=512", 32),
    "tiny": ("gpt2-tiny:layers=2", 4)}
ROUNDS, STEPS, WARMUP = 4, 8, 3
MEASURED_MS: Final = {"gpt2": (81.7, 34.9), "gpt2-xl": (115.1, 67.5), "llama-3-8b": (312.1, 260.5),
                      "bert-large": (99.7, 84.4), "vit-base": (41.5, 37.2), "resnet-50": (56.1, 26.7)}
"""Steps of the plain modules on one H200, torch 2.11, one micro-batch: eager, and under ``torch.compile``."""


def one_stage(source: ModelSource, graph: Any, *, batch: int, microbatches: int, compiled: bool,
              device: str = "d0") -> Plan:
    """Return the plan of one device that does it all."""
    order = tuple(f"s0:{phase}:{number}" for number in range(microbatches) for phase in "FB")
    return Plan(
        model=ModelRef(name=source.spec, digest=graph.digest, batch=batch, dtype=source.dtype or "bfloat16"),
        cluster=ClusterRef(digest="", devices=(device,)), microbatches=microbatches, order={device: order},
        stages=(Stage(name="s0", ops=tuple(graph.op_names), replicas=(Replica(devices=(device,)),)),),
        optimizer=Optimizer(kind="adamw", lr=1e-4), compiled=compiled)


def predict() -> None:
    """Print the predicted steps of one H200, operator by operator and compiled, beside the measured ones."""
    cluster, errors = read_cluster("1 x H200"), list[float]()
    for row, measured in MEASURED_MS.items():
        spec, batch = ROWS[row]
        source = resolve_model(spec, batch=batch, mode="training", dtype="bfloat16")
        graph = trace(source, batch=batch).graph
        costs = estimate_costs(graph, cluster, dtype="bfloat16")
        plan = one_stage(source, graph, batch=batch, microbatches=1, compiled=True, device=cluster.devices[0].name)
        steps = [simulate(lower(plan, graph), item, cluster).step_time_s * 1e3
                 for item in (costs, compiled_costs(graph, costs))]
        errors.append(abs(steps[1] / measured[1] - 1))
        print(f"{row:<12} eager {steps[0]:6.1f} ms (measured {measured[0]:6.1f}), "
              f"compiled {steps[1]:6.1f} ms (measured {measured[1]:6.1f})")
    print(f"mean error of compiled {statistics.mean(errors):.1%}")


def weft_side(spec: str, batch: int, microbatches: int, *, compiled: bool, transport: Transport) -> Executor:
    """Return what executes steps by Weft."""
    source = resolve_model(spec, batch=batch, mode="training", dtype="bfloat16")
    tracer = Tracer(source)
    graph = tracer.trace(batch // microbatches).graph
    plan = one_stage(source, graph, batch=batch, microbatches=microbatches, compiled=compiled)
    program = lower_to_run(plan, tracer)
    connect_ranks(program, tracer, transport)
    prepared = prepare_rank(program, tracer, transport, seed=0)
    if prepared.compiler is not None and prepared.compiler.fallbacks:
        print("\n".join(prepared.compiler.fallbacks), file=sys.stderr)
    return loaded_executor(prepared, source, transport)


def plain_side(spec: str, batch: int, microbatches: int, *, compiled: bool, device: torch.device) -> Callable[[], float]:
    """Return what takes one step of the plain module."""
    source = resolve_model(spec, batch=batch, mode="training", dtype="bfloat16")
    torch.manual_seed(0)
    module = source.build()
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and parameter.is_meta:
                part._parameters[name] = torch.nn.Parameter(
                    torch.randn(parameter.shape, device=device, dtype=parameter.dtype) * 0.02)
    module = module.to(device)
    inner = next((item for item in module.modules() if hasattr(item, "tie_weights")), None)
    if inner is not None:
        inner.tie_weights()
    inputs = tuple(item.to(device) for item in source.inputs(batch, 0))
    parts = list(zip(*(item.chunk(microbatches) for item in inputs), strict=True))
    parameters = [item for item in dict.fromkeys(module.parameters()) if item.requires_grad]
    masters = [torch.nn.Parameter(item.detach().float()) for item in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    forward = torch.compile(module) if compiled else module

    def step() -> float:
        total = 0.0
        for part in parts:
            output = forward(*part)
            loss: Tensor = output if torch.is_tensor(output) else output.loss if hasattr(output, "loss") else output[0]
            (loss / microbatches).backward()
            total = loss.detach()
        for item, master in zip(parameters, masters, strict=True):
            master.grad = None if item.grad is None else item.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        for item, master in zip(parameters, masters, strict=True):
            item.grad = master.grad = None
        return float(total)

    return step


def measure(spec: str, batch: int, microbatches: int, *, compiled: bool, device: torch.device,
            kernels: str = "") -> dict[str, Any]:
    """Return the figures of one row; on standard input comes when to measure.

    ``kernels`` is a file that gets the kernels of one more step of either side, by time.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    from torch.distributed import HashStore
    transport = Transport(rank=0, num_ranks=1, device=device, store=HashStore(), by_host=True)
    begin = time.perf_counter()
    executor = weft_side(spec, batch, microbatches, compiled=compiled, transport=transport)

    def own() -> float:
        executor.step()
        return executor.take_loss()

    for _ in range(WARMUP):
        own()
    ready_s = time.perf_counter() - begin
    begin = time.perf_counter()
    plain = plain_side(spec, batch, microbatches, compiled=compiled, device=device)
    for _ in range(WARMUP):
        plain()
    plain_ready_s = time.perf_counter() - begin
    print("ready", flush=True)
    sys.stdin.readline()
    times: dict[str, list[float]] = {"weft": [], "plain": []}
    peaks = {"weft": 0, "plain": 0}
    idle = {}
    for _ in range(ROUNDS):
        for name, step in (("weft", own), ("plain", plain)):
            for number in range(STEPS + 1):
                _wait(device)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                step()
                _wait(device)
                if number:
                    times[name].append(time.perf_counter() - start)
                    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() if device.type == "cuda" else 0)
    if kernels:
        with open(kernels, "w") as file:
            for name, step in (("weft", own), ("plain", plain)):
                file.write(f"{name}\n{kernel_table(step)}\n")
    ms = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    if device.type == "cuda":  # what the other side holds between its steps does not count
        both = torch.cuda.memory_allocated()
        held = sum(item.numel() * item.element_size() for item in _state(executor))
        idle = {"weft": both - held, "plain": held}
        peaks = {name: peak - idle[name] for name, peak in peaks.items()}
    return {"weft_ms": ms["weft"], "plain_ms": ms["plain"], "ratio": ms["weft"] / ms["plain"],
            "weft_peak": peaks["weft"], "plain_peak": peaks["plain"], "ready_s": ready_s,
            "plain_ready_s": plain_ready_s,
            "memory_ratio": peaks["weft"] / peaks["plain"] if peaks["plain"] else None}


def kernel_table(step: Callable[[], float]) -> str:
    """Return what one step spends its time on, on the device and on the host."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    rows: dict[str, tuple[float, int]] = {}
    for item in found.events():
        if item.device_type == torch.autograd.DeviceType.CUDA:
            time_us, count = rows.get(item.name, (0.0, 0))
            rows[item.name] = time_us + item.time_range.elapsed_us(), count + 1
    lines = [f"{time_us / 1e3:9.3f} ms {count:6d}  {name[:150]}"
             for name, (time_us, count) in sorted(rows.items(), key=lambda item: -item[1][0])]
    total = sum(time_us for time_us, _ in rows.values()) / 1e3
    host = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    return "\n".join([f"{total:9.3f} ms on the device in {sum(count for _, count in rows.values())} pieces",
                      *lines[:45], host])


def _state(executor: Executor) -> list[Tensor]:
    found = {id(item): item for item in executor.parameters.tensors.values()}
    for state in (executor.optimizer.state.values() if executor.optimizer is not None else ()):
        found.update({id(item): item for item in state.values() if isinstance(item, Tensor)})
    found.update({id(place.arguments[place.place]): place.arguments[place.place] for place in executor.binder.given})
    for parameter in executor.parameters.tensors.values():
        if parameter.grad is not None:
            found[id(parameter.grad)] = parameter.grad
    for flat in executor.parameters.flat:
        found.update({id(item): item for item in flat})
    return list(found.values())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    """Run the rows; the exit code is 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="gpt2,gpt2-xl,llama-3-8b,bert-large,vit-base,resnet-50,t5-base")
    parser.add_argument("--microbatches", default="1,4")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--together", type=int, default=4, help="rows that are prepared at the same time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kernels", default="", metavar="FOLDER", help="write what steps spend their time on there")
    parser.add_argument("--predict", action="store_true", help="needs no GPU")
    parser.add_argument("--worker", nargs=2, metavar=("ROW", "MICROBATCHES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.predict:
        predict()
        return 0
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.worker:
        spec, batch = ROWS[args.worker[0]]
        print(json.dumps(measure(spec, batch, int(args.worker[1]), compiled=not args.eager, device=device,
                                 kernels=args.kernels and f"{args.kernels}/{'.'.join(args.worker)}.txt")))
        return 0
    wanted = [(row, count) for row in args.rows.split(",") for count in args.microbatches.split(",")]
    results = []
    for first in range(0, len(wanted), args.together):
        results += run_group(wanted[first : first + args.together], args)
    good = [row for row in results if "ratio" in row]
    if good:
        print(f"mean ratio {statistics.mean(row['ratio'] for row in good):.3f}, "
              f"worst {max(row['ratio'] for row in good):.3f}")
    if args.json:
        print(json.dumps(results))
    return int(len(good) < len(results))


def run_group(rows: list[tuple[str, str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prepare some rows together, measure one after the other, and return their figures."""
    command = [sys.executable, "-m", "benchmarks.bench_compiled", "--device", args.device,
               *(["--eager"] if args.eager else []), "--kernels", args.kernels]
    running = [subprocess.Popen([*command, "--worker", *row], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
               for row in rows]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    found = []
    for row, process in zip(rows, running, strict=True):
        name = {"model": row[0], "microbatches": int(row[1]), "compiled": not args.eager}
        text = process.communicate("go\n")[0]
        line = (text.strip().splitlines() or [""])[-1]
        try:
            found.append({**name, **json.loads(line)})
        except json.JSONDecodeError:
            found.append({**name, "failed": process.returncode})
        print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                       for key, value in found[-1].items()), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
