from __future__ import annotations

import numpy as np
import pytest

from tests.show.helpers import simulated, stretched
from weft.plan.program import Op
from weft.show.timeline_chart import find_period


@pytest.mark.parametrize("num_devices", [2, 4])
def test_the_steady_state_of_1f1b_repeats_with_one_forward_and_one_backward(num_devices):
    timeline = simulated("1f1b", num_devices, 8)
    period = find_period(timeline)
    assert period is not None
    assert period.num_microbatches == 1
    assert period.length == pytest.approx(3.0)
    assert 0 < period.start <= period.period_start
    assert period.period_end <= period.end + 1e-9 < timeline.step_time_s


def test_each_compute_starts_once_in_the_period_that_is_marked():
    timeline = simulated("1f1b", 4, 8)
    period, program = find_period(timeline), timeline.program
    inside = (program.op == Op.COMPUTE) & (timeline.start_s >= period.period_start - 1e-9) & (
        timeline.start_s < period.period_end - 1e-9)
    kinds = list(zip(program.instance[inside].tolist(), program.phase[inside].tolist(), strict=True))
    assert sorted(kinds) == [(instance, phase) for instance in range(4) for phase in (0, 1)]


def test_slower_clocks_have_a_longer_period():
    timeline = simulated("1f1b", 2, 8)
    assert find_period(stretched(timeline, 1.5)).length == pytest.approx(4.5)


@pytest.mark.parametrize(("kind", "num_microbatches"), [("gpipe", 8), ("1f1b", 1), ("1f1b", 2)])
def test_where_nothing_repeats_there_is_no_period(kind, num_microbatches):
    assert find_period(simulated(kind, 4, num_microbatches)) is None


def test_irregular_times_are_no_period():
    timeline = simulated("1f1b", 2, 8)
    timeline.start_s[:] *= 1 + 0.3 * np.random.default_rng(0).random(timeline.num_instructions)
    assert find_period(timeline) is None
