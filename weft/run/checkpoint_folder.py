"""A folder of checkpoints: which are complete, which is the latest, and how a new one comes in.

    checkpoints/step-00000020/   model.safetensors  optimizer.safetensors  checkpoint.json
    checkpoints/step-00000030/

A checkpoint is written under a name that begins with a dot and renamed when all of it is on the disk; an old one is
renamed before it is deleted. So whatever is named ``step-...`` is whole, at any moment at which a process may be
killed, and what a killed process has left behind is removed when the next checkpoint is written. Names under which
something is written are the writer's own, and it holds a lock there while it lives: two runs in one folder do not
touch each other's files, and the second to write a step is refused.

``checkpoint.json`` has a checksum for each file and one for itself; older checkpoints, which have none, are read as
well. It is CRC-32, which the standard library has in C: it sees every flipped bit and all damage within 32 bits, and
misses other damage once in four thousand million times; the file's size is beside it. It is taken while the file is
written, so that nothing is read twice, and compared when the checkpoint is loaded.

Tensors are in safetensors files, which ``weft.base.tensor_file`` reads and lays out as bytes. They are written one
tensor after the other, so that the writer needs memory for one; a reader maps the file and copies out only the entries
it is asked for, so that a rank reads its parts and no more.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from weft.base import tensor_file
from weft.base.errors import InputError
from weft.base.files import check_header, decode, encode, load_json, make_folder, parse_json, remove_empty
from weft.base.scratch import take_lock
from weft.base.tensor_file import Entry, file_begin, file_order
from weft.plan.sharding import Region
from weft.run.parameters import cut_region

CHUNK_BYTES: Final = 1 << 24
"""So much of a file is read at once."""


def _checksum(crc: int, num_bytes: int) -> str:
    return f"crc32:{crc:08x}:{num_bytes}"


def checksum_of(data: bytes | memoryview) -> str:
    """Return the checksum of some bytes, with their number."""
    return _checksum(zlib.crc32(data), len(data))


def record_checksum(record: Mapping[str, Any]) -> str:
    """Return the checksum of what a JSON object says beside its checksum, however it is spaced or ordered."""
    fields = {key: item for key, item in record.items() if key != "checksum"}
    return checksum_of(json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


FORMAT: Final = "weft.checkpoint"
VERSION: Final = 1
MODEL_FILE: Final = "model.safetensors"
OPTIMIZER_FILE: Final = "optimizer.safetensors"
RANDOM_FILE: Final = "random.safetensors"
RECORD_FILE: Final = "checkpoint.json"
_NAME: Final = re.compile(r"step-([0-9]{8,})")
_WRITING: Final = ".writing-"
_REMOVING: Final = ".removing-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """What is known about a checkpoint beside its tensors."""

    step: int
    """So many training steps were taken."""
    model: str
    plan: str
    """Digest of the plan under which it was written: only with the same plan random numbers go on as they would have.
    """
    optimizer: str | None = None
    """The optimizer's class; None where there was none."""
    groups: tuple[Mapping[str, Any], ...] = ()
    """Options of the optimizer's parameter groups, such as the learning rate."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """State of the optimizer that is not a tensor, as ``parameter.key``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the training script has put in."""
    tensors: Mapping[str, int] = field(default_factory=dict)
    """How many tensors each file has; empty in older checkpoints, which do not say."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Of each file, see ``weft.run.checkpoint_folder``."""
    checksum: str = ""
    """Of everything else in the record; empty in older checkpoints, which have no checksums."""

    @property
    def is_checked(self) -> bool:
        """Return whether it has checksums."""
        return bool(self.checksum)


def read_record(path: Path) -> CheckpointRecord:
    """Return what a checkpoint says about itself; raise ``InputError`` if it is damaged."""
    file = path / RECORD_FILE
    _require_file(file)
    value = load_json(file)
    record = _decoded(value, where=str(file))
    if record.checksum and record.checksum != record_checksum(value):
        raise _damaged(file, record.checksum, record_checksum(value))
    if not record.checksum and record.checksums:
        raise InputError(f"{str(file)!r} has checksums of other files but none of its own: it is damaged. "
                         "Use an earlier checkpoint")
    return record


def _decoded(value: Any, *, where: str) -> CheckpointRecord:
    body = check_header(value, format_name=FORMAT, version=VERSION, where=where, error=InputError)
    return decode(CheckpointRecord, body, where=where)


def _require_file(path: Path) -> None:
    """Raise ``InputError`` for a pipe or a device, which could be waited for or read for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{str(path)!r} is a pipe or a device, not a file: use an earlier checkpoint")


def check_file(record: CheckpointRecord, path: Path) -> None:
    """Raise ``InputError`` if a file that is there is not what was written, as far as the record can tell."""
    _require_file(path)
    if not record.is_checked:
        return
    crc = num_bytes = 0
    try:
        with open(path, "rb", buffering=0) as stream:
            while data := stream.read(CHUNK_BYTES):
                crc, num_bytes = zlib.crc32(data, crc), num_bytes + len(data)
    except FileNotFoundError:
        return  # whether it must be there is for ``check_tensors``
    except OSError as problem:
        raise InputError(f"cannot read {str(path)!r}: {problem}. Use an earlier checkpoint") from problem
    wanted, found = record.checksums.get(path.name, "none"), _checksum(crc, num_bytes)
    if found != wanted:
        raise _damaged(path, wanted, found)


def _damaged(path: Path, wanted: str, found: str) -> InputError:
    return InputError(f"{str(path)!r} is damaged: its checksum is {found}, and {wanted} when it was written. Nothing "
                      "was loaded; use an earlier checkpoint, or another copy of this one")


def format_record(record: CheckpointRecord) -> str:
    """Return the record as its file has it, with its checksum; raise if JSON cannot say what is in it."""
    value = {"format": FORMAT, "version": VERSION, **encode(record)}
    value = json.loads(json.dumps(value, allow_nan=False))  # what will be read: keys that are numbers become text
    text = json.dumps({**value, "checksum": record_checksum(value)}, indent=1)
    try:
        where = "what would be its record"
        _decoded(parse_json(text, where=where), where=where)
    except InputError as problem:
        raise InputError(f"the checkpoint could not be read again: {problem}. Put less, or something simpler, into "
                         "extra: an object with keys that are text") from problem
    return text


def check_tensors(record: CheckpointRecord, path: Path, number: int) -> None:
    """Raise ``InputError`` unless a file has as many tensors as the checkpoint had when it was written."""
    wanted = record.tensors.get(path.name, 0) if record.tensors else number
    if wanted != number:
        raise InputError(f"{str(path)!r} has {number} tensors where {wanted} were written: part of the checkpoint is "
                         "lost. Use an earlier one, or load with optimizer=False if only the optimizer's file is gone")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, by step; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint with the most steps in a folder, or None.

    Nothing else has to be looked at: a checkpoint gets its name when it is whole.
    """
    found = checkpoints_in(Path(folder))
    return found[-1] if found else None


class NewCheckpoint:
    """A checkpoint that is being written: put files into ``path``, then call ``finish``."""

    def __init__(self, folder: Path, step: int) -> None:
        """Make the folder, and remove what was not finished there; raise ``InputError`` if it has later checkpoints."""
        self.folder, self.final = folder, folder / f"step-{step:08d}"
        self._made = make_folder(folder)
        later = [path.name for path in checkpoints_in(folder) if _step_of(path) >= step]
        if later:
            raise InputError(f"{str(folder)!r} has {later[-1]} already, and this is {self.final.name}: resume from it, "
                             "or use another folder")
        for left in folder.iterdir():
            if left.name.startswith((_WRITING, _REMOVING)) and _is_abandoned(left):
                shutil.rmtree(left, ignore_errors=True)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_WRITING}{self.final.name}-", dir=folder))
        except OSError:
            remove_empty(self._made)
            raise
        self.path.chmod(0o755)
        self._lock = take_lock(self.path)

    def write_record(self, record: CheckpointRecord) -> None:
        """Write what is known beside the tensors."""
        text = format_record(record)
        with open(self.path / RECORD_FILE, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def finish(self, keep: int | None) -> Path:
        """Give the checkpoint its name, and remove all but the ``keep`` latest; return where it is."""
        _sync_folder(self.path)
        try:
            os.rename(self.path, self.final)
        except OSError as problem:
            if not self.final.exists():
                raise
            raise InputError(f"another run has written {str(self.final)!r} meanwhile: give each run a folder of its "
                             "own") from problem
        self._unlock()
        _sync_folder(self.folder)
        for old in checkpoints_in(self.folder)[: -keep if keep else 0]:
            gone = Path(tempfile.mkdtemp(prefix=f"{_REMOVING}{old.name}-", dir=self.folder))
            os.rename(old, gone / old.name)
            shutil.rmtree(gone)
        return self.final

    def drop(self) -> None:
        """Remove what was written."""
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)
        remove_empty(self._made)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _is_abandoned(path: Path) -> bool:
    """Return whether nobody writes there any more."""
    try:
        handle = take_lock(path)
    except FileNotFoundError:
        return False
    if handle is not None:
        os.close(handle)
    return handle is not None


def _sync_folder(path: Path) -> None:
    """Make sure that the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}
"""How the format names dtypes."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: Tensor, name: str) -> str:
    """Return how the format names the dtype of a tensor; ``name`` is for the message if it has no name for it."""
    if tensor.dtype not in _NAMES:
        raise InputError(f"{name!r} has the dtype {tensor.dtype}, which the safetensors format does not know")
    return _NAMES[tensor.dtype]


class TensorWriter:
    """Writes tensors to a new file, in ``file_order``."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self.path, self.entries, self.names = path, entries, file_order(entries)
        self._stream: IO[bytes] = open(path, "wb")  # noqa: SIM115 - closed in close
        self._num_written = 0
        self._crc = self._num_bytes = 0
        self._write(file_begin(entries, {"format": "pt"}))

    def _write(self, data: bytes | memoryview) -> None:
        self._crc, self._num_bytes = zlib.crc32(data, self._crc), self._num_bytes + len(data)
        self._stream.write(data)

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor; it has the dtype and size that its entry says, in any shape."""
        entry = self.entries[self.names[self._num_written]]
        data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        assert (data.dtype, data.numel()) == (DTYPES[entry.dtype], math.prod(entry.shape)), "as the header says"
        self._write(memoryview(data.view(torch.uint8).numpy()))
        self._num_written += 1

    def close(self) -> str:
        """Make sure that the file is on the disk, and return its checksum."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return _checksum(self._crc, self._num_bytes)


class TensorFile(tensor_file.TensorFile):
    """A checkpoint's file of tensors, open for reading; use as a context manager."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, missing="every rank must see the folder")

    def __enter__(self) -> TensorFile:
        return self

    def read(self, name: str, region: Region = ()) -> Tensor:
        """Return a copy of the tensor, or of the entries of it that lie in the region."""
        entry, dtype = self.entries[name], DTYPES[self.entries[name].dtype]
        if entry.num_bytes == 0:
            return cut_region(torch.empty(entry.shape, dtype=dtype), region)
        data = torch.frombuffer(self.data(name), dtype=torch.uint8)
        whole = (data.clone() if data.data_ptr() % dtype.itemsize else data).view(dtype).view(entry.shape)
        part = cut_region(whole, region)
        return part.clone() if part is whole else part
