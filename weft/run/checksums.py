"""Checksums of a checkpoint's files: written with it, compared when it is loaded.

CRC-32, which the standard library has in C: it sees every flipped bit and every damage within 32 bits, and any other
damage but for one chance in four thousand million; the file's size is beside it. It is taken while the file is
written, so that nothing is read twice.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

CHUNK_BYTES: Final = 1 << 24
"""So much is looked at in one call: other threads of the process, such as those of messages, run in between."""


class Checksum:
    """The checksum of bytes that come one after the other."""

    def __init__(self) -> None:
        self._crc = self._num_bytes = 0

    def add(self, data: bytes | memoryview) -> None:
        """Go on with these bytes."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            self._crc = zlib.crc32(view[start : start + CHUNK_BYTES], self._crc)
        self._num_bytes += len(view)

    def __str__(self) -> str:
        return f"crc32:{self._crc:08x}:{self._num_bytes}"


def checksum_of(data: bytes | memoryview) -> str:
    """Return the checksum of some bytes, with their number."""
    found = Checksum()
    found.add(data)
    return str(found)


def record_checksum(fields: Mapping[str, Any]) -> str:
    """Return the checksum of what a JSON object says, however it is spaced or ordered."""
    return checksum_of(json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
