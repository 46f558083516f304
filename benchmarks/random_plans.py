"""Random plans of every kind for a random model, on 1 to 4 devices of equal or unequal speed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from benchmarks.random_models import DrawnModel
from tests.run.plans import greedy_order, make_plan, opposite_plan, pipeline_plan, replicated_plan
from tests.run.test_exchange import by_factors, by_hosts, by_servers
from tests.run.unit_plans import unit_plan
from tests.search.joint.test_baselines import mixed_cluster
from weft.cluster.cluster import Cluster
from weft.cost.costs import estimate_costs
from weft.model.graph import Graph
from weft.plan.orders import Order, forward_only, gpipe, interleaved, one_f_one_b
from weft.plan.plan import Optimizer, Plan, Replica, Stage, Storage
from weft.run.prepare import Tracer
from weft.search.common.budget import Budget
from weft.search.common.problem import PlanOptions, Problem
from weft.sharding.named_ops import named_ops

SIZE: Final = 2
"""Samples of a micro-batch, as traced."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What plans of one model are drawn from."""

    model: DrawnModel
    tracer: Tracer
    num_devices: int
    rng: random.Random

    @cached_property
    def graph(self) -> Graph:
        """Return the model as planners see it."""
        return self.tracer.trace(SIZE).graph

    @property
    def mode(self) -> str:
        """Return what the model is for."""
        return self.model.source.mode

    @cached_property
    def cluster(self) -> Cluster:
        """Return devices of which some may be faster."""
        speeds = [1e9] * self.num_devices
        if self.rng.random() < 0.5:
            speeds = [self.rng.choice([1e9, 2e9, 3e9]) for _ in speeds]
        return mixed_cluster(speeds)

    def problem(self, microbatches: int, **options: object) -> Problem:
        """Return the planning problem with so many micro-batches."""
        return Problem(graph=self.graph, cluster=self.cluster, costs=estimate_costs(self.graph, self.cluster, dtype="float64"),
                       options=PlanOptions(batch=SIZE * microbatches, mode=self.mode, **options))

    def cuts(self, num_stages: int) -> list[list[str]]:
        """Return the operators in order, cut at random places; every stage has one that is not constant."""
        graph = self.graph
        useful = [op for op in range(1, graph.num_ops) if not graph.is_constant[:op].all() and not graph.is_constant[op]]
        places = [0, *sorted(self.rng.sample(useful, num_stages - 1)), graph.num_ops]
        return [list(graph.op_names[first:last]) for first, last in pairwise(places)]


Maker = Callable[[World], Plan]


# ---- one stage on one or several devices ------------------------------------------------------------------------------


def single(world: World) -> Plan:
    return replicated_plan(world.graph, [[(0, 1.0)]], microbatches=world.rng.randint(1, 3), batch=12, num_devices=1)


def replicas(world: World, shares: list[float] | None = None) -> Plan:
    """Return the whole model on all devices."""
    count = world.num_devices
    given = shares or [1 / count] * count
    per_microbatch = 2 * count if shares is None else 8
    microbatches = world.rng.randint(1, 2)
    return replicated_plan(world.graph, [list(enumerate(given))], microbatches=microbatches,
                           batch=per_microbatch * microbatches, num_devices=count)


def uneven(world: World) -> Plan:
    parts = {2: [(0.75, 0.25), (0.625, 0.375)], 3: [(0.5, 0.25, 0.25)], 4: [(0.5, 0.25, 0.125, 0.125)]}
    return replicas(world, list(world.rng.choice(parts[world.num_devices])))


def divided_states(world: World) -> Plan:
    return replace(replicas(world), optimizer=Optimizer(kind="adamw", lr=0.1, sharded=True))


def in_pieces(world: World) -> Plan:
    """Return units, on all devices or on each half of a pipeline, that keep something in pieces in some way."""
    rng, count = world.rng, world.num_devices
    pieces = rng.choice(["states", "gradients", "parameters", "parameters"])
    size = count // 2 if count == 4 and rng.random() < 0.5 else count
    groups, shares = ((), ()) if size == count or rng.random() < 0.4 else (((0, 1), (2, 3)), ())
    meshes = [range(count)] if groups or size == count else [range(2), range(2, 4)]
    if rng.random() < 0.4:
        shares = tuple(float(rng.randint(1, 3)) for _ in range(2 if groups else len(meshes[0])))
    storage = Storage(pieces=pieces, groups=groups, shares=shares, keeps=pieces == "parameters" and rng.random() < 0.3,
                      accumulates=pieces != "states" and rng.random() < 0.3)
    num_units = rng.randint(1, 3)
    microbatches = rng.randint(1, 3)
    return unit_plan(world.graph, [[(device, 1 / len(mesh)) for device in mesh] for mesh in meshes], storage,
                     num_units=num_units, microbatches=microbatches, batch=2 * len(meshes[0]) * microbatches,
                     num_devices=count, recompute=rng.random() < 0.3, parts=world.cuts(num_units * len(meshes)),
                     order=rng.choice([gpipe, one_f_one_b])(len(meshes), microbatches))


def factors(world: World) -> Plan:
    return by_factors(uneven(world) if world.rng.random() < 0.5 else replicas(world), world.graph)


def servers(world: World) -> Plan:
    return by_servers(replicas(world))


def hosts(world: World) -> Plan:
    names = tuple(f"d{index}" for index in range(world.num_devices))
    return by_hosts(replicas(world), (names[:2], *((names[2:],) if names[2:] else ())))


# ---- pipelines --------------------------------------------------------------------------------------------------------


def _pipeline(world: World, order: Order, devices: list[int], microbatches: int, *, recompute: bool = False) -> Plan:
    return pipeline_plan(world.graph, devices, order, microbatches=microbatches, mode=world.mode, recompute=recompute,
                         ops=world.cuts(len(devices)))


def gpipe_plan(world: World, *, recompute: bool = False) -> Plan:
    microbatches = world.rng.randint(2, 4)
    return _pipeline(world, gpipe(world.num_devices, microbatches), list(range(world.num_devices)), microbatches,
                     recompute=recompute)


def one_f_one_b_plan(world: World, *, recompute: bool = False) -> Plan:
    microbatches = world.rng.randint(2, 6)
    return _pipeline(world, one_f_one_b(world.num_devices, microbatches), list(range(world.num_devices)), microbatches,
                     recompute=recompute)


def recomputing(world: World) -> Plan:
    return world.rng.choice([gpipe_plan, one_f_one_b_plan])(world, recompute=True)


def interleaved_plan(world: World) -> Plan:
    count, rounds = world.num_devices, world.rng.randint(1, 2)
    return _pipeline(world, interleaved(count, 2, count * rounds), [*range(count)] * 2, count * rounds)


def over_and_back(world: World) -> Plan:
    """Return two stages for each device, the second ones the other way round, in a greedy order."""
    microbatches, devices = world.rng.randint(2, 4), [*range(world.num_devices), *reversed(range(world.num_devices))]
    return _pipeline(world, greedy_order(devices, microbatches), devices, microbatches)


def split_backward(world: World) -> Plan:
    microbatches = world.rng.randint(2, 4)
    devices = world.rng.choice([[*range(world.num_devices)], [*range(world.num_devices)] * 2])
    return _pipeline(world, greedy_order(devices, microbatches, split=True), devices, microbatches,
                     recompute=world.rng.random() < 0.2)


def opposite(world: World) -> Plan:
    return opposite_plan(world.graph, world.num_devices, microbatches=4)


def named_order(world: World) -> Plan:
    """Return a pipeline with one of the orders of the literature that need a split backward."""
    from weft.search.schedule.from_plan import problem_of_plan, with_schedule
    from weft.search.schedule.named import named_schedule

    problem = world.problem(4)
    plan = one_f_one_b_plan(world) if world.rng.random() < 0.5 else gpipe_plan(world)
    asked = problem_of_plan(plan, problem.graph, problem.costs, problem.cluster, split_backward=True)
    return with_schedule(plan, asked, named_schedule(world.rng.choice(["zb-h1", "zb-h2"]), asked.problem,
                                                     asked.num_microbatches))


def searched_schedule(world: World) -> Plan:
    from weft.search.joint.placements import PLACEMENTS
    from weft.search.joint.scheduled import find_schedule, schedule_search

    problem, shape = world.problem(4, optimizer=Optimizer(kind="sgd", lr=0.1)), world.rng.choice(["v", "x", "interleaved"])
    return find_schedule(PLACEMENTS[shape](problem, 4), problem, schedule_search(effort=0.05),
                         split_backward=world.rng.random() < 0.5).plan


def replicated_stages(world: World) -> Plan:
    """Return a pipeline whose stages have replicas, with unlike shares, on all devices or some."""
    count = world.num_devices
    stages = [[(0, 0.5), (1, 0.5)], [(count - 1, 1.0)]] if world.rng.random() < 0.5 else [
        [(0, 0.25), (1, 0.75)], [(0, 0.5), (count - 1, 0.5)]]
    return replicated_plan(world.graph, stages, microbatches=2, batch=8, num_devices=count, parts=world.cuts(2))


# ---- operators on several devices, placements, searches ---------------------------------------------------------------


def tensor_parallel(world: World) -> Plan:
    """Return the whole model, or its second half, divided over devices operator by operator."""
    from weft.search.joint.placements import spread

    graph, count = world.graph, world.num_devices if world.num_devices != 3 else 2
    ops, shapes = named_ops(world.tracer.trace(SIZE)), {
        graph.tensor_names[tensor]: graph.tensor_shapes[tensor] for tensor in graph.parameters}
    tp_group = tuple(f"d{index}" for index in range(count))
    microbatches = world.rng.randint(1, 2)
    parts = world.cuts(2) if world.num_devices > count else [list(graph.op_names)]
    leaving = {tensor for name in [name for part in parts[1:] for name in part] for tensor in ops[name].inputs}
    sharding = spread({name: ops[name] for name in parts[0]}, shapes, count,
                      leaving=leaving | {graph.tensor_names[tensor] for tensor in graph.outputs})
    stages = [Stage(name="s0", ops=tuple(parts[0]), replicas=(Replica(devices=tp_group, mesh={"tensor": count}),),
                    sharding=sharding)]
    stages += [Stage(name="s1", ops=tuple(part), replicas=(Replica(devices=("d2",)),)) for part in parts[1:]]
    order = {f"d{device}": tuple(f"s{number}:{phase}:{mb}" for phase in ("FB" if world.mode == "training" else "F")
                                 for mb in range(microbatches) for number in [int(device >= count)]
                                 if number < len(stages)) for device in range(world.num_devices)}
    return make_plan(graph, stages, order, microbatches=microbatches, batch=SIZE * microbatches,
                     num_devices=world.num_devices, mode=world.mode)


def searched_sharding(world: World) -> Plan:
    from weft.model.folded import trace_folded
    from weft.search.shard.compare import search_plan

    return search_plan(trace_folded(world.model.source, batch=SIZE), world.cluster, shape=(world.num_devices,),
                       optimizer=Optimizer(kind="sgd", lr=0.1), budget=Budget(effort=5.0))


def deployed(world: World) -> Plan:
    from weft.search.deploy.search import DeployOptions, deploy

    problem = world.problem(4, optimizer=Optimizer(kind="sgd", lr=0.1))
    return deploy(problem, DeployOptions(max_simulations=30, seed=world.rng.randrange(1000))).plan


def joint(world: World) -> Plan:
    from weft.search.joint.search import joint_search

    return joint_search(world.problem(4, optimizer=Optimizer(kind="adam", lr=0.1)), budget=Budget(effort=0.2)).plan


def inference_pipeline(world: World) -> Plan:
    microbatches = world.rng.randint(1, 4)
    return _pipeline(world, forward_only(world.num_devices, microbatches), list(range(world.num_devices)), microbatches)


def placed(world: World) -> Plan:
    """Return a placement whose device changes along the graph at random."""
    from weft.search.place.placed_plan import OpPlacement, placed_plan

    device, restless = [0], world.rng.choice([0.2, 0.5, 1.0])
    for _ in range(world.graph.num_ops - 1):
        stays = world.rng.random() >= restless
        device.append(device[-1] if stays else world.rng.randrange(world.num_devices))
    requests = world.rng.randint(1, 3)
    placement = OpPlacement(device=np.asarray(device), order=np.arange(world.graph.num_ops))
    return placed_plan(world.problem(requests), placement, microbatches=requests)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plan: who makes it, for how many devices, and for what."""

    make: Maker
    least: int = 2
    most: int = 4
    mode: str = "training"


KINDS: Final[dict[str, Kind]] = {
    "single device": Kind(single, least=1, most=1), "data parallel": Kind(replicas), "uneven shares": Kind(uneven),
    "divided states": Kind(divided_states), "in pieces": Kind(in_pieces), "factors": Kind(factors), "servers": Kind(servers),
    "hierarchical": Kind(hosts, least=3), "gpipe": Kind(gpipe_plan), "1f1b": Kind(one_f_one_b_plan),
    "recompute": Kind(recomputing), "interleaved": Kind(interleaved_plan), "over and back": Kind(over_and_back, most=3),
    "split backward": Kind(split_backward), "opposite": Kind(opposite), "named order": Kind(named_order),
    "searched schedule": Kind(searched_schedule), "replicated stages": Kind(replicated_stages, least=3),
    "tensor parallel": Kind(tensor_parallel), "searched sharding": Kind(searched_sharding, most=2),
    "deploy": Kind(deployed), "joint": Kind(joint),
    "inference pipeline": Kind(inference_pipeline, mode="inference"),
    "placement": Kind(placed, mode="inference"),
    "tensor parallel inference": Kind(tensor_parallel, mode="inference")}
"""By name."""

_OPTIMIZERS: Final = ("none", "sgd", "sgd", "adam", "adamw")


def draw_plan(world: World, kind: str) -> Plan:
    """Return a plan of this kind, with an optimizer drawn unless the kind has one."""
    plan = KINDS[kind].make(world)
    if world.mode == "training" and not plan.optimizer.sharded:
        plan = replace(plan, optimizer=Optimizer(kind=world.rng.choice(_OPTIMIZERS), lr=0.1))
    return plan
