"""PyTorch's tensors in safetensors files, which ``weft.base.tensor_file`` reads and lays out as bytes.

Files are written one tensor after the other, so that the writer needs memory for one; a reader maps the file and
copies out only the entries it is asked for, so that a rank reads its parts and no more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

from weft.base import tensor_file
from weft.base.errors import InputError
from weft.base.tensor_file import Entry, file_begin, file_order
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
        self.checksum = Checksum()
        """Of all that was written so far."""
        self._write(file_begin(entries, {"format": "pt"}))

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
