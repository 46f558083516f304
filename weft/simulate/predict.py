"""The prediction: a program, costs and a cluster in, a timeline out."""

from __future__ import annotations

from weft.cluster.cluster import Cluster
from weft.cost.costs import Costs
from weft.plan.program import Program
from weft.simulate.timeline import Timeline, make_timeline
from weft.simulate.timing import time_program


def simulate(program: Program, costs: Costs, cluster: Cluster) -> Timeline:
    """Return when each instruction of the program would run on the cluster.

    Raises ``PlanError`` if instructions wait for each other, with their places.
    """
    from weft.simulate.engine import Simulator  # compiled code, which only a simulation needs

    timed = time_program(program, costs, cluster)
    wiring = timed.wiring
    simulator = Simulator(timed.graph, describe=lambda task: program.place(int(wiring.leader[task])))
    simulator.run()
    return make_timeline(program, start_s=simulator.starts[wiring.first], end_s=simulator.ends[wiring.task],
                         kind="predicted", source=timed.source[wiring.task], wiring=wiring)
