"""The compiled parts against what they mean: bounds by trying everything, peaks by numpy, forests by trying."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.search.strategies.random_graphs import random_graph
from weft.base.errors import NoFeasiblePlan
from weft.search.strategies.core import Compact, make_core
from weft.search.strategies.dual import Dual, cost_of, usage_of
from weft.search.strategies.integer import moved, solve_integer
from weft.search.strategies.units import add_usage, make_units, settle
from weft.search.strategies.walk import (
    add_to,
    anneal,
    choose_forest,
    improve,
    make_peaks,
    peak_in,
    repair,
    solve_forest,
)


def random_core(seed: int, **options: object) -> Compact | None:
    """Return a core that has not been shrunk, so that all kinds of units are in it; None if nothing fits."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, nodes=5, density=float(rng.random()), **options)
    try:
        units = make_units(graph)
        add_usage(graph, units)
        settle(units)
    except NoFeasiblePlan:
        return None
    return make_core(units)


def every_choice(compact: Compact) -> list[tuple[float, np.ndarray]]:
    """Return every choice of the core that fits, with its cost."""
    core = compact.core
    items = [np.array(item, dtype=np.int64) for item in itertools.product(*(range(k) for k in np.diff(core.first)))]
    return [(cost_of(core, x), x) for x in items if usage_of(core, x).max(initial=0.0) <= core.limit]


def by_strategy(compact: Compact) -> np.ndarray:
    """Return for every strategy the least cost of a choice with it."""
    first = compact.core.first
    best = np.full(len(compact.core.cost), np.inf)
    for cost, x in every_choice(compact):
        best[first[:-1] + x] = np.minimum(best[first[:-1] + x], cost)
    return best


def test_bounds_are_never_above_the_best_choice_nor_above_the_best_with_a_strategy():
    num_tight = num_all = 0
    for seed in range(500):
        compact = random_core(seed)
        if compact is None or not compact.num_units:
            continue
        best = by_strategy(compact)
        rounding = 1e-9 * max(1.0, abs(best.min())) if np.isfinite(best.min()) else 0.0
        dual, rng = Dual(compact), np.random.default_rng(seed)
        for _ in range(5):
            dual.advance(int(rng.integers(1, 12)), best=float(best.min()) if rng.random() < 0.5 else np.inf)
            assert dual.bound <= best.min() + rounding, seed
            assert (dual.reach <= best + rounding).all(), seed
        num_all += 1
        num_tight += dual.bound >= best.min() - max(rounding, 1e-6 * abs(best.min()))
    assert num_all > 300
    assert num_tight > 0.8 * num_all, "a bound that is never near the best would be valid, too"


@pytest.mark.parametrize("seed", range(40))
def test_the_integer_program_finds_the_best_choice(seed):
    compact = random_core(seed)
    if compact is None or not compact.num_units:
        return
    best = min((cost for cost, _ in every_choice(compact)), default=None)
    dual = Dual(compact)
    dual.advance(5, best=np.inf)
    found = solve_integer(compact.core, dual.messages, best=np.inf if best is None else best + 5.0, seconds=10.0)
    assert found.is_infeasible == (best is None)
    if best is not None:
        assert cost_of(compact.core, found.x) == pytest.approx(best, rel=1e-6)
        assert found.bound == pytest.approx(best, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_moving_costs_along_messages_changes_no_choices_cost(seed):
    compact = random_core(seed, limit="none")
    if compact is None or not compact.num_units:
        return
    dual = Dual(compact)
    dual.advance(3, best=np.inf)
    core, constant = moved(compact.core, dual.messages)
    assert min(core.cost.min(initial=0.0), core.matrices.min(initial=0.0)) >= 0
    for cost, x in every_choice(compact):
        assert cost_of(core, x) + constant == pytest.approx(cost, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33])
def test_the_tree_knows_the_peak_of_every_span(count):
    rng = np.random.default_rng(count)
    usage = rng.integers(0, 100, count).astype(float)
    peak = make_peaks(usage)
    added = np.zeros(len(peak) // 2)
    for _ in range(200):
        begin = int(rng.integers(count))
        end = int(rng.integers(begin + 1, count + 1))
        amount = float(rng.integers(-20, 20))
        add_to(peak, added, begin, end, amount)
        usage[begin:end] += amount
        begin = int(rng.integers(count))
        end = int(rng.integers(begin + 1, count + 1))
        assert peak_in(peak, added, begin, end) == usage[begin:end].max()
        assert peak[1] == usage.max()


@pytest.mark.parametrize("seed", range(60))
def test_repaired_and_annealed_choices_fit_and_are_no_dearer(seed):
    compact = random_core(seed, limit="tight")
    if compact is None or not compact.num_units:
        return
    core = compact.core
    x = np.array([np.random.default_rng(seed).integers(size) for size in np.diff(core.first)], dtype=np.int64)
    if not repair(core, x, 100):
        return
    assert usage_of(core, x).max(initial=0.0) <= core.limit
    before, found = cost_of(core, x), np.empty_like(x)
    least = anneal(core, x, found, 2000, 5.0, 0.1, seed)
    assert least == cost_of(core, found) <= before
    assert max(usage_of(core, found).max(initial=0.0), usage_of(core, x).max(initial=0.0)) <= core.limit
    bettered = found.copy()
    assert improve(core, bettered, np.zeros(len(core.base)), 4, 20, seed) == cost_of(core, bettered) <= least
    assert usage_of(core, bettered).max(initial=0.0) <= core.limit


@pytest.mark.parametrize("seed", range(60))
def test_a_forest_is_one_and_its_units_are_chosen_best(seed):
    compact = random_core(seed, limit="none")
    if compact is None or not compact.num_units:
        return
    core, count = compact.core, compact.num_units
    order, parent_arc = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    chosen = order[: choose_forest(core, count, order, parent_arc)].tolist()
    inside = [arc for unit in chosen for arc in range(core.arc[unit], core.arc[unit + 1]) if core.head[arc] in chosen]
    assert len(set(chosen)) == len(chosen) > 0
    assert sorted(inside) == sorted([arc for unit in chosen if (arc := parent_arc[unit]) >= 0]
                                    + [core.back[parent_arc[unit]] for unit in chosen if parent_arc[unit] >= 0])
    x = np.array([np.random.default_rng(seed).integers(size) for size in np.diff(core.first)], dtype=np.int64)
    best = min(cost for cost, other in every_choice(compact)
               if all(other[unit] == x[unit] for unit in range(count) if unit not in chosen))
    solve_forest(core, core.cost, x, order, len(chosen), parent_arc)
    assert cost_of(core, x) == pytest.approx(best, rel=1e-12)
