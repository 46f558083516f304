"""``weft schedule``: what it prints where, its files, its exit codes, and messages for files of any sort."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.limit_cases import schedule_problem
from tests.show.schedule_results import chain, hostile, joint, one_f_one_b, result_of
from weft.base.errors import NoFeasiblePlan
from weft.cli.main import main
from weft.search.schedule.problem import load_problem, problem_to_json, save_problem
from weft.search.schedule.schedule import Schedule, check_schedule

SEARCH = "weft.search.schedule.search"


@pytest.fixture
def problem(tmp_path) -> Path:
    save_problem(chain(2), tmp_path / "two.json")
    return tmp_path / "two.json"


@pytest.fixture
def calls(monkeypatch):
    """Replace the search by one that answers 1F1B and notes how it was called."""
    made = []

    def schedule(problem, *, microbatches, time_limit=None, seed=0, progress=lambda text: None):
        made.append({"microbatches": microbatches, "time_limit": time_limit, "seed": seed})
        progress("K 1, period 4")
        return result_of(one_f_one_b(problem, microbatches))

    monkeypatch.setitem(sys.modules, SEARCH, types.SimpleNamespace(schedule=schedule))
    return made


def run(capsys, *arguments: object, code: int = 0):
    capsys.readouterr()
    assert main(["schedule", *map(str, arguments)]) == code
    return capsys.readouterr()


def fails(capsys, *arguments: object, code: int = 2) -> str:
    captured = run(capsys, *arguments, code=code)
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_json_is_exactly_the_result_and_progress_goes_to_stderr(capsys, problem, calls):
    captured = run(capsys, problem, "--microbatches", 6, "--time-limit", 7.5, "--seed", 3, "--json")
    assert 0 < calls[0].pop("time_limit") < 7.5  # what reading has left of it
    assert calls == [{"microbatches": 6, "seed": 3}]
    value = json.loads(captured.out)
    assert value.pop("import_seconds") >= 0
    assert value == result_of(one_f_one_b(chain(2), 6)).to_json()
    assert "K 1, period 4" in captured.err
    assert run(capsys, problem, "--microbatches", 6, "--json", "--quiet").err == ""


def test_without_json_there_are_summary_devices_and_chart(capsys, problem, calls):
    text = run(capsys, problem, "--microbatches", 6, "--width", 60).out
    squeezed = " ".join(text.split())
    for part in ("status feasible", "makespan 28 (bound 14, gap 100 %)", "4 (bound 2; 1 micro-batch in a period of 4)",
                 "bubble 0.0 % of a period", "search 0.25 CPU seconds", "d0 85.7 % 2 2", "d1 85.7 % 1 2", "d0 |0",
                 "one period, 4 for 1 micro-batch"):
        assert part in squeezed, part
    assert "Named schedules" not in text
    assert max(map(len, text.splitlines())) <= 60


def test_compare_lists_named_schedules_beside_the_search(capsys, problem, calls):
    text = run(capsys, problem, "--microbatches", 6, "--compare").out
    assert text.count("* search") == 1
    assert "  gpipe" in text
    assert "no: d0 holds 6 at its fullest, its memory is 2" in text
    assert "do not apply here:" in text
    assert "idle" in text
    assert "1f1b 28 14.3 % 1 - 2 yes" in " ".join(text.split())
    value = json.loads(run(capsys, problem, "--microbatches", 6, "--compare", "--json").out)
    plain = json.loads(run(capsys, problem, "--microbatches", 6, "--json").out)
    named = {row["name"]: row for row in value.pop("named")}
    assert value == plain
    assert named["1f1b"] == {"name": "1f1b", "makespan": 28.0, "idle": pytest.approx(1 - 24 / 28), "fits": True,
                             "peak_memory": {"d0": 2.0, "d1": 1.0}, "reason": None}
    assert named["gpipe"]["fits"] is False
    assert named["gpipe"]["peak_memory"]["d0"] == 6.0
    assert named["zbv"]["makespan"] is None
    assert "does not apply" in named["zbv"]["reason"]


def test_a_shorter_named_schedule_would_be_marked(capsys, tmp_path, calls, monkeypatch):
    slow = result_of(Schedule(problem=chain(2), starts=2 * one_f_one_b(chain(2), 6).starts))
    monkeypatch.setitem(sys.modules, SEARCH, types.SimpleNamespace(schedule=lambda *_, **__: slow))
    save_problem(chain(2), tmp_path / "two.json")
    text = run(capsys, tmp_path / "two.json", "-n", 6, "--compare").out
    assert "* 1f1b" in text
    assert "* search" not in text


def test_files_are_written(capsys, problem, tmp_path, calls):
    html, svg, out = tmp_path / "new" / "a.html", tmp_path / "a.svg", tmp_path / "a.json"
    captured = run(capsys, problem, "-n", 6, "--html", html, "--svg", svg, "--out", out, "--compare", "--json")
    printed = json.loads(captured.out)
    assert json.loads(out.read_text()) == {key: item for key, item in printed.items() if key != "seconds"}
    assert "named" in json.loads(out.read_text())
    text = html.read_text()
    assert "<h1>two</h1>" in text
    assert "Named schedules" in text
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert {path.name for path in tmp_path.iterdir()} == {"two.json", "new", "a.svg", "a.json"}


def test_an_output_that_cannot_be_written_is_found_before_the_search(capsys, problem, tmp_path, calls):
    for option in ("--html", "--svg", "--out"):
        assert "it is a folder" in fails(capsys, problem, "-n", 2, option, tmp_path)
    assert calls == []
    assert "cannot write" in fails(capsys, problem, "-n", 2, "--svg", problem / "a.svg", "-q")


@pytest.mark.parametrize(("options", "message"), [
    (["-n", "0"], "--microbatches must be at least 1, not 0"), (["-n", "-3"], "--microbatches must be at least 1, not -3"),
    (["-n", "x"], "Invalid value for '--microbatches'"), ([], "Missing option"),
    (["-n", "2", "--time-limit", "0"], "--time-limit must be a number of seconds above 0"),
    (["-n", "2", "--time-limit", "nan"], "--time-limit must be a number of seconds above 0"),
    (["-n", "2", "--width", "0"], "--width must be at least 1"), (["-n", "2", "--width", "1000000"], "at most 100000"),
    (["-n", "2", "--colour"], "No such option")])
def test_bad_options_are_refused(capsys, problem, calls, options, message):
    text = " ".join(fails(capsys, problem, *options).replace("\u2502", " ").split())
    assert message in text
    assert calls == []


def test_infeasible_memory_has_its_own_exit_code(capsys, problem, monkeypatch):
    def schedule(*_, **__):
        raise NoFeasiblePlan("d0 can hold 0.5, f0 needs 1: the smallest memory that works is 1", device="d0")

    monkeypatch.setitem(sys.modules, SEARCH, types.SimpleNamespace(schedule=schedule))
    assert "the smallest memory that works is 1" in fails(capsys, problem, "-n", 2, code=3)


def test_hostile_names_go_through_everything(capsys, tmp_path, calls):
    (tmp_path / "p.json").write_text(json.dumps(problem_to_json(hostile())))
    captured = run(capsys, tmp_path / "p.json", "-n", 4, "--html", tmp_path / "a.html", "--svg", tmp_path / "a.svg", "--compare")
    assert all(line.isprintable() for line in captured.out.splitlines())
    captured.out.encode()
    names = set(json.loads(run(capsys, tmp_path / "p.json", "-n", 4, "--json").out)["peak_memory"])
    assert names == set(hostile().device_names)


# ---- files of any sort

GOOD = problem_to_json(chain(2, links=True))


def changed(path: str, value: object) -> dict:
    """Return the good problem with one place changed."""
    copy = json.loads(json.dumps(GOOD))
    *way, last = path.split("/")
    place = copy
    for key in way:
        place = place[int(key) if key.isdigit() else key]
    place[int(last) if last.isdigit() else last] = value
    return copy


BROKEN = {
    "not json": ("{", "is not valid JSON"), "empty": ("", "is not valid JSON"), "binary": (b"\xff\xfe\x00\x01\x80", "is not valid JSON"),
    "a list": ("[]", "must be an object"), "null": ("null", "must be an object"), "deep": ("[" * 100_000, "is nested more than 100 deep"),
    "nan": ('{"format": NaN}', "is not valid JSON"), "twice": ('{"format": 1, "format": 1}', "is there twice"),
    "format": (changed("format", "weft.plan"), "format must be 'weft.schedule-problem', not 'weft.plan'"),
    "version": (changed("version", 2), "version must be 1, not 2"),
    "field": (changed("extra", 1), "extra is not a known field"),
    "devices": (changed("devices", "d0"), "devices must be a list"), "no devices": (changed("devices", []), "names no device"),
    "device twice": (changed("devices/1/name", "d0"), "is there twice: 'd0'"),
    "device name": (changed("devices/0/name", 3), "devices[0].name must be text"),
    "memory": (changed("devices/0/memory", -1), "devices[0].memory must not be negative"),
    "memory text": (changed("devices/0/memory", "4GB"), "devices[0].memory must be a number"),
    "no blocks": (changed("blocks", []), "blocks is empty"), "blocks null": (changed("blocks", None), "blocks must be a list"),
    "time": (changed("blocks/0/time", -1), "blocks[0].time must not be negative"),
    "infinite": (changed("blocks/0/time", 10**400), "blocks[0].time must be a finite number"),
    "huge": (changed("blocks/0/time", 1e300), "blocks[0].time must be 0 or of a size between 1e-30 and 1e+30"),
    "tiny": (changed("transfers/0/time", 1e-320), "transfers[0].time must be 0 or of a size"),
    "huge memory": (changed("blocks/0/memory", -1e300), "blocks[0].memory must be 0 or of a size"),
    "time bool": (changed("blocks/0/time", True), "blocks[0].time must be a number"),
    "no device": (changed("blocks/0/devices", []), "blocks[0].devices is empty"),
    "unknown device": (changed("blocks/0/devices", ["d9"]), "blocks[0].devices names no device: 'd9'"),
    "device in block twice": (changed("blocks/0/devices", ["d0", "d0"]), "blocks[0].devices names a device twice"),
    "unknown block": (changed("blocks/1/after", ["f9"]), "blocks[1].after names no block: 'f9'"),
    "itself": (changed("blocks/1/after", ["f1"]), "wait for each other in a circle"),
    "circle": (changed("blocks/0/after", ["b0"]), "wait for each other in a circle"),
    "free": (changed("free_at", "middle"), "free_at must be one of 'start', 'end'"),
    "transfer": (changed("transfers/0/from", "f9"), "transfers[0].from names no block: 'f9'"),
    "transfer time": (changed("transfers/0/time", -0.5), "transfers[0].time must not be negative"),
    "transfer to itself": (changed("transfers/0/to", "f0"), "transfers[0] goes from a block to itself"),
    "link": (changed("transfers/0/link", 5), "transfers[0].link must be text"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_problem_file_gives_one_message(capsys, tmp_path, calls, kind):
    content, message = BROKEN[kind]
    data = content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode()
    (tmp_path / "p.json").write_bytes(data)
    text = fails(capsys, tmp_path / "p.json", "-n", 2)
    assert message in text
    assert text.startswith("weft: ")
    assert len(text) < 2000
    assert calls == []


def test_files_that_cannot_be_read_are_refused(capsys, tmp_path, calls):
    assert "no file" in fails(capsys, tmp_path / "none.json", "-n", 2)
    assert "cannot read" in fails(capsys, tmp_path, "-n", 2)
    (tmp_path / "p.json.gz").write_bytes(b"not packed")
    assert "cannot read" in fails(capsys, tmp_path / "p.json.gz", "-n", 2)


def test_the_library_is_not_loaded_for_help():
    script = ("import sys; from weft.cli.main import main; main(['schedule', '--help']); "
              "print(sorted({'numpy', 'ortools', 'numba', 'torch'} & set(sys.modules)), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
    for option in ("--microbatches", "--time-limit", "--seed", "--compare", "--html", "--svg", "--out", "--width", "--json", "--quiet"):
        assert option in done.stdout, option


# ---- with the search itself


@pytest.mark.parametrize("world", [chain(2), chain(3, links=True), joint()], ids=["chain", "links", "joint"])
def test_the_search_gives_a_checked_schedule(capsys, tmp_path, world):
    save_problem(world, tmp_path / "p.json")
    value = json.loads(run(capsys, tmp_path / "p.json", "-n", 4, "--time-limit", 20, "--json", "--compare").out)
    problem = load_problem(tmp_path / "p.json")
    names = {name: index for index, name in enumerate(problem.task_names)}
    starts = np.full((problem.num_tasks, 4), np.nan)
    for block, index, start in value["starts"]:
        starts[names[block], index] = start
    for source, target, index, start in value.get("transfer_starts", []):
        starts[names[f"{source}>{target}"], index] = start
    schedule = Schedule(problem=problem, starts=starts)
    check_schedule(schedule)
    assert schedule.makespan == pytest.approx(value["makespan"])
    assert value["makespan"] >= value["makespan_bound"] - 1e-9
    assert all(value["makespan"] <= row["makespan"] + 1e-9 for row in value["named"] if row["fits"])
    assert run(capsys, tmp_path / "p.json", "-n", 4, "--time-limit", 20, "--html", tmp_path / "a.html", "--svg",
               tmp_path / "a.svg").out.count("|") >= 4


def test_too_many_microbatches_are_refused(capsys, problem):
    assert "try fewer micro-batches" in fails(capsys, problem, "-n", 9999999999)


def test_ctrl_c_prints_the_best_schedule_so_far(tmp_path):
    """Of a problem that is not solved in seconds, so that there is something to end."""
    (tmp_path / "p.json").write_text(json.dumps(schedule_problem(16)))
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.cli.main", "schedule", tmp_path / "p.json", "-n", "64", "--time-limit", "60", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "makespan" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(timeout=10)
    assert process.returncode == 130
    value = json.loads(out)
    assert value["status"] == "feasible"
    assert len(value["starts"]) == 32 * 64


def test_memory_that_admits_no_schedule_names_what_would_do(capsys, tmp_path):
    from weft.search.schedule.problem import with_memory

    save_problem(with_memory(chain(2), {"d0": 0.5}), tmp_path / "p.json")
    text = fails(capsys, tmp_path / "p.json", "-n", 3, "-q", code=3)
    assert "d0" in text
    assert "1" in text
