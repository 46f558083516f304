"""Which rank hangs, from lines alone; time is what the watcher's turns add up to."""

from __future__ import annotations

import pytest

from weft.base.errors import InputError
from weft.run.status import Limits, Line, Milestone, Observer, describer, limits_of

LABELS = ("recv s0>s1 mb 0", "F s1 mb 0", "B s1 mb 0")
DESCRIBE = describer(lambda rank: LABELS)


def line(place=1, *, steps=1, marks=0, beat=0, cpu_ms=0):
    return Line(place, steps - 1, 0, steps, marks, 0, beat, cpu_ms)


def watch(observer, lines_at, seconds, *, turn_s=1.0, elapsed_s=None):
    """Let the observer look every second at what ``lines_at`` returns for the time; return what it says first."""
    for second in range(round(seconds / turn_s)):
        lines = lines_at(second * turn_s)
        for rank, item in enumerate(lines):
            observer.note(rank, item, elapsed_s or turn_s, process=None)
        for rank in range(len(lines)):
            found = observer.silent(rank, DESCRIBE, is_here=True)
            if found is not None:
                return found
        found = observer.stuck(len(lines), DESCRIBE)
        if found is not None:
            return found
    return None


def beating(second, **facts):
    return line(beat=int(second) + 1, **facts)


def test_silence_is_noticed_after_its_limit():
    found = watch(Observer(Limits()), lambda second: [beating(second, marks=1), beating(min(second, 5))], 60)
    assert found is not None
    assert (found.rank, found.message) == (1, "rank 1 hangs: no sign of life for 16 s; it was at instruction 1 (F s1 mb 0) of step 0")


def test_a_watcher_that_was_stopped_raises_no_alarm():
    """A laptop that slept: one turn takes an hour, and afterwards all beat again."""
    observer = Observer(Limits())
    assert watch(observer, lambda second: [beating(second), beating(second, marks=1)], 5) is None
    for rank in range(2):
        observer.note(rank, beating(4, marks=rank), 3600.0, process=None)
        assert observer.silent(rank, DESCRIBE, is_here=True) is None
    assert observer.stuck(2, DESCRIBE) is None


def test_the_rank_that_waits_is_not_blamed():
    found = watch(Observer(Limits()), lambda second: [beating(second, marks=1), beating(second)], 90)
    assert found is not None
    assert found.rank == 1
    assert found.message.startswith("rank 1 hangs: for 61 s it has not got on, and it waits for no other rank")


@pytest.mark.parametrize("busy", [
    lambda second: beating(second, cpu_ms=int(second * 300)),
    lambda second: beating(second, place=Milestone.COMPILING),
    lambda second: beating(second, place=Milestone.SAVING),
    lambda second: beating(second, place=Milestone.BETWEEN),
    lambda second: beating(second, marks=int(second / 50) * 2),
], ids=["computes", "compiles", "saves", "is in the script", "has many waits in one instruction"])
def test_a_slow_rank_is_left_alone_and_so_is_the_one_that_waits_for_it(busy):
    assert watch(Observer(Limits()), lambda second: [beating(second, marks=1), busy(second)], 1000) is None


def test_long_steps_have_a_longer_limit():
    """Ten times the predicted step, or ten times the longest that was measured."""
    def hung(second):
        return [beating(second, marks=1), beating(second)]

    assert watch(Observer(Limits(predicted_s=20)), hung, 190) is None
    assert watch(Observer(Limits(predicted_s=20)), hung, 210) is not None
    observer = Observer(Limits())
    assert watch(observer, lambda second: [beating(second, steps=1 + int(second / 30))] * 2, 95) is None
    assert observer.still_limit_s == pytest.approx(300, abs=20)


def test_all_wait_for_each_other():
    found = watch(Observer(Limits()), lambda second: [beating(second, marks=3), beating(second, place=0, marks=1)], 90)
    assert found is not None
    assert found.rank is None
    assert "rank 1 is the furthest behind, at instruction 0 (recv s0>s1 mb 0) of step 0" in found.message


def test_limits_of_the_environment(monkeypatch):
    monkeypatch.setenv("WEFT_BEAT_LIMIT_S", "2.5")
    assert limits_of(None).silence_s == 2.5
    monkeypatch.setenv("WEFT_STEP_LIMIT_S", "never")
    with pytest.raises(InputError, match="WEFT_STEP_LIMIT_S must be a number of seconds above 0, not 'never'"):
        limits_of(1.0)
