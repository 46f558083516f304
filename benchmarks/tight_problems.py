"""Random schedule problems with little memory: pipelines of the usual shapes, and any graphs of blocks."""

from __future__ import annotations

import math
from random import Random

from weft.search.schedule.problem import Block, ScheduleProblem

Steps = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Devices and predecessors of the forward blocks."""


def tight_problem(seed: int) -> ScheduleProblem:
    """Return a random pipeline of 4 to 8 devices: chains, ways back, branches, blocks on all devices; times 1 to 9.

    Memory is in units or bytes, from what one micro-batch takes upward.
    """
    rng = Random(f"tight {seed}")
    num_devices, kind = rng.randint(4, 8), rng.choice(["chain", "back", "branches", "wide", "double"])
    is_split, in_bytes, is_unequal = rng.random() < 0.3, rng.random() < 0.5, rng.random() < 0.75
    steps = _steps(rng, kind, num_devices)
    times = [float(rng.randint(1, 6)) if is_unequal else 1.0 for _ in steps]
    amounts = [0.0 if len(devices) > 1 and rng.random() < 0.5 else
               rng.randint(200, 2000) * 1e6 if in_bytes else 1.0 for devices, _ in steps]
    ratio, last = rng.choice([1, 2, 3]), len(steps) - 1
    blocks = [Block(name=f"f{index}", devices=devices, time=times[index], memory=amounts[index], after=after)
              for index, (devices, after) in enumerate(steps)]
    place = {index: len(steps) + last - index for index in range(len(steps))}
    for index in reversed(range(len(steps))):
        users = [other for other, (_, after) in enumerate(steps) if index in after]
        taken = times[index] * ratio if not is_unequal or rng.random() < 0.7 else float(rng.randint(1, 9))
        blocks.append(Block(name=f"b{index}", devices=steps[index][0], time=taken,
                            memory=0.0 if is_split else -amounts[index], after=(index, *(place[user] for user in users))))
    if is_split:
        blocks += [Block(name=f"w{index}", devices=devices, memory=-amounts[index], after=(place[index],),
                         time=times[index] + (rng.choice([0, 0, 1]) if is_unequal else 0))
                   for index, (devices, _) in enumerate(steps)]
    least = [sum(amount for amount, (devices, _) in zip(amounts, steps, strict=True) if device in devices)
             for device in range(num_devices)]
    factor, is_same = rng.choice([1, 1.3, 1.5, 2, 2, 3]), rng.random() < 0.5
    limits = [float(math.floor((max(least) if is_same else item) * factor)) or 1.0 for item in least]
    return ScheduleProblem(device_names=tuple(f"d{device}" for device in range(num_devices)),
                           device_memory=tuple(limits), blocks=tuple(blocks), free_at=rng.choice(["start", "end"]))


def _steps(rng: Random, kind: str, num_devices: int) -> Steps:
    """Return devices and predecessors of the forward blocks."""
    alone, everyone = [(device,) for device in range(num_devices)], tuple(range(num_devices))
    half = num_devices // 2
    rows = [alone]
    if kind == "back":
        rows = [alone + alone[::-1]]
    elif kind == "double":
        rows = [alone, alone[::-1]]
    elif kind == "branches":
        rows = [alone[:half], alone[half:]]
    elif kind == "wide":
        cut = rng.randint(2, num_devices - 1)
        rows = [[everyone, *alone[:cut], *([everyone] if rng.random() < 0.5 else []), *alone[cut:],
                 *([everyone] if rng.random() < 0.5 else [])]]
    steps = []
    for row in rows:
        begin = len(steps)
        steps += [(devices, (begin + index - 1,) if index else ()) for index, devices in enumerate(row)]
    if kind == "branches":
        steps.append((everyone if rng.random() < 0.6 else (num_devices - 1,), (half - 1, num_devices - 1)))
    return steps


def wide_problem(seed: int) -> ScheduleProblem:
    """Return a random problem of 4 to 8 devices: any graph of blocks, on one, some or all devices; times 1 to 18.

    Backward times need not follow forward times, and split backwards may give memory back in two parts. Memory is from
    what one micro-batch takes at a time upward: where parts of the graph do not depend on each other, what one of them takes.
    """
    rng = Random(f"wide {seed}")
    num_devices = rng.randint(4, 8)
    steps = _wide_steps(rng, rng.choice(["any", "any", "double", "several", "back", "twice"]), num_devices)
    last, is_split, in_bytes, free_at = len(steps) - 1, rng.random() < 0.4, rng.random() < 0.5, rng.choice(["start", "end"])
    longest = rng.choice([1, 3, 9])
    times = [rng.randint(1, longest) for _ in steps]
    amounts = [0 if len(devices) > 1 and rng.random() < 0.5 else
               rng.randint(50, 3000) * 10**6 if in_bytes else rng.choice([1, 1, 1, 2]) for devices, _ in steps]
    blocks = [Block(name=f"f{index}", devices=devices, time=float(times[index]), memory=float(amounts[index]), after=after)
              for index, (devices, after) in enumerate(steps)]
    place = {index: len(steps) + last - index for index in range(len(steps))}
    weights = []
    for index in reversed(range(len(steps))):
        taken = rng.randint(1, 2 * longest) if rng.random() < 0.5 else times[index] * rng.choice([1, 2])
        early = amounts[index] if not is_split else 0 if rng.random() < 0.6 else amounts[index] // 2
        users = [place[other] for other, (_, after) in enumerate(steps) if index in after]
        blocks.append(Block(name=f"b{index}", devices=steps[index][0], time=float(taken), memory=float(-early),
                            after=(index, *users)))
        weights.append(Block(name=f"w{index}", devices=steps[index][0], memory=float(early - amounts[index]),
                             time=float(rng.choice([times[index], rng.randint(1, longest)])), after=(place[index],)))
    least = [max(sum(amounts[index] for index in part if device in steps[index][0]) for part in _parts(steps))
             for device in range(num_devices)]
    factor, is_same = rng.choice([1, 1.1, 1.3, 1.6, 2, 2.5]), rng.random() < 0.5
    limits = [float(math.floor((max(least) if is_same else item) * factor)) or 1.0 for item in least]
    return ScheduleProblem(device_names=tuple(f"d{device}" for device in range(num_devices)), free_at=free_at,
                           device_memory=tuple(limits), blocks=(*blocks, *(weights if is_split else ())))


def _wide_steps(rng: Random, kind: str, num_devices: int) -> Steps:
    everyone = list(range(num_devices))
    rows = {"double": [everyone, everyone[::-1]], "back": [everyone + everyone[::-1]], "twice": [everyone * 2]}
    if kind in rows:
        return [((device,), (begin + index - 1,) if index else ())
                for begin, row in zip((0, num_devices), rows[kind], strict=False) for index, device in enumerate(row)]
    homes = everyone + [rng.randrange(num_devices) for _ in range(rng.randint(0, min(num_devices, 12 - num_devices)))]
    rng.shuffle(homes)
    if rng.random() < 0.5:
        homes.sort()
    steps: Steps = []
    for index, home in enumerate(homes):
        several = rng.sample(everyone, rng.choice([2, 2, 3, num_devices]))
        near = range(max(0, index - 4), index)
        steps.append((tuple(sorted(several)) if kind == "several" and rng.random() < 0.25 else (home,),
                      tuple(sorted(rng.sample(near, min(rng.choice([0, 1, 1, 1, 2]), len(near)))))))
    if rng.random() < 0.7:
        ends = tuple(index for index in range(len(steps)) if not any(index in after for _, after in steps))
        steps.append((tuple(everyone) if rng.random() < 0.4 else (rng.randrange(num_devices),), ends))
    return steps


def _parts(steps: Steps) -> list[list[int]]:
    """Return the steps in parts that do not depend on each other."""
    part = list(range(len(steps)))
    for index, (_, after) in enumerate(steps):
        for other in after:
            part = [part[index] if item == part[other] else item for item in part]
    return [[index for index, item in enumerate(part) if item == name] for name in sorted(set(part))]
