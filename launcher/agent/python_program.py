"""Which Python program a command line runs in this interpreter, if it runs one, by exec, env and #! lines."""

import os
import sys

from launcher.rank.hook import VALUE_OPTIONS, add_python, find_interpreter, locate_command

PLAIN_OPTIONS = "bBdOPqsu"
"""Options of python(1) without a value that a forked rank has from the process that it is forked from."""
PLAIN_X = (
    "faulthandler",
    "frozen_modules",
    "int_max_str_digits",
    "no_debug_ranges",
    "pycache_prefix",
    "utf8",
)
"""Values of `-X` for which that holds too. Others trace or print what happens at the interpreter's start."""


class ExecNeededError(Exception):
    """A rank of this program cannot be forked from a warm process; the text says why."""


class PythonProgram:
    """A program that this interpreter runs."""

    __slots__ = ("command", "first_argument", "kind", "name")

    def __init__(self, command: tuple[str, ...], first_argument: int, kind: str, name: str) -> None:
        self.command = command
        """The interpreter, its options, the program and its arguments."""
        self.first_argument = first_argument
        """Where the program's own arguments begin in the command."""
        self.kind = kind
        """`file` (a script, or a folder or zip file with `__main__.py`), `module` (-m) or `code` (-c)."""
        self.name = name
        """The file's path, the module's name, or the code."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What comes before the program's arguments."""
        return self.command[: self.first_argument]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The program's arguments."""
        return self.command[self.first_argument :]


def find_python_program(argv: list[str], environ: dict[str, str], python: str = "") -> PythonProgram:
    """Return what a rank's argv runs in the interpreter `python` (this one if that is not said).

    Relative paths are relative to the working directory. Raises ExecNeededError if it is something else, or
    has options of the interpreter with which a forked rank would not be the same.
    """
    try:
        command, settings = find_interpreter(add_python(argv), environ)
    except OSError as error:
        raise ExecNeededError(f"{argv[0]} cannot be read ({error.strerror})") from None
    if settings:
        raise ExecNeededError("env(1) changes the environment")
    if not command:
        raise ExecNeededError(f"{argv[0]} is no Python program")
    check_interpreter(locate_command(command[0], environ), python or sys.executable)
    return split_command(command)


def check_interpreter(path: str, python: str) -> None:
    """Raise ExecNeededError unless a path is that of this interpreter, in this environment.

    The folder tells the environment, and the file behind it the interpreter.
    """
    folders = {os.path.dirname(os.path.abspath(found)) for found in (path, python)}
    if len(folders) > 1 or os.path.realpath(path) != os.path.realpath(python):
        raise ExecNeededError(f"{path} is another interpreter than {python}")


def split_command(command: list[str]) -> PythonProgram:
    """Divide an interpreter's command line as python(1) does; raises ExecNeededError for some options."""
    index = 1
    while index < len(command) and command[index].startswith("-") and command[index] != "-":
        option, index = command[index], index + 1
        letters = option[1:].lstrip(PLAIN_OPTIONS)
        if not letters:
            continue
        letter, value = letters[0], letters[1:]
        if letter in VALUE_OPTIONS and not value:
            value, index = "".join(command[index : index + 1]), index + 1
        is_plain = letter in "cmW" or (letter == "X" and value.partition("=")[0] in PLAIN_X)
        if not is_plain or not value:
            raise ExecNeededError(f"the interpreter has the option {option}")
        if letter in "cm":
            return PythonProgram(tuple(command), index, "code" if letter == "c" else "module", value)
    if index >= len(command) or command[index] == "-":
        raise ExecNeededError("the program comes from stdin")
    return PythonProgram(tuple(command), index + 1, "file", command[index])
