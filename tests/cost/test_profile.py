"""The profile store: round trip, other dtypes, and files that are not stores."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from tests.cost.worlds import make_cluster, make_graph
from weft.cost.costs import estimate_costs
from weft.cost.figure import Source
from weft.cost.profile import ClassFit, CommFit, OpKey, OpTiming, ProfileStore, op_signature
from weft.errors import InputError

TIMING = OpTiming(forward_s=1.5e-4, input_grad_s=None, weight_grad_s=2e-5, spread=0.02, repeats=9, threads=1,
                  torch_version="2.13.0", recorded_at="2025-01-01T00:00:00+00:00")
KEY = OpKey("cpu", "aten.linear", "[4,8] [8,8] -> [4,8]", "float32")
FIT = ClassFit(device_kind="cpu", op_class="matmul", compute=0.5, memory=0.25, num_points=4, error=0.1)
COMM = CommFit(collective="p2p", scope="host:cpu", algorithm="ring", latency_s=1e-5, s_per_byte=1e-9, num_points=5,
               error=0.03)


@pytest.fixture
def store(tmp_path):
    return ProfileStore(tmp_path / "deep" / "profile.db")


def test_round_trip(store):
    other = OpKey("H200", *KEY[1:])
    store.put_timings([(KEY, TIMING), (other, TIMING)])
    store.put_class_fits([FIT])
    store.put_comm_fits([COMM])
    again = ProfileStore(store.path)
    assert again.timings("cpu") == {KEY: TIMING}
    assert again.timings("absent") == {}
    assert again.device_kinds() == ("H200", "cpu")
    assert again.class_fits("cpu") == {"matmul": FIT}
    assert again.comm_fits() == {("p2p", "host:cpu"): COMM}


def test_an_absent_file_is_empty_and_not_created_by_reading(store):
    assert store.timings("cpu") == {}
    assert store.comm_fits() == {}
    assert not store.path.exists()


def test_a_second_measurement_replaces_the_first(store):
    store.put_timings([(KEY, TIMING)])
    import dataclasses

    later = dataclasses.replace(TIMING, forward_s=3.0)
    store.put_timings([(KEY, later)])
    assert store.timings("cpu") == {KEY: later}


def test_a_failed_write_leaves_the_old_content(store):
    store.put_timings([(KEY, TIMING)])

    def rows():
        yield OpKey("cpu", "aten.add", "", "float32"), TIMING
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put_timings(rows())
    with pytest.raises(InputError):
        store._write("op_times", ("device_kind",), [("cpu",)])  # violates NOT NULL in the middle of a transaction
    assert store.timings("cpu") == {KEY: TIMING}


def test_readers_and_writers_at_the_same_time(store):
    problems: list[Exception] = []

    def write(number: int) -> None:
        try:
            for index in range(10):
                store.put_timings([(OpKey("cpu", f"op{number}", str(index), "float32"), TIMING)])
                assert len(store.timings("cpu")) > index
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert problems == []
    assert len(store.timings("cpu")) == 40


def foreign_database(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE precious (x)")
    connection.close()


def newer_store(path):
    ProfileStore(path).put_timings([(KEY, TIMING)])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()


def cut_store(path):
    store = ProfileStore(path)
    store.put_timings([(KEY._replace(signature=str(index)), TIMING) for index in range(500)])
    path.write_bytes(path.read_bytes()[:6000] + b"\xff" * 9000)


@pytest.mark.parametrize(("make", "message"), [
    (lambda path: path.write_text("hello"), "not a sqlite file"),
    (lambda path: path.write_bytes(b"SQLite format 3\x00" + bytes(20)), "not a sqlite file"),
    (foreign_database, "sqlite file of another program"),
    (newer_store, "its version is 7, this Weft reads 1"),
    (cut_store, "malformed|usable profile store"),
])
def test_broken_and_foreign_files_are_refused_and_left_alone(tmp_path, make, message):
    path = tmp_path / "profile.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=message) as caught:
        ProfileStore(path).timings("cpu")
    assert "delete this one and profile again" in str(caught.value)
    with pytest.raises(InputError):
        ProfileStore(path).put_timings([(KEY, TIMING)])
    assert path.read_bytes() == before


@pytest.mark.parametrize(("column", "value"), [("forward_s", -1.0), ("forward_s", "fast"), ("forward_s", float("inf")),
                                               ("repeats", -1), ("spread", "wide")])
def test_nonsense_values_are_refused(store, column, value):
    store.put_timings([(KEY, TIMING)])
    with sqlite3.connect(store.path) as connection:
        connection.execute(f"UPDATE op_times SET {column} = ?", (value,))
    connection.close()
    with pytest.raises(InputError, match=f"{column} is "):
        store.timings("cpu")


def test_a_folder_is_no_store(tmp_path):
    with pytest.raises(InputError, match="profile store"):
        ProfileStore(tmp_path).timings("cpu")


def test_signature_is_shapes_and_foreign_dtypes():
    graph = make_graph(1, batch=4, width=8)
    assert op_signature(graph, 0, "float32") == "[4,8] [8,8] -> [4,8]"
    assert op_signature(graph, 0, "float16") == "float32[4,8] float32[8,8] -> float32[4,8]"


def test_measured_times_hit_only_their_own_key(store):
    graph = make_graph(1, batch=4, width=8)
    timing = OpTiming(forward_s=0.5, input_grad_s=0.25, weight_grad_s=0.125, spread=0.0, repeats=1, threads=1,
                      torch_version="", recorded_at="")
    store.put_timings([(KEY._replace(device_kind="fast"), timing)])
    cluster = make_cluster((1,))
    costs = estimate_costs(graph, cluster, profile=store)
    added = costs.terms[0]["weight_grad"].sum_s[0]
    assert (costs.forward_s[0, 0], costs.input_grad_s[0, 0], costs.weight_grad_s[0, 0]) == (0.5, 0.25, 0.125 + added)
    assert costs.source[0, 0] == costs.backward_source[0, 0] == Source.MEASURED.code
    for other in (estimate_costs(graph, cluster, profile=store, dtype="fp16"),
                  estimate_costs(make_graph(1, batch=4, width=6), cluster, profile=store)):
        assert other.source[0, 0] == Source.ROOFLINE.code


def test_a_kind_that_the_store_does_not_know_is_noted(store):
    store.put_timings([(KEY, TIMING)])
    costs = estimate_costs(make_graph(1), make_cluster((1,)), profile=store)
    assert costs.notes == ("the profile store has no times for device kind 'fast' (it has: cpu): "
                           "costs there are estimates",)
