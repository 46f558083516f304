"""What must hold of the cells of a pipelining schedule: complete, each on its rank, and free of deadlock.

All problems are collected, each with its place. The dependencies are those of a chain: ``F`` of a stage after ``F`` of
the stage before it, ``B`` or ``I`` after its own ``F`` and after ``B`` or ``I`` of the next stage, ``W`` after ``I``.
Ranks run their cells in order, so a schedule that ends when every cell waits for what it needs ends in any runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from weft.plan.orders import Action, Order
from weft.plan.structure import raise_problems

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
    position: int = field(kw_only=True)
    """Its place among the actions of its rank."""

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

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.rank_of)


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
        for stage in range(self.shape.num_stages):
            if stage not in self.shape.rank_of:
                yield f"no row runs stage {stage}, although there are {self.shape.num_stages} stages"
                continue
            for microbatch in range(num_microbatches):
                yield from self._action_problems(stage, microbatch)
        yield from self._message_problems()

    def _at(self, cell: Cell) -> str:
        return self.shape.place(cell.rank, cell.column)

    def _cell_problem(self, cell: Cell) -> str | None:
        stage, kind, microbatch = cell.key
        stages, microbatches = self.shape.num_stages, self.shape.num_microbatches
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
        return 0 <= other < self.shape.num_stages and other in ranks and ranks[other] != ranks[stage]

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
            if first is not None and second is not None and first.position > second.position:
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
                elif compute is not None and (kind[0] == "S") != (message.position > compute.position):
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
