"""``python -m weft``: the same as the ``weft`` command."""

from __future__ import annotations

import sys


def entry() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it as it does later."""
    try:
        from weft.cli.main import entry as run
    except KeyboardInterrupt:
        print("weft: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    entry()
