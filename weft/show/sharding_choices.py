"""What the parts of a model chose in a sharding, in words, and under the names of the full model."""

from __future__ import annotations

from typing import NamedTuple

from weft.model.folded import FoldedModel
from weft.search.shard.folded_graph import MIDDLE, Assembler
from weft.search.shard.model_search import ShardedModel
from weft.search.shard.parts import Edge, ModelParts
from weft.search.shard.roles import Roles, find_roles
from weft.sharding.factors import NOT_SPLIT
from weft.sharding.tensor_layout import WHOLE, Layout
from weft.show.sharding_words import factor_word


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
        self.parameters_of: dict[int, list[Edge]] = {}
        self.reader_of: dict[int, Edge] = {}
        for edge in self.parts.edges:
            if edge.is_parameter:
                self.parameters_of.setdefault(edge.reader, []).append(edge)
                self.reader_of[edge.giver] = edge
        folded_graph = sharding.graph
        self.nodes = {key: node for node, key in
                      enumerate(zip(folded_graph.node_part, folded_graph.node_variant, strict=True))}

    def times(self, part: int, node: int) -> float:
        """Return how many copies a node stands for."""
        place, variant = self.assembler.places[part], self.sharding.graph.node_variant[node]
        return 1.0 if place is None or variant < 0 else float(self.sharding.graph.counts[place.run][variant])

    def choice_of(self, key: tuple[int, int]) -> int:
        """Return what a node, given by part and variant, chose."""
        return self.sharding.choice[self.nodes[key]]

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
        choices = self.parts.parts[index].choices
        assert choices is not None
        return tuple(self._word(index, factor) for factor in choices.strategies[chosen])

    def _word(self, index: int, factor: int) -> str:
        part = self.parts.parts[index]
        assert part.choices is not None
        assert part.choices.op is not None
        if factor < 0:
            return "whole" if factor == NOT_SPLIT else "sum"
        if factor == self.roles.samples.get(index):
            return "samples"
        if self.has_positions and factor == self.roles.positions.get(index):
            return "positions"
        name = part.choices.op.factors[factor].name
        return factor_word(self.kind_of[part.name], name)

    def stored_words(self, index: int, chosen: int, used: Layout) -> tuple[str, ...]:
        """Return for each axis how a parameter is stored that is read in the layout ``used``."""
        stored = self.parts.parts[index].stored[chosen]
        return tuple("whole" if gradient == WHOLE else "states" if value == WHOLE else
                     "split" if value == read else "pieces"
                     for value, gradient, read in zip(stored.layout, stored.gradient, used, strict=True))

    def parameter_words(self, key: tuple[int, int]) -> tuple[str, ...]:
        """Return for each axis how the parameter of a node is stored, see ``stored_words``."""
        edge = self.reader_of[key[0]]
        reader = next(item for item in ((edge.reader, key[1]), (edge.reader, -1), (edge.reader, 0))
                      if item in self.nodes)
        used = self.resharding.layouts[int(edge.reads[self.choice_of(reader)])]
        return self.stored_words(key[0], self.choice_of(key), used)
