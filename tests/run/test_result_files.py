"""What a run has left is read strictly: a damaged file of gradients is one clear error."""

from __future__ import annotations

import io
import json
import math
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from weft.base.errors import InputError
from weft.run.__main__ import report
from weft.run.result import GRADIENTS_FILE, RunResult, load_result, save_result


@pytest.fixture
def folder(tmp_path):
    save_result(RunResult(num_ranks=1, losses=(1.0,), step_times_s=(0.1,), cpu_s=(0.1,), gradients={"a": np.ones((3, 4))}), tmp_path)
    return tmp_path


def header_only(shape: str) -> bytes:
    stream, text = io.BytesIO(), f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    return stream.getvalue()


def packed_zeros() -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, a=np.zeros(10**6))
    return stream.getvalue()


def test_gradients_come_back(folder):
    assert np.array_equal(load_result(folder).gradients["a"], np.ones((3, 4)))


@pytest.mark.parametrize("make", [
    lambda data: b"", lambda data: data[:100], lambda data: data[:60] + b"\xff" * 30 + data[90:], lambda data: header_only("(1000000000,)"),
    lambda data: header_only("(-1,)"), lambda data: header_only("(1 +"), lambda data: packed_zeros()],
    ids=["empty", "cut", "overwritten", "no data", "negative", "no tuple", "larger than the file"])
def test_damaged_gradients_are_one_clear_error(folder, make):
    path = folder / GRADIENTS_FILE
    path.write_bytes(make(path.read_bytes()))
    with pytest.raises(InputError, match="gradients"):
        load_result(folder)


def test_a_loss_that_is_no_number_stays_none(tmp_path, capsys):
    result = RunResult(num_ranks=2, losses=(1.5, math.nan), step_times_s=(0.1,), cpu_s=(0.1,))
    save_result(result, tmp_path)
    first, second = load_result(tmp_path).losses
    assert first == 1.5
    assert math.isnan(second)
    report(replace(result, losses=(math.nan,)), as_json=True)
    assert json.loads(capsys.readouterr().out)["losses"] == [None]
    report(replace(result, losses=(math.nan,)), as_json=False)
    assert capsys.readouterr().out.startswith("2 ranks: loss nan, step time")
