"""Predicted against measured training plans (benchmarks/measured.py), on small files made here."""

import copy
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.measured import main, rank_correlation
from benchmarks.measured_file import link_rate, load_measured
from benchmarks.measured_predict import (
    CONNECTION_BYTES,
    CONTEXT_BYTES,
    in_flight,
    make_lanes,
    pipeline_seconds,
    predict,
)
from weft.base.errors import InputError

GB, MB = 1e9, 1e6
FLAT = [[0.0, 0.0, 1.0], 1 * GB]
"""A link of 1 GB/s for all messages."""
INSIDE = [[0.0, 0.0, 40.0], 40 * GB]


def times(scale, num_layers=8):
    return {str(layer): [1.0 * scale, 2.0 * scale, 0.25 * scale] for layer in range(num_layers)}


def sizes(tensor, num_layers=8):
    return {str(layer): {"params_bytes": 8 * MB / tensor, "act_mem_bytes": 3 * MB, "act_output_bytes": 4 * MB,
                         "act_input_bytes": 1.0} for layer in range(num_layers)}


def content(*rows):
    """Two kinds of GPUs: ``fast`` in nodes of 4, ``slow`` (three times slower) alone in their nodes."""
    return {
        "source": "made here", "note": "", "model": "layers", "rows": list(rows),
        "profile": {"fast": {"1": {"1": times(1.0), "2": times(0.5)}, "2": {"1": times(1.5)}},
                    "slow": {"1": {"1": times(3.0)}}},
        "sizes": {"1": sizes(1), "2": sizes(2)},
        "gpus": {"fast": {"memory_bytes": 80 * GB, "per_node": 4}, "slow": {"memory_bytes": 16 * GB, "per_node": 1}},
        "intra_node": {"fast": {"2": INSIDE}},
        "inter_node": {"fast>fast": FLAT, "fast>slow": FLAT, "slow>slow": FLAT},
    }


def row(*stages, batch=4, micro_batch=1, real=1.0, name="plan"):
    return {"name": name, "global_batch": batch, "micro_batch": micro_batch, "real_iteration_s": real,
            "real_peak_bytes": 1e9,
            "stages": [{"layers": layers, "replicas": [{"gpu": gpu, "tensor": tensor} for gpu, tensor in replicas]}
                       for layers, replicas in stages]}


def load_raw(raw):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        path.write_text(json.dumps(raw))
        return load_measured(path)


def load(*rows):
    return load_raw(content(*rows))


def predicted(*stages, **options):
    file = load(row(*stages, **options))
    return predict(file, file.rows[0])


def test_one_layer_on_one_gpu_is_the_sum_of_its_profile():
    found = predicted(([0], [("fast", 1)]), batch=3)
    assert found.pipeline_s == pytest.approx(3 * (1 + 2))
    assert (found.gradients_s, found.update_s) == (0.0, 0.25)
    assert found.peak_bytes == pytest.approx(4 * 8 * MB + 3 * MB + 2 * 3 * MB + CONTEXT_BYTES)


@pytest.mark.parametrize(("num_stages", "count"), [(2, 1), (2, 5), (4, 3), (4, 8)])
def test_equal_stages_without_transfers_take_the_closed_form_of_1f1b(num_stages, count):
    raw = content(row(*(([stage], [("fast", 1)]) for stage in range(num_stages)), batch=count))
    for layer in raw["sizes"]["1"].values():
        layer["act_output_bytes"] = 0.0
    file = load_raw(raw)
    assert predict(file, file.rows[0]).pipeline_s == pytest.approx((count + num_stages - 1) * 3.0)


def test_a_transfer_holds_both_stages():
    # slow GPUs are alone in their nodes: 4 MB at 1 GB/s is 4 ms, there and back, for each micro-batch
    found = predicted(([0], [("slow", 1)]), ([1], [("slow", 1)]), batch=6)
    assert found.pipeline_s == pytest.approx((6 + 1) * 9.0 + 6 * 2 * 0.004, rel=1e-4)


def test_the_slowest_replica_sets_the_pace_with_two_kinds_of_gpus():
    mixed = predicted(([0, 1], [("fast", 1), ("slow", 1)]), batch=8)
    slow = predicted(([0, 1], [("slow", 1), ("slow", 1)]), batch=8)
    fast = predicted(([0, 1], [("fast", 1), ("fast", 1)]), batch=8)
    assert mixed.pipeline_s == slow.pipeline_s == 4 * 2 * 9.0
    assert fast.pipeline_s == 4 * 2 * 3.0
    assert mixed.gradients_s == pytest.approx(2 * 0.5 * 16 * MB / GB)  # over the link between the two nodes
    assert fast.gradients_s == pytest.approx(2 * 0.5 * 16 * MB / (40 * GB))  # inside one node
    assert mixed.update_s == 2 * 0.75


def test_stages_of_different_tensor_degree_and_length():
    found = predicted(([0, 1, 2], [("fast", 2)] * 2), ([3], [("slow", 1), ("fast", 1)]), batch=4)
    assert found.pipeline_s >= 2 * 9.0 + 3 * 1.5  # the slow lane, and what comes before and after it
    assert found.pipeline_s < 2 * 9.0 + 3 * 1.5 + 0.1
    assert found.gradients_s == pytest.approx(2 * 0.5 * 8 * MB / GB)


def test_micro_batches_in_flight_fall_along_the_pipeline():
    stages = [([stage], [("fast", 1)] * 2) for stage in range(4)]
    assert in_flight(load(row(*stages, batch=20)).rows[0]) == [4, 3, 2, 1]
    uneven = [([0], [("fast", 1)]), ([1], [("fast", 1)] * 4), ([2], [("fast", 1)] * 2)]
    assert in_flight(load(row(*uneven, batch=20)).rows[0]) == [9, 2, 1]


def test_the_first_stage_keeps_most_activations():
    alone = predicted(([0], [("slow", 1)]), batch=6).peak_bytes
    first = predicted(([0], [("slow", 1)]), ([1], [("slow", 1)]), batch=6).peak_bytes
    # one more micro-batch, two copies of the boundary, and four communicators of two channels to other nodes
    assert first - alone == pytest.approx(3 * MB + 2 * 4 * MB + 4 * 2 * 3 * CONNECTION_BYTES)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_any_number_of_micro_batches_runs_to_the_end(num_replicas):
    for num_stages in range(1, 6):
        for count in range(1, 9):
            stages = [([stage], [("slow", 1)] * num_replicas) for stage in range(num_stages)]
            found = predicted(*stages, batch=count)
            per_replica = math.ceil(count / num_replicas)
            most = 0.004 * 4 * (per_replica + num_stages)
            assert 0 <= found.pipeline_s - (per_replica + num_stages - 1) * 9.0 <= most


def test_any_numbers_of_replicas_run_to_the_end():
    source = random.Random(7)
    for _ in range(40):
        counts = [source.randint(1, 4) for _ in range(source.randint(1, 5))]
        stages = [([stage], [(source.choice(["fast", "slow"]), 1) for _ in range(count)])
                  for stage, count in enumerate(counts)]
        file = load(row(*stages, batch=source.randint(1, 13)))
        lanes = make_lanes(file, file.rows[0])
        seconds = pipeline_seconds(file, file.rows[0], lanes, in_flight(file.rows[0]))
        num = file.rows[0].num_microbatches
        busiest = max(len(range(index, num, len(stage))) * (lane.forward_s + lane.backward_s)
                      for stage in lanes for index, lane in enumerate(stage))
        assert busiest <= seconds <= num * sum(9.0 + 0.02 for _ in lanes)


def test_link_rates_stay_between_the_bounds_of_their_fit():
    fit = ((-0.2, 3.0, 10.0), 20 * GB)
    assert link_rate(fit, 2**20) == 10 * GB
    assert link_rate(fit, 64 * MB) == 20 * GB
    assert link_rate(((-1.0, 8.0, 0.0), 100 * GB), 2**14 * MB) == pytest.approx(16 * GB), "past the top it does not fall"
    assert link_rate(((0.5, 0.0, 1.0), 100 * GB), 1.0) <= 1 * GB


def test_smaller_messages_never_take_longer():
    """A parabola that is negative below a few hundred kB."""
    for fit in (((-0.2, 3.0, 10.0), 20 * GB), ((-0.0858, 1.8, 6.2), 23 * GB), ((0.3, 1.0, 2.0), 50 * GB)):
        sizes = [2**power for power in range(38)]
        seconds = [size / link_rate(fit, size) for size in sizes]
        assert all(one <= other * (1 + 1e-9) for one, other in itertools.pairwise(seconds)), fit


def test_rows_for_which_something_is_missing_are_left_out(tmp_path, capsys):
    good, bad, apart = (row(([0], [(gpu, tensor)]), name=name) for gpu, tensor, name in
                        (("fast", 1, "good"), ("fast", 64, "bad"), ("slow", 1, "apart")))
    apart["stages"] += row(([1], [("fast", 1)]))["stages"]
    del good["name"]
    raw = content(good, bad, apart)
    raw["inter_node"] = None
    raw["intra_node"]["slow"] = {"2": [[0, 0, 0], 0]}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(raw))
    assert main([str(path), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert [item["name"] for item in result["rows"]] == ["row 0"]
    assert list(result["summary"]["skipped"]) == ["bad", "apart"]
    assert "bad is left out" in captured.err


def test_micro_batches_between_profiled_ones_are_interpolated():
    raw = content(row(([0], [("fast", 1)]), micro_batch=3, batch=3))
    raw["profile"]["fast"] = {size: {"1": {"0": times}} for size, times in
                              (("1", [1.0, 2.0, 7.0]), ("2", [1.5, 3.0, 7.0]), ("4", [2.5, 5.0, 7.0]))}
    file = load_raw(raw)
    replica = file.rows[0].stages[0].replicas[0]
    assert file.layer_times(replica, 3, 0) == (2.0, 4.0, 7.0)
    assert file.layer_times(replica, 8, 0) == (4.5, 9.0, 7.0)
    assert file.layer_times(replica, 2, 0) == (1.5, 3.0, 7.0)
    raw["profile"]["fast"] = {"4": {"1": {"0": [2.0, 4.0]}}}
    assert load_raw(raw).layer_times(replica, 2, 0) == (1.0, 2.0, 0.0)


def test_sizes_may_be_numbers_of_floats():
    raw = content(row(([0], [("fast", 1)])))
    raw["sizes"]["1"]["0"] = {"params_floats": 10, "act_mem_floats": 20, "act_output_floats": 30}
    file = load_raw(raw)
    found = file.layer_sizes(file.rows[0].stages[0].replicas[0], 0)
    assert (found.params_bytes, found.act_mem_bytes, found.act_output_bytes) == (40, 80, 120)


def test_rank_correlation_shares_the_ranks_of_equal_values():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9))
    assert rank_correlation([1], [1]) is None


def test_json_gives_rows_and_summary(tmp_path, capsys):
    path = tmp_path / "measured.json"
    plans = [row(([0], [("fast", 1)]), real=12.25, name="exact"), row(([0], [("slow", 1)]), real=73.5, name="half")]
    path.write_text(json.dumps(content(*plans)))
    assert main([str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in result["rows"]] == ["exact", "half"]
    assert [item["time_error"] for item in result["rows"]] == pytest.approx([0.0, -0.5])
    assert result["summary"]["mean_time_error"] == pytest.approx(0.25)
    assert result["summary"]["rank_correlation"] == 1.0
    assert main([str(path)]) == 0
    assert "-50.0 %" in capsys.readouterr().out


def test_plans_that_were_not_measured_are_predicted_only(tmp_path, capsys):
    path = tmp_path / "measured.json"
    plan = row(([0], [("fast", 1)]))
    del plan["real_iteration_s"], plan["real_peak_bytes"]
    path.write_text(json.dumps(content(plan)))
    assert main([str(path)]) == 0
    assert main([str(path), "--json"]) == 0
    assert '"mean_time_error": null' in capsys.readouterr().out


def test_unknown_fields_are_named(caplog):
    raw = content({**row(([0], [("fast", 1)])), "zone": "east"})
    load_raw(raw)
    assert "rows.zone" in caplog.text


def _broken(change):
    raw = content(row(([0, 1], [("fast", 2)]), ([2], [("slow", 1)])))
    change(raw)
    return raw


BROKEN = {
    "no tensor degree": (lambda raw: raw["profile"]["fast"]["1"].pop("2"),
                         "rows[0] (plan): stage 0: profile of fast has no tensor degree 2 (it has 1)"),
    "no micro-batches": (lambda raw: raw["profile"]["fast"].update({"x": {}}), "whole numbers from 1 on, not by 'x'"),
    "no sizes": (lambda raw: raw["sizes"].pop("2"), "sizes has no tensor degree 2 (it has 1)"),
    "no layer": (lambda raw: raw["rows"][0]["stages"][1].update(layers=[99]), "has no layer 99"),
    "no kind": (lambda raw: raw["gpus"].pop("slow"), "gpus has no kind 'slow'"),
    "no profile of a kind": (lambda raw: raw["profile"].pop("slow"), "profile has no GPU 'slow' (it has 'fast')"),
    "no link": (lambda raw: raw["inter_node"].pop("fast>slow"), "inter_node has no link 'fast>slow'"),
    "too many GPUs": (lambda raw: raw["gpus"]["fast"].update(per_node=1), "do not fit in a node of 1 fast"),
    "uneven batch": (lambda raw: raw["rows"][0].update(global_batch=5, micro_batch=2), "must be a multiple of"),
    "layer twice": (lambda raw: raw["rows"][0]["stages"][1].update(layers=[0]), "a layer is in it twice"),
    "no replicas": (lambda raw: raw["rows"][0]["stages"][1].update(replicas=[]), "stage 1 has no replicas"),
    "no rows": (lambda raw: raw.update(rows=[]), "rows is empty"),
    "field missing": (lambda raw: raw.pop("profile"), "profile is missing"),
    "wrong type": (lambda raw: raw["rows"][0].update(micro_batch="1"), "rows[0].micro_batch must be a whole number"),
    "wrong fit": (lambda raw: raw["inter_node"].update({"fast>slow": [1, 2]}), "fast>slow[0] must be a list"),
    "negative time": (lambda raw: raw["profile"]["slow"]["1"]["1"].update({"0": [1, -1, 0]}), "times from 0 to 1e+09 s"),
    "huge time": (lambda raw: raw["profile"]["slow"]["1"]["1"].update({"0": [1, 1e308, 0]}), "times from 0 to 1e+09 s"),
    "huge size": (lambda raw: raw["sizes"]["1"]["0"].update(params_bytes=1e308), "sizes from 0 to 1e+18 bytes"),
    "real time": (lambda raw: raw["rows"][0].update(real_iteration_s=0), "real_iteration_s must be above 0"),
    "huge": (lambda raw: raw["rows"][0].update(global_batch=10**9), "more than 1000000 in all"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_gets_one_message(name, tmp_path, capsys):
    change, expected = BROKEN[name]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(_broken(change)))
    assert main([str(path), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"rows": 3}', '{"rows": [1], "profile": [], "sizes": 0, "gpus": ""}'])
def test_files_of_another_form_are_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"other\.json"):
        load_measured(path)


def test_it_runs_by_its_path(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(content(row(([0], [("fast", 1)])))))
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "measured.py"
    done = subprocess.run([sys.executable, str(script), str(path), "--json"], capture_output=True, text=True,
                          timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["summary"]["rows"] == 1


def test_layers_may_be_lists():
    raw = content(row(([0, 1], [("fast", 1)])))
    listed = copy.deepcopy(raw)
    for by_batch in listed["profile"].values():
        for by_tensor in by_batch.values():
            for tensor, layers in by_tensor.items():
                by_tensor[tensor] = list(layers.values())
    listed["sizes"] = {tensor: list(layers.values()) for tensor, layers in listed["sizes"].items()}
    assert load_raw(listed) == load_raw(raw)
