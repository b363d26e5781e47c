"""Brings torch's files into the page cache on a cold disk, several at a time, while a start goes on.

`python -I -S read_ahead.py FOLDER` is the process that reads. It ends with its stdin, whose other end the
launcher holds.
"""

import contextlib
import ctypes
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON = re.compile(r"(python|pypy)[0-9.]*")
LARGEST_LIBRARY = "torch/lib/libtorch_cpu.so"
BEGINNING = 64 << 20
"""Bytes that are read of a library. Symbols and relocations come first, 17 MiB of libtorch_cpu.so."""
SAMPLE = 16 << 20
"""Bytes by which the largest library is judged to be cached."""
CHUNK = 1 << 20
"""Bytes of one read."""
CACHESTAT = 451
"""Number of the system call on all architectures."""
LIBRARIES = ("torch/lib/lib*.so*", "torch/_C*.so", "nvidia/*/lib/lib*.so.*")
THREADS = 16
"""Reads at the same time: a network filesystem answers many as fast as one."""


@dataclass(slots=True)
class ReadAhead:
    """The process that reads ahead, if there is need for one."""

    process: "subprocess.Popen[bytes] | None" = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process, which is no rank's."""
        return (self.process.pid,) if self.process else ()

    def close(self) -> None:
        """End the process if it still reads."""
        process, self.process = self.process, None
        if process:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def reading_ahead(
    mode: str, argv: Sequence[str], environ: Mapping[str, str], early: ReadAhead | None = None
) -> Iterator[ReadAhead]:
    """Have torch's files read ahead while this lasts, if need be; see `start_read_ahead`.

    `early` was started for the same program already.
    """
    if early and mode == "off":
        early.close()
    reader = early or start_read_ahead(mode, argv, environ)
    try:
        yield reader
    finally:
        reader.close()


def start_read_ahead(mode: str, argv: Sequence[str], environ: Mapping[str, str]) -> ReadAhead:
    """Have torch's files read that are not in the page cache; returns at once.

    `mode` is `start.read_ahead`: `auto` reads nothing if the largest library is cached, or if the program
    does not use torch. What fails here ends no start: then nothing is read ahead.
    """
    from launcher.agent.torch_use import is_without_torch

    if mode == "off" or (mode == "auto" and is_without_torch(tuple(argv), environ)):
        return ReadAhead()
    folder = _find_torch(find_program_python(argv, environ), environ)
    if not folder or (mode == "auto" and _is_cached(f"{folder}/{LARGEST_LIBRARY}")):
        return ReadAhead()
    command = (sys.executable, "-I", "-S", __file__, folder)
    with contextlib.suppress(OSError):
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=pipe, stdout=null, stderr=null, start_new_session=True)
        return ReadAhead(process)
    return ReadAhead()


def find_program_python(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the path of the interpreter that a program runs in, as far as its argv tells, else this one.

    Links stay: a virtual environment's interpreter is one.
    """
    first = argv[0] if argv else ""
    if first == "-m" or first.endswith(".py"):
        first = environ.get("PYTHON_EXEC", "")
    elif not PYTHON.fullmatch(Path(first).name):
        first = ""
    return (shutil.which(first, path=environ.get("PATH")) or sys.executable) if first else sys.executable


def _find_torch(python: str, environ: Mapping[str, str]) -> str:
    """Return the folder that has the package torch: one of PYTHONPATH, or `site-packages`; empty without."""
    packages = f"{glob.escape(str(Path(python).absolute().parents[1]))}/lib/python3*/*-packages"
    folders = [*environ.get("PYTHONPATH", "").split(os.pathsep), *sorted(glob.glob(packages))]
    return next((folder for folder in folders if os.path.isfile(f"{folder}/{LARGEST_LIBRARY}")), "")


def _is_cached(path: str) -> bool:
    """Tell whether most of a library's beginning is in the page cache; false if the kernel does not tell.

    cachestat(2) tells it of every filesystem, since Linux 6.5, and preadv2 with RWF_NOWAIT of local disks.
    """
    part, found = (ctypes.c_uint64 * 2)(0, SAMPLE), (ctypes.c_uint64 * 5)()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None).syscall(CACHESTAT, descriptor, part, found, 0) == 0:
            return found[0] * os.sysconf("SC_PAGE_SIZE") >= 0.9 * min(SAMPLE, os.fstat(descriptor).st_size)
        for offset in range(0, SAMPLE, SAMPLE // 8):
            os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


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
