"""What a composed configuration depends on, as one digest; None if it may depend on more than that."""

import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from launcher.config.search_path import Sources, find_shipped
from launcher.config.sweep_mode import mentions_hydra
from launcher.files import read_file
from launcher.runs.secrets import mask_words

MOST_ENTRIES = 2000
"""Files and folders of a search path; a larger one is composed each time."""
MOST_BYTES = 2 << 20
"""Of all files of a search path together."""
MOST_LEVELS = 8
"""Of folders in folders; links may lead in circles."""
RESOLVER = re.compile(rb"\$\{[^{}]*:")
"""An interpolation that calls something: `${oc.env:HOME}`, `${now:%H}`."""
ESCAPE = re.compile(rb"\\[xuU0-9]")
"""A character written by its number in YAML, which may stand for `$` or a letter of `hydra`."""
PACKAGES = ("hydra", "omegaconf", "yaml", "hydra_plugins")
"""What composes; the last is the namespace package that Hydra takes plugins from."""


class UncacheableError(Exception):
    """A composition that may depend on more than its files and words; the text says why."""


def make_key(sources: Sources, overrides: Sequence[str]) -> str:
    """Return the digest of all that a composition by these overrides depends on, as hexadecimal digits.

    That is: the words, the working directory, names and content of all configuration files of the search
    path, chosen or not, its folders, Hydra's plugins, and the versions of Python, Hydra, OmegaConf and
    launch. Raises UncacheableError.
    """
    check_cacheable_words(overrides)
    parts: list[object] = [sys.version, os.getcwd(), sources.primary, list(overrides)]  # noqa: PTH109
    parts += [describe_code(), [str(folder) for folder in sources.folders]]
    digest = hashlib.sha256(json.dumps(parts).encode())
    shipped = find_shipped()
    entries = size = 0
    for folder in sources.folders:
        for name, content in list_tree(str(folder), ""):
            entries, size = entries + 1, size + len(content or b"")
            if entries > MOST_ENTRIES or size > MOST_BYTES:
                raise UncacheableError(f"{folder} has too many files")
            if folder != shipped:
                check_own_content(name, content)
            digest.update(json.dumps([name, None if content is None else len(content)]).encode())
            digest.update(content or b"")
    return digest.hexdigest()


def check_cacheable_words(words: Sequence[str]) -> None:
    """Raise UncacheableError for words that use Hydra's settings, call a resolver, or hold a secret."""
    if mentions_hydra(words):
        raise UncacheableError("a word is of Hydra's settings")
    if any("${" in word and ":" in word for word in words):
        raise UncacheableError("a word may call a resolver")
    if mask_words(words) != list(words):
        raise UncacheableError("a word holds a secret")


def check_own_content(name: str, content: bytes | None) -> None:
    """Raise UncacheableError for a file of the user's that may change Hydra or call a resolver."""
    if "hydra" in name:
        raise UncacheableError(f"{name} is of Hydra's settings")
    if content is None:
        return
    if b"hydra" in content or ESCAPE.search(content):
        raise UncacheableError(f"{name} may be of Hydra's settings")
    if RESOLVER.search(content):
        raise UncacheableError(f"{name} may call a resolver")


def list_tree(folder: str, above: str, level: int = 0) -> Iterator[tuple[str, bytes | None]]:
    """Give the name and content of each configuration file, and of each folder None, in a fixed order.

    Raises UncacheableError for what cannot be read.
    """
    if level > MOST_LEVELS:
        raise UncacheableError(f"{folder} has too many levels")
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            name = f"{above}{entry.name}"
            if entry.is_dir():
                yield f"{name}/", None
                yield from list_tree(entry.path, f"{name}/", level + 1)
            elif name.endswith((".yaml", ".yml")):
                yield name, read_file(entry.path, MOST_BYTES, follow=True)
    except OSError as error:
        raise UncacheableError(f"{folder}: {error}") from None


def describe_code() -> list[object]:
    """Return what tells one version of the code that composes from another."""
    here = str(Path(__file__).parent)
    return [here, stat_files(here), *map(describe_package, PACKAGES)]


def describe_package(name: str) -> object:
    """Return where a package is, and how its folders stand; raises UncacheableError if it is nowhere."""
    spec = find_spec(name)
    if spec is None:
        raise UncacheableError(f"there is no package {name}")
    return [[folder, stat_files(folder)] for folder in spec.submodule_search_locations or ()]


def stat_files(folder: str) -> list[tuple[str, int, int, int]]:
    """Return name, size, time of change and inode of what is in a folder; raises UncacheableError."""
    try:
        with os.scandir(folder) as found:
            return sorted(
                (entry.name, 0 if stat.S_ISDIR(it.st_mode) else it.st_size, it.st_mtime_ns, it.st_ino)
                for entry in found
                if entry.name != "__pycache__"
                for it in (entry.stat(),)
            )
    except OSError as error:
        raise UncacheableError(f"{folder}: {error}") from None
