from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest

from tests.show.helpers import (
    HOSTILE,
    hostile_timeline,
    many_microbatches,
    played,
    replicated_program,
    simulated,
    stretched,
)
from tests.simulate.helpers import given_graph
from tests.simulate.test_overlap import world_of
from weft.base.errors import NoFeasiblePlan, PlanError
from weft.plan.plan import SearchInfo
from weft.planning.compare import Candidate, Comparison
from weft.show.facts import (
    StrategyFacts,
    device_facts,
    exchange_facts,
    plan_facts,
    program_of,
    stage_facts,
    strategy_facts,
)
from weft.show.plan_tables import (
    devices_table,
    exchanges_table,
    peak_text,
    plan_table,
    print_comparison,
    print_plan,
    print_timeline,
    stages_table,
    strategies_table,
)
from weft.show.tables import column_widths, make_table, percent, print_table
from weft.simulate.timing import simulate


def test_plan_facts_of_a_pipeline_with_bound_and_measurement():
    timeline = simulated()
    plan = replace(timeline.program.plan, search=SearchInfo(by="1f1b", status="feasible", step_time=9.0, bound=6.0))
    facts = plan_facts(plan, [timeline, stretched(timeline, 1.1)])
    assert (facts.step_time_s, facts.bound_s, facts.gap) == (9.0, 6.0, 0.5)
    assert facts.samples_per_s == pytest.approx(2 / 9)
    assert facts.bubble == pytest.approx(1 / 3)
    assert facts.measured_difference == pytest.approx(0.1)
    rows = dict(plan_table(facts).rows)
    assert rows["bound"] == "6 s (gap 50.0 %)"
    assert rows["batch"] == "2 in 2 micro-batches of 1"
    assert rows["measured step"] == "9.9 s, +10.0 % against the prediction"
    assert rows["status"] == "feasible"


def test_a_plan_without_bound_and_timeline_says_so():
    facts = plan_facts(simulated().program.plan)
    assert (facts.step_time_s, facts.gap, facts.samples_per_s) == (None, None, None)
    rows = dict(plan_table(facts).rows)
    assert rows["bound"] == "none known"
    assert rows["predicted step"] == "-"


def test_stages_have_times_parameters_and_modules():
    timeline = simulated()
    first, second = stage_facts(timeline.program, timeline)
    assert (first.name, first.modules, first.num_ops, first.replicas) == ("s0", "layers.0", 1, (("d0",),))
    assert (first.forward_s, first.backward_s) == (1.0, 2.0)
    assert first.parameter_bytes == second.parameter_bytes == 4
    assert stages_table([first]).rows[0] == ("s0", "layers.0", "1", "d0", "100 %", "4 B", "1 s", "2 s")


def test_replicas_that_are_alike_share_a_row():
    program = replicated_program((0.25, 0.25, 0.5))
    rows = stage_facts(program, played(program))
    assert [(row.replicas, row.share) for row in rows] == [((("d0",), ("d1",)), 0.25), ((("d2",),), 0.5)]
    table = stages_table(rows)
    assert [row[3:5] for row in table.rows] == [("d0 - d1", "2 x 25 %"), ("d2", "50 %")]


def test_exchanges_have_bytes_devices_and_time():
    program = replicated_program((0.5, 0.5))
    rows = exchange_facts(program, played(program))
    assert sum(row.num_bytes for row in rows) == 16
    assert {name for row in rows for name in row.parameters} == {"w0", "w1", "w2", "w3"}
    assert all(row.devices == ("d0", "d1") and row.time_s == pytest.approx(0.25) for row in rows)
    assert exchanges_table(rows).rows[0][0] == "all_reduce"


def test_buckets_of_one_method_among_the_same_devices_share_a_row():
    graph = given_graph([1.0] * 3, parameter_bytes=8, batch=2)
    program, costs, cluster = world_of(graph, [["w2"], ["w1", "w0"]])
    (row,) = exchange_facts(program, simulate(program, costs, cluster))
    assert (row.how, row.num_bytes, row.parameters) == ("all_reduce in 2 buckets", 24, ("w2", "w1", "w0"))
    assert row.time_s == pytest.approx(3.0)
    assert exchange_facts(program)[0].time_s is None


def test_device_parts_add_up_and_memory_is_against_capacity():
    timeline = simulated(activation_bytes=1)
    rows = device_facts(timeline, {"d0": 40, "d1": None})
    for row in rows:
        assert row.busy_s + row.exposed_s + row.bubble_s == pytest.approx(timeline.step_time_s)
        assert row.peak_bytes == sum(row.peak_memory.values())
        assert row.busy_s == 6.0
    assert rows[0].capacity_used == rows[0].peak_bytes / 40
    assert rows[1].capacity_used is None
    table = devices_table(rows)
    assert table.header[:5] == ("device", "busy", "exposed comm", "bubble", "idle")
    assert table.rows[0][-1] == "40 B"
    assert table.rows[1][-2:] == ("-", "-")
    assert table.rows[0][1] == percent(6 / timeline.step_time_s)


def test_long_device_tables_are_cut():
    table = devices_table(device_facts(many_microbatches(40, 2)), limit=10)
    assert len(table.rows) == 10
    assert table.rows[-1][0] == "... 31 more"


def comparison_of(timeline):
    plan = timeline.program.plan
    return Comparison(bound_s=6.0, candidates=(
        Candidate(strategy="single", problem=NoFeasiblePlan("d0 needs 2 GiB but has 1 GiB")),
        Candidate(strategy="gpipe", plan=plan, timeline=stretched(timeline, 1.5)),
        Candidate(strategy="1f1b", plan=plan, timeline=timeline)))


def test_the_fastest_strategy_is_marked_and_the_infeasible_one_has_its_reason():
    timeline = simulated()
    rows = strategy_facts(comparison_of(timeline))
    assert [row.is_chosen for row in rows] == [False, False, True]
    assert rows[1].step_time_s == 13.5
    assert rows[2].samples_per_s == pytest.approx(2 / 9)
    table = strategies_table(rows)
    assert table.marked == {2}
    assert table.rows[2][:4] == ("* 1f1b", "9 s", "0.2222/s", "2")
    assert table.rows[2][5:] == ("33.3 %", "6 s", "heuristic")
    assert table.rows[0][-1] == "infeasible"
    assert table.notes == ("single: d0 needs 2 GiB but has 1 GiB",)


def test_peaks_are_a_range_over_the_devices_with_work():
    row = StrategyFacts(strategy="x", peak_bytes={"a": 3 << 30, "b": 1 << 30, "c": 0})
    assert peak_text(row) == "1 - 3 GiB"
    assert peak_text(replace(row, peak_bytes={"a": 3 << 30, "b": 1 << 20})) == "1 MiB - 3 GiB"
    assert peak_text(replace(row, peak_bytes={"a": 5, "b": 5})) == "5 B"
    assert peak_text(replace(row, peak_bytes=None)) == "-"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(width):
    out = io.StringIO()
    rows = strategy_facts(comparison_of(simulated()))
    with redirect_stdout(out):
        print_comparison(rows, width=width)
    text = out.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    squeezed = "".join(text.split())
    for word in ("1f1b", "gpipe", "13.5s", "33.3%", "6s", "d0needs2GiBbuthas1GiB"):
        assert word in squeezed or width < 60


def test_widths_shrink_the_widest_column_first():
    cells = [["name", "text", "n"], ["abcdef", "one two three four", "1.5 GiB"]]
    assert column_widths(cells, 100) == [6, 18, 7]
    assert column_widths(cells, 30) == [6, 13, 7]
    assert sum(column_widths(cells, 16)) + 4 <= 16


def test_without_a_terminal_there_is_no_colour():
    out = io.StringIO()
    timeline = simulated(activation_bytes=1)
    with redirect_stdout(out):
        print_plan(timeline.program.plan, [timeline, stretched(timeline, 1.2)])
    text = out.getvalue()
    assert "\x1b" not in text
    for part in ("Stages", "Predicted step", "Measured step", "d0 |", "heuristic"):
        assert part in text


def test_names_cannot_bring_markup_or_control_characters_to_the_terminal():
    out = io.StringIO()
    with redirect_stdout(out):
        print_table(make_table("[red]t\x1b[2J", ["[bold]head[/bold]"], [[HOSTILE[5]], ["\x1b]0;title\x07"]]))
    timeline = hostile_timeline()
    with redirect_stdout(out):
        print_plan(timeline.program.plan, [timeline])
        print_timeline(timeline)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]x[/red] \\x1b[2J" in text
    assert "[bold]head[/bold]" in text


def test_timelines_of_different_programs_are_refused():
    timeline, other = simulated(), simulated(num_microbatches=3)
    with pytest.raises(PlanError, match=r"predicted timeline has \d+ instructions that are not those of the plan"):
        program_of([timeline, other])
    with pytest.raises(PlanError, match="none of the timelines knows its program"):
        program_of([replace(timeline, program=None)])


def test_a_timeline_without_instructions_can_be_shown():
    timeline = simulated()
    program = replace(timeline.program, rank_start=np.zeros(3, dtype=np.int64), **{
        name: getattr(timeline.program, name)[:0]
        for name in ("op", "instance", "microbatch", "phase", "channel", "bucket")})
    empty = played_empty(program)
    out = io.StringIO()
    with redirect_stdout(out):
        print_plan(program.plan, [empty])
    assert "d0 |...." in out.getvalue()


def played_empty(program):
    from weft.simulate.timeline import make_timeline
    return make_timeline(program, start_s=np.zeros(0), end_s=np.zeros(0), kind="predicted")


def test_importing_the_package_loads_neither_rich_nor_torch():
    code = ("import sys, weft.show.plan_tables, weft.show.drawing, weft.show.html; "
            "print([name for name in ('rich', 'torch', 'numba', 'ortools', 'yaml') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
