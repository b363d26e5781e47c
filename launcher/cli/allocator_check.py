"""A job's allocators: checked before anything starts, and without what does not go with its program."""

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.config.allocator_options import (
    check_settings,
    depends_on_version,
    doubt_variable,
    read_torch_version,
)
from launcher.config.program import render_program
from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.plan.allocator import (
    EXPANDABLE,
    Conflict,
    describe_idle,
    describe_ignored,
    find_conflicts,
    find_variable,
    merge_settings,
    parse_settings,
    read_settings,
)

logger = logging.getLogger(__name__)

MARKS = ("/.dockerenv", "/run/.containerenv")
"""Files by which docker and podman mark a container."""
SYS_PTRACE = 19
"""Bit of the capability to trace any process: capabilities(7)."""
CHOSEN = ("allocator", f"allocator.{EXPANDABLE}")
"""Keys of a command line that ask for expandable segments by name."""


def settle_allocator(
    config: Settings, words: Sequence[str], environ: Mapping[str, str], given: Collection[str]
) -> tuple[str, ...]:
    """Check the settings, warn of what is doubtful, and return the names of those that are to be left out.

    Expandable segments that nobody asked for by name are left out if the program is known to fail or crawl
    with them, as it would not without us. `given` are the command line's keys. Raises UsageError.
    """
    settings = read_settings(config.allocator)
    torch = find_torch(config, environ) if depends_on_version(list_names(settings, environ)) else None
    merged = merge_settings(settings, environ)
    asked = not {*CHOSEN}.isdisjoint(given) or EXPANDABLE in merge_settings({}, environ)
    wanted = {key: value for key, value in merged.items() if asked or key != EXPANDABLE}
    doubts = [*check_settings(settings, torch), *doubt_variable(environ, torch)]
    for doubt in filter(None, [*doubts, describe_ignored(wanted), describe_idle(merged)]):
        logger.warning(f"{doubt}")
    conflicts = [*find_conflicts(merged, words, environ, contained=is_contained(config))]
    for conflict in conflicts:
        logger.warning(f"{conflict.what}: {describe_way(conflict, asked=asked)}")
    return () if asked or not conflicts else (EXPANDABLE,)


def describe_way(conflict: Conflict, *, asked: bool) -> str:
    """Say what to do about a conflict with expandable segments, or what was done."""
    if asked:
        return f"{conflict.remedy}, or set allocator=default" if conflict.remedy else "set allocator=default"
    done = f"{EXPANDABLE} is left out (allocator=expandable has it all the same)"
    return f"{done}; {conflict.remedy} to have both" if conflict.remedy else done


def unset_settings(config: Settings, names: Sequence[str]) -> Settings:
    """Return a configuration without some of the allocator's settings."""
    kept = {key: value for key, value in config.allocator.items() if key not in names}
    return replace(config, allocator=kept)


def list_names(settings: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    """Give the names of the configuration's settings and the user's."""
    yield from settings
    if name := find_variable(environ):
        yield from parse_settings(environ[name]) or ()


def find_torch(config: Settings, environ: Mapping[str, str]) -> str | None:
    """Return the version of the ranks' torch; None if they have another Python or no torch."""
    own = environ.get("PYTHON_EXEC", sys.executable) == sys.executable and not config.cluster.container.image
    return read_torch_version() if own else None


def is_contained(config: Settings) -> bool:
    """Tell whether the ranks run in a container that may not trace processes."""
    if config.cluster.container.image:
        return True
    if not any(Path(mark).exists() for mark in MARKS):
        return False
    from launcher.probe.health import read_capabilities  # the doctor's, which most starts need not
    from launcher.probe.sysfs import Tree

    return not read_capabilities(Tree()) >> SYS_PTRACE & 1


def render_configured_program(config: Settings) -> tuple[str, ...]:
    """Return the argv of the configured program; empty if it is not valid."""
    try:
        return render_program(config.program, {"model": config.model, "data": config.data})
    except UsageError:
        return ()
