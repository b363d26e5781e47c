"""`config.yaml` in the run directory: what is written, and what differs from an earlier start of the run."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.files import LARGEST, read_file
from launcher.runs.secrets import mask_tree

if TYPE_CHECKING:
    from launcher.config.compose import Composed

NAME = "config.yaml"
PLACE_KEYS = ("run_dir", "new_run_dir")
"""Keys that differ for the same run, since one makes the directory and the other goes on with it."""


def render_config(composed: "Composed", left_out: Collection[str] = ()) -> str:
    """Return the text: what was resolved last, secrets masked, without some sections."""
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(composed.tree, resolve=True)
    return dump_masked({key: value for key, value in found.items() if key not in left_out})


def dump_masked(tree: Mapping[str, object]) -> str:
    """Return a configuration as YAML, secrets masked."""
    import yaml

    return str(yaml.safe_dump(mask_tree(dict(tree)), sort_keys=False))


def flatten(node: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves of nested mappings by their dotted keys; empty mappings have none."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        key: leaf
        for name, value in node.items()
        for key, leaf in flatten(value, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def read_config_value(run_path: Path, *keys: str) -> object:
    """Return a value of a run directory's file; None if the file cannot be read or does not have it."""
    import yaml

    try:
        found = yaml.safe_load(read_file(run_path / NAME, LARGEST).decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def find_changes(run_path: Path, text: str) -> list[str]:
    """Return `KEY OLD -> NEW` for what differs in a run directory's file from a new text.

    A file that cannot be read, or holds something else, differs in nothing.
    """
    import yaml

    path = run_path / NAME
    try:
        before = read_file(path, LARGEST).decode("utf-8", "surrogateescape")
        earlier = flatten(mask_tree(yaml.safe_load(before)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    return [] if "" in earlier else list(compare(earlier, flatten(yaml.safe_load(text))))


def compare(earlier: dict[str, object], now: dict[str, object]) -> Iterator[str]:
    """Give `KEY OLD -> NEW` for the leaves that differ; one that is not there is null."""
    for key in [*now, *(key for key in earlier if key not in now)]:
        is_chosen = key.startswith("program.") and now.get(key) == "auto"
        if key not in PLACE_KEYS and earlier.get(key) != now.get(key) and not is_chosen:
            old, new = (json.dumps(each.get(key), default=str) for each in (earlier, now))
            yield f"{key} {old} -> {new}"
