"""What a plan says about each operator, as text properties for other tools."""

from __future__ import annotations

from typing import Final

from weft.model.graph import Graph
from weft.plan.plan import Plan

DEVICE: Final = "weft.device"
"""The device, or devices joined by a comma where several run the operator."""
STAGE: Final = "weft.stage"
"""The plan's stage, or stages likewise."""


def op_properties(plan: Plan, graph: Graph) -> list[dict[str, str]]:
    """Return ``{"weft.device": ..., "weft.stage": ...}`` of each operator; nothing for one that is in no stage.

    Only constants are in no stage: every stage that needs one computes it.
    """
    devices: list[dict[str, None]] = [{} for _ in range(graph.num_ops)]
    stages: list[dict[str, None]] = [{} for _ in range(graph.num_ops)]
    for stage in plan.stages:
        for name in stage.ops:
            op = graph.op_index[name]
            stages[op][stage.name] = None
            devices[op].update(dict.fromkeys(device for replica in stage.replicas for device in replica.devices))
    return [{DEVICE: ",".join(own), STAGE: ",".join(names)} if names else {}
            for own, names in zip(devices, stages, strict=True)]
