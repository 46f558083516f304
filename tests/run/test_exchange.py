"""Every way to exchange gradients equals one device, in all shapes of plans, and each control fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.run.plans import greedy_order, opposite_plan, pipeline_plan, replicated_plan, traced
from tests.run.pool import Pool
from tests.worlds import with_gradients, with_sufficient_factors
from weft.model.graph import Graph
from weft.plan.factors import block_size, find_factors, num_rows, share_inputs
from weft.plan.orders import one_f_one_b
from weft.plan.plan import GradientExchange, Optimizer, Plan
from weft.plan.structure import structure_problems

TOLERANCE = 1e-10
CONTROL = 1e-7
"""A control must be at least this far off."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(4, tmp_path_factory.mktemp("pool"), models=("tiny_gpt", "tied_gpt", "products")) as running:
        yield running


def by_factors(plan: Plan, graph: Graph, *, biases: bool = True) -> Plan:
    """Return the plan with factors for all linear operators, and all-reduce for the rest, or for biases too."""
    plan = with_sufficient_factors(plan, graph)
    if biases:
        return plan
    exchanges = []
    for item in plan.gradients:
        for is_matrix in (True, False):
            names = tuple(name for name in item.parameters
                          if (len(graph.tensor_shapes[graph.tensor_index[name]]) == 2) is is_matrix)
            method = item.method if is_matrix else "all_reduce"
            exchanges += [replace(item, parameters=names, method=method)] if names else []
    return replace(plan, gradients=tuple(exchanges))


def by_servers(plan: Plan) -> Plan:
    """Return the plan with each parameter's gradient summed by a server, another for each."""
    return replace(plan, gradients=tuple(
        GradientExchange(parameters=(name,), method="parameter_server", devices=exchange.devices,
                         server=exchange.devices[number % len(exchange.devices)])
        for exchange in plan.gradients for number, name in enumerate(exchange.parameters)))


def by_hosts(plan: Plan, groups: tuple[tuple[str, ...], ...]) -> Plan:
    return replace(plan, gradients=tuple(replace(item, method="hierarchical", groups=groups) for item in plan.gradients))


def four_replicas(graph: Graph, shares: tuple[float, ...] = (0.4, 0.2, 0.2, 0.2)) -> Plan:
    return replicated_plan(graph, [list(enumerate(shares))], microbatches=2, batch=20, num_devices=4)


def mixed(graph: Graph) -> Plan:
    """Return a plan that uses all methods, one for each few parameters."""
    plan = by_factors(four_replicas(graph), graph)
    (factors, rest), names = plan.gradients, plan.gradients[1].parameters
    parts = (names[:4], names[4:8], names[8:])
    return replace(plan, gradients=(
        replace(rest, parameters=parts[0]), factors,
        replace(rest, parameters=parts[1], method="parameter_server", server="d2"),
        replace(rest, parameters=parts[2], method="hierarchical", groups=(("d3", "d0"), ("d1",), ("d2",)))))


def cut_after_a_product(graph: Graph) -> Plan:
    """Return two stages on the same devices, of which the second begins with what a linear operator gives."""
    place = 1 + next(op for op, kind in enumerate(graph.op_kinds) if kind == "aten.linear" and op > graph.num_ops // 3)
    both = [(0, 2 / 3), (1, 1 / 3)]
    return replicated_plan(graph, [both, both], microbatches=2, batch=12, num_devices=4,
                           parts=[graph.op_names[:place], graph.op_names[place:]])


CASES = {
    "factors, a product at the border": ("tiny_gpt", lambda graph: by_factors(cut_after_a_product(graph), graph),
                                         "no_all_reduce"),
    "factors, uneven shares": ("tiny_gpt", lambda graph: by_factors(four_replicas(graph), graph), "even_weights"),
    "factors, biases apart": ("tiny_gpt", lambda graph: by_factors(four_replicas(graph), graph, biases=False),
                              "no_all_reduce"),
    "factors, tied weights": ("tied_gpt", lambda graph: by_factors(four_replicas(graph), graph), "no_all_reduce"),
    "factors, all products": ("products", lambda graph: by_factors(four_replicas(graph), graph), "no_all_reduce"),
    "factors in pipelines": ("tied_gpt", lambda graph: by_factors(replicated_plan(
        graph, [[(0, 2 / 3), (1, 1 / 3)], [(2, 2 / 3), (3, 1 / 3)]], microbatches=2, batch=12, num_devices=4), graph),
        "no_all_reduce"),
    "servers, uneven shares": ("tiny_gpt", lambda graph: by_servers(four_replicas(graph)), "even_weights"),
    "hosts 2 and 2": ("tiny_gpt", lambda graph: by_hosts(four_replicas(graph), (("d1", "d0"), ("d2", "d3"))),
                      "no_all_reduce"),
    "hosts 3 and 1": ("tied_gpt", lambda graph: by_hosts(four_replicas(graph), (("d3",), ("d2", "d0", "d1"))),
                      "no_all_reduce"),
    "factors, opposite pipelines": ("tiny_gpt", lambda graph: by_factors(opposite_plan(graph, 4, microbatches=4), graph),
                                    "no_all_reduce"),
    "all methods in one plan": ("tiny_gpt", mixed, "no_all_reduce"),
}


def test_which_operators_have_factors():
    graph = traced("products", batch_dims=True).graph
    factors = find_factors(graph, graph.parameters.tolist())
    names, ops = graph.tensor_names, graph.op_kinds
    found = sorted((names[use.weight], ops[use.op], None if use.bias is None else names[use.bias]) for use in factors.uses)
    assert found == [
        ("added", "aten.addmm", "bias"), ("coder", "aten.linear", None), ("coder", "aten.matmul", None),
        ("first.weight", "aten.linear", "first.bias"), ("key.weight", "aten.linear", "key.bias"),
        ("plain", "aten.matmul", None), ("turned", "aten.matmul", None), ("twice.weight", "aten.linear", "bias"),
        ("twice.weight", "aten.linear", "twice.bias"), ("twice.weight", "aten.linear", "twice.bias"),
        ("unused.weight", "aten.linear", "unused.bias"), ("value.weight", "aten.linear", "value.bias")]
    assert [names[tensor] for tensor in factors.shared] == ["coder"]  # its sum is added to something
    assert {num_rows(graph, use.op, 10) for use in factors.uses} == {30}


def test_rows_of_an_input_are_gathered_once():
    graph = traced("products", batch_dims=True).graph
    uses = find_factors(graph, [graph.tensor_index[f"{name}.weight"] for name in ("key", "value", "first")])
    together = share_inputs(uses, [range(graph.num_ops)])
    assert [use.takes_input_of for use in together.uses] == [None, None, 1]
    apart = share_inputs(uses, [[uses.uses[1].op], [use.op for use in (uses.uses[0], uses.uses[2])]])
    assert [use.takes_input_of for use in apart.uses] == [None, None, None]
    sizes = [block_size(graph, item, (30, 30, 30)) for item in (together, apart)]
    assert sizes == [30 * (5 + 6 + 6 + 6 + 6), 30 * (5 + 6 + 6 + 6 + 6 + 6)]


def test_what_has_no_factors_is_refused():
    graph = traced("products", batch_dims=True).graph
    plan = by_factors(four_replicas(graph), graph, biases=False)
    biases = replace(plan.gradients[0], parameters=("first.bias",))
    weights = replace(plan.gradients[0], parameters=tuple(
        name for name in plan.gradients[0].parameters if name != "first.weight"))
    rest = replace(plan.gradients[1], parameters=(
        "first.weight", *(name for name in plan.gradients[1].parameters if name != "first.bias")))
    assert structure_problems(replace(plan, gradients=(biases, weights, rest)), graph) == [
        "gradients[0].parameters[0]: 'first.bias' is a bias; the weight that belongs to it must be in the same exchange "
        "of sufficient_factors"]
    turn, = (name for name, kind in zip(graph.op_names, graph.op_kinds, strict=True) if kind == "aten.t")
    parts = [[turn], [name for name in graph.op_names if name != turn]]
    stages = tuple(replace(plan.stages[0], name=f"s{index}", ops=tuple(part)) for index, part in enumerate(parts))
    order = dict.fromkeys(plan.cluster.devices, ("s0:F:0", "s1:F:0", "s1:B:0", "s0:B:0", "s0:F:1", "s1:F:1", "s1:B:1", "s0:B:1"))
    apart = replace(plan, stages=stages, order=order)
    assert structure_problems(apart, graph) == [
        "gradients[0]: stages[1] ('s1') holds 'matmul_1' but not 't', which transposes its weight: put both into one "
        "stage"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(pool, case):
    model, make, damage = CASES[case]
    plan = make(traced(model, batch_dims=True).graph)
    result = pool.run(plan, model, steps=2)
    check = result["verification"]
    assert check["loss_error"] <= TOLERANCE
    assert check["gradient_error"] <= TOLERANCE, check["worst"]
    assert result["spread"] == 0.0
    control = pool.run(plan, model, damage=damage)["verification"]
    assert not control["passed"]
    assert max(control["gradient_error"], control["loss_error"]) > CONTROL


def doubled_pipeline(graph: Graph, *, recompute: bool = False, split: bool = False) -> Plan:
    """Return two stages with two replicas each, cut right before a linear operator, with many micro-batches.

    Its input arrives from the other stage, in a buffer that later micro-batches use again.
    """
    linear = [index for index, kind in enumerate(graph.op_kinds) if kind == "aten.linear"]
    middle = linear[len(linear) // 2]
    order = greedy_order([0, 1], 6, split=True) if split else one_f_one_b(2, 6)
    plan = pipeline_plan(graph, [0, 1], order, microbatches=6, batch=36, recompute=recompute,
                         ops=[list(graph.op_names[:middle]), list(graph.op_names[middle:])])
    pairs = (("d0", "d2"), ("d1", "d3"))
    stages = tuple(replace(stage, replicas=tuple(replace(stage.replicas[0], devices=(device,), share=share)
                                                 for device, share in zip(pair, (2 / 3, 1 / 3), strict=True)))
                   for stage, pair in zip(plan.stages, pairs, strict=True))
    names = ("d0", "d1", "d2", "d3")
    return with_gradients(replace(
        plan, stages=stages, order={device: plan.order[names[index % 2]] for index, device in enumerate(names)},
        cluster=replace(plan.cluster, devices=names)), graph)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"split": True}], ids=["B", "recompute", "I and W"])
def test_factors_inside_a_full_pipeline(pool, options):
    graph = traced("tied_gpt", batch_dims=True).graph
    plan = by_factors(doubled_pipeline(graph, **options), graph)
    assert [item.method for item in plan.gradients].count("sufficient_factors") == 3
    result = pool.run(plan, "tied_gpt", steps=2)
    assert result["verification"]["gradient_error"] <= TOLERANCE, result["verification"]["worst"]
    assert result["spread"] == 0.0


@pytest.mark.timeout(120)
def test_factors_and_sums_leave_inside_the_backward(pool):
    graph = traced("tiny_gpt", batch_dims=True).graph
    plan = four_replicas(graph)
    prefixes = ("head", "norm", "blocks.1.", "blocks.0.", "")
    names = list(plan.gradients[0].parameters)
    buckets = [[name for name in names if name.startswith(prefix)
                and not name.startswith(tuple(item for item in prefixes[:place]))]
               for place, prefix in enumerate(prefixes)]
    plan = by_factors(replace(plan, gradients=tuple(
        replace(plan.gradients[0], parameters=tuple(bucket)) for bucket in buckets)), graph)
    methods = [item.method for item in plan.gradients]
    assert methods == ["sufficient_factors", "all_reduce", "sufficient_factors", "all_reduce", "sufficient_factors",
                       "all_reduce", "all_reduce"]
    answer = pool.run(plan, "tiny_gpt", steps=1, warmup=2)
    assert answer["verification"]["gradient_error"] <= TOLERANCE
    line = answer["timeline"]
    spans = [[(label, start, end) for label, start, end, of in zip(
        line["labels"], line["start_s"], line["end_s"], line["rank"], strict=True) if of == rank] for rank in range(4)]
    ends = [max(end for label, _, end in items if label.startswith("B")) for items in spans]
    for items in spans:
        starts = [start for label, start, _ in items if not label.startswith(("F", "B"))]
        assert starts == sorted(starts)
        assert starts[2] < max(ends)
    control = pool.run(plan, "tiny_gpt", damage="too_early")["verification"]
    assert control["gradient_error"] > CONTROL


@pytest.mark.timeout(120)
def test_training_goes_the_same_way(pool):
    graph = traced("tiny_gpt", batch_dims=True).graph
    plan = replace(four_replicas(graph), optimizer=Optimizer(kind="sgd", lr=0.5))
    summed, gathered = (pool.run(item, "tiny_gpt", verify=False, steps=3)["losses"]
                        for item in (plan, by_factors(plan, graph)))
    assert abs(summed[2] - summed[0]) > 1e-2
    assert gathered == pytest.approx(summed, rel=1e-10)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["replicas", "factors", "tied weights in a pipeline of replicas"])
def test_divided_states_change_the_same_parameters(pool, case):
    model = "tied_gpt" if case.startswith("tied") else "tiny_gpt"
    graph = traced(model, batch_dims=True).graph
    plan = four_replicas(graph)
    if case == "factors":
        plan = by_factors(plan, graph)
    elif model == "tied_gpt":
        plan = replicated_plan(graph, [[(0, 0.5), (1, 0.5)], [(2, 0.25), (3, 0.75)]], microbatches=2, batch=16,
                               num_devices=4)
    plan = replace(plan, optimizer=Optimizer(kind="adamw", lr=0.05))
    whole, divided = (pool.run(replace(plan, optimizer=replace(plan.optimizer, sharded=sharded)), model, verify=False,
                               steps=4)["losses"] for sharded in (False, True))
    assert abs(whole[3] - whole[0]) > 1e-2
    assert divided == pytest.approx(whole, rel=1e-12)


LIMITS = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 1e-2}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", LIMITS)
def test_factors_differ_from_all_reduce_by_rounding_only(pool, dtype):
    graph = traced("tiny_gpt", batch_dims=True).graph
    plan = four_replicas(graph)
    ways = [pool.run(item, "tiny_gpt", dtype=dtype, verify=False, gradients=True)
            for item in (plan, by_factors(plan, graph))]
    summed, gathered = ([np.asarray(value) for _, value in sorted(way["gradients"].items())] for way in ways)
    scale = max(np.abs(value).max() for value in summed)
    errors = [np.abs(a - b).max() / max(np.abs(a).max(), 1e-2 * scale) for a, b in zip(summed, gathered, strict=True)]
    assert 0 < max(errors) <= LIMITS[dtype]
    assert ways[1]["spread"] == 0.0
