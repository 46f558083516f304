"""The command line: what it prints where, its exit codes, and that it stays light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.main import main

MODEL = "gpt2-tiny:layers=2"
CLUSTER = "2 x A100-80GB"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main(["plan", MODEL, CLUSTER, "--batch", "8", "--strategy", "1f1b", "-o", str(path), "-q"]) == 0
    return path


def run_json(capsys, *arguments: object) -> object:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, code: int, *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_help_loads_nothing_heavy():
    script = ("import sys; from weft.cli.main import main; main(['--help']); "
              "print(sorted({'torch', 'ortools', 'numba', 'transformers', 'scipy', 'yaml', 'numpy'} & set(sys.modules)), "
              "file=sys.stderr)")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.strip() == "[]"
    assert "plan" in result.stdout


def test_every_command_has_help_and_json(capsys):
    commands = ["models", "profile", "plan", "simulate", "show", "check", "diff", "export", "import-order", "run",
                "schedule", "place", "shard", "cluster show", "cluster probe", "cluster from-topo"]
    for command in commands:
        capsys.readouterr()
        assert main([*command.split(), "--help"]) == 0
        text = capsys.readouterr().out
        assert "--json" in text, command


def test_models_lists_the_zoo(capsys):
    names = {item["name"] for item in run_json(capsys, "models")}
    assert {"gpt2", "gpt2-xl", "llama-7b", "llama-70b", "bert-large", "t5-base", "mt5-base", "vit-base", "swin-t", "flava",
            "resnet-50", "convnext-t", "opt-1.3b", "whisper-base", "mixtral-8x", "vgg-19", "lstm"} <= names
    assert main(["models"]) == 0
    assert "GPT-2 small" in capsys.readouterr().out


def test_plan_compares_strategies(capsys):
    result = run_json(capsys, "plan", MODEL, CLUSTER, "--batch", 8, "-q")
    rows = {row["strategy"]: row for row in result["strategies"]}
    assert set(rows) == {"single", "data-parallel", "data-parallel-by-speed", "fsdp", "gpipe", "1f1b", "1f1b-balanced",
                         "joint", "deploy"}
    assert result["step_time"] == min(row["step_time"] for row in rows.values())
    assert result["bound"] <= result["step_time"]
    assert set(rows["1f1b"]["peak_memory"]) == {"a0", "a1"}


def test_progress_goes_to_stderr_only(capsys):
    capsys.readouterr()
    assert main(["plan", MODEL, CLUSTER, "--batch", "8", "--json", "--no-deploy"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "best so far" in captured.err
    assert "bound" in captured.err


def test_a_plan_shows_checks_and_simulates_by_itself(capsys, plan_file, tmp_path):
    capsys.readouterr()
    assert main(["show", str(plan_file), "--html", str(tmp_path / "p.html")]) == 0
    text = capsys.readouterr().out
    assert "a0 |" in text
    assert "transformer" in text
    assert "<canvas" in (tmp_path / "p.html").read_text()
    assert run_json(capsys, "check", plan_file)["status"] == "ok"
    timeline, trace = tmp_path / "t.json.gz", tmp_path / "trace.json.gz"
    result = run_json(capsys, "simulate", plan_file, "-o", timeline, "--trace", trace)
    assert [item["device"] for item in result["devices"]] == ["a0", "a1"]
    assert timeline.exists()
    assert trace.exists()
    assert run_json(capsys, "show", plan_file)["format"] == "weft.plan"


@pytest.mark.parametrize("command", ["simulate", "check", "show"])
def test_a_plan_without_micro_batches_is_refused(capsys, plan_file, tmp_path, command):
    other = tmp_path / "none.json"
    other.write_text(json.dumps(json.loads(plan_file.read_text()) | {"microbatches": 0}))
    assert "microbatches (0) and model.batch (8) must be 1 or more" in fails(capsys, 2, command, other)


def test_a_chart_is_no_wider_than_anybody_can_use(capsys, plan_file):
    assert main(["show", str(plan_file), "--width", str(2**31)]) == 2
    assert "--width must be at least 1 and at most 100000" in capsys.readouterr().err


def test_half_a_character_in_a_name_is_written_as_what_it_is(capsys, plan_file, tmp_path):
    value = json.loads(plan_file.read_text())
    other, page = tmp_path / "half.json", tmp_path / "half.html"
    other.write_text(json.dumps(value | {"search": value["search"] | {"by": "me\ud800"}}))
    assert main(["show", str(other), "--html", str(page)]) == 0
    capsys.readouterr()
    assert page.read_bytes().decode()


def test_the_same_plan_twice_is_the_same_bytes(tmp_path, plan_file):
    again = tmp_path / "again.json"
    assert main(["plan", MODEL, CLUSTER, "--batch", "8", "--strategy", "1f1b", "-o", str(again), "-q"]) == 0
    assert again.read_bytes() == plan_file.read_bytes()


def test_a_graph_file_is_planned_for_inference(capsys, tmp_path):
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps({
        "format": "weft.graph", "version": 1,
        "ops": [{"name": "a", "kind": "op", "times": {"gpu": 0.5}}, {"name": "b", "kind": "op", "times": {"gpu": 0.25}}],
        "edges": [{"from": "a", "to": "b", "bytes": 1000}]}))
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({
        "format": "weft.cluster", "version": 1, "devices": [{"name": "d0", "kind": "gpu"}, {"name": "d1", "kind": "gpu"}],
        "links": [{"from": "d0", "to": "d1", "bandwidth": "1GB/s"}]}))
    result = run_json(capsys, "plan", graph, cluster, "--batch", 4, "--mode", "inference", "-q", "--microbatches", 4)
    rows = {row["strategy"]: row for row in result["strategies"]}
    assert rows["single"]["step_time"] == pytest.approx(3.0)
    assert rows["gpipe"]["step_time"] == pytest.approx(2.25 + 1e-6)
    assert "use --mode inference" in fails(capsys, 2, "plan", graph, cluster, "--batch", 4, "-q")


def test_a_users_file_is_planned(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\n\ndef tiny(batch=4):\n    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))\n"
                    "    class Loss(torch.nn.Module):\n        def __init__(self):\n            super().__init__()\n            self.net = net\n"
                    "        def forward(self, x):\n            return self.net(x).square().mean()\n    return Loss(), (torch.randn(batch, 4),)\n")
    plan = tmp_path / "plan.json"
    assert run_json(capsys, "plan", f"{file}:tiny", CLUSTER, "--batch", 8, "-q", "-o", plan)["best"]
    assert "give it as well (--model)" in fails(capsys, 2, "show", plan)
    assert run_json(capsys, "check", plan, "--model", f"{file}:tiny")["status"] == "ok"


BAD = [
    (2, ["plan", "gpt3", CLUSTER], "no model 'gpt3'"),
    (2, ["plan", MODEL, "nowhere.yaml"], "no file 'nowhere.yaml'"),
    (2, ["plan", MODEL, "4 x Q100"], "Q100"),
    (2, ["plan", MODEL, CLUSTER, "--batch", "10", "--microbatches", "4"], "cannot be divided into 4 equal micro-batches"),
    (2, ["plan", MODEL, CLUSTER, "--mode", "both"], "--mode must be one of training, inference"),
    (2, ["plan", MODEL, CLUSTER, "--dtype", "int8"], "--dtype must be one of"),
    (2, ["plan", MODEL, CLUSTER, "--strategy", "magic"], "there is no strategy 'magic'"),
    (2, ["plan", MODEL, CLUSTER, "--profile", "none.sqlite"], "no profile store"),
    (2, ["plan", MODEL], "Missing argument"),
    (2, ["plan", MODEL, CLUSTER, "--batsh", "3"], "No such option"),
    (2, ["show", "nothing.json"], "no file 'nothing.json'"),
    (2, ["cluster", "show", "80G x A100"], "80G"),
    (3, ["plan", "llama-7b:layers=12,seq=64", "2 x T4", "--batch", "2", "-q"], "too little"),
]


@pytest.mark.parametrize(("code", "arguments", "message"), BAD, ids=[" ".join(item[1]) for item in BAD])
def test_bad_input_gives_one_message_and_its_code(capsys, code, arguments, message):
    text = fails(capsys, code, *arguments)
    assert message in text
    assert "Traceback" not in text


def test_a_plan_for_another_model_or_cluster_is_refused(capsys, plan_file):
    text = fails(capsys, 2, "check", plan_file, "--model", "gpt2-tiny:layers=3")
    assert "the plan was made for another model" in text
    text = fails(capsys, 2, "check", plan_file, "--cluster", "2 x V100-16GB")
    assert "the plan was made for another cluster" in text


def test_a_failed_write_loses_nothing(capsys, tmp_path):
    folder = tmp_path / "taken"
    folder.mkdir()
    assert "cannot write" in fails(capsys, 2, "plan", MODEL, CLUSTER, "--batch", "8", "-q", "--strategy", "single", "-o", folder)
    assert [*tmp_path.iterdir()] == [folder]


def test_ctrl_c_before_there_is_a_plan_is_said(capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.planning.make.search_plans", interrupted)
    assert "weft: interrupted" in fails(capsys, 130, "plan", MODEL, CLUSTER)


def test_too_little_memory_on_this_machine_is_said(capsys, monkeypatch, tmp_path):
    def refuse(*args, **options):
        raise MemoryError

    path = tmp_path / "plan.json"
    path.write_text("{}")
    monkeypatch.setattr("weft.cli.plan_commands.load_plan", refuse)
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err == \
        "weft: this machine has too little memory for the command: free some, or try a smaller input\n"
