"""Overrides as people write them, made into what Hydra takes; whether they are for a sweep."""

import json
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

from launcher.config.hydra_flags import Flags
from launcher.config.settings import ClusterConfig, Settings
from launcher.config.sources import Sources
from launcher.errors import UsageError

FREE_FORM = ("env.", "allocator.", "torchrun.rdzv_conf.", "cluster.additional.", "cluster.srun.")
"""Keys that the schema does not list, and that need no `+`, one by one or as a mapping in braces."""
MODEL_CONFIG = "model.config"
"""A path, which no model of the group has."""
SLURM_TEXTS = tuple(f"cluster.{each.name}" for each in fields(ClusterConfig) if each.type == str | None)
"""Keys in SLURM's own notation: `n[0-3],n7`, `a100&ib`, `afterok:1?afterok:2`."""
NEUTRAL = {
    "binding": "binding=none",
    "cluster": "cluster=local",
    "dataloader": "dataloader=none",
    "gc": "gc=default",
    "machine": "machine=local",
}
"""What to write in place of `~GROUP` for a group that needs an option."""
OVERRIDE = re.compile(r"(\+{0,2})([^=@~+]+)([=@].*)", re.DOTALL)
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
"""A whole value in Hydra's quotes."""
NON_ASCII = re.compile(r"=(?=[^'\"\[\](){},]*[^\x00-\x7f])[^'\"\[\](){},]*", re.DOTALL)
"""A plain value with a letter that Hydra's grammar does not know: `=é`, `=/home/ü/data`."""


def rewrite_overrides(sources: Sources, overrides: Sequence[str], *, sweep: bool) -> list[str]:
    """Let `model=x` and `+model=x` both choose from a group, and `env.X=…` set a variable byte for byte.

    Hydra refuses the first for a group without a default, and the second for one with a default. Values
    may have letters that are not ASCII. With `sweep`, commas in a variable's value separate the jobs' values.
    """
    defaults = read_defaults(sources, sources.primary)
    return [rewrite_override(sources, defaults, word, sweep=sweep) for word in overrides]


def rewrite_override(sources: Sources, defaults: set[str], word: str, *, sweep: bool) -> str:
    """Rewrite one override; see rewrite_overrides."""
    match = OVERRIDE.fullmatch(word)
    if not match:
        return word
    key, rest = match[2], match[3]
    if key == "dataloader" and re.fullmatch(r"=[+-]?\d+", rest, re.ASCII):  # no option of the group
        return f"dataloader.num_workers{rest}"
    variable = (key.startswith("env.") or key == MODEL_CONFIG) and not sweep and rest.startswith("=")
    if key == "env.from_file" and rest.startswith(("=[", "=null")):  # a list of files, or none
        variable = False
    is_text = key in (*SLURM_TEXTS, "tune.option") and not sweep and rest not in ("=", "=null")
    divisions = key.startswith("allocator.") and rest.startswith("=[") and ">" in rest  # [256:1,>:8]
    if variable or divisions or NON_ASCII.fullmatch(rest) or (is_text and rest.startswith("=")):
        rest = "=" + quote_value(rest[1:])
    # A whole `env` is not rewritten: within braces, Hydra makes 1000.0 of `1e3`.
    whole = f"{key}." in FREE_FORM and key != "env" and rest.startswith("={")
    if key.startswith(FREE_FORM) or whole or key == MODEL_CONFIG:
        return f"++{key}{rest}"
    if "." not in key and sources.has_group(key) and not key.startswith("hydra/"):
        package = rest.partition("=")[0]  # `@program.net` puts the option there
        return f"{'' if f'{key}{package}' in defaults else '+'}{key}{rest}"
    return f"{match[1]}{key}{rest}"


def check_shape(word: str) -> None:
    """Raise UsageError for a word that is no override at all."""
    if not word:
        raise UsageError("'' is not KEY=VALUE: an empty word, perhaps of an unset shell variable in quotes")
    if word.startswith(("=", "@")):
        raise UsageError(f"{word!r} is not KEY=VALUE: the key is missing")
    if "=" not in word and not word.startswith("~"):
        raise UsageError(f"{word!r} is not KEY=VALUE")


def check_removal(word: str) -> None:
    """Raise UsageError for `~KEY` if the key always has a value: it would get its default."""
    if not word.startswith("~"):
        return
    *above, name = read_key(word).split(".")
    parent: object = Settings()
    for part in above:
        parent = getattr(parent, part, None) if is_dataclass(parent) else None
    value = getattr(parent, name, {}) if is_dataclass(parent) else {}
    if isinstance(value, dict):
        return
    key = ".".join((*above, name))
    if is_dataclass(value):
        fix = NEUTRAL.get(key) or f"{key}.{fields(value)[0].name}=…, or another key of it"
    else:
        fix = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
    raise UsageError(f"{word} changes nothing, since {key} always has a value: write {fix}")


def quote_value(value: str) -> str:
    """Quote a value for Hydra's grammar unless the user has: `1e3` stays `1e3`, and spaces are fine.

    In the grammar, backslashes are doubled only before a quote.
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

    An error in a file is ignored here; composition reports it.
    """
    import yaml

    from launcher.config.sources import read_yaml

    path = sources.find_file(name)
    try:
        tree = read_yaml(path) if path else None
    except (ValueError, RecursionError, yaml.YAMLError):
        return set()
    entries = tree.get("defaults") if isinstance(tree, dict) else None
    groups: set[str] = set()
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            groups |= {str(key).removeprefix("override ").removeprefix("optional ") for key in entry}
        elif isinstance(entry, str) and entry not in {"_self_", name, *seen}:
            groups |= read_defaults(sources, entry, seen | {name})
    return groups


def asks_sweep(flags: Flags, verb: str) -> bool:
    """Tell whether a command line is for a sweep: by `-m`, else `hydra.mode` (in a file, for runs only)."""
    if flags.multirun or flags.run:
        return flags.multirun
    modes = [word for word in flags.overrides if read_key(word) == "hydra.mode"]
    if modes:
        return modes[-1].rpartition("=")[2].strip("'\"") == "MULTIRUN"
    if verb != "run" or not (mentions_hydra(flags.overrides) or flags.sources.mentions("hydra")):
        return False
    from launcher.config.compose import add_searchpath
    from launcher.config.sweep import read_multirun

    sources = add_searchpath(flags.sources, flags.overrides)
    return sources.mentions("MULTIRUN") and read_multirun(sources, flags.overrides).settings.multirun


def mentions_hydra(words: Sequence[str]) -> bool:
    """Tell whether a word of the command line may change or use a setting of Hydra's."""
    return any("hydra" in word for word in words)


def refuse_other_mode(flags: Flags, *, sweep: bool) -> None:
    """Raise UsageError for a word that has no effect on a sweep, or that only a sweep can have."""
    for word in flags.overrides:
        key = read_key(word)
        if not sweep and key.startswith(("hydra.sweep", "hydra/sweeper")):
            raise UsageError(f"{word} goes with -m, for a sweep, and this is a single run")
