"""What a kind of file is for the attack, and how commands are run on one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attack_mutators import Mutator
from weft.base.errors import InputError
from weft.cli.common import INTERRUPTED
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


LONG_S, PATIENCE_S = 4.0, 1.0
"""A command that is told to search for longer gets Ctrl-C after so long, and must end then with the best so far."""


def call(*arguments: object) -> None:
    """Run a command in this process; what it says is nobody's."""
    texts, code = [str(item) for item in arguments], INTERRUPTED
    with _ctrl_c_if_told_to_search_on(texts):
        code = main(texts)
    if code not in (0, 1, 2, 3, INTERRUPTED):
        raise AssertionError(f"exit code {code}")
    if code >= 2:
        raise InputError(f"exit code {code}")


@contextmanager
def _ctrl_c_if_told_to_search_on(texts: Sequence[str]) -> Iterator[None]:
    limit_s = 0.0
    with suppress(ValueError, IndexError):
        limit_s = float(texts[texts.index("--time-limit") + 1])
    if not limit_s > LONG_S:
        yield
        return
    press = threading.Timer(PATIENCE_S, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    press.start()
    try:
        yield
        press.cancel()
        press.join()
    except KeyboardInterrupt:  # it came when the command was over
        return
    finally:
        press.cancel()


def sibling(path: Path, name: str) -> Path:
    """Return a clean file beside the mutant's folder."""
    return path.parent.parent / "clean" / name
