"""Degrees by hand: what the user fixes of a plan. What is left open, the search chooses.

    weft plan llama-70b CLUSTER --tp 8 --pp 2 --interleave 2 --recompute none     fixes four of them
    weft.make_plan("llama-70b", cluster, tp=8, pp=2, interleave=2, recompute="none")

``Degrees`` is the one place: the command line makes its options of it, and everything that makes plans reads it from
``PlanOptions.degrees``. ``weft.planning.degrees`` checks them against the model, the batch and the cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypedDict

from weft.base.errors import InputError
from weft.base.units import parse_bytes

ZeroGroup = Literal["host", "all"]
ZERO_GROUPS: Final = ("host", "all")
RECOMPUTE: Final = ("none", "full", "selective")


class DegreeWords(TypedDict, total=False):
    """The same as keyword arguments."""

    tp: int | None
    pp: int | None
    dp: int | None
    cp: int | None
    ep: int | None
    zero: int | None
    zero_group: ZeroGroup | None
    microbatch_size: int | None
    interleave: int | None
    recompute: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """What the user fixes; None where it is left to the search."""

    tp: int | None = None
    """Devices that divide every operator among them (a tp group)."""
    pp: int | None = None
    """Stages of the pipeline, each on devices of its own."""
    dp: int | None = None
    """Replicas of every stage."""
    cp: int | None = None
    """Devices that divide the sequence of a sample among them."""
    ep: int | None = None
    """Devices of a tp group, all of it, that divide the experts among them."""
    zero: int | None = None
    """What replicas keep in pieces: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too (fsdp)."""
    zero_group: ZeroGroup | None = None
    """Who divides that: the replicas of a host, or all."""
    microbatch_size: int | None = None
    """Samples of a micro-batch on one replica."""
    interleave: int | None = None
    """Stages (chunks) on each device."""
    recompute: str | None = None
    """``none``, ``full``, ``selective``, or the bytes of activations that a stage may keep."""

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{option(name)} must be a whole number, 1 or more, not {value!r}")
        if self.zero is not None and (isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3)):
            raise InputError(f"--zero must be 0, 1, 2 or 3, not {self.zero!r}")
        if self.zero_group not in (None, *ZERO_GROUPS):
            raise InputError(f"--zero-group must be host or all, not {self.zero_group!r}")
        if self.recompute is not None and not is_recompute(self.recompute):
            raise InputError(f"--recompute must be none, full, selective or a number of bytes such as 20GiB, not "
                             f"{self.recompute!r}")

    def __bool__(self) -> bool:
        return bool(self.given)

    @property
    def given(self) -> dict[str, Any]:
        """Return what is fixed, by name."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}

    @property
    def fixes_layout(self) -> bool:
        """Return whether it says how stages lie on devices, which only the joint search can follow."""
        return any(getattr(self, name) is not None for name in SIZES) or (self.zero or 0) > 1

    def admit(self, **sizes: int | str) -> bool:
        """Return whether a plan of these sizes is one of those wanted."""
        return all(getattr(self, name) in (None, size) for name, size in sizes.items())

    def flags(self) -> list[str]:
        """Return them in the words of the command line: ``["--tp 8", "--pp 2"]``."""
        return [f"{option(name)} {value}" for name, value in self.given.items()]

    def describe(self) -> str:
        """Return them in a few words: ``tp 8, pp 2``."""
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.given.items())


SIZES: Final = ("tp", "pp", "dp", "cp", "ep", "microbatch_size", "interleave")
"""Fields that are counts."""
NONE_FIXED: Final = Degrees()


def option(name: str) -> str:
    """Return a field as an option: ``zero_group`` as ``--zero-group``."""
    return "--" + name.replace("_", "-")


def is_recompute(text: object) -> bool:
    """Return whether the text says what to recompute: one of the words, or bytes."""
    if not isinstance(text, str):
        return False
    if text in RECOMPUTE:
        return True
    try:
        return re.match(r"[0-9]", text) is not None and parse_bytes(text) > 0
    except InputError:
        return False
