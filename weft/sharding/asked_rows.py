"""Rows of a table that devices have in parts, asked for by their numbers: three all-to-alls, by true counts.

A device tells every other how many rows it asks for, then which, and gets them; their gradients go back the same way,
in one all-to-all, and are added up where the rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.sharding.local_ops import Group


class AskedRows(torch.autograd.Function):
    """Rows of a table whose parts devices have, each of which asks for some by their numbers in the whole."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, group: Group, stops: Sequence[int]) -> Tensor:
        """Return the rows that ``index`` asks for, of a table whose parts end at ``stops``."""
        flat = index.flatten()
        owner = torch.searchsorted(torch.tensor(stops, device=flat.device), flat, right=True)
        order, counts = torch.argsort(owner, stable=True), torch.bincount(owner, minlength=group.size)
        asked = group.all_to_all(list(counts.split(1)), [(1,)] * group.size)
        asked_counts, own_counts = [int(item) for item in asked], counts.tolist()
        numbers = group.all_to_all(list(flat[order].split(own_counts)), [(count,) for count in asked_counts])
        wanted = torch.cat(numbers) - (stops[group.rank - 1] if group.rank else 0)
        shapes = [(count, *table.shape[1:]) for count in own_counts]
        rows = torch.cat(group.all_to_all(list(table[wanted].split(asked_counts)), shapes))
        ctx.save_for_backward(order, wanted)
        ctx.group, ctx.counts, ctx.shape = group, (own_counts, asked_counts), table.shape
        return torch.empty_like(rows).index_copy_(0, order, rows).view(*index.shape, *table.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None, None]:
        """Return the gradient of the device's part of the table: what all have for its rows, added up."""
        order, wanted = ctx.saved_tensors
        own_counts, asked_counts = ctx.counts
        sent = gradients[0].reshape(len(order), *ctx.shape[1:])[order]
        shapes = [(count, *ctx.shape[1:]) for count in asked_counts]
        rows = torch.cat(ctx.group.all_to_all(list(sent.split(own_counts)), shapes))
        return rows.new_zeros(ctx.shape).index_add_(0, wanted, rows), None, None, None
