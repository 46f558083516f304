"""All ranks go on together or end together: what one of them raises is raised on all, before anybody waits for it.

A rank that raises alone leaves the others waiting for a message that never comes. So what may fail on one rank alone
(the user's own functions, tracing, memory) is done inside ``together``: after it the ranks tell each other how it went.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import weft.base.errors
from weft.base.errors import RunError, WeftError
from weft.run.failures import PeerLost
from weft.run.transport import Transport


@contextmanager
def together(transport: Transport, doing: str) -> Iterator[None]:
    """Run the body, in which no message is sent, on all ranks; if it raises on any of them, raise on all of them.

    A rank that has failed raises what it met; the others name the first such rank, its reason and ``doing``.
    """
    problem: Exception | None = None
    try:
        yield
    except PeerLost:
        raise
    except Exception as found:
        problem = found
    if transport.num_ranks > 1 and transport.total(float(problem is not None)):
        raise_on_all(transport, problem, doing)
    if problem is not None:
        raise problem


def raise_on_all(transport: Transport, problem: Exception | None, doing: str) -> NoReturn:
    """Raise on all ranks, which know that one of them has a problem: its own there, on the others what it was."""
    if transport.num_ranks > 1:
        records = transport.gather_records(None if problem is None else _record(problem)) or []
        first = transport.share_record(next(([rank, *item] for rank, item in enumerate(records) if item), None))
        if problem is None:
            raise error_of(*first, doing=doing)
    assert problem is not None, "this rank or another has one"
    raise problem


def _record(problem: Exception) -> tuple[str, str]:
    return type(problem).__name__, str(problem)


def error_of(rank: int, kind: str, text: str, *, doing: str) -> WeftError:
    """Return the error of another rank as this one raises it: of the same class where it is one of Weft's."""
    known: Any = getattr(weft.base.errors, kind, None)
    if isinstance(known, type) and issubclass(known, WeftError):
        error: WeftError = known(f"{text} (on rank {rank})")
        return error
    return RunError(f"rank {rank} failed while {doing}: {kind}: {text}")
