"""YAML text to plain values, by a small and strict subset of YAML; the only module that touches PyYAML.

Scalars are text, whole numbers, numbers, ``true``/``false`` and ``null`` as JSON writes them; so ``no`` and ``on`` are
text, ``010`` is not eight and nothing becomes a date. Keys are text, and no key may be there twice. Tags (``!!int``,
``!!python/...``) are refused. Aliases and merge keys work, but what they expand to counts against ``MAX_NODES``, and
none may hold itself.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from weft.base.errors import ClusterError

MAX_TEXT: Final = 4 << 20
"""Longer YAML texts are refused, because PyYAML is slow; JSON has no such limit."""
MAX_NODES: Final = 250_000
"""Limit on values in a file, aliases counted as often as they are used."""
_MAX_SHOWN_TEXT: Final = 200_000
"""Faults of longer texts are told by line and column alone: showing the place takes the slow parser."""
_TAG: Final = "tag:yaml.org,2002:"
_SCALARS: Final = (
    ("bool", r"true|false", "tf"),
    ("int", r"-?(0|[1-9][0-9]*)", "-0123456789"),
    ("float", r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", "-0123456789"),
    ("null", r"null|~|", "n~"),
    ("merge", r"<<", "<"),
)


def parse_yaml(text: bytes | str, *, where: str) -> Any:
    """Return the value of a YAML text; raise ``ClusterError`` with the line where it is not YAML as described above."""
    if len(text) > MAX_TEXT:
        raise ClusterError(f"{where} is YAML of {len(text)} bytes, more than {MAX_TEXT}: write it as a .json file")
    try:
        import yaml
    except ImportError as problem:
        raise ClusterError(f"reading {where} needs PyYAML: run 'pip install PyYAML', or write it as JSON") from problem
    try:
        if hasattr(yaml, "CSafeLoader"):
            try:
                return _load(text, fast=True)
            except (yaml.YAMLError, RecursionError, ValueError, OverflowError):
                if len(text) > _MAX_SHOWN_TEXT:
                    raise
        return _load(text, fast=False)  # once more, since its messages show the place
    except yaml.YAMLError as problem:
        raise ClusterError(f"{where} is not valid YAML: {_one_line(problem)}") from problem
    except RecursionError as problem:
        raise ClusterError(f"{where} is not valid YAML: it is nested too deeply") from problem
    except (ValueError, OverflowError) as problem:  # PyYAML lets those of chr() and int() through
        raise ClusterError(f"{where} is not valid YAML: {problem}") from problem


def _load(text: bytes | str, *, fast: bool) -> Any:
    loader = _loader_class(fast)(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).replace("<unicode string>", "the text").replace("<byte string>", "the text").split())


@cache
def _loader_class(fast: bool) -> Any:
    """Return the loader; the fast one is for texts that have no faults, because its messages show no place."""
    import yaml
    from yaml.composer import Composer, ComposerError

    base: Any = yaml.SafeLoader
    if fast:

        class FastLoader(Composer, yaml.CSafeLoader):
            """Composes in Python, so that it can be as strict, from the events of the parser in C."""

            def __init__(self, stream: bytes | str) -> None:
                yaml.CSafeLoader.__init__(self, stream)
                Composer.__init__(self)

        base = FastLoader

    class StrictLoader(base):
        """PyYAML's safe loader with fewer types, unique text keys and a limit on what aliases expand to."""

        def __init__(self, stream: bytes | str) -> None:
            super().__init__(stream)
            self.num_nodes = 0
            self.node_sizes: dict[int, int] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if getattr(event, "tag", None) not in (None, "!"):
                raise ComposerError(None, None, "tags are not read here", event.start_mark)
            before = self.num_nodes
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            if is_alias and id(node) not in self.node_sizes:
                raise ComposerError(None, None, "an alias stands inside what it repeats", event.start_mark)
            self.num_nodes += self.node_sizes[id(node)] if is_alias else 1
            if self.num_nodes > MAX_NODES:
                raise ComposerError(None, None, f"more than {MAX_NODES} values, aliases counted", event.start_mark)
            self.node_sizes[id(node)] = self.num_nodes - before
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key, _value in node.value:
                if key.tag not in (_TAG + "str", _TAG + "merge"):
                    raise ComposerError(None, None, "a key must be text; put it in quotes", key.start_mark)
                if key.value in seen:
                    raise ComposerError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
            return node

    resolvers: dict[str, list[Any]] = {}
    for name, pattern, first in _SCALARS:
        for character in [*first, *([""] if name == "null" else [])]:
            resolvers.setdefault(character, []).append((_TAG + name, re.compile(rf"(?:{pattern})\Z")))
    StrictLoader.yaml_implicit_resolvers = resolvers
    plain = {f"{_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")}
    StrictLoader.yaml_constructors = {
        tag: function for tag, function in yaml.SafeLoader.yaml_constructors.items() if tag in plain or tag is None}
    return StrictLoader
