"""Operator classes: what an operator is like, and which share of a device's peak rates such operators reach.

The table is ``efficiency.yaml`` beside this file; its head documents the fields. ``op_class`` understands ATen names
as the tracer writes them (``aten.linear.default``, overload or not), ONNX operator types (``Conv``) and plain names. A
group of operators that run as one kernel (``fused:conv2d+batch_norm+relu``, see ``weft.coarsen``) is like its heaviest
part.

>>> op_class("aten.addmm.default"), op_class("Gelu"), op_class("aten._softmax"), op_class("fused:conv2d+relu")
('matmul', 'transcendental', 'softmax', 'convolution')
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from weft.base.files import decode

VIEW: Final = "view"
OTHER: Final = "other"
EMBEDDING: Final = "embedding"
FUSED_PREFIX: Final = "fused:"
"""What the kind of a group of operators begins with; the plain names of its parts follow, joined by ``+``."""

_BY_WEIGHT: Final = ("recurrent", "attention", "convolution", "matmul", "softmax", "normalisation", EMBEDDING,
                     "reduction", "transcendental", "elementwise", OTHER, VIEW)
"""Classes from heavy to light: which one a group is like."""

_TABLE: Final = Path(__file__).with_name("efficiency.yaml")
_NAMESPACES: Final = frozenset({"torch", "ops", "aten", "prims", "onnx", "ai", "com", "microsoft", "operator",
                                "_operator", "builtins", "math", "transformers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of a device's peak rates; more than 1 is possible where the peaks are understated."""

    compute: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpClass:
    """One class of the table."""

    unit: str
    """``matrix``: runs at the dtype's peak rate; ``vector``: at most at the float32 rate."""
    gpu: Efficiency
    cpu: Efficiency
    tf32: bool = False
    """float32 work runs at the TF32 rate of a GPU that has one."""
    operators: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()

    def on(self, device_type: str) -> Efficiency:
        """Return the shares on a device type: ``cpu``, or any other, which counts as ``gpu``."""
        return self.cpu if device_type == "cpu" else self.gpu


@cache
def op_classes() -> Mapping[str, OpClass]:
    """Return all classes by name, in the order of the table."""
    import yaml

    table = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return decode(dict[str, OpClass], table, where=_TABLE.name)


def base_name(kind: str) -> str:
    """Return the operator's plain name: no namespace, no overload, no leading underscore, lower case."""
    parts = [part for part in re.split(r"::|[.:/ ]", kind) if part]
    while len(parts) > 1 and parts[0] in _NAMESPACES:
        parts = parts[1:]
    return parts[0].strip("_<>").lower() if parts else ""


@cache
def op_class(kind: str) -> str:
    """Return the class of an operator by its kind; ``other`` where nothing is known."""
    if kind.startswith(FUSED_PREFIX):
        return heaviest_class(kind.removeprefix(FUSED_PREFIX).split("+"))
    name = base_name(kind)
    known = _class_by_operator().get(name)
    if known is not None:
        return known
    for class_name, entry in op_classes().items():
        if any(piece in name for piece in entry.contains):
            return class_name
    return OTHER


def heaviest_class(kinds: Iterable[str]) -> str:
    """Return the class that a group of operators of these kinds is like.

    Matrix products around a softmax are attention.
    """
    classes = [op_class(kind) for kind in kinds]
    if classes.count("matmul") >= 2 and "softmax" in classes:
        return "attention"
    return min(classes, key=_BY_WEIGHT.index, default=OTHER)


@cache
def _class_by_operator() -> Mapping[str, str]:
    return {operator: name for name, entry in op_classes().items() for operator in entry.operators}
