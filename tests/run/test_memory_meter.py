"""The memory meter: every storage once, from when it is made until it is freed, whoever holds it."""

from __future__ import annotations

import gc
import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bench_random_plans import run_cases
from tests.run.plans import greedy_order, pipeline_plan, source_of, traced
from tests.run.pretended import measured, prepared
from weft.cli.main import main
from weft.model.live_storages import LiveStorages
from weft.plan.memory import CATEGORIES, account_memory
from weft.plan.plan import Optimizer, Plan, save_plan
from weft.run.memory_meter import CpuMemory, MemoryMeter, compare_memory, measure_step, measured_account, storage_bytes
from weft.run.optimizers import make_optimizer
from weft.run.prepare import Tracer
from weft.simulate.timeline import make_timeline
from weft.simulate.timeline_file import load_timeline, save_timeline

MODELS = Path(__file__).with_name("models.py")


def pipeline(optimizer: str = "none") -> Plan:
    return replace(pipeline_plan(traced("tiny_gpt").graph, [0, 1], greedy_order([0, 1], 3), microbatches=3),
                   optimizer=Optimizer(kind=optimizer, lr=0.1))


def test_views_count_nothing_and_what_autograd_keeps_counts_until_the_backward():
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    memory = LiveStorages([weight])
    assert memory.now() == 512
    with memory.watching():
        y = (weight @ weight).tanh()  # the product is freed, the result is kept
        assert (memory.now(), memory.peak()) == (1024, 1536)
        loss = y.view(-1)[1:].sum()
        del y
        assert memory.now() == 1024 + 8, "autograd keeps the result of tanh"
        loss.backward()
        del loss
    gc.collect()
    assert memory.now() == 1024, "the weight and its gradient"


def test_what_existed_before_does_not_count_and_what_is_resized_does():
    there, room = torch.zeros(4), torch.zeros(100)
    memory = LiveStorages([room])
    with memory.watching():
        there.add_(1)
        there.view(2, 2)
    assert memory.now() == 400
    room.untyped_storage().resize_(0)
    memory.add(room)
    assert memory.now() == 0


def test_tensors_of_a_helper_thread_count_and_may_be_freed_elsewhere():
    memory, kept = LiveStorages(), []

    def work() -> None:
        with memory.watching():
            kept.append(torch.zeros(1000, dtype=torch.float64))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert memory.now() == 8000
    kept.clear()
    assert memory.now() == 0


def test_the_meter_lets_autograd_add_up_in_place():
    """Was: operators were watched by a dispatch mode, under which autograd adds up in new memory: too much was measured."""
    def total() -> torch.Tensor:
        y = torch.ones(1000, dtype=torch.float64, requires_grad=True) * 2
        return (y * 2 + (y * 3 + y * 4)).sum()  # three gradients of y are added up

    loss = total()
    memory = CpuMemory()
    with memory.watching():
        memory.begin()
        loss.backward()
        memory.end()
    (reading,) = memory.readings()
    assert 2 * 8000 <= reading.peak < 2 * 8000 + 100, "the sum, and one that is added to it"
    watched, loss = LiveStorages(), total()
    with watched.watching():
        loss.backward()
    assert watched.peak() >= 3 * 8000, "the same under a dispatch mode: a new sum, too"


def test_a_workspace_is_told_from_what_an_operator_gives():
    x, weight = torch.ones(1, 2, 64, dtype=torch.float64), torch.ones(2, 2, 3, dtype=torch.float64)
    memory = CpuMemory()
    with memory.watching():
        memory.begin()
        kept = torch.nn.functional.conv1d(x, weight)  # in double precision by a product with a matrix of all windows
        memory.end()
        memory.begin()
        more = kept.clone()
        memory.end()
    first, second = memory.readings()
    assert first.inside > 0
    assert any(name.startswith("aten::") for name in first.at)
    assert first.peak - first.inside == storage_bytes([kept])
    assert (second.before, second.peak, second.inside) == (
        storage_bytes([kept]), storage_bytes([kept, more]), 0)


def test_another_thread_that_is_watched_counts():
    kept = []
    memory = CpuMemory()
    with memory.watching():
        memory.begin()

        def work() -> None:
            with memory.watching():
                kept.append(torch.zeros(1000, dtype=torch.float64))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        memory.end()
    (reading,) = memory.readings()
    assert reading.peak - reading.before == 8000


@pytest.mark.parametrize("optimizer", ["none", "adam"])
def test_the_meter_sees_what_the_allocator_sees(optimizer):
    """An independent measure: the profiler's events of the allocator, which know nothing of storages."""
    plan, tracer = pipeline(optimizer), Tracer(source_of("tiny_gpt"))
    for rank in range(2):
        ready, executor = prepared(tracer, plan, rank)
        executor.step()
        actions = list(executor.binder.actions)
        record = measure_step(executor, buffers=ready.buffers.values())
        assert executor.binder.actions == actions, "the executor is as it was"
        uncounted = storage_bytes(ready.buffers.values()) + record.static[CATEGORIES.index("optimizer")]
        assert max(record.peak) == pytest.approx(measured(tracer, plan, rank) + uncounted, rel=0.01)


def test_categories_and_the_curve_add_up_to_what_was_measured():
    plan, tracer = pipeline("adam"), Tracer(source_of("tiny_gpt"))
    records, program = [], None
    for rank in range(2):
        ready, executor = prepared(tracer, plan, rank)
        executor.step()
        records.append(measure_step(executor, buffers=ready.buffers.values()))
        program = executor.program
    held = measured_account(program, records)
    assert (held.activations >= 0).all()
    for rank, item in enumerate(compare_memory(program, account_memory(program), records)):
        assert held.held(rank).tolist() == list(records[rank].peak)
        assert item.measured_bytes == max(records[rank].peak)
        assert item.measured["optimizer"] == pytest.approx(item.account["optimizer"], rel=0.01)
        assert item.measured["parameters"] == item.account["parameters"]
        assert item.inside > 0


def test_a_measured_timeline_keeps_measured_memory_in_its_file(tmp_path):
    plan, tracer = pipeline(), Tracer(source_of("tiny_gpt"))
    records = []
    for rank in range(2):
        ready, executor = prepared(tracer, plan, rank)
        records.append(measure_step(executor, buffers=ready.buffers.values()))
    program = executor.program
    times = np.arange(program.num_instructions, dtype=np.float64)
    timeline = replace(make_timeline(program, start_s=times, end_s=times + 1, kind="measured"),
                       stored_memory=measured_account(program, records), memory_source="measured")
    save_timeline(timeline, tmp_path / "timeline.json")
    again = load_timeline(tmp_path / "timeline.json", program)
    assert again.memory_source == "measured"
    assert again.memory.peak_bytes(0) == max(records[0].peak) != account_memory(program).peak_bytes(0)


def test_a_meter_that_saw_no_step_says_so():
    _, executor = prepared(Tracer(source_of("tiny_gpt")), pipeline())
    with pytest.raises(Exception, match="take a step inside its context"):
        MemoryMeter(executor).record()


def test_complex_parameters_have_an_optimizer():
    """Was: RuntimeError of PyTorch, whose fused optimizers are for real numbers."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex128))
    for kind in ("sgd", "adam", "adamw"):
        optimizer = make_optimizer([weight], Optimizer(kind=kind, lr=0.1))
        weight.grad = torch.ones_like(weight) * 1j
        optimizer.step()
    assert torch.isfinite(torch.view_as_real(weight.detach())).all()


@pytest.mark.timeout(120)
def test_run_memory_prints_and_saves_the_account_beside_what_was_measured(tmp_path, capsys):
    plan = pipeline("adam")
    save_plan(plan, tmp_path / "plan.json")
    arguments = ["run", str(tmp_path / "plan.json"), f"{MODELS}:tiny_gpt", "--dtype", "float64", "--memory",
                 "--out", str(tmp_path / "out"), "--quiet"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "peak memory in MB" in printed
    assert printed.count("measured") == 2
    saved = json.loads((tmp_path / "out" / "result.json").read_text())["memory"]
    for item in saved:
        assert sum(item["measured"].values()) == pytest.approx(sum(item["account"].values()), rel=0.05)
    assert load_timeline(tmp_path / "out" / "timeline.json.gz").memory_source == "measured"


@pytest.mark.timeout(180)
def test_random_plans_equal_one_process_and_faults_are_seen():
    """A small part of ``benchmarks/bench_random_plans.py``."""
    cases = list(run_cases(12, 6, per_model=4))
    assert {case.result for case in cases} <= {"equal", "refused"}, [(case.kind, case.words) for case in cases]
    assert sum(case.result == "equal" for case in cases) >= 10
    controls = "".join(case.control for case in cases)
    assert ": seen;" in controls
    assert "NOT SEEN" not in controls
