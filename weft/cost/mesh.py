"""A mesh of devices: what collectives along its axes take.

The devices of a group lie on the mesh in row-major order: on a mesh of 2 x 4 the first axis joins devices 0 and 4, the
second 0 to 3. All groups of an axis do the same at the same time and share links. A collective that was measured for
such groups takes as long as the fit says, times what sharing adds by the links' account.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from weft.base.errors import InputError
from weft.cluster.cluster import Cluster
from weft.cost.collectives import Algorithm, Collective, CollectiveModel, Line, scope_of, step_counts
from weft.cost.profile import CommFit
from weft.model.graph import F64
from weft.sharding.layout_steps import ALL_GATHER, KIND_NAMES

KINDS: Final = tuple(Collective(name) for name in KIND_NAMES)


class Mesh:
    """Devices of a cluster on a grid, and what collectives along its axes take."""

    def __init__(self, cluster: Cluster, devices: Sequence[int], shape: Sequence[int], *,
                 comm_fits: Mapping[tuple[str, str], CommFit] | None = None) -> None:
        """``comm_fits`` are measured collectives, ``Costs.comm_fits``."""
        if math.prod(shape) != len(devices) or any(size < 1 for size in shape):
            raise InputError(f"a mesh of {'x'.join(map(str, shape))} has {math.prod(shape)} places, but the group has "
                             f"{len(devices)} devices: choose sizes whose product is {len(devices)}")
        self.cluster = cluster
        self.devices = tuple(devices)
        self.shape = tuple(shape)
        self._fits = comm_fits or {}
        self._model = CollectiveModel(cluster)

    @property
    def name(self) -> str:
        """Return the mesh as people write it: ``2x4``."""
        return "x".join(map(str, self.shape))

    def groups(self, axis: int) -> list[tuple[int, ...]]:
        """Return the groups of devices along an axis."""
        grid = np.array(self.devices).reshape(self.shape)
        return [tuple(row) for row in np.moveaxis(grid, axis, -1).reshape(-1, self.shape[axis]).tolist()]

    @cached_property
    def lines(self) -> list[list[tuple[F64, F64]]]:
        """Return [axis][collective] (latency, seconds by byte) of every algorithm, all groups of an axis at once."""
        found = [[self._axis_lines(axis, kind) for kind in KINDS] for axis in range(len(self.shape))]
        return [[(np.array([line.latency_s for line in lines]), np.array([line.s_per_byte for line in lines]))
                 for lines in row] for row in found]

    def _axis_lines(self, axis: int, kind: Collective) -> Sequence[Line]:
        if self.shape[axis] == 1:
            return (Line(0.0, 0.0),)
        groups = self.groups(axis)
        fits = [self._fits.get((kind.value, scope_of(self.cluster, group))) for group in groups]
        if self._fits and all(fits):
            lines = [self._fitted(fit, kind, groups, place) for place, fit in enumerate(fits) if fit is not None]
            return (Line(max(line.latency_s for line in lines), max(line.s_per_byte for line in lines)),)
        return self._model.lines_together(kind, groups)

    def _fitted(self, fit: CommFit, kind: Collective, groups: Sequence[Sequence[int]], place: int) -> Line:
        """Return the measured time of one group, as much longer as all groups at once take by the links' account."""
        size = len(groups[place])
        counts = step_counts(kind, Algorithm(fit.algorithm), size)
        alone = min(line.s_per_byte for line in self._model.lines_together(kind, [groups[place]]))
        together = min(line.s_per_byte for line in self._model.lines_together(kind, groups))
        sharing = max(1.0, together / alone) if alone > 0 else 1.0
        return Line(counts.latency_s * fit.latency_s, counts.s_per_byte * fit.s_per_byte * sharing)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Return how long a byte takes along each axis in relation to the fastest, by the links, as a power of two.

        They decide which way tensors take from one layout to another. Runs have no measurements, so none count here.
        """
        rates = [min(line.s_per_byte for line in self._model.lines_together(KINDS[ALL_GATHER], self.groups(axis)))
                 * size / (size - 1) for axis, size in enumerate(self.shape) if size > 1]
        fastest = min((rate for rate in rates if rate > 0), default=1.0)
        weights = iter([2.0 ** round(math.log2(rate / fastest)) if rate > 0 else 1.0 for rate in rates])
        return tuple(next(weights) if size > 1 else 1.0 for size in self.shape)

    def seconds(self, axis: int, kind: int, num_bytes: F64) -> F64:
        """Return the time of a collective along an axis on so many bytes each; nothing for no bytes."""
        latency, rate = self.lines[axis][kind]
        times: F64 = (latency[:, None] + rate[:, None] * num_bytes[None, :]).min(axis=0)
        return np.where(num_bytes > 0, times, 0.0)
