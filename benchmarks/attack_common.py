"""What a kind of file is for the attack, and how commands are run on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attack_mutators import Mutator
from weft.base.errors import InputError
from weft.cli.main import main

LIMIT_S = "0.2"
"""What a search may take where a mutant is a sound file after all."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of file."""

    file: str
    """Its name in the folder of clean files; a mutant has the same."""
    mutate: Mutator
    read: Callable[[Path, bool], None]
    """Reads the file, and with the flag uses what is in it as the commands do."""
    weight: int = 10
    use: float = 1.0
    """Part of the mutants that is used as well as read."""
    bombs: bool = False
    """Some mutants are small files, compressed, of very many values."""


def call(*arguments: object) -> None:
    """Run a command in this process; what it says is nobody's."""
    code = main([str(item) for item in arguments])
    if code not in (0, 1, 2, 3):
        raise AssertionError(f"exit code {code}")
    if code >= 2:
        raise InputError(f"exit code {code}")


def sibling(path: Path, name: str) -> Path:
    """Return a clean file beside the mutant's folder."""
    return path.parent.parent / "clean" / name
