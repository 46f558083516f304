"""Archives of arrays whose headers lie are one clear error, and take no more memory than is there."""

from __future__ import annotations

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from weft.base.array_files import read_arrays
from weft.base.errors import InputError


def part(shape: str, data: bytes = b"", descr: str = "'<f8'", order: str = "False") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def archive(*parts: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as members:
        for index, data in enumerate(parts):
            members.writestr(f"a{index}.npy", data)
    return stream.getvalue()


def test_what_numpy_writes_comes_back(tmp_path):
    arrays = {"a": np.arange(12.0).reshape(3, 4), "b": np.asarray(5), "c": np.asfortranarray(np.ones((2, 3), dtype=np.float16)),
              "d": np.zeros((0, 4), dtype=np.int64), "e": np.asarray([True, False])}
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "x.npz", **arrays)
        found = read_arrays(tmp_path / "x.npz", max_bytes=1 << 20)
        assert all(np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in arrays.items())
        found["a"][0, 0] = 1.0  # the reader's own


@pytest.mark.parametrize(("data", "message"), [
    (archive(part("(10000000000,)")), "says float64"), (archive(part("(4294967296, 4294967296)")), "says float64"),
    (archive(part("(-1,)")), "shape of"), (archive(part("(1,)", bytes(7))), "says float64"),
    (archive(part("(1,)", bytes(8), "'|O'")), "says object"), (archive(part("(1,)", bytes(8), "[('x', '<f8')]")), "says"),
    (archive(part("(1 +", bytes(8))), "readable"), (archive(part("(" * 3000, bytes(8))), "readable"), (archive(b"text"), "readable"),
    (archive(part("(1,)", bytes(8)), method=zipfile.ZIP_LZMA), "packed in a way"), (b"", "readable"),
    (archive(part("(100000,)", bytes(800_000)), part("(100000,)", bytes(800_000))), "1,600,1.. bytes of arrays, and at most 1,000,000")])
def test_headers_that_lie_are_refused(tmp_path, data, message):
    (tmp_path / "x.npz").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=message):
            read_arrays(tmp_path / "x.npz", max_bytes=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
