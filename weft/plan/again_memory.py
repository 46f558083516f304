"""What a stage takes in its backward for what it makes again there (``weft.plan.saving``): a walk over its bundles.

A bundle runs when the backward first needs something of it. While it runs, what it makes is there from the operator
that makes it to the last that reads it; what the backward needs stays, each until the last backward that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from weft.model.graph import F64, I64, Bool
from weft.plan.gradient_memory import HANDING_ON, BackwardStep

_NEEDS_NOTHING: Final = HANDING_ON | {"", "aten.sub", "aten.rsub", "aten.cat", "aten.stack", "aten.sum", "aten.mean"}
"""Operators whose backward needs none of their operands, and moves."""


class AgainStep(BackwardStep, Protocol):
    """What the walk needs to know of an operator besides."""

    @property
    def keeps_result(self) -> bool:
        """Return whether its backward needs what it gave."""

    @property
    def inside_again(self) -> float:
        """Return what it keeps inside when it runs again."""

    @property
    def forward_room(self) -> float:
        """Return the bytes besides tensors while it runs."""

    @property
    def bundle(self) -> int:
        """Return the bundle it runs again with, or -1."""


class AgainLive(NamedTuple):
    """Bytes of what is made again, by operator in the order of the backward."""

    during: F64
    """While its backward runs."""
    after: F64
    """When it has run."""
    making: F64
    """The most while bundles run before it, what earlier ones have left included; 0 where none does."""
    places: dict[int, int]
    """Where each bundle runs."""


@dataclass(slots=True)
class _Bundle:
    steps: list[int] = field(default_factory=list)
    place: int = -1
    """Before the backward of this operator, in its order."""


def again_live(steps: Sequence[AgainStep], *, root: I64, size: F64, needed: Bool, stay: Bool | None) -> AgainLive:
    """Return what is made again takes; ``needed`` are the storages that a backward needs.

    Those in ``stay`` are there to the end once they are made.
    """
    count, bundles = len(steps), dict[int, _Bundle]()
    maker: dict[int, int] = {}
    for number, step in enumerate(steps):
        if step.bundle >= 0:
            bundles.setdefault(step.bundle, _Bundle()).steps.append(number)
            maker.update((int(root[tensor]), step.bundle) for tensor in step.written)
    until: dict[int, int] = {}
    for place in range(count):
        step = steps[count - 1 - place]
        for storage in _needs(step, root):
            if storage in maker and needed[storage]:
                until[storage] = place if stay is None or not stay[storage] else count
                bundle = bundles[maker[storage]]
                bundle.place = place if bundle.place < 0 else bundle.place
        if step.bundle >= 0 and step.inside_again > 0 and bundles[step.bundle].place < 0:
            bundles[step.bundle].place = place
    change, making = np.zeros(count + 2), np.zeros(count)
    peaks: dict[int, float] = {}
    for bundle in bundles.values():
        if bundle.place >= 0:
            peaks[bundle.place] = max(peaks.get(bundle.place, 0.0), _run(bundle, steps, root, size, until, change))
    for place, peak in peaks.items():
        making[place] = peak
    during = np.cumsum(change)[:count]
    after = during.copy()
    ended = np.zeros(count + 2)
    np.minimum(change, 0.0, out=ended)
    after += ended[1:count + 1]
    before = np.concatenate(([0.0], after))[:count]
    making[making > 0] += before[making > 0]
    return AgainLive(during, after, making, {number: item.place for number, item in bundles.items()})


def _needs(step: AgainStep, root: I64) -> list[int]:
    operands = [] if step.is_view or step.kind in _NEEDS_NOTHING else step.read
    return [int(root[tensor]) for tensor in (*operands, *(step.written if step.keeps_result else ()))]


def _run(bundle: _Bundle, steps: Sequence[AgainStep], root: I64, size: F64, until: dict[int, int],
         change: F64) -> float:
    """Note in ``change`` what a bundle leaves and when it goes; return the most that is live while it runs."""
    count, live, most = len(steps), 0.0, 0.0
    last = {int(root[tensor]): number for number in bundle.steps
            for tensor in (*steps[number].written, *steps[number].read)}
    there: set[int] = set()
    for number in bundle.steps:
        step = steps[number]
        new = {int(root[tensor]) for tensor in step.written if int(root[tensor]) not in there}
        made = {storage for storage in new if any(int(tensor) == storage for tensor in step.written)}
        there |= made
        live += float(size[list(made)].sum()) if made else 0.0
        most = max(most, live + step.forward_room)
        live += step.inside_again
        if step.inside_again:
            change[bundle.place] += step.inside_again
            change[max(count - number, bundle.place + 1)] -= step.inside_again
        for storage in [item for item in there if last[item] <= number]:
            there.discard(storage)
            end = until.get(storage, -1)
            if end < bundle.place:
                live -= float(size[storage])
            else:
                change[bundle.place] += size[storage]
                change[min(end, count) + 1] -= size[storage]
    return most
