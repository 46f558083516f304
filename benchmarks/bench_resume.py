"""Checkpoints under several plans, and ranks that are killed at random points and resumed, against one process.

    python -m benchmarks.bench_resume [--only plans|kills|restart] [--kills N] [--json]

A small transformer with tied embeddings is trained in float64 with AdamW and clipping. The losses of one process without
Weft's runtime are the reference.

``plans``: ten steps, two under each of five plans (a pipeline, shares by speed, split tensors, one device, and the first
again), each from the checkpoint of the one before.
``kills``: a rank is killed with SIGKILL at a random point: in any instruction of any step or, in every second case, while
rank 0 writes a checkpoint or removes an old one. Then the training is resumed, under the same plan or another. What must
hold: no checkpoint for which ``save_checkpoint`` had returned is lost, every checkpoint there can be read in full, and
the losses of all steps are those of the reference.
``restart``: the script of ``docs/training.md`` under ``torchrun --max-restarts 1``; its rank 1 is killed at some moment
after the first checkpoint. The parameters at the end are those of the script without a kill, to the last bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.resume_ranks import Job, Ranks, reference_losses
from benchmarks.sections import Row, run_sections
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.folded import trace_folded
from weft.model.source import ModelSource, resolve_model
from weft.plan.plan import Optimizer, Plan, save_plan
from weft.run.checkpoint_folder import TensorFile, check_file, checkpoints_in, read_record
from weft.search.common.problem import PlanOptions, Problem
from weft.search.joint.baselines import data_parallel_by_speed, one_f_one_b_equal, single_device
from weft.search.shard.compare import search_plan

MODEL = f"{Path(__file__).with_name('models') / 'tied_transformer.py'}:tied_transformer"
BATCH, NORM, TOLERANCE = 8, 0.5, 1e-10
SIZES = (1, 2, 4, 8)
"""Numbers of samples that the stages of these plans compute at once."""
STEPS, EVERY = 6, 2
SECTIONS = ("plans", "kills", "restart")
DISK = ("mkdir", "write", "write", "fsync", "rename", "unlink", "rmdir")
"""What writing a checkpoint and removing an old one do: tensors are written twice as often as each of the others."""
NONE = Optimizer(kind="none")


def cluster(speeds: tuple[float, ...]) -> Any:
    """Return devices of these speeds, so slow and on links so fast that splitting always pays."""
    names = [f"d{index}" for index in range(len(speeds))]
    kinds = {f"x{speed:g}": {"flops": {"float32": speed * 1e8, "float64": speed * 1e8}, "memory": "8GiB",
                             "memory_bandwidth": speed * 1e9} for speed in speeds}
    return parse_cluster({
        "format": "weft.cluster", "version": 1, "kinds": kinds,
        "devices": [{"name": name, "kind": f"x{speed:g}", "host": "h"} for name, speed in zip(names, speeds, strict=True)],
        "links": [{"from": a, "to": b, "bandwidth": "100GB/s", "latency": "0.1us"}
                  for index, a in enumerate(names) for b in names[index + 1:]]})


def make_plans() -> dict[str, Plan]:
    source = resolve_model(MODEL, batch=BATCH, dtype=None)
    assert isinstance(source, ModelSource)
    folded = trace_folded(source.with_dtype("float64"), batch=BATCH)

    def problem(*speeds: float) -> Problem:
        graph, target = folded.traced.graph, cluster(speeds)
        return Problem(graph=graph, cluster=target, costs=estimate_costs(graph, target),
                       options=PlanOptions(batch=BATCH, optimizer=NONE, dtype="float64"))

    return {"pipeline": one_f_one_b_equal(problem(1, 1), 4), "shares": data_parallel_by_speed(problem(2, 1, 1), 2),
            "split": search_plan(folded, cluster((1, 1)), shape=(2,), optimizer=NONE, name="megatron"),
            "one": single_device(problem(1), 2)}


class _Setup:
    """Plans in files, the reference, and the ranks; as a context manager."""

    def __init__(self, steps: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weft-resume-")
        self.folder = Path(self._folder.name)
        self.plans = make_plans()
        for name, plan in self.plans.items():
            save_plan(plan, self.folder / f"{name}.json")
        self.expected = reference_losses(MODEL, BATCH, steps, max_grad_norm=NORM)
        self.ranks = Ranks(MODEL, BATCH, sizes=SIZES)

    def __enter__(self) -> _Setup:
        self.ranks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.__exit__()
        self._folder.cleanup()

    def job(self, plan: str, folder: str, **options: Any) -> Job:
        return Job(plan=str(self.folder / f"{plan}.json"), folder=str(self.folder / folder), max_grad_norm=NORM, **options)

    def error(self, losses: dict[int, float]) -> float:
        """Return the largest relative difference from the reference over the steps."""
        return max(abs(loss - self.expected[step]) / abs(self.expected[step]) for step, loss in losses.items())


def plans(options: argparse.Namespace) -> Iterator[Row]:
    """Yield one row for training under one plan after the other."""
    order = ("pipeline", "shares", "split", "one", "pipeline")
    with _Setup(2 * len(order)) as setup:
        losses: dict[int, float] = {}
        for number, name in enumerate(order):
            outcome = setup.ranks.train(setup.job(name, "checkpoints", steps=2 * number + 2, every=2))
            assert not any(outcome.codes), (name, outcome.codes)
            losses |= outcome.losses
        error, complete = setup.error(losses), len(losses) == 2 * len(order)
        counts = ", ".join(f"{name} on {len(setup.plans[name].cluster.devices)}" for name in order)
        yield Row(f"{len(losses)} steps under {counts}", f"largest difference of a loss {error:.1e}", f"<= {TOLERANCE:.0e}",
                  complete and error <= TOLERANCE, {"losses": losses, "expected": setup.expected})


def kills(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each kill, and one for all."""
    lost, unreadable, largest = 0, 0, 0.0
    with _Setup(STEPS) as setup:
        names = ("pipeline", "shares", "split")
        points = {name: setup.ranks.train(setup.job(name, f"counted-{name}", steps=STEPS, every=EVERY)).points for name in names}
        for case in range(options.kills):
            chosen = random.Random(case)
            name, after = names[case % 3], names[(case + case // 3) % 3]
            rank = 0 if case % 2 else chosen.randrange(len(points[name]))
            kind = chosen.choice(DISK) if case % 2 else "compute"
            place = chosen.choice([place for place, seen in enumerate(points[name][rank]) if seen == kind])
            folder = f"killed-{case}"
            killed = setup.ranks.train(setup.job(name, folder, steps=STEPS, every=EVERY, kill=(rank, place + 1)))
            found = checkpoints_in(setup.folder / folder)
            latest = read_record(found[-1]).step if found else 0
            is_lost, bad = latest < max(killed.saved, default=0), sum(not _is_readable(path) for path in found)
            again = setup.ranks.train(setup.job(after, folder, steps=STEPS, every=EVERY))
            losses = killed.losses | again.losses
            error = setup.error(losses)
            ok = (killed.codes[rank] == -signal.SIGKILL and not any(again.codes) and not is_lost and not bad
                  and sorted(losses) == list(range(STEPS)) and sorted(again.losses) == list(range(latest, STEPS))
                  and error <= TOLERANCE)
            lost, unreadable, largest = lost + is_lost, unreadable + bad, max(largest, error)
            yield Row(f"{name}, rank {rank} at point {place + 1} ({kind}), resumed as {after}",
                      f"saved {max(killed.saved, default=0)}, resumed at {latest}, difference {error:.1e}",
                      f"all saved, <= {TOLERANCE:.0e}", ok)
    yield Row(f"{options.kills} kills", f"{lost} checkpoints lost, {unreadable} unreadable, largest difference of a loss "
              f"{largest:.1e}", f"0, 0, <= {TOLERANCE:.0e}", not lost and not unreadable and largest <= TOLERANCE)


ACCIDENT = """
import os, pathlib, signal, threading, time

def die():
    while not pathlib.Path("checkpoints/step-00000010").exists():
        time.sleep(0.001)
    pathlib.Path("accident").touch()
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    threading.Thread(target=die, daemon=True).start()
"""
"""Python executes it when it starts."""


def restart(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for the script of the documentation, with and without a kill."""
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    script = page.partition("```python train.py\n")[2].partition("```")[0]
    found = {}
    with tempfile.TemporaryDirectory(prefix="weft-restart-") as name:
        for case in ("undisturbed", "killed"):
            folder = Path(name) / case
            (folder / "site").mkdir(parents=True)
            (folder / "train.py").write_text(script)
            (folder / "site" / "sitecustomize.py").write_text(ACCIDENT if case == "killed" else "")
            paths = os.pathsep.join([str(Path(__file__).parents[1]), str(folder / "site")])
            ended = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
                                    "train.py"], cwd=folder, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                                   timeout=300, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            path = folder / "checkpoints" / "step-00000030" / "model.safetensors"
            found[case] = (ended.returncode, path.read_bytes() if path.exists() else b"", (folder / "accident").exists())
    plain, killed = found["undisturbed"], found["killed"]
    yield Row("docs/training.md under torchrun, rank 1 killed", f"exit code {killed[0]}, killed: {killed[2]}, same parameters: "
              f"{killed[1] == plain[1]}", "0, True, True", killed[0] == plain[0] == 0 and killed[2] and killed[1] == plain[1])


def _is_readable(path: Path) -> bool:
    """Return whether all of a checkpoint is there, as it was written."""
    record = read_record(path)
    for file in sorted(path.glob("*.safetensors")):
        check_file(record, file)
        with TensorFile(file) as tensors:
            for name in tensors.entries:
                tensors.read(name)
    return (path / "model.safetensors").exists() and (path / "optimizer.safetensors").exists()


def main() -> int:
    parser = argparse.ArgumentParser(description="Checkpoints under several plans, and killed ranks, against one process.")
    parser.add_argument("--only", action="append", choices=SECTIONS)
    parser.add_argument("--kills", type=int, default=20, help="random points (default 20)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    return run_sections(dict.fromkeys(SECTIONS, "bench_resume"), args, only=args.only, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
