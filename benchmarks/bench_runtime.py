"""CPU time per step of Weft's runtime against ``torch.distributed.pipelining`` on 1F1B, with the same stages.

    python benchmarks/bench_runtime.py [--json] [--layers 8] [--width 32] [--microbatches 8] [--repetitions 15]

Four gloo ranks on this machine run both, in turn, in the same processes: the same stage modules (from Weft's
partitioner), micro-batches, samples and loss. CPU time is that of all threads of a process, summed over the ranks; the
figure is the median over the repetitions. Both sides must give the same gradients before anything is timed.

In favour of PyTorch: its losses are not collected, outputs not returned and gradients not scaled by the number of
micro-batches, and its loss is a plain function rather than operators of a graph.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NUM_RANKS = 4


def main() -> int:
    args = parse()
    if args.rank is not None:
        return run_rank(args)
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                       "GLOO_SOCKET_IFNAME": "lo"}
        children = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--fd", str(fd)],
                                     env=environment, pass_fds=[fd]) for rank in range(NUM_RANKS)]
    try:
        return max(child.wait(timeout=900) for child in children)
    finally:
        for child in children:
            child.kill()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="per micro-batch")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="per repetition")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_source(args):
    from weft.model.source import ModelSource, resolve_model

    spec = f"gpt2:layers={args.layers},hidden={args.width},heads=4,vocab=128,seq=16"
    source = resolve_model(spec)
    assert isinstance(source, ModelSource)
    return source


def make_plan(args, graph):
    from weft.plan.orders import one_f_one_b, to_tokens
    from weft.plan.plan import ClusterRef, GradientExchange, ModelRef, Optimizer, Plan, Replica, Stage
    from weft.plan.structure import parameter_holders

    parts: list[list[str]] = [[] for _ in range(NUM_RANKS)]
    stage = 0
    for name, module in zip(graph.op_names, graph.op_modules, strict=True):
        if ".h." in f".{module}.":
            stage = int(module.split("h.")[1].split(".")[0]) * NUM_RANKS // args.layers
        parts[stage].append(name)
    names = tuple(f"s{index}" for index in range(NUM_RANKS))
    stages = tuple(Stage(name=name, ops=tuple(part), replicas=(Replica(devices=(f"d{index}",)),))
                   for index, (name, part) in enumerate(zip(names, parts, strict=True)))
    order = to_tokens(one_f_one_b(NUM_RANKS, args.microbatches), names)
    plan = Plan(
        model=ModelRef(name="gpt", digest=graph.digest, batch=args.microbatches * args.samples),
        cluster=ClusterRef(digest="bench", devices=tuple(f"d{index}" for index in range(NUM_RANKS))),
        microbatches=args.microbatches, stages=stages, order={f"d{index}": row for index, row in enumerate(order)},
        optimizer=Optimizer(kind="none"))
    shared = {tensor: devices for tensor, devices in parameter_holders(plan, graph).items() if len(devices) > 1}
    exchanges = tuple(GradientExchange(parameters=(graph.tensor_names[tensor],), devices=devices)
                      for tensor, devices in shared.items())
    from dataclasses import replace

    return replace(plan, gradients=exchanges)


def run_rank(args) -> int:
    import torch
    import torch.distributed as dist

    from weft.run.prepare import Tracer
    from weft.run.transport import Transport, open_store

    torch.set_num_threads(1)
    store = open_store(listen_fd=args.fd if args.rank == 0 else None, timeout_s=120)
    transport = Transport(rank=args.rank, num_ranks=NUM_RANKS, device=torch.device("cpu"), store=store)
    tracer = Tracer(make_source(args))
    graph = tracer.trace(args.samples).graph
    weft_step, parameters = make_weft(args, make_plan(args, graph), tracer, transport)
    torch_step, check = make_torch(args, tracer, graph, transport, parameters)
    check(weft_step, torch_step)
    samples: dict[str, list[list[float]]] = {"weft": [], "torch": []}
    for _ in range(2):
        weft_step(), torch_step()
    for _ in range(args.repetitions):
        for name, step in (("weft", weft_step), ("torch", torch_step)):
            transport.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(args.steps):
                step()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            total = torch.tensor([cpu, wall / NUM_RANKS], dtype=torch.float64)
            dist.all_reduce(total)
            samples[name].append((total / args.steps).tolist())
    if args.rank == 0:
        report(args, samples)
    transport.barrier()
    transport.close()
    return 0


def make_weft(args, plan, tracer, transport):
    from weft.run.executor import Executor
    from weft.run.prepare import lower_to_run, prepare_rank
    from weft.run.status import StatusLine

    program = lower_to_run(plan, tracer)
    transport.connect_groups(bucket.ranks for bucket in program.buckets)
    prepared = prepare_rank(program, tracer, transport.rank, device=transport.device, seed=0)
    executor = Executor(program, stages=prepared.stages, parameters=prepared.parameters, transport=transport,
                        status=StatusLine())
    inputs = tracer.source.inputs(plan.model.batch, 0)
    executor.load(dict(zip(prepared.input_names, inputs, strict=True)))

    def step() -> None:
        executor.step()
        executor.bound.losses.clear()

    return step, prepared


def make_torch(args, tracer, graph, transport, prepared):
    """Return the step of PyTorch's schedule on the same stage modules, and a function that compares gradients."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional

    rank, last = transport.rank, NUM_RANKS - 1
    module = next(iter(prepared.stages.values())).module.module
    if rank == last:
        module = without_loss(prepared, tracer, graph)
    stage = PipelineStage(module, rank, NUM_RANKS, transport.device)

    def loss_function(logits, labels):
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss_function, scale_grads=False)
    tokens, labels = tracer.source.inputs(args.microbatches * args.samples, 0)
    tensors = list(prepared.parameters.tensors.values())

    def step() -> None:
        for tensor in tensors:
            tensor.grad = None
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
        elif rank == last:
            schedule.step(target=labels, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
    return step, None
