"""Temporary folders and files that do not stay behind, not even after SIGKILL.

Each has its maker's process in its name and is locked while the maker lives. Whoever makes one first removes those of
the same kind whose maker is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from weft.base.errors import RunError

YOUNG_S: Final = 60.0
"""One that is not locked belongs to a process that lives if it is younger: its lock comes just after its name."""


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Give a new folder, which is removed in the end; ``kind`` begins its name."""
    sweep(kind)
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{kind}{os.getpid()}-"))
    except OSError as problem:
        raise RunError(f"no folder for temporary files: {problem}. Make room there, or set TMPDIR to another folder"
                       ) from problem
    handle = take_lock(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def scratch_file(kind: str) -> tuple[Path, int]:
    """Return a new file and its handle, which holds its lock; the caller removes and closes it."""
    sweep(kind)
    handle, name = tempfile.mkstemp(prefix=f"{kind}{os.getpid()}-")
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Path(name), handle


def sweep(kind: str) -> None:
    """Remove what processes that are gone have left of this kind; what belongs to other users is left alone."""
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{kind}*"):
            with contextlib.suppress(OSError):
                if _is_abandoned(path, kind):
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _is_abandoned(path: Path, kind: str) -> bool:
    facts = path.lstat()
    if facts.st_uid != os.getuid() or path.is_symlink():
        return False
    handle = take_lock(path)
    if handle is None:
        return False
    os.close(handle)
    maker = path.name.removeprefix(kind).partition("-")[0]
    is_old = time.time() - facts.st_mtime > YOUNG_S
    return maker.isdigit() and (is_old or not _lives(int(maker)))


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def take_lock(path: Path) -> int | None:
    """Return an open handle that locks a file or folder while it is open; None if another does, or nobody can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
