"""The tables of what the joint search tried."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

from weft.show.facts import StrategyFacts, TriedFacts
from weft.show.plan_tables import print_tried, tried_tables


def row(setting, estimate=None, simulated=None, reason=""):
    return TriedFacts(setting=setting, estimate_s=estimate, step_time_s=simulated, reason=reason)


ROWS = [row("a", 1.0, 1.1), row("b", 1.05, 1.05), row("c", 1.2), row("d", 1.01, None, "too large after all"),
        row("e", None, None, "e: memory is short: about 3 GiB"), row("f", None, None, "f: memory is short: about 9 GiB"),
        row("g", None, None, "cannot be faster than 4 s")]


def test_the_best_come_first_with_why_they_lost():
    best, _ = tried_tables(ROWS)
    assert best.rows == (("d", "1.01 s", "-", "too large after all"), ("b", "1.05 s", "1.05 s", "the best"),
                         ("a", "1 s", "1.1 s", "+4.8 %"), ("c", "1.2 s", "-", "+14.3 %, not simulated"))


def test_what_was_left_out_is_counted_by_reason():
    _, left = tried_tables(ROWS)
    assert left.rows == (("memory is short", "2", "e: memory is short: about 3 GiB"),
                         ("cannot be faster than", "1", "g: cannot be faster than 4 s"))


def test_long_lists_are_cut():
    (table,) = tried_tables([row(str(index), 1.0 + index) for index in range(30)], limit=20)
    assert len(table.rows) == 20
    assert table.notes == ("and 10 more that were estimated",)


def test_strategies_without_settings_print_nothing():
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_tried([StrategyFacts(strategy="single"), StrategyFacts(strategy="joint", tried=tuple(ROWS))])
    assert stream.getvalue().count("Tried") == 1
    assert not list(tried_tables(()))
