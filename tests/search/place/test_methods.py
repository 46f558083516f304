"""The memory-only rules: blocks, hand-made cases, and accelerate's own answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from weft.base.errors import NoFeasiblePlan
from weft.cluster.cluster_file import parse_cluster
from weft.cost.costs import estimate_costs
from weft.model.graph_file import parse_graph
from weft.search.place.methods import (
    METHODS,
    accelerate_balanced,
    accelerate_sequential,
    even,
    find_blocks,
    proportional,
    single,
)
from weft.search.place.problem import PlaceProblem, problem_from_graph
from weft.search.place.timetable import Assignment, Method, check_timetable, make_timetable

RULES = ("accelerate-sequential", "accelerate-balanced", "proportional", "even")


def make_chain(modules: Sequence[str], keeps: Sequence[int], memory: Sequence[int | None], *,
               on: Mapping[int, Sequence[str]] | None = None, colocate: Mapping[int, str] | None = None
               ) -> PlaceProblem:
    """Return operators in a row with modules and bytes; ``on`` and ``colocate`` for some of them."""
    devices = [f"d{index}" for index in range(len(memory))]
    ops: list[dict[str, Any]] = []
    for op, (module, size) in enumerate(zip(modules, keeps, strict=True)):
        names = list((on or {}).get(op, devices))
        ops.append({"name": f"op{op}", "module": module, "memory": size, "times": dict.fromkeys(names, 1), "on": names})
        if op in (colocate or {}):
            ops[-1]["colocate"] = (colocate or {})[op]
    edges = [{"from": f"op{op}", "to": f"op{op + 1}", "bytes": 8} for op in range(len(ops) - 1)]
    graph = parse_graph({"format": "weft.graph", "version": 1, "ops": ops, "edges": edges})
    cluster = parse_cluster({
        "format": "weft.cluster", "version": 1, "switches": ["s"],
        "devices": [{"name": name, "kind": name, "memory": amount}
                    for name, amount in zip(devices, memory, strict=True)],
        "links": [{"from": name, "to": "s", "bandwidth": 8} for name in devices]})
    return problem_from_graph(graph, cluster, estimate_costs(graph, cluster))


def checked(problem: PlaceProblem, found: Assignment) -> list[int]:
    """Return the device of each operator of a placement that the checker accepts."""
    check_timetable(make_timetable(problem, found.device, found.order))
    return [int(device) for device in found.device]


def layers(count: int) -> list[str]:
    return [f"h.{index}.mlp" for index in range(count)]


# ---- blocks -------------------------------------------------------------------------------------------------------


def test_blocks_are_layers_and_glue_joins_the_layer_before() -> None:
    modules = ["", "model.embed", "model", "model.h.0.attn", "model.h.0.mlp", "", "model.h.1.attn", "model", "head"]
    keeps = [0, 5, 0, 3, 4, 0, 3, 7, 2]
    blocks = find_blocks(make_chain(modules, keeps, [100, 100]))
    # an operator of "model" that keeps something, as a parameter of the model itself, is a block of its own
    assert blocks.names == ("model.embed", "model.h.0", "model.h.1", "model", "head")
    assert blocks.of_op.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 4]


def test_without_modules_every_unit_is_a_block() -> None:
    blocks = find_blocks(make_chain([""] * 4, [1] * 4, [9, 9], colocate={0: "a", 2: "a"}))
    assert blocks.of_op.tolist() == [0, 1, 0, 2]


def test_blocks_that_share_a_unit_are_one() -> None:
    blocks = find_blocks(make_chain(layers(4), [1] * 4, [9, 9], colocate={1: "a", 3: "a"}))
    assert blocks.of_op.tolist() == [0, 1, 2, 1]


# ---- accelerate ---------------------------------------------------------------------------------------------------


def test_sequential_fills_devices_in_order_and_keeps_room_on_the_first() -> None:
    problem = make_chain(layers(6), [10] * 6, [40, 25, 100])
    # the first device has room for four but keeps that of one
    assert checked(problem, accelerate_sequential(problem)) == [0, 0, 0, 1, 1, 2]


def test_sequential_gives_the_kept_room_up_where_it_is_needed() -> None:
    problem = make_chain(layers(6), [10] * 6, [40, 20])
    assert checked(problem, accelerate_sequential(problem)) == [0, 0, 0, 0, 1, 1]
    with pytest.raises(NoFeasiblePlan, match=r"'h\.5' keeps 10 B.*missing on 'd1'") as caught:
        accelerate_sequential(make_chain(layers(6), [10] * 6, [40, 19]))
    assert caught.value.missing_bytes == 1
    assert caught.value.device == "d1"


def test_balanced_caps_all_devices_but_the_last() -> None:
    problem = make_chain(layers(9), [10] * 9, [None, None, None])
    # the cap is 90 // 3 + 12 = 42: four blocks, three where room for one is kept
    assert checked(problem, accelerate_balanced(problem)) == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_devices_that_may_not_run_a_block_are_passed_over_for_it() -> None:
    problem = make_chain(layers(4), [10] * 4, [100, 100, 100], on={1: ["d2"]})
    assert checked(problem, accelerate_sequential(problem)) == [0, 2, 0, 0]
    torn = make_chain(["h.0", "h.0"], [1, 1], [9, 9], on={0: ["d0"], 1: ["d1"]})
    for name in RULES:
        with pytest.raises(NoFeasiblePlan, match=r"no device may run all operators of 'h\.0'"):
            METHODS[name](torn)


def test_blocks_with_tied_weights_go_together() -> None:
    problem = make_chain(["embed", *layers(4), "head"], [10] * 6, [45, 100], on=None)
    assert checked(problem, accelerate_sequential(problem)) == [0, 0, 0, 1, 1, 1]
    tied = replace(problem, weights=np.array([0, 1, 2, 3, 4, 0], dtype=np.int64))
    assert checked(tied, accelerate_sequential(tied)) == [0, 0, 0, 1, 1, 0]


@cache
def traced(spec: str) -> tuple[PlaceProblem, Any]:
    """Return the problem of a traced model on three unlimited devices, without lifetimes, and its module."""
    from weft.model.load import trace_model

    model = trace_model(spec, mode="inference", batch=1)
    cluster = parse_cluster({"format": "weft.cluster", "version": 1, "hosts": [
        {"name": "a", "devices": "3 x A100-80GB", "intra": "nvlink3"}]})
    problem = problem_from_graph(model.graph, cluster, estimate_costs(model.graph, cluster))
    return replace(problem, has_lifetimes=False), model.source.build()


def accelerate_devices(model: Any, names: Sequence[str], memory: int, layer: str, *, balanced: bool) -> list[set[str]]:
    """Return the devices that accelerate itself gives to the modules of each block, with three pretended devices."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    logging.getLogger("accelerate").setLevel(logging.ERROR)
    limits: dict[int | str, int | str] = dict.fromkeys(range(3), memory)
    if balanced:
        limits = get_balanced_memory(model, limits, no_split_module_classes=[layer])
    found = infer_auto_device_map(model, limits, no_split_module_classes=[layer], clean_result=False)
    return [{str(device) for module, device in found.items()
             if name == module or name.startswith(f"{module}.") or module.startswith(f"{name}.")} for name in names]


@pytest.mark.parametrize(("spec", "layer", "skipped"), [
    ("gpt2-tiny:layers=10", "GPT2Block", ()),
    ("llama-tiny:layers=10", "LlamaDecoderLayer", ("model.rotary_emb",)),
])
@pytest.mark.parametrize("balanced", [False, True])
def test_blocks_go_where_accelerate_itself_puts_them(spec: str, layer: str, skipped: tuple[str, ...],
                                                     balanced: bool) -> None:
    """Every block, tied head included, is on the same device, but for what accelerate does differently:

    it walks modules as they are registered, not as they run, so the 32 bytes of LLaMA's rotary embedding come last
    there (skipped here); it counts buffers that no operator reads (64 bytes: memory is never that close here); and
    where nothing is left it uses the disk, where Weft says that there is no plan.
    """
    pytest.importorskip("accelerate")
    problem, model = traced(spec)
    blocks = find_blocks(problem)
    rule: Method = accelerate_balanced if balanced else accelerate_sequential
    total = float(problem.weight_bytes.sum())
    for part in (0.45, 0.6, 0.9, 2.0):
        limited = replace(problem, capacity=np.full(3, int(part * total), dtype=np.float64))
        device = checked(limited, rule(limited))
        mine = {name: {str(device[int(np.argmax(blocks.of_op == block))])} for block, name in enumerate(blocks.names)}
        theirs = dict(zip(blocks.names, accelerate_devices(model, blocks.names, int(part * total), layer,
                                                           balanced=balanced), strict=True))
        for name in skipped:
            del mine[name], theirs[name]
        assert mine == theirs, f"at {part} of the model per device"
    assert {"disk"} in accelerate_devices(model, blocks.names, int(0.3 * total), layer, balanced=balanced)
    with pytest.raises(NoFeasiblePlan):
        rule(replace(problem, capacity=np.full(3, int(0.3 * total), dtype=np.float64)))


# ---- counts of layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory", "num_layers", "counts"), [
    ([300, 100], 8, [6, 2]),
    ([300, 300, 100], 8, [4, 3, 1]),  # 3.43, 3.43, 1.14: the first of the equal remainders
    ([1000, 1000, 1], 6, [2, 3, 1]),  # one each at least, taken from the largest
    ([500, 500, 500], 2, [1, 1, 0]),
    ([None, None], 5, [3, 2]),
])
def test_proportional_counts(memory: list[int | None], num_layers: int, counts: list[int]) -> None:
    problem = make_chain(layers(num_layers), [1] * num_layers, memory)
    assert np.bincount(checked(problem, proportional(problem)), minlength=len(memory)).tolist() == counts


@pytest.mark.parametrize(("num_devices", "num_layers", "counts"), [
    (3, 7, [2, 3, 2]), (3, 8, [3, 3, 2]), (4, 10, [2, 3, 3, 2]), (4, 3, [1, 1, 1, 0]), (1, 5, [5]), (2, 6, [3, 3]),
])
def test_even_counts(num_devices: int, num_layers: int, counts: list[int]) -> None:
    problem = make_chain(layers(num_layers), [1] * num_layers, [None] * num_devices)
    assert np.bincount(checked(problem, even(problem)), minlength=num_devices).tolist() == counts


def test_counts_of_layers_do_not_look_at_fit() -> None:
    problem = make_chain(layers(4), [10, 1, 1, 1], [8, 30])
    with pytest.raises(NoFeasiblePlan, match=r"'d0' would hold 10 B but has 8 B: 2 B are missing for 'op0'") as caught:
        proportional(problem)
    assert (caught.value.missing_bytes, caught.value.device) == (2, "d0")
    with pytest.raises(NoFeasiblePlan, match="'d0' would hold 11 B"):
        even(problem)


def test_counts_of_layers_go_to_the_nearest_device_that_may_run_them() -> None:
    problem = make_chain(layers(4), [1] * 4, [None, None, None, None], on={1: ["d3", "d0"]})
    assert checked(problem, even(problem)) == [0, 0, 2, 3]


def test_single_is_the_fastest_device_with_room() -> None:
    problem = make_chain(layers(3), [10] * 3, [30, 40])
    faster = replace(problem, time_s=problem.time_s * np.array([2.0, 1.0]))
    assert checked(faster, single(faster)) == [1, 1, 1]
    assert checked(problem, single(replace(faster, capacity=np.array([30.0, 29.0])))) == [0, 0, 0]
    with pytest.raises(NoFeasiblePlan, match="1 B are missing") as caught:
        single(replace(faster, capacity=np.array([29.0, 20.0])))
    assert caught.value.device == "d0"
    with pytest.raises(NoFeasiblePlan, match="no device may run all"):
        single(make_chain(layers(2), [1, 1], [9, 9], on={0: ["d0"], 1: ["d1"]}))
