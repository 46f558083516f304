"""Device maps: accelerate accepts and runs what is exported, and what a map cannot say is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from weft.base.errors import InputError
from weft.cli.main import main
from weft.cluster.cluster import Cluster, Device, DeviceKind
from weft.export.device_map import to_device_map
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import TracedModel, trace
from weft.model.weights import materialize
from weft.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from weft.search.place.placed_plan import OpPlacement, cut_segments

GPT2 = "gpt2-tiny:layers=2"
FLAVA = "flava:layers=1,joint_layers=1,hidden=32,heads=2,ffn=64,vocab=64,seq=8,image=32,classes=10"


@cache
def traced(spec: str) -> TracedModel:
    source = resolve_model(spec, mode="inference")
    assert isinstance(source, ModelSource)
    return trace(source, batch=2, backward="rule")


def mixed_cluster(*, hosts: str = "aaa") -> Cluster:
    """Return two GPUs and a CPU."""
    kinds = {"G": DeviceKind(name="G", flop_per_s={"float32": 1.0}),
             "C": DeviceKind(name="C", flop_per_s={"float32": 1.0}, type="cpu")}
    devices = tuple(Device(name=name, kind=kind, host=host, memory_bytes=None)
                    for name, kind, host in zip(("g0", "c", "g1"), "GCG", hosts, strict=True))
    return Cluster(name="mixed", kinds=kinds, devices=devices)


def plan_by(spec: str, device_of_module: Callable[[str], str]) -> Plan:
    """Return the plan that puts every operator on the device that the function gives for its module."""
    graph, names = traced(spec).graph, ("g0", "c", "g1")
    device = np.asarray([names.index(device_of_module(path)) for path in graph.op_modules])
    segments = cut_segments(graph, OpPlacement(device=device, order=np.arange(graph.num_ops)))
    stages = tuple(Stage(name=f"s{index}", ops=tuple(graph.op_names[op] for op in ops),
                         replicas=(Replica(devices=(names[device[ops[0]]],)),)) for index, ops in enumerate(segments))
    return Plan(model=ModelRef(name=spec, digest=graph.digest, mode="inference", batch=2),
                cluster=ClusterRef(digest="", devices=names), microbatches=1, stages=stages, order={})


def by_block(path: str) -> str:
    """Return where a GPT-2 goes whose first block is on the first GPU and whose second is on the CPU."""
    return "c" if path.startswith(("transformer.h.1", "transformer.ln_f", "lm_head")) else "g0"


def export(spec: str, plan: Plan, cluster: Cluster | None = None):
    source = traced(spec).source
    return to_device_map(plan, traced(spec).graph, cluster or mixed_cluster(), state=source.build().state_dict())


def test_blocks_become_the_coarsest_keys():
    found = export(GPT2, plan_by(GPT2, by_block))
    assert found.entries == {"transformer.wte": 0, "transformer.wpe": 0, "transformer.h.0": 0, "transformer.h.1": "cpu",
                             "transformer.ln_f": "cpu", "lm_head": "cpu"}
    assert any("main_device='cpu'" in note for note in found.notes)


def test_a_model_on_one_device_is_one_entry():
    assert export(GPT2, plan_by(GPT2, lambda path: "g1")).entries == {"": 1}


def test_gpus_are_counted_without_the_cpu():
    found = export(GPT2, plan_by(GPT2, lambda path: {"g0": "g0", "c": "g1"}[by_block(path)]))
    assert set(found.entries.values()) == {0, 1}
    assert not any("cpu" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize("spec", [GPT2, FLAVA], ids=["gpt2", "flava"])
def test_accelerate_covers_all_tensors_and_gives_the_same_outputs(spec):
    """FLAVA has parameters that no operator reads, and a split module with one of its own."""
    import torch
    from accelerate import dispatch_model
    from accelerate.utils import check_device_map

    rule = by_block if spec == GPT2 else lambda path: "c" if path.startswith("flava.text_model") else "g0"
    found = export(spec, plan_by(spec, rule))
    assert len(found.entries) > 3
    source = traced(spec).source
    model = materialize(source.build(), 0).eval()
    check_device_map(model, found.entries)
    inputs = source.inputs(2, 0)
    with torch.no_grad():
        expected = outputs_of(model(*inputs))
        here = dispatch_model(model, dict.fromkeys(found.entries, "cpu"), force_hooks=True, main_device="cpu")
        torch.testing.assert_close(outputs_of(here(*inputs)), expected)


def outputs_of(result):
    return result if not hasattr(result, "to_tuple") else result.to_tuple()[0]


def test_a_missing_entry_is_seen_by_accelerate():
    """The control of the test above."""
    from accelerate.utils import check_device_map

    entries = export(GPT2, plan_by(GPT2, by_block)).entries
    del entries["transformer.ln_f"]
    with pytest.raises(ValueError, match=r"transformer\.ln_f\.weight"):
        check_device_map(traced(GPT2).source.build(), entries)


def test_a_split_leaf_is_refused_by_name():
    plan, graph = plan_by(GPT2, by_block), traced(GPT2).graph
    name = [op for op, path in zip(graph.op_names, graph.op_modules, strict=True) if path.endswith("h.0.mlp.c_fc")][-1]
    rest = tuple(replace(stage, ops=tuple(op for op in stage.ops if op != name)) for stage in plan.stages)
    moved = Stage(name="x", ops=(name,), replicas=(Replica(devices=("g1",)),))
    with pytest.raises(InputError, match=r"module 'transformer\.h\.0\.mlp\.c_fc' is on 'g0' and 'g1' \(operator .* on 'g0'"):
        export(GPT2, replace(plan, stages=(*rest, moved)))


def test_a_block_split_across_its_own_addition_is_refused():
    plan = plan_by(GPT2, lambda path: "g1" if ".h.0.mlp" in path else "g0")
    with pytest.raises(InputError, match=r"module 'transformer.h.0' is split over 'g0' and 'g1', and its own operator "
                                         r"'.*' reads tensors of 'g0' and 'g1'.*Keep 'transformer.h.0' on one device"):
        export(GPT2, plan)


def test_operators_that_accelerate_moves_are_noted():
    plan = plan_by(GPT2, lambda path: "g1" if path == "transformer" else "g0")
    found = export(GPT2, plan)
    assert set(found.entries.values()) == {0}
    assert any("will run where the inputs are ('g0'), not on 'g1'" in note for note in found.notes)


def test_what_a_device_map_cannot_say_is_refused():
    plan = plan_by(GPT2, by_block)
    with pytest.raises(InputError, match="hosts a, b: a device map is for one machine"):
        export(GPT2, plan, mixed_cluster(hosts="aba"))
    stage = replace(plan.stages[0], replicas=(Replica(devices=("g0",), share=0.5), Replica(devices=("g1",), share=0.5)))
    with pytest.raises(InputError, match="stage 's0' runs on several devices"):
        export(GPT2, replace(plan, stages=(stage, *plan.stages[1:])))
    with pytest.raises(InputError, match="on 'g0' and on 'g1', for different micro-batches"):
        export(GPT2, replace(plan, stages=(*plan.stages, replace(plan.stages[0], name="x",
                                                                 replicas=(Replica(devices=("g1",)),)))))


def test_export_command(tmp_path, capsys):
    path, out = tmp_path / "plan.json", tmp_path / "map.json"
    assert main(["plan", GPT2, "2 x A100-80GB", "--mode", "inference", "--batch", "2", "--microbatches", "1", "--strategy",
                 "single", "-o", str(path), "-q"]) == 0
    capsys.readouterr()
    assert main(["export", str(path), "--format", "device-map", "-q"]) == 0
    assert json.loads(capsys.readouterr().out) == {"": 0}
    assert main(["export", str(path), "--format", "device-map", "--json", "-o", str(out), "-q"]) == 0
    assert json.loads(capsys.readouterr().out) == {"format": "device-map", "device_map": {"": 0}, "notes": []}
    assert json.loads(out.read_text()) == {"": 0}
