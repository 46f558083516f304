"""What commands import late, each name when it is first used, so that ``--help`` loads no heavy library."""

from __future__ import annotations

import time

from weft.base.late import names_in_stub

__getattr__ = names_in_stub(__name__, __file__)


def import_seconds(*names: str) -> float:
    """Import what these names are from, and return the seconds that it took: no time limit counts them."""
    begin = time.perf_counter()
    for name in names:
        __getattr__(name)
    return time.perf_counter() - begin
