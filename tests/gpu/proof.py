"""What a test with a GPU works with: it starts programs, records figures and keeps files; their summary."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.seam import clean_environ, find_processes

PROGRAMS = str(Path(__file__).with_name("programs.py"))
"""`programs.py NAME ARGUMENT …`, which the ranks run."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    code: int
    out: str
    err: str
    seconds: float
    run: Path
    """Its run directory, if it was `launch`."""

    def read_rank(self, stream: str = "out") -> str:
        """Return what rank 0 wrote."""
        return (self.run / "logs/0" / f"rank-0.{stream}").read_text(errors="replace")


@dataclass(frozen=True, slots=True)
class Proof:
    """A test's tools."""

    cpu: bool
    """There is to be no GPU."""
    folder: Path
    output: Path | None
    """Files there are kept; None if this is no proof."""
    record: Callable[[str, object], None]
    """Record a row of a table: its name, and the values by column."""
    mark: str

    def check_gpu(self) -> None:
        """Skip the test without a GPU; a proof fails."""
        import torch

        if not self.cpu and not torch.cuda.is_available():
            reason = f"torch {torch.__version__} sees no GPU (CUDA {torch.version.cuda})"
            pytest.fail(reason) if self.output else pytest.skip(reason)

    def keep(self, name: str, text: str) -> None:
        """Keep a file."""
        if self.output:
            (self.output / name).write_text(text, encoding="utf-8")

    def need_gpu(self) -> None:
        """Skip what cannot be tried with `--cpu`."""
        if self.cpu:
            pytest.skip("needs a GPU")

    def start(self, name: str, *words: str, code: int | None = 0, limit: float = 90, **environ: str) -> Ended:
        """Run `launch WORDS` with one rank in a folder of its own; its exit code must be `code`, if given."""
        command = [sys.executable, "-m", "launcher", "new_run_dir=run", "nproc_per_node=1", *words]
        return self.run(name, command, code, limit, environ)

    def program(
        self, name: str, program: str, *words: str, settings: Iterable[str] = (), **more: Any
    ) -> Ended:
        """Run one of PROGRAMS by `launch`."""
        return self.start(name, *settings, "--", PROGRAMS, program, *words, **more)

    def verb(self, name: str, *words: str, code: int | None = 0, limit: float = 60) -> Ended:
        """Run `launch VERB …`."""
        return self.run(name, [sys.executable, "-m", "launcher", *words], code, limit, {})

    def run(
        self, name: str, command: list[str], code: int | None, limit: float, environ: Mapping[str, str]
    ) -> Ended:
        """Run a program in a folder of its own; it is ended after `limit` seconds, which fails."""
        folder = self.folder / name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        shown = {key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in os.environ}
        whole = {**clean_environ(), **shown, **dict([self.mark.split("=", 1)]), **environ}
        began = time.monotonic()
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            done = subprocess.run(
                command,
                cwd=folder,
                env=whole,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=limit,
                check=False,
            )
        said, errors = ((folder / stream).read_text(errors="replace") for stream in ("out", "err"))
        seconds = time.monotonic() - began
        print(f"=== {name}: exit code {done.returncode} after {seconds:.1f} s: {' '.join(command)}")
        print(said[-20_000:], errors[-20_000:], sep="\n")
        ended = Ended(done.returncode, said, errors, seconds, folder / "run")
        assert code is None or ended.code == code, f"{name}: {ended.code}: {(errors or said)[-1000:]}"
        return ended

    def wait_for_end(self) -> None:
        """Wait half a minute for the processes that end just after their parent, then kill what is left."""
        deadline = time.monotonic() + 30
        while (left := find_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, left


class Summary:
    """Outcomes and figures as Markdown, written again after each test."""

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
        tables: dict[str, list[dict[str, object]]] = {"": []}
        for name, report in self.reports.items():
            row: dict[str, object] = {
                "test": name.rpartition("/")[2],
                "outcome": "not run",
                "s": "",
                "why": "",
            }
            if report:
                told = (
                    report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-600:]
                )
                row |= {"outcome": report.outcome, "s": f"{report.duration:.1f}", "why": told}
            tables[""].append(row)
            for title, value in report.user_properties if report else ():
                tables.setdefault(title, []).append(value if isinstance(value, dict) else {"": value})
        for title, rows in tables.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            yield f"\n## {title}\n" if title else ""
            yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
            yield from (f"| {' | '.join(clean(row.get(key, '')) for key in columns)} |" for row in rows)


def clean(value: object) -> str:
    return " ".join((f"{value:.4g}" if isinstance(value, float) else str(value)).split()).replace("|", "\\|")


Item = TypeVar("Item")
Result = TypeVar("Result")


def together(function: Callable[[Item], Result], items: Iterable[Item], at_once: int = 8) -> list[Result]:
    """Return the function's results, some of them computed at the same time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(function, items))
