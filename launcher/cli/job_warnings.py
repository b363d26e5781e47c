"""What is said of a job before it starts.

Settings without effect, variables that overrule settings, settings of the allocator that do not go with the
program, and which configuration files are the user's.
"""

import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path, PurePath

from launcher.config.program import find_script
from launcher.config.rules import check_allocator, read_torch_version
from launcher.config.settings import Settings
from launcher.config.start import DEVICE_VARIABLES, Cluster
from launcher.config.words import read_key
from launcher.files import name_user
from launcher.plan.variables import (
    EXPANDABLE,
    KEYS,
    OLDEST,
    find_conflicts,
    find_variable,
    is_kept,
    merge_settings,
    parse_settings,
    read_settings,
)
from launcher.protocol import LAUNCH_GC, LAUNCH_NUM_WORKERS
from launcher.runs.secrets import mask_variables, mask_words

logger = logging.getLogger(__name__)

OVERRULED = {
    LAUNCH_GC: ("gc", "gc.policy", "gc.warmup", "gc.every", "gc.log"),
    LAUNCH_NUM_WORKERS: ("dataloader", "dataloader.num_workers", "dataloader.workload"),
}
"""Variables of the user's, with the keys that they come over."""
CHECKED_ELSEWHERE = ("cluster.kind", "cluster.container", "cluster.container.image")
"""Keys of `cluster` that are no mistake here: a container is refused if there is no srun."""
SETTINGS = frozenset(field.name for field in fields(Settings)) - {"model", "data", "program", "name"}
"""Keys that are hardly an argument of a program that uses Hydra."""
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
"""Files by which docker and podman mark a container."""
SYS_PTRACE = 19
"""Bit of the capability to trace any process: capabilities(7)."""
CHOSEN = ("allocator", f"allocator.{EXPANDABLE}")
"""Keys of a command line that ask for expandable segments by name."""

# Settings without effect


def warn_unused(cluster: Cluster, given: Collection[str]) -> None:
    """Say which settings of the command line are SLURM's, in a job that runs here."""
    keys = sorted(key for key in given if key.startswith("cluster.") and key not in CHECKED_ELSEWHERE)
    if keys and cluster.kind in ("local", "manual"):
        logger.warning(
            f"{', '.join(keys)}: settings for SLURM, but this job runs here ({cluster.why}): set"
            " cluster=slurm, or leave them out"
        )


def warn_unread(program: Sequence[str]) -> None:
    """Say which words after a program look like settings."""
    script = Path(find_script(program))
    words = [word for word in program[1:] if "=" in word and read_key(word).partition(".")[0] in SETTINGS]
    if words:
        logger.info(
            f"{', '.join(mask_words(words))} after the program: it gets what stands there; write settings of"
            f" launch before {script}"
        )


# Variables


def warn_overruled(environ: Mapping[str, str], given: Collection[str]) -> None:
    """Say which variables of the environment come over what the command line asks for."""
    over = {name: keys for name, keys in OVERRULED.items() if name in environ and is_kept(environ, name)}
    if name := find_variable(environ):
        over[name] = tuple(f"allocator.{key}" for key in parse_settings(environ[name]) or ())
    for name, keys in over.items():
        if lost := [key for key in keys if key in given]:
            logger.warning(f"{name}={environ[name]} is set, and comes over {', '.join(lost)}: unset it")


def warn_visible(config: Settings, cluster: Cluster, given: Collection[str]) -> None:
    """Say which secrets are on the command line of a `launch` that stays: `ps` shows them to everybody."""
    if config.dry_run or (cluster.kind == "slurm" and not config.follow):
        return
    names = [name for name in config.env if "env" in given or f"env.{name}" in given]
    masked = mask_variables({name: str(config.env[name]) for name in names})
    if shown := [f"env.{name}" for name in names if masked[name] != str(config.env[name])]:
        logger.warning(
            f"{', '.join(shown)} on the command line: all users of this machine see that by `ps` while launch"
            " runs; write secrets to a file that you alone can read, env.from_file=FILE"
        )


def warn_elsewhere(config: Settings, environ: Mapping[str, str]) -> None:
    """Say which variables of the environment do not count, since another machine is planned for.

    They name this machine's devices, as SLURM's CUDA_VISIBLE_DEVICES does in a job.
    """
    for name in DEVICE_VARIABLES if config.machine.snapshot else ():
        if name in environ and name not in config.env:
            machine, value = PurePath(str(config.machine.snapshot)).stem, environ[name]
            logger.warning(
                f"{name}={value} is of this machine, and does not count in a plan for {machine}: "
                f"set env.{name}={value} if it is meant for that"
            )


# The allocator


def settle_allocator(
    config: Settings, words: Sequence[str], environ: Mapping[str, str], given: Collection[str]
) -> tuple[str, ...]:
    """Check the settings, warn of what is doubtful, and return the names of those that are to be left out.

    Expandable segments that nobody asked for by name are left out if the program is known to fail or crawl
    with them, as it would not without us. `given` are the command line's keys. Raises UsageError.
    """
    settings = read_settings(config.allocator)
    # The ranks' torch is this one unless they have another Python.
    is_own = environ.get("PYTHON_EXEC", sys.executable) == sys.executable
    is_own = is_own and not config.cluster.container.image
    depends = any(name not in KEYS or KEYS[name][1] > OLDEST for name in settings)
    for doubt in check_allocator(settings, read_torch_version() if is_own and depends else None):
        logger.warning(doubt)
    merged = merge_settings(settings, environ)
    asked = not {*CHOSEN}.isdisjoint(given) or EXPANDABLE in merge_settings({}, environ)
    conflicts = [*find_conflicts(merged, words, environ, contained=_is_contained(config))]
    for what, remedy in conflicts:
        if asked:
            way = f"{remedy}, or set allocator=default" if remedy else "set allocator=default"
        else:
            way = f"{EXPANDABLE} is left out (allocator=expandable has it all the same)"
            way += f"; {remedy} to have both" if remedy else ""
        logger.warning(f"{what}: {way}")
    return () if asked or not conflicts else (EXPANDABLE,)


def unset_settings(config: Settings, names: Sequence[str]) -> Settings:
    """Return a configuration without some of the allocator's settings."""
    kept = {key: value for key, value in config.allocator.items() if key not in names}
    return replace(config, allocator=kept)


def _is_contained(config: Settings) -> bool:
    """Tell whether the ranks run in a container that may not trace processes."""
    if config.cluster.container.image:
        return True
    if not any(Path(mark).exists() for mark in CONTAINER_MARKS):
        return False
    from launcher.probe.limits import read_capabilities
    from launcher.probe.sysfs import Tree

    return not read_capabilities(Tree()) >> SYS_PTRACE & 1


# Configuration files


def name_files(own_files: Sequence[str]) -> None:
    """Say which configuration is not the shipped one, and whose it is if it is another user's."""
    named = []
    for path in own_files:
        owner = Path(path).stat().st_uid
        named.append(path if owner in (os.geteuid(), 0) else f"{path} (of {name_user(owner)})")
    if named:
        logger.info(f"configuration from {', '.join(named)}")
