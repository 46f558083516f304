"""Plans for torchtitan, vLLM and llama.cpp: their rules give back the plan, and what they cannot say is refused."""

from __future__ import annotations

import json
import math
import os
import tomllib
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worlds import chain_graph, plain_cluster
from weft.base.errors import InputError
from weft.cli.main import main
from weft.cluster.cluster import Cluster, Device, DeviceKind
from weft.export.degrees import find_layers
from weft.export.pipelining_csv import parse_csv
from weft.export.servers import VARIABLE, to_layer_partition, to_tensor_split
from weft.export.titan import HEAD, TitanSettings, format_toml, to_titan
from weft.model.graph import Graph
from weft.plan.check import check_plan
from weft.plan.lower import lower
from weft.plan.orders import Order, forward_only, gpipe, interleaved, one_f_one_b, to_tokens
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Sharding, Stage
from weft.search.common.problem import add_gradients

NUM_LAYERS = 4


@cache
def decoder(num_layers: int = NUM_LAYERS) -> Graph:
    """Return a model with an embedding, layers of two operators, a norm and a head."""
    modules = ["model.embed", *(f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in ("up", "down")),
               "model.norm", "head"]
    kinds = ["aten.embedding", *["aten.linear"] * (2 * num_layers), "aten.rms_norm", "aten.linear"]
    graph = chain_graph(len(modules), batch=8)
    names = [f"{module}.op" for module in modules]
    shapes = {f"w{op}": (4, 4) if kind == "aten.linear" else (4,) for op, kind in enumerate(kinds)}
    return replace(graph, op_names=tuple(names), op_modules=tuple(modules), op_kinds=tuple(kinds),
                   tensor_shapes=tuple(shapes.get(name, shape) for name, shape in
                                       zip(graph.tensor_names, graph.tensor_shapes, strict=True)),
                   tensor_bytes=np.asarray([4 * math.prod(shapes[name]) if name in shapes else size for name, size in
                                            zip(graph.tensor_names, graph.tensor_bytes.tolist(), strict=True)]))


def cut(*sizes: int, graph: Graph | None = None) -> list[tuple[str, ...]]:
    """Return the operators of stages with so many layers each; the first has the embedding, the last norm and head."""
    names = list((graph or decoder(sum(sizes))).op_names)
    ends = [1 + 2 * sum(sizes[: index + 1]) for index in range(len(sizes))]
    ends[-1] = len(names)
    return [tuple(names[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def make_plan(stages: list[Stage], order: Order, ranks: list[str], *, cluster: Cluster, graph: Graph | None = None,
              mode: str = "training", microbatches: int = 4, **options) -> Plan:
    graph = graph or decoder()
    tokens = to_tokens(order, tuple(stage.name for stage in stages))
    plan = Plan(model=ModelRef(name="decoder", digest=graph.digest, mode=mode, batch=8),
                cluster=ClusterRef(digest=cluster.digest, devices=tuple(device.name for device in cluster.devices)),
                microbatches=microbatches, stages=tuple(stages), order=dict(zip(ranks, tokens, strict=True)),
                optimizer=options.pop("optimizer", Optimizer(kind="sgd")), **options)
    return add_gradients(plan, graph)


def pipeline(*sizes: int, mode: str = "training", order: Order | None = None, devices: tuple[int, ...] = (),
             num_devices: int | None = None, microbatches: int = 4) -> Plan:
    """Return a pipeline of stages with so many layers each, on ``d0``, ``d1``, ... or the given devices."""
    used = devices or tuple(range(len(sizes)))
    stages = [Stage(name=f"s{index}", ops=ops, replicas=(Replica(devices=(f"d{used[index]}",)),))
              for index, ops in enumerate(cut(*sizes))]
    if order is None:
        order = (forward_only if mode == "inference" else one_f_one_b)(len(sizes), microbatches)
    ranks = [f"d{device}" for device in dict.fromkeys(used)]
    return make_plan(stages, order, ranks, cluster=plain_cluster(num_devices or max(used) + 1), mode=mode,
                     graph=decoder(sum(sizes)), microbatches=microbatches)


def replicated(replicas: tuple[tuple[str, ...], ...], words: str = "", stored: str = "R", *, shares: tuple[float, ...] = (),
               mesh: dict[str, int] | None = None, **options) -> Plan:
    """Return one stage on these replicas; every product is split by ``words`` and every matrix stored as ``stored``."""
    graph, shares = decoder(), shares or (1 / len(replicas),) * len(replicas)
    mesh = mesh or ({"axis": len(replicas[0])} if len(replicas[0]) > 1 else {})
    sharding = Sharding()
    if words:
        ops = {name: tuple(words.split()) for name, kind in zip(graph.op_names, graph.op_kinds, strict=True)
               if kind == "aten.linear"}
        tensors = {f"w{op}": tuple(stored.split()) for op, kind in enumerate(graph.op_kinds) if kind == "aten.linear"}
        sharding = Sharding(ops=ops, tensors=tensors)
    stage = Stage(name="s0", ops=graph.op_names, sharding=sharding, replicas=tuple(
        Replica(devices=devices, mesh=mesh, share=share) for devices, share in zip(replicas, shares, strict=True)))
    ranks = [device for devices in replicas for device in devices]
    mode = options.get("mode", "training")
    one = forward_only(1, 2) if mode == "inference" else one_f_one_b(1, 2)
    return make_plan([stage], one * len(ranks), ranks, cluster=plain_cluster(len(ranks)), microbatches=2, **options)


def titan(plan: Plan, **options) -> TitanSettings:
    return to_titan(lower(plan, graph_of(plan)), **options)


def graph_of(plan: Plan) -> Graph:
    """Return the decoder that the plan is of."""
    return next(graph for graph in map(decoder, range(1, 40)) if graph.digest == plan.model.digest)


def gpus(text: str = "GG", hosts: str = "") -> Cluster:
    """Return devices ``d0``, ``d1``, ...: ``G`` is a GPU, ``C`` a CPU."""
    kinds = {"G": DeviceKind(name="G"), "C": DeviceKind(name="C", type="cpu")}
    devices = tuple(Device(name=f"d{index}", kind=kind, host=host, memory_bytes=None)
                    for index, (kind, host) in enumerate(zip(text, hosts or "a" * len(text), strict=True)))
    return Cluster(name="some", kinds=kinds, devices=devices)


# ---- the list of layers ---------------------------------------------------------------------------------------------


def test_layers_and_what_is_around_them():
    found = find_layers(pipeline(1, 3), decoder(), tool="x")
    assert (found.path, found.stages) == ("model.layers", (0, 1, 1, 1))
    assert (found.before, found.after) == ({"model.embed": 0}, {"model.norm": 1, "head": 1})
    assert found.counts(2) == (1, 3)


def cut_inside(*, work: float = 1.0) -> tuple[Plan, Graph]:
    """Return a pipeline whose first stage has the first half of layer 1, which does ``work``, the other half 1."""
    graph = decoder()
    flops = graph.flops.copy()
    flops[3] = work
    graph = replace(graph, flops=flops)
    names = graph.op_names
    plan = pipeline(2, 2, mode="inference")
    stages = tuple(replace(stage, ops=ops) for stage, ops in zip(plan.stages, (names[:4], names[4:]), strict=True))
    return replace(plan, stages=stages, model=replace(plan.model, digest=graph.digest)), graph


def test_a_layer_that_is_cut_is_refused_by_name():
    plan, graph = cut_inside()
    with pytest.raises(InputError, match=r"'model\.layers\.1' is cut: operator 'model\.layers\.1\.up\.op' is in stage 's0' "
                                         r"and 'model\.layers\.1\.down\.op' in stage 's1', but vLLM .* or --nearest"):
        to_layer_partition(lower(plan, graph), gpus())


@pytest.mark.parametrize(("work", "counts", "part"), [(3.0, "2,2", 75), (0.25, "1,3", 80)])
def test_nearest_gives_a_cut_layer_to_the_larger_part(work, counts, part):
    plan, graph = cut_inside(work=work)
    found = to_layer_partition(lower(plan, graph), gpus(), nearest=True)
    assert found.environment == {VARIABLE: counts}
    assert f"which has {part} % of its work" in found.notes[0]
    split = to_tensor_split(lower(plan, graph), gpus(), nearest=True)
    assert split.arguments[-1] == {"2,2": "2,3", "1,3": "1,4"}[counts]


def renamed(graph: Graph, **changes: str) -> Graph:
    modules = tuple(changes.get(path.replace(".", "_"), path) for path in graph.op_modules)
    return replace(graph, op_modules=modules)


@pytest.mark.parametrize(("graph", "message"), [
    (replace(decoder(), op_modules=("",) * decoder().num_ops), "has no list of layers, but x divides one"),
    (renamed(decoder(), head="decoder.0"), r"has 2 lists of layers \(decoder, model\.layers\)"),
    (renamed(decoder(), model_layers_3_up="model.layers.7.up", model_layers_3_down="model.layers.7.down"),
     r"numbered \[0, 1, 2, 7\]: x counts them from 0")])
def test_models_without_one_list_are_refused(graph, message):
    with pytest.raises(InputError, match=message):
        find_layers(pipeline(2, 2), graph, tool="x")


def test_stages_in_another_order_than_the_layers_are_refused():
    plan = pipeline(2, 2)
    with pytest.raises(InputError, match=r"'model\.embed' is in stage 's0' \(stages\[1\]\): x needs stages that follow"):
        find_layers(replace(plan, stages=plan.stages[::-1]), decoder(), tool="x")
    one, other = cut(2, 2)
    stages = (replace(plan.stages[0], ops=(*one[:3], *other[:2])), replace(plan.stages[1], ops=(*one[3:], *other[2:])))
    with pytest.raises(InputError, match=r"'model\.layers\.2' is in stage 's0' \(stages\[0\]\), behind 'model\.layers\.1'"):
        find_layers(replace(plan, stages=stages), decoder(), tool="x")


# ---- llama.cpp ------------------------------------------------------------------------------------------------------


def llama_cpp_devices(arguments: tuple[str, ...], visible: list[str], num_layers: int) -> list[str]:
    """Return where llama.cpp puts each layer and the output: its rule in single precision, as its loader has it."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    num_gpu = int(options["--gpu-layers"])
    first, used = max(num_layers + 1 - num_gpu, 0), min(num_gpu, num_layers + 1)
    parts = np.zeros(len(visible), dtype=np.float32)
    given_parts = [np.float32(part) for part in options.get("--tensor-split", "").split(",") if part]
    parts[: len(given_parts)] = given_parts
    points = np.cumsum(parts, dtype=np.float32)
    points = points / points[-1] if num_gpu else points
    return [visible[int(np.searchsorted(points, np.float32(slot - first) / np.float32(used), side="right"))]
            if slot >= first else "cpu" for slot in range(num_layers + 1)]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_llama_cpp_puts_layers_where_the_plan_has_them(sizes, num_unused, random):
    has_cpu = random.random() < 0.5
    names = random.sample(range(len(sizes) + num_unused), len(sizes))
    kinds = ["G"] * (len(sizes) + num_unused)
    if has_cpu:
        kinds[names[0]] = "C"
    plan = pipeline(*sizes, mode="inference", devices=tuple(names), num_devices=len(kinds), microbatches=1)
    cluster = gpus("".join(kinds))
    found = to_tensor_split(lower(plan, decoder(sum(sizes))), cluster)
    all_gpus = [f"d{index}" for index, kind in enumerate(kinds) if kind == "G"]
    shown = found.environment.get("CUDA_VISIBLE_DEVICES")
    visible = [all_gpus[int(number)] for number in shown.split(",")] if shown else all_gpus
    expected = [f"d{names[index]}" for index, size in enumerate(sizes) for _ in range(size)]
    expected.append(expected[-1])
    if has_cpu:
        expected = ["cpu" if name == f"d{names[0]}" else name for name in expected]
    assert llama_cpp_devices(found.arguments, visible, sum(sizes)) == expected


def test_llama_cpp_options():
    found = to_tensor_split(lower(pipeline(1, 3, mode="inference"), decoder()), gpus())
    assert found.command("llama-server") == "llama-server --gpu-layers 5 --split-mode layer --tensor-split 1,4"
    assert [note.partition(":")[0] for note in found.notes] == [
        "'model.embed' will be on the CPU", "the plan's 4 micro-batches are not passed on"]


LLAMA_CPP = [
    (lambda: (pipeline(2, 2), gpus()), "the plan is for training, and llama.cpp infers"),
    (lambda: (pipeline(2, 2, mode="inference"), gpus("GC")), r"layer 0 of 'model\.layers' is on 'd0', and something later is on"),
    (lambda: (pipeline(2, 2, mode="inference"), gpus("GG", "ab")), "hosts a, b: llama.cpp splits layers over the devices of one"),
    (lambda: (pipeline(1, 2, 1, mode="inference", devices=(0, 1, 0),
                       order=[[(0, "F", 0), (2, "F", 0)], [(1, "F", 0)]], microbatches=1), gpus()),
     "'d0' has layers on both sides of those of 'd1'"),
    (lambda: (replicated((("d0",), ("d1",)), mode="inference"), gpus()), "stage 's0' runs on several devices: llama.cpp"),
]


@pytest.mark.parametrize(("make", "message"), LLAMA_CPP, ids=[item[1][:30] for item in LLAMA_CPP])
def test_what_llama_cpp_cannot_say(make, message):
    plan, cluster = make()
    with pytest.raises(InputError, match=message):
        to_tensor_split(lower(plan, decoder()), cluster)


# ---- vLLM -----------------------------------------------------------------------------------------------------------


def vllm_layers(partition: str, num_layers: int, rank: int, size: int) -> tuple[int, int]:
    """Return first and last-plus-one layer of a pipeline rank, by vLLM's own reader where it is installed."""
    counts = [int(text) for text in partition.split(",")]
    assert len(counts) == size
    assert sum(counts) == num_layers
    mine = sum(counts[:rank]), sum(counts[: rank + 1])
    try:
        from vllm.distributed.utils import get_pp_indices
    except ImportError:
        return mine
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = partition
    try:
        assert get_pp_indices(num_layers, rank, size) == mine
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
    return mine


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
@settings(max_examples=20, deadline=None)
def test_vllm_has_the_layers_of_the_plan(sizes):
    plan = pipeline(*sizes, mode="inference")
    found = to_layer_partition(lower(plan, decoder(sum(sizes))), gpus("G" * len(sizes)))
    assert found.arguments == ("--tensor-parallel-size", "1", "--pipeline-parallel-size", str(len(sizes)))
    for rank, size in enumerate(sizes):
        first, last = vllm_layers(found.environment[VARIABLE], sum(sizes), rank, len(sizes))
        assert (first, last - first) == (sum(sizes[:rank]), size)


def test_vllm_degrees_and_order_of_gpus():
    program = lower(replicated((("d0", "d1"),), "n", "S0", mode="inference"), decoder())
    assert to_layer_partition(program, gpus()).command("vllm") == "vllm --tensor-parallel-size 2 --pipeline-parallel-size 1"
    program = lower(replicated((("d1",), ("d0",)), mode="inference"), decoder())
    found = to_layer_partition(program, gpus())
    assert found.arguments[-2:] == ("--data-parallel-size", "2")
    assert found.environment == {"CUDA_VISIBLE_DEVICES": "1,0"}
    program = lower(pipeline(2, 2, mode="inference"), decoder())
    assert any("d0, d1" in note for note in to_layer_partition(program, gpus("GG", "ab")).notes)


def head_apart() -> Plan:
    plan = pipeline(2, 1, mode="inference")
    names = decoder(3).op_names
    stages = tuple(replace(stage, ops=ops) for stage, ops in zip(plan.stages, (names[:-1], names[-1:]), strict=True))
    return replace(plan, stages=stages)


def test_vllm_has_norm_and_head_on_the_last_rank():
    program = lower(head_apart(), decoder(3))
    with pytest.raises(InputError, match=r"'model\.norm' is in stage 's0', but vLLM has it on the last pipeline rank"):
        to_layer_partition(program, gpus())
    found = to_layer_partition(program, gpus(), nearest=True)
    assert found.environment == {VARIABLE: "3,0"}
    assert found.notes[0].startswith("'model.norm' is in stage 's0'")


VLLM = [
    (lambda: pipeline(2, 2), "the plan is for training, and vLLM infers"),
    (lambda: pipeline(1, 1, 1, 1, mode="inference", devices=(0, 1, 0, 1), microbatches=1,
                      order=[[(0, "F", 0), (2, "F", 0)], [(1, "F", 0), (3, "F", 0)]]),
     r"the 4 stages are on the pipeline ranks \[0, 1, 0, 1\]: in vLLM each has one stage"),
    (lambda: replicated((("d0", "d1"),), "b0", mode="inference"), "'axis' is data parallel: vLLM divides a stage by tensor"),
    (lambda: replicated((("d0", "d1"),), mode="inference"),
     r"'model\.layers\.0\.up\.op' of stage 's0' is done whole by every device on the axis 'axis' of 2 devices"),
    (lambda: replicated((("d0",), ("d1",)), shares=(0.75, 0.25), mode="inference"), "unequal shares of the batch"),
]


@pytest.mark.parametrize(("make", "message"), VLLM, ids=[item[1][:30] for item in VLLM])
def test_what_vllm_cannot_say(make, message):
    plan = make()
    with pytest.raises(InputError, match=message):
        to_layer_partition(lower(plan, graph_of(plan)), gpus())


def test_vllm_runs_on_gpus():
    with pytest.raises(InputError, match="'d1', which is a CPU: vLLM puts layers on GPUs only"):
        to_layer_partition(lower(pipeline(2, 2, mode="inference"), decoder()), gpus("GC"))


# ---- torchtitan -----------------------------------------------------------------------------------------------------


def test_titan_pipeline():
    found = titan(pipeline(1, 3))
    assert found.sections["parallelism"] == {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 1, "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B", "pipeline_parallel_microbatch_size": 2,
        "module_fqns_per_model_part": [["tok_embeddings", "layers.0"],
                                       ["layers.1", "layers.2", "layers.3", "norm", "output", "lm_head"]]}
    assert found.sections["training"] == {"local_batch_size": 8, "global_batch_size": 8}
    assert found.ranks == ("d0", "d1")
    assert tomllib.loads(format_toml(found)) == found.sections


FOUR = ("d0", "d1", "d2", "d3")
BOTH = {"data": 2, "tensor": 2}
DEGREES = [
    ((1, 1, 1), replicated((("d0",),))),
    ((4, 1, 1), replicated(tuple((device,) for device in FOUR))),
    ((1, 1, 2), replicated((FOUR[:2],), "n", "S0")),
    ((2, 1, 1), replicated((FOUR[:2],), "b0", "R:P")),
    ((1, 2, 1), replicated((FOUR[:2],), "m", "S0")),
    ((2, 1, 2), replicated((FOUR,), "b0 k", "R:P S1", mesh=BOTH)),
    ((1, 2, 2), replicated((FOUR,), "b0 n/2", "S1 S0", mesh=BOTH)),
    ((2, 1, 2), replicated((FOUR[:2], FOUR[2:]), "n", "S0")),
    ((2, 2, 1), replicated((FOUR[:2], FOUR[2:]), "b0", "S0"))]


@pytest.mark.parametrize(("wanted", "plan"), DEGREES)
def test_titan_degrees(wanted, plan):
    found = titan(plan)
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    assert tuple(found.sections["parallelism"][f"{name}_degree"] for name in names) == wanted
    assert math.prod(wanted) == len(found.ranks)


def test_titan_divides_optimizer_states():
    found = titan(replicated((("d0",), ("d1",)), optimizer=Optimizer(kind="adamw", sharded=True)))
    section = found.sections["parallelism"]
    assert (section["data_parallel_replicate_degree"], section["data_parallel_shard_degree"]) == (1, 2)
    assert section["fsdp_reshard_after_forward"] == "never"
    assert "divides only the optimizer's state" in found.notes[0]
    assert found.sections["training"] == {"local_batch_size": 2, "global_batch_size": 8}, "two steps of accumulation"


class RecordingStage:
    """A stage of PyTorch's pipelines that does nothing but note what it is told to do."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.is_last, self.has_backward = index == num_stages - 1, True
        self.seen: list[tuple[int, str, int]] = []

    def forward_one_chunk(self, index: int, *_: object, **__: object) -> None:
        self.seen.append((self.stage_index, "F", index))

    def backward_one_chunk(self, index: int, **_: object) -> None:
        self.seen.append((self.stage_index, "B", index))

    def __getattr__(self, name: str):
        return lambda *_, **__: []


@pytest.mark.parametrize(("name", "order"), [("GPipe", gpipe), ("1F1B", one_f_one_b)])
def test_orders_with_a_name_are_those_that_pytorch_runs(name, order):
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind = get_schedule_class(name)
    for num_stages, num_microbatches in ((2, 2), (3, 7), (4, 4)):
        seen = []
        for index in range(num_stages):
            schedule, stage = object.__new__(kind), RecordingStage(index, num_stages)
            vars(schedule).update(_stage=stage, _num_stages=num_stages, _n_microbatches=num_microbatches, _loss_fn=None,
                                  _has_backward=True, scale_grads=False, _internal_losses=[],
                                  _stage_forward_initialized=True, _stage_backward_initialized=True)
            schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches, None, None)
            seen.append(stage.seen)
        assert seen == order(num_stages, num_microbatches)


def there_and_back() -> Plan:
    """Return four stages on two devices, there and back."""
    order: Order = [[(0, "F", 0), (3, "F", 0), (3, "B", 0), (0, "B", 0)], [(1, "F", 0), (2, "F", 0), (2, "B", 0), (1, "B", 0)]]
    return pipeline(1, 1, 1, 1, devices=(0, 1, 1, 0), order=order, microbatches=1)


@pytest.mark.parametrize(("plan", "schedule"), [
    (pipeline(2, 2, order=gpipe(2, 4)), "GPipe"), (pipeline(2, 2), "1F1B"),
    (pipeline(1, 1, 2, microbatches=2), "1F1B csv"), (pipeline(1, 1, 2, microbatches=1), "GPipe"),
    (pipeline(1, 1, 1, 1, devices=(0, 1, 0, 1), order=interleaved(2, 2, 4)), "Interleaved1F1B csv"),
    (there_and_back(), "ZBVZeroBubble csv")])
def test_titan_schedules(plan, schedule):
    found = titan(plan, csv_path="here.csv")
    name, _, has_csv = schedule.partition(" ")
    section = found.sections["parallelism"]
    assert section["pipeline_parallel_schedule"] == name
    assert section.get("pipeline_parallel_schedule_csv") == ("here.csv" if has_csv else None)
    assert (found.csv is not None) == bool(has_csv)
    if found.csv is not None:
        actions = [[f"s{stage}:{phase}:{index}" for stage, phase, index in row] for row in parse_csv(found.csv)]
        assert actions == [list(plan.order[device]) for device in found.ranks]
        with pytest.raises(InputError, match=r"say where with --out FILE\.toml"):
            titan(plan)


def two_by_two(order: tuple[str, ...] = ()) -> Plan:
    """Return two stages with two replicas each; the last replica's order may be another."""
    graph = decoder()
    stages = [Stage(name=f"s{index}", ops=ops, replicas=tuple(Replica(devices=(device,), share=0.5) for device in devices))
              for index, (ops, devices) in enumerate(zip(cut(2, 2), (("d0", "d2"), ("d1", "d3")), strict=True))]
    one, two = one_f_one_b(2, 2)
    plan = make_plan(stages, [one, two, one, two], ["d0", "d1", "d2", "d3"], cluster=plain_cluster(4), graph=graph,
                     microbatches=2)
    return replace(plan, order={**plan.order, "d3": order or plan.order["d3"]})


def sharded_pipeline(*, mode: str = "training") -> Plan:
    """Return two stages, each on two devices that split its layers by width."""
    graph = decoder()
    split = {name for name, kind in zip(graph.op_names, graph.op_kinds, strict=True) if kind == "aten.linear"}
    stages = [Stage(name=f"s{index}", ops=ops, replicas=(Replica(devices=devices, mesh={"tensor": 2}),), sharding=Sharding(
        ops={name: ("n",) for name in ops if name in split},
        tensors={f"w{graph.op_index[name]}": ("S0",) for name in ops if name in split}))
        for index, (ops, devices) in enumerate(zip(cut(1, 3), (FOUR[:2], FOUR[2:]), strict=True))]
    one, two = (forward_only if mode == "inference" else one_f_one_b)(2, 2)
    return make_plan(stages, [one, one, two, two], list(FOUR), cluster=plain_cluster(4), microbatches=2, mode=mode)


def test_tensor_parallelism_inside_a_pipeline():
    found = titan(sharded_pipeline()).sections["parallelism"]
    assert (found["tensor_parallel_degree"], found["pipeline_parallel_degree"]) == (2, 2)
    assert found["pipeline_parallel_schedule"] == "1F1B"
    options = to_layer_partition(lower(sharded_pipeline(mode="inference"), decoder()), gpus("GGGG"))
    assert options.command("vllm") == ("VLLM_PP_LAYER_PARTITION=1,3 vllm --tensor-parallel-size 2 "
                                       "--pipeline-parallel-size 2")


def test_titan_numbers_ranks_by_pipeline_then_replicas():
    found = titan(two_by_two())
    assert found.ranks == ("d0", "d2", "d1", "d3")
    assert found.sections["parallelism"]["data_parallel_replicate_degree"] == 2
    assert found.sections["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert found.sections["training"]["local_batch_size"] == 4
    assert "ranks must be started in this order of devices: d0, d2, d1, d3" in found.notes


TITAN = [
    (pipeline(2, 2, mode="inference"), "the plan is for inference, and torchtitan trains"),
    (replicated((("d0",), ("d1",)), shares=(0.75, 0.25)), r"unequal shares of the batch \(0\.75, 0\.25\): torchtitan gives"),
    (replicated((("d0",), ("d1",), ("d2",))), "a micro-batch of 4 samples cannot be divided evenly over 3 replicas"),
    (replicated((("d0", "d1"),)), "is done whole by every device on the axis 'axis' of 2 devices"),
    (replicated((("d0", "d1"),), "b1", "R:P"), "is split by 'b1' on the axis 'axis'"),
    (replicated((("d0", "d1", "d2", "d3"),), "n b0", "S0 R:P", mesh={"tensor": 2, "data": 2}),
     "'data' comes behind the axis that splits layers"),
    (two_by_two(("s1:F:0", "s1:F:1", "s1:B:0", "s1:B:1")), r"order\.d3 differs from order\.d1"),
    (pipeline(1, 1, 1, 1, devices=(0, 0, 1, 1), microbatches=1, order=[
        [(0, "F", 0), (1, "F", 0), (1, "B", 0), (0, "B", 0)], [(2, "F", 0), (3, "F", 0), (3, "B", 0), (2, "B", 0)]]),
     r"the stages are on the pipeline ranks \[0, 0, 1, 1\]: torchtitan deals them out in turn"),
]


@pytest.mark.parametrize(("plan", "message"), TITAN, ids=[item[1][:30] for item in TITAN])
def test_what_torchtitan_cannot_say(plan, message):
    with pytest.raises(InputError, match=message):
        titan(plan, csv_path="x.csv")


def test_mixed_words_on_an_axis_are_refused():
    plan = replicated((("d0", "d1"),), "n", "S0")
    ops = dict(plan.stages[0].sharding.ops)
    ops["model.layers.2.up.op"] = ("b0",)
    stage = replace(plan.stages[0], sharding=replace(plan.stages[0].sharding, ops=ops))
    with pytest.raises(InputError, match=r"operator 'model\.layers\.0\.up\.op' is split by width and 'model\.layers\.2\.up\.op' by"):
        titan(replace(plan, stages=(stage,)))


def test_fields_are_those_of_torchtitan(tmp_path):
    """Where torchtitan is installed: every field exists, and its own splitting gives each stage its modules."""
    config = pytest.importorskip("torchtitan.config")
    found = titan(pipeline(1, 3))
    if hasattr(config, "ParallelismConfig"):
        known = config.ParallelismConfig(**found.sections["parallelism"])
        assert {item.name for item in fields(config.TrainingConfig)} >= set(found.sections["training"])
    else:
        path = tmp_path / "settings.toml"
        path.write_text(format_toml(found))
        known = config.ConfigManager().parse_args(["--job.config_file", str(path)]).parallelism
    parts = found.sections["parallelism"]["module_fqns_per_model_part"]
    assert known.module_fqns_per_model_part == parts
    split = pytest.importorskip("torchtitan.distributed.pipeline_parallel")
    if hasattr(split, "_split_module"):
        import torch

        model = torch.nn.Module()
        model.tok_embeddings, model.norm, model.lm_head = (torch.nn.Linear(2, 2) for _ in range(3))
        model.layers = torch.nn.ModuleDict({str(index): torch.nn.Linear(2, 2) for index in range(4)})
        for names in parts:
            kept = {name.removesuffix(".weight") for name in split._split_module(model, names).state_dict() if "weight" in name}
            assert kept == set(names) - {HEAD[0]}


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(tmp_path):
    """Write a plan with its cluster, and the model as a graph file."""
    from weft.cluster.cluster_file import to_json
    from weft.model.graph_file import save_graph
    from weft.plan.plan import save_plan

    graph = tmp_path / "model.json"
    save_graph(decoder(), graph)

    def write(plan: Plan, cluster: Cluster) -> list[str]:
        described = replace(plan, cluster=replace(plan.cluster, digest=cluster.digest, description=to_json(cluster)))
        save_plan(described, tmp_path / "plan.json")
        return ["export", str(tmp_path / "plan.json"), "--model", str(graph), "-q"]

    return write


def test_export_writes_settings_and_schedule(plan_file, tmp_path, capsys):
    plan = pipeline(1, 1, 2, microbatches=2)
    command = plan_file(plan, plain_cluster(3))
    out = tmp_path / "titan.toml"
    assert main([*command, "--format", "torchtitan", "-o", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    settings = tomllib.loads(out.read_text())
    assert settings == {name: result[name] for name in settings}
    schedule = settings["parallelism"]["pipeline_parallel_schedule_csv"]
    assert schedule == str(tmp_path / "titan.csv")
    assert len((tmp_path / "titan.csv").read_text().splitlines()) == 3
    assert result["ranks"] == ["d0", "d1", "d2"]
    assert main([*command, "--format", "torchtitan", "-o", str(tmp_path / "titan.csv")]) == 2
    assert "choose one that ends in .toml" in capsys.readouterr().err


def test_export_prints_a_command(plan_file, capsys):
    cluster = plain_cluster(2)
    command = plan_file(pipeline(1, 3, mode="inference"), cluster)
    assert main([*command, "--format", "vllm"]) == 0
    assert capsys.readouterr().out == ("VLLM_PP_LAYER_PARTITION=1,3 vllm serve MODEL --tensor-parallel-size 1 "
                                       "--pipeline-parallel-size 2\n")
    assert main([*command, "--format", "llama-cpp", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["format"], result["devices"]) == ("llama-cpp", ["d0", "d1"])
    assert result["arguments"] == ["--gpu-layers", "5", "--split-mode", "layer", "--tensor-split", "1,4"]
    assert main([*command, "--format", "device-map", "--nearest"]) == 2
    assert "--nearest is for torchtitan, vllm, llama-cpp" in capsys.readouterr().err


def test_the_plans_here_are_sound():
    """What is exported are plans that pass all checks, so that refusals are about the format alone."""
    for plan in (pipeline(1, 3), there_and_back(), two_by_two(), pipeline(2, 2, mode="inference")):
        check_plan(plan, decoder(), plain_cluster(len(plan.cluster.devices)))
