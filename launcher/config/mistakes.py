"""A user's mistake in one line: errors of Hydra, OmegaConf and YAML, near names, other tools' names."""

import difflib
import re
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

from launcher.config import settings
from launcher.config.settings import ClusterConfig

CLUSTER = frozenset(field.name for field in fields(ClusterConfig))
SHORT = "short"
SUBMITIT, SLURM = "submitit's", "SLURM's"
TOP = ("nodes", "name")
"""Keys of ours that submitit's `slurm_` may stand before."""
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def explain_foreign(key: str) -> str:
    """Say whose a key is, and what there is here instead: `is torchrun's: the key here is nodes`.

    Empty for a key that no other tool is known to have.
    """
    if VARIABLE.fullmatch(key):
        return f"is a variable of the environment: the key here is env.{key}"
    name = key.removeprefix("hydra.launcher.").removeprefix("cluster.")
    is_submitits = key.startswith("hydra.launcher.") or name.startswith("slurm_")
    if "." in name or (key.startswith("cluster.") and name in CLUSTER):
        return ""
    plain = name.removeprefix("slurm_")
    for tool, names in read_tables().items():
        if plain in names and tool != SHORT:
            fix = names[plain]
            known = fix if fix.startswith("leave it out") else f"the key here is {fix}"
            return f"is {SUBMITIT if is_submitits else tool}: {known}"
    if plain in CLUSTER or (plain in TOP and is_submitits):
        found = plain if plain in TOP else f"cluster.{plain}"
    else:
        found = f"cluster.additional.{plain}" if name != plain else ""
    return f"is {SUBMITIT if is_submitits else SLURM}: the key here is {found}" if found else ""


def explain_option(option: str) -> str:
    """Say the same of an option, `--nproc-per-node` or `-N`."""
    short = read_tables()[SHORT].get(option[1:], "")
    return explain_foreign(option[2:].replace("-", "_") if option.startswith("--") else short)


@cache
def read_tables() -> dict[str, dict[str, str]]:
    """Return what to write instead of each name, by tool."""
    return tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8"))


COMPOSING = re.compile(r"In '(?P<file>[^']*)': \w+ raised while composing config: ")
"""How Hydra's errors begin that are about a value in a file, named by its group."""
NO_SECTION = re.compile(r"Invalid type assigned: \w+ is not a subclass of (?P<schema>\w+)\. ")
NO_MAPPING = re.compile(r"Cannot assign \w+ to Dict\[")
PLACES = {"fit": "; what the estimate has no key for, `launch fit -- PROGRAM` measures on fake tensors"}
"""Where else something is that a section has no key for."""
UNKNOWN = re.compile(r"Key '[^']*' not in '(?P<schema>\w+)'")
"""OmegaConf's words for a key that a dataclass does not have."""


def suggest(word: str, known: Sequence[str]) -> str:
    """Return `: did you mean …?`; without a similar name the choices, if they are few."""
    near = difflib.get_close_matches(word, dict.fromkeys(known), n=2, cutoff=0.5)
    if near:
        return f": did you mean {' or '.join(near)}?"
    return f": choose from {', '.join(sorted(known))}" if 0 < len(known) < 20 else ": see `launch --help-all`"


def suggest_dotted_key(key: str, known: Sequence[str]) -> str:
    """Return the same for a dotted key, from the keys that have the same prefix."""
    above, _, name = key.rpartition(".")
    beside = {each.rpartition(".")[2]: each for each in known if above and each.rpartition(".")[0] == above}
    if not beside:
        return suggest(key, known)
    words = difflib.get_close_matches(name, beside, n=2, cutoff=0.6)
    near = [beside[word] for word in words or [word for word in beside if word.startswith(name)]]
    if near:
        return f": did you mean {' or '.join(near)}?{PLACES.get(above, '')}"
    if above == "cluster":
        return f": any other option of sbatch is cluster.additional.{name}, of srun cluster.srun.{name}"
    return f": choose from {', '.join(sorted(beside.values()))}{PLACES.get(above, '')}"


def shorten_message(error: BaseException) -> str:
    """Return an error as one line, with the key if it is known; raises one that is a defect of ours.

    Hydra raises errors such as TypeError for files of a shape that it does not expect.
    """
    if isinstance(error, AssertionError | AttributeError | LookupError | TypeError):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith("launcher."):
            raise error
    cause = error.__cause__ if str(error.__cause__ or "") else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    text = " ".join(
        line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))
    )
    where = COMPOSING.match(text)
    file = f"{where['file']}.yaml: " if where else ""
    if key and "is not a ListConfig" in text:
        return f"{file}{key}: give a list, as in {key}=[…]"
    text = text[where.end() :] if where else text
    if key and (section := NO_SECTION.match(text)) and (kind := getattr(settings, section["schema"], None)):
        return f"{file}{key}: give its keys, as in {key}.{fields(kind)[0].name}=…"
    if key and NO_MAPPING.match(text):
        return f"{file}{key}: give a mapping, as in {key}.NAME=…"
    if where and key and (unknown := UNKNOWN.match(text)):
        if foreign := explain_foreign(key):
            return f"{file}{key} {foreign}"
        kind, above = getattr(settings, unknown["schema"], None), key.rpartition(".")[0]
        names = [field.name for field in (fields(kind) if kind else ())]  # none for a Hydra plugin's class
        near = suggest_dotted_key(key, [f"{above}.{name}" if above else name for name in names])
        return f"{file}there is no key {key!r}{near}"
    return f"{file}{key}: {text}" if key else text or type(error).__name__
