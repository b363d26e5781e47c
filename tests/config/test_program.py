"""From the words of the user, or of the configuration, to what a rank execs."""

import os
import stat
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.program import resolve_program
from launcher.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with programs of every kind."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "a b'c.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("")
    (tmp_path / "plain").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("run", "bin/tool"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    (tmp_path / "bin/data").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


ENVIRON = {"PATH": "/nowhere:bin"}
PYTHON = sys.executable


def test_modules_in_an_archive_and_of_an_editable_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `python -m` finds beside folders: a zip, and a finder that knows a module by its whole name."""
    with ZipFile(folder / "code.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/train.py", "")
    environ = {**ENVIRON, "PYTHONPATH": "code.zip"}
    assert resolve_program(["-m", "zipped.train"], environ)[1:] == ("-m", "zipped.train")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None, origin="train.py") if name == "shared.train" else None

    (folder / "shared").mkdir()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert resolve_program(["-m", "shared.train"], ENVIRON)[1:] == ("-m", "shared.train")
    with pytest.raises(UsageError, match=r"no module 'shared\.trian'"):
        resolve_program(["-m", "shared.trian"], ENVIRON)


@given(st.lists(st.text(), max_size=5))
def test_arguments_stay_as_they_are(arguments: list[str]) -> None:
    assert resolve_program([PYTHON, *arguments], ENVIRON) == (PYTHON, *arguments)
    assert resolve_program(["-m", "json.tool", *arguments], os.environ) == (
        *(PYTHON, "-m", "json.tool"),
        *arguments,
    )
