"""Odd but valid placement problems as files' values, by name: what a search must survive and be right about."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def graph(ops: list[Json], edges: list[Json] | None = None) -> Json:
    """Return a graph file's value."""
    return {"format": "weft.graph", "version": 1, "ops": ops, "edges": edges or []}


def cluster(names: str = "xy", *, contention: str = "link", memory: dict[str, int] | None = None,
            links: list[Json] | None = None, units: dict[str, str] | None = None, kind: str | None = None) -> Json:
    """Return a cluster file's value: devices named by letters, each of its own kind unless ``kind`` is given."""
    devices = []
    for name in names:
        device: Json = {"name": name, "kind": kind or name, "memory": (memory or {}).get(name)}
        devices.append(device if name not in (units or {}) else {**device, "unit": (units or {})[name]})
    switches = sorted({end for link in links or [] for end in (link["from"], link["to"])} - set(names))
    more = {"links": links, "switches": switches} if links else {}
    return {"format": "weft.cluster", "version": 1, "contention": contention, "devices": devices, **more}


def op(name: str, seconds: float = 1.0, other: float | None = None, **more: Any) -> Json:
    """Return an operator that takes ``seconds`` on x and ``other`` (the same if absent) on y."""
    return {"name": name, "times": {"x": seconds, "y": seconds if other is None else other}, **more}


def edge(source: str, target: str, seconds: float | None = None, **more: Any) -> Json:
    """Return an edge with a transfer time between x and y, or with ``bytes`` only."""
    times = {} if seconds is None else {"times": {"x>y": seconds, "y>x": seconds}}
    return {"from": source, "to": target, **times, **({"bytes": 1} if seconds is None and "bytes" not in more else {}),
            **more}


def chain(count: int, seconds: float, sent: float) -> Json:
    """Return a chain of operators."""
    return graph([op(f"op{i}", seconds) for i in range(count)],
                 [edge(f"op{i}", f"op{i + 1}", sent) for i in range(count - 1)])


def diamond(seconds: float, sent: float) -> Json:
    """Return a split, two branches and a join; with cheap transfers two devices are better than one."""
    return graph([op("a", seconds), op("b", 4 * seconds), op("c", 3 * seconds), op("d", seconds)],
                 [edge("a", "b", sent), edge("a", "c", sent), edge("b", "d", sent), edge("c", "d", sent)])


def odd_inputs() -> dict[str, tuple[Json, Json]]:
    """Return the problems, each with at most 8 operators and 3 devices, and with a placement."""
    line = [{"from": "x", "to": "y", "bandwidth": 1}]
    star = [{"from": name, "to": "s", "bandwidth": rate, "latency": 0.5} for name, rate in (("x", 2), ("y", 1))]
    three = {"times": {"x": 2.0, "y": 2.0, "z": 2.0}}
    return {
        "single-op": (graph([op("a", 2, 1)]), cluster()),
        "one-device": (chain(4, 1, 1), cluster("x")),
        "isolated-ops": (graph([op(f"op{i}", i + 1, 5 - i) for i in range(5)]), cluster()),
        "zero-time-ops": (graph([op(name, 0) for name in "abc"], [edge("a", "b", 0), edge("b", "c", 0)]), cluster()),
        "zero-and-one": (graph([op("a", 0), op("b", 3), op("c", 0), op("d", 2), op("e", 0)],
                               [edge("a", "b", 1), edge("a", "d", 1), edge("b", "c", 0), edge("c", "e", 1),
                                edge("d", "e", 0)]), cluster()),
        "zero-time-transfers": (diamond(1, 0), cluster()),
        "duplicate-edges": (graph([op("a"), op("b", 1, 0.1)], [edge("a", "b", 0.2), edge("a", "b", 0.3)]), cluster()),
        "duplicate-named-edges": (graph([op("a"), op("b", 1, 0.1)], [edge("a", "b", 0.2, tensor="t"),
                                                                   edge("a", "b", 0.2, tensor="t")]), cluster()),
        "all-colocated": (graph([op(f"op{i}", 1 + i, 5 - i, colocate="g") for i in range(5)],
                                [edge("op0", "op1", 1), edge("op1", "op4", 1)]), cluster()),
        "pinned": (graph([op("a", 1, 9, on=["x"]), op("b", 9, 1, on=["y"]), op("c", 1, 9, on=["x"])],
                         [edge("a", "b", 2), edge("b", "c", 2)]), cluster()),
        "on-by-device-name": (graph([{"name": "a", "times": {"k": 1}, "on": ["y"]}, {"name": "b", "times": {"k": 1}},
                                     {"name": "c", "times": {"k": 1}, "on": ["x"]}],
                                    [{"from": "a", "to": "c", "times": {"y>x": 1}}]), cluster(kind="k")),
        "times-by-device-name": (graph([op("a", 1, 2), op("b", 3, 1)], [edge("a", "b", 1)]), cluster(kind="k")),
        "one-way-only": (graph([op("a", 5, 1), op("b", 1, 5)], [{"from": "a", "to": "b", "times": {"x>y": 1}}]),
                         cluster()),
        "one-way-for-a-chain": (graph([op("a", 5, 1), op("b", 9, 1), op("c", 1, 9)],
                                      [{"from": "a", "to": "b", "times": {"x>y": 1}},
                                       {"from": "b", "to": "c", "times": {"x>y": 1}}]), cluster()),
        "no-way-at-all-but-no-need": (graph([op("a", 1, 2), op("b", 2, 1)]), cluster()),
        "missing-transfer-pair": (graph([op("a", 5, 1), op("b", 1, 5)],
                                        [{"from": "a", "to": "b", "times": {"x>y": 1}}]), cluster(links=line)),
        "device-that-holds-nothing": (graph([op("a", 1, 0.1, memory=10), op("b", 1, 0.1)], [edge("a", "b", 0.1)]),
                                      cluster(memory={"x": 100, "y": 1})),
        "memory-exactly-full": (graph([op("a", 1, 3, memory=5), op("b", 1, 3, memory=5), op("c", 1, 3, memory=5)]),
                                cluster(memory={"x": 10, "y": 5})),
        "shared-link": (diamond(1, 0.5) | {"edges": [edge(*pair, bytes=1) for pair in ("ab", "ac", "bd", "cd")]},
                        cluster(links=[{"from": "x", "to": "y", "bandwidth": 2, "shared": True}])),
        "shared-medium": (graph([op(name, 2, 2) | three for name in "abcdef"],
                                [edge("a", "d"), edge("b", "d"), edge("b", "e"), edge("c", "f"), edge("a", "f")]),
                          cluster("xyz", links=[{"from": name, "to": "s", "bandwidth": 2, "shared": "bus"}
                                                for name in "xyz"])),
        "shared-cores": (graph([op(name, 2, 2) | three for name in "abcde"], [edge("a", "e"), edge("b", "e")]),
                         cluster("xyz", units={"y": "core", "z": "core"}, links=[*star, {"from": "z", "to": "s",
                                                                                        "bandwidth": 4}])),
        "all-share-one-core": (diamond(1, 0), cluster(units={"x": "core", "y": "core"})),
        "tensor-read-on-two-devices": (graph([op("a") | three, *(op(f"r{i}") | three for i in range(4))],
                                             [edge("a", f"r{i}", tensor="t") for i in range(4)]),
                                       cluster("xyz", links=[{"from": name, "to": "s", "bandwidth": 4}
                                                             for name in "xyz"])),
        "identical-devices": (graph([op(f"op{i}", 1) | three for i in range(7)]), cluster("xyz", contention="none")),
        "tiny-times": (diamond(1e-12, 2e-13), cluster()),
        "huge-times": (diamond(1e9, 2e8), cluster()),
        "mixed-scales": (graph([op("a", 1e-9), op("b", 1e6), op("c", 1e-3), op("d", 3.3e5)],
                               [edge("a", "b", 1e-9), edge("a", "c", 1), edge("c", "d", 1e-6)]), cluster()),
        "irrational-times": (diamond(3**0.5, 2**0.5 / 7), cluster(contention="port")),
        "many-decimals": (diamond(0.123456789012345, 0.0987654321), cluster(contention="port")),
        "long-name": (graph([op("a" * 300), op("b\u00e9")], [edge("a" * 300, "b\u00e9", 1)]), cluster()),
        "port-late-transfer": (graph([op("a", 1, on=["x"]), op("b", 1, on=["x"]), op("c", 1, on=["y"]),
                                      op("d", 20, on=["y"])], [edge("a", "c", 10), edge("b", "d", 1)]),
                               cluster(contention="port")),
        "unsorted-ops": (graph([op("c"), op("b"), op("a")], [edge("a", "b", 1), edge("b", "c", 1)]), cluster()),
        "zero-time-op-inside-another": (
            graph([op("w", 6, on=["x"]), op("z", 0, on=["x"]), op("s", 1, on=["y"]), op("r", 9, on=["y"])],
                  [edge("s", "z", 0), edge("z", "r", 1)]), cluster()),
    }
