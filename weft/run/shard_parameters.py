"""The parts of parameters that a rank holds: which entries they are, and how their gradients come out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from weft.plan.holders import parameter_holdings
from weft.plan.program import Program
from weft.plan.sharding import Region, TensorLayout, axis_sizes, coordinates_of, parse_layout
from weft.run.mesh import group_ranks
from weft.sharding.tensor_layout import SUM, WHOLE


def held_regions(program: Program, rank: int) -> dict[str, Region]:
    """Return which entries of its parameters a rank holds; empty for all of them."""
    device, names = program.rank_names[rank], program.graph.tensor_names
    return {names[tensor]: held[device][0].region
            for tensor, held in parameter_holdings(program.plan, program.graph).items() if device in held}


def cut_region(whole: Tensor, region: Region) -> Tensor:
    """Return the entries of a tensor that lie in a region, a copy; the tensor itself if the region is all of it."""
    result = whole
    for dim, ranges in enumerate(region):
        if ranges != ((0, whole.shape[dim]),):
            result = torch.cat([result.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return result


def put_region(whole: Tensor, region: Region, part: Tensor) -> None:
    """Write the entries of a region, given in any shape, into the whole tensor."""
    if not region:
        whole.copy_(part.view(whole.shape))
        return
    part = part.view([sum(stop - start for start, stop in ranges) for ranges in region])
    for block in itertools.product(*(list(_places(ranges)) for ranges in region)):
        target = whole[tuple(slice(start, start + length) for start, _, length in block)]
        target.copy_(part[tuple(slice(place, place + length) for _, place, length in block)])


def _places(ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the whole, start in the part, length) of each range."""
    place = 0
    for start, stop in ranges:
        yield start, place, stop - start
        place += stop - start


def parameter_layouts(program: Program, instance: int, rank: int) -> dict[str, TensorLayout]:
    """Return how the parameters of an instance lie over its mesh, where they are not simply whole.

    Gradients that are summed over some axis in an exchange are sums on that axis: where all devices have the same
    gradient, all but the first leave it out.
    """
    item, plan, names = program.instances[instance], program.plan, program.graph.tensor_names
    stage = plan.stages[item.stage]
    sizes = axis_sizes(stage.replicas[item.replica])
    coordinates = coordinates_of(item.ranks.index(rank), sizes)
    lines = [set(group_ranks(item.ranks, sizes, coordinates, (axis,))) for axis in range(len(sizes))]
    summed = {names[tensor]: bucket.ranks for bucket in program.buckets if rank in bucket.ranks
              for tensor in bucket.parameters}
    stored = {name for name in stage.sharding.tensors if program.graph.tensor_index[name] in program.graph.parameters}
    result = {}
    for name in sorted(stored | summed.keys()):
        layout = parse_layout(stage.sharding.tensors.get(name, ("R",) * len(sizes)))
        gradient = tuple(SUM if own == WHOLE and len(line.intersection(summed.get(name, ()))) > 1 else own
                         for own, line in zip(layout.gradient, lines, strict=True))
        result[name] = TensorLayout(layout.value, gradient)
    return result
