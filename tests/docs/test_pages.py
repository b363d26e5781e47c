"""The documents hold: links lead somewhere, names exist, plans and generated parts are as they are shown."""

import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from launcher.plan.variables import HONOURED, REASONS
from tests.docs.generate import (
    DOCS,
    DOCUMENTS,
    PAGES,
    ROOT,
    fill,
    list_anchors,
    list_blocks,
    list_code,
    list_links,
    name_document,
)
from tests.launch.terminals import open_terminal
from tests.seam import LAUNCH, run_inside

README = ROOT / "README.md"
NAMES = {
    *("quickstart", "placement", "launch-rank", "slurm", "dataloader", "fit", "garbage-collection"),
    *("allocator", "doctor", "configuration", "environment-variables", "run-directory", "reliability"),
    *("start", "watching", "benchmarks", "comparison", "architecture"),
}
"""Of the pages in docs/."""
PLAN = "launch plan machine=dgx_a100"
DOTTED = re.compile(r"launcher(?:\.\w+)+")
FILE = re.compile(r"(?:launcher|tests|conf|slurm|docs|hydra_plugins|\.ci)/[\w./-]*[\w/]")
MADE = {"conf/model/mine.yaml", "conf/program/mine.yaml", "conf/cluster/ours.yaml", "conf/machine/ours.yaml"}
MADE |= {"conf/machine/ours.json", "conf/dataloader/tuned.yaml", "conf/program/tuned.yaml"}
"""Files that a reader makes."""


# Links


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


def test_the_readme_is_one_page_and_links_each_other() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 140 and len(text.split()) <= 1100
    assert {path.stem for path in DOCS.glob("*.md")} == NAMES
    links = {link.partition("#")[0] for link in list_links(text)}
    assert {f"docs/{name}.md" for name in NAMES} <= links
    # A broken link is seen.
    assert find_broken(README, "docs/none.md") and find_broken(README, "docs/slurm.md#no-such-heading")
    assert not find_broken(README, "docs/slurm.md#submit")


# Names


def exists(dotted: str) -> bool:
    """Whether `launcher.x.y.name` is a module, or something in one."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_document)
def test_every_name_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = " ".join(["", *list_code(text), *list_blocks(text)])
    names = {name for name in DOTTED.findall(code) if not name.startswith("launcher.rank_plan")}
    missing = {name for name in names if not exists(name)}
    missing |= {name for name in FILE.findall(code) if not (ROOT / name).exists() and name not in MADE}
    assert missing == set() and not exists("launcher.plan.none") and not exists("launcher.none.plan")


def test_the_glossary_is_in_order_and_defines_each_term_once() -> None:
    part = (
        (DOCS / "architecture.md").read_text(encoding="utf-8").split("\n## Glossary\n")[1].split("\n## ")[0]
    )
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    terms = [row.strip("|").split(" | ")[0].strip().lower() for row in rows[1:]]
    assert terms == sorted(set(terms)) and len(terms) > 15


# The plan: as a terminal of 80 columns shows it, and the keys of its JSON


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of the plan on such a terminal, without colours."""
    line = f"{shlex.join([*LAUNCH, *PLAN.split()[1:]])} 2>&-"
    with open_terminal(tmp_path_factory.mktemp("plan"), "sh", "-c", line) as terminal:
        assert terminal.finish() == 0
        return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", terminal.text()).splitlines()]


@pytest.mark.parametrize("path", [README, DOCS / "placement.md"], ids=name_document)
def test_the_plan_is_as_it_is_shown(path: Path, shown: list[str]) -> None:
    blocks = (block.splitlines() for block in list_blocks(path.read_text(encoding="utf-8")))
    (lines,) = (block[1:] for block in blocks if block[0] == f"$ {PLAN}")
    stripped = [line.strip() for line in lines]
    at = stripped.index("…") if "…" in stripped else len(lines)  # what stands for further ranks
    assert at >= 6 and lines[:at] == shown[:at]
    rest = lines[at + 1 :]
    assert not rest or rest == shown[shown.index(rest[0]) :][: len(rest)]


def test_every_key_of_the_plan_is_described() -> None:
    text = (DOCS / "placement.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `(?:ranks\[\]\.)?(\w+)` \| ", text.split("### As JSON")[1], re.MULTILINE)
    plan = json.loads(run_inside([*PLAN.split()[1:], "format=json"]).out)
    assert {*plan, *plan["ranks"][0]} == set(described[: described.index("warnings") + 1])


# Generated parts


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    text, part = (DOCS / name).read_text(encoding="utf-8"), PAGES[name]()
    assert fill(text, part) == text, "run python -m tests.docs.generate"
    rows = [line for line in part.splitlines() if line.startswith(("| `", "- `"))]
    assert 8 < len(rows) == len(set(rows))


def test_the_variables_of_others_are_described() -> None:
    text = (DOCS / "environment-variables.md").read_text(encoding="utf-8")
    assert [name for name in (*HONOURED, *REASONS) if f"`{name}`" not in text] == []
