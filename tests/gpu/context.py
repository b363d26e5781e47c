"""What a step is given, and how it starts programs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.gpu.records import Recorder

PROGRAMS = Path(__file__).parent / "programs"
NEEDED = "needs a GPU"
"""Why most things are left out with `--cpu`."""
SHOWN = 20_000
"""Characters of a program's output, from its end, that go to the log."""
PATIENCE = 90
"""Seconds that a run may take."""
AT_ONCE = min(8, len(os.sched_getaffinity(0)))
"""Processes that start CUDA at the same time."""
GRACE = 15
"""Seconds that a program has to end after SIGTERM; `launch` needs some to end its ranks."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Context:
    """What a step is given."""

    record: Recorder
    cpu: bool
    """There is to be no GPU."""
    folder: Path
    """An empty folder of the step's own, its working directory."""
    output: Path
    """Folder whose files are kept."""

    def launch(self, name: str, *words: str, environ: Mapping[str, str] | None = None) -> "Ended":
        """Run `launch WORDS` in a folder of its own, the run directory being `NAME/run`."""
        command = [sys.executable, "-m", "launcher", "new_run_dir=run", *words]
        return run_program(command, self.folder / name, PATIENCE, environ)

    def verb(self, name: str, *words: str, limit: float = 60) -> "Ended":
        """Run `launch VERB …`, which has no run directory, in a folder of its own."""
        return run_program([sys.executable, "-m", "launcher", *words], self.folder / name, limit)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    code: int
    out: str
    err: str
    seconds: float
    folder: Path

    def read_rank(self, stream: str = "out") -> str:
        """What rank 0 printed, as the run directory has it."""
        return (self.folder / "run/logs/0" / f"rank-0.{stream}").read_text(errors="replace")

    def demand(self, code: int = 0) -> "Ended":
        """Raise RuntimeError where the program ended otherwise than with `code`."""
        if self.code != code:
            lines = (self.err.strip() or self.out.strip()).splitlines()
            raise RuntimeError(f"{self.folder.name} ended with {self.code}: {' | '.join(lines[-3:])[-600:]}")
        return self


def run_program(
    command: Sequence[str], folder: Path, limit: float, environ: Mapping[str, str] | None = None
) -> Ended:
    """Run a program in a folder, its output in files there; raises TimeoutError after `limit` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    began, late = time.monotonic(), False
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
            end_process(process)
    said, complained = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    ended = Ended(process.returncode, said, complained, time.monotonic() - began, folder)
    show(command, ended)
    if late:
        raise TimeoutError(f"{folder.name} ran over {limit:.0f} s")
    return ended


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """End a process: SIGTERM, and SIGKILL if it does not heed that."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def show(command: Sequence[str], ended: Ended) -> None:
    """Print how a program ended, in one piece: others may run at the same time."""
    texts = [
        f"--- {name}\n{text[-SHOWN:].rstrip()}\n" for name, text in (("out", ended.out), ("err", ended.err))
    ]
    title = (
        f"\n=== {ended.folder.name}: exit code {ended.code} after {ended.seconds:.1f} s: {' '.join(command)}"
    )
    print(f"{title}\n{''.join(text for text in texts if text.count(chr(10)) > 2)}", flush=True)


def together(
    function: Callable[[Item], Result], items: Iterable[Item], at_once: int = AT_ONCE
) -> list[Result]:
    """Return the function's results for all items, some of them worked on at the same time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(function, items))
