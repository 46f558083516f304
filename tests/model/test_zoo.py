from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from tests.model.helpers import assert_equals_eager, zoo
from weft.base.errors import ModelError
from weft.model.functional import changes_memory
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.model.zoo import MODELS, find_model, list_models

SMALL = {
    "gpt2": "layers=5,hidden=32,heads=4,vocab=97,seq=16",
    "gpt2-xl": "layers=2,hidden=40,heads=5,vocab=97,seq=16",
    "gpt2-tiny": "",
    "llama-7b": "layers=2,hidden=32,heads=4,kv_heads=4,ffn=48,vocab=97,seq=16",
    "llama-70b": "layers=5,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=97,seq=16",
    "llama-tiny": "",
    "opt-1.3b": "layers=2,hidden=32,heads=4,vocab=97,seq=16,ffn=48",
    "mixtral-8x": "layers=2,hidden=32,heads=4,kv_heads=2,vocab=97,seq=16,ffn=48,experts=4",
    "mixtral-8x7b": "layers=2,hidden=32,heads=4,kv_heads=2,vocab=97,seq=16,ffn=48,experts=4",
    "qwen3-30b-a3b": "layers=2,hidden=32,heads=4,head_dim=8,kv_heads=2,vocab=97,seq=16,ffn=24,experts=8,top_k=3",
    "olmoe-7b": "layers=2,hidden=32,heads=4,kv_heads=4,vocab=97,seq=16,ffn=24,experts=8,top_k=3",
    "deepseek-v3": "layers=3,hidden=32,heads=4,vocab=97,seq=16,ffn=24,experts=8,top_k=3,groups=4,top_groups=2,"
                   "dense_layers=1,dense_ffn=48,q_rank=16,kv_rank=16,rope_dim=8,plain_dim=8,value_dim=8",
    "gpt-oss-20b": "layers=2,hidden=32,heads=4,head_dim=8,kv_heads=2,vocab=97,seq=16,ffn=24,experts=4,top_k=2,window=4",
    "bert-large": "layers=2,hidden=32,heads=4,vocab=97,seq=16,ffn=48",
    "t5-base": "layers=5,hidden=32,heads=4,vocab=97,seq=16,ffn=48",
    "llama-3-70b": "layers=2,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=97,seq=16",
    "llama-405b": "layers=2,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=97,seq=16",
    "llama-3-8b": "layers=3,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=97,seq=16",
    "t5-large": "layers=2,hidden=32,heads=4,vocab=97,seq=16,ffn=48",
    "mt5-base": "layers=2,hidden=32,heads=4,vocab=97,seq=16,ffn=48",
    "vit-base": "layers=2,hidden=32,heads=4,ffn=48,image=32,classes=11",
    "swin-t": "hidden=12,classes=11",
    "flava": "layers=2,joint_layers=2,hidden=32,heads=4,ffn=48,vocab=97,seq=9,image=32,classes=11",
    "resnet-50": "width=4,image=64,classes=11",
    "convnext-t": "hidden=8,image=32,classes=11",
    "whisper-base": "layers=2,hidden=32,heads=4,ffn=48,vocab=97,seq=9,frames=40",
    "vgg-19": "width=2,image=32,classes=11",
    "inception-v3": "width=4,image=107,classes=11",
    "lstm": "hidden=8,vocab=31,seq=5",
}


def test_every_model_has_a_small_form_here():
    assert SMALL.keys() == MODELS.keys()


@pytest.mark.parametrize("name", SMALL)
def test_traced_model_is_functional_and_equals_the_module(name):
    source = zoo(f"{name}:{SMALL[name]}", batch=2, dtype="float64")
    traced = trace(source)
    graph = traced.graph
    assert graph.num_ops > 5
    assert graph.flops.sum() > 0
    assert graph.backward_source == "joint"
    assert graph.weight_grad_flops.sum() > 0
    assert not [node for node in traced.program.fx_graph.nodes if changes_memory(node)]
    assert not [text for text in graph.warnings if "rule" in text or "random" in text]
    assert_equals_eager(traced)


@pytest.mark.parametrize("name", ["gpt2", "llama-70b", "t5-base"])
def test_names_and_wiring_do_not_depend_on_folding(name):
    source = zoo(f"{name}:{SMALL[name]}", batch=2)
    assert trace(source, backward="none").graph.digest == trace(source, backward="none", fold=False).graph.digest


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "mt5-base", "convnext-t"])
def test_names_and_wiring_do_not_depend_on_the_batch(name):
    source = zoo(f"{name}:{SMALL[name]}")
    digests = {trace(source, batch=batch, backward="none").graph.digest for batch in (1, 3)}  # 1 is special in PyTorch
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["gpt2-tiny", "t5-base", "vit-base", "whisper-base", "lstm"])
def test_inference_returns_logits_and_has_no_backward(name):
    traced = trace(zoo(f"{name}:{SMALL[name]}", batch=2, mode="inference"))
    graph = traced.graph
    logits = graph.tensor_shapes[graph.outputs[0]]
    assert logits[0] == 2
    assert logits[-1] in (97, 256, 11, 31)
    assert not graph.has_backward
    assert graph.input_grad_flops.sum() == graph.weight_grad_flops.sum() == graph.is_saved.sum() == 0


def test_listed_sizes_are_those_of_the_modules():
    units = {"k": 1e3, "M": 1e6, "B": 1e9}
    for model in list_models():
        module = zoo(model.name).build()
        count = sum(parameter.numel() for parameter in module.parameters())
        number, unit = re.fullmatch(r"([\d.]+)([kMB])", model.parameters).groups()
        assert float(number) * units[unit] == pytest.approx(count, rel=0.02), (model.name, count)
        assert all(parameter.is_meta for parameter in module.parameters())
        assert not any(buffer.is_meta for buffer in module.buffers())


def test_buffers_have_their_true_values():
    module = zoo("llama-tiny").build()
    inverse = module.model.rotary_emb.inv_freq
    want = 1.0 / 10000 ** (torch.arange(0, 16, 2).float() / 16)
    assert torch.allclose(inverse, want)


def test_inputs_differ_by_row_and_repeat_by_seed():
    source = zoo("gpt2-tiny")
    first, labels = source.inputs(4, seed=3)
    again, _ = source.inputs(4, seed=3)
    other, _ = source.inputs(4, seed=4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(row.tolist()) for row in first}) == 4
    assert not torch.equal(first, labels)


def test_a_source_can_be_resolved_again_elsewhere():
    source = zoo("gpt2-tiny:layers=2,dtype=bf16", batch=3, options={"seq": "16"})
    again = zoo(source.spec, batch=source.batch, mode=source.mode, dtype=source.dtype)
    assert [tensor.shape for tensor in again.inputs()] == [tensor.shape for tensor in source.inputs()] == [(3, 16)] * 2
    assert again.dtype == "bfloat16"
    assert len(again.build().transformer.h) == 2


def test_options_change_sizes_and_the_name():
    model, dtype = find_model("gpt2:layers=4,seq=128,dtype=bf16", {"hidden": "64", "heads": "4"})
    assert (model.sizes["layers"], model.sizes["seq"], model.sizes["hidden"], dtype) == (4, 128, 64, "bf16")
    assert model.name == "gpt2:layers=4,hidden=64,heads=4,seq=128"
    assert find_model("gpt2:batch=3")[0].batch == 3


@pytest.mark.parametrize(("spec", "message"), [
    ("gtp2", "did you mean gpt2"),
    ("no-such-thing-at-all", "no model 'no-such-thing-at-all' in the zoo"),
    ("gpt2:layrs=4", "no option 'layrs'.*layers"),
    ("gpt2:layers=0", "whole number from 1"),
    ("gpt2:layers=-1", "whole number from 1"),
    ("gpt2:layers=two", "whole number from 1"),
    ("gpt2:layers", "cannot read 'layers'.*layers=4,seq=128"),
    ("gpt2:hidden=50", "hidden=50 is not a multiple of heads=12"),
    ("gpt2:dtype=float7", "unknown dtype 'float7'"),
])
def test_bad_names_and_options_are_explained(spec, message):
    with pytest.raises(ModelError, match=message):
        resolve_model(spec)


def test_a_missing_package_gives_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'weft\[models\]'"):
        zoo("gpt2-tiny").build()


def test_listing_models_imports_neither_torch_nor_transformers():
    code = ("import sys; from weft.model.zoo import list_models; list_models(); "
            "sys.exit(bool({'torch', 'transformers', 'numba', 'ortools'} & sys.modules.keys()))")
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
