"""A small network over deployments: typed attention among operator groups and device groups, a policy and a value.

Shapes: B states, G operator groups, D device groups, A actions, H heads, W hidden. States of different sizes share a
batch by padding; padded nodes are masked, and nothing depends on their number. Five relations: an operator group reads
from those before and after it and from the device groups, a device group from operator groups and device groups. Each
relation has keys ``k``, values ``v`` and terms ``a`` of its own; for a target ``i``, over all its sources ``j`` with
the features ``e`` of their edges,

    weight = softmax over j of (q_i . k_j / sqrt(W / H) + a . e_ij),    message = sum over j of weight (v_j, e_ij)

Each action is scored from the group it is for, the device groups it uses and its own estimates, so any number of
devices and actions will do. This module is for training; ``weft.search.deploy.policy`` is what the search asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from weft.base.files import write_atomic
from weft.base.tensor_file import Entry, file_begin, file_order
from weft.search.deploy.features import F32, WIDTHS, Features
from weft.search.deploy.policy import FORMAT, HIDDEN, NUM_HEADS, NUM_LAYERS, check_shapes

_MASKED: Final = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """States as tensors with a leading dimension, padded to the largest."""

    ops: Tensor
    devices: Tensor
    flow: Tensor
    links: Tensor
    place: Tensor
    actions: Tensor
    members: Tensor
    world: Tensor
    group: Tensor
    has_op: Tensor
    """[B, G] whether it is no padding."""
    has_device: Tensor
    has_action: Tensor

    def to(self, device: str) -> Batch:
        """Return it on another device."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def make_batch(states: Sequence[Features]) -> Batch:
    """Return the states as one batch."""
    arrays = {name: _padded([getattr(state, name) for state in states])
              for name in (*WIDTHS, "members")}
    counts = {"has_op": "ops", "has_device": "devices", "has_action": "actions"}
    masks = {mask: _padded([np.ones(len(getattr(state, name)), dtype=np.float32) for state in states]) > 0
             for mask, name in counts.items()}
    return Batch(group=torch.tensor([state.group for state in states]), **arrays, **masks)


def _padded(arrays: Sequence[F32]) -> Tensor:
    if len(arrays) == 1:
        return torch.from_numpy(np.asarray(arrays[0], dtype=np.float32))[None]
    shape = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True))
    result = np.zeros((len(arrays), *shape), dtype=np.float32)
    for row, array in zip(result, arrays, strict=True):
        row[tuple(slice(size) for size in array.shape)] = array
    return torch.from_numpy(result)


class _Edges(nn.Module):
    """What edges say to each layer: terms of the weights, minus infinity where there is no edge, and features."""

    def __init__(self) -> None:
        super().__init__()
        flow, links, place = WIDTHS["flow"], WIDTHS["links"], WIDTHS["place"]
        per_layer = NUM_LAYERS * NUM_HEADS
        self.before, self.after = (nn.Linear(flow, per_layer, bias=False) for _ in range(2))
        self.op_device, self.device_op = (nn.Linear(place, per_layer, bias=False) for _ in range(2))
        self.device_device = nn.Linear(links, per_layer, bias=False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return [layers, B, H, G, 2 G + D] terms and [B, G, 2 G + D, ...] features of what operator groups read.

        The third and fourth are the same for device groups, which read from G + D.
        """
        before, served = batch.flow.transpose(1, 2), batch.place.transpose(1, 2)
        after = (batch.flow != 0).any(dim=-1)
        place = batch.has_op[:, :, None] & batch.has_device[:, None]
        links = batch.has_device[:, :, None] & batch.has_device[:, None]
        to_ops = torch.cat([self.before(before), self.after(batch.flow), self.op_device(batch.place)], dim=2)
        to_devices = torch.cat([self.device_op(served), self.device_device(batch.links)], dim=2)
        is_op_edge = torch.cat([after.transpose(1, 2), after, place], dim=2)
        is_device_edge = torch.cat([place.transpose(1, 2), links], dim=2)
        return (_by_layer(to_ops, is_op_edge), _beside([before, batch.flow, batch.place]),
                _by_layer(to_devices, is_device_edge), _beside([served, batch.links]))


def _by_layer(terms: Tensor, is_edge: Tensor) -> Tensor:
    terms = terms + torch.where(is_edge, 0.0, _MASKED)[..., None]
    return terms.permute(3, 0, 1, 2).unflatten(0, (NUM_LAYERS, NUM_HEADS)).transpose(1, 2)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """Return the edges one after the other, each kind with columns of its own."""
    num_sources, width = sum(part.shape[2] for part in parts), sum(part.shape[3] for part in parts)
    result, row, column = parts[0].new_zeros(*parts[0].shape[:2], num_sources, width), 0, 0
    for part in parts:
        result[:, :, row : row + part.shape[2], column : column + part.shape[3]] = part
        row, column = row + part.shape[2], column + part.shape[3]
    return result


class _Node(nn.Module):
    """What nodes of one type ask and offer, and their update by what they read."""

    def __init__(self, num_offers: int, edge_width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.project = nn.Linear(HIDDEN, (1 + 2 * num_offers) * HIDDEN)
        self.output = nn.Linear(HIDDEN + NUM_HEADS * edge_width, HIDDEN)
        self.inner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))

    def offer(self, nodes: Tensor) -> tuple[Tensor, ...]:
        """Return a query, then a key and a value for each relation, all [B, H, nodes, W / H]."""
        every = self.project(self.before(nodes)).unflatten(-1, (-1, NUM_HEADS, HIDDEN // NUM_HEADS))
        return tuple(every.permute(2, 0, 3, 1, 4).unbind(0))

    def forward(self, nodes: Tensor, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], terms: Tensor,
                edges: Tensor) -> Tensor:
        """Return the nodes after they have read from all sources."""
        logits = torch.matmul(query, torch.cat(keys, dim=2).transpose(2, 3)) * (HIDDEN // NUM_HEADS) ** -0.5 + terms
        weight = torch.softmax(logits, dim=-1)
        message = torch.matmul(weight, torch.cat(values, dim=2)).transpose(1, 2).flatten(2)
        features = torch.matmul(weight.transpose(1, 2), edges).flatten(2)
        nodes = nodes + self.output(torch.cat([message, features], dim=-1))
        return nodes + self.inner(self.after(nodes))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        flow, links, place = WIDTHS["flow"], WIDTHS["links"], WIDTHS["place"]
        self.op, self.device = _Node(3, 2 * flow + place), _Node(2, place + links)

    def forward(self, ops: Tensor, devices: Tensor, edges: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        query, *offers = self.op.offer(ops)
        device_query, *device_offers = self.device.offer(devices)
        return (self.op(ops, query, [offers[0], offers[2], device_offers[0]],
                        [offers[1], offers[3], device_offers[1]], edges[0], edges[1]),
                self.device(devices, device_query, [offers[4], device_offers[2]], [offers[5], device_offers[3]],
                            edges[2], edges[3]))


class DeployNetwork(nn.Module):
    """Logits of actions for the group to decide, and the logarithm of the best time against data parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.op_in, self.device_in = nn.Linear(WIDTHS["ops"], HIDDEN), nn.Linear(WIDTHS["devices"], HIDDEN)
        self.world_in = nn.Linear(WIDTHS["world"], 2 * HIDDEN)
        self.edges = _Edges()
        self.layers = nn.ModuleList(_Layer() for _ in range(NUM_LAYERS))
        self.op_out, self.device_out = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.action_in = nn.Linear(WIDTHS["actions"] + 2 * HIDDEN, HIDDEN)
        self.group_in = nn.Linear(3 * HIDDEN, HIDDEN)
        self.score = nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.value = nn.Sequential(nn.Linear(3 * HIDDEN + WIDTHS["world"], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return [B, A] logits, very low where there is no action, and [B] values."""
        for_ops, for_devices = self.world_in(batch.world)[:, None].chunk(2, dim=-1)
        ops, devices = self.op_in(batch.ops) + for_ops, self.device_in(batch.devices) + for_devices
        op_terms, op_edges, device_terms, device_edges = self.edges(batch)
        for index, layer in enumerate(self.layers):
            ops, devices = layer(ops, devices, (op_terms[index], op_edges, device_terms[index], device_edges))
        ops, devices = self.op_out(ops), self.device_out(devices)
        group = ops[torch.arange(len(ops), device=ops.device), batch.group]
        whole = torch.cat([group, _mean(ops, batch.has_op), _mean(devices, batch.has_device)], dim=-1)
        used = batch.members / batch.members.sum(dim=-1, keepdim=True).clamp(min=1.0)
        most = devices[:, None].masked_fill(batch.members[..., None] == 0, _MASKED).amax(dim=2).clamp(min=-1e4)
        action = self.action_in(torch.cat([batch.actions, used @ devices, most], dim=-1))
        logits = self.score(action + self.group_in(whole)[:, None])[..., 0]
        value = self.value(torch.cat([whole, batch.world], dim=-1))[:, 0]
        return logits.masked_fill(~batch.has_action, _MASKED), value


def _mean(nodes: Tensor, mask: Tensor) -> Tensor:
    return (nodes * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def to_arrays(network: DeployNetwork) -> dict[str, F32]:
    """Return the weights by name."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in network.state_dict().items()}


def from_arrays(arrays: dict[str, F32]) -> DeployNetwork:
    """Return the network with these weights; names and shapes must be exactly its own."""
    check_shapes(arrays)
    with torch.device("meta"):
        network = DeployNetwork()
    network.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()}, assign=True)
    network.eval()
    return network


def write_policy(path: Path, arrays: Mapping[str, F32], facts: Mapping[str, str]) -> None:
    """Write a network's weights and facts about their training."""
    entries = {name: Entry(dtype="F32", shape=array.shape) for name, array in arrays.items()}
    data = (np.ascontiguousarray(arrays[name], dtype="<f4").tobytes() for name in file_order(entries))
    write_atomic(path, file_begin(entries, {**facts, **FORMAT}) + b"".join(data))
