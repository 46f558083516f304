"""Simulation: when each instruction of a program would run, and what that says about the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.simulate.predict import simulate as simulate
    from weft.simulate.timeline import Timeline as Timeline

__all__ = ["Timeline", "simulate"]

_HOMES = {"Timeline": "weft.simulate.timeline", "simulate": "weft.simulate.predict"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
