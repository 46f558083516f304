"""The time of a pipeline by its longest path: every forward and backward of every stage, in the order of the schedule.

For clusters too large to simulate every device. Replicas of a stage are alike, so one pipeline stands for all; messages
take their time beside the computes, without waiting for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.orders import Order, forward_only, interleaved, one_f_one_b


def pipeline_order(num_meshes: int, chunks: int, microbatches: int, *, training: bool) -> Order:
    """Return what each mesh does in turn; stage ``s`` is on mesh ``s % num_meshes``."""
    if not training:
        return forward_only(num_meshes, microbatches)
    if chunks > 1:
        return interleaved(num_meshes, chunks, microbatches)
    return one_f_one_b(num_meshes, microbatches)


def pipeline_seconds(forward_s: Sequence[float], backward_s: Sequence[float], hop_s: Sequence[float],
                     order: Order) -> float:
    """Return when the last action ends; ``hop_s[s]`` is the time of a message between stages ``s`` and ``s + 1``.

    >>> pipeline_seconds([1, 1], [2, 2], [0], one_f_one_b(2, 2))
    9.0
    """
    last = len(forward_s) - 1
    done: dict[tuple[int, str, int], float] = {}
    place, clock = [0] * len(order), [0.0] * len(order)
    moved = True
    while moved:
        moved = False
        for mesh, actions in enumerate(order):
            while place[mesh] < len(actions):
                stage, phase, index = actions[place[mesh]]
                if phase == "F":
                    before = (stage - 1, "F", index) if stage else None
                    hop, seconds = hop_s[stage - 1] if stage else 0.0, forward_s[stage]
                else:
                    before = (stage + 1, phase, index) if stage < last else (stage, "F", index)
                    hop, seconds = hop_s[stage] if stage < last else 0.0, backward_s[stage]
                if before is not None and before not in done:
                    break
                ready = done[before] + hop if before is not None else 0.0
                clock[mesh] = done[stage, phase, index] = max(clock[mesh], ready) + seconds
                place[mesh] += 1
                moved = True
    return float(max(clock))
