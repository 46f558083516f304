"""Examples in files: those of a case in one compressed archive of arrays, in half precision, without code."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from weft.base.errors import InputError
from weft.base.files import read_bytes, write_atomic
from weft.search.deploy.expert import Example
from weft.search.deploy.features import WIDTHS, Features

_SHARED: Final = ("flow", "members")
"""Features that all states of a case have in common."""
_OWN: Final = tuple(field.name for field in fields(Features) if field.name not in (*_SHARED, "group"))


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write the examples of one case; there may be none."""
    arrays: dict[str, Any] = {"count": np.asarray(len(examples))}
    if examples:
        states = [example.features for example in examples]
        arrays |= {name: getattr(states[0], name).astype(np.float16) for name in _SHARED}
        arrays |= {name: np.stack([getattr(state, name) for state in states]).astype(np.float16) for name in _OWN}
        arrays["group"] = np.asarray([state.group for state in states], dtype=np.int64)
        arrays["gaps"] = np.stack([example.gaps for example in examples]).astype(np.float16)
        arrays["value"] = np.asarray([example.value for example in examples], dtype=np.float32)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def read_examples(path: Path) -> list[Example]:
    """Return the examples of one case."""
    try:
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return [_example(arrays, row) for row in range(int(arrays["count"]))]
    except (KeyError, ValueError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise InputError(f"the examples in {str(path)!r} are damaged ({problem}): delete the file, and it is made "
                         "again") from problem


def _example(arrays: dict[str, np.ndarray], row: int) -> Example:
    own = {name: arrays[name][row] for name in _OWN}
    for name, width in WIDTHS.items():
        found = (arrays[name] if name in _SHARED else own[name]).shape[-1]
        if found != width:
            raise ValueError(f"{name} has {found} columns, not {width}")
    shared = {name: arrays[name] for name in _SHARED}
    return Example(features=Features(**own, **shared, group=int(arrays["group"][row])), gaps=arrays["gaps"][row],
                   value=float(arrays["value"][row]))
