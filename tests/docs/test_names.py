"""Every module, function and file that the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.generate import DOCS, ROOT
from tests.docs.pages import DOCUMENTS, list_blocks, list_code, name_document

ARCHITECTURE = DOCS / "architecture.md"
DOTTED = re.compile(r"launcher(?:\.\w+)+")
FILE = re.compile(r"(?:launcher|tests|conf|slurm|docs|hydra_plugins|\.ci)/[\w./-]*[\w/]")


def find_name(dotted: str) -> bool:
    """Whether `launcher.x.y.name` is a module, or a name at the top of one, or of a class in it."""
    parts = dotted.split(".")
    for at in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:at])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return has_names(ast.parse(file.read_text(encoding="utf-8")).body, parts[at:])
    return False


def has_names(body: list[ast.stmt], names: list[str]) -> bool:
    """Whether the first name is defined in these statements, and the second within it."""
    if not names:
        return True
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == names[0]:
            return has_names(node.body, names[1:])
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == names[0] for target in targets):
            return len(names) == 1
    return False


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_document)
def test_every_name_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = " ".join(["", *list_code(text), *list_blocks(text)])
    names = {name for name in DOTTED.findall(code) if not name.startswith("launcher.rank_plan")}
    missing = {name for name in names if not find_name(name)}
    missing |= {name for name in FILE.findall(code) if not (ROOT / name).exists() and name not in MADE}
    assert missing == set()


MADE = {"conf/model/mine.yaml", "conf/program/mine.yaml", "conf/cluster/ours.yaml", "conf/machine/ours.yaml"}
MADE |= {"conf/machine/ours.json", "conf/dataloader/tuned.yaml", "conf/program/tuned.yaml"}
"""Files that a reader makes."""


def read_table(title: str) -> list[list[str]]:
    """The rows of the table below a heading of the page on architecture."""
    part = ARCHITECTURE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def test_the_glossary_is_in_order_and_defines_each_term_once() -> None:
    terms = [row[0].lower() for row in read_table("Glossary")]
    assert terms == sorted(set(terms)) and len(terms) > 15
