"""Standard output without what compiled code prints there."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send to stderr what compiled code prints on stdout: the solver does so now and then, and nothing turns it off."""
    flush = ctypes.CDLL(None).fflush
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError):  # There is no stdout.
        yield
        return
    flush(None)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
