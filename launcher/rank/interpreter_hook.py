"""Lets a rank's interpreter start with `launcher.inprocess`: garbage collection, DataLoaders."""

import os
from _collections_abc import MutableMapping  # `collections.abc` costs a millisecond

from launcher.cpulist import format_cpulist
from launcher.protocol import LAUNCH_GC, LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_RANK_PLAN, RANK_PLAN_KEYS
from launcher.rank.assignment import Share
from launcher.rank.plain_json import format_json

FOLDER = os.path.abspath(f"{__file__}/../../inprocess")
NEEDS = {LAUNCH_GC: "default", LAUNCH_LOADER_DEFAULT: "0", LAUNCH_METER: ""}
"""Variables that ask for something inside the interpreter, with the values that do not."""


def add_hook(
    environ: dict[str, str], share: Share, before: dict[str, str], cpus_before: frozenset[int]
) -> None:
    """Put the hook first on PYTHONPATH where something asks for it; it takes itself out again.

    `LAUNCH_RANK_PLAN` is what the program can know of its plan, JSON, with the variables that were set for it
    and those that these have replaced (`before`), which is for ranks inside this one, and the CPU set that it
    would have without us.
    """
    told = {name: share.entry.get(name) for name in RANK_PLAN_KEYS}
    own = {"env": share.env, "env_before": before, "cpus_before": format_cpulist(cpus_before)}
    environ[LAUNCH_RANK_PLAN] = format_json({**told, **own})
    # On fewer CPUs than without us, torch would warn of workers of which it says nothing then.
    if is_wanted(environ, share) or cpus_before != share.cpus:
        # An empty entry of PYTHONPATH is the working directory.
        environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *filter(None, [environ.get("PYTHONPATH")])])


def is_wanted(environ: MutableMapping[str, str], share: Share) -> bool:
    """Tell whether the rank is to have something that only the hook can do."""
    wanted = any(environ.get(name, off).partition(",")[0] != off for name, off in NEEDS.items())
    return wanted or share.entry.get("worker_cpus") not in (None, share.entry["cpus"])


def is_hooked(environ: MutableMapping[str, str]) -> bool:
    """Tell whether the hook is on PYTHONPATH, where each interpreter that starts it takes it out."""
    return environ.get("PYTHONPATH", "").partition(os.pathsep)[0] == FOLDER


def remove_hook(environ: MutableMapping[str, str]) -> None:
    """Take the hook out of PYTHONPATH where it is there, so that what starts next does not have it."""
    if is_hooked(environ):
        _, _, kept = environ.pop("PYTHONPATH").partition(os.pathsep)
        if kept:
            environ["PYTHONPATH"] = kept
