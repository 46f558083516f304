"""Stages cut out of a traced model compute what the model computes, whatever the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.helpers import state_of
from tests.run.plans import source_of, traced
from weft.base.errors import ModelError
from weft.model.graph import TensorRole
from weft.plan.layout import stage_inputs
from weft.run.stage import attribute_name, build_stage, model_graph

CPU = torch.device("cpu")


class Cut:
    """A traced model cut into parts by operator, run part after part."""

    def __init__(self, name: str) -> None:
        self.traced, self.source = traced(name), source_of(name)
        self.module = self.source.build()
        self.graph, self.model = self.traced.graph, model_graph(self.traced)
        self.values = {**state_of(self.module), **self.traced.program.constants}
        self.inputs = dict(zip(self.traced.program.inputs, self.source.inputs(2, 3), strict=True))

    def stages(self, part_of_op: np.ndarray):
        """Return the stages of a map from operators to parts, which must be numbered in topological order."""
        parts = [np.flatnonzero(part_of_op == part) for part in sorted(set(part_of_op.tolist()))]
        wanted = set(self.graph.outputs).union(*(stage_inputs(self.graph, ops).tolist() for ops in parts))
        for ops in parts:
            outputs = [self.graph.tensor_names[tensor] for tensor in sorted(wanted)
                       if self.graph.tensor_producer[tensor] in ops]
            yield build_stage(self.model, [self.graph.op_names[op] for op in ops], outputs, values=self.values.__getitem__, device=CPU)

    def run(self, part_of_op: np.ndarray) -> torch.Tensor:
        tensors = dict(self.inputs)
        for stage in self.stages(part_of_op):
            found = stage.module(*(tensors[name] for name in stage.inputs))
            tensors.update(zip(stage.outputs, found, strict=True))
        return tensors[self.graph.tensor_names[self.graph.outputs[0]]]

    def expected(self) -> torch.Tensor:
        return self.module(*self.inputs.values())


@pytest.fixture(scope="module", params=["tiny_gpt", "tied_gpt", "skip_net"])
def model(request):
    return Cut(request.param)


def levels(cut: Cut, group: np.ndarray) -> np.ndarray:
    """Return parts for any map of operators to groups: (longest chain of changes of group before, group), numbered."""
    level = np.zeros(cut.graph.num_ops, dtype=np.int64)
    for source, target, _ in cut.graph.edges:
        level[target] = max(level[target], level[source] + (group[source] != group[target]))
    return level * (group.max() + 1) + group


def test_any_map_of_operators_to_parts_gives_the_same_loss(model):
    @settings(max_examples=5, deadline=None)
    @given(st.lists(st.integers(0, 2), min_size=model.graph.num_ops, max_size=model.graph.num_ops))
    def check(groups):
        part_of_op = levels(model, np.asarray(groups))
        assert torch.equal(model.run(part_of_op), model.expected())

    check()


def test_gradients_flow_through_stages(model):
    half = (np.arange(model.graph.num_ops) >= model.graph.num_ops // 2).astype(np.int64)
    model.module.zero_grad()
    model.expected().backward()
    expected = {name: value.grad.clone() for name, value in model.module.named_parameters()}
    model.module.zero_grad()
    model.run(half).backward()
    for name, value in model.module.named_parameters():
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-12, atol=1e-15)


def test_parameters_are_sunk_and_never_arguments(model):
    part_of_op = np.minimum(np.arange(model.graph.num_ops) * 4 // model.graph.num_ops, 3)
    roles = dict(zip(model.graph.tensor_names, model.graph.tensor_role, strict=True))
    held = []
    for stage in model.stages(part_of_op):
        assert all(roles[name] in (TensorRole.INPUT, TensorRole.ACTIVATION) for name in stage.inputs)
        assert all(roles[name] == TensorRole.PARAMETER for name in stage.parameters)
        assert {name for name, _ in stage.module.named_parameters()} == set(map(attribute_name, stage.parameters))
        held.extend(stage.parameters)
    assert set(held) == {model.graph.tensor_names[tensor] for tensor in model.graph.parameters}


def test_constants_are_computed_where_they_are_read():
    cut = Cut("tiny_gpt")
    constant = set(np.asarray(cut.graph.op_names)[cut.graph.is_constant].tolist())
    assert constant
    last = np.flatnonzero(~cut.graph.is_constant)
    part_of_op = np.full(cut.graph.num_ops, 0)
    part_of_op[last] = 1
    (_, stage) = cut.stages(part_of_op)
    assert not constant & set(stage.inputs)
    assert torch.equal(cut.run(part_of_op), cut.expected())


def test_output_that_views_an_argument_is_copied():
    cut = Cut("skip_net")
    ops = {kind: index for index, kind in enumerate(cut.graph.op_kinds)}
    view = ops["aten.chunk"] if "aten.chunk" in ops else ops["aten.split"]
    names = [cut.graph.tensor_names[tensor] for tensor in cut.graph.op_outputs(view)]
    stage = build_stage(cut.model, [cut.graph.op_names[view]], names, values={}.__getitem__, device=CPU)
    argument = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    results = stage.module(argument)
    assert [tuple(item.shape) for item in results] == [(2, 3, 4, 4)] * 2
    assert all(item.untyped_storage().data_ptr() != argument.untyped_storage().data_ptr() for item in results)


def test_output_of_another_stage_is_refused():
    cut = Cut("skip_net")
    with pytest.raises(ModelError, match="is not computed by the stage"):
        build_stage(cut.model, [cut.graph.op_names[0]], [cut.graph.tensor_names[cut.graph.outputs[0]]],
                    values=cut.values.__getitem__, device=CPU)


def test_attribute_names_differ_where_names_do():
    names = ["a.b", "a_b", "a.b_", "a..b", "a_2e_b", "0"]
    assert len({attribute_name(name) for name in names}) == len(names)
    assert all(attribute_name(name).isidentifier() for name in names)
