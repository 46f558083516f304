"""The strategy graph of a folded model: layers that are equal share their choices, and count as often as they occur.

A run of equal layers has its first copy, a middle one that stands for many, and (mostly) its last. In the graph the
middle copy becomes one or more *variants*, each for a number of copies that follow each other:

    first -> [variant 0, n0 copies] -> [variant 1, n1 copies] -> last      or in turn: first -> 0 -> 1 -> 0 -> last

Nodes and edges inside a variant cost n times as much; the edges from one copy to the next occur n - 1 times inside the
variant, and once from each variant to the next. Tensors that all copies read (a mask, the encoder's output) have an
edge to each variant that counts n times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft.model.folded import FoldedModel
from weft.model.graph import F64
from weft.search.shard.parts import Edge, ModelParts
from weft.search.strategies.strategy_graph import StrategyGraph

MIDDLE = 1
"""Which of a run's kept copies stands for those in the middle."""


class Place(NamedTuple):
    """Where in a run a part is."""

    run: int
    copy: int
    """Of the kept copies."""
    key: tuple[str, int, int]
    """What corresponds between copies: the kind of part, the operator's position in its copy, which tensor of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedGraph:
    """A strategy graph whose nodes are parts of a model."""

    problem: StrategyGraph
    node_part: tuple[int, ...]
    """The part that each node is."""
    node_variant: tuple[int, ...]
    """Which variant of its run's middle copy it is in; -1 elsewhere."""
    counts: Mapping[int, tuple[int, ...]]
    """Copies of each variant, by run."""
    is_woven: bool = False
    """The two variants of a run take turns, copy by copy."""

    @cached_property
    def node_of(self) -> dict[tuple[int, int], int]:
        """Return the node of each part and variant."""
        return {key: node for node, key in enumerate(zip(self.node_part, self.node_variant, strict=True))}


def place_parts(parts: ModelParts, folded: FoldedModel) -> list[Place | None]:
    """Return where in a run each part is; None for what is in no run."""
    of_op = {name: (run, copy, position) for run, item in enumerate(folded.runs)
             for copy, names in enumerate(item.copies) for position, name in enumerate(names)}
    places: list[Place | None] = []
    for part in parts.parts:
        found = of_op.get(part.name) if part.kind == "op" else None
        places.append(None if found is None else Place(found[0], found[1], ("op", found[2], 0)))
    for edge in parts.edges:  # a tensor is where its writer is, a parameter where its only reader is
        giver, reader = parts.parts[edge.giver], parts.parts[edge.reader]
        if reader.kind == "tensor" and (place := places[edge.giver]) is not None:
            places[edge.reader] = Place(place.run, place.copy, ("tensor", place.key[1], edge.output))
        if giver.kind == "parameter":
            place = places[edge.reader]
            readers = [item for item in parts.edges if item.giver == edge.giver] if place is not None else []
            if place is not None and len(readers) == 1:
                slot = sum(item.is_parameter and item.reader == edge.reader and item.tensor < edge.tensor
                           for item in parts.edges)
                places[edge.giver] = Place(place.run, place.copy, ("parameter", place.key[1], slot))
    return places


class Assembler:
    """Makes strategy graphs of one model on one mesh."""

    def __init__(self, parts: ModelParts, folded: FoldedModel, *, pause: Callable[[], None] = lambda: None) -> None:
        """``pause`` is called before costs of an edge are first computed; it may raise to end."""
        self.parts, self.folded, self.pause = parts, folded, pause
        self.places = place_parts(parts, folded)
        self.partner = {place: part for part, place in enumerate(self.places) if place is not None}
        self._matrices: dict[tuple[object, ...], F64] = {}
        self._weighted: dict[tuple[tuple[object, ...], float], F64] = {}

    def num_middle(self, run: int) -> int:
        """Return how many copies the middle one stands for."""
        return self.folded.runs[run].multiplicity(MIDDLE)

    def woven(self) -> dict[int, tuple[int, ...]]:
        """Return for each run how many of its middle copies are the first, third, fifth and so on, and how many not."""
        counts = {run: self.num_middle(run) for run in range(len(self.folded.runs))}
        return {run: ((count + 1) // 2, count // 2) for run, count in counts.items() if count > 1}

    def assemble(self, counts: Mapping[int, Sequence[int]] | None = None, *, limit: float | None = None,
                 price: float = 0.0, is_woven: bool = False) -> FoldedGraph:
        """Return the strategy graph; ``counts`` divides the middle copies of runs among variants (default: one each).

        With ``is_woven`` the two variants of a run take turns, copy by copy.
        ``limit`` is for the bytes held; ``price`` adds so many seconds for each byte held instead.
        """
        shares = {run: tuple((counts or {}).get(run, (self.num_middle(run),))) for run in range(len(self.folded.runs))}
        nodes: list[tuple[int, int]] = []
        weights: list[float] = []
        index: dict[tuple[int, int], int] = {}
        for part, place in enumerate(self.places):
            is_middle = place is not None and place.copy == MIDDLE
            for variant, count in enumerate(shares[place.run] if is_middle and place is not None else (1,)):
                key = (part, variant if is_middle else -1)
                index[key] = len(nodes)
                nodes.append(key)
                weights.append(float(count))
        edges: list[tuple[int, int]] = []
        matrices: list[F64] = []
        own: dict[int, F64] = {}
        for edge in self.parts.edges:
            for source, target, weight in self.uses(edge, shares, is_woven):
                if not weight:
                    continue
                matrix = self._matrix(edge, weight)
                if source == target:  # from a copy to the next, which chooses the same
                    own[index[source]] = own.get(index[source], 0.0) + np.diagonal(matrix)
                else:
                    edges.append((index[source], index[target]))
                    matrices.append(matrix)
        items = [self.parts.parts[part] for part, _ in nodes]
        problem = StrategyGraph(
            name=self.folded.traced.graph.name,
            intervals=np.tile(np.array([0, 1], dtype=np.int64), (len(nodes), 1)),
            costs=tuple((item.seconds + price * item.held_bytes) * weight + own.get(node, 0.0)
                        for node, (item, weight) in enumerate(zip(items, weights, strict=True))),
            usages=tuple(item.held_bytes * weight for item, weight in zip(items, weights, strict=True)),
            edges=np.array(edges, dtype=np.int64).reshape(-1, 2), edge_costs=tuple(matrices), usage_limit=limit)
        return FoldedGraph(problem=problem, node_part=tuple(part for part, _ in nodes),
                           node_variant=tuple(variant for _, variant in nodes), counts=shares, is_woven=is_woven)

    def _matrix(self, edge: Edge, weight: float) -> F64:
        """Return an edge's costs; equal edges of equal layers share theirs."""
        giver, reader = self.parts.parts[edge.giver], self.parts.parts[edge.reader]
        key = (giver.values[edge.output].tobytes(), giver.gradients[edge.output].tobytes(), edge.reads.tobytes(),
               None if edge.returns is None else edge.returns.tobytes(), edge.num_bytes, self.parts.shape_of(edge),
               edge.is_parameter, len(reader.seconds))
        if key not in self._matrices:
            self.pause()
            self._matrices[key] = self.parts.matrix(edge)
        if weight == 1:
            return self._matrices[key]
        if (key, weight) not in self._weighted:
            self._weighted[key, weight] = self._matrices[key] * weight
        return self._weighted[key, weight]

    def uses(self, edge: Edge, shares: Mapping[int, tuple[int, ...]], is_woven: bool = False
             ) -> list[tuple[tuple[int, int], tuple[int, int], float]]:
        """Return (giver's node, reader's node, how often) for each edge of the graph that an edge of the model is."""
        giver, reader = self.places[edge.giver], self.places[edge.reader]
        gives_middle = giver is not None and giver.copy == MIDDLE
        reads_middle = reader is not None and reader.copy == MIDDLE
        if not gives_middle and not reads_middle:
            return [((edge.giver, -1), (edge.reader, -1), 1.0)]
        if reads_middle and reader is not None and giver is not None and giver.run == reader.run:
            counts = shares[reader.run]
            if gives_middle:
                return [((edge.giver, variant), (edge.reader, variant), float(count))
                        for variant, count in enumerate(counts)]
            return self._between(edge, giver, counts, is_woven)
        if gives_middle and giver is not None:  # the last copy, or what comes after the run
            counts = shares[giver.run]
            last = len(counts) - 1 if not is_woven or counts[-1] == counts[0] else 0
            return [((edge.giver, last), (edge.reader, -1), 1.0)]
        assert reader is not None
        return [((edge.giver, -1), (edge.reader, variant), float(count))
                for variant, count in enumerate(shares[reader.run])]

    def _between(self, edge: Edge, giver: Place, counts: tuple[int, ...], is_woven: bool
                 ) -> list[tuple[tuple[int, int], tuple[int, int], float]]:
        """Return the uses of an edge from a run's first copy to its second: it is between all copies that follow."""
        same = self.partner[Place(giver.run, MIDDLE, giver.key)]
        uses = [((edge.giver, -1), (edge.reader, 0), 1.0)]
        if is_woven and len(counts) == 2:
            return [*uses, ((same, 0), (edge.reader, 1), float(counts[1])),
                    ((same, 1), (edge.reader, 0), float(counts[0] - 1))]
        for variant, count in enumerate(counts):
            if count > 1:
                uses.append(((same, variant), (edge.reader, variant), float(count - 1)))
            if variant:
                uses.append(((same, variant - 1), (edge.reader, variant), 1.0))
        return uses


def usage_of(graph: FoldedGraph, choice: Sequence[int]) -> float:
    """Return the bytes that a choice holds on the device with the most."""
    return float(sum(items[strategy] for items, strategy in zip(graph.problem.usages, choice, strict=True)))


