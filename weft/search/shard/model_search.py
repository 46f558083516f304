"""How every tensor of a model is split over a group of devices: the sharding with the least time in one step.

    choose      x, a strategy for each part of the model: of an operator what each axis of the mesh does with it, of a
                tensor or parameter how it lies (``parts.PartBuilder``, ``op_choices``)
    minimise    T(x) = sum of seconds of parts + sum over tensors of what brings them from where they are made to where
                they are read, and their gradients back (``ModelParts.matrix``), by ``Assembler.assemble``
    subject to  H(x), bytes held on the device with the most, <= its memory (``folded_graph.usage_of``)
                equal layers choose alike, or in two kinds (``folded_graph.FoldedGraph``)
                what a named plan allows (``restricted``)
    bounds      T(x) >= min over x of T(x) + price (H(x) - memory) for any price (``MeshSearch._within_memory``)

For each shape of mesh the folded model becomes a strategy graph, which is solved exactly. Where what devices hold is
more than they have, memory gets a price: the dearer it is, the less is held. The price at which it just fits gives a
bound for all shardings, those that treat equal layers differently included, and the two shardings on either side of it
are mixed: so many copies of a layer as in the one, the rest as in the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from weft.base.errors import NoFeasiblePlan
from weft.base.units import format_bytes
from weft.cost.costs import Costs
from weft.cost.mesh import Mesh
from weft.model.folded import FoldedModel
from weft.plan.plan import Optimizer
from weft.search.common.budget import Budget
from weft.search.shard.folded_graph import Assembler, FoldedGraph, usage_of
from weft.search.shard.mesh import Resharding
from weft.search.shard.named import Restriction
from weft.search.shard.parts import ModelParts, PartBuilder
from weft.search.strategies.search import solve
from weft.search.strategies.strategy_graph import FORBIDDEN, StrategyGraph, evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The numbers that the search is tuned by, each with how its value was chosen."""

    prices: int = 24
    """Prices of memory that are tried at most; a guess, more than a bisection to 2 % takes."""
    tie: float = 1e-10
    """What all memory that could be held costs, as a share of the least time: far less than what counts as equal."""
    solve_s: float = 20.0
    """Seconds for one strategy graph, if there is no time limit; a guess."""
    exact_s: float = 3.0
    """The same with a limit of memory in it, of which several are tried; a guess."""
    all_shapes: int = 16
    """Up to so many devices all shapes of mesh are tried; of more, those of two axes, one inside hosts and one between
    them. A guess."""
    max_shapes: int = 8
    """Shapes that are tried; a guess."""


TUNING: Final = Tuning()


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedModel:
    """A way to split a model over a mesh, and what is known about it."""

    parts: ModelParts
    graph: FoldedGraph
    choice: tuple[int, ...]
    seconds: float
    """Time of one step: the work of the device with the most, and all collectives."""
    bound: float
    """No sharding on this mesh takes less in which equal layers are alike, or are of two kinds that take turns."""
    held_bytes: float
    """Kept on the device with the most: parameters, gradients, optimizer states, activations for the backward pass."""
    limit_bytes: float | None

    @property
    def mesh(self) -> Mesh:
        """Return the mesh."""
        return self.parts.resharding.mesh

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """Return ``optimal`` if nothing on this mesh takes less; see ``bound``."""
        return "optimal" if self.seconds <= self.bound * (1 + 1e-9) else "feasible"


class MeshSearch:
    """The search on one mesh."""

    def __init__(self, folded: FoldedModel, costs: Costs, mesh: Mesh, *, optimizer: Optimizer,
                 limit_bytes: float | None, budget: Budget, splits_states: bool = True,
                 has_context: bool = False) -> None:
        """List all choices and what they cost; raise ``NoFeasiblePlan`` if the budget ends meanwhile.

        With ``has_context`` the first axis of the mesh splits the sequence; ``InputError`` if it cannot.
        """
        self.folded, self.budget, self.limit, self._mesh = folded, budget, limit_bytes, mesh
        builder = PartBuilder(traced=folded.traced, costs=costs, devices=mesh.devices, resharding=Resharding(mesh),
                              optimizer=optimizer, splits_states=splits_states, pause=self._pause,
                              has_context=has_context)
        self.parts = builder.build()
        self.assembler = Assembler(self.parts, folded, pause=self._pause)
        problem = self.assembler.assemble().problem
        self.assembler.pause = lambda: None
        self._most = sum(float(items.max()) for items in problem.usages)
        self._tie = TUNING.tie * sum(float(items.min()) for items in problem.costs) / max(self._most, 1.0)

    def _pause(self) -> None:
        """End here if the budget is spent: there is nothing to return yet."""
        if self.budget.is_spent:
            raise NoFeasiblePlan(f"the time ended while the choices on a mesh of {self._mesh.name} were being listed, "
                                 "before there was a sharding on it. Try a longer time limit, or a mesh of fewer axes.")

    def run(self, restriction: Restriction | None = None) -> ShardedModel:
        """Return the best sharding, of those that ``restriction`` allows; raise ``NoFeasiblePlan`` if none fits."""
        graph, choice, bound = self._solve({}, 0.0, restriction)
        if self.limit is None or usage_of(graph, choice) <= self.limit:
            return self._in_turn(restriction, self._sharding(graph, choice, bound))
        return self._within_memory(restriction, (graph, choice, bound))

    def _in_turn(self, restriction: Restriction | None, alike: ShardedModel) -> ShardedModel:
        """Return the better of a sharding whose equal layers are alike and the best in which two kinds take turns."""
        counts = self.assembler.woven()
        if not counts or restriction is not None or self.budget.is_spent:
            return alike
        graph, choice, bound = self._solve(counts, 0.0, None, is_woven=True)
        if self.limit is not None and usage_of(graph, choice) > self.limit:
            return replace(alike, bound=min(alike.bound, bound))
        other = self._sharding(graph, choice, bound)
        return other if other.seconds < alike.seconds * (1 - 1e-9) else replace(alike, bound=min(alike.bound, bound))

    def _solve(self, counts: dict[int, tuple[int, ...]], price: float, restriction: Restriction | None, *,
               is_woven: bool = False) -> tuple[FoldedGraph, tuple[int, ...], float]:
        """Return a strategy graph with a price on memory, the best choice, and a bound of seconds and price.

        A tiny price on top lets of equally fast choices the one win that holds least; the bound is without it.
        """
        graph = self.assembler.assemble(counts, price=price + self._tie, is_woven=is_woven)
        problem = restricted(graph, self.parts, restriction)
        left = self.budget.seconds_left
        found = solve(problem, time_limit=TUNING.solve_s if left is None else max(0.1, left))
        return graph, found.choice, float(found.bound) - self._tie * self._most

    def _sharding(self, graph: FoldedGraph, choice: tuple[int, ...], bound: float) -> ShardedModel:
        plain = self.assembler.assemble(graph.counts, is_woven=graph.is_woven)
        seconds = float(evaluate(plain.problem, choice).cost)
        return ShardedModel(parts=self.parts, graph=plain, choice=choice, seconds=seconds, bound=min(bound, seconds),
                        held_bytes=usage_of(plain, choice), limit_bytes=self.limit)

    # ---- little memory ----------------------------------------------------------------------------------------------

    def _within_memory(self, restriction: Restriction | None,
                       first: tuple[FoldedGraph, tuple[int, ...], float]) -> ShardedModel:
        """Return the best sharding that fits: by a price on memory, then with layers of two kinds."""
        assert self.limit is not None
        graph, large, bound = first
        best = self._smallest(restriction)
        low, high = 0.0, bound / max(usage_of(graph, large), 1.0)
        small: tuple[int, ...] | None = None
        for _ in range(TUNING.prices):
            price = high if small is None else (low + high) / 2 if low == 0 else float(np.sqrt(low * high))
            graph, choice, value = self._solve({}, price, restriction)
            held = usage_of(graph, choice)
            bound = max(bound, value - price * self.limit)
            if held <= self.limit:
                small, high = choice, price
                best = _better(best, self._sharding(graph, choice, 0.0))
            else:
                large, low = choice, price
                if small is None:
                    high = price * 8
            if small is not None and (high <= low * 1.02 or self.budget.is_spent):
                break
            if small is None and high > 1e6 * first[2]:
                break
        best, proven = self._exact({}, restriction, best)
        if all(self.assembler.num_middle(run) < 2 for run in range(len(self.folded.runs))):
            bound = max(bound, proven)  # there are no layers to treat differently
        best = best if small is None else self._mixed(best, small, large, restriction)
        return replace(best, bound=min(bound, best.seconds))

    def _mixed(self, best: ShardedModel, small: tuple[int, ...], large: tuple[int, ...],
               restriction: Restriction | None) -> ShardedModel:
        """Return the best with some copies of a run as in ``small`` and the others as in ``large``."""
        assert self.limit is not None
        for run in range(len(self.folded.runs)):
            count = self.assembler.num_middle(run)
            if count < 2:
                continue
            low, high = 0, count  # copies as in the large one: the most that fit
            while high - low > 1 and not self.budget.is_spent:
                middle = (low + high) // 2
                found = self._mix(run, count, middle, small, large)
                if found is not None and found.held_bytes <= self.limit:
                    best = _better(best, found)
                    low = middle
                else:
                    high = middle
            for share in {max(1, low), min(count - 1, low + 1)}:
                if not self.budget.is_spent:
                    best, _ = self._exact({run: (share, count - share)}, restriction, best)
        return best

    def _mix(self, run: int, count: int, share: int, small: Sequence[int], large: Sequence[int]) -> ShardedModel | None:
        """Return the sharding with ``share`` copies of a run as in ``large`` and everything else as in ``small``."""
        if not 0 < share < count:
            return None
        of_node, graph = self.assembler.assemble().node_of, self.assembler.assemble({run: (share, count - share)})
        choice = []
        for part, variant in zip(graph.node_part, graph.node_variant, strict=True):
            place = self.assembler.places[part]
            source = large if variant == 0 and place is not None and place.run == run else small
            choice.append(source[of_node[part, min(variant, 0)]])
        return self._sharding(graph, tuple(choice), 0.0)

    def _exact(self, counts: dict[int, tuple[int, ...]], restriction: Restriction | None, best: ShardedModel
               ) -> tuple[ShardedModel, float]:
        """Return ``best``, or a better one with so many copies of each kind in a run, and a bound for all of these."""
        graph = self.assembler.assemble(counts, limit=self.limit)
        problem = restricted(graph, self.parts, restriction)
        left = self.budget.seconds_left
        try:
            found = solve(problem, time_limit=min(TUNING.exact_s, TUNING.exact_s if left is None else max(0.1, left)))
        except NoFeasiblePlan:
            return best, 0.0
        return _better(best, self._sharding(graph, found.choice, 0.0)), float(found.bound)

    def _smallest(self, restriction: Restriction | None) -> ShardedModel:
        """Return the sharding that holds the least; raise ``NoFeasiblePlan`` if that is too much."""
        assert self.limit is not None
        graph = self.assembler.assemble()
        usages, edge_costs = graph.problem.usages, graph.problem.edge_costs
        bare = replace(graph.problem, costs=usages, usages=tuple(map(np.zeros_like, usages)),
                       edge_costs=tuple(map(np.zeros_like, edge_costs)))
        problem = restricted(replace(graph, problem=bare), self.parts, restriction)
        found = self._sharding(graph, solve(problem, time_limit=TUNING.solve_s).choice, 0.0)
        if found.held_bytes > self.limit:
            raise self._too_little(found)
        return found

    def _too_little(self, smallest: ShardedModel) -> NoFeasiblePlan:
        """Return the error that says what the least is that a device must hold, and what holds it."""
        assert self.limit is not None
        held = {"parameters": 0.0, "activations": 0.0}
        for part, items, strategy in zip(smallest.graph.node_part, smallest.graph.problem.usages, smallest.choice,
                                         strict=True):
            what = "parameters" if self.parts.parts[part].kind == "parameter" else "activations"
            held[what] += float(items[strategy])
        least = math.ceil(smallest.held_bytes)
        return NoFeasiblePlan(
            f"{smallest.graph.problem.name!r} does not fit on a mesh of {smallest.mesh.name}: a device has "
            f"{format_bytes(self.limit)}, and holds at least {format_bytes(least)} ({least} bytes): "
            f"{format_bytes(held['parameters'])} of parameters with gradients and optimizer states, "
            f"{format_bytes(held['activations'])} of activations kept for the backward pass. Try more devices, a "
            "smaller batch or micro-batches.", missing_bytes=math.ceil(least - self.limit))


def _better(best: ShardedModel, other: ShardedModel) -> ShardedModel:
    """Return the one with less time; ``best`` if the other does not fit."""
    fits = other.limit_bytes is None or other.held_bytes <= other.limit_bytes
    return other if fits and other.seconds < best.seconds else best


def restricted(graph: FoldedGraph, parts: ModelParts, restriction: Restriction | None) -> StrategyGraph:
    """Return the strategy graph with everything ruled out that the restriction does not allow."""
    if restriction is None:
        return graph.problem
    costs = []
    for part, items in zip(graph.node_part, graph.problem.costs, strict=True):
        allowed = restriction(parts, part)
        costs.append(items if allowed is None else np.where(allowed, items, float(FORBIDDEN)))
    return replace(graph.problem, costs=tuple(costs))
