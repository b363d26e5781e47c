"""Compositions kept for the next command line of the same words and files, so that Hydra is not loaded.

They say what is run: what another user could have put there is not read (`cache_folder`). Whatever goes wrong
is as if there was no cache.
"""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence

from launcher.config.cache_folder import open_cache_folder
from launcher.config.composed import Composed
from launcher.config.composition_key import UncacheableError, make_key
from launcher.config.overrides import read_key
from launcher.config.search_path import Sources
from launcher.config.stored_values import StoredValues, parse_composition, render_composition
from launcher.decode import DecodeError
from launcher.files import read_file, remove, write_whole

logger = logging.getLogger(__name__)

ENDING = ".config.json"
LARGEST_ENTRY = 1 << 20
MOST_ENTRIES = 200
"""Compositions that are kept, the newest first."""
DRAFT_SECONDS = 3600.0
MOST_SECONDS = 30 * 86400.0
"""Age at which one is composed anew."""


def compose_cached(sources: Sources, overrides: Sequence[str], environ: Mapping[str, str]) -> Composed:
    """Return what `compose` returns, from the cache if it is there; raises UsageError."""
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
    try:
        cache = open_cache_folder(environ)
    except OSError as error:
        raise UncacheableError(str(error)) from None
    try:
        if not is_private(os.fstat(cache)):
            raise UncacheableError("the folder is not this user's alone")
        yield cache
    finally:
        os.close(cache)


def is_private(status: os.stat_result) -> bool:
    """Tell whether a file is this user's, not even root's, and others may neither read nor write it."""
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def load_composition(cache: int, key: str, sources: Sources, overrides: Sequence[str]) -> Composed | None:
    """Return a composition that is kept; None if there is none, or it is too old or no longer whole."""
    try:
        status = os.stat(f"{key}{ENDING}", dir_fd=cache, follow_symlinks=False)
        if not is_private(status) or not 0 <= time.time() - status.st_mtime < MOST_SECONDS:
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
