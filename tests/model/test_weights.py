from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.model.helpers import zoo
from weft.base.errors import ModelError
from weft.model.weights import initial_value, materialize, without_memory


def test_values_depend_on_name_shape_and_seed_only():
    value = initial_value("h.0.weight", (3, 4), torch.float32, 1)
    assert torch.equal(value, initial_value("h.0.weight", (3, 4), torch.float32, 1))
    assert not torch.equal(value, initial_value("h.1.weight", (3, 4), torch.float32, 1))
    assert not torch.equal(value, initial_value("h.0.weight", (3, 4), torch.float32, 2))
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    initial_value("h.0.weight", (3, 4), torch.float32, 1)
    assert torch.equal(before, torch.random.get_rng_state())
    wide = initial_value("h.0.weight", (3, 4), torch.float64, 1)
    assert wide.dtype == torch.float64
    assert torch.equal(wide.float(), value)
    assert 0.015 < initial_value("w", (200, 200), torch.float32, 0).std() < 0.025


def test_values_are_the_same_on_every_machine():
    """A run on many hosts needs the very same numbers: this list must not change."""
    value = initial_value("layer.weight", (2, 2), torch.float64, 0)
    assert value.flatten().tolist() == pytest.approx(KNOWN, abs=1e-9)


KNOWN = [-0.009138810448348522, -0.005110704340040684, -0.011115210130810738, -0.04145233705639839]


def test_biases_are_zero_and_scales_one():
    assert initial_value("norm.weight", (4,), torch.float32, 0).tolist() == [1, 1, 1, 1]
    assert initial_value("norm.bias", (4,), torch.float32, 0).tolist() == [0, 0, 0, 0]
    assert initial_value("lstm.bias_ih_l0", (4,), torch.float32, 0).tolist() == [0, 0, 0, 0]
    assert initial_value("scale", (), torch.float32, 0).item() == 1


def test_materialize_keeps_ties_and_fills_everything():
    module = materialize(zoo("gpt2-tiny", dtype="float64").build(), 7)
    assert module.lm_head.weight is module.transformer.wte.weight
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert {tensor.dtype for tensor in module.parameters()} == {torch.float64}
    want = initial_value("transformer.h.1.mlp.c_fc.weight", (64, 256), torch.float64, 7)
    assert torch.equal(module.transformer.h[1].mlp.c_fc.weight, want)


def test_materialize_leaves_real_values_alone():
    module = nn.Linear(3, 3)
    before = module.weight.detach().clone()
    assert torch.equal(materialize(module, 0).weight, before)


def test_materialize_reaches_the_second_list_of_an_lstm():
    with without_memory():
        module = nn.LSTM(3, 4)
    assert module.weight_ih_l0.is_meta
    materialize(module, 0)
    assert not any(weight.is_meta for weight in module._flat_weights)
    module(torch.randn(5, 2, 3))


def test_without_memory_spares_buffers_and_ends():
    with without_memory():
        module = nn.BatchNorm1d(3)
    assert module.weight.is_meta
    assert module.running_var.tolist() == [1, 1, 1]
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_buffer_without_value_is_refused():
    with torch.device("meta"):
        module = nn.BatchNorm1d(3)
    with pytest.raises(ModelError, match="buffer 'running_mean' is on the meta device"):
        materialize(module, 0)
