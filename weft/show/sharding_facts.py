"""A sharding in words and figures: how each layer class is split, its collectives, where time and memory go.

Everything is read off the parts and edges that the search chose from (``ShardingReader``), so that the figures add up
to its result: the compute time and the seconds of all collectives are the step time. What the parts chose is said in
words, and under the names of the full model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from weft.cost.mesh import KINDS
from weft.model.folded import FoldedModel, Run
from weft.search.shard.folded_graph import MIDDLE, Assembler
from weft.search.shard.model_search import ShardedModel
from weft.search.shard.named import LINEAR_KINDS, Roles, find_roles
from weft.search.shard.parts import ModelPart, ModelParts
from weft.sharding.factors import NOT_SPLIT
from weft.sharding.tensor_layout import WHOLE, Layout
from weft.show.names import ATTENTION, factor_word, grouped, short_list

OUTSIDE: Final = "outside layers"
Direction = Literal["forward", "backward", "weights", "gradients", "update"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("forward", "backward", "weights", "gradients", "update")
"""Weights that are stored in pieces are gathered for use, in both passes; gradients are added up and scattered; after
the update, weights whose states alone are in pieces are gathered."""


class Unit(NamedTuple):
    """Copies of a run that have their choices together: the first, a variant of the middle, or the last."""

    run: int
    copy: int
    variant: int


class ShardingReader:
    """What the parts of a sharding chose; nodes are given by part and variant."""

    def __init__(self, sharding: ShardedModel, folded: FoldedModel) -> None:
        self.sharding, self.folded = sharding, folded
        self.parts: ModelParts = sharding.parts
        self.mesh = sharding.mesh
        self.resharding = self.parts.resharding
        self.assembler = Assembler(self.parts, folded)
        self.roles: Roles = find_roles(self.parts, folded)
        graph = self.graph = folded.traced.graph
        self.kind_of = dict(zip(graph.op_names, graph.op_kinds, strict=True))
        program = folded.traced.program
        self.has_positions = all(len(program.nodes[program.tensor_nodes[name]].meta["val"].shape) < 4
                                 for name in program.inputs)
        read = [edge for edge in self.parts.edges if edge.is_parameter]
        self.parameters_of = {edges[0].reader: edges for edges in grouped(read, lambda edge: edge.reader)}
        self.reader_of = {edge.giver: edge for edge in read}
        keys = zip(sharding.graph.node_part, sharding.graph.node_variant, strict=True)
        self.nodes = {key: node for node, key in enumerate(keys)}

    def times(self, part: int, node: int) -> float:
        """Return how many copies a node stands for."""
        place, variant = self.assembler.places[part], self.sharding.graph.node_variant[node]
        return 1.0 if place is None or variant < 0 else float(self.sharding.graph.counts[place.run][variant])

    def choice_of(self, key: tuple[int, int]) -> int:
        """Return what a node, given by part and variant, chose."""
        return self.sharding.choice[self.nodes[key]]

    def at(self, part: int, variant: int) -> tuple[int, int]:
        """Return the node of a part that goes with a variant: its own, or the one for all of them."""
        return next(key for key in ((part, variant), (part, -1), (part, 0)) if key in self.nodes)

    def unit_of(self, key: tuple[int, int]) -> Unit | None:
        """Return the copies that a node belongs to; None for what is in no run."""
        place = self.assembler.places[key[0]]
        return None if place is None else Unit(place.run, place.copy, max(key[1], 0))

    def positions(self, unit: Unit) -> list[int]:
        """Return the positions in the full model of the copies that a unit stands for."""
        run = self.folded.runs[unit.run]
        if unit.copy != MIDDLE:
            return [run.kept[unit.copy]]
        graph = self.sharding.graph
        counts, begin = graph.counts[unit.run], run.kept[MIDDLE]
        if graph.is_woven and len(counts) == 2:
            return list(range(begin + unit.variant, begin + sum(counts), 2))
        begin += sum(counts[:unit.variant])
        return list(range(begin, begin + counts[unit.variant]))

    def full_names(self, key: tuple[int, int], name: str) -> list[str]:
        """Return what a name of a node is called in all copies of the full model that it stands for."""
        unit = self.unit_of(key)
        if unit is None:
            return [name]
        run = self.folded.runs[unit.run]
        return [self.folded.full_name(run, unit.copy, name, position) for position in self.positions(unit)]

    # ---- words ------------------------------------------------------------------------------------------------------

    def op_words(self, index: int, chosen: int) -> tuple[str, ...]:
        """Return for each axis how an operator is split."""
        part = self.parts.parts[index]
        assert part.choices is not None
        assert part.choices.op is not None
        known = {NOT_SPLIT: "whole", self.roles.samples.get(index): "samples"}
        if self.has_positions:
            known.setdefault(self.roles.positions.get(index), "positions")
        factors, kind = part.choices.op.factors, self.kind_of[part.name]
        return tuple(known.get(factor) or ("sum" if factor < 0 else factor_word(kind, factors[factor].name))
                     for factor in part.choices.strategies[chosen])

    def stored_words(self, index: int, chosen: int, used: Layout) -> tuple[str, ...]:
        """Return for each axis how a parameter is stored that is read in the layout ``used``."""
        stored = self.parts.parts[index].stored[chosen]
        return tuple("whole" if gradient == WHOLE else "states" if value == WHOLE else
                     "split" if value == read else "pieces"
                     for value, gradient, read in zip(stored.layout, stored.gradient, used, strict=True))

    def parameter_words(self, key: tuple[int, int]) -> tuple[str, ...]:
        """Return for each axis how the parameter of a node is stored, see ``stored_words``."""
        edge = self.reader_of[key[0]]
        used = self.resharding.layouts[int(edge.reads[self.choice_of(self.at(edge.reader, key[1]))])]
        return self.stored_words(key[0], self.choice_of(key), used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How one module of a layer (or the attention, or the loss) is split."""

    name: str
    words: tuple[str, ...]
    """For each axis: ``samples``, ``column``, ``row``, ``heads``, ``whole`` ..."""
    is_matrix: bool = False
    """It is a matrix product with a parameter."""
    stored: tuple[str, ...] = ()
    """For each axis how its largest parameter is stored: ``whole``, ``split``, ``pieces`` (gathered for use),
    ``states`` (only gradients and optimizer states are split)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Equal collectives along one axis."""

    direction: Direction
    kind: str
    axis: int
    count: float
    """How often in one layer."""
    num_bytes: float
    """Of all of these in one layer: what the collective works on, on one device."""
    seconds: float
    """In all layers of the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerClass:
    """Layers that are split alike."""

    title: str
    """``model.layers.1 - model.layers.30``."""
    count: int
    uses: tuple[Use, ...]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the mesh."""

    name: str
    """``data``, ``tensor`` or ``sequence``, by what it mostly splits."""
    size: int
    seconds: float
    """Of collectives along it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingFacts:
    """All that is shown of a sharding."""

    model: str
    cluster: str
    sharding: ShardedModel
    axes: tuple[Axis, ...]
    compute_s: float
    parameter_bytes: float
    activation_bytes: float
    layers: tuple[LayerClass, ...]
    ops: Mapping[str, str]
    """By name in the full model."""
    parameters: Mapping[str, str]
    notes: tuple[str, ...]


class _Sent(NamedTuple):
    unit: Unit | None
    direction: Direction
    axis: int
    kind: int
    num_bytes: float
    seconds: float
    times: float


def sharding_facts(sharding: ShardedModel, folded: FoldedModel) -> ShardingFacts:
    """Return all that is shown of a sharding."""
    return _FactsReader(sharding, folded).facts()


class _FactsReader(ShardingReader):
    """Makes the facts of a sharding."""

    def facts(self) -> ShardingFacts:
        """Return all that is shown."""
        sent = list(self._all_sent())
        axes = self._axes(sent)
        held, compute, graph = {True: 0.0, False: 0.0}, 0.0, self.sharding.graph
        for (part, _), node in self.nodes.items():
            item, chosen = self.parts.parts[part], self.sharding.choice[node]
            held[item.kind == "parameter"] += float(graph.problem.usages[node][chosen])
            if item.kind == "op":
                compute += self.times(part, node) * float(item.seconds[chosen])
        compute -= sum(item.seconds for item in self._results())
        names = tuple(axis.name for axis in axes)
        return ShardingFacts(
            model=self.graph.name, cluster=self.mesh.cluster.name, sharding=self.sharding, axes=axes,
            compute_s=compute, parameter_bytes=held[True], activation_bytes=held[False], layers=self._layers(sent),
            ops=self._named("op", names), parameters=self._named("parameter", names), notes=self._notes(names))

    # ---- collectives ------------------------------------------------------------------------------------------------

    def _all_sent(self) -> Iterator[_Sent]:
        """Yield every collective of a step."""
        graph = self.sharding.graph
        for edge in self.parts.edges:
            for source, target, times in self.assembler.uses(edge, graph.counts, graph.is_woven):
                given, read = self.choice_of(source), self.choice_of(target)
                giver, unit = self.parts.parts[edge.giver], self.unit_of(target)
                forth: Direction = "weights" if edge.is_parameter else "forward"
                back: Direction = "gradients" if edge.is_parameter else "backward"
                often = 2 if edge.is_parameter and edge.returns is not None else 1
                yield from self._steps(unit, forth, int(giver.values[edge.output][given]), int(edge.reads[read]),
                                       edge.tensor, times * often)
                if edge.returns is not None:
                    yield from self._steps(unit, back, int(edge.returns[read]),
                                           int(giver.gradients[edge.output][given]), edge.tensor, times)
        for key, node in self.nodes.items():
            item = self.parts.parts[key[0]]
            if item.kind == "parameter":
                stored = item.stored[self.choice_of(key)]
                number = self.resharding.number
                yield from self._steps(self.unit_of(key), "update", number(stored.gradient), number(stored.layout),
                                       item.tensor, self.times(key[0], node))
        yield from self._results()

    def _results(self) -> Iterator[_Sent]:
        """Yield the collectives that bring the model's results whole to all devices."""
        whole = self.resharding.number((WHOLE,) * len(self.mesh.shape))
        program = self.folded.traced.program
        for tensor in self.graph.outputs:
            for name, part in self.parts.part_of_op.items():
                node, *items = program.op_nodes[name]
                if program.tensor_nodes.get(self.graph.tensor_names[tensor]) in (node, *items):
                    key = (part, -1)
                    value = self.parts.parts[part].values[0][self.choice_of(key)]
                    yield from self._steps(self.unit_of(key), "forward", int(value), whole, tensor, 1.0)

    def _steps(self, unit: Unit | None, direction: Direction, source: int, target: int, tensor: int,
               times: float) -> Iterator[_Sent]:
        for step in self.resharding.steps(source, target, self.graph.tensor_shapes[tensor]):
            if step.kind is not None and self.mesh.shape[step.axis] > 1:
                num_bytes = step.part(self.mesh.shape) * float(self.graph.tensor_bytes[tensor])
                seconds = float(self.mesh.seconds(step.axis, step.kind, np.array([num_bytes]))[0])
                yield _Sent(unit, direction, step.axis, step.kind, num_bytes * times, seconds * times, times)

    def _axes(self, sent: list[_Sent]) -> tuple[Axis, ...]:
        """Return the axes, named by what they split most of the compute time by."""
        names: list[str] = []
        for axis in range(len(self.mesh.shape)):
            time = {"data": 0.0, "sequence": 0.0, "tensor": 0.0}
            for (part, _), node in self.nodes.items():
                item, chosen = self.parts.parts[part], self.sharding.choice[node]
                word = self.op_words(part, chosen)[axis] if item.kind == "op" else "whole"
                if word not in ("whole", "sum"):
                    name = {"samples": "data", "positions": "sequence"}.get(word, "tensor")
                    time[name] += self.times(part, node) * float(item.seconds[chosen])
            best = max(time, key=lambda name: time[name]) if any(time.values()) else "unused"
            names.append(best if best not in names else f"{best}{1 + sum(name.startswith(best) for name in names)}")
        return tuple(Axis(name=name, size=size, seconds=sum(item.seconds for item in sent if item.axis == axis))
                     for axis, (name, size) in enumerate(zip(names, self.mesh.shape, strict=True)))

    # ---- layer classes ----------------------------------------------------------------------------------------------

    def _layers(self, sent: list[_Sent]) -> tuple[LayerClass, ...]:
        """Return the classes of layers, in order of first use; what is in no layer comes last."""
        uses = self._uses_by_unit()
        result = []
        units = sorted(unit for unit in uses if unit is not None)
        for members in grouped(units, lambda unit: (unit.run, uses[unit])):
            positions = sorted(place for unit in members for place in self.positions(unit))
            shown = max(members, key=lambda unit: len(self.positions(unit)))
            result.append(LayerClass(
                title=layer_title(self.folded.runs[shown.run], positions), count=len(positions), uses=uses[shown],
                exchanges=self._exchanges(sent, members, shown)))
        return (*result, LayerClass(title=OUTSIDE, count=1, uses=uses.get(None, ()),
                                    exchanges=self._exchanges(sent, [None], None)))

    def _exchanges(self, sent: list[_Sent], units: list[Unit] | list[None], shown: Unit | None
                   ) -> tuple[Exchange, ...]:
        """Return the collectives of a class: those of one layer of its largest unit, the seconds of all layers."""
        copies = 1 if shown is None else len(self.positions(shown))
        alike = grouped((item for item in sent if item.unit in units),
                        lambda item: (DIRECTIONS.index(item.direction), item.axis, item.kind))
        alike.sort(key=lambda items: (DIRECTIONS.index(items[0].direction), items[0].axis, items[0].kind))
        return tuple(Exchange(direction=items[0].direction, axis=items[0].axis, kind=KINDS[items[0].kind].value,
                              count=sum((item.times / copies for item in items if item.unit == shown), 0.0),
                              num_bytes=sum((item.num_bytes / copies for item in items if item.unit == shown), 0.0),
                              seconds=sum(item.seconds for item in items)) for items in alike)

    def _uses_by_unit(self) -> dict[Unit | None, tuple[Use, ...]]:
        """Return, by unit, how its modules with parameters, its attention and its loss are split."""
        found: dict[Unit | None, dict[str, tuple[float, Use]]] = {}
        for key in (key for key in self.nodes if self.parts.parts[key[0]].kind == "op"):
            for size, use in self._shown(key, self.parts.parts[key[0]]):
                rows = found.setdefault(self.unit_of(key), {})
                if use.name not in rows or rows[use.name][0] < size:
                    rows[use.name] = (size, use)
        return {unit: tuple(use for _, use in rows.values()) for unit, rows in found.items()}

    def _shown(self, key: tuple[int, int], part: ModelPart) -> Iterator[tuple[float, Use]]:
        """Yield what is shown of an operator: size of the parameter, name in its layer and how it is split."""
        chosen = self.choice_of(key)
        words, kind = self.op_words(key[0], chosen), self.kind_of[part.name]
        for edge in self.parameters_of.get(key[0], ()):
            holder = (edge.giver, key[1] if (edge.giver, key[1]) in self.nodes else -1)
            used = self.resharding.layouts[int(edge.reads[chosen])]
            stored = self.stored_words(edge.giver, self.choice_of(holder), used)
            whole_name = self.parts.parts[edge.giver].name
            name = self._inside(key[0], whole_name.rpartition(".")[0] or whole_name)
            yield edge.num_bytes, Use(name=name, words=words, stored=stored, is_matrix=kind.startswith(LINEAR_KINDS))
        if kind.startswith(ATTENTION) and key[0] in self.roles.attention:
            module = self.graph.op_modules[self.graph.op_names.index(part.name)]
            yield 0.0, Use(name=f"{self._inside(key[0], module)} attention".strip(), words=words)
        elif "loss" in kind:
            yield 0.0, Use(name="loss", words=words)

    def _inside(self, index: int, name: str) -> str:
        """Return a name without the path of the layer that it is in."""
        place = self.assembler.places[index]
        if place is None:
            return name
        run = self.folded.runs[place.run]
        for number, path in enumerate(run.layers(run.kept[place.copy])):
            if name == path or name.startswith(path + "."):
                inner = name[len(path) + 1:]
                return inner if run.period == 1 else f"{number}.{inner}"
        return name

    # ---- by name ----------------------------------------------------------------------------------------------------

    def _named(self, kind: str, axes: tuple[str, ...]) -> dict[str, str]:
        """Return how every operator or parameter of the full model is split or stored."""
        result: dict[str, str] = {}
        for key in (key for key in self.nodes if self.parts.parts[key[0]].kind == kind):
            words = self.op_words(key[0], self.choice_of(key)) if kind == "op" else self.parameter_words(key)
            text = ", ".join(f"{axis}: {word}" for axis, word in zip(axes, words, strict=True) if word != "whole")
            result |= dict.fromkeys(self.full_names(key, self.parts.parts[key[0]].name), text or "whole")
        return result

    # ---- notes ------------------------------------------------------------------------------------------------------

    def _notes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return what keeps attention from being split evenly by heads."""
        found = (heads_note(factor.name, factor.size, axis, size) for part in self.parts.parts
                 if part.choices is not None and part.choices.op is not None
                 and self.kind_of[part.name].startswith(ATTENTION[0])
                 for factor in part.choices.op.factors if factor.name in ("heads", "kv")
                 for axis, size in zip(axes, self.mesh.shape, strict=True))
        return tuple(dict.fromkeys(note for note in found if note))


def heads_note(name: str, heads: int, axis: str, size: int) -> str:
    """Return why heads cannot be split evenly over an axis; nothing if they can."""
    if heads % size == 0:
        return ""
    what = "heads" if name == "heads" else "heads of keys and values"
    reason = f"{heads} {what} do not divide evenly by the {size} devices of axis {axis!r}"
    if heads < size:
        return f"attention cannot be split by heads over that axis: {reason}"
    most, least = -(-heads // size), heads // size
    return f"attention by heads is uneven over that axis, {most} on some devices and {least} on others: {reason}"


def layer_title(run: Run, positions: list[int]) -> str:
    """Return a name for some copies of a run: ``model.layers`` for all, else with their numbers."""
    base = run.paths[0].rpartition(".")[0] or run.paths[0]
    if len(positions) == run.num_copies:
        return base
    digits = run.paths[0].rpartition(".")[2]
    first = int(digits) if digits.isdecimal() else 0
    numbers = short_list((str(first + position) for position in positions), limit=len(positions))
    return f"{base} {numbers.replace(' - ', '-')}"
