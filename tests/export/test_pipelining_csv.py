"""The pipelining CSV: what is written, what is read back, and that everything wrong is found with its place."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tests.run.plans import greedy_order
from tests.worlds import chain_graph, plain_cluster, plan_of
from weft.base.errors import PlanError
from weft.cli.main import main
from weft.export.pipelining_csv import order_from_csv, order_to_csv, parse_csv, runtime_notes, schedule_to_csv, to_csv
from weft.plan.check import check_plan
from weft.plan.lower import lower
from weft.plan.orders import gpipe, interleaved, one_f_one_b
from weft.plan.plan import GradientExchange, Replica, load_plan
from weft.search.schedule.problem import Block, ScheduleProblem
from weft.search.schedule.schedule import replay

GRAPH = chain_graph(4)


def pipeline(order, devices, microbatches, **options):
    groups = [[op] for op in range(len(devices) - 1)] + [list(range(len(devices) - 1, 4))]
    return plan_of(GRAPH, groups, order=order, devices=devices, microbatches=microbatches, **options)


def two_stages(microbatches=2):
    return pipeline(one_f_one_b(2, microbatches), [0, 1], microbatches)


VALID = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def refused(text, plan=None):
    with pytest.raises(PlanError) as caught:
        parse_csv(text) if plan is None else order_from_csv(plan, text)
    return str(caught.value)


def test_the_text_of_a_plan():
    assert to_csv(two_stages()) == VALID
    assert to_csv(pipeline(interleaved(2, 2, 2), [0, 1, 0, 1], 2)).splitlines()[1].startswith("1F0,1F1,3F0,3F1,3B0")


@pytest.mark.parametrize(("order", "devices", "microbatches"), [
    (gpipe(4, 3), [0, 1, 2, 3], 3), (one_f_one_b(3, 7), [0, 1, 2], 7), (interleaved(2, 2, 4), [0, 1, 0, 1], 4),
    (greedy_order([0, 1, 1, 0], 5, split=True), [0, 1, 1, 0], 5), (one_f_one_b(1, 1), [0], 1)])
def test_written_and_read_again_is_the_same_plan(order, devices, microbatches):
    plan = pipeline(order, devices, microbatches)
    text = to_csv(plan)
    assert parse_csv(text, num_ranks=max(devices) + 1) == order
    again = order_from_csv(plan, text)
    assert again.order == plan.order
    assert to_csv(again) == text
    lower(again, GRAPH)


def test_another_order_replaces_that_of_the_plan():
    plan = replace(two_stages(), search=replace(two_stages().search, step_time=1.0, bound=0.5, status="optimal"))
    changed = order_from_csv(plan, order_to_csv(greedy_order([0, 1], 2, split=True), num_microbatches=2))
    assert changed.order["d1"] == ("s1:F:0", "s1:I:0", "s1:F:1", "s1:I:1", "s1:W:0", "s1:W:1")
    assert (changed.search.by, changed.search.step_time, changed.search.bound) == ("pytorch-csv", None, None)
    assert changed.search.status == "heuristic"
    assert check_plan(changed, GRAPH, plain_cluster(2)).num_ranks == 2


def test_times_follow_the_phases_in_use():
    plan = two_stages()
    stages = tuple(replace(stage, replicas=(replace(stage.replicas[0], times={"F": 1e-3, "B": 4e-3}),)) for stage in plan.stages)
    plan = replace(plan, stages=stages)
    assert order_from_csv(plan, VALID).stages == stages
    split = order_from_csv(plan, order_to_csv(greedy_order([0, 1], 2, split=True), num_microbatches=2))
    assert split.stages[0].replicas[0].times == {"F": 1e-3, "B": 4e-3, "I": 2e-3, "W": 2e-3}
    halves = tuple(replace(stage, replicas=(replace(stage.replicas[0], times={"F": 1.0, "I": 2.0, "W": 3.0}),)) for stage in stages)
    assert order_from_csv(replace(plan, stages=halves), VALID).stages[1].replicas[0].times["B"] == 5.0


@pytest.mark.parametrize("text", [
    VALID.replace("\n", "\r\n"), VALID.replace(",", " , "), VALID.rstrip("\n"), VALID.replace("1F0", ",,1F0,"),
    VALID.replace("0F1", '"0F1"'),
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n",
    "0F0,0F1,0B0,0B1\n1F0,1B0,(1F1;1B1)OVERLAP_F_B\n", "0F0,0F1,0B0,0B1\n1F0,1B0,( 1F1; 1B1 )OVERLAP_F_B\n"])
def test_other_ways_to_write_the_same(text):
    assert parse_csv(text) == parse_csv(VALID)
    assert order_from_csv(two_stages(), text) == order_from_csv(two_stages(), VALID)


BAD_TEXT = [
    ("", "has no actions"),
    ("\n\n", "has no actions"),
    ("0F0,0B0,0X0\n", "row 1, column 3 (rank 0): '0X0' is not an action; write the stage, F, B, I or W"),
    ("0F0,0B0,0B\n", "column 3 (rank 0): '0B' is not an action"),
    ("0F0,0B0 x\n", "column 2 (rank 0): '0B0 x' is not an action"),
    ("0F0,0B0junk\n", "'0B0junk' is not an action"),
    ("0F00,0B0\n", "'0F00' is not an action"),
    ("-1F0,0B0\n", "'-1F0' is not an action"),
    ("0F\u0661,0B1\n", "is not an action"),
    ("\ufeff0F0,0B0\n", r"column 1 (rank 0): '\ufeff0F0' is not an action"),
    ("0F9999999999999,0B0\n", "is not an action"),
    ("0F0;0B0\n", "'0F0;0B0' is not an action"),
    ("(0F0;0F1)OVERLAP_F_B,0B0,0B1\n", "column 1 (rank 0): '(0F0;0F1)OVERLAP_F_B' is not an action"),
    ("(0B0;0F1)OVERLAP_F_B\n", "is not an action"),
    ("(0F0;0B0)\n", "is not an action"),
    ("((0F0;0B0)OVERLAP_F_B;0B0)OVERLAP_F_B\n", "is not an action"),
    ("0F0,0UNSHARD1,0B0\n", "'0UNSHARD1' is not an action"),
    ("0F0,0SEND_F,0B0\n", "'0SEND_F' is not an action"),
    ('0F0,"0B0\n', "cannot be read at line 1: unexpected end of data"),
    ("0F0,0B0\n1F0,1B0,0F0\n", "row 2, column 3 (rank 1): '0F0' is on rank 1, but stage 0 belongs to rank 0"),
    ("0F0,0F0,0B0\n", "row 1, column 2 (rank 0): '0F0' is there already, at row 1, column 1 (rank 0)"),
    ("0F0,0B0,0F1\n", "row 1 (rank 0): '0B1' is missing, although '0F1' is at row 1, column 3 (rank 0)"),
    ("0F0,0B0,0B1\n", "row 1, column 3 (rank 0): '0B1' is for micro-batch 1, but there are 1 micro-batches, from 0 to 0"),
    ("0F0,0B0\n2F0,2B0\n", "row 2, column 1 (rank 1): '2F0' is for stage 2, but there are 2 stages, from 0 to 1"),
    ("0F0,0B0\n2F0,2B0\n", "no row runs stage 1, although there are 2 stages"),
    ("0F0,0B0,0I0,0W0\n", "row 1, column 3 (rank 0): '0I0' beside '0B0' at row 1, column 2 (rank 0): a backward is either B"),
    ("0F0,0W0,0B0\n", "row 1, column 2 (rank 0): '0W0' beside '0B0'"),
    ("0F0,0I0\n", "row 1 (rank 0): '0W0' is missing"),
    ("0F0,0W0\n", "row 1 (rank 0): '0I0' is missing"),
    ("0B0,,0F0\n", "row 1, column 1 (rank 0): '0B0' stands before '0F0', which is at row 1, column 3 (rank 0)"),
    ("0F0,0W0,0I0\n", "row 1, column 2 (rank 0): '0W0' stands before '0I0'"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "row 1, column 2 (rank 0): '0B0' waits for '1B0' at row 2, column 3 (rank 1), "
     "which never comes: the ranks block each other"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "row 2, column 2 (rank 1): '1F1' waits for '0F1' at row 1, column 3 (rank 0)"),
    ("1F0,1B0,0F0,0B0\n", "row 1, column 1 (rank 0): '1F0' waits for '0F0' at row 1, column 3"),
    ("0F0,0SEND_F0,0B0\n", "'0SEND_F0' has no partner: there is no stage 1 on another rank"),
    ("0F0,1RECV_F0,1F0,1B0,0B0\n", "'1RECV_F0' has no partner: there is no stage 0 on another rank"),
    ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "row 2 (rank 1): '1RECV_F0' is missing, although there are other sends or receives"),
    ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "row 1, column 1 (rank 0): '0SEND_F0' stands before '0F0' at"),
    ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1I0,1SEND_B0,1W0\n", "column 2 (rank 1): '1RECV_F0' stands behind '1F0' at"),
    ("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "'0SEND_F0' is there already"),
    ("0F0,1UNSHARD,0B0\n1F0,1B0\n", "row 2, column 1 (rank 1): '1F0' is on rank 1, but stage 1 belongs to rank 0"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXT)
def test_a_text_that_is_wrong_is_refused_with_its_place(text, message):
    assert message in refused(text)


BAD_FOR_TWO_STAGES = [
    (VALID + "\n", "has 3 rows, but the plan has 2 devices (d0, d1): it needs one row for each"),
    (VALID.splitlines()[0], "has 1 rows, but the plan has 2 devices"),
    ("\n".join(reversed(VALID.splitlines())), "row 1, column 1 (rank 0 'd0'): '1F0' is on rank 0, but stage 1 belongs to rank 1"),
    (VALID.replace("0F1", "0F2").replace("0B1", "0B2"), "row 1, column 2 (rank 0 'd0'): '0F2' is for micro-batch 2, but there are 2"),
    (VALID.replace("1", "2"), "'2F0' is for stage 2, but there are 2 stages, from 0 to 1"),
    ("0F0,0B0\n1F0,1B0\n", "row 1 (rank 0 'd0'): '0F1' is missing"),
    ("0F0,0F1,0B0,0B1\n\n", "row 2 (rank 1 'd1'): '1B1' is missing"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FOR_TWO_STAGES)
def test_an_order_that_does_not_fit_the_plan_is_refused(text, message):
    assert message in refused(text, two_stages())


def test_all_problems_are_listed():
    with pytest.raises(PlanError) as caught:
        parse_csv("0F0,0F0,0B0,0F1\n1F0,0F0,1I0\n")
    assert len(caught.value.problems) == 6
    assert str(caught.value).startswith("the schedule CSV has 6 problems: \n  - row 1, column 2")


PYTORCH_1F1B = """\
0F0,0F1,0F2,,,,,,,0F3,0B0,0F4,0B1,,0B2,,0B3,,0B4,0REDUCE_GRAD
,1F0,1F1,,,,,1F2,1B0,1F3,1B1,1F4,1B2,,1B3,,1B4,1REDUCE_GRAD
,,2F0,,,2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3,,2B4,2REDUCE_GRAD
,,,3F1,3B0,3F2,3B1,3F3,3B2,3F4,3B3,3F5,3B4,3REDUCE_GRAD
"""


def test_pytorchs_1f1b_list_whose_last_row_counts_from_one():
    """``Schedule1F1B._get_pipeline_order`` of torch 2.13 numbers the last rank's forwards from 1."""
    plan = pipeline(one_f_one_b(4, 5), [0, 1, 2, 3], 5)
    for text in (refused(PYTORCH_1F1B), refused(PYTORCH_1F1B, plan)):
        assert "has 2 problems" in text
        assert "row 4, column 12 (rank 3" in text
        assert "'3F5' is for micro-batch 5, but there are 5 micro-batches, from 0 to 4" in text
        assert "'3F0' is missing, although '3B0' is at row 4, column 5 (rank 3" in text
    mended = PYTORCH_1F1B
    for index in range(5):
        mended = mended.replace(f"3F{index + 1},", f"3F{index},")
    assert order_from_csv(plan, mended).order == plan.order


def test_plans_that_the_format_cannot_say():
    plan = two_stages()
    first, second = plan.stages
    cases = {
        "stages[1] ('s1') runs on 2 devices (d0, d1): it must be on one":
            replace(plan, stages=(first, replace(second, replicas=(Replica(devices=("d0", "d1"), mesh={"tensor": 2}),)))),
        "stages[0] ('s0') has 2 replicas: a stage must be on one device":
            replace(plan, stages=(replace(first, replicas=(Replica(devices=("d0",), share=0.5), Replica(devices=("d1",), share=0.5))),
                                  second)),
        "stages[0] ('s0') handles only the micro-batches [1] of 2 (opposite pipelines?)":
            replace(plan, stages=(replace(first, microbatches=(1,)), second)),
        "stages[0] ('s0') is on 'd9', which is not in cluster.devices":
            replace(plan, stages=(replace(first, replicas=(Replica(devices=("d9",)),)), second)),
        "model.mode is 'inference', but PyTorch accepts only": replace(plan, model=replace(plan.model, mode="inference")),
        "at least one stage and one micro-batch": replace(plan, stages=())}
    for message, item in cases.items():
        for action in (to_csv, lambda plan: order_from_csv(plan, VALID)):
            with pytest.raises(PlanError) as caught:
                action(item)
            assert message in str(caught.value)
    assert to_csv(replace(plan, stages=(replace(first, microbatches=(1, 0)), second))) == VALID


def test_plans_whose_order_is_wrong_are_not_written():
    plan = two_stages()
    cases = {
        "order.d0[1]: 's0:G:1' is not of the form": {"d0": ("s0:F:0", "s0:G:1")},
        "order.d0[0]: 's9:F:0' is not of the form": {"d0": ("s9:F:0",)},
        "order: 'd9' is not in cluster.devices": {"d9": ()},
        "order.d1: '1F0' is missing": {"d1": ()},
        "order.d1[1]: '1F0' is there already, at order.d1[0]": {"d1": ("s1:F:0", "s1:F:0")},
        "order.d1[0]: '1F1' waits for '0F1' at order.d0[2]": {"d0": ("s0:F:0", "s0:B:0", "s0:F:1", "s0:B:1"),
                                                             "d1": ("s1:F:1", "s1:B:1", "s1:F:0", "s1:B:0")}}
    for message, order in cases.items():
        with pytest.raises(PlanError) as caught:
            to_csv(replace(plan, order={**plan.order, **order}))
        assert message in str(caught.value)
    with pytest.raises(PlanError, match=r"cluster.devices\[2\]: 'd2' runs no stage"):
        to_csv(pipeline(one_f_one_b(2, 2), [0, 1], 2, num_devices=3))


def test_an_idle_device_has_an_empty_row():
    plan = pipeline(one_f_one_b(2, 2), [0, 1], 2, num_devices=3)
    assert order_from_csv(plan, VALID + "\n").order == plan.order
    assert "on rank 2, but stage 0 belongs to rank 0" in refused(VALID + "0F0\n", plan)


def test_a_plan_with_more_micro_batches_than_cells_is_refused_at_once():
    assert "there are 8 actions for 2000000000 micro-batches" in refused(VALID, replace(two_stages(), microbatches=2_000_000_000))


def test_notes_on_what_pytorch_does_not_do():
    plan = two_stages()
    assert runtime_notes(lower(plan, GRAPH)) == []
    graph = chain_graph(3, skips=((0, 2),), tied=((0, 2),))
    plan = plan_of(graph, [[0], [1], [2]], order=gpipe(3, 2), devices=[0, 1, 2], microbatches=2, recompute=True)
    assert isinstance(plan.gradients[0], GradientExchange)
    notes = runtime_notes(lower(plan, graph))
    assert [note[:30] for note in notes] == ["stages[2] ('s2') reads from st", "1 parameters are on several de", "the plan recomputes activation"]
    backwards = plan_of(graph, [[2], [1], [0]], order=gpipe(3, 2), devices=[0, 1, 2], microbatches=2)
    with pytest.raises(PlanError, match=r"stages\[0\] \('s0'\) reads from stages\[1\] \('s1'\): PyTorch runs stages in the order"):
        runtime_notes(lower(backwards, graph))


def chain_problem(*, shared: bool = False) -> ScheduleProblem:
    return ScheduleProblem(device_names=("a", "b"), device_memory=(None, None), blocks=(
        Block(name="f0", devices=(0,), time=1), Block(name="f1", devices=(0, 1) if shared else (1,), time=1, after=(0,)),
        Block(name="b1", devices=(1,), time=2, after=(1,)), Block(name="b0", devices=(0,), time=2, after=(2,))))


ROLES = {0: (0, "F"), 1: (1, "F"), 2: (1, "B"), 3: (0, "B")}


def test_a_schedule_is_written_by_the_roles_of_its_blocks():
    schedule = replay(chain_problem(), 2, [[(0, 0), (0, 1), (3, 0), (3, 1)], [(1, 0), (2, 0), (1, 1), (2, 1)]])
    assert schedule_to_csv(schedule, ROLES) == VALID
    for message, roles in {
            "block 'b0' has no role": {0: (0, "F"), 1: (1, "F"), 2: (1, "B")},
            "block 'f0' has the phase 'G'": {**ROLES, 0: (0, "G")},
            "blocks 'f0' and 'f1' are both F of stage 0": {**ROLES, 1: (0, "F")},
            "'0B0' is on rank 1, but stage 0 belongs to rank 0": {**ROLES, 2: (0, "B"), 3: (1, "B")},
            "rank 0, action 1: '1F1' waits for '0F1'": {0: (1, "F"), 3: (1, "B"), 1: (0, "F"), 2: (0, "B")}}.items():
        with pytest.raises(PlanError) as caught:
            schedule_to_csv(schedule, roles)
        assert message in str(caught.value)


def test_a_schedule_with_blocks_on_several_devices_is_not_written():
    schedule = replay(chain_problem(shared=True), 1, [[(0, 0), (1, 0), (3, 0)], [(1, 0), (2, 0)]])
    with pytest.raises(PlanError, match=r"block 'f1' is on several devices \(a, b\)"):
        schedule_to_csv(schedule, ROLES)


def test_hostile_texts_are_refused_or_mean_what_they_say():
    """Mutated texts never raise anything but PlanError, and what is accepted is an order that runs."""
    plan = pipeline(greedy_order([0, 1, 1, 0], 3, split=True), [0, 1, 1, 0], 3)
    valid = to_csv(plan)
    rng = random.Random(0)
    accepted = refusals = 0
    for _ in range(600):
        text = mutate(valid, rng)
        try:
            changed = order_from_csv(plan, text)
        except PlanError:
            refusals += 1
            continue
        accepted += 1
        lower(changed, GRAPH)
        cells = [[cell.strip(" \t\r\"") for cell in line.split(",")] for line in text.rstrip("\n").split("\n")]
        assert [",".join(cell for cell in row if cell) for row in cells] == to_csv(changed).splitlines()
    assert accepted > 30
    assert refusals > 300


JUNK = ['"', ",", "\n", "\r", "\0", " ", "(", ")", ";", "F", "W", "B", "I", "0", "9", "-", "\u0660", "\ud800", "0F0", "3B2", "1SEND_F0",
        "2UNSHARD", "(0F0;1B0)OVERLAP_F_B", "0F99999999999999999999", "=1+1", "'", "\x1b[2J", "9" * 5000, "(" * 5000]


def mutate(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind, at = rng.randrange(6), rng.randrange(len(text) + 1)
        if kind == 0:
            text = text[:at] + rng.choice(JUNK) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + rng.choice([1, 2, 4]):]
        elif kind == 2:
            text = text[:at] + rng.choice(JUNK) + text[at + 1:]
        elif kind == 3:
            text = text[:at]
        else:
            text = change_cells(text, rng)
    return text


def change_cells(text: str, rng: random.Random) -> str:
    """Swap two neighbouring cells, or copy, move or empty one, or exchange two rows."""
    rows = [line.split(",") for line in text.split("\n")]
    row = rng.choice(rows)
    at = rng.randrange(len(row))
    kind = rng.randrange(6)
    if kind <= 1 and at + 1 < len(row):
        row[at], row[at + 1] = row[at + 1], row[at]
    elif kind == 2:
        row.insert(rng.randrange(len(row)), row[at])
    elif kind == 3:
        rng.choice(rows).append(row.pop(at))
    elif kind == 4:
        row.insert(at, rng.choice(["", " ", "\t"]))
    else:
        rng.shuffle(rows)
    return "\n".join(",".join(row) for row in rows)


def saved_plan(folder):
    path = folder / "plan.json"
    assert main(["plan", "gpt2-tiny:layers=2", "2 x A100-80GB", "--batch", "8", "--microbatches", "4", "--strategy", "gpipe",
                 "-q", "-o", str(path)]) == 0
    return path


def test_the_command_line_writes_and_reads(tmp_path, capsys):
    plan, other, text = saved_plan(tmp_path), tmp_path / "other.json", tmp_path / "s.csv"
    capsys.readouterr()
    assert main(["export", str(plan)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1] == "1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3"
    assert "PyTorch does not add up their gradients" in captured.err
    assert main(["export", str(plan), "-o", str(text), "--json", "-q"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows"] == text.read_text().splitlines()
    assert captured.err == ""
    text.write_text(order_to_csv(one_f_one_b(2, 4), num_microbatches=4))
    assert main(["import-order", str(plan), str(text), "-o", str(other), "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "ok"
    assert load_plan(other).order["a1"][:3] == ("s1:F:0", "s1:B:0", "s1:F:1")
    assert main(["check", str(other)]) == 0
    for content, message in ((b"0F0\n", "has 1 rows"), (b"\xff\xfe", "is not text in UTF-8"), (None, "no file")):
        text.write_bytes(content) if content is not None else text.unlink()
        capsys.readouterr()
        assert main(["import-order", str(plan), str(text), "-o", str(tmp_path / "no.json")]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
    assert not (tmp_path / "no.json").exists()
    assert main(["export", str(plan), "--format", "svg"]) == 2
    assert "--format must be one of pytorch-csv" in capsys.readouterr().err
