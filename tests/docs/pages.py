"""The documents, their links and their code blocks."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.docs.generate import DOCS, ROOT

DOCUMENTS = (
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    ROOT / "slurm/README.md",
    ROOT / "tests/kernels/README.md",
    ROOT / "tests/lab/README.md",
)


def name_document(path: Path) -> str:
    return str(path.relative_to(ROOT))


BLOCK = re.compile(r"^```\w*\n((?:.*\n)*?)```$|((?:^    .*\n(?:\n(?=    ))?)+)", re.MULTILINE)
"""A fenced block, or an indented one."""


def list_blocks(text: str) -> Iterator[str]:
    """The code blocks of a document, without what marks them."""
    for fenced, indented in BLOCK.findall(text):
        yield fenced or textwrap.dedent(indented)


def strip_blocks(text: str) -> str:
    """A document without its code blocks."""
    return BLOCK.sub("", text)


def list_code(text: str) -> list[str]:
    """What stands in backticks in a document's text and tables."""
    return re.findall(r"`([^`\n]+)`", strip_blocks(text))


def list_links(text: str) -> list[str]:
    """The targets of a document's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", strip_blocks(text))


def list_anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", strip_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
