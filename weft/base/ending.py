"""How a command ends: by a signal, and with the last of its output.

SIGTERM, and SIGHUP when the terminal is gone, end it as an error would, so that processes and temporary files go as
well. The exit code is 128 + the signal's number, as Ctrl-C gives 130.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Final, NoReturn

from weft.base.errors import InputError

ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
PATIENCE_S: Final = 10.0
"""How long a command may take to end in order; a call that keeps Python from running may take longer."""


def end_on_signals() -> None:
    """Let this process end in order on ``ENDING``; those that it was started to ignore (``nohup``) stay ignored."""
    wanted = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in wanted:
        signal.signal(number, _end)
    received, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=_end_at_last, args=(received, wanted), name="weft-signals", daemon=True).start()


def _end(number: int, _: object) -> NoReturn:
    for other in (*ENDING, signal.SIGINT):  # a second one must not disturb the end
        signal.signal(other, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        print(f"weft: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def _end_at_last(received: int, wanted: list[signal.Signals]) -> None:
    """End the process some time after a signal, if it is still there: its main thread did not see it."""
    while True:
        for number in os.read(received, 16):
            if number in wanted:
                time.sleep(PATIENCE_S)
                os._exit(128 + number)


def output_failed(problem: OSError) -> int:
    """Say that what was printed could not be written, and return the exit code."""
    print(f"weft: cannot write the output: {problem.strerror}", file=sys.stderr)
    return InputError.exit_code


def finish_output(code: int) -> int:
    """Return the exit code after the last of the output is written; a reader who has gone away is not an error."""
    if sys.stdout is None:  # it was closed before the command began
        return code
    try:
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        pass
    except OSError as problem:
        code = code or output_failed(problem)
    with contextlib.suppress(OSError):  # what is left would fail again at the very end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
