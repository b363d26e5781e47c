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
LIBRARIES = ("torch/lib/lib*.so*", "torch/_C*.so", "nvidia/*/lib/lib*.so.*")
BEGINNING = 64 << 20
"""Bytes that are read of a library. Symbols and relocations come first, 17 MiB of libtorch_cpu.so."""
SAMPLE = 16 << 20
"""Bytes by which the largest library is judged to be cached."""
CHUNK = 1 << 20
"""Bytes of one read."""
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
    from launcher.launch.warm.program_text import read_program

    if mode == "off" or (mode == "auto" and (text := read_program(argv, environ)) and not text.uses_torch):
        return None
    first = argv[0] if argv and os.path.basename(argv[0]).startswith("python") else sys.executable
    prefix = Path(shutil.which(first, path=environ.get("PATH")) or sys.executable).absolute().parents[1]
    packages = sorted(glob.glob(f"{glob.escape(str(prefix))}/lib/python3*/*-packages"))
    folders = [*environ.get("PYTHONPATH", "").split(os.pathsep), *packages]
    folder = next((folder for folder in folders if os.path.isfile(f"{folder}/{LARGEST_LIBRARY}")), "")
    if not folder or (mode == "auto" and _is_cached(f"{folder}/{LARGEST_LIBRARY}")):
        return None
    command, null = (sys.executable, "-I", "-S", __file__, folder), subprocess.DEVNULL
    with contextlib.suppress(OSError):
        return Reader(command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)
    return None


def _is_cached(path: str) -> bool:
    """Tell whether a library's beginning is in the page cache, by reads that do not wait.

    Network filesystems have none: what is read again then is read from memory.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for offset in range(0, SAMPLE, SAMPLE // 8):
            os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
        return True
    return False


def main(folder: str) -> None:
    """Read the beginnings of torch's libraries, and its package's bytecode with what an import looks at."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Thread

    os.nice(5)  # the ranks come first
    Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    folder = glob.escape(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        for pattern in LIBRARIES:
            for path in glob.glob(f"{folder}/{pattern}"):
                for offset in range(0, min(BEGINNING, os.path.getsize(path)), CHUNK):
                    pool.submit(_read, path, offset)
        for path in glob.iglob(f"{folder}/torch/**/*.py*", recursive=True):
            pool.submit(_read, path, 0)


def _read(path: str, offset: int) -> None:
    """Read a part of a file; of a source, an import asks for its time and size alone."""
    if path.endswith(".py"):
        os.stat(path)
        return
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        file.read(CHUNK)


if __name__ == "__main__":
    main(sys.argv[1])
