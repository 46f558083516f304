"""The same input gives the same bytes: no clock, no CPU time and no order of sets in what commands write."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from weft.cli.main import main

PROBLEM = {
    "format": "weft.schedule-problem", "version": 1, "devices": [{"name": "d0", "memory": 4}, {"name": "d1", "memory": 4}],
    "blocks": [{"name": "f0", "devices": ["d0"], "time": 1, "memory": 1}, {"name": "f1", "devices": ["d1"], "time": 1, "after": ["f0"]},
               {"name": "b0", "devices": ["d0"], "time": 2, "memory": -1, "after": ["f1"]}]}
GRAPH = {
    "format": "weft.graph", "version": 1,
    "ops": [{"name": name, "times": {"fast": 1.0, "slow": 2.0}} for name in "abcd"],
    "edges": [{"from": source, "to": target, "bytes": 8} for source, target in ("ab", "ac", "bd", "cd")]}
CLUSTER = {
    "format": "weft.cluster", "version": 1, "kinds": {"fast": {}, "slow": {}},
    "devices": [{"name": "p", "kind": "fast"}, {"name": "q", "kind": "slow"}],
    "links": [{"from": "p", "to": "q", "bandwidth": 10, "latency": 0.1}]}
PARTITION = {
    "maxSizePerFPGA": 10, "maxFPGAs": 1, "maxCPUs": 1,
    "nodes": [{"id": index, "supportedOnFpga": 1, "cpuLatency": 4, "fpgaLatency": 1, "size": 1} for index in range(3)],
    "edges": [{"sourceId": 0, "destId": 1, "cost": 1}, {"sourceId": 1, "destId": 2, "cost": 1}]}
COMMANDS = {
    "schedule": ["schedule", "PROBLEM", "--microbatches", "3", "--compare"], "latency": ["place", "GRAPH", "CLUSTER"],
    "throughput": ["place", "GRAPH", "CLUSTER", "--objective", "throughput"],
    "partition": ["place", "PARTITION", "--format", "dnn-partitioning", "--objective", "throughput"]}


@pytest.mark.parametrize("case", COMMANDS)
def test_files_do_not_tell_how_long_the_search_took(case, tmp_path, monkeypatch, capsys):
    for name, value in (("PROBLEM", PROBLEM), ("GRAPH", GRAPH), ("CLUSTER", CLUSTER), ("PARTITION", PARTITION)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    arguments = [f"{tmp_path}/{item}.json" if item.isupper() else item for item in COMMANDS[case]]
    pages = [] if case == "partition" else ["--html", "page.html", "--svg", "picture.svg"]
    written, real = [], time.process_time
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        monkeypatch.chdir(tmp_path / run)
        clock = itertools.count(1)
        monkeypatch.setattr(time, "process_time", lambda clock=clock, run=run: real() + (0 if run == "first" else next(clock)))
        assert main([*arguments, "--json", "--out", "result.json", *pages]) == 0
        written.append({path.name: path.read_bytes() for path in sorted((tmp_path / run).iterdir())})
        printed = json.loads(capsys.readouterr().out)
        assert printed.pop("seconds") > 0
        assert json.loads(written[-1]["result.json"]) == printed
    assert len(written[0]) == 1 + len(pages) // 2
    assert written[0] == written[1]
