"""Orders written as CSV are run by PyTorch's own pipeline runtime, with the gradients of one process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.run.plans import greedy_order
from tests.run.pytorch_ranks import Case, gradients_of, make_batch, make_stage, save_cases
from tests.worlds import chain_graph, plan_of
from weft.base.errors import PlanError
from weft.export.pipelining_csv import parse_csv, schedule_to_csv, to_csv
from weft.plan.lower import lower
from weft.plan.orders import interleaved
from weft.search.schedule.problem import Block, ScheduleProblem
from weft.search.schedule.schedule import Schedule, replay

pytestmark = pytest.mark.timeout(100)
ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 80.0


def eager(num_stages: int, num_microbatches: int) -> list:
    """One stage per device, backwards of micro-batches in falling order where that can be: no named schedule."""
    half = num_microbatches // 2
    return [[(stage, phase, index) for first, last in ((0, half), (half, num_microbatches)) for phase in "FB"
             for index in (range(first, last) if phase == "F" else reversed(range(first, last)))]
            for stage in range(num_stages)]


def mixed(devices: list[int], num_microbatches: int) -> list:
    """Some backwards whole, some split."""
    whole = {(stage, index) for stage in range(len(devices)) for index in range(num_microbatches) if (stage + index) % 2}
    return [[(stage, "B" if phase == "I" and (stage, index) in whole else phase, index) for stage, phase, index in row
             if phase != "W" or (stage, index) not in whole] for row in greedy_order(devices, num_microbatches, split=True)]


ORDERS = {
    "v-falling": (eager(4, 6), [0, 1, 2, 3], 6),
    "looped": (interleaved(2, 2, 4), [0, 1, 0, 1], 4),
    "looped-split": (greedy_order([0, 1, 2, 0, 1, 2], 5, split=True), [0, 1, 2, 0, 1, 2], 5),
    "wave-split": (greedy_order([0, 1, 2, 3, 3, 2, 1, 0], 6, split=True), [0, 1, 2, 3, 3, 2, 1, 0], 6),
    "uneven-mixed": (mixed([0, 1, 1, 0, 2], 4), [0, 1, 1, 0, 2], 4),
}


def two_chunk_schedule() -> tuple[Schedule, dict]:
    """A schedule problem with two chunks per device and split backward, and the roles of its blocks."""
    devices = [0, 1, 1, 0]
    blocks, roles, last = [], {}, 3
    index = {(phase, stage): number for number, (phase, stage) in enumerate(
        [("f", 0), ("f", 1), ("f", 2), ("f", 3), ("i", 3), ("i", 2), ("i", 1), ("i", 0), ("w", 3), ("w", 2), ("w", 1), ("w", 0)])}
    for phase, stage in index:
        after = {"f": [index["f", stage - 1]] if stage else [], "w": [index.get(("i", stage), 0)],
                 "i": [index["f", stage]] + ([index["i", stage + 1]] if stage < last else [])}[phase]
        blocks.append(Block(name=f"{phase}{stage}", devices=(devices[stage],), time=1.0, after=tuple(after)))
        roles[index[phase, stage]] = (stage, phase.upper())
    problem = ScheduleProblem(device_names=("a", "b"), device_memory=(None, None), blocks=tuple(blocks))
    orders = [[(index[phase.lower(), stage], number) for stage, phase, number in row]
              for row in greedy_order(devices, 5, split=True)]
    return replay(problem, 5, orders), roles


def make_cases(folder: Path) -> list[Case]:
    cases = []
    for name, (order, devices, microbatches) in ORDERS.items():
        graph = chain_graph(len(devices))
        plan = plan_of(graph, [[op] for op in range(len(devices))], order=order, devices=devices,
                       microbatches=microbatches)
        lower(plan, graph)
        cases.append(make_case(folder, name, to_csv(plan), devices, microbatches))
    schedule, roles = two_chunk_schedule()
    cases.append(make_case(folder, "schedule", schedule_to_csv(schedule, roles), [0, 1, 1, 0], 5))
    return cases


def make_case(folder: Path, name: str, text: str, devices: list[int], microbatches: int) -> Case:
    path = folder / f"{name}.csv"
    path.write_text(text)
    return Case(name=name, csv=str(path), devices=devices, microbatches=microbatches)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with what four ranks of PyTorch made of all cases."""
    folder = tmp_path_factory.mktemp("pytorch")
    save_cases(folder, make_cases(folder))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen([sys.executable, "-m", "tests.run.pytorch_ranks", str(folder), "4"], cwd=ROOT, env=environment,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=RUN_LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output[-6000:]
    return folder


def one_process(num_stages: int, microbatches: int) -> dict[str, torch.Tensor]:
    stages = {stage: make_stage(stage) for stage in range(num_stages)}
    value, target = make_batch(microbatches)
    for module in stages.values():
        value = module(value)
    torch.nn.functional.mse_loss(value, target).backward()
    return gradients_of(stages)


@pytest.mark.parametrize("name", [*ORDERS, "schedule"])
def test_pytorch_runs_the_csv_with_the_gradients_of_one_process(folder, name):
    devices, microbatches = ([0, 1, 1, 0], 5) if name == "schedule" else ORDERS[name][1:]
    found = {}
    for rank in range(max(devices) + 1):
        found |= torch.load(folder / f"{name}.{rank}.pt")
    expected = one_process(len(devices), microbatches)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", [*ORDERS, "schedule"])
def test_what_pytorch_ran_is_read_back_as_the_same_order(folder, name):
    """The list that the ranks went through, with PyTorch's communication in it."""
    text = (folder / f"{name}.csv.comms").read_bytes().decode()
    assert "SEND_F" in text
    assert "REDUCE_GRAD" in text
    assert parse_csv(text) == parse_csv((folder / f"{name}.csv").read_text())


@pytest.mark.parametrize(("name", "num_ranks", "num_stages", "num_microbatches"), [
    ("LoopedBFS", 4, 8, 8), ("Interleaved1F1B", 2, 6, 6), ("InterleavedZeroBubble", 4, 8, 8), ("ZBVZeroBubble", 4, 8, 8),
    ("DualPipeV", 4, 8, 10)])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_pytorchs_own_schedules_are_read(tmp_path, name, num_ranks, num_stages, num_microbatches, form):
    from torch.distributed.pipelining.schedules import get_schedule_class

    numbers = [0, num_stages - 1] if "V" in name else range(0, num_stages, num_ranks)
    stages = [SimpleNamespace(num_stages=num_stages, group_size=num_ranks, group_rank=0, stage_index=number, submod=None,
                              has_backward=True)
              for number in numbers]
    schedule = get_schedule_class(name)(stages, num_microbatches, loss_fn=torch.nn.functional.mse_loss)
    path = tmp_path / "schedule.csv"
    schedule._dump_csv(str(path), format=form)
    order = parse_csv(path.read_bytes().decode(), num_ranks=num_ranks)
    own = [[(part.stage_index, str(part.computation_type.value), part.microbatch_index) for action in actions
            if action is not None for part in action.sub_actions or [action]] for actions in schedule.pipeline_order.values()]
    assert order == own


def test_pytorchs_1f1b_list_is_refused_where_its_last_row_is_wrong():
    """In torch 2.13 the last rank's forwards are numbered from 1; a version in which that is mended is read."""
    from torch.distributed.pipelining import Schedule1F1B

    stage = SimpleNamespace(num_stages=4, group_size=4, group_rank=0, stage_index=0, is_first=True, is_last=False,
                            has_backward=True)
    rows = Schedule1F1B(stage, 8, loss_fn=torch.nn.functional.mse_loss)._get_pipeline_order()
    text = "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows.values())
    if "3F8" in text:
        with pytest.raises(PlanError, match="'3F0' is missing"):
            parse_csv(text)
    else:
        parse_csv(text)
