"""Degrees by hand on the command line: the same options everywhere, old words, and one line for what cannot be."""

from __future__ import annotations

import json

import pytest

from weft.cli.degree_options import HELP, with_old_words
from weft.cli.main import main
from weft.search.common.degrees import NONE_FIXED, DegreeWords, option

SMALL = ("gpt2-tiny:layers=2", "4 x A100-80GB")


@pytest.mark.parametrize("command", ["plan", "fit", "explain"])
def test_every_command_that_plans_has_all_of_them(command, capsys):
    assert set(HELP) == set(DegreeWords.__annotations__)
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in HELP if option(name) not in text] == []
    assert not NONE_FIXED


def test_the_users_own_layout_is_planned_with_its_rates(capsys):
    assert main(["plan", *SMALL, "--batch", "16", "--pp", "2", "--dp", "2", "--tp", "1", "--microbatch-size", "2",
                 "--recompute", "none", "--zero", "0", "--precision", "bf16", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in found["strategies"]] == ["joint"]
    assert found["strategies"][0]["microbatches"] == 4
    assert all(item["setting"].startswith("stages 2 of 2x1") for item in found["tried"])
    assert found["tokens_per_s"] == pytest.approx(16 * 32 / found["step_time"])
    assert found["tokens_per_s_per_device"] == pytest.approx(found["tokens_per_s"] / 4)
    assert 0 < found["mfu"] < 1


@pytest.mark.parametrize(("arguments", "words", "note"), [
    (["plan", "gpt2", "c", "--recompute"], ["plan", "gpt2", "c", "--recompute", "full"], True),
    (["plan", "--recompute", "gpt2", "4 x A100"], ["plan", "--recompute", "full", "gpt2", "4 x A100"], True),
    (["explain", "m", "c", "--recompute", "--seed", "1"], ["explain", "m", "c", "--recompute", "full", "--seed", "1"],
     True),
    (["plan", "m", "c", "--no-recompute"], ["plan", "m", "c", "--recompute", "none"], True),
    (["plan", "m", "c", "--recompute", "none"], ["plan", "m", "c", "--recompute", "none"], False),
    (["fit", "m", "c", "--recompute", "20GiB"], ["fit", "m", "c", "--recompute", "20GiB"], False),
    (["models"], ["models"], False), ([], [], False)])
def test_a_bare_recompute_keeps_working(arguments, words, note, capsys):
    assert with_old_words(arguments) == words
    assert ("is now --recompute" in capsys.readouterr().err) == note


@pytest.mark.parametrize(("flags", "code", "message"), [
    (["--tp", "3"], 2, "weft: --tp 3 devices of one host cannot divide operators"),
    (["--pp", "3"], 2, "weft: --pp 3 is 3 devices, and the cluster has 4: try --pp 2 or 4"),
    (["--ep", "2"], 2, "weft: --ep 2 divides experts over devices, but gpt2-tiny:layers=2 has none: leave it out"),
    (["--zero", "7"], 2, "weft: --zero must be 0, 1, 2 or 3, not 7"),
    (["--deploy", "--tp", "2"], 2, "weft: --deploy chooses itself which stages are where"),
    (["--batch", "4", "--dp", "4", "--recompute=some"], 2, "weft: --recompute must be none, full, selective or")])
def test_what_cannot_be_is_one_line(flags, code, message, capsys):
    assert main(["plan", *SMALL, "--quiet", *flags]) == code
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_fit_follows_them_and_says_the_command(capsys):
    assert main(["fit", *SMALL, "--batch", "16", "--pp", "2", "--dp", "2", "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"].endswith("--pp 2 --dp 2 --out plan.json")


def test_a_plan_file_has_its_degrees_already(capsys):
    assert main(["explain", "plan.json", "--tp", "2"]) == 2
    assert "--tp is for a model with a CLUSTER after it" in capsys.readouterr().err
