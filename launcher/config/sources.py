"""Where configuration is read: conf/ in the working directory, then the shipped one."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UsageError
from launcher.files import LARGEST, read_file

PRIMARY = "launch"
"""Name of the primary configuration: not `config`, which a training program's own conf/ often holds."""
DEFAULTS = "launch_defaults"
"""What that is built on, and what a primary configuration of one's own can be."""

NESTED = ("*.yaml", "*/*.yaml", "*/*/*.yaml")
"""Where primary files, options, and options of groups in groups are."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Folders of configuration, the first match winning, and the name of the primary file."""

    folders: tuple[Path, ...]
    primary: str = PRIMARY
    searchpath: tuple[Path, ...] = ()
    """Folders of `hydra.searchpath`, which come after the others; Hydra finds these by itself."""

    @property
    def everywhere(self) -> tuple[Path, ...]:
        """All folders."""
        return self.folders + self.searchpath

    def has_group(self, name: str) -> bool:
        """Tell whether a group of this name exists in any folder."""
        try:
            return name != "" and any((folder / name).is_dir() for folder in self.everywhere)
        except OSError:  # too long to be a name
            return False

    def list_groups(self) -> tuple[str, ...]:
        """Return the groups in alphabetic order."""
        return tuple(
            sorted({path.parent.name for folder in self.everywhere for path in folder.glob("*/*.yaml")})
        )

    def list_options(self, group: str) -> tuple[str, ...]:
        """Return the options of a group in alphabetic order."""
        return tuple(
            sorted({path.stem for folder in self.everywhere for path in (folder / group).glob("*.yaml")})
        )

    def find_file(self, name: str) -> Path | None:
        """Return the file that `name` (`launch`, `model/tiny`) is read from; None if there is none."""
        paths = (folder / f"{name}.yaml" for folder in self.everywhere)
        try:
            return next((path for path in paths if path.is_file()), None)
        except OSError:  # too long to be a name
            return None

    def find_beside(self, group: str, name: str | None) -> str | None:
        """Return the file that an option of a group names: from here, else beside the option, first match.

        A name that leads to no file is returned as it is.
        """
        if name is None:
            return None
        try:
            beside = (folder / group / name for folder in self.everywhere)
            found = None if Path(name).exists() else next((path for path in beside if path.is_file()), None)
        except (OSError, ValueError):  # too long to be a name, or with a NUL in it
            found = None
        return str(found or name)

    def list_own(self, choices: Mapping[str, str]) -> list[str]:
        """Return the chosen files that are not the shipped ones, relative to the working directory.

        A choice is of a group, or of `group@package`.
        """
        options = (f"{group.partition('@')[0]}/{option}" for group, option in choices.items())
        found = dict.fromkeys(map(self.find_file, (self.primary, DEFAULTS, *options)))
        return [os.path.relpath(path) for path in found if path and find_shipped() not in path.parents]

    def read_own_files(self, most: int) -> Iterator[tuple[Path, bytes]]:
        """Give the user's files, chosen or not, that can be read and have `most` bytes at most."""
        own_folders = (folder for folder in self.everywhere if folder != find_shipped())
        files = (path for folder in own_folders for pattern in NESTED for path in folder.glob(pattern))
        for path in filter(os.path.isfile, files):
            try:
                content = read_file(path, most, follow=True)
            except OSError:
                continue
            yield path, content

    def mentions(self, word: str) -> bool:
        """Tell whether a file of the user's holds a word; Hydra reports a file that cannot be read."""
        return any(word.encode() in content for _, content in self.read_own_files(LARGEST))


def find_shipped() -> Path:
    """Return the shipped conf/: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def find_sources(config_path: str | None, config_dir: str | None, primary: str | None) -> Sources:
    """Find the folders: conf/ here (or `config_path`), the shipped ones, then `config_dir`.

    Raises UsageError for a folder that was named and is not there, or that cannot be read.
    """
    own = Path(config_path or "conf").absolute()
    last = [Path(config_dir).absolute()] if config_dir else []
    for folder in ([own] if config_path else []) + last:
        if not folder.is_dir():
            raise UsageError(
                f"there is no configuration folder {folder}: check --config-path and --config-dir"
            )
    folders = tuple(folder for folder in (own, find_shipped(), *last) if folder.is_dir())
    for folder in folders:
        check_readable(folder)
    return Sources(folders, primary or PRIMARY)


def check_here() -> None:
    """Raise UsageError if the working directory has been removed."""
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror}): cd to another") from None


def check_readable(folder: Path) -> None:
    """Raise UsageError for a folder with a group or an option in it that cannot be read, or is a pipe."""
    for path in (folder, *folder.glob("*/"), *folder.glob("*.yaml"), *folder.glob("*/*.yaml")):
        needed = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
        if path.exists() and not (path.is_dir() or path.is_file()):
            raise UsageError(f"{path} is no regular file: move it away, or start from another folder")
        if not os.access(path, needed):
            raise UsageError(f"{path} cannot be read: `chmod -R u+rX {folder}`, or start from another folder")


MOST_BYTES = 1 << 19
"""Of a file: PyYAML and OmegaConf take some seconds for as much."""


def read_yaml(path: Path) -> object:
    """Return what a file holds; raises UsageError for what is too large, else YAMLError or RecursionError."""
    import yaml  # 20 ms, which help has no use for

    return yaml.safe_load(read_text(path))


def read_text(path: Path) -> str:
    """Return the text of a configuration file; raises UsageError for one that Hydra is not to read."""
    try:
        return read_file(path, MOST_BYTES, follow=True).decode("utf-8", "replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): correct it, or move it away") from None
