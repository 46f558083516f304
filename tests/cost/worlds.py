"""Small graphs and clusters that the cost tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.cluster.cluster import Cluster, Contention, Device, DeviceKind, Link
from weft.model.graph import GivenCosts, Graph, TensorRole

FAST = DeviceKind(name="fast", flop_per_s={"float32": 1e12, "float16": 8e12}, memory_bytes=10**10,
                  memory_bytes_per_s=1e11, overhead_s=1e-6)
SLOW = DeviceKind(name="slow", flop_per_s={"float32": 1e11}, memory_bytes=10**10, memory_bytes_per_s=2e10,
                  overhead_s=5e-6, type="cpu")


def make_cluster(hosts: Sequence[int] = (4,), *, kinds: Sequence[DeviceKind] = (FAST,),
                 intra: tuple[float, float] = (1e11, 1e-6), network: tuple[float, float] = (1e10, 1e-5),
                 contention: Contention = Contention.LINK) -> Cluster:
    """Return hosts of so many devices, each behind a fabric, joined by a network; host ``i`` has kind ``i % n``."""
    devices, links = [], []
    for index, count in enumerate(hosts):
        host = "abcdefghijklmnop"[index]
        fabric = f"{host}/fabric"
        for position in range(count):
            name = f"{host}{position}"
            devices.append(Device(name=name, kind=kinds[index % len(kinds)].name, host=host, memory_bytes=None))
            for source, target in ((name, fabric), (fabric, name)):
                links.append(Link(source=source, target=target, bytes_per_s=intra[0], latency_s=intra[1] / 2))
        if len(hosts) > 1:
            for source, target in ((fabric, "network"), ("network", fabric)):
                links.append(Link(source=source, target=target, bytes_per_s=network[0], latency_s=network[1] / 2))
    return Cluster(name="test", kinds={kind.name: kind for kind in kinds}, devices=tuple(devices), links=tuple(links),
                   contention=contention)


def make_graph(num_layers: int = 2, *, batch: int = 4, width: int = 64, training: bool = True,
               given: GivenCosts | None = None) -> Graph:
    """Return a chain of linear, view, gelu per layer, with figures as a tracer would give them."""
    kinds, shapes, roles, producers, batch_dims, names, dtypes = [], [], [], [], [], [], []
    inputs: list[list[int]] = []
    flops, read, written, weight_flops, weight_bytes = [], [], [], [], []

    def tensor(name: str, shape: tuple[int, ...], role: TensorRole, producer: int, batch_dim: int) -> int:
        names.append(name)
        shapes.append(shape)
        roles.append(int(role))
        producers.append(producer)
        batch_dims.append(batch_dim)
        dtypes.append("float32")
        return len(names) - 1

    def op(kind: str, reads: list[int], amounts: tuple[float, float, float], weight: tuple[float, float]) -> None:
        kinds.append(kind)
        inputs.append(reads)
        for column, value in zip((flops, read, written), amounts, strict=True):
            column.append(value)
        weight_flops.append(weight[0])
        weight_bytes.append(weight[1])

    size, weight_size = 4.0 * batch * width, 4.0 * width * width
    current = tensor("x", (batch, width), TensorRole.INPUT, -1, 0)
    for layer in range(num_layers):
        weight = tensor(f"w{layer}", (width, width), TensorRole.PARAMETER, -1, -1)
        work = 2.0 * batch * width * width
        op("aten.linear", [current, weight], (work, size + weight_size, size), (work, size * 2 + weight_size))
        current = tensor(f"linear{layer}", (batch, width), TensorRole.ACTIVATION, len(kinds) - 1, 0)
        op("aten.view", [current], (0.0, 0.0, 0.0), (0.0, 0.0))
        current = tensor(f"view{layer}", (batch, width), TensorRole.ACTIVATION, len(kinds) - 1, 0)
        op("aten.gelu", [current], (8.0 * batch * width, size, size), (0.0, 0.0))
        current = tensor(f"gelu{layer}", (batch, width), TensorRole.ACTIVATION, len(kinds) - 1, 0)

    def column(values: Sequence[float]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    zero = np.zeros(len(kinds))
    return Graph(
        name="chain", op_names=tuple(f"op{i}" for i in range(len(kinds))), op_kinds=tuple(kinds),
        op_modules=("",) * len(kinds), flops=column(flops), bytes_read=column(read), bytes_written=column(written),
        input_grad_flops=column(flops) if training else zero,
        input_grad_bytes=column(read) + column(written) if training else zero,
        weight_grad_flops=column(weight_flops) if training else zero,
        weight_grad_bytes=column(weight_bytes) if training else zero,
        is_constant=np.zeros(len(kinds), dtype=bool),
        input_start=np.cumsum([0] + [len(reads) for reads in inputs]).astype(np.int64),
        inputs=np.array([tensor for reads in inputs for tensor in reads], dtype=np.int64),
        tensor_names=tuple(names), tensor_shapes=tuple(shapes), tensor_dtypes=tuple(dtypes),
        tensor_role=np.array(roles, dtype=np.int64), tensor_producer=np.array(producers, dtype=np.int64),
        tensor_bytes=np.array([4 * int(np.prod(shape)) for shape in shapes], dtype=np.int64),
        tensor_base=np.full(len(names), -1, dtype=np.int64), is_saved=np.zeros(len(names), dtype=bool),
        tensor_batch_dim=np.array(batch_dims, dtype=np.int64), outputs=(current,), batch=batch, has_backward=training,
        backward_source="rule" if training else "none", given=given,
    )


def given_costs(times: Sequence[Mapping[str, float] | None], *, num_tensors: int,
                allowed: Sequence[tuple[str, ...] | None] | None = None,
                transfers: Mapping[int, Mapping[str, float]] | None = None) -> GivenCosts:
    """Return what a graph file would say: times per operator, and the rest at its defaults."""
    return GivenCosts(
        times=tuple(times), memory_bytes=(0,) * len(times), allowed_kinds=tuple(allowed or (None,) * len(times)),
        colocate=(None,) * len(times),
        transfer_times=tuple((transfers or {}).get(tensor) for tensor in range(num_tensors)))
