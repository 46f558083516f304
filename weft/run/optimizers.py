"""The plan's own optimizer for the parameters of one rank, and the state of any optimizer as checkpoints have it.

Parameters in half precision are changed through *masters*, copies in float32 that the optimizer changes instead: steps
that are too small for the few digits of half precision add up there. The optimizer's state is in float32, too. This is
what the memory account counts (``weft.plan.memory.optimizer_bytes``). An optimizer that the user's script makes gets
the parameters as they are.

In checkpoints state goes by the names of the model's parameters, so that it outlives the plan it was made under. A
state tensor as large as the rank's part of its parameter (``exp_avg``) is that part of a whole; any other (``step``) is
taken as it is. Of another dtype it is taken only where it stays what it was: floating-point numbers may change their
precision, as when a checkpoint in float32 goes on in bfloat16, and whole numbers may become wider. A number of one kind
never becomes one of another: that is a damaged file or another model.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from weft.base.errors import InputError
from weft.base.tensor_file import Entry
from weft.plan.plan import Optimizer
from weft.plan.sharding import Region
from weft.run.checkpoint_folder import DTYPES, CheckpointRecord, TensorFile, dtype_name
from weft.run.optimizer_trial import FAILURES, try_state

HALF: Final = (torch.float16, torch.bfloat16)
KINDS: Final = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
CHUNK_BYTES: Final = 256 << 20
"""Masters whose gradients are in float32 at the same time: so much, or one parameter."""
MASTER: Final = "master"
"""The key of a parameter's master in the optimizer's state."""


def make_optimizer(tensors: Sequence[torch.nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer that the plan asks for, for these parameters, or None."""
    if settings.kind == "none" or not tensors:
        return None

    def make(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        fused = not any(item.is_complex() for item in parameters)  # one pass over parameters and state
        return KINDS[settings.kind](parameters, lr=settings.lr, fused=fused)

    return MasterWeights(tensors, make) if any(item.dtype in HALF for item in tensors) else make(tensors)


class MasterWeights(torch.optim.Optimizer):
    """Another optimizer, which changes float32 masters of the parameters; their values are rounded back.

    The state of a parameter is that of its master, with the master itself under ``master``. Parameters that are not in
    half precision are their own masters.
    """

    def __init__(self, tensors: Sequence[torch.nn.Parameter],
                 make: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._pairs = [(item, item if item.dtype not in HALF else torch.nn.Parameter(
            item.detach().float(), requires_grad=item.requires_grad)) for item in tensors]
        self._chunks = [(chunk, make([master for _, master in chunk])) for chunk in _chunks(self._pairs)]
        super().__init__(list(tensors), dict(self._chunks[0][1].defaults))

    @property
    def one(self) -> torch.optim.Optimizer:
        """Return an optimizer that changes masters; those of other masters are like it."""
        return self._chunks[0][1]

    def masters(self) -> dict[int, Tensor]:
        """Return the masters by the identities of the parameters in half precision."""
        return {id(item): master for item, master in self._pairs if item is not master}

    @property
    def description(self) -> str:
        """Return what a checkpoint says about the optimizer that wrote it."""
        return f"{type(self.one).__name__} with float32 masters"

    def step(self, closure: Any = None) -> None:
        """Change the masters by the parameters' gradients, and set the parameters to them."""
        assert closure is None, "steps are taken once the gradients are there"
        options = options_of(self.param_groups[0])
        for chunk, optimizer in self._chunks:
            optimizer.param_groups[0].update(options)
            rounded = [pair for pair in chunk if pair[0] is not pair[1] and pair[0].grad is not None]
            with torch.no_grad():
                for _, master in rounded:
                    master.grad = torch.empty_like(master)
                if rounded:
                    torch._foreach_copy_([master.grad for _, master in rounded], [item.grad for item, _ in rounded])
                optimizer.step()
                for _, master in rounded:
                    master.grad = None
                if rounded:
                    torch._foreach_copy_([item for item, _ in rounded], [master for _, master in rounded])
        if len(self.state) < len(self._pairs):  # an optimizer makes it in its first step, and changes it in place
            self._show_state()

    def refresh(self) -> None:
        """Take the masters from the parameters, which somebody else has changed."""
        with torch.no_grad():
            for item, master in self._pairs:
                master.copy_(item)

    def _show_state(self) -> None:
        for chunk, optimizer in self._chunks:
            for item, master in chunk:
                own = {} if master is item else {MASTER: master.detach()}
                self.state[item] = {**optimizer.state[master], **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the masters' values and state as they are: not rounded to the parameters' precision."""
        index = {item: place for place, (item, _) in enumerate(self._pairs)}
        with torch.no_grad():
            for chunk, optimizer in self._chunks:
                for item, master in chunk:
                    entry = dict(state_dict["state"].get(index[item], {}))
                    master.copy_(entry.pop(MASTER, item))
                    if entry:
                        optimizer.state[master] = {
                            key: value.to(item.device) if isinstance(value, Tensor) else value
                            for key, value in entry.items()}
        self.param_groups[0].update(options_of(state_dict["param_groups"][0]))
        self._show_state()


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key != "params"}


def _chunks(pairs: Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]
            ) -> Iterator[list[tuple[torch.nn.Parameter, torch.nn.Parameter]]]:
    chunk: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
    size = 0
    for pair in pairs:
        num_bytes = pair[1].numel() * pair[1].element_size()
        if chunk and size + num_bytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(pair)
        size += num_bytes
    if chunk:
        yield chunk


def kind_of(dtype: torch.dtype) -> str:
    """Return what kind of values a dtype has, in words."""
    if dtype.is_complex:
        return "complex numbers"
    if dtype.is_floating_point:
        return "floating-point numbers"
    return "truth values" if dtype == torch.bool else "whole numbers"


def may_become(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether every value of the one dtype is a value of the other, but for the precision."""
    if kind_of(stored) != kind_of(wanted):
        return False
    if kind_of(stored) != "whole numbers":
        return True
    one, other = torch.iinfo(stored), torch.iinfo(wanted)
    return int(other.min) <= int(one.min) and int(one.max) <= int(other.max)


def mismatch(stored: torch.dtype, wanted: torch.dtype, *, where: str) -> str:
    """Return what is wrong with a tensor of that dtype where another is wanted; nothing if it may become that."""
    if may_become(stored, wanted):
        return ""
    return (f"is {_name(stored)} in {where} but {_name(wanted)} here: {kind_of(stored)} are not turned into "
            f"{kind_of(wanted)}" if kind_of(stored) != kind_of(wanted) else
            f"is {_name(stored)} in {where} but {_name(wanted)} here, which cannot hold all of its values")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A tensor, or a part of one, that a rank gives to a checkpoint."""

    tensor: Tensor
    entry: Entry
    """Of the whole tensor."""
    region: Region = ()
    """Which part this is; empty for all of it."""
    is_initial: bool = False
    """The value that the module began with: it counts where no rank has changed it."""


def claim_of(name: str, tensor: Tensor, *, whole: tuple[int, ...] | None = None, region: Region = ()) -> Claim:
    """Return the claim of a tensor, or of the part in ``region`` of one of the shape ``whole``."""
    return Claim(tensor=tensor, region=region,
                 entry=Entry(dtype=dtype_name(tensor, name), shape=tuple(tensor.shape) if whole is None else whole))


class OptimizerState:
    """The state of one rank's optimizer; see the module's docstring."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], *,
                 regions: Mapping[str, Region], shapes: Mapping[str, tuple[int, ...]],
                 divided: Collection[str] = ()) -> None:
        """``parameters`` are what the optimizer changes, ``regions`` which parts of whole parameters with these
        ``shapes`` that is; of those that are ``divided``, other ranks change other rows."""
        self.optimizer = optimizer
        self.has_masters = isinstance(optimizer, MasterWeights)
        self.kind: str = optimizer.description if isinstance(optimizer, MasterWeights) else type(optimizer).__name__
        self._parameters, self._regions, self._shapes, self._divided = parameters, regions, shapes, divided
        self._has_warned = False

    def _state(self, name: str) -> dict[str, Any]:
        if name not in self._parameters:  # another rank changes it
            return {}
        state: dict[str, Any] = self.optimizer.state.get(self._parameters[name], {})
        return state

    def tensors(self, owned: Sequence[str]) -> dict[str, Claim]:
        """Return the tensors of the state that this rank gives, as ``parameter.key``.

        That is the state of the parameters it owns; of those that it changes only some rows of, these rows, and
        whatever is not like them only where it owns the parameter.
        """
        found = {}
        for name in [*owned, *(other for other in self._divided if other not in owned)]:
            local = self._parameters[name].shape if name in self._parameters else None
            for key, value in self._state(name).items():
                if isinstance(value, Tensor):
                    is_like = value.shape == local
                    if not is_like and name not in owned:
                        continue
                    found[f"{name}.{key}"] = claim_of(
                        f"{name}.{key}", value, whole=self._shapes[name] if is_like else None,
                        region=self._regions.get(name, ()) if is_like else ())
        return found

    def numbers(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what of these parameters' state is a number or nothing, as ``parameter.key``."""
        others = {(name, key): value for name in names for key, value in self._state(name).items()
                  if not isinstance(value, Tensor)}
        left_out = sorted({key for (_, key), value in others.items()
                           if not isinstance(value, int | float | bool | str | None)})
        if left_out and not self._has_warned:
            self._has_warned = True
            log.warning("the optimizer's state has %s, which is neither a tensor nor a number: it is left out of "
                        "checkpoints", ", ".join(left_out))
        return {f"{name}.{key}": value for (name, key), value in others.items() if key not in left_out}

    def groups(self) -> tuple[dict[str, Any], ...]:
        """Return the options of the parameter groups that JSON can say."""
        return tuple({key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()
                      if isinstance(value, int | float | bool | str | tuple | None)
                      or (isinstance(value, Tensor) and value.numel() == 1)}
                     for group in self.optimizer.param_groups)

    def refresh(self) -> None:
        """Note that the parameters were changed by somebody else."""
        if isinstance(self.optimizer, MasterWeights):
            self.optimizer.refresh()

    def change(self, file: TensorFile | None, record: CheckpointRecord) -> Callable[[], Callable[[], None]]:
        """Return what takes over the state of this rank's parameters, and returns what undoes that.

        None stands for the file of one without state. Raise ``InputError`` if it is not that of such an optimizer; so
        does the change, after undoing what it did.
        """
        if record.optimizer != self.kind:
            raise InputError(f"the checkpoint was written with {record.optimizer or 'no optimizer'}, but the optimizer "
                             f"is {self.kind}: use the same, or load with optimizer=False to begin with new state")
        if not all(isinstance(group, Mapping) for group in record.groups):
            raise InputError("the checkpoint's options of parameter groups are damaged: they must be objects")
        self._check_groups(record.groups)
        if file is not None:
            self._check_entries(file)
        options = self._options(record.groups)
        try:
            self._try(file, record, options)
        except InputError as problem:
            raise self._unfit(str(problem)) from problem

        def change() -> Callable[[], None]:
            undo, state, packed = self._undo(), self._read(file, record), self.optimizer.state_dict()
            names = {id(tensor): name for name, tensor in self._parameters.items()}
            for group, saved in zip(self.optimizer.param_groups, packed["param_groups"], strict=True):
                for tensor, index in zip(group["params"], saved["params"], strict=True):
                    name = names.get(id(tensor))
                    if name in state:
                        packed["state"][index] = state[name]
            for group, changed in zip(packed["param_groups"], options, strict=True):
                group.update(changed)
            try:
                self.optimizer.load_state_dict(packed)
            except FAILURES as problem:
                undo()
                raise self._unfit(f"{type(problem).__name__}: {problem}") from problem
            return undo

        return change

    def _unfit(self, why: str) -> InputError:
        return InputError(f"{self.kind} cannot take over its state from the checkpoint ({why}): it is damaged. Use an "
                          "earlier one, or load with optimizer=False")

    def _try(self, file: TensorFile | None, record: CheckpointRecord, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``InputError``, which says why, where one of PyTorch's optimizers could not go on from the checkpoint.

        ``groups`` are the options that it would go on with.
        """
        optimizer, masters = self.optimizer, dict[int, Tensor]()
        if isinstance(optimizer, MasterWeights):
            optimizer, masters = optimizer.one, optimizer.masters()
        if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
            return
        state = self._read(file, record, describes_only=True)
        names = {id(tensor): name for name, tensor in self._parameters.items()}
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            mine = {names[id(tensor)]: tensor for tensor in group["params"] if id(tensor) in names}
            found = {name: dict(state[name]) for name in mine if name in state}
            for name, tensor in mine.items() if self.has_masters else ():
                master = found.get(name, {}).pop(MASTER, None if id(tensor) in masters else tensor)
                if found.get(name) is not None and (not isinstance(master, Tensor) or master.shape != tensor.shape):
                    raise InputError(f"it has no {MASTER!r} of {name!r} in the shape {list(tensor.shape)}")
            try_state(type(optimizer), {name: masters.get(id(tensor), tensor) for name, tensor in mine.items()}, group,
                      options, {name: values for name, values in found.items() if values})

    def _undo(self) -> Callable[[], None]:
        """Return what gives the optimizer the state that it has now."""
        optimizer, state = self.optimizer, dict(self.optimizer.state)
        groups = [dict(group) for group in optimizer.param_groups]

        def undo() -> None:
            optimizer.state.clear()
            optimizer.state.update(state)
            optimizer.param_groups[:] = groups

        return undo

    def _check_entries(self, file: TensorFile) -> None:
        """Raise ``InputError`` where a stored tensor is of no parameter, or not of the kind of the state or parameter.

        Where nothing here says what it must be (``step`` before the first step), it is like others of its key.
        """
        others: dict[str, torch.dtype] = {}
        for entry, item in file.entries.items():
            name, _, key = entry.rpartition(".")
            if name not in self._shapes:
                raise InputError(f"the optimizer's {entry!r} in {file.path} is of no parameter of the model: it is "
                                 "damaged, or for another model. Use an earlier one, or load with optimizer=False")
            if name not in self._parameters:
                continue
            stored, now = DTYPES[item.dtype], self._state(name).get(key)
            if isinstance(now, Tensor):
                wanted = now.dtype
            elif item.shape == self._shapes[name]:
                wanted = self._parameters[name].dtype
            else:
                wanted = others.setdefault(key, stored)
            problem = mismatch(stored, wanted, where=str(file.path))
            if problem:
                raise InputError(f"the optimizer's {entry!r} {problem}. Use an earlier checkpoint, or load with "
                                 "optimizer=False")

    def _check_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``InputError`` where an option of a parameter group is of another kind than the optimizer's own."""
        if len(saved) != len(self.optimizer.param_groups):
            return
        for index, (group, options) in enumerate(zip(self.optimizer.param_groups, saved, strict=True)):
            for key, value in options.items():
                before = group.get(key, 0.0 if isinstance(value, float) else None)  # schedules add some
                known = (tuple(item) if isinstance(item, list | tuple) else item
                         for item in (before, self.optimizer.defaults.get(key, before)))
                if not any(_is_alike(value, item) for item in known):
                    raise InputError(f"the checkpoint's groups[{index}].{key} is {value!r:.60}, where {self.kind} has "
                                     f"{before!r:.60}: it is damaged. Use an earlier one, or load with optimizer=False")

    def _read(self, file: TensorFile | None, record: CheckpointRecord, *,
              describes_only: bool = False) -> dict[str, dict[str, Any]]:
        """Return the stored state of this rank's parameters by name and key.

        If it ``describes_only``, tensors larger than a number are on the meta device, in their shapes here.
        """
        found: dict[str, dict[str, Any]] = {}
        for entry, value in record.numbers.items():
            name, _, key = entry.rpartition(".")
            found.setdefault(name, {})[key] = value
        if file is None:
            return found
        for entry, item in file.entries.items():
            name, _, key = entry.rpartition(".")
            if name not in self._parameters:
                continue
            is_like = item.shape == self._shapes[name]
            if describes_only and (is_like or math.prod(item.shape) != 1):
                shape = self._parameters[name].shape if is_like else item.shape
                found.setdefault(name, {})[key] = torch.empty(shape, dtype=DTYPES[item.dtype], device="meta")
            else:
                found.setdefault(name, {})[key] = file.read(entry, self._regions.get(name, ()) if is_like else ())
        return found

    def _options(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the options of the parameter groups with those of a checkpoint."""
        groups = list(map(options_of, self.optimizer.param_groups))
        if len(groups) != len(saved):
            log.warning("the checkpoint has %d parameter groups and the optimizer %d: their options, such as the "
                        "learning rate, stay as they are", len(saved), len(groups))
            return groups
        for group, options in zip(groups, saved, strict=True):
            for key, value in options.items():
                before = group.get(key)
                if isinstance(before, Tensor):
                    group[key] = torch.full_like(before, value)
                elif key != "params":  # what only schedulers know, such as initial_lr, included
                    group[key] = tuple(value) if isinstance(before, tuple) else value
        return groups


def _is_alike(value: object, before: object) -> bool:
    """Return whether an option may become ``value``: a finite number stays one, a switch one or nothing.

    What was nothing may be a switch, a count or a word, as ``foreach`` and LBFGS's ``max_eval`` and ``line_search_fn``.
    """
    if isinstance(before, tuple):
        return isinstance(value, list | tuple) and len(value) == len(before) and all(map(_is_alike, value, before))
    if isinstance(before, bool):
        return isinstance(value, bool | None)
    if isinstance(before, Tensor | int | float):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return abs(value) <= sys.float_info.max or value == before
        return not isinstance(before, Tensor) and value == before
    return before is not None or not isinstance(value, list | tuple | dict | float)
