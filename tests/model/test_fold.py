"""Equal layers traced once: the graph is the one that tracing every layer gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.model.helpers import assert_equals_eager, source_of
from weft.model import fold
from weft.model.chains import find_chains
from weft.model.trace import trace

COLUMNS = ("flops", "bytes_read", "bytes_written", "input_grad_flops", "input_grad_bytes", "weight_grad_flops",
           "weight_grad_bytes", "saved_inside_bytes", "is_constant", "inputs", "input_start", "tensor_base", "is_saved",
           "tensor_bytes", "tensor_producer")


class Block(nn.Module):
    def __init__(self, index: int, scale: float = 1.0):
        super().__init__()
        self.index, self.scale = index, scale
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, memory=None):
        y = self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return x + y if memory is None else (x + y * memory, memory)


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


class WithMemory(Stack):
    def forward(self, x):
        memory = torch.tanh(x)
        for block in self.blocks:
            x, memory = block(x, memory=memory)
        return self.head(x).mean()


class Skipping(Stack):
    """Every layer also reads the output of the one before the last."""

    def forward(self, x):
        older = x
        for block in self.blocks:
            older, x = x, block(x) + older
        return self.head(x).mean()


class DependsOnIndex(Block):
    def forward(self, x):
        return super().forward(x) / (1 + self.index)


class Alternating(Block):
    def forward(self, x):
        return super().forward(x) if self.index % 2 else x - self.down(self.up(x))


class EveryThird(Block):
    """Does something else in layers 2 and 5 of seven, which are not traced."""

    def forward(self, x):
        return super().forward(x) if self.index % 3 != 2 else x - self.down(self.up(x))


class ChangesItsOwn(Block):
    def forward(self, x):
        y = self.up(self.norm(x))
        y += 1
        y[:, :4].mul_(2)
        return x + self.down(y)


class ChangesItsInput(Block):
    def forward(self, x):
        x += self.down(torch.relu(self.up(x.clone())))
        return x


class FromCopy(Stack):
    def forward(self, x):
        return super().forward(x.clone())


def stack(kind=Stack, block=Block, count=7, **settings):
    return lambda: kind([block(index, **settings) for index in range(count)])


def same_graph(make, *shapes):
    source = source_of(make, *(shapes or ((8,),)))
    folded, full = trace(source).graph, trace(source, fold=False).graph
    assert folded.digest == full.digest
    assert folded.op_modules == full.op_modules
    assert folded.tensor_shapes == full.tensor_shapes
    for column in COLUMNS:
        assert np.array_equal(getattr(folded, column), getattr(full, column)), column
    return source


@pytest.mark.parametrize(("make", "is_folded"), [
    (stack(), True),
    (stack(kind=WithMemory), True),
    (stack(kind=Skipping), True),
    (stack(block=DependsOnIndex), False),
    (stack(block=Alternating), False),
    (stack(block=EveryThird), False),
    (stack(block=ChangesItsOwn), True),
    (stack(kind=FromCopy, block=ChangesItsInput), False),
])
def test_folded_graph_is_the_full_one(make, is_folded, monkeypatch):
    copied = []
    real = fold.write_copy
    monkeypatch.setattr(fold, "write_copy", lambda *args: (copied.append(1), real(*args)))
    source = same_graph(make)
    assert bool(copied) == is_folded
    assert_equals_eager(trace(source))


def found(module: nn.Module) -> list[tuple[tuple[str, ...], int]]:
    return [(chain.paths, chain.period) for chain in find_chains(module)]


def blocks_of(*numbers: int) -> tuple[str, ...]:
    return tuple(f"blocks.{number}" for number in numbers)


def test_layers_are_equal_by_structure_and_settings():
    assert found(stack()()) == [(blocks_of(*range(7)), 1)]
    assert found(stack(count=2)()) == []
    mixed = Stack([Block(i, scale=1.0 + (i % 2)) for i in range(10)])
    assert found(mixed) == [(blocks_of(*range(10)), 2)]
    frozen = Stack([Block(i) for i in range(8)])
    frozen.blocks[3].requires_grad_(False)
    assert found(frozen) == [(blocks_of(0, 1, 2), 1), (blocks_of(4, 5, 6, 7), 1)]


def test_an_index_that_looks_like_a_setting_does_not_split_the_set():
    """A width of 4 in layer 4 is no index: it is the same in every layer."""
    blocks = [Block(i) for i in range(8)]
    for block in blocks:
        block.width = 4
    assert found(Stack(blocks)) == [(blocks_of(*range(8)), 1)]


def test_shared_parameters_are_not_folded():
    blocks = [Block(i) for i in range(6)]
    for block in blocks[1:]:
        block.up.weight = blocks[0].up.weight
    assert found(Stack(blocks)) == []
    same_graph(lambda: _shared())


def _shared():
    blocks = [Block(i) for i in range(6)]
    for block in blocks[1:]:
        block.up.weight = blocks[0].up.weight
    return Stack(blocks)


def test_modules_are_restored_after_folding():
    module = stack()()
    trace(source_of(lambda: module, (8,)))
    assert not any("forward" in block.__dict__ for block in module.blocks)
    assert not fold.RECORDS
