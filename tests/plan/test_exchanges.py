"""Gradient exchanges that cannot be, each with the sentence that the user gets, and those that can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.worlds import linear_graph, plain_cluster, with_gradients
from weft.base.errors import PlanError
from weft.model.graph import Graph
from weft.plan.lower import lower
from weft.plan.plan import ClusterRef, GradientExchange, ModelRef, Plan, Replica, Stage, parse_plan, plan_to_json
from weft.plan.structure import structure_problems

DEVICES = ("d0", "d1", "d2", "d3")


def plan_of(graph: Graph, *, replicas: tuple[tuple[str, ...], ...] = tuple((name,) for name in DEVICES),
            **exchange) -> Plan:
    """Return one stage with these replicas; ``w0`` is exchanged as said, other parameters by all-reduce."""
    plan = with_gradients(Plan(
        model=ModelRef(name="chain", digest=graph.digest, batch=graph.batch),
        cluster=ClusterRef(digest=plain_cluster(4).digest, devices=DEVICES), microbatches=1,
        stages=(Stage(name="s", ops=graph.op_names, replicas=tuple(
            Replica(devices=group, mesh={"data": len(group)} if len(group) > 1 else {}, share=1 / len(replicas))
            for group in replicas)),),
        order=dict.fromkeys(DEVICES, ("s:F:0", "s:B:0"))), graph)
    given = {"parameters": ("w0",), "devices": DEVICES, **exchange}
    rest = tuple(name for item in plan.gradients for name in item.parameters if name not in given["parameters"])
    return replace(plan, gradients=(
        GradientExchange(**given), *([GradientExchange(parameters=rest, devices=DEVICES)] if rest else [])))


BROKEN = {
    "no server": ({"method": "parameter_server"},
                  "gradients[0].server is missing: name one of d0, d1, d2, d3"),
    "another server": ({"method": "parameter_server", "server": "d7"},
                       "gradients[0].server 'd7' is not one of its devices: name one of d0, d1, d2, d3"),
    "server of an all-reduce": ({"server": "d0"},
                                "gradients[0].server is for the method 'parameter_server', not for 'all_reduce': "
                                "leave it out"),
    "groups of factors": ({"method": "sufficient_factors", "groups": (DEVICES,)},
                          "gradients[0].groups is for the method 'hierarchical', not for 'sufficient_factors': "
                          "leave it out"),
    "no groups": ({"method": "hierarchical"},
                  "gradients[0].groups: 'd0' is in no group; the groups divide the exchange's devices, each in one of "
                  "them"),
    "a device in no group": ({"method": "hierarchical", "groups": (("d0", "d1"), ("d2",))},
                             "gradients[0].groups: 'd3' is in no group; the groups divide the exchange's devices, each "
                             "in one of them"),
    "a device in two groups": ({"method": "hierarchical", "groups": (DEVICES, ("d1",))},
                               "gradients[0].groups: 'd1' is in them 2 times; the groups divide the exchange's "
                               "devices, each in one of them"),
    "a strange device": ({"method": "hierarchical", "groups": (DEVICES, ("e",))},
                         "gradients[0].groups: 'e' is not one of the exchange's devices"),
    "an empty group": ({"method": "hierarchical", "groups": (DEVICES, ())}, "gradients[0].groups has an empty group"),
    "factors of another operator": ({"method": "sufficient_factors", "parameters": ("w0", "w1")},
                                    "gradients[0].parameters[1]: 'w1' is not the weight or bias of a linear operator "
                                    "(it is read by aten.mse_loss), so its gradient has no factors: use all_reduce"),
    "factors of stages on several devices": (
        {"method": "sufficient_factors", "replicas": (("d0", "d1"), ("d2", "d3"))},
        "gradients[0]: stages[0] ('s') has replicas of several devices; sufficient_factors needs replicas of one "
        "device each: use all_reduce"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_exchanges_are_refused(case):
    exchange, message = BROKEN[case]
    graph = linear_graph(8, 4, 3)
    plan = plan_of(graph, **exchange)
    assert message in structure_problems(plan, graph)
    with pytest.raises(PlanError):
        lower(plan, graph)


GOOD = [{"method": "parameter_server", "server": "d3"}, {"method": "sufficient_factors"},
        {"method": "hierarchical", "groups": (("d2", "d0"), ("d1",), ("d3",))}]


@pytest.mark.parametrize("exchange", GOOD, ids=lambda item: item["method"])
def test_good_exchanges_reach_the_program_and_the_file(exchange):
    graph = linear_graph(8, 4, 3)
    plan = plan_of(graph, **exchange)
    assert parse_plan(plan_to_json(plan)) == plan
    bucket = lower(plan, graph).buckets[0]
    assert (bucket.method, bucket.ranks) == (exchange["method"], (0, 1, 2, 3))
    assert bucket.server == (3 if "server" in exchange else None)
    assert bucket.groups == (((2, 0), (1,), (3,)) if "groups" in exchange else ())
    assert bool(bucket.factors.uses) is (exchange["method"] == "sufficient_factors")
