"""The time of moving tensors from one layout to another on a mesh; shapes of meshes.

Which collectives a change of layout takes, and on which part of the tensor, is ``weft.sharding.layout_steps``'s
account, which the runtime follows too. It is the same for all pairs of layouts of one *form*: the same but for the
numbers of dimensions. So forms are numbered, and a table says which form each pair of layouts has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from weft.cost.mesh import KINDS, Mesh
from weft.model.graph import F64, I64
from weft.sharding.layout_steps import Room, Step, room_of, steps_in
from weft.sharding.tensor_layout import SUM, Layout, Placement

_PLACE_VALUES: Final = 1024
"""More than what a placement can become in the number of a form."""


class Resharding:
    """Times of changes of layout on one mesh, for layouts that are known by number."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.layouts: list[Layout] = []
        self._number: dict[Layout, int] = {}
        self._code: dict[Placement, int] = {}
        self._codes: list[list[int]] = []
        """[layout][axis] number of the placement."""
        self._tables: dict[Room, I64] = {}
        """[source, target] the form of the change; -1 where it was not asked for."""
        self._forms: dict[tuple[object, ...], int] = {}
        self._sent: list[tuple[int, int, float]] = []
        """(form, axis and collective, part of the tensor) of everything that is sent."""
        self._seconds: dict[float, F64] = {}

    def number(self, layout: Layout) -> int:
        """Return the layout's number."""
        if layout not in self._number:
            self._number[layout] = len(self.layouts)
            self.layouts.append(layout)
            self._codes.append([self._code.setdefault(item, len(self._code)) for item in layout])
        return self._number[layout]

    def steps(self, source: int, target: int, shape: Sequence[int]) -> tuple[Step, ...]:
        """Return the steps that bring a tensor of this shape from one layout to the other."""
        return steps_in(self.layouts[source], self.layouts[target], self.mesh.shape, room_of(shape, self.mesh.shape),
                        self.mesh.weights)

    def matrix(self, sources: I64, targets: I64, num_bytes: float, shape: Sequence[int]) -> F64:
        """Return [sources, targets] the time to bring a tensor from one layout to the other."""
        forms = self._known_forms(sources, targets, room_of(shape, self.mesh.shape))
        times: F64 = self._form_seconds(num_bytes)[forms]
        return times

    def _form_seconds(self, num_bytes: float) -> F64:
        """Return the time of every form for a tensor of so many bytes."""
        known = self._seconds.get(num_bytes)
        if known is None or len(known) < len(self._forms):
            known = np.zeros(len(self._forms))
            sent = np.array(self._sent).reshape(-1, 3)
            for place in np.unique(sent[:, 1]).tolist():
                items = sent[sent[:, 1] == place]
                axis, kind = divmod(int(place), len(KINDS))
                known += np.bincount(items[:, 0].astype(np.int64), minlength=len(known),
                                     weights=self.mesh.seconds(axis, kind, items[:, 2] * num_bytes))
            self._seconds[num_bytes] = known
        return known

    # ---- forms ------------------------------------------------------------------------------------------------------

    def _known_forms(self, sources: I64, targets: I64, room: Room) -> I64:
        """Return [sources, targets] the form of each change, after looking up those that are new."""
        table = self._tables.get(room)
        if table is None or len(table) < len(self.layouts):
            wider = np.full((len(self.layouts), len(self.layouts)), -1, dtype=np.int64)
            if table is not None:
                wider[:len(table), :len(table)] = table
            table = self._tables[room] = wider
        rows, columns = np.unique(sources), np.unique(targets)
        new = np.argwhere(table[rows[:, None], columns] < 0)
        if len(new):
            self._find_forms(table, rows[new[:, 0]], columns[new[:, 1]], room)
        return table[sources[:, None], targets]

    def _find_forms(self, table: I64, sources: I64, targets: I64, room: Room) -> None:
        codes = np.array(self._codes)
        sums = (codes == self._code.get(SUM, -1)).sum(axis=1)[sources] > 1
        for is_scattered in (False, True):
            chosen = np.flatnonzero(sums == is_scattered)
            if not len(chosen):
                continue
            rows, columns = sources[chosen], targets[chosen]
            keys = self._keys(np.concatenate([codes[rows], codes[columns]], axis=1), room if is_scattered else None)
            found, first, form_of = np.unique(keys, return_index=True, return_inverse=True)
            forms = [self._form((key, room if is_scattered else room.is_small), int(rows[place]), int(columns[place]),
                                room) for key, place in zip(found.tolist(), first.tolist(), strict=True)]
            table[rows, columns] = np.array(forms, dtype=np.int64)[form_of.reshape(-1)]

    def _keys(self, codes: I64, room: Room | None) -> I64:
        """Return equal numbers for pairs of layouts [pairs, 2 axes] of one form.

        A placement becomes where its dimension, and where it itself, occurs first; and with ``room`` what divides it.
        """
        dims = np.array([item.dim for item in self._code])[codes]
        kinds = np.unique((0,) if room is None or not room.divisors else room.divisors, return_inverse=True)[1]
        count = codes.shape[1]
        keys = np.zeros(len(codes), dtype=np.int64)
        for place in range(count):
            same_dim, same = (np.argmax(values == values[:, [place]], axis=1) for values in (dims, codes))
            value = 2 + same_dim * count + same
            if room is not None and room.divisors:
                value += count * count * kinds[np.maximum(dims[:, place], 0)]
            keys = keys * _PLACE_VALUES + np.where(dims[:, place] < 0, -1 - dims[:, place], value)
        return keys

    def _form(self, key: tuple[object, ...], source: int, target: int, room: Room) -> int:
        """Return the number of a form, of which a source and a target are given."""
        if key not in self._forms:
            form = self._forms[key] = len(self._forms)
            mesh = self.mesh.shape
            for step in steps_in(self.layouts[source], self.layouts[target], mesh, room, self.mesh.weights):
                if step.kind is not None:
                    self._sent.append((form, step.axis * len(KINDS) + step.kind, step.part(mesh)))
        return self._forms[key]


def mesh_shapes(num_devices: int, *, max_axes: int = 3) -> list[tuple[int, ...]]:
    """Return the shapes of meshes of so many devices, with up to ``max_axes`` axes of 2 or more each."""
    shapes: set[tuple[int, ...]] = {(num_devices,)}
    if max_axes > 1:
        for first in range(2, num_devices // 2 + 1):
            if num_devices % first == 0:
                shapes |= {(first, *rest) for rest in mesh_shapes(num_devices // first, max_axes=max_axes - 1)}
    return sorted(shapes, key=lambda shape: (len(shape), shape))
