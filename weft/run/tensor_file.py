"""Tensors in files of the safetensors format: eight bytes of length, a JSON header, the raw numbers.

Files are written one tensor after the other, so that the writer needs memory for one; a reader maps the file and
copies out only the entries it is asked for, so that a rank reads its parts and no more. Nothing in a file is executed,
and every field of the header is checked before a byte of data is touched.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from weft.base.errors import InputError
from weft.base.files import parse_json
from weft.plan.sharding import Region
from weft.run.checkpoint_folder import Checksum
from weft.run.parameters import cut_region

DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}
"""How the format names dtypes."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
"""The format allows no more."""
_FIELDS: Final = {"dtype", "shape", "data_offsets"}


def dtype_name(tensor: Tensor, name: str) -> str:
    """Return how the format names the dtype of a tensor; ``name`` is for the message if it has no name for it."""
    if tensor.dtype not in _NAMES:
        raise InputError(f"{name!r} has the dtype {tensor.dtype}, which the safetensors format does not know")
    return _NAMES[tensor.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the header says about one tensor."""

    dtype: str
    """As in ``DTYPES``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of its data."""
        return math.prod(self.shape) * int(DTYPES[self.dtype].itemsize)


def file_order(entries: Mapping[str, Entry]) -> list[str]:
    """Return the order of tensors in a file: wide dtypes first, so that all data is aligned, then by name."""
    return sorted(entries, key=lambda name: (-DTYPES[entries[name].dtype].itemsize, name))


class TensorWriter:
    """Writes tensors to a new file, in ``file_order``."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self.path, self.entries, self.names = path, entries, file_order(entries)
        self._stream: IO[bytes] = open(path, "wb")  # noqa: SIM115 - closed in close
        self._num_written = 0
        self.checksum = Checksum()
        """Of all that was written so far."""
        self._write_header()

    def _write_header(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in self.names:
            entry = self.entries[name]
            span = [offset, offset + entry.num_bytes]
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
            offset = span[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        self._write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def _write(self, data: bytes | memoryview) -> None:
        self.checksum.add(data)
        self._stream.write(data)

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor; it has the dtype and size that its entry says, in any shape."""
        entry = self.entries[self.names[self._num_written]]
        data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        assert (data.dtype, data.numel()) == (DTYPES[entry.dtype], math.prod(entry.shape)), "as the header says"
        self._write(memoryview(data.view(torch.uint8).numpy()))
        self._num_written += 1

    def close(self) -> None:
        """Make sure that the file is on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()


class TensorFile:
    """A file of tensors, open for reading; use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        where = f"the file {str(path)!r}"
        try:
            with open(path, "rb") as stream:
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as problem:
            raise InputError(f"there is no file {str(path)!r}: every rank must see the folder") from problem
        except (OSError, ValueError) as problem:
            raise InputError(f"cannot read {str(path)!r}: {problem}") from problem
        length = int.from_bytes(self._data[:_LENGTH_BYTES], "little")
        if length > min(len(self._data) - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise InputError(f"{where} ends within its header ({len(self._data)} bytes): it is damaged")
        header = parse_json(self._data[_LENGTH_BYTES : _LENGTH_BYTES + length], where=f"the header of {where}")
        if not isinstance(header, dict):
            raise InputError(f"the header of {where} is no JSON object: it is no safetensors file")
        header.pop("__metadata__", None)
        start = _LENGTH_BYTES + length
        self._offsets, self.entries = _check_entries(header, len(self._data) - start, where)
        self._offsets = {name: start + offset for name, offset in self._offsets.items()}

    def read(self, name: str, region: Region = ()) -> Tensor:
        """Return a copy of the tensor, or of the entries of it that lie in the region."""
        entry, offset = self.entries[name], self._offsets[name]
        dtype = DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return cut_region(torch.empty(entry.shape, dtype=dtype), region)
        data = torch.frombuffer(self._data, dtype=torch.uint8, offset=offset, count=entry.num_bytes)
        whole = (data.clone() if offset % dtype.itemsize else data).view(dtype).view(entry.shape)
        part = cut_region(whole, region)
        return part.clone() if part is whole else part

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()


def _check_entries(header: dict[str, Any], num_bytes: int, where: str) -> tuple[dict[str, int], dict[str, Entry]]:
    """Return the offset of each tensor, and what it is; the data must follow without a gap."""
    offsets, entries, end = {}, {}, 0
    for name, value in sorted(header.items(), key=lambda item: _first_offset(item[1])):
        entry = _check_entry(name, value, where)
        begin, end = end, end + entry.num_bytes
        if value["data_offsets"] != [begin, end] or end > num_bytes:
            raise InputError(f"{name!r} in {where} has the bytes {value['data_offsets']!r} of {num_bytes}: its shape "
                             f"and the tensors before it say {[begin, end]}")
        offsets[name], entries[name] = begin, entry
    if end != num_bytes:
        raise InputError(f"{where} has {num_bytes - end} bytes that belong to no tensor")
    return offsets, entries


def _check_entry(name: str, value: Any, where: str) -> Entry:
    if not isinstance(value, dict) or set(value) != _FIELDS:
        raise InputError(f"{name!r} in {where} must have exactly the fields {', '.join(sorted(_FIELDS))}")
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
        raise InputError(f"{name!r} in {where} has the dtype {value['dtype']!r}: known are {', '.join(DTYPES)}")
    shape = value["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise InputError(f"{name!r} in {where} has the shape {shape!r}: it must be a list of counts")
    return Entry(dtype=value["dtype"], shape=tuple(shape))


def _first_offset(value: Any) -> tuple[int, int]:
    offsets = value.get("data_offsets") if isinstance(value, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(item) is int for item in offsets):
        return (-1, -1)
    return (offsets[0], offsets[1])
