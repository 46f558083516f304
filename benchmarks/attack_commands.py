"""Mutants that whole commands read, and files that are sealed again after the change so that checksums do not stop it."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attack_common import LIMIT_S, call, sibling

PLAN_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("check", "FILE"), ("simulate", "FILE", "--json", "-o", "OUT.json"), ("simulate", "FILE", "--profile", "@store.db"),
    ("show", "FILE", "--html", "OUT.html", "--trace", "OUT.json.gz"), ("show", "FILE", "--timeline", "@timeline.json", "--width", "60"),
    ("diff", "FILE", "@plan.json"), ("diff", "@plan.json", "FILE", "--json"), ("explain", "FILE", "--time-limit", LIMIT_S, "-q"),
    ("explain", "FILE", "--replan", "--time-limit", LIMIT_S, "-q", "--json"), ("export", "FILE", "-q"),
    ("export", "FILE", "--format", "torchtitan", "-o", "OUT.toml", "-q"), ("export", "FILE", "--format", "vllm", "--nearest", "-q"),
    ("export", "FILE", "--format", "llama-cpp", "--nearest", "-q"), ("import-order", "FILE", "@order.csv", "-o", "OUT.json", "-q"))
CLUSTER_COMMANDS: tuple[tuple[str, ...], ...] = tuple(
    (name, "@traced.json", "FILE", "--time-limit", LIMIT_S, "-q", *more) for name, *more in
    (("fit",), ("fit", "--json"), ("plan", "--json"), ("plan", "-o", "OUT.json", "--html", "OUT.html"), ("deploy", "--json"), ("explain",),
     ("place", "--json")))
STORE_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("simulate", "@plan.json", "--model", "@traced.json", "--profile", "FILE"),
    ("explain", "@plan.json", "--model", "@traced.json", "--profile", "FILE", "--time-limit", LIMIT_S, "-q"),
    ("fit", "@traced.json", "2 x A100-80GB", "--profile", "FILE", "--time-limit", LIMIT_S, "-q"),
    ("place", "@traced.json", "2 x A100-80GB", "--profile", "FILE", "--time-limit", LIMIT_S, "-q"))
TRAINED = "step-00000001"


def _run(path: Path, command: Sequence[str], *more: str) -> None:
    """Run a command; FILE is the mutant, names after @ are clean files, OUT is beside the mutant."""
    def place(text: str) -> str:
        if text == "FILE":
            return str(path)
        if text.startswith("OUT"):
            return str(path.parent / f"out{text[3:]}")
        return str(sibling(path, text[1:])) if text.startswith("@") else text
    call(*map(place, (*command, *more)))


def _chosen(path: Path, commands: Sequence[Sequence[str]]) -> Sequence[str]:
    """Return one of the commands, by what is in the file; the first for the clean file."""
    if path.read_bytes() == sibling(path, path.name).read_bytes():
        return commands[0]
    return commands[zlib.crc32(path.read_bytes()) % len(commands)]


def read_plan_by_commands(path: Path, use: bool) -> None:
    """Check, predict, show, compare, explain or export a plan, or plan again for one of its devices."""
    from weft.plan.plan import load_plan
    from weft.training.parallelize import cluster_of, devices_left

    plan = load_plan(path)
    devices_left(cluster_of(plan), plan.cluster.devices[:1])
    _run(path, _chosen(path, PLAN_COMMANDS), "--model", "@traced.json")


def read_cluster_by_commands(path: Path, use: bool) -> None:
    """Plan, deploy, place or explain on a cluster, or ask what fits there."""
    _run(path, _chosen(path, CLUSTER_COMMANDS))


def read_store_by_commands(path: Path, use: bool) -> None:
    """Predict with the times of a profile store."""
    _run(path, _chosen(path, STORE_COMMANDS))


def read_weights_by_commands(path: Path, use: bool) -> None:
    """Search a deployment with a network's weights."""
    _run(path, ("deploy", "@traced.json", "@cluster.json", "--weights", "FILE", "--time-limit", LIMIT_S, "-q", "--json"))


def read_texts(path: Path, use: bool) -> None:
    """Run the command that the file spells, or find the model of the zoo that it names."""
    from weft.model.zoo import find_model

    arguments = json.loads(path.read_bytes())
    if arguments[:1] == ["model"]:
        find_model(arguments[1])
    elif arguments:
        _run(path, arguments)


def read_training(path: Path, use: bool) -> None:
    """Go on with a training that is done."""
    from benchmarks.policy_training.train import TrainOptions, train_policy

    folder = path.parent / "training"
    shutil.copytree(sibling(path, "training"), folder)
    shutil.copy(path, folder / path.name)
    train_policy(path.parent / "policy.safetensors", folder, TrainOptions(rounds=1, cases=1, epochs=1))


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def make_model() -> Any:
    """Return a small model that draws random numbers and has buffers; its forward gives the loss."""
    import torch

    class Model(torch.nn.Module):
        """Two linear layers, and what lies between them."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the loss."""
            return self.two(torch.nn.functional.dropout(self.norm(self.one(x)), 0.1)).square().mean()

    torch.manual_seed(0)
    return Model()


@functools.cache
def make_trainer() -> Any:
    """Return a trainer of one rank, with an optimizer's state and random numbers."""
    import torch

    import weft

    trainer = weft.parallelize(make_model(), torch.randn(4, 4), "1 x A100-80GB", device="cpu")
    trainer.step(torch.randn(4, 4))
    return trainer


def read_sealed_state(path: Path, use: bool) -> None:
    """Load a checkpoint whose checksums are those of the changed files, or which has none, as those of before had."""
    folder = path.parent / TRAINED
    shutil.copytree(sibling(path, "state"), folder)
    shutil.copy(path, folder / path.name)
    _seal(folder, path.name, with_checksums=zlib.crc32(path.read_bytes()) % 3 > 0)
    trainer = make_trainer()
    try:
        trainer.load_checkpoint(folder)
        if use:
            import torch

            trainer.step(torch.zeros(4, 4))
    finally:
        trainer.load_checkpoint(sibling(path, "checkpoint"))


def _seal(folder: Path, changed: str, *, with_checksums: bool) -> None:
    from weft.run.checkpoint_folder import checksum_of, record_checksum

    file = folder / "checkpoint.json"
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        value = json.loads(file.read_bytes())
        if not isinstance(value, dict):
            return
        value.pop("checksum", None)
        if not with_checksums:
            value.pop("checksums", None)
        elif changed != file.name:
            value["checksums"][changed] = checksum_of((folder / changed).read_bytes())
        if with_checksums:
            value["checksum"] = record_checksum(value)
        file.write_text(json.dumps(value))
