"""Links between documents, and to files, lead somewhere."""

from pathlib import Path

import pytest

from tests.docs.generate import DOCS, ROOT
from tests.docs.pages import DOCUMENTS, list_anchors, list_links, name_document

PAGES = (
    "quickstart",
    "placement",
    "launch-rank",
    "slurm",
    "dataloader",
    "fit",
    "garbage-collection",
    "allocator",
    "doctor",
    "configuration",
    "environment-variables",
    "run-directory",
    "reliability",
    "start",
    "watching",
    "benchmarks",
    "comparison",
    "architecture",
)


def find_broken(path: Path, link: str) -> bool:
    """Whether a link of a document leads nowhere; those into the web are not tried."""
    target, _, anchor = link.partition("#")
    if target.startswith("https://"):
        return False
    found = path.parent / target if target else path
    if not found.resolve().is_relative_to(ROOT) or not found.exists():
        return True
    return bool(anchor) and anchor not in list_anchors(found.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_document)
def test_every_link_leads_somewhere(path: Path) -> None:
    links = list_links(path.read_text(encoding="utf-8"))
    assert [link for link in links if find_broken(path, link)] == []


def test_the_pages_are_those_of_the_design_and_the_readme_links_each() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} == set(PAGES)
    links = {link.partition("#")[0] for link in list_links((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {f"docs/{name}.md" for name in PAGES} <= links


def test_the_readme_is_one_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 140 and len(text.split()) <= 1100


def test_a_broken_link_is_seen() -> None:
    path = DOCUMENTS[0]
    assert find_broken(path, "docs/none.md") and find_broken(path, "docs/slurm.md#no-such-heading")
    assert not find_broken(path, "docs/slurm.md#submit")
