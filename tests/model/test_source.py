from __future__ import annotations

import textwrap

import pytest
import torch

from weft.base.errors import ModelError
from weft.model.graph import Graph
from weft.model.source import ModelSource, resolve_model
from weft.model.trace import trace

GOOD = """
    import torch
    from torch import nn
    import companion

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, companion.WIDTH)

        def forward(self, x, y):
            return (self.layer(x) - y).square().mean()

    def plain():
        return Net(), (torch.arange(12.0).reshape(3, 4), torch.zeros(3, 2))

    def flexible(batch=5, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return Net(), (torch.randn(batch, 4, generator=generator), torch.zeros(batch, 2))

    def random_inputs():
        return Net(), (torch.randn(3, 4), torch.zeros(3, 2))

    def by_mode(mode):
        return Net() if mode == "training" else nn.Linear(4, 1), (torch.randn(2, 4), torch.zeros(2, 2))

    def shared_table():
        return Net(), (torch.randn(3, 4), torch.zeros(2))

    def raises():
        raise RuntimeError("no good")

    def returns_module():
        return Net()

    def returns_dictionary():
        return Net(), {"x": torch.zeros(1)}

    def wants_more(path):
        return Net(), ()

    class NotAFunction: ...
    number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "companion.py").write_text("WIDTH = 2\n")
    path = tmp_path / "models.py"
    path.write_text(textwrap.dedent(GOOD))
    return path


def source(spec, **options) -> ModelSource:
    result = resolve_model(spec, **options)
    assert isinstance(result, ModelSource)
    return result


def test_example_inputs_give_the_batch_and_are_repeated_or_cut(file):
    found = source(f"{file}:plain")
    assert (found.name, found.batch, found.mode) == ("plain", 3, "training")
    rows = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(found.inputs()[0], rows)
    assert torch.equal(found.inputs(5)[0], rows[[0, 1, 2, 0, 1]])
    assert torch.equal(found.inputs(2)[0], rows[:2])
    assert found.inputs(5)[1].shape == (5, 2)
    assert source(f"{file}:plain", batch=7).inputs()[0].shape == (7, 4)


def test_only_tensors_as_long_as_the_first_are_rebatched(file):
    assert [tensor.shape for tensor in source(f"{file}:shared_table").inputs(6)] == [(6, 4), (2,)]


def test_batch_seed_and_mode_are_passed_where_taken(file):
    found = source(f"{file}:flexible", batch=2)
    assert found.batch == 2
    assert torch.equal(found.inputs(4, 1)[0], found.inputs(4, 1)[0])
    assert not torch.equal(found.inputs(4, 1)[0], found.inputs(4, 2)[0])
    assert found.inputs(4, 1)[0].unique(dim=0).shape[0] == 4
    assert source(f"{file}:flexible").batch == 5
    assert source(f"{file}:by_mode", mode="inference").build().out_features == 1


def test_building_twice_gives_the_same_weights_and_leaves_the_random_state(file):
    found = source(f"{file}:random_inputs")
    before = torch.random.get_rng_state()
    first, second = found.build(), found.build()
    assert first is not second
    assert torch.equal(first.layer.weight, second.layer.weight)
    assert not torch.equal(found.inputs(3, 1)[0], found.inputs(3, 2)[0])
    assert torch.equal(before, torch.random.get_rng_state())


def test_modes_and_dtypes(file):
    found = source(f"{file}:plain", dtype="fp64")
    assert found.build().layer.weight.dtype == torch.float64
    assert found.inputs()[0].dtype == torch.float64
    assert found.build().training
    assert not found.with_mode("inference").build().training
    tokens = source("gpt2-tiny:dtype=bf16")
    assert tokens.build().transformer.wte.weight.dtype == torch.bfloat16
    assert tokens.inputs()[0].dtype == torch.int64
    assert not source("opt-1.3b:layers=1").build().training


def test_a_user_model_is_traced_with_its_own_lines(file):
    graph = trace(source(f"{file}:plain")).graph
    assert graph.batch == 3
    assert graph.sources[graph.op_index["layer.linear"]] == f"{file}:12"


@pytest.mark.parametrize(("name", "message"), [
    ("missing", r"no function 'missing' in .*it has .*flexible"),
    ("number", r"no function 'number'"),
    ("raises", r"raised RuntimeError: no good at .*models\.py:\d+ \(raise RuntimeError"),
    ("returns_module", r"must return \(module, example_inputs\), not Net"),
    ("returns_dictionary", r"example_inputs must be a tensor or a tuple of tensors, not dict"),
    ("wants_more", r"needs the arguments path.*may take batch, seed and mode"),
])
def test_bad_functions_are_explained(file, name, message):
    with pytest.raises(ModelError, match=message):
        resolve_model(f"{file}:{name}")


def test_bad_files_are_explained(file, tmp_path):
    with pytest.raises(ModelError, match="no file"):
        resolve_model(f"{tmp_path}/other.py:plain")
    with pytest.raises(ModelError, match=r"say which function.*models\.py:function"):
        resolve_model(str(file))
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ModelError, match=r"broken\.py cannot be run: SyntaxError.*broken\.py:1"):
        resolve_model(f"{tmp_path}/broken.py:f")
    (tmp_path / "fails.py").write_text("import torch\nx = 1 / 0\n")
    with pytest.raises(ModelError, match=r"ZeroDivisionError.*fails\.py:2 \(x = 1 / 0\)"):
        resolve_model(f"{tmp_path}/fails.py:f")


def test_other_bad_requests(file):
    with pytest.raises(ModelError, match="takes no options"):
        resolve_model(f"{file}:plain", options={"layers": "3"})
    with pytest.raises(ModelError, match="batch must be 1 or more"):
        resolve_model("gpt2-tiny", batch=0)
    with pytest.raises(ModelError, match="batch must be 1 or more"):
        source("gpt2-tiny").inputs(0)
    with pytest.raises(ModelError, match="no file"):
        resolve_model("nowhere.json")
    with pytest.raises(ModelError, match="has its own dtypes"):
        resolve_model("nowhere.json", dtype="bf16")


def test_graph_files_resolve_to_graphs(tmp_path):
    path = tmp_path / "two.json"
    path.write_text('{"format": "weft.graph", "version": 1, "ops": [{"name": "a", "flops": 1}], "edges": []}')
    assert isinstance(resolve_model(str(path)), Graph)
