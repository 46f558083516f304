"""Weft's error types, split by what the reader must do about them.

Every message answers four questions: what is wrong, where, with which values, and what to try. The command line turns
an error into one message on stderr and the error's ``exit_code``; anything else that escapes is a bug in Weft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class WeftError(Exception):
    """The root of all errors that Weft raises on purpose.

    Messages quote names from files, so characters that a terminal would obey or cannot show are written as escapes.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class InputError(WeftError):
    """An option, an argument or a file that is none of the kinds below is wrong."""


class ModelError(InputError):
    """The model or graph file is wrong, or cannot be traced."""


class ClusterError(InputError):
    """The cluster file is wrong, or describes a cluster that cannot be used as asked."""


class PlanError(InputError):
    """The plan or program is wrong, or belongs to another model or cluster."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(printable(problem) for problem in problems)


class NoFeasiblePlan(WeftError):  # noqa: N818 - it is an answer rather than a fault
    """The input is fine, but no plan exists within the given resources."""

    exit_code = 3

    def __init__(self, message: str, *, missing_bytes: int | None = None, device: str | None = None,
                 needed: float | None = None) -> None:
        super().__init__(message)
        self.needed = needed
        """The smallest memory of ``device`` that would do, in the units of a schedule problem."""
        self.missing_bytes = missing_bytes
        """How much memory is missing on ``device``, or in all; None where something else is the reason."""
        self.device = device


class RunError(WeftError):
    """Something broke while a plan was being executed."""

    exit_code = 4


def printable(text: str, *, keep: str = "\n\t") -> str:
    """Return the text with everything unprintable but what is to ``keep`` as an escape: ``'\\x1b'``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)
