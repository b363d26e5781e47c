"""Brings torch's files into the page cache on a cold disk, several at a time, while a start goes on.

`python -I -S read_ahead.py FOLDER` is the process that reads. It ends with its stdin, whose other end the
launcher holds.
"""

import contextlib
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

LARGEST_LIBRARY = "torch/lib/libtorch_cpu.so"
READ = ("torch/lib/lib*.so*", "torch/_C*.so", "nvidia/*/lib/lib*.so.*", "torch/**/*.py*")
"""The libraries come first."""
BEGINNING = 64 << 20
"""Bytes that are read of a file. Symbols and relocations come first, 17 MiB of libtorch_cpu.so."""
CHUNK = 1 << 20
THREADS = 16
"""Reads at the same time: a network filesystem answers many as fast as one."""
Reader = subprocess.Popen[bytes]


@contextlib.contextmanager
def reading_ahead(
    mode: str, argv: Sequence[str], environ: Mapping[str, str], early: Reader | None = None
) -> Iterator[Sequence[int]]:
    """Have torch's files read ahead while this lasts, if need be; gives the PID of the process that reads.

    `early` was started for the same program already.
    """
    reader = early or start_read_ahead(mode, argv, environ)
    with reader or contextlib.nullcontext():  # it ends as its stdin is closed
        yield (reader.pid,) if reader else ()


def start_read_ahead(mode: str, argv: Sequence[str], environ: Mapping[str, str]) -> Reader | None:
    """Have torch's files read that are not in the page cache; returns the process, and at once.

    `mode` is `start.read_ahead`: `auto` reads nothing if the largest library is cached, or if the program
    does not use torch. What fails here ends no start: then nothing is read ahead.
    """
    from launcher.launch.warm.program import read_program

    if mode == "off" or (mode == "auto" and (text := read_program(argv, environ)) and not text.uses_torch):
        return None
    first = argv[0] if argv and os.path.basename(argv[0]).startswith("python") else sys.executable
    prefix = Path(shutil.which(first, path=environ.get("PATH")) or sys.executable).absolute().parents[1]
    packages = sorted(glob.glob(f"{glob.escape(str(prefix))}/lib/python3*/*-packages"))
    folders = [*environ.get("PYTHONPATH", "").split(os.pathsep), *packages]
    folder = next((folder for folder in folders if os.path.isfile(f"{folder}/{LARGEST_LIBRARY}")), "")
    if not folder:
        return None
    with contextlib.suppress(OSError):
        if mode == "auto":
            with contextlib.suppress(OSError), open(f"{folder}/{LARGEST_LIBRARY}", "rb") as file:
                for offset in range(0, 16 << 20, 2 << 20):  # reads that do not wait
                    os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
                return None
        command, null = (sys.executable, "-I", "-S", __file__, folder), subprocess.DEVNULL
        return Reader(command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)
    return None


def main(folder: str) -> None:
    """Read the beginnings of torch's libraries, and its package's bytecode with what an import looks at."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Thread

    os.nice(5)  # the ranks come first
    Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    with ThreadPoolExecutor(THREADS) as pool:
        for pattern in READ:
            for path in glob.iglob(f"{glob.escape(folder)}/{pattern}", recursive=True):
                for offset in range(0, min(BEGINNING, os.path.getsize(path)), CHUNK):
                    pool.submit(_read, path, offset)


def _read(path: str, offset: int) -> None:
    """Read a part of a file."""
    if path.endswith(".py"):  # of a source, an import asks for its time and size alone
        os.stat(path)
    else:
        with open(path, "rb", buffering=0) as file:
            os.pread(file.fileno(), CHUNK, offset)


if __name__ == "__main__":
    main(sys.argv[1])
