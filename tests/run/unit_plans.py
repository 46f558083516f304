"""Plans whose stages keep parameters, gradients or states in pieces, in a few units for each mesh of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from tests.run.plans import cut, make_plan
from weft.model.graph import Graph
from weft.plan.orders import Action, Order, one_f_one_b
from weft.plan.plan import Plan, Replica, Stage, Storage

FSDP = Storage(pieces="parameters")


def unit_plan(graph: Graph, meshes: Sequence[Sequence[tuple[int, float]]], storage: Storage | Sequence[Storage] = FSDP, *,
              num_units: int = 2, microbatches: int = 2, batch: int = 8, num_devices: int = 4, optimizer: str = "none",
              order: Order | None = None, mode: str = "training", recompute: bool = False,
              parts: Sequence[Sequence[str]] | None = None) -> Plan:
    """Return a pipeline over meshes, given as (device, share) of each replica, with ``num_units`` stages on each.

    ``storage`` is that of all stages, or of those of a mesh in turn; ``order`` that of the meshes.
    """
    parts = parts or cut(graph, num_units * len(meshes))
    each = [storage] * num_units if isinstance(storage, Storage) else list(storage)
    stages = [Stage(name=f"s{index}", ops=tuple(part), storage=each[index % num_units], recompute=recompute,
                    replicas=tuple(Replica(devices=(f"d{device}",), share=share)
                                   for device, share in meshes[index // num_units]))
              for index, part in enumerate(parts)]
    given = order or one_f_one_b(len(meshes), microbatches)
    tokens = {f"d{device}": tuple(token for action in actions for token in _expand(action, num_units))
              for mesh, actions in zip(meshes, given, strict=True) for device, _ in mesh}
    if mode == "inference":
        tokens = {device: tuple(token for token in items if ":F:" in token) for device, items in tokens.items()}
    return make_plan(graph, stages, tokens, microbatches=microbatches, batch=batch, num_devices=num_devices,
                     optimizer=optimizer, mode=mode)


def _expand(action: Action, num_units: int) -> list[str]:
    stage, phase, microbatch = action
    units = range(stage * num_units, (stage + 1) * num_units)
    return [f"s{unit}:{phase}:{microbatch}" for unit in (units if phase == "F" else reversed(units))]
