"""Runs of equal layers, found in the module tree, and what stands in for most of them while the model is traced.

A *chain* is a stretch of sibling modules in which the same one to ``MAX_PERIOD`` layers come again and again, three
times or more: ``model.layers.0 .. 31``, or pairs of windowed and shifted-window blocks. Layers are equal by class,
settings and parameter shapes (``weft.model.fold``); only numbers that count the layers may differ, and these are
watched while tracing: a layer that looks at its number may do anything, so its chain is not folded.

While tracing (``standing_in``) the first and the last copy run between the markers ``fold_enter`` and ``fold_leave``.
Of a chain that is wanted *whole*, all others become an operator ``fold_repeat`` each, and are written out afterwards
(``write_chains``). Else the second alone is written out; the third becomes such an operator, too, and all others are
not even calls: they hand on the results of the second or third copy, in turn, so that a copy can always be told from
the one before it. They are also hollow, that is without parameters, so that a trace takes as long for 80 layers as for
8. Every copy must then read exactly what the copy before it read: tensors that never change, and results of the copy
before, in the same places. Whole or not, copies must be called in order, once. Anything else raises ``ChainMismatch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from weft.model import fold
from weft.model.fold import FoldMismatch, Record, Region, watch_numbers

MIN_COPIES: Final = 3
"""Fewer equal layers than this are simply traced."""
MAX_PERIOD: Final = 12
"""At most this many different layers make up one copy."""
_FIRST_HOLLOW: Final = 3
"""Copies before this keep their parameters: a chain may start at its second copy, and then writes out its third."""
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device)


class ChainMismatch(FoldMismatch):
    """A chain whose copies differ in what they do or read: trace all of them."""

    def __init__(self, chain: Chain, reason: str) -> None:
        super().__init__(f"{chain.paths[0]} and its equals are not folded: {reason}")
        self.chain = chain


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """Equal layers in a row, and what was seen of them in one trace."""

    paths: tuple[str, ...]
    """Paths of all layers, copy after copy."""
    period: int
    """Layers per copy."""
    is_whole: bool = False
    """Every copy is written out; so it may read what it likes."""
    first: int = 0
    """The first copy that is like the others: one before it was called with other inputs."""
    num_calls: int = 0
    records: list[Record] = field(default_factory=list)
    """Per layer of a copy."""
    record_ids: list[int] = field(default_factory=list)
    """Of these and of earlier ones."""
    signatures: list[Any] = field(default_factory=list)
    wiring: list[Any] = field(default_factory=list)
    """Per layer of a copy: where its inputs come from, in every copy but the first."""
    first_inputs: list[list[torch.Tensor]] = field(default_factory=list)
    made: dict[int, dict[int, tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    """By copy (later ones share): by layer of a copy, the tensors that it made."""

    @property
    def num_copies(self) -> int:
        """Return how many copies there are."""
        return len(self.paths) // self.period


# ---- in the module tree -------------------------------------------------------------------------------------------


def find_chains(module: torch.nn.Module, *, is_whole: bool = False) -> list[Chain]:
    """Return the outermost stretches of equal layers of ``module``, in order."""
    owners = fold.parameter_owners(module)
    chains: list[Chain] = []

    def visit(parent: torch.nn.Module, prefix: str) -> None:
        children = {name: child for name, child in parent._modules.items() if child is not None}
        names = list(children)
        kinds = [0] * len(names)
        for kind, positions in enumerate(fold.equal_children(list(children.values()), owners)):
            for position in positions:
                kinds[position] = kind
        inside: set[int] = set()
        for start, period, count in periodic_stretches(kinds):
            members = range(start, start + period * count)
            inside.update(members)
            chains.append(Chain(paths=tuple(prefix + names[position] for position in members), period=period,
                                is_whole=is_whole))
        for position, name in enumerate(names):
            if position not in inside:
                visit(children[name], f"{prefix}{name}.")

    visit(module, "")
    return chains


def periodic_stretches(kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, period, number of copies) of stretches that repeat at least ``MIN_COPIES`` times, in order.

    >>> list(periodic_stretches([0, 1, 1, 1, 1, 2, 3, 2, 3, 2, 3]))
    [(1, 1, 4), (5, 2, 3)]
    """
    start = 0
    while start < len(kinds):
        best = (0, 0)
        for period in range(1, min(MAX_PERIOD, (len(kinds) - start) // MIN_COPIES) + 1):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            count = (end - start) // period
            if count >= MIN_COPIES and count * period > best[0] * best[1]:
                best = (period, count)
        if best[0]:
            yield start, *best
        start += best[0] * best[1] or 1


# ---- while tracing ------------------------------------------------------------------------------------------------


@contextmanager
def standing_in(module: torch.nn.Module, chains: Sequence[Chain]) -> Iterator[None]:
    """Let most copies of the ``chains`` of ``module`` be stood in for while the body runs."""
    with ExitStack() as stack:
        for chain in chains:
            layers = [module.get_submodule(path) for path in chain.paths]
            stack.callback(_forget, chain)
            for position in range(chain.period):
                equal = layers[position :: chain.period]
                watch_numbers([*equal[: _FIRST_HOLLOW - 1], equal[-1]], stack, partial(ChainMismatch, chain))
            for index, layer in enumerate(layers):
                copy = index // chain.period
                if _FIRST_HOLLOW <= copy < chain.num_copies - 1 and not chain.is_whole:
                    _hollow_out(layer, stack)
                layer.forward = _stand_in(chain, index, layer.forward)
                stack.callback(delattr, layer, "forward")
        yield


def _forget(chain: Chain) -> None:
    for number in chain.record_ids:
        fold.RECORDS.pop(number, None)


def _hollow_out(layer: torch.nn.Module, stack: ExitStack) -> None:
    for name in ("_modules", "_parameters", "_buffers"):
        stack.callback(layer.__dict__.__setitem__, name, layer.__dict__[name])
        layer.__dict__[name] = {}


def _stand_in(chain: Chain, index: int, real: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _Call(chain, index).run(real, args, kwargs)

    return forward


class _Call:
    """One call of a layer of a chain."""

    def __init__(self, chain: Chain, index: int) -> None:
        self.chain = chain
        self.path = chain.paths[index]
        self.copy, self.layer = divmod(index, chain.period)
        if chain.num_calls != index:
            raise ChainMismatch(chain, f"{self.path} is not called once and in order")
        chain.num_calls += 1

    def run(self, real: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the layer, or what stands in for it."""
        chain = self.chain
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
            raise ChainMismatch(chain, f"{self.path} takes an argument that is neither a tensor nor a plain value")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._check(fold.call_signature(leaves, spec), tensors)
        record = chain.records[self.layer]
        number = self.copy - chain.first
        is_last = self.copy == chain.num_copies - 1
        if number == 0 or is_last:
            traced, result = fold.trace_layer(record, f"{record.id}:{self.path}", real, leaves, spec)
            self._note(tuple(traced))
        elif number <= 2 or chain.is_whole:
            made = fold.wanting(fold.REPEAT(f"{record.id}:{self.path}", tensors), record.outputs)
            self._note(tuple(made))
            result = fold.rebuild(record, tensors, made)
        else:
            same = chain.made[chain.first + 2 - number % 2][self.layer]
            self._note(same)
            result = fold.rebuild(record, tensors, list(same))
        return result

    def _note(self, made: tuple[torch.Tensor, ...]) -> None:
        self.chain.made.setdefault(self.copy, {})[self.layer] = made

    def _check(self, signature: Any, tensors: list[torch.Tensor]) -> None:
        """Raise ``ChainMismatch`` unless the inputs are like those of the copies before."""
        chain = self.chain
        if self.copy == chain.first:
            self._begin(signature, tensors)
            return
        wiring = [] if chain.is_whole else [self._source(tensor) for tensor in tensors]
        is_same = signature == chain.signatures[self.layer] and (chain.is_whole or all(
            self._is_like_first(source, before)
            for source, before in zip(wiring, chain.first_inputs[self.layer], strict=True)))
        if self.copy == chain.first + 1:
            if not is_same and chain.period == 1:
                chain.first += 1
                self._begin(signature, tensors)
                return
            chain.wiring.append(wiring)
        if not is_same or wiring != chain.wiring[self.layer]:
            raise ChainMismatch(chain, f"{self.path} reads other inputs than its equals")

    def _begin(self, signature: Any, tensors: list[torch.Tensor]) -> None:
        chain = self.chain
        if chain.period == 1:
            chain.records, chain.signatures, chain.first_inputs, chain.wiring = [], [], [], []
        chain.records.append(fold.new_record())
        chain.record_ids.append(chain.records[-1].id)
        chain.signatures.append(signature)
        chain.first_inputs.append(tensors)

    def _source(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (self._made(tensor, "same", self.copy) or self._made(tensor, "previous", self.copy - 1)
                or ("outside", id(tensor)))

    def _made(self, tensor: torch.Tensor, place: str, copy: int) -> tuple[Any, ...] | None:
        """Return ``place``, and which layer of a copy made the tensor as which of its results; None if none did."""
        return next(((place, layer, position) for layer, made in self.chain.made.get(copy, {}).items()
                     for position, other in enumerate(made) if tensor is other), None)

    def _is_like_first(self, source: tuple[Any, ...], before: torch.Tensor) -> bool:
        """Return whether an input comes from where the first copy has its own, ``before``, from."""
        made = self._made(before, "same", self.chain.first)
        return source == made if made else source[0] == "previous" or source == ("outside", id(before))


# ---- after tracing ------------------------------------------------------------------------------------------------


def write_chains(graph: fx.Graph, owned: Mapping[str, str], chains: Sequence[Chain]) -> None:
    """Write out stand-ins in place, after comparing the first copy of each chain with the last.

    Of a chain that is not whole the second copy alone is written out: the last one then reads its results. ``owned``
    gives the path of each parameter or buffer node.
    """
    regions, repeats = fold.find_regions(graph)
    nodes = {path: node for node in graph.nodes if node.op == "placeholder" and (path := owned.get(node.name))}
    for chain in chains:
        same = [regions.get(str(record.id), []) for record in chain.records]
        if chain.num_calls != len(chain.paths) or not same:
            raise ChainMismatch(chain, "not every layer is called")
        _check_chain(chain, same, repeats, owned)
        for layer, record in enumerate(chain.records):
            stand_ins = [node for node in repeats if node.args[0].split(":", 1)[0] == str(record.id)]
            results: list[Any] = []
            for node in stand_ins:
                if results and not chain.is_whole:
                    fold.forward_items(node, results)
                else:
                    results = fold.write_copy(graph, node, same[layer][0], node.args[0].split(":", 1)[1], owned, nodes)
    fold.remove_markers(regions)


def _check_chain(chain: Chain, same: list[list[Region]], repeats: Sequence[fx.Node], owned: Mapping[str, str]) -> None:
    """Raise ``ChainMismatch`` unless the copies do the same and only the next one reads a copy's results."""
    for regions in same:
        try:
            fold.check_equal(regions[0], regions[-1], owned)
        except FoldMismatch as problem:
            raise ChainMismatch(chain, str(problem)) from problem
        for region in regions:
            if any(not is_inside(node.meta["module"], region.path) for node in region.body):
                raise ChainMismatch(chain, f"{region.path} calls a module that is not its own")
    if chain.is_whole or chain.num_copies - chain.first < MIN_COPIES:
        return
    ids = {str(record.id) for record in chain.records}
    middle = [node for node in repeats if node.args[0].split(":", 1)[0] in ids]
    readers = {*middle, *(region.enter for regions in same for region in regions)}
    for node in (*middle, *(regions[0].leave for regions in same)):
        if any(reader not in readers for item in node.users for reader in item.users):
            raise ChainMismatch(chain, "results of a layer before the last are read outside")


def is_inside(module: str, path: str) -> bool:
    """Return whether a module is the one at ``path`` or in it."""
    return module == path or module.startswith(path + ".")
