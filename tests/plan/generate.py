"""Random models and plans: graphs cut into convex stages, any device map, replicas, opposite pipelines, any order."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.plan.meaning import Meaning, Member, divide
from tests.worlds import dag_graph, plain_cluster, with_gradients
from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.plan.plan import ClusterRef, ModelRef, Optimizer, Plan, Replica, Stage

Task = tuple[Member, str, int]
"""(member, phase, micro-batch)."""


def random_graph(rng: Random, num_ops: int, *, batch: int = 1) -> Graph:
    """Return a graph with skips, shared parameters, constants, unbatched and whole-number tensors."""
    reads: list[list[int]] = []
    weights: list[int | None] = []
    unbatched: list[int] = []
    for op in range(num_ops):
        if op == num_ops - 1:
            sources = sorted({num_ops - 2, *rng.sample(range(op), min(op, rng.randint(0, 2)))})
        elif op and rng.random() < 0.1:
            sources = []
            unbatched.append(op)
        else:
            sources = sorted({rng.randint(max(-1, op - 3), op - 1), rng.randint(-1, op - 1)})
        if op == 0 or (sources and set(sources) <= set(unbatched)):
            sources = [-1, *sources] if op else [-1]
        reads.append(sources)
        shared = [weight for weight in weights if weight is not None]
        choice = rng.random()
        weights.append(None if choice < 0.2 else rng.choice(shared) if shared and choice < 0.35 else op)
    numbers = tuple(op for op in range(num_ops - 1) if rng.random() < 0.08)
    graph = dag_graph(reads, weights=weights, unbatched=tuple(unbatched), whole_numbers=numbers, batch=batch,
                     not_saved=tuple(op for op in range(num_ops) if rng.random() < 0.2),
                     sizes=[batch * rng.randint(1, 50) for _ in range(num_ops)])
    kinds = ("aten.linear", "aten.add", "aten.relu", "aten.embedding", "aten.mul", "aten.layer_norm")
    return replace(graph, op_kinds=tuple(kinds[(5 * op + num_ops) % len(kinds)] for op in range(num_ops)))


def random_stages(rng: Random, graph: Graph, devices: tuple[str, ...], *, prefix: str, num_stages: int, size: int,
                  microbatches: tuple[int, ...] | None, joint: bool = True) -> list[Stage]:
    """Return stages that do not form a cycle: an operator's stage is at or after those it reads from."""
    level: list[int] = []
    for op in range(graph.num_ops):
        producers = [int(item) for item in graph.tensor_producer[graph.op_inputs(op)] if item >= 0]
        lowest = max((level[item] for item in producers), default=0)
        level.append(rng.choice([lowest, lowest, min(lowest + 1, num_stages - 1), rng.randint(lowest, num_stages - 1)]))
    stages = []
    for number in sorted(set(level)):
        ops = [op for op in range(graph.num_ops) if level[op] == number]
        rng.shuffle(ops)
        stages.append(Stage(
            name=f"{prefix}{number}", ops=tuple(graph.op_names[op] for op in ops), microbatches=microbatches,
            replicas=random_replicas(rng, devices, size=size, joint=joint), recompute=rng.random() < 0.2))
    return stages


def random_replicas(rng: Random, devices: tuple[str, ...], *, size: int, joint: bool) -> tuple[Replica, ...]:
    """Return one to three replicas on different devices, each with at least one of ``size`` samples."""
    free = rng.sample(devices, len(devices))
    counts = rng.choice([(size,), (size,), (1, size - 1), (size - 1, 1), tuple(divide(size, [1.0, 1.0, 1.0]))])
    counts = tuple(count for count in counts if count > 0)
    if len(counts) > len(free):
        counts = (size,)
    replicas = []
    for left, count in enumerate(reversed(counts)):
        more_wanted = len(counts) - 1 - left
        width = 2 if joint and len(free) - more_wanted >= 2 and rng.random() < 0.2 else 1
        mine = tuple(free.pop() for _ in range(width))
        times = {phase: rng.random() * 3 for phase in "FBIW" if rng.random() < 0.7}
        replicas.append(Replica(devices=mine, mesh={"tensor": width} if width > 1 else {}, share=count / size,
                                times=times))
    return tuple(reversed(replicas))


def random_plan(rng: Random, *, num_ops: int = 8, num_devices: int = 4, microbatches: int = 3,
                joint: bool = True) -> tuple[Graph, Cluster, Plan]:
    """Return a model, a cluster and a plan with a random order that can be run."""
    size = rng.choice([1, 2, 3, 4])
    graph, cluster = random_graph(rng, num_ops, batch=rng.choice([1, size])), plain_cluster(num_devices)
    devices = tuple(device.name for device in cluster.devices)
    settings = {"size": size, "num_stages": rng.randint(1, num_ops), "joint": joint}
    if microbatches > 1 and rng.random() < 0.3:
        chosen = tuple(rng.sample(range(microbatches), rng.randint(1, microbatches - 1)))
        others = tuple(index for index in range(microbatches) if index not in chosen)
        stages = [*random_stages(rng, graph, devices, prefix="down", microbatches=chosen, **settings),
                  *random_stages(rng, graph, devices, prefix="up", microbatches=others, **settings)]
    else:
        stages = random_stages(rng, graph, devices, prefix="s", microbatches=None, **settings)
    plan = Plan(
        model=ModelRef(name=graph.name, digest=graph.digest, batch=microbatches * size,
                       mode="training" if rng.random() < 0.85 else "inference"),
        cluster=ClusterRef(digest=cluster.digest, devices=devices), microbatches=microbatches, stages=tuple(stages),
        order={}, optimizer=Optimizer(kind=rng.choice(["none", "sgd", "adamw"]), sharded=rng.random() < 0.3))
    return graph, cluster, schedule_randomly(with_gradients(plan, graph), graph, rng, split=rng.choice([0.0, 0.3, 1.0]))


def schedule_randomly(plan: Plan, graph: Graph, rng: Random, *, split: float = 0.0) -> Plan:
    """Return the plan with an order in which some run is possible; that part of the backwards is split in I and W."""
    meaning = Meaning(plan, graph)
    is_split = {(stage, microbatch): rng.random() < split
                for stage, handled in enumerate(meaning.microbatches) for microbatch in handled}
    todo = [(member, phase, microbatch) for member in meaning.members()
            for microbatch in meaning.microbatches[member[0]]
            for phase in _phases(meaning, is_split[member[0], microbatch])]
    done: set[Task] = set()
    order: dict[str, list[str]] = {device: [] for device in plan.cluster.devices}
    while todo:
        ready = [task for task in todo if _needs(meaning, is_split, task) <= done]
        member, phase, microbatch = task = rng.choice(ready)
        todo.remove(task)
        done.add(task)
        for rank in meaning.ranks[member]:
            order[plan.cluster.devices[rank]].append(f"{plan.stages[member[0]].name}:{phase}:{microbatch}")
    return replace(plan, order={device: tuple(actions) for device, actions in order.items() if actions})


def _phases(meaning: Meaning, split: bool) -> tuple[str, ...]:
    if not meaning.training:
        return ("F",)
    return ("F", "I", "W") if split else ("F", "B")


def _needs(meaning: Meaning, is_split: dict[tuple[int, int], bool], task: Task) -> set[Task]:
    member, phase, microbatch = task
    if phase == "F":
        return {(source, "F", microbatch) for _, source in meaning.feeds(member, microbatch)}
    if phase == "W":
        return {(member, "I", microbatch)}
    readers = {(reader, "I" if is_split[reader[0], microbatch] else "B", microbatch)
               for _, reader in meaning.gradients(member, microbatch)}
    return readers | {(member, "F", microbatch)}
