"""The quick start, concepts, tutorials and pages on searches, costs and limits are true; links of all pages lead somewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.test_readme import README, ROOT, check_page
from weft.cost.op_classes import op_classes
from weft.planning.compare import DEPLOY_SIMULATIONS
from weft.search.common.problem import divisors
from weft.search.joint.tuning import TUNING

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
COMMANDS = {"start.md": 4, "tutorial-training.md": 4, "tutorial-inference.md": 3, "tutorial-schedules.md": 6,
            "tutorial-cluster.md": 5, "joint.md": 1, "costs.md": 1}
"""Commands and pieces of code that each page has at least."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_and_code_do_what_is_written(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert check_page(DOCS / name, capsys) >= COMMANDS[name]


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    missing = [link for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page))
               if not link.startswith("http") and not leads_somewhere(page, link)]
    assert missing == []


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.is_file() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """Return what headings of a page are called in links: small letters, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_every_page_is_named_in_the_readme_or_the_quick_start():
    named = README.read_text() + (DOCS / "start.md").read_text()
    assert [page.name for page in PAGES if page.name not in named] == []


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_whole_and_have_a_title(picture):
    root = ElementTree.parse(picture).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert picture.name in (DOCS / "concepts.md").read_text()


def test_the_page_on_costs_has_the_table_of_efficiencies():
    rows = [line for line in (DOCS / "costs.md").read_text().splitlines() if re.fullmatch(r"\|.*\|( \d\.\d\d \|){4}", line)]
    wanted = []
    for name, entry in op_classes().items():
        shares = [share for kind in ("gpu", "cpu") for share in (entry.on(kind).compute, entry.on(kind).memory)]
        unit = f"{entry.unit}, tf32" if entry.tf32 else entry.unit
        wanted.append(f"| {name} | {unit} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    assert rows == wanted


def test_the_page_on_the_joint_search_has_the_numbers_of_the_code():
    text = " ".join((DOCS / "joint.md").read_text().split())
    for sentence in (f"at most {TUNING.max_stages}. Likewise", f"up to {TUNING.max_groups} device groups",
                     f"divided into up to {TUNING.max_stages_in_group} stages",
                     f"at most {TUNING.max_microbatches_per_stage} for each stage",
                     f"up to {TUNING.slacks[-1]:.0%} shorter".replace("%", " %"),
                     f"Up to {TUNING.hidden:.0%} of a gradient".replace("%", " %"),
                     f"{TUNING.worse - 1:.0%} above the best".replace("%", " %"),
                     f"On more than {TUNING.large} devices"):
        assert sentence in text, sentence
    assert TUNING.chunks == (1, 2, 4), "the page says one, two or four"
    assert divisors(2 * TUNING.segment_counts[-1])[:-1] == list(TUNING.segment_counts), "1, 2, 4, ... 64"
    assert (TUNING.finalists, TUNING.attempts) == (6, 14), "the page says six and fourteen"


def test_other_pages_have_the_numbers_of_the_code():
    assert f"**More than {TUNING.large} devices**" in (DOCS / "limits.md").read_text()
    text = " ".join((DOCS / "searchers.md").read_text().split())
    assert f"ends after {DEPLOY_SIMULATIONS:,} simulations" in text
