"""Every method of placing operators, by name: the classic lists and the rules that people use today.

A method takes a problem and returns devices and an order, or raises ``NoFeasiblePlan`` where its rule finds no device
with enough memory. ``weft.search.place.search`` joins them with Weft's own search.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from weft.search.place.assignment import Assignment, Method
from weft.search.place.getf import getf
from weft.search.place.lists import best_heft, cpop, etf, heft, peft
from weft.search.place.rules import accelerate_balanced, accelerate_sequential, even, proportional, single
from weft.search.place.sct import m_sct

__all__ = ["METHODS", "Assignment", "Method"]

METHODS: Final[Mapping[str, Method]] = MappingProxyType({
    "single": single,
    "heft": heft,
    "heft-subsets": best_heft,
    "peft": peft,
    "cpop": cpop,
    "etf": etf,
    "m-sct": m_sct,
    "getf": getf,
    "accelerate-sequential": accelerate_sequential,
    "accelerate-balanced": accelerate_balanced,
    "proportional": proportional,
    "even": even,
})
"""Simple ones first."""
