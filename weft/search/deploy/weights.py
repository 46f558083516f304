"""Weights in files of the safetensors format: eight bytes of length, a JSON header, the raw numbers.

Only what Weft ships is read: float32, one tensor after the other without a gap. Reading runs no code and allocates no
more than the file is long; every field of the header is checked, and a number that is not finite is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError
from weft.base.files import parse_json, read_bytes, write_atomic

F32 = npt.NDArray[np.float32]
_LENGTH_BYTES: Final = 8
_ENTRY_FIELDS: Final = {"dtype", "shape", "data_offsets"}


def write_weights(path: Path, tensors: Mapping[str, F32], metadata: Mapping[str, str]) -> None:
    """Write the tensors, sorted by name, and texts about them."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    parts, offset = [], 0
    for name in sorted(tensors):
        data = np.ascontiguousarray(tensors[name], dtype="<f4").tobytes()
        shape, span = list(tensors[name].shape), [offset, offset + len(data)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": span}
        parts.append(data)
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    write_atomic(path, len(text).to_bytes(_LENGTH_BYTES, "little") + text + b"".join(parts))


def read_weights(path: Path) -> tuple[dict[str, F32], dict[str, str]]:
    """Return the tensors and the texts about them."""
    data, where = read_bytes(path), f"the weights file {str(path)!r}"
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or length > len(data) - _LENGTH_BYTES:
        raise InputError(f"{where} ends within its header ({len(data)} bytes): get it again")
    header = parse_json(data[_LENGTH_BYTES:_LENGTH_BYTES + length], where=f"the header of {where}")
    if not isinstance(header, dict):
        raise InputError(f"the header of {where} is no JSON object: it is no safetensors file")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise InputError(f"__metadata__ in {where} must be an object of texts")
    body, tensors, end = memoryview(data)[_LENGTH_BYTES + length:], {}, 0
    for name, entry in sorted(header.items(), key=lambda item: _offset(item[1])):
        begin = end
        shape, end = _check_entry(name, entry, begin, len(body), where)
        tensors[name] = np.frombuffer(body[begin:end], dtype="<f4").astype(np.float32).reshape(shape)
        if not np.isfinite(tensors[name]).all():
            raise InputError(f"{name!r} in {where} has numbers that are not finite: get the file again")
    if end != len(body):
        raise InputError(f"{where} has {len(body) - end} bytes that belong to no tensor")
    return tensors, metadata


def _offset(entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return offsets[0] if isinstance(offsets, list) and offsets and _is_count(offsets[0]) else -1


def _check_entry(name: str, entry: Any, begin: int, stop: int, where: str) -> tuple[tuple[int, ...], int]:
    """Return the tensor's shape and where its bytes end; they must begin at ``begin``."""
    if not isinstance(entry, dict) or set(entry) != _ENTRY_FIELDS:
        raise InputError(f"{name!r} in {where} must have exactly the fields {', '.join(sorted(_ENTRY_FIELDS))}")
    if entry["dtype"] != "F32":
        raise InputError(f"{name!r} in {where} has the dtype {entry['dtype']!r}: only F32 is read")
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)):
        raise InputError(f"{name!r} in {where} has the shape {shape!r}: it must be a list of counts")
    end = begin + 4 * math.prod(shape)
    if entry["data_offsets"] != [begin, end] or end > stop:
        raise InputError(f"{name!r} in {where} has the bytes {entry['data_offsets']!r} of {stop}: its shape and the "
                         f"tensors before it say {[begin, end]}")
    return tuple(shape), end


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
