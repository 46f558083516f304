"""Why a rank failed, for the launcher to read: a small file that has its room on the disk before anything can go wrong.

So a rank can say that the disk is full.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

ROOM_BYTES: Final = 8192
_MAX_MESSAGE: Final = 1200
"""Characters; JSON writes one as up to six bytes."""


def make_room(folder: Path, rank: int) -> None:
    """Make the file of a rank, with nothing in it."""
    _path(folder, rank).write_bytes(b" " * ROOM_BYTES)


def write_failure(folder: Path, rank: int, record: dict[str, Any]) -> None:
    """Write down why this rank fails; ``message`` is cut if it is long."""
    text = json.dumps({**record, "message": record["message"][:_MAX_MESSAGE]})
    with contextlib.suppress(OSError):  # the folder goes with the launcher
        handle = os.open(_path(folder, rank), os.O_WRONLY)
        os.write(handle, text.encode().ljust(ROOM_BYTES))
        os.close(handle)


def read_failure(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return what a rank that has ended wrote down; None if nothing."""
    try:
        text = _path(folder, rank).read_text(encoding="utf-8").strip()
        return dict(json.loads(text)) if text else None
    except (OSError, ValueError):
        return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"
