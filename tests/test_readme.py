"""The README's commands and code run as they are written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from weft.cli.main import main

README = Path(__file__).parents[1] / "README.md"


def test_the_first_result_comes_within_twenty_lines():
    lines = README.read_text().splitlines()[:20]
    assert any("* data-parallel" in line for line in lines)


def test_commands_run_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [line[2:].split("#")[0] for line in README.read_text().splitlines() if line.startswith("$ weft ")]
    assert len(commands) >= 8
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
    text = capsys.readouterr().out
    for row in re.findall(r"^[* ] (?:single|data-parallel|1f1b-balanced) .*$", README.read_text(), re.MULTILINE):
        words = row.split()
        assert any(line.split()[: len(words)] == words for line in text.splitlines()), row
    assert "equal to one process" in text


def test_the_python_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    exec(compile(code[1], str(README), "exec"), {})
    assert re.match(r"\S+ \d", capsys.readouterr().out)
