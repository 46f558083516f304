from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from tests.model.helpers import assert_equals_eager, source_of, state_of, zoo
from weft.base.errors import ModelError
from weft.model.graph import NO_BATCH_DIM, TensorRole, check_graph
from weft.model.graph_file import load_graph, save_graph
from weft.model.trace import run_program, trace

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, BATCH = 4, 64, 4, 256, 32, 8


@pytest.fixture(scope="module")
def gpt2():
    return trace(zoo("gpt2-tiny"), batch_dims=True)


def flops_of(graph, *kinds):
    return sum(flops for kind, flops in zip(graph.op_kinds, graph.flops, strict=True) if kind in kinds)


# ---- costs --------------------------------------------------------------------------------------------------------


class GroupNorm(nn.Module):
    """Normalizes channels, which lie behind places."""

    def __init__(self):
        super().__init__()
        self.norm, self.start = nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(self.start(x).transpose(1, 2)).transpose(1, 2).tanh().square().mean()


class Heads(nn.Module):
    """Attention of two heads with products for all that is read."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.start(x).reshape(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()


@pytest.mark.parametrize(("model", "copied"), [
    (GroupNorm, {"norm.group_norm": 2 * 4 * 8 * 8, "start.linear": 2 * 4 * 8 * 8}),
    (Heads, {"reshape": 2 * 4 * 24 * 8, "start.linear": 0})])
def test_a_gradient_that_lies_in_another_order_is_copied_where_its_reader_wants_it_so(model, copied):
    """Was: every backward was taken to be given its gradient as its own result lies."""
    graph = trace(source_of(model, (4, 8)), backward="joint").graph
    rooms = dict(zip(graph.op_names, graph.backward_room_bytes.tolist(), strict=True))
    assert {name: rooms[name] for name in copied} == copied


def test_flops_of_gpt2_equal_the_closed_form(gpt2):
    graph, rows = gpt2.graph, BATCH * SEQ
    per_layer = 2 * rows * (3 * HIDDEN * HIDDEN + HIDDEN * HIDDEN + 2 * 4 * HIDDEN * HIDDEN)
    assert flops_of(graph, "aten.addmm") == LAYERS * per_layer
    assert flops_of(graph, "aten.linear") == 2 * rows * HIDDEN * VOCAB
    attention = LAYERS * 2 * (2 * BATCH * HEADS * SEQ * SEQ * (HIDDEN // HEADS))
    assert flops_of(graph, "aten.scaled_dot_product_attention") == attention


def test_backward_of_gpt2_equals_the_closed_form(gpt2):
    """Each matrix product costs itself again for its input and again for its weight; attention two and a half times."""
    graph = gpt2.graph
    for kind in ("aten.addmm", "aten.linear"):
        for op in [index for index, name in enumerate(graph.op_kinds) if name == kind]:
            assert graph.input_grad_flops[op] == graph.flops[op]
            bias = 1 if kind == "aten.addmm" else 0
            rows_out = np.prod(graph.tensor_shapes[graph.op_outputs(op)[0]])
            tied = VOCAB * HIDDEN if kind == "aten.linear" else 0  # the sum with the embedding's own gradient
            assert graph.weight_grad_flops[op] == graph.flops[op] + bias * rows_out + tied
    ops = [index for index, name in enumerate(graph.op_kinds) if name == "aten.scaled_dot_product_attention"]
    assert np.allclose(graph.input_grad_flops[ops], 2.5 * graph.flops[ops])
    assert not graph.weight_grad_flops[ops].any()


def test_parts_of_the_backward_pass_agree_with_the_joint_graph_of_pytorch(gpt2):
    """The whole model's joint graph, traced by PyTorch, is the oracle for the operator-by-operator costs."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    source = gpt2.source
    module = source.build().to_empty(device="cpu")
    inputs = source.inputs()
    exported = torch.export.export(module, inputs, strict=False)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, exported.module(check_guards=False), inputs)
        products = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}
        total = sum(flop_registry[node.target.overloadpacket](
            *[argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument for argument in node.args],
            out_val=node.meta["val"])
            for node in joint.graph_module.graph.nodes
            if node.op == "call_function" and getattr(node.target, "overloadpacket", None) in products)
    graph = gpt2.graph
    kinds = np.array(graph.op_kinds)
    products = (kinds == "aten.addmm") | (kinds == "aten.linear")
    bias = sum(np.prod(graph.tensor_shapes[graph.op_outputs(op)[0]]) for op in np.flatnonzero(kinds == "aten.addmm"))
    ours = graph.flops[products].sum() + graph.input_grad_flops[products].sum() + (
        graph.weight_grad_flops[products].sum() - bias - VOCAB * HIDDEN)
    assert total == ours  # attention is one fused operator in both, and not among these


def test_rule_and_joint_agree_on_matrix_products(gpt2):
    rule = trace(zoo("gpt2-tiny"), backward="rule").graph
    joint = gpt2.graph
    assert (rule.backward_source, joint.backward_source) == ("rule", "joint")
    assert rule.op_names == joint.op_names
    assert np.array_equal(rule.flops, joint.flops)
    ratio = (rule.input_grad_flops + rule.weight_grad_flops).sum() / (
        joint.input_grad_flops + joint.weight_grad_flops).sum()
    assert 0.85 < ratio < 1.15
    assert set(np.flatnonzero(rule.weight_grad_flops)) >= {
        op for op, kind in enumerate(rule.op_kinds) if kind == "aten.addmm"}


def test_no_backward_leaves_the_columns_empty():
    graph = trace(zoo("gpt2-tiny"), backward="none").graph
    assert not graph.has_backward
    assert graph.backward_source == "none"
    assert graph.input_grad_bytes.sum() == graph.weight_grad_bytes.sum() == 0


def test_views_move_no_bytes_and_point_to_the_owner(gpt2):
    graph = gpt2.graph
    views = np.flatnonzero(graph.tensor_base >= 0)
    assert len(views)
    assert (graph.tensor_base[graph.tensor_base[views]] == -1).all()
    for tensor in views:
        op = graph.tensor_producer[tensor]
        assert graph.bytes_read[op] == graph.bytes_written[op] == graph.flops[op] == 0
    assert not graph.is_saved[views].any()


def test_bytes_of_a_product_are_its_tensors(gpt2):
    graph = gpt2.graph
    op = graph.op_index["transformer.h.0.mlp.c_fc.addmm"]
    rows = BATCH * SEQ
    assert graph.bytes_read[op] == 4 * (rows * HIDDEN + HIDDEN * 4 * HIDDEN + 4 * HIDDEN)
    assert graph.bytes_written[op] == 4 * rows * 4 * HIDDEN


def test_what_autograd_keeps_is_marked(gpt2):
    """The sum of marked tensors equals what saved-tensor hooks see when the module really runs."""
    source = gpt2.source
    from weft.model.weights import materialize

    module = materialize(source.build(), 0)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = max(storage.nbytes(), kept.get(storage.data_ptr(), 0))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(*source.inputs())
    real = sum(size for pointer, size in kept.items() if pointer not in own)
    loss.backward()
    graph = gpt2.graph
    ours = graph.tensor_bytes[graph.is_saved].sum() + graph.saved_inside_bytes.sum()
    assert ours == pytest.approx(real, rel=0.02)


# ---- wiring -------------------------------------------------------------------------------------------------------


def test_tied_embedding_is_one_parameter_read_twice(gpt2):
    graph = gpt2.graph
    assert graph.tied == (("transformer.wte.weight", "lm_head.weight"),)
    assert "lm_head.weight" not in graph.tensor_index
    tensor = graph.tensor_index["transformer.wte.weight"]
    readers = {graph.op_kinds[op] for op in graph.consumer_op[graph.inputs == tensor]}
    assert readers == {"aten.embedding", "aten.linear"}
    module = zoo("gpt2-tiny").build()
    assert graph.parameter_bytes == 4 * sum(parameter.numel() for parameter in module.parameters())


def test_modules_and_sources_are_named(gpt2):
    graph = gpt2.graph
    op = graph.op_index["transformer.h.2.attn.c_attn.addmm"]
    assert graph.op_modules[op] == "transformer.h.2.attn.c_attn"
    assert graph.op_kinds[op] == "aten.addmm"
    file, line = graph.sources[op].rsplit(":", 1)
    assert file.endswith(".py")
    assert line.isdecimal()
    assert "/torch/" not in file


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        first = self.first(x)
        return (self.third(torch.relu(self.second(first))) + first).square().mean()


def test_skip_connection_is_wired_past_the_middle():
    traced = trace(source_of(Skip, (6,)))
    graph = traced.graph
    names = {(graph.op_names[a], graph.op_names[b]) for a, b, _ in graph.edges}
    assert ("first.linear", "second.linear") in names
    assert ("first.linear", "add") in names
    assert ("third.linear", "add") in names
    assert_equals_eager(traced)


def test_batch_dimensions_are_found(gpt2):
    graph = gpt2.graph
    dims = dict(zip(graph.tensor_names, graph.tensor_batch_dim.tolist(), strict=True))
    assert dims["input_ids"] == 0
    assert dims["transformer.wte.weight"] == NO_BATCH_DIM
    assert dims["transformer.h.0.attn.c_attn.addmm"] == 0  # batch times sequence rows
    assert graph.outputs == (graph.tensor_index["cross_entropy_loss"],)
    assert dims["cross_entropy_loss"] == NO_BATCH_DIM


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.plain = torch.full((4,), 3.0, dtype=torch.float64)

    def forward(self, x):
        mask = torch.ones(4, 4).tril() * self.table
        shifted = torch.arange(4) + torch.tensor([1, 2, 3, 4])
        return (self.layer(x) @ mask.to(x.dtype) + shifted + self.plain).mean()


def test_constants_are_marked_and_their_values_kept():
    traced = trace(source_of(Constants, (4,)))
    graph = traced.graph
    constant = {graph.op_names[op] for op in np.flatnonzero(graph.is_constant)}
    assert {"ones", "tril", "mul", "arange", "add"} <= constant
    assert "layer.linear" not in constant
    assert "matmul" not in constant
    roles = {name: TensorRole(int(role)) for name, role in zip(graph.tensor_names, graph.tensor_role, strict=True)}
    assert roles["table"] is TensorRole.BUFFER
    values = list(traced.program.constants.values())
    assert any(torch.equal(value, torch.tensor([1, 2, 3, 4])) for value in values)
    assert all(not graph.is_saved[tensor] for tensor in np.flatnonzero(graph.tensor_role == TensorRole.BUFFER))
    assert_equals_eager(traced)


def test_lstm_stays_one_operator_with_costs_of_all_steps():
    source = zoo("lstm:hidden=8,vocab=31,seq=5,layers=1", batch=2)
    graph = trace(source).graph
    op = graph.op_kinds.index("aten.lstm")
    steps = 5 * 2 * (2 * 8 * 32 + 2 * 8 * 32)
    assert steps <= graph.flops[op] <= 1.5 * steps
    assert graph.input_grad_flops[op] > 0.9 * steps
    assert graph.weight_grad_flops[op] > 0.4 * steps
    assert len(graph.op_outputs(op)) == 1
    assert_equals_eager(trace(zoo("lstm:hidden=8,vocab=31,seq=5", batch=2, dtype="float64")))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x)).mean()


def test_frozen_and_unused_parameters(tmp_path):
    graph = trace(source_of(Frozen, (5,))).graph
    first, second = graph.op_index["first.linear"], graph.op_index["second.linear"]
    assert graph.input_grad_flops[first] == graph.weight_grad_flops[first] == 0
    assert graph.input_grad_flops[second] == 0
    assert graph.weight_grad_flops[second] > 0
    frozen = [name for name, is_frozen in zip(graph.tensor_names, graph.is_frozen, strict=True) if is_frozen]
    assert sorted(frozen) == ["first.bias", "first.weight"]
    assert not graph.needs_gradient[graph.tensor_index["first.linear"]]
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").is_frozen.tolist() == graph.is_frozen.tolist()
    assert "never.weight" not in graph.tensor_index
    assert any("2 parameters are never used" in text and "never.bias" in text for text in graph.warnings)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.5, training=True).mean()


def test_random_operators_are_warned_about():
    graph = trace(source_of(Dropped, (4,))).graph
    assert any("draws random numbers" in text and "dropout" in text for text in graph.warnings)
    assert trace(zoo("gpt2-tiny"), backward="none").graph.warnings == ()


def test_buffers_changed_by_the_forward_pass_are_outputs_on_the_side():
    class Normal(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.layer(x)).square().mean() + self.norm(x).mean()

    traced = trace(source_of(Normal, (4,), batch=6))
    assert set(traced.program.buffer_updates) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert len(traced.graph.outputs) == 1
    assert_equals_eager(traced)
    module = traced.source.build()
    inputs = traced.source.inputs()
    state = {name: tensor.clone() for name, tensor in state_of(module).items()}
    module(*inputs)
    new_names = list(traced.program.buffer_updates.values())
    values = run_program(traced.program, state, inputs, nodes=[traced.program.tensor_nodes[name] for name in new_names])
    for (path, _), value in zip(traced.program.buffer_updates.items(), values, strict=True):
        assert torch.allclose(value, module.get_buffer(path)), path


def test_the_module_is_left_as_it_was():
    module = Constants().double().eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in state_of(module).items()}
    source = source_of(lambda: module, (4,))
    trace(source)
    after = state_of(module)
    assert after.keys() == before.keys()
    for name, (tensor, value) in before.items():
        assert after[name] is tensor
        assert torch.equal(after[name], value)


def test_graphs_pass_their_checker_and_every_name_meets_a_node(gpt2):
    graph, program = gpt2.graph, gpt2.program
    check_graph(graph)
    assert set(program.op_nodes) == set(graph.op_names)
    assert set(program.tensor_nodes) == set(graph.tensor_names)
    assert all(name in program.nodes for nodes in program.op_nodes.values() for name in nodes)
    assert program.inputs == ("input_ids", "labels")
    assert program.outputs == ("cross_entropy_loss",)
    calls = {node.name for node in program.fx_graph.nodes if node.op == "call_function"}
    assert calls == {name for nodes in program.op_nodes.values() for name in nodes}


# ---- what cannot be traced ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)


class BranchOnData(Layer):
    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:  # the line to be named
            y = y * 2
        return y.mean()


class Times100(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 100


class CustomBackward(Layer):
    def forward(self, x):
        return Times100.apply(self.layer(x)).mean()


class SelectedRows(Layer):
    def forward(self, x):
        return x[self.layer(x) > 0].mean()


class ChangesInput(Layer):
    def forward(self, x):
        x.add_(1)
        return self.layer(x).mean()


class NoLoss(Layer):
    def forward(self, x):
        return self.layer(x)


class NothingToTrain(Layer):
    def forward(self, x):
        with torch.no_grad():
            return self.layer(x).mean()


class WrongShape(Layer):
    def forward(self, x):
        return self.layer(x[:, :3]).mean()


@pytest.mark.parametrize(("make", "message"), [
    (BranchOnData, r"aten\.item.*test_trace\.py:\d+ \(if y\.sum\(\) > 0:.*torch\.where"),
    (CustomBackward, r"custom autograd function Times100 at .*test_trace\.py:\d+"),
    (SelectedRows, r"aten\.index.*test_trace\.py:\d+.*depends on values"),
    (ChangesInput, r"changes 'x' in place.*clone"),
    (NoLoss, r"must be the loss.*shape \(2, 4\)"),
    (NothingToTrain, r"does not depend on any parameter"),
    (WrongShape, r"cannot be traced.*test_trace\.py:\d+ \(return self\.layer\(x\[:, :3\]\)"),
])
def test_untraceable_models_name_the_operator_and_the_line(make, message, capfd):
    with pytest.raises(ModelError, match=message):
        trace(source_of(make, (4,)))
    assert capfd.readouterr() == ("", "")


def test_inference_allows_what_only_training_cannot_have():
    graph = trace(source_of(CustomBackward, (4,)), mode="inference").graph
    assert graph.tensor_shapes[graph.outputs[0]] == ()
    assert trace(source_of(NoLoss, (4,)), mode="inference").graph.num_ops == 1
