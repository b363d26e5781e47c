"""The user's program: its argv, from what stands after `--` or in the configuration, and its variables."""

import io
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from launcher.config.settings import refuse
from launcher.config.words import read_section
from launcher.errors import UsageError
from launcher.files import open_file, read_input
from launcher.text import suggest

if TYPE_CHECKING:
    from launcher.config.settings import Settings

BUNDLED = ("-m", "launcher.programs.train")
"""The command of the shipped option of the group `program`."""
SECTIONS = ("model", "data", "program")
"""Sections of the configuration that describe the bundled program."""
RESERVED = ("command", "sections")
"""Keys of the group `program` that say what to run; all others are the program's own options."""
UNPASSED = ("global_batch",)
"""Keys of the section `model` that the launcher alone reads."""
UNTRAINED = {"experts": "a mixture of experts", "latent_attention": "latent attention"}
"""Keys of models that the bundled program has no layers for."""
SHEBANG = 256
"""Bytes of a `#!` line at most (BINPRM_BUF_SIZE of the kernel)."""


def runs_bundled(config: "Settings", argv: Sequence[str] | None = None) -> bool:
    """Tell whether the bundled program is what runs; `argv` is what is given after `--`."""
    return not argv and config.program.get("command") == list(BUNDLED)


def find_program(
    argv: tuple[str, ...] | None, config: "Settings", environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the program's argv, given or configured; raises UsageError if it cannot be run."""
    if argv is None:
        for key, kind in UNTRAINED.items() if runs_bundled(config) else ():
            if config.model.get(key):
                raise refuse("untrained", name=config.model.get("name"), kind=kind, key=key)
        argv = render_program(config)
    return resolve_program(argv, environ)


def spell_options(program: Mapping[str, object]) -> Mapping[str, object]:
    """Return the bundled program's section as it wants it.

    What is still `auto` is left to the program; true and false are words for checkpointing; a global batch in
    tokens has been solved for what it consists of.
    """
    found = {key: value for key, value in program.items() if value != "auto"}
    if not isinstance(found.get("global_batch"), int):
        found.pop("global_batch", None)
    if isinstance(recompute := found.get("activation_checkpointing"), bool):
        found["activation_checkpointing"] = "full" if recompute else "none"
    return found


def resolve_program(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the argv to exec: `train.py …` and `-m module …` run under Python, anything else by itself.

    Python is the one that runs the launcher, or `PYTHON_EXEC` as torchrun knows it.
    Raises UsageError for a program that is not there or cannot be run.
    """
    python = environ.get("PYTHON_EXEC", sys.executable)
    first = argv[0] if argv else ""
    if tuple(argv[:2]) == BUNDLED and python == sys.executable:
        return (python, "-P", *argv)  # a folder `launcher` in the working directory does not take its place
    if first == "-m":
        check_module(argv[1:2], environ)
        return (python, *argv)
    if not first or first.startswith("-"):
        raise UsageError(f"{first!r} is no program: give a script, `-m module`, or an executable after `--`")
    path = Path(first)
    try:
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise UsageError(f"{first} is a folder without a __main__.py: name the program in it")
        if not first.endswith(".py") and not path.is_dir():
            return (find_executable(first, environ), *argv[1:])
        if not path.exists():
            raise UsageError(f"no such program: {first} (from {Path.cwd()}): check the path")
        if not os.access(first, os.R_OK):
            raise UsageError(f"{first} cannot be read: `chmod +r {first}`")
    except OSError as error:  # a folder on the way is closed, or the name is too long
        raise UsageError(f"no such program: {first} ({error.strerror}): check the path") from None
    if os.access(first, os.X_OK) and names_interpreter(first):
        return (first if "/" in first else f"./{first}", *argv[1:])
    return (python, *argv)


def names_interpreter(script: str) -> bool:
    """Tell whether a script's `#!` line runs something other than a Python, such as `uv run --script`.

    A Python that such a line names is not used, as under torchrun: it seldom is the one that has torch.
    """
    try:
        with os.fdopen(open_file(script, follow=True), "rb", 0) as file:  # a folder or a pipe is no script
            line = file.read(SHEBANG).partition(b"\n")[0].decode(errors="replace")
    except OSError:
        return False
    words = line.removeprefix("#!").split() if line.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-S") and "=" not in word]
    return bool(words) and not Path(words[0]).name.startswith("python")


def find_executable(name: str, environ: Mapping[str, str]) -> str:
    """Return the path of an executable, looked up in PATH as a shell does; raises UsageError."""
    if found := shutil.which(name, path=environ.get("PATH")):
        return found
    if Path(name).is_file() and "/" in name:
        raise UsageError(f"{name} is not executable: `chmod +x {name}`, or put its interpreter before it")
    near = f" (there is a file ./{name} here)" if Path(name).is_file() else ""
    raise UsageError(f"no such program: {name}{near}: check the name, or that it is on PATH")


def find_unused(config: "Settings", program: tuple[str, ...] | None, given: Collection[str]) -> list[str]:
    """Return the sections of the configuration that are the bundled program's and have no use for another.

    `program` is what is given after `--`. `given` are the command line's keys.
    """
    if program is not None:
        return list(SECTIONS)
    if runs_bundled(config):
        return []
    named = config.program.get("sections") or ()
    asked = {*map(read_section, given)}
    return [section for section in ("model", "data") if section not in named and section not in asked]


def find_script(argv: Sequence[str]) -> str:
    """Return what a program is called by: its module's last part, or its script, also after `python`."""
    first = argv[0] if argv else ""
    if first != "-m" and not Path(first).name.startswith("python"):
        return first
    from launcher.rank.hook import split_options

    command = ["python", *argv] if first == "-m" else list(argv)
    options, index = split_options(command)
    last, value = options[-1] if options else ("", "")
    if last == "m":
        return value.rpartition(".")[2] or first
    return first if last == "c" or index >= len(command) else command[index]


def check_module(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise UsageError for a module that `python -m` would not find, with the nearest; nothing is imported.

    What a package that changes its `__path__` holds is not known before it is imported.
    """
    if not names:
        raise UsageError("-m needs a module: `launch -- -m package.module`")
    folders = list(
        filter(None, [str(Path.cwd()), *environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
    )
    name, package = names[0], ""
    for part in (*name.split("."), "__main__"):
        found = _find_module(f"{package}{part}", folders)
        if found is None:
            inside = [module.name for module in iter_modules(folders if package else folders[:1])]
            if part == "__main__":
                near = suggest("", inside, prefix=package, most=9) or ": name a module in it"
                raise UsageError(f"{name} is a package without a __main__.py{near}")
            near = suggest(part, inside, prefix=package) or ": install it, or start from its folder"
            raise UsageError(f"no module {name!r} here or in this Python{near}")
        if found.submodule_search_locations is None:
            if not f"{package}{part}".startswith(name):
                raise UsageError(f"no module {name!r}: {package}{part} is a module and no package")
            return
        package += f"{part}."
        if found.origin is None:  # a namespace, whose own list can be read only once its parent is imported
            folders = [f"{folder}/{part}" for folder in folders if Path(folder, part).is_dir()]
            continue
        folders = list(found.submodule_search_locations)
        init = Path(found.origin)
        if not init.is_file() or b"__path__" in init.read_bytes():  # in an archive, or one that is changed
            return


def _find_module(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Return a module's spec, from its package's folders or from a finder such as an editable install's."""
    others = (finder for finder in sys.meta_path if finder is not PathFinder)
    try:
        found = PathFinder.find_spec(name.rpartition(".")[2], folders)
        return found or next((spec for finder in others if (spec := finder.find_spec(name, None))), None)
    except (ImportError, ValueError):
        return None


def render_program(config: "Settings") -> tuple[str, ...]:
    """Return the configured program's argv: its `command`, then an option for each key.

    A key of the program's own becomes `--key`, a key of a section that it names `--section.key`; raises
    UsageError if there is no command or a section is not known.
    """
    program = spell_options(config.program) if runs_bundled(config) else config.program
    sections, command = {"model": config.model, "data": config.data}, program.get("command")
    if not isinstance(command, list) or not command:
        raise UsageError("the program has no command: set program.command=[train.py], or give one after `--`")
    argv = [str(word) for word in command]
    named = program.get("sections")
    for section in named if isinstance(named, list) else []:
        if section not in sections:
            raise UsageError(f"program.sections names {section!r}: choose from {', '.join(sections)}")
        options = {key: value for key, value in sections[section].items() if key not in UNPASSED}
        argv += render_options(options, f"{section}.")
    program_options = {key.replace("_", "-"): value for key, value in program.items() if key not in RESERVED}
    return (*argv, *render_options(program_options, ""))


def render_options(options: Mapping[str, object], prefix: str) -> list[str]:
    """Write options: true is `--key`, false is `--no-key`, null is left out, a list is joined by commas.

    A mapping is an option for each of its keys, `--key.name=value`.
    """
    rendered: list[str] = []
    for key, value in options.items():
        if isinstance(value, bool):
            rendered.append(f"--{prefix}{key}" if value else f"--no-{prefix}{key}")
        elif isinstance(value, Mapping):
            rendered += render_options(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            rendered.append(f"--{prefix}{key}={','.join(map(str, value))}")
        elif value is not None:
            rendered.append(f"--{prefix}{key}={value}")
    return rendered


KEY = "from_file"
"""The entry of `env` that is no variable."""
MOST_BYTES = 1 << 20
"""Of a file; the kernel takes 128 KiB for a variable."""


def write_values(env: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration's variables as texts, and the files' names as they are; raises UsageError."""
    for name, value in env.items():
        if name != KEY and not isinstance(value, str | int | float):
            raise UsageError(f"env.{name} is {value!r}, and a variable has a text: give one, or leave it out")
    return {name: value if name == KEY else str(value) for name, value in env.items()}


def fill_env(config: "Settings") -> "Settings":
    """Return a configuration with the variables of its files below those of `env.NAME`; raises UsageError.

    A later file's are over an earlier one's.
    """
    own = {**config.env}
    given = own.pop(KEY, None)
    names = given if isinstance(given, list) else [] if given is None else [given]
    if any(not isinstance(name, str) or not name for name in names):
        raise UsageError(f"env.{KEY}={given}: name a file, or several as env.{KEY}=[a.env,b.env]")
    files = {name: value for file in names for name, value in read_variables(file).items()}
    return replace(config, env={**files, **own})


def read_variables(name: str) -> dict[str, str]:
    """Read a file's variables, or a pipe's, byte for byte, as python-dotenv reads them; `$` means nothing.

    Raises UsageError. No error shows what stands in the file, which as a rule holds secrets.
    """
    from dotenv.parser import parse_stream  # 20 ms

    try:
        text = read_input(name, MOST_BYTES).decode("utf-8-sig", "surrogateescape")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise refuse("env_file", name=name, why=why) from None
    variables: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text)):
        passage = binding.original.string
        line = binding.original.line + passage[: -len(passage.lstrip())].count("\n")
        if binding.error or (binding.key is not None and binding.value is None):
            raise refuse("env_line", name=name, line=line)
        if binding.key is not None:  # else a comment, or an empty line
            variables[binding.key] = str(binding.value)
    return variables
