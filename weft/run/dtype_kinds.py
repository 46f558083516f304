"""Whether a stored tensor may become one of another dtype: only where it stays what it was.

Floating-point numbers may change their precision, as when a checkpoint in float32 goes on in bfloat16. Whole numbers
may become wider. A number of one kind never becomes one of another: that is a damaged file or another model.
"""

from __future__ import annotations

import torch


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
            f"is {_name(stored)} in {where} but {_name(wanted)} here, which has not room for all of its values")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
