"""Small worlds for tests: graphs, clusters and plans in two lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from weft.cluster.cluster import Cluster, Contention, Device, DeviceKind, Link
from weft.model.graph import Graph, TensorRole
from weft.plan.factors import find_factors
from weft.plan.orders import Order, gpipe, interleaved, one_f_one_b, to_tokens
from weft.plan.plan import ClusterRef, GradientExchange, ModelRef, Optimizer, Plan, Replica, Stage


def chain_graph(num_ops: int, *, skips: tuple[tuple[int, int], ...] = (), parameter_bytes: int = 4,
                activation_bytes: int = 8, flops: float = 1.0, batch: int = 1, tied: tuple[tuple[int, int], ...] = ()) -> Graph:
    """Return ops 0 -> 1 -> ... with one parameter each; (a, b) in skips: op b also reads what op a writes.

    (a, b) in tied: op b reads op a's parameter instead of its own. The last op writes a scalar loss.
    """
    names, roles, producers, sizes, shapes, dtypes = ["x"], [TensorRole.INPUT], [-1], [activation_bytes], [(batch, 2)], ["float32"]
    shared = {b: a for a, b in tied}
    weight = {}
    for op in range(num_ops):
        if op not in shared:
            weight[op] = len(names)
            names.append(f"w{op}")
            roles.append(TensorRole.PARAMETER)
            producers.append(-1)
            sizes.append(parameter_bytes)
            shapes.append((parameter_bytes // 4,))
            dtypes.append("float32")
    for op, source in shared.items():
        weight[op] = weight[source]
    output = {}
    for op in range(num_ops):
        output[op] = len(names)
        last = op == num_ops - 1
        names.append(f"y{op}")
        roles.append(TensorRole.ACTIVATION)
        producers.append(op)
        sizes.append(4 if last else activation_bytes)
        shapes.append(() if last else (batch, 2))
        dtypes.append("float32")
    inputs, start = [], [0]
    for op in range(num_ops):
        inputs += [output[op - 1] if op else 0, weight[op], *(output[a] for a, b in skips if b == op)]
        start.append(len(inputs))
    per_op = np.full(num_ops, flops)
    num_tensors = len(names)
    return Graph(
        name="chain", op_names=tuple(f"op{i}" for i in range(num_ops)), op_kinds=("aten.linear",) * num_ops,
        op_modules=tuple(f"layers.{i}" for i in range(num_ops)), flops=per_op, bytes_read=per_op * 0, bytes_written=per_op * 0,
        input_grad_flops=per_op, input_grad_bytes=per_op * 0, weight_grad_flops=per_op, weight_grad_bytes=per_op * 0,
        is_constant=np.zeros(num_ops, dtype=bool), input_start=np.asarray(start, dtype=np.int64),
        inputs=np.asarray(inputs, dtype=np.int64), tensor_names=tuple(names), tensor_shapes=tuple(shapes),
        tensor_dtypes=tuple(dtypes), tensor_role=np.asarray(roles, dtype=np.int64),
        tensor_producer=np.asarray(producers, dtype=np.int64), tensor_bytes=np.asarray(sizes, dtype=np.int64),
        tensor_base=np.full(num_tensors, -1, dtype=np.int64),
        is_saved=np.asarray([role == TensorRole.ACTIVATION for role in roles]),
        tensor_batch_dim=np.asarray([0 if role in (TensorRole.ACTIVATION, TensorRole.INPUT) else -1 for role in roles],
                                    dtype=np.int64),
        outputs=(output[num_ops - 1],), batch=batch, has_backward=True, backward_source="rule")


def linear_graph(rows: int, inputs: int, outputs: int, *, flops: float = 0.0, batch: int = 4) -> Graph:
    """Return a linear operator with ``rows`` rows for the traced batch, and a loss with a parameter of its own."""
    graph = chain_graph(2, batch=batch, flops=flops)
    shapes = {"x": (rows, inputs), "w0": (outputs, inputs), "y0": (rows, outputs)}
    sizes = {graph.tensor_index[name]: shape for name, shape in shapes.items()}
    tensor_bytes = graph.tensor_bytes.copy()
    for tensor, shape in sizes.items():
        tensor_bytes[tensor] = 4 * np.prod(shape)
    return replace(
        graph, op_kinds=("aten.linear", "aten.mse_loss"), tensor_bytes=tensor_bytes,
        tensor_shapes=tuple(sizes.get(index, shape) for index, shape in enumerate(graph.tensor_shapes)))


def plain_cluster(num_devices: int, *, memory_bytes: int | None = None, bytes_per_s: float = 1e9, latency_s: float = 0.0,
                  contention: Contention = Contention.LINK) -> Cluster:
    """Return equal devices d0, d1, ... on one host, joined to one switch."""
    kind = DeviceKind(name="unit", flop_per_s={"float32": 1.0}, memory_bytes=memory_bytes, memory_bytes_per_s=1e12)
    devices = tuple(Device(name=f"d{i}", kind="unit", host="h", memory_bytes=memory_bytes) for i in range(num_devices))
    links = tuple(Link(source=a, target=b, bytes_per_s=bytes_per_s, latency_s=latency_s)
                  for device in devices for a, b in ((device.name, "h/fabric"), ("h/fabric", device.name)))
    return Cluster(name="plain", kinds={"unit": kind}, devices=devices, links=links, contention=contention)


def plan_of(graph: Graph, groups: list[list[int]], *, order: Order, devices: list[int], microbatches: int,
            num_devices: int | None = None, cluster: Cluster | None = None, microbatch_size: int = 1,
            optimizer: str = "sgd", recompute: bool = False, mode: str = "training") -> Plan:
    """Return a plan with one stage for each group of ops, stage i on device ``d{devices[i]}``, and that order by device."""
    cluster = cluster or plain_cluster(num_devices or max(devices) + 1)
    names = tuple(f"s{i}" for i in range(len(groups)))
    stages = tuple(Stage(name=name, ops=tuple(graph.op_names[op] for op in ops), recompute=recompute,
                         replicas=(Replica(devices=(f"d{device}",)),))
                   for name, ops, device in zip(names, groups, devices, strict=True))
    tokens = to_tokens(order, names)
    return with_gradients(Plan(
        model=ModelRef(name=graph.name, digest=graph.digest, mode=mode, batch=microbatches * microbatch_size),
        cluster=ClusterRef(digest=cluster.digest, devices=tuple(device.name for device in cluster.devices)),
        microbatches=microbatches, stages=stages, order={f"d{i}": actions for i, actions in enumerate(tokens)},
        optimizer=Optimizer(kind=optimizer)), graph)


def with_gradients(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with one all-reduce for each set of devices that hold the same parameters."""
    from weft.search.common.problem import add_gradients
    return add_gradients(plan, graph)


def pipeline(kind: str, num_devices: int, num_microbatches: int, *, chunks: int = 1) -> tuple[Graph, Plan]:
    """Return a chain graph and its plan by a named order: ``gpipe``, ``1f1b`` or ``interleaved``."""
    graph = chain_graph(num_devices * chunks)
    groups = [[op] for op in range(num_devices * chunks)]
    order = {"gpipe": lambda: gpipe(num_devices, num_microbatches), "1f1b": lambda: one_f_one_b(num_devices, num_microbatches),
             "interleaved": lambda: interleaved(num_devices, chunks, num_microbatches)}[kind]()
    plan = plan_of(graph, groups, order=order, devices=[op % num_devices for op in range(num_devices * chunks)],
                   microbatches=num_microbatches)
    return graph, plan


def dag_graph(reads: list[list[int]], *, weights: list[int | None] | None = None, unbatched: tuple[int, ...] = (),
              whole_numbers: tuple[int, ...] = (), not_saved: tuple[int, ...] = (), sizes: list[int] | None = None,
              batch: int = 1) -> Graph:
    """Return a graph whose op ``i`` reads what the ops in ``reads[i]`` write (-1: the model's input).

    Op ``i`` also reads the parameter ``w{weights[i]}``, or none where that is None; the default is one each. Ops that
    read neither inputs nor parameters are constants. ``unbatched``: ops whose output does not grow with the batch;
    ``whole_numbers``: ops whose output is int64. The last op writes a scalar loss.
    """
    num_ops = len(reads)
    weights = list(range(num_ops)) if weights is None else weights
    used = sorted({weight for weight in weights if weight is not None})
    first_output = 1 + len(used)
    loss = num_ops - 1
    names = ["x", *(f"w{weight}" for weight in used), *(f"y{op}" for op in range(num_ops))]
    roles = [TensorRole.INPUT] + [TensorRole.PARAMETER] * len(used) + [TensorRole.ACTIVATION] * num_ops
    inputs: list[int] = []
    start, is_constant = [0], []
    for op in range(num_ops):
        own = [] if weights[op] is None else [1 + used.index(weights[op])]
        inputs += [0 if source < 0 else first_output + source for source in reads[op]] + own
        start.append(len(inputs))
        is_constant.append(not own and all(source >= 0 and is_constant[source] for source in reads[op]))
    sizes = [8 * batch] * num_ops if sizes is None else sizes
    no_batch = [op in unbatched or op == loss or is_constant[op] for op in range(num_ops)]
    ones = np.ones(num_ops)
    return Graph(
        name="dag", op_names=tuple(f"op{i}" for i in range(num_ops)), op_kinds=("aten.add",) * num_ops,
        op_modules=("",) * num_ops, flops=ones, bytes_read=ones * 0, bytes_written=ones * 0, input_grad_flops=ones,
        input_grad_bytes=ones * 0, weight_grad_flops=ones, weight_grad_bytes=ones * 0,
        is_constant=np.asarray(is_constant), input_start=np.asarray(start, dtype=np.int64),
        inputs=np.asarray(inputs, dtype=np.int64), tensor_names=tuple(names),
        tensor_shapes=((batch, 2), *((4,) for _ in used), *(() if op == loss else (batch, 2) for op in range(num_ops))),
        tensor_dtypes=("float32",) * first_output + tuple(
            "int64" if op in whole_numbers else "float32" for op in range(num_ops)),
        tensor_role=np.asarray(roles, dtype=np.int64),
        tensor_producer=np.asarray([-1] * first_output + list(range(num_ops)), dtype=np.int64),
        tensor_bytes=np.asarray([8 * batch] + [16] * len(used) + sizes, dtype=np.int64),
        tensor_base=np.full(len(names), -1, dtype=np.int64),
        is_saved=np.asarray([False] * first_output + [op not in not_saved for op in range(num_ops)]),
        tensor_batch_dim=np.asarray([0] + [-1] * len(used) + [-1 if item else 0 for item in no_batch], dtype=np.int64),
        outputs=(first_output + loss,), batch=batch, has_backward=True, backward_source="rule")


def with_sufficient_factors(plan: Plan, graph: Graph, *, only: Callable[[str], bool] = lambda name: True) -> Plan:
    """Return the plan with factors exchanged for the weights of linear operators that ``only`` accepts by name.

    Their biases go with them, also from other exchanges among the same devices; what else was exchanged together with
    them stays as it was.
    """
    homes: dict[tuple[str, tuple[str, ...]], int] = {}
    """The exchange by factors that a parameter goes to, by its name and devices."""
    for devices in dict.fromkeys(item.devices for item in plan.gradients):
        place_of = {graph.tensor_index[name]: place for place, item in enumerate(plan.gradients)
                    if item.devices == devices for name in item.parameters}
        wanted = [tensor for tensor in place_of
                  if len(graph.tensor_shapes[tensor]) < 2 or only(graph.tensor_names[tensor])]
        for use in find_factors(graph, wanted).uses:
            for tensor in (use.weight, use.bias):
                if tensor is not None:
                    homes.setdefault((graph.tensor_names[tensor], devices), place_of[use.weight])
    exchanges: list[GradientExchange] = []
    for place, item in enumerate(plan.gradients):
        chosen = tuple(name for (name, devices), home in homes.items() if home == place and devices == item.devices)
        rest = tuple(name for name in item.parameters if (name, item.devices) not in homes)
        if chosen:
            exchanges.append(GradientExchange(parameters=chosen, method="sufficient_factors", devices=item.devices))
        if rest:
            exchanges.append(replace(item, parameters=rest))
    return replace(plan, gradients=tuple(exchanges))
