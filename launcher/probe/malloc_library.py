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


def locate_malloc(word: str, environ: Mapping[str, str], root: str) -> str | None:
    """Return the path of the library for `allocator.host` on this node, empty if it has none.

    None for the system's malloc, and for another machine (`root`), whose files are not here.
    LD_PRELOAD separates paths by blanks and colons, so a path with one is of no use.
    """
    if word == "system" or root != "/":
        return None
    kind = _read_elf_kind("/proc/self/exe")
    for folder in _list_folders(environ):
        for name in SONAMES.get(word, ()):
            path = os.path.join(folder, name)
            if kind and _read_elf_kind(path) == kind and not set(path) & set(" :\t\n"):
                return path
    return ""


def _list_folders(environ: Mapping[str, str]) -> Iterator[str]:
    """Folders that may hold it, the nearest to the user first; no relative ones.

    Of ld.so.conf(5) those in /etc/ld.so.conf.d, without what it includes from elsewhere.
    """
    prefixes = (environ.get("CONDA_PREFIX"), sys.prefix, sys.base_prefix)
    yield from (f"{prefix}/lib" for prefix in dict.fromkeys(prefixes) if prefix)
    folders = environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":")
    try:
        names = sorted(os.listdir(CONFIGURATION))
    except OSError:
        names = []
    for name in names:
        try:
            with open(f"{CONFIGURATION}/{name}", errors="replace") as file:
                folders += file.read(1 << 16).splitlines()
        except OSError:
            continue
    yield from (folder.strip() for folder in folders if folder.startswith("/"))
    multiarch = getattr(sys.implementation, "_multiarch", "")
    yield from (f"{folder}/{multiarch}" for folder in ("/lib", "/usr/lib") if multiarch)
    yield from USUAL


def _read_elf_kind(path: str) -> bytes:
    """Word length, byte order and machine of an ELF file (elf(5)); empty if it is none that can be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        header = os.read(handle, 20)
    except OSError:
        return b""
    finally:
        os.close(handle)
    return header[4:6] + header[18:] if len(header) == 20 and header.startswith(b"\x7fELF") else b""
