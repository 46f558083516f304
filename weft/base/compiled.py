"""The adapter to numba: functions compiled once, kept on disk, that release the interpreter lock.

numba is imported when the first of them is called, so modules with compiled code are imported as fast as others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Any, TypeVar, cast

afterwards: list[Callable[[], None]] = []
"""What is to be done when a compiled function has returned, because a signal inside it could do nothing: what comes
back is often made by Python code of numba's, which is then the first that a signal finds, again and again."""

Function = TypeVar("Function", bound=Callable[..., Any])


class _Compiled:
    """A function that is compiled, or read from the disk, when it is called or called by compiled code."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)

    @cached_property
    def dispatcher(self) -> Any:
        """Return numba's version of the function."""
        import numba
        from numba.core.types import Dispatcher
        from numba.core.typing.typeof import typeof_impl

        typeof_impl.register(_Compiled)(lambda other, _context: Dispatcher(other.dispatcher))
        return numba.njit(cache=True, nogil=True, error_model="numpy")(self.function)

    def __call__(self, *args: Any) -> Any:
        result = self.dispatcher(*args)
        if afterwards:
            afterwards[0]()
        return result


def compiled(function: Function) -> Function:
    """Return the function compiled; division by zero gives infinity, as in numpy."""
    return cast(Function, _Compiled(function))
