"""What a failure means, how it reaches the launcher, and how all ranks learn of it.

Backends raise ``RuntimeError`` for a rank that is gone and for faults of this one, so the text decides. Only what
speaks of the connection is a lost rank, whose fault lies elsewhere; all else (a dtype that the backend does not take,
no memory) is this rank's own, and keeps its words.

Why a rank failed stands in a small file, which has its room on the disk before anything can go wrong: so a rank can say
that the disk is full.

A rank that raises alone leaves the others waiting for a message that never comes. So what may fail on one rank alone
(the user's own functions, tracing, memory) is done inside ``together``: after it the ranks tell each other how it went.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import weft.base.errors
from weft.base.ending import finish_output
from weft.base.errors import RunError, WeftError

if TYPE_CHECKING:
    from weft.run.transport import Transport

_CONNECTION: Final = re.compile(
    r"connection (was |is |has been )?(likely )?(closed|reset|refused|aborted|lost|timed out)|connection abort"
    r"|broken pipe|reset by peer|closed by peer|peer (is )?closed|socket (is |was )?closed|socket timeout"
    r"|timed? ?out|timeout"  # gloo and the store; nccl's watchdog
    r"|not connected|connectfullmesh|connect\(\)? failed|failed to connect|cannot connect|could not connect"
    r"|failed to (send|recv)|(send|recv|read|write)(msg|v)? ?(error|failed)|(read|write) error|end of file"
    r"|unreachable|no route to host|host is down|network (error|is down)"
    r"|remote (process|worker|peer)|remoteerror|ncclsystemerror|unhandled system error|communicator was aborted"
    r"|nccl communicator .*abort|pair closure|store .*(gone|closed)", re.IGNORECASE)
"""How gloo, nccl and the store report a connection that is gone."""


_LATE: Final = re.compile(r"CUDA error|device-side assert", re.IGNORECASE)
_LATE_HINT: Final = (". A GPU tells of an error when the host next waits for it, so an earlier instruction may be the "
                     "cause: set CUDA_LAUNCH_BLOCKING=1 to have the right one named")


class PeerLost(RunError):  # noqa: N818 - it says what happened
    """A message or collective failed because another rank is gone or silent: the fault lies there."""


def is_connection_loss(problem: BaseException) -> bool:
    """Return whether an error of a backend is about the connection to another rank."""
    return isinstance(problem, ConnectionError | TimeoutError) or bool(_CONNECTION.search(str(problem)))


def failure(problem: BaseException, *, lost: str, doing: str) -> RunError:
    """Return what to raise for an error of a backend.

    ``lost`` says who is gone if it is about the connection, ``doing`` what was done if it is not.
    """
    if isinstance(problem, RunError):
        return problem
    if is_connection_loss(problem):
        return PeerLost(f"{lost}: {problem}")
    return RunError(f"{doing} failed: {problem}")


ROOM_BYTES: Final = 8192
_MAX_MESSAGE: Final = 1200
"""Characters; JSON writes one as up to six bytes."""


def make_room(folder: Path, rank: int) -> None:
    """Make the file of a rank, with nothing in it."""
    _path(folder, rank).write_bytes(b" " * ROOM_BYTES)


def exit_code_and_text(problem: Exception) -> tuple[int, str]:
    """Return the exit code of a rank that fails, and why it does."""
    code, text = RunError.exit_code, f"{type(problem).__name__}: {problem}"
    if isinstance(problem, WeftError):
        code, text = problem.exit_code, str(problem)
    return code, f"{text.rstrip()}{_LATE_HINT}" if _LATE.search(text) else text


def end_process(code: int) -> NoReturn:
    """End the process at once: threads of the backend may hang on lost connections, or abort when torn down."""
    code = finish_output(code)
    sys.stderr.flush()
    os._exit(code)


def write_failure(folder: Path, rank: int, problem: Exception) -> None:
    """Write down why this rank fails; a long message is cut."""
    code, text = exit_code_and_text(problem)
    text = json.dumps({"kind": "peer" if isinstance(problem, PeerLost) else "own", "type": type(problem).__name__,
                       "message": text[:_MAX_MESSAGE], "is_input": code != RunError.exit_code})
    with contextlib.suppress(OSError):  # the folder goes with the launcher
        handle = os.open(_path(folder, rank), os.O_WRONLY)
        os.write(handle, text.encode().ljust(ROOM_BYTES))
        os.close(handle)


def read_failure(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return what a rank that has ended wrote down; None if nothing."""
    try:
        text = _path(folder, rank).read_text(encoding="utf-8").strip()
        return dict(json.loads(text)) if text else None
    except (OSError, ValueError):
        return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


@contextlib.contextmanager
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
        rank, first = transport.first_record(None if problem is None else (type(problem).__name__, str(problem)))
        if problem is None:
            raise error_of(rank, *first, doing=doing)
    assert problem is not None, "this rank or another has one"
    raise problem


def error_of(rank: int, kind: str, text: str, *, doing: str) -> WeftError:
    """Return the error of another rank as this one raises it: of the same class where it is one of Weft's."""
    known: Any = getattr(weft.base.errors, kind, None)
    if isinstance(known, type) and issubclass(known, WeftError):
        error: WeftError = known(f"{text} (on rank {rank})")
        return error
    return RunError(f"rank {rank} failed while {doing}: {kind}: {text}")
