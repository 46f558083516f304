"""Deployments of a training graph on a cluster: from a choice for every operator group to its simulated time.

``Deployer`` holds what is needed to evaluate any choice for one number of micro-batches. ``evaluate`` turns the actions
into layouts (which devices run a group on which samples), picks the exchange of gradients, and runs the compiled
simulation. ``weft.search.deploy.deployer`` makes the plan.

From a deployment to the plan that it means: one stage for each block, orders as simulated, exchanges by bucket.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from weft.cluster.cluster import DeviceId
from weft.cost.pair_times import PairTimes, check_pairs
from weft.model.graph import F64, I64
from weft.plan.op_bytes import kept_by_op
from weft.plan.orders import Action as Planned
from weft.plan.plan import GradientExchange, Plan, split_samples
from weft.plan.stage_memory import stage_memory
from weft.search.common.problem import Problem, StageSpec, make_plan
from weft.search.deploy.actions import Action, Layout, list_actions
from weft.search.deploy.blocks import Layouts, Outcome, World, find_blocks
from weft.search.deploy.exchange import Bucket, Exchanges
from weft.search.deploy.kernel import least_seconds, run
from weft.search.deploy.op_groups import OpGroups
from weft.search.deploy.splits import NO_SPLITS, Splits, TpGroupTimes

_ROUNDING: Final = 1e-9
"""Sums in another order may differ by such a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How a deployment runs."""

    seconds: float
    """Of one step; what it would take if memory were no limit."""
    missing_bytes: float
    """Beyond the capacity of devices, in all; zero where it fits."""
    outcome: Outcome
    layout_of: I64

    @property
    def fits(self) -> bool:
        """Return whether it fits the memory of all devices, by estimate."""
        return self.missing_bytes == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A deployment that was evaluated, as a choice for each group; several choices may be the same deployment."""

    deployer: Deployer
    choice: tuple[int, ...]
    evaluation: Evaluation

    @property
    def key(self) -> tuple[float, float]:
        """Return what to minimise: bytes that are missing, then time."""
        return self.evaluation.missing_bytes, self.evaluation.seconds


class Deployer(TpGroupTimes):
    """Evaluates deployments for one number of micro-batches; see the module's docstring."""

    def __init__(self, problem: Problem, groups: OpGroups, microbatches: int, *, splits: Splits = NO_SPLITS,
                 use_factors: bool = True, use_shares: bool = True, world: World | None = None) -> None:
        """``splits`` say how devices divide operators; ``world`` is another deployer's of the same operator groups."""
        super().__init__(problem, splits)
        self.groups, self.microbatches, self.use_shares = groups, microbatches, use_shares
        self.size = problem.options.batch // microbatches
        self.speeds = [1.0 / max(float(problem.op_seconds(device, self.size).sum()), 1e-12)
                       for device in problem.devices]
        actions = list_actions(self.device_groups, self.speeds, tp_groups=splits)
        self.actions = tuple(action for action in actions if use_shares or not action.by_speed)
        self.world = world or make_world(problem, groups)
        self.exchanges = Exchanges(problem, groups, use_factors=use_factors, held_part=self._held_part,
                                    summed=self._summed)
        self.layouts: list[Layout] = []
        """All that were used so far, by id."""
        self._ids: dict[Layout, int] = {}
        self._columns: list[_LayoutColumns] = []
        self._tables: Layouts | None = None
        self._runs: dict[tuple[int, int, int], list[int]] = {}
        self._known: dict[bytes, Evaluation] = {}
        self._slower: dict[bytes, float] = {}
        """Seconds that deployments are known to exceed; infinite for those that do not fit."""
        self.num_simulations = 0
        self.num_asked = 0
        """Evaluations asked for, remembered ones included."""

    def twin(self) -> Deployer:
        """Return another deployer of the same deployments, for another thread."""
        return Deployer(self.problem, self.groups, self.microbatches, splits=self.splits,
                        use_factors=self.exchanges.use_factors, use_shares=self.use_shares, world=self.world)

    @cached_property
    def group_seconds(self) -> F64:
        """Return [groups, devices]: forward and backward of one micro-batch's samples on one device."""
        return np.stack([np.add(*map(self.by_group, self.op_passes((device,), self.size)))
                         for device in self.problem.devices], axis=1)

    @cached_property
    def crossing_bytes(self) -> F64:
        """Return the bytes per sample that cross the place before each group, and the end."""
        change = np.zeros(self.groups.num_groups + 2)
        for bundle in self.groups.bundles:
            change[bundle.producer + 1] += bundle.bytes_per_sample
            change[bundle.consumers[-1] + 1] -= bundle.bytes_per_sample
        return np.cumsum(change)[:-1]

    @cached_property
    def by_weight(self) -> tuple[int, ...]:
        """Return the groups from the heaviest to the lightest: the order of decisions."""
        work = self.group_seconds.mean(axis=1)
        parameters = self.exchanges.group_bytes
        weight = work / max(work.sum(), 1e-300) + parameters / max(parameters.sum(), 1.0)
        return tuple(int(group) for group in np.argsort(-weight, kind="stable"))

    def find(self, choice: Sequence[int]) -> Found:
        """Return the deployment of this choice with how it runs."""
        return Found(deployer=self, choice=tuple(choice), evaluation=self.evaluate(choice))

    def evaluate(self, choice: Sequence[int]) -> Evaluation:
        """Return how the deployment runs in which group ``g`` takes action ``choice[g]``."""
        return self.evaluate_layouts(self.layouts_of(choice))

    def evaluate_layouts(self, layout_of: I64) -> Evaluation:
        """Return how the deployment with these layouts runs; simulated once, then remembered."""
        self.num_asked += 1
        key = layout_of.tobytes()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._simulate(layout_of)
        return known

    def evaluate_within(self, choice: Sequence[int], limit_s: float) -> Evaluation | None:
        """Return how a deployment runs that fits the memory and takes no longer than ``limit_s``; None for others.

        That costs no simulation where the work of a device, a link or the memory says no, and a part of one where the
        limit is missed on the way.
        """
        self.num_asked += 1
        limit_s *= 1 + _ROUNDING
        layout_of = self.layouts_of(choice)
        key = layout_of.tobytes()
        known = self._known.get(key)
        if known is None:
            if self._slower.get(key, -1.0) >= limit_s or self._bound(layout_of) > limit_s:
                return None
            known = self._simulate(layout_of, must_fit=True, limit_s=limit_s)
            if not np.isfinite(known.seconds):
                self._slower[key] = limit_s if known.fits else np.inf
                return None
            self._known[key] = known
        return known if known.fits and known.seconds <= limit_s else None

    def bound(self, choice: Sequence[int]) -> float:
        """Return the least seconds of a deployment by the work of its devices; no simulation is needed."""
        return self._bound(self.layouts_of(choice))

    def _bound(self, layout_of: I64) -> float:
        return least_seconds(self.tables, layout_of, len(self.speeds), self.microbatches, self.problem.is_training)

    def _simulate(self, layout_of: I64, *, must_fit: bool = False, limit_s: float = np.inf) -> Evaluation:
        if self.splits and not (self._tp_groups_agree(layout_of) and self._ties_agree(layout_of)):
            return self._impossible(layout_of)
        buckets = self.exchanges.buckets(layout_of.tolist(), self.layouts)
        for ahead in (2, 1) if self.microbatches > 1 else (1,):
            outcome = run(self.world, self.tables, buckets.columns, layout_of, self.microbatches, ahead,
                          self.problem.is_training, must_fit or ahead > 1, limit_s)
            self.num_simulations += outcome.num_events > 0
            missing = float(np.maximum(outcome.used - self.world.capacity, 0.0).sum())
            if missing == 0:
                break
        return Evaluation(seconds=float(outcome.seconds), missing_bytes=missing, outcome=outcome, layout_of=layout_of)

    def _ties_agree(self, layout_of: I64) -> bool:
        """Return whether devices hold the same part of a parameter for all groups that read it."""
        homes = self.groups.home_of_parameter
        return all(len({len(self.layouts[layout_of[group]].replicas[0][0]) for group in homes[tensor]}) == 1
                   for tensor in self.exchanges.tied)

    def _tp_groups_agree(self, layout_of: I64) -> bool:
        """Return whether every device is in the same tp group wherever it is used: tp groups do all things together."""
        tp_group_of: dict[DeviceId, tuple[DeviceId, ...]] = {}
        return all(tp_group_of.setdefault(device, tp_group) == tp_group for number in np.unique(layout_of).tolist()
                   for tp_group, _ in self.layouts[number].replicas for device in tp_group)

    def _impossible(self, layout_of: I64) -> Evaluation:
        """Return what a deployment that no plan can say is worth: nothing."""
        nothing = np.zeros(len(self.world.capacity))
        outcome = Outcome(np.inf, nothing, nothing, np.zeros(self.world.num_resources), nothing,
                          np.zeros(self.groups.num_groups), np.zeros((0, 0)), 0)
        return Evaluation(seconds=np.inf, missing_bytes=np.inf, outcome=outcome, layout_of=layout_of)

    # ---- layouts ----------------------------------------------------------------------------------------------------

    def layouts_of(self, choice: Sequence[int]) -> I64:
        """Return the layout of each group; pipelines are cut where the groups with the same action begin and end."""
        result: list[int] = []
        for action, stretch in itertools.groupby(choice):
            first, last = len(result), len(result) + len(list(stretch))
            key = int(action), first, last
            known = self._runs.get(key)
            if known is None:
                known = self._runs[key] = self._laid_out(first, last, self.stages(self.actions[action]))
            result += known
        return np.asarray(result, dtype=np.int64)

    def spelled_out(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return the same deployment with stages of pipelines as actions of their own, where there are such."""
        return tuple(self._action_of_layout.get(layout, action)
                     for layout, action in zip(self.layouts_of(choice).tolist(), choice, strict=True))

    @cached_property
    def _action_of_layout(self) -> dict[int, int]:
        stages = ((index, self.stages(action)) for index, action in enumerate(self.actions))
        return {self.layout_id(layouts[0]): index for index, layouts in reversed(list(stages)) if len(layouts) == 1}

    def layout_id(self, layout: Layout) -> int:
        """Return the number of a layout."""
        known = self._ids.get(layout)
        if known is None:
            known = self._ids[layout] = len(self.layouts)
            self.layouts.append(layout)
            self._columns.append(self._layout_columns(layout))
            self._tables = None
        return known

    def stages(self, action: Action) -> tuple[Layout, ...]:
        """Return the layouts that an action lays consecutive groups over."""
        match action.kind:
            case "replicate":
                return (self._replicated(action.devices, by_speed=action.by_speed),)
            case "single":
                return (Layout((((action.devices[0],), self.size),)),)
            case "pipeline":
                return tuple(Layout((((device,), self.size),)) for device in action.devices)
            case "pipeline groups":
                return tuple(self._replicated(self.device_groups[group], by_speed=False)
                             for group in action.device_groups)
            case "tensor":
                tp_groups = action.tp_groups(self.device_groups)
                power = tuple(sum(self.speeds[device] for device in tp_group) for tp_group in tp_groups)
                counts = split_samples(self.size, power if self.use_shares else (1.0,) * len(tp_groups))
                shares = zip(tp_groups, counts, strict=True)
                return (Layout(tuple((tp_group, count) for tp_group, count in shares if count)),)

    def _replicated(self, devices: Sequence[DeviceId], *, by_speed: bool) -> Layout:
        weights = tuple(self.speeds[device] if by_speed else 1.0 for device in devices)
        counts = split_samples(self.size, weights)
        return Layout(tuple(((device,), count) for device, count in zip(devices, counts, strict=True) if count))

    def _laid_out(self, first: int, last: int, stages: Sequence[Layout]) -> list[int]:
        """Return the stage of each group from ``first`` up to ``last``: each takes work as suits its speed."""
        if len(stages) == 1:
            return [self.layout_id(stages[0])] * (last - first)
        power = np.asarray([sum(self.speeds[device] for device in stage.devices) for stage in stages])
        work = self.group_seconds[first:last].mean(axis=1) + 1e-12
        middle = (np.cumsum(work) - work / 2) / work.sum()
        stage = np.searchsorted(np.cumsum(power) / power.sum(), middle)
        return [self.layout_id(stages[index]) for index in np.minimum(stage, len(stages) - 1)]

    # ---- columns ----------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Layouts:
        """Return the columns of all layouts."""
        if self._tables is None:
            self._tables = _pack_layouts(self._columns, self.groups.num_groups)
        return self._tables

    def by_group(self, values: F64) -> F64:
        """Return the sum over each group's operators."""
        return np.asarray(np.add.reduceat(values, self.groups.start[:-1]))

    def _summed(self, tp_group: Sequence[DeviceId]) -> frozenset[int]:
        split = self.split_of(tp_group)
        return frozenset() if split is None else split.summed

    def _held_part(self, tp_group: Sequence[DeviceId]) -> F64 | None:
        split = self.split_of(tp_group)
        return None if split is None else split.held_part

    def _layout_columns(self, layout: Layout) -> _LayoutColumns:
        rows, times, first = [], [], 0
        split = self.split_of(layout.replicas[0][0])
        static = self.exchanges.static_bytes if split is None else self.exchanges.held_bytes(split.held_part)
        saved = np.ones(self.groups.num_groups) if split is None else self._saved_part(split.saved_part)
        for tp_group, samples in layout.replicas:
            passes = [self.by_group(seconds) for seconds in self.op_passes(tp_group, samples)]
            for position, device in enumerate(tp_group):
                rows.append((device, first, first + samples, position, len(tp_group)))
                times.append([*passes, static * self.exchanges.step_s_per_byte[device]])
            first += samples
        return _LayoutColumns(np.asarray(rows, dtype=np.int64), np.stack(times, axis=2), static, saved)

    def _saved_part(self, part: F64) -> F64:
        """Return the part of what each group keeps for its backward that a device keeps, from that of operators."""
        kept = kept_by_op(self.problem.graph)
        return self.by_group(kept * part) / np.maximum(self.by_group(kept), 1.0)


class _LayoutColumns(NamedTuple):
    slots: I64
    """[slots, 5] device, first sample, last sample, place in the replica, devices of the replica."""
    times: F64
    """[forward, backward and step, groups, slots]"""
    static: F64
    """[groups]"""
    saved: F64
    """[groups] part of what a group keeps for its backward."""


def _pack_layouts(items: Sequence[_LayoutColumns], num_groups: int) -> Layouts:
    times = np.zeros((3, len(items), num_groups, max(len(item.slots) for item in items)))
    for index, item in enumerate(items):
        times[:, index, :, : len(item.slots)] = item.times
    device, first, stop, position, size = np.ascontiguousarray(np.concatenate([item.slots for item in items]).T)
    return Layouts(
        slot_start=_starts([item.slots for item in items]), slot_device=device, slot_first=first, slot_stop=stop,
        replica_position=position, replica_size=size, forward_s=times[0], backward_s=times[1], step_s=times[2],
        static=np.stack([item.static for item in items]), saved_part=np.stack([item.saved for item in items]))


def make_world(problem: Problem, groups: OpGroups) -> World:
    """Return the columns that do not depend on the deployment."""
    cluster, bundles = problem.cluster, groups.bundles
    check_pairs(cluster, "the search for deployments", "use `weft plan`")
    devices = range(cluster.num_devices)
    latency, rate = np.zeros((len(devices), len(devices))), np.zeros((len(devices), len(devices)))
    resources: list[tuple[int, ...]] = []
    times = PairTimes(problem.costs, (0.0, 1e6))
    for source in devices:
        for target in devices:
            zero, mega = times.seconds(source, target)
            latency[source, target], rate[source, target] = zero, (mega - zero) / 1e6
            resources.append(cluster.transfer_resources(DeviceId(source), DeviceId(target)))
    saved, work = _activation_bytes(problem, groups)
    return World(
        np.asarray([item.producer for item in bundles], dtype=np.int64), _starts([item.consumers for item in bundles]),
        np.asarray([group for item in bundles for group in item.consumers], dtype=np.int64),
        np.asarray([(item.bytes_per_sample, item.fixed_bytes, item.gradient_bytes_per_sample,
                     item.gradient_fixed_bytes) for item in bundles]).reshape(-1, 4),
        latency, rate, _starts(resources), np.asarray([item for row in resources for item in row], dtype=np.int64),
        cluster.num_resources, saved, work,
        np.asarray([np.inf if device.memory_bytes is None else device.memory_bytes for device in cluster.devices],
                   dtype=np.float64))


def _starts(rows: Sequence[Sized]) -> I64:
    return np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)


def _activation_bytes(problem: Problem, groups: OpGroups) -> tuple[F64, F64]:
    """Return the bytes per sample that each group keeps for its backward, and those that it needs while it runs."""
    graph = problem.graph
    saved, work = np.zeros(groups.num_groups), np.zeros(groups.num_groups)
    if problem.is_training:
        saved = np.asarray(np.add.reduceat(kept_by_op(graph), groups.start[:-1]))
    source, target = groups.of_op[graph.edges[:, 0]], groups.of_op[graph.edges[:, 1]]
    crossing = np.unique(graph.edges[source != target, 2])
    for group in range(groups.num_groups):
        memory = stage_memory(graph, groups.ops(group), num_samples=graph.batch, training=problem.is_training,
                              crossing=crossing)
        work[group] = max(memory.forward_peak - memory.saved, memory.backward_work, 0)
    return saved / graph.batch, work / graph.batch


# ---- plans of deployments --------------------------------------------------------------------------------------------


def deployment_plan(deployer: Deployer, found: Evaluation, *, by: str) -> Plan:
    """Return the plan of an evaluated deployment."""
    problem, layouts = deployer.problem, [deployer.layouts[index] for index in found.layout_of]
    block_of = find_blocks(found.layout_of)
    specs = []
    for block in range(int(block_of[-1]) + 1):
        groups = np.flatnonzero(block_of == block)
        ops = np.concatenate([deployer.groups.ops(int(group)) for group in groups])
        specs.append(deployer.stage(ops, layouts[groups[0]].replicas, recompute=problem.options.recompute))
    orders = _orders(deployer, found, specs)
    devices = tuple(orders)
    plan = make_plan(problem, specs, [orders[device] for device in devices], microbatches=deployer.microbatches, by=by,
                     order_devices=devices)
    if not problem.is_training:
        return plan
    # In the order in which their gradients are there: a plan's exchanges are done in the order given.
    end_s = found.outcome.group_end_s
    buckets = sorted(deployer.exchanges.buckets(found.layout_of.tolist(), deployer.layouts).items,
                     key=lambda bucket: (max(end_s[group] for group in bucket.groups), -min(bucket.groups)))
    return replace(plan, gradients=tuple(_exchanges(deployer, plan, buckets)))


def _exchanges(deployer: Deployer, plan: Plan, buckets: Sequence[Bucket]) -> Iterator[GradientExchange]:
    """Yield the plan's exchanges: as the buckets are, but part by part where devices hold parts of parameters."""
    problem = deployer.problem
    names, tensor_names = [device.name for device in problem.cluster.devices], problem.graph.tensor_names
    for bucket in buckets:
        parameters = tuple(tensor_names[tensor] for tensor in bucket.parameters)
        if not bucket.is_divided:
            yield GradientExchange(parameters=parameters, method=bucket.method,
                                   devices=tuple(names[device] for device in bucket.devices))
            continue
        chosen, parts = set(parameters), defaultdict[tuple[str, ...], list[str]](list)
        for item in plan.gradients:
            parts[item.devices] += [name for name in item.parameters if name in chosen]
        for devices, own in parts.items():
            if own:
                yield GradientExchange(parameters=tuple(own), devices=devices)


def _orders(deployer: Deployer, found: Evaluation, specs: list[StageSpec]) -> dict[DeviceId, list[Planned]]:
    """Return what each device that is used does, in the order in which it, or the first of its tp group, began."""
    items: dict[tuple[DeviceId, ...], list[tuple[float, int, Planned]]] = {}
    slot, microbatches = 0, deployer.microbatches
    for stage, spec in enumerate(specs):
        for tp_group, _ in spec.replicas:
            for row, start in enumerate(found.outcome.starts[:, slot].tolist()):
                action: Planned = (stage, "F" if row < microbatches else "B", row % microbatches)
                # Of two that begin together one takes no time: forwards run up the stages, backwards down.
                rank = row * len(specs) + (stage if row < microbatches else len(specs) - stage)
                items.setdefault(tp_group, []).append((start, rank, action))
            slot += len(tp_group)
    orders = {tp_group: [action for _, _, action in sorted(entries)] for tp_group, entries in items.items()}
    return dict(sorted((device, order) for tp_group, order in orders.items() for device in tp_group))
