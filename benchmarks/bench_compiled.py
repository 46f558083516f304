"""One GPU, one rank: a step of Weft's runtime beside the plain module, both compiled or both operator by operator.

    python -m benchmarks.bench_compiled [--rows gpt2,vit-base.4/llama-3-8b] [--eager] [--rounds 4] [--kernels FOLDER] [--json]
    python -m benchmarks.bench_compiled --host          what an instruction costs the host: stages of one small operator
    python -m benchmarks.bench_compiled --profile FILE  time the operators of the rows' models on this GPU
    python -m benchmarks.bench_compiled --predict [--profile FILE] [--measured ROWS.json]     predictions beside steps

A row is a model and its micro-batches (both 1 and 4 where none are named); rows between slashes are one group.

Models in bfloat16 with float32 masters and fused AdamW. Each row is a process of its own: it makes both sides, takes
their warm-up steps (which compile), and waits; when all rows of a group are that far, one after the other measures:
the two sides in turn, ``--rounds`` times ``STEPS`` steps, each step waited for. The figures are medians of steps, and the
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
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from weft.cluster import read_cluster
from weft.coarsen.compiled import compiled_costs
from weft.cost.costs import estimate_costs
from weft.cost.profile import ProfileStore
from weft.cost.profiler import profile_model
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
STEPS, WARMUP = 8, 3
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


def measured_steps(path: str) -> dict[tuple[str, int, bool], float]:
    """Return milliseconds by model, micro-batches and whether compiled: of Weft's steps in a file of rows, if given."""
    if not path:
        return {(row, 1, is_compiled): ms for row, both in MEASURED_MS.items()
                for is_compiled, ms in zip((False, True), both, strict=True)}
    with open(path) as file:
        return {(row["model"], row["microbatches"], row["compiled"]): row["weft_ms"]
                for line in file if line.startswith("[") for row in json.loads(line) if "weft_ms" in row}


def predict(store: ProfileStore | None, measured: dict[tuple[str, int, bool], float]) -> None:
    """Print the predicted steps of one H200, operator by operator and compiled, beside the measured ones."""
    cluster, errors = read_cluster("1 x H200"), dict[bool, list[float]]()
    for row, microbatches, is_compiled in sorted(measured):
        spec, batch = ROWS[row]
        source = resolve_model(spec, batch=batch, mode="training", dtype="bfloat16")
        graph = trace(source, batch=batch // microbatches).graph
        costs = estimate_costs(graph, cluster, profile=store, dtype="bfloat16")
        costs = compiled_costs(graph, costs) if is_compiled else costs
        plan = one_stage(source, graph, batch=batch, microbatches=microbatches, compiled=is_compiled,
                         device=cluster.devices[0].name)
        step_ms, found_ms = simulate(lower(plan, graph), costs, cluster).step_time_s * 1e3, measured[
            row, microbatches, is_compiled]
        errors.setdefault(is_compiled, []).append(abs(step_ms / found_ms - 1))
        print(f"{row:<12} {microbatches} micro-batches {'compiled' if is_compiled else 'eager   '} {step_ms:6.1f} ms "
              f"(measured {found_ms:6.1f}, {step_ms / found_ms - 1:+.1%})", flush=True)
    for is_compiled, found in errors.items():
        print(f"mean error {'compiled' if is_compiled else 'eager'} {statistics.mean(found):.1%}, worst {max(found):.1%}")


def profile(rows: list[tuple[str, int]], store: ProfileStore) -> None:
    """Time the operators of the rows' models on this machine's GPU."""
    for row, microbatches in rows:
        spec, batch = ROWS[row]
        source = resolve_model(spec, batch=batch, mode="training", dtype="bfloat16")
        found = profile_model(trace(source, batch=batch // microbatches), "cuda", store, kind="h200")
        print(f"{row} {batch // microbatches} samples: {found.num_timed} of {found.num_keys} timed in "
              f"{found.seconds_spent:.0f} s; {len(found.problems)} problems", flush=True)


class Chain(nn.Module):
    """Steps of one small operator each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        x = x * self.scale
        for _ in range(30):
            x = x * 1.01
        return x.sum()


def host_time(device: torch.device) -> None:
    """Print what an instruction takes of the host: a stage for each operator, so that all else is Weft's."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    from torch.distributed import HashStore
    transport = Transport(rank=0, num_ranks=1, device=device, store=HashStore(), by_host=True)
    count = 4
    source = ModelSource(name="chain", spec="", batch=2 * count, mode="training", builder=lambda mode: Chain(),
                         sampler=lambda mode, batch, seed: (torch.ones(batch, 8),))
    tracer = Tracer(source)
    graph = tracer.trace(2).graph
    plan = one_stage(source, graph, batch=2 * count, microbatches=count, compiled=False)
    names = [f"s{number}" for number in range(len(graph.op_names))]
    order = [*(f"{name}:F:{number}" for number in range(count) for name in names),
             *(f"{name}:B:{number}" for number in range(count) for name in reversed(names))]
    plan = replace(plan, order={"d0": tuple(order)}, model=replace(plan.model, dtype="float32"), stages=tuple(
        Stage(name=name, ops=(op,), replicas=(Replica(devices=("d0",)),))
        for name, op in zip(names, graph.op_names, strict=True)))
    program = lower_to_run(plan, tracer)
    connect_ranks(program, tracer, transport)
    executor = loaded_executor(prepare_rank(program, tracer, transport, seed=0), source, transport)
    module, inputs = Chain().to(device), [torch.ones(2, 8, device=device) for _ in range(count)]

    def plain() -> None:
        losses = [module(item) for item in inputs]
        for loss in losses:
            loss.backward()

    found: dict[str, list[float]] = {"weft": [], "plain": []}
    for number in range(25):
        for name, step in (("weft", executor.step), ("plain", plain)):
            _wait(device)
            start = time.perf_counter()
            step()
            spent = time.perf_counter() - start
            if number >= 5:
                found[name].append(spent / program.num_instructions * 1e6)
        executor.take_loss()
    weft_us, plain_us = (statistics.median(found[name]) for name in ("weft", "plain"))
    print(f"{program.num_instructions} instructions: {weft_us:.1f} us of the host each, {plain_us:.1f} us of them in the "
          "plain module under autograd (operators and their backwards)")


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
            rounds: int, kernels: str = "") -> dict[str, Any]:
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
    if device.type == "cuda":  # others share the GPU
        torch.cuda.empty_cache()
    print("ready", flush=True)
    sys.stdin.readline()
    times: dict[str, list[float]] = {"weft": [], "plain": []}
    peaks = {"weft": 0, "plain": 0}
    idle = {}
    for _ in range(rounds):
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


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="gpt2,gpt2-xl,resnet-50/bert-large,vit-base,t5-base/llama-3-8b.1/llama-3-8b.4")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kernels", default="", metavar="FOLDER", help="write what steps spend their time on there")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--profile", default="", metavar="FILE", help="a profile, to be made or to predict with")
    parser.add_argument("--predict", action="store_true", help="needs no GPU")
    parser.add_argument("--measured", default="", metavar="FILE", help="rows that --json printed")
    parser.add_argument("--worker", nargs=2, metavar=("ROW", "MICROBATCHES"), help=argparse.SUPPRESS)
    return parser.parse_args()


def parse_rows(text: str) -> list[list[tuple[str, int]]]:
    """Return the groups of rows that the text names."""
    groups = []
    for group in text.split("/"):
        rows = []
        for item in group.split(","):
            name, _, count = item.rpartition(".")
            rows += [(name, int(count))] if name and count.isdigit() else [(item, 1), (item, 4)]
        groups.append(rows)
    return groups


def main() -> int:
    """Run the rows; the exit code is 1 if a row failed."""
    args = parse()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    groups = parse_rows(args.rows)
    if args.predict:
        predict(ProfileStore(args.profile) if args.profile else None, measured_steps(args.measured))
        return 0
    if args.host or args.profile:
        if args.host:
            host_time(device)
        if args.profile:
            profile([row for group in groups for row in group], ProfileStore(args.profile))
        return 0
    if args.worker:
        spec, batch = ROWS[args.worker[0]]
        print(json.dumps(measure(spec, batch, int(args.worker[1]), compiled=not args.eager, device=device,
                                 rounds=args.rounds,
                                 kernels=args.kernels and f"{args.kernels}/{'.'.join(args.worker)}.txt")))
        return 0
    results = [found for group in groups for found in run_group(group, args)]
    good = [row for row in results if "ratio" in row]
    if good:
        print(f"mean ratio {statistics.mean(row['ratio'] for row in good):.3f}, "
              f"worst {max(row['ratio'] for row in good):.3f}")
    if args.json:
        print(json.dumps(results))
    return int(len(good) < len(results))


def run_group(rows: list[tuple[str, int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prepare some rows together, measure one after the other, and return their figures."""
    command = [sys.executable, "-m", "benchmarks.bench_compiled", "--device", args.device,
               *(["--eager"] if args.eager else []), "--kernels", args.kernels, "--rounds", str(args.rounds)]
    running = [subprocess.Popen([*command, "--worker", row[0], str(row[1])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
               for row in rows]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    found = []
    for row, process in zip(rows, running, strict=True):
        name = {"model": row[0], "microbatches": row[1], "compiled": not args.eager}
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
