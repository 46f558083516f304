"""What compiled searches share: how a run of annealing is cut into pieces."""

from __future__ import annotations

import pytest

from weft.search.place.kernel import pieces


def test_pieces_cool_from_hot_by_the_whole_fall():
    found = list(pieces(1000, size=300.0, hot=2.0, fall=0.125, is_done=lambda: False))
    assert [(piece.number, piece.total, piece.steps) for piece in found] == [(0, 3, 333), (1, 3, 333), (2, 3, 333)]
    assert [piece.hot for piece in found] == pytest.approx([2.0, 1.0, 0.5])
    assert [piece.cold for piece in found] == pytest.approx([1.0, 0.5, 0.25])


def test_the_first_piece_is_done_in_any_case_and_before_the_others_it_asks():
    assert len(list(pieces(1000, size=100.0, hot=1.0, fall=0.1, is_done=lambda: True))) == 1
    answers = iter([False, False, True])
    assert len(list(pieces(1000, size=100.0, hot=1.0, fall=0.1, is_done=lambda: next(answers)))) == 3


def test_a_short_run_is_one_piece_with_a_step_at_least():
    (piece,) = pieces(0, size=100.0, hot=1.0, fall=0.1, is_done=lambda: False)
    assert (piece.steps, piece.hot, piece.cold) == (1, 1.0, 0.1)
