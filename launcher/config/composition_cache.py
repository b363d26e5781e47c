"""Compositions kept for the next command line of the same words and files, so that Hydra is not loaded.

They are in `$XDG_CACHE_HOME/launch`, else `~/.cache/launch`, a folder of this user's alone. They say what is
run: what another user could have put there is not read. Whatever goes wrong is as if there was no cache.
"""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from errno import ENOENT, EPERM
from pathlib import Path

from launcher.config.composed import Composed
from launcher.config.composition_key import UncacheableError, make_key
from launcher.config.overrides import read_key
from launcher.config.search_path import Sources
from launcher.config.stored_values import StoredValues, parse_composition, render_composition
from launcher.decode import DecodeError
from launcher.files import DIRECTORY, make_inner, read_file, remove, write_whole
from launcher.protocol import LAUNCH_CACHE

logger = logging.getLogger(__name__)

FOLDER = "launch"
ENDING = ".config.json"
LARGEST_ENTRY = 1 << 20
MOST_ENTRIES = 200
"""Compositions that are kept, the newest first."""
DRAFT_SECONDS = 3600.0
MOST_SECONDS = 30 * 86400.0
"""Age at which one is composed anew."""


def compose_cached(sources: Sources, overrides: Sequence[str], environ: Mapping[str, str]) -> Composed:
    """Return what `compose` returns, from the cache if it is there; raises UsageError.

    `LAUNCH_CACHE=off` is the switch; `LAUNCH_CACHE=DIR` is another folder.
    """
    try:
        with open_cache(environ) as cache:
            key = make_key(sources, overrides)
            if (found := load_composition(cache, key, sources, overrides)) is not None:
                return found
            composed = compose_anew(sources, overrides)
            if make_key(sources, overrides) == key:  # nothing has changed meanwhile
                store_composition(cache, key, composed)
            return composed
    except UncacheableError as error:
        logger.debug(f"the configuration is not cached: {error}")
    return compose_anew(sources, overrides)


def compose_anew(sources: Sources, overrides: Sequence[str]) -> Composed:
    """Compose by Hydra, which takes a quarter of a second."""
    from launcher.config.composition import compose

    return compose(sources, overrides)


@contextlib.contextmanager
def open_cache(environ: Mapping[str, str]) -> Iterator[int]:
    """Give the cache's folder, open, made if it is missing; raises UncacheableError if there can be none."""
    if environ.get(LAUNCH_CACHE) == "off":
        raise UncacheableError(f"{LAUNCH_CACHE}=off")
    try:
        cache = open_folder(environ)
    except OSError as error:
        raise UncacheableError(str(error)) from None
    try:
        yield cache
    finally:
        os.close(cache)


def open_folder(environ: Mapping[str, str]) -> int:
    """Open the cache's folder, made if it is missing; raises OSError."""
    path = name_folder(environ)
    outer = os.open(path.parent, DIRECTORY)
    try:
        check_owner(os.fstat(outer), str(path.parent))
        cache = make_inner(outer, path.name)
    finally:
        os.close(outer)
    try:
        check_private(os.fstat(cache), str(path))
    except PermissionError:
        os.close(cache)
        raise
    return cache


def name_folder(environ: Mapping[str, str]) -> Path:
    """Return where the cache is; the folder above it is made if it is ~/.cache. Raises OSError."""
    if given := environ.get(LAUNCH_CACHE):
        return Path(given).absolute()
    above = environ.get("XDG_CACHE_HOME", "")
    if above.startswith("/"):  # the specification has relative ones ignored
        return Path(above) / FOLDER
    home = environ.get("HOME", "")
    if not home.startswith("/"):
        raise FileNotFoundError(ENOENT, "no folder for caches: HOME is not set")
    caches = Path(home) / ".cache"
    if not caches.is_dir():
        check_owner(Path(home).stat(), home)
        caches.mkdir(mode=0o700)
    return caches / FOLDER


def check_private(status: os.stat_result, name: str) -> None:
    """Raise PermissionError for what is another user's, even root's, or what others may read or write."""
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(EPERM, "not this user's alone", name)


def check_owner(status: os.stat_result, name: str) -> None:
    """Raise PermissionError for another user's folder: `sudo` may have kept HOME."""
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(EPERM, "another user's", name)


def load_composition(cache: int, key: str, sources: Sources, overrides: Sequence[str]) -> Composed | None:
    """Return a composition that is kept; None if there is none, or it is too old or no longer whole."""
    try:
        status = os.stat(f"{key}{ENDING}", dir_fd=cache, follow_symlinks=False)
        check_private(status, key)
        if not 0 <= time.time() - status.st_mtime < MOST_SECONDS:
            return None
        stored = parse_composition(read_file(f"{key}{ENDING}", LARGEST_ENTRY, at=cache))
    except (OSError, DecodeError) as error:
        logger.debug(f"no cached configuration: {error}")
        return None
    return Composed(
        values=StoredValues(stored, lambda: compose_anew(sources, overrides)),
        choices=stored.choices,
        warnings=(),
        sources=sources,
        given=frozenset(map(read_key, overrides)),
        own_files=tuple(stored.own_files),
    )


def store_composition(cache: int, key: str, composed: Composed) -> None:
    """Keep a composition if it depends on nothing but its key, and remove old ones."""
    text = render_composition(composed)
    if text is None or len(text) > LARGEST_ENTRY:
        return
    try:
        remove_old(cache)
        write_whole(cache, f"{key}{ENDING}", text.encode())
    except OSError as error:
        logger.debug(f"the configuration is not cached: {error}")


def remove_old(cache: int) -> None:
    """Remove compositions that are too old, and the oldest if there are many."""
    kept = []
    for name in os.listdir(cache):
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=cache, follow_symlinks=False).st_mtime
            is_draft = name.startswith(".launch-")  # left by a writer that was killed
            if (name.endswith(ENDING) and age > MOST_SECONDS) or (is_draft and age > DRAFT_SECONDS):
                os.unlink(name, dir_fd=cache)
            elif name.endswith(ENDING):
                kept.append((age, name))
    for _, name in sorted(kept)[MOST_ENTRIES - 1 :]:
        remove(cache, name)
