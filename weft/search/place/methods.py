"""Every method of placing operators, by name: the classic lists and the rules that people use today.

A method takes a problem and returns devices and an order, or raises ``NoFeasiblePlan`` where its rule finds no device
with enough memory. ``weft.search.place.search`` joins them with Weft's own search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.model.graph import I64
from weft.search.place.problem import PlaceProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """Where every operator runs, and in which order operators are taken."""

    device: I64
    """[n]"""
    order: I64
    """[n] all operators, each after those it reads from."""


Method = Callable[[PlaceProblem], Assignment]
