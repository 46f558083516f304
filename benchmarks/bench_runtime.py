"""CPU time per step of Weft's runtime against ``torch.distributed.pipelining`` on 1F1B, with the same stages.

    python benchmarks/bench_runtime.py [--json] [--layers 8] [--width 32] [--microbatches 8] [--repetitions 15]
    python benchmarks/bench_runtime.py --device cuda --compile --width 1024 --length 512 --words 8192 --heads 16 --steps 1

The second is for four parts of one GPU (25 % each by the multi-process service): wall time per step, stages compiled on
both sides (``torch.compile`` on PyTorch's), and Weft's zero-bubble order (ZB-H1) beside its 1F1B. gloo has no messages
between GPUs: PyTorch's are copied through pinned memory of the host (``through_the_host``), as Weft's are.

Four gloo ranks on this machine run both, in turn, in the same processes: the same stage modules (from Weft's
partitioner, loss included), micro-batches and samples. CPU time is that of all threads of a process, summed over the
ranks; the figure is the median over the repetitions, and ``ratio`` the median of the ratios of neighbours; ``upper`` is the
upper 95 % limit of their geometric mean. Both sides
must give the same gradients before anything is timed. In favour of PyTorch, its losses are not collected, its outputs
not returned, and its gradients not scaled by the number of micro-batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.mps import multi_process_service  # noqa: E402
from weft.model.source import ModelSource  # noqa: E402
from weft.plan.orders import by_pattern, one_f_one_b, to_tokens  # noqa: E402
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage  # noqa: E402
from weft.run.executor import loaded_executor  # noqa: E402
from weft.run.prepare import Tracer, connect_ranks, lower_to_run, prepare_rank  # noqa: E402
from weft.run.transport import Transport, open_store  # noqa: E402

NUM_RANKS = 4
T_95 = 1.73
"""One-sided, of Student's distribution for twenty pairs."""


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return the layer's output."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A language model with its loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(args.words, args.width), nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.words)

    def forward(self, tokens, labels):
        """Return the mean loss."""
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make_source(args: argparse.Namespace) -> ModelSource:
    def build(mode):
        torch.manual_seed(0)
        return TinyGPT(args)

    def sample(mode, batch, seed):
        tokens = torch.randint(0, args.words, (batch, args.length + 1), generator=torch.Generator().manual_seed(seed))
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()

    return ModelSource(name="tiny-gpt", spec="", batch=args.samples, mode="training", builder=build, sampler=sample)


def zb_h1(num_microbatches: int) -> list[list[tuple[int, str, int]]]:
    """Return ZB-H1 of one stage on each rank: rank ``r`` leaves ``r`` gradients of weights for later."""
    order = []
    for rank in range(NUM_RANKS):
        row = []
        for kind, number in by_pattern("zb-h1", rank, NUM_RANKS, num_microbatches):
            row.append((rank, kind[0], number))
            if kind[0] == "I" and number >= rank:
                row.append((rank, "W", number - rank))
        order.append([*row, *((rank, "W", number) for number in range(num_microbatches - rank, num_microbatches))])
    return order


def make_plan(args: argparse.Namespace, graph, order) -> Plan:
    parts: list[list[str]] = [[] for _ in range(NUM_RANKS)]
    stage = 0
    for name, module in zip(graph.op_names, graph.op_modules, strict=True):
        if module.startswith("blocks."):
            stage = int(module.split(".")[1]) * NUM_RANKS // args.layers
        parts[stage].append(name)
    names = tuple(f"s{index}" for index in range(NUM_RANKS))
    stages = tuple(Stage(name=name, ops=tuple(part), replicas=(Replica(devices=(f"d{index}",)),))
                   for index, (name, part) in enumerate(zip(names, parts, strict=True)))
    order = to_tokens(order, names)
    return Plan(
        model=ModelRef(name="tiny-gpt", digest=graph.digest, batch=args.microbatches * args.samples),
        cluster=ClusterRef(digest="bench", devices=tuple(f"d{index}" for index in range(NUM_RANKS))),
        microbatches=args.microbatches, stages=stages, order={f"d{index}": row for index, row in enumerate(order)},
        optimizer=Optimizer(kind="none"), compiled=args.compile)


def make_weft(args, tracer, transport, order):
    """Return the step of Weft's runtime, and what the rank holds."""
    program = lower_to_run(make_plan(args, tracer.trace(args.samples).graph, order), tracer)
    connect_ranks(program, tracer, transport)
    prepared = prepare_rank(program, tracer, transport, seed=0)
    executor = loaded_executor(prepared, tracer.source, transport)

    def step() -> None:
        executor.step()
        executor.binder.losses.clear()

    return step, prepared


def make_torch(args, tracer, transport, prepared):
    """Return the step of PyTorch's schedule on the same stage module and parameters."""
    rank, last = transport.rank, NUM_RANKS - 1
    (stage_module,) = (stage.module for stage in prepared.stages.values())
    given, made = (tuple(stage_module.values[name].detach().to("meta").requires_grad_(
        stage_module.values[name].is_floating_point()) for name in names if name != "labels")
        for names in (stage_module.inputs, stage_module.outputs))  # so that the ranks need not ask each other
    module = torch.compile(stage_module.module) if args.compile else stage_module.module
    stage = PipelineStage(module, rank, NUM_RANKS, transport.device, input_args=given, output_args=made)
    schedule = Schedule1F1B(stage, args.microbatches, scale_grads=False,
                            loss_fn=lambda output, _: output if isinstance(output, torch.Tensor) else output[0])
    tokens, labels = (item.to(transport.device) for item in tracer.source.inputs(args.microbatches * args.samples, 0))
    place = stage_module.inputs.index("labels") if rank == last else 0
    unused = torch.zeros(args.microbatches, device=transport.device)
    tensors = list(prepared.parameters.tensors.values())

    def step() -> None:
        for tensor in tensors:
            tensor.grad = None
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
        elif rank == last:
            schedule.step(target=unused, return_outputs=False, **{f"a{place}": labels})
        else:
            schedule.step(return_outputs=False)

    return step


class Arriving:
    """A message for a GPU on its way to the host."""

    def __init__(self, tensor: torch.Tensor, op: dist.P2POp) -> None:
        self.tensor, self.buffer = tensor.detach(), torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.work = dist.irecv(self.buffer, op.peer)

    def wait(self) -> None:
        """Let it arrive on the GPU."""
        self.work.wait()
        self.tensor.copy_(self.buffer, non_blocking=True)


class Leaving:
    """A message of a GPU on its way from the host."""

    def __init__(self, op: dist.P2POp) -> None:
        self.buffer = torch.empty(op.tensor.shape, dtype=op.tensor.dtype, pin_memory=True).copy_(op.tensor.detach())
        self.work = dist.isend(self.buffer, op.peer)

    def wait(self) -> None:
        """Let it be gone."""
        self.work.wait()


def through_the_host(ops, desc=None):
    """Stand in for PyTorch's call that issues the messages of a pipeline."""
    return [Leaving(op) if op.op is dist.isend else Arriving(op.tensor, op) for op in ops]


def wait(args) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def check_equal(args, prepared, weft_step, torch_step, times=None) -> None:
    """Raise unless both steps leave the same gradients (PyTorch's are sums over micro-batches)."""
    tensors = prepared.parameters.tensors
    weft_step()
    expected = {name: tensor.grad.clone() for name, tensor in tensors.items()}
    torch_step()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad / (times or args.microbatches), expected[name], rtol=1e-3,
                                   atol=1e-4 * float(expected[name].abs().max()), msg=name)


def run_rank(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    store = open_store(listen_fd=args.fd if args.rank == 0 else None, timeout_s=120)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    transport = Transport(rank=args.rank, num_ranks=NUM_RANKS, device=device, store=store,
                          by_host=args.device == "cuda")
    tracer = Tracer(make_source(args))
    weft_step, prepared = make_weft(args, tracer, transport, one_f_one_b(NUM_RANKS, args.microbatches))
    if args.device == "cuda":
        schedules._batch_p2p = through_the_host
    torch_step = make_torch(args, tracer, transport, prepared)
    check_equal(args, prepared, weft_step, torch_step)
    sides = {"weft": weft_step, "torch": torch_step}
    if args.zero_bubble:
        sides["zb-h1"], other = make_weft(args, tracer, transport, zb_h1(args.microbatches))
        check_equal(args, other, sides["zb-h1"], sides["zb-h1"], times=1)
    samples: dict[str, list[list[float]]] = {name: [] for name in sides}
    for repetition in range(args.repetitions + 1):
        for name, step in sides.items():
            wait(args)
            transport.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(args.steps):
                step()
            wait(args)
            cost = torch.tensor([time.process_time() - cpu, (time.perf_counter() - wall) / NUM_RANKS])
            dist.all_reduce(cost)
            if repetition:
                samples[name].append((cost / args.steps).tolist())
    if args.rank == 0:
        report(args, samples, prepared.program.num_instructions)
    transport.barrier()
    transport.close()
    return 0


def report(args: argparse.Namespace, samples: dict[str, list[list[float]]], num_instructions: int) -> None:
    cpu = {name: [row[0] * 1e3 for row in rows] for name, rows in samples.items()}
    wall = {name: [row[1] * 1e3 for row in rows] for name, rows in samples.items()}
    counted = wall if args.device == "cuda" else cpu
    ratios = [a / b for a, b in zip(counted["weft"], counted["torch"], strict=True)]
    ratio = statistics.median(ratios)
    logs = [math.log(item) for item in ratios]
    upper = math.exp(statistics.mean(logs) + T_95 * statistics.stdev(logs) / math.sqrt(len(logs)))
    facts = {
        "layers": args.layers, "width": args.width, "microbatches": args.microbatches, "samples": args.samples,
        "repetitions": args.repetitions, "steps": args.steps, "instructions": num_instructions,
        **{f"{name}_cpu_ms": statistics.median(values) for name, values in cpu.items()},
        **{f"{name}_cpu_ms_min": min(values) for name, values in cpu.items()},
        **{f"{name}_wall_ms": statistics.median(values) for name, values in wall.items()},
        "ratio": ratio, "upper": upper, "torch": torch.__version__}
    if args.json:
        print(json.dumps(facts))
        return
    print(f"1F1B, {NUM_RANKS} ranks, {args.layers} layers of width {args.width}, {args.microbatches} micro-batches; "
          "CPU ms per step over all ranks, median (min); wall ms per step")
    for name in cpu:
        print(f"  {name:6s} {facts[f'{name}_cpu_ms']:8.2f} ({facts[f'{name}_cpu_ms_min']:.2f})   "
              f"{facts[f'{name}_wall_ms']:8.2f}")
    print(f"  weft / torch ({'wall' if args.device == 'cuda' else 'CPU'}): {ratio:.3f}; geometric mean at most {upper:.3f} (95 %)")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time per step against torch.distributed.pipelining.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="per micro-batch")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="per repetition")
    parser.add_argument("--length", type=int, default=16, help="words of a sample")
    parser.add_argument("--words", type=int, default=128, help="in the vocabulary")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="stages as compiled graphs on both sides")
    parser.add_argument("--zero-bubble", action="store_true", help="ZB-H1 on Weft, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.rank is not None:
        return run_rank(args)
    with multi_process_service(args.device == "cuda"), socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        environment = {**os.environ, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
                       "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        fd = listener.fileno()
        children = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--fd", str(fd)],
                                     env=environment, pass_fds=[fd]) for rank in range(NUM_RANKS)]
        try:
            return max(child.wait(timeout=900) for child in children)
        finally:
            for child in children:
                child.kill()


if __name__ == "__main__":
    sys.exit(main())
