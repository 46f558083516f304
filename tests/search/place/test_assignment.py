"""Methods that place again because tensors do not fit beside the weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.place.odd_inputs import chain, cluster
from tests.search.place.worlds import problem_of
from weft.base.errors import NoFeasiblePlan
from weft.search.place.problem import PlaceProblem
from weft.search.place.timetable import Assignment, with_room_for_tensors


def world(*capacity: float) -> PlaceProblem:
    """Return two operators that keep 500 bytes in all, with a tensor of 501 between them."""
    problem = problem_of(chain(2, 1, 0.1), cluster())
    return replace(problem, has_lifetimes=True, capacity=np.array(capacity), weight_bytes=np.array([250.0, 250.0]),
                   tensor_bytes=np.array([501.0]))


def first_with_room(problem: PlaceProblem) -> Assignment:
    """Return everything on the first device that has room for the weights."""
    fits = np.flatnonzero(problem.capacity >= problem.weight_bytes.sum())
    if not len(fits):
        raise NoFeasiblePlan("none has room", missing_bytes=1)
    return Assignment(device=np.full(2, fits[0]), order=np.arange(2))


def test_weights_get_less_room_than_they_take_now():
    """One byte is missing on x, where the weights take half: a byte less in all would change nothing."""
    assert with_room_for_tensors(world(1000, np.inf), first_with_room).device.tolist() == [1, 1]
    assert with_room_for_tensors(world(1001, np.inf), first_with_room).device.tolist() == [0, 0]


def test_the_nearest_is_reported():
    with pytest.raises(NoFeasiblePlan, match="'y' would hold 1001 B at its peak, tensors included, but has 999 B"):
        with_room_for_tensors(world(990, 999), first_with_room)
