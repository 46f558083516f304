"""Mutations of files that know the files' structure: trees of JSON, tables of sqlite, headers of safetensors, text.

Every mutator takes the clean bytes and a random generator, and returns other bytes; the same generator gives the same
mutant.
"""

from __future__ import annotations

import copy
import gzip
import json
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Mutator = Callable[[bytes, Random], bytes]

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 0.5, -0.0, 1e-30, 1e-12, 1e-6, 1e6, 1e12, 1e18, 1e30, 1e31, 5e-324, 1e-300, 1e300, 1.7e308, -1e300, 2**31, 2**32,
    2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -2**63, -2**63 - 1, 10**18, 10**30, 1_000_000, 10**9, 65_537,
    10**400, float("nan"), float("inf"), float("-inf"))
TEXTS: tuple[str, ...] = (
    "", " ", "x", "0", "-1", "1e999", "nan", "inf", "null", "true", "a>b", "..", "../../etc/passwd", "/dev/zero", "\x00", "\x1b[2J",
    "\u202e", "\U0001f600", "\ud800", "e\u0301" * 50, "x" * 101, "y" * 100_001, "%s%n", "{}", "__proto__", "4 x A100-80GB",
    "1000000000 x A100-80GB", "9" * 60 + "GiB", "1e400GB/s", "1e-400us", "S0", "P", "R:P", "F", "s0:F:0", "s0:F:99999999999")
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0], {"a": 1}, [None] * 1000)
WORDS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" * 5000, b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe", b"\\u", b"\x00", b'"')


# ---- bytes ----------------------------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Return the bytes flipped, cut, spliced, repeated or with others put in."""
    text = bytearray(data)
    size = max(len(text), 1)
    at, other = rng.randrange(size), rng.randrange(size)
    length = min(rng.choice((1, 2, 4, 16, 100, 1000)), size)
    match rng.randrange(8):
        case 0:
            for _ in range(rng.choice((1, 1, 2, 8, 64))):
                text[rng.randrange(size) % max(len(text), 1)] ^= 1 << rng.randrange(8)
        case 1:
            del text[at:]
        case 2:
            text[at:at] = text[other:other + length]
        case 3:
            del text[at:at + length]
        case 4:
            text[at:at + length] = rng.randbytes(length)
        case 5:
            text[at:at] = text[other:other + length] * rng.choice((2, 10, 1000))
        case 6:
            text[at:at + rng.choice((0, length))] = rng.choice(WORDS)
        case _:
            text[at:at + length] = bytes(length)
    return bytes(text)


# ---- JSON -----------------------------------------------------------------------------------------------------------


def nasty(rng: Random) -> Any:
    """Return a value that a reader may not expect."""
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, NUMBERS, TEXTS, OTHERS))))


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return (container, key or index) of every value in the tree."""
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            found.append((value, key))
            _places(item, found)
    return found


def _put_everywhere(places: list[tuple[Any, Any]], key: Any, rng: Random) -> None:
    """Change all numbers under one key: to one value, or each to another size."""
    one, factor = rng.choice(NUMBERS), 10.0 ** rng.randint(-40, 40)
    mixed = rng.random() < 0.5
    for container, name in places:
        if name == key and isinstance(container[name], int | float) and not isinstance(container[name], bool):
            number = min(container[name], 1e300) if mixed else one
            container[name] = number * factor if mixed and rng.random() < 0.5 else number


def mutate_tree(value: Any, rng: Random) -> Any:
    """Return the tree with one change of structure, or of values."""
    root = [value]
    places = _places(root, [])
    container, key = rng.choice(places)
    other, name = rng.choice(places)
    match rng.randrange(18):
        case 0 | 1 | 2:
            container[key] = nasty(rng)
        case 12:
            _rename_everywhere(places, rng)
        case 13 | 14:
            _grow(places, rng)
        case 15:
            _turn_round(places, rng)
        case 16:
            container[key] = _in_another_type(container[key], rng)
        case 3:
            numbers = [place for place in places if type(place[0][place[1]]) in (int, float)]
            if numbers:
                container, key = rng.choice(numbers)
                container[key] = rng.choice(NUMBERS)
        case 4:
            del container[key]
        case 5:
            container[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(container[key])
        case 6:
            container[key] = copy.deepcopy(other[name])
        case 7:
            if isinstance(container, dict):
                container[rng.choice((*TEXTS, "unknown"))] = container.pop(key)
            else:
                container.insert(key, copy.deepcopy(other[name]))
        case 8:
            if isinstance(container, list):
                container[key:key] = [copy.deepcopy(container[key])] * rng.choice((1, 2, 300))
        case 9:
            lists = [place[0][place[1]] for place in places if isinstance(place[0][place[1]], list)]
            rng.shuffle(rng.choice(lists)) if lists else None
        case 10:
            keys = sorted({item for holder, item in places if isinstance(holder, dict)})
            _put_everywhere(places, rng.choice(keys), rng) if keys else None
        case 11:
            texts = [place for place in places if isinstance(place[0][place[1]], str)]
            if texts:
                one, two = rng.choice(texts), rng.choice(texts)
                one[0][one[1]] = two[0][two[1]] if rng.random() < 0.7 else rng.choice(TEXTS)
        case _:
            deep: Any = nasty(rng)
            for _ in range(rng.choice((5, 45, 60, 150))):
                deep = [deep] if rng.random() < 0.5 else {"a": deep}
            container[key] = deep
    return root[0] if root else None


def _rename_everywhere(places: list[tuple[Any, Any]], rng: Random) -> None:
    """Give something another name wherever it is named, so that the names still fit together."""
    texts = sorted({place[0][place[1]] for place in places if isinstance(place[0][place[1]], str)})
    if texts:
        old, new = rng.choice(texts), rng.choice(TEXTS)
        for container, key in places:
            if isinstance(container[key], str) and container[key] == old:
                container[key] = new
            elif isinstance(container, dict) and key == old:
                container[new] = container.pop(key)


def _grow(places: list[tuple[Any, Any]], rng: Random) -> None:
    """Add many copies of an item of a list; what has a name gets one of its own."""
    lists = [place[0][place[1]] for place in places if isinstance(place[0][place[1]], list) and place[0][place[1]]]
    if lists:
        grown = rng.choice(lists)
        item = rng.choice(grown)
        for number in range(rng.choice((3, 30, 300, 3000))):
            copied = copy.deepcopy(item)
            for key in ("name", "id"):
                if isinstance(copied, dict) and key in copied:
                    copied[key] = f"{copied[key]}_{number}" if isinstance(copied[key], str) else 100 + number
            grown.append(copied)


def _turn_round(places: list[tuple[Any, Any]], rng: Random) -> None:
    """Exchange two values of one object that are of one kind, such as the ends of an edge, or make both the same."""
    holders = [place[0][place[1]] for place in places if isinstance(place[0][place[1]], dict)]
    rng.shuffle(holders)
    for holder in holders:
        by_kind: dict[type, list[str]] = {}
        for key, value in holder.items():
            by_kind.setdefault(type(value), []).append(key)
        same = [keys for keys in by_kind.values() if len(keys) > 1]
        if same:
            one, two = rng.sample(rng.choice(same), 2)
            holder[one], holder[two] = holder[two], holder[rng.choice((one, two))]
            return


def _in_another_type(value: Any, rng: Random) -> Any:
    """Return the same value as a reader would not write it: numbers as text, whole ones with a point, alone in a list."""
    if isinstance(value, bool) or value is None:
        return rng.choice((int(bool(value)), str(value), [value]))
    if isinstance(value, int | float):
        return rng.choice((str(value), [value], bool(value), float(min(value, 1e300)), int(value) if abs(value) < 1e300 else "inf"))
    return rng.choice(([value], {"value": value}, json.dumps(value), json.dumps(value).encode().hex()))


def to_text(value: Any) -> bytes:
    """Return the tree as JSON, half characters and all."""
    return json.dumps(value, ensure_ascii=True).encode()


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Return the JSON text with a few changes in its tree, or with its bytes changed."""
    if rng.random() < 0.15:
        return mutate_bytes(data, rng)
    if rng.random() < 0.05:
        return _twice(data, rng)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = mutate_tree(value, rng)
    return to_text(value)


def _twice(data: bytes, rng: Random) -> bytes:
    """Return the text with one of its keys twice."""
    places = [at for at in range(len(data)) if data[at:at + 1] == b"{"]
    at = rng.choice(places) + 1
    key = data[at:data.index(b":", at)] if b":" in data[at:] else b'"a"'
    return data[:at] + key + b": 1, " + data[at:]


def bomb(data: bytes, rng: Random) -> bytes:
    """Return a small gzip file of very many values, very deep ones, or a very long text, in or instead of the JSON."""
    count = rng.choice((10**5, 10**6, 3 * 10**6, 8 * 10**6, 4 * 10**7))
    item = rng.choice((b"[]", b"{}", b"0", b'""', b"[[]]", b'{"a":0}', b"1.5", b"null", b"300", b'{"name":"x"}', b"[0,1]", b" "))
    inner = b"[" + item + (b"," + item) * count + b"]"
    if item == b" ":
        inner = rng.choice((b" " * count, b'"' + b"x" * count + b'"', '"\U0001f600'.encode() + b"x" * count + b'"', b"[" * count,
                            b'{"a":' * (count // 8), b"1" * (count // 100)))
    value = json.loads(data)
    if rng.random() < 0.5 or not isinstance(value, dict):
        return gzip.compress(inner, compresslevel=1, mtime=0)
    places = [place for place in _places([value], []) if isinstance(place[0], dict)]
    container, key = rng.choice(places)
    container[key] = "@here@"
    return gzip.compress(to_text(value).replace(b'"@here@"', inner), compresslevel=1, mtime=0)


# ---- YAML and other text --------------------------------------------------------------------------------------------


ALIASES = ("a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [" + ", ".join([f"*{chr(97 + level)}"] * 9) + "]\n" for level in range(12)))
MERGES = "a: &a {k0: 1}\n" + "".join(f"b{level}: &b{level} {{<<: [*{'a' if not level else f'b{level - 1}'}, *a], k{level + 1}: 1}}\n"
                                     for level in range(200))


def mutate_yaml(data: bytes, rng: Random) -> bytes:
    """Return the YAML text of a changed tree, or with aliases, tags, depth or length that a loader may follow for ever."""
    import yaml

    match rng.randrange(10):
        case 0 | 1:
            return mutate_bytes(data, rng)
        case 2:
            parts = (ALIASES, MERGES, "x: &x [*x]\n", "x: &x {<<: *x}\n", "<<: 1\n", "? [a]\n: b\n", "x: !!python/object:os.system ls\n",
                     "x: !!int 3\n", "x: |\n" + "  text\n" * 50_000, "x: '" + "y" * 300_000 + "'\n", "x: " + "[" * 3000 + "\n",
                     "- " * 3000 + "\n", "x: 0x10\nx: 010\n", "%YAML 9.9\n---\n", "---\na\n---\nb\n", "\tx: 1\n", "x: \"\\ud800\"\n",
                     "x: [" + "[]," * 600_000 + "]\n", "x: [" + "{a: 1}," * 300_000 + "]\n", "x: 1" + "0" * 5000 + "\n")
            extra = rng.choice(parts).encode()
            return extra if rng.random() < 0.2 else data + extra if rng.random() < 0.8 else extra + data
    value = yaml.safe_load(data)
    for _ in range(rng.choice((1, 1, 2))):
        value = mutate_tree(value, rng)
    try:
        return str(yaml.safe_dump(value, default_flow_style=rng.random() < 0.5)).encode("utf-8", "surrogatepass")
    except yaml.YAMLError:
        return to_text(value)


CELLS = (b"", b"0F0", b"0B0", b"1F99999999999999999999", b"-1F0", b"0F-1", b"99999999F0", b"(0F0;0B0)OVERLAP_F_B", b"0SEND_F0", b"X", b"NV18",
         b"NV99999999999", b"SYS", b"PIX", b"GPU0", b"GPU99999", b"NIC0", b'"', b"'", b"\x00", b"\xff", b"0F0" * 1000, b"0I0", b"0W0")


def mutate_cells(data: bytes, rng: Random) -> bytes:
    """Return a text of rows and cells with rows or cells changed, moved or repeated."""
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    separator = b"," if b"," in data else b"\t"
    rows = [line.split(separator) for line in data.split(b"\n")]
    for _ in range(rng.choice((1, 1, 2, 5))):
        row, other = rng.choice(rows), rng.choice(rows)
        at, to = rng.randrange(max(len(row), 1)), rng.randrange(max(len(other), 1))
        match rng.randrange(7):
            case 0 | 1:
                row[at:at + 1] = [rng.choice(CELLS)]
            case 2:
                del row[at:at + 1]
            case 3:
                row[at:at + 1], other[to:to + 1] = other[to:to + 1], row[at:at + 1]
            case 4:
                row[at:at] = row[at:at + 1] * rng.choice((1, 2, 1000))
            case 5:
                rows[rng.randrange(len(rows))] = list(row)
            case _:
                rows += [list(row) for _ in range(rng.choice((1, 2, 500)))]
    return b"\n".join(separator.join(row) for row in rows)


# ---- safetensors ----------------------------------------------------------------------------------------------------


def mutate_tensors(data: bytes, rng: Random) -> bytes:
    """Return a safetensors file whose header lies, or whose data is cut, longer or not finite."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8:8 + length], bytearray(data[8 + length:])
    match rng.randrange(8):
        case 0:
            return mutate_bytes(data, rng)
        case 1:
            return rng.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + data[8:]
        case 2:
            return data[:8 + length] + mutate_bytes(bytes(body), rng)
        case 3:
            at = rng.randrange(max(len(body) - 8, 1))
            body[at - at % 4:at - at % 4 + 4] = rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff" * 4, b"\x01\x00\x00\x00"))
        case 4:
            header = mutate_bytes(header, rng)
        case 5:
            header = b"[" + b"[]," * rng.choice((10, 10**6)) + b"[]]" if rng.random() < 0.5 else b"{" * 5000
        case _:
            value = json.loads(header)
            for _ in range(rng.choice((1, 1, 2))):
                value = mutate_tree(value, rng)
            header = to_text(value)
    return len(header).to_bytes(8, "little") + header + bytes(body)


# ---- sqlite ---------------------------------------------------------------------------------------------------------


ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r"
SCHEMA_CHANGES = (
    "DROP TABLE op_times", "DROP TABLE class_fits", "CREATE VIEW v AS " + ENDLESS, "CREATE TABLE more (x)",
    "CREATE INDEX i ON op_times (abs(forward_s))", "ALTER TABLE op_times ADD COLUMN more REAL DEFAULT 1", "PRAGMA user_version = 2",
    "ALTER TABLE comm_fits RENAME TO others", "PRAGMA application_id = 0", "PRAGMA journal_mode = WAL", "PRAGMA auto_vacuum = 1",
    "CREATE TRIGGER t AFTER INSERT ON op_times BEGIN DELETE FROM op_times WHERE 1 IN (" + ENDLESS + "); END", "PRAGMA encoding = 'UTF-16'",
    "CREATE VIRTUAL TABLE w USING fts5(a)", "DELETE FROM op_times", "REINDEX", "VACUUM", "ALTER TABLE op_times DROP COLUMN threads",
    "DROP TABLE op_times; CREATE VIEW op_times AS SELECT 'cpu' AS device_kind, x AS signature FROM (" + ENDLESS + ")")
SCHEMA_TEXTS = (
    "UPDATE sqlite_master SET sql = replace(sql, 'REAL NOT NULL', 'REAL NOT NULL CHECK (1 IN (SELECT 1))') WHERE name = 'op_times'",
    "UPDATE sqlite_master SET sql = 'CREATE VIEW op_times AS " + ENDLESS + "', type = 'view', rootpage = 0 WHERE name = 'op_times'",
    "UPDATE sqlite_master SET rootpage = 1 WHERE name = 'op_times'", "UPDATE sqlite_master SET rootpage = 99999 WHERE name = 'op_times'",
    "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master WHERE name = 'class_fits') WHERE name = 'op_times'",
    "UPDATE sqlite_master SET sql = 'x'", "UPDATE sqlite_master SET name = NULL", "UPDATE sqlite_master SET type = x'00'",
    "DELETE FROM sqlite_master WHERE type = 'index'", "UPDATE sqlite_master SET sql = sql || ' WITHOUT ROWID' WHERE name = 'op_times'")


def mutate_sqlite(data: bytes, rng: Random) -> bytes:
    """Return the database with pages, schema or values changed."""
    if rng.random() < 0.45:
        return _mutate_pages(data, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        path.write_bytes(data)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            if rng.random() < 0.5:
                _change_value(connection, rng)
            elif rng.random() < 0.5:
                connection.executescript(rng.choice(SCHEMA_CHANGES))
            else:
                connection.execute("PRAGMA writable_schema = ON")
                connection.execute(rng.choice(SCHEMA_TEXTS))
        except (sqlite3.Error, OverflowError):
            pass  # that change is not one that sqlite makes
        finally:
            connection.close()
        return path.read_bytes()


def _change_value(connection: sqlite3.Connection, rng: Random) -> None:
    table = rng.choice(("op_times", "class_fits", "comm_fits"))
    column = rng.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
    texts = [text for text in TEXTS if text.isprintable()]
    value = rng.choice((*NUMBERS, *texts, b"\xff\x00", b"x" * 2_000_000, "z" * 200_000, float("inf")))
    where = rng.choice(("", " WHERE rowid = 1", " WHERE rowid % 3 = 0"))
    connection.execute(f"UPDATE OR REPLACE {table} SET {column} = ?{where}", (value,))


def _mutate_pages(data: bytes, rng: Random) -> bytes:
    text, size = bytearray(data), 4096
    page, other = (rng.randrange(max(len(text) // size, 1)) * size for _ in range(2))
    match rng.randrange(6):
        case 0:
            return mutate_bytes(data, rng)
        case 1:
            text[rng.randrange(100)] = rng.randrange(256)
        case 2:
            text[page + (100 if not page else 0)] = rng.choice((2, 5, 10, 13, 0, 255))
        case 3:
            text[page:page + size] = text[other:other + size]
        case 4:
            at = page + rng.randrange(120 if page else 220)
            text[at:at + 2] = rng.randbytes(2)
        case _:
            for _ in range(20):
                text[page + rng.randrange(size)] ^= 1 << rng.randrange(8)
    return bytes(text)


# ---- ONNX -----------------------------------------------------------------------------------------------------------


def mutate_onnx(data: bytes, rng: Random) -> bytes:
    """Return the ONNX file with nodes, names, shapes, attributes or bytes changed."""
    import onnx

    if rng.random() < 0.35:
        return mutate_bytes(data, rng)
    model = onnx.load_model_from_string(data)
    graph = model.graph
    node, other = rng.choice(graph.node), rng.choice(graph.node)
    sizes = (0, 1, -1, 2, 7, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
    match rng.randrange(11):
        case 0:
            node.op_type = rng.choice([item.op_type for item in graph.node] + ["Loop", "If", "Nothing", "Constant", "LSTM", "Reshape"])
        case 1 if node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice((*other.output, "", "unknown", *node.output))
        case 2 if node.output:
            node.output[0] = rng.choice((*other.output, "", "new", *node.input))
        case 3:
            graph.node.remove(node)
        case 4:
            graph.node.append(other)
        case 5 if graph.initializer:
            tensor = rng.choice(graph.initializer)
            if tensor.dims:
                tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(sizes)
        case 6:
            dims = rng.choice(graph.input).type.tensor_type.shape.dim
            if dims:
                rng.choice(dims).dim_value = rng.choice(sizes)
        case 7:
            for attribute in node.attribute:
                if attribute.ints:
                    attribute.ints[0] = rng.choice(sizes)
                attribute.i = rng.choice(sizes)
        case 8:
            rng.choice(graph.input).type.tensor_type.elem_type = rng.choice((0, 1, 7, 8, 9, 16, 99))
        case 9 if graph.initializer:
            rng.choice(graph.initializer).data_type = rng.choice((0, 1, 7, 8, 10, 23, 99))
        case _:
            node.name = rng.choice(TEXTS[:16])
    return bytes(model.SerializeToString())
