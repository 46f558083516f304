"""Files of tensors as bytes; what PyTorch's and numpy's sides of them refuse is tested with those."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.base.errors import InputError
from weft.base.tensor_file import ITEM_BYTES, Entry, TensorFile, file_begin, file_order

ENTRIES = {"b": Entry(dtype="F32", shape=(2,)), "a": Entry(dtype="U8", shape=(3,)), "none": Entry(dtype="F64", shape=(0, 4))}


def written(path: Path, *, data: bytes = bytes(range(11)), **changes: object) -> Path:
    """Return a file of ``ENTRIES`` with these fields of the header changed."""
    begin = file_begin(ENTRIES, {"note": "x"})
    text = json.dumps({**json.loads(begin[8:]), **changes}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_come_back_as_bytes_with_texts_about_them(tmp_path):
    assert file_order(ENTRIES) == ["none", "b", "a"]
    with TensorFile(written(tmp_path / "file")) as file:
        assert file.entries == ENTRIES
        assert list(file.entries)[-1] == "a"
        assert file.metadata == {"note": "x"}
        assert [bytes(file.data(name)) for name in ("none", "b", "a")] == [b"", bytes(range(8)), bytes(range(8, 11))]
    assert len(file_begin(ENTRIES, {})) % 8 == 0


@pytest.mark.parametrize(("changes", "message"), [
    ({"__metadata__": {"note": 1}}, "must be an object of texts"), ({"__metadata__": []}, "must be an object of texts"),
    ({"a": {"dtype": "U8", "shape": [1] * 40 + [3], "data_offsets": [8, 11]}}, "list of counts"),
    ({"a": {"dtype": "U8", "shape": [True, 3], "data_offsets": [8, 11]}}, "list of counts"),
    ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [8, 10]}}, "1 bytes that belong to no tensor"),
    ({"a": {"dtype": "U8", "shape": [3], "data_offsets": [7, 10]}}, "has the bytes"),
    ({"a": {"dtype": "U7", "shape": [3], "data_offsets": [8, 11]}}, "known are F64"), ({"a": None}, "exactly the fields")])
def test_damaged_headers_are_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        TensorFile(written(tmp_path / "file", **changes))


def test_who_opens_a_file_says_which_dtypes_it_may_have_and_what_to_do_without_it(tmp_path):
    with pytest.raises(InputError, match="only F32 is read"):
        TensorFile(written(tmp_path / "file"), dtypes=("F32",))
    with pytest.raises(InputError, match=r"there is no file .* look again"):
        TensorFile(tmp_path / "none", missing="look again")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match=r"ends within its header \(0 bytes\)"):
        TensorFile(tmp_path / "empty")
    with pytest.raises(InputError, match="cannot read"):
        TensorFile(tmp_path)


def test_bytes_per_number_are_those_of_pytorch_and_reading_needs_neither_it_nor_numpy():
    torch_side = pytest.importorskip("weft.run.checkpoint_folder")
    assert {name: dtype.itemsize for name, dtype in torch_side.DTYPES.items()} == dict(ITEM_BYTES)
    code = "import sys, weft.base.tensor_file; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "[]\n"
