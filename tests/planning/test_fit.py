"""What fits, by how much: the quick account against the whole plans', and what is recommended against the planner."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from tests.worlds import chain_graph, plain_cluster
from weft.base.errors import NoFeasiblePlan
from weft.cli.main import main
from weft.cluster import read_cluster
from weft.cost.costs import estimate_costs
from weft.model.folded import trace_folded
from weft.model.load import load_graph_for
from weft.model.source import resolve_model
from weft.plan.check import check_plan
from weft.plan.lower import lower
from weft.plan.memory import account_memory
from weft.planning.compare import compare_strategies
from weft.planning.fit import Setting, _Fitter, describe, fit, memory_cuts, plan_of, problem_with
from weft.search.common.problem import PlanOptions, Problem
from weft.search.deploy.find_splits import find_splits
from weft.search.joint.baselines import STRATEGIES


@pytest.fixture(scope="module")
def tiny():
    return load_graph_for("gpt2-tiny", batch_dims=True)


def problem_on(graph, cluster, **options) -> Problem:
    return Problem(graph=graph, cluster=cluster, costs=estimate_costs(graph, cluster),
                   options=PlanOptions(**{"batch": 16, **options}))


def with_capacity(cluster, size: int):
    return replace(cluster, devices=tuple(replace(device, memory_bytes=size) for device in cluster.devices))


def peaks_of(plan, problem: Problem) -> list[int]:
    account = account_memory(lower(plan, problem.graph))
    return [account.peak_bytes(rank) for rank in range(len(problem.devices))]


def judged(problem: Problem, setting: Setting, splits=None) -> list[int]:
    """Return the peaks of the devices in use, as ``fit`` finds them."""
    fitter = _Fitter(problem, lambda degree: {})
    fitter.splits |= splits or {}
    return [use.peak_bytes for use in fitter.judge(setting).uses]


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("strategy", ["single", "data-parallel"])
def test_peaks_of_copies_are_those_of_the_whole_plan(tiny, mode, microbatches, strategy):
    problem = problem_on(tiny, read_cluster("4 x A100-80GB"), mode=mode)
    whole = peaks_of(STRATEGIES[strategy](problem, microbatches), problem)
    assert judged(problem, Setting(strategy=strategy, microbatches=microbatches)) == [peak for peak in whole if peak]


def test_the_state_in_pieces_is_that_of_the_whole_plan(tiny):
    problem = problem_on(tiny, read_cluster("4 x A100-80GB"))
    setting = Setting(strategy="data-parallel", microbatches=4, sharded=True)
    whole = peaks_of(plan_of(problem, setting), problem)
    assert judged(problem, setting) == whole
    assert whole[0] < judged(problem, replace(setting, sharded=False))[0]


@pytest.mark.parametrize(("mode", "recompute"), [("training", False), ("training", True), ("inference", False)])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_peaks_of_pipelines_are_those_of_the_whole_plan(tiny, mode, recompute, microbatches):
    problem = problem_on(tiny, read_cluster("3 x A100-80GB"), mode=mode)
    setting = Setting(strategy="pipeline", microbatches=microbatches, recompute=recompute)
    setting = replace(setting, cuts=memory_cuts(problem_with(problem, setting)))
    assert judged(problem, setting) == peaks_of(plan_of(problem, setting), problem)


def test_peaks_of_tp_groups_are_those_of_the_whole_plan(tiny):
    cluster = read_cluster("4 x A100-80GB")
    problem = problem_on(tiny, cluster)
    folded = trace_folded(resolve_model("gpt2-tiny", batch=tiny.batch), batch=tiny.batch)
    splits = find_splits(problem, folded, lambda graph: estimate_costs(graph, cluster), degree=2)
    setting = Setting(strategy="tensor", microbatches=4, degree=2)
    plan = plan_of(problem, setting, splits)
    check_plan(plan, tiny, cluster)
    assert judged(problem, setting, splits) == peaks_of(plan, problem)


def test_pipelines_are_cut_by_memory():
    """The middle operators are large: equal cuts would fill one device, cuts by memory do not."""
    graph = chain_graph(8, parameter_bytes=4000, activation_bytes=40)
    sizes = graph.tensor_bytes.copy()
    sizes[[graph.tensor_index[f"w{op}"] for op in (0, 1)]] = 16000
    graph = replace(graph, tensor_bytes=sizes)
    problem = problem_on(graph, plain_cluster(2, memory_bytes=10**6), batch=4, microbatches=4)
    cuts = memory_cuts(problem)
    equal = peaks_of(STRATEGIES["1f1b"](problem, 4), problem)
    assert max(judged(problem, Setting(strategy="pipeline", microbatches=4, cuts=cuts))) < 0.85 * max(equal)
    assert cuts == (0, 2, 8)


def test_devices_of_their_own_size_get_what_they_can_hold():
    graph = chain_graph(8, parameter_bytes=4000, activation_bytes=40)
    cluster = plain_cluster(2, memory_bytes=10**6)
    cluster = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], memory_bytes=3 * 10**6)))
    assert memory_cuts(problem_on(graph, cluster, batch=4, microbatches=4)) == (0, 2, 8)


def test_what_is_recommended_fits_and_is_what_the_planner_makes(tiny):
    for size in (2**22, 2**23, 2**25):
        problem = problem_on(tiny, with_capacity(read_cluster("4 x A100-80GB"), size))
        found = fit(problem).recommended
        assert found is not None
        plan = plan_of(problem, found.setting)
        check_plan(plan, tiny, problem.cluster)
        assert {use.device: use.peak_bytes for use in found.uses} == {
            device.name: peak for device, peak in zip(problem.cluster.devices, peaks_of(plan, problem), strict=True) if peak}
        changed = problem_with(problem, found.setting)
        assert compare_strategies(changed, [found.setting.strategy]).best.plan is not None


def test_the_largest_microbatches_that_fit_are_taken(tiny):
    problem = problem_on(tiny, with_capacity(read_cluster("1 x A100-80GB"), 10**7))
    found = fit(problem).recommended
    assert found is not None
    number = found.setting.microbatches
    assert 1 < number < 16
    (fitting,), (larger,) = (judged(problem, replace(found.setting, microbatches=m)) for m in (number, number // 2))
    assert fitting <= 10**7 < larger


def test_the_nearest_miss_is_named(tiny):
    problem = problem_on(tiny, with_capacity(read_cluster("2 x A100-80GB"), 2**20))
    found = fit(problem)
    assert found.recommended is None
    assert found.nearest.setting.strategy == "pipeline"
    assert found.nearest.setting.recompute
    miss = found.miss()
    assert isinstance(miss, NoFeasiblePlan)
    assert miss.missing_bytes == found.nearest.fullest.peak_bytes - 2**20
    assert describe(found.nearest.setting) in str(miss)


def test_sharded_state_is_recommended_only_where_nothing_else_fits():
    graph = chain_graph(1, parameter_bytes=4_000_000, activation_bytes=40, batch=2)
    problem = problem_on(graph, plain_cluster(4, memory_bytes=15_000_000), batch=4)
    found = fit(problem).recommended
    assert found is not None
    assert found.setting.sharded
    roomy = fit(problem_on(graph, plain_cluster(4, memory_bytes=21_000_000), batch=4)).recommended
    assert roomy is not None
    assert not roomy.setting.sharded


SMALL = """format: weft.cluster
version: 1
kinds:
  small: {{memory: {memory}, memory_bandwidth: 900GB/s, flops: {{float32: 19TFLOP/s}}, overhead: 5us}}
hosts:
  - {{name: a, devices: "2 x small", intra: pcie4}}
"""


@pytest.mark.parametrize(("memory", "strategy"), [("1GiB", "data-parallel"), ("3MiB", "1f1b-balanced")])
def test_the_command_that_is_printed_makes_the_plan(capsys, tmp_path, monkeypatch, memory, strategy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL.format(memory=memory))
    assert main(["fit", "gpt2-tiny", "small.yaml", "--batch", "16", "-q", "--out", "mine.json"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert f"--strategy {strategy}" in command
    assert main(shlex.split(command)[1:]) == 0
    made, mine = (json.loads((tmp_path / name).read_text()) for name in ("plan.json", "mine.json"))
    for key in ("name", "ops", "recompute"):
        assert [stage[key] for stage in made["stages"]] == [stage[key] for stage in mine["stages"]]
    assert made["order"] == mine["order"]


def test_nothing_fits_is_an_exit_code_with_the_nearest_miss(capsys, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.format(memory="1MiB"))
    capsys.readouterr()
    assert main(["fit", "gpt2-tiny", str(path), "--batch", "16", "-q", "--json"]) == 3
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["fits"] is False
    assert result["command"] is None
    assert result["nearest"]["strategy"] == "pipeline"
    assert "too little" in captured.err


def test_where_nothing_simple_fits_the_joint_search_is_asked(tiny, monkeypatch, tmp_path, capsys):
    """Only one device is tried before it here; the search then finds what the simple ways would have found."""
    from weft.planning import fit as module

    monkeypatch.setattr(module._Fitter, "candidates", lambda fitter: iter([fitter._largest(module.Setting(strategy="single", microbatches=1), fitter.choices)]))
    problem = problem_on(tiny, with_capacity(read_cluster("4 x A100-80GB"), 3_000_000))
    found = fit(problem)
    assert found.recommended is not None
    assert found.recommended.setting.strategy == "joint"
    plan = found.recommended.plan
    check_plan(plan, problem.graph, problem.cluster)
    assert [use.peak_bytes for use in found.recommended.uses] == [peak for peak in peaks_of(plan, problem) if peak]
    cluster = tmp_path / "small.yaml"
    cluster.write_text("format: weft.cluster\nversion: 1\nkinds: {small: {memory: 3MB, memory_bandwidth: 900GB/s, "
                       "flops: {float32: 19TFLOP/s}}}\nhosts: [{name: a, devices: '4 x small', intra: pcie4}]\n")
    assert main(["fit", "gpt2-tiny", str(cluster), "--batch", "16", "-q", "-o", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"weft plan gpt2-tiny {cluster} --batch 16 --out plan.json")
    assert main(["check", str(tmp_path / "plan.json")]) == 0


def test_a_slower_device_with_enough_memory_is_taken(tiny):
    """The fastest has room for the parameters, not for the step."""
    cluster = read_cluster("1 x A100-80GB, 1 x RTX3090")
    sizes = {True: 4_000_000, False: 60_000_000}
    cluster = replace(cluster, devices=tuple(
        replace(device, memory_bytes=sizes[device.kind.startswith("A100")]) for device in cluster.devices))
    single = fit(problem_on(tiny, cluster, batch=8, microbatches=1)).candidates[0]
    assert single.fits
    assert single.fullest.capacity_bytes == 60_000_000
