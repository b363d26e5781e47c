"""The plan in the documents: as a terminal of 80 columns shows it, and the keys of its JSON."""

import json
import os
import re
import subprocess
import termios
from pathlib import Path

import pytest

from tests.docs.generate import DOCS, ROOT
from tests.docs.pages import list_blocks
from tests.seam import LAUNCH, clean_environ, run_inside

COMMAND = "launch plan machine=dgx_a100"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of the plan on such a terminal, without colours."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 80))
    command = [*LAUNCH, *COMMAND.split()[1:]]
    folder = tmp_path_factory.mktemp("plan")
    environ = {name: value for name, value in clean_environ().items() if name not in {"COLUMNS", "LINES"}}
    with subprocess.Popen(command, cwd=folder, env=environ, stdin=theirs, stdout=theirs) as process:
        os.close(theirs)
        text = read_end(ours)
        assert process.wait(60) == 0
    return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]


def read_end(descriptor: int) -> str:
    """All that comes from a terminal until its other side is closed."""
    parts = []
    try:
        while part := os.read(descriptor, 65536):
            parts.append(part)
    except OSError:  # Linux's end of a terminal
        pass
    os.close(descriptor)
    return b"".join(parts).decode()


@pytest.mark.parametrize("path", [ROOT / "README.md", DOCS / "placement.md"], ids=lambda path: path.name)
def test_the_plan_is_as_it_is_shown(path: Path, shown: list[str]) -> None:
    blocks = (block.splitlines() for block in list_blocks(path.read_text(encoding="utf-8")))
    (lines,) = (block[1:] for block in blocks if block[0] == f"$ {COMMAND}")
    assert len(lines) > 10
    assert lines == shown[: len(lines)]


def test_every_key_of_the_plan_is_described() -> None:
    text = (DOCS / "placement.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `(?:ranks\[\]\.)?(\w+)` \| ", text.split("### As JSON")[1], re.MULTILINE)
    plan = json.loads(run_inside([*COMMAND.split()[1:], "format=json"]).out)
    assert {*plan, *plan["ranks"][0]} == set(described[: described.index("warnings") + 1])
