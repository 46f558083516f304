"""Which operators run again: against all choices on small pieces, on copies of layers, and at the ends of the range."""

from __future__ import annotations

import itertools
import random

import pytest

from weft.base.errors import NoFeasiblePlan
from weft.search.recompute.choose import Chooser
from weft.search.recompute.options import Option, hull, option_of
from weft.search.recompute.pieces import Lent, Piece


def random_piece(seed: int, num_ops: int) -> Piece:
    chance, lent = random.Random(seed), []
    for maker in range(-1, num_ops - 1):
        if chance.random() < 0.6:
            readers = {chance.randint(max(maker + 1, 0), num_ops - 1) for _ in range(chance.randint(1, 3))}
            lent.append(Lent(num_bytes=chance.randint(1, 20), maker=maker, readers=tuple(sorted(readers))))
    return Piece(seconds=tuple(chance.random() for _ in range(num_ops)), made=(1.0,) * num_ops,
                 freed=tuple(float(chance.choice([0, chance.randint(1, 30)])) for _ in range(num_ops)),
                 may_repeat=tuple(chance.random() < 0.9 for _ in range(num_ops)), lent=tuple(lent))


def all_options(piece: Piece) -> list[Option]:
    return [option_of(piece, again) for again in itertools.product((False, True), repeat=piece.num_ops)
            if all(may or not flag for flag, may in zip(again, piece.may_repeat, strict=True))]


@pytest.mark.parametrize("seed", range(20))
def test_small_pieces_against_all_choices(seed: int) -> None:
    piece = random_piece(seed, 2 + seed % 7)
    options, chooser = all_options(piece), Chooser([piece])
    assert chooser.least_bytes == pytest.approx(min(item.kept_bytes for item in options))
    for share in (0.0, 0.3, 0.6, 0.95):
        budget = chooser.least_bytes + share * (chooser.most_bytes - chooser.least_bytes)
        best = min(item.extra_s for item in options if item.kept_bytes <= budget + 1e-9)
        found = chooser(budget)
        assert found.kept_bytes <= budget + 1e-6
        assert found.extra_s == pytest.approx(best, abs=1e-6)
        assert found.bound_s <= best + 1e-6
        assert found.gap <= 0.02


@pytest.mark.parametrize("seed", range(6))
def test_two_layers_alike_and_one_other_against_all_choices(seed: int) -> None:
    layer, other = random_piece(100 + seed, 4), random_piece(200 + seed, 3)
    chooser = Chooser([layer, other, layer])
    assert len(chooser.sorts) == 2
    budget = (chooser.least_bytes + chooser.most_bytes) / 2
    best = min(sum(item.extra_s for item in row)
               for row in itertools.product(all_options(layer), all_options(other), all_options(layer))
               if sum(item.kept_bytes for item in row) <= budget + 1e-9)
    assert chooser(budget).extra_s == pytest.approx(best, abs=1e-6)


def test_options_of_the_hull_are_the_best_at_their_price() -> None:
    piece = random_piece(7, 8)
    points = hull(piece)
    assert len(points) > 2
    slopes = [(less.extra_s - more.extra_s) / (more.kept_bytes - less.kept_bytes)
              for more, less in itertools.pairwise(points)]
    assert slopes == sorted(slopes)
    for price in slopes:
        least = min(item.extra_s + price * item.kept_bytes for item in all_options(piece))
        assert min(item.extra_s + price * item.kept_bytes for item in points) == pytest.approx(least)


def test_a_choice_with_less_room_makes_less_again_at_a_time() -> None:
    piece = random_piece(7, 8)
    chooser = Chooser([piece] * 4)
    budget = (chooser.least_bytes + chooser.most_bytes) / 2
    free = chooser(budget)
    narrow = chooser(budget, room=free.again_bytes - 0.5)
    assert narrow.again_bytes < free.again_bytes
    assert narrow.kept_bytes <= budget
    assert narrow.extra_s >= free.extra_s


def test_a_budget_below_what_must_be_kept_says_which_works() -> None:
    chooser = Chooser([random_piece(7, 8)] * 3)
    with pytest.raises(NoFeasiblePlan, match=r"budget of 1 B .* is less than the \d+ B that must be kept"):
        chooser(1.0)
    assert chooser(chooser.least_bytes).kept_bytes == pytest.approx(chooser.least_bytes)
