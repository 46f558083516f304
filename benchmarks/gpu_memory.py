"""Ten random plans on one GPU: the allocator's peak of every rank beside what the account promised, and the results.

    python -m benchmarks.gpu_memory make out/gpu_memory --scale 64        (here: about 2 minutes; 60 KB)
    python -m benchmarks.gpu_memory run out/gpu_memory                    (on the GPU: about 3 minutes, 2 GB of its memory)

``make`` draws models and plans (``--plans 10 --seed 0``), which needs the planners; ``run`` (``--device cuda
--tolerance 1e-9``) executes them with this repository, PyTorch, NumPy, numba and safetensors, and nothing else. Its ranks share one GPU, each with an allocator of its own, and their messages pass through the host's memory.
The allocator rounds every block up to 512 bytes, so the models are large (``--scale`` times the smallest). Models with
attention are left out: in double precision a GPU has no fused kernel for it, and the account is that of a fused one.
The exit code is 1 if anything differs or breaks, or if a rank takes more than promised and no reason is computed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import statistics
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks import random_compare
from benchmarks.random_memory import FullTracer, compare_peaks
from benchmarks.random_models import draw_model
from benchmarks.random_ranks import Ranks
from weft.plan.plan import load_plan, save_plan
from weft.run.prepare import lower_to_run

KINDS: Final = ("data parallel", "divided states", "factors", "gpipe", "1f1b", "recompute", "interleaved",
                "split backward", "tensor parallel", "searched sharding")
CASES: Final = "cases.json"


def make(folder: Path, *, num_plans: int, seed: int, scale: int) -> None:
    """Write plans, each of another model, and the list of their models."""
    from benchmarks.random_plans import World, draw_plan
    from weft.base.errors import WeftError

    folder.mkdir(parents=True, exist_ok=True)
    rng, kinds, cases = random.Random(seed), itertools.cycle(KINDS), []
    kind = next(kinds)
    while len(cases) < num_plans:
        model = draw_model(rng.randrange(1 << 20), scale=scale)
        if "attention" in model.features:
            continue
        world = World(model=model, tracer=FullTracer(model.source), num_devices=2, rng=random.Random(model.seed))
        try:
            plan = draw_plan(world, kind)
            lower_to_run(plan, world.tracer)
        except WeftError as problem:
            print(f"{kind}, model {model.seed}: {problem}", file=sys.stderr)
            continue
        name = f"{len(cases):02d}.json"
        save_plan(plan, folder / name)
        cases.append({"plan": name, "kind": kind, "model": model.seed, "scale": scale})
        kind = next(kinds)
    (folder / CASES).write_text(json.dumps(cases, indent=1))


def run(folder: Path, *, device: str) -> bool:
    """Execute the plans and print what came of them; return whether all is well."""
    ratios: list[float] = []
    is_well, fork = True, multiprocessing.get_context("fork")
    for case in json.loads((folder / CASES).read_text()):
        found, told = fork.Pipe(duplex=False)
        process = fork.Process(target=_run_case, args=(folder, case, device, told))
        process.start()  # a process that has traced a model has touched the GPU, and cannot fork ranks that use it
        told.close()
        try:
            more, is_sound = found.recv()
            ratios += more
            is_well &= is_sound
        except EOFError:
            is_well = False
        process.join()
    if ratios:
        print(f"measured/promised {min(ratios):.4f} / {statistics.median(ratios):.4f} / {max(ratios):.4f} "
              "(min / median / max)")
    return is_well


def _run_case(folder: Path, case: dict[str, Any], device: str, told: Connection) -> None:
    """Execute one plan; tell the ratios of measured to promised peaks, and whether all is well."""
    plan, model = load_plan(folder / case["plan"]), draw_model(case["model"], scale=case["scale"])
    tracer, ratios, is_sound = FullTracer(model.source), [], True
    with Ranks(tracer, len(plan.cluster.devices), device) as ranks:
        outcomes = ranks.run(plan)
    program = lower_to_run(plan, tracer)
    words = [f"rank {rank}: {item.error}" for rank, item in enumerate(outcomes) if item.error]
    words = words or random_compare.differences(model, program, outcomes, tracer)
    print(f"{case['kind']:<20} {model.name}: {'; '.join(words) or 'equal'}")
    if all(item.memory is not None for item in outcomes):
        found = compare_peaks(program, outcomes)
        peaks = ", ".join(f"{max(item.memory.peak) / 2 ** 20:.2f} MiB" for item in outcomes if item.memory)
        print(f"    peaks {peaks}; measured/promised {', '.join(f'{ratio:.4f}' for ratio in found.ratios)}")
        for line in found.above:
            print(f"    above its account: {line}")
        ratios, is_sound = found.ratios, not found.unexplained
    sys.stdout.flush()
    told.send((ratios, is_sound and not words))


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="Peaks of random plans on one GPU beside those promised.")
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plans", type=int, default=10, help="make: how many plans (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="make: what is drawn")
    parser.add_argument("--scale", type=int, default=64, help="make: how many times as large the models are")
    parser.add_argument("--device", default="cuda", help="run: cuda (default) or cpu")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="run: how far results may be from one process's")
    args = parser.parse_args()
    if args.what == "make":
        make(args.folder, num_plans=args.plans, seed=args.seed, scale=args.scale)
        return 0
    random_compare.TOLERANCE = args.tolerance
    return 0 if run(args.folder, device=args.device) else 1


if __name__ == "__main__":
    sys.exit(main())
