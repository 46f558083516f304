"""Reading files into types and writing them safely: strict, bounded, and never code.

``decode`` turns plain JSON or YAML values into frozen dataclasses. Unknown fields, missing fields and wrong types are
refused with the path of the field (``stages[2].devices[0]``); all problems are collected and raised once. Only the
standard library is needed, so that the runtime can read plans on machines that carry nothing but PyTorch.

The JSON parser makes an object of every value at once: a text of 80 million empty lists is 230 KB in gzip and 8 GB in
memory. So ``excess`` first counts the brackets and commas outside of strings, by operations on the whole text that take
a fraction of the parser's time, and a text with more values or deeper nesting than its kind of file ever has is refused
unparsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import gzip
import json
import math
import os
import re
import shutil
import stat
import tempfile
import types
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard, TypeVar, get_args, get_origin

from weft.base.errors import InputError

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


T = TypeVar("T")

MAX_FILE_BYTES: Final = 1 << 30
"""Larger files are refused unread (compressed files: by their unpacked size)."""
MAX_PROBLEMS: Final = 20
"""At most this many problems are listed in one message."""
_ENOUGH: Final = 1_000
"""After so many problems no more are looked for."""
MAX_DEPTH: Final = 50
"""Values without a type of their own may be nested this deep."""
MAX_TEXT: Final = 100_000
"""No text in a file may have more characters."""
LEAST_ROOM_BYTES: Final = 1 << 16
"""A disk with less room than this counts as full before anything is written."""


def read_bytes(path: str | os.PathLike[str], *, error: type[InputError] = InputError,
               limit: int | None = None) -> bytes:
    """Return the content of ``path``, unpacked if its name ends in ``.gz``; at most ``limit`` bytes are unpacked.

    Devices are refused: ``/dev/zero`` has no end.
    """
    file = Path(path)
    limit = MAX_FILE_BYTES if limit is None else min(limit, MAX_FILE_BYTES)
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as stream:
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode) and not os.isatty(stream.fileno()):
                raise error(f"{str(path)!r} is a device, not a file: name a file")
            data = stream.read(limit + 1)
    except FileNotFoundError as problem:
        raise error(f"no file {str(path)!r}: check the path") from problem
    except (OSError, EOFError, ValueError, zlib.error) as problem:
        raise error(f"cannot read {str(path)!r}: {problem}") from problem
    if len(data) > limit:
        raise error(f"{str(path)!r} is larger than {limit} bytes: not read")
    return data


def parse_json(data: bytes | str, *, where: str, error: type[InputError] = InputError,
               limits: JsonLimits = LIMITS) -> Any:
    """Return the JSON value in ``data``; duplicate keys, NaN, damaged text and what is beyond ``limits`` are refused.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # every object lives, so looking for dead ones takes as long again
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        too_much = excess(data if _is_utf8(data) else text.encode("utf-8", "surrogatepass"), limits)
        if too_much is not None:
            raise error(f"{where} {too_much}, which is beyond what such files have: not read")
        del data
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where} is not valid JSON: {problem}") from problem
    finally:
        if was_enabled:
            gc.enable()


def _is_utf8(data: bytes | str) -> TypeGuard[bytes]:
    return isinstance(data, bytes) and json.detect_encoding(data).startswith("utf-8")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} is there twice")
            seen.add(key)
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def load_json(path: str | os.PathLike[str], *, error: type[InputError] = InputError,
              limits: JsonLimits = LIMITS) -> Any:
    """Return the JSON value in the file ``path`` (``.json`` or ``.json.gz``)."""
    return parse_json(read_bytes(path, error=error, limit=limits.num_bytes), where=str(path), error=error,
                      limits=limits)


def check_header(value: Any, *, format_name: str, version: int, where: str, error: type[InputError]) -> dict[str, Any]:
    """Return ``value`` without its ``format`` and ``version``, after checking both."""
    if not isinstance(value, dict):
        raise error(f"{where} must be an object with a 'format' field, not {_describe(value)}")
    if value.get("format") != format_name:
        raise error(f"{where}: format must be {format_name!r}, not {_describe(value.get('format'))}")
    if value.get("version") != version or isinstance(value.get("version"), bool):
        raise error(f"{where}: version must be {version}, not {_describe(value.get('version'))}; "
                    "this Weft reads no other")
    return {key: item for key, item in value.items() if key not in ("format", "version")}


def decode(target: type[T], value: Any, *, where: str, error: type[InputError] = InputError) -> T:
    """Return ``value`` as a ``target``; raise ``error`` with the path of every field that does not fit."""
    problems: list[str] = []
    result = None
    with contextlib.suppress(_EnoughProblems):
        result = _decode(target, value, "", problems)
    if problems:
        shown = problems[:MAX_PROBLEMS]
        if len(problems) > MAX_PROBLEMS:
            shown.append(f"... and {len(problems) - MAX_PROBLEMS} more" if len(problems) <= _ENOUGH else "... and more")
        raise error(f"{where}: " + "; ".join(shown))
    return typing.cast(T, result)


class _EnoughProblems(Exception):  # noqa: N818 - it only leads out of the value
    """So many problems were found that looking for more would only take time and memory."""


def _decode(target: Any, value: Any, path: str, problems: list[str]) -> Any:
    if len(problems) > _ENOUGH:
        raise _EnoughProblems
    here = path or "the file"
    origin = get_origin(target)
    if target is Any:
        return value if _is_plain(value) else _decode_plain(value, path, problems)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(target, value, path, problems)
    if origin is Literal:
        if value in get_args(target) and not isinstance(value, bool):
            return value
        problems.append(f"{here} must be one of {', '.join(map(repr, get_args(target)))}, not {_describe(value)}")
    elif isinstance(target, type) and issubclass(target, enum.Enum):
        return _decode_enum(target, value, here, problems)
    elif dataclasses.is_dataclass(target):
        return _decode_record(target, value, path, problems)
    elif origin is tuple:
        return _decode_list(target, value, path, problems)
    elif origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _decode_mapping(target, value, path, problems)
    else:
        return _decode_scalar(target, value, here, problems)
    return None


def _decode_union(target: Any, value: Any, path: str, problems: list[str]) -> Any:
    options = get_args(target)
    if value is None and type(None) in options:
        return None
    best: list[str] | None = None
    for option in options:
        if option is type(None):
            continue
        trial: list[str] = []
        with contextlib.suppress(_EnoughProblems):
            result = _decode(option, value, path, trial)
        if not trial:
            return result
        best = trial if best is None or len(trial) > len(best) else best
    problems.extend(best or [f"{path} has no accepted type"])
    return None


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether ``_decode_plain`` has nothing to say; many times faster, since no path is written down."""
    kind = type(value)
    if depth > MAX_DEPTH:
        return False
    if kind is list or kind is dict:
        return all(_is_plain(item, depth + 1) for item in (value.values() if kind is dict else value))
    if kind is str:
        return len(value) <= MAX_TEXT
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    return value is None or kind is bool or (kind is float and math.isfinite(value))


def _decode_plain(value: Any, path: str, problems: list[str], depth: int = 0) -> Any:
    """Return a value of no particular type as it is, if JSON can say it."""
    if len(problems) > _ENOUGH:
        raise _EnoughProblems
    if depth > MAX_DEPTH:
        problems.append(f"{path or 'the file'} is nested more than {MAX_DEPTH} deep")
    elif isinstance(value, dict):
        for key, item in value.items():
            _decode_plain(item, _join(path, key), problems, depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _decode_plain(item, f"{path}[{index}]", problems, depth + 1)
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        return _decode_scalar(type(value), value, path or "the file", problems)
    elif value is not None and not isinstance(value, bool):
        problems.append(f"{path or 'the file'} must be a plain value, not {_describe(value)}")
    return value


def _decode_enum(target: type[enum.Enum], value: Any, here: str, problems: list[str]) -> Any:
    for member in target:
        if member.value == value and type(member.value) is type(value):
            return member
    names = ", ".join(repr(member.value) for member in target)
    problems.append(f"{here} must be one of {names}, not {_describe(value)}")
    return None


def _decode_record(target: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{path or 'the file'} must be an object, not {_describe(value)}")
        return None
    hints = _type_hints(target)
    fields = {_key_of(field): field for field in dataclasses.fields(target)}
    before = len(problems)
    for name in (name for name in value if name not in fields):
        problems.append(f"{_join(path, name)} is not a known field (known: {', '.join(sorted(fields))})")
        if len(problems) > _ENOUGH:
            raise _EnoughProblems
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[field.name] = _decode(hints[field.name], value[name], _join(path, name), problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{_join(path, name)} is missing")
    return target(**arguments) if len(problems) == before else None


@functools.cache
def _type_hints(target: Any) -> dict[str, Any]:
    return typing.get_type_hints(target)


def _key_of(field: dataclasses.Field[Any]) -> str:
    """Return the field's key in a file: ``from_`` stands for ``from``, which Python keeps for itself."""
    return field.name.removesuffix("_")


def _decode_list(target: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, list | tuple):
        problems.append(f"{path or 'the file'} must be a list, not {_describe(value)}")
        return None
    arguments = get_args(target)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{path}[{index}]", problems) for index, item in enumerate(value))
    if len(arguments) != len(value):
        problems.append(f"{path} must have {len(arguments)} items, not {len(value)}")
        return None
    return tuple(_decode(kind, item, f"{path}[{index}]", problems)
                 for index, (kind, item) in enumerate(zip(arguments, value, strict=True)))


def _decode_mapping(target: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{path or 'the file'} must be an object, not {_describe(value)}")
        return None
    kind = get_args(target)[1]
    result = {}
    for key, item in value.items():
        if isinstance(key, str):
            result[key] = _decode(kind, item, _join(path, key), problems)
        else:
            problems.append(f"{path}: the key {key!r} must be text")
    return result


def _decode_scalar(target: Any, value: Any, here: str, problems: list[str]) -> Any:
    if target is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
        problems.append(f"{here} must be a finite number, not {_describe(value)}")
        return None
    if target is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if target is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
        problems.append(f"{here} must be a whole number of at most 64 bits, not {_describe(value)}")
        return None
    if target is str and isinstance(value, str) and len(value) > MAX_TEXT:
        problems.append(f"{here} is text of {len(value)} characters, more than {MAX_TEXT}")
        return None
    if isinstance(value, target) and (target is bool or not isinstance(value, bool)):
        return value
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    problems.append(f"{here} must be {names.get(target, str(target))}, not {_describe(value)}")
    return None


def _join(path: str, name: object) -> str:
    key = name if isinstance(name, str) and len(name) <= 60 else _describe(name)
    return f"{path}.{key}" if path else key


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def encode(value: Any) -> Any:
    """Return ``value`` (dataclasses, enums, tuples, mappings) as plain JSON values, with all fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_key_of(field): encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [encode(item) for item in value]
    return value


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write ``data`` to ``path`` through a temporary name, so that a failure leaves the old file whole.

    A name that ends in ``.gz`` is compressed, always to the same bytes. A link stays one, and a device or pipe is
    written to as it is.
    """
    raw = data.encode(errors="backslashreplace") if isinstance(data, str) else data  # half a character in a name
    if Path(path).suffix == ".gz":
        raw = gzip.compress(raw, mtime=0)
    made: list[Path] = []
    temporary: str | None = None
    try:
        file = Path(os.path.realpath(path))
        if _is_special(file) or str(path).startswith("/dev/"):  # /dev/stdout may lead to a file that is open
            file.write_bytes(raw)
            return
        made = make_folder(file.parent)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:100]}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException as problem:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        remove_empty(made)
        if isinstance(problem, OSError | ValueError):
            raise InputError(f"cannot write {str(path)!r}: {_reason(problem)}") from problem
        raise


def _is_special(file: Path) -> bool:
    """Return whether a path is a device, a pipe or the like."""
    return file.exists() and not file.is_file() and not file.is_dir()


def _reason(problem: Exception) -> str:
    """Return what went wrong, without the temporary name that it happened to."""
    return problem.strerror or str(problem) if isinstance(problem, OSError) else str(problem)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder with those above it; return the ones that were not there, the innermost first."""
    missing = [item for item in (folder, *folder.parents) if not item.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove those of the folders that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def written_together(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Give a new folder for files that come into ``folder`` when all of them are written; after a failure none does.

    Files of these names that were there go. The last of the names comes last, so what has it is whole.
    """
    made: list[Path] = []
    fresh: Path | None = None
    try:
        made = make_folder(folder)
        fresh = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
        yield fresh
        for name in reversed(names):
            (folder / name).unlink(missing_ok=True)
        for name in names:
            if (fresh / name).exists():
                os.replace(fresh / name, folder / name)
    except (OSError, InputError) as problem:
        why = _reason(problem) if fresh is None else _reason(problem).replace(str(fresh), str(folder))
        raise InputError(why if isinstance(problem, InputError) else f"cannot write {str(folder)!r}: {why}"
                         ) from problem
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        remove_empty(made)


def check_output(path: Path, *, is_folder: bool = False) -> None:
    """Raise ``InputError`` unless a file, or files in a folder, could be written there now."""
    try:
        if path.exists() and path.is_dir() != is_folder:
            raise InputError(f"cannot write {str(path)!r}: it is a {'file' if is_folder else 'folder'}")
        if _is_special(path):
            return
        above = next(item for item in ([path] if is_folder else []) + list(path.absolute().parents) if item.exists())
        if not above.is_dir():
            raise InputError(f"cannot write {str(path)!r}: {str(above)!r} is a file, not a folder")
        with tempfile.TemporaryFile(dir=above) as stream:
            stream.write(b"\0" * LEAST_ROOM_BYTES)
    except (OSError, ValueError) as problem:
        raise InputError(f"cannot write {str(path)!r}: {_reason(problem)}") from problem
