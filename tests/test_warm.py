"""What ``make`` compiles ahead is all that a placement, a strategy graph, a deployment or a schedule needs."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import numpy as np
from numba.core import event
from weft.warm import PARTS, _small_problem, _strategy_graph, _training_problem, main
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
from weft.search.strategies.search import solve
for limit in (None, 25 * 48):
    solve(_strategy_graph(limit), time_limit=1)
solve(_strategy_graph(None, steps=(1, 2)), time_limit=1)
from weft.search.deploy.search import DeployOptions, deploy
deploy(_training_problem(), DeployOptions(max_simulations=1000))
from benchmarks.schedule_shapes import shape
from weft.search.common.budget import Budget
from weft.search.schedule.steady import find_steady_state
find_steady_state(shape("nn", 4, memory=3), budget=Budget(effort=2.0))
assert not compiled, compiled
print("ok")
"""


def test_nothing_is_compiled_after_the_warm_up():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False,
                         env=dict(os.environ))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("ok")
