"""Runs a step in a process of its own, within its time, and leaves none of its processes behind."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.gpu.records import FAILED, LEFT_OUT, Check, Row, read_records
from tests.gpu.table import Step

RAN, RUNNING, WAITING, STOPPED = "ran", "running", "not begun", "stopped"
"""What can be said of a step, beside FAILED and LEFT_OUT."""
MARK = "GPU_PROOF_STEP"
"""A variable by which a step's processes are found."""
TICK = 0.2
"""Seconds between two looks at a step."""
LINGER = 3
"""Seconds that a step's processes may outlive it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step stands, or what came of it."""

    step: Step
    status: str = WAITING
    reason: str = ""
    """Why it failed or was left out."""
    seconds: float = 0.0
    limit: float = 0.0
    """Seconds that it was given: the step's limit, or less where less was left."""
    checks: tuple[Check, ...] = ()
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where steps run."""

    python: str
    environ: Mapping[str, str]
    folder: Path
    """For temporary files."""
    log: Path
    """File that has all output."""


class Stopped(BaseException):
    """A signal asked to end; its number is the argument."""


def run_step(step: Step, limit: float, place: Place, show: Callable[[Outcome], None]) -> Outcome:
    """Run a step for `limit` seconds at most; `show` gets its state whenever it has changed."""
    mark, records = f"{MARK}={uuid.uuid4()}", place.folder / f"{step.name}.jsonl"
    folder = place.folder / step.name
    folder.mkdir()
    environ = {**place.environ, "GPU_PROOF_RECORDS": str(records), **dict([mark.split("=")])}
    began = time.monotonic()
    with place.log.open("ab") as log:
        log.write(f"\n##### {step.name}: {step.title}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            [place.python, *step.command],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for checks, rows in follow(process, records, began + limit):
            seconds = time.monotonic() - began
            show(Outcome(step, RUNNING, "", seconds, limit, checks, rows))
        code = process.poll()
        if code is not None:
            wait_for_end(mark)
    finally:
        left = end_all(process, mark)
    seconds = time.monotonic() - began
    checks, rows = read_records(records)
    if code is not None and left:
        checks += (Check("no process is left", FAILED, f"{len(left)}: {'; '.join(left)}"),)
    last = read_last_line(place.log, start)
    return judge(Outcome(step, "", "", seconds, limit, checks, rows), code, last)


def follow(
    process: "subprocess.Popen[bytes]", records: Path, deadline: float
) -> Iterator[tuple[tuple[Check, ...], tuple[Row, ...]]]:
    """Give the records whenever there are more of them, until the process or its time ends."""
    size = -1
    while time.monotonic() < deadline:
        found = records.stat().st_size if records.exists() else 0
        if found != size:
            size = found
            yield read_records(records)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TICK)
            return


def judge(outcome: Outcome, code: int | None, last: str) -> Outcome:
    """Say what came of a step: `code` is None where its time ran out, `last` its last line of output."""
    failed = [check for check in outcome.checks if check.status == FAILED]
    left_out = [check for check in outcome.checks if check.status == LEFT_OUT]
    if code is None:
        status, reason = FAILED, f"not done after {outcome.limit:.0f} s: ended"
    elif code:
        how = f"died of signal {-code}" if code < 0 else f"exited with {code}"
        status, reason = FAILED, f"{how}: {last}"
    elif failed:
        status = FAILED
        reason = f"{len(failed)} of {len(outcome.checks)} checks: {failed[0].name}: {failed[0].detail}"
    elif left_out and len(left_out) == len(outcome.checks) and not outcome.rows:
        status, reason = LEFT_OUT, left_out[0].detail
    elif not outcome.checks:
        status, reason = FAILED, "it checked nothing"
    else:
        status, reason = RAN, ""
    return replace(outcome, status=status, reason=reason)


def wait_for_end(mark: str) -> None:
    """Wait, for a while, until no process of a step is left: some end just after their parent."""
    deadline = time.monotonic() + LINGER
    while find_marked(mark) and time.monotonic() < deadline:
        time.sleep(TICK)


def end_all(process: "subprocess.Popen[bytes]", mark: str) -> list[str]:
    """Kill what is left of a step, and return the command lines of what was not the step's own process."""
    left = {pid: command for pid, command in find_marked(mark).items() if pid != process.pid}
    for pid in [process.pid, *left]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it, in a driver's call
        process.wait(5)
    return list(left.values())


def find_marked(mark: str) -> dict[int, str]:
    """Return the living processes that have a variable, with their command lines."""
    found = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdecimal() and mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(path.name)] = command.decode(errors="replace").strip()[:120]
    return found


def read_last_line(log: Path, start: int) -> str:
    """Return the last line with anything in it that a step has printed."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
