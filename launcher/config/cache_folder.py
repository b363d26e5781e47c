"""The folder for what launch keeps between runs: `$XDG_CACHE_HOME/launch`, else `~/.cache/launch`.

Another user's folder is not used, and nothing is left there: `sudo` may have kept HOME.
"""

import os
from collections.abc import Mapping
from errno import ENOENT
from pathlib import Path

from launcher.files import make_inner, open_own
from launcher.protocol import LAUNCH_CACHE

FOLDER = "launch"


def open_cache_folder(environ: Mapping[str, str]) -> int:
    """Open the folder, made if it is missing; raises OSError.

    `LAUNCH_CACHE=off` is the switch; `LAUNCH_CACHE=DIR` is another folder.
    """
    path = name_cache_folder(environ)
    outer = open_own(path.parent)
    try:
        return make_inner(outer, path.name)
    finally:
        os.close(outer)


def name_cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where the folder is; the one above it is made if that is ~/.cache. Raises OSError."""
    given = environ.get(LAUNCH_CACHE)
    if given == "off":
        raise FileNotFoundError(ENOENT, f"{LAUNCH_CACHE}=off")
    if given:
        return Path(given).absolute()
    above = environ.get("XDG_CACHE_HOME", "")
    if above.startswith("/"):  # the specification has relative ones ignored
        return Path(above) / FOLDER
    home = environ.get("HOME", "")
    if not home.startswith("/"):
        raise FileNotFoundError(ENOENT, "no folder for caches: HOME is not set")
    caches = Path(home) / ".cache"
    if not caches.is_dir():
        os.close(open_own(home))
        caches.mkdir(mode=0o700)
    return caches / FOLDER
