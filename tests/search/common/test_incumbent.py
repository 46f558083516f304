"""The best so far, its bound, and what may be claimed of it."""

from __future__ import annotations

import math

import pytest

from weft.search.common.budget import Budget
from weft.search.common.incumbent import Incumbent


def incumbent(**settings) -> tuple[Incumbent[str], list[str]]:
    lines: list[str] = []
    return Incumbent(budget=Budget(effort=1.0, report=lines.append), what="makespan", **settings), lines


def test_only_better_answers_are_kept_and_each_is_told():
    best, lines = incumbent(unit="s")
    assert best.offer(10.0, "first", by="gpipe")
    assert not best.offer(10.0 * (1 - 1e-15), "rounding")
    assert not best.offer(math.inf, "nothing")
    assert not best.offer(math.nan, "not a number")
    best.raise_bound(6.0)
    assert best.offer(8.0, "second")
    assert (best.value, best.answer, best.by) == (8.0, "second", "")
    assert lines == ["gpipe: makespan 10 s", "makespan 8 s, bound 6 s, gap 25 %"]


def test_optimal_is_claimed_only_with_a_proof():
    best, _ = incumbent(proof=1e-6)
    best.raise_bound(5.0)
    assert (best.status, best.gap, best.is_done) == ("feasible", math.inf, False)
    best.offer(5.1, "near")
    assert best.status == "feasible"
    assert best.gap == pytest.approx(0.1 / 5.1)
    best.offer(5.0000001, "equal but for rounding")
    assert (best.status, best.gap) == ("optimal", 0.0)


def test_a_bound_is_never_above_the_value():
    best, _ = incumbent()
    best.offer(3.0, "answer")
    best.raise_bound(3.5)
    assert best.bound == 3.0
    best.raise_bound(2.0)
    assert best.bound == 3.0


def test_a_search_ends_when_nothing_may_be_spent_but_not_without_an_answer():
    best, _ = incumbent()
    best.budget.effort = 0.0
    assert not best.is_done
    best.offer(1.0, "answer")
    assert best.is_done


def test_negative_values_are_compared_as_well():
    best, _ = incumbent()
    best.offer(-1.0, "first")
    assert best.offer(-2.0, "second")
    assert not best.offer(-1.5, "third")


def test_what_a_part_of_a_budget_leaves_comes_back():
    budget = Budget(effort=10.0)
    with budget.lend(4.0) as share:
        share.effort -= 1.0
        share.is_interrupted = True
    assert budget.effort == 9.0
    assert budget.is_interrupted


def test_less_over_a_limit_is_better_whatever_the_values_and_proves_nothing():
    best, lines = incumbent(unit="s")
    best.raise_bound(3.0)
    assert best.offer(3.0, "too large", by="first", excess=2e9)
    assert (best.is_proven, best.status) == (False, "feasible")
    assert lines == ["first: makespan 3 s, over the limit by 2e+09, bound 3 s, gap 0 %"]
    assert not best.offer(2.0, "larger still", excess=3e9)
    assert not best.offer(math.inf, "nothing")
    assert best.offer(5.0, "less", excess=1e9)
    assert best.offer(9.0, "fits")
    assert not best.offer(4.0, "does not fit", excess=1.0)
    assert best.offer(8.0, "fits as well")
    assert (best.value, best.excess) == (8.0, 0.0)
