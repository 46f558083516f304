"""The adapter to numba: functions compiled once, kept on disk, that release the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return the function compiled; division by zero gives infinity, as in numpy."""
    return cast(Function, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
