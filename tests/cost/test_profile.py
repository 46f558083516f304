"""The profile store: round trip, other dtypes, and files that are not stores."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from tests.cost.worlds import make_cluster, make_graph
from weft.base.errors import InputError
from weft.cost.costs import estimate_costs
from weft.cost.figure import Source
from weft.cost.profile import ClassFit, CommFit, OpKey, OpTiming, ProfileStore, op_signature

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
        store._write("op_times", [("cpu", *[None] * 11)])  # violates NOT NULL in the middle of a transaction
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


ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT {} FROM r"
COLUMNS = ("'cpu' AS device_kind, 'mm' AS op_kind, x AS signature, 'f' AS dtype, 1.0 AS forward_s, NULL AS input_grad_s, "
           "NULL AS weight_grad_s, 0.0 AS spread, 1 AS repeats, 1 AS threads, '' AS torch_version, '' AS recorded_at")


@pytest.mark.parametrize("statements", [
    ("DROP TABLE op_times", f"CREATE VIEW op_times AS {ENDLESS.format(COLUMNS)}"),
    (f"CREATE TRIGGER t AFTER INSERT ON op_times BEGIN DELETE FROM op_times WHERE 1 IN ({ENDLESS.format('x')}); END",),
    ("CREATE VIEW extra AS SELECT 1",),
    ("CREATE INDEX i ON op_times (abs(forward_s))",),
    ("ALTER TABLE op_times ADD COLUMN more REAL",),
    ("ALTER TABLE op_times ADD COLUMN length INTEGER GENERATED ALWAYS AS (length(signature)) VIRTUAL",),
    ("CREATE VIRTUAL TABLE words USING fts5(a)",),
    ("DROP TABLE comm_fits",),
    ("ALTER TABLE class_fits RENAME TO gone", "CREATE TABLE class_fits (device_kind TEXT, op_class TEXT, compute REAL, "
     "memory REAL, num_points INTEGER, error REAL CHECK (error < 2), PRIMARY KEY (device_kind, op_class)) WITHOUT ROWID"),
], ids=["view", "trigger", "another view", "expression", "column", "generated", "virtual", "missing", "check"])
def test_a_store_with_more_than_plain_tables_runs_no_sql(store, statements):
    store.put_timings([(KEY, TIMING)])
    with sqlite3.connect(store.path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    before = store.path.read_bytes()
    for use in (lambda: store.timings("cpu"), store.device_kinds, store.comm_fits,
                lambda: store.put_timings([(KEY, TIMING)])):
        with pytest.raises(InputError, match=r"is not a usable profile store: it has (the|no) "):
            use()
    assert store.path.read_bytes() == before


def test_a_store_whose_pages_are_linked_to_endless_rows_ends(store):
    store.put_timings([(KEY._replace(signature=f"[{index}]" * 20), TIMING) for index in range(400)])
    data = bytearray(store.path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    for page in range(size, len(data), size):
        if data[page] in (2, 5):  # inner pages: all their children become the last one
            cells, start = int.from_bytes(data[page + 3:page + 5], "big"), page + 12
            offsets = [int.from_bytes(data[start + 2 * cell:start + 2 * cell + 2], "big") for cell in range(cells)]
            for offset in offsets:
                data[page + offset:page + offset + 4] = data[page + 8:page + 12]
    store.path.write_bytes(data)
    with pytest.raises(InputError, match="is not a usable profile store"):
        store.timings("cpu")


def test_statements_end_after_some_work(store):
    store.put_timings([(KEY, TIMING)])
    with pytest.raises(InputError, match="takes more work than any store of its size"):
        store._read(ENDLESS.format("x") + " WHERE x < 0")


def test_a_store_with_a_log_or_a_foreign_journal_is_refused(store):
    store.put_timings([(KEY, TIMING)])
    before = store.path.read_bytes()
    Path(f"{store.path}-journal").write_bytes(bytes(600) + b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7")
    with pytest.raises(InputError, match="the journal beside it belongs to several files"):
        store.timings("cpu")
    Path(f"{store.path}-journal").unlink()
    store.path.write_bytes(before[:18] + b"\x02\x02" + before[20:])
    with pytest.raises(InputError, match="write-ahead log"):
        store.timings("cpu")


def test_keys_that_are_no_text_are_refused(store):
    store.put_timings([(KEY, TIMING)])
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE op_times SET device_kind = x'ff00'")
    connection.close()
    with pytest.raises(InputError, match="a device_kind is not text"):
        store.device_kinds()
