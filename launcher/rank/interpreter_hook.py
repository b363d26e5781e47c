"""Lets a rank's interpreter start with `launcher.inprocess`, and undoes that for ranks inside a rank."""

import os
from _collections_abc import MutableMapping  # `collections.abc` costs a millisecond

from launcher.cpulist import format_cpulist
from launcher.protocol import (
    LAUNCH_FIT,
    LAUNCH_GC,
    LAUNCH_LOADER_DEFAULT,
    LAUNCH_MEMORY,
    LAUNCH_METER,
    LAUNCH_RANK_PLAN,
    LAUNCH_WATCH,
    RANK_PLAN_KEYS,
)
from launcher.rank.plain_json import dump_json, load_json
from launcher.rank.plan_entry import PlanEntry

FOLDER = os.path.abspath(f"{__file__}/../../inprocess")
IDLE_VALUES = {
    LAUNCH_FIT: "",
    LAUNCH_GC: "default",
    LAUNCH_LOADER_DEFAULT: "0",
    LAUNCH_METER: "",
    LAUNCH_WATCH: "",
}
"""Variables that ask for something inside the interpreter, with the values that ask for nothing."""
CONFINING = "_VISIBLE_DEVICES"
"""Ending of the variables that keep what runs in a rank to the rank's GPU, as its CPU set does."""


def add_hook(
    environ: dict[str, str], entry: PlanEntry, env_before: dict[str, str], cpus_before: frozenset[int]
) -> None:
    """Put the hook first on PYTHONPATH if something asks for it; it removes itself from there.

    LAUNCH_RANK_PLAN is what the program can know of its plan. For ranks inside this one it also has the
    variables that were set for it, those that they replaced (`env_before`), and the CPU set before ours.
    """
    plan = {name: entry.raw.get(name) for name in RANK_PLAN_KEYS}
    outer = {"env": entry.env, "env_before": env_before, "cpus_before": format_cpulist(cpus_before)}
    environ[LAUNCH_RANK_PLAN] = dump_json({**plan, **outer})
    # On fewer CPUs than without us, torch would warn of numbers of workers of which it does not warn then.
    if is_hook_wanted(environ, entry) or cpus_before != entry.cpus:
        # An empty entry of PYTHONPATH is the working directory.
        environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *filter(None, [environ.get("PYTHONPATH")])])


def is_hook_wanted(environ: MutableMapping[str, str], entry: PlanEntry) -> bool:
    """Tell whether the rank is to have something that only the hook can do."""
    wanted = any(environ.get(name, idle).partition(",")[0] != idle for name, idle in IDLE_VALUES.items())
    return wanted or entry.raw.get("worker_cpus") not in (None, entry.raw["cpus"])


def is_hooked(environ: MutableMapping[str, str]) -> bool:
    """Tell whether the hook is on PYTHONPATH, from where each interpreter that starts removes it."""
    return environ.get("PYTHONPATH", "").partition(os.pathsep)[0] == FOLDER


def remove_hook(environ: MutableMapping[str, str]) -> None:
    """Remove the hook from PYTHONPATH, so that what starts next does not have it."""
    if is_hooked(environ):
        _, _, kept = environ.pop("PYTHONPATH").partition(os.pathsep)
        if kept:
            environ["PYTHONPATH"] = kept


def leave_outer_rank(environ: MutableMapping[str, str]) -> None:
    """Undo what the shim of an enclosing rank has set, unless it was changed since.

    The values of that rank's plan are nobody's choice for what runs inside it.
    """
    text = environ.pop(LAUNCH_RANK_PLAN, "")
    environ.pop(LAUNCH_WATCH, None)
    environ.pop(LAUNCH_MEMORY, None)
    remove_hook(environ)
    try:
        outer = load_json(text)
    except (ValueError, RecursionError):
        return
    planned, before = (outer.get("env"), outer.get("env_before")) if isinstance(outer, dict) else (None, None)
    if not isinstance(planned, dict) or not isinstance(before, dict):
        return
    for name, value in planned.items():
        if environ.get(name) != value or name.endswith(CONFINING):
            continue
        if name in before:
            environ[name] = str(before[name])
        else:
            del environ[name]
