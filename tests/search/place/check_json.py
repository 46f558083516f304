"""A checker of placement results that knows only the file formats: graph file, cluster file and ``weft place --json``.

``check_result`` takes the three JSON values and returns what is wrong, in sentences. It reads graph files that give all
``times`` and cluster files in the long form with plain numbers, and shares no code with Weft.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
SLACK = 1e-6
"""Of the value: times this close are equal."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One tensor on its way to one device."""

    tensor: tuple[str, Any]
    source: str
    target: str
    start: float
    end: float


class _Cluster:
    """What a long-form cluster file says."""

    def __init__(self, value: Json) -> None:
        self.kinds = {device["name"]: device["kind"] for device in value["devices"]}
        self.memory = {device["name"]: device.get("memory") for device in value["devices"]}
        self.core = {device["name"]: device.get("unit", ("own", device["name"])) for device in value["devices"]}
        self.contention = value.get("contention", "link")
        self.links: list[tuple[str, str, float, float, Any]] = []
        for index, link in enumerate(value.get("links", [])):
            shared = link.get("shared", False)
            medium = (index, "both") if shared is True else shared
            ends = [(link["from"], link["to"])] + ([] if link.get("directed") else [(link["to"], link["from"])])
            self.links += [(a, b, float(link["bandwidth"]), float(link.get("latency", 0)), medium or (index, a, b))
                           for a, b in ends]

    def route(self, source: str, target: str) -> list[int] | None:
        """Return the links of the best way: no device between, then fewest links, then widest, then least latency."""
        for may_relay in (False, True):
            ways = [[]] if source == target else list(self._ways([], source, target, {source}, may_relay))
            if ways:
                return min(ways, key=lambda way: (len(way), -min(self.links[link][2] for link in way),
                                                  sum(self.links[link][3] for link in way)))
        return None

    def _ways(self, way: list[int], here: str, target: str, seen: set[str], may_relay: bool) -> Iterable[list[int]]:
        for link, (a, b, *_rest) in enumerate(self.links):
            if a != here or b in seen:
                continue
            if b == target:
                yield [*way, link]
            elif may_relay or b not in self.kinds:
                yield from self._ways([*way, link], b, target, seen | {b}, may_relay)

    def seconds(self, edge: Json, source: str, target: str) -> float:
        """Return how long the edge's tensor takes; infinite where there is no way."""
        times = edge.get("times") or {}
        for key in (f"{source}>{target}", f"{self.kinds[source]}>{self.kinds[target]}"):
            if key in times:
                return float(times[key])
        way = self.route(source, target)
        if way is None:
            return math.inf
        rate = min(self.links[link][2] for link in way)
        return sum(self.links[link][3] for link in way) + math.ceil(edge.get("bytes", 0)) / rate

    def occupied(self, source: str, target: str) -> set[Any]:
        """Return what a transfer holds while it runs."""
        if self.contention == "none":
            return set()
        if self.contention == "port":
            return {("out", source), ("in", target)}
        if not self.links:
            return {(source, target)}
        return {self.links[link][4] for link in self.route(source, target) or ()}


def check_result(graph: Json, cluster: Json, result: Json) -> list[str]:
    """Return everything that is wrong with a result of ``weft place --json``."""
    world, ops = _Cluster(cluster), {op["name"]: op for op in graph["ops"]}
    problems = _check_header(ops, result) or _check_places(ops, world, result)
    if problems:
        return problems
    slack = SLACK * max(result["value"], max((row[2] for row in result["starts"].values()), default=0.0))
    transfers, problems = _transfers(graph, world, result, slack)
    problems += _check_operators(ops, world, result, slack)
    problems += _check_waiting(graph, world, result, transfers, slack)
    for name, spans in _occupied_ways(world, transfers).items():
        problems += _overlaps(spans, slack, f"over {name}")
    problems += _check_memory(ops, world, result)
    problems += _check_value(ops, world, result, transfers, slack)
    return problems


def _check_header(ops: dict[str, Json], result: Json) -> list[str]:
    problems = []
    for key in ("placement", "starts"):
        if set(result[key]) != set(ops):
            problems.append(f"{key} names other operators than the graph: {set(result[key]) ^ set(ops)}")
    if result["status"] not in ("optimal", "feasible"):
        problems.append(f"status is {result['status']!r}")
    if result["objective"] not in ("latency", "throughput"):
        problems.append(f"objective is {result['objective']!r}")
    for key in ("value", "bound", "seconds"):
        if not isinstance(result[key], int | float) or not 0 <= result[key] < math.inf:
            problems.append(f"{key} is {result[key]!r}")
    return problems


def _time_on(op: Json, world: _Cluster, device: str) -> float:
    """Return the operator's time there, infinite where it may not run."""
    kind = world.kinds[device]
    if op.get("on") is not None and kind not in op["on"] and device not in op["on"]:
        return math.inf
    return float(op["times"].get(device, op["times"].get(kind, math.inf)))


def _check_places(ops: dict[str, Json], world: _Cluster, result: Json) -> list[str]:
    problems, together = [], {}
    for name, device in result["placement"].items():
        if device not in world.kinds:
            problems.append(f"{name} is on {device}, which is no device")
        elif _time_on(ops[name], world, device) == math.inf:
            problems.append(f"{name} may not run on {device}")
        group = ops[name].get("colocate")
        if group is not None and together.setdefault(group, device) != device:
            problems.append(f"{name} is on {device}, others of {group} on {together[group]}")
    return problems


def _check_operators(ops: dict[str, Json], world: _Cluster, result: Json, slack: float) -> list[str]:
    problems = []
    spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for name, (device, start, end) in result["starts"].items():
        if device != result["placement"][name]:
            problems.append(f"{name} is placed on {result['placement'][name]} but starts on {device}")
        seconds = _time_on(ops[name], world, device)
        if start < 0 or abs(end - start - seconds) > slack:
            problems.append(f"{name} runs from {start} to {end} on {device}, not for {seconds}")
        spans[world.core[device]].append((start, end, name))
    for core, items in spans.items():
        problems += _overlaps(items, slack, f"on {core}")
    return problems


def _tensors(graph: Json) -> dict[tuple[str, str], dict[Any, Json]]:
    """Return the tensors (by identity) that each pair of operators is joined by."""
    pairs: dict[tuple[str, str], dict[Any, Json]] = defaultdict(dict)
    for index, edge in enumerate(graph.get("edges", [])):
        tensor = edge.get("tensor")
        pairs[edge["from"], edge["to"]][(edge["from"], index if tensor is None else str(tensor))] = edge
    return pairs


def _transfers(graph: Json, world: _Cluster, result: Json, slack: float) -> tuple[dict[Any, _Transfer], list[str]]:
    """Return the transfers by (tensor, target), and what is wrong with the rows."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for source, target, start, end in result["transfers"]:
        rows[source, target].append((float(start), float(end)))
    problems: list[str] = []
    transfers: dict[Any, _Transfer] = {}
    places = result["placement"]
    for (source, target), tensors in _tensors(graph).items():
        here, there = places[source], places[target]
        found = rows.pop((source, target), [])
        needed = [] if here == there else list(tensors)
        if len(found) != len(needed):
            problems.append(f"{source} > {target}: {len(found)} transfers, not {len(needed)}")
            continue
        times = [world.seconds(tensors[tensor], here, there) for tensor in needed]
        match = _match(times, found, slack)
        if match is None:
            problems.append(f"{source} > {target}: transfers {found} do not take {times}")
            continue
        for tensor, (start, end) in zip(needed, match, strict=True):
            sent = transfers.setdefault((tensor, there), _Transfer(tensor, here, there, start, end))
            if abs(sent.start - start) > slack or abs(sent.end - end) > slack:
                problems.append(f"{source} > {target}: the tensor is sent to {there} twice")
    problems += [f"a transfer between {source} and {target}, which no edge joins" for source, target in rows]
    return transfers, problems


def _match(times: Sequence[float], found: Sequence[tuple[float, float]],
           slack: float) -> list[tuple[float, float]] | None:
    """Return the rows in an order in which each takes its time, or None."""
    for order in itertools.permutations(found):
        if all(abs(end - start - seconds) <= slack for (start, end), seconds in zip(order, times, strict=True)):
            return list(order)
    return None


def _check_waiting(graph: Json, world: _Cluster, result: Json, transfers: dict[Any, _Transfer],
                   slack: float) -> list[str]:
    problems = []
    for (source, target), tensors in _tensors(graph).items():
        _, _, written = result["starts"][source]
        there, start, _ = result["starts"][target]
        for tensor in tensors:
            sent = transfers.get((tensor, there))
            if sent is not None and sent.start < written - slack:
                problems.append(f"{source} > {target} is sent at {sent.start}, before {written}")
            ready = written if sent is None else sent.end
            if start < ready - slack:
                problems.append(f"{target} starts at {start}, but has what {source} writes at {ready}")
    return problems


def _occupied_ways(world: _Cluster, transfers: dict[Any, _Transfer]) -> dict[Any, list[tuple[float, float, str]]]:
    spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for sent in transfers.values():
        for way in world.occupied(sent.source, sent.target):
            spans[way].append((sent.start, sent.end, str(sent.tensor)))
    return spans


def _overlaps(spans: Iterable[tuple[float, float, str]], slack: float, where: str) -> list[str]:
    ordered = sorted(span for span in spans if span[1] - span[0] > slack)
    return [f"{first[2]} and {second[2]} at once {where}" for first, second in itertools.pairwise(ordered)
            if second[0] < first[1] - slack]


def _check_memory(ops: dict[str, Json], world: _Cluster, result: Json) -> list[str]:
    problems, held = [], dict.fromkeys(world.kinds, 0.0)
    for name, device in result["placement"].items():
        held[device] += math.ceil(ops[name].get("memory", 0))
    for device, amount in held.items():
        limit = world.memory[device]
        if limit is not None and amount > limit * (1 + SLACK):
            problems.append(f"{device} holds {amount} of {limit} bytes")
        if abs(result["peak_memory"][device] - amount) > SLACK * max(1.0, amount):
            problems.append(f"peak_memory of {device} is {result['peak_memory'][device]}, not {amount}")
    return problems


def _check_value(ops: dict[str, Json], world: _Cluster, result: Json, transfers: dict[Any, _Transfer],
                 slack: float) -> list[str]:
    problems, value = [], max((row[2] for row in result["starts"].values()), default=0.0)
    if result["objective"] == "throughput":
        loads: dict[Any, float] = defaultdict(float)
        for name, device in result["placement"].items():
            loads["core", world.core[device]] += _time_on(ops[name], world, device)
        for way, spans in _occupied_ways(world, transfers).items():
            loads["way", way] += sum(end - start for start, end, _ in spans)
        value = max(loads.values(), default=0.0)
    if abs(value - result["value"]) > slack:
        problems.append(f"the value is {value}, not {result['value']}")
    if result["bound"] > result["value"] + slack:
        problems.append(f"the bound {result['bound']} is above the value {result['value']}")
    if result["status"] == "optimal" and result["bound"] < result["value"] - 10 * slack:
        problems.append(f"optimal, but the bound is {result['bound']} and the value {result['value']}")
    return problems
