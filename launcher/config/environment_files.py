"""`env.from_file`: the variables of dotenv files, read once, when a job is started or submitted."""

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from errno import EFBIG
from pathlib import Path

from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.files import read_input

KEY = "from_file"
"""The entry of `env` that is no variable."""
MOST_BYTES = 1 << 20
"""Of a file; the kernel takes 128 KiB for a variable."""
NEWLINE = re.compile(r"\r\n|\n|\r")


def write_values(env: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration's variables as texts, and the files' names as they are; raises UsageError."""
    for name, value in env.items():
        if name != KEY and not isinstance(value, str | int | float):
            raise UsageError(f"env.{name} is {value!r}, and a variable has a text: give one, or leave it out")
    return {name: value if name == KEY else str(value) for name, value in env.items()}


def read_env_files(config: Settings) -> dict[str, str]:
    """Return the variables of `env.from_file`, a later file's over an earlier one's; raises UsageError."""
    given = config.env.get(KEY)
    names = given if isinstance(given, list) else [] if given is None else [given]
    if any(not isinstance(name, str) or not name for name in names):
        raise UsageError(f"env.{KEY}={given}: name a file, or several as env.{KEY}=[a.env,b.env]")
    return {name: value for file in names for name, value in read_variables(file).items()}


def fill_env(config: Settings, variables: Mapping[str, str]) -> Settings:
    """Return a configuration with the files' variables below those of `env.NAME`, and no files named."""
    env = {**variables, **{name: value for name, value in config.env.items() if name != KEY}}
    return replace(config, env=env)


def read_variables(name: str) -> dict[str, str]:
    """Read a file's variables, or a pipe's, byte for byte, as python-dotenv reads them; `$` means nothing.

    Raises UsageError. No error shows what stands in the file, which as a rule holds secrets.
    """
    from dotenv.parser import parse_stream  # 20 ms

    try:
        text = read_input(name, MOST_BYTES).decode("utf-8-sig", "surrogateescape")
    except FileNotFoundError:
        raise UsageError(
            f"env.{KEY}={name}: there is no such file (from {Path.cwd()}): check the path"
        ) from None
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == EFBIG:
            raise UsageError(
                f"env.{KEY}={name} has over {MOST_BYTES >> 20} MiB: is it a file of variables?"
            ) from None
        raise UsageError(
            f"env.{KEY}={name} cannot be read ({getattr(error, 'strerror', '') or error}): name a file"
            " of lines NAME=VALUE that you may read"
        ) from None
    variables: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text)):
        passage, line = binding.original
        above = passage[: len(passage) - len(passage.lstrip())]
        where = f"env.{KEY}={name}, line {line + len(NEWLINE.findall(above))}"
        key, value = binding.key, binding.value
        if binding.error or (key is not None and value is None):
            raise UsageError(
                f"{where}: no NAME=VALUE, comment or empty line (or a quote that is not closed): correct it"
            )
        if key is None or value is None:  # a comment, or an empty line
            continue
        if "=" in key or "\0" in key + value:
            raise UsageError(f"{where}: no variable can have this name or value: leave out = and NUL")
        variables[key] = value
    return variables
