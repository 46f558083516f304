"""What people call the factors that an axis of a mesh splits: ``column``, ``row``, ``heads``, ``vocabulary`` ..."""

from __future__ import annotations

from typing import Final

ATTENTION: Final = ("aten.scaled_dot_product_attention", "aten.softmax", "aten._softmax")
_LINEAR: Final = ("aten.linear", "aten.addmm", "aten.mm", "aten.bmm", "aten.matmul")
_WORDS: Final = {"heads": "heads", "kv": "heads", "group": "query heads", "vocab": "vocabulary", "classes": "classes",
                 "images": "samples", "batch": "samples", "out": "output channels", "in": "input channels",
                 "channels": "channels", "experts": "experts"}


def factor_word(kind: str, name: str) -> str:
    """Return what splitting the factor of an operator of that kind is called.

    >>> factor_word("aten.addmm.default", "n"), factor_word("aten.embedding", "vocab"), factor_word("aten.relu", "d2")
    ('column', 'vocabulary', 'dim 2')
    """
    if kind.startswith(_LINEAR):
        return {"n": "column", "k": "row"}.get(name, "rows")
    if kind.startswith("aten.embedding") and name == "d":
        return "column"
    if kind.startswith(ATTENTION[1:]) and name == "d1":
        return "heads"
    return _WORDS.get(name, f"dim {name[1:]}" if name[0] == "d" and name[1:].isdecimal() else name)
