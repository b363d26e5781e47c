"""Fixtures of all tests, over tests/seam.py, and what each process of pytest needs."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from launcher.text import set_up_logging

from .seam import Launch, enter, run_inside

set_up_logging()
# The same examples each time, few of them; LAUNCH_FUZZ=N runs N others of each kind.
settings.register_profile(
    "launch",
    max_examples=int(os.environ.get("LAUNCH_FUZZ", "25")),
    derandomize="LAUNCH_FUZZ" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("launch")


def pytest_configure(config: pytest.Config) -> None:
    """Let what the tests start be stopped by signals, also where this process ignores them.

    A shell's background job ignores SIGINT and SIGQUIT, under nohup SIGHUP too; children inherit that.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


WAITING = ("test_tune.py", "test_node_work.py", "test_wheel.py")
"""Modules that take long and use little of a CPU: at the end, one worker would run them alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits. A module's tests run in one worker with `--dist loadgroup` too, which splits
    those of programs: each of them is long, and they share nothing.
    """
    items.sort(key=lambda item: item.path.name not in WAITING)
    for item in items:
        if item.path.name != "test_programs.py":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Escape lone surrogates in a report: pytest-xdist's workers cannot send them, and stop."""
    return escape_surrogates((yield))


def escape_surrogates(value: object) -> object:
    """The same value with text that UTF-8 can encode, also within containers."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escape_surrogates(key): escape_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(escape_surrogates, value))
    return value


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment that asks for nothing."""
    folder = tmp_path / "here"
    folder.mkdir()
    enter(folder, monkeypatch)
    return folder


@pytest.fixture
def launch(here: Path) -> Launch:
    """`launch(*words)` in this process, from the empty directory."""
    assert here.is_dir()
    return lambda *words: run_inside(words)


@pytest.fixture
def quick_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start jobs with no torch but the ranks' own, since `launch` starts them: PYTHONPATH is not set."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(autouse=True)
def signals_are_as_they_were() -> Iterator[None]:
    """A signal that a test leaves ignored stays so in all that later tests start, and then stop in vain."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def pytest_collection_finish() -> None:
    """Keep what has been imported and collected out of garbage collections."""
    gc.collect()
    gc.freeze()
