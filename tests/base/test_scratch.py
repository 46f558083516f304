"""Temporary folders of processes that are gone go with the next one; those of processes that live stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from weft.base.scratch import scratch_folder, sweep

ROOT = Path(__file__).resolve().parents[2]
HOLD = "import time\nfrom weft.base.scratch import scratch_folder\nwith scratch_folder('weft-run-') as path:\n    print(path, flush=True)\n    time.sleep(60)"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_has_left_goes_with_the_next_folder(place):
    child = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                             env={**os.environ, "TMPDIR": str(place)})
    try:
        left = Path(child.stdout.readline().strip())
        sweep("weft-run-")
        assert left.is_dir(), "its process lives"
    finally:
        child.kill()
        child.communicate()
    assert left.is_dir(), "nobody has removed it yet"
    with scratch_folder("weft-run-") as path:
        assert list(place.iterdir()) == [path]
    assert list(place.iterdir()) == []


def test_what_is_not_known_to_be_abandoned_stays(place):
    for name in (f"weft-run-{os.getpid()}-young", "weft-run-strange", f"weft-other-{2**22 + 1}-x", f"mine-{2**22 + 1}-x"):
        (place / name).mkdir()
    (place / f"weft-run-{2**22 + 1}-file").write_text("")
    (place / f"weft-run-{2**22 + 1}-link").symlink_to(place / "mine")
    old = place / f"weft-run-{os.getpid()}-old"
    old.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    sweep("weft-run-")
    assert {path.name for path in place.iterdir()} == {
        f"weft-run-{os.getpid()}-young", "weft-run-strange", f"weft-other-{2**22 + 1}-x", f"mine-{2**22 + 1}-x",
        f"weft-run-{2**22 + 1}-link"}


SLEEP = "import sys, time\nfrom weft.base.ending import end_on_signals\nend_on_signals()\nprint('ready', flush=True)\ntime.sleep(60)"
DEEP = """import ctypes, signal, sys, threading
from weft.base import ending
ending.PATIENCE_S = 0.1
ending.end_on_signals()
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
threading.Timer(1.0, print, ('ready',), {'flush': True}).start()  # the main thread is in its call by then
ctypes.CDLL(None).sleep(60)"""


@pytest.mark.parametrize(("script", "number", "ignored", "code"), [
    (SLEEP, signal.SIGHUP, False, 129), (SLEEP, signal.SIGTERM, False, 143), (SLEEP, signal.SIGHUP, True, 143),
    (DEEP, signal.SIGHUP, False, 129)], ids=["hangup", "told to end", "nohup", "main thread in a long call"])
def test_a_signal_ends_a_command_with_its_code(script, number, ignored, code):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        if ignored:
            time.sleep(0.2)
            child.terminate()
        _, text = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == code
    assert text == ("" if script == DEEP else f"weft: ended by {'SIGTERM' if code == 143 else 'SIGHUP'}\n")
