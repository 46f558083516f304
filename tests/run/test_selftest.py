"""The self-test passes with gloo, on queues without tags; what hangs or fails is said and ended."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from weft.base.errors import InputError, RunError
from weft.plan.check import check_program
from weft.plan.lower import lower
from weft.run import selftest
from weft.run.prepare import Tracer
from weft.run.selftest import CONTROL, Ranks, is_right, main, run_all
from weft.run.selftest_plans import KINDS, World, model_of


def left_behind() -> list[str]:
    """Return processes and folders of a self-test that are still there."""
    mine = f"weft-selftest-{os.getpid()}-"
    found = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(mine)]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mine in (process / "environ").read_text(errors="replace"):
                found.append(process.name)
        except OSError:
            continue
    return found


def job(kind: str, *, compiled: bool = False) -> dict[str, object]:
    return {"kind": kind, "compiled": compiled}


@pytest.mark.timeout(120)
def test_a_few_kinds_on_four_ranks_and_a_control(capsys):
    assert main(["--device", "cpu", "--eager", *(word for kind in ("parameter-server", "interleaved", "zero-bubble", "wide-stage")
                                                 for word in ("--only", kind))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", kind] for kind in (
        "parameter-server", "interleaved", "zero-bubble", "wide-stage", "control")]
    assert left_behind() == []


@pytest.mark.timeout(120)
def test_what_fails_is_said_and_new_ranks_go_on():
    rows = run_all([job("no such kind"), job(CONTROL), job("opposite")], num_ranks=2, device="cpu")
    assert [is_right(row) for row in rows] == [False, True, True]
    assert "KeyError" in rows[0]["error"]
    assert max(rows[1]["loss_error"], rows[1]["gradient_error"]) > 1e-3
    assert max(rows[2]["loss_error"], rows[2]["gradient_error"], rows[2]["later_error"]) < 1e-10
    assert left_behind() == []


@pytest.mark.timeout(120)
def test_what_hangs_is_ended(tmp_path):
    with Ranks(2, "cpu", tmp_path) as ranks:
        ranks.ask(None, limit_s=60)
        with pytest.raises(RunError, match="no answer within 0 s from rank 0, 1"):
            ranks.ask(job("1f1b"), limit_s=0.0)
    assert all(child.returncode is not None for child in ranks._children)


def test_compiled_stages_are_tried_where_there_is_a_compiler(monkeypatch):
    """They take a minute to compile, so not here; ``tests/run`` has others."""
    found: list[list[tuple[str, bool]]] = []

    def note(jobs, **options):
        found.append([(item["kind"], item["compiled"]) for item in jobs])
        return []

    monkeypatch.setattr(selftest, "run_all", note)
    for compiler in ("g++", None):
        monkeypatch.setattr(selftest.shutil, "which", lambda name, compiler=compiler: compiler)
        main(["--device", "cpu", "--only", "1f1b", "--json"])
    main(["--device", "cpu", "--only", "1f1b", "--eager"])
    assert found == [[("1f1b", False), ("1f1b", True), (CONTROL, False)], *[[("1f1b", False), (CONTROL, False)]] * 2]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_kind_is_a_sound_plan_for_any_number_of_ranks(num_ranks):
    for kind, make in KINDS.items():
        mode = "inference" if kind == "inference" else "training"
        graph = Tracer(model_of(num_ranks).with_mode(mode)).trace(1).graph
        plan = make(World(num_ranks=num_ranks, graph=graph, mode=mode))
        check_program(lower(plan, graph))
        assert len(plan.cluster.devices) == num_ranks


def test_wrong_numbers_of_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(selftest.torch.cuda, "device_count", lambda: 1)
    for arguments in (["--ranks", "1"], ["--device", "cuda"], ["--device", "cuda", "--ranks", "2"]):
        with pytest.raises(InputError, match="at least 2 are needed, and a GPU for each"):
            main(arguments)
