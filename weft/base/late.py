"""Names that a module offers and imports only when they are used, so that importing the module loads no heavy library.

The module's stub (``.pyi``) says where each name is from, to type checkers and, as in Scientific Python's SPEC 1, here:

    __getattr__ = names_in_stub(__name__, __file__)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def names_in_stub(module: str, file: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of the module in that file: any name of its stub, imported from where it is."""
    @cache
    def homes() -> dict[str | None, tuple[str, str]]:
        stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
        return {item.asname: (str(node.module), item.name) for node in stub.body if isinstance(node, ast.ImportFrom)
                for item in node.names}

    def get(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, attribute = homes()[name]
        return getattr(import_module(home), attribute)

    return get
