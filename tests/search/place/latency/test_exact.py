"""The CP-SAT model against brute force: optima, limits, hints, whole and rounded ticks."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from tests.search.place.odd_inputs import chain, cluster, diamond, edge, graph, op
from tests.search.place.oracle import min_latency
from tests.search.place.random_problems import random_problem
from tests.search.place.test_oracle import draw
from tests.search.place.test_timetable import random_order, random_placement
from tests.search.place.worlds import problem_of
from weft.base.errors import NoFeasiblePlan
from weft.search.common.budget import Budget
from weft.search.place.latency.exact import (
    MAX_EXACT_TICKS,
    ROUNDED_TICKS,
    Model,
    Solved,
    Ticks,
    choose_ticks,
    longest,
    replay,
)
from weft.search.place.problem import PlaceProblem
from weft.search.place.search import pinned, place
from weft.search.place.timetable import check_timetable, make_timetable

EFFORT = 10.0


def solve(problem: PlaceProblem, *, limit_s: float = math.inf) -> Solved:
    return Model(problem, limit_s=limit_s).solve(Budget(effort=EFFORT), effort=EFFORT, linearization=0)


def scaled(problem: PlaceProblem, factor: float) -> PlaceProblem:
    return replace(problem, time_s=problem.time_s * factor, latency_s=problem.latency_s * factor,
                   s_per_byte=problem.s_per_byte * factor, given_s=problem.given_s * factor)


@pytest.mark.parametrize("seed", range(400, 436))
def test_it_equals_brute_force(seed):
    problem = scaled(draw(seed, 6), (1.0, 1e-6, 3**0.5)[seed % 3])
    best = min_latency(problem)
    assert best is not None
    found = solve(problem)
    assert not math.isinf(found.bound)
    assert found.timetable is not None
    check_timetable(found.timetable)
    assert found.timetable.latency_s == pytest.approx(best.latency_s, rel=1e-6, abs=1e-300)
    assert best.latency_s * (1 - 1e-6) <= found.bound <= best.latency_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(440, 452))
def test_only_what_takes_less_than_the_limit_counts(seed):
    problem = draw(seed, 6)
    problem = replace(problem, time_s=problem.time_s + 1)  # nothing takes no time
    best = min_latency(problem)
    assert best is not None
    at_limit = solve(problem, limit_s=best.latency_s)
    assert at_limit.timetable is None or at_limit.timetable.latency_s == pytest.approx(best.latency_s, rel=1e-6)
    if choose_ticks(problem, best.latency_s).is_exact:
        assert math.isinf(at_limit.bound)
    above = solve(problem, limit_s=best.latency_s * 1.001)
    assert above.timetable is not None
    assert above.timetable.latency_s == pytest.approx(best.latency_s, rel=1e-6)
    assert math.isinf(solve(problem, limit_s=best.latency_s * 0.999).bound)


def test_a_problem_that_has_one_latency_is_not_refused():
    """Everything one after the other is all there is: the time that limits the model is the answer."""
    for seconds in (5.0, 1e-6, 1 / 3):
        found = solve(problem_of(chain(2, seconds, 1), cluster("x")))
        assert not math.isinf(found.bound)
        assert found.timetable is not None
        assert found.timetable.latency_s == pytest.approx(2 * seconds)
        assert found.bound == pytest.approx(2 * seconds)


def test_too_little_memory_is_infeasible():
    problem = problem_of(graph([op(name, memory=10) for name in "abc"]), cluster(memory={"x": 19, "y": 10}))
    assert math.isinf(solve(problem).bound)
    assert solve(replace(problem, capacity=np.array([20.0, 10.0]))).timetable is not None


def test_weights_are_counted_once_on_a_device():
    problem = problem_of(graph([op(name, 1, 9, memory=10) for name in "abc"]), cluster(memory={"x": 10, "y": 10}))
    shared = replace(problem, weights=np.zeros(3, dtype=np.int64), weight_bytes=np.array([10.0, 0, 0]))
    found = solve(shared)
    assert found.timetable is not None
    assert found.timetable.device.tolist() == [0, 0, 0]
    assert math.isinf(solve(problem).bound)


@pytest.mark.parametrize("seed", range(460, 472))
def test_with_fixed_devices_only_the_order_is_left(seed):
    problem = draw(seed, 6)
    device = random_placement(np.random.default_rng(seed), problem)
    fixed = replace(pinned(problem, device), capacity=np.full(problem.num_devices, np.inf))
    best = min_latency(fixed)
    assert best is not None
    found = solve(fixed)
    assert found.timetable is not None
    assert np.array_equal(found.timetable.device, device)
    assert found.timetable.latency_s == pytest.approx(best.latency_s, rel=1e-6, abs=1e-12)


def test_a_hint_is_where_the_search_begins():
    """With next to no effort a larger problem is not solved, but the hint is a solution."""
    problem = random_problem(np.random.default_rng(4), 20, 3, contention="port", limited=False)
    rng = np.random.default_rng(4)
    start = make_timetable(problem, random_placement(rng, problem), random_order(rng, problem))
    model = Model(problem, limit_s=start.latency_s * 1.001)
    model.hint(start)
    assert not model.model.validate()
    names = {model.model.proto.variables[index].name: value for index, value in
             zip(model.model.proto.solution_hint.vars, model.model.proto.solution_hint.values, strict=True)}
    assert all(names[f"s{index}"] == model.ticks.of(when) for index, when in enumerate(start.start_s))
    assert all(names[f"x{unit},{device}"] == (device == start.device[np.flatnonzero(problem.unit_of_op == unit)[0]])
               for unit in range(problem.num_units) for device in np.flatnonzero(problem.is_allowed[unit]))
    found = model.solve(Budget(effort=0.3), effort=0.3, linearization=0)
    assert found.timetable is not None
    assert found.timetable.latency_s <= start.latency_s * (1 + 1e-6)


def test_without_effort_nothing_is_proven():
    problem = random_problem(np.random.default_rng(4), 40, 3, contention="port", limited=False)
    found = Model(problem).solve(Budget(effort=1e-9), effort=1e-9)
    best_known = make_timetable(problem, np.zeros(40, dtype=np.int64), np.arange(40)).latency_s
    assert not math.isinf(found.bound)
    assert found.bound <= best_known


# ---- ticks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "sent", "per_second"), [
    (3.0, 2.0, 1), (3000.0, 1000.0, Fraction(1, 1000)), (0.25, 0.5, 100), (7e-6, 2e-6, 10**6)])
def test_times_that_are_multiples_of_a_power_of_ten_are_exact(seconds, sent, per_second):
    problem = problem_of(diamond(seconds, sent), cluster())
    ticks = choose_ticks(problem, longest(problem))
    assert ticks == Ticks(per_second=Fraction(per_second), is_exact=True)


@pytest.mark.parametrize(("seconds", "sent"), [(1 / 3, 1 / 7), (3**0.5, 0.1), (1.0, 1e-12), (1e6, 1e-6)])
def test_other_times_are_rounded_down_and_bounds_stay_valid(seconds, sent):
    problem = problem_of(diamond(seconds, sent), cluster(contention="port"))
    limit = longest(problem)
    ticks = choose_ticks(problem, limit)
    assert not ticks.is_exact
    assert float(ticks.per_second) * limit == pytest.approx(ROUNDED_TICKS)
    for value in (seconds, sent, 4 * seconds):
        assert ticks.of(value) <= float(ticks.per_second) * value
        assert ticks.of(value) >= float(ticks.per_second) * value - 1.001
    best, found = min_latency(problem), solve(problem)
    assert best is not None
    assert found.timetable is not None
    assert found.bound <= best.latency_s
    assert found.bound == pytest.approx(best.latency_s, rel=1e-6)
    assert found.timetable.latency_s == pytest.approx(best.latency_s, rel=1e-6)


def test_what_takes_longer_than_the_limit_does_not_make_ticks_coarse():
    problem = problem_of(graph([op("a", 1, 1e12 / 3), op("b", 2, 2)], [edge("a", "b", 1)]), cluster())
    assert choose_ticks(problem, 10.0) == Ticks(per_second=Fraction(1), is_exact=True)
    assert not choose_ticks(problem, 1e13).is_exact


def test_ticks_below_a_time():
    whole = Ticks(per_second=Fraction(10), is_exact=True)
    assert (whole.below(0.5), whole.below(0.51), whole.below(0.5 + 1e-12)) == (4, 5, 4)
    rounded = Ticks(per_second=Fraction(10), is_exact=False)
    assert (rounded.below(0.5), rounded.below(0.59)) == (5, 5)


def test_nothing_but_zero_times():
    problem = problem_of(chain(3, 0, 0), cluster())
    assert choose_ticks(problem, 1.0).is_exact
    found = solve(problem)
    assert found.timetable is not None
    assert found.timetable.latency_s == 0.0


def test_exact_ticks_stay_within_their_number():
    problem = problem_of(graph([op("a", 1e-6), op("b", 1e3)], [edge("a", "b", 1)]), cluster())
    assert choose_ticks(problem, 999.0).is_exact
    assert not choose_ticks(problem, MAX_EXACT_TICKS * 1e-6 * 1.1).is_exact


def test_what_takes_no_time_is_not_put_inside_another_and_the_bound_holds_either_way():
    """z could run at 1, but not inside w: w begins with it or after it. The model does not know, which keeps the bound."""
    ops = [op("w", 6, on=["x"]), op("s", 1, on=["y"]), op("z", 0, on=["x"]), op("r", 9, on=["y"])]
    problem = problem_of(graph(ops, [edge("s", "z", 0), edge("z", "r", 1)]), cluster(contention="port"))
    found = solve(problem)
    assert found.timetable is not None
    check_timetable(found.timetable)
    assert found.bound == 1 + 1 + 9
    result = place(problem, time_limit=5.0)
    check_timetable(result.timetable)
    assert (result.value, result.status) == (1 + 1 + 9, "optimal")


def test_operators_without_a_common_device_are_no_crash():
    ops = [op("a", 1, on=["x"], colocate="g"), op("b", 1, on=["y"], colocate="g")]
    problem = problem_of(graph(ops, [edge("a", "b", 1)]), cluster())
    assert math.isinf(solve(problem).bound)
    with pytest.raises(NoFeasiblePlan, match="'a', 'b' share a device, but there is none that all of them may run on"):
        place(problem)


# ---- replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_a_replayed_timetable_is_valid_and_never_later(seed):
    problem = draw(seed, 9)
    problem = replace(problem, capacity=np.full(problem.num_devices, np.inf))
    rng = np.random.default_rng(seed)
    table = make_timetable(problem, random_placement(rng, problem), random_order(rng, problem))
    sent = {(item.tensor, item.target): item.start_s for item in table.transfers}
    again = replay(problem, table.device, table.start_s, sent)
    check_timetable(again)
    assert again.latency_s <= table.latency_s * (1 + 1e-9)
    check_timetable(replay(problem, table.device, 3 * table.start_s, {}))  # transfers before their first readers
    check_timetable(replay(problem, table.device, 3 * table.start_s + 1, {key: 3 * when + 1 for key, when in sent.items()}))


def test_longest_is_never_exceeded():
    for seed in range(30):
        problem = draw(seed, 9)
        problem = replace(problem, capacity=np.full(problem.num_devices, np.inf))
        rng = np.random.default_rng(seed)
        table = make_timetable(problem, random_placement(rng, problem), random_order(rng, problem))
        assert table.latency_s <= longest(problem) * (1 + 1e-12)
