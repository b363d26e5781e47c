"""Which ranks can be forked from a process with torch: what their command line runs, and their variables."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.rank.hook import FOLDER, add_python, find_interpreter, locate_command, split_options

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
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
"""Numbers of threads, which a forked rank sets again by the libraries' functions."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Settings of PyTorch's allocator, which it sets again."""
MAY_DIFFER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|TORCH_(ELASTIC_SHUTDOWN_TIMEOUT|DISABLE_SHARE_RDZV_TCP_STORE)|(TORCH_)?NCCL_\w+|LAUNCH_(?!FIT$)\w+"
    r"|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NUMEXPR_\w+"
    r"|TORCHINDUCTOR_(CACHE_DIR|COMPILE_THREADS)|TRITON_CACHE_DIR"
    rf"|{'|'.join((*THREADS, *ALLOCATOR))})"
)
"""Variables that may differ between the process with torch and a rank: those of a rank, and of its plan.

They are read after the import of torch, by the functions that they change, or set again. This was seen by
tracing getenv(3) and `os.environ` during the import (torch 2.13, CPU).
"""


class ExecNeededError(Exception):
    """A rank of this program cannot be forked from a warm process; the text says why."""


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A program that this interpreter runs."""

    command: tuple[str, ...]
    """The interpreter, its options, the program and its arguments."""
    first_argument: int
    """Where the program's own arguments begin in the command."""
    kind: str
    """`file` (a script, or a folder or zip file with `__main__.py`), `module` (-m) or `code` (-c)."""
    name: str
    """The file's path, the module's name, or the code."""


def find_python_program(argv: list[str], environ: dict[str, str], python: str = "") -> PythonProgram:
    """Return what a rank's argv runs in the interpreter `python` (this one if that is not said).

    Relative paths are relative to the working directory. Raises ExecNeededError if it is something else, or
    has options of the interpreter with which a forked rank would not be the same.
    """
    try:
        command = find_interpreter(add_python(argv), environ)
    except OSError as error:
        raise ExecNeededError(f"{argv[0]} cannot be read ({error.strerror})") from None
    if not command:
        raise ExecNeededError(f"{argv[0]} is no Python program")
    path, python = locate_command(command[0], environ), python or sys.executable
    # The folder tells the environment, and the file behind it the interpreter.
    folders = {os.path.dirname(os.path.abspath(found)) for found in (path, python)}
    if len(folders) > 1 or os.path.realpath(path) != os.path.realpath(python):
        raise ExecNeededError(f"{path} is another interpreter than {python}")
    return split_command(command)


def split_command(command: list[str]) -> PythonProgram:
    """Divide an interpreter's command line as python(1) does; raises ExecNeededError for some options."""
    options, index = split_options(command)
    for letter, value in options:
        has_value = letter in "cmW" or (letter == "X" and value.partition("=")[0] in PLAIN_X)
        if not (value if has_value else letter in PLAIN_OPTIONS):
            shown = letter if letter.startswith("-") else f"-{letter}{value}"
            raise ExecNeededError(f"the interpreter has the option {shown}")
    last, value = options[-1] if options else ("", "")
    if last in ("c", "m"):
        return PythonProgram(tuple(command), index, "code" if last == "c" else "module", value)
    if index >= len(command) or command[index] == "-":
        raise ExecNeededError("the program comes from stdin")
    return PythonProgram(tuple(command), index + 1, "file", command[index])


def check_environment(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise ExecNeededError unless a rank's variables (`after`) go with a process with torch that has others.

    Our folder on PYTHONPATH does not count.
    """
    for name in list_changed_variables(_forget_hook(before), _forget_hook(after)):
        if not MAY_DIFFER.fullmatch(name):
            raise ExecNeededError(f"{name} may have been read by the import of torch, and has another value")


def list_changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of variables that two environments have with another value, or one of them alone."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _forget_hook(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without our folder in PYTHONPATH."""
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry != FOLDER]
    kept = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return kept | ({"PYTHONPATH": os.pathsep.join(entries)} if any(entries) else {})
