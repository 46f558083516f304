"""The README's commands and code run as they are written, and print what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from weft.cli.main import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
_FENCE = re.compile(r"^```(json|yaml|console|python)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def check_page(page: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Return how many commands and pieces of code the page has, after each did what the page says, in this folder.

        json NAME    is written to that file; yaml NAME and python NAME likewise
        console      ``$`` commands, each followed by lines of its output; ``...`` stands for lines left out
        python       ``print(...)  # what it prints``
    """
    done, names = 0, dict[str, object]()
    for language, name, text in _FENCE.findall(page.read_text()):
        if name:
            Path(name).write_text(text)
        elif language == "console":
            done += sum(_check_command(item, capsys) for item in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:])
        elif language == "python":
            exec(compile(text, str(page), "exec"), names)
            printed = capsys.readouterr().out.splitlines()
            assert [line for line in _PRINTED.findall(text) if line not in printed] == [], printed
            done += 1
    return done


def _check_command(item: str, capsys: pytest.CaptureFixture[str]) -> bool:
    """Run a command and look for its lines; return whether it was run (``make`` is not)."""
    command, *lines = item.splitlines()
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        return False
    if words[0] != "weft":
        subprocess.run(command, shell=True, check=True, timeout=100)
        return True
    code = main(words[1:])
    is_answer = code == 0 or (words[1] == "diff" and code == 1)  # plans that differ are no error
    assert is_answer != any(line.startswith("weft: ") for line in lines), (command, code)
    captured = capsys.readouterr()
    assert _missing(lines, captured.err + captured.out) == [], command
    return True


def _missing(lines: list[str], text: str) -> list[str]:
    """Return the lines that do not come in the text, in their order; spaces, rules and CPU times do not matter."""
    found = iter([_plain(line) for line in text.splitlines()])
    return [line for line in lines if line.strip() not in ("", "...") and _plain(line) not in found]


def _plain(line: str) -> str:
    return re.sub(r"\S+ CPU seconds|\N{BOX DRAWINGS LIGHT HORIZONTAL}+", "", " ".join(line.split()))


def test_the_first_result_comes_within_twenty_lines():
    lines = README.read_text().splitlines()[:20]
    assert any("* data-parallel" in line for line in lines)


def test_commands_and_code_do_what_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    assert check_page(README, capsys) >= 10


def test_a_wrong_page_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for text in ("```console\n$ weft cluster show nowhere\n```\n", "```console\n$ weft models\nno-such-model\n```\n",
                 "```python\nprint(1)  # 2\n```\n"):
        Path("page.md").write_text(text)
        with pytest.raises(AssertionError):
            check_page(Path("page.md"), capsys)
