"""The tree is what docs/architecture.md says: its packages, which way imports point, and one place for each concept."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["weft"]
FRONT = {"weft", "weft.__main__", "weft.warm"}
"""Modules above all packages: the names that ``import weft`` offers, and programs that call everything."""


@cache
def modules() -> dict[str, ast.Module]:
    """Return every module of the package by name, parsed."""
    found = {}
    for file in sorted((ROOT / "weft").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def package_of(module: str) -> str:
    """Return the package of the table that a module belongs to."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["search"] else 2])


def imports(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each module of weft that is imported, and whether a function does it; not what is for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weft":
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield (full if full in modules() else str(node.module)), inside
        elif isinstance(node, ast.Import):
            yield from ((name.name, inside) for name in node.names if name.name.split(".")[0] == "weft")
        else:
            yield from imports(node, inside=inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def table(heading: str) -> list[tuple[str, str]]:
    """Return the rows of the table below a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in text.splitlines() if line.startswith("|")]
    return [(row[0], row[1]) for row in rows[2:]]


def packages() -> list[str]:
    return [first.strip("`") for first, _ in table("Packages")]


def test_the_pages_packages_are_those_of_the_tree():
    folders = {package_of(name) for name in modules() if name not in FRONT} - {"weft.search"}
    assert sorted(packages()) == sorted(folders)


def test_imports_point_up_the_pages_list_and_so_in_no_circle():
    place = {name: index for index, name in enumerate(packages())}
    wrong = [f"{name} imports {target}" for name, tree in modules().items() if name not in FRONT and name != "weft.search"
             for target, _ in imports(tree)
             if target not in FRONT and place[package_of(target)] > place[package_of(name)]]
    assert wrong == []


def test_the_runtime_reaches_no_searcher():
    wrong = [f"{name} imports {target}" for name, tree in modules().items() if name.startswith("weft.run")
             for target, _ in imports(tree) if target.startswith(("weft.search", "weft.planning", "weft.explain", "weft.training"))]
    assert wrong == []


def test_imports_inside_functions_are_few():
    """Outside the command line, which must start quickly. The limit only goes down."""
    count = sum(is_inside for name, tree in modules().items() if name not in FRONT and not name.startswith("weft.cli")
                for _, is_inside in imports(tree))
    assert count <= SETTINGS["max-lazy-imports"], count


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the lines that are neither blank, comment nor docstring."""
    doc: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else []:
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str):
                doc.update(range(item.lineno, (item.end_lineno or item.lineno) + 1))
    return sum(1 for number, line in enumerate(text.splitlines(), 1)
               if line.strip() and not line.strip().startswith("#") and number not in doc)


def test_the_code_keeps_to_its_budget():
    """Raise ``max-code-lines`` in pyproject only with a reason in the commit."""
    total = 0
    for file in (ROOT / "weft").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        total += code_lines(text, ast.parse(text))
    assert total <= SETTINGS["max-code-lines"], total


@pytest.mark.parametrize(("question", "answer"), table("Where is ...?"))
def test_the_page_names_places_that_are_there(question, answer):
    for place in re.findall(r"`([^`]+)`", answer):
        if "/" in place:
            assert (ROOT / place).exists(), question
            continue
        module, _, name = place.rpartition(".")
        names = {item.name for item in modules()[module].body if isinstance(item, ast.ClassDef | ast.FunctionDef)}
        names |= {target.id for item in modules()[module].body if isinstance(item, ast.Assign | ast.AnnAssign)
                  for target in (item.targets if isinstance(item, ast.Assign) else [item.target]) if isinstance(target, ast.Name)}
        assert name in names, question


MARKS = {
    "account of memory": (r"\bStageView\(", {"weft.plan.stage_memory", "weft.plan.step_memory"}),
    "account of optimizer states": (r"\bdef \w*optimizer_bytes\(", {"weft.plan.memory"}),
    "cutter": (r"\bdef (_bisect|\w*(cuts_within|best_cuts|even_cuts|greedy_cuts|shortest_period))\(", {"weft.search.joint.cut"}),
    "bytes by operator": (r"\bdef \w*(crossing_bytes|parameter_bytes|kept_by_op|saved_by_op|state_bytes)\((self, )?graph", {
        "weft.plan.op_bytes", "weft.cost.roofline"}),
    "way to what weft plan tries": (r"DeployOptions\(\s*max_simulations=", {"weft.planning.compare", "weft.warm"}),
    "library of named orders": (r"\bdef (gpipe|one_f_one_b|interleaved|chimera|zb_h1)\(", {"weft.plan.orders"}),
    "row of a chart": (r"\bclass Row\b[^@]*\bboxes\b", {"weft.show.chart"}),
    "reader of safetensors": (r"__metadata__", {"weft.base.tensor_file"}),
    "way to tell the best and its bound": (r"report\(\s*f\"[^\"]*best[^\"]*bound", {
        "weft.search.common.incumbent"}),
    "exchange time": (r"(?<!self)\.collective(_limits)?\(", {"weft.simulate.exchange_time"}),
}
"""What only these modules may do, as a pattern of their text."""


@pytest.mark.parametrize("concept", MARKS)
def test_each_concept_has_one_place(concept):
    pattern, allowed = MARKS[concept]
    found = {name for name in modules() if re.search(pattern, source_of(name), re.MULTILINE)}
    assert found <= allowed, concept


def source_of(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


FOR_TESTS = {"weft.export.pipelining_csv.parse_csv", "weft.show.drawing.format_chart"}
"""What only tests call. Nothing is to be added here."""


def test_nothing_is_unreferenced():
    """Every public function and class of a module is used somewhere, or named in the docs."""
    defined = {(name, item.name) for name, tree in modules().items() for item in tree.body
               if isinstance(item, ast.ClassDef | ast.FunctionDef) and not item.name.startswith("_") and not item.decorator_list}
    words: dict[str, int] = {}
    texts = [source_of(name) for name in modules()]
    texts += [file.read_text(encoding="utf-8") for folder in ("benchmarks", "examples", "docs") for file in (ROOT / folder).rglob("*")
              if file.suffix in (".py", ".md")]
    texts.append((ROOT / "README.md").read_text(encoding="utf-8"))
    for text in texts:
        for word in re.findall(r"[A-Za-z_]\w*", text):
            words[word] = words.get(word, 0) + 1
    unused = {f"{module}.{name}" for module, name in defined if words[name] < 2}
    assert unused <= FOR_TESTS
