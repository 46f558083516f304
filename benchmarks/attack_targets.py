"""Every kind of file that Weft's commands read: a clean one, how it is mutated, and what reads and uses it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.attack_commands import (
    make_model,
    make_trainer,
    read_cluster_by_commands,
    read_plan_by_commands,
    read_sealed_state,
    read_store_by_commands,
    read_texts,
    read_training,
    read_weights_by_commands,
)
from benchmarks.attack_common import LIMIT_S, Target, call, sibling
from benchmarks.attack_formats import mutate_arrays, mutate_functions, mutate_plan, mutate_sound_tensors, mutate_texts
from benchmarks.attack_mutators import (
    NUMBERS,
    bomb,
    mutate_bytes,
    mutate_cells,
    mutate_json,
    mutate_onnx,
    mutate_sqlite,
    mutate_tensors,
    mutate_yaml,
)

CLUSTER = {
    "format": "weft.cluster", "version": 1, "name": "pair",
    "kinds": {"slow": {"flops": {"float32": "10TFLOP/s"}, "memory": "8GiB", "memory_bandwidth": "100GB/s", "overhead": "5us"}},
    "hosts": [{"name": "a", "count": 2, "devices": "1 x A100-80GB", "intra": "nvlink3"}],
    "devices": [{"name": "b", "kind": "slow", "host": "c", "memory": "4GB"}, {"name": "d", "kind": "slow", "host": "c", "unit": "one"}],
    "switches": ["s"], "network": {"bandwidth": "100Gbit/s", "latency": "10us", "per": "host"},
    "links": [{"from": "b", "to": "s", "bandwidth": "1GB/s", "latency": "1us"},
              {"from": "s", "to": "d", "bandwidth": 1e9, "latency": 0, "shared": "bus"}]}
GRAPH = {
    "format": "weft.graph", "version": 1, "name": "six",
    "ops": [{"name": "in", "kind": "relu", "flops": 1e6, "bytes_read": 1e5, "bytes_written": 1e5, "memory": 1000},
            {"name": "l", "kind": "mm", "flops": 1e9, "bytes_read": 1e6, "bytes_written": 1e6, "memory": 1000, "colocate": "x"},
            {"name": "r", "kind": "mm", "times": {"A100-80GB": 0.5, "slow": 2.0, "b": 1.0}, "on": ["A100-80GB", "slow"]},
            {"name": "l2", "flops": 1e8, "bytes_read": 1e5, "bytes_written": 1e5, "colocate": "x"},
            {"name": "r2", "times": {"A100-80GB": 0.1, "slow": 0.3}},
            {"name": "out", "kind": "add", "flops": 1e6}],
    "edges": [{"from": "in", "to": "l", "bytes": 1000, "tensor": "in:0"}, {"from": "in", "to": "r", "bytes": 1000, "tensor": "in:0"},
              {"from": "l", "to": "l2", "bytes": 1e6}, {"from": "r", "to": "r2", "bytes": 5e5}, {"from": "l2", "to": "out", "bytes": 10},
              {"from": "r2", "to": "out", "bytes": 10}]}
PROBLEM = {
    "format": "weft.schedule-problem", "version": 1, "free_at": "start",
    "devices": [{"name": "d0", "memory": 4}, {"name": "d1", "memory": None}, {"name": "d2", "memory": 6.5}],
    "blocks": [{"name": "f0", "devices": ["d0"], "time": 1, "memory": 1, "after": []},
               {"name": "f1", "devices": ["d1"], "time": 1.5, "memory": 1, "after": ["f0"]},
               {"name": "x", "devices": ["d0", "d2"], "time": 0.5, "memory": 2, "after": ["f1"]},
               {"name": "b1", "devices": ["d1"], "time": 2, "memory": -1, "after": ["x"]},
               {"name": "b0", "devices": ["d0"], "time": 2, "memory": -1, "after": ["b1"]},
               {"name": "y", "devices": ["d0", "d2"], "time": 0.1, "memory": -2, "after": ["b1"]}],
    "transfers": [{"from": "f0", "to": "f1", "time": 0.1, "link": "d0-d1"}, {"from": "b1", "to": "b0", "time": 0.25}]}
PARTITION = {
    "maxSizePerFPGA": 30, "maxFPGAs": 2, "maxCPUs": 1,
    "nodes": [{"id": index, "supportedOnFpga": int(index != 3), "cpuLatency": 4.5 + index, "fpgaLatency": 1, "size": 10,
               "isBackwardNode": int(index > 4), "colorClass": index if index < 2 else 7 - index} for index in range(7)],
    "edges": [{"sourceId": a, "destId": b, "cost": 0.5 + a} for a, b in ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (4, 5), (5, 6))]}
STRATEGY = {"problem": {
    "name": "four", "usage_limit": 20,
    "nodes": {"intervals": [[0, 3], [1, 4], [2, 6], [5, 7]], "costs": [[1, 5], [3, 2, 1], [4], [7, 10**18]],
              "usages": [[10, 2], [3, 3, 9], [1], [5, 0]]},
    "edges": {"nodes": [[0, 1], [1, 2], [2, 3], [0, 1]], "costs": [[0, 1, 2, 3, 4, 5], [1, 0, 2], [0, 3], [1, 1, 1, 0, 0, 0]]}}}
TOPO = ("\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\nGPU0\t X \tNV4\tNV4\tPIX\tPXB\t0-31\nGPU1\tNV4\t X \tNV4\tSYS\tSYS\t0-31\n"
        "GPU2\tNV4\tNV4\t X \tNODE\tPHB\t32-63\nGPU3\tPIX\tSYS\tNODE\t X \tSYS\t32-63\nNIC0\tPXB\tSYS\tPHB\tSYS\t X \t\n\nLegend:\n\n  X = Self\n")


# ---- clean files ----------------------------------------------------------------------------------------------------


@functools.cache
def world() -> dict[str, Any]:
    """Return a traced model, a cluster and two plans for them: a pipeline, and one that divides operators."""
    import torch

    from weft.cluster.cluster_file import parse_cluster
    from weft.cost.costs import estimate_costs
    from weft.model.folded import trace_folded
    from weft.plan.check import check_plan
    from weft.plan.plan import Optimizer
    from weft.search.common.problem import PlanOptions, Problem
    from weft.search.joint.baselines import one_f_one_b_equal
    from weft.search.shard.compare import search_plan
    from weft.simulate.timing import simulate
    from weft.training.parallelize import source_of_module

    torch.set_num_threads(1)
    cluster = parse_cluster({"format": "weft.cluster", "version": 1, "hosts": [
        {"name": "a", "devices": "2 x A100-80GB", "intra": "nvlink3"}]})
    folded = trace_folded(source_of_module(make_model(), torch.zeros(8, 4)), batch=2)
    whole = trace_folded(source_of_module(make_model(), torch.zeros(8, 4)), batch=8)
    graph = folded.traced.graph
    costs = estimate_costs(graph, cluster)
    plan = one_f_one_b_equal(Problem(graph=graph, cluster=cluster, costs=costs, options=PlanOptions(batch=8)), 4)
    sharded = search_plan(whole, cluster, shape=(2,), optimizer=Optimizer(kind="adam"), name="megatron")
    program = check_plan(plan, graph, cluster)
    return {"cluster": cluster, "graph": graph, "plan": plan, "costs": costs, "program": program, "sharded": sharded,
            "whole": whole.traced.graph, "timeline": simulate(program, costs, cluster)}


def make_clean(folder: Path) -> None:
    """Write a clean file of every kind."""
    import yaml

    for name, value in (("cluster.json", CLUSTER), ("graph.json", GRAPH), ("problem.json", PROBLEM), ("partition.json", PARTITION),
                        ("strategy.json", STRATEGY)):
        (folder / name).write_text(json.dumps(value))
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "topo.txt").write_text(TOPO)
    _write_planned(folder)
    _write_onnx(folder / "model.onnx")
    _write_store(folder / "store.db")
    _write_policy(folder / "policy.safetensors")
    _write_run(folder)
    make_trainer().save_checkpoint(folder / "checkpoint", extra={"epoch": 1})
    step = next((folder / "checkpoint").iterdir())
    shutil.copytree(step, folder / "state")
    _write_training(folder)
    (folder / "texts.json").write_text("[]")


def _write_training(folder: Path) -> None:
    """Write a training folder that is done, and the examples of a case."""
    from dataclasses import asdict

    from benchmarks.policy_training.expert import Effort, make_examples, write_examples
    from benchmarks.policy_training.train import Progress, TrainOptions, train_policy

    write_examples(folder / "examples.npz", make_examples(5, None, Effort(anneal_steps=10, tree_steps=2, num_states=3)))
    row = Progress(round=1, epoch=1, num_states=3, loss=1.0, held_out_loss=1.0, value_error=0.1, agreement=0.5, regret=0.1)
    (folder / "training").mkdir()
    (folder / "training" / "round-0.json").write_text(json.dumps([asdict(row)]))
    shutil.copy(folder / "policy.safetensors", folder / "training" / "round-0.safetensors")
    train_policy(folder / "trained.safetensors", folder / "training", TrainOptions(rounds=1, cases=1, epochs=1))


def _write_planned(folder: Path) -> None:
    from weft.export.pipelining_csv import to_csv
    from weft.model.graph_file import save_graph
    from weft.plan.plan import save_plan
    from weft.simulate.timeline_file import save_timeline

    save_graph(world()["graph"], folder / "traced.json")
    save_plan(world()["plan"], folder / "plan.json")
    save_plan(world()["sharded"], folder / "sharded.json")
    save_timeline(world()["timeline"], folder / "timeline.json")
    (folder / "order.csv").write_text(to_csv(world()["plan"]))


def _write_onnx(path: Path) -> None:
    from onnx import TensorProto, helper

    weights = [helper.make_tensor(name, TensorProto.FLOAT, dims, [0.5] * (dims[0] * dims[1] * dims[2] * dims[3] if len(dims) == 4 else
                                                                          dims[0] * dims[1])) for name, dims in
               (("w", [4, 3, 3, 3]), ("v", [4, 5]))]
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], name="/a/conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
             helper.make_node("Relu", ["c"], ["r"], name="/a/relu"), helper.make_node("GlobalAveragePool", ["r"], ["g"], name="/b/pool"),
             helper.make_node("Flatten", ["g"], ["f"], name="/b/flat"), helper.make_node("MatMul", ["f", "v"], ["y"], name="/b/mm")]
    graph = helper.make_graph(nodes, "small", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 8, 8])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 5])], weights)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def _write_store(path: Path) -> None:
    from weft.cost.profile import ClassFit, CommFit, OpKey, OpTiming, ProfileStore, op_signature
    from weft.model.graph_file import load_graph

    graph = load_graph(path.with_name("traced.json"))
    timing = OpTiming(forward_s=1e-4, input_grad_s=1e-4, weight_grad_s=None, spread=0.1, repeats=3, threads=1, torch_version="2",
                      recorded_at="2026")
    store = ProfileStore(path)
    store.put_timings([(OpKey("A100-80GB", graph.op_kinds[op], op_signature(graph, op, "float32"), "float32"), timing)
                       for op in range(graph.num_ops)])
    store.put_timings([(OpKey("other", "mm", f"[{index},{index}] -> [{index}]", "float32"), timing) for index in range(300)])
    store.put_class_fits([ClassFit(device_kind="A100-80GB", op_class=name, compute=0.5, memory=0.5, num_points=3, error=0.1)
                          for name in ("matmul", "elementwise")])
    store.put_comm_fits([CommFit(collective="all_reduce", scope="host", algorithm="ring", latency_s=1e-5, s_per_byte=1e-10,
                                 num_points=3, error=0.1)])


def _write_policy(path: Path) -> None:
    import numpy as np

    from benchmarks.policy_training.network import write_policy
    from weft.search.deploy.policy import WEIGHTS, read_policy

    arrays = read_policy(WEIGHTS)
    write_policy(path, {name: np.zeros_like(array) for name, array in arrays.items()}, {})


def _write_run(folder: Path) -> None:
    import numpy as np

    from weft.run.result import RunResult, save_result

    gradients = {"a.weight": np.ones((3, 4)), "b": np.zeros(5)}
    save_result(RunResult(num_ranks=2, losses=(1.0, 0.5), step_times_s=(0.1, 0.2), cpu_s=(0.1, 0.1), gradients=gradients,
                          timeline=world()["timeline"]), folder / "run")


# ---- readers --------------------------------------------------------------------------------------------------------


def _read_cluster(path: Path, use: bool) -> None:
    call("cluster", "show", path, "--json")
    if use:
        call("place", sibling(path, "graph.json"), path, "--time-limit", LIMIT_S, "--json", "-q")


def _read_topo(path: Path, use: bool) -> None:
    call("cluster", "from-topo", path, "--json")


def _read_graph(path: Path, use: bool) -> None:
    from weft.model.graph_file import load_graph

    load_graph(path)
    if use:
        objective = "throughput" if len(path.read_bytes()) % 2 else "latency"
        call("place", path, sibling(path, "cluster.json"), "--time-limit", LIMIT_S, "--objective", objective, "-q", "-o",
             path.parent / "out.json", "--html", path.parent / "out.html", "--svg", path.parent / "out.svg")


def _read_traced(path: Path, use: bool) -> None:
    from weft.cost.costs import estimate_costs
    from weft.model.graph_file import load_graph

    graph = load_graph(path)
    estimate_costs(graph, world()["cluster"])
    if use:
        call("plan", path, sibling(path, "cluster.json"), "--time-limit", LIMIT_S, "--strategy", "single", "-q", "--json")


def _read_onnx(path: Path, use: bool) -> None:
    from weft.model.onnx import load_onnx

    load_onnx(path)
    if use:
        call("place", path, sibling(path, "cluster.json"), "--time-limit", LIMIT_S, "-q", "--json")


def _read_plan(path: Path, use: bool, like: str = "plan", model: str = "graph") -> None:
    from weft.cli.common import cluster_of_plan
    from weft.cost.costs import estimate_costs
    from weft.plan.check import check_plan
    from weft.plan.diff import diff_plans
    from weft.plan.plan import load_plan
    from weft.show.html import render_report
    from weft.simulate.timing import simulate

    plan, graph = load_plan(path), world()[model]
    cluster = cluster_of_plan(plan, None)
    program = check_plan(plan, graph, cluster)
    if use:
        timeline = simulate(program, estimate_costs(graph, cluster), cluster)
        diff_plans(plan, world()[like], graph, graph)
        render_report([timeline], cluster=cluster)


def _read_timeline(path: Path, use: bool) -> None:
    from weft.show.html import render_report
    from weft.simulate.timeline_file import load_timeline, write_trace

    load_timeline(path)
    timeline = load_timeline(path, program=world()["program"])
    if use:
        render_report([world()["timeline"], timeline])
        write_trace([timeline], path.parent / "trace.json.gz")


def _read_csv(path: Path, use: bool) -> None:
    from weft.export.pipelining_csv import load_csv, order_from_csv
    from weft.plan.check import check_plan

    check_plan(order_from_csv(world()["plan"], load_csv(path)), world()["graph"], world()["cluster"])


def _read_problem(path: Path, use: bool) -> None:
    from weft.search.schedule.problem import load_problem

    load_problem(path)
    if use:
        call("schedule", path, "-n", 3, "--time-limit", LIMIT_S, "--compare", "-q", "-o", path.parent / "out.json", "--html",
             path.parent / "out.html", "--svg", path.parent / "out.svg")


def _read_partition(path: Path, use: bool) -> None:
    from weft.search.place.partition.search import load_partition

    load_partition(path)
    if use:
        objective = "throughput" if len(path.read_bytes()) % 2 else "latency"
        call("place", path, "--format", "dnn-partitioning", "--objective", objective, "--time-limit", LIMIT_S, "--json", "-q")


def _read_strategy(path: Path, use: bool) -> None:
    from weft.search.strategies.strategy_graph import load_strategy_graph

    load_strategy_graph(path)
    if use:
        call("shard", path, "--time-limit", LIMIT_S, "--json", "-q")


def _read_store(path: Path, use: bool) -> None:
    from weft.cost.costs import estimate_costs
    from weft.cost.profile import OpKey, OpTiming, ProfileStore

    store = ProfileStore(path)
    store.device_kinds()
    costs = estimate_costs(world()["graph"], world()["cluster"], profile=store)
    if use:
        from weft.simulate.timing import simulate

        simulate(world()["program"], costs, world()["cluster"])
        store.put_timings([(OpKey("new", "mm", "[1] -> [1]", "float32"), OpTiming(
            forward_s=1e-4, input_grad_s=None, weight_grad_s=None, spread=0.1, repeats=3, threads=1, torch_version="", recorded_at=""))])


def _read_policy(path: Path, use: bool) -> None:
    from weft.search.deploy.policy import read_policy

    read_policy(path)


def _read_examples(path: Path, use: bool) -> None:
    from benchmarks.policy_training.expert import read_examples

    read_examples(path)


def _read_run(path: Path, use: bool) -> None:
    from weft.run.result import load_result

    folder = path.parent / "run"
    shutil.copytree(sibling(path, "run"), folder)
    shutil.copy(path, folder / path.name)
    load_result(folder)


def _read_state(path: Path, use: bool) -> None:
    folder = path.parent / "step-00000001"
    shutil.copytree(sibling(path, "state"), folder)
    shutil.copy(path, folder / path.name)
    make_trainer().load_checkpoint(folder)


def _read_options(path: Path, use: bool) -> None:
    arguments = json.loads(path.read_bytes())
    call(*(str(sibling(path, item[1:])) if item.startswith("@") else item for item in arguments))


OPTIONS: tuple[tuple[list[str], tuple[str, ...]], ...] = (
    (["schedule", "@problem.json", "-q", "--json", "--time-limit", LIMIT_S], ("--microbatches", "--seed", "--width")),
    (["place", "@graph.json", "@cluster.json", "-q", "--json", "--time-limit", LIMIT_S], ("--seed", "--width")),
    (["place", "@model.onnx", "@cluster.json", "-q", "--json", "--time-limit", LIMIT_S], ("--batch", "--seed")),
    (["shard", "@strategy.json", "-q", "--json", "--time-limit", LIMIT_S], ("--seed",)),
    (["plan", "@graph.json", "@cluster.json", "-q", "--json", "--time-limit", LIMIT_S, "--strategy", "single"],
     ("--microbatches", "--batch", "--seed", "--headroom")))


def mutate_options(data: bytes, rng: Random) -> bytes:
    """Return a command with a number that is out of the way."""
    arguments, names = rng.choice(OPTIONS)
    values = [str(item) for item in NUMBERS if abs(item) < 10**40 and not 1000 <= abs(item) < 10**6]
    value = rng.choice(("nan", "inf", "", "x", "10%", "1GiB", *values))
    extra = [rng.choice(names), value] if rng.random() < 0.8 else ["--time-limit", rng.choice(("0", "-1", "nan", "inf", "", "1e-9", "5e-324"))]
    needed = ["-n", "2"] if arguments[0] == "schedule" and "--microbatches" not in extra else []
    return json.dumps([*arguments, *needed, *extra]).encode()


TARGETS: Mapping[str, Target] = {
    "cluster (JSON)": Target(file="cluster.json", mutate=mutate_json, read=_read_cluster, weight=14, use=0.1, bombs=True),
    "cluster (YAML)": Target(file="cluster.yaml", mutate=mutate_yaml, read=_read_cluster, weight=10, use=0.05),
    "nvidia-smi topo": Target(file="topo.txt", mutate=mutate_cells, read=_read_topo, weight=6),
    "graph": Target(file="graph.json", mutate=mutate_json, read=_read_graph, weight=18, use=0.2, bombs=True),
    "traced graph": Target(file="traced.json", mutate=mutate_json, read=_read_traced, weight=10, use=0.1, bombs=True),
    "ONNX": Target(file="model.onnx", mutate=mutate_onnx, read=_read_onnx, weight=10, use=0.1),
    "plan": Target(file="plan.json", mutate=mutate_json, read=_read_plan, weight=24, use=1.0, bombs=True),
    "plan (sharded)": Target(file="sharded.json", mutate=mutate_json, weight=10, bombs=True,
                             read=functools.partial(_read_plan, like="sharded", model="whole")),
    "timeline": Target(file="timeline.json", mutate=mutate_json, read=_read_timeline, weight=12, bombs=True),
    "pipelining CSV": Target(file="order.csv", mutate=mutate_cells, read=_read_csv, weight=6),
    "schedule problem": Target(file="problem.json", mutate=mutate_json, read=_read_problem, weight=18, use=0.3, bombs=True),
    "dnn-partitioning": Target(file="partition.json", mutate=mutate_json, read=_read_partition, weight=12, use=0.25, bombs=True),
    "strategy graph": Target(file="strategy.json", mutate=mutate_json, read=_read_strategy, weight=12, use=0.5, bombs=True),
    "profile store": Target(file="store.db", mutate=mutate_sqlite, read=_read_store, weight=18),
    "policy weights": Target(file="policy.safetensors", mutate=mutate_tensors, read=_read_policy, weight=5),
    "run result": Target(file="run/result.json", mutate=mutate_json, read=_read_run, weight=5, bombs=True),
    "run gradients": Target(file="run/gradients.npz", mutate=mutate_bytes, read=_read_run, weight=4),
    "checkpoint record": Target(file="state/checkpoint.json", mutate=mutate_json, read=_read_state, weight=10),
    "checkpoint model": Target(file="state/model.safetensors", mutate=mutate_tensors, read=_read_state, weight=6),
    "checkpoint optimizer": Target(file="state/optimizer.safetensors", mutate=mutate_tensors, read=_read_state, weight=6),
    "checkpoint random": Target(file="state/random.safetensors", mutate=mutate_tensors, read=_read_state, weight=3),
    "cluster (commands)": Target(file="cluster.json", mutate=mutate_json, read=read_cluster_by_commands, weight=6),
    "plan (commands)": Target(file="plan.json", mutate=mutate_plan, read=read_plan_by_commands, weight=16),
    "profile store (commands)": Target(file="store.db", mutate=mutate_sqlite, read=read_store_by_commands, weight=4),
    "policy weights (sound)": Target(file="policy.safetensors", mutate=mutate_sound_tensors, read=read_weights_by_commands, weight=2),
    "ONNX (grown)": Target(file="model.onnx", mutate=mutate_functions, read=_read_onnx, weight=6, use=0.05),
    "run gradients (arrays)": Target(file="run/gradients.npz", mutate=mutate_arrays, read=_read_run, weight=4),
    "training examples": Target(file="examples.npz", mutate=mutate_arrays, read=_read_examples, weight=5),
    "training curve": Target(file="training/round-0.json", mutate=mutate_json, read=read_training, weight=3, bombs=True),
    "training options": Target(file="training/training.json", mutate=mutate_json, read=read_training, weight=2, bombs=True),
    "checkpoint record (sealed)": Target(file="state/checkpoint.json", mutate=mutate_json, read=read_sealed_state, weight=10, use=0.3),
    "checkpoint model (sealed)": Target(file="state/model.safetensors", mutate=mutate_sound_tensors, read=read_sealed_state, weight=5,
                                        use=0.3),
    "checkpoint optimizer (sealed)": Target(file="state/optimizer.safetensors", mutate=mutate_sound_tensors, read=read_sealed_state,
                                            weight=6, use=0.3),
    "checkpoint random (sealed)": Target(file="state/random.safetensors", mutate=mutate_sound_tensors, read=read_sealed_state, weight=4,
                                         use=0.3),
    "texts on the command line": Target(file="texts.json", mutate=mutate_texts, read=read_texts, weight=5),
    "options": Target(file="options.json", mutate=mutate_options, read=_read_options, weight=4),
}


def make_mutant(target: Target, clean: bytes, rng: Random) -> tuple[str, bytes]:
    """Return the name and the bytes of a mutant."""
    name = Path(target.file).name
    if target.bombs and rng.random() < 0.01:
        return f"{name}.gz", bomb(clean, rng)
    return name, target.mutate(clean, rng)
