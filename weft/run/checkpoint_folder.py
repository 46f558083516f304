"""A folder of checkpoints: which are complete, which is the latest, and how a new one comes in.

    checkpoints/step-00000020/   model.safetensors  optimizer.safetensors  checkpoint.json
    checkpoints/step-00000030/

A checkpoint is written under a name that begins with a dot and renamed when all of it is on the disk; an old one is
renamed before it is deleted. So whatever is named ``step-...`` is whole, at any moment at which a process may be
killed, and what a killed process has left behind is removed when the next checkpoint is written. Names under which
something is written are the writer's own, and it holds a lock there while it lives: two runs in one folder do not
touch each other's files, and the second to write a step is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weft.errors import InputError
from weft.files import check_header, decode, encode, load_json

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
    """State of the optimizer that is no tensor, as ``parameter.key``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the training script has put in."""
    tensors: Mapping[str, int] = field(default_factory=dict)
    """How many tensors each file has; empty in checkpoints of before that was written down."""


def read_record(path: Path) -> CheckpointRecord:
    """Return what a checkpoint says about itself."""
    file = path / RECORD_FILE
    body = check_header(load_json(file), format_name=FORMAT, version=VERSION, where=str(file), error=InputError)
    return decode(CheckpointRecord, body, where=str(file))


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
        folder.mkdir(parents=True, exist_ok=True)
        later = [path.name for path in checkpoints_in(folder) if _step_of(path) >= step]
        if later:
            raise InputError(f"{str(folder)!r} has {later[-1]} already, and this is {self.final.name}: resume from it, "
                             "or use another folder")
        for left in folder.iterdir():
            if left.name.startswith((_WRITING, _REMOVING)) and _is_abandoned(left):
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_WRITING}{self.final.name}-", dir=folder))
        self.path.chmod(0o755)
        self._lock = _locked(self.path)

    def write_record(self, record: CheckpointRecord) -> None:
        """Write what is known beside the tensors."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **encode(record)}, indent=1, allow_nan=False)
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

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int | None:
    """Return an open handle of the folder that has its lock while it is open; None if there are no locks here."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _is_abandoned(path: Path) -> bool:
    """Return whether nobody writes there any more."""
    try:
        handle = _locked(path)
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
