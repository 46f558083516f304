"""Compiled stages: the same loss and gradients as operator by operator, in all ways in which a stage can run."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.run.plans import cut, greedy_order, pipeline_plan, replicated_plan, traced
from tests.run.pool import Pool
from tests.run.sharded_plans import sharded_plan, sharding_of
from tests.run.test_overlap import in_buckets, spans
from tests.run.test_sharded import GPT, GPT_TENSOR
from weft.base.errors import RunError
from weft.model.source import ModelSource
from weft.model.trace import trace
from weft.plan.orders import one_f_one_b
from weft.plan.plan import Plan
from weft.run import inductor
from weft.run.compiled import Compiler
from weft.run.random_state import RankRandom
from weft.run.stage import Compilation, Stage, build_stage, model_graph

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="compiled stages on a CPU need a C++ compiler"),
              pytest.mark.timeout(180)]
TOLERANCE = 1e-10
CPU = torch.device("cpu")


# ---- one stage in this process --------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Uses of parameters and values that a compiled backward must get right."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.shift = nn.BatchNorm1d(6), nn.Parameter(torch.randn(6))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.first(x))
        x = x + functional.gelu(self.second(x)) + self.shift
        x = self.frozen(x).tanh() @ self.second.weight.t()  # used twice
        return (x.square().mean() + self.shift.sum() * 0.5,)


class Made:
    """A stage of one module, as it is and compiled, with the same parameters."""

    def __init__(self, build: Callable[[], nn.Module], *shape: int, split: bool = False,
                 compiler: Compiler | None = None) -> None:
        torch.manual_seed(0)
        self.module, self.compiler = build().double(), compiler or Compiler()
        source = ModelSource(name="layers", spec="", batch=4, mode="training", builder=lambda mode: self.module,
                             sampler=lambda mode, batch, seed: (torch.randn(batch, *shape, dtype=torch.float64),))
        model = trace(source, batch=4, backward="rule")
        self.inputs = source.inputs(4, 1)
        self.values: dict[str, torch.Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        self.values |= {name: value.clone() for name, value in self.module.named_buffers()}
        names = [model.graph.tensor_names[item] for item in model.graph.outputs]
        stage = build_stage(model_graph(model), list(model.graph.op_names), names, values=self.values.__getitem__,
                            device=CPU)
        self.stage = Stage(stage, split=split, random=RankRandom(CPU, seed=0, rank=0, num_ranks=1),
                           compilation=Compilation(compiler=self.compiler, name="s0", device=CPU, writes_updates=True,
                                                   differentiable=frozenset()))

    def gradients(self, *, split: bool = False) -> dict[str, torch.Tensor | None]:
        """Return the compiled stage's gradients, and clear them."""
        call = self.stage.split_forward if split else self.stage.forward
        (loss, *updated) = call(*self.inputs)
        loss.backward()
        for item in self.stage.queue.take():
            item.accumulate()
        for place, buffer in self.stage.updates:
            buffer.copy_((loss, *updated)[place])
        return self._taken()

    def expected(self) -> dict[str, torch.Tensor | None]:
        """Return the module's."""
        self.module(*self.inputs)[0].backward()
        return self._taken()

    def _taken(self) -> dict[str, torch.Tensor | None]:
        found = {name: item.grad for name, item in self.module.named_parameters()}
        self.module.zero_grad()
        return found


def check_same(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert {name for name, item in found.items() if item is None} == {
        name for name, item in expected.items() if item is None}
    for name, item in expected.items():
        if item is not None:
            torch.testing.assert_close(found[name], item, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_gradients_and_statistics_of_a_compiled_stage():
    made = Made(Layers, 6)
    assert not made.compiler.fallbacks
    assert len(made.compiler.graphs) == 1
    found = made.gradients()
    check_same(found, made.expected())
    assert len(made.stage.updates) < 3  # the piece writes what it alone reads
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(made.values[name], dict(made.module.named_buffers())[name])


def test_gradients_add_up_over_micro_batches_and_are_nobody_elses_memory():
    made = Made(Layers, 6)
    (loss, *_) = made.stage.forward(*made.inputs)
    loss.backward()
    (loss, *_) = made.stage.forward(*made.inputs)
    loss.backward()
    twice, once = made._taken(), made.expected()
    for name, item in once.items():
        if item is not None:
            torch.testing.assert_close(twice[name], 2 * item)
    memory = [item.untyped_storage().data_ptr() for item in twice.values() if item is not None]
    assert len(set(memory)) == len(memory)


def test_a_split_backward_leaves_products_for_later():
    made = Made(Layers, 6, split=True)
    (loss, *_) = made.stage.split_forward(*made.inputs)
    loss.backward()
    assert made.module.first.weight.grad is None
    assert made.module.second.weight.grad is None
    later = made.stage.queue.take()
    assert later
    for item in later:
        item.accumulate()
    check_same(made._taken(), made.expected())


@pytest.mark.parametrize("split", [False, True])
def test_what_a_forward_keeps_is_freed_while_its_backward_runs(split, monkeypatch):
    kept: list[weakref.ref] = []

    def watched(call):
        def run(given):
            kept.extend(weakref.ref(item) for item in given if isinstance(item, torch.Tensor) and item._base is None
                        and not isinstance(item, nn.Parameter))
            found = call(given)
            assert not given, "the compiled graph empties its list"
            alive.append(sum(item() is not None and all(item() is not other for other in found) for item in kept))
            return found
        return run

    def compile_graphs(*args, **kwargs):
        graphs = made_by(*args, **kwargs)
        later = graphs.weights and watched(graphs.weights)
        return replace(graphs, backward=watched(graphs.backward), weights=later)

    made_by, alive = inductor.compile_graphs, []
    monkeypatch.setattr(inductor, "compile_graphs", compile_graphs)
    made = Made(Layers, 6, split=split)
    made.gradients(split=split)
    assert len(kept) > 2
    assert len(alive) == 1 + split
    assert max(alive) <= len(made.inputs)  # what is kept for W does not count: the first call has returned it


class Returned(nn.Module):
    """One value that its backward needs is a result, another is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        shown = torch.tanh(self.first(x))
        return functional.log_softmax(self.second(shown.exp()), 1).square().sum(), shown


@pytest.mark.parametrize("split", [False, True])
def test_a_backward_may_write_over_what_nobody_else_has(split, monkeypatch):
    backwards = []

    def compile_graph(module, *args, **kwargs):
        if kwargs.get("is_backward"):
            backwards.append([(node.name, tuple(node.meta["val"].shape)) for node in inductor._placeholders(module)])
        return made_by(module, *args, **kwargs)

    made_by = inductor._compile
    monkeypatch.setattr(inductor, "_compile", compile_graph)
    made = Made(Returned, 6, split=split)
    given = {shape for name, shape in backwards[1 if split else 0] if name.startswith("given_away_")}
    assert (4, 5) in given  # the products before the softmax; W does not need them
    assert ((4, 6) in given) != split  # the exponential, which W wants if there is one
    found, shown = (made.stage.split_forward if split else made.stage.forward)(*made.inputs)
    before = shown.detach().clone()
    found.backward()
    for item in made.stage.queue.take():
        item.accumulate()
    torch.testing.assert_close(shown, before, rtol=0, atol=0)
    check_same(made._taken(), made.expected())


class Repeated(nn.Module):
    """Equal layers with sums of random numbers between them, which are drawn outside of compiled pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.view_as_real(torch.view_as_complex(layer(x).unflatten(1, (-1, 1)).expand(-1, -1, 2).contiguous())
                                   * 2).sum(-1)
        return (x.square().mean(),)


def test_equal_pieces_are_compiled_once():
    compiler = Compiler()
    said: list[str] = []
    compiler.say = said.append
    made = Made(Repeated, 5, compiler=compiler)
    check_same(made.gradients(), made.expected())
    assert not compiler.fallbacks
    assert len(said) == len(compiler.graphs) == 3  # the first, those in the middle, and the loss


def test_what_cannot_be_compiled_runs_as_it_is_and_says_why(monkeypatch):
    def fails(*arguments, **options):
        raise NotImplementedError("no such kernel\nand more")

    monkeypatch.setattr("weft.run.inductor.compile_graphs", fails)
    made = Made(Layers, 6)
    check_same(made.gradients(), made.expected())
    assert made.compiler.fallbacks == ["s0, piece 0 is not compiled: NotImplementedError: no such kernel"]
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(made.values[name], dict(made.module.named_buffers())[name])


def test_another_dtype_than_was_compiled_is_refused():
    made = Made(Layers, 6)
    with pytest.raises(RunError, match="was compiled: autocast"):
        made.stage.forward(made.inputs[0].float())


# ---- plans on ranks -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(2, tmp_path_factory.mktemp("pool"), models=("tiny_gpt", GPT)) as running:
        yield running


def two_stages(*, split: bool = False, recompute: bool = False) -> Plan:
    graph = traced("tiny_gpt").graph
    order = greedy_order([0, 1], 2, split=True) if split else one_f_one_b(2, 2)
    return pipeline_plan(graph, [0, 1], order, microbatches=2, ops=cut(graph, 2), recompute=recompute)


def replicas() -> Plan:
    graph = traced("tiny_gpt").graph
    return in_buckets(replicated_plan(graph, [[(0, 0.5), (1, 0.5)]], microbatches=2, batch=8, num_devices=2),
                      "tiny_gpt", 3)


def divided() -> Plan:
    return sharded_plan(GPT, {"tensor": 2}, sharding_of(GPT, [2], [GPT_TENSOR]), num_devices=2)


PLANS = {"1F1B": ("tiny_gpt", two_stages, "swapped_channel"),
         "split backward": ("tiny_gpt", lambda: two_stages(split=True), "lost_weight_gradient"),
         "recompute": ("tiny_gpt", lambda: two_stages(recompute=True), "changed_weight"),
         "replicas, buckets inside the backward": ("tiny_gpt", replicas, "no_all_reduce"),
         "tensor parallel": (GPT, divided, "lost all_reduce 1")}


def test_exchanges_begin_inside_a_compiled_backward(pool):
    """A piece ends where the gradients of a bucket are final, as the simulator takes it."""
    answer = pool.run(replace(replicas(), compiled=True), "tiny_gpt")
    assert answer["verification"]["passed"]
    begun = spans(answer, 0, "all_reduce")
    assert len(begun) == 3
    assert begun[0][0] < max(spans(answer, rank, "B")[-1][1] for rank in range(2))  # it begins when both have issued it


@pytest.mark.parametrize("case", PLANS)
def test_compiled_plans_equal_one_device(pool, case):
    model, make, damage = PLANS[case]
    plan = replace(make(), compiled=True)
    answer = pool.run(plan, model)
    check = answer["verification"]
    assert check["passed"], check
    assert max(check["loss_error"], check["gradient_error"]) <= TOLERANCE, check["worst"]
    assert not [note for note in answer["notes"] if "not compiled" in note]
    assert not pool.run(plan, model, damage=damage)["verification"]["passed"]
