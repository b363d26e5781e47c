"""The tests marked `gpu`: each file in a pytest of its own, all at the same time."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tests.gpu.context import NEEDED, Context, run_program, together
from tests.gpu.environment import ROOT

MARKED = re.compile(r"\bmark\.gpu\b")
OPTIONS = ("-m", "gpu", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-p", "no:cacheprovider")
WARNINGS = ("-W", "default")
"""What other versions of other packages warn of is no failure of ours."""
LIMIT = 165


def run(context: Context) -> None:
    """Run the tests of each file; on the CPU, see only that they can be collected."""
    collect = ("--collect-only", "-q") if context.cpu else ()
    together(lambda path: run_file(context, path, collect), find_files(), 8)
    if context.cpu:
        context.record.leave_out("running the tests", NEEDED)


def find_files() -> list[Path]:
    """Files with a test that is marked."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARKED.search(path.read_text())]


def run_file(context: Context, path: Path, collect: tuple[str, ...]) -> None:
    """Run the tests of a file."""
    name = str(path.relative_to(ROOT))
    with context.record.part(name):
        folder = context.folder / path.stem
        report = folder / "report.xml"
        options = (*OPTIONS, *WARNINGS, f"--junitxml={report}", f"--basetemp={folder / 'tmp'}", *collect)
        command = [sys.executable, "-m", "pytest", *options, str(path)]
        ended = run_program(command, folder, LIMIT, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
        if collect:
            found = ended.demand().out.count("::")
            context.record.check(f"{name}: tests are there", found > 0, ended.out[-300:])
            context.record.row("Tests marked `gpu`", file=name, collected=found)
            return
        cases = list(read_cases(report))
        for case, status, detail in cases:
            record_case(context, f"{name}::{case}", status, detail)
        context.record.check(
            f"{name}: pytest ends well", ended.code == 0 and bool(cases), f"exit code {ended.code}"
        )


def record_case(context: Context, name: str, status: str, detail: str) -> None:
    """Record what became of a test."""
    if status == "skipped":
        context.record.leave_out(name, detail)
    else:
        context.record.check(name, status == "passed", detail)


def read_cases(report: Path) -> Iterator[tuple[str, str, str]]:
    """Give each test's name, `passed`, `failed` or `skipped`, and why, from a report in JUnit's form."""
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        status = "passed" if found is None else "skipped" if found.tag == "skipped" else "failed"
        yield case.get("name", "?"), status, "" if found is None else found.get("message", "")
