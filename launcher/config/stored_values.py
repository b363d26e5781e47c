"""The values of a composition as JSON, and a configuration's values made of that without Hydra."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.composed import RUN_DIR, Composed, ConfigValues
from launcher.config.config_file import dump_masked
from launcher.config.schema import LaunchConfig
from launcher.decode import DecodeError, convert, decode
from launcher.runs.secrets import mask_tree

if TYPE_CHECKING:
    from omegaconf import DictConfig

RUN_DIR_MARK = "/the-run-directory-of-this-run"
"""Stands for the run directory, which is known later, in values that refer to it."""
PLAIN_PATH = re.compile(rf"/[\w./-]*|{RUN_DIR}", re.ASCII)
"""A path that YAML has as it is, wherever the mark stands."""
SEPARATE = re.compile(rf"[^\s'\"]*{re.escape(RUN_DIR_MARK)}[^\s'\"]*")
"""A value with the mark that YAML writes without quotes and in one line, whatever path there is."""


@dataclass(frozen=True, slots=True)
class StoredComposition:
    """What is kept of a composition; all that it depends on is in its key."""

    run_dir: str | None
    """`run_dir` as composed: the other values have a mark for it."""
    tree: Mapping[str, Any]
    """All values resolved, RUN_DIR_MARK in the place of the run directory."""
    texts: dict[str, str]
    """Each top-level key's part of `config.yaml`."""
    choices: dict[str, str]
    own_files: list[str]


@dataclass(slots=True)
class StoredValues:
    """The values of a stored composition; what they cannot answer is composed by Hydra then."""

    stored: StoredComposition
    compose: Callable[[], Composed]
    composed: ConfigValues | None = None
    """Hydra's values, once something has asked for them; from then on they answer everything."""
    path: str | None = None
    """The run directory that was resolved last."""

    @property
    def tree(self) -> "DictConfig":
        """Hydra's tree, whose keys can be set and removed."""
        return self.load().tree

    def load(self) -> ConfigValues:
        """Compose by Hydra, with the same run directory."""
        if self.composed is None:
            self.composed = self.compose().values
            if self.path is not None:
                self.composed.resolve(Path(self.path))
        return self.composed

    def select(self, keys: Sequence[str]) -> dict[str, object]:
        """Return single values, before the run directory is known; raises UsageError."""
        found = None if self.composed else {key: self.find(key) for key in keys}
        if found is None or ... in found.values():
            return self.load().select(keys)
        return found

    def find(self, key: str) -> object:
        """Return a value that does not depend on the run directory, else `...`."""
        if key == "run_dir":
            return self.stored.run_dir
        value: Any = self.stored.tree
        for part in key.split("."):
            value = value.get(part, ...) if isinstance(value, dict) else ...
        is_text = isinstance(value, str)
        return ... if isinstance(value, dict | list) or (is_text and RUN_DIR_MARK in value) else value

    def resolve(self, run_dir: Path | None) -> LaunchConfig:
        """Return all values with a run directory; raises UsageError."""
        if self.composed is not None:
            return self.composed.resolve(run_dir)
        known = str(run_dir) if run_dir else self.path or self.stored.run_dir
        try:
            config = convert(LaunchConfig, replace_mark(self.stored.tree, known or RUN_DIR))
        except DecodeError:  # somebody has changed the file
            return self.load().resolve(run_dir)
        config.run_dir = self.path = known
        return config

    def to_mapping(self) -> dict[str, object]:
        """Return all values, as they were resolved last."""
        if self.composed is not None or self.path is None:
            return self.load().to_mapping()
        found: Any = replace_mark(self.stored.tree, self.path)
        return dict(found)

    def find_text(self, left_out: Collection[str]) -> str | None:
        """Return the same as YAML, without some sections; None if it has to be written first."""
        path = self.path
        if self.composed is not None or path is None or not PLAIN_PATH.fullmatch(path):
            return None
        if not self.stored.texts or mask_tree({"run_dir": path}) != {"run_dir": path}:
            return None
        texts = (text for key, text in self.stored.texts.items() if key not in left_out)
        return "".join(texts).replace(RUN_DIR_MARK, path)


def replace_mark(value: object, run_dir: str) -> object:
    """Return values with the run directory in the place of its mark."""
    if isinstance(value, dict):
        return {key: replace_mark(item, run_dir) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_mark(item, run_dir) for item in value]
    return value.replace(RUN_DIR_MARK, run_dir) if isinstance(value, str) and RUN_DIR_MARK in value else value


def render_composition(composed: Composed) -> str | None:
    """Return a composition as JSON to be stored; None if it cannot be, as with secrets or resolvers in it.

    What is stored has been read back and compared: values, types and order.
    """
    from launcher.config.composition import freeze_values

    frozen = None if composed.warnings else freeze_values(composed, RUN_DIR_MARK)
    if frozen is None or mask_tree(frozen.tree) != frozen.tree:
        return None
    tree = frozen.tree
    texts = {key: dump_masked({key: tree[key]}) for key in tree} if is_separate(tree) else {}
    stored = {
        "run_dir": frozen.run_dir,
        "tree": tree,
        "texts": texts,
        "choices": composed.choices,
        "own_files": list(composed.own_files),
    }
    try:
        text = json.dumps(stored)
        found = parse_composition(text)
        config = convert(LaunchConfig, found.tree)
    except (DecodeError, TypeError, ValueError):
        return None
    same = repr(found.tree) == repr(tree) and repr(config) == repr(frozen.config)
    return text if same else None


def is_separate(value: object) -> bool:
    """Tell whether the mark is in no key, and in texts that YAML writes the same with another path in it."""
    if isinstance(value, dict):
        return all(RUN_DIR_MARK not in str(key) and is_separate(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_separate, value))
    return not isinstance(value, str) or RUN_DIR_MARK not in value or bool(SEPARATE.fullmatch(value))


def parse_composition(text: str | bytes) -> StoredComposition:
    """Read a stored composition; raises DecodeError."""
    return decode(StoredComposition, text)
