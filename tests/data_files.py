"""Cases that are data: what `tests/data/*.toml` says of the files and variables that a command line finds."""

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


def read_data(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text())


def read_cases(name: str, table: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = read_data(name)[table]
    return cases


def write(path: Path, text: str | bytes) -> Path:
    """Write a file, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def prepare(case: dict[str, Any], here: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the `files` of a case, set its `env`, and let its `torch` be the version that is installed.

    A name that ends with a slash is a folder, a text after "-> " the target of a link, `{here}` the folder.
    """
    for name, text in case.get("files", {}).items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(parents=True)
        elif text.startswith("-> "):
            path.symlink_to(text.removeprefix("-> "))
        else:
            write(path, text.replace("{here}", str(here)).encode("latin-1"))
    for name in case.get("executable", ()):
        (here / name).chmod(0o755)
    for name, value in case.get("env", {}).items():
        patch.setenv(name, value.replace("{here}", str(here)))
    if "torch" in case:
        pretend_torch(case["torch"], patch)


def pretend_torch(version: str, patch: pytest.MonkeyPatch) -> None:
    """Let the metadata say that this torch is installed, or "none"."""
    installed = importlib.metadata.version

    def find(name: str) -> str:
        if name != "torch":
            return installed(name)
        if version == "none":
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    patch.setattr(importlib.metadata, "version", find)
