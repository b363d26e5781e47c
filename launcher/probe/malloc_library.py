"""Finds the library of a malloc on this node, as the dynamic linker would load it."""

import os
import sys
from collections.abc import Iterator, Mapping

SONAMES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so"),
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so"),
}
"""Names of the files, those that a run-time package has first."""
CONFIGURATION = "/etc/ld.so.conf.d"
USUAL = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib", "/usr/local/lib64")
KIND = (slice(0, 6), slice(18, 20))
"""Where an ELF header has the magic number with class and byte order, and the machine: elf(5)."""


def locate_malloc(word: str, environ: Mapping[str, str], root: str) -> str | None:
    """Return the path of the library for `allocator.host` on this node, empty if it has none.

    None for the system's malloc, and for another machine (`root`), whose files are not here.
    """
    return None if word == "system" or root != "/" else find_malloc_library(word, environ)


def find_malloc_library(word: str, environ: Mapping[str, str]) -> str:
    """Return the path of `tcmalloc` or `jemalloc`; empty if it is not there, or for another word.

    LD_PRELOAD separates paths by blanks and colons, so a path with one is of no use.
    """
    kind = read_elf_kind("/proc/self/exe")
    for folder in list_library_folders(environ):
        for name in SONAMES.get(word, ()):
            path = os.path.join(folder, name)
            if kind and read_elf_kind(path) == kind and not set(path) & set(" :\t\n"):
                return path
    return ""


def list_library_folders(environ: Mapping[str, str]) -> Iterator[str]:
    """Folders that may hold it, the nearest to the user first; no relative ones."""
    if prefix := environ.get("CONDA_PREFIX"):
        yield f"{prefix}/lib"
    yield from (f"{prefix}/lib" for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)))
    user_folders = environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":")
    yield from (folder for folder in user_folders if folder.startswith("/"))
    yield from list_configured()
    multiarch = getattr(sys.implementation, "_multiarch", "")
    yield from (f"{folder}/{multiarch}" for folder in ("/lib", "/usr/lib") if multiarch)
    yield from USUAL


def list_configured() -> Iterator[str]:
    """Folders of ld.so.conf(5), without those that it includes from elsewhere."""
    try:
        names = sorted(os.listdir(CONFIGURATION))
    except OSError:
        return
    for name in names:
        try:
            with open(f"{CONFIGURATION}/{name}", errors="replace") as file:
                lines = file.read(1 << 16).splitlines()
        except OSError:
            continue
        yield from (line.strip() for line in lines if line.startswith("/"))


def read_elf_kind(path: str) -> tuple[bytes, ...]:
    """Word length, byte order and machine of an ELF file; empty if it is none that can be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ()
    try:
        header = os.read(handle, 20)
    except OSError:
        return ()
    finally:
        os.close(handle)
    return tuple(header[part] for part in KIND) if len(header) == 20 and header[:4] == b"\x7fELF" else ()
