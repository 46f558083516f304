"""The names of orders that people know: GPipe, 1F1B, interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from weft.plan.orders import Action, Order, forward_only, gpipe, interleaved, one_f_one_b
from weft.plan.plan import Plan
from weft.plan.structure import parse_action


def stage_order(plan: Plan, devices: Sequence[str]) -> Order:
    """Return the actions of some devices of a checked plan, with stages as numbers."""
    number = {stage.name: index for index, stage in enumerate(plan.stages)}
    order: Order = []
    for device in devices:
        found = [parse_action(token) for token in plan.order.get(device, ())]
        order.append([cast(Action, (number[action[0]], *action[1:])) for action in found if action is not None])
    return order


def order_name(order: Order, num_stages: int, num_microbatches: int) -> str | None:
    """Return ``gpipe``, ``1f1b``, ``interleaved-1f1b`` or ``forward`` if the order is that, else None.

    ``order`` has one list for each pipeline rank; rank ``r`` has the stages ``r``, ``r + num_ranks`` and so on.
    """
    known: Mapping[str, Order] = {"forward": forward_only(num_stages, num_microbatches),
                                  "1f1b": one_f_one_b(num_stages, num_microbatches),
                                  "gpipe": gpipe(num_stages, num_microbatches)}
    num_ranks = len(order)
    if num_stages > num_ranks and num_stages % num_ranks == 0 and num_microbatches % num_ranks == 0:
        known = {"interleaved-1f1b": interleaved(num_ranks, num_stages // num_ranks, num_microbatches)}
    return next((name for name, actions in known.items() if actions == order), None)
