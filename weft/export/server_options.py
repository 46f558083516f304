"""What servers of language models are told on their command lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Environment and arguments that mean a plan."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    devices: tuple[str, ...]
    """The plan's device for each rank, or for each GPU that the server sees."""
    notes: tuple[str, ...] = ()

    def command(self, *words: str) -> str:
        """Return a line for a shell that starts the program ``words`` with these options."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*settings, *words, *self.arguments])


def visible_gpus(numbers: tuple[int, ...]) -> dict[str, str]:
    """Return the variable that shows GPUs in this order; nothing where they are the first ones, in their own order."""
    if numbers == tuple(range(len(numbers))):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}
