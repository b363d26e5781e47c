"""How long a way of starting a program takes until the program's first instruction."""

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
MARK = struct.Struct("@q")


def compile_program(name: str, folder: Path) -> Path:
    """Compile one of the C programs here, statically where there is a static C library."""
    program = folder / name.removesuffix(".c").replace("_", "-")
    command = ["cc", "-O2", "-o", str(program), str(HERE / name)]
    if subprocess.run([*command, "-static"], capture_output=True, check=False).returncode:
        subprocess.run(command, check=True)
    return program


def time_first(command: Sequence[str], environ: Mapping[str, str], ranks: int = 1) -> float:
    """Milliseconds from before the first rank's start to the first instruction of the last rank's program.

    Each rank runs `command`, which ends up as the compiled first.c; raises RuntimeError where one does not.
    """
    reading, writing = os.pipe()
    start = time.monotonic_ns()
    processes = [start_rank(command, environ, (rank, ranks), writing) for rank in range(ranks)]
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        marks = [int(mark) for (mark,) in MARK.iter_unpack(stream.read())]
    codes = [process.wait() for process in processes]
    if any(codes) or len(marks) != ranks:
        raise RuntimeError(f"{command} ended with {codes} and {len(marks)} marks")
    return (max(marks) - start) / 1e6


def start_rank(
    command: Sequence[str], environ: Mapping[str, str], place: tuple[int, int], output: int
) -> subprocess.Popen[bytes]:
    """Start one rank with torchrun's variables; `place` is its rank and the number of ranks."""
    rank, ranks = map(str, place)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return subprocess.Popen(command, env={**environ, **names}, stdout=output, stderr=subprocess.DEVNULL)


def find_missing(*tools: str) -> str:
    """Which of some programs this machine lacks, as a row of a table says it; empty where none."""
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    return f"not measured, {', '.join(lacking)} is not installed here" if lacking else ""
