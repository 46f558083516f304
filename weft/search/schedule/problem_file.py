"""Schedule problem files (``weft.schedule-problem``): read strictly, written readably."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

from weft.base.errors import InputError
from weft.base.files import MAX_PROBLEMS, check_header, decode, load_json, write_atomic
from weft.search.schedule.problem import MAX_BLOCKS, Block, FreeAt, ScheduleProblem, Transfer

FORMAT: Final = "weft.schedule-problem"
VERSION: Final = 1
SMALLEST: Final = 1e-30
LARGEST: Final = 1e30
"""Times and memory beyond these are refused: sums of them would overflow or vanish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    name: str
    memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    name: str
    devices: tuple[str, ...]
    time: float
    memory: float = 0.0
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    from_: str
    to: str
    time: float
    link: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    devices: tuple[_Device, ...]
    blocks: tuple[_Block, ...]
    free_at: FreeAt = "end"
    transfers: tuple[_Transfer, ...] = ()


def load_problem(path: str | PathLike[str]) -> ScheduleProblem:
    """Return the problem in the file (``.json`` or ``.json.gz``)."""
    return parse_problem(load_json(path), where=str(path))


def parse_problem(value: Any, *, where: str = "problem") -> ScheduleProblem:
    """Return the problem in the plain JSON value; raise ``InputError`` that lists everything wrong with it."""
    body = check_header(value, format_name=FORMAT, version=VERSION, where=where, error=InputError)
    file = decode(_File, body, where=where)
    problems = _find_problems(file)
    if not problems:
        problem = _resolve(file)
        problems = find_cycle(problem)
    if problems:
        more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise InputError(f"{where}: " + "; ".join([*problems[:MAX_PROBLEMS], *more]))
    return problem


def _find_problems(file: _File) -> list[str]:
    problems: list[str] = []
    devices = _unique("devices", [device.name for device in file.devices], problems)
    blocks = _unique("blocks", [block.name for block in file.blocks], problems)
    if not file.blocks:
        problems.append("blocks is empty: give at least one block")
    if len(file.blocks) > MAX_BLOCKS:
        problems.append(f"blocks has {len(file.blocks)} items, more than {MAX_BLOCKS}")
    for index, device in enumerate(file.devices):
        if device.memory is not None:
            problems += _size_problems(f"devices[{index}].memory", device.memory)
    for index, block in enumerate(file.blocks):
        problems += _block_problems(f"blocks[{index}]", block, devices, blocks)
    for index, transfer in enumerate(file.transfers):
        where = f"transfers[{index}]"
        problems += [f"{where}.{key} names no block: {name!r}" for key, name in
                     (("from", transfer.from_), ("to", transfer.to)) if name not in blocks]
        problems += _size_problems(f"{where}.time", transfer.time)
        if transfer.from_ == transfer.to:
            problems.append(f"{where} goes from a block to itself")
    return problems


def _unique(where: str, names: list[str], problems: list[str]) -> set[str]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            problems.append(f"{where}[{index}].name is there twice: {name!r}")
        seen.add(name)
    return seen


def _block_problems(where: str, block: _Block, devices: set[str], blocks: set[str]) -> list[str]:
    problems = [f"{where}.devices names no device: {name!r}" for name in block.devices if name not in devices]
    problems += [f"{where}.after names no block: {name!r}" for name in block.after if name not in blocks]
    if not block.devices:
        problems.append(f"{where}.devices is empty: a block needs at least one device")
    if len(set(block.devices)) < len(block.devices):
        problems.append(f"{where}.devices names a device twice")
    if len(set(block.after)) < len(block.after):
        problems.append(f"{where}.after names a block twice")
    return [*problems, *_size_problems(f"{where}.time", block.time),
            *_size_problems(f"{where}.memory", abs(block.memory))]


def _size_problems(where: str, value: float) -> list[str]:
    if value < 0:
        return [f"{where} must not be negative, not {value}"]
    if value and not SMALLEST <= value <= LARGEST:
        return [f"{where} must be 0 or of a size between {SMALLEST:g} and {LARGEST:g}, not {value}: try other units"]
    return []


def _resolve(file: _File) -> ScheduleProblem:
    devices = {device.name: index for index, device in enumerate(file.devices)}
    blocks = {block.name: index for index, block in enumerate(file.blocks)}
    return ScheduleProblem(
        device_names=tuple(devices), device_memory=tuple(device.memory for device in file.devices),
        free_at=file.free_at,
        blocks=tuple(Block(name=block.name, devices=tuple(sorted(devices[name] for name in block.devices)),
                           time=block.time, memory=block.memory, after=tuple(blocks[name] for name in block.after))
                     for block in file.blocks),
        transfers=tuple(Transfer(source=blocks[item.from_], target=blocks[item.to], time=item.time, link=item.link)
                        for item in file.transfers))


def find_cycle(problem: ScheduleProblem) -> list[str]:
    """Return one message that names the blocks of a cycle of dependencies, or nothing."""
    order = set(problem.topological)
    if len(order) == problem.num_tasks:
        return []
    task = next(task for task in range(problem.num_tasks) if task not in order)
    seen: list[int] = []
    while task not in seen:
        seen.append(task)
        task = next(edge.source for edge in problem.predecessors[task] if edge.source not in order)
    names = [problem.task_names[item] for item in (*seen[seen.index(task):], task)]
    shown = names if len(names) <= 10 else [*names[:9], "..."]
    return [f"blocks wait for each other in a circle: {' after '.join(shown)}"]


def problem_to_json(problem: ScheduleProblem) -> dict[str, Any]:
    """Return the problem as plain JSON values, as ``parse_problem`` reads them."""
    names = [block.name for block in problem.blocks]
    transfers = [{"from": names[item.source], "to": names[item.target], "time": item.time,
                  **({} if item.link is None else {"link": item.link})} for item in problem.transfers]
    return {
        "format": FORMAT, "version": VERSION,
        "devices": [{"name": name, "memory": memory} for name, memory in
                    zip(problem.device_names, problem.device_memory, strict=True)],
        "free_at": problem.free_at,
        "blocks": [{"name": block.name, "devices": [problem.device_names[device] for device in block.devices],
                    "time": block.time, "memory": block.memory, "after": [names[index] for index in block.after]}
                   for block in problem.blocks],
        **({"transfers": transfers} if transfers else {})}


def save_problem(problem: ScheduleProblem, path: str | PathLike[str]) -> None:
    """Write the problem to the file, whole or not at all."""
    write_atomic(path, json.dumps(problem_to_json(problem), indent=1, allow_nan=False) + "\n")
