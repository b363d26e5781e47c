"""Lets a rank's interpreter start with `launcher.inprocess`, if the program's Python would run it."""

import os
import sys
from _collections_abc import MutableMapping  # `collections.abc` costs a millisecond

from launcher import protocol
from launcher.cpulist import format_cpulist
from launcher.files import READ, Descriptor
from launcher.rank.entry import PlanEntry, dump_json, load_json

FOLDER = os.path.abspath(f"{__file__}/../../inprocess")
IDLE_VALUES = {
    protocol.LAUNCH_FIT: "",
    protocol.LAUNCH_GC: "default",
    protocol.LAUNCH_LOADER_DEFAULT: "0",
    protocol.LAUNCH_METER: "",
    protocol.LAUNCH_WATCH: "",
}
"""Variables that ask for something inside the interpreter, with the values that ask for nothing."""
CONFINING = "_VISIBLE_DEVICES"
"""Ending of the variables that keep what runs in a rank to the rank's GPU, as its CPU set does."""
BLOCKING_OPTIONS = {"E": "ignores PYTHONPATH", "I": "ignores PYTHONPATH", "S": "runs no sitecustomize"}
"""Options of python(1) with which no sitecustomize of ours starts."""
VALUE_OPTIONS = "cmWX"
"""Options of python(1) with a value, in the same argument or in the next; `-c` and `-m` are the last ones."""
MAX_INDIRECTIONS = 4
"""Steps from one command to the next: a script's #! line, env, an interpreter."""
SHEBANG_BYTES = 256
"""Bytes of a #! line at most (BINPRM_BUF_SIZE of the kernel)."""


def add_hook(
    environ: dict[str, str], entry: PlanEntry, env_before: dict[str, str], cpus_before: frozenset[int]
) -> None:
    """Put the hook first on PYTHONPATH if something asks for it; it removes itself from there.

    LAUNCH_RANK_PLAN is what the program can know of its plan. For ranks inside this one it also has the
    variables that were set for it, those that they replaced (`env_before`), and the CPU set before ours.
    """
    plan = {name: entry.raw.get(name) for name in protocol.RANK_PLAN_KEYS.split()}
    outer = {"env": entry.env, "env_before": env_before, "cpus_before": format_cpulist(cpus_before)}
    environ[protocol.LAUNCH_RANK_PLAN] = dump_json({**plan, **outer})
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
    text = environ.pop(protocol.LAUNCH_RANK_PLAN, "")
    environ.pop(protocol.LAUNCH_WATCH, None)
    environ.pop(protocol.LAUNCH_MEMORY, None)
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


def add_python(argv: list[str]) -> list[str]:
    """Put this interpreter before a Python file that cannot be executed itself, as torchrun does."""
    path = argv[0]
    if not path.endswith(".py") or not os.path.isfile(path):
        return argv
    with open(path, "rb") as file:
        is_executable = "/" in path and os.access(path, os.X_OK) and file.read(2) == b"#!"
    return argv if is_executable else [sys.executable or "python3", "-u", *argv]


def locate_command(command: str, environ: dict[str, str]) -> str:
    """Return the path of a command, looked up in PATH as exec does; else the command itself."""
    folders = [] if "/" in command else os.get_exec_path(environ)
    paths = (os.path.join(folder, command) for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK)), command)


def find_interpreter(argv: list[str], environ: dict[str, str]) -> list[str]:
    """Return the Python command line that a command line comes to by #! lines and `env`; empty if none.

    Options of env(1), and variables that it sets, are not read: there, nothing is found.
    """
    for _ in range(MAX_INDIRECTIONS):
        name = argv[0].rpartition("/")[2] if argv else ""
        if name.startswith(("python", "pypy")):
            return argv
        argv = argv[1:] if name == "env" else _read_shebang(argv, environ)
    return []


def _read_shebang(argv: list[str], environ: dict[str, str]) -> list[str]:
    """Return the command line that a script's #! line makes of its own; empty if it has none."""
    try:
        path = locate_command(argv[0], environ) if argv else ""
        with Descriptor(os.open(path, READ)) as file:  # a pipe, which exec refuses, is not waited for
            line = os.read(file, SHEBANG_BYTES).partition(b"\n")[0]
    except OSError:
        return []
    # The kernel makes one argument of all that follows the interpreter.
    return [*os.fsdecode(line[2:]).split(maxsplit=1), path, *argv[1:]] if line.startswith(b"#!") else []


def split_options(command: list[str]) -> tuple[list[tuple[str, str]], int]:
    """Return the options of a python(1) command line with their values, and where its program is.

    Options of one letter come without the dash; `c` and `m` are the program themselves, and the last ones.
    """
    options: list[tuple[str, str]] = []
    index = 1
    while index < len(command) and command[index].startswith("-") and command[index] != "-":
        word, index = command[index], index + 1
        letters = "" if word.startswith("--") else word[1:]
        options += [] if letters else [(word, "")]
        if word == "--":
            break
        while letters:
            letter, letters = letters[0], letters[1:]
            value = ""
            if letter in VALUE_OPTIONS:
                value, letters = letters, ""
                if not value:
                    value, index = "".join(command[index : index + 1]), index + 1
            options.append((letter, value))
            if letter in "cm":
                return options, index
    return options, index


def find_hook_obstacle(argv: list[str], environ: dict[str, str]) -> str:
    """Say in a few words what of a command line keeps the hook from starting; empty if nothing does."""
    for word in argv[1:] if argv[0].rpartition("/")[2] == "env" else ():
        if word.startswith(("-", "PYTHONPATH=")):
            return "env may drop PYTHONPATH"
        if "=" not in word:
            break
    try:
        command = find_interpreter(add_python(argv), environ)
    except (OSError, ValueError):  # the start will tell
        return ""
    letters = [letter for letter, _ in split_options(command)[0] if letter in BLOCKING_OPTIONS]
    name = command[0].rpartition("/")[2] if letters else ""
    return f"{name} -{letters[0]} {BLOCKING_OPTIONS[letters[0]]}" if letters else ""
