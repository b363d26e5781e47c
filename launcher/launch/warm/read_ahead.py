"""Brings torch's files into the page cache on a cold disk, many at a time, while a start goes on."""

import contextlib
import glob
import os
import sys
from collections.abc import Mapping, Sequence
from threading import Thread

from launcher.launch.warm.program import read_program

LARGEST_LIBRARY = "torch/lib/libtorch_cpu.so"
READ = ("torch/lib/lib*.so*", "torch/_C*.so", "nvidia/*/lib/lib*.so.*", "torch/**/*.py*")
"""The libraries come first."""
BEGINNING = 64 << 20
"""Bytes that are read of a file. Symbols and relocations come first, 17 MiB of libtorch_cpu.so."""
CHUNK = 1 << 20
THREADS = 16
"""Reads at the same time: a network filesystem answers many as fast as one."""


def read_ahead(mode: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have torch's files read that are not in the page cache, by threads; returns at once.

    `mode` is `start.read_ahead`: `auto` reads for a program of this interpreter that uses torch, and nothing
    if the largest library is cached. What fails here ends no start: then nothing is read ahead.
    """
    if mode == "off" or (mode == "auto" and not ((text := read_program(argv, environ)) and text.uses_torch)):
        return
    folders = [*environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    folder = next((folder for folder in folders if os.path.isfile(f"{folder}/{LARGEST_LIBRARY}")), "")
    with contextlib.suppress(OSError):
        if folder and mode == "auto":
            with open(f"{folder}/{LARGEST_LIBRARY}", "rb") as file:
                for offset in range(0, 16 << 20, 2 << 20):  # reads that do not wait
                    os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
            return
    if folder:
        Thread(target=_read_folder, args=(folder,), daemon=True).start()


def _read_folder(folder: str) -> None:
    """Read the beginnings of torch's libraries, and its package's bytecode with what an import looks at."""
    parts = []
    for pattern in READ:
        for path in glob.iglob(f"{glob.escape(folder)}/{pattern}", recursive=True):
            with contextlib.suppress(OSError):
                size = min(BEGINNING, os.path.getsize(path))
                # Of a source, an import asks for its time and size alone.
                parts += [(path, offset) for offset in range(0, size, CHUNK) if not path.endswith(".py")]

    def read_parts(number: int) -> None:
        for path, offset in parts[number::THREADS]:
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                os.pread(file.fileno(), CHUNK, offset)

    for number in range(THREADS):
        Thread(target=read_parts, args=(number,), daemon=True).start()
