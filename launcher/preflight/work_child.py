"""Runs `launcher.programs.node_work` in the ranks' interpreter, as a child that is killed at its limit."""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.codec import DecodeError, convert, parse_json
from launcher.doctor.node_facts import WorkResult
from launcher.text import escape_text

BOOT = """
import importlib.util, sys
if importlib.util.find_spec("torch") is None:
    sys.exit(78)
sys.path.append(sys.argv.pop(1))
from launcher.programs.node_work import main
main()
"""
"""The ranks' interpreter may have no `launcher`: it finds this one, after all that it has itself."""
NO_TORCH = 78
PACKAGES = Path(__file__).parents[2]
MOST = 512 << 10
"""Bytes of its output that are read; a result is about 250."""
KEPT = 2000
"""Bytes of the end of its stderr that are kept."""
PR_SET_PDEATHSIG = 1
TICK = 0.1
"""Seconds after which it is looked whether it has ended: a process of its that is stuck keeps its pipes."""


@dataclass(frozen=True, slots=True)
class GpuOfTorch:
    """A GPU as the child's torch numbers it."""

    index: int
    name: str
    uuid: str
    pci: str


@dataclass(frozen=True, slots=True)
class ChildWork:
    """What the child has found."""

    results: tuple[WorkResult, ...] = ()
    torch: str = ""
    torch_cuda: str = ""
    gpus: tuple[GpuOfTorch, ...] = ()
    problem: str = ""
    """Why there is nothing, or not all."""


def run_work(python: str, kind: str, seconds: float, options: Sequence[str] = ()) -> ChildWork:
    """Do the work within so many seconds; never raises for what the child does.

    `python` is the ranks' interpreter, empty for this one.
    """
    python = python or sys.executable
    begin = time.monotonic()
    words = ("--kind", kind, "--seconds", f"{seconds:.2f}", "--begin", repr(begin), *options)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        child = subprocess.Popen(
            (python, "-P", "-c", BOOT, str(PACKAGES), *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environ,
            start_new_session=True,
            preexec_fn=be_killed_with_parent,  # noqa: PLW1509 - no other thread runs here
        )
    except OSError as error:
        return ChildWork(problem=f"{python} cannot be run ({error.strerror})")
    try:
        out, err = read_output(child, begin + seconds)
    finally:
        end_child(child)
    return describe_child_end(parse_output(out), child, python, err)


def be_killed_with_parent() -> None:
    """Have the kernel kill this process if its parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_output(child: "subprocess.Popen[bytes]", deadline: float) -> tuple[bytes, bytes]:
    """Return stdout, and the end of stderr, once the child has ended or the deadline is over."""
    found: dict[str, bytearray] = {"out": bytearray(), "err": bytearray()}
    with selectors.DefaultSelector() as selector:
        for name, pipe in (("out", child.stdout), ("err", child.stderr)):
            if pipe:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, name)
        while time.monotonic() < deadline:
            has_ended = child.poll() is not None
            ready = selector.select(0 if has_ended else TICK)
            data = {key.data: os.read(key.fd, 1 << 16) for key, _ in ready}
            for name, part in data.items():
                found[name] += part
            del found["err"][:-KEPT], found["out"][MOST:]
            for key, _ in ready:
                if not data[key.data]:
                    selector.unregister(key.fileobj)
            if not selector.get_map() or (has_ended and not any(data.values())):
                break
    return bytes(found["out"]), bytes(found["err"])


def end_child(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child and its processes; one that the kernel keeps in a driver is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    for pipe in (child.stdout, child.stderr):
        if pipe:
            pipe.close()


def parse_output(data: bytes) -> ChildWork:
    """Read the child's lines; what is none of them is left out."""
    results: list[WorkResult] = []
    known: dict[str, str] = {"torch": "", "torch_cuda": ""}
    gpus: tuple[GpuOfTorch, ...] = ()
    for line in data.split(b"\n"):
        with contextlib.suppress(DecodeError):
            value = parse_json(line) if line.startswith(b"{") else None
            if not isinstance(value, dict):
                continue
            if "measure" in value:
                results.append(convert(WorkResult, value))
            elif "gpus" in value:
                gpus = convert(tuple[GpuOfTorch, ...], value["gpus"])
            else:
                known |= {key: convert(str, value[key]) for key in known if key in value}
    return ChildWork(tuple(results), known["torch"], known["torch_cuda"], gpus)


def describe_child_end(
    work: ChildWork, child: "subprocess.Popen[bytes]", python: str, err: bytes
) -> ChildWork:
    """Add why the child did not do all of its work."""
    code = child.returncode
    if code == 0:
        return work
    lines = err.decode(errors="replace").strip().splitlines()
    last = f": {escape_text(lines[-1], 300)}" if lines else ""
    if code == NO_TORCH and not work.torch:
        problem = f"{python} has no torch"
    elif code in (None, -signal.SIGKILL):
        problem = f"it did not end in time{last}"
    else:
        problem = f"it ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}{last}"
    return replace(work, problem=problem)
