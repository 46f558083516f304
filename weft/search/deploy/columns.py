"""Columns for the compiled simulation of deployments: the model on the cluster, layouts of groups, exchanges."""

from __future__ import annotations

from typing import NamedTuple

from weft.model.graph import F64, I64


class World(NamedTuple):
    """What does not depend on the deployment."""

    bundle_producer: I64
    bundle_consumer_start: I64
    bundle_consumers: I64
    bundle_bytes: F64
    """[bundles, 4] per sample, fixed, and the same of gradients."""
    latency_s: F64
    """[devices, devices]"""
    s_per_byte: F64
    resource_start: I64
    """[devices * devices + 1] into ``resources``: what a transfer between two devices holds."""
    resources: I64
    num_resources: int
    saved_per_sample: F64
    """[groups] bytes kept from forward to backward."""
    work_per_sample: F64
    """[groups] bytes that are needed while the group runs."""
    capacity: F64
    """[devices] bytes; infinite for no limit."""


class Layouts(NamedTuple):
    """All layouts that groups may have; a *slot* is one device of one replica."""

    slot_start: I64
    slot_device: I64
    slot_first: I64
    """First sample of the micro-batch."""
    slot_stop: I64
    replica_position: I64
    """The slot's place in its replica."""
    replica_size: I64
    forward_s: F64
    """[layouts, groups, slots]"""
    backward_s: F64
    step_s: F64
    """Seconds of the optimizer."""
    static: F64
    """[layouts, groups] bytes of parameters, gradients and optimizer states on each device."""
    saved_part: F64
    """[layouts, groups] part of what a group keeps for its backward that each device keeps."""


class Buckets(NamedTuple):
    """Gradient exchanges of a deployment."""

    seconds: F64
    member_start: I64
    members: I64
    """What is occupied: devices, and as ``num_devices + resource`` the resources on which exchanges meet."""
    of_group: I64
    """[pairs, 2] rows (bucket, group)."""


class Blocks(NamedTuple):
    """Consecutive groups with one layout, their replicas' devices as slots, and what flows between slots."""

    of_group: I64
    layout: I64
    first_group: I64
    """[blocks + 1]"""
    base: I64
    """[blocks + 1] first slot of each block."""
    device: I64
    """[slots]"""
    of_slot: I64
    seconds: F64
    """[2, slots] forward and backward of one micro-batch."""
    edges: I64
    """[edges, 2] rows (source slot, target slot)."""
    leader: I64
    """[edges] the edge whose message serves this one too: the same tensors for another block on the same device."""
    sizes: F64
    """[edges, 2] bytes forward and backward."""
    out_start: I64
    out_edges: I64
    in_start: I64
    in_edges: I64
    limit: I64
    """[blocks] micro-batches that may be between forward and backward."""


class Outcome(NamedTuple):
    """What the simulation says."""

    seconds: float
    used: F64
    """[devices] bytes."""
    busy_s: F64
    """[devices]"""
    link_busy_s: F64
    """[resources]"""
    exchange_s: F64
    """[devices] seconds of gradient exchanges."""
    group_end_s: F64
    """[groups] when the last backward of the group's block ends."""
    starts: F64
    """[phase * M + micro-batch, slots of blocks], for the order of the plan."""
    num_events: int
    """Of the simulation; zero if it did not have to begin."""
