"""Times and memory of very different sizes in one problem: all that a file may say is searched, what it may not is named."""

from __future__ import annotations

import json

import pytest

from weft.base.errors import InputError
from weft.search.schedule.problem import parse_problem
from weft.search.schedule.schedule import check_schedule
from weft.search.schedule.search import schedule


def problem(*, times=(1, 1.5, 2, 2), delays=(0.1, 0.25), memory=(1, 1, -1, -1), limit=4):
    names, devices = ("f0", "f1", "b1", "b0"), ("d0", "d1", "d1", "d0")
    return {
        "format": "weft.schedule-problem", "version": 1, "devices": [{"name": "d0", "memory": limit}, {"name": "d1", "memory": limit}],
        "blocks": [{"name": name, "devices": [device], "time": time, "memory": amount, "after": [names[index - 1]] if index else []}
                   for index, (name, device, time, amount) in enumerate(zip(names, devices, times, memory, strict=True))],
        "transfers": [{"from": "f0", "to": "f1", "time": delays[0]}, {"from": "b1", "to": "b0", "time": delays[1], "link": "back"}]}


@pytest.mark.parametrize("changes", [
    {"delays": (2**63, 0.25)}, {"delays": (0.1, 2**63)}, {"delays": (1e30, 1e-30)}, {"delays": (1e30, 1e30), "times": (0, 0, 0, 0)},
    {"times": (1e-30, 1e30, 1e-12, 1e12)}, {"times": (1e-30,) * 4, "delays": (1e30, 0)}, {"times": (2.0**63,) * 4},
    {"memory": (1e30, 1e-30, -1e-30, -1e30), "limit": 1e30}, {"limit": 1e30}, {"memory": (1e-30, 1, -1, -1e-30)},
], ids=str)
def test_any_times_and_memory_within_the_range_are_searched(changes):
    result = schedule(parse_problem(problem(**changes)), microbatches=3, time_limit=1)
    check_schedule(result.schedule)
    assert 0 <= result.makespan_bound <= result.makespan * (1 + 1e-9)
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize(("changes", "field"), [
    ({"delays": (1e31, 0)}, r"transfers\[0\].time"), ({"times": (1, 1, 1, 1e-31)}, r"blocks\[3\].time"),
    ({"memory": (1e31, 0, 0, 0)}, r"blocks\[0\].memory"), ({"limit": 2e30}, r"devices\[0\].memory")])
def test_what_is_out_of_range_is_named(changes, field):
    with pytest.raises(InputError, match=f"{field} must be 0 or of a size between 1e-30 and 1e\\+30"):
        parse_problem(problem(**changes))
