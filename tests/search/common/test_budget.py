"""Budgets: what is kept for later."""

from __future__ import annotations

import pytest

from weft.search.common.budget import Budget


def test_what_is_kept_for_later_comes_back_whatever_happens():
    budget = Budget(effort=10.0)
    with budget.without(8.0):
        assert budget.effort == 2.0
        budget.effort -= 1.5
    assert budget.effort == 8.5
    with pytest.raises(InterruptedError), budget.without(8.0):
        raise InterruptedError
    assert budget.effort == 8.5
