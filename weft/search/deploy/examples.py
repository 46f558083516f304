"""Examples in files: those of a case in one compressed archive of arrays, in half precision, without code."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from weft.array_files import read_arrays
from weft.base.errors import InputError
from weft.base.files import write_atomic
from weft.search.deploy.expert import Example
from weft.search.deploy.features import WIDTHS, Features

MAX_BYTES: Final = 256 << 20
"""Unpacked; a case has a thousandth of that."""
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
        arrays = read_arrays(path, max_bytes=MAX_BYTES)
        return [_example(arrays, row) for row in range(_count(arrays))]
    except (InputError, KeyError, ValueError, IndexError, TypeError, OverflowError) as problem:
        raise InputError(f"the examples in {str(path)!r} are damaged ({problem}): delete the file, and it is made "
                         "again") from problem


def _count(arrays: Mapping[str, np.ndarray]) -> int:
    """Return how many examples there are, after checking that all arrays fit together and are finite."""
    count = int(arrays["count"])
    if count == 0:
        return 0
    own = (*_OWN, "group", "gaps", "value")
    groups, devices, actions = (arrays[name].shape[axis] for name, axis in (("ops", 1), ("devices", 1), ("actions", 1)))
    sizes = {"ops": (groups,), "devices": (devices,), "flow": (groups, groups), "links": (devices, devices),
             "place": (groups, devices), "actions": (actions,), "members": (actions,), "world": (), "group": None,
             "gaps": None, "value": None}
    for name, size in sizes.items():
        rows = (count,) if name in own else ()
        wanted = (*rows, *size, WIDTHS.get(name, devices)) if size is not None else (
            (count, actions) if name == "gaps" else (count,))
        if arrays[name].shape != wanted:
            raise ValueError(f"{name} has the shape {list(arrays[name].shape)}, not {list(wanted)}")
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name} has numbers that are not finite")
    if arrays["group"].dtype.kind != "i" or arrays["group"].min() < 0 or arrays["group"].max() >= groups:
        raise ValueError(f"group must be one of {groups}")
    return count


def _example(arrays: Mapping[str, np.ndarray], row: int) -> Example:
    own = {name: arrays[name][row] for name in _OWN}
    shared = {name: arrays[name] for name in _SHARED}
    return Example(features=Features(**own, **shared, group=int(arrays["group"][row])), gaps=arrays["gaps"][row],
                   value=float(arrays["value"][row]))
