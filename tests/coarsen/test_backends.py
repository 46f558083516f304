"""Groups as inductor and ONNX Runtime make them, and how the rules agree."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tests.model.helpers import source_of
from weft.base.errors import InputError
from weft.coarsen.coarsen import coarsen, contract, find_groups
from weft.coarsen.groups import check_groups
from weft.coarsen.rules import fuse_by_rules
from weft.model.load import trace_model
from weft.model.onnx import load_onnx
from weft.model.trace import trace


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        y = self.norm(self.linear(x) + x)
        return self.linear(torch.relu(y * 2.0 + 1.0))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return torch.relu(self.head(y.mean((2, 3))))


def traced_inference(module, *shapes):
    return trace(source_of(module, *shapes, mode="inference"))


def labels(groups):
    return sorted(groups.labels)


def test_inductor_agrees_with_the_rules_on_a_residual_norm():
    traced = traced_inference(PostNorm, (4, 16))
    by_rules, by_inductor = fuse_by_rules(traced.graph), find_groups(traced, "inductor")
    assert by_inductor.how == "inductor"
    assert by_inductor.labels == by_rules.labels == ("linear", "add+layer_norm+mul+add+relu", "linear")
    assert np.array_equal(by_rules.of_op, by_inductor.of_op)


def test_inductor_calls_libraries_for_products_and_fuses_what_follows():
    traced = traced_inference(ConvNet, (3, 8, 8))
    assert fuse_by_rules(traced.graph).labels[0] == "conv2d+batch_norm+relu"
    by_inductor = find_groups(traced, "inductor")
    assert by_inductor.labels[0] == "conv2d"
    assert by_inductor.labels[1].startswith("batch_norm+relu")


def test_inductor_groups_of_a_zoo_model_can_be_contracted():
    traced = trace_model("gpt2-tiny:layers=2", mode="inference", batch=1)
    coarse = coarsen(traced, "inductor")
    check_groups(traced.graph, coarse.groups)
    assert coarse.graph.num_ops < traced.graph.num_ops / 3
    assert coarse.groups.labels.count("scaled_dot_product_attention") == 2
    assert np.isclose(coarse.graph.flops.sum(), traced.graph.flops[~traced.graph.is_constant].sum())


def test_a_pytorch_without_the_hook_is_told_what_to_do(monkeypatch):
    from weft.coarsen import backends

    monkeypatch.setattr(backends, "_HOOK", "_no_such_hook")
    traced = traced_inference(PostNorm, (4, 16))
    with pytest.raises(InputError, match="coarsen by rules instead"):
        find_groups(traced, "inductor")


def test_a_model_that_inductor_cannot_compile_is_named(monkeypatch):
    from torch._inductor import compile_fx

    def fail(*_args, **_kwargs):
        raise RuntimeError("no lowering for this")

    monkeypatch.setattr(compile_fx, "compile_fx", fail)
    with pytest.raises(InputError, match="inductor cannot compile 'test': no lowering for this"):
        find_groups(traced_inference(PostNorm, (4, 16)), "inductor")


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(ConvNet().eval(), (torch.randn(1, 3, 8, 8),), str(path), dynamo=False,
                          do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE)
    return path


def test_onnxruntime_agrees_with_the_rules_on_conv_norm_activation(onnx_file):
    graph = load_onnx(onnx_file)
    assert "BatchNormalization" in graph.op_kinds
    by_rules, by_runtime = fuse_by_rules(graph), find_groups(graph, "onnxruntime", path=onnx_file)
    assert by_runtime.how == "onnxruntime"
    for groups in (by_rules, by_runtime):
        assert "conv+batchnormalization+relu" in groups.labels
        assert "gemm+relu" in groups.labels
        contract(graph, groups)
    assert labels(by_rules) == labels(by_runtime)


def test_a_file_that_onnxruntime_cannot_read_is_named(onnx_file, tmp_path):
    graph = load_onnx(onnx_file)
    with pytest.raises(InputError, match="there is no ONNX file"):
        find_groups(graph, "onnxruntime", path=tmp_path / "missing.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    with pytest.raises(InputError, match="ONNX Runtime cannot optimise"):
        find_groups(graph, "onnxruntime", path=broken)


@pytest.mark.parametrize(("name", "share"), [("gpt2-tiny", 0.25), ("vgg-19", 0.6), ("llama-tiny", 0.3)])
def test_zoo_models_shrink_by_the_rules(name, share):
    traced = trace_model(name, mode="inference", batch=1)
    coarse = coarsen(traced)
    assert coarse.graph.num_ops <= share * traced.graph.num_ops
    assert coarse.graph.parameter_bytes == traced.graph.parameter_bytes
