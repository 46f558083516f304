"""Arrays in ``.npz`` files: read without code, and without memory for more than is there.

``numpy.load`` makes room for whatever a header says before it looks at the data, and unpacks whatever an archive holds.
Here an array must be as long as its part of the archive, and all parts together no longer than is allowed.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from weft.base.errors import InputError

_SUFFIX: Final = ".npy"
_KNOWN: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_KINDS: Final = "biufc"
"""Truth values and numbers, nothing else."""
_DAMAGED: Final = (OSError, ValueError, EOFError, KeyError, IndexError, TypeError, OverflowError, NotImplementedError,
                   RuntimeError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error)
"""What the libraries raise where an archive or a header is damaged."""


def read_arrays(path: Path, *, max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of numbers in the file by name; their data and headers have at most ``max_bytes``."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            total = sum(part.file_size for part in parts)
            if total > max_bytes:
                raise InputError(f"{str(path)!r} has {total:,} bytes of arrays, and at most {max_bytes:,} are read")
            return {part.filename.removesuffix(_SUFFIX): _read_part(archive, part) for part in parts}
    except _DAMAGED as problem:
        raise InputError(f"{str(path)!r} is not a readable file of arrays: {problem}") from problem


def _read_part(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> npt.NDArray[Any]:
    if part.compress_type not in _KNOWN:
        raise ValueError(f"{part.filename!r} is packed in a way that numpy does not use")
    with archive.open(part) as stream:
        shape, is_fortran, dtype = _read_header(stream)
        left = part.file_size - stream.tell()
        if dtype.kind not in _KINDS or math.prod(shape) * dtype.itemsize != left:
            raise ValueError(f"the header of {part.filename!r} says {dtype} {list(shape)}, which is not what its "
                             f"{left} bytes are")
        array = np.frombuffer(stream.read(left), dtype=dtype).copy()
    return array.reshape(shape, order="F" if is_fortran else "C")


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    read = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape of {list(shape)}")
    return shape, is_fortran, dtype
