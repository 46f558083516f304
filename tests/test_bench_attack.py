"""A small attack on every kind of file that the commands read; ``benchmarks/bench_attack.py`` is the large one."""

from __future__ import annotations

import json
import os
import time

import pytest

from benchmarks import bench_attack
from benchmarks.attack_targets import TARGETS, make_clean
from benchmarks.bench_attack import Verdict, attack, list_jobs, mutant_of, summary
from weft.base.errors import InputError


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attack") / "clean"
    folder.mkdir()
    make_clean(folder)
    return folder


def test_mutants_of_every_kind_end_in_a_result_or_one_clear_error(clean, capfd):
    verdicts = [attack(kind, number, 7, clean, 0.0) for kind, number in list_jobs(250, None) if kind != "options"]
    capfd.readouterr()
    defects = [f"{item.kind} {item.number}: {', '.join(item.defects)}\n{item.why}" for item in verdicts if item.defects]
    assert not defects, "\n".join(defects)
    rows = {row["file"]: row for row in summary(verdicts)}
    assert set(rows) == {*TARGETS, "all"} - {"options"}
    assert rows["all"]["accepted"] > 30
    assert rows["all"]["refused"] > 100


def test_mutants_are_the_same_for_the_same_seed(clean):
    for kind in TARGETS:
        assert mutant_of(kind, 3, 1, clean) == mutant_of(kind, 3, 1, clean)
    assert len({mutant_of("plan", number, 1, clean)[1] for number in range(20)}) > 10


def test_parts_are_all_mutants_together():
    assert sorted([*list_jobs(500, None, "1/2"), *list_jobs(500, None, "2/2")]) == sorted(list_jobs(500, None))


def test_a_command_that_is_told_to_search_for_ever_ends_by_ctrl_c(clean):
    path = clean.parent / "told" / "texts.json"
    path.parent.mkdir()
    path.write_text(json.dumps(["schedule", "@problem.json", "-n", "3", "--time-limit", str(2**63), "-q"]))
    with pytest.raises(InputError, match="exit code 130"):
        TARGETS["texts on the command line"].read(path, True)


def _crash(_path, _use):
    raise KeyError("not Weft's own")


def _eat(_path, _use):
    bytearray(1200 << 20)[::4096] = bytes(1) * (1200 << 8)


def _burn(_path, _use):
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(("read", "defect"), [(_crash, "untyped"), (_eat, "fat"), (_burn, "slow")])
def test_defects_are_seen(clean, monkeypatch, read, defect):
    monkeypatch.setattr(bench_attack, "MAX_S", 0.04 if defect == "slow" else 60.0)
    target = TARGETS["graph"]
    monkeypatch.setitem(bench_attack.TARGETS, "graph", type(target)(file=target.file, mutate=target.mutate, read=read))
    assert attack("graph", 0, 0, clean, 0.0).defects == (defect,)


def test_a_worker_that_dies_is_a_defect_and_the_rest_goes_on(clean, monkeypatch):
    monkeypatch.setattr(bench_attack, "_work", _die_once)
    jobs = [("graph", 0), ("graph", 1), ("graph", 2)]
    verdicts = list(bench_attack.run(jobs, seed=0, clean=clean, workers=1))
    assert [(item.number, item.what) for item in verdicts] == [(0, "accepted"), (1, "untyped"), (2, "accepted")]
    assert "the process ended with 3" in verdicts[1].why


def _die_once(jobs, seed, clean, pipe):
    for kind, number in jobs:
        pipe.send((kind, number))
        if number == 1:
            os._exit(3)
        pipe.send(Verdict(kind=kind, number=number, what="accepted"))
    pipe.send(None)
