"""Placements: which stage is on which device, in every shape, and what is said where a model has no such shape."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.search.joint.test_baselines import mixed_cluster, problem_of
from tests.search.schedule.greedy import greedy_search
from tests.worlds import chain_graph, dag_graph
from weft.base.errors import InputError, NoFeasiblePlan
from weft.cli.main import main
from weft.cluster.cluster import Cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.model.load import load_graph_for
from weft.plan.check import check_plan
from weft.plan.memory import static_bytes
from weft.plan.plan import Optimizer
from weft.planning.compare import compare_strategies
from weft.search.common.problem import PlanOptions, Problem
from weft.search.common.problem import evaluate_plan as evaluate
from weft.search.joint import scheduled
from weft.search.joint.baselines import STRATEGIES
from weft.search.joint.placements import PLACEMENTS, guess_sharding
from weft.search.joint.scheduled import scheduled_plan

EQUAL = [1e12] * 4


def problem_with(graph: Graph, *, cluster: Cluster | None = None, batch: int = 16, **options) -> Problem:
    cluster = cluster or mixed_cluster(EQUAL)
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                   options=PlanOptions(batch=batch, **{"optimizer": Optimizer(kind="sgd"), **options}))


def table_graph(tables: tuple[int, ...], num_ops: int = 14, rows: int = 4000) -> Graph:
    """Return a chain of 16 x 16 matrices in which some operators read one and the same table of many rows."""
    graph = chain_graph(num_ops, batch=4, parameter_bytes=1024, activation_bytes=256, flops=1e9,
                        tied=tuple((tables[0], table) for table in tables[1:]))
    shapes = tuple((rows, 16) if name == f"w{tables[0]}" else (16, 16) if name.startswith("w") else shape
                   for name, shape in zip(graph.tensor_names, graph.tensor_shapes, strict=True))
    object.__setattr__(graph, "tensor_shapes", shapes)
    graph.tensor_bytes[graph.tensor_index[f"w{tables[0]}"]] = rows * 64
    return graph


def two_branches(num_ops: int = 6) -> Graph:
    """Return two chains that read different inputs, and a chain that reads both."""
    reads = [[index - 1] for index in range(num_ops)] + [[-1]] + [[num_ops + index] for index in range(num_ops - 1)]
    reads += [[num_ops - 1, 2 * num_ops - 1]] + [[2 * num_ops + index] for index in range(num_ops - 1)]
    graph = dag_graph(reads, batch=4)
    names = (*graph.tensor_names, "z")
    extra = {"tensor_names": names, "tensor_shapes": (*graph.tensor_shapes, (4, 2)), "tensor_dtypes": (*graph.tensor_dtypes, "float32")}
    for column, value in (("tensor_role", 1), ("tensor_producer", -1), ("tensor_bytes", 32), ("tensor_base", -1), ("is_saved", False),
                          ("tensor_batch_dim", 0)):
        extra[column] = np.append(getattr(graph, column), np.asarray(value, dtype=getattr(graph, column).dtype))
    inputs = graph.inputs.copy()
    inputs[graph.input_start[num_ops]] = len(names) - 1
    for column in (graph.flops, graph.input_grad_flops, graph.weight_grad_flops):
        column *= 1e9
    return replace(graph, **extra, inputs=inputs)


def devices_of(plan) -> list[tuple[str, ...]]:
    return [stage.replicas[0].devices for stage in plan.stages]


ALL = ("d0", "d1", "d2", "d3")
SHAPES = {
    "v": (0, [("d0",), ("d1",), ("d2",), ("d3",)]),
    "interleaved": (0, [("d0",), ("d1",), ("d2",), ("d3",)] * 2),
    "vv": (0, [("d0",), ("d1",), ("d2",), ("d3",), ("d3",), ("d2",), ("d1",), ("d0",)]),
    "x": (0, [("d0",), ("d1",), ("d2",), ("d3",), ("d3",), ("d2",), ("d1",), ("d0",)]),
    "m": ((0, 13), [ALL, ("d0",), ("d1",), ("d2",), ("d3",), ALL]),
    "nn": ((0, 6, 13), [ALL, ("d0",), ("d1",), ALL, ("d2",), ("d3",), ALL]),
    "k": (None, [("d0",), ("d1",), ("d2",), ("d3",), ALL]),
}


def graph_for(shape: str) -> Graph:
    tables = SHAPES[shape][0]
    return two_branches() if tables is None else table_graph(tables) if tables else chain_graph(
        24, batch=4, parameter_bytes=400, activation_bytes=400, flops=1e9)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("shape", PLACEMENTS)
def test_stages_stand_where_the_shape_says(shape, mode):
    problem = problem_with(graph_for(shape), mode=mode)
    plan = PLACEMENTS[shape](problem, 8)
    assert devices_of(plan) == SHAPES[shape][1]
    check_plan(plan, problem.graph, problem.cluster)
    for stage in plan.stages:
        assert stage.replicas[0].mesh == ({"tensor": 4} if len(stage.replicas[0].devices) > 1 else {})


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("shape", PLACEMENTS)
def test_a_found_schedule_is_checked_simulated_and_faster_than_one_by_one(shape, mode):
    problem = problem_with(graph_for(shape), mode=mode)
    skeleton = evaluate(PLACEMENTS[shape](problem, 8), problem).step_time_s
    plan = scheduled_plan(problem, 8, shape, greedy_search)
    found = evaluate(plan, problem).step_time_s
    assert found <= skeleton if mode == "inference" else found < skeleton
    assert plan.search.by == "schedule"
    assert plan.search.bound <= found


def test_opposite_pipelines_take_turns_and_hold_everything_twice():
    problem = problem_with(graph_for("x"))
    plan = PLACEMENTS["x"](problem, 6)
    assert [stage.microbatches for stage in plan.stages] == [(0, 2, 4)] * 4 + [(1, 3, 5)] * 4
    assert sum(len(exchange.parameters) for exchange in plan.gradients) == len(problem.graph.parameters)
    with pytest.raises(NoFeasiblePlan, match="even number of micro-batches, not 3"):
        PLACEMENTS["x"](problem_with(graph_for("x"), batch=15), 3)


def test_unequal_devices_get_unequal_stages():
    problem = problem_of(24, cluster=mixed_cluster([1e12, 3e12]), batch=8)
    plan = PLACEMENTS["interleaved"](problem, 8)
    work = {"d0": 0.0, "d1": 0.0}
    for stage in plan.stages:
        work[stage.replicas[0].devices[0]] += sum(problem.graph.flops[problem.graph.op_index[op]] for op in stage.ops)
    assert 2 < work["d1"] / work["d0"] < 4


def test_a_table_on_all_devices_is_held_in_parts_and_not_exchanged():
    problem = problem_with(table_graph((0, 13)))
    plan = PLACEMENTS["m"](problem, 8)
    assert plan.stages[0].sharding.tensors["w0"] == ("S0",)
    assert plan.gradients == ()
    static = static_bytes(check_plan(plan, problem.graph, problem.cluster))
    table, small = 4000 * 64, 1024
    assert static[:, 0].tolist() == [table // 4 + small * len(stage.ops) for stage in plan.stages[1:5]]
    assert static[:, 1].tolist() == static[:, 0].tolist()


def test_a_table_too_large_for_one_device_fits_on_all():
    problem = problem_with(table_graph((0, 13)), cluster=mixed_cluster(EQUAL, memory="300kB"))
    for strategy in ("single", "1f1b", "data-parallel"):
        with pytest.raises(NoFeasiblePlan):
            evaluate(STRATEGIES[strategy](problem, 8), problem)
    plan = scheduled_plan(problem, 8, "m", greedy_search)
    assert max(item.peak_bytes for item in evaluate(plan, problem).summary()) <= 300_000


def test_a_joint_stage_takes_its_part_of_the_time():
    problem = problem_with(table_graph((0, 13)))
    plan = PLACEMENTS["m"](problem, 8)
    alone = problem.costs.stage_figure(np.asarray([0]), 0, "F", 0.5).seconds
    assert plan.stages[0].replicas[0].times["F"] == pytest.approx(alone / 4)
    timeline = evaluate(plan, problem)
    spans = timeline.end_s - timeline.start_s
    assert spans[timeline.labels.index("F s0 mb 0")] == pytest.approx(alone / 4)


def test_only_what_stays_inside_a_stage_is_divided():
    graph = table_graph((0, 13))
    object.__setattr__(graph, "tensor_shapes", tuple((4, 4000) if name in ("y10", "y11") else shape for name, shape in
                                                     zip(graph.tensor_names, graph.tensor_shapes, strict=True)))
    sharding = guess_sharding(graph, np.asarray([0, 9, 10]), 4)
    assert "y10" not in sharding.tensors  # op 11 reads it outside
    assert guess_sharding(graph, np.asarray([0, 10, 11, 12]), 4).tensors["y10"] == ("S1",)


BAD = {
    "m without a large parameter": ("m", lambda: chain_graph(12, batch=4, parameter_bytes=4), r"no matrices|no parameter that is worth"),
    "m with equal matrices": ("m", lambda: table_graph((0,), rows=16), r"has no parameter that is worth to be spread .*Try placement v"),
    "m with a table in the middle": ("m", lambda: table_graph((0, 6)), r"layers.6 stands in the middle. Try nn, k or v"),
    "nn without one in the middle": ("nn", lambda: table_graph((0, 13)), r"has none in the middle. Try m, k or v"),
    "nn without one at the beginning": ("nn", lambda: table_graph((6,)), r"has none at the beginning"),
    "nn with several in the middle": ("nn", lambda: table_graph((0, 4, 10)), r"layers.4, layers.10 stand apart"),
    "nothing but tables": ("m", lambda: table_graph((0, 1, 2), num_ops=3), r"no parameter that is worth|no layers besides"),
    "k with one branch": ("k", lambda: chain_graph(12, batch=4), r"needs two branches .* has none. Try v or m"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_model_that_does_not_suit_is_refused_with_the_reason(case):
    shape, graph, message = BAD[case]
    with pytest.raises(NoFeasiblePlan, match=message):
        PLACEMENTS[shape](problem_with(graph()), 8)


@pytest.mark.parametrize("shape", PLACEMENTS)
def test_one_device_is_too_few(shape):
    with pytest.raises(NoFeasiblePlan, match="2 or more devices"):
        PLACEMENTS[shape](problem_with(graph_for(shape), cluster=mixed_cluster([1e12])), 8)


@pytest.mark.parametrize(("spec", "shape", "joint"), [
    ("gpt2-tiny:vocab=4096,layers=4", "m", ["transformer.wte", "lm_head"]),
    ("t5-base:layers=2,hidden=64,heads=4,ffn=128,vocab=4096,seq=16", "nn", ["encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]),
    ("flava:layers=2,joint_layers=1,hidden=64,heads=4,ffn=128,vocab=512,seq=8,image=32,classes=10", "k",
     ["flava.multimodal_model.encoder.layer.0"]),
])
def test_models_of_the_zoo(spec, shape, joint):
    problem = problem_with(load_graph_for(spec, mode="training", batch=2), batch=16)
    plan = scheduled_plan(problem, 8, shape, greedy_search)
    spread = [stage for stage in plan.stages if len(stage.replicas[0].devices) > 1]
    modules = {module for stage in spread for module in stage.modules}
    assert set(joint) <= modules
    assert evaluate(plan, problem).step_time_s < evaluate(STRATEGIES["single"](problem, 8), problem).step_time_s


def test_the_planner_compares_placements_with_strategies(monkeypatch):
    monkeypatch.setattr("weft.planning.compare.schedule_search", lambda **options: greedy_search)
    problem = problem_with(graph_for("v"), microbatches=8)
    comparison = compare_strategies(problem, ["1f1b"], placements=["v", "m", "vv"])
    assert [item.strategy for item in comparison.candidates] == ["1f1b", "schedule-v", "schedule-m", "schedule-vv"]
    by_name = {item.strategy: item for item in comparison.candidates}
    assert by_name["schedule-m"].plan is None
    assert "no parameter that is worth" in by_name["schedule-m"].reason or "no matrices" in by_name["schedule-m"].reason
    for name in ("schedule-v", "schedule-vv"):
        plan = by_name[name].plan
        assert plan.search.by == "schedule"
        assert plan.search.step_time == by_name[name].step_time_s >= plan.search.bound >= comparison.bound_s
    with pytest.raises(InputError, match="there is no placement 'w'; choose from v, x, m"):
        compare_strategies(problem, placements=["w"])


def test_split_backward_is_taken_where_it_is_faster():
    problem = problem_with(graph_for("v"))
    times = {split: evaluate(scheduled.find_schedule(PLACEMENTS["v"](problem, 8), problem, greedy_search, split_backward=split).plan,
                             problem).step_time_s for split in (False, True)}
    plan = scheduled_plan(problem, 8, "v", greedy_search)
    assert evaluate(plan, problem).step_time_s == min(times.values())
    assert times[False] != times[True]
    assert any(":I:" in token for token in itertools.chain(*plan.order.values())) == (times[True] < times[False])


def test_the_command_plans_shows_and_checks_a_placement(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("weft.planning.compare.schedule_search", lambda **options: greedy_search)
    plan, model, cluster = tmp_path / "plan.json", "gpt2-tiny:vocab=4096,layers=4", "4 x A100-80GB"
    arguments = ["plan", model, cluster, "--batch", "16", "--microbatches", "8", "--strategy", "single", "--placement", "m", "-q"]
    assert main([*arguments, "-o", str(plan), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in result["strategies"]] == ["single", "schedule-m"]
    assert result["best"] == "schedule-m"
    assert result["status"] == "feasible"
    assert main(["check", str(plan)]) == 0
    assert main(["show", str(plan), "--width", "100"]) == 0
    assert "a0 + a1 + a2 + a3" in capsys.readouterr().out
    first = plan.read_bytes()
    assert main([*arguments, "-o", str(plan), "--json"]) == 0
    assert plan.read_bytes() == first
    assert main([*arguments, "--placement", "w"]) == 2
    assert "there is no placement 'w'" in capsys.readouterr().err
