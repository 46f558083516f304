"""Text with units in, plain numbers out: bytes, bytes per second, seconds, operations per second.

``GB`` is 10^9 bytes, ``GiB`` is 2^30 bytes, and ``Gb`` or ``Gbit`` is 10^9 bits. Inside Weft there are only ``int``
bytes and ``float`` seconds; this module is the one place where text becomes a number or a number becomes text.

>>> parse_bytes("80GiB"), parse_rate("400Gbit/s"), parse_time("5us")
(85899345920, 50000000000.0, 5e-06)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from weft.base.errors import InputError

_NUMBER: Final = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(\S*)")
_MAX_LENGTH: Final = 60
_DECIMAL: Final = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_MAX_BYTES: Final = 2**63 - 1
_TIME: Final = {"": (1, 1), "s": (1, 1), "ms": (1, 1e3), "us": (1, 1e6), "ns": (1, 1e9), "min": (60, 1)}
"""What to multiply with and divide by; division keeps ``5us`` the same number as ``5e-6``."""


def _split(text: str | float | int, what: str) -> tuple[float, str]:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise InputError(f"{what} must be a number with a unit, not {_quoted(text)}")
    if isinstance(text, int | float):
        return _to_float(text), ""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise InputError(f"cannot read {what} {_quoted(text)}: write a number and a unit, such as {_EXAMPLES[what]}")
    return float(match[1]), match[2]


def _to_float(number: float | int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _quoted(value: object) -> str:
    """Return ``value`` for a message, shortened where it is long."""
    if isinstance(value, int) and abs(value) > 10**_MAX_LENGTH:
        return "a number with more than 60 digits"
    text = repr(value)
    return text if len(text) <= _MAX_LENGTH else text[:_MAX_LENGTH] + "..."


_EXAMPLES: Final = {
    "size": "'80GiB' or '80GB'",
    "bandwidth": "'400Gbit/s' or '50GB/s'",
    "time": "'5us'",
    "compute rate": "'312TFLOP/s'",
}


def _checked(value: float, text: object, what: str, *, zero_ok: bool) -> float:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero_ok):
        wanted = "zero or more" if zero_ok else "more than zero"
        raise InputError(f"{what} {_quoted(text)} must be {wanted} and finite")
    return value


def _scale(prefix: str) -> float | None:
    return _DECIMAL.get(prefix, _BINARY.get(prefix))


def parse_bytes(text: str | float | int) -> int:
    """Return the number of bytes that ``text`` means; a bare number is bytes."""
    value, unit = _split(text, "size")
    if unit == "":
        return _whole_bytes(value, text)
    scale = _scale(unit[:-1]) if unit.endswith("B") else None
    if scale is None:
        hint = "units are B, kB, MB, GB, GiB, TB"
        if unit in _DECIMAL:
            hint = f"write {unit}B (10^n) or {unit.upper()}iB (2^n)"
        elif unit.endswith(("b", "bit", "bits")):
            hint = f"'{unit}' means bits; memory is given in bytes, such as '80GB' or '80GiB'"
        raise InputError(f"cannot read size {_quoted(text)}: {hint}")
    return _whole_bytes(value * scale, text)


def _whole_bytes(value: float, text: str | float | int) -> int:
    if _checked(value, text, "size", zero_ok=True) >= _MAX_BYTES:
        raise InputError(f"size {_quoted(text)} is more than 8 EiB")
    return text if isinstance(text, int) else int(value)


def parse_rate(text: str | float | int) -> float:
    """Return the bytes per second that ``text`` means; a bare number is bytes per second."""
    value, unit = _split(text, "bandwidth")
    if unit == "":
        return _checked(value, text, "bandwidth", zero_ok=False)
    if unit.endswith("ps") and unit[:-2].endswith(("b", "bit", "B")):
        unit = unit[:-2] + "/s"
    if not unit.endswith("/s"):
        raise InputError(f"cannot read bandwidth {_quoted(text)}: say per second, such as {_EXAMPLES['bandwidth']}"
                         " ('Gb' means bits, 'GB' means bytes)")
    amount = unit[:-2]
    for suffix, factor in (("bit", 1 / 8), ("b", 1 / 8), ("B", 1.0)):
        scale = _scale(amount[: -len(suffix)]) if amount.endswith(suffix) else None
        if scale is not None:
            return _checked(value * scale * factor, text, "bandwidth", zero_ok=False)
    raise InputError(f"cannot read bandwidth {_quoted(text)}: units are Gbit/s (bits) and GB/s (bytes)")


def parse_time(text: str | float | int) -> float:
    """Return the seconds that ``text`` means; a bare number is seconds."""
    value, unit = _split(text, "time")
    if unit not in _TIME:
        raise InputError(f"cannot read time {_quoted(text)}: units are s, ms, us, ns, min")
    times, parts = _TIME[unit]
    return _checked(value * times / parts, text, "time", zero_ok=True)


def parse_flop_rate(text: str | float | int) -> float:
    """Return the floating-point operations per second that ``text`` means; a bare number is FLOP/s."""
    value, unit = _split(text, "compute rate")
    name = unit.removesuffix("/s").removesuffix("S").removesuffix("s")
    scale = 1.0 if unit == "" else (_scale(name[:-4]) if name.upper().endswith("FLOP") else None)
    if scale is None:
        raise InputError(f"cannot read compute rate {_quoted(text)}: write it as '312TFLOP/s'")
    return _checked(value * scale, text, "compute rate", zero_ok=False)


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` for people, in binary units: ``'1.5 GiB'``."""
    units = ((" TiB", 2.0**40), (" GiB", 2.0**30), (" MiB", 2.0**20), (" KiB", 2.0**10))
    return f"{num_bytes:.0f} B" if abs(num_bytes) < 1024 else _scaled(num_bytes, units)


def format_time(time_s: float) -> str:
    """Return ``time_s`` for people: ``'3.15 ms'``."""
    if abs(time_s) >= 7200.0:
        return _scaled(time_s, ((" days", 86400.0), (" h", 3600.0)), least=2.0)
    return _scaled(time_s, ((" s", 1.0), (" ms", 1e-3), (" us", 1e-6)))


def format_rate(bytes_per_s: float) -> str:
    """Return ``bytes_per_s`` for people: ``'50 GB/s'``."""
    return _scaled(bytes_per_s, ((" TB/s", 1e12), (" GB/s", 1e9), (" MB/s", 1e6), (" kB/s", 1e3)))


def format_count(value: float) -> str:
    """Return a large count for people: ``'6.74 G'``."""
    units = ((" P", 1e15), (" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3))
    return f"{value:.0f}" if abs(value) < 1e3 else _scaled(value, units, digits=3)


def _scaled(value: float, units: Sequence[tuple[str, float]], *, digits: int = 4, least: float = 1.0) -> str:
    """Return the value in the largest unit of which there are at least ``least``, or in the last one."""
    name, scale = next((unit for unit in units if abs(value) >= least * unit[1]), units[-1])
    return f"{value / scale:.{digits}g}{name}"
