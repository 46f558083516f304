"""The schedule CSV of ``torch.distributed.pipelining``: one row for each rank, one action in each cell.

    0F0,0F1,0B0,0B1        rank 0 runs stage 0        a cell is <stage><phase><micro-batch>; phases are F forward,
    1F0,1B0,1F1,1B1        rank 1 runs stage 1        B whole backward, I and W its two halves

The format knows stages on one rank each, joined in a chain: stage ``s`` passes its output to ``s + 1`` and gets the
gradient back. ``to_csv`` writes the order of a plan in the form that PyTorch calls ``compute_only``; ``order_from_csv``
puts the order in a CSV into a plan, whose devices are the ranks and whose stages are numbered as they are listed.

PyTorch itself accepts duplicates, micro-batches that do not exist and text behind an action; here all that is refused,
with row and column (both counted from 1). Of its ``compute_comms`` form the communication is checked and then left out,
because Weft places its own. ``(0F7;3B2)OVERLAP_F_B`` is read as ``0F7`` and then ``3B2``, as PyTorch runs it.

``schedule_to_csv`` writes a schedule of blocks in the same form, where every block is on one device.

What must hold of the cells: complete, each on its rank, and free of deadlock. The dependencies are those of a chain:
``F`` of a stage after ``F`` of the stage before it, ``B`` or ``I`` after its own ``F`` and after ``B`` or ``I`` of the
next stage, ``W`` after ``I``. Ranks run their cells in order, so a schedule that ends when every cell waits for what it
needs ends in any runtime. All problems are collected, each with its place.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Final, cast

from weft.base.errors import PlanError
from weft.base.files import read_bytes
from weft.plan.orders import Action, Order, to_tokens
from weft.plan.plan import Plan, SearchInfo, Stage
from weft.plan.program import Program
from weft.plan.structure import PHASES, parse_action, raise_problems

if TYPE_CHECKING:
    from weft.search.schedule.schedule import Schedule


COMPUTE: Final = ("F", "B", "I", "W")
OF_STAGE: Final = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Kinds that concern a whole stage, not a micro-batch; they may come several times."""
_NEIGHBOUR: Final = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}
"""The stage that a message goes to or comes from, relative to the stage that the cell names."""
_MAX_PROBLEMS: Final = 1000

Key = tuple[int, str, int]
"""(stage, kind, micro-batch); micro-batch -1 for the kinds in ``OF_STAGE``."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One action, and where it was written."""

    key: Key
    rank: int = field(kw_only=True)
    column: int = field(kw_only=True)
    """Its place among the actions of its rank; those of an overlap, a forward and then a backward, share one."""

    def __str__(self) -> str:
        return _token(self.key)


Rows = list[list[Cell]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the cells are checked against."""

    rank_of: Mapping[int, int]
    """The rank of each stage; there are as many stages as it names."""
    num_microbatches: int
    place: Callable[[int, int], str]
    """Words for (rank, column); column -1 is the whole row."""


def require_order(rows: Rows, shape: Shape, what: str) -> Order:
    """Return the compute actions of each rank; raise ``PlanError`` about ``what`` with everything that is wrong."""
    checker = _Checker(rows, shape)
    problems = list(itertools.islice(checker.problems(), _MAX_PROBLEMS)) or list(checker.blocked())
    if problems:
        raise_problems(what, problems)
    return [[cast(Action, cell.key) for cell in row if cell.key[1] in COMPUTE] for row in rows]


class _Checker:
    """Walks over the cells of all ranks once and remembers where each action is."""

    def __init__(self, rows: Rows, shape: Shape) -> None:
        self.rows, self.shape = rows, shape
        self.found: dict[Key, Cell] = {}

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with single cells, then what is missing or in the wrong order on its rank."""
        for row in self.rows:
            for cell in row:
                if problem := self._cell_problem(cell):
                    yield f"{self._at(cell)}: {problem}"
                else:
                    self.found.setdefault(cell.key, cell)
        num_microbatches, num_cells = self.shape.num_microbatches, sum(map(len, self.rows))
        if num_microbatches > num_cells:
            yield f"there are {num_cells} actions for {num_microbatches} micro-batches: each needs at least one"
            return
        num_stages = len(self.shape.rank_of)
        for stage in range(num_stages):
            if stage not in self.shape.rank_of:
                yield f"no row runs stage {stage}, although there are {num_stages} stages"
                continue
            for microbatch in range(num_microbatches):
                yield from self._action_problems(stage, microbatch)
        yield from self._message_problems()

    def _at(self, cell: Cell) -> str:
        return self.shape.place(cell.rank, cell.column)

    def _cell_problem(self, cell: Cell) -> str | None:
        stage, kind, microbatch = cell.key
        stages, microbatches = len(self.shape.rank_of), self.shape.num_microbatches
        if not 0 <= stage < stages:
            return f"'{cell}' is for stage {stage}, but there are {stages} stages, from 0 to {stages - 1}"
        if kind not in OF_STAGE and not 0 <= microbatch < microbatches:
            return (f"'{cell}' is for micro-batch {microbatch}, but there are {microbatches} micro-batches, "
                    f"from 0 to {microbatches - 1}")
        if (rank := self.shape.rank_of.get(stage)) != cell.rank:
            return f"'{cell}' is on rank {cell.rank}, but stage {stage} belongs to rank {rank}"
        if cell.key in self.found and kind not in OF_STAGE:
            return f"'{cell}' is there already, at {self._at(self.found[cell.key])}"
        step = _NEIGHBOUR.get(kind)
        if step is not None and not self._has_message(stage, stage + step):
            return f"'{cell}' has no partner: there is no stage {stage + step} on another rank"
        return None

    def _has_message(self, stage: int, other: int) -> bool:
        ranks = self.shape.rank_of
        return 0 <= other < len(ranks) and ranks.get(other, ranks[stage]) != ranks[stage]

    def _action_problems(self, stage: int, microbatch: int) -> Iterator[str]:
        """Yield what is missing of one stage and micro-batch, doubled, or before what it needs."""
        here = {kind: self.found.get((stage, kind, microbatch)) for kind in COMPUTE}
        whole, half = here["B"], here["I"] or here["W"]
        if whole is not None and half is not None:
            yield (f"{self._at(half)}: '{half}' beside '{whole}' at {self._at(whole)}: "
                   "a backward is either B, or I and W")
            return
        chain = ("F", "I", "W") if half is not None else ("F", "B")
        beside = next((cell for cell in here.values() if cell is not None), None)
        reason = f", although '{beside}' is at {self._at(beside)}" if beside is not None else ""
        for kind in chain:
            if here[kind] is None:
                where = self.shape.place(self.shape.rank_of[stage], -1)
                yield f"{where}: '{_token((stage, kind, microbatch))}' is missing{reason}"
        for before, after in itertools.pairwise(chain):
            first, second = here[before], here[after]
            if first is not None and second is not None and first.column > second.column:
                yield f"{self._at(second)}: '{second}' stands before '{first}', which is at {self._at(first)}"

    def _message_problems(self) -> Iterator[str]:
        """Yield what is wrong with sends and receives; a schedule that has any must have all."""
        if not any(kind in _NEIGHBOUR for _, kind, _ in self.found):
            return
        for stage, rank in sorted(self.shape.rank_of.items()):
            for (kind, step), microbatch in itertools.product(_NEIGHBOUR.items(), range(self.shape.num_microbatches)):
                if not self._has_message(stage, stage + step):
                    continue
                message, compute = self.found.get((stage, kind, microbatch)), self._compute(stage, kind, microbatch)
                if message is None:
                    yield (f"{self.shape.place(rank, -1)}: '{_token((stage, kind, microbatch))}' is missing, although "
                           "there are other sends or receives")
                elif compute is not None and (kind[0] == "S") != (message.column > compute.column):
                    relation = "before" if kind[0] == "S" else "behind"
                    yield f"{self._at(message)}: '{message}' stands {relation} '{compute}' at {self._at(compute)}"

    def _compute(self, stage: int, message: str, microbatch: int) -> Cell | None:
        """Return the action that makes what is sent or needs what is received."""
        kinds = ("F",) if message.endswith("F") else ("B", "I")
        cells = (self.found.get((stage, kind, microbatch)) for kind in kinds)
        return next((cell for cell in cells if cell is not None), None)

    def blocked(self) -> Iterator[str]:
        """Yield for each rank that cannot come to its end the cell at which it waits."""
        rows = [[cell for cell in row if cell.key[1] in COMPUTE] for row in self.rows]
        heads, done = [0] * len(rows), set[Key]()
        waiting: dict[Key, int] = {}
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            while heads[rank] < len(rows[rank]):
                cell = rows[rank][heads[rank]]
                need = self._need(cell)
                if need is not None and need.key not in done:
                    waiting[need.key] = rank
                    break
                done.add(cell.key)
                heads[rank] += 1
                if cell.key in waiting:
                    ready.append(waiting.pop(cell.key))
        for head, row in zip(heads, rows, strict=True):
            if head < len(row) and (need := self._need(row[head])) is not None:
                yield (f"{self._at(row[head])}: '{row[head]}' waits for '{need}' at {self._at(need)}, which never "
                       "comes: the ranks block each other")

    def _need(self, cell: Cell) -> Cell | None:
        """Return the action of a neighbouring stage that must be done before this one."""
        stage, kind, microbatch = cell.key
        if kind == "F":
            return self.found.get((stage - 1, "F", microbatch))
        return self._compute(stage + 1, "B", microbatch) if kind in ("B", "I") else None


def _token(key: Key) -> str:
    stage, kind, microbatch = key
    return f"{stage}{kind}{microbatch if microbatch >= 0 else ''}"


_NUMBER: Final = "(0|[1-9][0-9]{0,8})"
_WITH_MICROBATCH: Final = re.compile(f"{_NUMBER}(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B){_NUMBER}")
_OF_STAGE: Final = re.compile(f"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAP: Final = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_THE_PLAN: Final = "the plan, as a schedule CSV of torch.distributed.pipelining,"
_THE_CSV: Final = "the schedule CSV"


def to_csv(plan: Plan) -> str:
    """Return the plan's order as a CSV (``compute_only``); raise ``PlanError`` if the format cannot say it."""
    ranks = _stage_ranks(plan)
    devices = plan.cluster.devices
    if missing := sorted(set(range(len(devices))) - set(ranks)):
        raise_problems(_THE_PLAN, [f"cluster.devices[{rank}]: {devices[rank]!r} runs no stage, but PyTorch gives every "
                                   "rank a part of the schedule; plan for fewer devices" for rank in missing])
    shape = Shape(rank_of=dict(enumerate(ranks)), num_microbatches=plan.microbatches,
                  place=lambda rank, column: f"order.{devices[rank]}" + (f"[{column}]" if column >= 0 else ""))
    return _format(require_order(_plan_rows(plan), shape, _THE_PLAN))


def order_to_csv(order: Order, *, num_microbatches: int) -> str:
    """Return the actions of each rank as a CSV; raise ``PlanError`` if PyTorch could not run them to the end."""
    rows = [[Cell(action, rank=rank, column=place) for place, action in enumerate(actions)]
            for rank, actions in enumerate(order)]
    shape = replace(_infer_shape(rows), num_microbatches=num_microbatches, place=lambda rank, column: (
        f"rank {rank}" + (f", action {column}" if column >= 0 else "")))
    if empty := [rank for rank, row in enumerate(rows) if not row]:
        raise_problems("the order", [f"rank {rank} has nothing to do, which PyTorch refuses" for rank in empty])
    return _format(require_order(rows, shape, "the order"))


def parse_csv(text: str, *, num_ranks: int | None = None) -> Order:
    """Return the compute actions of each rank; raise ``PlanError`` with row and column of all that is wrong.

    Every stage from 0 up and every micro-batch from 0 up must be there in full, in an order that comes to its end. How
    many there are is taken from the text: as many stages as it has different ones, and as many micro-batches as the
    stage with the most has forwards.
    """
    rows = _read(text)
    if num_ranks is not None and len(rows) != num_ranks:
        raise PlanError(f"{_THE_CSV} has {len(rows)} rows, but there are {num_ranks} ranks: it needs one row for each")
    return require_order(rows, _infer_shape(rows), _THE_CSV)


def order_from_csv(plan: Plan, text: str) -> Plan:
    """Return the plan with the order in the CSV; raise ``PlanError`` with row and column of all that is wrong.

    Row ``i`` is for ``plan.cluster.devices[i]``, stage ``s`` is ``plan.stages[s]``. What the plan said about its search
    (``status``, ``step_time``, ``bound``) is dropped: it was about another order.
    """
    ranks = _stage_ranks(plan)
    devices = plan.cluster.devices
    rows = _read(text)
    if len(rows) != len(devices):
        raise PlanError(f"{_THE_CSV} has {len(rows)} rows, but the plan has {len(devices)} devices "
                        f"({', '.join(devices[:8])}{', ...' if len(devices) > 8 else ''}): it needs one row for each")
    shape = Shape(rank_of=dict(enumerate(ranks)), num_microbatches=plan.microbatches,
                  place=lambda rank, column: _csv_place(rank, column, devices[rank]))
    order = require_order(rows, shape, _THE_CSV)
    tokens = to_tokens(order, tuple(stage.name for stage in plan.stages))
    return replace(plan, stages=_with_times(plan.stages, order), search=SearchInfo(by="pytorch-csv"),
                   order={device: actions for device, actions in zip(devices, tokens, strict=True) if actions})


def load_csv(path: str | PathLike[str]) -> str:
    """Return the text of a schedule file."""
    try:
        return read_bytes(path, error=PlanError).decode()
    except UnicodeDecodeError as problem:
        raise PlanError(f"{str(path)!r} is not text in UTF-8: {problem}") from problem


def runtime_notes(program: Program) -> list[str]:
    """Return what PyTorch's runtime will not do by itself for the program's plan; its plan must suit ``to_csv``.

    Raises ``PlanError`` if stages are not numbered along the flow of data, because PyTorch takes them for a chain.
    """
    plan = program.plan
    problems, notes = [], []
    for stage, instance in enumerate(program.instances):
        for source in instance.producers:
            text = f"stages[{stage}] ({plan.stages[stage].name!r}) reads from stages[{source}] "
            if source > stage:
                problems.append(f"{text}({plan.stages[source].name!r}): PyTorch runs stages in the order of their "
                                "numbers; list them along the flow of data")
            elif source < stage - 1:
                notes.append(f"{text}({plan.stages[source].name!r}), but PyTorch passes tensors only to the next "
                             "stage: the modules of the stages between must pass them on")
    if problems:
        raise_problems(_THE_PLAN, problems)
    shared = sum(len(exchange.parameters) for exchange in plan.gradients)
    if shared:
        notes.append(f"{shared} parameters are on several devices, but PyTorch does not add up their gradients")
    if any(stage.recompute for stage in plan.stages):
        notes.append("the plan recomputes activations, but a CSV cannot say so: wrap the stages' modules")
    return notes


def _stage_ranks(plan: Plan) -> list[int]:
    """Return the rank of each stage; raise ``PlanError`` for what the format cannot say."""
    problems = [problem for index, stage in enumerate(plan.stages) for problem in _stage_problems(plan, index, stage)]
    if plan.model.mode == "inference":
        problems.append("model.mode is 'inference', but PyTorch accepts only schedules in which every forward has its "
                        "backward")
    if not plan.stages or plan.microbatches < 1:
        problems.append("it needs at least one stage and one micro-batch")
    if problems:
        raise_problems(_THE_PLAN, problems)
    return [plan.cluster.devices.index(stage.replicas[0].devices[0]) for stage in plan.stages]


def _stage_problems(plan: Plan, index: int, stage: Stage) -> Iterator[str]:
    here = f"stages[{index}] ({stage.name!r})"
    if len(stage.replicas) != 1:
        yield f"{here} has {len(stage.replicas)} replicas: a stage must be on one device"
    for replica in stage.replicas:
        if len(replica.devices) != 1:
            yield f"{here} runs on {len(replica.devices)} devices ({', '.join(replica.devices)}): it must be on one"
        for device in replica.devices:
            if device not in plan.cluster.devices:
                yield f"{here} is on {device!r}, which is not in cluster.devices"
    handled = stage.microbatches
    if handled is not None and (len(handled) < plan.microbatches or set(handled) != set(range(plan.microbatches))):
        yield (f"{here} handles only the micro-batches {list(handled[:8])}{' ...' if len(handled) > 8 else ''} of "
               f"{plan.microbatches} (opposite pipelines?): every stage must handle all")


def _plan_rows(plan: Plan) -> Rows:
    """Return the plan's actions by rank; the column of a cell is its place in ``order``."""
    rank_of = {device: rank for rank, device in enumerate(plan.cluster.devices)}
    number = {stage.name: index for index, stage in enumerate(plan.stages)}
    rows: Rows = [[] for _ in plan.cluster.devices]
    problems = []
    for device, tokens in plan.order.items():
        if device not in rank_of:
            problems.append(f"order: {device!r} is not in cluster.devices")
            continue
        for place, token in enumerate(tokens):
            action = parse_action(token)
            if action is None or action[0] not in number:
                problems.append(f"order.{device}[{place}]: {token!r} is not of the form stage:F:0 with a stage of the "
                                "plan and a phase F, B, I or W")
                continue
            rows[rank_of[device]].append(Cell((number[action[0]], *action[1:]), rank=rank_of[device], column=place))
    if problems:
        raise_problems(_THE_PLAN, problems)
    return rows


def _read(text: str) -> Rows:
    """Return the cells of each row, empty ones left out; raise ``PlanError`` with every cell that is not an action."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: Rows = []
    problems = []
    try:
        for rank, row in enumerate(reader):
            rows.append([])
            for column, cell in enumerate(row):
                actions = _parse_cell(cell.strip(" \t"))
                if actions is None:
                    problems.append(f"{_csv_place(rank, column)}: {_shown(cell)} is not an action; write the stage, F, "
                                    "B, I or W, and the micro-batch, such as 0F1")
                rows[-1] += [Cell(action, rank=rank, column=column) for action in actions or ()]
    except csv.Error as problem:
        raise PlanError(f"{_THE_CSV} cannot be read at line {reader.line_num}: {problem}") from problem
    if problems:
        raise_problems(_THE_CSV, problems)
    if not any(rows):
        raise PlanError(f"{_THE_CSV} has no actions")
    return rows


def _parse_cell(text: str) -> list[tuple[int, str, int]] | None:
    """Return the actions in one cell (two for an overlap, none for an empty cell), or None if it has none."""
    if not text:
        return []
    if match := _WITH_MICROBATCH.fullmatch(text):
        return [(int(match[1]), match[2], int(match[3]))]
    if match := _OF_STAGE.fullmatch(text):
        return [(int(match[1]), match[2], -1)]
    if match := _OVERLAP.fullmatch(text):
        parts = [_parse_cell(part.strip(" \t")) for part in match.groups()]
        actions = [action for part in parts for action in part or ()]
        if [kind for _, kind, _ in actions] == ["F", "B"]:
            return actions
    return None


def _infer_shape(rows: Rows) -> Shape:
    """Return the shape that the cells themselves suggest: a stage belongs to the rank that names it first."""
    rank_of: dict[int, int] = {}
    for cell in itertools.chain.from_iterable(rows):
        rank_of.setdefault(cell.key[0], cell.rank)
    forwards = Counter(stage for stage, kind, _ in {cell.key for row in rows for cell in row} if kind == "F")
    return Shape(rank_of=rank_of, num_microbatches=max(forwards.values(), default=1), place=_csv_place)


def _csv_place(rank: int, column: int, device: str | None = None) -> str:
    name = "" if device is None else f" {device!r}"
    return f"row {rank + 1}{f', column {column + 1}' if column >= 0 else ''} (rank {rank}{name})"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _with_times(stages: Sequence[Stage], order: Order) -> tuple[Stage, ...]:
    """Return the stages with times for the phases in use: lowering would take seconds for those that have none."""
    used = {(stage, phase) for actions in order for stage, phase, _ in actions}
    result = []
    for index, stage in enumerate(stages):
        times = dict(stage.replicas[0].times)
        if (index, "I") in used and "B" in times and not times.keys() & {"I", "W"}:
            times["I"] = times["W"] = times["B"] / 2
        elif (index, "B") in used and "B" not in times and times.keys() >= {"I", "W"}:
            times["B"] = times["I"] + times["W"]
        result.append(replace(stage, replicas=(replace(stage.replicas[0], times=times),)))
    return tuple(result)


def _format(order: Order) -> str:
    return "".join(",".join(f"{stage}{phase}{index}" for stage, phase, index in actions) + "\n" for actions in order)


def schedule_to_csv(schedule: Schedule, roles: Mapping[int, tuple[int, str]]) -> str:
    """Return the order of the schedule's blocks as a CSV: one row per device, one cell per block and micro-batch.

    ``roles`` gives each block's (stage, phase) by the block's index; phases are F, B, I and W, stages form one chain
    from 0. Raises ``PlanError`` for blocks on several devices, for blocks without a role or with that of another, and
    for what PyTorch could not run.
    """
    problem = schedule.problem
    problems, taken = [], dict[tuple[int, str], str]()
    for index, block in enumerate(problem.blocks):
        role = roles.get(index)
        if len(block.devices) > 1:
            names = ", ".join(problem.device_names[device] for device in block.devices)
            problems.append(f"block {block.name!r} is on several devices ({names}), a stage of a pipelining CSV on one")
        if role is None:
            problems.append(f"block {block.name!r} has no role (stage, phase)")
        elif role[1] not in PHASES:
            problems.append(f"block {block.name!r} has the phase {role[1]!r}, not one of {', '.join(PHASES)}")
        elif (other := taken.setdefault(role, block.name)) != block.name:
            problems.append(f"blocks {other!r} and {block.name!r} are both {role[1]} of stage {role[0]}")
    if problems:
        raise_problems("the schedule", problems)
    order = [[cast(Action, (*roles[task], index)) for task, index in row]
             for row in schedule.orders()[: problem.num_devices]]
    return order_to_csv(order, num_microbatches=schedule.num_microbatches)
