"""Options of `tests/gpu/prove`, what its tests are given, and the summary, written again after each test."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.proof import Proof


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="there is to be no GPU")
    parser.addoption("--proof", type=Path, help="folder for summary.md and the files that are kept")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--proof", None):
        config.pluginmanager.register(Summary(config.getoption("--proof") / "summary.md"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the tests that need a GPU out of other runs: they import torch."""
    wanted = config.getoption("-m") == "gpu" or collection_path.name == "test_prove.py"
    return None if wanted or collection_path.suffix != ".py" else True


@pytest.fixture
def tools(
    request: pytest.FixtureRequest, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[Proof]:
    """What a test works with, also without a GPU; the test fails if it leaves a process behind."""
    output = request.config.getoption("--proof", None)
    cpu = request.config.getoption("--cpu", default=False)
    made = Proof(cpu, tmp_path, output, record_property, f"LAUNCH_TEST_MARK=gpu-{uuid.uuid4()}")
    yield made
    made.wait_for_end()


@pytest.fixture
def proof(tools: Proof) -> Proof:
    """The same; without a GPU the test is skipped, or fails if it is to prove something."""
    tools.check_gpu()
    return tools


class Summary:
    """Outcomes and figures as Markdown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: dict[str, pytest.TestReport | None] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.reports = {item.nodeid: None for item in session.items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.reports[report.nodeid] = report
            self.path.with_suffix(".part").write_text("\n".join(self.render()) + "\n", encoding="utf-8")
            self.path.with_suffix(".part").replace(self.path)

    def render(self) -> Iterator[str]:
        yield "| test | outcome | s | why |\n|---|---|---|---|"
        for name, report in self.reports.items():
            outcome, seconds = (report.outcome, f"{report.duration:.1f}") if report else ("not run", "")
            yield f"| {name.rpartition('/')[2]} | {outcome} | {seconds} | {tell_reason(report)} |"
        tables: dict[str, list[dict[str, object]]] = {}
        for report in filter(None, self.reports.values()):
            for name, row in report.user_properties:
                tables.setdefault(name, []).append(row if isinstance(row, dict) else {"": row})
        for name, rows in tables.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            yield f"\n## {name}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
            yield from (f"| {' | '.join(clean(row.get(key, '')) for key in columns)} |" for row in rows)


def tell_reason(report: pytest.TestReport | None) -> str:
    if report is None or report.passed:
        return ""
    return clean(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-600:])


def clean(value: object) -> str:
    return " ".join((f"{value:.4g}" if isinstance(value, float) else str(value)).split()).replace("|", "\\|")
