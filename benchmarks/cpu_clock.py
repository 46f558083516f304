"""``python -m benchmarks.cpu_clock ARGUMENTS``: a ``weft`` command whose clock is the CPU time of its process.

On a busy machine a time limit by the wall says little: most of it passes while others compute. With this clock the limit
is in CPU seconds, as on a quiet machine with one core, and so is what the command reports of imports and tracing.
Solvers keep the wall's clock for their own limits, and so end sooner than they would.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any


def main() -> None:
    """Change the clock and the alarm, then run the command."""
    clocks: Any = time
    clocks.monotonic = clocks.perf_counter = time.process_time
    signals: Any = signal
    signals.ITIMER_REAL, signals.SIGALRM = signal.ITIMER_PROF, signal.SIGPROF
    sys.argv[0] = "weft"
    from weft.cli.main import entry

    entry()


if __name__ == "__main__":
    main()
