"""Pipelines as schedule problems: ``chain([0, 1, 2, 3], weight=1)``; and placements of their stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from weft.search.schedule.problem import Block, ScheduleProblem, Transfer


def chain(places: Sequence[int | tuple[int, ...]], *, forward: float = 1.0, backward: float = 1.0,
          weight: float | None = None, memory: float | None = None, amount: float = 1.0) -> ScheduleProblem:
    """Return a pipeline whose stages lie on the given devices; with ``weight`` its backward is split."""
    devices = [place if isinstance(place, tuple) else (place,) for place in places]
    last = len(devices) - 1
    blocks = [Block(name=f"a{stage}", devices=item, time=forward, memory=amount, after=(stage - 1,) if stage else ())
              for stage, item in enumerate(devices)]
    for stage in reversed(range(len(devices))):
        after = (stage,) if stage == last else (stage, len(blocks) - 1)
        blocks.append(Block(name=f"z{stage}", devices=devices[stage], time=backward, after=after,
                            memory=-amount if weight is None else 0.0))
    if weight is not None:
        blocks += [Block(name=f"y{stage}", devices=item, time=weight, memory=-amount, after=(2 * last + 1 - stage,))
                   for stage, item in enumerate(devices)]
    num_devices = max(max(item) for item in devices) + 1
    return ScheduleProblem(device_names=tuple(f"d{index}" for index in range(num_devices)),
                           device_memory=(memory,) * num_devices, blocks=tuple(blocks))


def over_and_back(num_devices: int) -> list[int]:
    """Return the devices of two stages on each device, in a V."""
    return [*range(num_devices), *reversed(range(num_devices))]


def round_and_round(num_devices: int, num_chunks: int) -> list[int]:
    """Return the devices of stages that go round several times."""
    return list(range(num_devices)) * num_chunks


def both_ways(num_devices: int, *, weight: float | None = None, **options: float) -> ScheduleProblem:
    """Return two opposite pipelines."""
    return together(chain(range(num_devices), weight=weight, **options),
                    chain(range(num_devices)[::-1], weight=weight, **options))


def together(first: ScheduleProblem, second: ScheduleProblem) -> ScheduleProblem:
    """Return both problems on the same devices."""
    moved = tuple(replace(block, name=f"second {block.name}",
                          after=tuple(index + first.num_blocks for index in block.after)) for block in second.blocks)
    return replace(first, blocks=first.blocks + moved)


def uneven(problem: ScheduleProblem, seed: int, *, transfers: str = "none") -> ScheduleProblem:
    """Return the problem with other times, in another order and with other names; ``transfers``: none, delay or link."""
    rng = Random(seed)
    order = list(range(problem.num_blocks))
    rng.shuffle(order)
    place = {block: number for number, block in enumerate(order)}
    blocks = tuple(replace(problem.blocks[block], name=f"block {number}", time=rng.uniform(0.5, 1.5),
                           after=tuple(place[other] for other in problem.blocks[block].after))
                   for number, block in enumerate(order))
    moves = tuple(Transfer(source=source, target=target, time=rng.uniform(0, 0.3),
                           link=_link(blocks[source], blocks[target]) if transfers == "link" else None)
                  for target, block in enumerate(blocks) for source in block.after
                  if transfers != "none" and blocks[source].devices != block.devices)
    return replace(problem, blocks=blocks, transfers=moves)


def _link(one: Block, other: Block) -> str:
    return "-".join(map(str, sorted((one.devices[0], other.devices[0]))))
