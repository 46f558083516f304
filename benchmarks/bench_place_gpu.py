"""Two unlike devices run one model that is larger than the memory granted to one of them: who places it best?

The pair is a GPU and its host's CPU, or two unequal parts of one GPU (``cuda:0@50%``, by the multi-process service).

    python benchmarks/bench_place_gpu.py --devices cuda:0@50%,cuda:0@25% --model flava --batch 16 --granted 900MiB
    python benchmarks/bench_place_gpu.py --model gpt2-xl:seq=32 --profile-model gpt2-xl:layers=2,seq=32 --granted 4GiB
    python benchmarks/bench_place_gpu.py --model flava --batch 4 --granted 500MiB
    python benchmarks/bench_place_gpu.py --devices cpu,cpu --model gpt2-tiny --granted 600KiB --steps 5     (no GPU)

Steps (all of them, or one by ``--only``; what they find lies in ``--work``):

    profile   every distinct operator on both devices, and the way between two processes on them
    place     Weft's search, and the rules of accelerate (sequential, balanced) and one device, under the same limits
    run       each plan with one process on each device, GPUs held to the granted memory; outputs against one process;
              median latency of warm steps beside the predicted one; all plans in turn, ``--rounds`` times

Each rule's blocks run where the rule puts them, also on a CPU (as with ``dispatch_model(..., main_device="cpu")``).
accelerate's default instead keeps such weights on the CPU and copies them to the GPU for each call; that is measured as
well, with the sequential rule's split, from pageable memory as accelerate has it and from pinned memory.
Where OR-Tools is not installed, Weft's search is its list methods and local search, without exact parts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # else the granted memory breaks into pieces

from benchmarks.mps import multi_process_service  # noqa: E402
from weft.base.errors import NoFeasiblePlan, WeftError  # noqa: E402
from weft.base.units import format_bytes, parse_bytes  # noqa: E402
from weft.cluster.cluster import Cluster, Device, Link  # noqa: E402
from weft.cluster.cluster_file import load_cluster, save_cluster  # noqa: E402
from weft.cluster.probe import probe  # noqa: E402
from weft.coarsen.coarsen import Coarse, contract  # noqa: E402
from weft.coarsen.groups import single_groups  # noqa: E402
from weft.cost.costs import estimate_costs  # noqa: E402
from weft.cost.profile import ProfileStore  # noqa: E402
from weft.model.graph import Graph  # noqa: E402
from weft.model.load import load_graph_for  # noqa: E402
from weft.model.source import resolve_model  # noqa: E402
from weft.plan.check import check_plan  # noqa: E402
from weft.plan.lower import lower  # noqa: E402
from weft.plan.memory import static_bytes  # noqa: E402
from weft.plan.plan import Plan, load_plan, save_plan, with_search  # noqa: E402
from weft.run.result import RunOptions, RunResult, share_environment  # noqa: E402
from weft.search.common.problem import PlanOptions, Problem  # noqa: E402
from weft.search.place.methods import METHODS  # noqa: E402
from weft.search.place.placed_plan import OpPlacement, placement_of_groups, plan_within_memory  # noqa: E402
from weft.search.place.problem import PlaceProblem, problem_from_graph  # noqa: E402
from weft.search.place.timetable import Timetable, make_timetable  # noqa: E402
from weft.simulate.timing import simulate  # noqa: E402

RULES = ("accelerate-sequential", "accelerate-balanced", "single")
LINK_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
LINK_ROUNDS = 30
ROUNDS = 12
HEAT = (0.02, 0.005, 0.05, 0.01)
STEPS_PER_S = 2e7
"""Operators timed per second of local search, about."""
TOLERANCE = 1e-4
"""Of float32 outputs between a GPU and a CPU, relative to the largest: they add in another order."""


# ---- profile --------------------------------------------------------------------------------------------------------


def profile(args: argparse.Namespace) -> None:
    """Write the operators' times, and the measured link and device kinds, into the work folder."""
    for name, device in zip(kinds(args), args.devices.split(","), strict=True):
        if name not in kinds(args)[:kinds(args).index(name)]:
            own_process(args, "--profile-device", device, share=device)
    link = measure_link(args)
    note(f"link: {link['latency_s'] * 1e6:.0f} us + bytes / {link['bytes_per_s'] / 1e9:.2f} GB/s")
    (args.work / "link.json").write_text(json.dumps(link))


def profile_device(args: argparse.Namespace) -> None:
    """Time every distinct operator on one device, in a process of its own: a part of a GPU is given to a process."""
    import torch

    from weft.cost.profiler import profile_model
    from weft.model.trace import trace

    torch.backends.cudnn.allow_tf32 = False  # as the runtime does on unlike devices
    store = ProfileStore(args.work / "profile.sqlite")
    traced = trace(resolve_model(args.profile_model or args.model, mode="inference", dtype=args.dtype),
                   batch=args.batch, backward="rule")
    name, plain = kind_name(args.profile_device), args.profile_device.partition(":")[0].partition("@")[0]
    save_cluster(probe(1, device=plain), args.work / f"kind-{name}.json")
    summary = profile_model(traced, plain, store, threads=args.threads, kind=f"bench-{name}")
    note(f"{name}: {summary.num_timed} of {summary.num_keys} distinct operators timed, sum {summary.forward_s:.4g} s"
         f"{''.join(f'; {text}' for text in summary.problems[:3])}")


def own_process(args: argparse.Namespace, *more: str, share: str) -> str:
    """Return what this script prints when started again with ``more``, on the part of a GPU that ``share`` names."""
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--work", str(args.work), *more],
                          env={**os.environ, **share_environment(share)}, stdout=subprocess.PIPE, text=True,
                          timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(more)} ended with exit code {done.returncode}")
    return done.stdout.strip()


def kind_name(device: str) -> str:
    """Return what a device's kind is called here: cpu, cuda, or cuda-25 for a part."""
    plain, _, share = device.partition("@")
    return plain.partition(":")[0] + (f"-{share.rstrip('%')}" if share else "")


def kinds(args: argparse.Namespace) -> list[str]:
    return [kind_name(name) for name in args.devices.split(",")]


def measure_link(args: argparse.Namespace) -> dict[str, float]:
    """Return latency and rate of messages between two processes on the two devices, as the runtime sends them."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listener:
        fd = listener.fileno()
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
                       "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(args.threads)}
        children = [subprocess.Popen(
            [sys.executable, __file__, "--devices", args.devices, "--link-rank", str(rank), "--link-fd", str(fd)],
            env={**environment, **share_environment(args.devices.split(",")[rank])}, pass_fds=[fd], stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL)
            for rank in range(2)]
    try:
        text = children[0].communicate(timeout=300)[0]
        if any(child.wait(timeout=60) for child in children):
            raise SystemExit("the link between the two devices could not be measured")
    finally:
        for child in children:
            child.kill()
            child.wait()
    times = {int(size): seconds for size, seconds in json.loads(text).items()}
    sizes = np.asarray(sorted(times), dtype=float)
    seconds = np.asarray([times[int(size)] for size in sizes])
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)  # the same relative weight for all
    return {"latency_s": max(float(start), 1e-6), "bytes_per_s": 1 / float(slope)}


def link_rank(args: argparse.Namespace) -> None:
    """Be one of the two processes: send tensors to and fro; rank 0 prints the seconds of one way by size."""
    import torch

    from weft.run.transport import Transport, open_store
    from weft.run.worker import own_device

    rank = args.link_rank
    device = own_device(args.devices, rank=rank, num_ranks=2)
    store = open_store(listen_fd=args.link_fd if rank == 0 else None, timeout_s=120)
    transport = Transport(rank=rank, num_ranks=2, device=device, store=store, by_host=True)
    found = {}
    for size in LINK_BYTES:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        times = []
        for _ in range(LINK_ROUNDS):
            transport.barrier()
            begin = time.perf_counter()
            for turn in range(2):
                work = transport.send(tensor, 1 - rank, turn) if turn == rank else transport.receive(tensor, 1 - rank, turn)
                work.wait()
                if transport.synchronize is not None:
                    transport.synchronize()
            times.append((time.perf_counter() - begin) / 2)
        found[size] = statistics.median(times)
    if rank == 0:
        print(json.dumps(found), flush=True)
    transport.leave()
    os._exit(0)


# ---- place ----------------------------------------------------------------------------------------------------------


def make_cluster(args: argparse.Namespace) -> Cluster:
    """Return the two devices as measured: the first with the granted memory less what libraries take, and the host."""
    link = json.loads((args.work / "link.json").read_text())
    described = {}
    for kind in kinds(args):
        measured = load_cluster(args.work / f"kind-{kind}.json").kind_of(0)
        described[f"bench-{kind}"] = replace(measured, name=f"bench-{kind}")
    granted = args.granted - args.reserve
    memory = (granted, described["bench-cpu"].memory_bytes if kinds(args)[1] == "cpu" else granted)
    devices = tuple(Device(name=f"{kind}{index}", kind=f"bench-{kind}", host="host", memory_bytes=memory[index])
                    for index, kind in enumerate(kinds(args)))
    first, second = devices
    links = tuple(Link(source=a.name, target=b.name, bytes_per_s=link["bytes_per_s"], latency_s=link["latency_s"],
                       origin="measured") for a, b in ((first, second), (second, first)))
    return Cluster(name="pair", kinds=described, devices=devices, links=links)


@cache
def traced_graph(model: str, batch: int, dtype: str) -> Graph:
    return load_graph_for(model, mode="inference", batch=batch, dtype=dtype)


def graph_of(args: argparse.Namespace) -> Graph:
    return traced_graph(args.model, args.batch, args.dtype)


def place(args: argparse.Namespace) -> None:
    """Write one plan for each rule into the work folder."""
    cluster = make_cluster(args)
    store = ProfileStore(args.work / "profile.sqlite")
    graph = graph_of(args)
    costs = estimate_costs(graph, cluster, profile=store)
    problem = Problem(graph=graph, cluster=cluster, costs=costs,
                      options=PlanOptions(batch=args.batch, mode="inference", dtype=args.dtype))
    coarse = contract(graph, single_groups(graph))  # constants are left to those who read them
    placement = problem_from_graph(coarse.graph, cluster, estimate_costs(coarse.graph, cluster, profile=store))
    note(f"{graph.name}: {graph.num_ops} operators, parameters {format_bytes(graph.parameter_bytes)}, granted "
         f"{format_bytes(args.granted)} of which {format_bytes(args.reserve)} is kept for libraries")
    for text in costs.notes:
        note(f"note: {text}")
    rules = {"weft": lambda item: weft_search(item, args), **{rule: by_method(rule) for rule in RULES}}
    for name, rule in rules.items():
        path = args.work / f"plan-{name}.json"
        path.unlink(missing_ok=True)
        try:
            plan = plan_within_memory(problem, searcher(name, rule, placement, coarse), by=name)
        except NoFeasiblePlan as miss:
            note(f"{name}: no plan: {miss}")
            continue
        predicted = simulate(check_plan(plan, graph, cluster), costs, cluster).step_time_s
        save_plan(with_search(plan, step_time=predicted), path)


def searcher(name: str, rule: Callable[[PlaceProblem], Timetable], problem: PlaceProblem,
             coarse: Coarse) -> Callable[[Mapping[str, int]], OpPlacement]:
    """Return what places by the rule with some memory kept free."""
    def search(reserve: Mapping[str, int]) -> OpPlacement:
        kept = np.asarray([reserve.get(device, 0) for device in problem.device_names], dtype=float)
        table = rule(replace(problem, capacity=np.maximum(0.0, problem.capacity - kept)))
        note(f"{name}: timetable {table.latency_s * 1e3:.3f} ms, kept free {dict(reserve)}")
        return placement_of_groups(coarse, table.device, table.order)

    return search


def by_method(name: str) -> Callable[[PlaceProblem], Timetable]:
    def rule(problem: PlaceProblem) -> Timetable:
        found = METHODS[name](problem)
        return make_timetable(problem, found.device, found.order)

    return rule


def weft_search(problem: PlaceProblem, args: argparse.Namespace) -> Timetable:
    """Return what Weft's search finds (without exact parts where OR-Tools is not installed)."""
    from weft.search.place.search import place as search

    return search(problem, time_limit=args.time_limit, progress=note).timetable


# ---- run ------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row for each plan in the work folder, run on the two devices; then rows of accelerate's offloading."""
    names = [name for name in ("weft", *RULES) if (args.work / f"plan-{name}.json").exists()]
    rows: dict[str, dict[str, object]] = {name: {"method": name, "note": "no plan"} for name in ("weft", *RULES)}
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names * args.rounds:
        plan = load_plan(args.work / f"plan-{name}.json")
        try:
            result = run_once(args, plan)
        except WeftError as problem:
            rows[name] = {"method": name, "note": str(problem)}
            continue
        check = result.verification
        assert check is not None
        times[name] += result.step_times_s
        rows[name] = {"method": name, "predicted_s": plan.search.step_time, "measured_s": statistics.median(times[name]),
                      "least_s": min(times[name]), "error": check.loss_error, "is_equal": check.loss_error <= TOLERANCE,
                      **facts_of(args, plan)}
        note(f"{name}: predicted {plan.search.step_time:.6g} s, measured {result.step_time_s:.6g} s, "
             f"error {check.loss_error:.1e}")
    return [*rows.values(), *offload_rows(args)]


def run_once(args: argparse.Namespace, plan: Plan) -> RunResult:
    """Return the result of running a plan on the two devices, GPUs held to the granted memory."""
    from weft.run.launch import run_plan

    options = RunOptions(steps=args.steps, warmup=args.warmup, device=args.devices, verify=True, dtype=args.dtype,
                         timeout_s=600.0, gpu_memory_bytes=args.granted if "cuda" in args.devices else None)
    return run_plan(plan, args.model, options=options, threads=args.threads)


def facts_of(args: argparse.Namespace, plan: Plan) -> dict[str, object]:
    """Return what the plan keeps where, and how often it changes device."""
    program = lower(plan, graph_of(args))
    return {"weights": [int(amount) for amount in static_bytes(program).sum(axis=1)], "stages": len(plan.stages),
            "messages": len(program.channels)}


def offload_rows(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return the latency of accelerate's default: what the sequential rule puts on the CPU is copied for each call."""
    path = args.work / "plan-accelerate-sequential.json"
    if not path.exists() or kinds(args)[1] != "cpu":  # with two GPUs accelerate copies nothing
        return []
    rows: list[dict[str, object]] = []
    for how in ("pageable", "pinned") if kinds(args)[0].startswith("cuda") else ("pageable",):
        printed = own_process(args, "--offload", how, share=args.devices.split(",")[0])
        rows.append({"method": f"offloaded, {how} memory", **json.loads(printed.splitlines()[-1])})
    return rows


def offload(args: argparse.Namespace) -> None:
    """Print the latency of one process whose CPU modules copy their weights to the GPU when they are called."""
    import torch

    from weft.model.weights import materialize
    from weft.run.worker import limit_memory

    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.devices.split(",")[0].partition("@")[0])
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        limit_memory(device, args.granted)
    plan = load_plan(args.work / "plan-accelerate-sequential.json")
    source = resolve_model(args.model, mode="inference", dtype=args.dtype)
    module = materialize(source.build(), 0)
    inputs = source.inputs(args.batch, 0)
    with torch.no_grad():
        expected = first_tensor(module(*inputs))
    away = away_modules(args, plan, module)
    num_bytes = 0
    for path, leaf in module.named_modules():
        own = list(leaf.named_parameters(recurse=False)) + list(leaf.named_buffers(recurse=False))
        if path in away:
            num_bytes += sum(item.numel() * item.element_size() for _, item in own)
            hook_offload(leaf, device, pinned=args.offload == "pinned")
        else:
            for name, item in own:
                getattr(leaf, name).data = item.data.to(device)
    times, result = [], None
    inputs = [item.to(device) for item in inputs]
    with torch.no_grad():
        for _ in range(args.warmup + args.steps):
            begin = time.perf_counter()
            result = first_tensor(module(*inputs))
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    assert result is not None
    error = float((result.cpu() - expected).abs().max() / expected.abs().max())
    times = times[args.warmup:]
    print(json.dumps({"measured_s": statistics.median(times), "least_s": min(times), "error": error, "copied": num_bytes,
                      "is_equal": error <= TOLERANCE}))


def first_tensor(result):
    """Return a model's first output."""
    from torch.utils import _pytree as pytree

    return pytree.tree_leaves(result)[0]


def away_modules(args: argparse.Namespace, plan: Plan, module) -> set[str]:
    """Return the paths of modules with weights of their own that the plan runs on the second device."""
    graph = graph_of(args)
    second = plan.cluster.devices[1]
    found: dict[str, bool] = {}
    for stage in plan.stages:
        for op in stage.ops:
            path = graph.op_modules[graph.op_index[op]]
            found[path] = found.get(path, True) and stage.replicas[0].devices[0] == second
    here = {id(item) for path, leaf in module.named_modules() if not found.get(path)
            for item in leaf.parameters(recurse=False)}
    return {path for path, leaf in module.named_modules() if found.get(path)
            and not any(id(item) in here for item in leaf.parameters(recurse=False))}


def hook_offload(leaf, device, *, pinned: bool) -> None:
    """Let a module copy its weights to the device before each call and forget the copies after it."""
    kept = {name: item.data.pin_memory() if pinned else item.data for name, item in
            (*leaf.named_parameters(recurse=False), *leaf.named_buffers(recurse=False))}

    def before(module, inputs):
        for name, value in kept.items():
            getattr(module, name).data = value.to(device, non_blocking=pinned)

    def after(module, inputs, outputs):
        for name, value in kept.items():
            getattr(module, name).data = value

    leaf.register_forward_pre_hook(before)
    leaf.register_forward_hook(after)


# ---- report ---------------------------------------------------------------------------------------------------------


def report(args: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    if args.json:
        print(json.dumps({"model": args.model, "batch": args.batch, "granted": args.granted, "devices": args.devices,
                          "threads": args.threads, "rows": rows}))
        return
    print(f"\n{args.model}, batch {args.batch}, {args.dtype}; {format_bytes(args.granted)} granted on each GPU of "
          f"{args.devices}; {args.threads} CPU threads; median of {args.rounds} x {args.steps} warm steps")
    print(f"{'method':30s} {'predicted':>12s} {'measured':>12s} {'least':>12s} {'error':>8s}  weights by device")
    for row in rows:
        if "measured_s" not in row:
            print(f"{row['method']:30s} {row['note']}")
            continue
        predicted = f"{row['predicted_s'] * 1e3:9.3f} ms" if "predicted_s" in row else ""
        where = (", ".join(map(format_bytes, row["weights"])) + f"; {row['stages']} stages, {row['messages']} messages"
                 if "weights" in row else f"{format_bytes(row['copied'])} copied for each call")
        print(f"{row['method']:30s} {predicted:>12s} {row['measured_s'] * 1e3:9.3f} ms {row['least_s'] * 1e3:9.3f} ms "
              f"{row['error']:8.1e}  {where}{'' if row['is_equal'] else '  OUTPUTS DIFFER'}")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Placement on a GPU with little memory and its host's CPU.")
    parser.add_argument("--model", default="gpt2-xl:seq=32")
    parser.add_argument("--profile-model", help="profile this one instead: the same operators in fewer layers")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--devices", default="cuda,cpu", help="of the two processes: cuda,cpu or parts of one GPU, cuda:0@50%%,cuda:0@25%%")
    parser.add_argument("--granted", type=parse_bytes, default=parse_bytes("4GiB"), help="memory of the first device")
    parser.add_argument("--reserve", type=parse_bytes, help="of it, kept for libraries (default 5 %% and 96 MiB on a GPU)")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2),
                        help="of the process on the CPU (default: all cores but two, which the other process needs)")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2, help="how often each plan is run, in turn with the others")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=20.0, help="of each of Weft's searches, in seconds")
    parser.add_argument("--work", type=Path, default=Path("place-gpu"), help="folder for the profile and the plans")
    parser.add_argument("--only", choices=("profile", "place", "run"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--link-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--link-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--profile-device", help=argparse.SUPPRESS)
    parser.add_argument("--offload", choices=("pinned", "pageable"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reserve is None:
        args.reserve = args.granted // 20 + (96 << 20) if args.devices.startswith("cuda") else 0
    return args


def main() -> int:
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.link_rank is not None:
        link_rank(args)
    if args.offload is not None:
        offload(args)
        return 0
    if args.profile_device is not None:
        profile_device(args)
        return 0
    with multi_process_service("@" in args.devices):
        if args.only in (None, "profile"):
            profile(args)
        if args.only in (None, "place"):
            place(args)
        if args.only not in (None, "run"):
            return 0
        rows = run(args)
    report(args, rows)
    return int(not all(row.get("is_equal", False) for row in rows if "measured_s" in row))


if __name__ == "__main__":
    sys.exit(main())
