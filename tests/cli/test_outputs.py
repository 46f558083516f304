"""What commands write: looked at before the work begins, whole or not there, and one message where it cannot be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import weft.base.files
from weft.base.errors import InputError
from weft.base.files import check_output, write_atomic, written_together
from weft.cli.main import main
from weft.run.result import RunResult, load_result, save_result

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    "plan none none --out", "plan none none --html", "plan none none --trace", "simulate none --out", "simulate none --trace",
    "show none --html", "show none --trace", "fit none none --out", "export none --out", "import-order none none --out",
    "run none none --out", "run none none --checkpoint", "schedule none -n 2 --out", "schedule none -n 2 --html",
    "schedule none -n 2 --svg",
    "place none none --out", "place none none --html", "place none none --svg", "place none none --plan", "shard none none --out",
    "shard none none --plan", "deploy none none --out", "train-policy --out", "train-policy --resume", "cluster probe --out",
    "cluster from-topo none --out", "profile none --store"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_below_a_file_is_refused_before_the_work(command, tmp_path, capsys):
    """The inputs do not exist, so what is said first was looked at first."""
    (tmp_path / "file").write_text("old")
    path = tmp_path / "file" / "result.safetensors"
    assert main([*command.split(), str(path)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"weft: cannot write {str(path)!r}")
    assert f"{str(tmp_path / 'file')!r} is a file, not a folder" in text
    assert (tmp_path / "file").read_text() == "old"


def test_a_result_on_a_file_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("old")
    assert main(["run", "none", "none", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"weft: cannot write {str(tmp_path / 'file')!r}: it is a file\n"


def result(**facts) -> RunResult:
    return RunResult(num_ranks=1, losses=(1.0,), step_times_s=(0.1,), cpu_s=(0.1,), **facts)


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_nothing_of_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(InputError, match=r"cannot write .*result': No space left on device"):
        save_result(result(gradients={"w": np.zeros(3)}), tmp_path / "new" / "result")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_result_before_it(tmp_path, monkeypatch):
    save_result(result(gradients={"w": np.ones(3)}), tmp_path)
    monkeypatch.setattr(weft.base.files.os, "fdopen", full)
    with pytest.raises(InputError, match="No space left"):
        save_result(result(), tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gradients.npz", "result.json"]
    assert load_result(tmp_path).gradients is not None


def test_a_new_result_replaces_all_of_the_old_one(tmp_path):
    save_result(result(gradients={"w": np.ones(3)}), tmp_path)
    save_result(result(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_files_come_together_or_not_at_all(tmp_path):
    def write(last: str) -> None:
        with written_together(tmp_path / "out", ("a", "b")) as fresh:
            (fresh / "a").write_text("1")
            (fresh / last).write_text("2")

    with pytest.raises(InputError, match=r"cannot write .*out': No such file or directory"):
        write("c/b")
    assert not (tmp_path / "out").exists()
    write("b")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b"]


def test_a_folder_that_was_made_for_a_file_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(weft.base.files.os, "fdopen", full)
    with pytest.raises(InputError, match="No space left"):
        write_atomic(tmp_path / "a" / "b" / "c.json", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_and_a_link_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    check_output(tmp_path / "pipe")
    write_atomic(tmp_path / "pipe", "text")
    reader.join(10)
    assert found == ["text"]
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomic(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no device that is always full")
def test_a_result_that_cannot_be_printed_is_one_message():
    with open("/dev/full", "w") as output:
        done = subprocess.run([sys.executable, "-m", "weft", "cluster", "show", "2 x cpu", "--json"], stdout=output, cwd=ROOT,
                              stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "weft: cannot write the output: No space left on device\n")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 100 KiB, which only root can have."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(tmp_path)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("no disk can be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_really_full(small_disk, capfd):
    with pytest.raises(InputError, match="No space left on device"):
        save_result(result(gradients={"w": np.zeros(100_000)}), small_disk / "result")
    assert list(small_disk.iterdir()) == []
    (small_disk / "rest").write_bytes(b"x" * 80_000)
    with pytest.raises(InputError, match="No space left on device"):
        check_output(small_disk / "result", is_folder=True)
    assert capfd.readouterr().err == ""
