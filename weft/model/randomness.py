"""Which operators draw random numbers, with the settings they have."""

from __future__ import annotations

import torch
from torch import fx


def is_random(node: fx.Node) -> bool:
    """Return whether the operator draws random numbers: dropout that is on, not attention without it."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    settings = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    probability = next((settings[key] for key in ("dropout_p", "dropout", "p") if key in settings), None)
    switched_off = settings.get("train") is False
    takes_probability = any(key in names for key in ("dropout_p", "dropout"))
    return not (switched_off or probability == 0 or (probability is None and takes_probability))
