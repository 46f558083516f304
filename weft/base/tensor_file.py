"""Tensors in files of the safetensors format: eight bytes of length, a JSON header, the raw numbers.

Nothing in a file is executed, no more is allocated than it is long, and every field of the header is checked before a
byte of data is touched: tensors follow each other without a gap, and nothing comes after them. Whoever opens a file
says which dtypes it may have. This module knows bytes alone, with nothing but the standard library:
``weft.run.checkpoint_folder`` makes PyTorch's tensors of them, ``weft.search.deploy.policy`` numpy's arrays.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weft.base.errors import InputError
from weft.base.files import parse_json

ITEM_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1, "C64": 8}
"""How the format names dtypes, and the bytes of a number."""
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
"""The format allows no more."""
_MAX_DIMS: Final = 32
_FIELDS: Final = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the header says about one tensor."""

    dtype: str
    """As in ``ITEM_BYTES``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of its data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def file_order(entries: Mapping[str, Entry]) -> list[str]:
    """Return the order of tensors in a file: wide dtypes first, so that all data is aligned, then by name."""
    return sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name].dtype], name))


def file_begin(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Return what a file has before its data, for tensors that follow in ``file_order``, and texts about them."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in file_order(entries):
        entry = entries[name]
        begin, end = end, end + entry.num_bytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class TensorFile:
    """A file of tensors, mapped for reading; use as a context manager."""

    def __init__(self, path: Path, *, dtypes: Collection[str] = tuple(ITEM_BYTES),
                 missing: str = "check the path") -> None:
        """``missing`` is what to do if there is no such file."""
        self.path = path
        where = f"the file {str(path)!r}"
        try:
            with open(path, "rb") as stream:
                num_bytes = os.fstat(stream.fileno()).st_size
                length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
                if length > min(num_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                    raise InputError(f"{where} ends within its header ({num_bytes} bytes): it is damaged, get it again")
                self._data = mmap.mmap(stream.fileno(), num_bytes, access=mmap.ACCESS_COPY)
        except FileNotFoundError as problem:
            raise InputError(f"there is no file {str(path)!r}: {missing}") from problem
        except (OSError, ValueError) as problem:
            raise InputError(f"cannot read {str(path)!r}: {problem}") from problem
        start = _LENGTH_BYTES + length
        header = parse_json(self._data[_LENGTH_BYTES:start], where=f"the header of {where}")
        if not isinstance(header, dict):
            raise InputError(f"the header of {where} is not a JSON object: it is not a safetensors file")
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        """Texts about the tensors."""
        if not isinstance(self.metadata, dict) or not all(isinstance(text, str) for text in self.metadata.values()):
            raise InputError(f"__metadata__ in {where} must be an object of texts")
        self.entries: dict[str, Entry] = {}
        """In the order of the file."""
        self._offsets: dict[str, int] = {}
        end = start
        for name, value in sorted(header.items(), key=lambda item: _first_offset(item[1])):
            entry = self.entries[name] = _check_entry(name, value, dtypes, where)
            begin, end = end, end + entry.num_bytes
            if value["data_offsets"] != [begin - start, end - start] or end > num_bytes:
                raise InputError(f"{name!r} in {where} has the bytes {value['data_offsets']!r} of {num_bytes - start}: "
                                 f"its shape and the tensors before it say {[begin - start, end - start]}")
            self._offsets[name] = begin
        if end != num_bytes:
            raise InputError(f"{where} has {num_bytes - end} bytes that belong to no tensor")

    def data(self, name: str) -> memoryview:
        """Return the numbers of a tensor, as they are in the file."""
        begin = self._offsets[name]
        return memoryview(self._data)[begin : begin + self.entries[name].num_bytes]

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()


def _check_entry(name: str, value: Any, dtypes: Collection[str], where: str) -> Entry:
    if not isinstance(value, dict) or set(value) != _FIELDS:
        raise InputError(f"{name!r} in {where} must have exactly the fields {', '.join(sorted(_FIELDS))}")
    dtype, shape = value["dtype"], value["shape"]
    if not isinstance(dtype, str) or dtype not in dtypes:
        known = f"known are {', '.join(dtypes)}" if len(dtypes) > 1 else f"only {', '.join(dtypes)} is read"
        raise InputError(f"{name!r} in {where} has the dtype {dtype!r}: {known}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(
            type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise InputError(f"{name!r} in {where} has the shape {shape!r}: it must be a list of counts")
    return Entry(dtype=dtype, shape=tuple(shape))


def _first_offset(value: Any) -> tuple[int, int]:
    offsets = value.get("data_offsets") if isinstance(value, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(item) is int for item in offsets):
        return (-1, -1)
    return (offsets[0], offsets[1])
