"""Teams of devices that divide operators, and stages that they run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from weft.cluster.cluster import DeviceId
from weft.model.graph import F64, I64
from weft.search.common.problem import Problem, StageSpec

if TYPE_CHECKING:
    from weft.search.shard.tensor_costs import TensorCosts

Team = tuple[DeviceId, ...]
"""Devices that divide the operators of a stage among them; one device for none."""
Splits = Mapping[tuple[int, int], "TensorCosts"]
"""How devices divide operators, by device group and number of devices."""
NO_SPLITS: Final[Splits] = MappingProxyType({})
MAX_DEGREE: Final = 16
"""No more devices divide operators together: hosts rarely have more."""

def divided_stage(problem: Problem, split: TensorCosts | None, ops: I64, counts: Sequence[tuple[Team, int]], *,
                  passes: Callable[[Team, int], tuple[F64, F64]], sort: Callable[[Team], Hashable]) -> StageSpec:
    """Return the stage of these operators, with its words and times where teams of devices divide it.

    ``counts`` are the teams with their samples of a micro-batch, ``passes`` gives the seconds of every operator's
    forward and backward on a team, which are the same for all of a ``sort``.
    """
    size, graph = sum(count for _, count in counts), problem.graph
    replicas = tuple((team, count / size) for team, count in counts)
    if split is None:
        return StageSpec(ops=ops, replicas=replicas)
    touched = dict.fromkeys(tensor for op in ops.tolist() for tensor in (*graph.op_inputs(op), *graph.op_outputs(op)))
    words = split.words([graph.op_names[op] for op in ops], [graph.tensor_names[tensor] for tensor in touched])
    times: dict[tuple[Hashable, int], dict[str, float]] = {}
    keys = [(sort(team), count) for team, count in counts]
    for key, (team, count) in dict(zip(keys, counts, strict=True)).items():
        forward, backward = (float(seconds[ops].sum()) for seconds in passes(team, count))
        again = forward if problem.options.recompute else 0.0
        times[key] = {"F": forward, "B": backward + again} if problem.is_training else {"F": forward}
    return StageSpec(ops=ops, replicas=replicas, sharding=words, times=tuple(times[key] for key in keys))


def teams_by_degree(groups: Sequence[Sequence[DeviceId]]) -> Iterator[tuple[int, list[int]]]:
    """Yield each degree with the device groups that have a team of so many."""
    degree = 2
    while degree <= MAX_DEGREE:
        members = [index for index, group in enumerate(groups) if len(group) >= degree]
        if members:
            yield degree, members
        degree *= 2
