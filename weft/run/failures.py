"""What a failed message or collective means: another rank is gone, or something is wrong here.

Backends raise ``RuntimeError`` for both, so the text decides. Only what speaks of the connection is a lost rank, whose
fault lies elsewhere; all else (a dtype that the backend does not take, no memory) is this rank's own, and keeps its
words.
"""

from __future__ import annotations

import re
from typing import Final

from weft.base.errors import RunError

_CONNECTION: Final = re.compile(
    r"connection (was |is |has been )?(likely )?(closed|reset|refused|aborted|lost|timed out)|connection abort"
    r"|broken pipe|reset by peer|closed by peer|peer (is )?closed|socket (is |was )?closed|socket timeout"
    r"|timed? ?out|timeout"  # gloo and the store; nccl's watchdog
    r"|not connected|connectfullmesh|connect\(\)? failed|failed to connect|cannot connect|could not connect"
    r"|failed to (send|recv)|(send|recv|read|write)(msg|v)? ?(error|failed)|(read|write) error|end of file"
    r"|unreachable|no route to host|host is down|network (error|is down)"
    r"|remote (process|worker|peer)|remoteerror|ncclsystemerror|unhandled system error|communicator was aborted"
    r"|nccl communicator .*abort|pair closure|store .*(gone|closed)", re.IGNORECASE)
"""How gloo, nccl and the store speak of a connection that is no more."""


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
