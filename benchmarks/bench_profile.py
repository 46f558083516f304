"""Sum of profiled operator times against the time of the whole model, on one CPU thread (or on a GPU).

    python benchmarks/bench_profile.py                  three models, inference and a training step; about five minutes
    python benchmarks/bench_profile.py --json           the same facts for machines
    python benchmarks/bench_profile.py --device cuda    the same on the GPU; wall time there

A round profiles the model's operators into a fresh store; after every timing pass the whole model runs once (the module
as the user wrote it, not the traced graph), so that background load meets both alike. Times are CPU times and medians;
the ratio is the median of the rounds' ratios. The sum is what Weft predicts for one device: every operator's entry in
the store, over all operators of the model. Exit status 1 if a ratio is off by more than the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from weft.cost.profile import ProfileStore
from weft.cost.profiler import profile_model
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace
from weft.model.weights import materialize

LIMIT = 0.08
PASSES = 3
MODELS = (("gpt2:layers=4,seq=128", 1), ("bert-large:layers=4,seq=128", 1), ("resnet-50", 4))


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model in one mode."""

    model: str
    mode: str
    batch: int
    num_ops: int
    num_timed: int
    sum_s: float
    whole_s: float
    ratio: float
    ratios: tuple[float, ...]
    limit: float
    is_within: bool
    problems: tuple[str, ...]


class WholeModel:
    """Runs the module as its user wrote it, and keeps the CPU times of its steps."""

    def __init__(self, source: ModelSource, device: str) -> None:
        self.module = materialize(source.build(), 0, device=device)
        self.inputs = tuple(tensor.to(device) for tensor in source.inputs())
        self.device = device
        self.is_training = source.mode == "training"
        self.seconds: list[float] = []

    def step(self, *_progress: int) -> None:
        """Run one forward pass, or forward and backward."""
        for parameter in self.module.parameters():
            parameter.grad = None
        begin = self.now()
        with torch.set_grad_enabled(self.is_training):
            output = self.module(*self.inputs)
            if self.is_training:
                (output[0] if isinstance(output, tuple) else output).backward()
        self.seconds.append(self.now() - begin)

    def now(self) -> float:
        """Return the CPU time of this process, or the wall time when the GPU has finished."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def measure(spec: str, batch: int, mode: str, rounds: int, device: str) -> Result:
    source = resolve_model(spec, batch=batch, mode=mode)
    assert isinstance(source, ModelSource)
    traced = trace(source)
    whole = WholeModel(source, device)
    whole.step()
    sums, wholes = [], []
    for _ in range(rounds):
        whole.seconds.clear()
        with tempfile.TemporaryDirectory() as folder:
            store = ProfileStore(Path(folder) / "profile.db")
            summary = profile_model(traced, device, store, threads=1, passes=PASSES, progress=whole.step)
        sums.append(summary.forward_s + summary.backward_s)
        wholes.append(statistics.median(whole.seconds))
    ratios = tuple(sum_s / whole_s for sum_s, whole_s in zip(sums, wholes, strict=True))
    ratio = statistics.median(ratios)
    return Result(model=spec, mode=mode, batch=batch, num_ops=summary.num_ops, num_timed=summary.num_timed,
                  sum_s=statistics.median(sums), whole_s=statistics.median(wholes), ratio=ratio, ratios=ratios,
                  limit=LIMIT, is_within=abs(ratio - 1) <= LIMIT, problems=summary.problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--rounds", type=int, default=7, help=f"rounds of {PASSES} timing passes (training: twice)")
    parser.add_argument("--mode", choices=("inference", "training", "both"), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", action="append", metavar="SPEC", help="a zoo model instead of the three")
    parser.add_argument("--batch", type=int, default=1, help="batch size for --model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    modes = ("inference", "training") if options.mode == "both" else (options.mode,)
    models = MODELS if not options.model else tuple((spec, options.batch) for spec in options.model)
    results = []
    for spec, batch in models:
        for mode in modes:
            result = measure(spec, batch, mode, options.rounds, options.device)
            results.append(result)
            if not options.json:
                verdict = "ok" if result.is_within else "OVER"
                print(f"{spec:<28} {mode:<9} batch {batch}  {result.num_timed:>3} of {result.num_ops} ops timed  "
                      f"sum {result.sum_s * 1e3:8.1f} ms  whole {result.whole_s * 1e3:8.1f} ms  "
                      f"ratio {result.ratio:.3f} ({min(result.ratios):.2f}..{max(result.ratios):.2f})  "
                      f"limit {1 - LIMIT:.2f}..{1 + LIMIT:.2f}  {verdict}", flush=True)
    if options.json:
        print(json.dumps({"benchmark": "profile", "torch": torch.__version__, "results": [asdict(r) for r in results]}))
    return 0 if all(result.is_within for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
