"""Names that are imported when they are first used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import weft
from weft.cli import late


@pytest.mark.parametrize("module", [weft, late], ids=lambda module: module.__name__)
def test_each_name_of_the_stub_is_there(module) -> None:
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = [item.asname or item.name for node in stub.body if isinstance(node, ast.ImportFrom) for item in node.names]
    assert names
    for name in names:
        assert getattr(module, name) is not None


def test_no_other_name_is_there() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        late.__getattr__("nothing")
