"""The random numbers that a rank's stages draw, for dropout and the like.

A process alone uses its own generator, as the plain module would. With several ranks, stages draw from *streams* that
Weft seeds: what the script does with the generators of its processes, such as making the same batch on all of them,
neither depends on the model nor disturbs it. Ranks that run the same part of an operator have the same stream, since
they must draw the same numbers; all others have streams of their own, so that replicas and stages do not draw alike:

    stage on one device                         a stream for each rank
    operator that a tp group runs whole         a stream for the group
    operator that it divides along mesh axes    a stream for those with the same coordinates on these axes
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from weft.base.errors import InputError
from weft.run.checkpoint_folder import TensorFile, dtype_name

ALONE: Final = "alone"
"""The stream of a process alone: its own generator."""


def _generator_of(device: torch.device) -> torch.Generator:
    """Return the process's own generator for the device."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


class RankRandom:
    """The streams of one rank; see the module's docstring."""

    def __init__(self, device: torch.device, *, seed: int, rank: int, num_ranks: int) -> None:
        self._device, self._seed, self._is_alone = device, seed, num_ranks == 1
        self._generator = _generator_of(device)
        self.own: Final = f"rank{rank}"
        """The stream of this rank."""
        self._streams: dict[str, Tensor] = {}

    @property
    def is_used(self) -> bool:
        """Return whether some operator of the rank draws random numbers."""
        return bool(self._streams)

    def drawing(self, call: Callable[..., Any], stream: str) -> Callable[..., Any]:
        """Return the function with its random numbers drawn from the stream of that name."""
        if self._is_alone:
            self._streams[ALONE] = torch.empty(0, dtype=torch.uint8)
            return call
        if stream not in self._streams:
            digest = hashlib.sha256(f"{self._seed}/{stream}".encode()).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
            self._streams[stream] = generator.get_state()

        def draw(*args: Any, **kwargs: Any) -> Any:
            outside = self._generator.get_state()
            self._generator.set_state(self._streams[stream])
            try:
                return call(*args, **kwargs)
            finally:
                self._streams[stream] = self._generator.get_state()
                self._generator.set_state(outside)

        return draw

    def snapshot(self) -> dict[str, Tensor]:
        """Return the states of all streams."""
        return {ALONE: self._generator.get_state()} if self._is_alone else dict(self._streams)

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Let all streams go on from these states."""
        if self._is_alone:
            self._generator.set_state(states[ALONE])
        else:
            self._streams.update(states)

    @contextmanager
    def replaying(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Draw again what was drawn after the snapshot; the streams go on afterwards as if nothing had been."""
        now = self.snapshot()
        self.restore(states)
        try:
            yield
        finally:
            self.restore(now)

    def now(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the states that an operator meets: of the process's generator, and of the streams."""
        return self._generator.get_state(), dict(self._streams)

    @contextmanager
    def as_it_was(self, states: tuple[Tensor, Mapping[str, Tensor]]) -> Iterator[None]:
        """Draw again what an operator drew that met these states; all goes on afterwards as if nothing had been."""
        now, streams = self.now()
        self._generator.set_state(states[0])
        self._streams.update(states[1])
        try:
            yield
        finally:
            self._generator.set_state(now)
            self._streams.update(streams)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def states(self, rank: int) -> dict[str, Tensor]:
        """Return what a checkpoint keeps for a rank, by name."""
        return {f"rank{rank}.{stream}": state for stream, state in self.snapshot().items()}

    def change(self, file: TensorFile, rank: int) -> Callable[[], None]:
        """Return what goes on from the states in a checkpoint's file; raise ``InputError`` if they are not there."""
        found = {}
        for name, state in self.states(rank).items():
            entry = file.entries.get(name)
            if entry is None or entry.shape != tuple(state.shape) or entry.dtype != dtype_name(state, name):
                raise InputError(f"{str(file.path)!r} has no state of random numbers {name!r} as this run has it: it "
                                 "was written on another kind of device, or by another version")
            found[name.partition(".")[2]] = file.read(name)
            try:  # before anything is changed
                torch.Generator(self._device).set_state(found[name.partition(".")[2]])
            except RuntimeError as problem:
                raise InputError(f"{str(file.path)!r} has a state of random numbers {name!r} that cannot be used "
                                 f"({problem}): it is damaged. Use an earlier checkpoint") from problem
        return lambda: self.restore(found)
