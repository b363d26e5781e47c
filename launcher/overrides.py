"""Overrides as people write them, made into what Hydra takes."""

import re
from collections.abc import Sequence

import yaml

from launcher.errors import UsageError
from launcher.sources import Sources

FREE_FORM = ("env.", "allocator.", "torchrun.rdzv_conf.", "cluster.additional.", "cluster.srun.")
"""Keys that need no `+`, though the schema cannot know them."""
SLURM_TEXTS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "exclude",
    "nodelist",
    "reservation",
    "dependency",
    "mail_user",
    "mail_type",
)
"""Keys of `cluster` in SLURM's own notation, `n[0-3],n7`, `a100&ib`, `afterok:1?afterok:2`."""
OVERRIDE = re.compile(r"(\+{0,2})([^=@~+]+)([=@].*)", re.DOTALL)
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
"""A whole value in Hydra's quotes."""
FOREIGN = re.compile(r"=(?=[^'\"\[\](){},]*[^\x00-\x7f])[^'\"\[\](){},]*", re.DOTALL)
"""A plain value with a letter that Hydra's grammar does not know: `=é`, `=/home/ü/data`."""


def rewrite_overrides(sources: Sources, overrides: Sequence[str], *, sweep: bool) -> list[str]:
    """Let `model=x` and `+model=x` both choose from a group, and `env.X=…` set a variable byte for byte.

    Hydra by itself refuses the first for a group without a default and the second for one with it. Letters
    that are not ASCII are fine too.
    With `sweep`, commas in the value of a variable separate the jobs' values.
    """
    defaults = read_defaults(sources, sources.primary)
    return [rewrite_override(sources, defaults, word, sweep=sweep) for word in overrides]


def rewrite_override(sources: Sources, defaults: set[str], word: str, *, sweep: bool) -> str:
    """Rewrite one override; see rewrite_overrides."""
    match = OVERRIDE.fullmatch(word)
    if not match:
        return word
    key, rest = match[2], match[3]
    variable = key.startswith("env.") and not sweep and rest.startswith("=")
    slurm = key.startswith("cluster.") and key[8:] in SLURM_TEXTS and not sweep and rest not in ("=", "=null")
    if variable or FOREIGN.fullmatch(rest) or (slurm and rest.startswith("=")):
        rest = "=" + quote_value(rest[1:])
    if key.startswith(FREE_FORM):
        return f"++{key}{rest}"
    if "." not in key and sources.has_group(key):
        return f"{'' if key in defaults else '+'}{key}{rest}"
    return f"{match[1]}{key}{rest}"


def check_shape(word: str) -> None:
    """Raise UsageError for a word that is no override at all."""
    if not word:
        raise UsageError("'' is not KEY=VALUE: an empty word, perhaps of an unset shell variable in quotes")
    if word.startswith(("=", "@")):
        raise UsageError(f"{word!r} is not KEY=VALUE: the key is missing")
    if "=" not in word and not word.startswith("~"):
        raise UsageError(
            f"{word!r} is not KEY=VALUE: to run a program, put it after `--`, as in `launch -- {word}`"
        )


def quote_value(value: str) -> str:
    """Quote a value for Hydra's grammar unless the user has: `1e3` stays `1e3`, and spaces are fine.

    The grammar wants backslashes doubled where a quote follows, and there alone.
    """
    if QUOTED.fullmatch(value):
        return value
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"


def is_choice(sources: Sources, word: str) -> bool:
    """Tell whether an override chooses an option of a group."""
    return sources.has_group(read_key(word))


def read_key(word: str) -> str:
    """Return the key of an override, as in the configuration: `+model@x=y` sets `model`."""
    return re.split("[=@]", word.lstrip("+~"))[0]


def read_defaults(sources: Sources, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the groups that have a default in a primary file, or in the files that it builds on.

    What is wrong with a file is left for composing to say.
    """
    path = sources.find_file(name)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return set()
    entries = tree.get("defaults") if isinstance(tree, dict) else None
    groups: set[str] = set()
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            groups |= {str(key).removeprefix("override ").removeprefix("optional ") for key in entry}
        elif isinstance(entry, str) and entry not in {"_self_", name, *seen}:
            groups |= read_defaults(sources, entry, seen | {name})
    return groups
