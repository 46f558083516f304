"""A reduced model counts for the full one: same operators, costs and names, and nothing is merged that differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.model.helpers import eager, replayed, source_of, zoo
from weft.base.errors import ModelError
from weft.model import fold
from weft.model.chains import find_chains, periodic_stretches
from weft.model.folded import trace_folded
from weft.model.graph import TensorRole
from weft.model.trace import trace

COSTS = ("flops", "bytes_read", "bytes_written", "input_grad_flops", "input_grad_bytes", "weight_grad_flops",
         "weight_grad_bytes", "saved_inside_bytes")
SMALL = "hidden=32,heads=4,vocab=97,seq=16"


class Block(nn.Module):
    def __init__(self, index: int, width: int = 16):
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x, memory=None):
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + (y if memory is None else y * memory)


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.run(self.stem(x))).mean()

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class WithoutStem(Stack):
    def forward(self, x):
        return self.head(self.run(x)).mean()


class SharesMemory(Stack):
    def run(self, x):
        memory = torch.tanh(self.head.weight * x)
        for block in self.blocks:
            x = block(x, memory=memory)
        return x


class ReadsFirst(Stack):
    """Every layer after the first reads the result of the first."""

    def run(self, x):
        first = self.blocks[0](x)
        x = first
        for block in self.blocks[1:]:
            x = block(x, memory=first)
        return x


class Skipping(Stack):
    def run(self, x):
        older = x
        for block in self.blocks:
            older, x = x, block(x) + older
        return x


class ReadsTwoBack(Stack):
    def run(self, x):
        older = torch.tanh(x)
        for block in self.blocks:
            older, x = x, block(x, memory=older)
        return x


class Taps(Stack):
    """The result of a layer in the middle is read at the end."""

    def run(self, x):
        seen = []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return x + seen[len(seen) // 2]


class Backwards(Stack):
    def run(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return x


class LooksInside(Stack):
    def run(self, x):
        for block in self.blocks:
            x = block(x).to(block.up.weight.dtype)
        return x


class EveryThird(Block):
    """Does something else in layers 2, 5, ...: neither in the first two nor in the last of seven."""

    def forward(self, x, memory=None):
        return super().forward(x) if self.index % 3 != 2 else x - self.down(self.up(x))


class UsesAuxiliary(Stack):
    """Layers hand on a second result, which nobody reads after the last one."""

    def run(self, x):
        auxiliary = torch.tanh(x)
        for block in self.blocks:
            x, auxiliary = block(x, auxiliary)
        return x


class TwoResults(Block):
    def forward(self, x, memory=None):
        y = super().forward(x, memory)
        return y, torch.sigmoid(y)


class Half(Block):
    def forward(self, x, memory=None):
        return x + torch.sigmoid(self.up(self.norm(x))).mean(-1, keepdim=True) * self.down.weight.sum()


def alternating():
    return Stack([(Block if index % 2 == 0 else Half)(index) for index in range(9)])


def stack(kind=Stack, block=Block, count=7):
    return lambda: kind([block(index) for index in range(count)])


def assert_counts_for_full(source):
    """Check the reduced model against the full trace: operators, costs, parameters and all names."""
    folded, full = trace_folded(source), trace(source, fold=False).graph
    graph, times = folded.traced.graph, np.array(folded.multiplicities())
    for column in COSTS:
        assert (getattr(graph, column) * times).sum() == pytest.approx(getattr(full, column).sum(), rel=1e-14), column
    stand_for = {name: {name} for name in (*graph.op_names, *graph.tensor_names)}
    for run in folded.runs:
        for index, names in enumerate(run.copies):
            assert names
            assert len(names) == len(run.copies[0])
            positions = [run.kept[index]] if index != 1 else [
                position for position in range(run.num_copies) if position not in (run.kept[0], *run.kept[2:])]
            assert len(positions) == run.multiplicity(index)
            inside = [name for name in stand_for if folded.full_name(run, index, name, run.kept[index]) == name
                      and folded.full_name(run, index, name, 0 if index else 1) != name]
            for name in inside:
                stand_for[name] = {folded.full_name(run, index, name, position) for position in positions}
    assert_same_names(graph, full, stand_for)
    return folded


def assert_same_names(graph, full, stand_for):
    """Check that every name of the full graph comes from exactly one of the reduced graph, with the same facts."""
    ops, tensors = ({name: index for index, name in enumerate(names)} for names in (full.op_names, full.tensor_names))
    made = [(other, index) for index, name in enumerate(graph.op_names) for other in stand_for[name]]
    assert sorted(other for other, _ in made) == sorted(full.op_names)
    assert all(graph.op_kinds[index] == full.op_kinds[ops[other]] for other, index in made)
    for column in COSTS:
        reduced, whole = getattr(graph, column), getattr(full, column)
        assert all(reduced[index] == whole[ops[other]] for other, index in made), column
    made = [(other, index) for index, name in enumerate(graph.tensor_names) for other in stand_for[name]]
    assert sorted(other for other, _ in made) == sorted(full.tensor_names)
    for column in ("tensor_shapes", "tensor_dtypes", "tensor_role", "tensor_bytes", "is_saved"):
        reduced, whole = getattr(graph, column), getattr(full, column)
        assert all(reduced[index] == whole[tensors[other]] for other, index in made), column


def shape_of(folded):
    return [(run.paths[0], run.num_copies, run.period, run.kept) for run in folded.runs]


@pytest.mark.parametrize(("spec", "runs"), [
    (f"gpt2:layers=6,{SMALL}", [("transformer.h.0", 6, 1, (0, 1, 5))]),
    (f"llama-3-8b:layers=5,kv_heads=2,ffn=48,{SMALL}", [("model.layers.0", 5, 1, (0, 1, 4))]),
    (f"bert-large:layers=3,ffn=48,{SMALL}", [("bert.encoder.layer.0", 3, 1, (0, 1, 2))]),
    (f"t5-large:layers=5,ffn=48,{SMALL}",
     [("encoder.block.1", 4, 1, (0, 1, 3)), ("decoder.block.1", 4, 1, (0, 1, 3))]),
    ("vit-base:layers=4,hidden=32,heads=4,ffn=48,image=32,classes=7", [("vit.layers.0", 4, 1, (0, 1, 3))]),
    ("swin-t:hidden=12,classes=7", [("swin.encoder.layers.2.blocks.0", 3, 2, (0, 1, 2))]),
    (f"mixtral-8x:layers=5,kv_heads=2,ffn=24,experts=4,{SMALL}", [("model.layers.0", 5, 1, (0, 1, 4))]),
])
def test_zoo_models_count_for_the_full_ones(spec, runs):
    assert shape_of(assert_counts_for_full(zoo(spec, batch=2))) == runs


def test_inference_counts_too():
    assert shape_of(assert_counts_for_full(zoo(f"gpt2:layers=4,{SMALL}", mode="inference", batch=1)))


def test_two_layers_are_no_run():
    assert not trace_folded(zoo(f"gpt2:layers=2,{SMALL}", batch=2)).runs


@pytest.mark.parametrize(("make", "runs"), [
    (stack(), [("blocks.0", 7, 1, (0, 1, 6))]),
    (stack(kind=WithoutStem), [("blocks.1", 6, 1, (0, 1, 5))]),  # the first one's input needs no gradient
    (stack(kind=SharesMemory), [("blocks.0", 7, 1, (0, 1, 6))]),
    (stack(kind=UsesAuxiliary, block=TwoResults), [("blocks.0", 6, 1, (0, 1))]),
    (alternating, [("blocks.0", 4, 2, (0, 1, 3))]),
    (lambda: Stack([Block(0, 24), *(Block(i) for i in range(1, 7))]), [("blocks.1", 6, 1, (0, 1, 5))]),
    (lambda: Stack([Block(i, 24 if i % 3 == 2 else 16) for i in range(9)]), [("blocks.0", 3, 3, (0, 1, 2))]),
    (lambda: Stack([Block(i, 24 if i > 3 else 16) for i in range(8)]),
     [("blocks.0", 4, 1, (0, 1, 3)), ("blocks.4", 4, 1, (0, 1, 3))]),
    (stack(kind=Skipping), []),
    (stack(kind=ReadsTwoBack), []),
    (stack(kind=Taps), []),
    (stack(kind=Backwards), []),
    (stack(block=EveryThird), []),
    (stack(kind=LooksInside), []),
])
def test_only_what_is_equal_is_merged(make, runs):
    assert shape_of(assert_counts_for_full(source_of(make, (8,)))) == runs


def test_a_result_of_the_first_layer_that_all_read_starts_the_run_after_it():
    """The second copy reads the first's result twice; only the third tells what is handed on and what stays."""
    folded = assert_counts_for_full(source_of(stack(kind=ReadsFirst), (8,)))
    assert shape_of(folded) in ([], [("blocks.1", 6, 1, (0, 1, 5))])


def test_tied_layers_are_not_merged():
    def make():
        blocks = [Block(index) for index in range(6)]
        for block in blocks[1:]:
            block.up.weight = blocks[0].up.weight
        return Stack(blocks)

    assert not assert_counts_for_full(source_of(make, (8,))).runs


def test_frozen_layers_are_not_merged_with_others():
    def make():
        module = stack(count=8)()
        module.blocks[:4].requires_grad_(False)
        return module

    assert shape_of(assert_counts_for_full(source_of(make, (8,)))) == [
        ("blocks.0", 4, 1, (0, 1, 3)), ("blocks.4", 4, 1, (0, 1, 3))]


@pytest.mark.parametrize("make", [stack(), stack(kind=SharesMemory), alternating])
def test_the_reduced_program_is_the_model_with_the_kept_layers(make):
    folded = trace_folded(source_of(make, (8,)))
    (run,) = folded.runs
    kept = [int(path.split(".")[1]) for position in run.kept for path in run.layers(position)]
    last = len(run.paths)

    def cut():
        module = make()
        module.blocks = nn.ModuleList(module.blocks[index] for index in (*kept, *range(last, len(module.blocks))))
        return module

    inputs = folded.traced.source.inputs(seed=3)
    want_loss, want = eager(source_of(cut, (8,)), inputs)
    got_loss, got = replayed(folded.traced, inputs)
    assert torch.isclose(got_loss, want_loss, rtol=1e-13, atol=0)
    for place, index in enumerate((*kept, *range(last, len(make().blocks)))):
        name = "down.weight"
        assert torch.allclose(got[f"blocks.{index}.{name}"], want[f"blocks.{place}.{name}"], rtol=1e-12, atol=1e-15)


def test_depth_does_not_change_the_reduced_graph():
    shallow, deep = (trace_folded(zoo(f"gpt2:layers={count},{SMALL}", batch=2)).traced.graph for count in (5, 40))
    assert shallow.op_kinds == deep.op_kinds
    assert [name.replace("h.4", "h.39") for name in shallow.op_names] == list(deep.op_names)
    parameters = np.flatnonzero(deep.tensor_role == TensorRole.PARAMETER)
    assert len(parameters) == (shallow.tensor_role == TensorRole.PARAMETER).sum()


def test_modules_are_restored():
    module = stack(count=9)()
    before = {name: id(tensor) for name, tensor in module.named_parameters()}
    trace_folded(source_of(lambda: module, (8,)))
    module.double()
    assert before.keys() == dict(module.named_parameters()).keys()
    assert [block.index for block in module.blocks] == list(range(9))
    assert all(type(block.index) is int and "forward" not in block.__dict__ for block in module.blocks)
    assert not fold.RECORDS


def test_names_of_copies():
    folded = trace_folded(zoo(f"gpt2:layers=6,{SMALL}", batch=2))
    (run,) = folded.runs
    assert folded.full_name(run, 1, "transformer.h.1.attn.c_attn.weight", 4) == "transformer.h.4.attn.c_attn.weight"
    assert folded.full_name(run, 1, "transformer.h.1", 4) == "transformer.h.4"
    assert folded.full_name(run, 1, "transformer.wte.weight", 4) == "transformer.wte.weight"
    with pytest.raises(ModelError, match="no copy 6 in a run of 6"):
        folded.full_name(run, 1, "transformer.h.1", 6)


def test_errors_of_the_model_are_told():
    class Branches(Stack):
        def run(self, x):
            return super().run(x if x.sum() > 0 else -x)

    with pytest.raises(ModelError, match=r"torch\.where"):
        trace_folded(source_of(stack(kind=Branches), (8,)))


def test_stretches():
    assert list(periodic_stretches([0, 0, 0])) == [(0, 1, 3)]
    assert list(periodic_stretches([0, 1, 0, 1])) == []
    assert list(periodic_stretches([0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 2])) == [(0, 4, 3)]
    assert list(periodic_stretches([5, 0, 1, 0, 1, 0, 1, 0, 3, 3, 3, 3])) == [(1, 2, 3), (8, 1, 4)]


def test_a_number_that_counts_the_layers_is_no_setting():
    assert [chain.paths for chain in find_chains(Stack([Block(i + 3) for i in range(4)]))] == [
        tuple(f"blocks.{i}" for i in range(4))]
    assert not find_chains(Stack([Block(i * i) for i in range(4)]))
