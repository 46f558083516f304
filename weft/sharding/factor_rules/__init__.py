"""The table of factor rules: a module for each family of operators; importing the package enters all of them."""

from __future__ import annotations

from weft.sharding import local_losses, local_special, local_views  # noqa: F401
from weft.sharding.factor_rules import (  # noqa: F401
    attention,
    convolutions,
    elementwise,
    indexing,
    losses,
    norms,
    products,
    views,
)
