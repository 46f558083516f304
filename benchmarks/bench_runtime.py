"""CPU time per step of Weft's runtime against ``torch.distributed.pipelining`` on 1F1B, with the same stages.

    python benchmarks/bench_runtime.py [--json] [--layers 8] [--width 32] [--microbatches 8] [--repetitions 15]

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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from weft.model.source import ModelSource  # noqa: E402
from weft.plan.orders import one_f_one_b, to_tokens  # noqa: E402
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage  # noqa: E402
from weft.run.executor import loaded_executor  # noqa: E402
from weft.run.prepare import Tracer, lower_to_run, prepare_rank  # noqa: E402
from weft.run.transport import Transport, open_store  # noqa: E402

NUM_RANKS = 4
T_95 = 1.73
"""One-sided, of Student's distribution for twenty pairs."""
WORDS, LENGTH = 128, 16


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return the layer's output."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A language model with its loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, tokens, labels):
        """Return the mean loss."""
        x = self.words(tokens) + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def make_source(args: argparse.Namespace) -> ModelSource:
    def build(mode):
        torch.manual_seed(0)
        return TinyGPT(args.layers, args.width)

    def sample(mode, batch, seed):
        tokens = torch.randint(0, WORDS, (batch, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()

    return ModelSource(name="tiny-gpt", spec="", batch=args.samples, mode="training", builder=build, sampler=sample)


def make_plan(args: argparse.Namespace, graph) -> Plan:
    parts: list[list[str]] = [[] for _ in range(NUM_RANKS)]
    stage = 0
    for name, module in zip(graph.op_names, graph.op_modules, strict=True):
        if module.startswith("blocks."):
            stage = int(module.split(".")[1]) * NUM_RANKS // args.layers
        parts[stage].append(name)
    names = tuple(f"s{index}" for index in range(NUM_RANKS))
    stages = tuple(Stage(name=name, ops=tuple(part), replicas=(Replica(devices=(f"d{index}",)),))
                   for index, (name, part) in enumerate(zip(names, parts, strict=True)))
    order = to_tokens(one_f_one_b(NUM_RANKS, args.microbatches), names)
    return Plan(
        model=ModelRef(name="tiny-gpt", digest=graph.digest, batch=args.microbatches * args.samples),
        cluster=ClusterRef(digest="bench", devices=tuple(f"d{index}" for index in range(NUM_RANKS))),
        microbatches=args.microbatches, stages=stages, order={f"d{index}": row for index, row in enumerate(order)},
        optimizer=Optimizer(kind="none"))


def make_weft(args, tracer, transport):
    """Return the step of Weft's runtime, and what the rank holds."""
    plan = make_plan(args, tracer.trace(args.samples).graph)
    prepared = prepare_rank(lower_to_run(plan, tracer), tracer, transport, seed=0)
    executor = loaded_executor(prepared, tracer.source, transport)

    def step() -> None:
        executor.step()
        executor.binder.losses.clear()

    return step, prepared


def make_torch(args, tracer, transport, prepared):
    """Return the step of PyTorch's schedule on the same stage module and parameters."""
    rank, last = transport.rank, NUM_RANKS - 1
    (stage_module,) = (stage.module for stage in prepared.stages.values())
    schedule = Schedule1F1B(PipelineStage(stage_module.module, rank, NUM_RANKS, transport.device), args.microbatches,
                            loss_fn=lambda output, _: output if isinstance(output, torch.Tensor) else output[0],
                            scale_grads=False)
    tokens, labels = tracer.source.inputs(args.microbatches * args.samples, 0)
    place = stage_module.inputs.index("labels") if rank == last else 0
    unused = torch.zeros(args.microbatches)
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


def check_equal(args, prepared, weft_step, torch_step) -> None:
    """Raise unless both steps leave the same gradients (PyTorch's are sums over micro-batches)."""
    tensors = prepared.parameters.tensors
    weft_step()
    expected = {name: tensor.grad.clone() for name, tensor in tensors.items()}
    torch_step()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad / args.microbatches, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def run_rank(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    store = open_store(listen_fd=args.fd if args.rank == 0 else None, timeout_s=120)
    transport = Transport(rank=args.rank, num_ranks=NUM_RANKS, device=torch.device("cpu"), store=store)
    tracer = Tracer(make_source(args))
    weft_step, prepared = make_weft(args, tracer, transport)
    torch_step = make_torch(args, tracer, transport, prepared)
    check_equal(args, prepared, weft_step, torch_step)
    sides = {"weft": weft_step, "torch": torch_step}
    samples: dict[str, list[list[float]]] = {name: [] for name in sides}
    for repetition in range(args.repetitions + 1):
        for name, step in sides.items():
            transport.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(args.steps):
                step()
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
    ratios = [a / b for a, b in zip(cpu["weft"], cpu["torch"], strict=True)]
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
    print(f"  weft / torch: {ratio:.3f}; geometric mean at most {upper:.3f} (95 %)")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time per step against torch.distributed.pipelining.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="per micro-batch")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="per repetition")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.rank is not None:
        return run_rank(args)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]),
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
