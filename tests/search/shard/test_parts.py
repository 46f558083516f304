"""Parts and edges of small models, against an account by hand: work, bytes held, and every collective."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.search.shard.worlds import cluster_of, parts_of, source_of, whole
from weft.cost.collectives import Collective, CollectiveModel
from weft.cost.costs import estimate_costs
from weft.cost.mesh import KINDS
from weft.search.shard.folded_graph import Assembler
from weft.search.shard.op_choices import describe
from weft.search.strategies.search import solve
from weft.search.strategies.strategy_graph import evaluate

WIDTH, INNER = 32, 64
WEIGHT = 4.0 * WIDTH * INNER


class Pair(nn.Module):
    """A projection, so that the pair's input has a gradient, then two linear layers."""

    def __init__(self, *, is_residual=False):
        super().__init__()
        self.is_residual = is_residual
        self.e = nn.Linear(WIDTH, WIDTH, bias=False)
        self.a, self.b = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        x = self.e(x)
        y = self.b(torch.relu(self.a(x)))
        return (x + y if self.is_residual else y).square().sum()


class Made:
    """A model's parts on a mesh of two, with choices by name."""

    def __init__(self, make, *shapes, batch=4, rate=1e9, latency=1e-9, mode="training", **options):
        self.folded = whole(source_of(make, *shapes, batch=batch, mode=mode))
        self.cluster = cluster_of((2,), flop_per_s=1e9, memory_bytes_per_s=1e15, link=(rate, latency))
        self.parts = parts_of(self.folded, self.cluster, (2,), **options)
        self.graph = Assembler(self.parts, self.folded).assemble()

    def part(self, name, kind=None):
        return next(part for part in self.parts.parts if part.name == name and kind in (None, part.kind))

    def words(self, part, index):
        """Return a choice in words: the factor of an operator, or (value, gradient) layouts."""
        if part.kind == "op":
            return describe(part.choices, index, ["x"]).removeprefix("x: ")
        layouts = self.parts.resharding.layouts
        return tuple(str(layouts[column[0][index]][0]) for column in (part.values, part.gradients))

    def choice(self, wanted):
        """Return the choice with these words; parts that are not named are whole."""
        found = []
        for part in self.parts.parts:
            words = [self.words(part, index) for index in range(len(part.seconds))]
            default = "whole" if part.kind == "op" else ("R", "R")
            found.append(words.index(wanted.get((part.kind, part.name), wanted.get(part.name, default))))
        return tuple(found)

    def collectives(self, choice):
        """Return (direction, giver, reader, collective, bytes of the whole tensor) of everything sent for edges."""
        sent = []
        steps, layouts = self.parts.resharding.steps, self.parts.parts
        for edge in self.parts.edges:
            giver, reader = layouts[edge.giver], layouts[edge.reader]
            ways = [("forward", giver.values[edge.output][choice[edge.giver]], edge.reads[choice[edge.reader]])]
            if edge.returns is not None:
                ways.append(("backward", edge.returns[choice[edge.reader]],
                             giver.gradients[edge.output][choice[edge.giver]]))
            for way, source, target in ways:
                sent += [(way, giver.name, reader.name, KINDS[step.kind].value,
                          step.part(self.parts.resharding.mesh.shape) * edge.num_bytes)
                         for step in steps(int(source), int(target), self.parts.shape_of(edge))
                         if step.kind is not None]
        return sorted(sent)

    def best(self):
        found = solve(self.graph.problem)
        assert found.status == "optimal"
        return found

    def cost(self, choice):
        return evaluate(self.graph.problem, choice).cost

    def seconds(self, kind, num_bytes):
        return CollectiveModel(self.cluster).cost(Collective(kind), num_bytes, (0, 1)).seconds


MEGATRON = {"a.linear": "n", "relu": "d1", "b.linear": "k", "a.weight": ("S0", "S0"), "b.weight": ("S1", "S1")}


def data_parallel(*more):
    return {**dict.fromkeys(("relu", "square", "sum", *more), "d0"),
            **{f"{name}.linear": "b0" for name in ("e", "a", "b")}}


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_a_megatron_pair_has_one_all_reduce_forward_and_one_backward():
    made = Made(Pair, (WIDTH,))
    size = 4.0 * 4 * WIDTH
    assert made.collectives(made.choice(MEGATRON)) == [
        ("backward", "e.linear", "a.linear", "all_reduce", size),
        ("forward", "b.linear", "square", "all_reduce", size)]


def test_data_parallel_all_reduces_every_gradient_and_nothing_else():
    made = Made(Pair, (WIDTH,))
    assert made.collectives(made.choice(data_parallel())) == [
        ("backward", "a.weight", "a.linear", "all_reduce", WEIGHT),
        ("backward", "b.weight", "b.linear", "all_reduce", WEIGHT),
        ("backward", "e.weight", "e.linear", "all_reduce", 4.0 * WIDTH * WIDTH)]


def test_a_sum_between_products_is_needed_only_once_for_several_readers():
    """With a residual the gradients of both readers meet before they are summed over devices."""
    made = Made(lambda: Pair(is_residual=True), (WIDTH,))
    choice = made.choice({**MEGATRON, ("tensor", "e.linear"): ("R", "P")})
    size = 4.0 * 4 * WIDTH
    assert made.part("e.linear", "tensor").name == "e.linear"
    assert made.collectives(choice) == [("backward", "e.linear", "e.linear", "all_reduce", size),
                                        ("forward", "b.linear", "add", "all_reduce", size)]


def test_stored_in_pieces_a_parameter_is_gathered_twice_and_its_gradient_scattered():
    made = Made(Pair, (WIDTH,))
    plain, pieces = (made.choice({**data_parallel(), "a.weight": stored}) for stored in (("R", "R"), ("S0", "S0")))
    assert {item[0]: item[3] for item in made.collectives(pieces) if item[1] == "a.weight"} == {
        "forward": "all_gather", "backward": "reduce_scatter"}
    gather, scatter, reduce = (made.seconds(kind, WEIGHT) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    assert made.cost(pieces) - made.cost(plain) == pytest.approx(2 * gather + scatter - reduce)


def test_with_states_in_pieces_a_parameter_is_gathered_after_the_update():
    made = Made(Pair, (WIDTH,))
    plain, states = (made.choice({**data_parallel(), "a.weight": stored}) for stored in (("R", "R"), ("R", "S0")))
    gather, scatter, reduce = (made.seconds(kind, WEIGHT) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    assert made.cost(states) - made.cost(plain) == pytest.approx(gather + scatter - reduce)


# ---- the whole account -----------------------------------------------------------------------------------------------


def work_of(made, name):
    """Return the seconds of an operator on one device, all parts."""
    graph = made.folded.traced.graph
    costs = estimate_costs(graph, made.cluster)
    op = graph.op_names.index(name)
    return float((costs.forward_s + costs.input_grad_s + costs.weight_grad_s)[op, 0])


def test_the_cost_of_data_parallel_is_half_the_work_and_the_gradients():
    made = Made(Pair, (WIDTH,), batch=64)
    graph = made.folded.traced.graph
    by_hand = (sum(work_of(made, name) for name in graph.op_names) / 2 + made.seconds("all_reduce", 4.0)  # the loss
               + 2 * made.seconds("all_reduce", WEIGHT) + made.seconds("all_reduce", 4.0 * WIDTH * WIDTH))
    assert made.cost(made.choice(data_parallel())) == pytest.approx(by_hand, rel=1e-6)


def test_the_cost_of_a_megatron_pair_is_half_of_its_work_and_two_all_reduces():
    made = Made(Pair, (WIDTH,), batch=64)
    inside = ("a.linear", "relu", "b.linear")
    outside = [name for name in made.folded.traced.graph.op_names if name not in inside]
    by_hand = (sum(work_of(made, name) for name in inside) / 2 + sum(work_of(made, name) for name in outside)
               + 2 * made.seconds("all_reduce", 4.0 * 64 * WIDTH))
    assert made.cost(made.choice(MEGATRON)) == pytest.approx(by_hand, rel=1e-6)


def test_few_samples_split_the_weights_and_many_samples_are_split():
    few, many = Made(Pair, (WIDTH,), batch=2), Made(Pair, (WIDTH,), batch=512)
    for made, strategies in ((few, ("n", "k")), (many, ("b0", "b0"))):
        found = made.best()
        words = {part.name: made.words(part, index) for part, index in zip(made.parts.parts, found.choice, strict=True)}
        assert (words["a.linear"], words["b.linear"]) == strategies
        assert found.cost <= min(made.cost(made.choice(plan)) for plan in (MEGATRON, data_parallel())) * (1 + 1e-9)


def test_on_a_slow_link_every_device_does_everything():
    made = Made(Pair, (WIDTH,), rate=1e3, latency=1e-2)
    choice = made.best().choice
    assert made.collectives(choice) == []
    assert made.cost(choice) == pytest.approx(sum(work_of(made, name) for name in made.folded.traced.graph.op_names))


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "states"), [("adam", 2), ("sgd", 0)])
def test_bytes_of_a_parameter(optimizer, states):
    made = Made(Pair, (WIDTH,), optimizer=optimizer)
    part = made.part("a.weight")
    held = {made.words(part, index): part.held_bytes[index] for index in range(len(part.seconds))}
    assert held == {("R", "R"): WEIGHT * (2 + states), ("R", "S0"): WEIGHT * (1 + (1 + states) / 2),
                    ("S0", "S0"): WEIGHT * (2 + states) / 2, ("S1", "S1"): WEIGHT * (2 + states) / 2}


def test_states_are_as_parameters_where_they_may_not_be_split():
    made = Made(Pair, (WIDTH,), splits_states=False)
    part = made.part("a.weight")
    assert {made.words(part, index) for index in range(len(part.seconds))} == {("R", "R"), ("S0", "S0"), ("S1", "S1")}


def test_what_is_kept_for_the_backward_counts_as_it_is_read():
    made = Made(Pair, (WIDTH,))
    linear, size = made.part("b.linear"), 4.0 * 4 * INNER  # keeps the result of relu
    held = {made.words(linear, index): linear.held_bytes[index] for index in range(len(linear.seconds))}
    assert (held["whole"], held["b0"], held["k"], held["n"]) == (size, size / 2, size / 2, size)


def test_inference_has_no_gradients_and_gathers_its_results():
    made = Made(lambda: nn.Sequential(nn.Linear(WIDTH, INNER, bias=False)), (WIDTH,), mode="inference", batch=2)
    part = made.part("0.weight")
    assert {made.words(part, index) for index in range(len(part.seconds))} == {("R", "R"), ("S0", "S0"), ("S1", "S1")}
    assert part.held_bytes.max() == WEIGHT
    assert all(edge.returns is None for edge in made.parts.edges)
    linear = made.part("0.linear")
    by_words = {made.words(linear, index): linear.seconds[index] for index in range(len(linear.seconds))}
    assert by_words["n"] == pytest.approx(by_words["whole"] / 2 + made.seconds("all_gather", 4.0 * 2 * INNER), rel=1e-6)
    assert by_words["k"] == pytest.approx(by_words["whole"] / 2 + made.seconds("all_reduce", 4.0 * 2 * INNER), rel=1e-6)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_an_operator_without_a_rule_is_whole_and_named():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return torch.linalg.matrix_exp(self.e(x)).sum()

    made = Made(Strange, (4, 4))
    assert list(made.parts.without_rule) == ["aten.linalg_matrix_exp.default"]
    strange = next(part for part in made.parts.parts if "matrix_exp" in part.name)
    assert [made.words(strange, index) for index in range(len(strange.seconds))] == ["whole"]
    made.best()


def test_a_tied_parameter_is_one_part_that_two_read():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.a(x))).sum()

    made = Made(Tied, (8,))
    stored = [part for part in made.parts.parts if part.kind == "parameter"]
    assert len(stored) == 1
    index = made.parts.parts.index(stored[0])
    readers = [made.parts.parts[edge.reader].name for edge in made.parts.edges if edge.giver == index]
    assert readers == ["a.linear", "b.linear"]


def test_uneven_parts_cost_what_the_larger_does():
    made = Made(lambda: nn.Sequential(nn.Linear(5, 5, bias=False)), (5,), mode="inference", batch=3, latency=1e-30,
                rate=1e30)
    linear = made.part("0.linear")
    by_words = {made.words(linear, index): linear.seconds[index] for index in range(len(linear.seconds))}
    assert by_words["b0"] == pytest.approx(by_words["whole"] * 2 / 3, rel=1e-6)
    assert by_words["n"] == pytest.approx(by_words["whole"] * 3 / 5, rel=1e-6)
    assert math.isclose(made.part("0.weight").held_bytes.min(), 4 * 25 * 3 / 5)


# ---- inside operators, and what is not trained -----------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, x):
        return nn.functional.cross_entropy(self.out(x), x.new_zeros(len(x), dtype=torch.long))


def test_what_a_loss_exchanges_depends_on_the_factor_that_is_split():
    """Split classes exchange a maximum and a sum for every row; split rows one number, how many rows there are."""
    made = Made(Classifier, (WIDTH,), batch=1000, latency=1e-6, rate=1e6)
    part = made.part("cross_entropy_loss", "op")
    seconds = {made.words(part, index): float(part.seconds[index]) for index in range(len(part.seconds))}
    rows, classes = made.seconds("all_reduce", 4.0), 2 * made.seconds("all_reduce", 4.0 * 1000)
    whole_loss = made.seconds("all_reduce", 4.0)  # either way the loss itself is a sum
    assert seconds["rows0"] - seconds["whole"] / 2 == pytest.approx(rows + whole_loss, rel=1e-3)
    assert seconds["classes"] - seconds["whole"] / 2 == pytest.approx(classes + whole_loss, rel=1e-3)


class HalfFrozen(Pair):
    def __init__(self):
        super().__init__()
        self.e.weight.requires_grad_(False)
        self.b.weight.requires_grad_(False)


def test_frozen_parameters_have_no_gradients_and_no_states():
    made, trained = Made(HalfFrozen, (WIDTH,)), Made(Pair, (WIDTH,))
    for name in ("e.weight", "b.weight"):
        frozen, usual = (item.part(name, "parameter") for item in (made, trained))
        assert frozen.held_bytes.max() == usual.held_bytes.max() / 4  # Adam: value, gradient and two states
        assert all(item.layout == item.gradient for item in frozen.stored)
    assert made.collectives(made.choice(data_parallel())) == [
        ("backward", "a.weight", "a.linear", "all_reduce", WEIGHT)]
    backward = [item for item in made.collectives(made.choice(MEGATRON)) if item[0] == "backward"]
    assert backward == []  # nothing before the first trained layer wants a gradient
