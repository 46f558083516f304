"""What other people's models do that the zoo's do not: registered operators, checks of values, layer drop."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.foreign_models import build
from tests.model.helpers import assert_equals_eager, source_of
from tests.sharding.factor_harness import check_call
from weft.base.errors import ModelError
from weft.model.source import resolve_model
from weft.model.trace import trace
from weft.training.parallelize import source_of_module

# ---- operators of torch.library -------------------------------------------------------------------------------------


@torch.library.custom_op("weft_test::times", mutates_args=())
def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


@times.register_fake
def _(x, y):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    """Not the derivative of a product: a backward that is lost would be seen."""
    x, y = ctx.saved_tensors
    return 3 * gradient * y, 5 * gradient * x


times.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("weft_test::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@half.register_fake
def _(x):
    return torch.empty_like(x)


class Registered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return times(self.layer(x), self.layer(x + 1)).mean()


class NoFormula(Registered):
    def forward(self, x):
        return half(self.layer(x)).mean()


class GeneratedBackwardFor_mine(torch.autograd.Function):  # noqa: N801 - a name that PyTorch gives its own
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 100


class Pretends(Registered):
    def forward(self, x):
        return GeneratedBackwardFor_mine.apply(self.layer(x)).mean()


def test_a_registered_operator_keeps_its_own_backward():
    traced = trace(source_of(Registered, (4,)))
    assert "weft_test.times" in traced.graph.op_kinds
    assert_equals_eager(traced)


def test_a_function_of_the_user_with_the_name_of_a_generated_one_is_refused():
    with pytest.raises(ModelError, match="custom autograd function GeneratedBackwardFor_mine"):
        trace(source_of(Pretends, (4,)))


def test_a_registered_operator_without_a_formula_is_refused():
    with pytest.raises(ModelError, match=r"weft_test\.half .*has no derivative"):
        trace(source_of(NoFormula, (4,)))


# ---- experts --------------------------------------------------------------------------------------------------------

TOKENS, HIDDEN, FFN, EXPERTS, CHOSEN = 4 * 8, 32, 48, 4, 2


@pytest.fixture(scope="module")
def mixtral():
    source = source_of_module(*build("mixtral"))
    source.build().double()
    return trace(source)


def test_default_experts_are_traced_and_each_token_pays_for_its_experts_alone(mixtral):
    graph = mixtral.graph
    ops = [op for op, kind in enumerate(graph.op_kinds) if kind == "transformers.grouped_mm_fallback"]
    rows = TOKENS * CHOSEN
    flops = [2 * rows * HIDDEN * 2 * FFN, 2 * rows * FFN * HIDDEN] * 2
    assert graph.flops[ops].tolist() == flops
    assert graph.input_grad_flops[ops].tolist() == graph.weight_grad_flops[ops].tolist() == flops
    weights = EXPERTS * HIDDEN * FFN * 8
    read = [rows * HIDDEN * 8 + 2 * weights, rows * FFN * 8 + weights] * 2
    assert graph.bytes_read[ops].tolist() == pytest.approx(read, rel=1e-6)  # nearly sure that all experts get a row
    assert graph.bytes_written[ops].tolist() == [rows * 2 * FFN * 8, rows * HIDDEN * 8] * 2
    assert not any("cannot be run" in text for text in graph.warnings)
    saved = graph.tensor_bytes[graph.is_saved].sum()
    copied = rows * HIDDEN * 2 * FFN * 8  # an expert's weights for every token, as batched_mm has them
    assert saved < copied


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_experts_are_split_by_columns_or_rows_of_their_matrices(mixtral, mesh):
    grouped = torch.ops.transformers.grouped_mm_fallback.default
    rows, weights = torch.randn(6, 8, dtype=torch.float64), torch.randn(3, 8, 4, dtype=torch.float64)
    checked = check_call(grouped, rows, weights, torch.tensor([2, 2, 6], dtype=torch.int32), mesh=mesh)
    assert checked.split == {"n", "k"}


# ---- values that only a check looks at ------------------------------------------------------------------------------


class Checked(nn.Module):
    """Counts its marked tokens and makes sure of their number, as vision-language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        marked = (x > 100).sum()
        torch._check(marked.item() == 0)
        return self.layer(x).square().mean()


class Counted(Checked):
    def forward(self, x):
        return self.layer(x).square().mean() * (x > 100).sum().item()


def test_a_value_that_only_a_check_uses_is_no_obstacle():
    traced = trace(source_of(Checked, (4,)))
    assert not any("item" in kind or "sum" in kind for kind in traced.graph.op_kinds)
    assert_equals_eager(traced)


def test_a_value_that_is_computed_with_still_is():
    with pytest.raises(ModelError, match="depends on values of tensors"):
        trace(source_of(Counted, (4,)))


# ---- layer drop -----------------------------------------------------------------------------------------------------

LAYER_DROP = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            if self.training and torch.rand([]) < 0.1:
                return x.mean()
            return self.second(x).square().mean()

    class Always(Net):
        def forward(self, x):
            return self.first(x).mean() if x.sum() > 0 else self.second(x).mean()

    def net():
        return Net(), torch.arange(12.0).reshape(3, 4)

    def always():
        return Always(), torch.arange(12.0).reshape(3, 4)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "drops.py"
    path.write_text(textwrap.dedent(LAYER_DROP))
    return path


def test_layer_drop_is_refused_with_the_way_out_and_the_way_out_works(file):
    with pytest.raises(ModelError, match=r"function:in_eval_mode, or call model\.eval") as problem:
        trace(resolve_model(f"{file}:net"))
    assert "torch.rand([]) < 0.1" in str(problem.value)
    source = resolve_model(f"{file}:net:in_eval_mode")
    assert not source.build().training
    assert source.mode == "training"
    graph = trace(source).graph
    assert "second.linear" in graph.op_names
    assert graph.has_backward


def test_eval_mode_is_not_offered_where_it_does_not_help(file):
    with pytest.raises(ModelError, match="depends on values") as problem:
        trace(resolve_model(f"{file}:always"))
    assert "eval mode" not in str(problem.value)


def test_a_failed_trace_leaves_every_module_in_its_own_mode(file):
    source = source_of_module(*resolve_model(f"{file}:net").sampler.__self__(batch=None, seed=0, mode="training"))
    source.build().second.eval()
    with pytest.raises(ModelError, match=r"model\.eval"):
        trace(source)
    assert source.build().training
    assert source.build().first.training
    assert not source.build().second.training
    source.build().eval()
    assert trace(source).graph.num_ops > 0


@pytest.mark.parametrize("option", ["eval", "", "in_eval_mode:more"])
def test_other_options_of_a_function_are_refused(file, option):
    with pytest.raises(ModelError, match=r"in_eval_mode|which function"):
        resolve_model(f"{file}:net:{option}")


def test_bart_says_how_it_can_be_trained():
    source = source_of_module(*build("bart"))
    with pytest.raises(ModelError, match=r"modeling_bart.*model\.eval"):
        trace(source, backward="rule")
    source.build().eval()
    assert np.isfinite(trace(source, backward="rule").graph.flops).all()
