"""Checkpoints: one ordinary state dict and the optimizer's state, whole and by name, whatever plan wrote or reads them.

Every rank says which tensors, or parts of tensors, it has to give (its *claims*); of those that several hold alike, the
first gives them. Rank 0 puts the claims together, and the tensors come to it one after the other, in the order of the
files, so that it needs memory for one. Loading is the other way round and needs no messages: each rank maps the files
and copies its own parts out of them. So a plan with other stages, shares, shardings or ranks reads what another wrote.
"""

from __future__ import annotations

import errno
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.base.errors import InputError, ModelError, RunError, WeftError
from weft.base.tensor_file import Entry, file_order
from weft.plan.holders import parameter_copies, parameter_holdings
from weft.plan.plan import Plan, format_plan
from weft.plan.program import Program
from weft.plan.sharding import Region
from weft.plan.units import rows_of_region
from weft.run import checkpoint_folder as files
from weft.run.failures import together
from weft.run.optimizers import Claim, OptimizerState, claim_of, mismatch
from weft.run.parameters import StateShares, cut_region, held_regions, kept_regions, put_region
from weft.run.prepare import Prepared, value_of
from weft.run.transport import Transport

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""(file, name)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The names in the model's own state dict, and the values in it that no stage holds."""

    names: dict[str, str]
    """Name in the state dict -> name of the tensor in the graph; tied parameters have one tensor."""
    rest: dict[str, Tensor]
    """By name of the tensor, on rank 0: buffers, and parameters that the forward does not use."""


def model_state(module: torch.nn.Module, program: Program, *, rank: int, seed: int) -> ModelState:
    """Return what a checkpoint needs to know of a module; values of the module are copied."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    path_of: dict[int, str] = {}
    for path, tensor in tensors:
        path_of.setdefault(id(tensor), path)
    state = module.state_dict(keep_vars=True)
    names = {name: path_of[id(tensor)] for name, tensor in state.items() if id(tensor) in path_of}
    if len(names) < len(state):
        strange = sorted(state.keys() - names.keys())
        raise ModelError(f"the state dict has {', '.join(strange[:3])}, which is neither a parameter nor a buffer of "
                         "the module: such models cannot be written to checkpoints")
    held = {program.graph.tensor_names[tensor] for tensor in parameter_holdings(program.plan, program.graph)}
    by_path = {path: tensor for path, tensor in tensors if path in set(names.values()) - held}
    return ModelState(names=names, rest={} if rank else {
        path: value_of(path, tensor, seed).cpu().clone() for path, tensor in by_path.items()})


class Checkpoints:
    """Writes and reads the checkpoints of a run. Every rank has one; all ranks call each method together."""

    def __init__(self, prepared: Prepared, transport: Transport, *, plan: Plan, state: ModelState,
                 optimizer: torch.optim.Optimizer | None, shares: StateShares) -> None:
        """``plan`` is the one that was given, which the program's may differ from in small things."""
        self.program, self.prepared, self.transport, self.state = prepared.program, prepared, transport, state
        self._digest = hashlib.sha256(format_plan(plan).encode()).hexdigest()[:16]
        self._regions = kept_regions(self.program, transport.rank)
        graph, held = self.program.graph, held_regions(self.program, transport.rank)
        self._shapes = {graph.tensor_names[tensor]: graph.tensor_shapes[tensor] for tensor in graph.parameters.tolist()}
        changed = held | {name: rows_of_region(held.get(name, ()), self._shapes[name], rows)
                          for name, rows in shares.rows.items()}
        units = prepared.parameters.units.of
        divided = tuple(name for name in shares.rows if name not in units or units[name].unit.is_first)
        self._optimizer = None if optimizer is None else OptimizerState(
            optimizer, shares.tensors, regions=changed, shapes=self._shapes, divided=divided)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def save(self, folder: Path, *, step: int, keep: int | None = 2, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint to the folder, remove all but the ``keep`` latest, and return where it is."""
        if keep is not None and (type(keep) is not int or keep < 1):
            raise InputError(f"keep must be a whole number, 1 or more, or None for all, not {keep!r}")
        optimizer, claims = self._optimizer, self._agreed_claims()
        layout = self._gather_layout(claims, {} if optimizer is None else optimizer.numbers(self.owned()))
        record = files.CheckpointRecord(
            step=step, model=self.program.graph.name, plan=self._digest, numbers=layout.numbers, extra=extra or {},
            tensors={file: len(entries) for file, entries in layout.entries.items()},
            optimizer=None if optimizer is None else optimizer.kind,
            groups=() if optimizer is None else optimizer.groups())
        writing = _Writing(folder, record, layout) if self.transport.rank == 0 else None
        self._raise_writing(writing)
        for key, whole in self._gathered(layout, claims):
            if writing is not None and whole is not None:
                writing.attempt(writing.add, key[0], whole)
        if writing is not None:
            writing.attempt(writing.finish, keep)
        self._raise_writing(writing)
        return folder / f"step-{step:08d}"

    def state_dict(self) -> dict[str, Tensor]:
        """Return on rank 0 the model's state dict, whole and in the host's memory; nothing on the others."""
        claims = {key: claim for key, claim in self._agreed_claims().items() if key[0] == files.MODEL_FILE}
        layout = self._gather_layout(claims, {})
        return {name: whole.clone() for (_, name), whole in self._gathered(layout, claims) if whole is not None}

    def owned(self) -> list[str]:
        """Return the parameters of which this rank gives its part: it is the first that holds it, or its first rows."""
        graph, device = self.program.graph, self.program.rank_names[self.transport.rank]
        units = self.prepared.parameters.units.of
        found = []
        for tensor, copies in parameter_copies(self.program.plan, graph).items():
            name = graph.tensor_names[tensor]
            if name in units:
                if units[name].unit.is_first and units[name].rows.get(name, (1, 1))[0] == 0:
                    found.append(name)
            elif any(item.devices[0] == device for item in copies):
                found.append(name)
        return found

    def _agreed_claims(self) -> dict[Key, Claim]:
        """Return what this rank gives; raise on all ranks if one of them has what no file can hold."""
        with together(self.transport, "writing a checkpoint"):
            claims = self._claims()
        return claims

    def _claims(self) -> dict[Key, Claim]:
        owned = self.owned()
        units = self.prepared.parameters.units.of
        given = [*owned, *(name for name, store in units.items() if store.is_gathered and store.unit.is_first
                           and name in store.rows and name not in owned)]
        found = {name: claim_of(name, self.prepared.parameters.tensors[name], whole=self._shapes[name],
                                region=self._regions.get(name, ())) for name in given}
        changed = {name for stage in self.prepared.stages.values() for name in stage.module.updated_buffers}
        found |= {name: claim_of(name, self.prepared.buffers[name]) for name in sorted(changed)}
        found |= {name: replace(claim_of(name, tensor), is_initial=True)
                  for name, tensor in self.state.rest.items() if name not in found}
        claims = {(files.MODEL_FILE, name): found[path] for name, path in self.state.names.items() if path in found}
        if self._optimizer is not None:
            claims |= {(files.OPTIMIZER_FILE, name): claim for name, claim in self._optimizer.tensors(owned).items()}
        if self.prepared.random.is_used:
            claims |= {(files.RANDOM_FILE, name): claim_of(name, state)
                       for name, state in self.prepared.random.states(self.transport.rank).items()}
        return claims

    def _gather_layout(self, claims: Mapping[Key, Claim], numbers: Mapping[str, Any]) -> _Layout:
        """Return, the same on all ranks, which tensors there are and who gives which parts of them."""
        rows = [[*key, claim.entry.dtype, claim.entry.shape, claim.region, claim.is_initial]
                for key, claim in claims.items()]
        records = self.transport.gather_records({"rows": rows, "numbers": numbers})
        return _Layout(**self.transport.share_record(None if records is None else _merge(records)))

    def _gathered(self, layout: _Layout, claims: Mapping[Key, Claim]) -> Iterator[tuple[Key, Tensor | None]]:
        """Yield every tensor, whole on rank 0 and None elsewhere; all ranks must run through it."""
        rank = self.transport.rank
        for key, entry, parts in layout.rows:
            dtype, whole = files.DTYPES[entry.dtype], None
            for source, region in parts:
                mine = claims[key].tensor.detach().cpu().reshape(-1) if source == rank else None
                data = self.transport.gather_tensor(mine, source=source)
                if rank == 0 and data is not None:
                    data = data.view(dtype)
                    if not region:
                        whole = data.view(entry.shape)
                        continue
                    whole = torch.empty(entry.shape, dtype=dtype) if whole is None else whole
                    put_region(whole, region, data)
            yield key, whole

    def _raise_writing(self, writing: _Writing | None) -> None:
        """Raise on all ranks if rank 0 cannot write: ``RunError`` if that is the disk's fault."""
        with together(self.transport, "writing a checkpoint"):
            if writing is not None and writing.problem is not None:
                raise writing.problem

    # ---- reading ----------------------------------------------------------------------------------------------------

    def find(self, path: Path) -> Path | None:
        """Return the checkpoint that rank 0 sees there: ``path`` itself, or the latest in that folder; None if none."""
        latest = None
        with together(self.transport, "looking for a checkpoint"):
            if self.transport.rank == 0:
                try:
                    latest = path if (path / files.RECORD_FILE).exists() else files.latest_checkpoint(path)
                except OSError as why:
                    raise InputError(f"cannot look for checkpoints in {str(path)!r}: {why.strerror or why}") from why
        found = self.transport.share_record(None if latest is None else str(latest))
        return None if found is None else Path(found)

    def load(self, path: Path, *, with_optimizer: bool = True) -> files.CheckpointRecord:
        """Take parameters, buffers and optimizer state from a checkpoint; return what it says about itself.

        All of it is looked at on all ranks first: if anything is wrong, nothing is changed.
        """
        record = self._checked_record(path, with_optimizer=with_optimizer)
        with ExitStack() as opened:
            with together(self.transport, "reading a checkpoint"):
                change_optimizer, others = self._changes(path, record, opened, with_optimizer=with_optimizer)
            self._change_optimizer(change_optimizer)
            for change in others:
                change()
        return record

    def _change_optimizer(self, change: Callable[[], Callable[[], None]] | None) -> None:
        """Let the optimizer take over its state, or none of the ranks' if one finds fault with it."""
        undo = None
        try:
            with together(self.transport, "taking over the optimizer's state"):
                undo = None if change is None else change()
        except Exception:
            if undo is not None:
                undo()
            raise

    def _checked_record(self, path: Path, *, with_optimizer: bool) -> files.CheckpointRecord:
        """Return the record of a checkpoint whose files are as they were written; raise the same on all ranks if not.

        On every machine, which may have a copy of its own, each file is looked at by one of its ranks.
        """
        machines, changes_any = self.transport.machines(), self.transport.total(float(self._optimizer is not None)) > 0
        mine = [rank for rank, machine in enumerate(machines) if machine == machines[self.transport.rank]]
        with together(self.transport, "reading a checkpoint"):
            record = files.read_record(path)
            for number, name in enumerate(self._wanted(record, with_optimizer and changes_any)):
                if mine[number % len(mine)] == self.transport.rank:
                    files.check_file(record, path / name)
        if not record.is_checked and self.transport.rank == 0:
            log.warning("%s was written before checkpoints had checksums: damage in its files may go unnoticed", path)
        return record

    def _wanted(self, record: files.CheckpointRecord, with_optimizer: bool) -> list[str]:
        """Return the files of a checkpoint that are to be loaded."""
        return [files.MODEL_FILE, *((files.OPTIMIZER_FILE,) if with_optimizer else ()),
                *((files.RANDOM_FILE,) if record.plan == self._digest else ())]

    def _changes(self, path: Path, record: files.CheckpointRecord, opened: ExitStack, *,
                 with_optimizer: bool) -> tuple[Callable[[], Callable[[], None]] | None, list[Callable[[], object]]]:
        """Return what takes over a checkpoint's content: the optimizer's, which returns what undoes it, and all else.

        Raise ``InputError`` if something is wrong with it.
        """
        wanted = [name for name in self._wanted(record, with_optimizer and self._optimizer is not None)
                  if name != files.RANDOM_FILE or self.prepared.random.is_used]
        found = {name: opened.enter_context(files.TensorFile(path / name)) for name in wanted
                 if name != files.OPTIMIZER_FILE or (path / name).exists()}  # one without state has no file
        for name, file in found.items():
            files.check_tensors(record, path / name, len(file.entries))
        if files.OPTIMIZER_FILE in wanted and files.OPTIMIZER_FILE not in found:
            files.check_tensors(record, path / files.OPTIMIZER_FILE, 0)
        model = found[files.MODEL_FILE]
        stored = {name: (files.DTYPES[entry.dtype], entry.shape) for name, entry in model.entries.items()}
        others: list[Callable[[], object]] = [self._model_change(stored, model.read, str(path))]
        optimizer = None
        if files.OPTIMIZER_FILE in wanted:
            assert self._optimizer is not None, "it is wanted"
            optimizer = self._optimizer.change(found.get(files.OPTIMIZER_FILE), record)
            if self._optimizer.has_masters:  # which come after the parameters, whose values they may be
                others, optimizer = [*others, optimizer], None
        if files.RANDOM_FILE in wanted:
            others.append(self.prepared.random.change(found[files.RANDOM_FILE], self.transport.rank))
        return optimizer, others

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take parameters and buffers from a whole state dict, which every rank must have."""
        with together(self.transport, "reading the state dict"):
            _require_values(state)
            change = self._model_change({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()},
                                        lambda name, region=(): cut_region(state[name], region), "the state dict",
                                        strict=strict)
        change()

    def _model_change(self, stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], read: Callable[..., Tensor],
                      where: str, *, strict: bool = True) -> Callable[[], None]:
        """Return what takes over this rank's parameters, buffers and other values.

        ``stored`` says what tensors there are, ``read(name, region)`` returns a part of one. Unless ``strict``, names
        may be missing or unknown.
        """
        names = self.state.names
        source = {names[name]: name for name in reversed(names) if name in stored}
        missing = [name for name, path in names.items() if path not in source]
        strange = [name for name in stored if name not in names]
        if strict and (missing or strange):
            raise InputError(f"{where} is for another model: it lacks {', '.join(missing[:3]) or 'nothing'}, and has "
                             f"{', '.join(strange[:3]) or 'nothing'} that the model does not have")
        own: list[tuple[str, Tensor]] = [*self.state.rest.items(), *self.prepared.buffers.items(),
                                         *self.prepared.parameters.tensors.items()]
        values = list[tuple[Tensor, str, Region]]()
        for path, tensor in own:
            if path not in source:
                continue  # a constant of the forward, or a buffer that is not saved
            expected = self._shapes.get(path, tuple(tensor.shape))
            dtype, shape = stored[source[path]]
            if shape != expected:
                raise InputError(f"{source[path]!r} has the shape {shape} in {where} but {expected} in the model")
            problem = mismatch(dtype, tensor.dtype, where=where)
            if problem:
                raise InputError(f"{source[path]!r} {problem}. Use an earlier checkpoint if the file is damaged, or "
                                 "convert it if it was written by another program")
            values.append((tensor, source[path], self._regions.get(path, ())))

        def change() -> None:
            with torch.no_grad():
                for tensor, name, region in values:
                    tensor.copy_(read(name, region))
            if self._optimizer is not None:
                self._optimizer.refresh()

        return change


def _require_values(state: object) -> None:
    """Raise ``InputError`` unless a state dict has tensors with values."""
    if not isinstance(state, Mapping):
        raise InputError(f"the state dict is of the kind {type(state).__name__}: give a dictionary of tensors by name")
    for name, item in state.items():
        if not isinstance(item, Tensor) or item.is_meta:
            what = "has no values, it is on the meta device" if isinstance(item, Tensor) else type(item).__name__
            raise InputError(f"{name!r} in the state dict is not a tensor with values: {what}")


# ---- putting claims together ----------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One tensor of a checkpoint and who gives it."""

    key: Key
    entry: Entry
    parts: list[tuple[int, Region]]


class _Layout:
    """All tensors of a checkpoint, in the order in which they travel, and the numbers beside them."""

    def __init__(self, rows: list[list[Any]], numbers: dict[str, Any]) -> None:
        self.rows = [_Row((file, name), Entry(dtype=dtype, shape=tuple(shape)), [
            (source, tuple(tuple((start, stop) for start, stop in ranges) for ranges in region))
            for source, region in parts]) for file, name, dtype, shape, parts in rows]
        self.numbers = numbers
        self.entries: dict[str, dict[str, Entry]] = {}
        """The tensors of each file."""
        for row in self.rows:
            self.entries.setdefault(row.key[0], {})[row.key[1]] = row.entry


def _merge(records: list[Any]) -> dict[str, Any]:
    """Return rows and numbers of all ranks together: a whole tensor comes from the first rank that claims it.

    Initial values come after all others.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    numbers: dict[str, Any] = {}
    for record in records:
        numbers = {**record["numbers"], **numbers}
    claims = [(is_initial, rank, row) for rank, record in enumerate(records) for *row, is_initial in record["rows"]]
    for _, rank, (file, name, dtype, shape, region) in sorted(claims, key=lambda claim: claim[0]):
        row = found.setdefault(file, {}).setdefault(name, [file, name, dtype, shape, []])
        if region or not row[-1]:
            row[-1].append([rank, region])
    rows = []
    for file in sorted(found):
        entries = {name: Entry(dtype=row[2], shape=tuple(row[3])) for name, row in found[file].items()}
        rows += [found[file][name] for name in file_order(entries)]
    return {"rows": rows, "numbers": numbers}


class _Writing:
    """The files of a checkpoint under way, on rank 0; after a problem it takes the rest of the tensors and drops them.
    """

    def __init__(self, folder: Path, record: files.CheckpointRecord, layout: _Layout) -> None:
        self.problem: WeftError | None = None
        self._folder, self._record, self._entries = folder, record, layout.entries
        self._new: files.NewCheckpoint | None = None
        self._writer: files.TensorWriter | None = None
        self._checksums: dict[str, str] = {}
        self.attempt(self._begin)

    def _begin(self) -> None:
        files.format_record(self._record)  # what JSON cannot say must be known before anything is sent
        try:
            self._new = files.NewCheckpoint(self._folder, self._record.step)
        except ValueError as problem:
            raise InputError(f"the checkpoint cannot be written to {str(self._folder)!r}: {problem}") from problem

    def add(self, file: str, whole: Tensor) -> None:
        """Write the next tensor."""
        assert self._new is not None, "there was no problem"
        if self._writer is None or self._writer.path.name != file:
            self._close()
            self._writer = files.TensorWriter(self._new.path / file, self._entries[file])
        self._writer.write(whole)

    def _close(self) -> None:
        if self._writer is not None:
            self._checksums[self._writer.path.name] = self._writer.close()

    def finish(self, keep: int | None) -> None:
        """Close the files, write the record and give the checkpoint its name."""
        assert self._new is not None, "there was no problem"
        self._close()
        self._new.write_record(replace(self._record, checksums=self._checksums))
        self._new.finish(keep)

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run the action unless there was a problem; note one with the disk or with what is to be written."""
        if self.problem is not None:
            return
        try:
            action(*arguments)
        except InputError as problem:
            self.problem = problem
        except OSError as problem:
            why = problem.strerror or problem
            is_full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
            cure = "make room" if is_full else "give a folder that can be written to"
            self.problem = RunError(f"the checkpoint cannot be written to {str(self._folder)!r}: {why}. The one before "
                                    f"it, if there was one, is still there: {cure} and resume")
        except (TypeError, ValueError) as problem:
            self.problem = InputError(f"the checkpoint's record cannot be written, extra must be what JSON can say: "
                                      f"{problem}")
        if self.problem is not None and self._new is not None:
            self._new.drop()
