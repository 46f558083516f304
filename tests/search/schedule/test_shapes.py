"""The shapes equal the committed problem files, and grow as described."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.schedule_shapes import SHAPES, shape
from weft.base.errors import InputError
from weft.search.schedule.problem import load_problem

PROBLEMS = Path(__file__).resolve().parents[3] / "benchmarks" / "problems" / "schedule"
FILES = ["v-train-mem4", "v-train-mem3", "x-train-mem4", "m-train-mem6", "m-train-mem5", "nn-train-mem6", "k-train-mem6",
         *(f"{name}-infer" for name in SHAPES)]


@pytest.mark.parametrize("file", FILES)
def test_shapes_equal_the_files(file):
    name, _, memory = file.partition("-train-mem")
    training = bool(memory)
    made = shape(name.removesuffix("-infer"), 4, memory=float(memory) if training else None, training=training)
    assert made == load_problem(PROBLEMS / f"{file}.json")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_devices", [2, 6, 16])
def test_work_and_memory_of_any_size(name, num_devices):
    problem = shape(name, num_devices, memory=9, forward=2, backward=5, wide_forward=0.5, wide_backward=0.25)
    work = {"v": 7, "x": 14, "m": 7.75, "nn": 8.5, "k": 7.75}[name]
    assert problem.device_work == (work,) * num_devices
    assert len(problem.topological) == problem.num_tasks
    for device in range(num_devices):
        taken = [block.memory for block in problem.blocks if device in block.devices]
        assert sum(taken) == 0
        assert sum(amount for amount in taken if amount > 0) == {"v": 1, "x": 2, "m": 1, "nn": 1, "k": 2}[name]


def test_other_numbers_of_devices_are_refused():
    assert len(shape("m", 1, memory=None).blocks) == 4
    with pytest.raises(InputError, match="no shape 'w'; choose from v, x, m, nn, k"):
        shape("w", 4, memory=1)
    with pytest.raises(InputError, match="'nn' needs an even number of devices, not 5"):
        shape("nn", 5, memory=1)
    with pytest.raises(InputError, match="at least one device, not 0"):
        shape("v", 0, memory=1)
