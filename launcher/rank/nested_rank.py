"""A rank inside a rank: what the outer one's plan has set is nobody's choice."""

from collections.abc import MutableMapping

from launcher.protocol import LAUNCH_RANK_PLAN
from launcher.rank.interpreter_hook import remove_hook
from launcher.rank.plain_json import parse_json

CONFINES = "_VISIBLE_DEVICES"
"""Ending of the variables that keep what runs in a rank to the rank's GPU, as its CPU set does."""


def leave_rank(environ: MutableMapping[str, str]) -> None:
    """Undo what the shim of an enclosing rank has set, as far as it is still as that has left it."""
    text = environ.pop(LAUNCH_RANK_PLAN, "")
    remove_hook(environ)
    try:
        told = parse_json(text)
    except (ValueError, RecursionError):
        return
    planned, before = (told.get("env"), told.get("env_before")) if isinstance(told, dict) else (None, None)
    if not isinstance(planned, dict) or not isinstance(before, dict):
        return
    for name, value in planned.items():
        if environ.get(name) != value or name.endswith(CONFINES):
            continue
        if name in before:
            environ[name] = str(before[name])
        else:
            del environ[name]
