"""What the tests share: `launch` in this process and as a real command, from an empty directory."""

import contextlib
import ctypes
import gc
import io
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.config.request import LIBRARY_PREFIXES
from launcher.plan.environment import HONOURED
from launcher.protocol import LAUNCH_CACHE
from launcher.text import set_up_logging

set_up_logging()
LAUNCH = (
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'launch'; from launcher.cli.main import main; main()",
)


QUICK_AGENT = str(Path(__file__).parent / "launch" / "quick_agent")
"""For PYTHONPATH: see there."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a command line ended."""

    code: int
    out: str
    err: str

    def assert_error(self, code: int, *parts: str) -> None:
        """Assert one line on stderr that starts as our errors do and has these parts, and no output."""
        assert (self.code, self.out) == (code, ""), self
        assert self.err.startswith("launch: error: "), self.err
        assert self.err.endswith("\n") and self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        for part in parts:
            assert part in self.err, self.err


def run_inside(words: Sequence[str], encoding: str = "utf-8") -> Result:
    """Run a command line in this process; what would start something is an error of the test.

    With another encoding of the streams, as by PYTHONIOENCODING, they are prepared as the entry point does.
    """
    from launcher.cli import main
    from launcher.launch import local_run

    def refuse(*_: object, **__: object) -> int:
        raise AssertionError(f"{words} would start a job")

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, newline="") for _ in range(2))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(local_run, "execute_job", refuse)
        if encoding != "utf-8":
            main.open_streams()
        code = main.run_guarded(list(words))
    return Result(code, *(read_buffer(stream) for stream in (out, err)))


def read_buffer(stream: io.TextIOWrapper) -> str:
    """What has been written to a stream in memory."""
    stream.seek(0)
    return stream.read()


def run_outside(
    words: Sequence[str | bytes],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    *,
    timeout: float = 120,
    **options: object,
) -> Result:
    """Run a command line as a process of its own."""
    environ = {**clean_environ(), **(env or {})}
    done = subprocess.run(  # type: ignore[call-overload]  # options are subprocess.run's own
        [*LAUNCH, *words], cwd=cwd, env=environ, capture_output=True, timeout=timeout, check=False, **options
    )
    return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def in_shell(line: str, cwd: Path, **variables: str) -> Result:
    """Run a line of bash in which $LAUNCH is `launch`."""
    script = f'set -o pipefail; launch() {{ {shlex.join(LAUNCH)} "$@"; }}; {line}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env={**clean_environ(), **variables},
        capture_output=True,
        timeout=60,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace"))


def drop_powers() -> None:
    """Make permissions hold for root too, after the next exec: CAP_DAC_OVERRIDE (1) and _READ_SEARCH (2) go.

    To be called between fork and exec. Another user would not do: it may not even read this interpreter.
    """
    if os.geteuid() == 0:
        for capability in (1, 2):
            if ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
                raise OSError(ctypes.get_errno(), "a capability cannot be dropped")


def clean_environ() -> dict[str, str]:
    """Return this process's environment without what changes a job's placement or size, or a plan shows.

    Libraries that a test imports in this process leave variables of their own.
    """
    ours = ("PET_", "LAUNCH_", "TORCHELASTIC_", "HYDRA_", "COMP_", *HONOURED, *LIBRARY_PREFIXES)
    slurms = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*ours, *slurms))}
    return kept | {name: os.environ[name] for name in (LAUNCH_CACHE,) if name in os.environ}


def pytest_configure(config: pytest.Config) -> None:
    """Keep composed configurations of the tests by themselves, and let the tests' processes be stopped."""
    folder = tempfile.TemporaryDirectory(prefix="launch-cache-")
    os.environ[LAUNCH_CACHE] = folder.name
    config.add_cleanup(folder.cleanup)
    restore_stop_signals()


def restore_stop_signals() -> None:
    """Let what the tests start be stopped by signals, also where this process ignores them.

    A shell's background job ignores SIGINT and SIGQUIT, under nohup SIGHUP too; children inherit that.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


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
    monkeypatch.chdir(folder)
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    return folder


@pytest.fixture
def launch(here: Path) -> Callable[..., Result]:
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
