"""What a command line runs, as torchrun, the shell and exec see it, and whether the hook starts in it."""

import os
import sys

BLOCKING_OPTIONS = {"E": "ignores PYTHONPATH", "I": "ignores PYTHONPATH", "S": "runs no sitecustomize"}
"""Options of python(1) with which no sitecustomize of ours starts."""
VALUE_OPTIONS = "cmWX"
"""Options of python(1) with a value, in the same argument or in the next; `-c` and `-m` are the last ones."""
MAX_INDIRECTIONS = 4
"""Steps from one command to the next: a script's #! line, env, an interpreter."""
SHEBANG_BYTES = 256
"""Bytes of a #! line at most (BINPRM_BUF_SIZE of the kernel)."""


def add_python(argv: list[str]) -> list[str]:
    """Put this interpreter before a Python file that cannot be executed itself, as torchrun does."""
    path = argv[0]
    if not path.endswith(".py") or not os.path.isfile(path):
        return argv
    with open(path, "rb") as file:
        is_executable = "/" in path and os.access(path, os.X_OK) and file.read(2) == b"#!"
    return argv if is_executable else [sys.executable or "python3", "-u", *argv]


def exec_script(path: str, argv: list[str], environ: dict[str, str]) -> None:
    """Give a script without a #! line to the shell, as execvp(3) does; return if it is no text."""
    with open(path, "rb") as file:
        if b"\0" not in file.read(SHEBANG_BYTES):
            os.execve("/bin/sh", ["sh", path, *argv[1:]], environ)


def locate_command(command: str, environ: dict[str, str]) -> str:
    """Return the path of a command, looked up in PATH as exec does; else the command itself."""
    folders = [] if "/" in command else os.get_exec_path(environ)
    paths = (os.path.join(folder, command) for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK)), command)


def find_hook_obstacle(argv: list[str], environ: dict[str, str]) -> str:
    """Say in a few words what of a command line keeps the hook from starting; empty if nothing does."""
    for _ in range(MAX_INDIRECTIONS):
        name = argv[0].rpartition("/")[2] if argv else ""
        if name.startswith(("python", "pypy")):
            return find_blocking_option(name, argv[1:])
        if name == "env":
            argv, obstacle = strip_env(argv[1:])
            if obstacle:
                return obstacle
        else:
            argv = read_shebang(argv, environ)
    return ""


def find_blocking_option(name: str, arguments: list[str]) -> str:
    """Look for an option of Python's that keeps the hook out, before the program's own arguments."""
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--check-hash-based-pycs":
            skip = True
        elif not argument.startswith("-") or argument in ("-", "--"):
            return ""
        elif not argument.startswith("--"):
            known = (
                letter for letter in argument[1:] if letter in BLOCKING_OPTIONS or letter in VALUE_OPTIONS
            )
            letter = next(known, "")
            if letter in BLOCKING_OPTIONS:
                return f"{name} -{letter} {BLOCKING_OPTIONS[letter]}"
            if letter and letter in "cm":
                return ""
            skip = argument.endswith(letter) if letter else False
    return ""


def strip_env(arguments: list[str]) -> tuple[list[str], str]:
    """Return the command that env(1) runs, and what it does to PYTHONPATH if that keeps the hook out."""
    while arguments:
        first, rest = arguments[0], arguments[1:]
        if first in ("-", "-i", "--ignore-environment"):
            return [], "env drops PYTHONPATH"
        if first.startswith("PYTHONPATH="):
            return [], "env sets another PYTHONPATH"
        if first in ("-u", "-C", "--unset", "--chdir"):
            first, rest = f"{first}={''.join(rest[:1])}", rest[1:]
        if first in ("-u=PYTHONPATH", "--unset=PYTHONPATH", "-uPYTHONPATH"):
            return [], "env drops PYTHONPATH"
        if first.startswith("-S"):
            return [*(first[2:] or " ".join(rest[:1])).split(), *rest[first == "-S" :]], ""
        if "=" not in first and not first.startswith("-"):
            return arguments, ""
        arguments = rest
    return [], ""


def read_shebang(argv: list[str], environ: dict[str, str]) -> list[str]:
    """Return the command line that a script's #! line makes of its own; empty if it has none."""
    try:
        # A pipe, which exec refuses, is not waited for.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(locate_command(argv[0], environ) if argv else "", flags)
        try:
            line = os.read(file, SHEBANG_BYTES).partition(b"\n")[0]
        finally:
            os.close(file)
    except OSError:
        return []
    # The kernel makes one argument of all that follows the interpreter.
    return [*os.fsdecode(line[2:]).split(maxsplit=1), *argv] if line.startswith(b"#!") else []
