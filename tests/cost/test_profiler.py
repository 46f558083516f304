"""Profiling a small model: what is timed, what is not timed again, and what costs make of it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests.cost.worlds import make_cluster, make_graph
from weft.base.errors import InputError
from weft.cluster.cluster import DeviceKind
from weft.cost.costs import estimate_costs
from weft.cost.entries import SUM_KIND, gradient_sums
from weft.cost.figure import Source
from weft.cost.profile import ProfileStore
from weft.cost.profiler import op_keys, profile_model
from weft.model.source import ModelSource
from weft.model.trace import trace

KIND = "local-cpu"
"""What an entry of this machine's CPU is filed under, and what the probe calls it."""
CPU = DeviceKind(name=KIND, flop_per_s={"float32": 1e11}, memory_bytes_per_s=1e10, overhead_s=1e-6, type="cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class Tiny(nn.Module):
    """A language model with equal layers, tied weights, indices, a mask and a position buffer."""

    def __init__(self, mode: str, layers: int = 3, width: int = 16, vocabulary: int = 40) -> None:
        super().__init__()
        self.mode = mode
        self.table = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(8, width)
        self.register_buffer("position", torch.arange(8))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, labels):
        x = self.table(tokens) + self.places(self.position)
        x = x.masked_fill((tokens > 3).unsqueeze(-1), 0.0)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        if self.mode == "inference":
            return scores, labels + 0
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def tiny(mode: str = "training", batch: int = 2, **sizes: int):
    def inputs(_mode, batch, seed):
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(0, 40, (batch, 8), generator=generator) for _ in range(2))

    return trace(ModelSource(name="tiny", spec="tiny", batch=batch, mode=mode, builder=lambda mode: Tiny(mode, **sizes),
                             sampler=inputs))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    store = ProfileStore(tmp_path_factory.mktemp("profile") / "store.db")
    traced = tiny()
    return traced, store, profile_model(traced, "cpu", store, passes=2, timestamp="then")


def test_every_distinct_operator_is_timed_once(profiled):
    traced, store, summary = profiled
    keys = set(op_keys(traced.graph, KIND))
    assert summary.problems == ()
    assert summary.num_ops == traced.graph.num_ops
    assert summary.num_keys == len(keys) < traced.graph.num_ops
    entries = store.timings(KIND)
    assert keys <= set(entries)
    assert {key.op_kind for key in set(entries) - keys} == {SUM_KIND}
    assert summary.num_timed == len(entries)
    for entry in entries.values():
        assert (entry.recorded_at, entry.threads, entry.torch_version) == ("then", 1, torch.__version__)
        assert entry.repeats >= 2
    linear = next(entry for key, entry in entries.items() if key.signature == "[2,8,16] [64,16] [64] -> [2,8,64]")
    assert linear.forward_s > 0
    assert linear.input_grad_s is not None
    assert linear.weight_grad_s is not None


def test_second_trace_hits_every_key(profiled):
    _, store, first = profiled
    before = store.timings(KIND)
    again = profile_model(tiny(), "cpu", store, passes=2)
    assert again.num_timed == 0
    assert again.forward_s == first.forward_s
    assert again.backward_s == first.backward_s
    assert store.timings(KIND) == before


def test_a_deeper_model_of_the_same_layers_needs_no_timing(profiled):
    _, store, first = profiled
    deeper = profile_model(tiny(layers=6), "cpu", store, passes=2)
    assert deeper.num_timed == 0
    assert deeper.forward_s > first.forward_s


def test_costs_are_measured_and_equal_the_profile(profiled):
    traced, store, summary = profiled
    costs = estimate_costs(traced.graph, make_cluster((1,), kinds=(CPU,)), profile=store)
    everything = np.arange(traced.graph.num_ops)
    forward, backward = (costs.stage_figure(everything, 0, phase) for phase in "FB")
    assert forward.source is backward.source is Source.MEASURED
    assert forward.seconds == pytest.approx(summary.forward_s)
    sums = costs.terms[0]["weight_grad"].sum_s.sum()  # gradients added up over micro-batches, which is not profiled
    assert backward.seconds == pytest.approx(summary.backward_s + sums)


def test_another_batch_or_thread_count_is_timed_anew(profiled, tmp_path):
    _, store, _ = profiled
    copy = tmp_path / "store.db"
    copy.write_bytes(store.path.read_bytes())
    other = ProfileStore(copy)
    assert profile_model(tiny(batch=3), "cpu", other, passes=1).num_timed > 0
    assert profile_model(tiny(), "cpu", other, passes=1, threads=2).num_timed > 0


def test_inference_profile_is_completed_for_training(tmp_path):
    store = ProfileStore(tmp_path / "store.db")
    first = profile_model(tiny("inference"), "cpu", store, passes=1)
    assert first.backward_s == 0
    assert first.problems == ()
    assert all(entry.input_grad_s is None for entry in store.timings(KIND).values())
    second = profile_model(tiny("training"), "cpu", store, passes=1)
    assert second.backward_s > 0
    assert second.num_timed >= second.num_keys


def test_gradient_parts_belong_to_inputs_and_parameters(tmp_path):
    store = ProfileStore(tmp_path / "store.db")
    traced = tiny(batch=8, layers=1, width=256, vocabulary=8000)  # large enough to stand out from autograd's own time
    profile_model(traced, "cpu", store, passes=3)
    parts: dict[str, list[tuple[bool, bool]]] = {}
    for key, entry in store.timings(KIND).items():
        if key.op_kind != SUM_KIND:
            parts.setdefault(key.op_kind, []).append((entry.input_grad_s > 0, entry.weight_grad_s > 0))
    assert (False, True) in parts["aten.embedding"]
    assert (True, False) not in parts["aten.embedding"]
    assert parts["aten.gelu"] == [(True, False)]
    assert (True, True) in parts["aten.linear"]
    assert parts["aten.gt"] == [(False, False)]


def test_gradient_sums_of_residuals_and_tied_weights():
    graph = tiny().graph
    sums = list(gradient_sums(graph))
    tied = [item for item in sums if item.is_weight]
    assert [graph.tensor_names[item.tensor] for item in tied] == ["table.weight"]
    assert graph.op_kinds[tied[0].op] in ("aten.linear", "aten.embedding")
    assert len(sums) - len(tied) == 3  # one residual stream per block: read by its norm and by its addition
    assert list(gradient_sums(make_graph(2))) == []
    assert list(gradient_sums(tiny("inference").graph)) == []


def test_random_state_and_threads_are_left_as_they_were(tmp_path):
    before = torch.get_num_threads()
    traced = tiny("inference")
    torch.manual_seed(5)
    profile_model(traced, "cpu", ProfileStore(tmp_path / "store.db"), passes=1, threads=before + 1)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert torch.get_num_threads() == before


def test_progress_is_reported(tmp_path):
    calls: list[tuple[int, int]] = []
    profile_model(tiny("inference"), "cpu", ProfileStore(tmp_path / "store.db"), passes=3,
                  progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_an_operator_that_fails_alone_is_named_and_stays_an_estimate(tmp_path, monkeypatch):
    store = ProfileStore(tmp_path / "store.db")
    traced = tiny("inference")
    node = next(node for node in traced.program.fx_graph.nodes if node.target is torch.ops.aten.gelu.default)

    def broken(*_args, **_kwargs):
        raise RuntimeError("no kernel here")

    monkeypatch.setattr(node, "target", broken)
    summary = profile_model(traced, "cpu", store, passes=1)
    assert len(summary.problems) == 1
    assert "aten.gelu" in summary.problems[0]
    assert "no kernel here" in summary.problems[0]
    costs = estimate_costs(traced.graph, make_cluster((1,), kinds=(CPU,)), profile=store)
    weak = {kind for kind, code in zip(traced.graph.op_kinds, costs.source[:, 0], strict=True)
            if code == Source.ROOFLINE.code}
    assert weak == {"aten.gelu"}


@pytest.mark.parametrize(("device", "options", "message"), [
    ("tpu", {}, "cannot profile on 'tpu': choose 'cpu' or 'cuda'"),
    ("cpu", {"threads": 0}, "threads and passes must be 1 or more, not 0"),
    ("cpu", {"passes": 0}, "threads and passes must be 1 or more"),
])
def test_bad_arguments(tmp_path, device, options, message):
    with pytest.raises(InputError, match=message):
        profile_model(tiny("inference"), device, ProfileStore(tmp_path / "store.db"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_plainly(tmp_path):
    with pytest.raises(InputError, match="sees no GPU"):
        profile_model(tiny("inference"), "cuda", ProfileStore(tmp_path / "store.db"))


def imports(statement: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, check=False)


def test_profiler_imports_with_torch_and_numpy_only():
    absent = ["yaml", "rich", "typer", "transformers", "ortools", "scipy", "rustworkx", "onnx", "numba", "safetensors"]
    block = "; ".join(f"sys.modules[{name!r}] = None" for name in absent)
    result = imports(f"import sys; {block}; import weft.cost.profiler, weft.cost.profile")
    assert result.returncode == 0, result.stderr


def test_costs_import_without_torch():
    result = imports("import sys, weft.cost.costs, weft.cost.fit; "
                     "print([name for name in ('torch', 'numba', 'ortools', 'yaml') if name in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr
