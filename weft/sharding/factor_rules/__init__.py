"""The table of factor rules: a module for each family of operators; importing the package enters all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.sharding.factor_rules import elementwise, indexing, layers, signals, views  # noqa: F401
from weft.sharding.factor_rules.common import RULES, Call
from weft.sharding.factors import OpFactors

if TYPE_CHECKING:
    from torch import fx


def has_rule(target: Any) -> bool:
    """Return whether there is a rule for an operator."""
    return str(target) in RULES


def factors_of(node: fx.Node) -> OpFactors | None:
    """Return the factors of a call; None if there is no rule for it, or it cannot be split."""
    found = RULES.get(str(node.target))
    return None if found is None else found(Call(node))
