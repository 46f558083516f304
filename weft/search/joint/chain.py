"""A model as a chain of pieces with what any run of them takes on the devices that share it: seconds and bytes.

Stages may begin and end at *places*: before every operator, or in a long model where least is sent. Seconds are prefix
sums at the places, so those of a stage are differences; bytes are tables from place to place
(``weft.plan.piece_memory``), which say the same as the account of a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.model.graph import F64, I64
from weft.plan.local_tensors import local_tensors
from weft.plan.memory import SEND_WINDOW
from weft.plan.op_bytes import crossing_bytes, prefix_sums
from weft.plan.piece_memory import PieceMemory
from weft.plan.plan import Replica, Stage
from weft.search.common.problem import Problem, mesh_axes
from weft.search.deploy.splits import NO_SPLITS, Splits, TpGroup, TpGroupTimes
from weft.search.joint.pieces import layer_starts
from weft.search.joint.tuning import TUNING

if TYPE_CHECKING:
    from weft.search.shard.tensor_costs import TensorCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What goes through a stage, and how it is kept."""

    num_samples: float
    """Of a micro-batch, on the device."""
    microbatches: int
    """In a step."""
    in_flight: float
    """For so many micro-batches activations are kept."""
    recompute: bool = False
    """Only inputs are kept; forwards run again before their backwards."""
    zero: int = 0
    """What is kept in pieces: 1 the optimizer's states, 2 gradients, too, 3 parameters, too."""
    part: float = 1.0
    """The part of what is in pieces that the device has."""
    chunks: float = 1
    """Of so many stages on the device one is at work at a time: each is charged its part of that."""
    is_alone: bool = False
    """No gradients are exchanged: those of the only micro-batch appear in its backward."""

    @property
    def is_only(self) -> bool:
        """Return whether gradients of parameters are not there before the only backward."""
        return self.is_alone and self.microbatches == 1

    @property
    def in_units(self) -> bool:
        """Return whether wholes come and go, unit by unit."""
        return self.zero >= 2

    def total(self, static: F64, kept: F64, forward: F64, backward: F64, inputs: F64, output_gradients: F64,
              input_gradients: F64) -> F64:
        """Return what stages take, of these parts: what they keep is for each micro-batch in flight.

        What a forward or a backward takes while it runs includes inputs and gradients of outputs.
        """
        early = inputs if self.microbatches > self.in_flight else 0.0 * inputs  # those of the next micro-batch
        work = np.maximum(np.maximum(forward, backward + early), kept + output_gradients + early)
        work = work + min(SEND_WINDOW, self.microbatches - 1) * input_gradients
        return np.asarray(static + max(0.0, self.in_flight - 1 / self.chunks) * kept + work / self.chunks)


class Chain(TpGroupTimes):
    """Figures of a model's pieces, computed when asked for."""

    def __init__(self, problem: Problem, splits: Splits = NO_SPLITS, *, ops: I64 | None = None,
                 num_stages: int = 1) -> None:
        """``ops`` are the operators to be cut, in order (all if absent), for up to so many stages."""
        super().__init__(problem, splits)
        self.ops: I64 = np.arange(problem.graph.num_ops) if ops is None else ops
        self.places: I64 = self._places(max(TUNING.max_places, 2 * num_stages))
        self._passes: dict[tuple[int, int, float], tuple[F64, F64]] = {}
        self._pieces: dict[tuple[int, int], PieceMemory] = {}
        self._static, self._passing = cache(self._find_static), cache(self._find_passing)
        self.capacity = cache(self._find_capacity)
        self._between_units = cache(self._find_between_units)

    def _places(self, wanted: int) -> I64:
        """Return where stages may begin: before all operators, or of many those with least to send among neighbours."""
        num_ops = len(self.ops)
        if num_ops <= wanted:
            return np.arange(num_ops + 1)
        load = prefix_sums(self.problem.op_seconds(self.problem.devices[0], self.problem.graph.batch)[self.ops])
        bucket = np.minimum((load / load[-1] * wanted).astype(np.int64), wanted - 1)
        order = np.lexsort((np.arange(num_ops + 1), self._crossing, bucket))
        first = np.concatenate(([True], np.diff(bucket[order]) > 0))
        return np.union1d(order[first], [0, num_ops])

    @property
    def num_places(self) -> int:
        """Return at how many places, both ends included, the model may be cut."""
        return len(self.places)

    # ---- seconds ----------------------------------------------------------------------------------------------------

    def passes(self, tp_group: TpGroup, num_samples: float) -> tuple[F64, F64]:
        """Return the seconds of forward and backward up to each place, for so many samples at once."""
        key = (*self.figures_key(tp_group), num_samples)
        if key not in self._passes:
            forward, backward = (prefix_sums(seconds[self.ops])[self.places]
                                 for seconds in self.op_passes(tp_group, num_samples))
            self._passes[key] = forward, backward
        return self._passes[key]

    def step_seconds(self, device: DeviceId, num_samples: float) -> F64:
        """Return the seconds of forward and backward up to each place on one device, a second forward included."""
        forward, backward = self.passes((device,), num_samples)
        again = forward if self.problem.options.recompute and self.problem.is_training else 0.0
        return np.asarray(forward + backward + again, dtype=np.float64)

    def crossing_seconds(self, num_samples: float, devices: Sequence[DeviceId]) -> F64:
        """Return by place the time of its messages in one direction, on the slowest of neighbouring devices."""
        pairs = [(a, b) for a, b in itertools.pairwise(devices) if a != b]
        if not pairs:
            return np.zeros(self.num_places)
        routes = [self.problem.cluster.route(source, target) for source, target in pairs]
        latency, rate = max(route.latency_s for route in routes), min(route.bytes_per_s for route in routes)
        seconds = np.where(self.crossing > 0, latency + num_samples * self.crossing / rate, 0.0)
        seconds[[0, -1]] = 0.0
        return np.asarray(seconds, dtype=np.float64)

    def speed(self, tp_group: TpGroup) -> float:
        """Return samples per second of the whole model on a tp group."""
        return self.problem.graph.batch / max(float(sum(column[-1] for column in self.passes(
            tp_group, float(self.problem.graph.batch)))), 1e-12)

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def pieces(self, tp_group: TpGroup) -> PieceMemory:
        """Return what one device of the tp group holds."""
        split = self.split_of(tp_group)
        key = len(tp_group), 0 if split is None else id(split)
        if key not in self._pieces:
            problem, graph = self.problem, self.problem.graph
            local = {} if split is None else local_tensors(
                graph, *_one_stage(graph.op_names, split, len(tp_group)), self.ops, np.zeros(0, dtype=np.int64))
            self._pieces[key] = PieceMemory(graph, self.ops, self.places, training=problem.is_training, local=local,
                                            optimizer=problem.options.optimizer, max_samples=problem.options.batch)
        return self._pieces[key]

    def stage_bytes(self, tp_group: TpGroup, begin: int, load: Load) -> F64:
        """Return what stages from a place to each place from there on take on a device of the tp group at their peak.

        A stage that recomputes does so as a whole; see ``segmented_bytes``.
        """
        return load.total(*(table[begin, begin:] for table in self._tables(tp_group, load)))

    def segmented_bytes(self, tp_group: TpGroup, ends: Sequence[int], load: Load) -> float:
        """Return the same for one stage that recomputes in segments, from each of the ends to the next."""
        tables, here, there, last = self._tables(tp_group, load), np.array(ends[:-1]), np.array(ends[1:]), ends[-1]
        static, kept, _, _, inputs, *gradients = (table[ends[0], last] for table in tables)
        forward, backward, each = (table[here, there] for table in tables[2:5])
        needed = np.cumsum(each)
        before = needed - each
        if load.is_only:  # the gradients of later segments are there by then
            backward = backward + self.pieces(tp_group).lasting.gradients[there, last]
        return float(load.total(static, kept - inputs + needed[-1], (before + forward).max(), (before + backward).max(),
                                inputs, *gradients))

    def _tables(self, tp_group: TpGroup, load: Load) -> tuple[F64, ...]:
        """Return [begin, end] the parts of ``Load.total``."""
        pieces = self.pieces(tp_group)
        static = self._static(tp_group if load.in_units else None, pieces, load.zero, load.part, load.is_only)
        passing = self._passing(pieces, load.num_samples, load.recompute, load.is_only)
        if not load.in_units or load.recompute:
            return static, *passing
        return static, passing[0] + self._between_units(pieces, load.num_samples), *passing[1:]

    def _find_static(self, tp_group: TpGroup | None, pieces: PieceMemory, zero: int, part: float,
                     is_only: bool) -> F64:
        """Return what is there all the time; of what comes and goes unit by unit two of the largest, as ever."""
        parameters, gradients, states, buffers = pieces.lasting
        own = [part if zero >= level else 1.0 for level in (3, 2, 1)]
        total = own[0] * parameters + own[2] * states + buffers + (0.0 if is_only else own[1]) * gradients
        if tp_group is not None:
            unit = self.largest_unit(tp_group)
            total = total + (2 + own[1]) * np.minimum(unit, gradients) + (zero >= 3) * 2 * np.minimum(unit, parameters)
        return np.asarray(total, dtype=np.float64)

    def _find_between_units(self, pieces: PieceMemory, num_samples: float) -> F64:
        """Return what units inside keep of what they read from each other, though no operator's backward needs it."""
        now, before = pieces.passing(num_samples), np.zeros(self.num_places)
        inside = self.unit_places[1:-1]
        before[inside] = (now.outputs - now.kept_outputs)[inside]
        total = np.cumsum(before)
        return np.asarray(np.maximum(0.0, (total - before)[None, :] - total[:, None]), dtype=np.float64)

    # ---- units ------------------------------------------------------------------------------------------------------

    @cached_property
    def unit_starts(self) -> tuple[int, ...]:
        """Return the operators at which units begin, besides the first."""
        return layer_starts(self.problem.graph)

    @cached_property
    def unit_places(self) -> I64:
        """Return the places that are nearest to where units begin, both ends included."""
        starts = np.searchsorted(self.ops, self.unit_starts)
        after = np.clip(np.searchsorted(self.places, starts), 1, self.num_places - 1)
        before = after - 1
        near = np.where(starts - self.places[before] < self.places[after] - starts, before, after)
        return np.unique(np.concatenate([[0], near, [self.num_places - 1]]))

    def units_between(self, first: int, last: int) -> list[int]:
        """Return the places at which units of a stage from place to place end, and where it begins."""
        inside = self.unit_places[(self.unit_places > first) & (self.unit_places < last)]
        return [first, *inside.tolist(), last]

    def largest_unit(self, tp_group: TpGroup) -> float:
        """Return the bytes of parameters of the largest unit, on a device of the tp group."""
        parameters, ends = self.pieces(tp_group).lasting.parameters, self.unit_places
        return float(parameters[ends[:-1], ends[1:]].max())

    def _find_passing(self, pieces: PieceMemory, num_samples: float, recompute: bool,
                      is_only: bool) -> tuple[F64, ...]:
        """Return all tables but the first, of stages that recompute as a whole."""
        now = pieces.passing(num_samples)
        if not self.problem.is_training:
            none = np.broadcast_to(0.0, now.inputs.shape)
            return none, now.inputs + now.forward + SEND_WINDOW * now.outputs, none, none, none, none
        backward = now.first_backward if is_only else now.backward
        if recompute:
            kept, backward = now.inputs + now.outputs, np.maximum(backward, now.forward)
        else:
            kept = now.saved - now.saved_inputs + now.inputs + now.outputs - now.kept_outputs
        return (kept + now.copied_outputs, now.inputs + now.forward, now.inputs + backward + now.output_gradients,
                now.inputs, np.broadcast_to(now.output_gradients, kept.shape), now.input_gradients)

    @cached_property
    def _crossing(self) -> F64:
        """Return the bytes that go over a cut before each operator, for the batch traced."""
        return crossing_bytes(self.problem.graph, self.ops)

    @cached_property
    def crossing(self) -> F64:
        """Return the bytes that go over each place, for one sample."""
        return np.asarray(self._crossing[self.places] / self.problem.graph.batch)

    @cached_property
    def narrow_places(self) -> I64:
        """Return the places inside where about least crosses."""
        inside = self.crossing[1:-1]
        return 1 + np.flatnonzero(inside <= TUNING.about_least * inside.min(initial=np.inf))

    def _find_capacity(self, tp_group: TpGroup) -> float:
        """Return the memory of the tp group's smallest device."""
        sizes = [self.problem.cluster.devices[device].memory_bytes for device in tp_group]
        return min((float(size) for size in sizes if size is not None), default=float("inf"))


def _one_stage(op_names: Sequence[str], split: TensorCosts, degree: int) -> tuple[Stage, Replica]:
    replica = Replica(devices=tuple(map(str, range(degree))), mesh=mesh_axes(degree, split.cp))
    return Stage(name="all", ops=tuple(op_names), sharding=split.sharding, replicas=(replica,)), replica
