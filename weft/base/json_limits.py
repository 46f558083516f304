"""How much a JSON text holds, counted before it is parsed: the parser makes an object of every value at once.

A text of 80 million empty lists is 230 KB in gzip and 8 GB in memory. So the brackets and commas outside of strings are
counted first, by operations on the whole text that take a fraction of the parser's time, and a text with more values or
deeper nesting than its kind of file ever has is refused unparsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_STRUCTURE: Final = b'[]{},"'
_OTHERS: Final = bytes(set(range(256)) - set(_STRUCTURE))
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_STRING: Final = re.compile(rb'"[^"]*"?')


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLimits:
    """What a JSON text may hold at most."""

    num_bytes: int = 100_000_000
    """Of the text itself, unpacked."""
    values: int = 5_000_000
    """Numbers, texts, objects' keys; lists and objects count twice."""
    lists: int = 2_500_000
    """Lists and objects, which take the most memory."""
    depth: int = 100
    """Lists and objects inside each other."""


LIMITS: Final = JsonLimits()
"""Those of most files: more than any that Weft writes for its largest clusters and models."""


def excess(data: bytes, limits: JsonLimits) -> str | None:
    """Return what the JSON text (in UTF-8) has too much of, or None.

    A text that is not valid may be counted wrongly; but what the parser makes of it is never more than is counted.
    """
    if len(data) > limits.num_bytes:
        return f"has more than {limits.num_bytes:,} bytes"
    lists = data.count(b"[") + data.count(b"{")
    if lists <= min(limits.depth, limits.lists) and lists + data.count(b",") < limits.values:
        return None
    structure = _structure(data)
    lists = structure.count(b"[") + structure.count(b"{")
    if lists + structure.count(b",") >= limits.values:
        return f"has more than {limits.values:,} values"
    if lists > limits.lists:
        return f"has more than {limits.lists:,} lists and objects"
    return f"is nested more than {limits.depth} deep" if _is_deeper(structure, limits.depth) else None


def _structure(data: bytes) -> bytes:
    """Return the brackets and commas of the text that are not in strings."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    plain = plain.replace(b'""', b"")  # what else is in quotes now has brackets or commas
    return _STRING.sub(b"", plain)


def _is_deeper(structure: bytes, depth: int) -> bool:
    """Return whether brackets are nested deeper, by taking away the innermost ones ``depth`` times."""
    left = structure.translate(_ONE_KIND, b",")
    for _ in range(depth):
        before = len(left)
        left = left.replace(b"[]", b"")
        if len(left) == before:
            break
    return b"[]" in left or left.count(b"[") > depth
