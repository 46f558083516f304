"""A model with each run of equal layers cut to a few copies: ``trace_folded(source) -> FoldedModel``.

What is searched for one layer holds for all that are equal, so nothing needs the other copies: not the tracer, not the
search. The reduced model is a ``TracedModel`` like any other, in which a run has its first copy, one that stands for
all in the middle, and its last:

    full      embed -> h.0 -> h.1 -> h.2 -> ... -> h.46 -> h.47 -> loss
    reduced   embed -> h.0 -> h.1 ----------------------> h.47 -> loss        Run(paths=h.0 .. h.47, kept=(0, 1, 47))

Costs are those of the full model: the copy in the middle counts ``Run.multiplicity`` times, and what adds up the
gradients of a tensor that every copy reads (a mask, the output of the encoder) counts all of them. ``full_name`` says
what an operator, tensor or parameter of a kept copy is called in any other copy.

A run's copies may be several layers each (``Run.period``). How runs are found and checked: ``weft.model.chains``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from weft.base.errors import ModelError
from weft.model.capture import Capture, capture_chains
from weft.model.chains import MIN_COPIES, Chain, is_inside
from weft.model.columns import Backward, make_columns
from weft.model.forward import current_autocast, within
from weft.model.graph import Graph, check_graph, collector_paused
from weft.model.source import ModelSource
from weft.model.trace import TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Equal layers, one after the other."""

    paths: tuple[str, ...]
    """Module paths of all layers, in order: ``period`` for each copy."""
    kept: tuple[int, ...]
    """Positions of the copies that the reduced model has, such as (0, 1, 31)."""
    copies: tuple[tuple[str, ...], ...]
    """Operator names of each kept copy, in corresponding order."""
    period: int = 1
    """Layers per copy: 2 where two kinds alternate."""

    @property
    def num_copies(self) -> int:
        """Return how many copies the full model has."""
        return len(self.paths) // self.period

    def multiplicity(self, index: int) -> int:
        """Return how many copies of the full model the kept copy ``index`` stands for."""
        return self.num_copies - len(self.kept) + 1 if index == 1 else 1

    def layers(self, position: int) -> tuple[str, ...]:
        """Return the module paths of the copy at ``position``."""
        return self.paths[position * self.period : (position + 1) * self.period]


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedModel:
    """A reduced model and its runs; see the module's docstring."""

    traced: TracedModel
    """The reduced model: the copy in the middle goes straight to the last one."""
    runs: tuple[Run, ...]

    def full_name(self, run: Run, index: int, name: str, position: int) -> str:
        """Return what ``name``, of the kept copy ``index`` of ``run``, is called in the copy at ``position``.

        The name may be of an operator, a tensor, a parameter or a module; one that is not of the copy is returned as
        it is, because all copies share it.
        """
        if not 0 <= position < run.num_copies:
            raise ModelError(f"there is no copy {position} in a run of {run.num_copies} from {run.paths[0]}")
        for old, new in zip(run.layers(run.kept[index]), run.layers(position), strict=True):
            if is_inside(name, old):
                return new + name[len(old) :]
        return name

    def multiplicities(self) -> tuple[int, ...]:
        """Return for each operator of the reduced model how many of the full model it stands for."""
        counts = {name: run.multiplicity(index) for run in self.runs
                  for index, names in enumerate(run.copies) for name in names}
        return tuple(counts.get(name, 1) for name in self.traced.graph.op_names)


def trace_folded(source: ModelSource, *, batch: int | None = None,
                 backward: Literal["auto", "joint", "rule", "none"] = "auto") -> FoldedModel:
    """Return ``source`` traced with a few copies of each run of equal layers, in a time that does not grow with depth.

    The arguments are those of ``weft.model.trace.trace``. Where equal layers turn out to differ, all of them are
    traced and there is no run of them. ``ModelError`` if the model cannot be traced.
    """
    training = source.mode == "training"
    kind: Backward = "none" if not training else "joint" if backward == "auto" else backward
    size = source.batch if batch is None else batch
    module, inputs = source.build(), source.inputs(size, 0)
    with collector_paused(), within(module, current_autocast()):
        found, chains = capture_chains(module, inputs, training=training)
        whole = [chain for chain in chains if chain.num_copies - chain.first >= MIN_COPIES]
        graph, program = make_columns(found, name=source.name, batch=size, training=training, backward=kind,
                                      more_reads=_more_reads(found, whole))
    check_graph(graph)
    traced = TracedModel(graph=graph, program=program, source=replace(source, batch=size))
    return FoldedModel(traced=traced, runs=tuple(_run(graph, chain) for chain in whole))


def _paths(chain: Chain) -> tuple[str, ...]:
    return chain.paths[chain.first * chain.period :]


def _run(graph: Graph, chain: Chain) -> Run:
    """Return the run of ``chain``; without the last copy if that has other operators, because nobody needs some."""
    paths, period = _paths(chain), chain.period
    last = len(paths) // period - 1
    kept = (0, 1, last)
    copies = [_ops_inside(graph, paths[position * period : (position + 1) * period]) for position in kept]
    relative = [tuple(name for _, name in ops) for ops in copies]
    assert relative[0] == relative[1], f"copies of {paths[0]} have other operators"
    names = tuple(tuple(full for full, _ in ops) for ops in copies)
    if relative[2] == relative[0]:
        return Run(paths=paths, kept=kept, copies=names, period=period)
    return Run(paths=paths[:-period], kept=kept[:2], copies=names[:2], period=period)


def _ops_inside(graph: Graph, layers: Sequence[str]) -> list[tuple[str, tuple[int, str]]]:
    """Return the operators inside ``layers``: name, and number of the layer with the name in it."""
    return [(name, (number, name[len(path) :])) for name, module in zip(graph.op_names, graph.op_modules, strict=True)
            for number, path in enumerate(layers) if is_inside(module, path)]


def _more_reads(found: Capture, chains: Sequence[Chain]) -> Mapping[tuple[str, str], int]:
    """Return how often more the full model reads a tensor of all copies, by reader in the middle copy and tensor."""
    result: dict[tuple[str, str], int] = {}
    for chain in chains:
        paths, period = _paths(chain), chain.period
        more = len(paths) // period - 3
        if more:
            for node in found.graph.nodes:
                if node.op == "call_function" and _is_in(node, paths[period : 2 * period]):
                    result |= {(node.name, source.name): more for source in node.all_input_nodes
                               if source.op == "call_function" and not _is_in(source, paths[: 2 * period])}
    return result


def _is_in(node: fx.Node, layers: Sequence[str]) -> bool:
    return any(is_inside(node.meta["module"], path) for path in layers)
