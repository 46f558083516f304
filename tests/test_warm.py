"""What ``make`` compiles ahead is all that a placement needs."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import numpy as np
from numba.core import event
from weft.warm import PARTS, _small_problem, main
assert main(list(PARTS)) == 0
compiled = []
class Listener(event.Listener):
    def on_start(self, item):
        dispatcher = item.data.get("dispatcher")
        if dispatcher is not None and "weft" in dispatcher.py_func.__module__:
            compiled.append(dispatcher.py_func.__qualname__)
    def on_end(self, item):
        pass
event.register("numba:compile", Listener())
from weft.search.place.search import place
for objective in ("latency", "throughput"):
    place(_small_problem(), objective=objective, time_limit=1)
assert not compiled, compiled
print("ok")
"""


def test_a_placement_compiles_nothing_after_the_warm_up():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False,
                         env=dict(os.environ))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("ok")
