"""Checkpoints are ordinary files, outlive their plan, and are never lost when a rank is killed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.resume_ranks import Job, Ranks, reference_losses
from tests.run.plans import MODELS, pipeline_plan, replicated_plan, source_of, traced
from tests.run.sharded_plans import sharded_plan, sharding_of
from tests.run.unit_plans import unit_plan
from weft.base.errors import InputError
from weft.base.tensor_file import Entry
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Optimizer, Storage, save_plan
from weft.run.checkpoint_folder import (
    RECORD_FILE,
    CheckpointRecord,
    NewCheckpoint,
    TensorFile,
    TensorWriter,
    checkpoints_in,
    latest_checkpoint,
    read_record,
)

pytestmark = pytest.mark.timeout(120)
MODEL, BATCH, NORM = "tied_gpt", 8, 0.5
TOLERANCE = 1e-10
SPLIT = {r".*\.up\.linear": "n", r".*\.gelu": "d2", r".*\.down\.linear": "k", r"words\.embedding": "vocab",
         r"head\.linear": "n"}


# ---- under one plan and another -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(f"{MODELS}:{MODEL}", BATCH, sizes=(1, 2)) as running:
        yield running


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, str]:
    """Files of plans for two, three and three ranks; the last holds parts of parameters, uneven ones."""
    graph, folder = traced(MODEL).graph, tmp_path_factory.mktemp("plans")
    found = {
        "pipeline": pipeline_plan(graph, [0, 1], one_f_one_b(2, 4), microbatches=4),
        "uneven shares": replicated_plan(graph, [[(0, 0.5), (1, 0.25), (2, 0.25)]], microbatches=2, batch=BATCH, num_devices=3),
        "split tensors": sharded_plan(MODEL, {"tensor": 3}, sharding_of(MODEL, (3,), [SPLIT]), microbatches=4, num_devices=3)}
    shares = [[(0, 0.5), (1, 0.25), (2, 0.25)]]
    found["fsdp"] = unit_plan(graph, shares, num_units=3, batch=BATCH, num_devices=3)
    found["zero-2"] = unit_plan(graph, shares, Storage(pieces="gradients"), num_units=2, batch=BATCH, num_devices=3)
    found["divided states"] = replace(found["uneven shares"], optimizer=Optimizer(sharded=True))
    for name, plan in found.items():
        save_plan(plan, folder / f"{name}.json")
    return {name: str(folder / f"{name}.json") for name in found}


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference_losses(f"{MODELS}:{MODEL}", BATCH, 10, max_grad_norm=NORM)


def test_training_goes_on_under_other_plans(ranks, plans, expected, tmp_path):
    losses = {}
    for steps, name in ((2, "pipeline"), (4, "uneven shares"), (5, "divided states"), (6, "split tensors"),
                        (7, "fsdp"), (8, "zero-2"), (9, "pipeline")):
        outcome = ranks.train(Job(plan=plans[name], folder=str(tmp_path), steps=steps, max_grad_norm=NORM))
        assert not any(outcome.codes), outcome
        losses |= outcome.losses
    assert list(losses) == list(range(9)), "every step was taken once"
    assert list(losses.values()) == pytest.approx(expected[:9], rel=TOLERANCE)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000008", "step-00000009"]
    module = source_of(MODEL).build()
    for step in (8, 9):  # written under pieces and under wholes
        module.load_state_dict(load_file(tmp_path / f"step-0000000{step}" / "model.safetensors"))
        assert module(*source_of(MODEL).inputs(BATCH, step)).item() == pytest.approx(expected[step], rel=TOLERANCE)
        state = load_file(tmp_path / f"step-0000000{step}" / "optimizer.safetensors")
        assert state["blocks.0.up.weight.exp_avg"].shape == module.blocks[0].up.weight.shape
        assert state["words.weight.step"] == step


def test_a_rank_killed_while_it_writes_loses_no_checkpoint(ranks, plans, expected, tmp_path):
    """Rank 0 dies somewhere in the second checkpoint; ``benchmarks.bench_resume`` has many more such kills."""
    counted = ranks.train(Job(plan=plans["pipeline"], folder=str(tmp_path / "counted"), steps=2, max_grad_norm=NORM))
    places = [number for number, kind in enumerate(counted.points[0]) if kind == "write"]
    chosen = random.Random(0).choice(places[len(places) // 2 + 1 :])
    folder = tmp_path / "killed"
    outcome = ranks.train(Job(plan=plans["pipeline"], folder=str(folder), steps=3, kill=(0, chosen + 1), max_grad_norm=NORM))
    assert outcome.codes[0] == -signal.SIGKILL
    assert outcome.saved == [1]
    assert [path.name[:-9] for path in folder.iterdir() if path.name.startswith(".")] == [".writing-step-00000002"]
    latest = latest_checkpoint(folder)
    assert latest is not None
    assert read_record(latest).step == 1
    again = ranks.train(Job(plan=plans["pipeline"], folder=str(folder), steps=3, max_grad_norm=NORM))
    assert not any(again.codes), again
    assert list((outcome.losses | again.losses).values()) == pytest.approx(expected[:3], rel=TOLERANCE)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "what was left behind is removed"


# ---- the folder -----------------------------------------------------------------------------------------------------


def write(folder: Path, step: int, keep: int | None = 2) -> None:
    new = NewCheckpoint(folder, step)
    new.write_record(CheckpointRecord(step=step, model="m", plan="p", extra={"epoch": step}))
    new.finish(keep)


def test_the_latest_complete_checkpoint_counts(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (1, 2, 100_000_000):
        write(tmp_path, step)
    left = tmp_path / ".writing-step-100000001-abc"
    left.mkdir()
    (left / RECORD_FILE).write_text("{")
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert read_record(latest).extra == {"epoch": 100_000_000}
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000002", "step-100000000"]
    write(tmp_path, 100_000_002, keep=None)
    assert len(os.listdir(tmp_path)) == 3, "the unfinished one is gone"


def test_what_another_run_is_writing_is_left_to_it(tmp_path):
    first, second = NewCheckpoint(tmp_path, 3), NewCheckpoint(tmp_path, 3)
    for new in (first, second):
        new.write_record(CheckpointRecord(step=3, model="m", plan="p"))
    first.finish(2)
    with pytest.raises(InputError, match=r"another run has written .*step-00000003' meanwhile: give each run a folder"):
        second.finish(2)
    second.drop()
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_a_folder_of_another_run_is_refused(tmp_path):
    write(tmp_path, 7)
    with pytest.raises(InputError, match="has step-00000007 already, and this is step-00000005: resume from it"):
        NewCheckpoint(tmp_path, 5)


# ---- files of tensors -----------------------------------------------------------------------------------------------

TENSORS = {"a": torch.arange(6, dtype=torch.float64).view(2, 3), "b": torch.tensor([True, False]), "c": torch.tensor(3),
           "d": torch.randn(4, 5).bfloat16(), "e": torch.empty(0, 2)}
DTYPES = {"a": "F64", "b": "BOOL", "c": "I64", "d": "BF16", "e": "F32"}


def written(path: Path) -> Path:
    writer = TensorWriter(path, {name: Entry(dtype=DTYPES[name], shape=tuple(item.shape)) for name, item in TENSORS.items()})
    for name in writer.names:
        writer.write(TENSORS[name])
    writer.close()
    return path


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path):
    found = load_file(written(tmp_path / "ours"))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], item) and found[name].dtype == item.dtype for name, item in TENSORS.items())
    save_file(TENSORS, tmp_path / "theirs")
    with TensorFile(tmp_path / "theirs") as file:
        assert all(torch.equal(file.read(name), item) for name, item in TENSORS.items())
        part = file.read("a", (((0, 2),), ((0, 1), (2, 3))))
    assert part.tolist() == [[0.0, 2.0], [3.0, 5.0]]


def header(path: Path) -> tuple[dict[str, object], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.mark.parametrize(("damage", "message"), [
    (lambda head, body: (head, body[:-1]), "'.' in the file .* has the bytes"),
    (lambda head, body: (head, body + b"1"), "1 bytes that belong to no tensor"),
    (lambda head, body: ({**head, "a": {**head["a"], "dtype": ["F64"]}}, body), r"has the dtype \['F64'\]: known are"),
    (lambda head, body: ({**head, "a": {**head["a"], "shape": [-2, -3]}}, body), "must be a list of counts"),
    (lambda head, body: ({**head, "a": {**head["a"], "data_offsets": "all"}}, body), "has the bytes 'all'"),
    (lambda head, body: ({**head, "a": {"dtype": "F64"}}, body), "must have exactly the fields"),
    (lambda head, body: ([], body), "not a JSON object"),
])
def test_damaged_files_are_refused(tmp_path, damage, message):
    head, body = damage(*header(written(tmp_path / "file")))
    text = json.dumps(head).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + body)
    with pytest.raises(InputError, match=message):
        TensorFile(tmp_path / "file")


def test_files_that_are_cut_short_or_absent_are_refused(tmp_path):
    path = written(tmp_path / "file")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(InputError, match="ends within its header"):
        TensorFile(path)
    with pytest.raises(InputError, match="every rank must see the folder"):
        TensorFile(tmp_path / "none")
