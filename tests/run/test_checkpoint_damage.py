"""No damaged checkpoint is loaded without a word: flipped bits, lost bytes, swapped blocks, edited headers."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import weft
from weft.base.errors import InputError
from weft.run.checkpoint_folder import CHUNK_BYTES, MODEL_FILE, OPTIMIZER_FILE, RECORD_FILE, checksum_of
from weft.run.optimizers import may_become

pytestmark = pytest.mark.timeout(120)
FILES = (MODEL_FILE, OPTIMIZER_FILE, RECORD_FILE)


class Net(nn.Module):
    """Parameters in float64, statistics, and whole numbers beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.last(self.norm(self.first(x))), y)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(6, size, generator=generator, dtype=torch.float64) for size in (3, 2))


@pytest.fixture
def trainer(monkeypatch) -> Iterator[weft.Trainer]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with weft.parallelize(Net().double(), batch(0), "1 x cpu", optimizer=lambda ps: torch.optim.Adam(ps, lr=0.1)) as made:
        made.step(batch(0))
        yield made
    assert not dist.is_initialized()


# ---- corruptions ----------------------------------------------------------------------------------------------------


def flip_bit(data: bytearray, draw: random.Random) -> bytes:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def cut_short(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.randrange(len(data))])


def swap_blocks(data: bytearray, draw: random.Random) -> bytes:
    size = draw.choice((1, 4, 8, 64))
    one, other = (draw.randrange(0, len(data) - size) for _ in range(2))
    parts = data[one : one + size], data[other : other + size]
    data[one : one + size], data[other : other + size] = parts[1], parts[0]
    return bytes(data)


def edit_header(data: bytearray, draw: random.Random) -> bytes:
    """Give a tensor of a file another dtype of the same size, another name, or another's place; or edit the record."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data):
        return bytes(data).replace(b'"step": 1', b'"step": 2', 1)
    header = json.loads(data[8 : 8 + length])
    name, other = draw.sample([item for item in header if item != "__metadata__"], 2)
    match draw.randrange(3):
        case 0:
            header[name]["dtype"] = {"F64": "I64", "F32": "I32", "I64": "F64"}[header[name]["dtype"]]
        case 1:
            header[f"{name}x"] = header.pop(name)
        case _:
            header[name], header[other] = header[other], header[name]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data[8 + length :])


CORRUPTIONS: tuple[Callable[[bytearray, random.Random], bytes], ...] = (flip_bit, cut_short, swap_blocks, edit_header)


def silent_loads(trainer: weft.Trainer, folder: Path, number: int, *, seed: int) -> list[str]:
    """Return which of so many corruptions of a checkpoint were loaded with other values than were written."""
    path, draw, silent = trainer.save_checkpoint(folder / "good"), random.Random(seed), []
    for index in range(number):
        damaged = folder / f"damaged-{index}"
        shutil.copytree(path, damaged)
        name, corrupt = draw.choice(FILES), CORRUPTIONS[index % len(CORRUPTIONS)]
        before = (path / name).read_bytes()
        after = corrupt(bytearray(before), draw)
        (damaged / name).write_bytes(after)
        is_same = after == before or (name == RECORD_FILE and _json(after) == _json(before))
        state = trainer.state_dict()
        try:
            trainer.load_checkpoint(damaged)
        except InputError:
            assert not is_same, f"{corrupt.__name__} {index} changed nothing"
            assert all(torch.equal(value, state[key]) for key, value in trainer.state_dict().items()), "all or nothing"
        else:
            silent += [] if is_same else [f"{corrupt.__name__} {index} of {name}"]
        shutil.rmtree(damaged)
    return silent


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return data


def test_a_flipped_bit_was_loaded(trainer, tmp_path):
    """``python -m tests.run.test_checkpoint_damage 2000`` does as many."""
    assert silent_loads(trainer, tmp_path, 60, seed=0) == []


class Spectrum(nn.Module):
    """A complex parameter and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mix = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.register_buffer("turn", torch.randn(2, dtype=torch.complex64).conj())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = (x.to(torch.complex64) @ self.mix) * self.turn
        return functional.mse_loss(z.real + z.imag, y)


def test_gradients_of_complex_parameters_are_clipped_and_their_checkpoints_loaded(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    plain, examples = Spectrum(), [tuple(item.float() for item in batch(seed)) for seed in range(3)]
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    with weft.parallelize(Spectrum(), examples[0], "1 x cpu", optimizer=lambda ps: torch.optim.Adam(ps, lr=0.1),
                          max_grad_norm=0.5) as made:
        for example in examples[:2]:
            loss = plain(*example)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            assert made.step(example) == pytest.approx(loss.item(), rel=1e-5)
            assert made.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
        path = made.save_checkpoint(tmp_path)
        expected = made.step(examples[2])
        made.load_checkpoint(path)
        assert made.step(examples[2]) == expected
        assert torch.equal(load_file(path / MODEL_FILE)["turn"], plain.turn.resolve_conj())


# ---- what is said ---------------------------------------------------------------------------------------------------


def relabel(path: Path, name: str, dtype: str) -> None:
    """Let the file's header say that a tensor has another dtype."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def make_old(path: Path, **changes: object) -> None:
    """Take the checksums away, as a checkpoint of before has none."""
    record = json.loads((path / RECORD_FILE).read_text())
    for field in ("checksums", "checksum"):
        record.pop(field, None)
    (path / RECORD_FILE).write_text(json.dumps({**record, **changes}))


def test_a_damaged_file_is_named_with_what_to_try(trainer, tmp_path):
    path = trainer.save_checkpoint(tmp_path)
    whole = (path / MODEL_FILE).read_bytes()
    (path / MODEL_FILE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 16]))
    with pytest.raises(InputError, match=r"model.safetensors' is damaged: its checksum is crc32:.* use an earlier checkpoint"):
        trainer.load_checkpoint(path)
    (path / MODEL_FILE).write_bytes(whole)
    text = (path / RECORD_FILE).read_text()
    (path / RECORD_FILE).write_text(text.replace('"lr": 0.1', '"lr": 0.9'))
    with pytest.raises(InputError, match=r"checkpoint.json' is damaged"):
        trainer.load_checkpoint(path)
    (path / RECORD_FILE).write_text(text.replace('"checksum"', '"checksun"'))
    with pytest.raises(InputError, match="checksun"):
        trainer.load_checkpoint(path)
    (path / RECORD_FILE).write_text(text)
    assert trainer.load_checkpoint(path).step == 1


@pytest.mark.parametrize(("file", "name", "dtype", "message"), [
    (MODEL_FILE, "last.weight", "I64", r"'last.weight' is int64 in .* but float64 here: whole numbers are not turned into floating"),
    (MODEL_FILE, "norm.num_batches_tracked", "F64", r"'norm.num_batches_tracked' is float64 in .* but int64 here"),
    (MODEL_FILE, "norm.running_mean", "C64", r"'norm.running_mean' is complex64 in .* but float64 here"),
    (OPTIMIZER_FILE, "last.weight.exp_avg", "I64", r"the optimizer's 'last.weight.exp_avg' is int64 .*optimizer=False"),
    (OPTIMIZER_FILE, "last.weight.step", "I32", r"the optimizer's 'last.weight.step' is int32 .* but float32 here"),
])
def test_a_number_of_one_kind_became_one_of_another(trainer, tmp_path, file, name, dtype, message):
    """In a checkpoint without checksums, which would say it first."""
    path = trainer.save_checkpoint(tmp_path)
    relabel(path / file, name, dtype)
    make_old(path)
    before = trainer.state_dict()
    with pytest.raises(InputError, match=message):
        trainer.load_checkpoint(path)
    assert all(torch.equal(value, before[key]) for key, value in trainer.state_dict().items())


def test_state_that_the_optimizer_cannot_use_changes_nothing(trainer, tmp_path):
    """Again without checksums: Adam misses the number of steps, or its options are nonsense."""
    path = trainer.save_checkpoint(tmp_path)
    trainer.step(batch(1))
    before, step = trainer.state_dict(), trainer.optimizer.state[trainer.optimizer.param_groups[0]["params"][0]]["step"].item()
    data = (path / OPTIMIZER_FILE).read_bytes()
    (path / OPTIMIZER_FILE).write_bytes(data.replace(b'"last.weight.step"', b'"last.weight.stap"'))
    make_old(path)
    with pytest.raises(InputError, match=r"Adam cannot take over its state .*'step'.*optimizer=False"):
        trainer.load_checkpoint(path)
    assert all(torch.equal(value, before[key]) for key, value in trainer.state_dict().items())
    assert trainer.optimizer.state[trainer.optimizer.param_groups[0]["params"][0]]["step"].item() == step == 2


def test_state_without_what_other_parameters_have_is_refused(trainer, tmp_path):
    """It was loaded, and PyTorch's Adam ended the next step with KeyError."""
    path = trainer.save_checkpoint(tmp_path)
    data = (path / OPTIMIZER_FILE).read_bytes()
    (path / OPTIMIZER_FILE).write_bytes(data.replace(b'"last.weight.exp_avg_sq"', b'"last.weight.exp_avg_qs"'))
    make_old(path)
    with pytest.raises(InputError, match=r"Adam cannot take over its state .* no 'exp_avg_sq' of 'last.weight'.*optimizer=False"):
        trainer.load_checkpoint(path)
    trainer.step(batch(1))


def test_state_of_another_shape_is_refused(trainer, tmp_path):
    """It was loaded, and the next step read beyond the end of a tensor."""
    path = trainer.save_checkpoint(tmp_path)
    tensors = load_file(path / OPTIMIZER_FILE)
    save_file({**tensors, "last.weight.exp_avg": torch.zeros(3, dtype=torch.float64)}, path / OPTIMIZER_FILE)
    make_old(path)
    with pytest.raises(InputError, match=r"Adam cannot take over .* 'exp_avg' of 'last.weight' in the shape \[3\], not \[2, 4\]"):
        trainer.load_checkpoint(path)
    trainer.step(batch(1))


def test_options_whose_parts_are_of_another_kind_are_refused(trainer, tmp_path):
    path = trainer.save_checkpoint(tmp_path)
    groups = json.loads((path / RECORD_FILE).read_text())["groups"]
    make_old(path, groups=[{**groups[0], "betas": [0.9, {"a": 1}]}])
    with pytest.raises(InputError, match=r"groups\[0\].betas is .*, where Adam has \(0.9, 0.999\): it is damaged"):
        trainer.load_checkpoint(path)
    trainer.step(batch(1))


class Noisy(Net):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(functional.dropout(self.last(self.first(x)), 0.5), y)


def test_a_state_of_random_numbers_that_is_none_changes_nothing(monkeypatch, tmp_path):
    """The model was loaded before PyTorch refused the state with RuntimeError."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with weft.parallelize(Noisy().double(), batch(0), "1 x cpu") as made:
        path = made.save_checkpoint(tmp_path)
        made.step(batch(0))
        before = made.state_dict()
        data = bytearray((path / "random.safetensors").read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(len(data) - start)
        (path / "random.safetensors").write_bytes(data)
        make_old(path)
        with pytest.raises(InputError, match=r"state of random numbers 'rank0.alone' that cannot be used"):
            made.load_checkpoint(path)
        assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())


def test_a_state_dict_of_another_kind_is_refused(trainer):
    state = {name: value.clone() for name, value in trainer.state_dict().items()}
    trainer.load_state_dict({name: value.float() if value.is_floating_point() else value for name, value in state.items()})
    with pytest.raises(InputError, match=r"'first.bias' is int64 in the state dict but float64 here"):
        trainer.load_state_dict({**state, "first.bias": state["first.bias"].long()})


def test_checkpoints_of_before_load_with_a_note(trainer, tmp_path, caplog):
    path = trainer.save_checkpoint(tmp_path)
    make_old(path)
    with caplog.at_level(logging.WARNING):
        assert trainer.load_checkpoint(path).step == 1
    assert "was written before checkpoints had checksums" in caplog.text
    caplog.clear()
    make_old(path, checksums={MODEL_FILE: "crc32:0:0"})
    with pytest.raises(InputError, match="has checksums of other files but none of its own"):
        trainer.load_checkpoint(path)


def test_which_dtypes_may_become_which():
    assert may_become(torch.float64, torch.bfloat16)
    assert may_become(torch.int32, torch.int64)
    assert not may_become(torch.int64, torch.int32)
    assert not may_become(torch.uint8, torch.int8)
    assert not may_become(torch.bool, torch.uint8)
    assert not may_become(torch.complex64, torch.float64)


def test_a_checksum_is_that_of_all_bytes_however_they_come():
    data = bytes(random.Random(0).randbytes(CHUNK_BYTES + 5))
    assert checksum_of(data) == f"crc32:{zlib.crc32(data):08x}:{len(data)}"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place, weft.parallelize(
            Net().double(), batch(0), "1 x cpu", optimizer=lambda ps: torch.optim.Adam(ps, lr=0.1)) as made:
        made.step(batch(0))
        found = silent_loads(made, Path(place), int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
        print(f"{len(found)} of {sys.argv[1]} damaged checkpoints were loaded without a word: {found[:5]}")


@pytest.mark.parametrize("name", FILES)
def test_pipes_and_devices_are_no_files_of_a_checkpoint(trainer, tmp_path, name):
    saved = trainer.save_checkpoint(tmp_path / "saved")
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(InputError, match=f"{name}' is a pipe or a device, not a file"):
        trainer.load_checkpoint(saved)
    (saved / name).unlink()
    (saved / name).symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is a pipe or a device, not a file"):
        trainer.load_checkpoint(saved)


@pytest.mark.parametrize("extra", [[1, 2], "text", {"big": 2**70}, {"text": "x" * 200_000}], ids=type)
def test_what_could_not_be_read_again_is_not_written(trainer, tmp_path, extra):
    with pytest.raises(InputError, match=r"the checkpoint could not be read again: .* simpler, into extra"):
        trainer.save_checkpoint(tmp_path / "saved", extra=extra)
    assert not (tmp_path / "saved").exists()
    trainer.save_checkpoint(tmp_path / "saved", extra={"epoch": 3})
    assert trainer.load_checkpoint(tmp_path / "saved").extra == {"epoch": 3}


def test_arguments_of_checkpoints_that_make_no_sense_are_refused(trainer, tmp_path):
    with pytest.raises(InputError, match=r"cannot look for checkpoints in .*: File name too long"):
        trainer.resume(tmp_path / ("x" * 300))
    for keep in ("2", 1.5, 0):
        with pytest.raises(InputError, match="keep must be a whole number, 1 or more, or None"):
            trainer.save_checkpoint(tmp_path / "saved", keep=keep)
    with pytest.raises(InputError, match=r"the checkpoint cannot be written to 'a.x00b': embedded null byte"):
        trainer.save_checkpoint("a\0b")
    with pytest.raises(InputError, match="the state dict is of the kind list: give a dictionary"):
        trainer.load_state_dict([1])
    state = trainer.state_dict()
    for value, why in (("text", "str"), (state["last.bias"].to("meta"), "on the meta device")):
        with pytest.raises(InputError, match=f"'last.bias' in the state dict is not a tensor with values: .*{why}"):
            trainer.load_state_dict({**state, "last.bias": value})
