"""Names of other tools for what has a key here; other_tools.toml has the table."""

import re
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

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
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
