"""Short, safe names for people: module lists, device lists, words of shardings, and text that is safe to print.

>>> short_modules([["transformer.h.0.attn", "transformer.h.1.mlp"], ["transformer.h.2.attn", "transformer.ln_f"]])
('h.0 - h.1', 'h.2, ln_f')
>>> short_list(["a0", "a1", "a2", "a3", "b0"])
'a0 - a3, b0'
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from weft.base import errors

_Item = TypeVar("_Item")
_NUMBERED: Final = re.compile(r"(.*?)(\d{1,9})")
_MAX_DEEPER: Final = 3
"""A module that two stages divide is named so many levels deeper at most."""


def printable(text: str) -> str:
    r"""Return the text with everything that is not printable written as an escape, so that names cannot move a cursor.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    return errors.printable(text, keep="")


def shorten(text: str, length: int) -> str:
    """Return the text, cut in the middle if it is longer than ``length``.

    >>> shorten("transformer.layers.12", 12)
    'trans..rs.12'
    """
    if len(text) <= length:
        return text
    if length < 8:
        return text[:length]
    left = (length - 2) // 2
    return text[:left] + ".." + text[len(text) - (length - 2 - left):]


def grouped(items: Iterable[_Item], key: Callable[[_Item], object]) -> list[list[_Item]]:
    """Return the items in groups that are alike by ``key``, in the order of the first of each.

    >>> grouped(["a0", "b0", "a1"], lambda name: name[0])
    [['a0', 'a1'], ['b0']]
    """
    groups: dict[object, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def short_list(names: Iterable[str], *, limit: int = 6) -> str:
    """Return names with runs of consecutive numbers joined, and no more than ``limit`` parts."""
    parts = [first if first == last else f"{first} - {last}" for first, last in _runs(dict.fromkeys(names))]
    if len(parts) > limit:
        parts = [*parts[: limit - 1], f"{len(parts) - limit + 1} more"]
    return ", ".join(parts)


def _runs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (first, last) of each run of names that end in consecutive numbers."""
    runs: list[tuple[str, str]] = []
    expected: str | None = None
    for name in names:
        if name == expected:
            runs[-1] = (runs[-1][0], name)
        else:
            runs.append((name, name))
        match = _NUMBERED.fullmatch(name)
        expected = f"{match[1]}{int(match[2]) + 1}" if match else None
    return runs


def short_modules(stages: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the modules of each stage in short form, such as ``h.0 - h.5``.

    Modules are named down to the first number in their path, deeper where stages divide one; what all longer paths
    begin with is left out.
    """
    paths = [[tuple(module.split(".")) for module in dict.fromkeys(modules) if module] for modules in stages]
    depth: dict[tuple[str, ...], int] = {}
    for _ in range(_MAX_DEEPER):
        shared = _shared([{_cut(path, depth) for path in stage} for stage in paths])
        if not shared:
            break
        for path in (path for stage in paths for path in stage):
            cut = _cut(path, depth)
            if cut in shared and len(cut) < len(path):
                depth[path] = len(cut) + 1
    cuts = [list(dict.fromkeys(_cut(path, depth) for path in stage)) for stage in paths]
    short = _strip_common({cut for stage in cuts for cut in stage})
    return tuple(short_list(".".join(short[cut]) for cut in stage) for stage in cuts)


def _cut(path: tuple[str, ...], depth: dict[tuple[str, ...], int]) -> tuple[str, ...]:
    return path[: depth[path]] if path in depth else tuple(to_number(path))


def to_number(path: Sequence[str]) -> Sequence[str]:
    """Return the parts of a module's path up to its first number, or all of them."""
    return path[: next((index + 1 for index, part in enumerate(path) if part.isdecimal()), len(path))]


def _shared(stages: list[set[tuple[str, ...]]]) -> set[tuple[str, ...]]:
    """Return the names that stages with different modules have in common; equal stages are copies of each other."""
    count = Counter(name for stage in {frozenset(stage) for stage in stages} for name in stage)
    return {name for name in count if count[name] > 1}


def _strip_common(names: set[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return each name without the leading parts that all longer names share; a number keeps a word before it."""
    short = {name: name for name in names}
    while True:
        long = [name for name in short.values() if len(name) > 1]
        if not long or len({name[0] for name in long}) > 1 or any(
                len(name) - name[-1].isdecimal() < 2 for name in long):
            return short
        stripped = {name: cut[1:] if len(cut) > 1 else cut for name, cut in short.items()}
        if len(set(stripped.values())) < len(stripped):
            return short
        short = stripped


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
